"""What a replaced call costs the host beyond the kernel's own Python function, measured in models that run many of them.

Usage:   chrt -f 5 python benchmarks/host_cost.py      (a priority that others on the machine do not interrupt)
Writes:  benchmarks/host_cost.json

Two models that differ in nothing but how often they call their one RMSNorm, with a kernel that only allocates its result:
the difference of their times, over that of their calls, is what one call takes. (What Dynamo's guards cost, 4-6 µs for
each module with a parameter, torch.compile costs as well.) Rounds are interleaved; medians of them.
"""

import sys
import time
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.backend import Replacer, Winner, beside
from autokernel.device import Device
from autokernel.spec import Case, TensorSpec
from autokernel.target import Target, WeightedCase, write_json

FEW, MANY, SHAPE = 8, 40, (256, 64)
ROUNDS, CALLS = 41, 50
SOURCE = """
import torch

def kernel_fn(x, weight, eps=1e-6):
    return torch.empty_like(x)
"""
CASE = Case("x", {"x": TensorSpec(SHAPE, torch.float32), "weight": TensorSpec(SHAPE[1:], torch.float32), "eps": 1e-6})
WINNER = Winner(Target("norm", "rmsnorm", "cpp", "cpu", (WeightedCase(CASE),)), SOURCE)
LIMIT_US = {"no_grad": 5, "inference_mode": 5, "gradients": 12}
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "gradients": torch.enable_grad}


class Repeated(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.norm = times, nn.RMSNorm(SHAPE[1], 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(x)
        return x


def main() -> None:
    rows = {f"{mode}, {fallback or 'as it is'}": cost(mode, fallback) for mode in MODES for fallback in (None, "inductor")}
    for name, row in rows.items():
        print("{:28} {cost_us:6.2f} µs a call [{low_us:.2f}, {high_us:.2f}], at most {limit_us}".format(name, **row))
    record = {"cpu": Device.detect(torch.device("cpu")).name, "torch": torch.__version__, "rows": rows}
    write_json(Path(__file__).with_suffix(".json"), record)


def cost(mode: str, fallback: str | None) -> dict[str, float]:
    """Of one call, µs: median, and the middle half of the rounds."""
    torch._dynamo.reset()
    replacer, kernel = Replacer([WINNER], fallback), WINNER.load()
    few, many = (beside(Repeated(n), replacer) for n in (FEW, MANY))
    weight = torch.ones(SHAPE[1])
    with MODES[mode]():
        x = torch.randn(SHAPE)
        for model in (few, many):
            model(x)
        assert len(replacer.replaced) == FEW + MANY
        rounds = [(_us(few, x), _us(many, x), _us(kernel, x, weight, 1e-6)) for _ in range(ROUNDS)]
    costs = [(b - a) / (MANY - FEW) - bare for a, b, bare in rounds]
    low, _, high = quantiles(costs, n=4)
    return {"cost_us": median(costs), "low_us": low, "high_us": high, "limit_us": LIMIT_US[mode]}


def _us(call, *arguments: Tensor) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call(*arguments)
    return (time.perf_counter() - start) / CALLS * 1e6


if __name__ == "__main__":
    main()
