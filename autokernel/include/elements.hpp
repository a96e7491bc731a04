// Functions of single floats for loops that the compiler vectorises: without branches, NaN and Inf as in PyTorch.
#pragma once
#include <autokernel.hpp>

inline float ak_abs(float x) { return __builtin_fabsf(x); }
inline int64_t ak_abs(int64_t x) { return x < 0 ? -x : x; }
// NaN where either is. Conditions are joined by |: || is a jump, and GCC joins the jumps of a clamp to paths of their own.
inline float ak_max(float a, float b) {
    const float larger = (b > a) | (b != b) ? b : a;
    return a != a ? a : larger;
}
inline float ak_min(float a, float b) {
    const float less = (b < a) | (b != b) ? b : a;
    return a != a ? a : less;
}
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

// erf(x), to 2.5 ulp: Cephes erff's polynomial below 1; above it 1 - 2^v, where v is log2(erfc(|x|)) as a polynomial on [1, 4],
// and 2^v one of its fraction on [-1/2, 1/2], both fitted by weighted least squares.
inline float ak_erf(float x) {
    const float z = x * x, a = __builtin_fabsf(x), b = a > 4.f ? 4.f : a;
    float p = 7.853861353153693e-5f;
    p = p * z - 8.010193625184903e-4f;
    p = p * z + 5.188327685732524e-3f;
    p = p * z - 2.685381193529856e-2f;
    p = p * z + 1.128358514861418e-1f;
    p = p * z - 3.761262582423300e-1f;
    p = p * z + 1.128379165726710f;
    float v = -1.65970403e-3f;
    v = v * b + 2.13202888e-2f;
    v = v * b - 1.27871991e-1f;
    v = v * b - 9.44228090e-1f;
    v = v * b - 1.61212287f;
    v = v * b - 3.85447710e-3f;
    const float n = __builtin_rintf(v), f = v - n;
    float q = 1.32764719e-3f;
    q = q * f + 9.67554133e-3f;
    q = q * f + 5.55071327e-2f;
    q = q * f + 2.40221197e-1f;
    q = q * f + 6.93146967e-1f;
    q = q * f + 1.00000007f;
    const float large = 1.f - bits_as<float>(bits_as<uint32_t>(q) + (uint32_t(int32_t(n)) << 23));
    return a >= 1.f ? __builtin_copysignf(large, x) : p * x;
}

