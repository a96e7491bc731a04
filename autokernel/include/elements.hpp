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

// log(x): Cephes logf on the mantissa in [sqrt(1/2), sqrt(2)), the exponent times ln 2 in two parts.
inline float ak_log(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const float scaled = tiny ? x * 8388608.f : x;  // 2^23: denormals have no exponent of their own
    const uint32_t bits = bits_as<uint32_t>(scaled);
    const int32_t shifted = int32_t(bits - 0x3f3504f3u);
    const float e = float(shifted >> 23) - (tiny ? 23.f : 0.f);
    const float m = bits_as<float>(uint32_t(shifted & 0x007fffff) + 0x3f3504f3u) - 1.f, z = m * m;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    float y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
    y = (m + y) + e * 0.693359375f;
    y = x == INFINITY ? INFINITY : y;
    return x > 0.f ? y : (x == 0.f ? -INFINITY : NAN);
}

// log(1 + x), corrected by what 1 + x has lost (Kahan).
inline float ak_log1p(float x) {
    const float u = 1.f + x, lost = u - 1.f;
    const float y = ak_log(u), corrected = y * (x / (lost == 0.f ? 1.f : lost));
    return lost == 0.f ? x : (u == INFINITY || u == 0.f ? y : corrected);
}

// e^x - 1: its series below 0.35, where e^x has lost its digits.
inline float ak_expm1(float x) {
    float p = 1.f / 40320;
    p = p * x + 1.f / 5040;
    p = p * x + 1.f / 720;
    p = p * x + 1.f / 120;
    p = p * x + 1.f / 24;
    p = p * x + 1.f / 6;
    p = p * x + 0.5f;
    return __builtin_fabsf(x) < 0.35f ? p * x * x + x : ak_exp(x) - 1.f;
}
