"""Contents for a case's tensors: fresh random numbers in several distributions and layouts."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autokernel.spec import Case, KernelSpec, TensorSpec

POOL = 4_000_037  # a prime, so that rows of any width are cut from it at ever new places


def _rows(x: Tensor, generator: torch.Generator) -> Tensor:
    """One random number in [0, 1) per row (all dims but the last)."""
    return torch.rand((*x.shape[:-1], 1), generator=generator)


def _dominant_tail(x: Tensor, generator: torch.Generator) -> Tensor:
    """The last eighth of every row carries nearly all of it: work skipped there shows."""
    tail = max(x.shape[-1] // 8, 1)
    return torch.cat((x[..., :-tail] * 0.05, x[..., -tail:] * 3), -1)


# name -> (values drawn from N(0, 1), generator) -> values. Magnitudes stay where fp16 sums of thousands do not overflow.
DISTRIBUTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda x, g: x,
    "shifted": lambda x, g: 0.5 * x + 2,
    "small": lambda x, g: 0.02 * x,
    "ragged": lambda x, g: x * 10 ** (2 * _rows(x, g) - 1.5),  # rows from 0.03 to 3
    "dominant_tail": _dominant_tail,
    "uniform": lambda x, g: torch.rand(x.shape, generator=g) * 4 - 2,
}


def fill_inputs(spec: KernelSpec, case: Case, seed: int, distribution: str = "normal") -> dict[str, Any]:
    """Contiguous CPU tensors (and plain values) for every argument of `case`, from `seed` alone.

    Inputs that the spec declares static (weights) are drawn as 1 + N(0, 1)/2 for vectors: neither ones nor zeros, so that
    a kernel that ignores them fails. `distribution` shapes the other floating-point inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for name, value in case.args.items():
        if not isinstance(value, TensorSpec):
            inputs[name] = value
        elif name in spec.fill:
            inputs[name] = spec.fill[name](value, case.args, generator).to(value.dtype)
        else:
            x = torch.randn(value.shape, generator=generator)
            if name in spec.static:
                x = 1 + x / 2 if x.dim() == 1 else x / math.sqrt(x.shape[-1])
            elif x.dim() > 0 and x.numel() > 0:
                x = DISTRIBUTIONS[distribution](x, generator)
            inputs[name] = x.to(value.dtype)
    return inputs


class Pool:
    """Random numbers for large timed inputs, drawn once per seed and cut at random places: as fast as a copy."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.normal = torch.randn(POOL, generator=self.generator)
        self._cast = {torch.float32: self.normal}

    def values(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._cast:
            self._cast[dtype] = self.normal.to(dtype)
        return self._cast[dtype]

    def place(self) -> int:
        """Where in the pool the next tensor is cut."""
        return int(torch.randint(POOL, (), generator=self.generator))


def cut(values: Tensor, start: int, out: Tensor) -> None:
    """Fill `out`, of any strides, with the pool's `values` from `start` on, in the order in which it lies in memory."""
    if not dense(out):
        out.copy_(cut_dense(values, start, torch.empty(out.shape, dtype=out.dtype, device=out.device)))
        return
    cut_dense(values, start, out.permute(sorted(range(out.dim()), key=lambda d: -out.stride(d))))


def cut_dense(values: Tensor, start: int, out: Tensor) -> Tensor:
    flat, done = out.view(-1), 0
    while done < flat.numel():
        count = min(POOL - start, flat.numel() - done)
        flat[done : done + count] = values[start : start + count]
        done, start = done + count, 0
    return out


def changing(spec: KernelSpec, case: Case) -> list[str]:
    """The inputs that are new in every timed batch: all but weights and what has contents of a special kind."""
    return [name for name in case.tensors if name not in spec.static and name not in spec.fill]


def fill_fixed(spec: KernelSpec, case: Case, views: dict[str, Tensor], pool: Pool) -> None:
    """Contents for the other inputs of one timed set, written through `views`."""
    for name, view in views.items():
        if name in spec.fill:
            view.copy_(spec.fill[name](case.args[name], case.args, pool.generator).to(view.dtype))
            continue
        cut(pool.values(view.dtype), pool.place(), view)
        if view.dim() > 1:
            view.mul_(view.shape[-1] ** -0.5)  # weights as networks have them: sums stay in fp16's range


def dense(x: Tensor) -> bool:
    """Whether x is a permutation of a contiguous tensor: no gaps, no overlaps."""
    return x.permute(sorted(range(x.dim()), key=lambda d: -x.stride(d))).is_contiguous()


def transposed(tensor: TensorSpec) -> TensorSpec:
    """The same shape with the last two dims stored the other way round."""
    *lead, rows, columns = tensor.shape
    strides = TensorSpec((*lead, columns, rows), tensor.dtype).strides
    return replace(tensor, stride=(*strides[:-2], strides[-1], strides[-2]))


def padded(tensor: TensorSpec) -> TensorSpec:
    """A slice of a wider tensor, starting at an odd element: gaps between rows, unaligned base."""
    *lead, columns = tensor.shape
    strides = TensorSpec((*lead, columns + 3), tensor.dtype).strides
    return replace(tensor, stride=strides, offset=1)


LAYOUTS: dict[str, Callable[[TensorSpec], TensorSpec]] = {"transposed": transposed, "sliced": padded}


def with_layout(case: Case, layout: str) -> Case:
    """`case` with every tensor of two or more dims (and vectors, if sliced) in the given layout."""
    least = 2 if layout == "transposed" else 1
    args = {
        k: LAYOUTS[layout](v) if isinstance(v, TensorSpec) and len(v.shape) >= least else v for k, v in case.args.items()
    }
    return Case(f"{case.name} {layout}", args)
