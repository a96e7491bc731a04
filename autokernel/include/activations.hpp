// The activations of reference.ACTIVATIONS on vectors of floats, by their place there; from there on none.
#pragma once
#include <autokernel.hpp>

inline vfloat vabs(vfloat x) { return bits_as<vfloat>(vuint(bits_as<vuint>(x) & 0x7fffffffu)); }

inline vfloat silu(vfloat x) {
    const vfloat e = vexp(-vabs(x));  // x sigmoid(x), by an exponential that cannot overflow
    return x * (x < 0.f ? e : splat(1)) / (e + 1.f);
}

inline vfloat gelu(vfloat x) {
    const vfloat z = vabs(x) * 0.70710678f, t = 2.f / (z + 2.f);
    // erfc(z), relative error 1.2e-7: Press et al., "Numerical Recipes in C" (1992), 6.2
    vfloat p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    const vfloat half_tail = t * vexp(p - z * z) * 0.5f;
    return x * (x < 0.f ? half_tail : 1.f - half_tail);
}

inline vfloat relu2(vfloat x) { return x < 0.f ? vfloat{} : x * x; }

// 0.5 (1 + tanh(y)) is sigmoid(2 y)
inline vfloat gelu_tanh(vfloat x) {
    const vfloat z = (x * x * 0.044715f + 1.f) * x * 1.5957691216f, e = vexp(-vabs(z));
    return x * (z < 0.f ? e : splat(1)) / (e + 1.f);
}

inline vfloat relu(vfloat x) { return x < 0.f ? vfloat{} : x; }

inline vfloat activation(int code, vfloat x) {
    switch (code) {
        case 0: return silu(x);
        case 1: return gelu(x);
        case 2: return relu2(x);
        case 3: return gelu_tanh(x);
        case 4: return relu(x);
        default: return x;
    }
}
