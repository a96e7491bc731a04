"""Time kernels side by side: the judge's clock around batches of calls, interleaved, in fresh pairs of processes.

A side is one kernel under comparison (candidate, incumbent, the eager baseline, torch.compile). One *pair* is one fresh
process for each side; in it every case is timed in rounds, forwards and backwards (A B B A), on the same fresh inputs,
rotated so that no call finds its data in a cache. What counts is the judge's wall clock from sending "go" to the answer,
less that of an empty batch.
"""

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from autokernel.gate.channel import POISON, Placed, place
from autokernel.gate.correctness import expect, wrong
from autokernel.gate.inputs import Pool, fill_timed
from autokernel.gate.processes import WarmParent, WorkerFault, WorkerProcess
from autokernel.spec import Case, KernelSpec
from autokernel.target import Target, WeightedCase

BATCH_S = {"cpu": 5e-3, "cuda": 8e-3}  # a batch is at least this long: the round trip to a worker is 0.1 ms
ROUNDS = 5  # ABBA rounds per case and pair, fewer where one takes longer than CASE_S
CASE_S = 0.15
MAX_SETS = 32
HELD_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}  # outputs of one batch, all held so that any of them can be asked for
ROTATE_BYTES = {"cpu": 96 << 20, "cuda": 160 << 20}  # more than twice the last-level cache of current parts
CHECK_SHARE = 0.3  # of the later pairs' cases in which a timed output is checked: an expectation can cost a second
START_S, CALL_S = 60.0, 60.0


@dataclass(frozen=True)
class Side:
    """One kernel to be timed: a source, or (source empty) the eager form, plain or through torch.compile."""

    name: str
    source: str = ""
    compiled: bool = False

    def load(self, kernel_type: str, libraries: str) -> dict[str, Any]:
        """The message that makes a worker ready to run this side."""
        if self.source:
            return {"op": "load", "source": self.source, "poison": False, "libraries": libraries}
        return {"op": "load_eager", "kernel_type": kernel_type, "compiled": self.compiled}


@dataclass(frozen=True)
class PairResult:
    """Seconds per call by side, one entry per case of the target."""

    seconds: dict[str, tuple[float, ...]]

    def total(self, side: str, cases: Sequence[WeightedCase]) -> float:
        """Seconds that one pass of the model spends in the target's cases."""
        return sum(s * c.calls for s, c in zip(self.seconds[side], cases))

    def log_ratio(self, slow: str, fast: str, cases: Sequence[WeightedCase]) -> float:
        return math.log(self.total(slow, cases) / self.total(fast, cases))

    def case_log_ratio(self, slow: str, fast: str, index: int) -> float:
        return math.log(self.seconds[slow][index] / self.seconds[fast][index])


class BystanderFault(RuntimeError):
    """A baseline or an incumbent failed while it was timed beside the candidate."""


class WrongTimedOutput(Exception):
    """A call that was timed returned a wrong result."""

    def __init__(self, case: str, seed: int, reason: str):
        super().__init__(reason)
        self.case, self.seed, self.reason = case, seed, reason


