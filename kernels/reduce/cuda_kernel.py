"""Reduce in CUDA C++: sum or max along any dim; where that leaves too few blocks, in two stages.

The dim is cut into parts whose results (fp32) a second launch reduces in a fixed order, so that runs agree bitwise.
"""

import math
from functools import cache

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "reduce"
BACKEND = "cuda"
TUNABLES = {
    "BLOCK": [64, 128, 256],
    "UNROLL": [2, 4, 8, 16],
    "ALONG": [4, 8, 16, 32],
    "WAVES": [1, 2, 4, 8],
    "STREAMING": [0, 1],
}

BLOCK = 256  # threads; narrower rows share a block
UNROLL = 16  # vectors of 16 bytes that a thread takes at a time
ALONG = 8  # threads along dim, where dim is not contiguous
WAVES = 4  # blocks a multiprocessor, below which dim is cut into parts
STREAMING = 1  # 1: loads leave the caches to others
ACROSS = 32  # threads beside each other, where dim is not contiguous
LARGEST_BLOCK = 256

SOURCE = r"""
#include <rows.cuh>

__device__ inline float maximum(float a, float b) {  // NaN if either is, unlike fmaxf
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

template <bool MAX>
struct Reduction {
    static constexpr float EMPTY = MAX ? -INFINITY : 0;

    __device__ float operator()(float a, float b) const { return MAX ? maximum(a, b) : a + b; }
};

// Where results go: partial ones as floats, others into the output.
template <class T>
struct Output {
    T* y;
    float* partial;

    __device__ void put(int64_t at, float value) const {
        if (partial) partial[at] = value;
        else y[at] = from_float<T>(value);
    }
};

// Part blockIdx.y of rows of N contiguous elements.
template <class T, bool MAX>
__global__ void __launch_bounds__(LARGEST_BLOCK)
    rows(const T* x, Output<T> y, int64_t M, int64_t N, int64_t stride, int64_t part, int threads) {
    constexpr Reduction<MAX> join;
    __shared__ float scratch[MAX_WARPS];
    take_over();
    const int64_t m = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads, from = blockIdx.y * part;
    const Row<T> row(x + min(m, M - 1) * stride + from, min(N - from, part));
    const int lane = threadIdx.x % threads, first = row.first != 0, last = row.end / LANES<T>;  // of whole vectors
    float results[LANES<T>], v[LANES<T>];
    for (float& result : results) result = join.EMPTY;
    int at = first + lane;
    for (; at < last; at += UNROLL * threads) {
        Vector<T> vectors[UNROLL];
        load_batch(vectors, row.base, at, threads, last, join.EMPTY);
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            unpack(vectors[i], v);
            for (int e = 0; e < LANES<T>; ++e) results[e] = join(results[e], v[e]);
        }
    }
    for (int edge = 0; edge < 2; ++edge) {  // vectors that are shared with neighbours
        at = edge ? last : 0;
        if (lane != edge % threads || row.whole(at) || (edge && last == 0)) continue;
        row.unpack(at, {}, v, join.EMPTY);
        for (int e = 0; e < LANES<T>; ++e) results[e] = join(results[e], v[e]);
    }
    float result = join.EMPTY;
    for (float other : results) result = join(result, other);
    result = shuffle(result, threads, join);
    if (threads > 32) {
        const int warps = threads / 32, warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) scratch[warp] = result;
        __syncthreads();
        result = join.EMPTY;
        for (int i = warp / warps * warps, end = i + warps; i < end; ++i) result = join(result, scratch[i]);
    }
    if (m < M && lane == 0) y.put(m * gridDim.y + blockIdx.y, result);
}

// Part blockIdx.y of x[outer, n, lane] along n: a thread takes WIDTH neighbouring lanes.
template <class T, int WIDTH, bool MAX>
__global__ void __launch_bounds__(ACROSS* ALONG) lanes(const T* x, Output<T> y, int64_t lanes, int64_t N, int64_t part,
                                                       int64_t stride_outer, int64_t stride_n, int64_t stride_lane) {
    constexpr Reduction<MAX> join;
    struct alignas(WIDTH * sizeof(T)) Some {
        T at[WIDTH];
    };
    __shared__ float scratch[ALONG][ACROSS * WIDTH + 1];
    take_over();
    const int64_t blocks = divide_up(lanes, ACROSS * WIDTH), outer = blockIdx.x / blocks;
    const int64_t first = blockIdx.x % blocks * ACROSS * WIDTH;
    const int64_t lane = first + threadIdx.x * WIDTH, end = min(N, (blockIdx.y + 1) * part);
    float results[WIDTH];
    for (float& result : results) result = join.EMPTY;
    if (lane < lanes) {
        x += outer * stride_outer + lane * stride_lane;
#pragma unroll 8
        for (int64_t n = blockIdx.y * part + threadIdx.y; n < end; n += ALONG) {
            const Some some = *reinterpret_cast<const Some*>(x + n * stride_n);
            for (int e = 0; e < WIDTH; ++e) results[e] = join(results[e], to_float(some.at[e]));
        }
    }
    for (int e = 0; e < WIDTH; ++e) scratch[threadIdx.y][threadIdx.x * WIDTH + e] = results[e];
    __syncthreads();
    for (int i = threadIdx.y * ACROSS + threadIdx.x; i < ACROSS * WIDTH && first + i < lanes; i += ACROSS * ALONG) {
        float result = join.EMPTY;
        for (int j = 0; j < ALONG; ++j) result = join(result, scratch[j][i]);
        y.put((outer * lanes + first + i) * gridDim.y + blockIdx.y, result);
    }
}

template <class T, bool MAX>
__global__ void finish(const float* partial, T* y, int64_t count, int parts) {
    constexpr Reduction<MAX> join;
    take_over();
    const int64_t i = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    float result = join.EMPTY;
    for (int p = threadIdx.x % 32; p < parts && i < count; p += 32) result = join(result, partial[i * parts + p]);
    result = shuffle(result, 32, join);
    if (threadIdx.x % 32 == 0 && i < count) y[i] = from_float<T>(result);
}

struct Shape {
    int64_t outer, N, lanes, stride_outer, stride_n, stride_lane;
};

template <class T, bool MAX>
int reduce(const T* x, T* y, float* partial, const Shape& s, int parts, cudaStream_t stream) {
    const Output<T> out = {y, parts > 1 ? partial : nullptr};
    const int64_t part = divide_up(divide_up(s.N, parts), LANES<T>) * LANES<T>;
    const int64_t count = s.outer * s.lanes;
    if (s.stride_n == 1 && (s.lanes == 1 || s.outer == 1)) {
        const int64_t stride = s.lanes == 1 ? s.stride_outer : s.stride_lane;
        auto [threads, shared] = Layout::of<T>(part, UNROLL, BLOCK, LARGEST_BLOCK);
        if (!threads) threads = LARGEST_BLOCK, shared = 1;
        const dim3 grid(divide_up(count, shared), parts);
        launch_early(rows<T, MAX>, grid, threads * shared, 0, stream, x, out, count, s.N, stride, part, threads);
    } else {  // rows with gaps between their elements: take the rows as lanes
        const int64_t outer = s.lanes == 1 ? 1 : s.outer, width = s.lanes == 1 ? s.outer : s.lanes;
        const int64_t apart = s.lanes == 1 ? s.stride_outer : s.stride_lane;
        const bool whole = apart == 1 && aligned(x) && (width | s.stride_outer | s.stride_n) % LANES<T> == 0;
        const dim3 block(ACROSS, ALONG), grid(outer * divide_up(width, ACROSS * (whole ? LANES<T> : 1)), parts);
        auto kernel = whole ? lanes<T, LANES<T>, MAX> : lanes<T, 1, MAX>;
        launch_early(kernel, grid, block, 0, stream, x, out, width, s.N, part, s.stride_outer, s.stride_n, apart);
    }
    if (parts > 1) launch_early(finish<T, MAX>, divide_up(count, 8), 256, 0, stream, partial, y, count, parts);
    return cudaGetLastError();
}

extern "C" int run(int dtype, const void* x, void* y, float* partial, int64_t outer, int64_t N, int64_t lanes,
                   int64_t stride_outer, int64_t stride_n, int64_t stride_lane, int parts, int max, cudaStream_t stream) {
    const Shape shape = {outer, N, lanes, stride_outer, stride_n, stride_lane};
    AK_DISPATCH(dtype, return max ? reduce<T, true>((const T*)x, (T*)y, partial, shape, parts, stream)
                                  : reduce<T, false>((const T*)x, (T*)y, partial, shape, parts, stream));
}
"""

