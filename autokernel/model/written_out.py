"""Operators that a trace would take apart otherwise than eager mode runs them, written out as it does."""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
)

from autokernel.model.autocast import casts_inside, of_autocast
from autokernel.model.nodes import aten, strides_of


def _einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Tensor:
    """See _as_product, in PyTorch's own strides; where these have elements lie elsewhere, as it is."""
    if path is not None:
        return NotImplemented
    cast = of_autocast(aten.einsum.default, equation, operands)
    if cast is not NotImplemented:
        return cast
    if len({t.dtype for t in operands}) > 1:
        return casts_inside(aten.einsum.default, equation, operands)
    # Where there is but one of something, strides of fake tensors are no real one's.
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        without_memory = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in operands]
        expected = torch.einsum(equation, without_memory)
        products = [_as_product(equation, without_memory, turned) for turned in (False, True)]
    for turned, product in enumerate(products):
        if product is not NotImplemented and strides_of(product) == strides_of(expected):
            result = _as_product(equation, operands, bool(turned))
            return result if product.stride() == expected.stride() else result.as_strided(expected.shape, expected.stride())
    return NotImplemented


def _as_product(equation: str, operands: Sequence[Tensor], turned: bool) -> Tensor:
    """An einsum that is a product of matrices, or of batches of them, written as one; NotImplemented of any other.

    turned: of the second operand and the first, as PyTorch has it where the result lies in that order.
    """
    names, _, result = equation.replace(" ", "").partition("->")
    letters = names.split(",")
    if "..." in result:
        unused = "".join(c for c in ascii_letters if c not in equation)
        rests = [t.dim() - len(name.replace("...", "")) if "..." in name else 0 for name, t in zip(letters, operands)]
        letters = [name.replace("...", unused[:n][::-1]) for name, n in zip(letters, rests)]  # their last dims are the same
        result = result.replace("...", unused[: max(rests)][::-1])
    if len(letters) != 2 or any("." in name or len(set(name)) < len(name) for name in letters):
        return NotImplemented
    left, right = map(list, letters[::-1] if turned else letters)
    a, b = operands[::-1] if turned else operands
    shared = [c for c in left if c in right]
    batch, summed = [c for c in shared if c in result], sorted(c for c in shared if c not in result)
    rows, columns = ([c for c in result if c in one and c not in shared] for one in (left, right))
    sizes_agree = all(a.shape[left.index(c)] == b.shape[right.index(c)] for c in shared)
    is_all = sorted(result) == sorted([*batch, *rows, *columns]) and set(result) | set(shared) == {*left, *right}
    if not (sizes_agree and is_all and rows and columns and summed):
        return NotImplemented
    if not batch and len(summed) == 1:
        a, row_sizes = _in_order(a, left, rows + summed), []  # matmul() takes any number of rows
    else:
        row_sizes = [a.shape[left.index(c)] for c in rows]
        a = _as_matrices(_in_order(a, left, batch + rows + summed), len(batch), len(rows))
    column_sizes = [b.shape[right.index(c)] for c in columns]
    inner = [c for c in right if c not in batch]  # summed and free, in either order
    if inner[0] in summed:
        b = _as_matrices(_in_order(b, right, batch + summed + columns), len(batch), len(summed))
    else:
        b = _as_matrices(_in_order(b, right, batch + columns + summed), len(batch), len(columns)).transpose(-2, -1)
    product = torch.matmul(a, b)
    product = product.unflatten(-1, column_sizes) if len(column_sizes) > 1 else product
    product = product.unflatten(len(batch), row_sizes) if len(row_sizes) > 1 else product
    return _in_order(product, [*batch, *rows, *columns], list(result))


def _as_matrices(t: Tensor, batch: int, rows: int) -> Tensor:
    """Of so many dims of a batch, then of rows, then others: the rows as one dim, the others as one."""
    t = t.flatten(batch, batch + rows - 1) if rows > 1 else t
    return t.flatten(batch + 1) if t.dim() > batch + 2 else t


def _encoder_layer(
    x: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """nn.TransformerEncoderLayer's fast path, one operator of PyTorch's for inference, as its documentation defines it.

    mask: what is not 0 hides a key, [seq, seq] (mask_type 0), [batch, seq] (1) or [batch, heads, seq, seq] (2). A query
    without any key is NaN, as it is there.
    """
    if x.is_nested:
        return NotImplemented
    hidden = None if mask is None else mask.to(torch.bool)
    hidden = hidden[:, None, None, :] if mask_type == 1 else hidden

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if hidden is None:
            return F.scaled_dot_product_attention(q, k, v)
        scores = (q @ k.transpose(-2, -1)) * (embed_dim // num_heads) ** -0.5
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def attention(x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
        return F.linear(mixed(q, k, v).transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attention(norm_1(x))
        return x + feed_forward(norm_2(x))
    x = norm_1(x + attention(x))
    return norm_2(x + feed_forward(x))


# What hides operations for which there are kernels inside one of its own.
def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Outside of training its input itself, as in eager mode: of a fake tensor PyTorch makes a copy."""
    return NotImplemented if train else x


def _triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Tensor:
    """As its documentation defines it."""
    if len({anchor.dim(), positive.dim(), negative.dim()}) > 1:
        return NotImplemented
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    losses = torch.clamp_min(margin + near - far, 0)
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


WRITTEN_OUT = {
    aten.einsum.default: _einsum,
    aten.triplet_margin_loss.default: _triplet_margin_loss,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten.dropout.default: _dropout,
}


def _in_order(t: Tensor, names: list[str], wanted: list[str]) -> Tensor:
    """t's dims, called `names`, in the order `wanted`."""
    moved = [i for i, (name, other) in enumerate(zip(names, wanted)) if name != other]
    if len(moved) == 2:
        return t.transpose(*moved)
    return t.permute([names.index(name) for name in wanted]) if moved else t
