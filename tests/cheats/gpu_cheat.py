"""What a cheat for a GPU is, a right RMSNorm to make it of, and words that the gate says of several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cheat import Cheat


@dataclass(frozen=True)
class GpuCheat(Cheat):
    """`checked`: the dims on which the naive gate compares outputs (it times the target's)."""

    dtype: str = "float16"
    checked: Mapping[str, Any] | None = None


# A right RMSNorm, small enough to read: run(x, weight, eps, y) launches it on the current stream.
RMSNORM = """
import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


@triton.jit
def _row(x, weight, y, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, columns < N, 0.0).to(tl.float32)
    weights = tl.load(weight + columns, columns < N, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / N + eps)
    tl.store(y + row * N + columns, (values * scale * weights).to(y.dtype.element_ty), STORED)


def empty(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def run(x, weight, eps, y):
    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]
    _row[(x.numel() // N,)](x, weight, y, N, N, eps, BLOCK=triton.next_power_of_2(N), num_warps=8)
    return y
"""


def rmsnorm(body: str, stored: str = "columns < N") -> str:
    """`stored`: the mask with which a row's result is written."""
    return RMSNORM.replace("STORED", stored) + "\n\n" + body.strip() + "\n"


TIMED = "the output of a timed call"
STALE, NOT_WRITTEN = "outside the tolerance", "NaN mask differs"
EARLIER = "memory of an earlier call's result"
FORGED = "the worker's answer is not what was asked for"
LIBRARY = "does the work, not the kernel"
