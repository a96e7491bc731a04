// The inside of a matrix product: operands packed into panels of floats, and a tile of the result kept in registers.
#pragma once
#include <autokernel.hpp>
#include <cstdlib>
#include <memory>

constexpr int64_t LANES = AK_LANES;
#if defined(TILE_ROWS) && TILE_ROWS > 0
constexpr int64_t MR = TILE_ROWS;
#elif defined(__AVX512F__)
constexpr int64_t MR = 14;  // 28 of 32 registers
#elif defined(__AVX__)
constexpr int64_t MR = 6;  // 12 of 16
#else
constexpr int64_t MR = 8;  // 16 of 32 (NEON)
#endif
constexpr int64_t NR = 2 * LANES;  // a tile of the result is MR rows by NR columns
using Tile = vfloat[MR][2];

inline int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

inline int thread_count() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;
inline Buffer buffer(int64_t n) { return Buffer((float*)std::aligned_alloc(64, blocks(n, 16) * 64)); }

#if AK_VECTOR_BYTES == 64
#define AK_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define AK_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif AK_VECTOR_BYTES == 32
#define AK_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define AK_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define AK_ZIP_LOW 0, 4, 1, 5
#define AK_ZIP_HIGH 2, 6, 3, 7
#endif

// Transpose a square of floats: each zip of the upper with the lower half turns the bits of (row, column) by one place.
inline void transpose(vfloat (&t)[LANES]) {
    for (int64_t turn = 1; turn < LANES; turn *= 2) {
        vfloat z[LANES];
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES / 2; ++i) {
            z[2 * i] = __builtin_shufflevector(t[i], t[i + LANES / 2], AK_ZIP_LOW);
            z[2 * i + 1] = __builtin_shufflevector(t[i], t[i + LANES / 2], AK_ZIP_HIGH);
        }
        std::memcpy(t, z, sizeof t);
    }
}

// x [rows, K] of any strides -> panel [K, W] whose rows lie `Pitch` apart; zero from `rows` to W.
template <int64_t W, int64_t Pitch = W, class T>
void pack(const T* x, int64_t stride_r, int64_t stride_k, int64_t rows, int64_t K, float* panel) {
    int64_t k = 0;
    if (stride_k == 1)
        for (; k + LANES <= K; k += LANES)
            for (int64_t w = 0; w < W; w += LANES) {
                vfloat t[LANES];
                for (int64_t i = 0; i < LANES; ++i) t[i] = w + i < rows ? load(x + (w + i) * stride_r + k) : vfloat{};
                transpose(t);
                for (int64_t i = 0; i < LANES; ++i)
                    std::memcpy(panel + (k + i) * Pitch + w, &t[i], sizeof(float) * (W - w < LANES ? W - w : LANES));
            }
    else if (stride_r == 1 && rows == W && W % LANES == 0)
        for (; k < K; ++k)
            for (int64_t w = 0; w < W; w += LANES) store(panel + k * Pitch + w, load(x + k * stride_k + w));
    for (; k < K; ++k)
        for (int64_t r = 0; r < W; ++r) panel[k * Pitch + r] = r < rows ? float(x[r * stride_r + k * stride_k]) : 0.f;
}

// sum += a b over K terms, for a with its rows and terms at the given strides and a panel b [K, NR].
template <int64_t StrideRow, int64_t StrideTerm>
inline __attribute__((always_inline)) void multiply(const float* a, const float* b, int64_t K, Tile& sum) {
    for (int64_t k = 0; k < K; ++k, a += StrideTerm, b += NR) {
        const vfloat low = load(b), high = load(b + LANES);
#pragma GCC unroll 16
        for (int64_t r = 0; r < MR; ++r) {
            sum[r][0] += low * a[r * StrideRow];
            sum[r][1] += high * a[r * StrideRow];
        }
    }
}

// C [rows, columns] = (or +=) the product of a panel of A [K, MR] and a panel of B [K, NR].
inline void multiply_tile(const float* a, const float* b, int64_t K, float* c, int64_t ldc, int64_t rows, int64_t columns,
                          bool add) {
    Tile sum = {};
    multiply<1, MR>(a, b, K, sum);
    if (rows == MR && columns == NR) {
#pragma GCC unroll 16
        for (int64_t r = 0; r < MR; ++r, c += ldc) {
            store(c, add ? load(c) + sum[r][0] : sum[r][0]);
            store(c + LANES, add ? load(c + LANES) + sum[r][1] : sum[r][1]);
        }
        return;
    }
    float whole[MR][NR];
    std::memcpy(whole, sum, sizeof sum);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < columns; ++n) c[r * ldc + n] = (add ? c[r * ldc + n] : 0.f) + whole[r][n];
}
