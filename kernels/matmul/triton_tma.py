"""Matmul in Triton for Hopper and later: tiles fetched by the tensor memory accelerator, programs that stay resident.

The accelerator computes addresses and bounds, which leaves the warps to the tensor cores. It asks for 16-bit matrices
that are contiguous along one dim and aligned to 16 bytes along the other; others take plain loads, in the same loops.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [64, 128, 256],
    "BLOCK_N": [64, 128, 192, 256],
    "BLOCK_K": [32, 64, 128],
    "GROUP_M": [4, 8, 16],
    "NUM_WARPS": [4, 8],
    "NUM_STAGES": [2, 3, 4, 5],
}

BLOCK_M = 128
BLOCK_N = 256
BLOCK_K = 64
GROUP_M = 8  # rows of tiles that are walked together
NUM_WARPS = 8
NUM_STAGES = 4  # at most: as many as shared memory holds


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
    TMA: tl.constexpr,
    A_ALONG_K: tl.constexpr,
    B_ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """With TMA, A, B and C are descriptors; A and B of the matrix or its transpose, whichever is contiguous by rows."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        group = min(tiles_m - first_m, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        m0 = (first_m + within % group) * BLOCK_M
        n0 = within // group * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        for k0 in range(0, K, BLOCK_K):
            if TMA:
                a = A.load([m0, k0]) if A_ALONG_K else tl.trans(A.load([k0, m0]))
                b = tl.trans(B.load([n0, k0])) if B_ALONG_K else B.load([k0, n0])
            else:
                k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
                a_at = A + m.to(tl.int64)[:, None] * stride_am + k[None, :] * stride_ak
                b_at = B + k[:, None] * stride_bk + n.to(tl.int64)[None, :] * stride_bn
                a = tl.load(a_at, (m[:, None] < M) & (k[None, :] < K), 0.0)
                b = tl.load(b_at, (k[:, None] < K) & (n[None, :] < N), 0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        if TMA:
            C.store([m0, n0], sums.to(C.dtype))
        else:
            c = C + m.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(c, sums.to(C.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@cache
def _device(index: int | None) -> tuple[int, int, bool]:
    """Multiprocessors, bytes of shared memory a program may use, has it TMA; an H100's where there is no GPU."""
    if index is None:
        return 132, 232448, True
    properties = torch.cuda.get_device_properties(index)
    tma = torch.version.hip is None and properties.major >= 9
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 65536), tma


def _by_rows(matrix: torch.Tensor) -> torch.Tensor | None:
    """The matrix or its transpose, whichever TMA can read; None if it can read neither."""
    for candidate in (matrix, matrix.t()):
        rows_aligned = candidate.stride(0) * candidate.element_size() % 16 == 0 and candidate.stride(0) > 0
        if candidate.stride(1) == 1 and rows_aligned and candidate.data_ptr() % 16 == 0:
            return candidate
    return None


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ B [K, N] -> a contiguous [M, N] in A's dtype."""
    M, K = A.shape
    N = B.shape[1]
    C = torch.empty((M, N), dtype=A.dtype, device=A.device)
    processors, shared_memory, has_tma = _device(A.device.index)
    block_m, block_n, block_k = BLOCK_M, BLOCK_N, BLOCK_K
    if A.element_size() == 4:  # products in fp32 keep operands in registers
        block_m, block_n, block_k = 64, 64, 16
    a, b, c = (_by_rows(t) for t in (A, B, C))
    tma = has_tma and A.element_size() == 2 and a is not None and b is not None and c is C
    a_along_k, b_along_k = a is A, b is not B
    if tma:
        a = TensorDescriptor.from_tensor(a, [block_m, block_k] if a_along_k else [block_k, block_m])
        b = TensorDescriptor.from_tensor(b, [block_n, block_k] if b_along_k else [block_k, block_n])
        c = TensorDescriptor.from_tensor(C, [block_m, block_n])
    stage = (block_m + block_n) * block_k * A.element_size()
    room = shared_memory - (block_m * block_n * A.element_size() if tma else 0)  # C is stored through shared memory
    tiles = -(-M // block_m) * -(-N // block_n)
    _matmul[(min(tiles, processors),)](
        *((a, b, c) if tma else (A, B, C)),
        M,
        N,
        K,
        *A.stride(),
        *B.stride(),
        TMA=tma,
        A_ALONG_K=a_along_k,
        B_ALONG_K=b_along_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        num_warps=NUM_WARPS,
        num_stages=max(min(NUM_STAGES, room // stage), 1),
    )
    return C
