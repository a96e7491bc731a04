"""Matmul in CUDA C++: on Hopper TMA and wgmma (see hopper_gemm.cuh); elsewhere, and for strides TMA cannot read, mma.sync.

fp32 is multiplied in fp32 (FFMA), not in TF32.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "matmul"
BACKEND = "cuda"
TUNABLES = {
    "BLOCK_M": [0, 64, 128, 256],
    "BLOCK_N": [0, 64, 128, 192, 256],
    "STAGES": [0, 3, 4, 5, 6],
    "CLUSTER": [0, 1, 2],
    "GROUP": [2, 4, 8, 16],
    "EARLY": [0, 1],
}

BLOCK_M = 0  # of a thread block's tile on Hopper; here and below, 0: the best of TILES for the shape
BLOCK_N = 0
STAGES = 0  # steps along K in flight
CLUSTER = 0  # blocks that share a tile of B
GROUP = 4  # rows of (clusters of) tiles that are walked together, so that their operands meet in L2
EARLY = 1  # whether a launch may begin while the kernel ahead ends


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    stages: int
    turns: bool  # whether two warpgroups take turns, a tile each; else they share each
    cluster: int
    splits: int  # parts of K
    efficiency: float  # of the tensor cores, next to the first's

    def time(self, M: int, N: int, processors: int) -> float:
        """Waves of clusters, times the work of one."""
        clusters, resident = -(-M // (self.m * self.cluster)) * -(-N // self.n) * self.splits, processors // self.cluster
        if self.splits > 1 and clusters > resident:  # they wait for each other
            return math.inf
        return -(-clusters // resident) * self.m * self.n / self.splits / self.efficiency


TILES = (
    Tile(128, 256, 4, False, 2, 1, 1.0),
    Tile(128, 128, 6, True, 2, 1, 1.0),
    Tile(128, 64, 8, True, 1, 1, 0.6),
    Tile(64, 64, 8, True, 1, 1, 0.4),
    Tile(128, 256, 4, False, 2, 4, 0.8),
    Tile(128, 256, 4, False, 2, 2, 0.8),
)

SIGNATURE = "ppp iii llll pp"

HOPPER_SOURCE = r"""
#include <hopper_gemm.cuh>

using T = std::conditional_t<DTYPE == 1, f16, bf16>;
using G = hopper::Gemm<T, TILE_M, TILE_N, TILE_STAGES, TILE_TURNS, TILE_CLUSTER, TILE_SPLITS, A_K, B_K>;

extern "C" int run(const void* A, const void* B, void* C, int M, int N, int K, int64_t a_m, int64_t a_k, int64_t b_k,
                   int64_t b_n, void* sums, void* ready, cudaStream_t stream) {
    const hopper::Problem problem = {M, N, K, GROUP, (float4*)sums, (unsigned*)ready, true};
    return hopper::launch_gemm<G>(A, B, nullptr, C, problem, A_K ? a_m : a_k, B_K ? b_n : b_k, PROCESSORS, EARLY, stream);
}
"""

MMA_SOURCE = r"""
#include <tensor_cores.cuh>

using T = std::conditional_t<DTYPE == 1, f16, bf16>;
constexpr int STEP = 32, PIPELINE = 3;  // along K; steps in flight

