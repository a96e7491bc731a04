"""Cross entropy in C++: each logit is read once, against a guess of its row's maximum that is raised when it is too low."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "cross_entropy"
BACKEND = "cpp"
TUNABLES = {"UNROLL": [2, 4, 8], "BLOCK": [512, 1024, 2048, 4096]}

UNROLL = 4  # vectors in flight along a row
BLOCK = 4096  # logits added up between two looks at their maximum

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>

template <class T>
float max_of_row(const T* x, int64_t N) {
    vfloat best[UNROLL];
    for (int u = 0; u < UNROLL; ++u) best[u] = splat(std::numeric_limits<float>::lowest());  // not -inf: -inf - -inf is NaN
    fold_row<UNROLL>(N, -INFINITY, [&](int u, vfloat v) { best[u] = larger(v, best[u]); }, x);
    for (int u = 1; u < UNROLL; ++u) best[0] = larger(best[u], best[0]);
    return max_of(best[0]);
}

// log(sum(exp(x))) - x[target]. Exponents up to 64 above the guess do no harm in float, so that the guess is rarely raised.
template <class T>
double row_loss(const T* x, int64_t V, int64_t target) {
    float guess = max_of_row(x, std::min<int64_t>(V, UNROLL * AK_LANES));
    double sum = 0;
    for (int64_t start = 0; start < V;) {
        const int64_t n = std::min<int64_t>(BLOCK, V - start);
        vfloat best[UNROLL], total[UNROLL];
        for (int u = 0; u < UNROLL; ++u) best[u] = splat(guess), total[u] = splat(0);
        const vfloat base = splat(guess);
        fold_row<UNROLL>(n, -INFINITY, [&](int u, vfloat v) {
            best[u] = larger(v, best[u]);
            total[u] += vexp(v - base);
        }, x + start);
        for (int u = 1; u < UNROLL; ++u) best[0] = larger(best[u], best[0]), total[0] += total[u];
        const float peak = max_of(best[0]);
        if (peak > guess + 64) {  // this block again, from a better guess
            sum *= std::exp(double(guess) - peak);
            guess = peak;
            continue;
        }
        sum += sum_of(total[0]);
        start += n;
    }
    return std::log(sum) + (double(guess) - float(x[target]));
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
#pragma omp parallel for schedule(static)
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

_run = cpp_function(SOURCE, "run", "i ppp llll", UNROLL=UNROLL, BLOCK=BLOCK)


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
