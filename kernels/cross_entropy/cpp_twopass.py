"""Cross entropy in C++, two passes: a row's true maximum, then the sum of exponentials, from L2 where the row fits."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "cross_entropy"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [2, 4, 8], "CHUNK_ROWS": [0, 1, 8, 64]}

UNROLL = 4  # vectors in flight along a row
CHUNK_ROWS = 0  # rows that a thread takes at a time; 0: an equal share, at once

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>
#if CHUNK_ROWS
#define SCHEDULE schedule(dynamic, CHUNK_ROWS)
#else
#define SCHEDULE schedule(static)
#endif

template <class T>
double row_loss(const T* x, int64_t V, int64_t target) {
    vfloat best[UNROLL], total[UNROLL];
    for (int u = 0; u < UNROLL; ++u) best[u] = splat(-INFINITY), total[u] = splat(0);
    fold_row<UNROLL>(V, -INFINITY, [&](int u, vfloat v) { best[u] = larger(v, best[u]); }, x);
    for (int u = 1; u < UNROLL; ++u) best[0] = larger(best[u], best[0]);
    const float peak = max_of(best[0]);
    const vfloat base = splat(peak);
    fold_row<UNROLL>(V, -INFINITY, [&](int u, vfloat v) { total[u] += vexp(v - base); }, x);
    for (int u = 1; u < UNROLL; ++u) total[0] += total[u];
    return std::log(double(sum_of(total[0]))) + (double(peak) - float(x[target]));
}

template <class T>
int cross_entropy(const T* x, const int64_t* target, T* loss, int64_t M, int64_t V, int64_t stride, int64_t ignore_index) {
    int64_t counted = 0;
    for (int64_t m = 0; m < M; ++m) {
        if (target[m] == ignore_index) continue;
        if (target[m] < 0 || target[m] >= V) return 1;
        ++counted;
    }
    std::vector<double> rows(M);
#pragma omp parallel for SCHEDULE
    for (int64_t m = 0; m < M; ++m) rows[m] = target[m] == ignore_index ? 0 : row_loss(x + m * stride, V, target[m]);
    double sum = 0;
    for (double row : rows) sum += row;
    *loss = T(float(sum / counted));
    return 0;
}

extern "C" int run(int dtype, const void* x, const int64_t* target, void* loss, int64_t M, int64_t V, int64_t stride,
                   int64_t ignore_index) {
    AK_DISPATCH(dtype, return cross_entropy((const T*)x, target, (T*)loss, M, V, stride, ignore_index));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i ppp llll", UNROLL=UNROLL, CHUNK_ROWS=CHUNK_ROWS)


def kernel_fn(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """logits [M, V], targets [M] int64 -> their mean loss, a scalar of the logits' dtype. IndexError: a target beyond V."""
    M, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    targets = targets.contiguous()
    loss = torch.empty((), dtype=logits.dtype)
    code, stride = DTYPE_CODE[logits.dtype], logits.stride(0)
    if _run(code, logits.data_ptr(), targets.data_ptr(), loss.data_ptr(), M, V, stride, ignore_index):
        raise IndexError(f"a target is neither in 0..{V - 1} nor {ignore_index}")
    return loss
