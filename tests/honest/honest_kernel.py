"""What an honest kernel is: odd, and for its own work; and a right RMSNorm to make it of."""

from dataclasses import dataclass

from autokernel.spec import load_spec

SLOWED = 8  # times: so much slower is the starter that an odd kernel has to beat


@dataclass(frozen=True)
class Honest:
    """`kept`: it is fast enough to be kept beside a starter that computes its answer SLOWED times. `refused`: why the
    gate does not pass it yet; such an entry is a debt. `threads`: what is odd needs several of OpenMP's."""

    name: str
    source: str
    kernel_type: str = "rmsnorm"
    kept: bool = True
    refused: str = ""
    threads: bool = False


HEAD = """
import torch
from autokernel.build import DTYPE_CODE, cpp_function
KERNEL_TYPE = "{kernel_type}"
BACKEND = "cpp"
"""

# RMSNorm, one row after another; OVER_ROWS says in which order, by whom.
ROWS = r"""
#include <autokernel.hpp>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>
PREAMBLE
template <class T>
void one_row(const T* x, const T* weight, T* y, int64_t N, float eps) {
    vfloat squares[2] = {};
    fold_row<2>(N, 0, [&](int u, vfloat v) { squares[u] += v * v; }, x);
    const vfloat scale = splat(1 / std::sqrt(sum_of(squares[0] + squares[1]) / N + eps));
    map_row<2>(y, N, 0, [&](int, vfloat v, vfloat w) { return v * scale * w; }, x, weight);
}
template <class T>
void rows(const T* x, const T* weight, T* y, int64_t M, int64_t N, float eps) {
    auto row = [&](int64_t m) { one_row(x + m * N, weight, y + m * N, N, eps); };
    OVER_ROWS
}
extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, float eps) {
    AK_DISPATCH(dtype, rows((const T*)x, (const T*)weight, (T*)y, M, N, eps));
    return 0;
}
"""

SIMPLE_LOOP = """
#pragma omp parallel for schedule(static) if (M * N >= 16384)
    for (int64_t m = 0; m < M; ++m) row(m);
"""

KERNEL_FN = """
def kernel_fn(x, weight, eps=1e-6):
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""


def rmsnorm(kernel_fn: str = KERNEL_FN, over_rows: str = SIMPLE_LOOP, preamble: str = "") -> str:
    """A kernel file whose kernel_fn may use run and launch(run, x, weight, eps, y), and the text of the C++ as CPP."""
    cpp = ROWS.replace("OVER_ROWS", over_rows).replace("PREAMBLE", preamble)
    return (
        HEAD.format(kernel_type="rmsnorm")
        + f"CPP = {cpp!r}\n"
        + 'run = cpp_function(CPP, "run", "i ppp ll f", ROWS_AT_ONCE=1)\n\n'
        + "def launch(run, x, weight, eps, y):\n"
        + "    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]\n"
        + "    code, M = DTYPE_CODE[x.dtype], x.numel() // N\n"
        + "    run(code, x.data_ptr(), weight.data_ptr(), y.data_ptr(), M, N, eps)\n"
        + "    return y\n"
        + kernel_fn
    )


def starter(kernel_type: str) -> str:
    return (load_spec(kernel_type).folder / "cpp_kernel.py").read_text()


def wrapped(before: str, kernel_type: str = "rmsnorm") -> str:
    """The type's starter; `before` runs at each call."""
    return starter(kernel_type).replace("def kernel_fn(", "def _right(") + (
        f"\ndef kernel_fn(*args, **kwargs):\n    {before}\n    return _right(*args, **kwargs)\n"
    )
