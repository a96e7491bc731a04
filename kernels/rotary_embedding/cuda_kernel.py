"""Rotary embedding in CUDA C++: a thread takes the same channels of some heads, so that it reads their cos and sin once.

Interleaved pairs lie within a vector of 16 bytes, the others in two vectors. Heads that do not lie in whole vectors are
rotated a pair at a time.
"""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "rotary_embedding"
BACKEND = "cuda"
TUNABLES = {"HEADS": [1, 2, 4, 8], "BLOCK": [64, 128, 256, 512], "STREAMING": [0, 1, 2, 3]}

HEADS = 1  # that a thread takes
BLOCK = 128  # threads
STREAMING = 2  # 1: loads leave the caches to others, 2: stores do, 3: both

SOURCE = r"""
#include <rows.cuh>

struct Shape {
    int64_t B, H, S, D, half, stride_b, stride_h, stride_s, stride_a;  // of x, and of the angles from row to row
};

// COUNT elements, of which a thread reads the cosines (or sines) at once.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T)) Angles {
    T at[COUNT];
};

__device__ inline void rotate(float& a, float& b, float cos, float sin) {
    const float first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
}

// Slot threadIdx.x of a head: one vector of interleaved pairs, or two of others; from slot `rotated` on, one that passes.
template <class T, bool INTERLEAVED>
__global__ void __launch_bounds__(BLOCK) vectors(const T* x, const T* cos, const T* sin, T* y, Shape shape, int rotated) {
    constexpr int LINES = INTERLEAVED ? 1 : 2, PAIRS = LANES<T> * LINES / 2;
    const int64_t s = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (s >= shape.S) return;
    const int slot = threadIdx.x, first = blockIdx.y * HEADS, heads = min(int(shape.H) - first, HEADS);
    const bool turns = slot < rotated;
    const int64_t channel = turns ? slot * LANES<T> : 2 * shape.half + (slot - rotated) * LANES<T>;
    const int64_t second = !INTERLEAVED && turns ? shape.half : 0;  // from a vector to the one of its partners
    x += blockIdx.z * shape.stride_b + first * shape.stride_h + s * shape.stride_s + channel;
    y += ((blockIdx.z * shape.H + first) * shape.S + s) * shape.D + channel;
    Vector<T> values[HEADS][LINES];
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
        for (int l = 0; l < LINES; ++l)
            if (h < heads) values[h][l] = read_once((const Vector<T>*)(x + h * shape.stride_h + l * second));
    if (turns) {
        const int64_t at = s * shape.stride_a + slot * PAIRS;
        const auto c = *(const Angles<T, PAIRS>*)(cos + at), d = *(const Angles<T, PAIRS>*)(sin + at);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float v[LINES][LANES<T>];
            for (int l = 0; l < LINES; ++l) unpack(values[h][l], v[l]);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                if constexpr (INTERLEAVED) rotate(v[0][2 * p], v[0][2 * p + 1], to_float(c.at[p]), to_float(d.at[p]));
                else rotate(v[0][p], v[1][p], to_float(c.at[p]), to_float(d.at[p]));
            }
            for (int l = 0; l < LINES; ++l) values[h][l] = pack<T>(v[l]);
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
        for (int l = 0; l < LINES; ++l)
            if (h < heads && l <= turns) write_once((Vector<T>*)(y + h * shape.S * shape.D + l * second), values[h][l]);
}

// A thread a pair, or a channel that passes.
template <class T>
__global__ void __launch_bounds__(BLOCK)
    pairs(const T* x, const T* cos, const T* sin, T* y, Shape shape, bool interleaved) {
    const int64_t width = shape.D - shape.half, index = int64_t(blockIdx.x) * BLOCK + threadIdx.x;
    const int64_t row = index / width, p = index % width;
    const int64_t s = row % shape.S, h = row / shape.S % shape.H, b = row / shape.S / shape.H;
    if (b >= shape.B) return;
    x += b * shape.stride_b + h * shape.stride_h + s * shape.stride_s;
    y += row * shape.D;
    if (p >= shape.half) {
        y[shape.half + p] = x[shape.half + p];
        return;
    }
    const int64_t one = interleaved ? 2 * p : p, other = interleaved ? one + 1 : p + shape.half;
    const int64_t at = s * shape.stride_a + p;
    float a = to_float(x[one]), c = to_float(x[other]);
    rotate(a, c, to_float(cos[at]), to_float(sin[at]));
    y[one] = from_float<T>(a), y[other] = from_float<T>(c);
}

template <class T>
int rotary(const T* x, const T* cos, const T* sin, T* y, const Shape& s, bool interleaved, cudaStream_t stream) {
    const int64_t rotated = (interleaved ? 2 : 1) * s.half / LANES<T>, slots = rotated + (s.D - 2 * s.half) / LANES<T>;
    const int64_t all = (interleaved ? 2 * s.half : s.half) | s.D | s.stride_b | s.stride_h | s.stride_s | s.stride_a;
    if (all % LANES<T> == 0 && aligned(x) && aligned(cos) && aligned(sin) && slots <= BLOCK && s.B < 65536 && s.H < 65536) {
        const dim3 block(slots, BLOCK / slots), grid(divide_up(s.S, block.y), divide_up(s.H, HEADS), s.B);
        auto kernel = interleaved ? vectors<T, true> : vectors<T, false>;
        kernel<<<grid, block, 0, stream>>>(x, cos, sin, y, s, rotated);
    } else {
        const int64_t count = s.B * s.H * s.S * (s.D - s.half);
        pairs<<<divide_up(count, BLOCK), BLOCK, 0, stream>>>(x, cos, sin, y, s, interleaved);
    }
    return cudaGetLastError();
}

extern "C" int run(int dtype, const void* x, const void* cos, const void* sin, void* y, int64_t B, int64_t H, int64_t S,
                   int64_t D, int64_t half, int64_t stride_b, int64_t stride_h, int64_t stride_s, int64_t stride_a,
                   int interleaved, cudaStream_t stream) {
    const Shape shape = {B, H, S, D, half, stride_b, stride_h, stride_s, stride_a};
    AK_DISPATCH(dtype, return rotary((const T*)x, (const T*)cos, (const T*)sin, (T*)y, shape, interleaved, stream));
}
"""

_run = cuda_function(SOURCE, "run", "i pppp lllll llll i", HEADS=HEADS, BLOCK=BLOCK, STREAMING=STREAMING)


def kernel_fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
    """x [batch, heads, seq, head_dim], cos and sin [seq, rotary_dim / 2] -> a contiguous tensor of x's shape and dtype."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.stride(3) != 1:
        x = x.contiguous()
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    _run(DTYPE_CODE[x.dtype], *pointers, *x.shape, cos.shape[-1], *x.stride()[:3], cos.stride(0), interleaved)
    return y
