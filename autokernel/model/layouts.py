"""Operators of which PyTorch's fake tensors have other strides than real ones, traced with the strides of these."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from autokernel.model.autocast import casts_inside
from autokernel.model.nodes import aten, strides_of

# Of contiguous tensors real results lie as fake ones do. Of others, one of the two keeps strides, and the other does not.
POINTWISE = (  # of tensors in several layouts
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.heaviside.default,
    aten.huber_loss.default,
    aten.ldexp.Tensor,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.xlogy.Tensor,
)
IN_DOUBT = (
    *POINTWISE,
    aten.batch_norm.default,
    aten.channel_shuffle.default,
    aten.log_sigmoid.default,
    aten.max_unpool2d.default,
    aten.normal.Tensor_float,
    aten.normal.Tensor_Tensor,
    aten.roll.default,
    aten.rrelu.default,
)


def operators_in_doubt() -> dict[Any, Callable[..., Any]]:
    """How to trace each of them; for one trace."""
    inside: list[Any] = []  # what is being traced
    return {operator: partial(_in_real_strides, inside, operator) for operator in IN_DOUBT}


def _in_real_strides(inside: list[Any], operator: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The operator, and contiguous() of its dims as they lie: a real result stays as it is, a fake one has its strides."""
    if inside:
        return NotImplemented
    inside.append(operator)
    try:
        cast = casts_inside(operator, x, *args, **kwargs)
        given = [t for t in tree_leaves((x, args, kwargs)) if isinstance(t, Tensor)]
        if cast is not NotImplemented or not all(map(_can_be_made, given)) or all(t.is_contiguous() for t in given):
            return cast
        result = operator(x, *args, **kwargs)
    finally:
        inside.pop()
    real = _real_strides(operator, x, *args, **kwargs)
    if real == strides_of(result):
        return result
    several = [dim for dim, size in enumerate(result.shape) if size > 1]
    strides = dict(zip(several, real))
    order = [dim for dim in range(result.dim()) if dim not in strides] + sorted(several, key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(result.dim())]
    with _disable_current_modes():
        laid_out = torch.empty([result.shape[dim] for dim in order], device="meta").permute(back)
    if strides_of(laid_out) != real:
        return result
    return result.contiguous() if order == sorted(order) else result.permute(order).contiguous().permute(back)


def _can_be_made(x: Tensor) -> bool:
    """Whether there can be a real tensor like it here."""
    is_plain = type(x) is FakeTensor and x.layout is torch.strided and not x.is_nested
    return is_plain and (x.device.type == "cpu" or x.device.type == "cuda" and torch.cuda.is_available())


def _real_strides(operator: Any, *args: Any, **kwargs: Any) -> list[int]:
    """Those of its result of real tensors like these: they depend on the device."""
    with _disable_current_modes(), torch.no_grad():
        like = partial(tree_map_only, Tensor, _ones if operator in POINTWISE else _zeros)
        return strides_of(operator(*like(args), **like(kwargs)))


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()


def _ones(fake: Tensor) -> Tensor:
    """By which integers may be divided."""
    return _zeros(fake).fill_(1)
