"""A lowered region as the text of a kernel file: what C++ and Triton have in common."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autokernel.model.regions.lowering import Expression, Lowered


@dataclass(frozen=True)
class Loops:
    """The dims of a region as loops: dims that every input walks through in one stride are one loop.

    rows, columns: sizes, outer first; a reduction runs over the columns. Strides are by loop, rows before columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    strides: Mapping[Expression, tuple[int, ...]]  # of each load
    output: tuple[int, ...]  # of the result, contiguous; 0 along what was reduced

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rows + self.columns


def loops_of(lowered: Lowered) -> Loops:
    loads = [e for e in lowered.expressions if e.op == "load"]
    columns = lowered.reduced or tuple(range(len(lowered.sizes)))[-1:]
    rows = tuple(d for d in range(len(lowered.sizes)) if d not in columns)
    own, step = [0] * len(lowered.sizes), 1
    for d in reversed(range(len(lowered.sizes))):
        if d in lowered.result.dims or not lowered.reduced:
            own[d], step = step, step * lowered.sizes[d]
    walked = [e.data[1] for e in loads] + [tuple(own)]
    if not lowered.reduced:  # no dim is special: as many as walk alike are the columns
        merged = _merged(rows + columns, lowered.sizes, walked)
        groups = merged[:-1], merged[-1:]
    else:
        groups = _merged(rows, lowered.sizes, walked), _merged(columns, lowered.sizes, walked)
    order = [*groups[0], *groups[1]]
    sizes = [math.prod(lowered.sizes[d] for d in group) for group in order]
    strides = [tuple(w[group[-1]] for group in order) for w in walked]
    split = len(groups[0])
    return Loops(tuple(sizes[:split]), tuple(sizes[split:]), dict(zip(loads, strides)), strides[-1])


def _merged(dims: Sequence[int], sizes: Sequence[int], walked: Sequence[Sequence[int]]) -> list[list[int]]:
    groups: list[list[int]] = []
    for d in dims:
        if groups and all(w[groups[-1][-1]] == w[d] * sizes[d] for w in walked):
            groups[-1].append(d)
        else:
            groups.append([d])
    return groups


@dataclass
class Writer:
    """Expressions as statements of one language; `known` has the names of what was computed, for this scope."""

    functions: Mapping[str, str]  # of an expression's name -> its text, with {0}, {1}, …
    number: Callable[[Expression], str]
    declare: Callable[[str, str, Expression], str]  # (name, text) -> a statement
    load: Callable[[Expression], str]
    prefix: str = "t"
    known: dict[Expression, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    made: int = 0

    def text(self, e: Expression) -> str:
        """A name or literal for `e`, after statements that compute it."""
        if e.op == "number":
            return self.number(e)
        if e not in self.known:
            operands = [self.text(o) for o in e.operands]
            text = self.load(e) if e.op == "load" else self.functions[e.op].format(*operands)
            name = f"{self.prefix}{self.made}"
            self.made += 1
            self.lines.append(self.declare(name, text, e))
            self.known[e] = name
        return self.known[e]

    def same_along_row(self, ends: Sequence[Expression], varying: Collection[Expression]) -> list[str]:
        """Statements for what `ends` need that is none of `varying`, nor a reduction."""

        def visit(e: Expression) -> None:
            if e in self.known or e.op == "number":
                return
            if e not in varying and not e.op.startswith("reduce_"):
                self.text(e)
                return
            for operand in e.operands:
                visit(operand)

        for e in ends:
            for operand in e.operands:
                visit(operand)
        return self.take()

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def varying(lowered: Lowered) -> set[Expression]:
    """What differs along a row."""
    columns = set(lowered.reduced or range(len(lowered.sizes)))
    return {e for e in lowered.expressions if e.dims & columns}


def levels(lowered: Lowered) -> list[list[Expression]]:
    """The reductions, those that need no other first."""
    level: dict[Expression, int] = {}
    found: list[list[Expression]] = []
    for e in lowered.expressions:
        before = max((level[o] for o in e.operands), default=0)
        is_reduction = e.op.startswith("reduce_")
        level[e] = before + is_reduction
        if is_reduction:
            found += [[]] * (before + 1 - len(found))
            found[before] = [*found[before], e]
    return found


INFIX = {
    **dict(zip(("add", "sub", "mul", "div"), "+-*/")),
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}
OPERATORS = {op: f"({{0}} {sign} {{1}})" for op, sign in INFIX.items()}  # as C++ and Triton write them
