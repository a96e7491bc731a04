"""Softmax in CUDA C++: rows held in registers, long ones in shared memory, whose first part is at work while the rest is on
its way; other dims in two passes, the second of them from L2."""

import math

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "softmax"
BACKEND = "cuda"
TUNABLES = {
    "VECTORS": [1, 2, 4, 8],
    "BLOCK": [64, 128, 256, 512],
    "MOST": [128, 256, 512],
    "STAGED": [256, 512, 768, 1024],
    "BATCH": [1, 2, 4],
    "STREAMING": [0, 1, 2, 3],
}

VECTORS = 4  # of 16 bytes, that a thread holds
BLOCK = 128  # threads; narrower rows share a block
MOST = 512  # threads that hold a row in registers
STAGED = 512  # threads of a longer row
BATCH = 2  # vectors of a longer row that a thread takes at a time
STREAMING = 0  # 1: loads leave the caches to others, 2: stores do, 3: both

SOURCE = r"""
#include <rows.cuh>

template <class T, bool PEEL>
__global__ void __launch_bounds__(MOST) held(const T* x, T* y, int64_t M, int N, int64_t stride, int threads) {
    __shared__ Part scratch[MAX_WARPS];
    take_over();
    const int lane = threadIdx.x % threads;
    const int64_t m = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    const Row<T, PEEL> row(x + min(m, M - 1) * stride, N, x, x + (M - 1) * stride + N);
    Vector<T> values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) values[i] = row.load(lane + i * threads);
    Part part;
    float powers[VECTORS][LANES<T>];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        row.unpack(lane + i * threads, values[i], powers[i], -INFINITY);
        for (float v : powers[i]) part.peak = fmaxf(part.peak, v);
    }
    const float own = part.base();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        for (float& v : powers[i]) part.total += v = fast_exp(v - own);
    const Part all = row_part(part, threads, scratch);
    const float scale = fast_exp(part.peak - all.base()) / all.total;  // not from `own`, 0 where a thread has only -inf
    if (m >= M) return;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        for (float& v : powers[i]) v *= scale;
        row.store(y + m * N, lane + i * threads, powers[i]);
    }
}

constexpr int MOST_BATCHES = divide_up(divide_up(228 * 1024, 16 * STAGED), BATCH);

// A thread's `batches` batches of vectors are copied into its own places in shared memory, and taken as they arrive; what
// there is no room for is read twice.
template <class T, bool PEEL>
__global__ void __launch_bounds__(STAGED) staged(const T* x, T* y, int N, int64_t stride, int batches) {
    extern __shared__ uint4 shared[];
    __shared__ Part scratch[MAX_WARPS];
    take_over();
    const Row<T, PEEL> row(x + blockIdx.x * stride, N, x, x + (gridDim.x - 1) * stride + N);
    const int count = row.vectors();
    Vector<T>* const own = reinterpret_cast<Vector<T>*>(shared) + threadIdx.x;
    const int slots = min(batches * BATCH, int(divide_up(count - int(threadIdx.x), STAGED)));
#pragma unroll 1
    for (int first = 0; first < MOST_BATCHES * BATCH; first += BATCH) {
#pragma unroll
        for (int i = first; i < first + BATCH; ++i) {
            const int v = threadIdx.x + i * STAGED;
            if (i < slots && row.readable(v)) copy_async(own + i * STAGED, row.base + v);
        }
        end_batch_of_copies();
    }
    Part part;
    float values[BATCH][LANES<T>];
#pragma unroll 1
    for (int first = 0; first < slots; first += BATCH) {
        copies_arrived<MOST_BATCHES - 1>();  // one more than before, for each turn ends a batch of none
        end_batch_of_copies();
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            row.unpack(threadIdx.x + (first + i) * STAGED, own[(first + i) * STAGED], values[i], -INFINITY);
        add(part, values);
    }
    for (int v = threadIdx.x + slots * STAGED; v < count; v += STAGED) {
        float more[1][LANES<T>];
        row.unpack(v, row.load(v), more[0], -INFINITY);
        add(part, more);
    }
    part = row_part(part, STAGED, scratch);
    const float base = part.base(), scale = 1 / part.total, logarithm = log2f(part.total);
    const auto finish = [&](int v, const Vector<T>& vector) {
        float out[LANES<T>];
        row.unpack(v, vector, out, -INFINITY);
        for (float& a : out)
            a = sizeof(T) == 4 ? fast_exp(a - base) * scale : fast_exp2(fmaf(a - base, LOG2_E, -logarithm));
        row.store(y + int64_t(blockIdx.x) * N, v, out);
    };
#pragma unroll 2
    for (int i = 0; i < slots; ++i) finish(threadIdx.x + i * STAGED, own[i * STAGED]);
    for (int v = threadIdx.x + slots * STAGED; v < count; v += STAGED) finish(v, row.load(v));
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
    take_over();
    const int64_t blocks = divide_up(lanes, ACROSS), outer = blockIdx.x / blocks;
    const int64_t lane = blockIdx.x % blocks * ACROSS + threadIdx.x;
    x += outer * from.outer + min(lane, lanes - 1) * from.lane;
    y += outer * to.outer + lane * to.lane;
    Part part;
#pragma unroll 4
    for (int64_t n = threadIdx.y; n < N; n += ALONG) {
        const float v[1][1] = {{to_float(x[n * from.n])}};
        add(part, v);
    }
    scratch[threadIdx.y][threadIdx.x] = part;
    __syncthreads();
    Part all;
    for (int i = 0; i < ALONG; ++i) all.join(scratch[i][threadIdx.x]);
    if (lane >= lanes) return;
    const float base = all.base(), scale = 1 / all.total;
#pragma unroll 4
    for (int64_t n = threadIdx.y; n < N; n += ALONG)
        y[n * to.n] = from_float<T>(fast_exp(to_float(x[n * from.n]) - base) * scale);
}

template <class T, bool PEEL>
int rows(const T* x, T* y, int64_t M, int64_t N, int64_t stride, cudaStream_t stream) {
    const auto [threads, rows] = Layout::of<T>(N, VECTORS, BLOCK, MOST, PEEL);
    const int blocks = divide_up(M, rows), block = threads * rows;
    if (threads) return launch_early(held<T, PEEL>, blocks, block, 0, stream, x, y, M, N, stride, threads);
    const int room = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - MAX_WARPS * sizeof(Part);
    const int batch_bytes = BATCH * STAGED * 16, wanted = divide_up(N * sizeof(T) + 15, batch_bytes);
    const int batches = wanted * batch_bytes <= room ? wanted : room / batch_bytes, bytes = batches * batch_bytes;
    auto kernel = staged<T, PEEL>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    return launch_early(kernel, M, STAGED, bytes, stream, x, y, N, stride, batches);
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
    AK_DISPATCH(dtype, return launch_early(strided<T>, grid, block, 0, stream, (const T*)x, (T*)y, lanes, N, from, to));
}
"""

_tunables = {"VECTORS": VECTORS, "BLOCK": BLOCK, "MOST": MOST, "STAGED": STAGED, "BATCH": BATCH, "STREAMING": STREAMING}
_run_rows = cuda_function(SOURCE, "run_rows", "i pp lll", **_tunables)
_run_strided = cuda_function(SOURCE, "run_strided", "i pp lll lll lll", **_tunables)


def kernel_fn(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x of any shape -> its softmax along `dim`, a contiguous tensor of x's shape and dtype."""
    dim %= x.dim()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
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
