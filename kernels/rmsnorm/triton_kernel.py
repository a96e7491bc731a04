"""RMSNorm in Triton: rows held in registers between their sum of squares and their scaling, so x is read once."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
TUNABLES = {"NUM_WARPS": [0, 1, 2, 4, 8, 16], "PROGRAM_ELEMENTS": [1024, 2048, 4096, 8192], "HELD": [4096, 8192, 16384]}

NUM_WARPS = 0  # 0: by row width
PROGRAM_ELEMENTS = 2048  # narrower rows share a program
HELD = 16384  # wider rows are read twice, the second time from L1 or L2
LOOP_BLOCK = 8192


@triton.jit
def _held(x, weight, y, stride, M, N, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (columns < N)
    rows = rows.to(tl.int64)
    values = tl.load(x + rows * stride + columns, mask, 0.0).to(tl.float32)
    # Asked for before the reduction, whose barrier it would else have to wait for.
    weights = tl.load(weight + columns, columns < N, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / N + eps)
    result = values * scale[:, None] * weights.to(tl.float32)
    tl.store(y + rows * N + columns, result.to(y.dtype.element_ty), mask)


@triton.jit
def _looped(x, weight, y, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        values = tl.load(x + row * stride + start + columns, start + columns < N, 0.0).to(tl.float32)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares) / N + eps)
    for start in range(0, N, BLOCK):
        mask = start + columns < N
        values = tl.load(x + row * stride + start + columns, mask, 0.0).to(tl.float32)
        weights = tl.load(weight + start + columns, mask, 0.0).to(tl.float32)
        tl.store(y + row * N + start + columns, (values * scale * weights).to(y.dtype.element_ty), mask)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., N], weight [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, N)
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = weight.contiguous()
    M = x.shape[0]
    if N > HELD:
        _looped[(M,)](x, weight, y, x.stride(0), N, eps, BLOCK=LOOP_BLOCK, num_warps=NUM_WARPS or 16)
        return y
    block = 1 << (N - 1).bit_length()
    rows = max(PROGRAM_ELEMENTS // block, 1)
    warps = NUM_WARPS or min(max(block // 1024, 8), 16)
    _held[(-(-M // rows),)](x, weight, y, x.stride(0), M, N, eps, ROWS=rows, BLOCK=block, num_warps=warps)
    return y
