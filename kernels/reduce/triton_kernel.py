"""Reduce in Triton: sum or max along any dim; where that leaves too few programs, in two stages.

The dim is cut into parts whose results (fp32) a second launch reduces in a fixed order, so that runs agree bitwise.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"
BACKEND = "triton"
TUNABLES = {
    "ROW_ELEMENTS": [2048, 4096, 8192, 16384],
    "BLOCK_N": [32, 64, 128],
    "BLOCK_LANES": [32, 64, 128],
    "NUM_WARPS": [2, 4, 8, 16],
    "WAVES": [1, 2, 4, 8],
}

ROW_ELEMENTS = 2048  # a tile where dim is contiguous: elements in all, of one row or of several narrow ones
BLOCK_N = 64  # a tile elsewhere: elements along dim
BLOCK_LANES = 64  # and beside each other
NUM_WARPS = 4
WAVES = 8  # programs a multiprocessor, below which dim is cut into parts


@triton.jit
def _reduce(
    x,
    y,
    lanes,
    N,
    part,
    stride_outer,
    stride_n,
    stride_lane,
    y_lane,
    MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    """y[outer, lane, p] from part p, `part` elements long, of x[outer, :, lane]; a program takes BLOCK_LANES lanes."""
    blocks = tl.cdiv(lanes, BLOCK_LANES)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.program_id(0) % blocks * BLOCK_LANES + tl.arange(0, BLOCK_LANES)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    first = tl.program_id(1).to(tl.int64) * part
    count = min(N - first, part).to(tl.int32)
    x += outer * stride_outer + first * stride_n + lane.to(tl.int64) * stride_lane
    empty = -float("inf") if MAX else 0.0
    result = tl.full((BLOCK_LANES, BLOCK_N), empty, tl.float32)
    for start in range(0, count, BLOCK_N):
        mask = (start + n < count) & (lane < lanes)
        values = tl.load(x + (start + n).to(tl.int64) * stride_n, mask, empty).to(tl.float32)
        if MAX:
            result = tl.maximum(result, values, propagate_nan=tl.PropagateNan.ALL)
        else:
            result += values
    if MAX:
        has_nan = tl.max((result != result).to(tl.int32), 1, keep_dims=True) > 0  # which tl.max may pass over
        result = tl.where(has_nan, float("nan"), tl.max(result, 1, keep_dims=True))
    else:
        result = tl.sum(result, 1, keep_dims=True)
    y += (outer * lanes + lane) * y_lane + tl.program_id(1)
    tl.store(y, result.to(y.dtype.element_ty), lane < lanes)


@cache
def _processors(device: int | None) -> int:
    """The GPU's multiprocessors; an H100's where there is no GPU."""
    return 132 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


def _launch(x: torch.Tensor, y: torch.Tensor, parts: int, op: str) -> None:
    """Reduce x [outer, N, lanes] in `parts` parts into y, contiguous [outer, lanes, parts]."""
    outer, N, lanes = x.shape
    stride_outer, stride_n, stride_lane = x.stride()
    if lanes == 1:  # rows, of which several may share a program
        outer, lanes, stride_outer, stride_lane = 1, outer, 0, stride_outer
    if stride_n == 1:
        block_n = min(1 << (N - 1).bit_length(), ROW_ELEMENTS)
        block_lanes = ROW_ELEMENTS // block_n
    else:
        block_n, block_lanes = BLOCK_N, BLOCK_LANES
    part = -(-N // (parts * block_n)) * block_n
    grid = (outer * -(-lanes // block_lanes), parts)
    _reduce[grid](
        x,
        y,
        lanes,
        N,
        part,
        stride_outer,
        stride_n,
        stride_lane,
        parts,
        MAX=op == "max",
        BLOCK_N=block_n,
        BLOCK_LANES=block_lanes,
        num_warps=NUM_WARPS,
    )


def kernel_fn(x: torch.Tensor, dim: int = -1, op: str = "sum") -> torch.Tensor:
    """x of any shape -> its sum or max along `dim`, without that dim, contiguous and in x's dtype."""
    dim %= x.dim()
    y = torch.empty(x.shape[:dim] + x.shape[dim + 1 :], dtype=x.dtype, device=x.device)
    outer, N, lanes = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    x = x.reshape(outer, N, lanes)
    wanted = WAVES * _processors(x.device.index)
    if x.stride(1) == 1:
        programs, least_part = -(-outer * lanes * min(N, ROW_ELEMENTS) // ROW_ELEMENTS), ROW_ELEMENTS
    else:
        programs, least_part = outer * -(-lanes // BLOCK_LANES), 4 * BLOCK_N
    parts = min(-(-wanted // max(programs, 1)), N // least_part)
    if parts <= 1:
        _launch(x, y, 1, op)
    else:
        partial = torch.empty((outer, lanes, parts), dtype=torch.float32, device=x.device)
        _launch(x, partial, parts, op)
        _launch(partial.view(-1, parts, 1), y, 1, op)
    return y
