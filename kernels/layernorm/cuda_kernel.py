"""LayerNorm in CUDA C++: rows held in registers between mean, variance and scaling, so x is read once."""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "layernorm"
BACKEND = "cuda"
TUNABLES = {"VECTORS": [1, 2, 4, 8], "BLOCK": [64, 128, 256, 512], "EARLY": [0, 1], "STREAMING": [0, 1, 2, 3]}

VECTORS = 4  # of 16 bytes, that a thread holds
BLOCK = 64  # threads; narrower rows share a block
EARLY = 0  # ask for the weights before the sums are known
STREAMING = 0  # 1: loads leave the caches to others, 2: stores do, 3: both

SOURCE = r"""
#include <rows.cuh>

constexpr int LARGEST = 512;  // threads of a block that holds its rows: more would be short of registers

// Sums over a row of the distances from a guess at its mean, and of their squares. The guess is the mean as rounding
// left it: so near that nothing cancels in the squares. The distances add up to what rounding left of it, all that there is
// in a row of equal values.
struct Moments {
    float sum = 0, squares = 0;

    __device__ void add(float distance) { sum += distance, squares += distance * distance; }
};

struct Scaling {
    float mean, scale;

    __device__ Scaling(const Moments& part, float guess, int N, float eps, int threads, float (*scratch)[MAX_WARPS]) {
        float sums[] = {part.sum, part.squares};
        row_sums(sums, threads, scratch);
        const float drift = __fdividef(sums[0], N);
        mean = guess + drift;
        const float variance = __fdividef(sums[1], N) - drift * drift;
        scale = rsqrtf((variance < 0 ? 0 : variance) + eps);  // NaN stays
    }
    __device__ float operator()(float value) const { return (value - mean) * scale; }
};

template <class T>
__global__ void __launch_bounds__(LARGEST)
    held(const T* x, const T* weight, const T* bias, T* y, int64_t M, int N, int64_t stride, float eps, int threads) {
    __shared__ float scratch[3][MAX_WARPS];
    take_over();
    const int lane = threadIdx.x % threads, count = N / LANES<T>;
    const int64_t m = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    const auto vector = [&](auto* p, int i) { return (Vector<T>*)p + min(lane + i * threads, count - 1); };
    Vector<T> values[VECTORS], weights[VECTORS], biases[VECTORS];
    load_batch(values, (const Vector<T>*)(x + min(m, M - 1) * stride), lane, threads, count, 0);
    if constexpr (EARLY) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) weights[i] = *vector(weight, i), biases[i] = *vector(bias, i);
        keep_packed(weights);
        keep_packed(biases);
    }
    // The distances from an element of the row, and their squares: the variance that they give is off by at most N / 2^24
    // of itself (no element is more than sqrt(N) deviations from the mean), which 16-bit results do not show.
    const float element = to_float(x[min(m, M - 1) * stride]);
    Moments part;
    float v[LANES<T>], w[LANES<T>], b[LANES<T>];
    const auto add = [&](float guess) {
        part = {};
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack(values[i], v);
            if (lane + i * threads < count)
                for (float a : v) part.add(a - guess);
        }
        if constexpr (sizeof(T) == 2) keep_packed(values);
    };
    add(element);
    float guess = element;
    if constexpr (sizeof(T) == 4) {
        guess += __fdividef(row_sum(part.sum, threads, scratch[0]), N);
        add(guess);
    }
    const Scaling scaling(part, guess, N, eps, threads, scratch + 1);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack(values[i], v);
        if constexpr (!EARLY) weights[i] = *vector(weight, i), biases[i] = *vector(bias, i);
        unpack(weights[i], w);
        unpack(biases[i], b);
        for (int e = 0; e < LANES<T>; ++e) v[e] = scaling(v[e]) * w[e] + b[e];
        if (m < M && lane + i * threads < count) write_once(vector(y + m * N, i), pack<T>(v));
    }
}

// Rows that no block can hold, or that do not lie in whole vectors, are read three times, from L1 or L2 after the first.
template <class T>
__global__ void __launch_bounds__(1024)
    looped(const T* x, const T* weight, const T* bias, T* y, int N, int64_t stride, float eps) {
    __shared__ float scratch[3][MAX_WARPS];
    take_over();
    const Row<T> row(x + blockIdx.x * stride, N);
    float sum = 0, v[LANES<T>];
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        row.unpack(i, row.load(i), v, 0);
        for (float a : v) sum += a;
    }
    const float guess = __fdividef(row_sum(sum, blockDim.x, scratch[0]), N);
    Moments part;
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        row.unpack(i, row.load(i), v, 0);
        for (int e = 0; e < LANES<T>; ++e)
            if (row.has(i, e)) part.add(v[e] - guess);
    }
    const Scaling scaling(part, guess, N, eps, blockDim.x, scratch + 1);
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        row.unpack(i, row.load(i), v, 0);
        const int64_t at = int64_t(i) * LANES<T> - row.first;
        for (int e = 0; e < LANES<T>; ++e)
            if (row.has(i, e)) v[e] = scaling(v[e]) * to_float(weight[at + e]) + to_float(bias[at + e]);
        row.store(y + int64_t(blockIdx.x) * N, i, v);
    }
}

template <class T>
int layernorm(const T* x, const T* weight, const T* bias, T* y, int64_t M, int64_t N, int64_t stride, float eps,
              cudaStream_t stream) {
    const auto [threads, rows] = Layout::of<T>(N, VECTORS, BLOCK, LARGEST);
    const bool whole = aligned(x) && aligned(weight) && aligned(bias) && N % LANES<T> == 0 && stride % LANES<T> == 0;
    const int wide = N < 1024 ? divide_up(N, 32) * 32 : 1024;
    if (!threads || !whole) return launch_early(looped<T>, M, wide, 0, stream, x, weight, bias, y, N, stride, eps);
    const int blocks = divide_up(M, rows), block = threads * rows;
    return launch_early(held<T>, blocks, block, 0, stream, x, weight, bias, y, M, N, stride, eps, threads);
}

extern "C" int run(int dtype, const void* x, const void* weight, const void* bias, void* y, int64_t M, int64_t N,
                   int64_t stride, float eps, cudaStream_t stream) {
    AK_DISPATCH(dtype,
                return layernorm((const T*)x, (const T*)weight, (const T*)bias, (T*)y, M, N, stride, eps, stream));
}
"""

_run = cuda_function(SOURCE, "run", "i pppp lll f", VECTORS=VECTORS, BLOCK=BLOCK, EARLY=EARLY, STREAMING=STREAMING)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """x [..., N], weight and bias [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else N
    weight, bias = weight.contiguous(), bias.contiguous()
    pointers = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr()
    _run(DTYPE_CODE[x.dtype], *pointers, y.numel() // N, N, stride, eps)
    return y
