// Functions of single floats for loops that the compiler vectorises: without branches, NaN and Inf as in PyTorch.
#pragma once
#include <autokernel.hpp>

inline float ak_abs(float x) { return __builtin_fabsf(x); }
inline int64_t ak_abs(int64_t x) { return x < 0 ? -x : x; }
inline float ak_max(float a, float b) { return a != a ? a : (b > a || b != b ? b : a); }  // NaN where either is
inline float ak_min(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
inline int64_t ak_max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ak_min(int64_t a, int64_t b) { return a < b ? a : b; }

// tanh(x): Cephes tanhf's polynomial below 0.625, above it 1 - 2 / (e^2|x| + 1).
inline float ak_tanh(float x) {
    const float z = x * x, a = __builtin_fabsf(x);
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float small = p * z * x + x, large = 1.f - 2.f / (ak_exp(2.f * a) + 1.f);
    return a < 0.625f ? small : __builtin_copysignf(large, x);
}

// erf(x): Cephes erff's polynomial below 1, above it 1 - erfc(|x|) by Press et al., "Numerical Recipes in C" (1992), 6.2.
inline float ak_erf(float x) {
    const float z = x * x, a = __builtin_fabsf(x);
    float p = 7.853861353153693e-5f;
    p = p * z - 8.010193625184903e-4f;
    p = p * z + 5.188327685732524e-3f;
    p = p * z - 2.685381193529856e-2f;
    p = p * z + 1.128358514861418e-1f;
    p = p * z - 3.761262582423300e-1f;
    p = p * z + 1.128379165726710f;
    const float t = 1.f / (0.5f * a + 1.f);
    float q = t * 0.17087277f - 0.82215223f;
    q = q * t + 1.48851587f;
    q = q * t - 1.13520398f;
    q = q * t + 0.27886807f;
    q = q * t - 0.18628806f;
    q = q * t + 0.09678418f;
    q = q * t + 0.37409196f;
    q = q * t + 1.00002368f;
    q = q * t - 1.26551223f;
    const float large = 1.f - t * ak_exp(q - z);
    return a < 1.f ? p * x : (x != x ? x : __builtin_copysignf(large, x));
}
