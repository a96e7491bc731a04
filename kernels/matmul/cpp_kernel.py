"""Matrix product in C++: A and B packed into panels of floats, multiplied by a kernel that keeps a tile of C in registers.

The loops are those of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a block of B stays
in L2, a panel of it in L1, and panels of A stream past.
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

TILE_ROWS = 0  # of C held in registers; 0: as many as the machine's registers hold
BLOCK_K = 256  # terms summed before C is touched again
BLOCK_N = 384  # columns of B packed at a time by a thread
BLOCK_M = 1024  # rows of C that use a packed block of B

SOURCE = r"""
#include <autokernel.hpp>
#include <cstdlib>
#include <memory>

constexpr int64_t L = AK_LANES;
#if TILE_ROWS
constexpr int64_t MR = TILE_ROWS, NR = 2 * L;
#elif defined(__AVX512F__)
constexpr int64_t MR = 14, NR = 2 * L;  // 28 of 32 registers
#elif defined(__AVX__)
constexpr int64_t MR = 6, NR = 2 * L;  // 12 of 16
#else
constexpr int64_t MR = 8, NR = 2 * L;  // 16 of 32 (NEON)
#endif

inline int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

struct Free { void operator()(float* p) const { std::free(p); } };
using Buffer = std::unique_ptr<float, Free>;
inline Buffer buffer(int64_t n) { return Buffer((float*)std::aligned_alloc(64, blocks(n, 16) * 64)); }

#if AK_VECTOR_BYTES == 64
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif AK_VECTOR_BYTES == 32
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

// Transpose L rows of L floats: each zip of the upper with the lower half turns the bits of (row, column) by one place.
inline void transpose(vfloat (&t)[L]) {
    for (int64_t turn = 1; turn < L; turn *= 2) {
        vfloat z[L];
#pragma GCC unroll 16
        for (int64_t i = 0; i < L / 2; ++i) {
            z[2 * i] = __builtin_shufflevector(t[i], t[i + L / 2], ZIP_LOW);
            z[2 * i + 1] = __builtin_shufflevector(t[i], t[i + L / 2], ZIP_HIGH);
        }
        std::memcpy(t, z, sizeof t);
    }
}

// x [rows, K] of any strides -> panel [K, W], zero from `rows` to W.
template <int64_t W, class T>
void pack(const T* x, int64_t stride_r, int64_t stride_k, int64_t rows, int64_t K, float* panel) {
    int64_t k = 0;
    if (stride_k == 1)
        for (; k + L <= K; k += L)
            for (int64_t w = 0; w < W; w += L) {
                vfloat t[L];
                for (int64_t i = 0; i < L; ++i) t[i] = w + i < rows ? load(x + (w + i) * stride_r + k) : vfloat{};
                transpose(t);
                for (int64_t i = 0; i < L; ++i)
                    std::memcpy(panel + (k + i) * W + w, &t[i], sizeof(float) * (W - w < L ? W - w : L));
            }
    else if (stride_r == 1 && rows == W && W % L == 0)
        for (; k < K; ++k)
            for (int64_t w = 0; w < W; w += L) store(panel + k * W + w, load(x + k * stride_k + w));
    for (; k < K; ++k)
        for (int64_t r = 0; r < W; ++r) panel[k * W + r] = r < rows ? float(x[r * stride_r + k * stride_k]) : 0.f;
}

// C [rows, columns] = (or +=) the product of a panel of A [K, MR] and a panel of B [K, NR].
inline void tile(const float* a, const float* b, int64_t K, float* c, int64_t ldc, int64_t rows, int64_t columns,
                 bool add) {
    vfloat sum[MR][NR / L] = {};
    for (int64_t k = 0; k < K; ++k, a += MR, b += NR) {
        const vfloat low = load(b), high = load(b + L);
#pragma GCC unroll 16
        for (int64_t r = 0; r < MR; ++r) {
            sum[r][0] += low * a[r];
            sum[r][1] += high * a[r];
        }
    }
    if (rows == MR && columns == NR) {
#pragma GCC unroll 16
        for (int64_t r = 0; r < MR; ++r, c += ldc) {
            store(c, add ? load(c) + sum[r][0] : sum[r][0]);
            store(c + L, add ? load(c + L) + sum[r][1] : sum[r][1]);
        }
        return;
    }
    float whole[MR][NR];
    std::memcpy(whole, sum, sizeof sum);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < columns; ++n) c[r * ldc + n] = (add ? c[r * ldc + n] : 0.f) + whole[r][n];
}

// sums [M, N] is C itself for float, otherwise where its sums are kept before they are rounded.
template <class T>
void matmul(const T* A, const T* B, T* C, float* sums, int64_t M, int64_t N, int64_t K, int64_t a_m, int64_t a_k,
            int64_t b_k, int64_t b_n, int64_t threads) {
    const int64_t panels_m = blocks(M, MR), panels_n = blocks(N, NR);
    // as many column blocks as threads can share evenly; rows are divided further only if those are too few
    const int64_t blocks_n = std::min(panels_n, blocks(blocks(N, BLOCK_N), threads) * threads);
    const int64_t blocks_m = std::min(panels_m, std::max(blocks(M, BLOCK_M), threads / blocks_n));
    const int64_t nc = blocks(panels_n, blocks_n) * NR, mc = blocks(panels_m, blocks_m) * MR;
    const Buffer packed_a = buffer(panels_m * MR * K);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2)
        for (int64_t k = 0; k < K; k += BLOCK_K)
            for (int64_t m = 0; m < M; m += MR) {
                const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
                float* a = packed_a.get() + k * panels_m * MR + m * kc;
                pack<MR>(A + m * a_m + k * a_k, a_m, a_k, std::min(MR, M - m), kc, a);
            }
        const Buffer packed_b = buffer(nc * std::min<int64_t>(BLOCK_K, K));
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t n0 = 0; n0 < N; n0 += nc)
            for (int64_t m0 = 0; m0 < M; m0 += mc) {
                const int64_t n1 = std::min(n0 + nc, N), m1 = std::min(m0 + mc, M);
                for (int64_t k = 0; k < K; k += BLOCK_K) {
                    const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
                    for (int64_t n = n0; n < n1; n += NR) {
                        float* b = packed_b.get() + (n - n0) * kc;
                        pack<NR>(B + n * b_n + k * b_k, b_n, b_k, std::min(NR, N - n), kc, b);
                        for (int64_t m = m0; m < m1; m += MR)
                            tile(packed_a.get() + k * panels_m * MR + m * kc, b, kc, sums + m * N + n, N,
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
#ifdef _OPENMP
    const int64_t threads = omp_get_max_threads();
#else
    const int64_t threads = 1;
#endif
    AK_DISPATCH(dtype, matmul((const T*)A, (const T*)B, (T*)C, sums, M, N, K, a_m, a_k, b_k, b_n, threads));
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
