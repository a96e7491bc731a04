"""A region's nodes as arithmetic on single elements: which numbers, at which indices, through which functions and sums.

All values of a region are looked at from one index space, that of its largest result. Its dims are split where a reshape
within the region needs it. What is computed at an index is an expression; each input is read, and each result written, by a
stride per dim.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.model.capture import aten, value
from autokernel.spec import TensorSpec

FLOAT, INT, BOOL = "float", "int", "bool"
OWN_NAMES = ("exp", "log", "tanh", "erf", "sin", "cos", "floor", "ceil", "log1p", "expm1", "sqrt")  # as PyTorch has them

Groups = tuple[
    tuple[int, ...], ...
]  # for each dim of a tensor, the dims of the index space that it runs along; () for none


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


@dataclass(frozen=True, eq=False)
class Expression:
    """A function of the index. op: "load", "number", "index", "reduce_sum" or "scan_sum" and their like, or a function.

    A load of a condition is 0 where that is false. A scan is a reduction of all up to an index, in the order of the row.
    """

    op: str
    operands: tuple["Expression", ...]
    kind: str  # FLOAT, INT or BOOL
    dims: frozenset[int]  # on whose index it depends
    # Of a load (input, stride per dim, offset); of an index (None, step per dim, start); of a number its value; of a scan
    # whether it begins at the end of the row.
    data: Any = None


@dataclass(frozen=True)
class Result:
    """An expression that is written to memory: at every index, or, where it ends in a reduction, once for each row."""

    expression: Expression
    spec: TensorSpec
    strides: tuple[int, ...]  # by dim of the index space; 0 along those that it does not have


@dataclass(frozen=True)
class Lowered:
    """One region: its results for the indices of `sizes`."""

    sizes: tuple[int, ...]
    reduced: tuple[int, ...]  # dims that every reduction runs over; empty if there is none
    results: tuple[Result, ...]
    inputs: tuple[Node, ...]

    @property
    def scans(self) -> list[Expression]:
        return [e for e in self.expressions if is_scan(e)]

    @property
    def is_backwards(self) -> bool:
        """Whether rows are walked through from their ends."""
        return any(e.data for e in self.scans)

    @property
    def expressions(self) -> list[Expression]:
        """All of them, operands first."""
        found: dict[Expression, None] = {}

        def visit(e: Expression) -> None:
            if e not in found:
                for operand in e.operands:
                    visit(operand)
                found[e] = None

        for result in self.results:
            visit(result.expression)
        return list(found)


def is_scan(e: Expression) -> bool:
    return e.op.startswith("scan_")


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
            return self.number(_of_numbers(op, kind, [e.data for e in operands]))
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
        t = value(node)
        strides, offset = self._walk(t.stride(), groups), 0
        for stride, group in zip(t.stride(), groups):
            offset += stride * group.start if isinstance(group, Shifted) else 0
        dims = [d for d, stride in enumerate(strides) if stride]
        guard = self.inside(groups, t.shape)
        data = self.inputs.index(node), strides, offset
        if guard.op == "number":
            load = self.make("load", kind=kind_of(t.dtype), data=data, dims=dims)
            return load if guard.data else _in(self, self.number(False), load.kind)
        return self.make("load", guard, kind=kind_of(t.dtype), data=data, dims={*dims, *guard.dims})

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
        return _in(self, e, FLOAT)

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
            return _in(self, of(along), number)
        self.along_rows(missing)
        return self.make(kind, _in(self, of(along), number), kind=number, dims=used)

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
        return _in(low, result, kind_of(value(node).dtype, node))

    return made


def _in(low: Lowering, e: Expression, kind: str) -> Expression:
    """`e` as a number of this kind."""
    if e.kind == kind:
        return e
    if e.op == "number":
        return low.number({FLOAT: float, INT: int, BOOL: bool}[kind](e.data))
    if kind == BOOL:
        return low.make("ne", e, low.number(0.0 if e.kind == FLOAT else 0), kind=BOOL)
    return low.make(kind, e, kind=kind)


def _float1(op: str) -> Callable[..., Expression]:
    return lambda low, x: low.make(op, low.as_float(x))


def _arithmetic(low: Lowering, op: str, *operands: Expression) -> Expression:
    """In floats where one of them is, else in integers."""
    if any(e.kind == FLOAT for e in operands):
        return low.make(op, *map(low.as_float, operands))
    return low.make(op, *(_in(low, e, INT) for e in operands), kind=INT)


def sigmoid(low: Lowering, x: Expression) -> Expression:
    one = low.number(1.0)
    return low.make("div", one, low.make("add", one, low.make("exp", low.make("neg", low.as_float(x)))))


def silu(low: Lowering, x: Expression) -> Expression:
    return low.make("mul", x, sigmoid(low, x))


def relu(low: Lowering, x: Expression) -> Expression:
    return _arithmetic(low, "max", x, _in(low, low.number(0), x.kind))


def gelu(low: Lowering, x: Expression, tanh: bool) -> Expression:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, or x (1 + erf(x / sqrt(2))) / 2."""
    half = low.make("mul", low.number(0.5), x)
    if tanh:
        cube = low.make("mul", low.number(0.044715), power(low, x, 3))
        inner = low.make("mul", low.number(math.sqrt(2 / math.pi)), low.make("add", x, cube))
    else:
        inner = low.make("mul", x, low.number(math.sqrt(0.5)))
    return low.make("mul", half, low.make("add", low.number(1.0), low.make("tanh" if tanh else "erf", inner)))


