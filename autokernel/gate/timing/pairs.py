"""Time kernels side by side: the judge's clock around batches of calls, interleaved, in fresh pairs of processes.

A side is one kernel under comparison (candidate, incumbent, the eager baseline, torch.compile). One *pair* is one fresh
process for each side; in it every case is timed in rounds, forwards and backwards (A B B A), on fresh inputs, rotated so
that no call finds its data in a cache. What counts is the judge's wall clock from sending "go" to the answer, less what
an empty batch takes, which is the same for all sides.

A worker is stopped but for its batches. What it is to compute on does not exist before the clock starts, and its outputs
are read from its memory as they are when the clock has stopped: on a GPU, which goes on when a process is stopped, before.
So nothing can be done earlier or left for later.

The path of a source: contest.py decides how many pairs, this file times a pair, batches.py a batch, and audit.py looks at
what is done beside the clock.
"""

import contextlib
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from autokernel.gate.checks.expectations import most_bytes
from autokernel.gate.checks.inputs import Pool
from autokernel.gate.timing import audit, witness
from autokernel.gate.timing.batches import (
    CALL_S,
    Batches,
    Clocked,
    Setting,
    TimedContents,
    per_call,
    running,
    same_overhead,
)
from autokernel.gate.timing.disturbance import DRIFT, MOST_LOAD, OTHER_LOAD, OtherLoad, drift
from autokernel.gate.timing.faults import BaselineFault, Inconclusive, RefusedWhileTimed
from autokernel.gate.workers.channel import encoded_arguments
from autokernel.gate.workers.processes import WorkerFault, WorkerProcess, end_all
from autokernel.spec import Case, KernelSpec
from autokernel.target import WeightedCase

