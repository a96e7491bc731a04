"""Time kernels side by side: the judge's clock around batches of calls, interleaved, in fresh pairs of processes.

A side is one kernel under comparison (candidate, incumbent, the eager baseline, torch.compile). One *pair* is one fresh
process for each side; in it every case is timed in rounds, forwards and backwards (A B B A), on fresh inputs, rotated so
that no call finds its data in a cache. What counts is the judge's wall clock from sending "go" to the answer, less that of
an empty batch.

On a CPU a worker is stopped but for its batches: what it is to compute on does not exist before the clock starts, and its
outputs are read from its memory as they are when the clock has stopped. So nothing can be done earlier or left for later.
"""

import contextlib
import math
import random
import select
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autokernel.gate import witness
from autokernel.gate.batches import CALL_S, Batches, TimedContents, running
from autokernel.gate.channel import Placed
from autokernel.gate.correctness import expect, same_bits, wrong
from autokernel.gate.disturbance import DRIFT, OTHER_LOAD, OtherLoad, drift
from autokernel.gate.inputs import Pool
from autokernel.gate.processes import WarmParent, WorkerFault, WorkerProcess, end_all
from autokernel.gate.room import Room
from autokernel.gate.stopwatch import Stopwatch
from autokernel.spec import Case, KernelSpec, TensorSpec
from autokernel.target import Target, WeightedCase

BATCH_S = {"cpu": 5e-3, "cuda": 8e-3}  # a batch is at least this long: the round trip to a worker is 0.1 ms
ROUNDS = 6  # ABBA rounds per case and pair, fewer where they take longer than CASE_S
CASE_S = 0.2
WARM_COPIES = 8  # of what one call moves, that a first call takes of a GPU's memory
MAX_PREPARED = 5  # pairs whose processes are started at once
CHECK_SHARE = 0.5  # of the later pairs' cases that are checked and audited: an expectation can cost a second
CHECK_CALLS, CHECK_BYTES = 8, 64 << 20  # calls whose outputs are compared
READ_S = 0.05  # for how long outputs that are read are held against the oracle: one at least
AUDIT_ROUNDS = 3, 24  # at least to pass, at most to refuse
AUDIT_S, AUDIT_BYTES = 10e-3, 64 << 20  # calls to fill so much time, of which so many outputs' arrival is clocked
AUDIT_ELEMENTS = 4096  # of each output, on a GPU
# What arrives later than these shares, of the time that a call is said to take and of the other side's, is refused.
AUDIT_SHARE, AUDIT_NOISE = 0.25, 0.05
AUDIT_JITTER_S = {"cpu": 20e-6, "cuda": 40e-6}  # of a batch and a fetch
AUDIT_LOAD = 0.1  # of the cores' time: with more taken by others, an audit proves nothing against a kernel
STRIKES = 5  # by which the audits that refuse outnumber those that do not: noise passes, and cannot acquit a cheat
WITNESS_S = 0.5  # for how long it is watched at most where a kernel computes
START_S = 60.0


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
    rotated_bytes: tuple[int, ...] = ()  # per case: of all the input sets through which the calls rotate
    disturbance: str = ""  # why this pair should not count

    def total(self, side: str, cases: Sequence[WeightedCase]) -> float:
        """Seconds that one pass of the model spends in the target's cases."""
        return sum(s * c.calls for s, c in zip(self.seconds[side], cases))

    def log_ratio(self, slow: str, fast: str, cases: Sequence[WeightedCase]) -> float:
        return math.log(self.total(slow, cases) / self.total(fast, cases))

    def case_log_ratio(self, slow: str, fast: str, index: int) -> float:
        return math.log(self.seconds[slow][index] / self.seconds[fast][index])


class BystanderFault(RuntimeError):
    """A baseline or an incumbent failed while it was timed beside the candidate."""


class Doubt(Exception):
    """An audit went against the kernel, which other load on the machine may explain: the pair does not count."""


class RefusedWhileTimed(Exception):
    """A kernel was wrong, late, or not at work itself, while it was timed."""

    def __init__(self, case: str, seed: int, reason: str):
        super().__init__(reason)
        self.case, self.seed, self.reason = case, seed, reason


