"""A region's nodes as arithmetic on single elements: which numbers, at which indices, through which functions and sums.

All values of a region are looked at from one index space, that of its largest result. Its dims are split where a reshape
within the region needs it. What is computed at an index is an expression; each input is read, and each result written, by a
stride per dim.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.expressions import (
    BOOL,
    FLOAT,
    FUNCTIONS,
    INT,
    Expression,
    Lowered,
    Result,
    of_numbers,
)
from autokernel.spec import TensorSpec

# For each dim of a tensor, the dims of the index space that it runs along; () for none.
Groups = tuple[tuple[int, ...], ...]

MOST_FACTORS = 8  # of a power that is written as a product
MOST_PLACES = 128  # of a window, each of which is written out
MOST_EXPRESSIONS = 4096  # of a region: windows of windows


class Unsupported(Exception):
    """What cannot be written as such an expression; `node` is where."""

    def __init__(self, why: str, node: Node | None = None):
        super().__init__(why)
        self.node = node


class Shifted(tuple):
    """Dims of the index space along which a tensor's dim runs by `step` from `start` on, maybe beyond its ends."""

    step: int
    start: int

    def __new__(cls, dims: Sequence[int], step: int, start: int) -> "Shifted":
        made = super().__new__(cls, dims)
        made.step, made.start = step, start
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shifted) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return tuple(self), self.step, self.start


def plain(groups: Groups) -> Groups:
    """`groups`, of which none is shifted."""
    if any(isinstance(g, Shifted) for g in groups):
        raise Unsupported("a part of something that is reshaped")
    return groups


class _Split(Exception):
    """Dim `dim` of the index space has to be two, the inner one of `inner` elements."""

    def __init__(self, dim: int, inner: int):
        self.dim, self.inner = dim, inner


def result_spec(fake: Tensor) -> TensorSpec:
    """What a kernel makes in place of `fake`: in its strides where these are of all of a memory, else contiguous."""
    is_plain = fake.is_contiguous() or not is_dense(fake)
    return TensorSpec(tuple(fake.shape), fake.dtype, None if is_plain else tuple(fake.stride()))


def is_dense(fake: Tensor) -> bool:
    """Whether it fills its memory without gaps or overlaps."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(fake.stride(), fake.shape) if n > 1):
        if stride != reach:
            return False
        reach *= size
    return True


def lower(piece: GraphModule) -> Lowered:
    """The results of a region, a graph of its own; Unsupported where they are beyond these means."""
    whys = []
    for shape in _spaces(piece):
        try:
            return _lowered(piece, shape)
        except Unsupported as why:
            whys.append(why)
    ends = (None, *piece.graph.output_node().args[0])  # of which the shape may be at fault alone
    raise next((why for why in whys if why.node not in ends), whys[0])


def _spaces(piece: GraphModule) -> list[Sequence[int]]:
    """Shapes whose indices may be those of a region: its largest result's, its largest tensor's, its last result's."""
    outputs = piece.graph.output_node().args[0]
    tensors = [n for n in piece.graph.nodes if isinstance(value(n), Tensor)]
    computed = [n for n in tensors if n.op == "call_function"]
    found = [max(reversed(computed), key=lambda n: (value(n).numel(), n in outputs)), outputs[-1]]
    found.insert(1, max(tensors, key=lambda n: value(n).numel()))
    return list(dict.fromkeys(tuple(value(n).shape) for n in found))


