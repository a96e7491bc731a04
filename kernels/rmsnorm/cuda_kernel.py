"""RMSNorm in CUDA C++: rows held in registers between their sum of squares and their scaling, so x is read once."""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
TUNABLES = {"VECTORS": [1, 2, 4, 8], "BLOCK": [64, 128, 256, 512]}

VECTORS = 4  # of 16 bytes, that a thread holds; more where a row has more than 1024 threads can hold so
BLOCK = 128  # threads; narrower rows share a block

SOURCE = r"""
#include <rows.cuh>

template <class T, int HELD>
__global__ void __launch_bounds__(1024) held(const T* x, const T* weight, T* y, int64_t M, int N, int64_t stride, float eps,
                                             int threads) {
    __shared__ float scratch[MAX_WARPS];
    const int lane = threadIdx.x % threads;
    const int64_t m = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    const Row<T> row(x + min(m, M - 1) * stride, N);
    Vector<T> values[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) values[i] = row.load(lane + i * threads, 0);
    float squares = 0, v[LANES<T>], w[LANES<T>];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        unpack(values[i], v);
        for (float a : v) squares += a * a;
    }
    const float scale = rsqrtf(row_sum(squares, threads, scratch) / N + eps);
    if (m >= M) return;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        unpack(values[i], v);
        row.weights(weight, lane + i * threads, w);
        for (int e = 0; e < LANES<T>; ++e) v[e] *= scale * w[e];
        row.store(y + m * N, lane + i * threads, pack<T>(v));
    }
}

// Rows that no block can hold are read twice, the second time from L2.
template <class T>
__global__ void __launch_bounds__(1024) looped(const T* x, const T* weight, T* y, int N, int64_t stride, float eps) {
    __shared__ float scratch[MAX_WARPS];
    const Row<T> row(x + blockIdx.x * stride, N);
    float squares = 0, v[LANES<T>], w[LANES<T>];
#pragma unroll 4
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        unpack(row.load(i, 0), v);
        for (float a : v) squares += a * a;
    }
    const float scale = rsqrtf(row_sum(squares, blockDim.x, scratch) / N + eps);
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        unpack(row.load(i, 0), v);
        row.weights(weight, i, w);
        for (int e = 0; e < LANES<T>; ++e) v[e] *= scale * w[e];
        row.store(y + int64_t(blockIdx.x) * N, i, pack<T>(v));
    }
}

template <class T, int HELD>
int rmsnorm(const T* x, const T* weight, T* y, int64_t M, int64_t N, int64_t stride, float eps, cudaStream_t stream) {
    const auto [threads, rows] = Layout::of<T>(N, HELD, BLOCK);
    if (threads <= 1024)
        held<T, HELD><<<divide_up(M, rows), threads * rows, 0, stream>>>(x, weight, y, M, N, stride, eps, threads);
    else if constexpr (HELD < 8) return rmsnorm<T, 8>(x, weight, y, M, N, stride, eps, stream);
    else looped<T><<<M, 1024, 0, stream>>>(x, weight, y, N, stride, eps);
    return cudaGetLastError();
}

extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t stride, float eps,
                   cudaStream_t stream) {
    AK_DISPATCH(dtype, return (rmsnorm<T, VECTORS>((const T*)x, (const T*)weight, (T*)y, M, N, stride, eps, stream)));
}
"""

_run = cuda_function(SOURCE, "run", "i ppp lll f", VECTORS=VECTORS, BLOCK=BLOCK)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., N], weight [N] -> a contiguous tensor of x's shape and dtype."""
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else N
    weight = weight.contiguous()
    _run(DTYPE_CODE[x.dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), y.numel() // N, N, stride, eps)
    return y
