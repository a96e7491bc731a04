"""Autotuning: many sources timed on a target in a few processes, to choose what is worth an experiment.

Nothing of it is believed. Sources share processes and the caches of compilers, and of each only a part of one output is
held against the oracle; no verdict comes of it. What wins is proposed to the gate as any other edit.

First all are compiled, in several processes at once. Then they are timed in one, case after case, each of which has its
share of the time; those that are clearly behind come last in the cases that follow, where they may be the fastest. At last
the best few are timed against each other as the gate times a pair.
"""

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import Expectation, TypeFault, expectations, most_bytes
from autokernel.gate.checks.inputs import Pool
from autokernel.gate.timing.batches import Batches, TimedContents
from autokernel.gate.timing.faults import BaselineFault, RefusedWhileTimed
from autokernel.gate.timing.pairs import PairTimer, Side
from autokernel.gate.workers.processes import WorkerFault, WorkerProcess
from autokernel.spec import Case

COMPILE_S = 60.0  # of one source, its first calls included
COMPILED, TIMED = (
    0.5,
    0.75,
)  # shares of all the time at which no source more is compiled, and none timed; finals have the rest
BATCH_S = {"cpu": 5e-3, "cuda": 3e-3}  # of the first source, whose number of calls serves all
MOST_CALLS, HELD_BYTES = 256, 2 << 30  # of a batch, whose outputs are held
BEHIND = 1.3  # times the best one's seconds, with which a source is clearly behind
FINALISTS, FINALS = 4, 3  # that are timed against each other unless one is clearly ahead, in so many sets of processes
PART_ELEMENTS = 1 << 16  # of an output that are held against the oracle: whole rows


@dataclass(frozen=True)
class Looked:
    """What autotuning saw of a source: seconds of the target's calls in one pass of the model, or why there are none.

    by_case: seconds of one call of each case; inf where there was no time for it, and `seconds` has an estimate.
    """

    source: str
    seconds: float = math.inf
    reason: str = ""
    by_case: tuple[float, ...] = ()


@dataclass(frozen=True)
class Part:
    """What a part of a result must be: all of it, or whole rows from element `start` on."""

    expected: Expectation
    result: int
    start: int | None = None

    def wrong(self, batch: Batches) -> str | None:
        rows = self.expected.native
        if self.start is None:
            ((output, _),) = batch.fetch([0], self.result)
        else:
            output = batch.fetch_part([0], [self.start, rows.numel()], self.result).view(rows.shape)
        return wrong(output, self.expected)