def _lowered(piece: GraphModule, space: Sequence[int]) -> Lowered:
    placeholders, outputs = tuple(piece.graph.find_nodes(op="placeholder")), piece.graph.output_node().args[0]
    sizes = [size for size in space if size != 1]
    for _ in range(16):
        try:
            return Lowering(placeholders, tuple(sizes)).lower(outputs, space)
        except _Split as split:
            sizes[split.dim : split.dim + 1] = [sizes[split.dim] // split.inner, split.inner]
    raise Unsupported("its reshapes do not fit together", outputs[-1])


@dataclass
class Lowering:
    inputs: tuple[Node, ...]
    sizes: tuple[int, ...]
    made: dict[Any, Expression] = field(default_factory=dict)
    at: dict[tuple[Node, Groups], Expression] = field(default_factory=dict)
    reduced: tuple[int, ...] = ()
    is_backwards: bool | None = None  # None where the order does not matter

    def lower(self, outputs: Sequence[Node], space: Sequence[int]) -> Lowered:
        """From the last result to the first: an earlier one is where a later one was computed from it."""
        results = {output: self._result(output, space) for output in reversed(outputs)}
        for output, result in results.items():
            missing = {d for d, stride in enumerate(result.strides) if not stride}
            if missing and missing != set(self.reduced):
                raise Unsupported("a result that is one number for several rows", output)
        return Lowered(self.sizes, self.reduced, tuple(results[output] for output in outputs), self.inputs)

    def _result(self, output: Node, space: Sequence[int]) -> Result:
        spec = result_spec(value(output))
        dims = range(len(self.sizes))
        seen = (groups for node, groups in self.at if node is output)
        groups = next((g for g in seen if self._is_all_of(g)), None)
        if groups is None and spec.numel == math.prod(space):
            groups = self.split(dims, spec.shape)
        elif groups is None:  # a reduction is the end: its dims are found from the operand's side
            groups = self._kept(spec.shape, space, self.split(dims, space), output)
        dims = [d for group in groups for d in group]
        if len(set(dims)) < len(dims) or math.prod(self.sizes[d] for d in dims) != spec.numel:
            raise Unsupported("its result has another shape than what it is computed of", output)
        return Result(self.element(output, groups), spec, self._walk(spec.strides, groups))

    def _is_all_of(self, groups: Groups) -> bool:
        """Whether a tensor whose dims run along these is there for every index, or once for each row."""
        is_plain = not any(isinstance(g, Shifted) for g in groups)
        return is_plain and {d for g in groups for d in g} | set(self.reduced) == set(range(len(self.sizes)))

    def _walk(self, strides: Sequence[int], groups: Groups) -> tuple[int, ...]:
        """The strides of a tensor, whose dims run along `groups`, by dim of the index space."""
        walked = [0] * len(self.sizes)
        for stride, group in zip(strides, groups):
            stride *= group.step if isinstance(group, Shifted) else 1
            for dim in reversed(group):
                walked[dim] = stride
                stride *= self.sizes[dim]
        return tuple(walked)

    def _kept(self, shape: Sequence[int], space: Sequence[int], whole: Groups, node: Node) -> Groups:
        if len(shape) == len(space):
            return tuple(self._outer(n, of, group) for n, of, group in zip(shape, space, whole))
        for start in range(len(space)):  # without the dims in the middle or at the end that are gone
            gone = len(space) - len(shape)
            if tuple(space[:start]) + tuple(space[start + gone :]) == tuple(shape):
                last = start if start + gone < len(space) else len(shape)
                return whole[:last] + whole[last + gone :]
        raise Unsupported("its result has another shape than what it is computed of", node)

    def _outer(self, n: int, of: int, group: tuple[int, ...]) -> tuple[int, ...]:
        """The first dims of `group`, which has `of` indices, that have `n`: each stands for as many as it takes."""
        if of % n:
            raise Unsupported("its result has another shape than what it is computed of")
        return () if n == 1 else self.split(group, (n, of // n))[0]

    # --- dims ---

    def split(self, dims: Sequence[int], shape: Sequence[int]) -> Groups:
        """Dims of the index space, one after another, as the dims of a tensor of `shape`."""
        plain((dims,))
        pending, groups = list(dims), []
        for size in shape:
            group: list[int] = []
            while size > 1:
                if not pending:
                    raise Unsupported("a reshape of what is broadcast")
                n = self.sizes[pending[0]]
                if size % n == 0:
                    group.append(pending.pop(0))
                    size //= n
                elif n % size == 0:
                    raise _Split(pending[0], n // size)
                else:
                    raise Unsupported("a reshape that does not divide the dims")
            groups.append(tuple(group))
        if pending:
            raise Unsupported("a reshape of what is broadcast")
        return tuple(groups)

    def shifted(self, group: tuple[int, ...], step: int, start: int, n: int) -> tuple[int, ...]:
        """Where a dim of `n` is at `start + step * i`, for the `i` that `group` says."""
        own_step, own_start = (group.step, group.start) if isinstance(group, Shifted) else (1, 0)
        step, start = step * own_step, start + step * own_start
        is_whole = (step, start) == (1, 0) and math.prod(self.sizes[d] for d in group) == n
        return tuple(group) if is_whole else Shifted(group, step, start)

    # --- expressions ---

    def make(self, op: str, *operands: Expression, kind: str = FLOAT, data: Any = None, dims: Any = None) -> Expression:
        if op in FUNCTIONS and all(e.op == "number" for e in operands):
            return self.number(of_numbers(op, kind, [e.data for e in operands]))
        depends = frozenset().union(*(e.dims for e in operands)) if dims is None else frozenset(dims)
        key = (op, tuple(map(id, operands)), kind, repr(data), depends)
        if key not in self.made:
            if len(self.made) == MOST_EXPRESSIONS:
                raise Unsupported("more arithmetic than a kernel is written for")
            self.made[key] = Expression(op, operands, kind, depends, data)
        return self.made[key]

    def number(self, v: Any) -> Expression:
        kind = BOOL if isinstance(v, bool) else INT if isinstance(v, int) else FLOAT
        return self.make("number", kind=kind, data=v)

    def element(self, v: Any, groups: Groups) -> Expression:
        """The element of node `v` at the index, whose dims run along `groups`; a number is itself."""
        if not isinstance(v, Node):
            if not isinstance(v, (bool, int, float)):
                raise Unsupported(f"an argument of type {type(v).__name__}")
            return self.number(v)
        if (v, groups) not in self.at:
            self.at[v, groups] = self._load(v, groups) if v in self.inputs else self._computed(v, groups)
        return self.at[v, groups]

    def _load(self, node: Node, groups: Groups) -> Expression:
        return self.load(node, groups, None, self.inside(groups, value(node).shape))

    def load(
        self, node: Node, groups: Groups, place: Expression | None, guard: Expression, ends: tuple[Any, ...] = ()
    ) -> Expression:
        """An input's element; `place`, if given, comes on top of where the index says. ends: see Expression.data."""
        t = value(node)
        strides, offset = self._walk(t.stride(), groups), 0
        for stride, group in zip(t.stride(), groups):
            offset += stride * group.start if isinstance(group, Shifted) else 0
        kind, data = kind_of(t.dtype), (self.inputs.index(node), strides, offset, *ends)
        if guard.op == "number" and not guard.data:
            return as_kind(self, self.number(False), kind)
        operands = [*filter(None, [place]), *([] if guard.op == "number" else [guard])]
        dims = {d for d, stride in enumerate(strides) if stride}.union(*(e.dims for e in operands))
        return self.make("gather" if place else "load", *operands, kind=kind, data=data, dims=dims)

    def index(self, groups: Groups, shape: Sequence[int]) -> Expression:
        """The place, counted along dims of `shape`, at which a tensor's element is whose dims run along `groups`."""
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        start = sum(stride * g.start for stride, g in zip(strides, groups) if isinstance(g, Shifted))
        steps = self._walk(strides, groups)
        dims = [d for d, step in enumerate(steps) if step]
        return self.make("index", kind=INT, data=(None, steps, start), dims=dims) if dims else self.number(start)

    def inside(self, groups: Groups, shape: Sequence[int]) -> Expression:
        """Whether each dim is at one of its indices: the number True where it is known to be."""
        result = self.number(True)
        for group, n in zip(groups, shape):
            if isinstance(group, Shifted):
                for condition in self._conditions(group, n):
                    result = both(self, result, condition)
        return result

    def _conditions(self, group: Shifted, n: int) -> list[Expression]:
        """That hold where a dim of `n` is at one of its indices, of those that may not."""
        at, reach = self.index((group,), (n,)), group.step * (math.prod(self.sizes[d] for d in group) - 1)
        first, last = group.start + min(reach, 0), group.start + max(reach, 0)
        if last < 0 or first >= n:
            return [self.number(False)]
        below = [] if first >= 0 else [self.make("ge", at, self.number(0), kind=BOOL)]
        return below + ([] if last < n else [self.make("lt", at, self.number(n), kind=BOOL)])

    def _computed(self, node: Node, groups: Groups) -> Expression:
        try:
            rule = RULES.get(node.target)
            if rule is None:
                raise Unsupported(f"{node.target} is no operation on elements, or rows of them")
            return rule(self, node, groups)
        except Unsupported as why:
            raise Unsupported(str(why), why.node or node) from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # arguments that the rule does not know
            raise Unsupported(f"{node.target}: {type(error).__name__}", node) from None

    def operand(self, node: Node, v: Any, groups: Groups) -> Expression:
        """The element of an operand that is broadcast to the shape of `node`."""
        if not isinstance(v, Node):
            return self.element(v, ())
        shape, own = value(node).shape, value(v).shape
        theirs = groups[len(shape) - len(own) :]
        return self.element(v, tuple(() if n == 1 else g for n, g in zip(own, theirs)))

    def as_float(self, e: Expression) -> Expression:
        return as_kind(self, e, FLOAT)

    def reduce(self, kind: str, source: Node, groups: Groups, dims: Sequence[int], keepdim: bool, of: Any) -> Expression:
        """of(groups of the source) reduced over `dims` of `source`, where `groups` are those of the result."""
        shape = value(source).shape
        dims = sorted(d % len(shape) for d in dims)
        kept = [g for i, g in enumerate(groups) if not (keepdim and i in dims)]

        def whole(along: Groups) -> Groups:
            inner, rest = iter(along), iter(kept)
            return tuple(next(inner) if d in dims else next(rest) for d in range(len(shape)))

        return self.reduce_over(kind, kept, [shape[d] for d in dims], lambda along: of(whole(along)))

    def reduce_over(self, kind: str, kept: Sequence[tuple[int, ...]], shape: Sequence[int], of: Any) -> Expression:
        """of(groups of dims of `shape`) reduced over these, where the result has the groups `kept`."""
        used = {d for g in kept for d in g}
        missing = tuple(d for d in range(len(self.sizes)) if d not in used)
        along, number = self.split(missing, shape), INT if kind.endswith("_int") else FLOAT
        if not missing:  # of one element each
            return as_kind(self, of(along), number)
        self.along_rows(missing)
        return self.make(kind, as_kind(self, of(along), number), kind=number, dims=used)

    def along_rows(self, dims: tuple[int, ...]) -> None:
        """From now on these are the dims of a row."""
        if self.reduced not in ((), dims):
            raise Unsupported("it reduces over different dims")
        self.reduced = dims

    def in_order(self, backwards: bool) -> None:
        """From now on rows are walked through from their ends, or not."""
        if self.is_backwards not in (None, backwards):
            raise Unsupported("sums from both ends of a row")
        self.is_backwards = backwards

    def count(self, source: Node, dims: Sequence[int]) -> int:
        return math.prod(value(source).shape[d] for d in dims)


def kind_of(dtype: torch.dtype, node: Node | None = None) -> str:
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return FLOAT
    if dtype == torch.bool:
        return BOOL
    if dtype in (torch.int64, torch.int32):
        return INT
    raise Unsupported(f"{dtype} is not among the dtypes of kernels", node)


# --- rules: operator -> expression ---------------------------------------------------------------------------------------

Rule = Callable[[Lowering, Node, Groups], Expression]
RULES: dict[Any, Rule] = {}
VIEWS: set[Any] = set()  # of these: they move elements, and compute nothing
# Operators with several results -> a rule for one of them, which getitem() takes: (…, node, groups, which).
PARTED: dict[Any, Callable[[Lowering, Node, Groups, int], Expression]] = {}


def arguments(node: Node) -> dict[str, Any]:
    """By name, defaults filled in."""
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def rule(*targets: str, view: bool = False, parted: bool = False) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for target in targets:
            packet, _, overload = target.partition(".")
            found = getattr(getattr(aten, packet, None), overload or "default", None)
            if found is not None:  # not in every release
                (PARTED if parted else RULES)[found] = rule
                VIEWS.update({found} if view else ())
        return rule

    return add


def _item(low: Lowering, node: Node, groups: Groups) -> Expression:
    parts, which = node.args
    if parts.target not in PARTED:
        raise Unsupported(f"{parts.target} is no operation on elements, or rows of them")
    return PARTED[parts.target](low, parts, groups, which)


RULES[operator.getitem] = _item


def elementwise(function: Callable[..., Expression], *names: str) -> Rule:
    """A rule for an operator whose arguments `names` are tensors or numbers."""

    def made(low: Lowering, node: Node, groups: Groups) -> Expression:
        given = arguments(node)
        result = function(low, *(low.operand(node, given[name], groups) for name in names))
        return as_kind(low, result, kind_of(value(node).dtype, node))

    return made


def as_kind(low: Lowering, e: Expression, kind: str) -> Expression:
    """`e` as a number of this kind."""
    if e.kind == kind:
        return e
    if e.op == "number":
        return low.number({FLOAT: float, INT: int, BOOL: bool}[kind](e.data))
    if kind == BOOL:
        return low.make("ne", e, low.number(0.0 if e.kind == FLOAT else 0), kind=BOOL)
    return low.make(kind, e, kind=kind)


def both(low: Lowering, a: Expression, b: Expression) -> Expression:
    """a and b, where either may be a number."""
    if a.op == "number":
        return b if a.data else a
    return both(low, b, a) if b.op == "number" else low.make("and", a, b, kind=BOOL)


def choose(low: Lowering, condition: Expression, a: Expression, b: Expression, kind: str) -> Expression:
    if condition.op == "number":
        return as_kind(low, a if condition.data else b, kind)
    return low.make("where", as_kind(low, condition, BOOL), as_kind(low, a, kind), as_kind(low, b, kind), kind=kind)


# --- views: elements elsewhere ---

RESHAPES = (
    *("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int"),
    *("unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "view_as", "reshape_as"),
)


@rule(*RESHAPES, view=True)
def _reshape(low: Lowering, node: Node, groups: Groups) -> Expression:
    return low.element(node.args[0], low.split([d for g in plain(groups) for d in g], value(node.args[0]).shape))


@rule("expand", "expand_as", view=True)
def _expand(low: Lowering, node: Node, groups: Groups) -> Expression:
    return low.operand(node, node.args[0], groups)


@rule("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist", view=True)
def _moved(low: Lowering, node: Node, groups: Groups) -> Expression:
    starts, ends = ([d % len(groups) for d in ([v] if isinstance(v, int) else v)] for v in node.args[1:])
    there = dict(zip(starts, ends))
    rest = iter(d for d in range(len(groups)) if d not in ends)
    return low.element(node.args[0], tuple(groups[there[d] if d in there else next(rest)] for d in range(len(groups))))


@rule("permute", "transpose.int", "swapaxes", "swapdims", "t", "mT", view=True)
def _permute(low: Lowering, node: Node, groups: Groups) -> Expression:
    rank = len(groups)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    elif rank > 1:
        a, b = (d % rank for d in node.args[1:] or (-2, -1))
        order[a], order[b] = order[b], order[a]
    return low.element(node.args[0], tuple(groups[order.index(d)] for d in range(rank)))
