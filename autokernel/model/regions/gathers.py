"""Operations that take elements from where integers say: embeddings, and indices of all kinds."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from autokernel.model.nodes import value
from autokernel.model.regions.expressions import BOOL, INT, Expression, Limit
from autokernel.model.regions.lowering import Groups, Lowering, Unsupported, choose, rule


def _gathered(
    low: Lowering, source: Node, groups: Groups, indices: Mapping[int, tuple[Node, Groups]], lowest: int = 0
) -> Expression:
    """The element of an input at `groups`, but along dims of `indices` where such a tensor's element says.

    lowest: how far below zero an index may count from the end, in the dim's sizes: 0 or -1.
    """
    t = value(source)
    if source not in low.inputs:
        raise Unsupported("what is computed would be computed once for each of its uses", source)
    groups = tuple(() if d in indices else g for d, g in enumerate(groups))
    guard, place, limits, last = low.inside(groups, t.shape), None, [], 0
    for dim, (index, theirs) in indices.items():
        n = t.shape[dim]
        at = low.element(index, theirs)
        if at.op != "load" or at.kind != INT or at.operands:
            raise Unsupported("an index that is not an input's integer", index)
        limits.append(Limit(at.data[0], lowest * n, n))
        last += (n - 1) * t.stride()[dim]
        if lowest:
            from_end = low.make("add", at, low.number(n), kind=INT)
            at = choose(low, low.make("lt", at, low.number(0), kind=BOOL), from_end, at, INT)
        step = low.make("mul", at, low.number(t.stride()[dim]), kind=INT)
        place = low.make("add", place, step, kind=INT) if place else step
    return low.load(source, groups, place, guard, (tuple(limits), last))


@rule("embedding")
def _embedding(low: Lowering, node: Node, groups: Groups) -> Expression:
    weight, index = node.args[:2]
    return _gathered(low, weight, ((), groups[-1]), {0: (index, groups[:-1])})


@rule("index_select")
def _index_select(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, dim, index = node.args
    if value(index).dim() != 1 or not groups:
        raise Unsupported("an index of no dim")
    return _gathered(low, source, groups, {dim % len(groups): (index, (groups[dim],))})


@rule("gather")
def _gather(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Along one dim; along the others the first elements, where the index has fewer."""
    source, dim, index = node.args[:3]
    if not groups:
        raise Unsupported("an index of no dim")
    sizes = value(source).shape
    there = tuple(low.shifted(g, 1, 0, n) for g, n in zip(groups, sizes))
    return _gathered(low, source, there, {dim % len(groups): (index, groups)})


@rule("index.Tensor")
def _index(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Of indices in dims next to each other, which are broadcast: in their place the result has their dims."""
    source, indices = node.args
    dims = [d for d, index in enumerate(indices) if index is not None]
    first, count = dims[0], len(dims)
    if dims != list(range(first, first + count)):
        raise Unsupported("indices in dims apart")
    shape: Sequence[int] = torch.broadcast_shapes(*(value(indices[d]).shape for d in dims))
    theirs = groups[first : first + len(shape)]
    there = (*groups[:first], *[()] * count, *groups[first + len(shape) :])
    each = {d: (indices[d], _broadcast(theirs, value(indices[d]).shape)) for d in dims}
    return _gathered(low, source, there, each, lowest=-1)


def _broadcast(groups: Groups, shape: Sequence[int]) -> Groups:
    return tuple(() if n == 1 else g for n, g in zip(shape, groups[len(groups) - len(shape) :]))
