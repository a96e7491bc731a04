"""Whose code does the work: where the threads of a stopped worker stand, on a CPU; which kernels ran, on a GPU.

What runs inside a worker can be patched by the candidate; where its threads stand when the judge stops them cannot. The
list of a GPU's kernels (CUPTI's) comes from inside, and corroborates only.
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

INTERVAL_S = 2e-3  # between samples
LEAST_SAMPLES = 6  # fewer say nothing
SETTLE_S = 2e-3  # how long a thread may take to come to its stop
# Where a kernel's launch, not its work, is done: the interpreter, the run-time libraries of C, C++ and OpenMP.
RUNTIME = ("python", "libpython", "libc.", "libm.", "libgomp", "libomp", "libiomp", "ld-linux", "libstdc++", "libgcc", "[")
RUNTIME += ("libtorch_python", "libc10", "libpthread", "_ctypes", "libffi")

# Device kernels of PyTorch, cuBLAS, cuDNN, cuSPARSE, CUB and Inductor, by name; and those that only move memory.
LIBRARY_KERNELS = re.compile(
    r"at::native|at_cuda_detail|cublas|nvjet|cutlass|(ampere|volta|turing|sm\d+)_(xmma|\w*gemm)|splitKreduce|gemvN|gemv2T|"
    r"cudnn|implicit_gemm|fmha|flash_fwd|pytorch_flash|cusparse|csrmm|cub::|thrust::|triton_(poi|red|per|tem|mm)_"
)
MEMORY_KERNELS = re.compile(r"^Mem(cpy|set)|at::native.*([Cc]opy|[Ff]ill)")
LIBRARY_SHARE = 0.05  # of the device's time


def sample(pid: int, running: Callable[[float], bool]) -> Counter[str]:
    """Where the threads of process `pid` compute, as files of its memory map, while `running(seconds)`, which waits.

    Threads that wait in the kernel are not counted. Linux only; needs the right to trace the process.
    """
    counters: Counter[int] = Counter()
    while running(INTERVAL_S):
        os.killpg(pid, signal.SIGSTOP)
        counters.update(filter(None, map(_program_counter, Path(f"/proc/{pid}/task").iterdir())))
        os.killpg(pid, signal.SIGCONT)
    files = Counter()
    regions = _executable_regions(pid)
    for address, count in counters.items():
        files[next((name for start, end, name in regions if start <= address < end), "unmapped memory")] += count
    return files


def _program_counter(task: Path) -> int | None:
    """Where a stopped thread stands; None if it is in a system call, or gone."""
    deadline = time.perf_counter() + SETTLE_S
    while time.perf_counter() < deadline:
        try:
            fields = (task / "syscall").read_text().split()
        except OSError:
            return None
        if fields[0] != "running":
            return int(fields[-1], 16) if fields[0] == "-1" else None
    return None


def _executable_regions(pid: int) -> list[tuple[int, int, str]]:
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if "x" in permissions:
            start, end = (int(a, 16) for a in addresses.split("-"))
            regions.append((start, end, name[0].strip() if name else "anonymous memory"))
    return regions


def foreign(files: Counter[str], own: Callable[[str], bool]) -> str | None:
    """Why this was not the kernel's own work: most of the samples fell neither on its code nor on run-time libraries."""
    work = Counter({f: n for f, n in files.items() if not Path(f).name.startswith(RUNTIME)})
    others = Counter({f: n for f, n in work.items() if not own(f)})
    if sum(others.values()) < LEAST_SAMPLES or 2 * sum(others.values()) < sum(work.values()):
        return None
    share = sum(others.values()) / sum(work.values())
    return f"{share:.0%} of its time is spent in {Path(others.most_common(1)[0][0]).name}, not in the kernel's own code"


def foreign_kernels(microseconds: Mapping[str, float]) -> str | None:
    """Why this was not the kernel's own work: device kernels of a library took more than a few percent of the time."""
    work = {name: us for name, us in microseconds.items() if not MEMORY_KERNELS.search(name)}
    library = {name: us for name, us in work.items() if LIBRARY_KERNELS.search(name)}
    share = sum(library.values()) / max(sum(work.values()), 1e-9)
    if share <= LIBRARY_SHARE:
        return None
    return f"{share:.0%} of its device time is spent in {max(library, key=library.get)[:60]}, not in the kernel's own code"
