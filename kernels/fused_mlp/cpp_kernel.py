"""Gated MLP in C++: one product makes gate and up side by side in registers, and stores activation x up.

The matrix products are those of kernels/matmul/cpp_kernel.py.
"""

import ctypes

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "fused_mlp"
BACKEND = "cpp"
TUNABLES = {
    "TILE_ROWS": [0, 4, 6, 8, 10, 12, 14],
    "BLOCK_K": [128, 192, 256, 384, 512, 768],
    "BLOCK_N": [128, 256, 384, 512, 768],
    "BLOCK_M": [256, 512, 1024, 2048],
}

TILE_ROWS = 0  # rows held in registers; 0: as many as this machine's registers hold
BLOCK_K = 384  # terms summed before a result is touched again
BLOCK_N = 384  # columns that a thread takes at a time (of the hidden layer: half as many)
BLOCK_M = 1024  # rows that a thread takes at a time: as many as share a packed panel of weights

SOURCE = r"""
#include <activations.hpp>
#include <product.hpp>

template <class T>
void mlp(const T* x, const T* w_gate, const T* w_up, const T* w_down, float* hidden, T* y, int64_t M, int64_t dim,
         int64_t wide, const int64_t* x_stride, const int64_t* gate_stride, const int64_t* up_stride,
         const int64_t* down_stride, int code) {
    auto pack_both = [=](int64_t n, int64_t k, int64_t kc, float* panel) {
        const int64_t first = n * LANES, count = std::min(LANES, wide - first);
        const int64_t g = first * gate_stride[0] + k * gate_stride[1], u = first * up_stride[0] + k * up_stride[1];
        pack<LANES, NR>(w_gate + g, gate_stride[0], gate_stride[1], count, kc, panel);
        pack<LANES, NR>(w_up + u, up_stride[0], up_stride[1], count, kc, panel + LANES);
    };
    auto activate = [=](int64_t m, int64_t n, const Tile& sum) {
        const int64_t first = n * LANES, count = std::min(LANES, wide - first);
        for (int64_t r = 0; r < std::min(MR, M - m); ++r) {
            const vfloat h = activation(code, sum[r][0]) * sum[r][1];
            float* out = hidden + (m + r) * wide + first;
            count == LANES ? store(out, h) : store_first(out, h, count);
        }
    };
    product(x, x_stride[0], x_stride[1], M, dim, blocks(wide, LANES), pack_both, activate);

    auto pack_down = [=](int64_t n, int64_t k, int64_t kc, float* panel) {
        const T* w = w_down + n * NR * down_stride[0] + k * down_stride[1];
        pack<NR>(w, down_stride[0], down_stride[1], std::min(NR, dim - n * NR), kc, panel);
    };
    auto write = [=](int64_t m, int64_t n, const Tile& sum) {
        for (int64_t r = 0; r < std::min(MR, M - m); ++r)
            map_row<2>(y + (m + r) * dim + n * NR, std::min(NR, dim - n * NR), 0, [](int, vfloat v) { return v; },
                       (const float*)sum[r]);
    };
    product(hidden, wide, 1, M, wide, blocks(dim, NR), pack_down, write);
}

extern "C" int run(int dtype, const void* x, const void* w_gate, const void* w_up, const void* w_down, float* hidden,
                   void* y, int64_t M, int64_t dim, int64_t wide, const int64_t* strides, int code) {
    AK_DISPATCH(dtype, mlp((const T*)x, (const T*)w_gate, (const T*)w_up, (const T*)w_down, hidden, (T*)y, M, dim, wide,
                           strides, strides + 2, strides + 4, strides + 6, code));
    return 0;
}
"""

_run = cpp_function(
    SOURCE, "run", "i pppppp lll p i", TILE_ROWS=TILE_ROWS, BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, BLOCK_M=BLOCK_M
)


def kernel_fn(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, activation: str = "silu"
) -> torch.Tensor:
    """x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden] -> contiguous, shape and dtype of x."""
    dim, wide = x.shape[-1], w_gate.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype)
    x = x.reshape(-1, dim)
    M = x.shape[0]
    hidden = torch.empty(M, wide)  # in float whatever the dtype: rounded once, at the end
    strides = (ctypes.c_int64 * 8)(*x.stride(), *w_gate.stride(), *w_up.stride(), *w_down.stride())
    tensors = x, w_gate, w_up, w_down, hidden, y
    code = ("silu", "gelu", "relu2", "gelu_tanh").index(activation)
    pointers = [t.data_ptr() for t in tensors]
    _run(DTYPE_CODE[x.dtype], *pointers, M, dim, wide, ctypes.addressof(strides), code)
    return y
