"""A linear layer and its activation in Triton: bias and activation meet the sums while they are in registers.

The matrix product is that of kernels/matmul/triton_kernel.py, which says why it is as it is: one output tile a program,
K in pipelined steps; 16-bit products of LARGE size by the tensor memory accelerator (TMA), from Hopper on; fp32 as three
products of TF32 parts.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

KERNEL_TYPE = "fused_linear"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 64, 128, 256],
    "BLOCK_N": [0, 64, 128, 256],
    "BLOCK_K": [0, 32, 64, 128],
    "GROUP_M": [4, 8, 16],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [0, 2, 3, 4, 5],
    "TMA": [0, 1, 2],
    "FP32": ["tf32x3", "ieee"],
}

BLOCK_M = 0  # 0: by shape, see _tile
BLOCK_N = 0
BLOCK_K = 0  # 0: 64, in fp32 32
GROUP_M = 8  # rows of tiles that are walked together
NUM_WARPS = 0  # 0: 8 from tiles of 128 x 256 on, else 4
NUM_STAGES = 0  # at most: as many as shared memory holds; 0: 4, with TMA 5
TMA = 1  # 0: never; 1: for large products; 2: wherever it can read
LARGE = 2048**3  # products that take longer than their launch
FP32 = "tf32x3"  # where there are tensor cores for it; "ieee": the plain units


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        return tl.where(x <= 0, 0.0, x * x)
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, x)
    else:
        return x


@triton.jit
def _linear(
    A,
    B,
    bias,
    C,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_bias,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
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
    if BIASED:
        sums += tl.load(bias + (n % N) * stride_bias).to(tl.float32)[None, :]
    c = C + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(c, _activated(sums, ACTIVATION).to(C.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _resident(
    A,
    B,
    bias,
    C,
    M,
    N,
    K,
    stride_bias,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    A_ALONG_K: tl.constexpr,
    B_ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    C_LINES: tl.constexpr,
):
    """A and B are descriptors, of the matrix or its transpose, whichever is contiguous by rows; so is C with C_LINES, whose
    rows start at multiples of 16 bytes then; else it is a pointer."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        group = min(tiles_m - first_m, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        m = (first_m + within % group) * BLOCK_M
        n = within // group * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = A.load([m, k]) if A_ALONG_K else tl.trans(A.load([k, m]))
            b = tl.trans(B.load([n, k])) if B_ALONG_K else B.load([k, n])
            sums = tl.dot(a, b, sums)
        halves = tl.split(sums.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))  # one after the other: fewer registers
        for half in tl.static_range(2):
            first = n + half * (BLOCK_N // 2)
            columns = first + tl.arange(0, BLOCK_N // 2)
            y = halves[half]
            if BIASED:
                y += tl.load(bias + (columns % N) * stride_bias).to(tl.float32)[None, :]
            y = _activated(y, ACTIVATION)
            if C_LINES:
                C.store([m, first], y.to(C.dtype))
            else:
                rows = m + tl.arange(0, BLOCK_M)
                c = C + rows.to(tl.int64)[:, None] * N + columns[None, :]
                tl.store(c, y.to(C.dtype.element_ty), (rows[:, None] < M) & (columns[None, :] < N))


@cache
def _device(index: int | None) -> tuple[int, int, bool, bool]:
    """Multiprocessors, bytes of shared memory a program may use, whether its tensor cores take parts of fp32 numbers, and
    whether it has TMA; an H100's where there is no GPU."""
    if index is None:
        return 132, 232448, True, True
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 65536)
    generation = 0 if torch.version.hip else properties.major
    return properties.multi_processor_count, shared_memory, generation >= 8, generation >= 9


def _tile(M: int, N: int, fp32: bool, processors: int) -> tuple[int, int]:
    """The largest tile of which there are enough to keep the multiprocessors busy."""
    tiles = [(128, 64)] if fp32 else [(128, 256), (128, 128), (64, 128)]
    tiles += [(64, 64), (32, 64), (16, 64), (16, 32)]
    for block_m, block_n in tiles:
        fits = block_m <= max(1 << (M - 1).bit_length(), 16) and block_n <= max(1 << (N - 1).bit_length(), 32)
        if fits and -(-M // block_m) * -(-N // block_n) >= 0.9 * processors:
            return block_m, block_n
    return tiles[-1]


def _by_rows(matrix: torch.Tensor) -> torch.Tensor | None:
    """The matrix or its transpose, whichever TMA can read; None if it can read neither."""
    for candidate in (matrix, matrix.t()):
        line, inner = candidate.stride()
        if inner == 1 and line > 0 and line % 8 == 0 and candidate.data_ptr() % 16 == 0:
            return candidate
    return None


def kernel_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "gelu"
) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] -> contiguous [..., N] in x's dtype."""
    A, B = x.reshape(-1, x.shape[-1]), weight.t()
    M, K = A.shape
    N = B.shape[1]
    y = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    C = y.view(M, N)
    processors, shared_memory, tensor_cores, accelerator = _device(A.device.index)
    fp32 = A.dtype == torch.float32
    block_m, block_n = _tile(M, N, fp32, processors)
    a = b = None
    large = M * N * K >= LARGE and block_m * block_n >= 128 * 128
    c_lines = N % 8 == 0
    if TMA and accelerator and not fp32 and (large or TMA == 2):
        a, b = _by_rows(A), _by_rows(B)
    with_tma = a is not None and b is not None
    block_m, block_n, block_k = BLOCK_M or block_m, BLOCK_N or block_n, BLOCK_K or (32 if fp32 else 64)
    tiles = -(-M // block_m) * -(-N // block_n)
    stage = (block_m + block_n) * block_k * A.element_size()
    room = shared_memory - (block_m * block_n if with_tma else 0)  # through which half a tile of C is written
    launch = {
        "ACTIVATION": activation,
        "BIASED": bias is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": GROUP_M,
        "num_warps": NUM_WARPS or (8 if block_m * block_n >= 128 * 256 else 4),
        "num_stages": max(min(NUM_STAGES or (5 if with_tma else 4), room // stage), 1),
    }
    vector, step = (C, 0) if bias is None else (bias, bias.stride(0))
    if not with_tma:
        even, precision = K % block_k == 0, FP32 if fp32 and tensor_cores else "ieee"
        strides = (*A.stride(), *B.stride(), step)
        _linear[(tiles,)](A, B, vector, C, M, N, K, *strides, EVEN_K=even, PRECISION=precision, **launch)
        return y
    a_along_k, b_along_k = a is A, b is not B
    _resident[(min(tiles, processors),)](
        TensorDescriptor.from_tensor(a, [block_m, block_k] if a_along_k else [block_k, block_m]),
        TensorDescriptor.from_tensor(b, [block_n, block_k] if b_along_k else [block_k, block_n]),
        vector,
        TensorDescriptor.from_tensor(C, [block_m, block_n // 2]) if c_lines else C,
        M,
        N,
        K,
        step,
        A_ALONG_K=a_along_k,
        B_ALONG_K=b_along_k,
        C_LINES=c_lines,
        **launch,
    )
    return y
