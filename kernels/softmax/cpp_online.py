"""Softmax in C++, online: one read finds a row's maximum and sum together, a second recomputes the exponentials, scaled.

No scratch and one pass fewer than cpp_kernel.py, for twice the exponentials: for rows that do not stay in cache.
After Milakov and Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867
"""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "softmax"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [1, 2, 4, 8], "BLOCK": [256, 1024, 4096], "PARALLEL_FROM": [4096, 16384, 65536]}

UNROLL = 4  # vectors in flight along a row
BLOCK = 1024  # elements whose maximum is found, in L1, before their exponentials are added up
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>

template <class T>
void softmax_row(const T* x, T* y, int64_t N) {
    float peak = std::numeric_limits<float>::lowest(), sum = 0;  // not -inf: -inf - -inf is NaN
    for (int64_t start = 0; start < N; start += BLOCK) {
        const int64_t n = std::min<int64_t>(BLOCK, N - start);
        vfloat best[UNROLL], total[UNROLL];
        for (int u = 0; u < UNROLL; ++u) best[u] = splat(-INFINITY), total[u] = splat(0);
        fold_row<UNROLL>(n, -INFINITY, [&](int u, vfloat v) { best[u] = larger(v, best[u]); }, x + start);
        for (int u = 1; u < UNROLL; ++u) best[0] = larger(best[u], best[0]);
        const float block_peak = max_of(best[0]);
        if (block_peak > peak) {
            sum *= vexp(splat(peak - block_peak))[0];
            peak = block_peak;
        }
        const vfloat p = splat(peak);
        fold_row<UNROLL>(n, -INFINITY, [&](int u, vfloat v) { total[u] += vexp(v - p); }, x + start);
        for (int u = 1; u < UNROLL; ++u) total[0] += total[u];
        sum += sum_of(total[0]);
    }
    const vfloat p = splat(peak), scale = splat(1 / sum);
    map_row<UNROLL>(y, N, 0, [&](int, vfloat v) { return vexp(v - p) * scale; }, x);
}

template <class T>
void softmax(const T* x, T* y, int64_t M, int64_t N, int64_t stride) {
#pragma omp parallel for schedule(static) if (M * N >= PARALLEL_FROM)
    for (int64_t m = 0; m < M; ++m) softmax_row(x + m * stride, y + m * N, N);
}

extern "C" int run(int dtype, const void* x, void* y, int64_t M, int64_t N, int64_t stride) {
    AK_DISPATCH(dtype, softmax((const T*)x, (T*)y, M, N, stride));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pp lll", UNROLL=UNROLL, BLOCK=BLOCK, PARALLEL_FROM=PARALLEL_FROM)


def kernel_fn(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x of any rank -> a contiguous tensor of x's shape and dtype; `dim` is brought last by a copy if it is not."""
    rows = x.movedim(dim, -1)
    N = rows.shape[-1]
    y = torch.empty(rows.shape, dtype=x.dtype)
    if not (rows.dim() == 2 and rows.stride(1) == 1):
        rows = rows.contiguous()
    stride = rows.stride(0) if rows.dim() == 2 else N
    _run(DTYPE_CODE[x.dtype], rows.data_ptr(), y.data_ptr(), y.numel() // N, N, stride)
    return y.movedim(-1, dim).contiguous()
