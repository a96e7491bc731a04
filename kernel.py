"""RMSNorm in C++: each row is read once for its sum of squares and, still in L1 or L2, once more to be scaled."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {"CHUNK_ROWS": [1, 4, 16, 64]}

CHUNK_ROWS = 16  # rows that a thread takes at a time

SOURCE = r"""
#include <autokernel.hpp>

template <class T>
void rmsnorm(const T* x, const T* weight, T* y, int64_t M, int64_t N, int64_t stride, float eps) {
#pragma omp parallel for schedule(static, CHUNK_ROWS)
    for (int64_t m = 0; m < M; ++m) {
        const T* row = x + m * stride;
        T* out = y + m * N;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t n = 0; n < N; ++n) sum += float(row[n]) * float(row[n]);
        const float scale = 1 / std::sqrt(sum / N + eps);
#pragma omp simd
        for (int64_t n = 0; n < N; ++n) out[n] = T(float(row[n]) * scale * float(weight[n]));
    }
}

extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t stride, float eps) {
    AK_DISPATCH(dtype, rmsnorm((const T*)x, (const T*)weight, (T*)y, M, N, stride, eps));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i ppp lll f", CHUNK_ROWS=CHUNK_ROWS)


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
