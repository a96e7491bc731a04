"""What the gate's own time is on this machine: a judge until it is ready, five stages, a loser, an identical kernel.

Usage:   python benchmarks/gate_speed.py               the nine types' starters: Triton on a GPU, C++ on a CPU
         python benchmarks/gate_speed.py rmsnorm softmax:cuda matmul:cuda
         python benchmarks/gate_speed.py --json seconds.json
         python benchmarks/gate_speed.py --starts 7 [--against CLONE]     how soon bench.py is ready, in fresh processes

For each kernel, in one judge, at the type's first timing size:
  first      five stages of a source that this judge has never seen (compilers' own caches in ~/.cache may know it)
  again      five stages of the same source: nothing new is compiled
  changed    five stages with another value of a knob, or a comment: compiled anew
  identical  a whole verdict on the source against itself, until it is decided (not kept, or the gate is wrong)
  broken     a whole verdict on a source whose smoke test fails
With --starts, seconds from the start of `python bench.py` on the first kernel: until its judge is ready, until the first
stage begins (a kernel is loaded), and of `bench.py --help`; another clone in turns with this one.
Prints seconds, the pairs that "identical" took, where its time went, and medians over the kernels.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.agents.knobs import read_knobs, set_knob
from autokernel.gate import Judge
from autokernel.spec import ROOT, load_spec
from autokernel.target import default_target

TYPES = ["matmul", "softmax", "layernorm", "rmsnorm", "flash_attention", "fused_mlp", "cross_entropy", "rotary_embedding"]
TYPES += ["reduce"]
COLUMNS = ("first", "again", "changed", "identical", "broken")
STARTS = ("ready", "first stage", "help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=TYPES, metavar="TYPE[:BACKEND]")
    parser.add_argument("--json", type=Path, help="write what was measured there, too")
    parser.add_argument("--starts", type=int, metavar="N", help="only how soon bench.py is ready, N times")
    parser.add_argument("--against", type=Path, metavar="CLONE", help="--starts: of this one as well, in turns")
    args = parser.parse_args()
    device, backend = ("cuda", "triton") if torch.cuda.is_available() else ("cpu", "cpp")
    if args.starts:
        kernel_type, _, own = args.kernels[0].partition(":")
        measure_starts([*filter(None, (args.against, ROOT))], f"kernels/{kernel_type}/{own or backend}_kernel.py", args)
        return
    started = time.perf_counter()
    with Judge(device) as judge:
        ready_s = time.perf_counter() - started
        print(f"{judge.device.name}, torch {torch.__version__}: judge ready after {ready_s:.1f} s", flush=True)
        measured = {}
        for name in args.kernels:
            kernel_type, _, own = name.partition(":")
            measured[name] = measure(judge, kernel_type, own or backend, device)
            print(row(name, measured[name]), flush=True)
    medians = {column: median(m[column] for m in measured.values()) for column in COLUMNS}
    print(row("median", medians))
    if args.json:
        record = {"device": judge.device.name, "torch": torch.__version__, "ready": ready_s}
        args.json.write_text(json.dumps(record | {"kernels": measured, "median": medians}, indent=1) + "\n")


def measure_starts(clones: list[Path], kernel: str, args: argparse.Namespace) -> None:
    """Print medians over fresh processes, the clones in turns; the first of each is not counted."""
    measured: dict[Path, list[dict[str, float]]] = {clone: [] for clone in clones}
    for _ in range(args.starts + 1):
        for clone in clones:
            measured[clone].append(start(clone, kernel))
    record = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0], "clones": {}}
    for clone, (_, *starts) in measured.items():
        seconds = {column: sorted(one[column] for one in starts) for column in STARTS}
        described = subprocess.run(["git", "-C", clone, "describe", "--always", "--dirty"], capture_output=True, text=True)
        record["clones"][described.stdout.strip()] = seconds
        told = (f"{column} {median(s):.2f} [{s[0]:.2f}, {s[-1]:.2f}]" for column, s in seconds.items())
        print(f"{described.stdout.strip()}, {len(starts)} starts, torch {torch.__version__}: {', '.join(told)} s")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def start(clone: Path, kernel: str) -> dict[str, float]:
    """Seconds of STARTS, of one process each."""
    command, environment = [sys.executable, "bench.py"], os.environ | {"PYTHONPATH": str(clone.resolve())}
    began, seconds = time.perf_counter(), {}
    options = {"cwd": clone, "env": environment, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, kernel, "--quick"], stderr=subprocess.PIPE, **options) as process:
        for column, line in (("ready", kernel), ("first stage", "smoke_test")):
            said = process.stderr.readline().strip()
            assert said == line, said
            seconds[column] = time.perf_counter() - began
        process.terminate()
        process.communicate()
    began = time.perf_counter()
    subprocess.run([*command, "--help"], check=True, **options)
    return seconds | {"help": time.perf_counter() - began}


def measure(judge: Judge, kernel_type: str, backend: str, device: str) -> dict[str, Any]:
    """Seconds of each column; `pairs`, `why` and `phases` of "identical"."""
    spec, dtype = load_spec(kernel_type), torch.float32 if device == "cpu" else torch.float16
    target = default_target(kernel_type, backend, device, dtype)
    source = spec.starters(backend)[f"{backend}_kernel"].read_text()
    seconds: dict[str, Any] = {}
    for column, candidate in (("first", source), ("again", source), ("changed", another(source))):
        verdict = judge.check(candidate, target)
        seconds[column] = verdict.bench_time_seconds
        assert verdict.correctness == "PASS" or column == "changed", verdict.failure
    verdict = judge.examine(source, target, incumbent=source)
    assert not verdict.keep, verdict.why
    seconds |= {"identical": verdict.bench_time_seconds, "why": verdict.why, "phases": verdict.phase_seconds}
    broken = f'KERNEL_TYPE = "{kernel_type}"\nBACKEND = "{backend}"\ndef kernel_fn(*args, **options):\n    return args[0]\n'
    verdict = judge.examine(broken, target, incumbent=source)
    return seconds | {"broken": verdict.bench_time_seconds}


def another(source: str) -> str:
    """The source with one knob at another value; with none, a comment more."""
    knobs = read_knobs(source)
    for name, values in knobs.choices.items():
        for value in values:
            if value != knobs.current[name]:
                return set_knob(source, name, value)
    return source + "# changed\n"


def row(name: str, seconds: dict[str, Any]) -> str:
    text = f"{name:24}" + "".join(f"  {column} {seconds[column]:5.1f}" for column in COLUMNS)
    if "why" in seconds:
        phases = sorted(seconds["phases"].items(), key=lambda item: -item[1])
        text += f"\n    {seconds['why']}\n    " + ", ".join(f"{phase} {took:.1f}" for phase, took in phases)
    return text


if __name__ == "__main__":
    main()
