"""The C++ kernels on this CPU: every starter through the gate, against PyTorch eager and torch.compile, in fp32.

Usage:   python benchmarks/cpu.py                     (the main starter of every type, about half a minute each)
         python benchmarks/cpu.py rmsnorm softmax     (these)
         python benchmarks/cpu.py --all               (their structural alternatives as well)
Reads:   kernels/<type>/cpp_*.py
Writes:  benchmarks/cpu.json (types that were not measured keep their record), and the tables in docs/measurements.md

Sizes are the first of the type's `timing` sizes. Outputs are allocated inside the timing; both sides run under the same
allocator settings: the gate's workers keep freed memory, so that no call pays for page faults.
"""

import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.common.console import fail, preflight, progress
from autokernel.common.records import write_json
from autokernel.common.table import print_table
from autokernel.gate import Judge, Verdict
from autokernel.spec import kernel_types, load_spec
from autokernel.target import Target, default_target, encode
from benchmarks import tables

RECORD = Path(__file__).with_suffix(".json")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"default: all of {', '.join(kernel_types())}")
    parser.add_argument("--all", action="store_true", help="the structural alternatives as well")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.types) - set(kernel_types()):
        fail(f"no kernel type {', '.join(sorted(unknown))}; there are: {', '.join(kernel_types())}")
    preflight("cpp")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    starters = [list(load_spec(name).starters("cpp").values()) for name in arguments.types or kernel_types()]
    files = [path for paths in starters for path in (paths if arguments.all else paths[:1])]
    with Judge("cpu") as judge, progress("measuring", len(files)) as step:
        for path in files:
            step(f"{path.parent.name}/{path.name}")
            verdict = judge.examine(path.read_text(), target_of(path), compile_baseline=True)
            if not verdict.decided:  # says nothing of the kernel: its record stays
                step(f"{path.parent.name}/{path.name}: {verdict.why}")
                continue
            record[f"{path.parent.name}/{path.stem}"] = entry(judge, path, verdict)
            write_json(RECORD, record)
    print_table("C++ kernels, fp32", tables.COLUMNS, [tables.row(name, entry) for name, entry in sorted(record.items())])
    tables.write()


def target_of(path: Path) -> Target:
    dtypes = load_spec(path.parent.name).dtypes
    return default_target(path.parent.name, "cpp", "cpu", torch.float32 if torch.float32 in dtypes else dtypes[0])


def entry(judge: Judge, path: Path, verdict: Verdict) -> dict[str, object]:
    kernel_type = path.parent.name
    return {
        "verdict": encode(verdict),
        "case": target_of(path).cases[0].case.name,
        "eager_form": load_spec(kernel_type).eager_form,
        "device": f"{judge.device.name}, {judge.device.units} threads",
        "torch": torch.__version__,
        "date": f"{date.today()}",
        "command": f"python benchmarks/cpu.py {kernel_type}",
    }


if __name__ == "__main__":
    raise SystemExit(script(main))
