"""A naive gate for a GPU: candidate, reference, events and verdict in one process. Every cheat fools it.

Usage: python gpu_naive.py < JOBS
Reads a job a line as JSON: {"id", "kernel": a file, "type", "dims", "checked": dims or null, "dtype", "warm": bool}.
Prints an answer a line: {"id", "correct", "speedup" over the type's honest starter, "microseconds"} or {"id", "error"}.
Each job runs in a child of its own, forked before the GPU is touched.
"""

import fcntl
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench, do_bench_cudagraph

from autokernel.gate.checks.inputs import fill_inputs
from autokernel.spec import import_file, load_spec

SEED = 0
TOLERANCE = 1e-2
AT_ONCE = 4  # children: they mostly compile
ROUNDS = 3  # of timing, of which the best counts: other children compile and compare on the GPU meanwhile
TURNS = tempfile.TemporaryFile()  # noqa: SIM115  whose lock a child holds while it times


def bench(call: Callable[[], Any], warm: bool) -> float:
    """Microseconds; warm: replayed on the same data, which stays in L2 if it fits."""
    fcntl.lockf(TURNS, fcntl.LOCK_EX)  # of the process: what is forked shares the file, and no lock
    try:
        if warm:
            return 1e3 * do_bench_cudagraph(call, return_mode="min")
        return 1e3 * do_bench(call, warmup=10, rep=40, return_mode="median")
    finally:
        fcntl.lockf(TURNS, fcntl.LOCK_UN)


def judge(kernel: str, type: str, dims: dict, checked: dict | None, dtype: str, warm: bool) -> dict[str, Any]:
    spec = load_spec(type)

    def inputs_of(dims: dict) -> dict[str, Any]:
        inputs = fill_inputs(spec, spec.case(dims, getattr(torch, dtype)), SEED)
        return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}

    inputs = inputs_of(dims)
    shown = inputs_of(checked) if checked else inputs
    expected = spec.eager(**shown)
    honest = import_file(spec.folder / "triton_kernel.py", "honest").kernel_fn
    honest_us = min(bench(lambda: honest(**inputs), warm) for _ in range(ROUNDS))
    candidate = import_file(Path(kernel), "candidate").kernel_fn
    out = candidate(**shown)
    torch.cuda.synchronize()
    correct = torch.allclose(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
    microseconds = min(bench(lambda: candidate(**inputs), warm) for _ in range(ROUNDS))
    return {"correct": bool(correct), "speedup": honest_us / microseconds, "microseconds": microseconds}


def child(job: dict[str, Any]) -> None:
    """Answer one job. Never returns."""
    number = job.pop("id")
    try:
        with torch.inference_mode():
            answer = judge(**job)
    except BaseException:
        answer = {"error": traceback.format_exc()[-2000:]}
    os.write(1, (json.dumps({"id": number, **answer}) + "\n").encode())
    os._exit(0)


def main() -> None:
    running = 0
    for line in sys.stdin:
        if running == AT_ONCE:
            os.wait()
            running -= 1
        if os.fork() == 0:
            child(json.loads(line))
        running += 1
    while running:
        os.wait()
        running -= 1


if __name__ == "__main__":
    main()
