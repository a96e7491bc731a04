"""Matrix product in C++: A and B packed into panels of floats, multiplied by a kernel that keeps a tile of C in registers.

After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a panel of B stays in L1 while the
panels of A stream past it from L2.
"""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "matmul"
BACKEND = "cpp"
TUNABLES = {
    "TILE_ROWS": [0, 4, 6, 8, 10, 12, 14],
    "BLOCK_K": [128, 192, 256, 384, 512, 768],
    "BLOCK_N": [128, 256, 384, 512, 768],
    "BLOCK_M": [256, 512, 1024, 2048],
}

TILE_ROWS = 0  # rows of C held in registers; 0: as many as this machine's registers hold
BLOCK_K = 384  # terms summed before C is touched again
BLOCK_N = 384  # columns of C that a thread takes at a time
BLOCK_M = 1024  # rows of C that a thread takes at a time: as many as share a packed panel of B

SOURCE = r"""
#include <panels.hpp>

// sums [M, N] is C itself for float, otherwise where its sums are kept before they are rounded.
template <class T>
void matmul(const T* A, const T* B, T* C, float* sums, int64_t M, int64_t N, int64_t K, int64_t a_m, int64_t a_k,
            int64_t b_k, int64_t b_n) {
    const int64_t threads = thread_count();
    const int64_t panels_m = blocks(M, MR), panels_n = blocks(N, NR);
    // as many column blocks as threads can share evenly; rows are divided further only if those are too few
    const int64_t blocks_n = std::min(panels_n, blocks(blocks(N, BLOCK_N), threads) * threads);
    const int64_t blocks_m = std::min(panels_m, std::max(blocks(M, BLOCK_M), threads / blocks_n));
    const int64_t nc = blocks(panels_n, blocks_n) * NR, mc = blocks(panels_m, blocks_m) * MR;
    const Buffer packed_a = buffer(panels_m * MR * K);
#pragma omp parallel
    {
#pragma omp for collapse(2)
        for (int64_t k = 0; k < K; k += BLOCK_K)
            for (int64_t m = 0; m < M; m += MR) {
                const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
                float* a = packed_a.get() + k * panels_m * MR + m * kc;
                pack<MR>(A + m * a_m + k * a_k, a_m, a_k, std::min(MR, M - m), kc, a);
            }
        alignas(64) float b[BLOCK_K * NR];
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t n0 = 0; n0 < N; n0 += nc)
            for (int64_t m0 = 0; m0 < M; m0 += mc) {
                const int64_t n1 = std::min(n0 + nc, N), m1 = std::min(m0 + mc, M);
                for (int64_t k = 0; k < K; k += BLOCK_K) {
                    const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
                    for (int64_t n = n0; n < n1; n += NR) {
                        pack<NR>(B + n * b_n + k * b_k, b_n, b_k, std::min(NR, N - n), kc, b);
                        for (int64_t m = m0; m < m1; m += MR)
                            multiply_tile(packed_a.get() + k * panels_m * MR + m * kc, b, kc, sums + m * N + n, N,
                                 std::min(MR, M - m), std::min(NR, N - n), k > 0);
                    }
                }
                if ((void*)sums != (void*)C)
                    for (int64_t m = m0; m < m1; ++m)
                        map_row<2>(C + m * N + n0, n1 - n0, 0, [](int, vfloat v) { return v; }, sums + m * N + n0);
            }
    }
}

extern "C" int run(int dtype, const void* A, const void* B, void* C, float* sums, int64_t M, int64_t N, int64_t K,
                   int64_t a_m, int64_t a_k, int64_t b_k, int64_t b_n) {
    AK_DISPATCH(dtype, matmul((const T*)A, (const T*)B, (T*)C, sums, M, N, K, a_m, a_k, b_k, b_n));
    return 0;
}
"""

_run = cpp_function(
    SOURCE, "run", "i pppp lll llll", TILE_ROWS=TILE_ROWS, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, BLOCK_M=BLOCK_M
)


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K], B [K, N], of any strides -> C [M, N], contiguous, in A's dtype; sums are kept in float."""
    (M, K), N = A.shape, B.shape[1]
    C = torch.empty(M, N, dtype=A.dtype)
    sums = C if A.dtype == torch.float32 else torch.empty(M, N)
    pointers = A.data_ptr(), B.data_ptr(), C.data_ptr(), sums.data_ptr()
    _run(DTYPE_CODE[A.dtype], *pointers, M, N, K, *A.stride(), *B.stride())
    return C
