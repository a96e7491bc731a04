"""Writing to tensors of any strides: transposed, with gaps, repeated along a dim."""

import torch
from torch import Tensor

POOL = 4_000_037  # a prime, so that rows of any width are cut from it at ever new places


def distinct(x: Tensor) -> Tensor:
    """x without its repetitions along dims of stride 0: each element has a place of its own, and can be written to."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def write(view: Tensor, values: Tensor) -> None:
    """Copy `values`, of the shape of `view`, into it; where it repeats itself, the first of them."""
    view = distinct(view)
    view.copy_(values[tuple(slice(n) for n in view.shape)])


def copy_from_pool(values: Tensor, start: int, out: Tensor, factor: int | None = None) -> None:
    """Fill `out`, of any strides, with the pool's `values` from `start` on, in the order in which it lies in memory;
    with `factor`, with their products with those from there on. The pool may be there several times over: the longer it is,
    the fewer pieces are cut."""
    out = distinct(out)
    if not dense(out):
        out.copy_(cut_dense(values, start, torch.empty(out.shape, dtype=out.dtype, device=out.device), factor))
        return
    cut_dense(values, start, in_memory_order(out), factor)


def in_memory_order(x: Tensor) -> Tensor:
    """The elements of a dense x, one after the other as they lie in memory."""
    return x.permute(sorted(range(x.dim()), key=lambda d: -x.stride(d))).view(-1)


def cut_dense(values: Tensor, start: int, out: Tensor, factor: int | None = None) -> Tensor:
    flat, done = out.view(-1), 0
    while done < flat.numel():
        count = min(len(values) - max(start, factor or 0), flat.numel() - done)
        part = flat[done : done + count]
        if factor is None:
            part.copy_(values[start : start + count])
        else:
            torch.mul(values[start : start + count], values[factor : factor + count], out=part)
            factor = (factor + count) % POOL
        done, start = done + count, (start + count) % POOL
    return out


def dense(x: Tensor) -> bool:
    """Whether x is a permutation of a contiguous tensor: no gaps, no overlaps."""
    return x.permute(sorted(range(x.dim()), key=lambda d: -x.stride(d))).is_contiguous()
