"""What the machine does that is no kernel's doing: a full disk, a GPU that is lost or shared, sleep, a clock that was set.

Looked for around each experiment. The loop waits it out and judges again, or ends and says so; it is never a result.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autokernel import driver
from autokernel.gate.verdict import Correctness, Verdict

LOW_DISK_BYTES = 32 << 20
SLEPT_S = JUMPED_S = 2.0  # shorter ones are the clocks' own corrections
POLL_S = 0.02  # less than a run needs from one experiment to the next, so that all get their turn
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


class Watch:
    """Looks at the machine while an experiment is judged."""

    def __init__(self, device: str, folders: Iterable[Path], say: Callable[[str], None]) -> None:
        self.device, self.folders, self.say = device, list(folders), say
        self.before = Clocks.now()

    def fault(self, verdict: Verdict) -> str:
        """What the machine did to this verdict; empty if nothing. Raises MachineFault where the GPU is lost."""
        now = Clocks.now()
        if abs(jump := self.before.jumped_s(now)) > JUMPED_S:
            self.say(f"the clock was set by {jump:+.0f} s meanwhile; nothing is timed by it")
        if (slept := self.before.slept_s(now)) > SLEPT_S:
            return f"the machine slept for {slept:.0f} s"
        if verdict.correctness != Correctness.PASS:
            if lost := gpu_lost(self.device):
                raise MachineFault(lost)
            if full := low_disk(self.folders):
                return full
        if not verdict.decided:
            return verdict.why.removeprefix("not decided: ")
        return ""


def low_disk(folders: Iterable[Path]) -> str:
    """Which of the folders is on a disk that is all but full, in words; empty if none is."""
    for folder in folders:
        if folder.exists() and (free := shutil.disk_usage(folder).free) < LOW_DISK_BYTES:
            return f"the disk of {folder} is full ({free / 2**20:.0f} MiB left)"
    return ""


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
    pids = _numbers(device, "--query-compute-apps=pid")
    if os.getpid() not in pids:  # the driver's process ids are not those of our container, or we are not on it yet
        return ""
    others = [pid for pid in pids if os.getpgid(0) not in _ancestry(pid) and os.getpid() not in _ancestry(pid)]
    for _ in range(BUSY_SAMPLES if others else 0):
        if max(_numbers(device, "--query-gpu=utilization.gpu"), default=0) < BUSY_PERCENT:
            return ""
        time.sleep(SAMPLE_S)
    return f"{device} is used by other processes: {others}" if others else ""


def _numbers(device: str, query: str) -> list[int]:
    return [int(line) for line in driver.ask(device, query) if line.isdecimal()]


def _ancestry(pid: int) -> list[int]:
    """A process, its parent, and so on up, as far as they can be seen."""
    chain = []
    while pid > 1:
        chain.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return chain


@contextmanager
def turn(device: str, waiting: Callable[[str], None], stopping: Callable[[], object] = lambda: False) -> Iterator[None]:
    """Alone on the device among all runs on this machine: they take turns, one experiment each.

    Raises KeyboardInterrupt if `stopping` says so while it waits.
    """
    name = device if device == "cpu" else driver.gpu_id(device)
    path = Path(tempfile.gettempdir()) / f"autokernel-turn-{name}"
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o644))
    with open(path) as file:
        while not locks(file):
            if stopping():
                raise KeyboardInterrupt
            waiting(f"waiting for {device}: another run's experiment is on it")
            time.sleep(POLL_S)
        yield


def locks(file: IO[str]) -> bool:
    """Whether the file is ours alone from now on, until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
