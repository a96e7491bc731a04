"""What else the machine was doing while a pair was timed: other processes' load, clocks that drift or are throttled."""

import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from autokernel.hardware import nvml
from autokernel.hardware.machine import usable_cores

# Of the cores' time, taken by others: pairs with more are not wanted, and with more yet they are worth nothing.
OTHER_LOAD, MOST_LOAD = 0.25, 0.6
DRIFT = 0.25  # every side's time in the second half of its rounds against the first: pairs with more are not wanted
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
# nvmlClocksEventReasons: hardware slowdown, software and hardware thermal slowdown, power brake. Not the software power
# cap: large matmuls run into it on a healthy H100.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80


class OtherLoad:
    """The share of the cores' time that went to other processes, or to other machines on this host, while it watched.

    Sees nothing where there is no /proc (macOS): then it reports 0.
    """

    def __init__(self, pids: Iterable[int]):
        """pids: the workers, whose time is ours, as this process's is."""
        self.pids = list(pids)
        self.spent_s = self.watched_s = 0.0

    def __enter__(self) -> "OtherLoad":
        self._before = time.perf_counter(), _busy_s(), self._own_s()
        return self

    def __exit__(self, *exc: object) -> None:
        started, busy_s, own_s = self._before
        self.watched_s += time.perf_counter() - started
        self.spent_s += (_busy_s() - busy_s) - (self._own_s() - own_s)

    @property
    def share(self) -> float:
        return max(0.0, self.spent_s / (self.watched_s * len(usable_cores()))) if self.watched_s else 0.0

    def _own_s(self) -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system + sum(map(_process_s, self.pids))


def _busy_s() -> float:
    """Seconds that our cores have been busy, or taken away by the hypervisor (proc_stat(5))."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ours = {f"cpu{n}" for n in usable_cores()}
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks * TICK_S


def _process_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S


def drift(samples: Iterable[Sequence[float]]) -> float:
    """How far all sides went the same way between the first and the second half of their rounds, in log.

    A clock that changes takes all of them along; one side alone has its own reasons (its allocator warms up, say).
    """
    ways = [math.log(median(s[len(s) // 2 :]) / median(s[: len(s) // 2])) for s in samples if len(s) >= 6]
    return min(map(abs, ways)) if ways and (min(ways) > 0 or max(ways) < 0) else 0.0


def throttled(device: str) -> str | None:
    """Why the GPU does not run at its full clocks, as its driver says; None if it does, or if none can be asked."""
    reasons = nvml.clock_event_reasons(device)
    return f"the GPU is throttled (clock event reasons {reasons:#x})" if reasons & THROTTLED else None
