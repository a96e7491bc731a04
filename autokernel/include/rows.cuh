// Rows of a matrix in registers: a group of threads holds a row, each thread VECTORS vectors of it.
#pragma once
#include <autokernel.cuh>

#ifndef STREAMING
#define STREAMING 0  // 1: loads leave the caches to others, 2: stores do, 3: both
#endif
template <class T>
__device__ inline Vector<T> read_once(const Vector<T>* p) {
    const auto from = reinterpret_cast<const uint4*>(p);
    const uint4 bits = STREAMING & 1 ? __ldcs(from) : *from;
    return {bits.x, bits.y, bits.z, bits.w};
}
template <class T>
__device__ inline void write_once(Vector<T>* p, const Vector<T>& v) {
    const auto& w = v.words;
    if constexpr (STREAMING & 2) __stcs(reinterpret_cast<uint4*>(p), uint4{w[0], w[1], w[2], w[3]});
    else  // said outright: where elements may be written too, the compiler writes them one by one
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
// Start to copy a vector into shared memory; this thread may read it there when its copies_arrived().
template <class T>
__device__ inline void copy_async(Vector<T>* to, const Vector<T>* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ inline void end_batch_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for all batches of copies but the last `but`.
template <int but>
__device__ inline void copies_arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(but) : "memory");
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

// A row of N elements as the vectors in which it lies. With PEEL it may start and end at any element: odd widths, slices. Its
// first and last vector, which it shares with its neighbours, are then read as the others are where they lie within a tensor
// that is given, and else by element. Without PEEL all are whole.
template <class T, bool PEEL = true>
struct Row {
    const Vector<T>* base;
    int first, end;  // elements of the vectors from which and up to which they are the row's
    int readable_first, readable_end;  // vectors that may be read

    __device__ Row(const T* x, int N, const T* from = nullptr, const T* to = nullptr) {
        first = PEEL ? int(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T)) : 0;
        base = reinterpret_cast<const Vector<T>*>(x - first);
        end = first + N;
        readable_first = first != 0 && !(from && (const void*)base >= from);
        readable_end = to && (const void*)(base + vectors()) <= to ? vectors() : end / LANES<T>;
    }
    __device__ int vectors() const { return (end + LANES<T> - 1) / LANES<T>; }
    __device__ bool whole(int v) const { return (!PEEL || v * LANES<T> >= first) && (v + 1) * LANES<T> <= end; }
    __device__ bool has(int v, int e) const { return v * LANES<T> + e >= first && v * LANES<T> + e < end; }
    __device__ bool readable(int v) const { return (!PEEL || v >= readable_first) && v < readable_end; }

    // Vector v, or another one where it may not be read: without a test, so that many can be asked for together.
    __device__ Vector<T> load(int v) const {
        if (PEEL && readable_first >= readable_end) return {};
        return read_once(base + max(min(v, readable_end - 1), PEEL ? readable_first : 0));
    }

    // The elements of vector v, which has been loaded as `vector`; `fill` where they are not the row's.
    __device__ void unpack(int v, const Vector<T>& vector, float (&out)[LANES<T>], float fill) const {
        ::unpack(vector, out);
        if (whole(v)) return;
        const T* elements = reinterpret_cast<const T*>(base + v);
#pragma unroll
        for (int e = 0; e < LANES<T>; ++e)
            out[e] = !has(v, e) ? fill : readable(v) ? out[e] : to_float(elements[e]);
    }

    // Write vector v of this row to the row y: at once if y lies in its vectors as this row does, else by element.
    __device__ void store(T* y, int v, const float (&values)[LANES<T>]) const {
        T* out = y + v * LANES<T> - first;
        if (whole(v) && (!PEEL || reinterpret_cast<uintptr_t>(out) % 16 == 0))
            write_once(reinterpret_cast<Vector<T>*>(out), pack<T>(values));
        else if constexpr (PEEL) {
#pragma unroll
            for (int e = 0; e < LANES<T>; ++e)
                if (has(v, e)) out[e] = from_float<T>(values[e]);
        }
    }
};

// ---- what the threads of a row tell one another ----
// `threads` is a power of two up to 32, or whole warps. Results are joined in a fixed order, so that runs agree bitwise.
// `scratch` is shared memory of MAX_WARPS elements that nothing else of the kernel uses.

constexpr int MAX_WARPS = 32;

template <class Join>
__device__ inline float shuffle(float value, int threads, Join join) {
    if (threads >= 32) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
    } else {
        for (int step = threads / 2; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
    }
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
    const int warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0)
        for (int c = 0; c < COUNT; ++c) scratch[c][warp] = values[c];
    __syncthreads();
    for (int c = 0; c < COUNT; ++c) values[c] = shuffle_sum(lane < warps ? scratch[c][warp / warps * warps + lane] : 0);
}

__device__ inline float row_sum(float value, int threads, float* scratch) {
    float values[] = {value};
    row_sums(values, threads, reinterpret_cast<float(*)[MAX_WARPS]>(scratch));
    return values[0];
}

// Part of a row's softmax: its peak, and the sum of exp(value - peak).
struct Part {
    float peak = -INFINITY, total = 0;

    // What to subtract instead of the peak: nothing, where there is only -Inf as yet.
    __device__ float base() const { return peak == -INFINITY ? 0 : peak; }
    __device__ float total_from(float base) const { return total * fast_exp(peak - base); }
    __device__ void join(const Part& other) {
        const Part all = {fmaxf(peak, other.peak), 0};
        total = total_from(all.base()) + other.total_from(all.base());
        peak = all.peak;
    }
};

__device__ inline Part shuffle_part(const Part& part, int threads = 32) {
    const Part all = {shuffle_max(part.peak, threads), 0};
    return {all.peak, shuffle_sum(part.total_from(all.base()), threads)};
}

__device__ inline Part row_part(Part part, int threads, Part* scratch) {
    part = shuffle_part(part, threads);
    if (threads <= 32) return part;
    const int warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = part;
    __syncthreads();
    return shuffle_part(lane < warps ? scratch[warp / warps * warps + lane] : Part{});
}

// Add values to a part.
template <int COUNT, int LENGTH>
__device__ inline void add(Part& part, const float (&values)[COUNT][LENGTH]) {
    Part with = part;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        for (float v : values[i]) with.peak = fmaxf(with.peak, v);
    const float base = with.base();
    with.total = part.total_from(base);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        float sum = 0;
        for (float v : values[i]) sum += fast_exp(v - base);
        with.total += sum;
    }
    part = with;
}

// How rows of N elements are shared out: `threads` a row, `rows` rows a block. threads is 0 where a row is too long.
struct Layout {
    int threads, rows;

    // Each thread is to hold up to `vectors` vectors, a block to have about `block` threads, at most `most`. With `peel`,
    // rows may start at any element.
    template <class T>
    static Layout of(int64_t N, int vectors, int block, int most, bool peel = false) {
        const int64_t lanes = LANES<T>, needed = divide_up(divide_up(N + (peel ? lanes - 1 : 0), lanes), vectors);
        if (needed > most) return {0, 0};
        int threads = 1;
        while (threads < needed && threads < 32) threads *= 2;
        if (needed > 32) threads = divide_up(needed, 32) * 32;
        return {threads, threads < block ? block / threads : 1};
    }
};
