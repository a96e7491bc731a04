// What every C++ kernel starts from: vectors, storage types with float arithmetic, dispatch on dtype, exp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef _OPENMP
#include <omp.h>
#endif

// Vectors as wide as the machine's (GCC and Clang extensions, no intrinsics). Arithmetic is by element, as on scalars.
#if defined(__AVX512F__)
#define AK_VECTOR_BYTES 64
#elif defined(__AVX__)
#define AK_VECTOR_BYTES 32
#else
#define AK_VECTOR_BYTES 16
#endif
constexpr int AK_LANES = AK_VECTOR_BYTES / 4;
typedef float vfloat __attribute__((vector_size(AK_VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(AK_VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(AK_VECTOR_BYTES)));
typedef uint16_t vshort __attribute__((vector_size(AK_VECTOR_BYTES / 2)));

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// 16-bit formats to and from float, on scalars (U = uint32_t, F = float) and on vectors (vuint, vfloat) alike. Written on
// bits: GCC before 13 has no vector instruction for half precision, and before 12 no such type on x86.
template <class F, class U>
inline F bf16_to_float(U h) {
    return bits_as<F>(U(h << 16));
}

template <class F, class U>
inline U float_to_bf16(F value) {  // rounds to nearest even
    const U u = bits_as<U>(value);
    const U nan = U{} + 0x7fc0u, rounded = U((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    return value != value ? nan : rounded;
}

template <class F, class U>
inline F f16_to_float(U h) {
    const U sign = U((h & 0x8000u) << 16), magnitude = U((h & 0x7fffu) << 13);
    const U number = bits_as<U>(F(bits_as<F>(magnitude) * 0x1p112f)), special = magnitude | 0x7f800000u;
    return bits_as<F>(U(sign | (magnitude >= (U{} + 0x0f800000u) ? special : number)));
}

template <class F, class U>
inline U float_to_f16(F value) {  // rounds to nearest even
    const U u = bits_as<U>(value), magnitude = u & 0x7fffffffu;
    const U denormal = bits_as<U>(F(bits_as<F>(magnitude) + 0.5f)) - 0x3f000000u;  // adding 0.5 rounds at 2^-24
    const U normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const U infinity = U{} + 0x7c00u, nan = U{} + 0x7e00u;
    const U finite = magnitude < (U{} + 0x38800000u) ? denormal : normal;
    const U number = magnitude >= (U{} + 0x477ff000u) ? infinity : finite;
    return ((u >> 16) & 0x8000u) | (value != value ? nan : number);
}

// In loops that a compiler is to vectorise, a number is assigned as a float: a bf16 or f16 that is copied stands in the way.
struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float value) : bits(uint16_t(float_to_bf16<float, uint32_t>(value))) {}
    void operator=(float value) { bits = uint16_t(float_to_bf16<float, uint32_t>(value)); }
    operator float() const { return bf16_to_float<float, uint32_t>(bits); }
};

struct f16 {
    uint16_t bits;
    f16() = default;
    f16(float value) : bits(uint16_t(float_to_f16<float, uint32_t>(value))) {}
    void operator=(float value) { bits = uint16_t(float_to_f16<float, uint32_t>(value)); }
    operator float() const { return f16_to_float<float, uint32_t>(bits); }
};

// AK_LANES elements from or to memory of any alignment, as floats.
inline vfloat load(const float* p) {
    vfloat v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vuint load_bits(const void* p) {
    vshort h;
    std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vuint);
}
inline vfloat load(const bf16* p) { return bf16_to_float<vfloat>(load_bits(p)); }
inline vfloat load(const f16* p) { return f16_to_float<vfloat>(load_bits(p)); }

inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }
inline void store_bits(void* p, vuint u) {
    const vshort h = __builtin_convertvector(u, vshort);
    std::memcpy(p, &h, sizeof h);
}
inline void store(bf16* p, vfloat v) { store_bits(p, float_to_bf16<vfloat, vuint>(v)); }
inline void store(f16* p, vfloat v) { store_bits(p, float_to_f16<vfloat, vuint>(v)); }

// The first n < AK_LANES elements only: the end of a row. The lanes beyond read as `fill`.
template <class T>
inline vfloat load_first(const T* p, int64_t n, float fill) {
    float lane[AK_LANES];
    for (int i = 0; i < AK_LANES; ++i) lane[i] = i < n ? float(p[i]) : fill;
    return load(lane);
}
template <class T>
inline void store_first(T* p, vfloat v, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = T(v[i]);
}

inline vfloat splat(float value) { return vfloat{} + value; }
inline vfloat larger(vfloat a, vfloat b) { return a > b ? a : b; }  // b where either is NaN
inline float sum_of(vfloat v) {
    float lane[AK_LANES];
    store(lane, v);
    for (int width = AK_LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}
inline float max_of(vfloat v) {
    float lane[AK_LANES];
    store(lane, v);
    for (int width = AK_LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

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

// exp(x) for x <= 88, to 1 ulp near 0 and 4 far below: what a softmax needs of x - max(x). Keeps NaN; below -86.6 it is 0.
inline vfloat vexp(vfloat x) {
    const vfloat shifted = x * 1.44269504f + 12583039.f;  // 1.5 * 2^23 + 127: the last bits hold n + 127
    const vfloat n = shifted - 12583039.f;
    const vfloat r = x - n * 0.69314718f;  // one constant is enough: n * 2e-9 is below half an ulp while exp(x) matters
    vfloat p = r * 0.0013814541f + 0.0083687454f;  // minimax on [-ln2/2, ln2/2], relative error 3.1e-9
    p = p * r + 0.0416683890f;
    p = p * r + 0.1666652113f;
    p = p * r + 0.4999999404f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    const vfloat power = bits_as<vfloat>(vuint(bits_as<vuint>(shifted) << 23));
    return x < splat(-86.6f) ? vfloat{} : p * power;
}

// Walks rows x[0..N) side by side, Unroll vectors in flight: f(u, v...) gets the vectors of each row at one place, u < Unroll
// says which accumulator to use. Lanes beyond N read as `fill`. map_row also writes what f returns to y.
template <int Unroll, class F, class... T>
inline void fold_row(int64_t N, float fill, F f, const T*... x) {
    int64_t n = 0;
    for (; n + Unroll * AK_LANES <= N; n += Unroll * AK_LANES)
        for (int u = 0; u < Unroll; ++u) f(u, load(x + n + u * AK_LANES)...);
    for (; n + AK_LANES <= N; n += AK_LANES) f(0, load(x + n)...);
    if (n < N) f(0, load_first(x + n, N - n, fill)...);
}
template <int Unroll, class Y, class F, class... T>
inline void map_row(Y* y, int64_t N, float fill, F f, const T*... x) {
    int64_t n = 0;
    for (; n + Unroll * AK_LANES <= N; n += Unroll * AK_LANES)
        for (int u = 0; u < Unroll; ++u) store(y + n + u * AK_LANES, f(u, load(x + n + u * AK_LANES)...));
    for (; n + AK_LANES <= N; n += AK_LANES) store(y + n, f(0, load(x + n)...));
    if (n < N) store_first(y + n, f(0, load_first(x + n, N - n, fill)...), N - n);
}
