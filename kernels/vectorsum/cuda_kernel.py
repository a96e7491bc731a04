"""The sum of a vector in CUDA C++: each block a share, then one block the shares; always in the same order."""

import torch

from autokernel.build import cuda_function

KERNEL_TYPE = "vectorsum"
BACKEND = "cuda"
TUNABLES = {"BLOCK": [256, 512, 1024], "UNROLL": [4, 8, 16], "BLOCKS": [264, 528, 1056, 2112]}

BLOCK = 512  # threads
UNROLL = 4  # vectors of 16 bytes that a thread asks for at a time
BLOCKS = 2112  # at most

SOURCE = r"""
#include <autokernel.cuh>

__device__ double block_sum(double v, double* scratch) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < BLOCK / 32; ++i) v += scratch[i];
    __syncthreads();
    return v;
}

__global__ void __launch_bounds__(BLOCK) shares(const float* x, double* sums, int64_t n, int64_t share, int head) {
    __shared__ double scratch[BLOCK / 32];
    take_over();
    const auto vectors = reinterpret_cast<const float4*>(x + head);
    const int64_t count = (n - head) / 4, end = min(count, (blockIdx.x + 1) * share);
    double sum = 0;
    int64_t i = blockIdx.x * share + threadIdx.x;
    for (; i + (UNROLL - 1) * BLOCK < end; i += UNROLL * BLOCK) {
        float4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) v[u] = __ldcs(vectors + i + u * BLOCK);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) sum += double((v[u].x + v[u].y) + (v[u].z + v[u].w));
    }
    for (; i < end; i += BLOCK) {
        const float4 v = vectors[i];
        sum += double((v.x + v.y) + (v.z + v.w));
    }
    if (blockIdx.x == 0) {  // what is not in whole vectors
        if (threadIdx.x < head) sum += x[threadIdx.x];
        const int64_t rest = head + count * 4 + threadIdx.x;
        if (rest < n) sum += x[rest];
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(BLOCK) together(const double* sums, float* y, int count) {
    __shared__ double scratch[BLOCK / 32];
    take_over();
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += BLOCK) sum += sums[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *y = float(sum);
}

extern "C" int run(const float* x, double* sums, float* y, int64_t n, cudaStream_t stream) {
    const int head = min(n, int64_t(16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / 4);
    const int64_t pass = BLOCK * UNROLL, passes = divide_up((n - head) / 4, pass);
    const int64_t share = max(divide_up(passes, BLOCKS), int64_t(1)) * pass;
    const int blocks = max(divide_up((n - head) / 4, share), int64_t(1));
    launch_early(shares, blocks, BLOCK, 0, stream, x, sums, n, share, head);
    launch_early(together, 1, BLOCK, 0, stream, sums, y, blocks);
    return cudaGetLastError();  // of either
}
"""

_run = cuda_function(SOURCE, "run", "ppp l", BLOCK=BLOCK, UNROLL=UNROLL, BLOCKS=BLOCKS)


def kernel_fn(x: torch.Tensor) -> torch.Tensor:
    """x [N] fp32 -> a scalar."""
    x = x.contiguous()
    sums = torch.empty((BLOCKS,), dtype=torch.float64, device=x.device)
    y = torch.empty((), dtype=x.dtype, device=x.device)
    _run(x.data_ptr(), sums.data_ptr(), y.data_ptr(), x.numel())
    return y
