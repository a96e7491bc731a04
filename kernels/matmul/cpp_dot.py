"""Matrix product in C++ by dot products along K: nothing is packed. Pays where A has few rows and B is a transposed weight.

Every element of a tile of C has a vector of partial sums of its own, added up at the end.
"""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "matmul"
BACKEND = "cpp"
TUNABLES = {"ROWS": [1, 2, 3, 4], "COLUMNS": [2, 3, 4, 6], "CHUNK_COLUMNS": [24, 48, 96, 192]}

ROWS = 4  # of a tile of C: ROWS * COLUMNS vectors of sums are in flight
COLUMNS = 4
CHUNK_COLUMNS = 48  # columns that a thread takes at a time

SOURCE = r"""
#include <autokernel.hpp>

template <int R, int C, class T>
inline void tile(const T* a, int64_t stride_a, const T* b, int64_t stride_b, int64_t K, T* c, int64_t stride_c) {
    vfloat sum[R][C] = {};
    auto add = [&](auto read, int64_t k) {
        vfloat row[R];
        for (int r = 0; r < R; ++r) row[r] = read(a + r * stride_a + k);
        for (int n = 0; n < C; ++n) {
            const vfloat column = read(b + n * stride_b + k);
            for (int r = 0; r < R; ++r) sum[r][n] += row[r] * column;
        }
    };
    int64_t k = 0;
    for (; k + AK_LANES <= K; k += AK_LANES) add([](const T* p) { return load(p); }, k);
    if (k < K) add([=](const T* p) { return load_first(p, K - k, 0.f); }, k);
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < C; ++n) c[r * stride_c + n] = T(sum_of(sum[r][n]));
}

template <int C, class T>
inline void columns(const T* A, int64_t stride_a, const T* b, int64_t stride_b, int64_t M, int64_t N, int64_t K, T* c) {
    int64_t m = 0;
    for (; m + ROWS <= M; m += ROWS) tile<ROWS, C>(A + m * stride_a, stride_a, b, stride_b, K, c + m * N, N);
    for (; m < M; ++m) tile<1, C>(A + m * stride_a, stride_a, b, stride_b, K, c + m * N, N);
}

template <class T>
void matmul(const T* A, const T* B, T* C, int64_t M, int64_t N, int64_t K, int64_t stride_a, int64_t stride_b) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t first = 0; first < N; first += CHUNK_COLUMNS) {
        const int64_t last = std::min<int64_t>(first + CHUNK_COLUMNS, N);
        int64_t n = first;
        for (; n + COLUMNS <= last; n += COLUMNS)
            columns<COLUMNS>(A, stride_a, B + n * stride_b, stride_b, M, N, K, C + n);
        for (; n < last; ++n) columns<1>(A, stride_a, B + n * stride_b, stride_b, M, N, K, C + n);
    }
}

extern "C" int run(int dtype, const void* A, const void* B, void* C, int64_t M, int64_t N, int64_t K, int64_t stride_a,
                   int64_t stride_b) {
    AK_DISPATCH(dtype, matmul((const T*)A, (const T*)B, (T*)C, M, N, K, stride_a, stride_b));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i ppp lll ll", ROWS=ROWS, COLUMNS=COLUMNS, CHUNK_COLUMNS=CHUNK_COLUMNS)


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [M, K], B [K, N] -> C [M, N], contiguous, in A's dtype. Operands not contiguous along K are copied first."""
    (M, K), N = A.shape, B.shape[1]
    C = torch.empty(M, N, dtype=A.dtype)
    A = A if A.stride(1) == 1 else A.contiguous()
    weight = B.t() if B.stride(0) == 1 else B.t().contiguous()
    pointers = A.data_ptr(), weight.data_ptr(), C.data_ptr()
    _run(DTYPE_CODE[A.dtype], *pointers, M, N, K, A.stride(0), weight.stride(0))
    return C
