"""Problems that a wrong or an idle answer could pass: found by experiment on the reference itself, with its own inputs."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autokernel.gate.checks.correctness import ELEMENT_TOLERANCE
from autokernel.kernelbench.modelnew import as_kernel
from autokernel.kernelbench.problems import Problem

LAUNCHES = 0.25  # of a pass's time: with more of it spent in starting operators, the time says little of kernels
NEARLY_ZERO = 1e-4


def weaknesses(problem: Problem, device: str = "cpu") -> list[str]:
    """In words, each with what was seen; empty where a right answer needs the inputs, and the time is that of work."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        return list(_found(problem, device))


def _found(problem: Problem, device: str) -> Iterator[str]:
    model = as_kernel(lambda *init: problem.module.Model(*init), used=False)
    given, other = ({k: _on(v, device) for k, v in problem.inputs(seed).items()} for seed in (1, 2))
    weights = {k: _on(v, device) for k, v in problem.weights(1).items()}

    def run(inputs: dict[str, Any]) -> Tensor:
        return model(init=problem.arguments["init"], **inputs, **weights).double()

    y = run(given)
    if not torch.equal(y, run(given)) and not _close(y, run(given)):
        yield "draws random numbers: two calls on the same inputs differ"
        return
    tensors = [name for name, v in given.items() if isinstance(v, Tensor)]
    if y.abs().max() < NEARLY_ZERO:
        yield f"nearly zero: no element of the output is larger than {y.abs().max().item():.1e}"
    elif y.numel() > 1 and _close(y, y.flatten()[0].expand_as(y)):
        yield f"constant: every element of the output is {y.flatten()[0].item():.4g} within the tolerance"
    if _close(y, run(other)):
        yield "inputs do not matter: other inputs give the same output within the tolerance"
    else:
        for name in tensors:
            if _close(y, run(given | {name: other[name]})):
                yield f"{name} does not matter: others give the same output within the tolerance"
            elif _close(y, run(given | {name: _half(given[name], other[name])})):
                yield f"{name} hardly matters: with half of its elements replaced the output is the same"
    yield from _launches(lambda: run(given), device)


def _on(v: Any, device: str) -> Any:
    return v.to(device) if isinstance(v, Tensor) else v


def _close(a: Tensor, b: Tensor) -> bool:
    """Within the outer bound of the gate, which is that of the benchmark."""
    tolerance = ELEMENT_TOLERANCE[torch.float32]
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _half(a: Tensor, b: Tensor) -> Tensor:
    """Every second element of a, the others from b."""
    return torch.where((torch.arange(a.numel(), device=a.device) % 2 == 0).view(a.shape), a, b)


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _launches(run: Callable[[], Tensor], device: str) -> Iterator[str]:
    """Whether a pass takes about as long as it takes to start its operators on nothing."""
    nothing = torch.zeros(1, device=device)
    with _Count() as count:
        run()
    one = _least_s(lambda: torch.relu(nothing), device, 50)
    share = count.calls * one / _least_s(run, device, 5)
    if share > LAUNCHES:
        yield f"times the launch: starting its {count.calls} operators is {min(share, 1):.0%} of a pass"


def _least_s(call: Callable[[], Any], device: str, times: int) -> float:
    least = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least
