"""Convolutions whose windows lie side by side, as where pictures become patches: each window is a row of a product."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
SIDES = {"first": 7, "second": 11, "third": 13}  # of a window in a pattern's example, by the names of its numbers
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def sizes_of(dims: int) -> Mapping[str, Any]:
    """A pattern's inputs, of windows in so many dims."""
    sides = dict(list(SIDES.items())[:dims])
    return {"x": (2, 3, *(2 * side for side in sides.values())), "weight": (5, 3, *sides.values()), **sides}


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, sides: Mapping[str, int]) -> Tensor:
    """As models write it."""
    return CONVOLUTIONS[len(sides) - 1](x, weight, bias, stride=list(sides.values()))


def rows_of(x: Tensor, sides: Mapping[str, int]) -> Tensor:
    """The windows of x [batch, channels, *sizes] -> [batch, *windows, channels * elements of a window]."""
    dims = len(sides)
    for dim, side in reversed(list(enumerate(sides.values(), start=2))):
        x = x.unflatten(dim, (-1, side))
    places = range(2, 2 + 2 * dims)
    return x.permute(0, *places[::2], 1, *places[1::2]).flatten(1 + dims)


def as_convolved(y: Tensor) -> Tensor:
    """[batch, *windows, channels] -> [batch, channels, *windows]."""
    return y.movedim(-1, 1)


def are_side_by_side(x: Tensor, weight: Tensor, sides: Mapping[str, int]) -> bool:
    """Whether the windows are all of x. Those of one element only where they are rows in memory as they are."""
    sizes = tuple(sides.values())
    if x.dim() != len(sizes) + 2 or weight.shape[1] != x.shape[1] or tuple(weight.shape[2:]) != sizes:
        return False
    if set(sizes) == {1}:
        return x.dim() in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    return all(size % side == 0 for size, side in zip(x.shape[2:], sizes))
