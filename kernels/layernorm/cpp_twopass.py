"""LayerNorm in C++: a row is read for its mean, for its variance about that mean, and, still in L1 or L2, to be scaled."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "layernorm"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [1, 2, 4, 8], "PARALLEL_FROM": [4096, 16384, 65536]}

UNROLL = 4  # vectors in flight along a row
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>

inline float total_of(vfloat (&parts)[UNROLL]) {
    for (int u = 1; u < UNROLL; ++u) parts[0] += parts[u];
    return sum_of(parts[0]);
}

// A guess of the mean, to sum distances from: with a large mean and a small variance no digits are lost.
template <class T>
float guess_of(const T* x, int64_t N) {
    return 0.25f * x[0] + 0.25f * x[N / 4] + 0.25f * x[N / 2] + 0.25f * x[N / 4 * 3];
}

template <class T>
void layernorm_row(const T* x, const T* weight, const T* bias, T* y, int64_t N, float eps) {
    vfloat sum[UNROLL] = {}, squares[UNROLL] = {};
    const float guess = guess_of(x, N);
    const vfloat g = splat(guess);
    fold_row<UNROLL>(N, guess, [&](int u, vfloat v) { sum[u] += v - g; }, x);
    const vfloat d = splat(total_of(sum) / N);
    auto centred = [&](vfloat v) { return (v - g) - d; };
    fold_row<UNROLL>(N, guess, [&](int u, vfloat v) { squares[u] += centred(v) * centred(v); }, x);
    const int64_t beyond = (N + AK_LANES - 1) / AK_LANES * AK_LANES - N;  // lanes that added d² though they hold no element
    const float variance = (total_of(squares) - beyond * d[0] * d[0]) / N;
    const vfloat scale = splat(1 / std::sqrt(variance + eps));
    auto scaled = [&](int, vfloat v, vfloat w, vfloat b) { return centred(v) * scale * w + b; };
    map_row<UNROLL>(y, N, 0, scaled, x, weight, bias);
}

template <class T>
void layernorm(const T* x, const T* weight, const T* bias, T* y, int64_t M, int64_t N, int64_t stride, float eps) {
#pragma omp parallel for schedule(static) if (M * N >= PARALLEL_FROM)
    for (int64_t m = 0; m < M; ++m) layernorm_row(x + m * stride, weight, bias, y + m * N, N, eps);
}

extern "C" int run(int dtype, const void* x, const void* weight, const void* bias, void* y, int64_t M, int64_t N,
                   int64_t stride, float eps) {
    AK_DISPATCH(dtype, layernorm((const T*)x, (const T*)weight, (const T*)bias, (T*)y, M, N, stride, eps));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pppp lll f", UNROLL=UNROLL, PARALLEL_FROM=PARALLEL_FROM)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """x [..., N], weight and bias [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else N
    weight, bias = weight.contiguous(), bias.contiguous()
    code, rows = DTYPE_CODE[x.dtype], y.numel() // N
    _run(code, x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), rows, N, stride, eps)
    return y
