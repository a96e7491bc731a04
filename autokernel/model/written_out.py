"""Operators that a trace would take apart otherwise than eager mode runs them, written out as it does."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_letters

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
)

from autokernel.model.autocast import casts_inside, of_autocast
from autokernel.model.nodes import aten, strides_of


def _einsum(equation: str, operands: Sequence[Tensor], path: Sequence[int] | None = None) -> Tensor:
    """An einsum written out, in PyTorch's own strides; where these have elements lie elsewhere, as it is."""
    cast = of_autocast(aten.einsum.default, equation, operands)
    if cast is not NotImplemented:
        return cast
    if len({t.dtype for t in operands}) > 1:
        return casts_inside(aten.einsum.default, equation, operands, path=path)
    return _in_its_strides(partial(aten.einsum.default, path=path), equation, operands, path)


def _tensordot(one: Tensor, other: Tensor, dims: Sequence[int], others_dims: Sequence[int]) -> Tensor:
    """As the einsum that it is."""
    cast = of_autocast(aten.tensordot.default, one, other, dims, others_dims)
    if cast is not NotImplemented:
        return cast
    left, right = list(ascii_letters[: one.dim()]), list(ascii_letters[one.dim() : one.dim() + other.dim()])
    for i, j in zip(dims, others_dims):
        right[j] = left[i]
    result = [c for c in (*left, *right) if (c in left) != (c in right)]
    letters = ["".join(letters) for letters in (left, right, result)]
    equation = "{},{}->{}".format(*letters)
    return _in_its_strides(lambda _, given: aten.tensordot.default(*given, dims, others_dims), equation, [one, other])


def _in_its_strides(
    operator: Callable[[str, Sequence[Tensor]], Tensor],
    equation: str,
    operands: Sequence[Tensor],
    path: Sequence[int] | None = None,
) -> Tensor:
    """See _written_out; NotImplemented where `operator` has elements lie elsewhere."""
    # Where there is but one of something, strides of fake tensors are no real one's.
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        without_memory = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in operands]
        expected = operator(equation, without_memory)
        made = [_written_out(equation, without_memory, path, turned) for turned in (False, True)]
    for turned, one in enumerate(made):
        if one is not NotImplemented and strides_of(one) == strides_of(expected):
            result = _written_out(equation, operands, path, bool(turned))
            return result if one.stride() == expected.stride() else result.as_strided(expected.shape, expected.stride())
    return NotImplemented


@dataclass(frozen=True)
class Named:
    """An operand of an einsum: the tensor, and a letter for each of its dims, in any order."""

    tensor: Tensor
    letters: tuple[str, ...]

    def size(self, letter: str) -> int:
        return self.tensor.shape[self.letters.index(letter)]

    def summed(self, letters: Collection[str], order: Sequence[str]) -> "Named":
        """Without `letters`, over which it is added up, in `order` as PyTorch does: the result's strides are of that."""
        if not letters:
            return self
        names = [c for c in order if c in self.letters]
        summed = _in_order(self.tensor, self.letters, names).sum([names.index(c) for c in names if c in letters])
        return Named(summed, tuple(c for c in names if c not in letters))

    def among(self, order: Sequence[str]) -> Tensor:
        """Its dims in `order`, with 1 for each that it has not."""
        t = _in_order(self.tensor, self.letters, [c for c in order if c in self.letters])
        for i, c in enumerate(order):
            t = t if c in self.letters else t.unsqueeze(i)
        return t


def _written_out(equation: str, operands: Sequence[Tensor], path: Sequence[int] | None, turned: bool) -> Tensor:
    """An einsum as PyTorch computes it, of two operands at a time: products of matrices, of batches of them, or of single
    elements. NotImplemented where there are no elements, and of ellipses that are summed over.

    turned: of the second operand and the first, as PyTorch has it where the result lies in that order.
    """
    read = _read(equation, [t.dim() for t in operands])
    if read is None or not all(t.numel() for t in operands):
        return NotImplemented
    letters, result = read
    left = [_without_repeated(Named(t, names)) for t, names in zip(operands, letters)]
    order = [*result, *sorted({c for names in letters for c in names} - set(result))]
    sizes = {c: max(one.size(c) for one in left if c in one.letters) for c in order}
    if len(left) == 1:
        one = left[0].summed({*order} - {*result}, order)
        return one.tensor.permute([one.letters.index(c) for c in result])  # a view, where nothing is summed
    left = [_without_single(one, sizes, result) for one in left]
    steps = iter(path or ())
    while len(left) > 1:
        i, j = sorted((next(steps), next(steps))) if path else (0, 1)
        a, b = left[i], left[j]
        left = [one for k, one in enumerate(left) if k not in (i, j)]
        needed = {*result, *(c for one in left for c in one.letters)}
        kept = [c for c in order if c in needed and c in (*a.letters, *b.letters)]
        a, b = (one.summed({*one.letters} - needed - {*other.letters}, order) for one, other in ((a, b), (b, a)))
        product = Named(_product(a, b, kept, turned), tuple(kept))
        left = [*left, product] if path else [product, *left]
    return left[0].among(result)