// BLOCK x BLOCK of C by 4 warps.
__global__ void __launch_bounds__(128)
    matmul(Matrix A, Matrix B, T* C, int M, int N, int K, bool a_vectors, bool b_vectors) {
    __shared__ Tile<T, BLOCK, STEP, A_K> a[PIPELINE];
    __shared__ Tile<T, BLOCK, STEP, B_K> b[PIPELINE];
    const int tiles_m = divide_up(M, BLOCK), m0 = blockIdx.x % tiles_m * BLOCK, n0 = blockIdx.x / tiles_m * BLOCK;
    const int steps = divide_up(K, STEP), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp / 2 * (BLOCK / 2), warp_n = warp % 2 * (BLOCK / 2);
    const auto fill = [&](int step) {
        if (step < steps) {
            a[step % PIPELINE].fill(A, m0, step * STEP, M, K, a_vectors);
            b[step % PIPELINE].fill(B, n0, step * STEP, N, K, b_vectors);
        }
        commit_copies();
    };
    float d[BLOCK / 32][BLOCK / 16][4] = {};
    for (int step = 0; step < PIPELINE - 1; ++step) fill(step);
    for (int step = 0; step < steps; ++step) {
        wait_copies<PIPELINE - 2>();
        __syncthreads();
        fill(step + PIPELINE - 1);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t a_part[BLOCK / 32][4], b_part[BLOCK / 32][4];
#pragma unroll
            for (int i = 0; i < BLOCK / 32; ++i) a[step % PIPELINE].template fragment<false>(a_part[i], warp_m + 16 * i, k);
#pragma unroll
            for (int j = 0; j < BLOCK / 32; ++j) b[step % PIPELINE].template fragment<true>(b_part[j], warp_n + 16 * j, k);
#pragma unroll
            for (int i = 0; i < BLOCK / 32; ++i)
#pragma unroll
                for (int j = 0; j < BLOCK / 16; ++j)
                    multiply_16x8<T>(d[i][j], a_part[i], b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCK / 32; ++i)
#pragma unroll
        for (int j = 0; j < BLOCK / 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int m = m0 + warp_m + 16 * i + lane / 4 + e / 2 * 8, n = n0 + warp_n + 8 * j + lane % 4 * 2 + e % 2;
                if (m < M && n < N) C[int64_t(m) * N + n] = from_float<T>(d[i][j][e]);
            }
}

extern "C" int run(const void* A_base, const void* B_base, void* C, int M, int N, int K, int64_t a_m, int64_t a_k,
                   int64_t b_k, int64_t b_n, void*, void*, cudaStream_t stream) {
    const Matrix A = {A_base, a_m, a_k}, B = {B_base, b_n, b_k};
    matmul<<<divide_up(M, BLOCK) * divide_up(N, BLOCK), 128, 0, stream>>>(A, B, (T*)C, M, N, K, A.in_vectors(A_K),
                                                                          B.in_vectors(B_K));
    return cudaGetLastError();
}
"""

FP32_SOURCE = r"""
#include <tensor_cores.cuh>

// BLOCK x BLOCK of C by 16 x 16 threads, operands through shared memory, the next step's in registers meanwhile.
__global__ void __launch_bounds__(256, 2) matmul(Matrix A, Matrix B, float* C, int M, int N, int K) {
    constexpr int OWN = BLOCK / 16, RUN = OWN < 4 ? OWN : 4, BK = 8;  // rows and columns of a thread, in runs of RUN
    __shared__ alignas(16) float a[2][BK][BLOCK + 4], b[2][BK][BLOCK + 4];
    const int tiles_m = divide_up(M, BLOCK), m0 = blockIdx.x % tiles_m * BLOCK, n0 = blockIdx.x / tiles_m * BLOCK;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float a_next[BLOCK * BK / 256], b_next[BLOCK * BK / 256];
    const auto read = [&](const Matrix& from, int row0, int rows, int k0, auto& to) {
#pragma unroll
        for (int i = 0; i < sizeof(to) / 4; ++i) {
            const int at = threadIdx.x + 256 * i;
            const int row = row0 + (from.k_stride == 1 ? at / BK : at % BLOCK);
            const int k = k0 + (from.k_stride == 1 ? at % BK : at / BLOCK);
            const bool inside = row < rows && k < K;
            to[i] = inside ? static_cast<const float*>(from.base)[row * from.row_stride + k * from.k_stride] : 0;
        }
    };
    const auto keep = [&](const Matrix& from, const auto& values, auto& to) {
#pragma unroll
        for (int i = 0; i < sizeof(values) / 4; ++i) {
            const int at = threadIdx.x + 256 * i;
            to[from.k_stride == 1 ? at % BK : at / BLOCK][from.k_stride == 1 ? at / BK : at % BLOCK] = values[i];
        }
    };
    const auto fetch = [&](int k0) {
        read(A, m0, M, k0, a_next);
        read(B, n0, N, k0, b_next);
    };
    float d[OWN][OWN] = {};
    fetch(0);
    for (int k0 = 0, now = 0; k0 < K; k0 += BK, now ^= 1) {
        keep(A, a_next, a[now]);
        keep(B, b_next, b[now]);
        __syncthreads();
        if (k0 + BK < K) fetch(k0 + BK);
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a_part[OWN], b_part[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i) a_part[i] = a[now][k][i / RUN * 16 * RUN + y * RUN + i % RUN];
#pragma unroll
            for (int j = 0; j < OWN; ++j) b_part[j] = b[now][k][j / RUN * 16 * RUN + x * RUN + j % RUN];
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j) d[i][j] += a_part[i] * b_part[j];
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int m = m0 + i / RUN * 16 * RUN + y * RUN + i % RUN, n = n0 + j / RUN * 16 * RUN + x * RUN + j % RUN;
            if (m < M && n < N) C[int64_t(m) * N + n] = d[i][j];
        }
}

