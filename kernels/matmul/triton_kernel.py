"""Matmul in Triton: one output tile a program, K in pipelined steps, tiles ordered so that their neighbours meet in L2.

A and B are read where they lie, whatever their strides: a transposed B (a Linear's weight) is contiguous along K.

Against cuda_kernel.py on an H200 it takes 1.04-1.15 times as long from 2048³ on, 1.3 times at 1024³, and 1.55-1.65 times
with a transposed B. Why that is so is not known: for sm_90 the loop differs in the layout of B's shared memory alone.

fp32 products are three of TF32 parts (a = high + low, of 11 bits each; high x high + high x low + low x high, summed in
fp32), which an H200's tensor cores do 1.6 times as fast as cuBLAS does fp32 where B is transposed, 1.1 times at 4096³ where
it is not, with 0.2 to 0.6 of cuBLAS's error for K up to 8192, 1.4 for K = 131072. Slower than cuBLAS: small ones whose B is
not transposed (at best 0.6 times at 512 x 768 x 768), and few rows and columns with a long K, which is not split here.
"""

from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 64, 128, 256],
    "BLOCK_N": [0, 64, 128, 256],
    "BLOCK_K": [0, 32, 64, 128],
    "GROUP_M": [4, 8, 16],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [2, 3, 4, 5],
    "FP32": ["tf32x3", "ieee"],
}

BLOCK_M = 0  # 0: by shape, see _tile
BLOCK_N = 0
BLOCK_K = 0  # 0: 64, in fp32 32
GROUP_M = 8  # rows of tiles that are walked together
NUM_WARPS = 0  # 0: 8 from tiles of 128 x 256 on, else 4
NUM_STAGES = 4  # at most: as many as shared memory holds
FP32 = "tf32x3"  # where there are tensor cores for it; "ieee": the plain units


@triton.jit
def _matmul(
    A,
    B,
    C,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group = min(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap round: loads need no mask for them, and they are not stored.
    a = A + (m % M).to(tl.int64)[:, None] * stride_am + k[None, :] * stride_ak
    b = B + (n % N).to(tl.int64)[None, :] * stride_bn + k[:, None] * stride_bk
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_block, b_block = tl.load(a), tl.load(b)
        else:
            a_block = tl.load(a, k[None, :] < K - start, 0.0)
            b_block = tl.load(b, k[:, None] < K - start, 0.0)
        sums = tl.dot(a_block, b_block, sums, input_precision=PRECISION)
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    c = C + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(c, sums.to(C.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@cache
def _device(index: int | None) -> tuple[int, int, bool]:
    """Multiprocessors, bytes of shared memory a program may use, and whether its tensor cores take parts of fp32 numbers;
    an H100's where there is no GPU."""
    if index is None:
        return 132, 232448, True
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 65536)
    return properties.multi_processor_count, shared_memory, properties.major >= 8 and torch.version.hip is None


def _tile(M: int, N: int, fp32: bool, processors: int) -> tuple[int, int]:
    """The largest tile of which there are enough to keep the multiprocessors busy."""
    tiles = [(128, 64)] if fp32 else [(128, 256), (128, 128), (64, 128)]
    tiles += [(64, 64), (32, 64), (16, 64), (16, 32)]
    for block_m, block_n in tiles:
        fits = block_m <= max(1 << (M - 1).bit_length(), 16) and block_n <= max(1 << (N - 1).bit_length(), 32)
        if fits and -(-M // block_m) * -(-N // block_n) >= 0.9 * processors:
            return block_m, block_n
    return tiles[-1]


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ B [K, N] -> a contiguous [M, N] in A's dtype."""
    M, K = A.shape
    N = B.shape[1]
    C = torch.empty((M, N), dtype=A.dtype, device=A.device)
    processors, shared_memory, tensor_cores = _device(A.device.index)
    fp32 = A.dtype == torch.float32
    block_m, block_n = _tile(M, N, fp32, processors)
    block_m, block_n, block_k = BLOCK_M or block_m, BLOCK_N or block_n, BLOCK_K or (32 if fp32 else 64)
    stage = (block_m + block_n) * block_k * A.element_size()
    _matmul[(-(-M // block_m) * -(-N // block_n),)](
        A,
        B,
        C,
        M,
        N,
        K,
        *A.stride(),
        *B.stride(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        EVEN_K=K % block_k == 0,
        PRECISION=FP32 if fp32 and tensor_cores else "ieee",
        num_warps=NUM_WARPS or (8 if block_m * block_n >= 128 * 256 else 4),
        num_stages=max(min(NUM_STAGES, shared_memory // stage), 1),
    )
    return C
