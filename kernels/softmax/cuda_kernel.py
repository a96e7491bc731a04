"""Softmax in CUDA C++: rows held in registers, long ones by a cluster of blocks; other dims, and rows beyond that, in two
passes, the second of them from L2."""

import math

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "softmax"
BACKEND = "cuda"
TUNABLES = {
    "VECTORS": [1, 2, 4, 8],
    "BLOCK": [64, 128, 256, 512],
    "MOST": [128, 256, 512],
    "KEEP": [0, 1],
    "STREAMING": [0, 1, 2, 3],
}

VECTORS = 4  # of 16 bytes, that a thread holds
BLOCK = 128  # threads; narrower rows share a block
MOST = 512  # threads of a block, where a row can have more blocks
STREAMING = 0  # 1: loads leave the caches to others, 2: stores do, 3: both
KEEP = 1  # exponentials, where they are few; else they are computed again when they are written

SOURCE = r"""
#include <rows.cuh>

using Part = PartOf<false>;
constexpr int LARGEST = AK_ARCH >= 900 ? MOST : 1024;

template <class T, bool CLUSTER, bool PEEL>
__global__ void __launch_bounds__(LARGEST) held(const T* x, T* y, int64_t M, int N, int64_t stride, int threads) {
    constexpr bool KEPT = KEEP && VECTORS * LANES<T> <= 32;
    __shared__ Part scratch[MAX_WARPS * (CLUSTER ? MAX_CLUSTER : 1)];
    const Cluster cluster;
    if constexpr (CLUSTER) cluster.arrive();
    const int step = CLUSTER ? cluster.blocks * threads : threads;
    const int lane = CLUSTER ? cluster.rank * threads + threadIdx.x : threadIdx.x % threads;
    const int64_t first = CLUSTER ? blockIdx.x / cluster.blocks : int64_t(blockIdx.x) * (blockDim.x / threads);
    const int64_t m = first + threadIdx.x / threads;
    const Row<T, PEEL> row(x + min(m, M - 1) * stride, N);
    Vector<T> values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) values[i] = row.load(lane + i * step, -INFINITY);
    Part part = Part::none();
    float v[LANES<T>], powers[KEPT ? VECTORS : 1][LANES<T>];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack(values[i], v);
        for (float a : v) part.peak = fmaxf(part.peak, a);
    }
    const float own = part.base();
    if constexpr (!KEPT) keep_packed(values);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack(values[i], v);
        for (int e = 0; e < LANES<T>; ++e) part.total += (powers[KEPT ? i : 0][e] = fast_exp(v[e] - own));
    }
    if constexpr (!KEPT) keep_packed(values);
    const Part all = row_part<CLUSTER>(part, threads, scratch, cluster);
    const float scale = (KEPT ? fast_exp(own - all.base()) : 1) / all.total;
    if (m >= M) return;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if constexpr (!KEPT) unpack(values[i], v);
        for (int e = 0; e < LANES<T>; ++e) v[e] = scale * (KEPT ? powers[KEPT ? i : 0][e] : fast_exp(v[e] - all.base()));
        row.store(y + m * N, lane + i * step, pack<T>(v));
    }
}

// Add `values` to a part.
template <int COUNT>
__device__ void add(Part& part, const float (&values)[COUNT]) {
    Part with = part;
    for (float v : values) with.peak = fmaxf(with.peak, v);
    with.total = part.total_from(with.base());
    for (float v : values) with.total += fast_exp(v - with.base());
    part = with;
}

template <class T>
__global__ void __launch_bounds__(1024) looped(const T* x, T* y, int N, int64_t stride) {
    __shared__ Part scratch[MAX_WARPS];
    const Row<T> row(x + blockIdx.x * stride, N);
    Part part = Part::none();
    float v[LANES<T>];
#pragma unroll 2
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        unpack(row.load(i, -INFINITY), v);
        add(part, v);
    }
    part = row_part<false>(part, blockDim.x, scratch);
    const float base = part.base(), scale = 1 / part.total;
    for (int i = threadIdx.x; i < row.vectors(); i += blockDim.x) {
        unpack(row.load(i, -INFINITY), v);
        for (float& a : v) a = fast_exp(a - base) * scale;
        row.store(y + int64_t(blockIdx.x) * N, i, pack<T>(v));
    }
}

struct Strides {
    int64_t outer, n, lane;
};
constexpr int ACROSS = 32, ALONG = 16;  // threads of a block of `strided`

// Along n of x[outer, n, lane], whatever the strides: neighbouring threads take neighbouring lanes.
template <class T>
__global__ void __launch_bounds__(ACROSS* ALONG)
    strided(const T* x, T* y, int64_t lanes, int64_t N, Strides from, Strides to) {
    __shared__ Part scratch[ALONG][ACROSS];
    const int64_t blocks = divide_up(lanes, ACROSS), outer = blockIdx.x / blocks;
    const int64_t lane = blockIdx.x % blocks * ACROSS + threadIdx.x;
    x += outer * from.outer + min(lane, lanes - 1) * from.lane;
    y += outer * to.outer + lane * to.lane;
    Part part = Part::none();
#pragma unroll 4
    for (int64_t n = threadIdx.y; n < N; n += ALONG) {
        const float v[] = {to_float(x[n * from.n])};
        add(part, v);
    }
    scratch[threadIdx.y][threadIdx.x] = part;
    __syncthreads();
    Part all = Part::none();
    for (int i = 0; i < ALONG; ++i) all = Part::join(all, scratch[i][threadIdx.x]);
    if (lane >= lanes) return;
    const float base = all.base(), scale = 1 / all.total;
#pragma unroll 4
    for (int64_t n = threadIdx.y; n < N; n += ALONG)
        y[n * to.n] = from_float<T>(fast_exp(to_float(x[n * from.n]) - base) * scale);
}

template <class T, bool PEEL>
int rows(const T* x, T* y, int64_t M, int64_t N, int64_t stride, cudaStream_t stream) {
    const auto [threads, rows, blocks] = Layout::of<T>(N, VECTORS, BLOCK, LARGEST, MAX_CLUSTER, PEEL);
    if constexpr (MAX_CLUSTER > 1) {
        auto kernel = held<T, true, PEEL>;
        if (blocks > 1) return launch(kernel, M * blocks, threads, 0, stream, blocks, false, x, y, M, N, stride, threads);
    }
    if (threads) held<T, false, PEEL><<<divide_up(M, rows), threads * rows, 0, stream>>>(x, y, M, N, stride, threads);
    else looped<T><<<M, 1024, 0, stream>>>(x, y, N, stride);
    return cudaGetLastError();
}

extern "C" int run_rows(int dtype, const void* x, void* y, int64_t M, int64_t N, int64_t stride, cudaStream_t stream) {
    AK_DISPATCH(dtype, {
        const bool whole = aligned(x) && N % LANES<T> == 0 && stride % LANES<T> == 0;
        return (whole ? rows<T, false> : rows<T, true>)((const T*)x, (T*)y, M, N, stride, stream);
    });
}

extern "C" int run_strided(int dtype, const void* x, void* y, int64_t outer, int64_t lanes, int64_t N, int64_t x_outer,
                           int64_t x_n, int64_t x_lane, int64_t y_outer, int64_t y_n, int64_t y_lane, cudaStream_t stream) {
    const Strides from = {x_outer, x_n, x_lane}, to = {y_outer, y_n, y_lane};
    const dim3 grid(outer * divide_up(lanes, ACROSS)), block(ACROSS, ALONG);
    AK_DISPATCH(dtype, (strided<<<grid, block, 0, stream>>>((const T*)x, (T*)y, lanes, N, from, to)));
    return cudaGetLastError();
}
"""

_tunables = {"VECTORS": VECTORS, "BLOCK": BLOCK, "MOST": MOST, "KEEP": KEEP, "STREAMING": STREAMING}
_run_rows = cuda_function(SOURCE, "run_rows", "i pp lll", **_tunables)
_run_strided = cuda_function(SOURCE, "run_strided", "i pp lll lll lll", **_tunables)


def kernel_fn(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x of any shape -> its softmax along `dim`, a contiguous tensor of x's shape and dtype."""
    dim %= x.dim()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer, N, lanes = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    x = x.reshape(outer, N, lanes)
    x_outer, x_n, x_lane = x.stride()
    code = DTYPE_CODE[x.dtype]
    if lanes == 1 and x_n == 1:
        _run_rows(code, x.data_ptr(), y.data_ptr(), outer, N, x_outer)
    elif lanes == 1:  # rows with gaps between their elements: take the rows as lanes
        _run_strided(code, x.data_ptr(), y.data_ptr(), 1, outer, N, 0, x_n, x_outer, 0, 1, N)
    else:
        _run_strided(code, x.data_ptr(), y.data_ptr(), outer, lanes, N, x_outer, x_n, x_lane, N * lanes, lanes, 1)
    return y
