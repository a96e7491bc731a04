"""Softmax in C++: a row's maximum, then its exponentials and their sum, then the scaling, all while the row is in cache."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "softmax"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [1, 2, 4, 8], "COLUMNS": [1, 2, 4, 8], "PARALLEL_FROM": [4096, 16384, 65536]}

UNROLL = 4  # vectors in flight along a row
COLUMNS = 4  # vectors side by side where dim is not the last
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>

// e holds the exponentials until they are scaled; it may be y.
template <class T>
void softmax_row(const T* x, T* y, float* e, int64_t N) {
    vfloat best[UNROLL], total[UNROLL];
    for (int u = 0; u < UNROLL; ++u) best[u] = splat(-INFINITY), total[u] = splat(0);
    fold_row<UNROLL>(N, -INFINITY, [&](int u, vfloat v) { best[u] = larger(v, best[u]); }, x);
    for (int u = 1; u < UNROLL; ++u) best[0] = larger(best[u], best[0]);
    const vfloat peak = splat(max_of(best[0]));
    auto add_exp = [&](int u, vfloat v) {
        const vfloat p = vexp(v - peak);
        total[u] += p;
        return p;
    };
    map_row<UNROLL>(e, N, -INFINITY, add_exp, x);
    for (int u = 1; u < UNROLL; ++u) total[0] += total[u];
    const vfloat scale = splat(1 / sum_of(total[0]));
    map_row<UNROLL>(y, N, 0, [&](int, vfloat p) { return p * scale; }, e);
}

template <class T>
void softmax_rows(const T* x, T* y, int64_t M, int64_t N, int64_t stride) {
    constexpr bool in_place = std::is_same<T, float>::value;
#pragma omp parallel if (M * N >= PARALLEL_FROM)
    {
        std::vector<float> scratch(in_place ? 0 : N);
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; ++m) {
            float* e = in_place ? (float*)(y + m * N) : scratch.data();
            softmax_row(x + m * stride, y + m * N, e, N);
        }
    }
}

// Up to COLUMNS * AK_LANES neighbouring columns of R rows, each `inner` elements long.
template <class T>
void softmax_columns(const T* x, T* y, int64_t R, int64_t inner, int64_t width) {
    constexpr int W = COLUMNS * AK_LANES;
    float best[W], total[W];
    for (int i = 0; i < W; ++i) best[i] = -INFINITY, total[i] = 0;
    for (int64_t r = 0; r < R; ++r)
        map_row<COLUMNS>(best, width, 0, [&](int, vfloat v, vfloat b) { return larger(v, b); }, x + r * inner, best);
    auto add_exp = [&](int, vfloat v, vfloat b, vfloat t) { return t + vexp(v - b); };
    for (int64_t r = 0; r < R; ++r)
        map_row<COLUMNS>(total, width, 0, add_exp, x + r * inner, best, total);
    auto scaled = [&](int, vfloat v, vfloat b, vfloat t) { return vexp(v - b) / t; };
    for (int64_t r = 0; r < R; ++r)
        map_row<COLUMNS>(y + r * inner, width, 0, scaled, x + r * inner, best, total);
}

template <class T>
void softmax_middle(const T* x, T* y, int64_t outer, int64_t R, int64_t inner) {
    constexpr int W = COLUMNS * AK_LANES;
    const int64_t blocks = (inner + W - 1) / W;
#pragma omp parallel for schedule(static) if (outer * R * inner >= PARALLEL_FROM)
    for (int64_t job = 0; job < outer * blocks; ++job) {
        const int64_t column = job % blocks * W, at = job / blocks * R * inner + column;
        softmax_columns(x + at, y + at, R, inner, std::min<int64_t>(W, inner - column));
    }
}

extern "C" int rows(int dtype, const void* x, void* y, int64_t M, int64_t N, int64_t stride) {
    AK_DISPATCH(dtype, softmax_rows((const T*)x, (T*)y, M, N, stride));
    return 0;
}

extern "C" int middle(int dtype, const void* x, void* y, int64_t outer, int64_t R, int64_t inner) {
    AK_DISPATCH(dtype, softmax_middle((const T*)x, (T*)y, outer, R, inner));
    return 0;
}
"""

_tunables = {"UNROLL": UNROLL, "COLUMNS": COLUMNS, "PARALLEL_FROM": PARALLEL_FROM}
_rows = cpp_function(SOURCE, "rows", "i pp lll", **_tunables)
_middle = cpp_function(SOURCE, "middle", "i pp lll", **_tunables)


def kernel_fn(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x of any rank -> a contiguous tensor of x's shape and dtype; stable for any finite x."""
    dim %= x.dim()
    N = x.shape[dim]
    y = torch.empty(x.shape, dtype=x.dtype)
    if not (x.dim() == 2 and dim == 1 and x.stride(1) == 1):
        x = x.contiguous()
    code, source, target = DTYPE_CODE[x.dtype], x.data_ptr(), y.data_ptr()
    if dim == x.dim() - 1:
        _rows(code, source, target, y.numel() // N, N, x.stride(0) if x.dim() == 2 else N)
    else:
        inner = x.stride(dim)
        _middle(code, source, target, y.numel() // (N * inner), N, inner)
    return y