def power(low: Lowering, x: Expression, exponent: float) -> Expression:
    """Small whole powers as products: they are defined below 0, too."""
    x, one = low.as_float(x), low.number(1.0)
    size = abs(exponent)
    if size != int(size) and size != 0.5 or size > MOST_FACTORS:
        return low.make("pow", x, low.number(float(exponent)))
    result = low.make("sqrt", x) if size == 0.5 else x if size else one
    for _ in range(int(size) - 1):
        result = low.make("mul", result, x)
    return result if exponent >= 0 else low.make("div", one, result)


for name in OWN_NAMES:
    rule(name)(elementwise(_float1(name), "self"))
rule("rsqrt")(elementwise(lambda low, x: power(low, x, -0.5), "self"))
rule("reciprocal")(elementwise(lambda low, x: power(low, x, -1), "self"))
rule("square")(elementwise(lambda low, x: _arithmetic(low, "mul", x, x), "self"))
rule("abs")(elementwise(lambda low, x: _arithmetic(low, "abs", x), "self"))
rule("neg")(elementwise(lambda low, x: _arithmetic(low, "neg", x), "self"))
rule("sigmoid")(elementwise(sigmoid, "self"))
rule("silu")(elementwise(silu, "self"))
rule("relu")(elementwise(relu, "self"))
rule("clone", "contiguous", "alias", "detach", "dropout", "lift_fresh_copy", "positive")(
    lambda low, node, groups: _same(low, node, groups)
)
rule("to.dtype", "_to_copy", "to.dtype_layout", "to.device")(lambda low, node, groups: _cast(low, node, groups))


def _same(low: Lowering, node: Node, groups: Groups) -> Expression:
    if node.target is aten.dropout.default and node.args[2] and node.args[1]:
        raise Unsupported("random numbers")
    return low.element(node.args[0], groups)


def _cast(low: Lowering, node: Node, groups: Groups) -> Expression:
    source = low.element(node.args[0], groups)
    if value(node).device != value(node.args[0]).device and source.op != "number":
        raise Unsupported("a copy to another device")
    return _in(low, source, kind_of(value(node).dtype, node))


