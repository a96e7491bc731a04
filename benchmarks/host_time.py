"""What a call takes beside its operators: torch.compile()'s form of a model, ours without any kernel, and apply()'s.

Usage:   python benchmarks/host_time.py         (over CUDA graphs if there is a GPU, else over Inductor)
         python benchmarks/host_time.py gpt2    (a model of models.py, also with every starter: a pass, in turns)

By default the model is a chain of small layers, whose operators take as little as a call may. The sides take turns; of each
the fastest of many batches of calls counts, since whatever else the machine does only adds to it.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.integration.apply import apply, compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.integration.verification.forms import GRAPHS, INDUCTOR, baseline
from autokernel.integration.verification.sides import Sides, Variant
from autokernel.model.capture import compile_model
from autokernel.model.extraction import make_plan
from autokernel.model.profiler import profile_workload
from autokernel.model.regions.growing import region_finder
from benchmarks.models import MODELS, rounds_of, speedup, winners_of, workload_of

LAYERS, WIDTH, ROUNDS, CALLS = 24, 8, 150, 20
SECONDS = 7.0  # of rounds of a model
WITHOUT, EVERY = "without kernels", "with every starter"


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


def of_a_chain(device: str, fallback: str) -> None:
    model, x = Chain().to(device).eval(), torch.randn(2, WIDTH, device=device)
    sides = {
        baseline(fallback): compile_model(model, mode=fallback if fallback == GRAPHS else None),
        WITHOUT: compile_with_kernels(model, Replacer((), fallback)),
        "apply()": apply(copy.deepcopy(model), [], fallback=fallback),
    }
    with torch.no_grad():
        for call in sides.values():
            for _ in range(5):
                call(x)
        rounds = [{name: batch_s(call, x) for name, call in sides.items()} for _ in range(ROUNDS)]
    fastest = {name: min(seconds[name] for seconds in rounds) for name in sides}
    first = next(iter(fastest))
    for name, seconds in fastest.items():
        more = (seconds - fastest[first]) * 1e6
        print(f"{name:28} {seconds / fastest[first]:.3f} of the time of {first}, {more:+.1f} µs a call")


def of_a_model(name: str, device: str, fallback: str) -> None:
    workload, first = workload_of(name, device), baseline(fallback)
    profile = profile_workload(workload, 2, 5, baseline="eager", regions=region_finder(device))
    winners = tuple(winners_of(make_plan(profile, top=99), lambda line: print(f"{name}: {line}")))
    model, *_ = workload.load()
    example = workload.inputs(model, 1)
    sides = Sides(workload, model)
    with torch.no_grad():
        sides.build({first: Variant((), fallback), EVERY: Variant(winners, fallback)}, example)
        call = sides.models[WITHOUT] = compile_with_kernels(model, Replacer((), fallback, finder=sides.finder))
        for _ in range(3):  # compiled, recorded, replayed
            call(*example[0], **example[1])
        rounds = rounds_of(sides, SECONDS)
    for side in sides.models:
        ms = 1e3 * median(passes[side].seconds for passes in rounds)
        print(f"{name}: {side:28} {ms:.3f} ms, {speedup(rounds, first, side)} of {first}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    models = parser.parse_args().models
    if unknown := set(models) - set(MODELS):
        parser.error(f"there is no model {min(unknown)!r}: {', '.join(MODELS)}")
    device, fallback = ("cuda", GRAPHS) if torch.cuda.is_available() else ("cpu", INDUCTOR)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")
    for name in models:
        of_a_model(name, device, fallback)
    if not models:
        of_a_chain(device, fallback)


if __name__ == "__main__":
    main()
