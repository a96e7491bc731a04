"""Matmul with FP4 weights in C++: a few rows of weights dequantised to float in L1, then used for every row of x."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "matmul_fp4"
BACKEND = "cpp"
TUNABLES = {"PARALLEL_FROM": [16384, 65536, 262144]}

PARALLEL_FROM = 65536  # weights from which threads pay

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>

const float SIZES[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

float e4m3(uint8_t b) {
    const int e = b >> 3 & 15, m = b & 7;
    const float size = e ? std::ldexp(1 + m / 8.f, e - 7) : std::ldexp(m / 8.f, -6);
    return b & 128 ? -size : size;
}

void dequantise(const uint8_t* w, const uint8_t* scales, bool e8m0, float scale, float* out, int64_t K, int64_t group) {
    float table[16];
    for (int64_t g = 0; g < K / group; ++g) {
        const float s = (e8m0 ? std::ldexp(1.f, scales[g] - 127) : e4m3(scales[g])) * scale;
        for (int c = 0; c < 16; ++c) table[c] = (c & 8 ? -s : s) * SIZES[c & 7];
        for (int64_t k = g * group; k < (g + 1) * group; k += 2) {
            out[k] = table[w[k / 2] & 15];
            out[k + 1] = table[w[k / 2] >> 4];
        }
    }
}

float dot(const float* a, const float* b, int64_t n) {
    vfloat sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * AK_LANES <= n; i += 4 * AK_LANES)
        for (int u = 0; u < 4; ++u) sums[u] += load(a + i + u * AK_LANES) * load(b + i + u * AK_LANES);
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

template <class T>
void matmul(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int64_t M, int64_t N, int64_t K, int64_t group,
            bool e8m0, float scale) {
    std::vector<float> wide(M * K);
    for (int64_t i = 0; i < M * K; ++i) wide[i] = float(x[i]);
#pragma omp parallel if (N * K >= PARALLEL_FROM)
    {
        std::vector<float> row(K);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N; ++n) {
            dequantise(w + n * K / 2, scales + n * (K / group), e8m0, scale, row.data(), K, group);
            for (int64_t m = 0; m < M; ++m) y[m * N + n] = T(dot(wide.data() + m * K, row.data(), K));
        }
    }
}

extern "C" int run(int dtype, const void* x, const void* w, const void* scales, void* y, int64_t M, int64_t N, int64_t K,
                   int64_t group, int e8m0, float scale) {
    AK_DISPATCH(dtype, matmul((const T*)x, (const uint8_t*)w, (const uint8_t*)scales, (T*)y, M, N, K, group, e8m0, scale));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pppp llll i f", PARALLEL_FROM=PARALLEL_FROM)


def kernel_fn(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [M, K], w [N, K / 2] uint8, scales [N, K / group] -> [M, N] in x's dtype."""
    x, w, scales = x.contiguous(), w.contiguous(), scales.contiguous()
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty((M, N), dtype=x.dtype)
    pointers = (x.data_ptr(), w.data_ptr(), scales.data_ptr(), y.data_ptr())
    e8m0 = scales.dtype == torch.uint8
    _run(DTYPE_CODE[x.dtype], *pointers, M, N, K, K // scales.shape[1], e8m0, scale)
    return y