class PairTimer:
    """Times pairs of processes on one target."""

    def __init__(
        self,
        parent: WarmParent,
        spec: KernelSpec,
        target: Target,
        threads: int,
        seed: int,
        libraries: str,
        room: Room,
        watch: Stopwatch,
    ):
        """`libraries`: what a kernel may call, see Worker.do_load."""
        self.watch, self.room = watch, room
        self.libraries = libraries
        self.parent, self.spec, self.target, self.threads = parent, spec, target, threads
        self.kind = "cuda" if target.device.startswith("cuda") else "cpu"
        self.random = random.Random(seed)
        self.seed = seed
        self.peak_bytes = 0
        self.memory_share = 0.0  # of the device's, the largest seen
        self.launch_us: dict[str, float] = {}  # by case, on a GPU: what the host takes for a call
        self.discarded = 0  # pairs that were disturbed
        self.checked = False  # whether an output of every case has been checked, and nothing is in doubt
        self.strikes = 0  # audits that went against the side under judgement, less those since that did not
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

        The pairs that follow must be of these sides. On a CPU processes start in no time, and would take it from others.
        """
        if self.kind == "cuda":
            new = min(pairs, MAX_PREPARED) - len(self.prepared)
            self.prepared += [self.pool.submit(self._line_up, sides, check) for _ in range(new)]

    def pair(self, sides: Sequence[Side], check: str) -> PairResult:
        """One fresh process per side, all cases; outputs of timed calls of side `check` are held against the oracle.

        Raises WorkerFault if its process dies or hangs, RefusedWhileTimed if a timed call of it was wrong or went on after
        the clock had stopped, BystanderFault if another side's process died or hung, for which it is not to blame.
        """
        seed = self.random.getrandbits(48)
        pool = Pool(seed)
        with contextlib.ExitStack() as stack:
            with self.watch("processes"):
                wait(self.prepared)  # or their start would disturb this pair
                workers = self.prepared.pop(0).result() if self.prepared else self._line_up(sides, check)
            stack.callback(end_all, workers.values())
            stack.enter_context(_blame(workers[check]))
            seconds: dict[str, list[float]] = {side.name: [] for side in sides}
            rotated, drifts, load = [], [], OtherLoad([worker.pid for worker in workers.values()])
            try:
                with self._alone(workers):
                    for weighted in self.target.cases:
                        contents = TimedContents(self, weighted.case, pool)
                        samples = self._case(workers, weighted.case, contents, seed, check, load)
                        for name, values in samples.items():
                            seconds[name].append(median(values))
                        drifts.append(drift(samples.values()))
                        rotated.append(contents.nbytes)
            except Doubt as doubt:
                self.checked = False  # from now on every pair is audited, until one is clean
                return PairResult({}, disturbance=str(doubt))
            self._note_memory(workers[check])
        self.strikes, disturbance = max(0, self.strikes - 1), ""
        if self.kind == "cpu" and load.share > OTHER_LOAD:
            disturbance = f"other processes took {load.share:.0%} of the cores' time"
        elif max(drifts) > DRIFT:
            disturbance = f"all sides' times drifted by {math.expm1(max(drifts)):.0%}"
        self.checked = not self.strikes and (self.checked or not disturbance)
        return PairResult({name: tuple(values) for name, values in seconds.items()}, tuple(rotated), disturbance)

    def _line_up(self, sides: Sequence[Side], check: str) -> dict[str, WorkerProcess]:
        """A process for each side, its kernel loaded."""
        workers: dict[str, WorkerProcess] = {}
        try:
            for side in random.sample(sides, len(sides)):
                workers[side.name] = WorkerProcess(self.parent, self.threads, side.source)
            with _blame(workers[check]):
                self.each(workers, {side.name: side.load(self.spec.name, self.libraries) for side in sides})
                if self.kind == "cuda":
                    moved = max(self.spec.bytes_moved(weighted.case.args) for weighted in self.target.cases)
                    with self.room.take(WARM_COPIES * len(workers) * moved):
                        self.each(workers, dict.fromkeys(workers, {"op": "warm", "cases": self._encoded_cases()}))
        except BaseException:
            end_all(workers.values())
            raise
        return workers

    def _encoded_cases(self) -> list[dict[str, Any]]:
        """The arguments of every case, without contents."""
        return [
            {name: Placed(v, 0).encode() if isinstance(v, TensorSpec) else v for name, v in weighted.case.args.items()}
            for weighted in self.target.cases
        ]

    def _note_memory(self, worker: WorkerProcess) -> None:
        self.peak_bytes = max(self.peak_bytes, int(worker.request("memory", CALL_S)["peak_bytes"]))
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
    ) -> dict[str, list[float]]:
        """Seconds per call by side, one sample for each batch."""
        with self.watch("inputs"):
            contents.hand_out(workers)
        with self.watch("warm-up"):  # compile, load, start threads, fault memory in
            self.each(workers, dict.fromkeys(workers, {"op": "prepare", "order": [0, 1], "graph": False}))
            self.each(workers, dict.fromkeys(workers, {"op": "batch", "repeats": 1}))
            batches = {name: Batches(worker, self.kind == "cpu") for name, worker in workers.items()}
            order, round_s = self._order(batches, contents, self._most_calls(case))
            contents.used, length = order, len(order)
            if self.kind == "cuda" and not self.checked:
                self.launch_us[case.name] = batches[check].launch_us(order)
        frozen = self.kind == "cpu" and workers[check].memory_fd is not None
        layout = batches[check].layout() if frozen else None
        samples: dict[str, list[float]] = {name: [] for name in batches}
        looks = not self.checked or self.random.random() < CHECK_SHARE
        rounds = max(1, min(ROUNDS, round(CASE_S / round_s)))
        look_after = self.random.randint(1, 2 * rounds) if frozen else 2 * rounds  # once asked, a worker is warned
        with load:
            for _ in range(rounds):
                for name, seconds in self._round(workers, batches, contents):
                    samples[name].append(seconds / length)
                    if not looks or name != check or len(samples[check]) != look_after:
                        continue
                    if frozen:
                        self._read(batches[check], case, contents, order, layout, seed)
                    else:
                        output = self._fetch(batches[check], case, contents, order, seed)
        if not looks:
            return samples
        pids, least = [worker.pid for worker in workers.values()], {name: min(times) for name, times in samples.items()}
        with self.watch("audit"), OtherLoad(pids) as other_load:
            reason = None if frozen else self._audit(workers, batches, contents, check, least, output)
            reason = reason or self._witness(batches[check])
        if frozen and not reason:
            return samples
        if self.kind == "cpu" and other_load.share > OTHER_LOAD:
            raise Doubt(f"other processes took {other_load.share:.0%} of the cores' time during an audit")
        if reason:
            self.strikes += other_load.share <= AUDIT_LOAD
            if self.strikes == STRIKES:
                raise RefusedWhileTimed(case.name, seed, reason)
            raise Doubt(reason)
        return samples

    def _round(
        self,
        workers: dict[str, WorkerProcess],
        batches: dict[str, Batches],
        contents: TimedContents,
    ) -> Iterator[tuple[str, float]]:
        """Every side's seconds for a batch on new contents, forwards and backwards.

        On a CPU a side first runs a batch on the old contents, which wakes its threads and touches its memory. Then the
        judge writes new ones, in the order of the calls, so that those read first have left the cache when they are read.
        From then on the worker runs in the timed batch only.
        """
        forwards = self.random.sample(sorted(batches), len(batches))
        for names in (forwards, forwards[::-1]):
            if self.kind == "cuda":
                with self.watch("inputs"):
                    contents.renew(workers)
                with self.watch("batches"):
                    batches[names[-1]].drop()
                    batches[names[-1]].time()  # drives what was just written out of the cache
            for name in names:
                batches[name].drop()
                if self.kind == "cpu":
                    with self.watch("batches"):
                        batches[name].time()
                        batches[name].drop()
                    with self.watch("inputs"):
                        contents.renew(workers)
                with self.watch("batches"):
                    seconds = batches[name].time()
                yield name, seconds

    def _order(self, batches: dict[str, Batches], contents: TimedContents, most: int) -> tuple[list[int], float]:
        """The input sets of a batch's calls, the same for all sides, long enough for the clock on the fastest side; and
        the seconds of a round.

        All sides are captured as CUDA graphs, or none: what one of them cannot capture is not captured.
        """
        sets = range(contents.count)
        sequence = [i for _ in range(0, most, len(sets)) for i in self.random.sample(sets, len(sets))]
        if self.kind == "cpu":  # each once: what is remembered of an input helps no later call
            most = min(most, len(sets))
        wanted, graph = 2, self.kind == "cuda"
        while True:
            order = sequence[: min(wanted, most)]
            for batch in batches.values():
                batch.prepare(order, graph)
            if graph and not all(batch.graph for batch in batches.values()):
                graph = False
                continue
            seconds = [batch.time() for batch in batches.values()]
            if BATCH_S[self.kind] <= min(seconds) < 4 * BATCH_S[self.kind]:  # unless this was but a moment's disturbance
                for batch in batches.values():
                    batch.drop()
                seconds = [min(batch.time(), before) for batch, before in zip(batches.values(), seconds)]
            fastest = min(seconds)
            if fastest >= BATCH_S[self.kind] or len(order) == most:
                return order, 2 * sum(seconds)
            wanted = math.ceil(len(order) * min(max(1.2 * BATCH_S[self.kind] / fastest, 1.5), 16))

    def _most_calls(self, case: Case) -> int:
        """All outputs of a batch must fit into memory: a call whose output could not be asked for need not be made."""
        held_bytes = 512 << 20
        if self.kind == "cuda":
            held_bytes = min(8 << 30, torch.cuda.get_device_properties(self.target.device).total_memory // 16)
        output_bytes = max(1, sum(t.nbytes for t in case.tensors.values()))  # an output is rarely larger than its inputs
        return max(1, min(1024, held_bytes // output_bytes))

    def _read(
        self, batch: Batches, case: Case, contents: TimedContents, order: list[int], layout: TensorSpec, seed: int
    ) -> None:
        """Read outputs of the last batch from the memory of a worker that was stopped with the clock, and has not run
        since: as many, of which it cannot know which, as the oracle can say something of in a moment."""
        with self.watch("oracle"):
            deadline = time.perf_counter() + READ_S
            for call in self.random.sample(range(len(order)), min(CHECK_CALLS, len(order))):
                reason = wrong(batch.output(call, layout), expect(self.spec, contents.inputs(order[call]), "cpu"))
                if reason:
                    raise RefusedWhileTimed(case.name, seed, f"the output of a timed call: {reason}")
                if time.perf_counter() > deadline:
                    return

    def _fetch(self, batch: Batches, case: Case, contents: TimedContents, order: list[int], seed: int) -> Tensor:
        """Fetch the outputs of some timed calls on the same contents, which ones the worker cannot know: they must agree,
        and agree with the oracle. Of large outputs only some rows are fetched, at a place that it cannot know either.

        Returns the eager form's output, to tell what outputs are like.
        """
        index = self.random.choice(order)
        calls = [call for call, i in enumerate(order) if i == index]
        most = max(2, min(CHECK_CALLS, CHECK_BYTES // max(1, sum(t.nbytes for t in case.tensors.values()))))
        calls = self.random.sample(calls, min(most, len(calls)))
        with self.watch("oracle"):
            expected = expect(self.spec, contents.inputs(index), self.target.device)
            native = expected.native
            if native.nbytes <= CHECK_BYTES:
                first, *again = [y for y, _ in batch.fetch(calls)]
            else:
                columns = native.shape[-1]
                rows = max(1, CHECK_BYTES // (columns * native.itemsize))
                start = self.random.randint(0, native.numel() // columns - rows)
                expected = expected.rows(start, rows)
                first, *again = batch.fetch_part(calls, [start * columns, rows * columns]).view(len(calls), rows, columns)
            reason = wrong(first, expected)
        if reason is None and not all(same_bits(first, y) for y in again):
            reason = "calls on the same contents do not agree bitwise"
        if reason:
            raise RefusedWhileTimed(case.name, seed, f"the output of a timed call: {reason}")
        return native

    def _audit(
        self,
        workers: dict[str, WorkerProcess],
        batches: dict[str, Batches],
        contents: TimedContents,
        check: str,
        seconds: dict[str, float],
        output: Tensor,
    ) -> str | None:
        """Where a worker cannot be stopped and read: clock calls on new contents, each on its own, up to the arrival of the
        outputs.

        Here the work shows that was left for later (to a thread, a stream, the moment at which an output is read), and
        the work of which the timed batches were spared because an earlier call had seen the same contents: the outputs
        arrive later than those batches say, and later than another side's, which are as large.
        """
        contents.used = range(contents.count)
        length = max(2, min(contents.count, math.ceil(AUDIT_S / min(seconds.values()))))
        order = self.random.sample(range(contents.count), length)
        other = min((name for name in batches if name != check), key=lambda name: seconds[name])
        for name in (check, other):
            if batches[name].graph != batches[name].prepare(order, batches[name].graph):
                raise Doubt("what had been captured as a CUDA graph could not be captured again")
            batches[name].time()
        # A GPU computes an output in a hundredth of the time in which it reaches the host: there a part of each will do.
        elements = output.numel() if self.kind == "cpu" else min(output.numel(), AUDIT_ELEMENTS)
        part = [self.random.randint(0, output.numel() - elements), elements]
        most = max(1, min(len(order), AUDIT_BYTES // max(elements * output.itemsize, 1)))
        calls = self.random.sample(range(len(order)), most)
        margin = AUDIT_SHARE * seconds[check] + AUDIT_NOISE * seconds[other] + AUDIT_JITTER_S[self.kind] / len(calls)
        late = 0.0
        plain: list[float] = []  # seconds of the other side's batches now
        arrived: dict[str, list[float]] = {check: [], other: []}
        for rounds in range(1, AUDIT_ROUNDS[1] + 1):
            contents.renew(workers)
            for _ in range(2):  # the first drives out what was just written
                batches[other].drop()
                other_s = batches[other].time()
            plain.append(other_s)
            for name, times in arrived.items():
                times.append(batches[name].arrival_s(calls, part))
            pace = max(1.0, min(plain) / (len(order) * seconds[other]))  # the machine may be slower now than it was
            said_s, fetch_s = len(order) * seconds[check] * pace, min(arrived[other]) - min(plain)
            late = (min(arrived[check]) - said_s - fetch_s) / len(calls)
            # The work is in every round: a single one without delay is enough, if none of the other side hides it.
            if rounds >= AUDIT_ROUNDS[0] and late <= margin and _spread(arrived[other]) <= margin * len(calls):
                return None
        if late <= margin:
            raise Doubt("no two rounds of an audit agreed")
        late_us, said_us = late * 1e6, seconds[check] * 1e6
        return f"work done after the clock had stopped: {late_us:.1f} us per call, on top of {said_us:.1f} us"

    def _witness(self, batch: Batches) -> str | None:
        """See where the side under judgement computes, in batches like those that are timed, until it is clear."""
        if self.kind != "cpu" or sys.platform != "linux" or self.libraries != "none":
            return None
        worker, seen, deadline = batch.worker, witness.Seen(), time.perf_counter() + WITNESS_S
        while not seen.enough() and time.perf_counter() < deadline:
            with running(worker):
                worker.request("drop", CALL_S)
                worker.post("batch", repeats=1)
                seen.sample(worker.pid, lambda seconds: not select.select([worker.socket], [], [], seconds)[0])
                worker.answer(CALL_S)
        return seen.foreign(worker.built)

    def corroborate(self, side: Side) -> None:
        """On a GPU: look at the device kernels that one call of `side` runs on each case, in a process of its own.

        Raises RefusedWhileTimed where a library's kernels do the work, WorkerFault as `pair` does.
        """
        if self.kind != "cuda" or self.libraries != "none":
            return
        workers, seed = self._line_up([side], side.name), self.random.getrandbits(48)
        with workers[side.name] as worker:
            for weighted in self.target.cases:
                TimedContents(self, weighted.case, Pool(seed)).hand_out(workers)
                microseconds = worker.request("kernels", CALL_S)["microseconds"]
                reason = witness.foreign_kernels({str(name): float(us) for name, us in microseconds.items()})
                if reason:
                    raise RefusedWhileTimed(weighted.case.name, seed, reason)

    def each(self, workers: dict[str, WorkerProcess], messages: dict[str, dict[str, Any]]) -> None:
        """Send every worker its message and await the answers; on a CPU one after another, for they share its cores."""
        if self.kind == "cpu":
            for name, worker in workers.items():
                with running(worker):
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


def _spread(seconds: Sequence[float]) -> float:
    """Between the two shortest, which are those that were disturbed least."""
    shortest, next_to_it = sorted(seconds)[:2]
    return next_to_it - shortest


@contextlib.contextmanager
def _blame(candidate: WorkerProcess) -> Iterator[None]:
    """Tell the candidate's faults from those of the others."""
    try:
        yield
    except WorkerFault as fault:
        if fault.worker is candidate:
            raise
        raise BystanderFault(f"{fault.reason}\n{fault.detail}") from fault
