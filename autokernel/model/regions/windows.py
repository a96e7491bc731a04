"""Operations that take elements from elsewhere: parts, joined parts, padding, pooling over windows."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.expressions import BOOL, FLOAT, INT, Expression
from autokernel.model.regions.lowering import MOST_PLACES, Groups, Lowering, Unsupported, arguments, choose, kind_of, rule


def shifted_along(low: Lowering, source: Node, groups: Groups, dim: int, step: int, start: int) -> Groups:
    """`groups` with one dim of `source` at `start + step * i`."""
    dim %= len(groups)
    return (*groups[:dim], low.shifted(groups[dim], step, start, value(source).shape[dim]), *groups[dim + 1 :])


@rule("slice.Tensor", view=True)
def _slice(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    n, start = value(given["self"]).shape[given["dim"]], given["start"] or 0
    there = shifted_along(low, given["self"], groups, given["dim"], given["step"], _place(start, n))
    return low.element(given["self"], there)


def _place(start: int, n: int) -> int:
    """An index that may count from the end, or lie beyond an end."""
    return min(max(start + n if start < 0 else start, 0), n)


@rule("narrow", view=True)
def _narrow(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, dim, start, _ = node.args
    return low.element(source, shifted_along(low, source, groups, dim, 1, _place(start, value(source).shape[dim])))


@rule("select.int", view=True)
def _select(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, dim, place = node.args
    n = value(source).shape[dim]
    dim %= value(source).dim()
    return low.element(source, (*groups[:dim], low.shifted((), 1, place % n, n), *groups[dim:]))


@rule("split.Tensor", "split_with_sizes", "chunk", view=True, parted=True)
def _split(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    source, dim = node.args[0], arguments(node)["dim"]
    start = sum(part.shape[dim] for part in value(node)[:which])
    return low.element(source, shifted_along(low, source, groups, dim, 1, start))


@rule("unbind.int", view=True, parted=True)
def _unbind(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    source, dim = node.args[0], arguments(node)["dim"] % value(node.args[0]).dim()
    n = len(value(node))
    return low.element(source, (*groups[:dim], low.shifted((), 1, which % n, n), *groups[dim:]))


@rule("broadcast_tensors", parted=True)
def _broadcast(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    return low.operand(node.args[0][which], node.args[0][which], groups[len(groups) - value(node.args[0][which]).dim() :])


@rule("flip")
def _flip(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, dims = node.args
    for dim in dims:
        groups = shifted_along(low, source, groups, dim, -1, value(source).shape[dim] - 1)
    return low.element(source, of_one(groups, source))


def of_one(groups: Groups, source: Node) -> Groups:
    """`groups` without those that are but one index."""
    return tuple(() if n == 1 else g for n, g in zip(value(source).shape, groups))


@rule("diff")
def _diff(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    source, dim = given["self"], given["dim"]
    if given["n"] != 1 or given["prepend"] is not None or given["append"] is not None:
        raise Unsupported("differences of differences, or of what is joined on")
    if (kind := kind_of(value(node).dtype, node)) == BOOL:
        raise Unsupported("differences of truths")
    after, before = (low.element(source, shifted_along(low, source, groups, dim, 1, start)) for start in (1, 0))
    return low.make("sub", after, before, kind=kind)


@rule("cat")
def _cat(low: Lowering, node: Node, groups: Groups) -> Expression:
    given, kind = arguments(node), kind_of(value(node).dtype, node)
    dim, parts, end = given["dim"] % len(groups), [], 0
    for part in given["tensors"]:
        shape = value(part).shape
        if len(shape) != len(groups):  # of no elements
            continue
        there = shifted_along(low, part, groups, dim, 1, -end)
        inside = low.inside((there[dim],), (shape[dim],))
        parts.append((inside, low.element(part, of_one(there, part))))
        end += shape[dim]
    result = parts.pop()[1]
    for inside, element in reversed(parts):
        result = choose(low, inside, element, result, kind)
    return result


@rule("stack")
def _stack(low: Lowering, node: Node, groups: Groups) -> Expression:
    given, kind = arguments(node), kind_of(value(node).dtype, node)
    parts, dim = given["tensors"], given["dim"] % len(groups)
    at, there = low.index((groups[dim],), (len(parts),)), (*groups[:dim], *groups[dim + 1 :])
    result = low.element(parts[-1], there)
    for which, part in reversed([*enumerate(parts[:-1])]):
        is_there = low.make("eq", at, low.number(which), kind=BOOL)
        result = choose(low, is_there, low.element(part, there), result, kind)
    return result


@rule("roll")
def _roll(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Each place is one of two along each dim that is rolled; what is there is computed for both."""
    given, kind = arguments(node), kind_of(value(node).dtype, node)
    source, shape = given["self"], value(given["self"]).shape
    if not given["dims"]:
        raise Unsupported("what is rolled as one dim")

    def element(there: Groups, rest: Sequence[tuple[int, int]]) -> Expression:
        if not rest:
            found = low.element(source, of_one(there, source))
            if is_costly(found):
                raise Unsupported("what is rolled would be computed several times", source)
            return found
        (dim, shift), *rest = rest
        n = shape[dim]
        starts = -shift % n - n, -shift % n
        first, second = (element(shifted_along(low, source, there, dim, 1, start), rest) for start in starts)
        at = low.index((there[dim],), (n,))
        return choose(low, low.make("ge", at, low.number(shift % n), kind=BOOL), first, second, kind)

    moved: dict[int, int] = {}
    for dim, shift in zip(given["dims"], given["shifts"]):
        moved[dim % len(shape)] = moved.get(dim % len(shape), 0) + shift
    return element(groups, [(dim, shift) for dim, shift in moved.items() if shift % shape[dim]])