_tunables = {"BLOCK": BLOCK, "UNROLL": UNROLL, "ALONG": ALONG, "STREAMING": STREAMING}
_run = cuda_function(SOURCE, "run", "i ppp lll lll ii", ACROSS=ACROSS, LARGEST_BLOCK=LARGEST_BLOCK, **_tunables)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _parts(outer: int, N: int, lanes: int, contiguous: bool, device: int) -> int:
    """Into how many parts to cut dim, for every multiprocessor to have work."""
    if contiguous:
        least, blocks = 8 * UNROLL * BLOCK, outer * lanes
    else:
        least, blocks = 16 * ALONG, outer * math.ceil(lanes / (8 * ACROSS))
    return max(min(math.ceil(WAVES * _processors(device) / blocks), N // least), 1)


def kernel_fn(x: torch.Tensor, dim: int = -1, op: str = "sum") -> torch.Tensor:
    """x of any shape -> its sum or max along `dim`, without that dim, contiguous and in x's dtype."""
    dim %= x.dim()
    y = x.new_empty(x.shape[:dim] + x.shape[dim + 1 :])
    outer, N, lanes = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    x = x.reshape(outer, N, lanes)
    parts = _parts(outer, N, lanes, x.stride(1) == 1, x.device.index)
    partial = torch.empty(outer * lanes * parts, dtype=torch.float32, device=x.device) if parts > 1 else y
    pointers = x.data_ptr(), y.data_ptr(), partial.data_ptr()
    _run(DTYPE_CODE[x.dtype], *pointers, outer, N, lanes, *x.stride(), parts, op == "max")
    return y
