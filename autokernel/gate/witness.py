"""Whose code does the work: where the threads of a stopped worker stand, on a CPU; which kernels ran, on a GPU.

What runs inside a worker can be patched by the candidate; where its threads stand when the judge stops them cannot. The
list of a GPU's kernels (CUPTI's) comes from inside, and corroborates only.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from pathlib import Path

INTERVAL_S = 2e-3  # between samples at most: a batch may be over sooner
SAMPLES = 24  # of work, taken if there is time; half as many say nothing
# Of the samples, above which a kernel does not do the work itself. One that copies its input first can spend three quarters
# of its time in that (measured: rmsnorm in place on a copy).
OTHERS_SHARE = 0.85
SETTLE_S, YIELD_S = 2e-3, 50e-6  # how long a thread may take to come to its stop, for which it may need this core
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


class Seen:
    """Where the threads of a worker were seen computing: samples by file of its memory map. Linux only."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()

    def sample(self, pid: int, running: Callable[[float], bool]) -> None:
        """Look at the threads of process `pid`, stopped for a moment, while `running(seconds)`, which waits.

        Threads that wait in the kernel are not counted. Needs the right to trace the process.
        """
        counters: Counter[int] = Counter()
        while running(random.uniform(0, INTERVAL_S)):
            os.killpg(pid, signal.SIGSTOP)
            counters.update(filter(None, map(_program_counter, Path(f"/proc/{pid}/task").iterdir())))
            os.killpg(pid, signal.SIGCONT)
        regions = _executable_regions(pid)
        for address, count in counters.items():
            file = next((name for start, end, name in regions if start <= address < end), "unmapped memory")
            if not Path(file).name.startswith(RUNTIME):
                self.files[file] += count

    def enough(self) -> bool:
        """Whether more samples would tell nothing new."""
        return self.files.total() >= SAMPLES

    def foreign(self, own: Container[str]) -> str | None:
        """Why this was not the kernel's own work: nearly all samples fell neither on its code, the files `own`, nor on
        run-time libraries."""
        others = Counter({file: count for file, count in self.files.items() if file not in own})
        if self.files.total() <= SAMPLES // 2 or others.total() < OTHERS_SHARE * self.files.total():
            return None
        share, (file, _) = others.total() / self.files.total(), others.most_common(1)[0]
        return f"{share:.0%} of its time is spent in {Path(file).name}, not in the kernel's own code"


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
        time.sleep(YIELD_S)
    return None


def _executable_regions(pid: int) -> list[tuple[int, int, str]]:
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if "x" in permissions:
            start, end = (int(a, 16) for a in addresses.split("-"))
            regions.append((start, end, name[0].strip() if name else "anonymous memory"))
    return regions


def foreign_kernels(microseconds: Mapping[str, float]) -> str | None:
    """Why this was not the kernel's own work: device kernels of a library took more than a few percent of the time."""
    work = {name: us for name, us in microseconds.items() if not MEMORY_KERNELS.search(name)}
    library = {name: us for name, us in work.items() if LIBRARY_KERNELS.search(name)}
    share = sum(library.values()) / max(sum(work.values()), 1e-9)
    if share <= LIBRARY_SHARE:
        return None
    return f"{share:.0%} of its device time is spent in {max(library, key=library.get)[:60]}, not in the kernel's own code"
