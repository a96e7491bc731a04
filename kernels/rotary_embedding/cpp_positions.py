"""Rotary embedding in C++, position by position: its cos and sin, and x of a transposed projection, are read in order."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "rotary_embedding"
BACKEND = "cpp"
TUNABLES = {"CHUNK_POSITIONS": [1, 4, 16, 64]}

CHUNK_POSITIONS = 16  # positions, with all their heads, that a thread takes at a time

SOURCE = r"""
#include <autokernel.hpp>

template <class T>
void rotate_interleaved(const T* x, const float* cos, const float* sin, T* y, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1], c = cos[i], s = sin[i];
        y[2 * i] = T(a * c - b * s);
        y[2 * i + 1] = T(b * c + a * s);
    }
}

template <class T>
void rotate_halves(const T* x, const float* cos, const float* sin, T* y, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i], c = cos[i], s = sin[i];
        y[i] = T(a * c - b * s);
        y[half + i] = T(b * c + a * s);
    }
}

template <class T>
void rotary(const T* x, const float* cos, const float* sin, T* y, int64_t B, int64_t H, int64_t S, int64_t D,
            int64_t half, int64_t stride_b, int64_t stride_h, int64_t stride_s, int64_t stride_a, bool interleaved) {
#pragma omp parallel for collapse(2) schedule(static, CHUNK_POSITIONS)
    for (int64_t b = 0; b < B; ++b)
        for (int64_t s = 0; s < S; ++s)
            for (int64_t h = 0; h < H; ++h) {
                const T* row = x + b * stride_b + h * stride_h + s * stride_s;
                T* out = y + ((b * H + h) * S + s) * D;
                if (interleaved)
                    rotate_interleaved(row, cos + s * stride_a, sin + s * stride_a, out, half);
                else
                    rotate_halves(row, cos + s * stride_a, sin + s * stride_a, out, half);
                for (int64_t d = 2 * half; d < D; ++d) out[d] = row[d];
            }
}

extern "C" int run(int dtype, const void* x, const float* cos, const float* sin, void* y, int64_t B, int64_t H, int64_t S,
                   int64_t D, int64_t half, int64_t stride_b, int64_t stride_h, int64_t stride_s, int64_t stride_a,
                   int interleaved) {
    AK_DISPATCH(dtype, rotary((const T*)x, cos, sin, (T*)y, B, H, S, D, half, stride_b, stride_h, stride_s, stride_a,
                              interleaved));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pppp lllll llll i", CHUNK_POSITIONS=CHUNK_POSITIONS)


def kernel_fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
    """x [batch, heads, seq, head_dim], cos and sin [seq, rotary_dim / 2] -> a contiguous tensor of x's shape and dtype."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.float(), sin.float()
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    _run(DTYPE_CODE[x.dtype], *pointers, *x.shape, cos.shape[-1], *x.stride()[:3], cos.stride(0), interleaved)
    return y
