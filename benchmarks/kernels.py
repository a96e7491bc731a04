"""Our GPU kernels against their peers: PyTorch, its compiler, Liger, cuDNN and FlashAttention, and the memory's own limit.

Usage:   python benchmarks/kernels.py                                    (every case; a few minutes on a GPU machine)
         python benchmarks/kernels.py softmax rmsnorm --budget 120       (these types, as far as they get in two minutes)
         python benchmarks/kernels.py matmul --case M=4096 --only eager triton cuda
         python benchmarks/kernels.py --missing                          (what the record does not have yet)
Reads:   kernels/<type>/{triton,cuda}_*.py
Writes:  benchmarks/kernels-<device>.json after every row; at the end .md and .png of the same name: tables and roofline
         (then `python benchmarks/tables.py` for docs/measurements.md)

How it is timed. The gate gives each side fresh processes, which is right for a verdict on one kernel and takes seconds for
each of the hundred cases here. So everyone who can run a case is timed in one process: batches of calls, CUDA graphs where
they can be captured, over input sets that together exceed the L2 several times, in rounds that run forwards and backwards
(rounds.py). The record keeps every round's time; ratios are taken within rounds. What one process cannot show is the bias
that it carries itself: repeat the command to see that. All of a row's numbers come from one run on one device.

Everyone's first output is held against the eager form's: who computes something else is not timed. What must be compiled
is compiled before anything is timed, by several processes at once into the usual caches; torch.compile's autotuning then
has the GPU to itself by a lock.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.runtime import benchmarking

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, count, positive, script
from autokernel.common.console import add_device_argument, fail, settle_device
from autokernel.hardware import nvml
from autokernel.hardware.device import Device
from autokernel.spec import kernel_types
from benchmarks import roofline, tables
from benchmarks.contestants import Call, Row, contestants, input_sets, rows
from benchmarks.rounds import ROUNDS, Batch, interleaved, sets_needed

FOLDER = Path(__file__).resolve().parent
TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}  # of the eager output's norm
COMPILING_SHARE = 0.5  # of a budget
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"default: all of {', '.join(kernel_types())}")
    parser.add_argument("--case", action="append", default=[], metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--only", nargs="+", metavar="WHO", help="these contestants (default: everyone)")
    parser.add_argument("--without", nargs="+", default=[], metavar="WHO[:TEXT]", help="not these (in rows with this text)")
    parser.add_argument("--alternatives", action="store_true", help="our structural alternatives as well")
    parser.add_argument("--budget", type=positive, metavar="SECONDS", help="start no row after so long (default: no limit)")
    parser.add_argument("--rounds", type=count, default=ROUNDS, help="forwards and backwards (default: %(default)s)")
    parser.add_argument("--jobs", type=count, default=max((os.cpu_count() or 2) - 2, 1), help="that compile at once")
    parser.add_argument("--missing", action="store_true", help="only rows that the record lacks")
    parser.add_argument("--list", action="store_true", help="print the rows and who would run them")
    parser.add_argument("--record", type=Path, help="default: benchmarks/kernels-<device>.json")
    add_device_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    started = time.monotonic()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    settle_device(arguments, parser)
    if unknown := set(arguments.types) - set(kernel_types()):
        fail(f"no kernel type {', '.join(sorted(unknown))}; there are: {', '.join(kernel_types())}")
    chosen = [row for row in rows(arguments.device) if wanted(row, arguments)]
    if not chosen:
        fail(f"no case of {', '.join(arguments.types) or 'any type'} has {' or '.join(arguments.case)} in its name")
    if arguments.list:
        print("\n".join(f"{row.name}: {', '.join(who(row, arguments))}" for row in chosen))
        return
    budget = arguments.budget or float("inf")
    path = arguments.record or FOLDER / f"kernels-{slug(arguments.device)}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    chosen = [row for row in chosen if not (arguments.missing and row.name in record)]
    built = compile_all(chosen, arguments, started + budget * COMPILING_SHARE)
    ready = [row for row in chosen if all((row.name, name) in built for name in who(row, arguments))]
    machine = {"command": command(arguments), **versions(arguments.device)}
    with torch.inference_mode(), clocks(arguments.device) as clock:
        for done, row in enumerate(ready):
            if time.monotonic() >= started + budget:
                ready = ready[:done]
                break
            entry = measure(row, arguments, built)
            record[row.name] = entry | {"machine": machine | clock()}
            path.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in record.items()) + "\n}\n")
            print(summary(row, entry), flush=True)
    if len(ready) < len(chosen):
        print(f"not reached within {budget:.0f} s: {len(chosen) - len(ready)} of {len(chosen)} rows (--missing goes on)")
    if record:
        path.with_suffix(".md").write_text(tables.gpu_tables(path))
        roofline.plot(path)


def command(arguments: argparse.Namespace) -> str:
    """What repeats this run, on any machine."""
    words = [word for word in sys.argv[1:] if word not in ("--record", str(arguments.record))]
    return shlex.join(["python", "benchmarks/kernels.py", *words])


def wanted(row: Row, arguments: argparse.Namespace) -> bool:
    right_type = not arguments.types or row.kernel_type in arguments.types
    return right_type and (not arguments.case or any(text in row.case.name for text in arguments.case))


def who(row: Row, arguments: argparse.Namespace) -> dict[str, Callable[[], Call]]:
    everyone = contestants(row, arguments.device, arguments.alternatives)
    chosen = arguments.only or everyone
    without = {name for name, _, text in (rule.partition(":") for rule in arguments.without) if text in row.name}
    return {name: load for name, load in everyone.items() if name in chosen and name not in without}


def measure(row: Row, arguments: argparse.Namespace, built: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Everyone's times on `row`; for those without: why."""
    kind, args = torch.device(arguments.device).type, row.case.args
    torch._dynamo.reset()
    sets = list(input_sets(row, arguments.device, sets_needed(row.spec.bytes_moved(args), kind)))
    expected = row.spec.eager(**sets[0])
    entry: dict[str, Any] = {
        "kernel_type": row.kernel_type,
        "case": row.case.name,
        "flops": row.spec.flops(args),
        "bytes_moved": row.spec.bytes_moved(args),
        "peak": peak(arguments.device, row.case.dtype),
        "sets": len(sets),
        "us": {},
        "not_captured": [],
        "failed": {},
    }
    batches: dict[str, Batch] = {}
    for name, load in who(row, arguments).items():
        reason = built[row.name, name]
        if not reason:
            try:
                call = load()
                reason = name not in ("copy", "read") and wrong(call(**sets[0]), expected)
                if not reason:
                    batches[name] = Batch(call, sets, kind)
            except Exception as error:  # a peer's crash is an outcome, and says nothing of the others
                reason = first_line(error)
        if reason:
            entry["failed"][name] = reason
    entry["us"] = {name: [round(us, 3) for us in times] for name, times in interleaved(batches, arguments.rounds).items()}
    entry["not_captured"] = [name for name, batch in batches.items() if kind == "cuda" and not batch.graph]
    entry["source"] = {name: digest(row, name) for name in batches if digest(row, name)}
    del batches, sets
    if kind == "cuda":
        torch.cuda.empty_cache()
    return entry


