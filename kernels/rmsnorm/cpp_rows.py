"""RMSNorm in C++, several rows at a time: their sums run side by side, and the weight is read once for all of them."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {"ROWS": [2, 4, 8], "PARALLEL_FROM": [4096, 16384, 65536]}

ROWS = 4  # rows taken together
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>

// `count` <= ROWS rows; a group that is not full walks its last row again and writes the same values to it.
template <class T>
void rmsnorm_rows(const T* x, const T* weight, T* y, int64_t count, int64_t N, int64_t stride, float eps) {
    vfloat squares[ROWS] = {}, scale[ROWS];
    const int64_t whole = N / AK_LANES * AK_LANES;
    int64_t row[ROWS];
    for (int r = 0; r < ROWS; ++r) row[r] = std::min<int64_t>(r, count - 1);
    for (int64_t n = 0; n < whole; n += AK_LANES)
        for (int r = 0; r < ROWS; ++r) {
            const vfloat v = load(x + row[r] * stride + n);
            squares[r] += v * v;
        }
    for (int r = 0; r < ROWS; ++r) {
        const vfloat v = load_first(x + row[r] * stride + whole, N - whole, 0);
        scale[r] = splat(1 / std::sqrt(sum_of(squares[r] + v * v) / N + eps));
    }
    for (int64_t n = 0; n < whole; n += AK_LANES) {
        const vfloat w = load(weight + n);
        for (int r = 0; r < ROWS; ++r) store(y + row[r] * N + n, load(x + row[r] * stride + n) * scale[r] * w);
    }
    for (int r = 0; r < count; ++r)
        for (int64_t n = whole; n < N; ++n) y[r * N + n] = T(float(x[r * stride + n]) * scale[r][0] * float(weight[n]));
}

template <class T>
void rmsnorm(const T* x, const T* weight, T* y, int64_t M, int64_t N, int64_t stride, float eps) {
#pragma omp parallel for schedule(static) if (M * N >= PARALLEL_FROM)
    for (int64_t m = 0; m < M; m += ROWS)
        rmsnorm_rows(x + m * stride, weight, y + m * N, std::min<int64_t>(ROWS, M - m), N, stride, eps);
}

extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t stride, float eps) {
    AK_DISPATCH(dtype, rmsnorm((const T*)x, (const T*)weight, (T*)y, M, N, stride, eps));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i ppp lll f", ROWS=ROWS, PARALLEL_FROM=PARALLEL_FROM)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., N], weight [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else N
    weight = weight.contiguous()
    _run(DTYPE_CODE[x.dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), y.numel() // N, N, stride, eps)
    return y
