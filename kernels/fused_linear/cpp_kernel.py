"""A linear layer and its activation in C++: bias and activation meet the sums while they are in registers.

The matrix product is that of kernels/matmul/cpp_kernel.py.
"""

import ctypes

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "fused_linear"
BACKEND = "cpp"
TUNABLES = {
    "TILE_ROWS": [0, 4, 6, 8, 10, 12, 14],
    "BLOCK_K": [128, 192, 256, 384, 512, 768],
    "BLOCK_N": [128, 256, 384, 512, 768],
    "BLOCK_M": [256, 512, 1024, 2048],
}

TILE_ROWS = 0  # rows held in registers; 0: as many as this machine's registers hold
BLOCK_K = 384  # terms summed before a result is touched again
BLOCK_N = 384  # columns that a thread takes at a time
BLOCK_M = 1024  # rows that a thread takes at a time: as many as share a packed panel of weights
ACTIVATIONS = ("silu", "gelu", "relu2", "gelu_tanh", "relu", "none")

SOURCE = r"""
#include <activations.hpp>
#include <product.hpp>

template <class T>
void linear(const T* x, const T* weight, const T* bias, T* y, int64_t M, int64_t N, int64_t K, const int64_t* strides,
            int code) {
    const int64_t weight_n = strides[2], weight_k = strides[3], bias_n = strides[4];
    auto pack_weights = [=](int64_t n, int64_t k, int64_t kc, float* panel) {
        pack<NR>(weight + n * NR * weight_n + k * weight_k, weight_n, weight_k, std::min(NR, N - n * NR), kc, panel);
    };
    auto finish = [=](int64_t m, int64_t n, const Tile& sum) {
        const int64_t first = n * NR, count = std::min(NR, N - first);
        alignas(64) float own[NR] = {};
        if (bias)
            for (int64_t i = 0; i < count; ++i) own[i] = float(bias[(first + i) * bias_n]);
        const vfloat low = load(own), high = load(own + LANES);
        for (int64_t r = 0; r < std::min(MR, M - m); ++r) {
            const vfloat row[2] = {activation(code, sum[r][0] + low), activation(code, sum[r][1] + high)};
            map_row<2>(y + (m + r) * N + first, count, 0, [](int, vfloat v) { return v; }, (const float*)row);
        }
    };
    product(x, strides[0], strides[1], M, K, blocks(N, NR), pack_weights, finish);
}

extern "C" int run(int dtype, const void* x, const void* weight, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                   const int64_t* strides, int code) {
    AK_DISPATCH(dtype, linear((const T*)x, (const T*)weight, (const T*)bias, (T*)y, M, N, K, strides, code));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pppp lll p i", TILE_ROWS=TILE_ROWS, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, BLOCK_M=BLOCK_M)


def kernel_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "gelu"
) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N], of any strides -> contiguous [..., N] in x's dtype; sums are kept in float."""
    N, K = weight.shape
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype)
    x = x.reshape(-1, K)
    strides = (ctypes.c_int64 * 5)(*x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0))
    pointers = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
    code = ACTIVATIONS.index(activation)
    _run(DTYPE_CODE[x.dtype], *pointers, x.shape[0], N, K, ctypes.addressof(strides), code)
    return y
