"""The machine's own faults: a full disk, a GPU that is lost or shared with others, sleep, a clock that was set."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autokernel.hardware import nvml

LOW_DISK_BYTES = 32 << 20
POLL_S = 0.02  # less than a run needs from one experiment to the next, so that all get their turn
CPU_TIMING = "cpu-timing"  # a turn at timing, for those that have a turn on some cores
BUSY_PERCENT, BUSY_SAMPLES, SAMPLE_S = 10, 3, 0.5  # of the GPU, while nothing of ours runs


class MachineFault(RuntimeError):
    """This process cannot go on, but another one may, later. The message says why."""


@dataclass(frozen=True)
class Clocks:
    """An instant on three clocks: one that can be set, one that stands while the machine sleeps, one that does not."""

    wall_s: float
    awake_s: float
    boot_s: float

    @staticmethod
    def now() -> "Clocks":
        wall_s = time.time()
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else wall_s
        return Clocks(wall_s, time.monotonic(), boot_s)

    def slept_s(self, later: "Clocks") -> float:
        return (later.boot_s - self.boot_s) - (later.awake_s - self.awake_s)

    def jumped_s(self, later: "Clocks") -> float:
        """How far the clock on the wall was set; nothing here is timed by it."""
        return (later.wall_s - self.wall_s) - (later.boot_s - self.boot_s)


def low_disk(folders: Iterable[Path]) -> str:
    """Which of the folders is on a disk that is all but full, in words; empty if none is."""
    for folder in folders:
        if folder.exists() and (free := shutil.disk_usage(folder).free) < LOW_DISK_BYTES:
            return f"the disk of {folder} is full ({free / 2**20:.0f} MiB left)"
    return ""


@contextmanager
def full_disk_told(folders: Sequence[Path]) -> Iterator[None]:
    """Whatever fails in it while one of the folders' disks is full, is that disk's doing: raises MachineFault."""
    try:
        yield
    except Exception as error:
        if full := low_disk(folders):
            raise MachineFault(full) from error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # what was written is removed by now, and left space
            raise MachineFault(f"the disk of {error.filename or 'what was written'} was full") from error
        raise


def usable_cores() -> set[int]:
    """The CPU's cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def free_memory() -> int:
    """Bytes that processes can still take, of the machine's memory and of what this container may use."""
    import psutil  # here, because this module is read before it is checked what is installed

    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines()).get("inactive_file", 0)
    except (OSError, ValueError):  # no such files; "max": no limit
        return free
    return min(free, limit - used + int(cached))


def gpu_lost(device: str) -> str:
    """Why this process can no longer use its GPU, in words; empty if it can."""
    if not device.startswith("cuda"):
        return ""
    import torch  # here, because the supervisor reads this module and must stay small

    try:
        torch.ones(8, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch without GPUs
        return f"{device} does not answer any more: {str(error).splitlines()[0]}"
    return ""


def gpu_shared(device: str) -> str:
    """Who else computes on the GPU while nothing of ours does, in words; empty if nobody, or if it cannot be told."""
    pids = nvml.compute_pids(device)
    if os.getpid() not in pids:  # the driver's process ids are not those of our container, or we are not on it yet
        return ""
    others = [pid for pid in pids if os.getpgid(0) not in _ancestry(pid) and os.getpid() not in _ancestry(pid)]
    for _ in range(BUSY_SAMPLES if others else 0):
        if nvml.utilization_percent(device) < BUSY_PERCENT:
            return ""
        time.sleep(SAMPLE_S)
    return f"{device} is used by other processes: {others}" if others else ""


def _ancestry(pid: int) -> list[int]:
    """A process, its parent, and so on up, as far as they can be seen."""
    import psutil  # here, because this module is read before it is checked what is installed

    try:
        parents = [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:  # of another namespace, or gone
        parents = []
    return [number for number in (pid, *parents) if number > 1]


@contextmanager
def turn(
    device: str,
    waiting: Callable[[str], None],
    stopping: Callable[[], object] = lambda: False,
    cores: Collection[int] = (),
) -> Iterator[None]:
    """Alone on the device among all runs on this machine: they take turns, one experiment each.

    `cores`: all of the CPU that is needed; who needs other cores of it does not wait, who needs the whole CPU does.
    `waiting` is called once, where it is not free. Raises KeyboardInterrupt if `stopping` says so while it waits.
    """
    name = device if device in ("cpu", CPU_TIMING) else nvml.gpu_id(device)
    wanted = {name: fcntl.LOCK_SH if cores else fcntl.LOCK_EX}
    wanted |= {f"{name}-{core}": fcntl.LOCK_EX for core in sorted(cores)}
    with ExitStack() as opened:
        files = [(opened.enter_context(_lock_file(name)), kind) for name, kind in wanted.items()]
        if not _lock_all(files):
            waiting(f"waiting for {device}: another run's experiment is on it")
            while not _lock_all(files):
                if stopping():
                    raise KeyboardInterrupt
                time.sleep(POLL_S)
        yield


def _lock_file(name: str) -> IO[str]:
    path = Path(tempfile.gettempdir()) / f"autokernel-turn-{name}"
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o644))
    return open(path)


def _lock_all(files: Sequence[tuple[IO[str], int]]) -> bool:
    """All of them or none: who waits for one must not keep others waiting for the rest."""
    for number, (file, kind) in enumerate(files):
        if not locks(file, kind):
            for taken, _ in files[:number]:
                fcntl.flock(taken, fcntl.LOCK_UN)
            return False
    return True


def locks(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """Whether the file is ours from now on, until it is closed: alone, or with LOCK_SH together with others."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
