"""Enlarged images: each element several times, elements between elements, channels that become places and back."""

from typing import Any

from torch.fx import Node

from autokernel.model.nodes import value
from autokernel.model.regions.expressions import BOOL, FLOAT, Expression
from autokernel.model.regions.lowering import Groups, Lowering, Unsupported, arguments, choose, plain, rule
from autokernel.model.regions.windows import is_costly, of_one, shifted_along


def _factor(n: int, made: int, given: float | None) -> int:
    """How many times each element is there; given: as the operator was told."""
    if made % n or given not in (None, made // n):
        raise Unsupported("an enlargement by no whole number")
    return made // n


def _factors(node: Node) -> list[int]:
    given = arguments(node)
    source = value(given["input"])
    factors = given["scale_factors"] or [None] * (source.dim() - 2)
    return list(map(_factor, source.shape[2:], value(node).shape[2:], factors))


NEAREST = [f"{name}{rank}d.vec" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)]


@rule(*NEAREST)
def _enlarged(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Each element several times, where that is so many times for all."""
    source = node.args[0]
    spread = list(groups[:2])
    for n, factor, group in zip(value(source).shape[2:], _factors(node), groups[2:]):
        spread.append(group if factor == 1 else low.split(group, (n, factor))[0])
    return low.element(source, of_one(tuple(spread), source))


@rule("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _interpolated(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Between an element and the one next to it, dim by dim: at (i + 1/2) / factor - 1/2, but not beyond the ends."""
    given, source = arguments(node), node.args[0]
    if given["align_corners"]:
        raise Unsupported("an enlargement whose elements lie at fractions of all kinds")
    split = []
    for n, factor, group in zip(value(source).shape[2:], _factors(node), groups[2:]):
        split.append((group, ()) if factor == 1 else low.split(group, (n, factor)))

    def along(dim: int, there: Groups) -> Expression:
        if dim == len(groups):
            found = low.as_float(low.element(source, of_one(there, source)))
            if is_costly(found):
                raise Unsupported("what is between elements would compute each of them several times", source)
            return found
        own, inner = split[dim - 2]
        factor = value(node).shape[dim] // value(source).shape[dim]
        if factor == 1:
            return along(dim + 1, there)
        return _between(low, along, (*there[:dim], own, *there[dim + 1 :]), dim, low.index((inner,), (factor,)), factor)

    def _between(low: Lowering, along: Any, there: Groups, dim: int, part: Expression, factor: int) -> Expression:
        middle = along(dim + 1, there)
        before, after = (_beside(low, along, there, dim, step, middle) for step in (-1, 1))
        whole = low.make("div", low.make("add", low.as_float(part), low.number(0.5)), low.number(float(factor)))
        off = low.make("sub", whole, low.number(0.5))
        other = choose(low, low.make("lt", off, low.number(0.0), kind=BOOL), before, after, FLOAT)
        weight = low.make("abs", off)
        own = low.make("mul", low.make("sub", low.number(1.0), weight), middle)
        return low.make("add", own, low.make("mul", weight, other))

    def _beside(low: Lowering, along: Any, there: Groups, dim: int, step: int, middle: Expression) -> Expression:
        moved = shifted_along(low, source, there, dim, 1, step)
        inside = low.inside((moved[dim],), (value(source).shape[dim],))
        return choose(low, inside, along(dim + 1, moved), middle, FLOAT)

    return along(2, groups)


@rule("pixel_shuffle")
def _pixels_of_channels(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, factor = node.args
    *batch, channel, height, width = plain(groups)
    *_, h, w = value(source).shape
    (row, below), (column, beside) = low.split(height, (h, factor)), low.split(width, (w, factor))
    return low.element(source, (*batch, (*channel, *below, *beside), row, column))


@rule("pixel_unshuffle")
def _channels_of_pixels(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, factor = node.args
    *batch, channels, height, width = plain(groups)
    channel, below, beside = low.split(channels, (value(source).shape[-3], factor, factor))
    return low.element(source, (*batch, channel, (*height, *below), (*width, *beside)))


@rule("channel_shuffle")
def _channels_dealt_out(low: Lowering, node: Node, groups: Groups) -> Expression:
    source, count = node.args
    of_group, group = low.split(plain(groups)[1], (value(source).shape[1] // count, count))
    return low.element(source, (groups[0], (*group, *of_group), *groups[2:]))