@rule("tril", "triu")
def _triangle(low: Lowering, node: Node, groups: Groups) -> Expression:
    given, kind = arguments(node), kind_of(value(node).dtype, node)
    row, column = (low.index((group,), (n,)) for group, n in zip(groups[-2:], value(node).shape[-2:]))
    end = low.make("add", row, low.number(given["diagonal"]), kind=INT)
    is_inside = low.make("le" if node.target is aten.tril.default else "ge", column, end, kind=BOOL)
    return choose(low, is_inside, low.element(given["self"], groups), low.number(False), kind)


@rule("repeat", "repeat_interleave.self_int")
def _repeat(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Each dim several times as a whole, or one of them element by element."""
    given = arguments(node)
    source, shape = given["self"], value(given["self"]).shape
    if node.target is aten.repeat.default:
        sizes = [(of // n, n) for of, n in zip(value(node).shape[-len(shape) :], shape)] if shape else []
        return low.element(
            source, tuple(_split_in(low, g, two)[1] for g, two in zip(groups[len(groups) - len(sizes) :], sizes))
        )
    if given["dim"] is None:
        raise Unsupported("what is repeated as one dim")
    dim = given["dim"] % len(shape)
    own = _split_in(low, groups[dim], (shape[dim], value(node).shape[dim] // shape[dim]))[0]
    return low.element(source, (*groups[:dim], own, *groups[dim + 1 :]))


def _split_in(low: Lowering, group: tuple[int, ...], sizes: tuple[int, int]) -> Groups:
    """A dim as two; one that is as it was may run from elsewhere."""
    if 1 in sizes:
        return (group, ()) if sizes[1] == 1 else ((), group)
    return low.split(group, sizes)


@rule("constant_pad_nd", "pad")
def _pad(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    if given.get("mode", "constant") != "constant":
        raise Unsupported("padding with elements")
    source, pads = given["self"], given["pad"]
    for i, before in enumerate(pads[::2]):
        groups = shifted_along(low, source, groups, -1 - i, 1, -before)
    inside = low.inside(groups, value(source).shape)
    padding = low.number(given["value"] or 0)
    return choose(low, inside, low.element(source, of_one(groups, source)), padding, kind_of(value(node).dtype, node))


@rule("zeros_like", "ones_like", "full_like", "zeros", "ones", "full", "scalar_tensor")
def _filled(low: Lowering, node: Node, groups: Groups) -> Expression:
    packet, given = node.target.overloadpacket, arguments(node)
    v = given.get("fill_value", given.get("s", int(packet in (aten.ones_like, aten.ones))))
    kind = kind_of(value(node).dtype, node)
    return low.number(float(v) if kind == FLOAT else bool(v) if value(node).dtype == torch.bool else int(v))


# --- pooling and convolution ---

SHORT = 8  # places of a convolution's window: of 9 cuDNN is faster where channels are last, of 31 anywhere (on an H200)


class _Windows:
    """The windows of one operation, of whose places each has an index in the source and may be in its padding.

    kept: where all places of a window are in the source's first two dims; groups: those of the windows.
    """

    def __init__(
        self, low: Lowering, source: Node, kept: Groups, groups: Groups, size: Sequence[int], given: dict[str, Any]
    ):
        self.low, self.source, self.kept, self.groups = low, source, kept, groups
        self.size, self.shape = size, value(source).shape[-len(size) :]
        self.dilation = _for_each_dim(given.get("dilation", 1), size)
        self.padding = self._before(given["padding"])
        self.step = _for_each_dim(given["stride"] or size, size)
        self.overlap = any(size > step for size, step in zip(self.size, self.step))
        if math.prod(self.size) > MOST_PLACES:
            raise Unsupported("a window of very many places")

    def _before(self, padding: Any) -> Sequence[int]:
        """The padding ahead of each dim; with "same" so much that there are as many windows as places."""
        if isinstance(padding, str):
            return [(padding == "same") * step * (n - 1) // 2 for step, n in zip(self.dilation, self.size)]
        return _for_each_dim(padding, self.size)

    def places(self) -> Iterator[tuple[Expression, Expression]]:
        """Whether a place is in the source, and the element there."""
        for place in itertools.product(*map(range, self.size)):
            there = tuple(map(self._there, range(len(place)), place))
            element = self.low.element(self.source, of_one((*self.kept, *there), self.source))
            if self.overlap and is_costly(element):
                raise Unsupported("what overlapping windows take would be computed once for each", self.source)
            yield self.low.inside(there, self.shape), element

    def _there(self, dim: int, place: int, first: int = 0) -> tuple[int, ...]:
        """Where a place is in the source, which begins `first` places after what it is counted from."""
        start = place * self.dilation[dim] - self.padding[dim] + first
        return self.low.shifted(self.groups[dim], self.step[dim], start, self.shape[dim] + 2 * first)

    def count(self, with_padding: bool) -> Expression:
        """How many places of a window are in the source, or in it and its padding."""
        low, result = self.low, self.low.number(1.0)
        for dim, (size, n) in enumerate(zip(self.size, self.shape)):
            total = low.number(0.0)
            padding = self.padding[dim] if with_padding else 0
            for place in range(size):
                inside = low.inside((self._there(dim, place, padding),), (n + 2 * padding,))
                total = _folded(low, "add", total, choose(low, inside, low.number(1.0), low.number(0.0), FLOAT))
            result = _folded(low, "mul", result, total)
        return result


def _for_each_dim(v: Any, size: Sequence[int]) -> Sequence[int]:
    v = [v] if isinstance(v, int) else v
    return list(v) * len(size) if len(v) == 1 else v


def _pooled(low: Lowering, node: Node, groups: Groups) -> _Windows:
    given = arguments(node)
    rank = int(node.target.overloadpacket.__name__[-2])  # of max_pool2d: 2
    size = _for_each_dim(given["kernel_size"], range(rank))
    return _Windows(low, given["self"], groups[:-rank], groups[-rank:], size, given)


# What a window may take of each of its places, for which it is computed again; sums of rows are there once.
FEW_LOADS = 9
CHEAP = {"load", "number", "index", "float", "where", "add", "sub", "mul", "max", "min", "neg", "abs", "and", "or", "not"}
CHEAP |= {"lt", "le", "gt", "ge", "eq", "ne", "floor", "ceil", "trunc", "round", "copysign"}


def is_costly(e: Expression) -> bool:
    found, waiting = set(), [e]
    while waiting:
        o = waiting.pop()
        if o in found or o.op.startswith(("reduce_", "scan_")):
            continue
        if o.op not in CHEAP:
            return True
        found.add(o)
        waiting += o.operands
    return sum(o.op == "load" for o in found) > FEW_LOADS


FOLDED: dict[str, tuple[float, Callable[[float, float], float]]] = {"add": (0.0, operator.add), "mul": (1.0, operator.mul)}


def _folded(low: Lowering, op: str, a: Expression, b: Expression) -> Expression:
    """a op b, of which `a` may change nothing, or both be numbers."""
    neutral, function = FOLDED[op]
    if a.op == b.op == "number":
        return low.number(function(a.data, b.data))
    return b if a.op == "number" and a.data == neutral else low.make(op, a, b)


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(low: Lowering, node: Node, groups: Groups) -> Expression:
    if kind_of(value(node).dtype, node) != FLOAT:
        raise Unsupported("pooling of integers")
    nothing, result = low.number(-math.inf), None
    for inside, element in _pooled(low, node, groups).places():
        term = choose(low, inside, element, nothing, FLOAT)
        result = term if result is None else low.make("max", result, term)
    return result


def _or_nothing(low: Lowering, inside: Expression, element: Expression, nothing: Expression) -> Expression:
    """The element where a place is in the source: a load is 0 outside of it by itself."""
    is_zero_outside = element.op == "load" and inside in element.operands
    return low.as_float(element) if is_zero_outside else choose(low, inside, element, nothing, FLOAT)


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _average_pool(low: Lowering, node: Node, groups: Groups) -> Expression:
    given, windows, nothing, total = arguments(node), _pooled(low, node, groups), low.number(0.0), None
    for inside, element in windows.places():
        term = _or_nothing(low, inside, element, nothing)
        total = term if total is None else low.make("add", total, term)
    count = low.number(float(given["divisor_override"])) if given.get("divisor_override") else None
    return low.make("div", total, count or windows.count(given["count_include_pad"]))


def _adaptive(low: Lowering, node: Node, groups: Groups, kind: str) -> tuple[Expression, int]:
    """Where all windows are of one size and next to each other: reduced over the dims that make one up; how many are."""
    source, rank = node.args[0], int(node.target.overloadpacket.__name__[-2])  # of adaptive_avg_pool2d: 2
    made = value(node)[0] if isinstance(value(node), tuple) else value(node)
    of, made = value(source).shape[-rank:], made.shape[-rank:]
    if any(n % m for n, m in zip(of, made)):
        raise Unsupported("windows of several sizes")
    sizes = [n // m for n, m in zip(of, made)]

    def element(along: Groups) -> Expression:
        inner = tuple((*g, *a) for g, a in zip(groups[-rank:], along))
        return low.element(source, (*groups[:-rank], *inner))

    return low.reduce_over(f"reduce_{kind}", [*groups], sizes, element), math.prod(sizes)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_means(low: Lowering, node: Node, groups: Groups) -> Expression:
    total, count = _adaptive(low, node, groups, "sum")
    return low.make("div", total, low.number(float(count)))


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", parted=True)
def _adaptive_largest(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    if which:
        raise Unsupported("the places of the largest elements of windows")
    return _adaptive(low, node, groups, "max")[0]


CONVOLUTIONS = "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "convolution"
CONVOLVED = {
    getattr(getattr(aten, packet), overload or "default")
    for packet, _, overload in (c.partition(".") for c in CONVOLUTIONS)
}


@rule(*CONVOLUTIONS)
def _convolution(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Of short windows of one channel each, which takes as long as its memory does."""
    given = arguments(node)
    source, weight = given["input"], given["weight"]
    (made, channels_each, *size), shape = value(weight).shape, value(source).shape
    if channels_each > 1 or math.prod(size) > SHORT or given.get("transposed"):
        raise Unsupported("a convolution whose products take longer than its memory", node)
    if len(shape) != len(size) + 2:
        raise Unsupported("a convolution without a batch", node)
    own = () if shape[1] == 1 else _split_in(low, groups[1], (shape[1], made // shape[1]))[0]
    windows, nothing, total = _Windows(low, source, (groups[0], own), groups[2:], size, given), low.number(0.0), None
    for place, (inside, element) in zip(itertools.product(*map(range, size)), windows.places()):
        at = tuple(low.shifted((), 1, i, n) for i, n in zip(place, size))
        factor = low.as_float(low.element(weight, (groups[1], (), *of_one((*groups[:2], *at), weight)[2:])))
        if is_costly(factor):
            raise Unsupported("weights would be computed once for each element", weight)
        term = low.make("mul", _or_nothing(low, inside, element, nothing), factor)
        total = term if total is None else low.make("add", total, term)
    return (
        total if given["bias"] is None else low.make("add", total, low.as_float(low.element(given["bias"], (groups[1],))))
    )
