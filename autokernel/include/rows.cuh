// Rows of a matrix in registers: a group of threads holds a row, each thread VECTORS vectors of it.
#pragma once
#include <autokernel.cuh>

// A row of N elements as the whole vectors in which it lies, so that a row may start at any element: odd widths, slices.
// What the first and the last vector hold of the neighbours' is in the same 16 bytes as an element of the row: readable.
template <class T>
struct Row {
    const Vector<T>* base;
    int first, end;  // elements of the vectors from which and up to which they are the row's

    __device__ Row(const T* x, int N) {
        first = int(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
        base = reinterpret_cast<const Vector<T>*>(x - first);
        end = first + N;
    }
    __device__ int vectors() const { return (end + LANES<T> - 1) / LANES<T>; }
    __device__ bool whole(int v) const { return v * LANES<T> >= first && (v + 1) * LANES<T> <= end; }
    __device__ bool has(int v, int e) const { return v * LANES<T> + e >= first && v * LANES<T> + e < end; }

    // Vector v; `fill` where it is not the row's.
    __device__ Vector<T> load(int v, float fill) const {
        Vector<T> values;
        if (v < vectors()) values = base[v];
        if (!whole(v)) {
#pragma unroll
            for (int e = 0; e < LANES<T>; ++e)
                if (!has(v, e)) values.at[e] = from_float<T>(fill);
        }
        return values;
    }

    // Write vector v of this row to the row y: at once if y lies in its vectors as this row does, else by element.
    __device__ void store(T* y, int v, const Vector<T>& values) const {
        T* out = y + v * LANES<T> - first;
        if (whole(v) && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
            *reinterpret_cast<Vector<T>*>(out) = values;
            return;
        }
#pragma unroll
        for (int e = 0; e < LANES<T>; ++e)
            if (has(v, e)) out[e] = values.at[e];
    }

    // What belongs to vector v of a vector of N weights.
    __device__ void weights(const T* w, int v, float (&out)[LANES<T>]) const {
        const T* in = w + v * LANES<T> - first;
        if (whole(v) && reinterpret_cast<uintptr_t>(in) % 16 == 0) {
            unpack(*reinterpret_cast<const Vector<T>*>(in), out);
            return;
        }
#pragma unroll
        for (int e = 0; e < LANES<T>; ++e) out[e] = has(v, e) ? to_float(in[e]) : 0;
    }
};

constexpr int MAX_WARPS = 32;

// The sum over a row's group of `threads` (a power of two up to 32, or whole warps) in a fixed order, for each thread of it.
// `scratch`: MAX_WARPS floats of shared memory that nothing else of this kernel uses.
__device__ inline float row_sum(float value, int threads, float* scratch) {
    for (int step = min(threads, 32) / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threads <= 32) return value;
    const int warps = threads / 32, warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) scratch[warp] = value;
    __syncthreads();
    value = 0;
    for (int i = warp / warps * warps, last = i + warps; i < last; ++i) value += scratch[i];
    return value;
}

// How rows of N elements are shared out: `threads` a row, each with up to `vectors` vectors, `rows` rows a block.
struct Layout {
    int threads, rows;

    template <class T>
    static Layout of(int64_t N, int vectors, int block) {
        // One vector more: a row that is not aligned lies in that many.
        const int64_t lanes = LANES<T>, needed = divide_up(divide_up(N, lanes) + (N % lanes != 0), vectors);
        int threads = 1;
        while (threads < needed && threads < 32) threads *= 2;
        if (needed > 32) threads = int(divide_up(needed, 32) * 32);
        return {threads, threads < block ? block / threads : 1};
    }
};
