"""Where the gate's own time goes: seconds by phase, printed by `bench.py --timing`."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator


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
