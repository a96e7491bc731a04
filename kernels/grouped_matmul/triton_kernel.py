"""Products of groups of rows with a matrix each in Triton: one tile of one group's product a program, K in pipelined steps.

A program of its own says first which tiles there are, so that the CPU need not wait for the groups' sizes.
"""

from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "grouped_matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 16, 32, 64, 128],
    "BLOCK_N": [0, 64, 128, 256],
    "BLOCK_K": [0, 32, 64, 128],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [2, 3, 4, 5],
    "FP32": ["tf32x3", "ieee"],
}

BLOCK_M = 0  # 0: by the mean of a group's rows, see _tile
BLOCK_N = 0
BLOCK_K = 0  # 0: 64, in fp32 32; as much as there is of K at most
NUM_WARPS = 0  # 0: 8 from tiles of 128 x 256 on, else 4
NUM_STAGES = 4  # at most: as many as shared memory holds
FP32 = "tf32x3"  # where there are tensor cores for it: three products of TF32 parts; "ieee": the plain units


@triton.jit
def _schedule(offs, plan, rows, groups, BLOCK_M: tl.constexpr, P: tl.constexpr):
    """plan [4, P]: of each group, and last of the rows in none, its number, its first row, the row that it ends before,
    and how many tiles of rows it and those before it in `offs` have."""
    i = tl.arange(0, P)
    end = tl.load(offs + i, i < groups, rows).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), rows)
    number, first = tl.zeros((P,), tl.int32), tl.zeros((P,), tl.int32)
    for j in range(groups):  # `offs` in any order: a group begins where the next smaller one ends
        other = tl.minimum(tl.maximum(tl.load(offs + j).to(tl.int32), 0), rows)
        is_before = (other < end) | ((other == end) & (j < i))
        number += is_before.to(tl.int32)
        first = tl.where(is_before, tl.maximum(first, other), first)
    tiles = tl.where(i <= groups, tl.cdiv(end - first, BLOCK_M), 0)
    tl.store(plan + i, number)
    tl.store(plan + P + i, first)
    tl.store(plan + 2 * P + i, end)
    tl.store(plan + 3 * P + i, tl.cumsum(tiles, 0))


@triton.jit
def _grouped(
    x,
    weight,
    y,
    plan,
    groups,
    N,
    K,
    x_row,
    x_k,
    w_group,
    w_k,
    w_n,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    P: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0) // tiles_n  # neighbours read the same rows of x, and are of one group
    after = tl.load(plan + 3 * P + tl.arange(0, P))
    at = tl.sum((after <= tile).to(tl.int32), 0)
    if at > groups:  # there are fewer tiles than there might have been
        return
    number, first, end = tl.load(plan + at), tl.load(plan + P + at), tl.load(plan + 2 * P + at)
    before = tl.load(plan + 3 * P + at - 1, at > 0, 0)
    m = first + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the group's end repeat its last one, columns past the edge wrap round; neither is stored.
    x_tile = x + tl.minimum(m, end - 1).to(tl.int64)[:, None] * x_row + k[None, :] * x_k
    w_tile = weight + number.to(tl.int64) * w_group + (n % N).to(tl.int64)[None, :] * w_n + k[:, None] * w_k
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    terms = tl.where(number < groups, K, 0)  # rows in no group are 0
    for start in range(0, terms, BLOCK_K):
        if EVEN_K:
            x_block, w_block = tl.load(x_tile), tl.load(w_tile)
        else:
            x_block = tl.load(x_tile, k[None, :] < K - start, 0.0)
            w_block = tl.load(w_tile, k[:, None] < K - start, 0.0)
        sums = tl.dot(x_block, w_block, sums, input_precision=PRECISION)
        x_tile += BLOCK_K * x_k
        w_tile += BLOCK_K * w_k
    tl.store(
        y + m.to(tl.int64)[:, None] * N + n[None, :], sums.to(y.dtype.element_ty), (m[:, None] < end) & (n[None, :] < N)
    )


@cache
def _device(index: int | None) -> tuple[int, bool]:
    """Bytes of shared memory a program may use, and whether tensor cores take parts of fp32 numbers; an H100's where there
    is no GPU."""
    if index is None:
        return 232448, True
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 65536)
    return shared_memory, not torch.version.hip and properties.major >= 8


def _power(n: int, least: int) -> int:
    return max(1 << (n - 1).bit_length(), least)


def _tile(rows: int, groups: int, N: int, fp32: bool) -> tuple[int, int]:
    """About as many rows as a group has, and columns for as much work as registers hold."""
    block_m = min(_power(-(-rows // groups), 16), 64 if fp32 else 128)
    widest = 64 if fp32 else 256 if block_m == 128 else 128
    return block_m, min(_power(N, 32), widest)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [rows, K] and weight [groups, K, N] of any strides, offs [groups] -> [rows, N] in x's dtype."""
    (rows, K), (groups, _, N) = x.shape, weight.shape
    y = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    shared_memory, tensor_cores = _device(x.device.index)
    fp32 = x.dtype == torch.float32
    block_m, block_n = _tile(rows, groups, N, fp32)
    block_m, block_n = BLOCK_M or block_m, BLOCK_N or block_n
    block_k = BLOCK_K or min(32 if fp32 else 64, _power(K, 16))
    P = _power(groups + 1, 2)
    plan = torch.empty(4, P, dtype=torch.int32, device=x.device)
    _schedule[(1,)](offs.contiguous(), plan, rows, groups, BLOCK_M=block_m, P=P)
    tiles_n = -(-N // block_n)
    most = rows // block_m + min(groups + 1, rows)  # each group may end within a tile
    _grouped[(most * tiles_n,)](
        x,
        weight,
        y,
        plan,
        groups,
        N,
        K,
        *x.stride(),
        *weight.stride(),
        tiles_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        P=P,
        EVEN_K=K % block_k == 0,
        PRECISION=FP32 if fp32 and tensor_cores else "ieee",
        num_warps=NUM_WARPS or (8 if block_m * block_n >= 128 * 256 else 4),
        num_stages=max(min(NUM_STAGES, shared_memory // ((block_m + block_n) * block_k * x.element_size())), 1),
    )
    return y