extern "C" int run(const void* A, const void* B, void* C, int M, int N, int K, int64_t a_m, int64_t a_k, int64_t b_k,
                   int64_t b_n, cudaStream_t stream) {
    matmul<<<divide_up(M, BLOCK) * divide_up(N, BLOCK), 256, 0, stream>>>({A, a_m, a_k}, {B, b_n, b_k}, (float*)C, M, N, K);
    return cudaGetLastError();
}
"""


@cache
def _hopper(dtype: torch.dtype, a_along_k: bool, b_along_k: bool, tile: Tile, processors: int) -> CudaFunction:
    layout = {"DTYPE": DTYPE_CODE[dtype], "A_K": int(a_along_k), "B_K": int(b_along_k)}
    names = {f"TILE_{name.upper()}": int(value) for name, value in asdict(tile).items() if name != "efficiency"}
    launch = {"GROUP": GROUP, "EARLY": EARLY, "PROCESSORS": processors}
    return cuda_function(HOPPER_SOURCE, "run", SIGNATURE, **layout, **names, **launch)


@cache
def _general(dtype: torch.dtype, a_along_k: bool, b_along_k: bool, block: int) -> CudaFunction:
    if dtype == torch.float32:  # its kernel looks at the strides as it runs
        return cuda_function(FP32_SOURCE, "run", SIGNATURE, BLOCK=block)
    layout = {"DTYPE": DTYPE_CODE[dtype], "A_K": int(a_along_k), "B_K": int(b_along_k)}
    return cuda_function(MMA_SOURCE, "run", SIGNATURE, **layout, BLOCK=block)


def _tile(M: int, N: int, K: int, processors: int) -> Tile:
    tiles = [t for t in TILES if t.splits == 1 or K >= 2048]
    best = min(tiles, key=lambda tile: tile.time(M, N, processors))
    fixed = {"m": BLOCK_M, "n": BLOCK_N, "stages": STAGES, "cluster": CLUSTER}
    return replace(best, **{name: value for name, value in fixed.items() if value})


@cache
def _function(
    dtype: torch.dtype, M: int, N: int, K: int, along_k: tuple[bool, bool], tma: bool, device: int
) -> tuple[CudaFunction, int]:
    """The library for this call, and the numbers that it needs room for: one for each tile, layout and dtype, for each
    takes seconds to compile."""
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    if tma and properties.major == 9:
        tile = _tile(M, N, K, processors)
        rows, columns = -(-M // (tile.m * tile.cluster)) * tile.m * tile.cluster, -(-N // tile.n) * tile.n
        return _hopper(dtype, *along_k, tile, processors), rows * columns * tile.splits if tile.splits > 1 else 0
    small = 32 if dtype == torch.float32 else 64
    return _general(dtype, *along_k, 128 if processors <= -(-M // 128) * -(-N // 128) else small), 0


def _zeros(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(1024, dtype=torch.int32, device=device)


_kept_zeros = cache(_zeros)


def _room(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For the sums of splits, and zeros which the kernel leaves as zeros: one for each stream, for they may run at the same
    time; and one for each call that is captured, for its graph may run on any stream."""
    zeros = _zeros if torch.cuda.is_current_stream_capturing() else _kept_zeros
    ready = zeros(device, torch.cuda.current_stream(device).cuda_stream)
    return torch.empty(count, dtype=torch.float32, device=device), ready


def _fits_tma(matrix: torch.Tensor, along: int) -> bool:
    """Whether its 16-bit elements are contiguous along this dim, in lines that start at multiples of 16 bytes."""
    line = matrix.stride(1 - along)
    return matrix.element_size() == 2 and matrix.stride(along) == 1 and line % 8 == 0 < line and matrix.data_ptr() % 16 == 0


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ B [K, N] -> a contiguous [M, N] in A's dtype."""
    M, K = A.shape
    N = B.shape[1]
    C = torch.empty((M, N), dtype=A.dtype, device=A.device)
    a_along_k, b_along_k = A.stride(1) == 1, B.stride(1) != 1
    tma = _fits_tma(A, a_along_k) and _fits_tma(B, not b_along_k)
    run, count = _function(A.dtype, M, N, K, (a_along_k, b_along_k), tma, A.device.index)
    held = _room(count, A.device) if count else ()
    room = [tensor.data_ptr() for tensor in held] or (None, None)
    pointers = (A.data_ptr(), B.data_ptr(), C.data_ptr())
    run(*pointers, M, N, K, *A.stride(), *B.stride(), *room)
    return C
