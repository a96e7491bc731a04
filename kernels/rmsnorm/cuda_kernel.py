"""RMSNorm in CUDA C++: rows held in registers between their sum of squares and their scaling, so x is read once.

A block takes several rows in turn: it has the weights already, and asks for the next row while it is at work on one.
"""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
TUNABLES = {
    "VECTORS": [1, 2, 4, 8],
    "BLOCK": [64, 128, 256, 512],
    "RESIDENT": [512, 768, 1024, 2048],
    "HOLD": [0, 1],
    "STREAMING": [0, 1, 2, 3],
}

VECTORS = 4  # of 16 bytes, that a thread holds
BLOCK = 128  # threads; narrower rows share a block
RESIDENT = 768  # threads of a multiprocessor, which take rows in turns
HOLD = 1  # the weights in registers; else they are read from L1 for each row
STREAMING = 0  # 1: loads leave the caches to others, 2: stores do, 3: both

SOURCE = r"""
#include <rows.cuh>

constexpr int LARGEST = 512;  // threads of a block that holds its rows: more would be short of registers

template <class T>
__global__ void __launch_bounds__(LARGEST)
    held(const T* x, const T* weight, T* y, int64_t M, int N, int64_t stride, float eps, int threads) {
    __shared__ float scratch[2][MAX_WARPS];
    const int lane = threadIdx.x % threads, count = N / LANES<T>, rows = blockDim.x / threads;
    const int64_t step = int64_t(gridDim.x) * rows;
    const auto vector = [&](auto* p, int i) { return (Vector<T>*)p + min(lane + i * threads, count - 1); };
    const auto ask = [&](Vector<T>(&to)[VECTORS], int64_t m) {
        load_batch(to, (const Vector<T>*)(x + min(m, M - 1) * stride), lane, threads, count, 0);
    };
    int64_t m = int64_t(blockIdx.x) * rows + threadIdx.x / threads;
    Vector<T> values[VECTORS], next[VECTORS], weights[VECTORS];
    ask(values, m);
    if constexpr (HOLD) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) weights[i] = *vector(weight, i);
    }
    int turn = 0;
    for (int64_t first = int64_t(blockIdx.x) * rows; first < M; first += step, m += step, turn ^= 1) {
        if (first + step < M) ask(next, m + step);  // while this row is at work
        float squares = 0, v[LANES<T>], w[LANES<T>];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack(values[i], v);
            for (float a : v) squares += a * a;
        }
        if constexpr (sizeof(T) == 2) keep_packed(values);
        const float scale = rsqrtf(row_sum(squares, threads, scratch[turn]) / N + eps);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            unpack(values[i], v);
            if constexpr (!HOLD) weights[i] = *vector(weight, i);
            unpack(weights[i], w);
            for (int e = 0; e < LANES<T>; ++e) v[e] *= scale * w[e];
            if (m < M && lane + i * threads < count) write_once(vector(y + m * N, i), pack<T>(v));
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) values[i] = next[i];
    }
}

// Rows that no block can hold, or that do not lie in whole vectors, are read twice, the second time from L1 or L2.
template <class T>
__global__ void __launch_bounds__(1024) looped(const T* x, const T* weight, T* y, int N, int64_t stride, float eps) {
    __shared__ float scratch[MAX_WARPS];
    const Row<T> row(x + blockIdx.x * stride, N);
    float squares = 0, v[LANES<T>], w[LANES<T>];
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        unpack(row.load(i, 0), v);
        for (float a : v) squares += a * a;
    }
    const float scale = rsqrtf(row_sum(squares, blockDim.x, scratch) / N + eps);
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        unpack(row.load(i, 0), v);
        unpack(row.weights(weight, i), w);
        for (int e = 0; e < LANES<T>; ++e) v[e] *= scale * w[e];
        row.store(y + int64_t(blockIdx.x) * N, i, pack<T>(v));
    }
}

template <class T>
int rmsnorm(const T* x, const T* weight, T* y, int64_t M, int64_t N, int64_t stride, float eps, cudaStream_t stream) {
    const auto [threads, rows] = Layout::of<T>(N, VECTORS, BLOCK, LARGEST);
    const bool whole = aligned(x) && aligned(weight) && N % LANES<T> == 0 && stride % LANES<T> == 0;
    const int wide = N < 1024 ? divide_up(N, 32) * 32 : 1024;
    if (threads && whole) {  // each block takes equally many rows, so that all end together
        const int block = threads * rows;
        const int resident = attribute(cudaDevAttrMultiProcessorCount) * max(RESIDENT / block, 1);
        const int64_t turns = divide_up(M, int64_t(rows) * resident), blocks = divide_up(M, rows * turns);
        held<<<blocks, block, 0, stream>>>(x, weight, y, M, N, stride, eps, threads);
    } else looped<<<M, wide, 0, stream>>>(x, weight, y, N, stride, eps);
    return cudaGetLastError();
}

extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t stride, float eps,
                   cudaStream_t stream) {
    AK_DISPATCH(dtype, return rmsnorm((const T*)x, (const T*)weight, (T*)y, M, N, stride, eps, stream));
}
"""

_run = cuda_function(
    SOURCE, "run", "i ppp lll f", VECTORS=VECTORS, BLOCK=BLOCK, RESIDENT=RESIDENT, HOLD=HOLD, STREAMING=STREAMING
)


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
