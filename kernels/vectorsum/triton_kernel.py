"""The sum of a vector in Triton: each program a share, then one program the programs' sums; always in the same order.

Four loads are added in float, their sum in double: an H200 does that in the shadow of its memory.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "vectorsum"
BACKEND = "triton"
TUNABLES = {"BLOCK": [1024, 2048, 4096], "NUM_WARPS": [4, 8, 16], "PROGRAMS": [264, 528, 1056, 2112]}

BLOCK = 2048
NUM_WARPS = 8
PROGRAMS = 1056  # at most: eight for each multiprocessor of an H200


@triton.jit
def _shares(x, sums, N, rounds, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * rounds * (4 * BLOCK)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    whole = tl.minimum(rounds, tl.maximum(N - start, 0) // (4 * BLOCK)).to(tl.int32)
    for _ in range(whole):
        a = tl.load(x + start + offsets)
        b = tl.load(x + start + BLOCK + offsets)
        c = tl.load(x + start + 2 * BLOCK + offsets)
        d = tl.load(x + start + 3 * BLOCK + offsets)
        total += ((a + b) + (c + d)).to(tl.float64)
        start += 4 * BLOCK
    if whole < rounds:
        for k in range(4):
            place = start + k * BLOCK + offsets
            total += tl.load(x + place, place < N, 0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def _together(sums, y, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(sums + offsets, offsets < count, 0.0)
    tl.store(y, tl.sum(total).to(tl.float32))


def kernel_fn(x: torch.Tensor) -> torch.Tensor:
    """x [N] fp32 -> a scalar."""
    x = x.contiguous()
    N = x.numel()
    y = torch.empty((), dtype=x.dtype, device=x.device)
    rounds = -(-N // (4 * BLOCK * PROGRAMS))
    programs = -(-N // (4 * BLOCK * rounds))
    sums = torch.empty((programs,), dtype=torch.float64, device=x.device)
    _shares[(programs,)](x, sums, N, rounds, BLOCK=BLOCK, num_warps=NUM_WARPS)
    _together[(1,)](sums, y, programs, BLOCK=1024, num_warps=4)
    return y
