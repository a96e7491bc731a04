"""Operations along rows beside plain sums: which element is the largest, and sums and products of all up to an element."""

import math

import torch
from torch.fx import Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.expressions import BOOL, FLOAT, INT, Expression
from autokernel.model.regions.lowering import Groups, Lowering, Shifted, Unsupported, arguments, choose, kind_of, rule
from autokernel.model.regions.reductions import dims_of, one_per_row
from autokernel.model.regions.spec import PICKING


def _place_of(low: Lowering, node: Node, groups: Groups, largest: bool) -> Expression:
    """The first place of the largest or least element, or of the first NaN: the least of the places that have it."""
    source, keepdim, dims = node.args[0], arguments(node)["keepdim"], dims_of(node, node.args[0])
    shape = value(source).shape
    if kind_of(value(source).dtype, node) != FLOAT or not shape:
        raise Unsupported("the place of an integer")
    if not _is_picked(low, source):
        raise Unsupported("a place that roundings decide")
    one, dims = one_per_row(groups, source, dims, keepdim), sorted(d % len(shape) for d in dims)
    peak = low.reduce(f"reduce_{'max' if largest else 'min'}", source, one, dims, True, lambda g: low.element(source, g))

    def place(g: Groups) -> Expression:
        x, none = low.element(source, g), low.number(low.count(source, dims))
        is_there = low.make("or", low.make("eq", x, peak, kind=BOOL), low.make("ne", x, x, kind=BOOL), kind=BOOL)
        return choose(low, is_there, low.index(tuple(g[d] for d in dims), [shape[d] for d in dims]), none, INT)

    return low.reduce("reduce_min_int", source, one, dims, True, place)


def _is_picked(low: Lowering, node: Node) -> bool:
    """Whether it is made of the inputs' numbers as they are."""
    packet = getattr(node.target, "overloadpacket", None)
    return node in low.inputs or packet in PICKING and all(_is_picked(low, n) for n in node.all_input_nodes)


@rule("argmax", "argmin")
def _argument(low: Lowering, node: Node, groups: Groups) -> Expression:
    return _place_of(low, node, groups, node.target is aten.argmax.default)


@rule("max.dim", "min.dim", parted=True)
def _extreme(low: Lowering, node: Node, groups: Groups, which: int) -> Expression:
    """The element, or its place."""
    source, dim, keepdim = node.args[0], arguments(node)["dim"], arguments(node)["keepdim"]
    if kind_of(value(source).dtype, node) != FLOAT or not value(source).dim():
        raise Unsupported("a reduction of integers")
    largest = node.target is aten.max.dim
    if which == 1:
        return _place_of(low, node, groups, largest)
    return low.reduce(
        f"reduce_{'max' if largest else 'min'}", source, groups, [dim], keepdim, lambda g: low.element(source, g)
    )


@rule("cumsum", "cumprod")
def _scan(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Up to each index of the row, in which the dim may run backwards, and may begin before its first element."""
    given = arguments(node)
    source, dim = given["self"], given["dim"]
    if given["dtype"] not in (None, torch.float32, value(source).dtype) or not value(source).dim():
        raise Unsupported("a sum in another dtype")
    if kind_of(value(source).dtype, node) != FLOAT:
        raise Unsupported("a reduction of integers")
    group = groups[dim]
    if not group:
        if isinstance(group, Shifted) and group.start and value(source).shape[dim] > 1:
            raise Unsupported("a sum up to one place of its row")
        return low.element(source, groups)
    if list(group) != sorted(group):
        raise Unsupported("a row in another order than its dims")
    backwards = isinstance(group, Shifted) and group.step < 0
    if isinstance(group, Shifted) and not _begins(low, group, backwards):
        raise Unsupported("a sum that begins before the row")
    is_sum = node.target is aten.cumsum.default
    low.along_rows(tuple(group))
    low.in_order(backwards)
    inside = low.inside((group,), (value(source).shape[dim],))
    term = choose(low, inside, low.element(source, groups), low.number(0.0 if is_sum else 1.0), FLOAT)
    name = "scan_sum" if is_sum else "scan_prod"
    return low.make(name, term, data=backwards, dims={d for g in groups for d in g})


def _begins(low: Lowering, group: Shifted, backwards: bool) -> bool:
    """Whether the row has the first element, and those after it one by one."""
    last = math.prod(low.sizes[d] for d in group) - 1
    return abs(group.step) == 1 and (group.start - last if backwards else group.start) <= 0
