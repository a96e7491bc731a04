"""Whose code does the work: where the threads of a stopped worker stand, on a CPU; which kernels ran, on a GPU.

What runs inside a worker can be patched by the candidate; where its threads stand when the judge stops them cannot. The
list of a GPU's kernels (CUPTI's) comes from inside, and corroborates only.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from autokernel.gate.timing.symbols import symbols_at
from autokernel.gate.workers.sandbox import readable_paths

INTERVAL_S = 2e-3  # between samples at most: a batch may be over sooner
SAMPLES = 24  # of work, taken if there is time; half as many say nothing
# Of the samples, above which a kernel does not do the work itself. One that copies its input first can spend three quarters
# of its time in that (measured: rmsnorm in place on a copy). In a library's code that computes an honest
# kernel has no business at all: three of 24 samples there are no accident.
OTHERS_SHARE, COMPUTING_SHARE = 0.85, 0.1
SPARE_THREADS = 2  # of a worker that compute beside its kernel for a moment: the interpreter, PyTorch's pool as it ends
SETTLE_S, YIELD_S = 50e-3, 50e-6  # how long a thread may take to come to its stop, for which it needs a core
# Where a kernel's launch, not its work, is done: the interpreter, the run-time libraries of C, C++ and OpenMP.
RUNTIME = ("python", "libpython", "libc.", "libm.", "libgomp", "libomp", "libiomp", "ld-linux", "libstdc++", "libgcc")
RUNTIME += ("libtorch_python", "libc10", "libpthread", "_ctypes", "libffi")
TORCH = "libtorch_cpu.so"  # which moves a kernel's memory, and holds MKL, oneDNN and PyTorch's own loops
# Functions of it that compute, by mangled names: the libraries', and the loops of operators but for those that move.
COMPUTES = re.compile(
    r"^_?mkl_|^MKL|^v[sd][A-Z]|[sdcz]gem[mv]|cblas|dnnl|fbgemm|xnn_|nnp_|kleidi|[Ss]leef|8cpublas|"
    r"^(?!.*([Cc]opy|[Ff]ill|_cat|[Cc]at_|arange|[Uu]nfold)).*(cpu_kernel|[Vv]ectorized_?[Ll]oop|_kernel_impl|3vec\d)"
)
KERNEL_PAGES = ("[vdso]", "[vsyscall]")  # other names in brackets are memory that a process may fill with code

# Device kernels of PyTorch, cuBLAS, cuDNN, cuSPARSE, CUB and Inductor, by name; and those that only move memory.
LIBRARY_KERNELS = re.compile(
    r"at::native|at_cuda_detail|cublas|nvjet|cutlass|(ampere|volta|turing|sm\d+)_(xmma|\w*gemm)|splitKreduce|gemvN|gemv2T|"
    r"cudnn|implicit_gemm|fmha|flash_fwd|pytorch_flash|cusparse|csrmm|cub::|thrust::|triton_(poi|red|per|tem|mm)_"
)
MEMORY_KERNELS = re.compile(r"^Mem(cpy|set)|at::native.*([Cc]opy|[Ff]ill)")
LIBRARY_SHARE = 0.05  # of the device's time


class Seen:
    """Where the threads of a worker were seen computing, by file of its memory map. Linux only.

    A thread weighs as much as the CPU time that it had while nothing was sampled: threads that are runnable, but leave the
    cores to others, say little of where the work is done. (To be stopped and continued gives them more than they had.)
    """

    def __init__(self) -> None:
        self.cpu_ns: Counter[str] = Counter()  # by thread
        self.places: dict[str, Counter[str]] = defaultdict(Counter)  # by thread: samples, by file

    @contextlib.contextmanager
    def weighing(self, pid: int) -> Iterator[None]:
        """What the threads of process `pid` do meanwhile is what they weigh."""
        before = _cpu_ns(pid)
        yield
        self.cpu_ns.update({name: spent - before.get(name, 0) for name, spent in _cpu_ns(pid).items()})

    def sample(self, pid: int, running: Callable[[float], bool]) -> None:
        """Look at the threads of process `pid`, stopped for a moment, while `running(seconds)`, which waits.

        Threads that wait in the kernel are not counted. Needs the right to trace the process.
        """
        seen: Counter[tuple[str, int]] = Counter()
        while running(random.uniform(0, INTERVAL_S)):
            os.killpg(pid, signal.SIGSTOP)
            places = {task.name: _program_counter(task) for task in Path(f"/proc/{pid}/task").iterdir()}
            os.killpg(pid, signal.SIGCONT)
            seen.update((name, place) for name, place in places.items() if place is not None)
        regions = _executable_regions(pid)
        for (name, address), count in seen.items():
            region = next((r for r in regions if r.start <= address < r.end), Region(0, 0, 0, "unmapped memory"))
            if not _is_runtime(region.file):
                self.places[name][_place(region, address)] += count

    @property
    def samples(self) -> int:
        return sum(files.total() for files in self.places.values())

    def enough(self) -> bool:
        """Whether more samples would tell nothing new: there are many, and some of each thread that works."""
        busy = [name for name, spent in self.cpu_ns.items() if 10 * spent > self.cpu_ns.total()]
        return self.samples >= SAMPLES and all(self.places[name].total() for name in busy)

    def shares(self) -> dict[str, float]:
        """The share of the work in each file, of the threads that were seen."""
        shares: dict[str, float] = defaultdict(float)
        weights = {name: self.cpu_ns[name] if self.cpu_ns.total() else 1 for name, files in self.places.items() if files}
        for name, weight in weights.items():
            for file, count in self.places[name].items():
                shares[file] += weight / max(sum(weights.values()), 1) * count / self.places[name].total()
        return shares

    def foreign(self, own: Container[str]) -> str | None:
        """Why this was not the kernel's own work: nearly all of it fell neither on its code, the files `own`, nor on
        run-time libraries."""
        others = {file: share for file, share in self.shares().items() if file not in own}
        computing = {file: share for file, share in others.items() if not _moves(file)}
        for seen, most in ((others, OTHERS_SHARE), (computing, COMPUTING_SHARE)):
            if self.samples > SAMPLES // 2 and (share := sum(seen.values())) >= most:
                file = _printable(Path(max(seen, key=seen.get)).name)
                return f"{share:.0%} of its time is spent in {file}, not in the kernel's own code"
        return None

    def crowd(self, threads: int) -> str | None:
        """Why more threads than all sides were given did the work: those that got a quarter of the busiest one's time."""
        busy = sum(4 * spent > max(self.cpu_ns.values()) > 0 for spent in self.cpu_ns.values())
        if busy <= threads + SPARE_THREADS:
            return None
        return f"{busy} of its threads are at work, where {threads} are what all sides have"


