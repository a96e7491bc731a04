// A block of a matrix product that one thread computes by itself, from operands of any strides.
//
// A kernel defines BLOCK_K: terms summed before a sum is touched again.
#pragma once
#include <panels.hpp>

// The product of A [rows, K] and B [K, columns], to sums, whose rows lie `line` apart. `packed` has room for `rows` and the
// tile's more by BLOCK_K floats, `panel` for NR by BLOCK_K.
template <class T>
void block(const T* A, int64_t a_row, int64_t a_k, const T* B, int64_t b_k, int64_t b_column, float* sums, int64_t line,
           int64_t rows, int64_t columns, int64_t K, float* packed, float* panel) {
    for (int64_t k = 0; k < K; k += BLOCK_K) {
        const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
        for (int64_t m = 0; m < rows; m += MR)
            pack<MR>(A + m * a_row + k * a_k, a_row, a_k, std::min(MR, rows - m), kc, packed + m * kc);
        for (int64_t n = 0; n < columns; n += NR) {
            pack<NR>(B + n * b_column + k * b_k, b_column, b_k, std::min(NR, columns - n), kc, panel);
            for (int64_t m = 0; m < rows; m += MR)
                multiply_tile(packed + m * kc, panel, kc, sums + m * line + n, line, std::min(MR, rows - m),
                              std::min(NR, columns - n), k > 0);
        }
    }
}

// Sums [rows, columns], whose rows lie `line` apart, in the dtype of the result, whose rows lie `pitch` apart.
template <class T>
void store_rows(const float* sums, int64_t line, T* to, int64_t pitch, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r)
        map_row<2>(to + r * pitch, columns, 0, [](int, vfloat v) { return v; }, sums + r * line);
}