BATCH_S = {"cpu": 5e-3, "cuda": 8e-3}  # a batch is at least this long: the round trip to a worker is 0.1 ms
LEAST_CALLS = {"cpu": 1, "cuda": 2}  # of a batch
SINGLE_CALL = 4  # multiples of BATCH_S that the only call of a batch takes at least
ROUNDS = 6  # ABBA rounds per case and pair, fewer where they take longer than CASE_S
CASE_S = 0.2
WARM_COPIES = 8  # of what one call moves, that a first call takes of a GPU's memory
MAX_PREPARED = max(1, min(8, (os.cpu_count() or 1) // 2))  # pairs whose processes are started at once
CHECK_SHARE = 0.5  # of the later pairs' cases that are checked and audited: an expectation can cost a second
AUDIT_LOAD = 0.1  # of the cores' time: with more taken by others, an audit proves nothing against a kernel
STRIKES, STRIKE_SHARE = 5, 0.25  # audits that went against a kernel, and of all its audits, with which it is refused
MEAN_SHARE = 0.8  # of a side's mean that its time is at least, whatever the median: some slow batches are part of the cost


@dataclass(frozen=True)
class Side:
    """One kernel to be timed: a source, or (source empty) the eager form, plain or through torch.compile."""

    name: str
    source: str = ""
    compiled: bool = False

    def load(self, spec: KernelSpec, libraries: str) -> dict[str, Any]:
        """The message that makes a worker ready to run this side."""
        if self.source:
            results = spec.result_count
            return {"op": "load", "source": self.source, "poison": False, "libraries": libraries, "results": results}
        return {"op": "load_eager", "kernel_type": spec.name, "compiled": self.compiled}


@dataclass(frozen=True)
class PairResult:
    """Seconds per call by side, one entry per case of the target."""

    seconds: dict[str, tuple[float, ...]]
    rotated_bytes: tuple[int, ...] = ()  # per case: of all the input sets through which the calls rotate
    disturbance: str = ""  # why this pair should not count
    struck: bool = False  # an audit went against the candidate, whose times are not below its opponent's here

    def total(self, side: str, cases: Sequence[WeightedCase]) -> float:
        """Seconds that one pass of the model spends in the target's cases."""
        return sum(s * c.calls for s, c in zip(self.seconds[side], cases))

    def log_ratio(self, slow: str, fast: str, cases: Sequence[WeightedCase]) -> float:
        return math.log(self.total(slow, cases) / self.total(fast, cases))

    def case_log_ratio(self, slow: str, fast: str, index: int) -> float:
        return math.log(self.seconds[slow][index] / self.seconds[fast][index])


class PairTimer:
    """Times pairs of processes on one target."""

    def __init__(self, setting: Setting, seed: int):
        self.setting, self.seed, self.random = setting, seed, setting.random
        self.target, self.kind, self.watch = setting.target, setting.kind, setting.watch
        self.peak_bytes = 0
        self.memory_share = 0.0  # of the device's, the largest seen
        self.launch_us: dict[str, float] = {}  # by case, on a GPU: what the host takes for a call
        self.calls: dict[str, int] = {}  # by case: of a batch that was long enough for the clock in the last pair
        self.discarded = 0  # pairs that were disturbed
        self.checked = False  # whether an output of every case has been checked, and nothing is in doubt
        self.excused = False  # whether it has been measured again because it ran while it was suspended
        self.audits = self.strikes = 0  # of the side under judgement, and those that went against it
        # Of this pair, until it is known whether others are at work on the GPU; and what else an audit has against it.
        self.doubts: list[tuple[audit.WentOn, str]] = []
        self.pool = ThreadPoolExecutor(MAX_PREPARED)
        self.prepared: list[Future[dict[str, WorkerProcess]]] = []

    def __enter__(self) -> "PairTimer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        for future in self.prepared:
            if not future.cancelled() and not future.exception():
                end_all(future.result().values())

    def prepare(self, sides: Sequence[Side], check: str, pairs: int) -> None:
        """Start the processes of the next pairs all at once: on a GPU each takes a second, and 16 cores take it together.

        They are started once none is left, not one by one: a pair waits until all that start have started. The pairs that
        follow must be of these sides. On a CPU processes start in no time, and would take it from others.
        """
        if self.kind == "cuda" and not self.prepared:
            count = min(pairs, MAX_PREPARED)
            self.prepared = [self.pool.submit(self._start_workers, sides, check) for _ in range(count)]

    def pair(self, sides: Sequence[Side], check: str) -> PairResult:
        """One fresh process per side, all cases; outputs of timed calls of side `check` are held against the oracle.

        Raises WorkerFault if its process dies or hangs, RefusedWhileTimed if a timed call of it was wrong or went on after
        the clock had stopped, BaselineFault if another side's process died or hung, for which it is not to blame.
        """
        seed = self.random.getrandbits(48)
        pool = Pool(seed)
        with contextlib.ExitStack() as stack:
            with self.watch("processes"):
                wait(self.prepared)  # or their start would disturb this pair
                workers = self.prepared.pop(0).result() if self.prepared else self._start_workers(sides, check)
            stack.callback(end_all, workers.values())
            stack.enter_context(_blame(workers[check]))
            seconds: dict[str, list[float]] = {side.name: [] for side in sides}
            pids = [worker.pid for worker in workers.values()]
            rotated, drifts, load, load_of_pair = [], [], OtherLoad(pids), OtherLoad(pids)
            opponent = next((side.name for side in sides if side.name != check), check)
            is_struck, self.doubts = False, []
            try:
                with load_of_pair, self._alone(workers):
                    for weighted in self.target.cases:
                        contents = TimedContents(self.setting, weighted.case, pool)
                        with contextlib.ExitStack() as mapped:
                            samples, struck = self._case(workers, weighted.case, contents, seed, check, load, mapped)
                        taken = {name: seconds_of(times) for name, times in samples.items()}
                        if struck:
                            taken[check] = max(taken[check], taken[opponent])
                        is_struck |= struck
                        for name, value in taken.items():
                            seconds[name].append(value)
                        drifts.append(drift(samples.values()))
                        rotated.append(contents.nbytes)
                self._note_memory(workers[check])
            except Inconclusive as reason:
                self.checked = False  # from now on every pair is audited, until one is clean
                self._settle(workers, seed)
                return PairResult({}, disturbance=str(reason))
            except WorkerFault as fault:  # its worker lives, or its time would be others'
                if not self._is_excused(fault, workers[check], load_of_pair):
                    raise
                self.checked = False
                return PairResult({}, disturbance=f"{fault.reason}, with other processes at work")
            others, struck_in = self._settle(workers, seed)
        found = next((found for _, found in self.doubts if found), None)
        if others and found and not is_struck:
            self.checked = False
            return PairResult({}, disturbance=f"{found}, with another process at work on the GPU")
        for i, weighted in enumerate(self.target.cases):
            if weighted.case in struck_in:
                is_struck, seconds[check][i] = True, max(seconds[check][i], seconds[opponent][i])
        disturbance = ""
        if others:
            disturbance = "another process is at work on the GPU"
        elif self.kind == "cpu" and load.share > OTHER_LOAD:
            disturbance = f"other processes took {load.share:.0%} of the cores' time"
            if load.share > MOST_LOAD and not is_struck:
                return PairResult({}, disturbance=disturbance)
        elif max(drifts) > DRIFT:
            disturbance = f"all sides' times drifted by {math.expm1(max(drifts)):.0%}"
        self.checked = not is_struck and (self.checked or not disturbance)
        # A struck pair counts whatever disturbed it: else a kernel would choose which of its pairs do.
        times = {name: tuple(values) for name, values in seconds.items()}
        return PairResult(times, tuple(rotated), disturbance, is_struck)

    def _start_workers(self, sides: Sequence[Side], check: str) -> dict[str, WorkerProcess]:
        """A process for each side, its kernel loaded."""
        workers: dict[str, WorkerProcess] = {}
        try:
            for side in random.sample(sides, len(sides)):
                workers[side.name] = WorkerProcess(self.setting.parent, self.setting.threads, side.source, side.compiled)
            with _blame(workers[check]):
                self.setting.each(
                    workers, {side.name: side.load(self.setting.spec, self.setting.libraries) for side in sides}
                )
                if self.kind == "cuda":
                    moved = max(self.setting.spec.bytes_moved(weighted.case.args) for weighted in self.target.cases)
                    with self.setting.memory.take(WARM_COPIES * len(workers) * moved):
                        self.setting.each(workers, dict.fromkeys(workers, {"op": "warm", "cases": self.encoded_cases()}))
        except BaseException:
            end_all(workers.values())
            raise
        return workers

    def encoded_cases(self) -> list[dict[str, Any]]:
        """The arguments of every case, without contents."""
        return [encoded_arguments(weighted.case.args) for weighted in self.target.cases]

    def _note_memory(self, worker: WorkerProcess) -> None:
        self.peak_bytes = max(self.peak_bytes, worker.request("memory", CALL_S).peak_bytes)
        if self.kind == "cuda":
            total = torch.cuda.get_device_properties(self.target.device).total_memory
            self.memory_share = max(self.memory_share, self.peak_bytes / total)

    def _case(
        self,
        workers: dict[str, WorkerProcess],
        case: Case,
        contents: TimedContents,
        seed: int,
        check: str,
        load: OtherLoad,
        stack: contextlib.ExitStack,
    ) -> tuple[dict[str, list[float]], bool]:
        """Seconds per call by side, one sample for each batch; and whether an audit went against side `check`. What is
        mapped for it `stack` unmaps."""
        with self.watch("inputs"):
            contents.hand_out(workers)
        with self.watch("warm-up"):  # compile, load, start threads, fault memory in
            first = list(range(LEAST_CALLS[self.kind]))
            self.setting.each(workers, dict.fromkeys(workers, {"op": "prepare", "order": first, "graph": False}))
            self.setting.each(workers, dict.fromkeys(workers, {"op": "batch", "repeats": 1}))
            if self.kind == "cpu":
                for worker in workers.values():
                    worker.pin()
            most = most_bytes(self.setting.spec, case)
            results = self.setting.spec.result_count
            batches = {name: Batches(worker, True, most, results) for name, worker in workers.items()}
            same_overhead(batches.values())
            order, round_s = self._order(
                batches, contents, self._most_calls(case), self.calls.get(case.name, LEAST_CALLS[self.kind])
            )
            self.calls[case.name] = len(order)
            contents.used, length = order, len(order)
            if self.kind == "cuda" and not self.checked:
                self.launch_us[case.name] = batches[check].launch_us(order)
            for batch in batches.values() if self.setting.maps else ():
                stack.callback(batch.unmap)
                batch.map(contents, self.target.device)
                contents.renew(workers)
                contents.write(batch)
        if self.setting.maps and (reason := audit.shared_outputs(batches[check])):
            raise RefusedWhileTimed(case.name, seed, reason)
        frozen = self.setting.maps or self.kind == "cpu" and workers[check].memory_fd is not None
        readings = {
            name: audit.Readings(self.setting, case, seed, batch.layouts(), keeps=name == check)
            for name, batch in batches.items()
            if frozen and (self.setting.maps or name == check)
        }
        clocked: dict[str, list[Clocked]] = {name: [] for name in batches}
        untimed: dict[str, list[float]] = defaultdict(list)
        is_audited = not self.checked or self.random.random() < CHECK_SHARE
        rounds = max(1, min(ROUNDS, round(CASE_S / round_s)))
        looked_at, went_on = self.random.randint(1, 2 * rounds), None  # after which of its batches the GPU should be idle
        with load:
            for _ in range(rounds):
                for name, batch in self._round(workers, batches, contents, untimed, readings, order):
                    clocked[name].append(batch)
                    if self.kind == "cpu" and name in readings:  # after each: one that is read seldom could be told by it
                        readings[name].read(batches[name], contents, order)
                    elif is_audited and name == check:
                        if len(clocked[check]) == 2 * rounds:  # before contents change
                            outputs = audit.fetch(self.setting, batches[check], case, contents, order, seed)
                        if self.kind == "cuda" and len(clocked[check]) == looked_at and self.setting.probe.busy():
                            went_on = audit.goes_on(self.setting, batches, check, case, seed)
        samples = per_call(clocked, length)
        if check in readings:
            readings[check].check_spots()
        if not is_audited:
            return samples, False
        if check in readings:
            readings[check].check()
        late, pids = None, [worker.pid for worker in workers.values()]
        with self.watch("audit"), OtherLoad(pids) as other_load:
            if self.kind == "cuda" or not readings:
                least = {name: min(times) for name, times in samples.items()}
                late = audit.late_work(self.setting, workers, batches, contents, check, least, outputs)
            foreign = audit.foreign_work(self.setting, batches[check], contents)
        is_quiet = other_load.share <= AUDIT_LOAD
        if late and not is_quiet:
            raise Inconclusive(late)
        soon = audit.done_too_soon(clocked, check) if self.setting.maps else None
        beside = is_quiet and (audit.slow_when_idle(batches, check) or audit.busy_between(untimed, samples, check))
        found = late or soon or foreign or beside or None
        if went_on and went_on.perhaps_others:
            self.doubts.append((went_on, found or ""))
            return samples, False
        return samples, self._is_struck(went_on.reason if went_on else found, is_quiet, case, seed)

    def _is_excused(self, fault: WorkerFault, worker: WorkerProcess, load: OtherLoad) -> bool:
        """Whether a kernel that ran while it was suspended is given another pair: once, with others at work, where a
        thread may be late. Such a pair has no times, so that nothing can be gained by it."""
        if not fault.suspended or fault.worker is not worker or self.excused or load.share <= AUDIT_LOAD:
            return False
        self.excused = True
        return True

    def _settle(self, workers: dict[str, WorkerProcess], seed: int) -> tuple[bool, list[Case]]:
        """Where the GPU was at work in the turn of others, at the end of the pair: whether other programs are, once no
        worker lives; if none is, the cases in which it counts against the kernel. Raises RefusedWhileTimed as
        _is_struck() does, and where it recurred."""
        if not self.doubts:
            return False, []
        started = [future.result() for future in self.prepared]
        end_all(worker for sides in (workers, *started) for worker in sides.values())
        self.prepared = []
        if self.setting.probe.others_at_work():
            return True, []
        for doubt, _ in self.doubts:
            if doubt.recurs:
                raise RefusedWhileTimed(doubt.case.name, seed, doubt.reason)
            self._is_struck(doubt.reason, True, doubt.case, seed)
        return False, [doubt.case for doubt, _ in self.doubts]

    def _is_struck(self, reason: str | None, is_quiet: bool, case: Case, seed: int) -> bool:
        """Whether an audit went against the kernel. Raises RefusedWhileTimed where too many did on a quiet machine."""
        self.audits += 1
        self.strikes += bool(reason) and is_quiet
        if reason and is_quiet and self.strikes >= max(STRIKES, STRIKE_SHARE * self.audits):
            raise RefusedWhileTimed(case.name, seed, reason)
        return reason is not None

    def _round(
        self,
        workers: dict[str, WorkerProcess],
        batches: dict[str, Batches],
        contents: TimedContents,
        untimed: dict[str, list[float]],
        readings: dict[str, audit.Readings],
        order: list[int],
    ) -> Iterator[tuple[str, Clocked]]:
        """A batch of calls of every side, on new contents, forwards and backwards; seconds per call of those that do not
        count go to `untimed`.

        On a CPU a side first runs a batch on the old contents, which wakes its threads and touches its memory. Then the
        judge writes new ones, in the order of the calls, so that those read first have left the cache when they are read.
        From then on the worker runs in the timed batch only. So it is on a GPU whose memory is mapped.
        """
        forwards = self.random.sample(sorted(batches), len(batches))
        for names in (forwards, forwards[::-1]):
            if self.kind == "cuda" and not self.setting.maps:
                with self.watch("inputs"):
                    contents.renew(workers)
                with self.watch("batches"):
                    batches[names[-1]].drop()
                    batches[names[-1]].time()  # drives what was just written out of the cache
            for name in names:
                batches[name].drop()
                if self.setting.maps:
                    with self.watch("batches"):
                        contents.renew(workers)
                        clocked = readings[name].time(batches[name], contents, order)
                    yield name, clocked
                    continue
                if self.kind == "cpu":
                    with self.watch("batches"):
                        untimed[name].append(batches[name].time() / len(order))
                        batches[name].drop()
                    with self.watch("inputs"):
                        contents.renew(workers)
                with self.watch("batches"):
                    clocked = Clocked(batches[name].time())
                yield name, clocked

    def _order(
        self, batches: dict[str, Batches], contents: TimedContents, most: int, wanted: int
    ) -> tuple[list[int], float]:
        """The input sets of a batch's calls, the same for all sides, `wanted` or more, until they are long enough for the
        clock on the fastest side; and the seconds of a round. A single call is enough only if it is much longer than that.

        All sides are captured as CUDA graphs, or none: what one of them cannot capture is not captured.
        """
        sets = range(contents.count)
        sequence = [i for _ in range(0, most, len(sets)) for i in self.random.sample(sets, len(sets))]
        if self.kind == "cpu":  # each once: what is remembered of an input helps no later call
            most = min(most, len(sets))
        graph = self.kind == "cuda"
        while True:
            order = sequence[: min(wanted, most)]
            for batch in batches.values():
                batch.prepare(order, graph)
            if graph and not all(batch.graph for batch in batches.values()):
                graph = False
                continue
            least_s = BATCH_S[self.kind] * (SINGLE_CALL if len(order) == 1 else 1)
            seconds = [batch.settled_s(BATCH_S[self.kind]) for batch in batches.values()]
            fastest = min(seconds)
            if fastest >= least_s or len(order) == most:
                return order, 2 * sum(seconds)
            wanted = math.ceil(len(order) * min(max(1.2 * BATCH_S[self.kind] / fastest, 1.5), 16))

    def _most_calls(self, case: Case) -> int:
        """All outputs of a batch must fit into memory: a call whose output could not be asked for need not be made."""
        held_bytes = 512 << 20
        if self.kind == "cuda":
            held_bytes = min(8 << 30, torch.cuda.get_device_properties(self.target.device).total_memory // 16)
        input_bytes = sum(t.nbytes for t in case.tensors.values())
        output_bytes = self.setting.spec.bytes_moved(case.args) - input_bytes
        if output_bytes <= 0:  # not all of the inputs is read
            output_bytes = input_bytes
        return max(1, min(1024, held_bytes // max(1, output_bytes)))

    def corroborate(self, side: Side) -> None:
        """On a GPU: look at the device kernels that one call of `side` runs on each case, in a process of its own.

        Raises RefusedWhileTimed where a library's kernels do the work, WorkerFault as `pair` does.
        """
        if self.kind != "cuda" or self.setting.libraries != "none":
            return
        workers, seed = self._start_workers([side], side.name), self.random.getrandbits(48)
        with workers[side.name] as worker:
            for weighted in self.target.cases:
                TimedContents(self.setting, weighted.case, Pool(seed)).hand_out(workers)
                with running(worker):
                    microseconds = worker.request("kernels", CALL_S).microseconds
                reason = witness.foreign_kernels(microseconds)
                if reason:
                    raise RefusedWhileTimed(weighted.case.name, seed, reason)

    @contextlib.contextmanager
    def _alone(self, workers: dict[str, WorkerProcess]) -> Iterator[None]:
        """Suspend every worker: each runs only while it is its turn."""
        for worker in workers.values():
            worker.stop()
        yield
        for worker in workers.values():
            worker.resume()


def seconds_of(times: Sequence[float]) -> float:
    """What a call takes, of one sample for each batch: the median, unless slow batches make up a good part of the mean."""
    return max(median(times), MEAN_SHARE * mean(times))


@contextlib.contextmanager
def _blame(candidate: WorkerProcess) -> Iterator[None]:
    """Tell the candidate's faults from those of the others."""
    try:
        yield
    except WorkerFault as fault:
        if fault.worker is candidate:
            raise
        raise BaselineFault(f"{fault.reason}\n{fault.detail}") from fault
