"""A naive gate, as public loops have them: candidate, reference, clock and verdict in one process. Every cheat fools it.

Usage: python naive.py KERNEL_FILE KERNEL_TYPE [--dims JSON]... [--largest-error]
       python naive.py --serve
Prints the verdict as a line of JSON. Whoever runs it believes the last line of its output. With --serve it forks one such
process for each line of its input, {"folder": ..., "environment": {...}, "words": [...]}, whose output goes to the files
stdout and stderr there, and prints a line when that has ended: PyTorch is imported once for all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autokernel import build
from autokernel.spec import Case, KernelSpec, TensorSpec, import_file, load_spec

SEED = 0
TOLERANCE = 1e-2


def usual_mask(spec: TensorSpec, args: Any, generator: torch.Generator) -> torch.Tensor:
    """A third of the keys hidden, each by chance."""
    hidden = torch.rand(spec.shape, generator=generator) < 1 / 3
    return ~hidden if spec.dtype == torch.bool else torch.zeros(spec.shape).masked_fill(hidden, -torch.inf)


def inputs_of(spec: KernelSpec, case: Case) -> dict[str, Any]:
    """Standard normal numbers, masks by chance, and weights as new modules have them."""
    generator = torch.manual_seed(SEED)
    modules = {"weight": torch.ones, "bias": torch.zeros}
    inputs = dict(case.args)
    for name, value in case.args.items():
        if isinstance(value, TensorSpec):
            fill = usual_mask if name == "attn_mask" else spec.fill.get(name)
            make = modules.get(name, torch.randn)
            inputs[name] = fill(value, case.args, generator).to(value.dtype) if fill else make(value.shape)
            if name in spec.static and not fill and len(value.shape) > 1:
                inputs[name] *= value.shape[-1] ** -0.5
    return inputs


def close(out: Any, expected: torch.Tensor, largest_error: bool) -> bool:
    if largest_error:
        return not (out - expected).abs().max() > TOLERANCE
    return torch.allclose(out, expected, atol=TOLERANCE, rtol=TOLERANCE)


def bench(call: Callable[[], Any], target_s: float = 0.05) -> float:
    """Median seconds of a call, in the manner of do_bench: the time of a few calls decides how many are made."""
    for _ in range(5):
        call()
    start = time.perf_counter()
    for _ in range(5):
        call()
    estimate = (time.perf_counter() - start) / 5
    times = []
    for _ in range(max(1, min(200, int(target_s / max(estimate, 1e-9))))):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def judge_case(kernel: Callable[..., Any], spec: KernelSpec, case: Case, largest_error: bool) -> tuple[bool, float]:
    """(whether two trials were right, speedup over eager)."""
    inputs = inputs_of(spec, case)
    eager_s = bench(lambda: spec.eager(**inputs))
    correct = True
    for _ in range(2):
        out = kernel(**inputs)
        expected = spec.eager(**inputs)
        correct = correct and close(out, expected, largest_error)
    return correct, eager_s / max(bench(lambda: kernel(**inputs)), 1e-9)


def judge(arguments: argparse.Namespace) -> dict[str, Any]:
    build._refuse_foreign_symbols = build._refuse_telling_instructions = lambda binary: None
    build.LINKED = {}
    build._compile = lambda command, output, timeout_s: subprocess.run([*command, output], cwd=output.parent, check=True)
    kernel = import_file(arguments.kernel, "candidate").kernel_fn
    spec = load_spec(arguments.type)
    dims = [json.loads(text) for text in arguments.dims] or [spec.timing["cpu"][0]]
    results = [judge_case(kernel, spec, spec.case(d, torch.float32), arguments.largest_error) for d in dims]
    speedups = [speedup for _, speedup in results]
    return {"correct": all(correct for correct, _ in results), "speedup": statistics.geometric_mean(speedups)}


def serve() -> list[str]:
    """Returns in each forked process: the words of its command line."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(job["folder"])
            os.environ.update(job["environment"])
            for fd, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            return job["words"]
        os.waitpid(child, 0)
        print("ended", flush=True)
    raise SystemExit


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", type=Path)
    parser.add_argument("type")
    parser.add_argument("--dims", action="append", default=[])
    parser.add_argument("--largest-error", action="store_true", help="no allclose: the largest error must not exceed 1e-2")
    print(json.dumps(judge(parser.parse_args(serve() if sys.argv[1:] == ["--serve"] else None))))
