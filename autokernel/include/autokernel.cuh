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

template <class T>
struct alignas(16) Vector {
    T at[LANES<T>];
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
    for (int e = 0; e < LANES<T>; ++e) out[e] = to_float(v.at[e]);
}

template <class T>
__device__ inline Vector<T> pack(const float (&values)[LANES<T>]) {  // in pairs: one instruction for two
    Vector<T> v;
#pragma unroll
    for (int e = 0; e < LANES<T>; e += 2) {
        if constexpr (sizeof(T) == 4) v.at[e] = values[e], v.at[e + 1] = values[e + 1];
        else if constexpr (std::is_same_v<T, f16>) reinterpret_cast<__half2&>(v.at[e]) = __floats2half2_rn(values[e], values[e + 1]);
        else reinterpret_cast<__nv_bfloat162&>(v.at[e]) = __floats2bfloat162_rn(values[e], values[e + 1]);
    }
    return v;
}

// Have the compiler keep these as they are, rather than the floats into which it has unpacked them: registers are few.
template <class T, int COUNT>
__device__ inline void keep_packed(Vector<T> (&vectors)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        uint4& bits = reinterpret_cast<uint4&>(vectors[i]);
        asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    }
}

// Launch before the kernel ahead on the stream has ended: once all of its blocks have called let_next_start(). Such a kernel
// calls after_previous() before it reads what that one wrote. Before sm_90 all three do nothing special.
template <class... Parameters, class... Arguments>
inline int launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config = {grid, block, 0, stream, &early, AK_ARCH >= 900};
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

inline int attribute(cudaDeviceAttr which) {  // of the current device
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}
