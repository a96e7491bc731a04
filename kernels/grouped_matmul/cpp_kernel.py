"""Products of groups of rows with a matrix each in C++: each thread takes a block of one group's product at a time.

Of a group of many rows a block's operands are packed (blocks.hpp); of a few rows the weights are read once, where they lie.
"""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "grouped_matmul"
BACKEND = "cpp"
TUNABLES = {
    "TILE_ROWS": [0, 4, 6, 8, 10, 12, 14],
    "BLOCK_K": [64, 128, 256, 384, 512],
    "BLOCK_M": [32, 64, 128, 256, 512],
    "SHARES": [1, 2, 4, 8],
    "FEW": [0, 1, 2, 4, 8],
}

TILE_ROWS = 0  # rows of the result held in registers; 0: as many as this machine's registers hold
BLOCK_K = 256  # terms summed before a result is touched again
BLOCK_M = 256  # rows of a group that a thread takes at a time
SHARES = 4  # blocks for each thread at least, where the products are that large
FEW = 4  # rows of a group of which the weights are read once, as they are

SOURCE = r"""
#include <blocks.hpp>
#include <vector>

struct Unit {  // a block of the result
    int64_t group, row, rows, column, columns;
};

// R rows of x [R, K], in floats, times C columns of weights whose terms lie side by side.
template <int R, int C, class T>
void products(const float* x, const T* weight, int64_t w_n, T* y, int64_t pitch, int64_t K) {
    vfloat sum[R][C] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const vfloat w = load(weight + c * w_n + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[r][c] += w * load(x + r * K + k);
        }
    }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) {
            float total = sum_of(sum[r][c]);
            for (int64_t rest = k; rest < K; ++rest) total += float(weight[c * w_n + rest]) * x[r * K + rest];
            y[r * pitch + c] = T(total);
        }
}

// The same, times C vectors of columns that lie side by side.
template <int R, int C, class T>
void products_across(const float* x, const T* weight, int64_t w_k, T* y, int64_t pitch, int64_t K) {
    vfloat sum[R][C] = {};
    for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const vfloat w = load(weight + k * w_k + c * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[r][c] += w * x[r * K + k];
        }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) store(y + r * pitch + c * LANES, sum[r][c]);
}

template <int R, class T>
void few_rows(const float* x, const T* weight, int64_t w_k, int64_t w_n, T* y, int64_t pitch, int64_t columns, int64_t K) {
    constexpr int C = 8 / R;  // as many sums as keep the processor's units busy
    int64_t n = 0;
    if (w_k == 1)
        for (; n + C <= columns; n += C) products<R, C>(x, weight + n * w_n, w_n, y + n, pitch, K);
    else
        for (; n + C * LANES <= columns; n += C * LANES) products_across<R, C>(x, weight + n, w_k, y + n, pitch, K);
    for (; w_k == 1 && n < columns; ++n) products<R, 1>(x, weight + n * w_n, w_n, y + n, pitch, K);
    for (; n + LANES <= columns; n += LANES) products_across<R, 1>(x, weight + n, w_k, y + n, pitch, K);
    for (; n < columns; ++n)
        for (int r = 0; r < R; ++r) {
            float total = 0;
            for (int64_t k = 0; k < K; ++k) total += float(weight[n + k * w_k]) * x[r * K + k];
            y[r * pitch + n] = T(total);
        }
}

// Rows of x [rows, K], in floats, times columns of weights whose terms or whose columns lie side by side.
template <class T>
void few(int64_t rows, const float* x, const T* weight, int64_t w_k, int64_t w_n, T* y, int64_t pitch, int64_t columns,
         int64_t K) {
    while (rows > 0) {
        const int64_t now = rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
        if (now == 4)
            few_rows<4>(x, weight, w_k, w_n, y, pitch, columns, K);
        else if (now == 2)
            few_rows<2>(x, weight, w_k, w_n, y, pitch, columns, K);
        else
            few_rows<1>(x, weight, w_k, w_n, y, pitch, columns, K);
        rows -= now, x += now * K, y += now * pitch;
    }
}

template <class T>
void grouped(const T* x, const T* weight, const int64_t* offs, T* y, int64_t rows, int64_t groups, int64_t K, int64_t N,
             int64_t x_row, int64_t x_k, int64_t w_group, int64_t w_k, int64_t w_n) {
    constexpr bool exact = std::is_same_v<T, float>;  // y has room for the sums
    std::vector<int64_t> ends(offs, offs + groups);
    std::sort(ends.begin(), ends.end());
    int64_t blocks_m = 0, from = 0;
    for (int64_t& end : ends) {
        end = std::min(std::max(end, int64_t(0)), rows);
        blocks_m += blocks(end - from, BLOCK_M);
        from = end;
    }
    std::memset((void*)(y + from * N), 0, (rows - from) * N * sizeof(T));
    if (!from) return;
    const int64_t wanted = blocks(int64_t(SHARES) * thread_count(), blocks_m);  // blocks of columns
    const int64_t shares = std::max<int64_t>(1, std::min(wanted, blocks(N, 4 * NR)));
    const int64_t nc = blocks(blocks(N, shares), NR) * NR;
    std::vector<Unit> units;
    from = 0;
    for (int64_t group = 0; group < groups; from = ends[group++])
        if (const int64_t size = ends[group] - from) {
            const int64_t mc = blocks(blocks(size, blocks(size, BLOCK_M)), MR) * MR;
            for (int64_t m = 0; m < size; m += mc)
                for (int64_t n = 0; n < N; n += nc)
                    units.push_back({group, from + m, std::min(mc, size - m), n, std::min(nc, N - n)});
        }
    std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.rows > b.rows; });
    const int64_t most = blocks(std::min<int64_t>(BLOCK_M, rows), MR) * MR;
#pragma omp parallel if (from * N * K >= 65536)
    {
        const Buffer packed = buffer(std::max(most * BLOCK_K, FEW * K)), sums = buffer(exact ? 0 : most * nc);
        alignas(64) float panel[BLOCK_K * NR];
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < units.size(); ++i) {
            const Unit unit = units[i];
            const T* from_x = x + unit.row * x_row;
            const T* from_w = weight + unit.group * w_group + unit.column * w_n;
            T* to = y + unit.row * N + unit.column;
            if (unit.rows <= FEW && (w_k == 1 || w_n == 1)) {
                float* floats = packed.get();
                for (int64_t r = 0; r < unit.rows; ++r)
                    for (int64_t k = 0; k < K; ++k) floats[r * K + k] = float(from_x[r * x_row + k * x_k]);
                few(unit.rows, floats, from_w, w_k, w_n, to, N, unit.columns, K);
                continue;
            }
            float* into = exact ? (float*)to : sums.get();
            const int64_t line = exact ? N : nc;
            block(from_x, x_row, x_k, from_w, w_k, w_n, into, line, unit.rows, unit.columns, K, packed.get(), panel);
            if (!exact) store_rows(into, line, to, N, unit.rows, unit.columns);
        }
    }
}

extern "C" int run(int dtype, const void* x, const void* weight, const int64_t* offs, void* y, int64_t rows, int64_t groups,
                   int64_t K, int64_t N, int64_t x_row, int64_t x_k, int64_t w_group, int64_t w_k, int64_t w_n) {
    AK_DISPATCH(dtype, grouped((const T*)x, (const T*)weight, offs, (T*)y, rows, groups, K, N, x_row, x_k, w_group, w_k,
                               w_n));
    return 0;
}
"""

_run = cpp_function(
    SOURCE,
    "run",
    "i pppp llll ll lll",
    TILE_ROWS=TILE_ROWS,
    BLOCK_K=BLOCK_K,
    BLOCK_M=BLOCK_M,
    SHARES=SHARES,
    FEW=FEW,
)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [rows, K] and weight [groups, K, N] of any strides, offs [groups] -> [rows, N] in x's dtype; sums in float."""
    offs = offs.to(torch.int64).contiguous()
    (rows, K), (groups, _, N) = x.shape, weight.shape
    y = torch.empty(rows, N, dtype=x.dtype)
    pointers = x.data_ptr(), weight.data_ptr(), offs.data_ptr(), y.data_ptr()
    _run(DTYPE_CODE[x.dtype], *pointers, rows, groups, K, N, *x.stride(), *weight.stride())
    return y
