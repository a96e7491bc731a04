// Rows of a matrix in registers: a group of threads holds a row, each thread VECTORS vectors of it.
#pragma once
#include <autokernel.cuh>

#ifndef STREAMING
#define STREAMING 0  // 1: loads leave the caches to others, 2: stores do, 3: both
#endif
template <class T>
__device__ inline Vector<T> read_once(const Vector<T>* p) {
    if constexpr (STREAMING & 1) {
        Vector<T> v;
        reinterpret_cast<uint4&>(v) = __ldcs(reinterpret_cast<const uint4*>(p));
        return v;
    } else return *p;
}
template <class T>
__device__ inline void write_once(Vector<T>* p, const Vector<T>& v) {
    if constexpr (STREAMING & 2) __stcs(reinterpret_cast<uint4*>(p), reinterpret_cast<const uint4&>(v));
    else *p = v;
}

template <class T>
__device__ inline Vector<T> filled(float value) {
    float values[LANES<T>];
    for (float& v : values) v = value;
    return pack<T>(values);
}

// Vectors at, at + step, … of those up to `end`; `fill` beyond. Where none is beyond, the loads are independent of any test
// and are asked for together.
template <class T, int COUNT>
__device__ inline void load_batch(Vector<T> (&vectors)[COUNT], const Vector<T>* from, int at, int step, int end, float fill) {
    if (at + (COUNT - 1) * step < end) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) vectors[i] = read_once(from + at + i * step);
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) vectors[i] = at + i * step < end ? read_once(from + at + i * step) : filled<T>(fill);
}

// A row of N elements as the whole vectors in which it lies, so that with PEEL a row may start and end at any element: odd
// widths, slices. Its first and last vector, which it shares with its neighbours, are then read and written by element.
template <class T, bool PEEL = true>
struct Row {
    const Vector<T>* base;
    int first, end;  // elements of the vectors from which and up to which they are the row's

    __device__ Row(const T* x, int N) {
        first = PEEL ? int(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T)) : 0;
        base = reinterpret_cast<const Vector<T>*>(x - first);
        end = first + N;
    }
    __device__ int vectors() const { return (end + LANES<T> - 1) / LANES<T>; }
    __device__ bool whole(int v) const { return (!PEEL || v * LANES<T> >= first) && (v + 1) * LANES<T> <= end; }
    __device__ bool has(int v, int e) const { return v * LANES<T> + e >= first && v * LANES<T> + e < end; }

    // Vector v; `fill` where it is not the row's.
    __device__ Vector<T> load(int v, float fill) const {
        if constexpr (!PEEL) return v < vectors() ? read_once(base + v) : filled<T>(fill);
        if (whole(v)) return read_once(base + v);
        Vector<T> values = filled<T>(fill);
#pragma unroll
        for (int e = 0; e < LANES<T>; ++e)
            if (has(v, e)) values.at[e] = base[v].at[e];
        return values;
    }

    // Write vector v of this row to the row y: at once if y lies in its vectors as this row does, else by element.
    __device__ void store(T* y, int v, const Vector<T>& values) const {
        T* out = y + v * LANES<T> - first;
        if (whole(v) && (!PEEL || reinterpret_cast<uintptr_t>(out) % 16 == 0)) write_once(reinterpret_cast<Vector<T>*>(out), values);
        else if constexpr (PEEL) {
#pragma unroll
            for (int e = 0; e < LANES<T>; ++e)
                if (has(v, e)) out[e] = values.at[e];
        }
    }

    // What belongs to vector v in a vector of N weights.
    __device__ Vector<T> weights(const T* w, int v) const {
        const T* in = w + v * LANES<T> - first;
        if (whole(v) && reinterpret_cast<uintptr_t>(in) % 16 == 0) return *reinterpret_cast<const Vector<T>*>(in);
        Vector<T> values;
#pragma unroll
        for (int e = 0; e < LANES<T>; ++e) values.at[e] = has(v, e) ? in[e] : from_float<T>(0);
        return values;
    }
};

// ---- what the threads of a row tell one another ----
// `threads` is a power of two up to 32, or whole warps. Results are joined in a fixed order, so that runs agree bitwise.
// `scratch` is shared memory of MAX_WARPS elements that nothing else of the kernel uses.

constexpr int MAX_WARPS = 32;

