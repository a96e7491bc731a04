"""Matmul in Triton for few output tiles and a long K: K in parts, each a program's, whose fp32 sums a second kernel adds.

The parts are added in a fixed order, so that runs agree bitwise, which atomics would not.
"""

from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 16, 64, 128],
    "BLOCK_N": [0, 32, 64, 128, 256],
    "BLOCK_K": [0, 32, 64, 128],
    "SPLIT_K": [0, 1, 2, 4, 8, 16],
    "GROUP_M": [4, 8, 16],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [2, 3, 4, 5],
}

BLOCK_M = 0  # 0: 128, fewer if M is smaller
BLOCK_N = 0  # 0: 128, fewer if N is smaller
BLOCK_K = 0  # 0: 64, in fp32 16
SPLIT_K = 0  # parts; 0: as many as give every multiprocessor a program
GROUP_M = 8  # rows of tiles that are walked together
NUM_WARPS = 0  # 0: 8 for tiles of 128 x 128, else 4
NUM_STAGES = 4  # at most: as many as shared memory holds
ADD_BLOCK = 1024  # elements of a program that adds parts


@triton.jit
def _parts(
    A,
    B,
    parts,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    part_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """parts[p] = A[:, p's] @ B[p's, :], where p's are the part_k elements of K from p * part_k on."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group = min(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = part * part_k
    end = min(begin + part_k, K)
    k = begin + tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap round: loads need no mask for them, and they are not stored.
    a = A + (m % M).to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b = B + (n % N).to(tl.int64)[None, :] * stride_bn + k.to(tl.int64)[:, None] * stride_bk
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            sums = tl.dot(tl.load(a), tl.load(b), sums, input_precision="ieee")
        else:
            inside = start + tl.arange(0, BLOCK_K) < end
            sums = tl.dot(tl.load(a, inside[None, :], 0.0), tl.load(b, inside[:, None], 0.0), sums, input_precision="ieee")
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    at = (part.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(parts + at, sums.to(parts.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _add(parts, C, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, at < count, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * count.to(tl.int64) + at, at < count, 0.0)
    tl.store(C + at, total.to(C.dtype.element_ty), at < count)


@cache
def _device(index: int | None) -> tuple[int, int]:
    """Multiprocessors and bytes of shared memory a program may use; an H100's where there is no GPU."""
    if index is None:
        return 132, 232448
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 65536)


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ B [K, N] -> a contiguous [M, N] in A's dtype."""
    M, K = A.shape
    N = B.shape[1]
    C = torch.empty((M, N), dtype=A.dtype, device=A.device)
    processors, shared_memory = _device(A.device.index)
    fp32 = A.dtype == torch.float32
    block_m = BLOCK_M or min(max(1 << (M - 1).bit_length(), 16), 128)
    block_n = BLOCK_N or min(max(1 << (N - 1).bit_length(), 32), 128)
    block_k = BLOCK_K or (16 if fp32 else 64)
    tiles = -(-M // block_m) * -(-N // block_n)
    steps = -(-K // block_k)
    split = min(SPLIT_K or max(processors // tiles, 1), 32, max(steps // 4, 1))
    part_k = -(-steps // split) * block_k
    split = -(-K // part_k)
    parts = C if split == 1 else torch.empty((split, M, N), dtype=torch.float32, device=A.device)
    stage = (block_m + block_n) * block_k * A.element_size()
    _parts[(tiles, split)](
        A,
        B,
        parts,
        M,
        N,
        K,
        *A.stride(),
        *B.stride(),
        part_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        EVEN_K=K % block_k == 0,
        num_warps=NUM_WARPS or (8 if block_m * block_n >= 128 * 128 else 4),
        num_stages=max(min(NUM_STAGES, shared_memory // stage), 1),
    )
    if split > 1:
        _add[(-(-C.numel() // ADD_BLOCK),)](parts, C, C.numel(), PARTS=split, BLOCK=ADD_BLOCK, num_warps=4)
    return C