class Autotuner:
    """Times sources on a timer's target; `processes` compile at once; `progress` is told how many of how many they have."""

    def __init__(self, timer: PairTimer, processes: int, progress: Callable[[int, int], None]):
        self.timer, self.setting, self.processes, self.progress = timer, timer.setting, processes, progress
        self.place = f"autotune {secrets.token_hex(8)}"  # whose caches its processes share, and no verdict's
        self.refused: dict[str, str] = {}  # source -> why
        self.lock = threading.Lock()

    def run(self, sources: Iterable[str], seconds: float, is_compiled: bool = False, finals: bool = True) -> list[Looked]:
        """The sources, the fastest first; those that `seconds` did not suffice for are missing.

        The first of them is the one to beat: it is timed against the best whatever it takes. is_compiled: all of them have
        been, for this target. finals: see _finals().
        """
        started, sources = time.monotonic(), list(dict.fromkeys(sources))
        if self.setting.kind != "cpu":  # where sources are compiled at run time
            self.setting.parent.gather_caches(self.place, sources)
        compiled = sources if is_compiled else self._compile(sources, started + COMPILED * seconds)
        timed = self._time(compiled, started + TIMED * seconds)
        taken = self._finals(timed, sources[0], started + seconds) if finals else timed
        looked = [Looked(source, s, by_case=tuple(taken[source])) for source, s in self._totals(taken).items()]
        looked += [Looked(source, reason=reason) for source, reason in self.refused.items()]
        return sorted(looked, key=lambda one: one.seconds)

    def _compile(self, sources: Sequence[str], deadline: float) -> list[str]:
        """Those that load and compute the target's cases, as far as the deadline allows; at least the first is tried."""
        left = iter(sources)
        made: set[str] = set()

        def work() -> None:
            with contextlib.ExitStack() as stack:
                worker = None
                while True:
                    with self.lock:
                        source = next(left, None) if time.monotonic() < deadline or not made else None
                    if source is None:
                        return
                    worker = worker or self._worker(stack)
                    try:
                        self._load(worker, source)
                        worker.request("warm", COMPILE_S, cases=self.timer.encoded_cases())
                    except WorkerFault as fault:
                        self._refuse(source, fault)
                        worker = None
                    with self.lock:
                        made.update({source} - self.refused.keys())
                        self.progress(len(made) + len(self.refused), len(sources))

        with ThreadPoolExecutor(self.processes) as pool:
            try:
                for worked in [pool.submit(work) for _ in range(min(self.processes, len(sources)))]:
                    worked.result()
            finally:  # the pool waits for what was begun: where a signal ends this, nothing more is
                with self.lock:
                    left = iter(())
        return [source for source in sources if source in made]

    def _time(self, sources: Sequence[str], deadline: float) -> dict[str, list[float]]:
        """Seconds of a call in each case, by source; inf where the deadline came first."""
        cases, first = self.setting.target.cases, sources[:1]
        taken: dict[str, list[float]] = {source: [] for source in sources}
        for number, weighted in enumerate(cases if taken else ()):
            now = time.monotonic()
            totals = self._totals(taken)
            order = sorted(taken, key=lambda source: ([source] != first, totals[source]))
            near = [source for source in order if totals[source] <= BEHIND * min(totals.values())] if number else []
            sure = dict.fromkeys([order[0], *near])
            with contextlib.ExitStack() as stack:
                share = now + (deadline - now) / (len(cases) - number)
                seen = self._case(stack, weighted.case, list(sure | dict.fromkeys(order)), share, len(sure))
            for source, seconds in taken.items():
                seconds.append(seen[source])
            taken = {s: seconds for s, seconds in taken.items() if seconds[0] < math.inf and s not in self.refused}
            if not taken:
                break
        return taken

    def _totals(self, taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Seconds of the target's calls in the cases so far; where one was not timed, as if it stayed as far behind."""
        calls = [weighted.calls for weighted in self.setting.target.cases]
        best = [n * min(seconds) for n, seconds in zip(calls, zip(*taken.values()))]

        def behind(seconds: Sequence[float]) -> float:
            timed = [(n * s, b) for n, s, b in zip(calls, seconds, best) if s < math.inf]
            return sum(own for own, _ in timed) / sum(b for _, b in timed) if timed else 1.0

        return {source: behind(seconds) * sum(best) for source, seconds in taken.items()}

    def _case(
        self, stack: contextlib.ExitStack, case: Case, sources: Sequence[str], deadline: float, sure: int
    ) -> dict[str, float]:
        """Seconds of a call, by source; inf where the deadline came first, which the first `sure` do not heed."""
        contents = TimedContents(self.setting, case, Pool(self.setting.random.getrandbits(48)))
        output_bytes = most_bytes(self.setting.spec, case)
        most = max(2, min(MOST_CALLS, HELD_BYTES // max(1, output_bytes)))
        seconds = dict.fromkeys(sources, math.inf)
        worker, order, part = None, [0, 1], None
        for number, source in enumerate([sources[0], *sources]):  # the first once more: in a new process it looks slow
            if number > sure and time.monotonic() > deadline:
                break
            if worker is None:
                worker = self._worker(stack)
                contents.hand_out({"autotune": worker})
                worker.resume()  # on a CPU workers are stopped between their turns, and this one has no opponent
                part = part or self._part(contents)
            try:
                self._load(worker, source)
                batch = Batches(worker, False, output_bytes, self.setting.spec.result_count)
                if self.setting.kind == "cpu":
                    batch.prepare([0], graph=False)
                    batch.time()
                    worker.pin()
                while True:
                    batch.prepare(order, self.setting.kind == "cuda")
                    batch_s = batch.settled_s(BATCH_S[self.setting.kind])
                    if number or batch_s >= BATCH_S[self.setting.kind] or len(order) == most:
                        break
                    wanted = math.ceil(len(order) * min(max(1.2 * BATCH_S[self.setting.kind] / batch_s, 1.5), 16))
                    order = [i % contents.count for i in range(min(wanted, most))]
                if part and (reason := part.wrong(batch)):
                    self.refused[source] = reason
                else:
                    seconds[source] = batch_s / len(order)
                batch.prepare([], graph=False)
            except WorkerFault as fault:
                self._refuse(source, fault)
                worker = None
        return seconds

    def _part(self, contents: TimedContents) -> Part | None:
        """What is expected of a part of one of the first call's results; None where that cannot be said."""
        try:
            results = expectations(self.setting.spec, contents.inputs(0), self.setting.target.device)
            which = self.setting.random.randrange(len(results))
            expected = results[which]
            native: Tensor = expected.native
        except (torch.OutOfMemoryError, TypeFault):
            return None
        if native.numel() <= PART_ELEMENTS:
            return Part(expected, which)
        columns = native.shape[-1]
        rows = max(1, PART_ELEMENTS // columns)
        start = self.setting.random.randint(0, native.numel() // columns - rows)
        return Part(expected.rows(start, rows), which, start * columns)

    def _finals(self, taken: dict[str, list[float]], first: str, deadline: float) -> dict[str, list[float]]:
        """The seconds, of the best few and of the `first` by what they take in processes of their own, in turns.

        As many of FINALS sets of processes as begin before the deadline, one at least.
        """
        totals = self._totals(taken)
        ahead = min(totals, key=totals.get, default=first)
        if all(totals[source] > BEHIND * totals[ahead] for source in totals.keys() - {ahead}):
            return taken
        best = sorted(taken, key=lambda source: (source != first, totals[source]))[:FINALISTS]
        sides = [Side(str(number), source) for number, source in enumerate(best)]
        finals: dict[str, list[tuple[float, ...]]] = {source: [] for source in best}
        try:
            for number in range(FINALS):
                if number and time.monotonic() > deadline:
                    break
                self.timer.prepare(sides, "0", FINALS)
                pair = self.timer.pair(sides, "0")
                for side in sides if pair.seconds else ():
                    finals[side.source].append(pair.seconds[side.name])
        except (WorkerFault, BaselineFault, RefusedWhileTimed):
            return taken
        if not all(finals.values()):
            return taken
        means = {source: [sum(case) / len(case) for case in zip(*seconds)] for source, seconds in finals.items()}
        for number in range(len(self.setting.target.cases)):
            both = [source for source in best if taken[source][number] < math.inf]
            pace = sum(taken[s][number] for s in both) / sum(means[s][number] for s in both) if both else 1.0
            for source in best:
                means[source][number] *= pace
        return taken | means

    def _worker(self, stack: contextlib.ExitStack) -> WorkerProcess:
        return stack.enter_context(WorkerProcess(self.setting.parent, self.setting.threads, self.place))

    def _load(self, worker: WorkerProcess, source: str) -> None:
        results = self.setting.spec.result_count
        worker.request("load", COMPILE_S, source=source, poison=False, libraries="any", results=results)

    def _refuse(self, source: str, fault: WorkerFault) -> None:
        self.refused[source] = fault.reason
        fault.worker.kill()