@rule("gelu")
def _gelu(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    return gelu(low, low.element(given["self"], groups), given["approximate"] == "tanh")


@rule("add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar", "rsub.Tensor")
def _sum(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    a, b = (low.operand(node, given[name], groups) for name in ("self", "other"))
    if node.target.overloadpacket is aten.rsub:  # other - alpha self
        a, b = b, a
    if given["alpha"] != 1:
        b = _arithmetic(low, "mul", b, low.number(given["alpha"]))
    result = _arithmetic(low, "add" if node.target.overloadpacket is aten.add else "sub", a, b)
    return _in(low, result, kind_of(value(node).dtype, node))


def _binary(op: str) -> Callable[..., Expression]:
    return lambda low, a, b: _arithmetic(low, op, a, b)


rule("mul.Tensor", "mul.Scalar")(elementwise(_binary("mul"), "self", "other"))
rule("maximum", "max.other")(elementwise(_binary("max"), "self", "other"))
rule("minimum", "min.other")(elementwise(_binary("min"), "self", "other"))
rule("div.Tensor", "div.Scalar", "true_divide.Tensor")(
    elementwise(lambda low, a, b: low.make("div", low.as_float(a), low.as_float(b)), "self", "other")
)


def _compared(op: str) -> Callable[..., Expression]:
    def function(low: Lowering, a: Expression, b: Expression) -> Expression:
        if FLOAT in (a.kind, b.kind):
            return low.make(op, low.as_float(a), low.as_float(b), kind=BOOL)
        return low.make(op, _in(low, a, INT), _in(low, b, INT), kind=BOOL)

    return function


def _comparison(name: str) -> Rule:
    compared = elementwise(_compared(name), "self", "other")

    def made(low: Lowering, node: Node, groups: Groups) -> Expression:
        a, b = (value(v) if isinstance(v, Node) else v for v in node.args)
        if not all(_is_exact(v, torch.result_type(a, b)) for v in (a, b)):
            raise Unsupported("a comparison that rounds to 16 bits")
        return compared(low, node, groups)

    return made


def _is_exact(v: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor or number is the same where PyTorch compares in `dtype`; float32 is what expressions compare in."""
    if dtype.itemsize > 2 or not dtype.is_floating_point:
        return True
    if isinstance(v, Tensor):
        return v.dtype in (dtype, torch.bool)
    return math.isnan(v) or torch.tensor(v, dtype=dtype).item() == v


for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule(f"{name}.Tensor", f"{name}.Scalar")(_comparison(name))


def _logical(op: str) -> Callable[..., Expression]:
    return lambda low, *operands: low.make(op, *(_in(low, e, BOOL) for e in operands), kind=BOOL)


rule("logical_not")(elementwise(_logical("not"), "self"))
rule("logical_and")(elementwise(_logical("and"), "self", "other"))
rule("logical_or")(elementwise(_logical("or"), "self", "other"))


@rule("bitwise_not", "bitwise_and.Tensor", "bitwise_or.Tensor")
def _bitwise(low: Lowering, node: Node, groups: Groups) -> Expression:
    if value(node).dtype != torch.bool:
        raise Unsupported("bits of integers")
    op = {aten.bitwise_not: "not", aten.bitwise_and: "and", aten.bitwise_or: "or"}[node.target.overloadpacket]
    return low.make(op, *(low.operand(node, v, groups) for v in node.args), kind=BOOL)


@rule("pow.Tensor_Scalar", "pow.Tensor_Tensor")
def _power(low: Lowering, node: Node, groups: Groups) -> Expression:
    if kind_of(value(node).dtype, node) != FLOAT:
        raise Unsupported("powers of integers")
    x, exponent = low.as_float(low.operand(node, node.args[0], groups)), node.args[1]
    if isinstance(exponent, Node):
        return low.make("pow", x, low.as_float(low.operand(node, exponent, groups)))
    return power(low, x, exponent)


def both(low: Lowering, a: Expression, b: Expression) -> Expression:
    """a and b, where either may be a number."""
    if a.op == "number":
        return b if a.data else a
    return both(low, b, a) if b.op == "number" else low.make("and", a, b, kind=BOOL)


def choose(low: Lowering, condition: Expression, a: Expression, b: Expression, kind: str) -> Expression:
    if condition.op == "number":
        return _in(low, a if condition.data else b, kind)
    return low.make("where", _in(low, condition, BOOL), _in(low, a, kind), _in(low, b, kind), kind=kind)


@rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(low: Lowering, node: Node, groups: Groups) -> Expression:
    condition, a, b = (low.operand(node, v, groups) for v in node.args)
    return choose(low, condition, a, b, kind_of(value(node).dtype, node))


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(low: Lowering, node: Node, groups: Groups) -> Expression:
    x, mask, v = (low.operand(node, v, groups) for v in node.args)
    return choose(low, mask, v, x, kind_of(value(node).dtype, node))


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    result = low.element(given["self"], groups)
    for name, op in (("min", "max"), ("max", "min"), ("min_val", "max"), ("max_val", "min")):
        if given.get(name) is not None:
            result = _arithmetic(low, op, result, low.operand(node, given[name], groups))
    return _in(low, result, kind_of(value(node).dtype, node))


@rule("leaky_relu")
def _leaky_relu(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x = low.element(given["self"], groups)
    slope = low.make("mul", x, low.number(float(given["negative_slope"])))
    return choose(low, low.make("gt", x, low.number(0.0), kind=BOOL), x, slope, FLOAT)


@rule("hardsigmoid", "hardswish")
def _hard(low: Lowering, node: Node, groups: Groups) -> Expression:
    x = low.element(node.args[0], groups)
    three, zero, six = map(low.number, (3.0, 0.0, 6.0))
    gate = low.make("div", low.make("min", low.make("max", low.make("add", x, three), zero), six), six)
    return gate if node.target is aten.hardsigmoid.default else low.make("mul", x, gate)


LN2 = math.log(2)
rule("exp2")(elementwise(lambda low, x: low.make("exp", low.make("mul", low.as_float(x), low.number(LN2))), "self"))
rule("log2")(elementwise(lambda low, x: low.make("div", low.make("log", low.as_float(x)), low.number(LN2)), "self"))


@rule("addcmul")
def _addcmul(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, a, b = (low.operand(node, given[name], groups) for name in ("self", "tensor1", "tensor2"))
    product = _arithmetic(low, "mul", a, b)
    if given["value"] != 1:
        product = _arithmetic(low, "mul", product, low.number(given["value"]))
    return _in(low, _arithmetic(low, "add", x, product), kind_of(value(node).dtype, node))


@rule("lerp.Scalar", "lerp.Tensor")
def _lerp(low: Lowering, node: Node, groups: Groups) -> Expression:
    a, b, weight = (low.as_float(low.operand(node, v, groups)) for v in node.args)
    difference, rest = low.make("sub", b, a), low.make("sub", low.number(1.0), weight)
    from_a = low.make("add", a, low.make("mul", weight, difference))
    from_b = low.make("sub", b, low.make("mul", difference, rest))  # which is b itself at a weight of 1
    if weight.op == "number":
        return from_a if abs(weight.data) < 0.5 else from_b
    return choose(low, low.make("lt", low.make("abs", weight), low.number(0.5), kind=BOOL), from_a, from_b, FLOAT)


@rule("mish", "log_sigmoid")
def _smooth(low: Lowering, node: Node, groups: Groups) -> Expression:
    x, zero = low.element(node.args[0], groups), low.number(0.0)
    if node.target is aten.log_sigmoid.default:  # min(x, 0) - log(1 + e^-|x|)
        return low.make("sub", low.make("min", x, zero), _softened(low, x))
    return low.make("mul", x, low.make("tanh", low.make("log1p", low.make("exp", x))))


def _softened(low: Lowering, x: Expression) -> Expression:
    """log(1 + e^-|x|)"""
    return low.make("log1p", low.make("exp", low.make("neg", low.make("abs", x))))


SELU = {"alpha": 1.6732632423543772, "scale": 1.0507009873554805}


@rule("elu", "celu", "selu")
def _exponential(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node) | (SELU if node.target is aten.selu.default else {})
    x, zero = low.element(given["self"], groups), low.number(0.0)
    alpha, scale = low.number(float(given["alpha"])), low.number(float(given.get("scale", 1)))
    below = x
    if node.target is aten.celu.default:
        below = low.make("div", x, alpha)
    elif given.get("input_scale", 1) != 1:
        below = low.make("mul", x, low.number(float(given["input_scale"])))
    curve = low.make("mul", alpha, low.make("expm1", below))
    result = choose(low, low.make("gt", x, zero, kind=BOOL), x, curve, FLOAT)
    return result if scale.data == 1 else low.make("mul", scale, result)


@rule("prelu")
def _prelu(low: Lowering, node: Node, groups: Groups) -> Expression:
    """A slope for each channel, the second dim, or for all."""
    x, weight = low.element(node.args[0], groups), node.args[1]
    is_one = value(weight).numel() == 1
    slope = low.element(weight, ((),) * value(weight).dim() if is_one else (groups[min(1, len(groups) - 1)],))
    return choose(low, low.make("gt", x, low.number(0.0), kind=BOOL), x, low.make("mul", slope, x), FLOAT)


@rule("glu")
def _glu(low: Lowering, node: Node, groups: Groups) -> Expression:
    """The first half of a dim times the sigmoid of the second."""
    source, dim = node.args[0], arguments(node)["dim"] % len(groups)
    half, n = value(node).shape[dim], value(source).shape[dim]
    first, second = ((*groups[:dim], low.shifted(groups[dim], 1, start, n), *groups[dim + 1 :]) for start in (0, half))
    return low.make("mul", low.element(source, first), sigmoid(low, low.element(source, second)))


@rule("softshrink", "hardshrink", "threshold")
def _shrunk(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, zero = low.element(given["self"], groups), low.number(0.0)
    if node.target is aten.threshold.default:
        is_below = low.make("le", x, low.number(float(given["threshold"])), kind=BOOL)
        return choose(low, is_below, low.number(float(given["value"])), x, FLOAT)
    limit, other = low.number(float(given["lambd"])), low.number(-float(given["lambd"]))
    above, below = low.make("gt", x, limit, kind=BOOL), low.make("lt", x, other, kind=BOOL)
    if node.target is aten.hardshrink.default:
        is_within = low.make("le", low.make("abs", x), limit, kind=BOOL)
        return choose(low, is_within, zero, x, FLOAT)
    inner = choose(low, below, low.make("add", x, limit), low.make("mul", x, zero), FLOAT)
    return choose(low, above, low.make("sub", x, limit), inner, FLOAT)


rule("isnan")(elementwise(lambda low, x: low.make("ne", low.as_float(x), low.as_float(x), kind=BOOL), "self"))
rule("isinf")(
    elementwise(lambda low, x: low.make("eq", low.make("abs", low.as_float(x)), low.number(math.inf), kind=BOOL), "self")
)


@rule("softplus")
def _softplus(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, beta = low.element(given["self"], groups), low.number(float(given["beta"]))
    scaled = low.make("mul", x, beta)
    soft = low.make("div", low.make("log1p", low.make("exp", scaled)), beta)
    return choose(low, low.make("gt", scaled, low.number(float(given["threshold"])), kind=BOOL), x, soft, FLOAT)


# --- reductions and what is made of them ---


def dims_of(node: Node, source: Node) -> list[int]:
    """The dims over which an operator reduces: all, if it names none."""
    dims = arguments(node).get("dim")
    return list(range(value(source).dim())) if dims in (None, []) else [dims] if isinstance(dims, int) else dims


REDUCTIONS = {aten.amax: "max", aten.max: "max", aten.amin: "min", aten.min: "min", aten.prod: "prod"}


@rule("sum.dim_IntList", "mean.dim", "amax", "amin", "prod.dim_int", "sum", "mean", "max", "min", "prod")
def _reduction(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    source = given["self"]
    if given.get("dtype") not in (None, torch.float32, value(source).dtype):
        raise Unsupported("a sum in another dtype")
    if kind_of(value(source).dtype, node) != FLOAT:
        raise Unsupported("a reduction of integers")
    dims, kind = dims_of(node, source), REDUCTIONS.get(node.target.overloadpacket, "sum")
    result = low.reduce(f"reduce_{kind}", source, groups, dims, given.get("keepdim"), lambda g: low.element(source, g))
    if node.target.overloadpacket is aten.mean:
        result = low.make("div", result, low.number(float(low.count(source, dims))))
    return result


def one_per_row(groups: Groups, source: Node, dims: Sequence[int], keepdim: bool) -> Groups:
    """The groups of a result of `source`'s rank, with 1 along `dims`, of which `groups` may lack those dims."""
    rank = value(source).dim()
    dims = {d % rank for d in dims}
    if keepdim:
        return tuple(() if d in dims else g for d, g in enumerate(groups))
    rest = iter(groups)
    return tuple(() if d in dims else next(rest) for d in range(rank))


def _sum_of(
    low: Lowering, node: Node, groups: Groups, of: Callable[[Expression], Expression], kind: str = "sum"
) -> Expression:
    """of(x), added up (or its largest) over the dims of an operator with `self`, `dim` and `keepdim`."""
    given = arguments(node)
    source = given["self"]
    dims = dims_of(node, source)
    one = one_per_row(groups, source, dims, given["keepdim"])
    return low.reduce(f"reduce_{kind}", source, one, dims, True, lambda g: of(low.as_float(low.element(source, g))))


@rule("logsumexp")
def _logsumexp(low: Lowering, node: Node, groups: Groups) -> Expression:
    peak = _sum_of(low, node, groups, lambda x: x, "max")
    is_infinite = low.make("eq", low.make("abs", peak), low.number(math.inf), kind=BOOL)
    peak = choose(low, is_infinite, low.number(0.0), peak, FLOAT)  # as PyTorch does: inf - inf would be NaN
    total = _sum_of(low, node, groups, lambda x: low.make("exp", low.make("sub", x, peak)))
    return low.make("add", peak, low.make("log", total))


@rule("linalg_vector_norm")
def _norm(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    if given["dtype"] not in (None, torch.float32, value(given["self"]).dtype) or given["ord"] not in (1, 2):
        raise Unsupported("another norm than the 1-norm and the 2-norm")
    if given["ord"] == 1:
        return _sum_of(low, node, groups, lambda x: low.make("abs", x))
    return low.make("sqrt", _sum_of(low, node, groups, lambda x: low.make("mul", x, x)))


@rule("var.correction", "std.correction", "var.dim", "std.dim")
def _variance(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    source = given["self"]
    dims = dims_of(node, source)
    count = low.count(source, dims)
    correction = given.get("correction", 1 if given.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    if count <= correction:
        raise Unsupported("the variance of too few elements")
    mean = low.make("div", _sum_of(low, node, groups, lambda x: x), low.number(float(count)))

    def squared(x: Expression) -> Expression:
        deviation = low.make("sub", x, mean)
        return low.make("mul", deviation, deviation)

    variance = low.make("div", _sum_of(low, node, groups, squared), low.number(float(count - correction)))
    return low.make("sqrt", variance) if node.target.overloadpacket is aten.std else variance


@rule("softmax.int", "_softmax", "log_softmax.int")
def _softmax(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    source, dim = given["self"], given["dim"]
    if kind_of(value(source).dtype, node) != FLOAT:
        raise Unsupported("a softmax of integers")
    x = low.element(source, groups)
    one = tuple(() if d == dim % len(groups) else g for d, g in enumerate(groups))
    peak = low.reduce("reduce_max", source, one, [dim], True, lambda g: low.element(source, g))
    shifted = low.make("sub", x, peak)
    terms = lambda g: low.make("exp", low.make("sub", low.element(source, g), peak))  # noqa: E731
    total = low.reduce("reduce_sum", source, one, [dim], True, terms)
    if node.target is aten.log_softmax.int:
        return low.make("sub", shifted, low.make("log", total))
    return low.make("div", low.make("exp", shifted), total)


def _normalised(low: Lowering, source: Node, groups: Groups, dims: Sequence[int], eps: float, centred: bool) -> Expression:
    """x, less its mean if `centred`, over the root of the mean of its square."""
    one = tuple(() if d in dims else g for d, g in enumerate(groups))
    count = low.number(float(low.count(source, dims)))
    mean = None
    if centred:
        total = low.reduce("reduce_sum", source, one, dims, True, lambda g: low.element(source, g))
        mean = low.make("div", total, count)

    def deviation(g: Groups) -> Expression:
        x = low.element(source, g)
        return low.make("sub", x, mean) if mean else x

    squares = low.reduce("reduce_sum", source, one, dims, True, lambda g: low.make("mul", deviation(g), deviation(g)))
    variance = low.make("div", squares, count)
    return low.make("div", deviation(groups), low.make("sqrt", low.make("add", variance, low.number(float(eps)))))


def _scaled(low: Lowering, x: Expression, groups: Groups, weight: Any, bias: Any) -> Expression:
    for op, v in (("mul", weight), ("add", bias)):
        if v is not None:
            x = low.make(op, x, low.as_float(low.element(v, groups)))
    return x


@rule("layer_norm", "rms_norm")
def _layer_norm(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    source, width = given["input"], len(given["normalized_shape"])
    dims = list(range(len(groups) - width, len(groups)))
    eps = given["eps"] if given["eps"] is not None else torch.finfo(torch.float32).eps
    x = _normalised(low, source, groups, dims, eps, node.target is aten.layer_norm.default)
    return _scaled(low, x, groups[-width:], given["weight"], given.get("bias"))


@rule("group_norm")
def _group_norm(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    source, count = given["input"], given["num_groups"]
    batch, channels, *rest = value(source).shape
    parts = low.split(groups[1], (count, channels // count))
    whole = (groups[0], parts[0], parts[1], *groups[2:])
    one = (groups[0], parts[0])
    flat = lambda g: (g[0], g[1] + g[2], *g[3:])  # noqa: E731  of a group, back to channels
    number = low.number(float(math.prod(rest) * channels // count))

    def reduced(of: Callable[[Groups], Expression]) -> Expression:
        return low.reduce_over("reduce_sum", one, (channels // count, *rest), lambda along: of((*one, *along)))

    mean = low.make("div", reduced(lambda g: low.element(source, flat(g))), number)
    deviation = lambda g: low.make("sub", low.element(source, flat(g)), mean)  # noqa: E731
    variance = low.make("div", reduced(lambda g: low.make("mul", deviation(g), deviation(g))), number)
    root = low.make("sqrt", low.make("add", variance, low.number(float(given["eps"]))))
    return _scaled(low, low.make("div", deviation(whole), root), (groups[1],), given["weight"], given["bias"])


@rule("instance_norm")
def _instance_norm(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    if not given["use_input_stats"] or given["running_mean"] is not None:
        raise Unsupported("an instance norm that keeps statistics, or has kept some")
    x = _normalised(low, given["input"], groups, list(range(2, len(groups))), given["eps"], centred=True)
    return _scaled(low, x, (groups[1],), given["weight"], given["bias"])


@rule("batch_norm")
def _batch_norm(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    if given["training"]:
        raise Unsupported("batch norm in training keeps statistics")
    channel = (groups[1],)
    x, mean, variance = (
        low.as_float(low.element(given[name], g))
        for name, g in (("input", groups), ("running_mean", channel), ("running_var", channel))
    )
    root = low.make("sqrt", low.make("add", variance, low.number(float(given["eps"]))))
    return _scaled(low, low.make("div", low.make("sub", x, mean), root), channel, given["weight"], given["bias"])


# --- views: elements elsewhere ---

RESHAPES = (
    *("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int"),
    *("unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims"),
)


@rule(*RESHAPES, view=True)
def _reshape(low: Lowering, node: Node, groups: Groups) -> Expression:
    return low.element(node.args[0], low.split([d for g in plain(groups) for d in g], value(node.args[0]).shape))


@rule("expand", "expand_as", view=True)
def _expand(low: Lowering, node: Node, groups: Groups) -> Expression:
    return low.operand(node, node.args[0], groups)


@rule("permute", "transpose.int", "t", view=True)
def _permute(low: Lowering, node: Node, groups: Groups) -> Expression:
    rank = len(groups)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    elif rank > 1:
        a, b = (node.args[1] % rank, node.args[2] % rank) if node.target is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]
    return low.element(node.args[0], tuple(groups[order.index(d)] for d in range(rank)))


def evaluate(lowered: Lowered, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The region's results as the expressions say, computed by PyTorch in the inputs' dtypes, in their own strides."""
    known: dict[Expression, Any] = {}
    for e in lowered.expressions:
        known[e] = _evaluated(e, [known[operand] for operand in e.operands], inputs, lowered)
    return tuple(_written(result, _tensor(known[result.expression], inputs), lowered) for result in lowered.results)


def _tensor(v: Any, inputs: Sequence[Tensor]) -> Tensor:
    """A number as a tensor, of floating-point ones in the inputs' dtype."""
    dtype = next(x.dtype for x in inputs if x.is_floating_point())
    return torch.as_tensor(v, dtype=dtype if isinstance(v, float) else None)


def _written(result: Result, numbers: Tensor, lowered: Lowered) -> Tensor:
    sizes = [n if stride else 1 for n, stride in zip(lowered.sizes, result.strides)]
    y = torch.empty_strided(result.spec.shape, result.spec.strides, dtype=numbers.dtype)
    y.as_strided(sizes, result.strides).copy_(numbers.expand(sizes))
    return y


def _evaluated(e: Expression, operands: list[Any], inputs: Sequence[Tensor], lowered: Lowered) -> Any:
    if e.op == "number":
        return e.data
    if e.op == "index":
        return _at(e, lowered)
    if e.op == "load":
        memory = inputs[e.data[0]]
        whole = memory.as_strided((memory.untyped_storage().nbytes() // memory.itemsize,), (1,), 0)
        loaded = whole[(_at(e, lowered) + memory.storage_offset()).clamp(0, len(whole) - 1)]
        return torch.where(operands[0], loaded, torch.zeros_like(loaded)) if operands else loaded
    if e.op.startswith("reduce_"):
        operand = _tensor(operands[0], inputs).expand(lowered.sizes)
        return ROWS[e.op](operand, lowered.reduced)
    if is_scan(e):
        return _scanned(_tensor(operands[0], inputs).expand(lowered.sizes), e, lowered.reduced)
    return FUNCTIONS[e.op](*operands)


def _at(e: Expression, lowered: Lowered) -> Tensor:
    """The places that a load or an index goes to, of the dims on which they depend."""
    _, steps, at = e.data
    for d, step in enumerate(steps):
        shape = [n if d == i else 1 for i, n in enumerate(lowered.sizes)]
        at = at + (
            step * torch.arange(lowered.sizes[d]).view(shape) if step else torch.zeros([1] * len(shape), dtype=torch.int64)
        )
    return torch.as_tensor(at)


def _scanned(x: Tensor, e: Expression, dims: Sequence[int]) -> Tensor:
    ends = list(range(-len(dims), 0))
    rows = x.movedim(list(dims), ends)
    flat = rows.flatten(-len(dims))
    flat = flat.flip(-1) if e.data else flat
    made = {"scan_sum": torch.cumsum, "scan_prod": torch.cumprod}[e.op](flat, -1)
    return (made.flip(-1) if e.data else made).view(rows.shape).movedim(ends, list(dims))


def _product(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in dims:
        x = x.prod(d, keepdim=True)
    return x


ROWS: Mapping[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "reduce_sum": lambda x, dims: x.sum(dims, keepdim=True),
    "reduce_prod": _product,
    "reduce_max": lambda x, dims: x.amax(dims, keepdim=True),
    "reduce_min": lambda x, dims: x.amin(dims, keepdim=True),
    "reduce_min_int": lambda x, dims: x.amin(dims, keepdim=True),
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in OWN_NAMES},
    "float": lambda x: x if x.is_floating_point() else x.to(torch.float64),
    "int": lambda x: x.to(torch.int64),
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a / b,
    "neg": operator.neg,
    "abs": abs,
    "pow": operator.pow,
    "max": lambda a, b: torch.maximum(*_tensors(a, b)),
    "min": lambda a, b: torch.minimum(*_tensors(a, b)),
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and": operator.and_,
    "or": operator.or_,
    "not": torch.logical_not,
    "where": lambda c, a, b: torch.where(c, *_tensors(a, b)),
}


def _of_numbers(op: str, kind: str, numbers: Sequence[Any]) -> Any:
    """What a function comes to, in float64: languages of kernels have some for tensors alone."""
    result = FUNCTIONS[op](*(torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for v in numbers))
    return {FLOAT: float, INT: int, BOOL: bool}[kind](result)


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    dtype = next((v.dtype for v in (a, b) if isinstance(v, Tensor)), torch.float64)
    return torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype)
