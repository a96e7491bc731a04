"""Matmul with FP4 weights in Triton: yᵀ = W xᵀ in tiles, W dequantised in registers on its way to the tensor cores.

Weights are packed anew once: in each block of BLOCK_K, the lower four bits hold its first half, the upper ones its second.
So a byte's two numbers meet different, contiguous columns of x, and nothing has to be interleaved. Few rows of x leave
too few tiles: then K is split, and a second kernel adds the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

KERNEL_TYPE = "matmul_fp4"
BACKEND = "triton"
TUNABLES = {
    "SMALL_N": [32, 64, 128],
    "SMALL_WARPS": [2, 4, 8],
    "SMALL_STAGES": [3, 4, 6],
    "LARGE_M": [64, 128, 256],
    "LARGE_N": [64, 128],
    "LARGE_WARPS": [4, 8],
    "LARGE_STAGES": [2, 3, 4],
    "PROGRAMS": [132, 264, 528],
}

BLOCK_K = 128
SMALL_N = 64  # of a tile where x has up to 32 rows
SMALL_WARPS = 4
SMALL_STAGES = 4
LARGE_M = 128
LARGE_N = 128
LARGE_WARPS = 8
LARGE_STAGES = 3
PROGRAMS = 264  # that are to be had by splitting K
GROUP_N = 8  # tiles side by side that share x in L2

_packed = WeakTensorKeyDictionary()  # weights -> the same packed anew


@triton.jit
def _pack(w, out, K, stride, columns, BLOCK_K: tl.constexpr):
    """A block of BLOCK_K weights of one row."""
    HALF: tl.constexpr = BLOCK_K // 2
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = block * BLOCK_K + tl.arange(0, HALF)
    first = tl.load(w + row * stride + k // 2, k < K, 0).to(tl.int32) >> (4 * (k % 2))
    k += HALF
    second = tl.load(w + row * stride + k // 2, k < K, 0).to(tl.int32) >> (4 * (k % 2))
    both = (first & 15) | ((second & 15) << 4)
    tl.store(out + row * columns + block * HALF + tl.arange(0, HALF), both.to(tl.uint8))


@triton.jit
def _numbers(codes, factors, GROUP: tl.constexpr, dtype: tl.constexpr):
    """E2M1 codes [N, half] in `dtype`, scaled by `factors` [N, half / GROUP].

    Sign, exponent and mantissa are put where fp16, or fp32 for bf16, has them. In fp16 the smallest numbers are subnormal,
    as they are in E2M1, and the difference of the biases is multiplied; in fp32 that might flush them, and it is added.
    """
    N: tl.constexpr = codes.shape[0]
    HALF: tl.constexpr = codes.shape[1]
    if dtype == tl.float16:
        bits = codes.to(tl.uint16)
        numbers = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0
    else:
        bits = codes.to(tl.uint32)
        size = bits & 7
        magnitude = tl.where(size > 1, 0x3F000000 + (size << 22), size * 0x3F000000)
        numbers = (((bits & 8) << 28) | magnitude).to(tl.float32, bitcast=True)
    factors = tl.broadcast_to(factors[:, :, None], (N, HALF // GROUP, GROUP)).reshape(N, HALF)
    return (numbers * factors).to(dtype)


@triton.jit
def _factors(scales, mask, E8M0: tl.constexpr, dtype: tl.constexpr):
    codes = tl.load(scales, mask, 0).to(tl.uint32)
    if E8M0:
        return (codes << 23).to(tl.float32, bitcast=True).to(dtype)
    sizes = ((codes & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # E4M3: 2^120
    return tl.where(codes > 127, -sizes, sizes).to(dtype)


@triton.jit
def _tiles(
    x, w, scales, y, M, N, K, x_stride, w_stride, groups, blocks, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, GROUP_N: tl.constexpr,
    E8M0: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of yᵀ, or of one part of K of it: part p covers blocks [p · blocks, (p + 1) · blocks)."""
    HALF: tl.constexpr = BLOCK_K // 2
    dtype: tl.constexpr = x.dtype.element_ty
    wide: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.float32
    part = tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    place = tl.program_id(0)
    first = place // (GROUP_N * tiles_m) * GROUP_N
    width = tl.minimum(tiles_n - first, GROUP_N)
    tile_n, tile_m = first + place % (GROUP_N * tiles_m) % width, place % (GROUP_N * tiles_m) // width
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, HALF)
    g = tl.arange(0, HALF // GROUP)
    x_rows = x + tl.where(m < M, m, 0).to(tl.int64)[None, :] * x_stride
    n_inside = tl.where(n < N, n, 0).to(tl.int64)[:, None]
    w_rows, scale_rows = w + n_inside * w_stride, scales + n_inside * groups
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(part * blocks, (part + 1) * blocks):
        at = block * BLOCK_K
        codes = tl.load(w_rows + (block * HALF + k)[None, :])
        low, high = at + k[:, None], at + HALF + k[:, None]
        group = at // GROUP + g[None, :]
        if EVEN:
            x_low, x_high = tl.load(x_rows + low), tl.load(x_rows + high)
        else:
            x_low, x_high = tl.load(x_rows + low, low < K, 0.0), tl.load(x_rows + high, high < K, 0.0)
        low_factors = _factors(scale_rows + group, group < groups, E8M0, wide)
        group += HALF // GROUP
        high_factors = _factors(scale_rows + group, group < groups, E8M0, wide)
        total = tl.dot(_numbers(codes & 15, low_factors, GROUP, dtype), x_low, total)
        total = tl.dot(_numbers(codes >> 4, high_factors, GROUP, dtype), x_high, total)
    result = tl.trans(total * scale)
    places = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if SPLIT:
        tl.store(y + part.to(tl.int64) * M * N + places, result, inside)
    else:
        tl.store(y + places, result.to(y.dtype.element_ty), inside)


@triton.jit
def _add(parts, y, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * count + place, place < count, 0.0)
    tl.store(y + place, total.to(y.dtype.element_ty), place < count)


def packed(w: torch.Tensor, K: int) -> torch.Tensor:
    if w not in _packed:
        rows, blocks = w.shape[0], -(-K // BLOCK_K)
        w_rows = w.contiguous()
        out = torch.empty((rows, blocks * BLOCK_K // 2), dtype=torch.uint8, device=w.device)
        _pack[(rows, blocks)](w_rows, out, K, w_rows.stride(0), out.shape[1], BLOCK_K=BLOCK_K, num_warps=1)
        _packed[w] = out
    return _packed[w]


def kernel_fn(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [M, K], w [N, K / 2] uint8, scales [N, K / group] -> [M, N] in x's dtype."""
    (M, K), N, groups = x.shape, w.shape[0], scales.shape[1]
    w = packed(w, K)
    x = x if x.stride(1) == 1 else x.contiguous()
    e8m0 = scales.dtype == torch.uint8
    scales = scales.contiguous().view(torch.uint8)
    blocks = -(-K // BLOCK_K)
    small = M <= 32
    tile_m = 16 if M <= 16 else 32 if small else LARGE_M
    tile_n = SMALL_N if small else LARGE_N
    tiles = -(-M // tile_m) * -(-N // tile_n)
    parts = max(1, min(PROGRAMS // tiles, blocks))
    while blocks % parts:
        parts -= 1
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    out = y if parts == 1 else torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    warps, stages = (SMALL_WARPS, SMALL_STAGES) if small else (LARGE_WARPS, LARGE_STAGES)
    _tiles[(tiles, parts)](
        x, w, scales, out, M, N, K, x.stride(0), w.stride(0), groups, blocks // parts, scale,
        BLOCK_M=tile_m, BLOCK_N=tile_n, BLOCK_K=BLOCK_K, GROUP=K // groups, GROUP_N=GROUP_N,
        E8M0=e8m0, SPLIT=parts > 1, EVEN=K % BLOCK_K == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        _add[(-(-M * N // 1024),)](out, y, M * N, PARTS=parts, BLOCK=1024, num_warps=4)
    return y
