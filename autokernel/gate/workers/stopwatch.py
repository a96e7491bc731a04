"""Where the gate's own time goes: seconds by phase, printed by `bench.py --timing`, and how much of it may."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

MOST = 8.0  # times its seconds, after which an allowance ends on the busiest machine, too


class Allowance:
    """So many seconds of this thread's work. Where others have the cores it takes longer, and as much is done in it."""

    def __init__(self, seconds: float):
        self.worked_s, self.passed_s = time.thread_time() + seconds, time.perf_counter() + MOST * seconds

    def is_spent(self) -> bool:
        return time.thread_time() > self.worked_s or time.perf_counter() > self.passed_s


class Stopwatch:
    """Adds up seconds by phase. Phases of parallel workers add up too, to more than passes on the wall."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started
