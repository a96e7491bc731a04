"""What a replaced call costs the host beyond the kernel's own Python function, measured in models that run many of them.

Usage:   chrt -f 5 python benchmarks/host_cost.py      (a priority that others on the machine do not interrupt)
         python benchmarks/host_cost.py --device cuda
Writes:  benchmarks/host_cost.json, benchmarks/host_cost-cuda.json

Two models that differ in nothing but how often they call their one RMSNorm, with a kernel that only allocates its result
(and, on a GPU, launches a Triton kernel that does nothing): the difference of their times, over that of their calls, is
what a call takes. It may be less than the kernel's own function: launches that are always the same are prepared. (What
Dynamo's guards cost, 4-6 µs for each module with a parameter, torch.compile costs as well.) Medians of interleaved rounds.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.common.records import write_json
from autokernel.hardware.device import Device
from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.integration.winner import Winner
from autokernel.spec import Case, TensorSpec
from autokernel.target import Target, WeightedCase

FEW, MANY, SHAPE = 8, 40, (256, 64)
ROUNDS, CALLS = 41, 20
SOURCE = """
import torch

def kernel_fn(x, weight, eps=1e-6):
    return torch.empty_like(x)
"""
TRITON_SOURCE = """
import torch
import triton

@triton.jit
def nothing(x, weight, y, eps, N):
    pass

def kernel_fn(x, weight, eps=1e-6):
    y = torch.empty_like(x)
    nothing[(1,)](x, weight, y, eps, x.shape[-1])
    return y
"""
CASE = Case("x", {"x": TensorSpec(SHAPE, torch.float32), "weight": TensorSpec(SHAPE[1:], torch.float32), "eps": 1e-6})
WINNERS = {
    "cpu": Winner(Target("norm", "rmsnorm", "cpp", "cpu", (WeightedCase(CASE),)), SOURCE),
    "cuda": Winner(Target("norm", "rmsnorm", "triton", "cuda", (WeightedCase(CASE),)), TRITON_SOURCE),
}
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=WINNERS, default="cpu")
    device = parser.parse_args(argv).device
    ways = [(mode, fallback) for mode in MODES for fallback in (None, "inductor")]
    rows = {f"{mode}, {fallback or 'as it is'}": cost(mode, fallback, device) for mode, fallback in ways}
    for name, row in rows.items():
        print("{:28} {cost_us:6.2f} µs a call [{low_us:.2f}, {high_us:.2f}], at most {limit_us}".format(name, **row))
    record = {"device": Device.detect(torch.device(device)).name, "torch": torch.__version__, "rows": rows}
    path = Path(__file__).with_suffix(".json")
    write_json(path if device == "cpu" else path.with_stem("host_cost-cuda"), record)


def cost(mode: str, fallback: str | None, device: str) -> dict[str, float]:
    """Of one call, µs: median, and the middle half of the rounds."""
    torch._dynamo.reset()
    replacer, kernel = Replacer([WINNERS[device]], fallback), WINNERS[device].load()
    few, many = (compile_with_kernels(Repeated(n).to(device), replacer) for n in (FEW, MANY))
    weight = torch.ones(SHAPE[1], device=device)
    with MODES[mode]():
        x = torch.randn(SHAPE, device=device)
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
    seconds = time.perf_counter() - start
    if arguments[0].is_cuda:
        torch.cuda.synchronize()  # a queue that is full would be waited for
    return seconds / CALLS * 1e6


if __name__ == "__main__":
    raise SystemExit(script(main))
