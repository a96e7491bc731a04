"""Products of a batch of matrices in Triton: one output tile of one of them a program, K in pipelined steps.

A and B are read where they lie, whatever their strides: heads are cut from a projection, keys are transposed.
"""

from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "bmm"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 32, 64, 128],
    "BLOCK_N": [0, 32, 64, 128, 256],
    "BLOCK_K": [0, 32, 64, 128],
    "GROUP_M": [1, 4, 8],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [2, 3, 4, 5],
    "FP32": ["tf32x3", "ieee"],
}

BLOCK_M = 0  # 0: by shape, see _tile
BLOCK_N = 0
BLOCK_K = 0  # 0: 64, in fp32 32; as much as there is of K at most
GROUP_M = 8  # rows of tiles that are walked together
NUM_WARPS = 0  # 0: 8 from tiles of 128 x 256 on, else 4
NUM_STAGES = 4  # at most: as many as shared memory holds
FP32 = "tf32x3"  # where there are tensor cores for it: three products of TF32 parts; "ieee": the plain units


@triton.jit
def _bmm(
    A,
    B,
    C,
    M,
    N,
    K,
    inner,
    a_outer,
    a_inner,
    a_m,
    a_k,
    b_outer,
    b_inner,
    b_k,
    b_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    index = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap round: loads need no mask for them, and they are not stored.
    a = A + index // inner * a_outer + index % inner * a_inner + (m % M).to(tl.int64)[:, None] * a_m + k[None, :] * a_k
    b = B + index // inner * b_outer + index % inner * b_inner + (n % N).to(tl.int64)[None, :] * b_n + k[:, None] * b_k
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_block, b_block = tl.load(a), tl.load(b)
        else:
            a_block = tl.load(a, k[None, :] < K - start, 0.0)
            b_block = tl.load(b, k[:, None] < K - start, 0.0)
        sums = tl.dot(a_block, b_block, sums, input_precision=PRECISION)
        a += BLOCK_K * a_k
        b += BLOCK_K * b_k
    c = C + (index * M + m.to(tl.int64))[:, None] * N + n[None, :]
    tl.store(c, sums.to(C.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@cache
def _device(index: int | None) -> tuple[int, int, bool]:
    """Multiprocessors, bytes of shared memory a program may use, and whether its tensor cores take parts of fp32 numbers;
    an H100's where there is no GPU."""
    if index is None:
        return 132, 232448, True
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 65536)
    return properties.multi_processor_count, shared_memory, not torch.version.hip and properties.major >= 8


def _power(n: int, least: int) -> int:
    return max(1 << (n - 1).bit_length(), least)


def _tile(batch: int, M: int, N: int, fp32: bool, processors: int) -> tuple[int, int]:
    """The largest tile of which there are enough to keep the multiprocessors busy."""
    tiles = [(128, 64)] if fp32 else [(128, 256), (128, 128), (64, 128)]
    tiles += [(64, 64), (32, 64), (16, 64), (16, 32)]
    for block_m, block_n in tiles:
        fits = block_m <= _power(M, 16) and block_n <= _power(N, 32)
        if fits and batch * -(-M // block_m) * -(-N // block_n) >= 0.9 * processors:
            return block_m, block_n
    return tiles[-1]


def _with_two(x: torch.Tensor) -> torch.Tensor:
    """x as a batch of two dims."""
    return x.unsqueeze(0) if x.dim() == 3 else x if x.dim() == 4 else x.flatten(0, -4)


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [*batch, M, K] @ B [*batch, K, N], of any strides -> a contiguous [*batch, M, N] in A's dtype."""
    C = torch.empty((*A.shape[:-1], B.shape[-1]), dtype=A.dtype, device=A.device)
    a, b = _with_two(A), _with_two(B)
    (outer, inner, M, K), N = a.shape, b.shape[-1]
    processors, shared_memory, tensor_cores = _device(A.device.index)
    fp32 = A.dtype == torch.float32
    block_m, block_n = _tile(outer * inner, M, N, fp32, processors)
    block_m, block_n = BLOCK_M or block_m, BLOCK_N or block_n
    block_k = BLOCK_K or min(32 if fp32 else 64, _power(K, 16))
    tiles = outer * inner * -(-M // block_m) * -(-N // block_n)
    _bmm[(tiles,)](
        a,
        b,
        C,
        M,
        N,
        K,
        inner,
        *a.stride(),
        *b.stride(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        EVEN_K=K % block_k == 0,
        PRECISION=FP32 if fp32 and tensor_cores else "ieee",
        num_warps=NUM_WARPS or (8 if block_m * block_n >= 128 * 256 else 4),
        num_stages=max(min(NUM_STAGES, shared_memory // ((block_m + block_n) * block_k * A.element_size())), 1),
    )
    return C