def peak(device: str, dtype: torch.dtype) -> dict[str, float]:
    most = Device.detect(device)
    return {"tflops": most.peak_tflops(dtype), "gb_s": most.peak_bandwidth_gb_s}


def wrong(y: Tensor, expected: Tensor) -> str:
    """Why `y` is not the result; empty if it is, to its dtype's precision. (The gate is what proves a kernel right.)"""
    if y.shape != expected.shape:
        return f"wrong: shape {tuple(y.shape)} instead of {tuple(expected.shape)}"
    error = ((y.float() - expected.float()).norm() / expected.float().norm()).item()
    return "" if error <= TOLERANCE[expected.dtype] else f"wrong: differs from the eager form by {error:.1e} of its norm"


def digest(row: Row, name: str) -> str:
    """Of one of our kernels' source: which version the numbers are of."""
    path = row.spec.folder / (f"{name}_kernel.py" if name in ("triton", "cuda", "cpp") else f"{name}.py")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def summary(row: Row, entry: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {median(us):.1f}" for name, us in entry["us"].items())
    return f"{row.name}: {times} us" + "".join(f"\n  {name}: {why}" for name, why in entry["failed"].items())


def slug(device: str) -> str:
    """Of the device's name: "h200", "cpu"."""
    kind = torch.device(device).type
    return kind if kind == "cpu" else Device.detect(device).name.removeprefix("NVIDIA ").split(" ")[0].lower()


def versions(device: str) -> dict[str, Any]:
    record = {"device": Device.detect(device).name, "torch": torch.__version__, "date": f"{date.today()}"}
    if torch.device(device).type == "cuda":
        import triton

        record |= {"driver": nvml.driver_version(device), "triton": triton.__version__, "cuda": torch.version.cuda}
    return record


@contextmanager
def clocks(device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """A function that returns what the driver said of the GPU's clocks since it was last called: lowest to highest."""
    if torch.device(device).type != "cuda":
        yield dict
        return
    query = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits", "--loop-ms=200"]
    query.append(f"--id={nvml.gpu_id(device)}")
    with tempfile.NamedTemporaryFile("r") as file:
        with open(file.name, "w") as written:  # apart from ours, which has a place of its own
            asked = subprocess.Popen(query, stdout=written)

        def since() -> dict[str, Any]:
            lines = [line.strip().split(", ") for line in file.read().split("\n")]
            samples = list(zip(*(line for line in lines if len(line) == len(CLOCKS))))
            return {"clocks": {name: [min(cells), max(cells)] for name, cells in zip(CLOCKS, samples)}}

        try:
            yield since
        finally:
            asked.terminate()
            asked.wait()


Job = tuple[Row, str]


def compile_all(chosen: Sequence[Row], arguments: argparse.Namespace, until: float) -> dict[tuple[str, str], str]:
    """Let several processes call everyone once, so that the caches have what must be compiled.

    Returns why each (row, contestant) cannot run, empty if it can; those not reached by `until` are missing.
    """
    jobs = [(row, name) for row in chosen for name in who(row, arguments)]
    context = multiprocessing.get_context("forkserver")  # which has imported what takes long, and touched no GPU
    context.set_forkserver_preload(["torch", "torch._inductor.config", "triton", "triton.language"])
    turn, answers = context.Value("i", 0), context.SimpleQueue()
    built: dict[tuple[str, str], str] = {}
    with tempfile.NamedTemporaryFile() as lock:
        workers: list[multiprocessing.Process] = []
        while time.monotonic() < until and len(built) < len(jobs):
            workers = [worker for worker in workers if worker.is_alive()]
            if not workers and turn.value >= len(jobs) and answers.empty():
                return dict.fromkeys(((row.name, name) for row, name in jobs), "it ended its process") | built
            while len(workers) < arguments.jobs and turn.value < len(jobs):
                workers.append(
                    context.Process(target=compile_some, args=(jobs, turn, answers, lock.name, arguments.device))
                )
                workers[-1].start()
            while not answers.empty():
                index, reason = answers.get()
                built[jobs[index][0].name, jobs[index][1]] = reason
            time.sleep(0.02)
        for worker in workers:
            worker.terminate()
            worker.join()
    return built


def compile_some(jobs: Sequence[Job], turn: Any, answers: Any, lock: str, device: str) -> None:
    """Call one contestant after the other, whichever is next. A process whose CUDA context broke ends itself."""
    autotune_alone(lock)
    logging.getLogger("torch._inductor").setLevel(logging.CRITICAL)  # of its choices some do not fit the chip
    with torch.inference_mode():
        while (index := next_turn(turn)) < len(jobs):
            row, name = jobs[index]
            torch._dynamo.reset()
            torch._inductor.config.compile_threads = 1  # what processes compiled, max-autotune compiles once more
            try:
                load = contestants(row, device, alternatives=True)[name]
                load()(**next(input_sets(row, device, 1)))
                synchronize(device)
                answers.put((index, ""))
            except Exception as error:  # a peer's crash is an outcome
                answers.put((index, first_line(error)))
                end_if_broken(device)


def next_turn(turn: Any) -> int:
    with turn.get_lock():
        turn.value += 1
        return turn.value - 1


def end_if_broken(device: str) -> None:
    """After an illegal access no call of this process succeeds any more."""
    try:
        synchronize(device)
    except RuntimeError:
        os._exit(1)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def autotune_alone(lock: str) -> None:
    """Let this process time Inductor's choices only while it holds the lock: others compile meanwhile, and time nothing."""
    benchmarker = type(benchmarking.benchmarker)
    timed = benchmarker.benchmark_gpu

    def alone(*arguments: Any, **options: Any) -> Any:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return timed(*arguments, **options)

    benchmarker.benchmark_gpu = alone


if __name__ == "__main__":
    raise SystemExit(script(main))
