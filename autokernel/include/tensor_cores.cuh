// Tensor cores as every NVIDIA GPU from sm_80 on has them: cp.async, ldmatrix and mma.sync, one wrapper each.
#pragma once
#include <autokernel.cuh>

#include <type_traits>

__device__ inline uint32_t shared_at(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// 16 bytes from global to shared memory, asynchronously; those from `bytes` on become zero and are not read.
__device__ inline void copy_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the newest PENDING groups of this thread's copies have landed.
template <int PENDING>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices; lane 8i + j gives the address of row j of matrix i.
template <bool TRANSPOSED>
__device__ void load_matrices(uint32_t (&r)[4], const void* row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_at(row)));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_at(row)));
}

// d [16, 8] += a [16, 16] b [16, 8]. Lane l holds d[l / 4 + {0, 8}][2 (l % 4) + {0, 1}], the upper row's pair first.
template <class T>
__device__ void multiply_16x8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define AK_MMA(TYPE)                                                                                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
                 "{%0, %1, %2, %3};"                                                                                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<T, f16>) AK_MMA("f16");
    else AK_MMA("bf16");
#undef AK_MMA
}

template <class T>
__device__ uint32_t pack_pair(float low, float high) {
    if constexpr (std::is_same_v<T, f16>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

struct Matrix {  // [rows, K]: A, or B transposed
    const void* base;
    int64_t row_stride, k_stride;

    // Whether elements of 16 bits lie in vectors of 16 bytes along the dim of stride 1, as cp.async and TMA ask.
    __host__ __device__ bool in_vectors(bool along_k) const {
        const int64_t inner = along_k ? k_stride : row_stride, outer = along_k ? row_stride : k_stride;
        return inner == 1 && outer > 0 && outer % 8 == 0 && reinterpret_cast<uintptr_t>(base) % 16 == 0;
    }
};

// ROWS x STEP of a 16-bit matrix in shared memory: 16-byte vectors along one dim, swizzled against bank conflicts.
template <class T, int ROWS, int STEP, bool ALONG_K>
struct alignas(16) Tile {
    T at[ROWS * STEP];

    __device__ T* vector(int row, int k) {
        constexpr int LENGTH = ALONG_K ? STEP : ROWS;  // of a line; two lines of 32 elements share the 32 banks
        const int line = ALONG_K ? row : k, column = ALONG_K ? k : row;
        return at + line * LENGTH + ((column / 8) ^ (LENGTH == 32 ? line / 2 % 4 : line % 8)) * 8;
    }
    // From row `row0` and from k0 on; what lies past the last row or K is zero. By single elements unless `vectors`.
    __device__ void fill(const Matrix& x, int row0, int k0, int rows, int K, bool vectors) {
        for (int i = threadIdx.x; i < ROWS * STEP / 8; i += blockDim.x) {
            const int row = ALONG_K ? i / (STEP / 8) : i % (ROWS / 8) * 8;
            const int k = ALONG_K ? i % (STEP / 8) * 8 : i / (ROWS / 8);
            const int rows_left = rows - row0 - row, k_left = K - k0 - k;
            const int count = rows_left > 0 && k_left > 0 ? min(ALONG_K ? k_left : rows_left, 8) : 0;
            const T* from = static_cast<const T*>(x.base);
            if (count > 0) from += (row0 + row) * x.row_stride + (k0 + k) * x.k_stride;
            if (vectors) {
                copy_async(vector(row, k), from, count * sizeof(T));
                continue;
            }
            alignas(16) T values[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) values[e] = e < count ? from[e * (ALONG_K ? x.k_stride : x.row_stride)] : T(0.f);
            *reinterpret_cast<Vector<T>*>(vector(row, k)) = reinterpret_cast<const Vector<T>&>(values);
        }
    }
    // 16 rows by 16 of k as the tensor cores take A or, in the order of B's two columns of matrices, B.
    template <bool IS_B>
    __device__ void fragment(uint32_t (&r)[4], int row, int k) {
        const int lane = threadIdx.x % 32, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
        const int row_half = IS_B ? second : first, k_half = IS_B ? first : second;
        if constexpr (ALONG_K) load_matrices<false>(r, vector(row + row_half + lane % 8, k + k_half));
        else load_matrices<true>(r, vector(row + row_half, k + k_half + lane % 8));
    }
};
