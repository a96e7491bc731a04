"""Matmul in CUDA C++: on Hopper by TMA and wgmma (see hopper_gemm.cuh); else, and for strides TMA cannot read, mma.sync.

fp32 is multiplied in fp32 (FFMA), not in TF32.
"""

from functools import cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "matmul"
BACKEND = "cuda"
TUNABLES = {"TILE": [-1, 0, 1, 2, 3], "GROUP": [2, 4, 8, 16], "DEPTH": [3, 4]}

TILE = -1  # of those in `hopper_matmul`; -1: the one that should take least time
GROUP = 4  # rows of (clusters of) tiles that are walked together, so that their operands meet in L2
DEPTH = 4  # steps along K in flight, for the largest tile

SOURCE = r"""
#include <tensor_cores.cuh>
#if AK_ARCH == 900
#include <hopper_gemm.cuh>
#endif

constexpr int STEP = 32;  // along K

// BM x BN of C by 4 warps, PIPELINE steps in flight.
template <class T, int BM, int BN, bool A_ALONG_K, bool B_ALONG_K, int PIPELINE = 3>
__global__ void __launch_bounds__(128)
    mma_matmul(Matrix A, Matrix B, T* C, int M, int N, int K, bool a_vectors, bool b_vectors) {
    __shared__ Tile<T, BM, STEP, A_ALONG_K> a[PIPELINE];
    __shared__ Tile<T, BN, STEP, B_ALONG_K> b[PIPELINE];
    const int tiles_m = divide_up(M, BM), m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
    const int steps = divide_up(K, STEP), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp / 2 * (BM / 2), warp_n = warp % 2 * (BN / 2);
    const auto fill = [&](int step) {
        if (step < steps) {
            a[step % PIPELINE].fill(A, m0, step * STEP, M, K, a_vectors);
            b[step % PIPELINE].fill(B, n0, step * STEP, N, K, b_vectors);
        }
        commit_copies();
    };
    float d[BM / 32][BN / 16][4] = {};
    for (int step = 0; step < PIPELINE - 1; ++step) fill(step);
    for (int step = 0; step < steps; ++step) {
        wait_copies<PIPELINE - 2>();
        __syncthreads();
        fill(step + PIPELINE - 1);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t a_part[BM / 32][4], b_part[BN / 32][4];
#pragma unroll
            for (int i = 0; i < BM / 32; ++i) a[step % PIPELINE].template fragment<false>(a_part[i], warp_m + 16 * i, k);
#pragma unroll
            for (int j = 0; j < BN / 32; ++j) b[step % PIPELINE].template fragment<true>(b_part[j], warp_n + 16 * j, k);
#pragma unroll
            for (int i = 0; i < BM / 32; ++i)
#pragma unroll
                for (int j = 0; j < BN / 16; ++j)
                    multiply_16x8<T>(d[i][j], a_part[i], b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < BM / 32; ++i)
#pragma unroll
        for (int j = 0; j < BN / 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int m = m0 + warp_m + 16 * i + lane / 4 + e / 2 * 8, n = n0 + warp_n + 8 * j + lane % 4 * 2 + e % 2;
                if (m < M && n < N) C[int64_t(m) * N + n] = from_float<T>(d[i][j][e]);
            }
}

// fp32: BM x BN of C by 16 x 16 threads, operands through shared memory, the next step's in registers meanwhile.
template <int BM, int BN, int BK = 8>
__global__ void __launch_bounds__(256, 2) fp32_matmul(Matrix A, Matrix B, float* C, int M, int N, int K) {
    constexpr int TM = BM / 16, TN = BN / 16, VM = TM < 4 ? TM : 4, VN = TN < 4 ? TN : 4;  // rows of a thread: runs of VM
    __shared__ alignas(16) float a[2][BK][BM + 4], b[2][BK][BN + 4];
    const int tiles_m = divide_up(M, BM), m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float a_next[BM * BK / 256], b_next[BN * BK / 256];
    const auto read = [&](const Matrix& from, int row0, int rows, int k0, auto& to, int count) {
#pragma unroll
        for (int i = 0; i < sizeof(to) / 4; ++i) {
            const int at = threadIdx.x + 256 * i;
            const int row = row0 + (from.k_stride == 1 ? at / BK : at % count);
            const int k = k0 + (from.k_stride == 1 ? at % BK : at / count);
            const bool inside = row < rows && k < K;
            to[i] = inside ? static_cast<const float*>(from.base)[row * from.row_stride + k * from.k_stride] : 0;
        }
    };
    const auto keep = [&](const Matrix& from, const auto& values, auto& to, int count) {
#pragma unroll
        for (int i = 0; i < sizeof(values) / 4; ++i) {
            const int at = threadIdx.x + 256 * i;
            to[from.k_stride == 1 ? at % BK : at / count][from.k_stride == 1 ? at / BK : at % count] = values[i];
        }
    };
    const auto fetch = [&](int k0) {
        read(A, m0, M, k0, a_next, BM);
        read(B, n0, N, k0, b_next, BN);
    };
    float d[TM][TN] = {};
    fetch(0);
    for (int k0 = 0, now = 0; k0 < K; k0 += BK, now ^= 1) {
        keep(A, a_next, a[now], BM);
        keep(B, b_next, b[now], BN);
        __syncthreads();
        if (k0 + BK < K) fetch(k0 + BK);
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a_part[TM], b_part[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a_part[i] = a[now][k][i / VM * 16 * VM + y * VM + i % VM];
#pragma unroll
            for (int j = 0; j < TN; ++j) b_part[j] = b[now][k][j / VN * 16 * VN + x * VN + j % VN];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) d[i][j] += a_part[i] * b_part[j];
        }
    }
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int m = m0 + i / VM * 16 * VM + y * VM + i % VM, n = n0 + j / VN * 16 * VN + x * VN + j % VN;
            if (m < M && n < N) C[int64_t(m) * N + n] = d[i][j];
        }
}

#if AK_ARCH == 900
template <class T>
int hopper_matmul(const Matrix& A, const Matrix& B, T* C, int M, int N, int K, int processors, cudaStream_t stream) {
    const int64_t lda = A_K ? A.row_stride : A.k_stride, ldb = B_K ? B.row_stride : B.k_stride;
    const hopper::Problem problem = {M, N, K, GROUP, true};
    const auto with = [&](auto gemm) {
        return hopper::launch_gemm<decltype(gemm)>(A.base, B.base, nullptr, C, problem, lda, ldb, processors, stream);
    };
    const hopper::Tiling tilings[] = {{256, 256, 2, 1.0}, {128, 128, 1, 0.8}, {64, 64, 1, 0.4}, {256, 256, 8, 0.85}};
    switch (TILE >= 0 ? TILE : hopper::fastest(tilings, K >= 2048 ? 4 : 3, M, N, processors)) {
        case 0: return with(hopper::Gemm<T, 128, 256, DEPTH, 2, A_K, B_K>{});
        case 1: return with(hopper::Gemm<T, 128, 128, 5, 1, A_K, B_K>{});
        case 2: return with(hopper::Gemm<T, 64, 64, 8, 1, A_K, B_K>{});
        default: return with(hopper::Gemm<T, 128, 256, DEPTH, 2, A_K, B_K, void, 4>{});
    }
}
#endif

extern "C" int run(const void* A_base, const void* B_base, void* C, int M, int N, int K, int64_t a_m, int64_t a_k,
                   int64_t b_k, int64_t b_n, cudaStream_t stream) {
    const Matrix A = {A_base, a_m, a_k}, B = {B_base, b_n, b_k};
    int device, processors;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const bool large = divide_up(M, 128) * divide_up(N, 128) >= processors;
#if DTYPE == 0
    if (large) fp32_matmul<128, 128><<<divide_up(M, 128) * divide_up(N, 128), 256, 0, stream>>>(A, B, (float*)C, M, N, K);
    else fp32_matmul<32, 32><<<divide_up(M, 32) * divide_up(N, 32), 256, 0, stream>>>(A, B, (float*)C, M, N, K);
#else
    using T = std::conditional_t<DTYPE == 1, f16, bf16>;
    const bool a_vectors = A.in_vectors(A_K), b_vectors = B.in_vectors(B_K);
#if AK_ARCH == 900
    if (a_vectors && b_vectors && K > 0) return hopper_matmul<T>(A, B, (T*)C, M, N, K, processors, stream);
#endif
    const auto with = [&](auto kernel, int size) {
        kernel<<<divide_up(M, size) * divide_up(N, size), 128, 0, stream>>>(A, B, (T*)C, M, N, K, a_vectors, b_vectors);
    };
    if (large) with(mma_matmul<T, 128, 128, A_K, B_K>, 128);
    else with(mma_matmul<T, 64, 64, A_K, B_K>, 64);
#endif
    return cudaGetLastError();
}
"""


@cache
def _compiled(dtype: torch.dtype, a_along_k: bool, b_along_k: bool) -> CudaFunction:
    """A library for each dtype and layout that is met: one for all would take a dozen times as long to compile."""
    layout = {"DTYPE": DTYPE_CODE[dtype], "A_K": int(a_along_k), "B_K": int(b_along_k)}
    return cuda_function(SOURCE, "run", "ppp iii llll", **layout, TILE=TILE, GROUP=GROUP, DEPTH=DEPTH)


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K] @ B [K, N] -> a contiguous [M, N] in A's dtype."""
    M, K = A.shape
    N = B.shape[1]
    C = torch.empty((M, N), dtype=A.dtype, device=A.device)
    fp32 = A.dtype == torch.float32  # its kernel asks the strides as it runs
    run = _compiled(A.dtype, fp32 or A.stride(1) == 1, fp32 or (B.stride(0) == 1 and N > 1))
    run(A.data_ptr(), B.data_ptr(), C.data_ptr(), M, N, K, *A.stride(), *B.stride())
    return C
