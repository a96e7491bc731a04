"""LayerNorm in Triton: rows held in registers between mean, variance and scaling, so x is read once.

Rows of 5120 take 1.25-1.3 times as long as in CUDA C++ (H200): no power of two fits them, and they are read twice. Held as
4096 and 1024 they take 1-2 % less, which a third kernel is not worth.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "layernorm"
BACKEND = "triton"
TUNABLES = {"NUM_WARPS": [0, 1, 2, 4, 8, 16], "PROGRAM_ELEMENTS": [1024, 2048, 4096, 8192], "HELD": [4096, 8192, 16384]}

NUM_WARPS = 0  # 0: by row width
PROGRAM_ELEMENTS = 2048  # rows share a program: as many as this has room for, and two that it has not
HELD = 4096  # wider rows are read twice, the second time from L1 or L2
LOOP_BLOCK = 4096  # at most; less where that divides the row


@triton.jit
def _held(x, weight, bias, y, stride, M, N, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < N
    mask = (rows < M) & inside
    rows = rows.to(tl.int64)
    values = tl.load(x + rows * stride + columns, mask, 0.0).to(tl.float32)
    # Asked for before the reductions, whose barriers they would else have to wait for.
    weights = tl.load(weight + columns, inside, 0.0)
    biases = tl.load(bias + columns, inside, 0.0)
    centred = tl.where(inside, values - (tl.sum(values, 1) / N)[:, None], 0.0)
    # What rounding left of the mean, which is all that there is in a row of equal values.
    drift = tl.sum(centred, 1) / N
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / N - drift * drift + eps)
    result = (centred - drift[:, None]) * scale[:, None] * weights.to(tl.float32) + biases.to(tl.float32)
    tl.store(y + rows * N + columns, result.to(y.dtype.element_ty), mask)


@triton.jit
def _looped(x, weight, bias, y, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mean, squares = 0.0, 0.0  # of the elements so far, and their summed squared distances from it (Chan et al.)
    for start in range(0, N, BLOCK):
        mask = start + columns < N
        values = tl.load(x + row * stride + start + columns, mask, 0.0).to(tl.float32)
        count = min(N - start, BLOCK)
        rough = tl.sum(values) / count
        centred = tl.where(mask, values - rough, 0.0)
        drift = tl.sum(centred) / count  # what rounding left of the mean
        step = rough + drift - mean
        share = count / (start + count)
        squares += tl.sum(centred * centred) - drift * drift * count + step * step * start * share
        mean += step * share
    scale = tl.rsqrt(squares / N + eps)
    for start in range(0, N, BLOCK):
        mask = start + columns < N
        values = tl.load(x + row * stride + start + columns, mask, 0.0).to(tl.float32)
        weights = tl.load(weight + start + columns, mask, 0.0).to(tl.float32)
        biases = tl.load(bias + start + columns, mask, 0.0).to(tl.float32)
        result = (values - mean) * scale * weights + biases
        tl.store(y + row * N + start + columns, result.to(y.dtype.element_ty), mask)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """x [..., N], weight and bias [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, N)
    if x.stride(1) != 1:
        x = x.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    M, stride = x.shape[0], x.stride(0)
    if N > HELD:
        block = min(max(N & -N, 1024), LOOP_BLOCK)
        _looped[(M,)](x, weight, bias, y, stride, N, eps, BLOCK=block, num_warps=NUM_WARPS or max(block // 512, 4))
        return y
    block = 1 << (N - 1).bit_length()
    rows = PROGRAM_ELEMENTS // block or 2
    warps = NUM_WARPS or min(max(rows * block // 1024, 4), 16)
    _held[(-(-M // rows),)](x, weight, bias, y, stride, M, N, eps, ROWS=rows, BLOCK=block, num_warps=warps)
    return y
