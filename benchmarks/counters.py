"""What the GPU's own counters say of one case of a kernel, for us and for our peers: why a kernel misses its mark.

Usage:   python benchmarks/counters.py matmul M=1024,K=8192,N=1024 eager cuda
         python benchmarks/counters.py layernorm M=4096,N=2048 triton cuda compile --dtype bfloat16
Needs:   ncu (Nsight Compute) on the PATH, and a driver that lets this user read counters
Prints:  a line a kernel of one warm call, whose inputs are in no cache: time under ncu, launch, shares of the peaks of
         memory (dram), L2, shared memory (l1) and tensor cores, of warps at work; what warps wait for, in cycles an
         instruction

ncu replays the kernel for its many counters, and slows it: compare shares, take times from benchmarks/kernels.py.
"""

import argparse
import csv
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.common.console import fail
from autokernel.spec import kernel_types, load_spec
from benchmarks.contestants import Row, contestants, input_sets, sizes

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
    "Occupancy",
    "LaunchStats",
)
# What is printed of a kernel: ncu's name of the metric, and how many of its unit make ours.
LAUNCH = {
    "us": ("gpu__time_duration.sum", 1e3),
    "blocks": ("launch__grid_size", 1),
    "threads": ("launch__block_size", 1),
    "registers": ("launch__registers_per_thread", 1),
    "cluster": ("launch__cluster_size", 1),
    "shared_kb": ("launch__shared_mem_per_block", 1e3),
}
SHARES = {
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
WAIT, WAIT_END = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("kernel_type", choices=kernel_types())
    parser.add_argument("case", help="text in a case's name; the first that has it")
    parser.add_argument("who", nargs="+", help="eager, compile, liger, triton, cuda, ... as benchmarks/kernels.py has them")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="keep ncu's table, with all its metrics (CSV)")
    parser.add_argument("--measured", action="store_true", help=argparse.SUPPRESS)  # this process is the one under ncu
    arguments = parser.parse_args(argv)
    if arguments.measured:
        run(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        for who in arguments.who:
            path = arguments.raw or Path(folder, "counters.csv")
            asked = [arguments.kernel_type, arguments.case, who, "--dtype", arguments.dtype, "--measured"]
            path.write_text(measured([sys.executable, __file__, *asked]))
            for line in described(path.read_text()):
                print(f"{arguments.kernel_type} {arguments.case} {arguments.dtype}, {who}: {line}", flush=True)


def run(arguments: argparse.Namespace) -> None:
    """One call between the marks that ncu waits for."""
    spec, dtype = load_spec(arguments.kernel_type), getattr(torch, arguments.dtype)
    cases = [spec.case(dims, dtype) for dims in sizes(spec.name, "cuda")]
    row = next((Row(spec.name, case) for case in cases if arguments.case in case.name), None)
    if row is None:
        fail(f"no case of {spec.name} has {arguments.case} in its name: {', '.join(case.name for case in cases)}")
    everyone, (who,) = contestants(row, "cuda"), arguments.who
    if who not in everyone:
        fail(f"{who} is not among those who can run it: {', '.join(everyone)}")
    with torch.inference_mode():
        inputs, call = next(input_sets(row, "cuda", 1)), everyone[who]()
        for _ in range(3):
            call(**inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call(**inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def measured(command: Sequence[str]) -> str:
    """ncu's table of what `command` runs between its marks, as CSV."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", *sections]
    try:
        result = subprocess.run(["ncu", *options, *command], capture_output=True, text=True)
    except FileNotFoundError:
        fail("ncu is not on the PATH: it comes with the CUDA toolkit and with Nsight Compute")
    lines = result.stdout.splitlines()
    table = [line for line in lines if line.startswith('"')]
    if result.returncode or not table:
        fail("ncu gave no counters: " + "\n".join((result.stdout + result.stderr).splitlines()[-8:]))
    return "\n".join(table)


def described(table: str) -> Iterator[str]:
    """A line a kernel."""
    header, _, *kernels = csv.reader(io.StringIO(table))
    for values in kernels:
        row = dict(zip(header, values))
        launch = [f"{name} {_number(row[m]) / unit:.4g}" for name, (m, unit) in LAUNCH.items() if row.get(m)]
        shares = [f"{name} {_number(row[m]):.0f}%" for name, m in SHARES.items() if row.get(m)]
        waits = {
            name.removeprefix(WAIT).removesuffix(WAIT_END): _number(cycles)
            for name, cycles in row.items()
            if name.startswith(WAIT) and name.endswith(WAIT_END) and cycles
        }
        longest = [f"{name} {waits[name]:.1f}" for name in sorted(waits, key=waits.__getitem__, reverse=True)[:4]]
        kernel = row["Kernel Name"].split("(")[0].removeprefix("void ")[:60]
        yield f"{kernel}: {', '.join(launch)}; {', '.join(shares)}; waits: {', '.join(longest)}"


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    raise SystemExit(script(main))