@cache
def _is_runtime(file: str) -> bool:
    """By its name, and because it lies where no worker can write: a library can be copied to any name."""
    if file in KERNEL_PAGES:
        return True
    return Path(file).name.startswith(RUNTIME) and _lies_unwritable(file)


@cache
def _lies_unwritable(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _unwritable())


@cache
def _unwritable() -> list[str]:
    return [os.path.realpath(path) for path in readable_paths()]


def _printable(name: str) -> str:
    """A name that a kernel may have chosen, for people."""
    return "".join(c if c.isprintable() else "?" for c in name)[:60]


def _cpu_ns(pid: int) -> dict[str, int]:
    """CPU time of each thread, by its number (proc_pid_schedstat(5)); nothing of those of which that is not told."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent[task.name] = int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return spent


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


class Region(NamedTuple):
    """Where code lies, which byte of the file comes first, and which file."""

    start: int
    end: int
    offset: int
    file: str


def _executable_regions(pid: int) -> list[Region]:
    """All code of a process (proc_pid_smaps(5)); pages of a file that the process has changed are not of it.
    These are not told where there is no smaps; nothing is told of a process that is gone."""
    regions: list[Region] = []
    is_code, tables = False, (Path(f"/proc/{pid}/{name}") for name in ("smaps", "maps"))
    table = next((path for path in tables if path.exists()), None)
    for line in table.read_text().splitlines() if table else ():
        first, *fields = line.split(maxsplit=5)
        if not first.endswith(":"):
            is_code = "x" in fields[0]
            if is_code:
                start, end = (int(a, 16) for a in first.split("-"))
                file = fields[4].strip() if len(fields) > 4 else "anonymous memory"
                regions.append(Region(start, end, int(fields[1], 16), file))
        elif is_code and first == "Anonymous:" and int(fields[0]) and regions[-1].file.startswith("/"):
            regions[-1] = regions[-1]._replace(file=f"code that was written over {Path(regions[-1].file).name}")
    return regions


def _place(region: Region, address: int) -> str:
    """The file, and of PyTorch's the function, too, if it computes."""
    if not _is_torch(region.file):
        return region.file
    (symbol,) = symbols_at(Path(region.file), [address - region.start + region.offset])
    return f"{region.file}: {symbol}" if COMPUTES.search(symbol) else region.file


def _is_torch(file: str) -> bool:
    return Path(file).name == TORCH and _lies_unwritable(file)


def _moves(file: str) -> bool:
    """Whether it computes nothing: PyTorch's file where it moves memory, and Python's own modules."""
    return _is_torch(file) or Path(file).parent.name == "lib-dynload" and _lies_unwritable(file)


def foreign_kernels(microseconds: Mapping[str, float]) -> str | None:
    """Why this was not the kernel's own work: device kernels of a library took more than a few percent of the time."""
    work = {name: us for name, us in microseconds.items() if not MEMORY_KERNELS.search(name)}
    library = {name: us for name, us in work.items() if LIBRARY_KERNELS.search(name)}
    share = sum(library.values()) / max(sum(work.values()), 1e-9)
    if share <= LIBRARY_SHARE:
        return None
    name = _printable(max(library, key=library.get))
    return f"{share:.0%} of its device time is spent in {name}, not in the kernel's own code"
