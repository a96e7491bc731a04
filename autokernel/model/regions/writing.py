"""A lowered region as the text of a kernel file: what C++ and Triton have in common."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autokernel.model.regions.expressions import Expression, Lowered, Result, is_scan
from autokernel.spec import TensorSpec

PLACED = ("load", "gather", "index")  # expressions that depend on the index itself
# of a kernel file: each input as its loops walk through it
LAID_OUT = '''def _laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """x in the strides that the code above was written for; those of dims of one element are no matter."""
    if x.stride() == stride or all(own == s for own, s, n in zip(x.stride(), stride, x.shape) if n > 1):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
'''


@dataclass(frozen=True)
class Loops:
    """The dims of a region as loops: dims that every tensor walks through in one stride are one loop.

    rows, columns: sizes, outer first, as the largest result lies in memory; a reduction runs over the columns. Strides are
    by loop, rows before columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    strides: Mapping[Expression, tuple[int, ...]]  # of each load and index
    results: tuple[tuple[int, ...], ...]  # of each result; 0 along what was reduced

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rows + self.columns

    def in_columns(self, result: int) -> bool:
        """Whether a result differs along a row: else it is one number for each."""
        return any(self.results[result][len(self.rows) :])


def loops_of(lowered: Lowered) -> Loops:
    loads = [e for e in lowered.expressions if e.op in PLACED]
    if not lowered.sizes:  # tensors of no dim: a loop over the one number of each
        return Loops((), (1,), dict.fromkeys(loads, (0,)), ((0,),) * len(lowered.results))
    walked = [e.data[1] for e in loads] + [result.strides for result in lowered.results]
    main = max((r.strides for r in reversed(lowered.results)), key=lambda strides: sum(map(bool, strides)))
    if not all(main):  # what is summed up is larger
        read = (e.data[1] for e in loads if e.op == "load")
        main = max([main, *read], key=lambda strides: sum(map(bool, strides)))
    dims = sorted(range(len(lowered.sizes)), key=lambda d: -main[d])
    columns = tuple(d for d in dims if d in lowered.reduced) or tuple(dims[-1:])
    columns = tuple(sorted(columns)) if lowered.scans else columns  # whose order is the row's
    rows = tuple(d for d in dims if d not in columns)
    if not lowered.reduced:  # no dim is special: as many as walk alike are the columns
        merged = _merged(rows + columns, lowered.sizes, walked)
        groups = merged[:-1], merged[-1:]
    else:
        groups = _merged(rows, lowered.sizes, walked), _merged(columns, lowered.sizes, walked)
    order = [*groups[0], *groups[1]]
    sizes = [math.prod(lowered.sizes[d] for d in group) for group in order]
    strides = [tuple(w[group[-1]] for group in order) for w in walked]
    split = len(groups[0])
    return Loops(tuple(sizes[:split]), tuple(sizes[split:]), dict(zip(loads, strides)), tuple(strides[len(loads) :]))


def read_across(lowered: Lowered, loops: Loops) -> int | None:
    """The loop in which most of what is read is contiguous, if that is another one than the last: both make up a tile."""
    if lowered.reduced or lowered.scans or any(e.op == "gather" for e in lowered.expressions):
        return None
    across = [loops.strides[e].index(1) for e in lowered.expressions if e.op == "load" and is_across(e, loops)]
    return max(set(across), key=across.count, default=None)


def is_across(load: Expression, loops: Loops) -> bool:
    """Whether it is contiguous in another loop than the last; nor does its condition depend on more than it does."""
    strides = loops.strides[load]
    return strides[-1] > 1 and 1 in strides and all(load.data[1][d] for d in load.dims)


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
    declare: Callable[[str, str, Expression], list[str]]  # (name, text) -> statements; of a scan its operand's text
    load: Callable[..., str]  # of a load or an index, and its condition's text
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
            text = self.load(e, *operands) if e.op in PLACED else self.functions[e.op].format(*operands)
            name = f"{self.prefix}{self.made}"
            self.made += 1
            self.lines += self.declare(name, text, e)
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

    def scans(self) -> list[tuple[str, Expression]]:
        """Those of this scope alone, which go on from element to element, and their names."""
        return [(name, e) for e, name in self.known.items() if is_scan(e)]

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def place(index: Sequence[str], strides: Sequence[int], offset: int = 0) -> str:
    """Where an element is."""
    terms = [i if s == 1 else f"{i} * {s}" for i, s in zip(index, strides) if s]
    return " + ".join([*terms, *([str(offset)] if offset else ())]) or "0"


def result_names(results: Sequence[Result]) -> list[str]:
    return [f"y{i}" for i in range(len(results))] if len(results) > 1 else ["y"]


def made(results: Sequence[Result], device: str = "") -> str:
    """A statement that makes the results' memory."""
    return "\n    ".join(f"{name} = {_memory(result, device)}" for name, result in zip(result_names(results), results))


def _memory(result: Result, device: str) -> str:
    t = result.spec
    size = f"empty({t.shape}" if t.stride is None else f"empty_strided({t.shape}, {t.stride}"
    return f"torch.{size}, dtype={t.dtype}{device})"


def returned(results: Sequence[Result]) -> str:
    return "torch.Tensor" if len(results) == 1 else "tuple[torch.Tensor, ...]"


def in_words(names: Sequence[str], inputs: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> str:
    """The shapes of a kernel's inputs and results, for people."""
    laid_out = ["contiguous" if t.stride is None else f"strides {list(t.stride)}" for t in results]
    made = ", ".join(f"{list(t.shape)}, {how}" for t, how in zip(results, laid_out))
    return f"{', '.join(f'{n} {list(t.shape)}' for n, t in zip(names, inputs))} -> {made}."


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