class PairTimer:
    """Times pairs of processes on one target."""

    def __init__(self, parent: WarmParent, spec: KernelSpec, target: Target, threads: int, seed: int, libraries: str):
        """`libraries`: what a kernel may call, see Worker.do_load."""
        self.libraries = libraries
        self.parent, self.spec, self.target, self.threads = parent, spec, target, threads
        self.kind = "cuda" if target.device.startswith("cuda") else "cpu"
        self.random = random.Random(seed)
        self.seed = seed
        self.peak_bytes = 0
        self.checked = False  # whether an output of every case has been checked

    def pair(self, sides: Sequence[Side], check: str) -> PairResult:
        """One fresh process per side, all cases; outputs of timed calls of side `check` are held against the oracle.

        Raises WorkerFault if its process dies or hangs, WrongTimedOutput if a timed call of it was wrong, BystanderFault
        if another side's process died or hung, for which it is not to blame.
        """
        seed = self.random.getrandbits(48)
        pool = Pool(seed)
        with contextlib.ExitStack() as stack:
            workers = {}
            for side in self.random.sample(sides, len(sides)):
                workers[side.name] = stack.enter_context(WorkerProcess(self.parent, self.threads, side.source))
            stack.enter_context(_blame(workers[check]))
            loads = {side.name: side.load(self.spec.name, self.libraries) for side in sides}
            self._each(workers, loads)
            seconds: dict[str, list[float]] = {side.name: [] for side in sides}
            for weighted in self.target.cases:
                measured = self._case(workers, weighted, pool, seed, check)
                for name, value in measured.items():
                    seconds[name].append(value)
            self.checked = True
            self.peak_bytes = max(self.peak_bytes, workers[check].request("memory", CALL_S)["peak_bytes"])
        return PairResult({name: tuple(values) for name, values in seconds.items()})

    def _case(
        self, workers: dict[str, WorkerProcess], weighted: WeightedCase, pool: Pool, seed: int, check: str
    ) -> dict[str, float]:
        case = weighted.case
        set_bytes = sum(t.nbytes for t in case.tensors.values())
        sets = max(2, min(MAX_SETS, -(-ROTATE_BYTES[self.kind] // max(set_bytes, 1))))
        messages = self._fill(weighted, sets, pool)
        with self._alone(workers):
            self._each(workers, dict.fromkeys(workers, {"op": "sets", "sets": messages}))
            # Warm up: compile, load, start threads, fault memory in.
            self._each(workers, dict.fromkeys(workers, {"op": "prepare", "order": [0, 1], "graph": False}))
            self._each(workers, dict.fromkeys(workers, {"op": "batch", "repeats": 1}))
            batches = {name: _Batches(worker, self.kind == "cpu") for name, worker in workers.items()}
            length, repeats = self._batch_length(batches, case)
            order = [self.random.randrange(sets) for _ in range(length)]
            for batch in batches.values():
                batch.prepare(order, graph=self.kind == "cuda")
            if not all(batch.graph for batch in batches.values()) and any(batch.graph for batch in batches.values()):
                for batch in batches.values():  # alike on all sides: calls that one of them cannot capture are not captured
                    batch.prepare(order, graph=False)
            samples: dict[str, list[float]] = {name: [] for name in batches}
            rounds = 0
            started = time.perf_counter()
            while rounds < ROUNDS and (rounds < 1 or time.perf_counter() - started < CASE_S):
                forwards = self.random.sample(sorted(batches), len(batches))
                for name in (*forwards, *reversed(forwards)):
                    samples[name].append(batches[name].time(repeats) / (repeats * length))
                rounds += 1
            if not self.checked or self.random.random() < CHECK_SHARE:  # the first pair's always
                self._check(batches[check], case, messages, order, seed)
        return {name: median(values) for name, values in samples.items()}

    def _fill(self, weighted: WeightedCase, sets: int, pool: Pool) -> list[dict]:
        """Write `sets` fresh input sets into the shared arena."""
        memory, start, messages = self.parent.inputs.bytes, 0, []
        args = weighted.case.args
        for _ in range(sets):
            placed, end = place(weighted.case.tensors, start)
            memory[start:end] = POISON
            fill_timed(self.spec, args, {name: where.view(memory) for name, where in placed.items()}, pool)
            messages.append({name: placed[name].encode() if name in placed else value for name, value in args.items()})
            start = end
        return messages

    def _batch_length(self, batches: dict[str, "_Batches"], case: Case) -> tuple[int, int]:
        """Calls per batch, the same for all sides, so that the fastest side's batch is long enough for the clock."""
        fastest = math.inf
        for batch in batches.values():
            batch.prepare([0, 1], graph=False)
            fastest = min(fastest, batch.time(1) / 2)
        wanted = max(1, math.ceil(BATCH_S[self.kind] / max(fastest, 1e-6)))
        output_bytes = max(1, sum(t.nbytes for t in case.tensors.values()))  # an output is rarely larger than its inputs
        length = max(1, min(wanted, 1024, HELD_BYTES[self.kind] // output_bytes))
        return length, max(1, math.ceil(wanted / length))

    def _check(self, batch: "_Batches", case: Case, messages: list[dict], order: list[int], seed: int) -> None:
        """Fetch the output of one timed call, which one the worker cannot know, and hold it against the oracle."""
        call = self.random.randrange(len(order))
        ((y, _),) = batch.fetch(call)
        placed, _ = place(case.tensors, 0)
        memory = self.parent.inputs.bytes
        inputs = {
            name: Placed.decode(value).view(memory) if name in placed else value
            for name, value in messages[order[call]].items()
        }
        reason = wrong(y, expect(self.spec, inputs, self.target.device))
        if reason:
            raise WrongTimedOutput(case.name, seed, f"the output of a timed call: {reason}")

    def _each(self, workers: dict[str, WorkerProcess], messages: dict[str, dict[str, Any]]) -> None:
        """Send every worker its message and await the answers; on a CPU one after another, for they share its cores."""
        if self.kind == "cpu":
            for name, worker in workers.items():
                with _running(worker):
                    worker.request(timeout_s=START_S, **messages[name])
            return
        for name, worker in workers.items():
            worker.post(**messages[name])
        for worker in workers.values():
            worker.answer(START_S)

    @contextlib.contextmanager
    def _alone(self, workers: dict[str, WorkerProcess]) -> Iterator[None]:
        """On a CPU, suspend every worker: each runs only while it is its turn. On a GPU an idle one disturbs nobody."""
        if self.kind == "cpu":
            for worker in workers.values():
                worker.stop()
        yield
        if self.kind == "cpu":
            for worker in workers.values():
                worker.resume()


@contextlib.contextmanager
def _blame(candidate: WorkerProcess) -> Iterator[None]:
    """Tell the candidate's faults from those of the others."""
    try:
        yield
    except WorkerFault as fault:
        if fault.worker is candidate:
            raise
        raise BystanderFault(f"{fault.reason}\n{fault.detail}") from fault


@contextlib.contextmanager
def _running(worker: WorkerProcess, stops: bool = True) -> Iterator[None]:
    if stops:
        worker.resume()
    yield
    if stops:
        worker.stop()


def _timed(worker: WorkerProcess, repeats: int) -> float:
    start = time.perf_counter()
    worker.request("batch", CALL_S, repeats=repeats)
    return time.perf_counter() - start


class _Batches:
    """One side while it is timed; `stops`: the worker is suspended between its turns."""

    def __init__(self, worker: WorkerProcess, stops: bool):
        self.worker, self.stops, self.graph = worker, stops, False
        with _running(worker, stops):
            worker.request("prepare", CALL_S, order=[], graph=False)
            self.overhead_s = median(_timed(worker, 1) for _ in range(7))  # what the clock reads for a batch of no calls

    def prepare(self, order: list[int], graph: bool) -> None:
        with _running(self.worker, self.stops):
            self.graph = self.worker.request("prepare", CALL_S, order=order, graph=graph)["graph"]

    def time(self, repeats: int) -> float:
        with _running(self.worker, self.stops):
            self.worker.request("drop", CALL_S)
            return max(_timed(self.worker, repeats) - self.overhead_s, 1e-7)

    def fetch(self, call: int) -> list[tuple[Tensor, tuple[int, ...]]]:
        with _running(self.worker, self.stops):
            return self.worker.fetch(self.worker.request("fetch", CALL_S, call=call)["outputs"])