template <class Join>
__device__ inline float shuffle(float value, int threads, Join join) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        if (step < threads) value = join(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

__device__ inline float shuffle_sum(float value, int threads = 32) {
    return shuffle(value, threads, [](float a, float b) { return a + b; });
}
__device__ inline float shuffle_max(float value, int threads = 32) {  // passes over NaN
    return shuffle(value, threads, [](float a, float b) { return fmaxf(a, b); });
}

// Each of `values` becomes its sum over the row.
template <int COUNT>
__device__ inline void row_sums(float (&values)[COUNT], int threads, float (*scratch)[MAX_WARPS]) {
    for (float& value : values) value = shuffle_sum(value, threads);
    if (threads <= 32) return;
    const int warps = threads / 32, warp = threadIdx.x / 32, first = warp / warps * warps;
    if (threadIdx.x % 32 == 0)
        for (int c = 0; c < COUNT; ++c) scratch[c][warp] = values[c];
    __syncthreads();
    for (int c = 0; c < COUNT; ++c) {
        values[c] = 0;
        for (int i = first; i < first + warps; ++i) values[c] += scratch[c][i];
    }
}

__device__ inline float row_sum(float value, int threads, float* scratch) {
    float values[] = {value};
    row_sums(values, threads, reinterpret_cast<float(*)[MAX_WARPS]>(scratch));
    return values[0];
}

// Part of a row's softmax: its peak, and the sum of exp(value - peak), or with BASE2 of exp2(value - peak).
template <bool BASE2>
struct PartOf {
    float peak, total;

    // What to subtract instead of the peak: nothing, where there is only -Inf as yet.
    __device__ float base() const { return peak == -INFINITY ? 0 : peak; }
    __device__ float total_from(float base) const {
        return total * (BASE2 ? fast_exp2(peak - base) : fast_exp(peak - base));
    }
    static __device__ PartOf none() { return {-INFINITY, 0}; }
    static __device__ PartOf join(PartOf a, PartOf b) {
        PartOf all = {fmaxf(a.peak, b.peak), 0};
        all.total = a.total_from(all.base()) + b.total_from(all.base());
        return all;
    }
};

template <class Part>
__device__ inline Part shuffle_part(Part part, int threads = 32) {
    const Part all = {shuffle_max(part.peak, threads), 0};
    return {all.peak, shuffle_sum(part.total_from(all.base()), threads)};
}

// The blocks of a cluster that has the row between them; 1 block before sm_90.
struct Cluster {
    int rank = 0, blocks = 1;

    __device__ Cluster() {
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
    }
    __device__ void arrive() const {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }
    __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }
    // Write to the shared memory of another block, where this block has `to`.
    template <class Part>
    __device__ void tell(int other, Part* to, Part part) const {
#if __CUDA_ARCH__ >= 900
        uint32_t there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(uint32_t(__cvta_generic_to_shared(to))), "r"(other));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(part.peak), "f"(part.total) : "memory");
#endif
    }
};
constexpr int MAX_CLUSTER = AK_ARCH >= 900 ? 8 : 1;

// Join the parts of a row that one block, or each block of a cluster, has. Blocks of a cluster have called arrive() before.
template <bool CLUSTER, class Part>
__device__ inline Part row_part(Part part, int threads, Part* scratch, const Cluster& cluster = {}) {
    part = shuffle_part(part, threads);
    if (threads <= 32) return part;
    const int warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (CLUSTER) {
        cluster.wait();  // every block has started: its shared memory is there
        if (lane < cluster.blocks) cluster.tell(lane, scratch + cluster.rank * MAX_WARPS + warp, part);
        cluster.arrive();
        cluster.wait();
        part = Part::none();
        for (int block = 0; block < cluster.blocks; ++block)
            part = Part::join(part, lane < warps ? scratch[block * MAX_WARPS + lane] : Part::none());
    } else {
        if (lane == 0) scratch[warp] = part;
        __syncthreads();
        part = lane < warps ? scratch[warp / warps * warps + lane] : Part::none();
    }
    return shuffle_part(part);
}

// How rows of N elements are shared out: `threads` a row in each of `blocks` blocks, `rows` rows a block.
struct Layout {
    int threads, rows, blocks;

    // Each thread is to hold up to `vectors` vectors. Rows that need more than `most` threads are given more blocks;
    // threads is 0 where a row is too long for all that there are. With `peel`, rows may start at any element.
    template <class T>
    static Layout of(int64_t N, int vectors, int block, int most = 1024, int most_blocks = 1, bool peel = false) {
        const int64_t lanes = LANES<T>, needed = divide_up(divide_up(N + (peel ? lanes - 1 : 0), lanes), vectors);
        if (needed > 32) {
            int blocks = 1;
            while (blocks * most < needed && blocks < most_blocks) blocks *= 2;
            const int64_t threads = divide_up(divide_up(needed, blocks), 32) * 32;
            if (threads > most) return {0, 0, 0};
            return {int(threads), threads < block && blocks == 1 ? int(block / threads) : 1, blocks};
        }
        int threads = 1;
        while (threads < needed) threads *= 2;
        return {threads, block / threads, 1};
    }
};
