"""Products of a batch of matrices in C++: each thread takes a block of one product, whose operands it packs for itself.

The inside is matmul's: panels of floats, and a tile of the result kept in registers (blocks.hpp, panels.hpp).
"""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "bmm"
BACKEND = "cpp"
TUNABLES = {
    "TILE_ROWS": [0, 4, 6, 8, 10, 12, 14],
    "BLOCK_K": [64, 128, 256, 384, 512],
    "BLOCK_M": [64, 128, 256, 512],
    "SHARES": [1, 2, 4, 8],
}

TILE_ROWS = 0  # rows of C held in registers; 0: as many as this machine's registers hold
BLOCK_K = 256  # terms summed before C is touched again
BLOCK_M = 256  # rows of C that a thread takes at a time
SHARES = 4  # blocks for each thread at least, where the products are that large

SOURCE = r"""
#include <blocks.hpp>

struct Sides {
    int64_t outer, inner, row, column;  // strides: of both dims of the batch, and of the matrix
};

template <class T>
void bmm(const T* A, const T* B, T* C, int64_t outer, int64_t inner, int64_t M, int64_t N, int64_t K, Sides a, Sides b) {
    constexpr bool exact = std::is_same_v<T, float>;  // C has room for the sums
    const int64_t batch = outer * inner, threads = thread_count();
    const int64_t blocks_m = blocks(M, BLOCK_M), wanted = blocks(SHARES * threads, batch * blocks_m);
    const int64_t blocks_n = std::max<int64_t>(1, std::min(wanted, blocks(N, 4 * NR)));
    const int64_t mc = blocks(blocks(M, blocks_m), MR) * MR, nc = blocks(blocks(N, blocks_n), NR) * NR;
    const int64_t count_m = blocks(M, mc), count_n = blocks(N, nc);
#pragma omp parallel if (batch * M * N * K >= 65536)
    {
        const Buffer packed = buffer(mc * BLOCK_K), sums = buffer(exact ? 0 : mc * nc);
        alignas(64) float panel[BLOCK_K * NR];
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < batch * count_m * count_n; ++unit) {
            const int64_t index = unit / (count_m * count_n), at = unit % (count_m * count_n);
            const int64_t m = at / count_n * mc, n = at % count_n * nc;
            const int64_t rows = std::min(mc, M - m), columns = std::min(nc, N - n);
            const T* from_a = A + index / inner * a.outer + index % inner * a.inner + m * a.row;
            const T* from_b = B + index / inner * b.outer + index % inner * b.inner + n * b.column;
            T* to = C + (index * M + m) * N + n;
            float* into = exact ? (float*)to : sums.get();
            const int64_t line = exact ? N : nc;
            block(from_a, a.row, a.column, from_b, b.row, b.column, into, line, rows, columns, K, packed.get(), panel);
            if (!exact) store_rows(into, line, to, N, rows, columns);
        }
    }
}

extern "C" int run(int dtype, const void* A, const void* B, void* C, int64_t outer, int64_t inner, int64_t M, int64_t N,
                   int64_t K, int64_t a_outer, int64_t a_inner, int64_t a_m, int64_t a_k, int64_t b_outer, int64_t b_inner,
                   int64_t b_k, int64_t b_n) {
    const Sides a = {a_outer, a_inner, a_m, a_k}, b = {b_outer, b_inner, b_k, b_n};
    AK_DISPATCH(dtype, bmm((const T*)A, (const T*)B, (T*)C, outer, inner, M, N, K, a, b));
    return 0;
}
"""

_run = cpp_function(
    SOURCE, "run", "i ppp lllll llll llll", TILE_ROWS=TILE_ROWS, BLOCK_K=BLOCK_K, BLOCK_M=BLOCK_M, SHARES=SHARES
)


def _with_two(x: torch.Tensor) -> torch.Tensor:
    """x as a batch of two dims."""
    return x.unsqueeze(0) if x.dim() == 3 else x if x.dim() == 4 else x.flatten(0, -4)


def kernel_fn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [*batch, M, K], B [*batch, K, N], of any strides -> C [*batch, M, N], contiguous, in A's dtype; sums in float."""
    C = torch.empty(*A.shape[:-1], B.shape[-1], dtype=A.dtype)
    a, b = _with_two(A), _with_two(B)
    (outer, inner, M, K), N = a.shape, b.shape[-1]
    pointers = a.data_ptr(), b.data_ptr(), C.data_ptr()
    _run(DTYPE_CODE[A.dtype], *pointers, outer, inner, M, N, K, *a.stride(), *b.stride())
    return C
