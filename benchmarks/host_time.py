"""What a call takes beside its operators: torch.compile()'s form of a model, ours without any kernel, and apply()'s.

Usage:   python benchmarks/host_time.py    (over CUDA graphs if there is a GPU, else over Inductor)

The model is a chain of small layers, whose operators take as little as a call may. The sides take turns; of each the
fastest of many batches of calls counts, since whatever else the machine does only adds to it.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from autokernel.integration.apply import apply, compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.integration.verification.forms import GRAPHS, INDUCTOR, baseline
from autokernel.model.capture import compile_model

LAYERS, WIDTH, ROUNDS, CALLS = 24, 8, 150, 20


class Chain(nn.Module):
    """Residual layers and a norm: 50 parameters, about as many as three layers of a transformer have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def batch_s(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds a call, without what the GPU is left to do behind the last one."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call(x)
    seconds = (time.perf_counter() - start) / CALLS
    if x.is_cuda:
        torch.cuda.synchronize()
    return seconds


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device, fallback = ("cuda", GRAPHS) if torch.cuda.is_available() else ("cpu", INDUCTOR)
    model, x = Chain().to(device).eval(), torch.randn(2, WIDTH, device=device)
    sides = {
        baseline(fallback): compile_model(model, mode=fallback if fallback == GRAPHS else None),
        "without kernels": compile_with_kernels(model, Replacer((), fallback)),
        "apply()": apply(copy.deepcopy(model), [], fallback=fallback),
    }
    with torch.no_grad():
        for call in sides.values():
            for _ in range(5):
                call(x)
        rounds = [{name: batch_s(call, x) for name, call in sides.items()} for _ in range(ROUNDS)]
    fastest = {name: min(seconds[name] for seconds in rounds) for name in sides}
    first = next(iter(fastest))
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")
    for name, seconds in fastest.items():
        more = (seconds - fastest[first]) * 1e6
        print(f"{name:28} {seconds / fastest[first]:.3f} of the time of {first}, {more:+.1f} µs a call")


if __name__ == "__main__":
    main()
