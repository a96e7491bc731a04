"""RMSNorm in CUDA C++: rows held in registers between their sum of squares and their scaling, so x is read once."""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
TUNABLES = {"VECTORS": [1, 2, 4, 8], "BLOCK": [64, 128, 256, 512], "EARLY": [0, 1], "STREAMING": [0, 1, 2, 3]}

VECTORS = 4  # of 16 bytes, that a thread holds
BLOCK = 128  # threads; narrower rows share a block
EARLY = 1  # ask for the weights before the sums are known
STREAMING = 0  # 1: loads leave the caches to others, 2: stores do, 3: both

SOURCE = r"""
#include <rows.cuh>

constexpr int LARGEST = 512;  // threads of a block that holds its rows: more would be short of registers

template <class T>
__global__ void __launch_bounds__(LARGEST)
    held(const T* x, const T* weight, T* y, int64_t M, int N, int64_t stride, float eps, int threads) {
    __shared__ float scratch[MAX_WARPS];
    take_over();
    const int lane = threadIdx.x % threads, count = N / LANES<T>;
    const int64_t m = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    const auto vector = [&](auto* p, int i) { return (Vector<T>*)p + min(lane + i * threads, count - 1); };
    Vector<T> values[VECTORS], weights[VECTORS];
    load_batch(values, (const Vector<T>*)(x + min(m, M - 1) * stride), lane, threads, count, 0);
    if constexpr (EARLY) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) weights[i] = *vector(weight, i);
        keep_packed(weights);
    }
    float squares = 0, v[LANES<T>], w[LANES<T>];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack(values[i], v);
        for (float a : v) squares += a * a;
    }
    if constexpr (sizeof(T) == 2) keep_packed(values);
    const float scale = rsqrtf(row_sum(squares, threads, scratch) / N + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack(values[i], v);
        if constexpr (!EARLY) weights[i] = *vector(weight, i);
        unpack(weights[i], w);
        for (int e = 0; e < LANES<T>; ++e) v[e] *= scale * w[e];
        if (m < M && lane + i * threads < count) write_once(vector(y + m * N, i), pack<T>(v));
    }
}

// Rows that no block can hold, or that do not lie in whole vectors, are read twice, the second time from L1 or L2.
template <class T>
__global__ void __launch_bounds__(1024) looped(const T* x, const T* weight, T* y, int N, int64_t stride, float eps) {
    __shared__ float scratch[MAX_WARPS];
    take_over();
    const Row<T> row(x + blockIdx.x * stride, N);
    float squares = 0, v[LANES<T>];
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        row.unpack(i, row.load(i), v, 0);
        for (float a : v) squares += a * a;
    }
    const float scale = rsqrtf(row_sum(squares, blockDim.x, scratch) / N + eps);
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        row.unpack(i, row.load(i), v, 0);
        const int64_t at = int64_t(i) * LANES<T> - row.first;
        for (int e = 0; e < LANES<T>; ++e)
            if (row.has(i, e)) v[e] = v[e] * scale * to_float(weight[at + e]);
        row.store(y + int64_t(blockIdx.x) * N, i, v);
    }
}

template <class T>
int rmsnorm(const T* x, const T* weight, T* y, int64_t M, int64_t N, int64_t stride, float eps, cudaStream_t stream) {
    const auto [threads, rows] = Layout::of<T>(N, VECTORS, BLOCK, LARGEST);
    const bool whole = aligned(x) && aligned(weight) && N % LANES<T> == 0 && stride % LANES<T> == 0;
    const int wide = N < 1024 ? divide_up(N, 32) * 32 : 1024;
    if (!threads || !whole) return launch_early(looped<T>, M, wide, 0, stream, x, weight, y, N, stride, eps);
    const int blocks = divide_up(M, rows), block = threads * rows;
    return launch_early(held<T>, blocks, block, 0, stream, x, weight, y, M, N, stride, eps, threads);
}

extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t stride, float eps,
                   cudaStream_t stream) {
    AK_DISPATCH(dtype, return rmsnorm((const T*)x, (const T*)weight, (T*)y, M, N, stride, eps, stream));
}
"""

_run = cuda_function(SOURCE, "run", "i ppp lll f", VECTORS=VECTORS, BLOCK=BLOCK, EARLY=EARLY, STREAMING=STREAMING)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., N], weight [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else N
    weight = weight.contiguous()
    _run(DTYPE_CODE[x.dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), y.numel() // N, N, stride, eps)
    return y
