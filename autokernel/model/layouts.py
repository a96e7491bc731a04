"""Operators of which PyTorch's fake tensors have other strides than real ones, traced with the strides of these."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
)
from torch.utils._pytree import tree_map_only

from autokernel.model.autocast import casts_inside
from autokernel.model.nodes import aten, strides_of

# Of tensors that are contiguous fake and real ones agree. Each of these keeps strides where the other makes them anew.
IN_DOUBT = (aten.batch_norm.default, aten.log_sigmoid.default, aten.roll.default, aten.channel_shuffle.default)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def operators_in_doubt() -> dict[Any, Callable[..., Any]]:
    """How to trace each of them; for one trace."""
    inside: list[Any] = []  # those that are being traced
    return {operator: partial(_in_real_strides, inside, operator) for operator in IN_DOUBT}


def _in_real_strides(inside: list[Any], operator: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The operator, then contiguous(): of the real result, which is so already, it makes nothing new."""
    if inside:
        return NotImplemented
    inside.append(operator)
    try:
        cast = casts_inside(operator, x, *args, **kwargs)
        if cast is not NotImplemented or x.is_contiguous():
            return cast
        result = operator(x, *args, **kwargs)
        real = _real_strides(operator, x, *args, **kwargs)
        if real == strides_of(result):
            return result
        for memory_format in FORMATS:
            if memory_format is torch.contiguous_format or result.dim() == (
                4 if memory_format is torch.channels_last else 5
            ):
                made = result.contiguous(memory_format=memory_format)
                if strides_of(made) == real:
                    return made
        return result
    finally:
        inside.pop()


def _real_strides(operator: Any, *args: Any, **kwargs: Any) -> list[int]:
    """Those of its result of real tensors like these, which are zeros: they depend on the device."""
    with _disable_current_modes(), torch.no_grad():
        like = partial(tree_map_only, Tensor, _zeros)
        return strides_of(operator(*like(args), **like(kwargs)))


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
