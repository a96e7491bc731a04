// What every CUDA kernel starts from: 16-byte vectors of a storage type, dispatch on dtype, launches with attributes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

using f16 = __half;
using bf16 = __nv_bfloat16;

// `...` with T as the storage type of that code (DTYPE_CODE in build.py).
#define AK_DISPATCH(dtype, ...)   \
    switch (dtype) {              \
        case 0: {                 \
            using T = float;      \
            __VA_ARGS__;          \
            break;                \
        }                         \
        case 1: {                 \
            using T = f16;        \
            __VA_ARGS__;          \
            break;                \
        }                         \
        default: {                \
            using T = bf16;       \
            __VA_ARGS__;          \
        }                         \
    }

template <class T>
constexpr int LANES = 16 / sizeof(T);  // elements of a vector

// LANES elements of T as they lie in memory: in words, for of a struct of 16-bit numbers the compiler handles each by itself.
template <class T>
struct alignas(16) Vector {
    uint32_t words[4];
};

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(f16 x) { return __half2float(x); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T from_float(float x) {
    if constexpr (sizeof(T) == 4) return x;
    else if constexpr (std::is_same_v<T, f16>) return __float2half_rn(x);
    else return __float2bfloat16_rn(x);
}

constexpr float LOG2_E = 1.44269504f;

// Half the instructions of exp2f and __expf, which treat results below 2^-126 apart: here those are 0.
__device__ inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_exp(float x) { return fast_exp2(x * LOG2_E); }

template <class T>
__device__ inline void unpack(const Vector<T>& v, float (&out)[LANES<T>]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) out[i] = __uint_as_float(v.words[i]);
        else if constexpr (std::is_same_v<T, f16>) {
            const float2 pair = __half22float2(reinterpret_cast<const __half2&>(v.words[i]));
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        } else {
            out[2 * i] = __uint_as_float(v.words[i] << 16);
            out[2 * i + 1] = __uint_as_float(v.words[i] & 0xffff0000u);
        }
    }
}

template <class T>
__device__ inline Vector<T> pack(const float (&values)[LANES<T>]) {
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) v.words[i] = __float_as_uint(values[i]);
        else if constexpr (std::is_same_v<T, f16>)
            reinterpret_cast<__half2&>(v.words[i]) = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        else reinterpret_cast<__nv_bfloat162&>(v.words[i]) = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    }
    return v;
}

// Have the compiler keep these as they are, rather than the floats into which it has unpacked them: registers are few.
template <class T, int COUNT>
__device__ inline void keep_packed(Vector<T> (&vectors)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        for (uint32_t& word : vectors[i].words) asm volatile("" : "+r"(word));
}

// Launch before the kernel ahead on the stream has ended: once all of its blocks have called let_next_start(), or ended. Such
// a kernel calls after_previous() before it reads or writes anything. Before sm_90 all of these do nothing special.
template <class... Parameters, class... Arguments>
inline int launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                        Arguments... arguments) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config = {grid, block, shared_bytes, stream, &early, AK_ARCH >= 900};
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void after_previous() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// First in a kernel that has nothing to do before.
__device__ inline void take_over() {
    let_next_start();
    after_previous();
}

inline int attribute(cudaDeviceAttr which) {  // of the current device
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}
