"""Matmul in CUDA C++: on Hopper TMA and wgmma (see hopper_gemm.cuh); elsewhere, and for strides TMA cannot read, mma.sync.

fp32 is multiplied in fp32 (FFMA), not in TF32.
"""

import ctypes
import math
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "matmul"
BACKEND = "cuda"
TUNABLES = {
    "BLOCK_M": [0, 64, 128, 192],
    "BLOCK_N": [0, 64, 128, 192, 256],
    "STAGES": [0, 3, 4, 5, 6],
    "CLUSTER": [0, 1, 2],
    "SPLITS": [0, 1, 2],
    "GROUP": [2, 4, 8, 16],
    "EARLY": [0, 1],
}

BLOCK_M = 0  # of a thread block's tile on Hopper; here and below, 0: the best of TILES for the shape
BLOCK_N = 0
STAGES = 0  # steps along K in flight
CLUSTER = 0  # blocks that share a tile of B
SPLITS = 0  # blocks that share the K of a tile
GROUP = 8  # rows of (clusters of) tiles that are walked together, so that their operands meet in L2
EARLY = 1  # whether a launch may begin while the kernel ahead ends


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    stages: int
    turns: bool  # whether two warpgroups take turns, a tile each; else they share each
    cluster: int
    splits: int  # of K, whose sums meet in a cluster of that many times `cluster`
    efficiency: float  # next to the first's, where there is work enough

    @property
    def fits(self) -> bool:
        """Into the registers of two warpgroups, and beside a panel of C for each of them into shared memory."""
        sharers = 1 if self.turns else 2
        splits = self.splits == 1 or (not self.turns and self.n % (64 * self.splits) == 0)
        sums = self.m * self.n * 4 * (self.splits - 1) // self.splits  # of the other splits
        shared = self.stages * (self.m + self.n) * 128 + sums + 16384
        return (
            splits and 64 * sharers <= self.m and self.m * self.n <= (24576 if self.turns else 32768) and shared <= 230912
        )

    def period(self, M: int, N: int) -> int:
        """Of how many rows of C, [M, N], a tile has one, for all to start as far from a multiple of 16 bytes (see
        hopper_gemm.cuh); 1 where such tiles would be too large for M or N."""
        period, rows = 8 // math.gcd(N, 8), self.m * self.cluster
        fits = self.n <= N and 8 * period * rows * -(-M // (period * rows)) <= 9 * M
        return period if fits else 1

    def clocks(self, M: int, N: int, K: int, processors: int, along_k: bool = True) -> float:
        """Waves of clusters at 2,048 products a clock and processor. A wave of splits starts anew and adds up sums, one
        among several with its tensor cores idle for a quarter of the time; rows of C that start anywhere are written by
        those who multiply, unless tiles are of a period of them; many waves without clusters wait for L2; a start in
        clusters costs some. (Fitted to h100-matmul-tiles.txt.)"""
        rows, blocks = self.m * self.cluster, self.cluster * self.splits
        period = self.period(M, N) if along_k else 1
        waves = -(-period * -(-M // (period * rows)) * -(-N // self.n) // (processors // blocks))
        wave = self.m * self.n * K / self.splits / 2048 / self.efficiency
        if N % 8 and period == 1:
            wave += self.m * self.n / 11
        if waves > 14 and blocks == 1:
            wave *= 1.1
        if waves > 1 and self.splits > 1:
            wave *= 1.3
        return waves * wave + 1000 * (blocks > 1) + (4500 * waves - 1500) * (self.splits > 1)


TILES = (
    Tile(128, 256, 4, False, 2, 1, 1.0),
    Tile(128, 128, 6, True, 2, 1, 0.95),
    Tile(128, 128, 6, True, 1, 1, 0.98),
    Tile(128, 128, 5, False, 1, 2, 0.98),  # more splits: an H200 runs fewer than 32 clusters of 4 blocks at a time
    Tile(192, 128, 5, True, 1, 1, 0.98),
    Tile(128, 192, 5, True, 1, 1, 0.98),
    Tile(64, 128, 8, True, 2, 1, 0.69),
    Tile(128, 64, 8, True, 1, 1, 0.7),
    Tile(64, 64, 8, True, 1, 1, 0.45),
)

SIGNATURE = "ppp p"  # A, B, C, the numbers of a call

CALL_SOURCE = r"""
#include <cstdint>
struct Call {
    int64_t M, N, K, a_m, a_k, b_k, b_n;
};
"""

HOPPER_SOURCE = r"""
#include <hopper_gemm.cuh>

using T = std::conditional_t<DTYPE == 1, f16, bf16>;
using G = hopper::Gemm<T, TILE_M, TILE_N, TILE_STAGES, TILE_TURNS, TILE_CLUSTER, A_K, B_K, void, TILE_SPLITS, void,
                       TILE_PERIOD>;

extern "C" int run(const void* A, const void* B, void* C, const Call* c, cudaStream_t stream) {
    const hopper::Problem problem = {int(c->M), int(c->N), int(c->K), GROUP};
    const int64_t lda = A_K ? c->a_m : c->a_k, ldb = B_K ? c->b_n : c->b_k;
    return hopper::launch_gemm<G>(A, B, nullptr, C, problem, lda, ldb, PROCESSORS, EARLY, stream);
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

extern "C" int run(const void* a, const void* b, void* C, const Call* c, cudaStream_t stream) {
    const Matrix A = {a, c->a_m, c->a_k}, B = {b, c->b_n, c->b_k};
    const int blocks = divide_up(c->M, BLOCK) * divide_up(c->N, BLOCK);
    matmul<<<blocks, 128, 0, stream>>>(A, B, (T*)C, c->M, c->N, c->K, A.in_vectors(A_K), B.in_vectors(B_K));
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
    // Neighbouring threads read along the dim that is contiguous.
    const auto read = [&](const Matrix& from, int row0, int rows, int k0, auto& to) {
        const bool along_k = from.k_stride == 1;
        const int row = row0 + (along_k ? threadIdx.x / BK : threadIdx.x % BLOCK);
        const int k = k0 + (along_k ? threadIdx.x % BK : threadIdx.x / BLOCK);
        const int row_step = along_k ? 256 / BK : 0, k_step = along_k ? 0 : 256 / BLOCK;
        const float* at = static_cast<const float*>(from.base) + row * from.row_stride + k * from.k_stride;
        const int64_t step = row_step * from.row_stride + k_step * from.k_stride;
#pragma unroll
        for (int i = 0; i < sizeof(to) / 4; ++i, at += step)
            to[i] = row + i * row_step < rows && k + i * k_step < K ? *at : 0;
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

extern "C" int run(const void* a, const void* b, void* C, const Call* c, cudaStream_t stream) {
    const int blocks = divide_up(c->M, BLOCK) * divide_up(c->N, BLOCK);
    matmul<<<blocks, 256, 0, stream>>>({a, c->a_m, c->a_k}, {b, c->b_n, c->b_k}, (float*)C, c->M, c->N, c->K);
    return cudaGetLastError();
}
"""


@cache
def _hopper(
    dtype: torch.dtype, a_along_k: bool, b_along_k: bool, tile: Tile, processors: int, period: int = 1
) -> CudaFunction:
    layout = {"DTYPE": DTYPE_CODE[dtype], "A_K": int(a_along_k), "B_K": int(b_along_k)}
    names = {f"TILE_{name.upper()}": int(value) for name, value in asdict(tile).items() if name != "efficiency"}
    launch = {"GROUP": GROUP, "EARLY": EARLY, "PROCESSORS": processors, "TILE_PERIOD": period}
    return cuda_function(CALL_SOURCE + HOPPER_SOURCE, "run", SIGNATURE, **layout, **names, **launch)


@cache
def _general(dtype: torch.dtype, a_along_k: bool, b_along_k: bool, block: int) -> CudaFunction:
    if dtype == torch.float32:  # its kernel looks at the strides as it runs
        return cuda_function(CALL_SOURCE + FP32_SOURCE, "run", SIGNATURE, BLOCK=block)
    layout = {"DTYPE": DTYPE_CODE[dtype], "A_K": int(a_along_k), "B_K": int(b_along_k)}
    return cuda_function(CALL_SOURCE + MMA_SOURCE, "run", SIGNATURE, **layout, BLOCK=block)


def _tile(M: int, N: int, K: int, processors: int, along_k: bool = True) -> Tile:
    asked = {"m": BLOCK_M, "n": BLOCK_N, "stages": STAGES, "cluster": CLUSTER, "splits": SPLITS}
    fixed = {name: value for name, value in asked.items() if value}
    tiles = [tile for tile in (replace(tile, **fixed) for tile in TILES) if tile.fits]
    return min(tiles or TILES, key=lambda tile: tile.clocks(M, N, K, processors, along_k))


@lru_cache(4096)
def _plan(dtype: torch.dtype, a: tuple, a_strides: tuple, b: tuple, b_strides: tuple, aligned: bool, device: int) -> tuple:
    """The library for a call and its numbers, by the shapes of A and B, their strides, and whether both are aligned.

    Prepared once: Python's part of a small product takes longer than the GPU's.
    """
    M, K, N = *a, b[1]
    numbers = (ctypes.c_int64 * 7)(M, N, K, *a_strides, *b_strides)
    along_k = a_strides[1] == 1, b_strides[1] != 1
    a_line, a_inner = a_strides if along_k[0] else a_strides[::-1]
    b_line, b_inner = b_strides[::-1] if along_k[1] else b_strides
    lines = a_inner == b_inner == 1 and a_line % 8 == b_line % 8 == 0 < min(a_line, b_line)
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    if properties.major == 9 and dtype != torch.float32 and aligned and lines:  # as TMA asks
        tile = _tile(M, N, K, processors, all(along_k))
        return _hopper(dtype, *along_k, tile, processors, tile.period(M, N) if all(along_k) else 1), numbers
    small = 32 if dtype == torch.float32 else 64
    block = 128 if processors <= -(-M // 128) * -(-N // 128) else small
    return _general(dtype, *along_k, block), numbers


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ B [K, N] -> a contiguous [M, N] in A's dtype."""
    C = A.new_empty(A.shape[0], B.shape[1])
    a, b = A.data_ptr(), B.data_ptr()
    run, numbers = _plan(A.dtype, A.shape, A.stride(), B.shape, B.stride(), (a | b) % 16 == 0, C.get_device())
    run(a, b, C.data_ptr(), numbers)
    return C
