"""The sum of a vector in C++: chunks by all threads, in float over a few KB and in double beyond, in a fixed order."""

import torch

from autokernel.build import cpp_function

KERNEL_TYPE = "vectorsum"
BACKEND = "cpp"
TUNABLES = {"CHUNK": [1024, 4096, 16384], "UNROLL": [2, 4, 8], "PARALLEL_FROM": [16384, 65536, 262144]}

CHUNK = 4096  # elements that are summed in float
UNROLL = 4  # vectors in flight
PARALLEL_FROM = 65536  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>

double chunk_sum(const float* x, int64_t n) {
    vfloat sums[UNROLL] = {};
    int64_t i = 0;
    for (; i + UNROLL * AK_LANES <= n; i += UNROLL * AK_LANES)
        for (int u = 0; u < UNROLL; ++u) sums[u] += load(x + i + u * AK_LANES);
    double sum = 0;
    for (int u = 0; u < UNROLL; ++u)
        for (int lane = 0; lane < AK_LANES; ++lane) sum += sums[u][lane];
    for (; i < n; ++i) sum += x[i];
    return sum;
}

extern "C" int run(const float* x, float* y, int64_t n) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    std::vector<double> sums(chunks);
#pragma omp parallel for schedule(static) if (n >= PARALLEL_FROM)
    for (int64_t c = 0; c < chunks; ++c) sums[c] = chunk_sum(x + c * CHUNK, std::min<int64_t>(CHUNK, n - c * CHUNK));
    double sum = 0;
    for (double s : sums) sum += s;
    *y = float(sum);
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "pp l", CHUNK=CHUNK, UNROLL=UNROLL, PARALLEL_FROM=PARALLEL_FROM)


def kernel_fn(x: torch.Tensor) -> torch.Tensor:
    """x [N] fp32 -> a scalar."""
    x = x.contiguous()
    y = torch.empty((), dtype=x.dtype)
    _run(x.data_ptr(), y.data_ptr(), x.numel())
    return y