def _read(equation: str, ranks: Sequence[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]] | None:
    """The letters of each operand and of the result, with letters for the dims of ellipses; None where such are summed."""
    names, arrow, result = equation.replace(" ", "").partition("->")
    letters = names.split(",")
    if not arrow:
        once = sorted(c for c in set(names) - {*",."} if names.count(c) == 1)
        result = "".join(["..." if "..." in names else "", *once])
    if "..." in result:
        unused = "".join(c for c in ascii_letters if c not in equation)
        rests = [rank - len(name.replace("...", "")) if "..." in name else 0 for name, rank in zip(letters, ranks)]
        letters = [name.replace("...", unused[:n][::-1]) for name, n in zip(letters, rests)]  # their last dims are the same
        result = result.replace("...", unused[: max(rests)][::-1])
    is_clear = "." not in "".join(letters)
    return ([*map(tuple, letters)], tuple(result)) if is_clear else None


def _without_repeated(one: Named) -> Named:
    """With the diagonal of dims that have one letter."""
    t, letters = one.tensor, list(one.letters)
    for i, c in reversed([*enumerate(letters)]):
        if (first := letters.index(c)) < i:
            t = t.diagonal(0, first, i).movedim(-1, first)
            del letters[i]
    return Named(t, tuple(letters))


def _without_single(one: Named, sizes: Mapping[str, int], result: Sequence[str]) -> Named:
    """Without the dims of which it has one, where another operand has more, or the result none."""
    gone = [i for i, c in enumerate(one.letters) if one.tensor.shape[i] == 1 and (sizes[c] > 1 or c not in result)]
    letters = tuple(c for i, c in enumerate(one.letters) if i not in gone)
    return Named(one.tensor.squeeze(gone), letters) if gone else one


def _product(one: Named, other: Named, result: Sequence[str], turned: bool) -> Tensor:
    """Of two operands, neither of which alone has a dim that `result` has not."""
    left, right = (other, one) if turned else (one, other)
    shared = [c for c in left.letters if c in right.letters]
    batch, summed = [c for c in result if c in shared], sorted(c for c in shared if c not in result)
    if not summed:
        return torch.mul(one.among(result), other.among(result))
    rows, columns = ([c for c in result if c in side.letters and c not in shared] for side in (left, right))
    a, b = left.tensor, right.tensor
    takes_rows = bool(rows) and not batch and len(summed) == 1  # matmul() takes any number of rows
    a = _in_order(a, left.letters, batch + rows + summed)
    a = a if takes_rows else _as_matrices(a, len(batch), len(rows))
    inner = [c for c in right.letters if c not in batch]  # summed and free, in either order
    if inner[0] in summed:
        b = _as_matrices(_in_order(b, right.letters, batch + summed + columns), len(batch), len(summed))
    else:
        b = _as_matrices(_in_order(b, right.letters, batch + columns + summed), len(batch), len(columns)).transpose(-2, -1)
    product = _as_dims(torch.matmul(a, b), -1, [right.size(c) for c in columns])
    product = product if takes_rows else _as_dims(product, len(batch), [left.size(c) for c in rows])
    return _in_order(product, [*batch, *rows, *columns], list(result))


def _as_matrices(t: Tensor, batch: int, rows: int) -> Tensor:
    """Of so many dims of a batch, then of rows, then others: the rows as one dim, the others as one."""
    t = t.flatten(batch, batch + rows - 1) if rows > 1 else t if rows else t.unsqueeze(batch)
    others = t.dim() - batch - 1
    return t.flatten(batch + 1) if others > 1 else t if others else t.unsqueeze(-1)


def _as_dims(t: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Its dim `dim` as those of `sizes`, of which there may be none."""
    return t.unflatten(dim, sizes) if len(sizes) > 1 else t if sizes else t.squeeze(dim)


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
    aten.tensordot.default: _tensordot,
    aten.triplet_margin_loss.default: _triplet_margin_loss,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten.dropout.default: _dropout,
}


def _in_order(t: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """t's dims, called `names`, in the order `wanted`."""
    moved = [i for i, (name, other) in enumerate(zip(names, wanted)) if name != other]
    if len(moved) == 2:
        return t.transpose(*moved)
    return t.permute([names.index(name) for name in wanted]) if moved else t
