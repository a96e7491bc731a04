"""Workers whose answers take no time: a fleet's pool on a simulated clock, for ray_simulation.py, kills.py and tests."""

import heapq
import math
from collections.abc import Callable, Sequence

from autokernel.common.verdict import Verdict
from autokernel.run.fleet import Answer, Event, Joined, Lost, Task

RESTART_S = 30.0  # until another worker has taken the place of a lost one

Outcome = tuple[float, Verdict | None]  # how long it takes, and None where the worker is lost with it


class SimulatedPool:
    """autokernel.run.fleet.Pool on a clock that jumps from one event to the next."""

    def __init__(self, workers: int, judge: Callable[[str, Task], Outcome], restart_s: float = RESTART_S) -> None:
        """judge: of a worker's name and its task; one that takes for ever never answers."""
        self.judge, self.restart_s = judge, restart_s
        self.clock_s = self.busy_s = 0.0
        self.coming: list[tuple[float, int, Event]] = []
        self.events_made = self.names = 0
        for _ in range(workers):
            self._start(0.0)

    def _start(self, after_s: float) -> None:
        self.names += 1
        self._add(after_s, Joined(f"w{self.names}", "simulated", "simulated"))

    def _add(self, after_s: float, event: Event) -> None:
        self.events_made += 1
        heapq.heappush(self.coming, (self.clock_s + after_s, self.events_made, event))

    def now(self) -> float:
        return self.clock_s

    def submit(self, worker: str, task: Task) -> None:
        seconds, verdict = self.judge(worker, task)
        if seconds < math.inf:
            self.busy_s += seconds
            self._add(seconds, Answer(worker, task.lease, verdict) if verdict else Lost(worker, "killed"))

    def replace(self, worker: str) -> None:
        self._start(self.restart_s)

    def events(self, timeout_s: float) -> Sequence[Event]:
        """All of the next moment at which something happens, if it is near enough."""
        until = self.clock_s + timeout_s
        if not self.coming or self.coming[0][0] > until:
            self.clock_s = until
            return []
        self.clock_s = max(self.clock_s, self.coming[0][0])  # the driver may have been busy beyond it
        events = []
        while self.coming and self.coming[0][0] <= self.clock_s:
            events.append(heapq.heappop(self.coming)[2])
        for _ in (event for event in events if isinstance(event, Lost)):
            self._start(self.restart_s)
        return events
