// What every C++ kernel starts from: storage types with float arithmetic, dispatch on dtype, a vectorisable exp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef _OPENMP
#include <omp.h>
#endif

// bfloat16 as the upper half of a float; rounds to nearest even, keeps NaN.
struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float value) {
        uint32_t u;
        std::memcpy(&u, &value, 4);
        bits = value != value ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    }
    operator float() const {
        const uint32_t u = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &u, 4);
        return value;
    }
};
using f16 = _Float16;

// The codes that autokernel.build.DTYPE_CODE passes; AK_DISPATCH(code, f<T>(…)) runs the statement with that T.
#define AK_DISPATCH(code, ...)                                    \
    switch (code) {                                               \
        case 0: { using T = float; __VA_ARGS__; } break;          \
        case 1: { using T = f16; __VA_ARGS__; } break;            \
        case 2: { using T = bf16; __VA_ARGS__; } break;           \
    }

// exp(x) to 2 ulp for float, branch-free so that the compiler can vectorise a loop over it. Keeps NaN; exp(-inf) = 0.
inline float ak_exp(float x) {
    const float clamped = x < -104.f ? -104.f : (x > 89.f ? 89.f : x);
    const float n = __builtin_rintf(clamped * 1.44269504f);
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;  // Cephes expf minimax polynomial on [-ln2/2, ln2/2]
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    const int32_t e = int32_t(n);  // 2^n in two factors: n reaches -150 (denormals) and 129 (inf)
    const int32_t half = e >> 1, rest = e - half;
    const uint32_t a = uint32_t(half + 127) << 23, b = uint32_t(rest + 127) << 23;
    float fa, fb;
    std::memcpy(&fa, &a, 4);
    std::memcpy(&fb, &b, 4);
    const float y = p * fa * fb;
    return x != x ? x : (x < -104.f ? 0.f : y);
}
