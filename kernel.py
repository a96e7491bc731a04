"""RMSNorm in C++: each row is read once for its sum of squares and, still in L1 or L2, once more to be scaled."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [1, 2, 4, 8], "CHUNK_ROWS": [0, 1, 4, 16, 64], "PARALLEL_FROM": [4096, 16384, 65536]}

UNROLL = 4  # vectors in flight along a row
CHUNK_ROWS = 0  # rows that a thread takes at a time; 0: an equal share, at once
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>
#if CHUNK_ROWS
#define SCHEDULE schedule(static, CHUNK_ROWS)
#else
#define SCHEDULE schedule(static)
#endif

template <class T>
void rmsnorm_row(const T* x, const T* weight, T* y, int64_t N, float eps) {
    vfloat squares[UNROLL] = {};
    fold_row<UNROLL>(N, 0, [&](int u, vfloat v) { squares[u] += v * v; }, x);
    for (int u = 1; u < UNROLL; ++u) squares[0] += squares[u];
    const vfloat scale = splat(1 / std::sqrt(sum_of(squares[0]) / N + eps));
    map_row<UNROLL>(y, N, 0, [&](int, vfloat v, vfloat w) { return v * scale * w; }, x, weight);
}

template <class T>
void rmsnorm(const T* x, const T* weight, T* y, int64_t M, int64_t N, int64_t stride, float eps) {
#pragma omp parallel for SCHEDULE if (M * N >= PARALLEL_FROM)
    for (int64_t m = 0; m < M; ++m) rmsnorm_row(x + m * stride, weight, y + m * N, N, eps);
}

extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t stride, float eps) {
    AK_DISPATCH(dtype, rmsnorm((const T*)x, (const T*)weight, (T*)y, M, N, stride, eps));
    return 0;
}
"""

_tunables = {"UNROLL": UNROLL, "CHUNK_ROWS": CHUNK_ROWS, "PARALLEL_FROM": PARALLEL_FROM}
_run = cpp_function(SOURCE, "run", "i ppp lll f", **_tunables)


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
