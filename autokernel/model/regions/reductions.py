"""Sums, largest and least elements, and what is made of them: norms, variances, softmax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.expressions import BOOL, FLOAT, INT, Expression
from autokernel.model.regions.lowering import Groups, Lowering, Unsupported, arguments, as_kind, choose, kind_of, rule


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
    if value(source).dtype == torch.bool and node.target.overloadpacket is aten.sum and given["dtype"] is None:
        return _count(low, node, groups)
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
    one = one_per_row(groups, source, dims, given.get("keepdim"))
    return low.reduce(f"reduce_{kind}", source, one, dims, True, lambda g: of(low.as_float(low.element(source, g))))


MOST_COUNTED = 1 << 24  # of which float32 has each number


@rule("count_nonzero", "count_nonzero.dim_IntList")
def _count(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Of elements that are not 0: of truths their sum."""
    source, keepdim = node.args[0], arguments(node).get("keepdim")
    dims = dims_of(node, source)
    if low.count(source, dims) > MOST_COUNTED:
        raise Unsupported("more elements than can be counted")
    is_there = lambda g: as_kind(low, as_kind(low, low.element(source, g), BOOL), FLOAT)  # noqa: E731
    return as_kind(low, low.reduce("reduce_sum", source, groups, dims, keepdim, is_there), INT)


@rule("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def _truth(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Whether the largest of them, or the least, is no 0."""
    source, keepdim = node.args[0], arguments(node).get("keepdim")
    kind = "max" if node.target.overloadpacket is aten.any else "min"
    is_there = lambda g: as_kind(low, as_kind(low, low.element(source, g), BOOL), FLOAT)  # noqa: E731
    return as_kind(low, low.reduce(f"reduce_{kind}", source, groups, dims_of(node, source), keepdim, is_there), BOOL)


@rule("nansum")
def _numbers_summed(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    if given["dtype"] not in (None, torch.float32, value(given["self"]).dtype):
        raise Unsupported("a sum in another dtype")
    if kind_of(value(node).dtype, node) != FLOAT:
        raise Unsupported("a reduction of integers")
    is_number = lambda x: low.make("eq", x, x, kind=BOOL)  # noqa: E731
    return _sum_of(low, node, groups, lambda x: choose(low, is_number(x), x, low.number(0.0), FLOAT))


@rule("aminmax", parted=True)
def _extremes(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    given = arguments(node)
    if kind_of(value(given["self"]).dtype, node) != FLOAT:
        raise Unsupported("a reduction of integers")
    return _sum_of(low, node, groups, lambda x: x, ("min", "max")[which])


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
    if given["dtype"] not in (None, torch.float32, value(given["self"]).dtype) or given["ord"] not in (1, 2, math.inf):
        raise Unsupported("another norm than those of 1, 2 and infinity")
    if given["ord"] == math.inf:
        return _sum_of(low, node, groups, lambda x: low.make("abs", x), "max")
    if given["ord"] == 1:
        return _sum_of(low, node, groups, lambda x: low.make("abs", x))
    return low.make("sqrt", _sum_of(low, node, groups, lambda x: low.make("mul", x, x)))


@rule("var_mean", "std_mean", "var_mean.correction", "std_mean.correction", "var_mean.dim", "std_mean.dim", parted=True)
def _variance_and_mean(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    if not which:
        return _variance(low, node, groups)
    count = low.count(node.args[0], dims_of(node, node.args[0]))
    return low.make("div", _sum_of(low, node, groups, lambda x: x), low.number(float(count)))


@rule("var", "std", "var.correction", "std.correction", "var.dim", "std.dim")
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
    return low.make("sqrt", variance) if node.target.overloadpacket in (aten.std, aten.std_mean) else variance


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
    return _standardised(low, deviation(groups), variance, eps)


def _standardised(low: Lowering, deviation: Expression, variance: Expression, eps: float) -> Expression:
    """As PyTorch has it: times one reciprocal of what a row has one of."""
    root = low.make("sqrt", low.make("add", variance, low.number(float(eps))))
    return low.make("mul", deviation, low.make("div", low.number(1.0), root))


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
    x = _standardised(low, deviation(whole), variance, given["eps"])
    return _scaled(low, x, (groups[1],), given["weight"], given["bias"])


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
    x = _standardised(low, low.make("sub", x, mean), variance, given["eps"])
    return _scaled(low, x, channel, given["weight"], given["bias"])
