"""Operators of which PyTorch's fake tensors have other strides than real ones, traced with the strides of these."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from autokernel.model.autocast import casts_inside
from autokernel.model.nodes import aten, strides_of

# Of contiguous tensors real results lie as fake ones do. Of others, one of the two keeps strides, and the other does not.
IN_DOUBT = (
    aten.batch_norm.default,
    aten.channel_shuffle.default,
    aten.log_sigmoid.default,
    aten.max_unpool2d.default,
    aten.normal.Tensor_float,
    aten.normal.Tensor_Tensor,
    aten.roll.default,
    aten.rrelu.default,
)
FORMATS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}  # beside rows, by dims


def operators_in_doubt() -> dict[Any, Callable[..., Any]]:
    """How to trace each of them; for one trace."""
    inside: list[Any] = []  # what is being traced
    return {operator: partial(_in_real_strides, inside, operator) for operator in IN_DOUBT}


def _in_real_strides(inside: list[Any], operator: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The operator, and contiguous(), which returns a real result as it is and gives a fake one its strides."""
    if inside:
        return NotImplemented
    inside.append(operator)
    try:
        cast = casts_inside(operator, x, *args, **kwargs)
        if cast is not NotImplemented or not _can_be_made(x) or x.is_contiguous():
            return cast
        result = operator(x, *args, **kwargs)
    finally:
        inside.pop()
    real = _real_strides(operator, x, *args, **kwargs)
    if real != strides_of(result):
        for memory_format in (torch.contiguous_format, *FORMATS.get(result.dim(), ())):
            if strides_of(torch.empty(result.shape, device="meta", memory_format=memory_format)) == real:
                return result.contiguous(memory_format=memory_format)
    return result


def _can_be_made(x: Tensor) -> bool:
    """Whether there can be a real tensor like it here."""
    is_plain = type(x) is FakeTensor and x.layout is torch.strided and not x.is_nested
    return is_plain and (x.device.type == "cpu" or x.device.type == "cuda" and torch.cuda.is_available())


def _real_strides(operator: Any, *args: Any, **kwargs: Any) -> list[int]:
    """Those of its result of real tensors like these: they depend on the device."""
    with _disable_current_modes(), torch.no_grad():
        like = partial(tree_map_only, Tensor, _zeros)
        return strides_of(operator(*like(args), **like(kwargs)))


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
