"""Cross entropy in CUDA C++: a block a row, which it reads once (online log-sum-exp), then one block for the mean.

The second kernel keeps the sum in a fixed order, so that runs agree bitwise, which atomics would not. From sm_90 on it is
launched while the first still runs, and waits for it.
"""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "cross_entropy"
BACKEND = "cuda"
TUNABLES = {"BLOCK": [128, 256, 512, 1024], "UNROLL": [1, 2, 4, 8], "STREAMING": [0, 1]}

BLOCK = 512  # threads
UNROLL = 4  # vectors of 16 bytes that a thread takes at a time
STREAMING = 0  # 1: loads leave the caches to others

SOURCE = r"""
#include <rows.cuh>

template <class T>
__device__ float highest(const Vector<T> (&vectors)[UNROLL]) {  // passes over NaN
    if constexpr (sizeof(T) == 4) {
        float peak = -INFINITY;
        for (const auto& vector : vectors)
            for (uint32_t word : vector.words) peak = fmaxf(peak, __uint_as_float(word));
        return peak;
    } else {  // in pairs: one instruction for two
        using Pair = std::conditional_t<std::is_same_v<T, f16>, __half2, __nv_bfloat162>;
        Pair peak = reinterpret_cast<const Pair&>(vectors[0].words[0]);
#pragma unroll
        for (const auto& vector : vectors)
            for (const uint32_t& word : vector.words) peak = __hmax2(peak, reinterpret_cast<const Pair&>(word));
        return fmaxf(to_float(peak.x), to_float(peak.y));
    }
}

template <class T>
__device__ void add_vectors(Part& part, const Vector<T> (&vectors)[UNROLL]) {
    const Part with = {fmaxf(part.peak, highest(vectors)), 0};
    const float base = with.base();
    float totals[LANES<T>] = {part.total_from(base)}, v[LANES<T>];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        unpack(vectors[i], v);
        for (int e = 0; e < LANES<T>; ++e) totals[e] += fast_exp(v[e] - base);
    }
    part = with;
    for (float total : totals) part.total += total;
}

struct Loss {
    float value, counted;
};

template <class T>
__global__ void __launch_bounds__(BLOCK)
    losses(const T* logits, const int64_t* targets, Loss* out, int V, int64_t stride, int64_t ignored) {
    __shared__ Part scratch[MAX_WARPS];
    take_over();
    const int64_t target = targets[blockIdx.x];
    if (target == ignored) {
        if (threadIdx.x == 0) out[blockIdx.x] = {0, 0};
        return;
    }
    logits += blockIdx.x * stride;
    const float chosen = target >= 0 && target < V ? to_float(logits[target]) : NAN;
    const Row<T> row(logits, V);
    const int first = row.first != 0, last = row.end / LANES<T>;  // of the vectors that are the row's alone
    Part part;
    for (int start = first + threadIdx.x; start < last; start += UNROLL * BLOCK) {
        Vector<T> vectors[UNROLL];
        load_batch(vectors, row.base, start, BLOCK, last, -INFINITY);
        add_vectors(part, vectors);
    }
    const int edge = threadIdx.x == 0 ? 0 : last;  // the two vectors that are shared with the neighbours
    if (threadIdx.x < 2 && !row.whole(edge) && (threadIdx.x == 0 || last > 0)) {
        float values[1][LANES<T>];
        row.unpack(edge, {}, values[0], -INFINITY);
        add(part, values);
    }
    part = row_part(part, BLOCK, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = {logf(part.total) + (part.peak - chosen), 1};
}

constexpr int MEAN_BLOCK = 1024;

template <class T>
__global__ void __launch_bounds__(MEAN_BLOCK) mean(const Loss* losses, T* out, int64_t M) {
    __shared__ float scratch[2][MAX_WARPS];
    take_over();
    float sums[2] = {};
#pragma unroll 8
    for (int64_t m = threadIdx.x; m < M; m += MEAN_BLOCK) {
        const Loss loss = losses[m];
        sums[0] += loss.value, sums[1] += loss.counted;
    }
    row_sums(sums, MEAN_BLOCK, scratch);
    if (threadIdx.x == 0) *out = from_float<T>(sums[0] / sums[1]);
}

template <class T>
int cross_entropy(const T* logits, const int64_t* targets, Loss* partial, T* out, int64_t M, int64_t V, int64_t stride,
                  int64_t ignored, cudaStream_t stream) {
    launch_early(losses<T>, M, BLOCK, 0, stream, logits, targets, partial, V, stride, ignored);
    launch_early(mean<T>, 1, MEAN_BLOCK, 0, stream, partial, out, M);
    return cudaGetLastError();  // of either
}

extern "C" int run(int dtype, const void* logits, const int64_t* targets, Loss* partial, void* out, int64_t M, int64_t V,
                   int64_t stride, int64_t ignored, cudaStream_t stream) {
    AK_DISPATCH(dtype, return cross_entropy((const T*)logits, targets, partial, (T*)out, M, V, stride, ignored, stream));
}
"""

_run = cuda_function(SOURCE, "run", "i pppp llll", BLOCK=BLOCK, UNROLL=UNROLL, STREAMING=STREAMING)


def kernel_fn(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """logits [M, V], targets [M] int64 -> a scalar in the logits' dtype; NaN if every row is ignored."""
    M, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    targets = targets.contiguous()
    losses, mean = targets.new_empty(M), logits.new_empty(())  # a loss is as large as an index
    pointers = logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), mean.data_ptr()
    _run(DTYPE_CODE[logits.dtype], *pointers, M, V, logits.stride(0), ignore_index)
    return mean
