"""Reduce in C++: pieces of fixed size in parallel, then their results in order, so that threads do not change the bits."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "reduce"
BACKEND = "cpp"
TUNABLES = {
    "UNROLL": [2, 4, 8],
    "PIECE": [1024, 4096, 16384],
    "PIECE_ROWS": [32, 64, 128, 256],
    "PIECE_COLUMNS": [512, 2048, 8192],
    "PARALLEL_FROM": [16384, 65536],
}

UNROLL = 4  # vectors in flight along a row
PIECE = 4096  # elements of a row that one task reduces
PIECE_ROWS = 128  # where dim is not the last: rows that one task reduces ...
PIECE_COLUMNS = 2048  # ... over this many columns, whose results stay in L1
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>

struct Sum {
    static constexpr float identity = 0;
    template <class V>
    static V join(V a, V b) { return a + b; }
};
struct Max {  // NaN wins
    static constexpr float identity = -INFINITY;
    template <class V>
    static V join(V a, V b) { return ((a != a) | (a > b)) ? a : b; }
};

template <class T>
float reduce_piece(Sum, const T* x, int64_t N) {
    vfloat part[UNROLL] = {};
    fold_row<UNROLL>(N, 0, [&](int u, vfloat v) { part[u] += v; }, x);
    for (int u = 1; u < UNROLL; ++u) part[0] += part[u];
    return sum_of(part[0]);
}

// The vector maximum passes over NaN. A sum beside it, cheaper than a test, is NaN if there was one: then look again.
template <class T>
float reduce_piece(Max, const T* x, int64_t N) {
    vfloat best[UNROLL], sum[UNROLL];
    for (int u = 0; u < UNROLL; ++u) best[u] = splat(-INFINITY), sum[u] = splat(0);
    auto add = [&](int u, vfloat v) {
        best[u] = larger(v, best[u]);
        sum[u] += v;
    };
    fold_row<UNROLL>(N, -INFINITY, add, x);
    for (int u = 1; u < UNROLL; ++u) best[0] = larger(best[u], best[0]), sum[0] += sum[u];
    float result = max_of(best[0]);
    if (std::isnan(sum_of(sum[0])))
        for (int64_t n = 0; n < N; ++n) result = Max::join(result, float(x[n]));
    return result;
}

template <class Op, class T>
void reduce_rows(const T* x, T* y, int64_t M, int64_t N, int64_t stride) {
    if (N <= PIECE) {
#pragma omp parallel for schedule(static) if (M * N >= PARALLEL_FROM)
        for (int64_t m = 0; m < M; ++m) y[m] = T(reduce_piece(Op(), x + m * stride, N));
        return;
    }
    const int64_t pieces = (N + PIECE - 1) / PIECE;
    std::vector<float> partial(M * pieces);
#pragma omp parallel for schedule(static)
    for (int64_t task = 0; task < M * pieces; ++task) {
        const int64_t m = task / pieces, n = task % pieces * PIECE;
        partial[task] = reduce_piece(Op(), x + m * stride + n, std::min<int64_t>(PIECE, N - n));
    }
    for (int64_t m = 0; m < M; ++m) {
        double result = Op::identity;
        for (int64_t p = 0; p < pieces; ++p) result = Op::join(result, double(partial[m * pieces + p]));
        y[m] = T(float(result));
    }
}

// The first `rows` rows of `width` columns each into part[width]; four at a time, which spares trips to part.
template <class Op, class T>
void reduce_columns(const T* x, float* part, int64_t rows, int64_t width, int64_t inner) {
    std::fill(part, part + width, Op::identity);
    auto join4 = [](int, vfloat p, vfloat a, vfloat b, vfloat c, vfloat d) {
        return Op::join(p, Op::join(Op::join(a, b), Op::join(c, d)));
    };
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const T* row = x + r * inner;
        map_row<1>(part, width, 0, join4, part, row, row + inner, row + 2 * inner, row + 3 * inner);
    }
    auto join1 = [](int, vfloat p, vfloat a) { return Op::join(p, a); };
    for (; r < rows; ++r) map_row<1>(part, width, 0, join1, part, x + r * inner);
}

template <class Op, class T>
void reduce_middle(const T* x, T* y, int64_t outer, int64_t R, int64_t inner) {
    const int64_t pieces = (R + PIECE_ROWS - 1) / PIECE_ROWS, blocks = (inner + PIECE_COLUMNS - 1) / PIECE_COLUMNS;
    std::vector<float> partial(outer * pieces * inner);
#pragma omp parallel for schedule(static) if (outer * R * inner >= PARALLEL_FROM)
    for (int64_t task = 0; task < outer * pieces * blocks; ++task) {
        const int64_t column = task % blocks * PIECE_COLUMNS, piece = task / blocks;
        const int64_t o = piece / pieces, r = piece % pieces * PIECE_ROWS;
        reduce_columns<Op>(x + (o * R + r) * inner + column, &partial[piece * inner + column],
                           std::min<int64_t>(PIECE_ROWS, R - r), std::min<int64_t>(PIECE_COLUMNS, inner - column), inner);
    }
    for (int64_t o = 0; o < outer; ++o)
        for (int64_t i = 0; i < inner; ++i) {
            double result = Op::identity;
            for (int64_t p = 0; p < pieces; ++p) result = Op::join(result, double(partial[(o * pieces + p) * inner + i]));
            y[o * inner + i] = T(float(result));
        }
}

template <class Op, class T>
void reduce(const T* x, T* y, int64_t outer, int64_t R, int64_t inner, int64_t stride) {
    if (inner == 1) reduce_rows<Op>(x, y, outer, R, stride);
    else reduce_middle<Op>(x, y, outer, R, inner);
}

extern "C" int run(int dtype, int max, const void* x, void* y, int64_t outer, int64_t R, int64_t inner, int64_t stride) {
    AK_DISPATCH(dtype, (max ? reduce<Max, T> : reduce<Sum, T>)((const T*)x, (T*)y, outer, R, inner, stride));
    return 0;
}
"""

_tunables = {
    "UNROLL": UNROLL,
    "PIECE": PIECE,
    "PIECE_ROWS": PIECE_ROWS,
    "PIECE_COLUMNS": PIECE_COLUMNS,
    "PARALLEL_FROM": PARALLEL_FROM,
}
_run = cpp_function(SOURCE, "run", "ii pp llll", **_tunables)


def kernel_fn(x: torch.Tensor, dim: int = -1, op: str = "sum") -> torch.Tensor:
    """x of any rank -> x without `dim`, contiguous, of x's dtype."""
    dim %= x.dim()
    shape, N = x.shape, x.shape[dim]
    y = torch.empty(shape[:dim] + shape[dim + 1 :], dtype=x.dtype)
    if not (x.dim() == 2 and dim == 1 and x.stride(1) == 1):
        x = x.contiguous()
    inner = 1 if dim == x.dim() - 1 else x.stride(dim)
    stride = x.stride(0) if x.dim() == 2 else N
    _run(DTYPE_CODE[x.dtype], op == "max", x.data_ptr(), y.data_ptr(), y.numel() // inner, N, inner, stride)
    return y
