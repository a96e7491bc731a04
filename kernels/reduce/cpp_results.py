"""Reduce in C++, each result by one task from start to end: no second stage, for shapes with many results."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "reduce"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [2, 4, 8], "COLUMNS": [1, 2, 4, 8], "SPAN": [16, 64, 256], "PARALLEL_FROM": [16384, 65536]}

UNROLL = 4  # vectors in flight along a row
COLUMNS = 4  # vectors of columns side by side where dim is not the last, their results in L1
SPAN = 64  # vectors or rows added up before they join the rest: rounding grows with the length of a sum
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>

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
float reduce_row(Sum, const T* x, int64_t N) {
    vfloat part[UNROLL] = {};
    fold_row<UNROLL>(N, 0, [&](int u, vfloat v) { part[u] += v; }, x);
    for (int u = 1; u < UNROLL; ++u) part[0] += part[u];
    return sum_of(part[0]);
}

// The vector maximum passes over NaN. A sum beside it, cheaper than a test, is NaN if there was one: then look again.
template <class T>
float reduce_row(Max, const T* x, int64_t N) {
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
#pragma omp parallel for schedule(static) if (M * N >= PARALLEL_FROM)
    for (int64_t m = 0; m < M; ++m) {
        double result = Op::identity;
        for (int64_t n = 0; n < N; n += SPAN * AK_LANES) {
            const float part = reduce_row(Op(), x + m * stride + n, std::min<int64_t>(SPAN * AK_LANES, N - n));
            result = Op::join(result, double(part));
        }
        y[m] = T(float(result));
    }
}

// `width` <= COLUMNS * AK_LANES neighbouring columns of R rows.
template <class Op, class T>
void reduce_columns(const T* x, T* y, int64_t R, int64_t width, int64_t inner) {
    constexpr int W = COLUMNS * AK_LANES;
    float part[W], result[W];
    auto join = [](int, vfloat a, vfloat b) { return Op::join(a, b); };
    std::fill(result, result + W, Op::identity);
    for (int64_t start = 0; start < R; start += SPAN) {
        std::fill(part, part + W, Op::identity);
        for (int64_t r = start; r < std::min<int64_t>(start + SPAN, R); ++r)
            map_row<COLUMNS>(part, width, 0, join, part, x + r * inner);
        map_row<COLUMNS>(result, width, 0, join, result, part);
    }
    map_row<COLUMNS>(y, width, 0, [](int, vfloat v) { return v; }, result);
}

template <class Op, class T>
void reduce_middle(const T* x, T* y, int64_t outer, int64_t R, int64_t inner) {
    constexpr int W = COLUMNS * AK_LANES;
    const int64_t blocks = (inner + W - 1) / W;
#pragma omp parallel for schedule(static) if (outer * R * inner >= PARALLEL_FROM)
    for (int64_t task = 0; task < outer * blocks; ++task) {
        const int64_t o = task / blocks, column = task % blocks * W;
        const int64_t width = std::min<int64_t>(W, inner - column);
        reduce_columns<Op>(x + o * R * inner + column, y + o * inner + column, R, width, inner);
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

_tunables = {"UNROLL": UNROLL, "COLUMNS": COLUMNS, "SPAN": SPAN, "PARALLEL_FROM": PARALLEL_FROM}
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