// erfc(x): e^-x^2 P((|x| - 3) / (|x| + 3)) / (1 + 2 |x|), where P was fitted for the least relative error on [0, 10.2]; x^2 is
// the square of the first 12 bits, which is exact, and the rest.
inline float ak_erfc(float x) {
    const float size = __builtin_fabsf(x), a = size > 11.f ? 11.f : size, r = (a - 3.f) / (a + 3.f);
    float p = -0.000267186231f;
    p = p * r - 0.000775183376f;
    p = p * r + 0.00200325786f;
    p = p * r + 0.00256655854f;
    p = p * r - 0.0237984844f;
    p = p * r + 0.0682957619f;
    p = p * r - 0.119270802f;
    p = p * r + 0.129646435f;
    p = p * r - 0.0475624092f;
    p = p * r - 0.135621145f;
    p = p * r + 1.25300801f;
    const float high = bits_as<float>(bits_as<uint32_t>(a) & 0xfffff000u);
    const float y = ak_exp(-high * high) * ak_exp((high - a) * (high + a)) * (p / (1.f + 2.f * a));
    return x < 0.f ? 2.f - y : y;
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

// The remainder of x / y with x's sign. Of a quotient below 2^29 the whole part, and what it leaves, are exact in double;
// others are rare, and the jump to them keeps loops from being vectorised: 1.1 ns an element, and of fmodf 3.9 (EPYC, one
// thread, |x| < 5 and y = 0.7).
inline float ak_fmod(float x, float y) {
    const double a = __builtin_fabsf(x), b = __builtin_fabsf(y), quotient = a / b;
    if (!(quotient < 0x1p29) || b == INFINITY) return std::fmod(x, y);
    return __builtin_copysignf(float(a - __builtin_trunc(quotient) * b), x);
}

// The angle of (x, y): Cephes atanf of the smaller size over the larger, then by the octant. Scaled, where a sum of both
// would overflow.
inline float ak_atan2(float y, float x) {
    const float scale = (__builtin_fabsf(x) > 1e38f) | (__builtin_fabsf(y) > 1e38f) ? 0.25f : 1.f;
    const float a = __builtin_fabsf(y) * scale, b = __builtin_fabsf(x) * scale;
    const bool is_steep = a > b;
    const float large = is_steep ? a : b, small = is_steep ? b : a;
    const bool is_far = small > 0.41421356f * large, is_alike = a == b;  // also of two zeros, or two infinities
    const float top = is_far ? small - large : small, below = is_far ? small + large : large;
    const float t = is_alike ? 0.f : top / below, z = t * t;
    float p = 8.05374449538e-2f;
    p = p * z - 1.38776856032e-1f;
    p = p * z + 1.99777106478e-1f;
    p = p * z - 3.33329491539e-1f;
    const float bent = p * z * t + t, low = is_far | (is_alike & (a > 0.f)) ? 0.78539816f + bent : bent;
    const float within = is_steep ? 1.57079633f - low : low;
    const float angle = bits_as<uint32_t>(x) >> 31 ? 3.14159265f - within : within;
    return __builtin_copysignf((x != x) | (y != y) ? NAN : angle, y);
}

// sin(x + quarters of a turn), to 1.7 ulp: the polynomials of Cephes sinf and cosf on [-pi/4, pi/4].
// |x| in quarter turns is the sum of its products with 87 bits of 2/pi, in three parts of 29: a product with the 24 bits of
// a float is exact in a double. For 16 exponents each a row: the bits before it make whole turns (Payne and Hanek, 1983).
inline float ak_sin_from(float x, uint32_t quarters) {
    static constexpr double HIGH[] = {0x1.45f306dp-1, 0x1.45f306dp-1, 0x1.45f306dp-1, 0x1.f306dc9p-9, 0x1.b939104p-26,
                                      0x1.1054a7ep-42, 0x1.4fe13a8p-59, 0x1.3abe8f8p-75, 0x1.a3ea69bp-89};
    static constexpr double MIDDLE[] = {0x1.9391054p-30, 0x1.9391054p-30, 0x1.9391054p-30, 0x1.91054a7p-38, 0x1.4a7f09dp-54,
                                        0x1.09d5f47p-70, 0x1.f47d4d3p-86, 0x1.4d37703p-102, 0x1.7036d8ap-118};
    static constexpr double LOW[] = {0x1.4fe13abp-59, 0x1.4fe13abp-59, 0x1.4fe13abp-59, 0x1.e13abe8p-67, 0x1.7d1f534p-84,
                                     0x1.a9a6ee0p-99, 0x1.dc0db62p-116, 0x1.b629598p-132, 0x1.5993c42p-148};
    const float a = __builtin_fabsf(x);
    const int32_t past = int32_t(bits_as<uint32_t>(a) >> 23) - 112;
    const int64_t row = (past & ~(past >> 31)) >> 4;
    const double high = a * HIGH[row], middle = a * MIDDLE[row], low = a * LOW[row];
    const double rounded = high + middle + 0x1.8p52, whole = rounded - 0x1.8p52;  // the number is in its last bits
    const float r = float((((high - whole) + middle) + low) * 1.5707963267948966), z = r * r;
    float s = -1.9515295891e-4f;
    s = s * z + 8.3321608736e-3f;
    s = s * z - 1.6666654611e-1f;
    s = s * z * r + r;
    float c = 2.443315711809948e-5f;
    c = c * z - 1.388731625493765e-3f;
    c = c * z + 4.166664568298827e-2f;
    c = c * z * z - 0.5f * z + 1.f;
    const uint32_t at = uint32_t(bits_as<uint64_t>(rounded)) + quarters;
    const float y = at & 1 ? c : s;
    const uint32_t flips = (at << 30 & 0x80000000u) ^ (quarters & 1 ? 0u : bits_as<uint32_t>(x) & 0x80000000u);
    const float signed_y = bits_as<float>(bits_as<uint32_t>(y) ^ flips);
    return a < INFINITY ? signed_y : NAN;
}
inline float ak_sin(float x) { return ak_sin_from(x, 0); }
inline float ak_cos(float x) { return ak_sin_from(x, 1); }
