"""Softmax in Triton: rows held in registers; longer rows and other dims in two passes, the second of them from L2.

Rows of 50257 take 1.3 times as long as in CUDA C++ (H200), which keeps them in shared memory between the passes: Triton
gives no way to place a row there.
"""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
TUNABLES = {
    "NUM_WARPS": [0, 1, 2, 4, 8, 16],
    "PROGRAM_ELEMENTS": [1024, 2048, 4096, 8192],
    "HELD": [8192, 16384, 32768],
    "ONLINE_WARPS": [4, 8, 16, 32],
    "ONLINE_UNROLL": [16, 32, 64],
    "BLOCK_N": [16, 32, 64, 128],
    "BLOCK_LANES": [16, 32, 64, 128],
}

NUM_WARPS = 0  # of a program that holds its rows; 0: by row width
PROGRAM_ELEMENTS = 2048  # narrower rows share a program
HELD = 16384  # longer rows are read twice
ONLINE_WARPS = 32  # of 32 threads
ONLINE_UNROLL = 16  # elements of a longer row that a thread takes at a time
BLOCK_N = 64  # a tile where dim is not contiguous: elements along dim
BLOCK_LANES = 32  # and beside each other


@triton.jit
def _held(x, y, stride, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (columns < N)
    rows = rows.to(tl.int64)
    values = tl.load(x + rows * stride + columns, mask, -float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 1)[:, None])
    scale = 1 / tl.sum(tl.where(columns < N, powers, 0.0), 1)
    tl.store(y + rows * N + columns, (powers * scale[:, None]).to(y.dtype.element_ty), mask)


@triton.jit
def _online(x, y, stride, N, PEEL: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, VECTOR: tl.constexpr):
    """A program a row. Each lane (thread) keeps a maximum and a sum of its own; lanes meet only at the row's end.

    PEEL: rows start at any element of a tensor that is aligned to 16 bytes. The whole vectors within a row are read and
    written as such; what is before and after them, fewer elements than a vector has, by itself.
    """
    STEP: tl.constexpr = UNROLL * LANES * VECTOR
    row = tl.program_id(0).to(tl.int64)
    x_start, y_start, first, end = row * stride, row * N, 0, N
    if PEEL:  # stride == N
        first = (x_start % VECTOR).to(tl.int32)
        end = N + first
        x_start = x_start // VECTOR * VECTOR
        y_start = x_start
    x += x_start
    y += y_start
    whole_first = tl.cdiv(first, VECTOR) * VECTOR
    whole_end = end // VECTOR * VECTOR
    offsets = tl.arange(0, UNROLL)[:, None, None] * (LANES * VECTOR)
    offsets += tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    peak = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(whole_first, whole_end, STEP):
        at = start + offsets
        values = tl.load(x + at, at < whole_end, -float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(tl.max(values, 2), 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # not yet anything but -Inf
        powers = tl.exp(values - base[None, :, None])
        total = total * tl.exp(peak - base) + tl.sum(tl.sum(powers, 2), 0)
        peak = higher
    highest = tl.max(peak, 0)
    if PEEL:
        column = tl.arange(0, VECTOR)
        is_before = (column >= first) & (column < tl.minimum(whole_first, end))
        is_after = (whole_end + column >= whole_first) & (whole_end + column < end)
        before = tl.load(x + column, is_before, -float("inf")).to(tl.float32)
        after = tl.load(x + whole_end + column, is_after, -float("inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(tl.maximum(before, after), 0))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    mass = tl.sum(total * tl.exp(peak - base), 0)
    if PEEL:
        mass += tl.sum(tl.exp(before - base) + tl.exp(after - base), 0)
    scale = 1 / mass
    for start in range(whole_first, whole_end, STEP):
        at = start + offsets
        values = tl.load(x + at, at < whole_end, 0.0).to(tl.float32)
        tl.store(y + at, (tl.exp(values - base) * scale).to(y.dtype.element_ty), at < whole_end)
    if PEEL:
        tl.store(y + column, (tl.exp(before - base) * scale).to(y.dtype.element_ty), is_before)
        tl.store(y + whole_end + column, (tl.exp(after - base) * scale).to(y.dtype.element_ty), is_after)


@triton.jit
def _strided(
    x,
    y,
    lanes,
    N,
    x_outer,
    x_n,
    x_lane,
    y_outer,
    y_n,
    y_lane,
    BLOCK_N: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    """Softmax along n of x[outer, n, lane], whatever the strides; a program takes BLOCK_LANES neighbouring lanes."""
    blocks = tl.cdiv(lanes, BLOCK_LANES)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    lane = (tl.program_id(0) % blocks * BLOCK_LANES + tl.arange(0, BLOCK_LANES))[None, :]
    n = tl.arange(0, BLOCK_N)[:, None]
    x += outer * x_outer + lane.to(tl.int64) * x_lane
    y += outer * y_outer + lane.to(tl.int64) * y_lane
    peak = tl.full((BLOCK_LANES,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_LANES,), tl.float32)
    for start in range(0, N, BLOCK_N):
        at = (start + n).to(tl.int64)
        values = tl.load(x + at * x_n, (at < N) & (lane < lanes), -float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(values, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(values - base[None, :]), 0)
        peak = higher
    scale = 1 / total
    for start in range(0, N, BLOCK_N):
        at = (start + n).to(tl.int64)
        mask = (at < N) & (lane < lanes)
        values = tl.load(x + at * x_n, mask, 0.0).to(tl.float32)
        result = tl.exp(values - peak[None, :]) * scale[None, :]
        tl.store(y + at * y_n, result.to(y.dtype.element_ty), mask)


def _rows(x: torch.Tensor, y: torch.Tensor, M: int, N: int, stride: int) -> None:
    if N <= HELD:
        block = 1 << (N - 1).bit_length()
        rows = max(PROGRAM_ELEMENTS // block, 1)
        warps = NUM_WARPS or min(max(block // 1024, 4), 16)
        _held[(-(-M // rows),)](x, y, stride, M, N, ROWS=rows, BLOCK=block, num_warps=warps)
        return
    vector = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0
    peel = aligned and stride == N and N % vector != 0
    if not aligned or not peel and (stride % vector or N % vector):
        vector = 1
    unroll = ONLINE_UNROLL // vector
    lanes = 32 * ONLINE_WARPS
    warps = lanes // (64 if torch.version.hip else 32)
    _online[(M,)](x, y, stride, N, PEEL=peel, LANES=lanes, UNROLL=unroll, VECTOR=vector, num_warps=warps)


def kernel_fn(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x of any shape -> its softmax along `dim`, a contiguous tensor of x's shape and dtype."""
    dim %= x.dim()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer, N, lanes = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    x = x.reshape(outer, N, lanes)
    if lanes == 1 and x.stride(1) == 1:
        _rows(x, y, outer, N, x.stride(0))
        return y
    x_strides, y_strides = x.stride(), (N * lanes, lanes, 1)
    if lanes == 1:  # rows with gaps between their elements: take the rows as lanes
        outer, lanes = 1, outer
        x_strides, y_strides = (0, x_strides[1], x_strides[0]), (0, 1, N)
    grid = (outer * -(-lanes // BLOCK_LANES),)
    _strided[grid](x, y, lanes, N, *x_strides, *y_strides, BLOCK_N=BLOCK_N, BLOCK_LANES=BLOCK_LANES, num_warps=8)
    return y
