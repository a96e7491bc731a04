"""A kernel whose time can be set: RMSNorm with a chain of dependent multiplications by one in every row.

The compiler cannot know that the factor, an argument, is one, so no step of the chain can be left out, and none can begin
before the one in front of it has ended: time grows by the same amount, some cycles a row, with each step. Two files that
differ in STEPS run the same binary.
"""

from dataclasses import dataclass

import torch

from autokernel.gate.judge import Judge
from autokernel.gate.timing.contest import NotDecided
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase

CPP = r'''
import torch
from autokernel.build import cpp_function
KERNEL_TYPE = "rmsnorm"
BACKEND = "cpp"
STEPS = 0

SOURCE = r"""
#include <autokernel.hpp>
extern "C" int run(const float* x, const float* weight, float* y, int64_t M, int64_t N, float eps, int64_t steps,
                   float one) {
#pragma omp parallel for schedule(static) if (M * N >= 16384)
    for (int64_t m = 0; m < M; ++m) {
        vfloat squares[4] = {};
        fold_row<4>(N, 0, [&](int u, vfloat v) { squares[u] += v * v; }, x + m * N);
        for (int u = 1; u < 4; ++u) squares[0] += squares[u];
        float scale = 1 / std::sqrt(sum_of(squares[0]) / N + eps);
        for (int64_t i = 0; i < steps; ++i) scale *= one;
        map_row<4>(y + m * N, N, 0, [&](int, vfloat v, vfloat w) { return v * scale * w; }, x + m * N, weight);
    }
    return 0;
}
"""
run = cpp_function(SOURCE, "run", "ppp ll f l f")

def kernel_fn(x, weight, eps=1e-6):
    y = torch.empty(x.shape, dtype=x.dtype)
    run(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, eps, STEPS, 1.0)
    return y
'''

TRITON = """
import torch
import triton
import triton.language as tl
KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
STEPS = 0

@triton.jit(do_not_specialize=["steps"])
def rmsnorm(x, weight, y, N, eps, steps, one, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    values = tl.load(x + row + columns, mask, 0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / N + eps)
    for _ in range(steps):
        scale = scale * one
    tl.store(y + row + columns, (values * scale * weights).to(y.dtype.element_ty), mask)

def kernel_fn(x, weight, eps=1e-6):
    y = torch.empty_like(x)
    M, N = x.shape
    rmsnorm[(M,)](x, weight, y, N, eps, STEPS, 1.0, BLOCK=triton.next_power_of_2(N), num_warps=4)
    return y
"""


@dataclass(frozen=True)
class Band:
    """A latency at which kernels are planted, and the size of the rows' own work, which takes at most two thirds of it."""

    name: str
    latency_us: float
    cpu: tuple[int, int]  # M, N
    cuda: tuple[int, int]


BANDS = (
    Band("10 us", 10, cpu=(8, 768), cuda=(1024, 1024)),
    Band("100 us", 100, cpu=(64, 768), cuda=(4096, 2048)),
    Band("1 ms", 1000, cpu=(512, 2048), cuda=(16384, 4096)),
)
TRIED_STEPS = (2_000, 16_000, 128_000)  # until the chain shows beside the rows
ATTEMPTS = 3  # at a measurement that a busy machine disturbs
CHAIN_SHARE = 1 / 3  # at least, of the time: where the chain is shorter, other rows' work hides some of it


def planted_source(backend: str, steps: int) -> str:
    return (CPP if backend == "cpp" else TRITON).replace("STEPS = 0", f"STEPS = {steps}")


def planted_target(band: Band, backend: str, device: str) -> Target:
    M, N = band.cpu if device == "cpu" else band.cuda
    dtype = torch.float32 if device == "cpu" else torch.float16
    case = load_spec("rmsnorm").case({"M": M, "N": N}, dtype)
    return Target(f"planted_{band.name}", "rmsnorm", backend, device, (WeightedCase(case),))


@dataclass(frozen=True)
class Dial:
    """How many steps make which time on one target: `steps` for its latency, `steps_per_gain` more for twice of it."""

    target: Target
    steps: int
    steps_per_gain: float

    def contestants(self, gain: float) -> tuple[str, str]:
        """Candidate and incumbent, one of them longer: the candidate is 1 + gain times as fast, or slower by -gain."""
        shorter = planted_source(self.target.backend, self.steps)
        longer = planted_source(self.target.backend, self.steps + round(abs(gain) * self.steps_per_gain))
        return (shorter, longer) if gain > 0 else (longer, shorter)


def set_dial(judge: Judge, band: Band, backend: str, device: str) -> Dial:
    """Read the line of time over steps, twice: from the rows alone, then at the latency that is wanted."""
    target = planted_target(band, backend, device)
    for tried in TRIED_STEPS:
        rows_us, step_us = _line(judge, target, 0, tried)
        if tried * step_us > CHAIN_SHARE * rows_us:
            break
    steps = round((max(band.latency_us, rows_us / (1 - CHAIN_SHARE)) - rows_us) / step_us)
    time_us, step_us = _line(judge, target, steps, round(steps * 1.2))
    assert step_us > 0, f"at {steps} steps, more of them take no more time"
    return Dial(target, steps, time_us / step_us)


def _line(judge: Judge, target: Target, low: int, high: int) -> tuple[float, float]:
    """Microseconds at `low` steps, and for each step from there to `high`. Raises NotDecided on a busy machine."""
    for _ in range(ATTEMPTS):
        verdict = judge.compare(planted_source(target.backend, low), planted_source(target.backend, high), target)
        if verdict.speedup_vs_incumbent is not None:
            return verdict.latency_us, verdict.latency_us * (verdict.speedup_vs_incumbent.value - 1) / (high - low)
    raise NotDecided(verdict.why)
