"""What is done beside the clock, so that a time means that the work was done, in it, by the kernel itself.

On a CPU a worker is stopped with the clock: an output of every timed batch is read from its memory before it runs again.
On a GPU it is read there within the clock. The judge holds some of them, which the worker cannot tell from the others,
against the oracle. On a GPU calls are also clocked up to the arrival of their outputs, which are asked for, and the judge
looks whether work goes on when all workers are suspended.
"""

import math
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from autokernel.gate.checks.correctness import ELEMENT_TOLERANCE, same_bits, wrong
from autokernel.gate.checks.expectations import Expectation, expectations
from autokernel.gate.checks.inputs import line_dim
from autokernel.gate.timing import witness
from autokernel.gate.timing.batches import CALL_S, Batches, Clocked, Odd, Setting, TimedContents, running
from autokernel.gate.timing.faults import Inconclusive, RefusedWhileTimed
from autokernel.gate.workers.processes import WorkerProcess
from autokernel.gate.workers.stopwatch import Allowance
from autokernel.spec import Case, KernelSpec, TensorSpec

CHECK_CALLS, CHECK_BYTES = 8, 64 << 20  # calls of a batch whose outputs are fetched and compared, on a GPU
READS_ODD = 0.5  # of the batches in which one call has odd inputs
READ_S = 0.1  # for how long outputs that were read are held against the oracle: one at least
# Of so many calls of every batch so many rows are held against PyTorch's own, for so long: a call that was left out is in
# few of those that are read. They may be off by this multiple of the outer tolerance.
SPOTS, SPOT_ROWS, SPOT_S, SPOT_MULTIPLE = 8, 2, 50e-3, 4.0
PART_BYTES = 4 << 20  # of an output that are read: whole rows, at a place that the worker cannot know
KEPT_BYTES = 256 << 20  # of what was read, with the inputs of the calls
ROUNDS = 3, 24  # of clocked arrivals: at least to pass, at most to refuse
ARRIVAL_S, ARRIVAL_BYTES = 10e-3, 64 << 20  # calls to fill so much time, of which so many outputs' arrival is clocked
ARRIVAL_ELEMENTS = 4096  # of each output, on a GPU
# What arrives later than these shares, of the time that a call is said to take and of the other side's, is refused.
LATE_SHARE, LATE_NOISE = 0.25, 0.05
JITTER_S = {"cpu": 20e-6, "cuda": 40e-6}  # of a batch and a fetch
WITNESS_S = 0.5  # for how long it is watched at most where a kernel computes
# In which a GPU that is at work after a batch is looked at again. Another program that is at work half of the time agrees
# with all of them, by chance, once in 2^16 suspicions.
GOES_ON_ROUNDS = 8
LATE_READ_SHARE, LATE_READ_S = 0.01, 60e-6  # of a batch, and more, by which an output may be read later than another side's
EMPTY_S = 1e-3  # by which a side's empty batch may take longer than another's


@dataclass
class Reading:
    """Rows of an output of a timed batch as the judge read them, and the inputs that the call was given."""

    rows: Tensor  # or all of it
    start: int | None  # the first of them; None: it is all of the output
    result: int  # which of the call's
    inputs: dict[str, Any]
    is_odd: bool = False  # they are not all random numbers


@dataclass(frozen=True)
class WentOn:
    """The GPU was at work after a batch of the side under judgement, all workers suspended."""

    case: Case
    recurs: bool  # after each of its batches
    perhaps_others: bool  # after a batch of another side, too: who it was is seen when no worker lives

    reason: ClassVar[str] = "the GPU is at work for its process after its batches, in the turn of others"


@dataclass(frozen=True)
class Spot:
    """A few rows of an output, and the inputs that make these rows alone."""

    rows: Tensor
    inputs: dict[str, Any]

    def is_left_out(self, spec: KernelSpec) -> bool:
        """Whether most of it is something else, such as what memory held before."""
        with torch.inference_mode():
            native = spec.eager(**self.inputs).reshape(self.rows.shape)
        size = native.float().square().mean().sqrt() + native.float().abs()
        bound = SPOT_MULTIPLE * ELEMENT_TOLERANCE[native.dtype] * size
        return bool(((self.rows.float() - native.float()).abs() <= bound).float().mean() < 0.5)


@dataclass
class Readings:
    """Outputs of one case's timed batches, of a worker that was stopped with the clock."""

    setting: Setting
    case: Case
    seed: int
    layouts: Sequence[TensorSpec]  # of each result of a call
    keeps: bool = True  # what was read
    kept: list[Reading] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)

    def read(self, batch: Batches, contents: TimedContents, order: Sequence[int]) -> None:
        """One output of the batch that was just timed: which one, the worker cannot know."""
        call, result, layout, start = self.choose(order, contents.odd)
        rows = batch.output(call, layout, (start or 0) * self.columns(result), result)
        self.keep(Reading(rows, start, result, {}), contents, order[call])
        self._look(batch, contents, order)

    def _look(self, batch: Batches, contents: TimedContents, order: Sequence[int]) -> None:
        """Keep a few rows of several calls, on random numbers, of a type whose rows can be computed alone."""
        spec, chance = self.setting.spec, self.setting.random
        first, layout = next(iter(self.case.tensors.values())), self.layouts[0]
        contiguous = torch.empty_strided(layout.shape, layout.strides, device="meta").is_contiguous()
        if not spec.sliced or not contiguous or layout.shape[:1] != first.shape[:1] or not layout.numel:
            return
        if line_dim(self.case.args) % len(first.shape) == 0:
            return
        count, columns = min(SPOT_ROWS, first.shape[0]), layout.numel // first.shape[0]
        for call in chance.sample(range(len(order)), min(SPOTS, len(order))):
            if contents.odd is not None and contents.odd.index == order[call]:
                continue
            start = chance.randint(0, first.shape[0] - count)
            rows = batch.output(call, TensorSpec((count, columns), layout.dtype), start * columns)
            inputs = contents.inputs(order[call])
            inputs |= {name: inputs[name][start : start + count].clone() for name in spec.sliced}
            self.spots.append(Spot(rows, inputs))

    def check_spots(self) -> None:
        """Raises RefusedWhileTimed where a call was left out."""
        with self.setting.watch("oracle"):
            allowance = Allowance(SPOT_S)
            for spot in self.setting.random.sample(self.spots, len(self.spots)):
                if spot.is_left_out(self.setting.spec):
                    raise RefusedWhileTimed(
                        self.case.name, self.seed, "the output of a timed call: not what it was to compute"
                    )
                if allowance.is_spent():
                    return

    def time(self, batch: Batches, contents: TimedContents, order: Sequence[int]) -> Clocked:
        """Of mapped memory: one batch, until an output of it has been read."""
        call, result, layout, start = self.choose(order)
        first = (start or 0) * self.columns(result)
        clocked, rows = batch.time_in_view(contents, lambda: batch.mapped_output(contents, call, layout, first, result))
        if self.keeps:
            self.keep(Reading(rows, start, result, {}), contents, order[call])
        return clocked

    def keep(self, reading: Reading, contents: TimedContents, index: int) -> None:
        """Keep what was read of a call on the set `index`, or not: there is memory for some."""
        chance = self.setting.random
        nbytes = reading.rows.nbytes + sum(self.case.tensors[name].nbytes for name in contents.changing)
        places = max(1, KEPT_BYTES // max(1, nbytes))
        place = len(self.kept) if len(self.kept) < places else chance.randrange(2 * places)
        if place < places:
            inputs = contents.inputs(index)
            is_odd = contents.odd is not None and contents.odd.index == index
            inputs |= {name: inputs[name].clone() for name in contents.changing}  # they are about to be overwritten
            self.kept[place : place + 1] = [replace(reading, inputs=inputs, is_odd=is_odd)]

    def columns(self, result: int) -> int:
        shape = self.layouts[result].shape
        return max(1, shape[-1]) if shape else 1

    def choose(self, order: Sequence[int], odd: Odd | None = None) -> tuple[int, int, TensorSpec, int | None]:
        """What is to be read of the next batch: of which call which result, of what layout, and from which row on, unless
        it is all of it. That of a call on odd inputs half of the time: others must not do without."""
        call, result = self.setting.random.randrange(len(order)), self.setting.random.randrange(len(self.layouts))
        layout, columns = self.layouts[result], self.columns(result)
        reads_odd = odd is not None and odd.index in order and self.setting.random.random() < READS_ODD
        if reads_odd:
            call = order.index(odd.index)
        lines, most = layout.numel // columns, max(1, PART_BYTES // (columns * layout.dtype.itemsize))
        if lines <= most or not torch.empty_strided(layout.shape, layout.strides, device="meta").is_contiguous():
            return call, result, layout, None
        start = self.setting.random.randint(0, lines - most)
        if reads_odd and odd.line < lines:
            start = min(max(0, odd.line - self.setting.random.randrange(max(1, most // 2))), lines - most)
        return call, result, TensorSpec((most, columns), layout.dtype), start

    def check(self) -> None:
        """Hold as many as the oracle can say something of in a moment against it. Raises RefusedWhileTimed."""
        with self.setting.watch("oracle"):
            allowance = Allowance(READ_S)
            for reading in self._in_turns():
                expected = expectations(self.setting.spec, reading.inputs, self.setting.target.device)[reading.result]
                if reading.start is not None:
                    expected = expected.rows(reading.start, len(reading.rows))
                if reason := wrong(reading.rows, expected, adversarial=reading.is_odd):
                    raise RefusedWhileTimed(self.case.name, self.seed, f"the output of a timed call: {reason}")
                if allowance.is_spent():
                    return

    def _in_turns(self) -> list[Reading]:
        """What was kept, in random order, odd inputs and others in turn."""
        kept = self.setting.random.sample(self.kept, len(self.kept))
        ways = [[reading for reading in kept if reading.is_odd is is_odd] for is_odd in (True, False)]
        self.setting.random.shuffle(ways)
        return [reading for pair in zip_longest(*ways) for reading in pair if reading]


def fetch(
    setting: Setting, batch: Batches, case: Case, contents: TimedContents, order: list[int], seed: int
) -> list[Tensor]:
    """Fetch the outputs of some timed calls on the same contents, which ones the worker cannot know: they must agree,
    and agree with the oracle. Of large outputs only some rows are fetched, at a place that it cannot know either.

    Returns the eager form's results, to tell what outputs are like. Raises RefusedWhileTimed.
    """
    index = setting.random.choice(order)
    calls = [call for call, i in enumerate(order) if i == index]
    most = max(2, min(CHECK_CALLS, CHECK_BYTES // max(1, sum(t.nbytes for t in case.tensors.values()))))
    calls = setting.random.sample(calls, min(most, len(calls)))
    with setting.watch("oracle"):
        results = expectations(setting.spec, contents.inputs(index), setting.target.device)
        reasons = (_why_wrong(setting, batch, calls, i, result) for i, result in enumerate(results))
        reason = next(filter(None, reasons), None)
    if reason:
        raise RefusedWhileTimed(case.name, seed, f"the output of a timed call: {reason}")
    return [result.native for result in results]


def _why_wrong(setting: Setting, batch: Batches, calls: list[int], result: int, expected: Expectation) -> str | None:
    native = expected.native
    if native.nbytes <= CHECK_BYTES:
        first, *again = [y for y, _ in batch.fetch(calls, result)]
    else:
        columns = native.shape[-1]
        rows = max(1, CHECK_BYTES // (columns * native.itemsize))
        start = setting.random.randint(0, native.numel() // columns - rows)
        expected = expected.rows(start, rows)
        part = batch.fetch_part(calls, [start * columns, rows * columns], result)
        first, *again = part.view(len(calls), rows, columns)
    reason = wrong(first, expected)
    if reason is None and not all(same_bits(first, y) for y in again):
        return "calls on the same contents do not agree bitwise"
    return reason


def late_work(
    setting: Setting,
    workers: dict[str, WorkerProcess],
    batches: dict[str, Batches],
    contents: TimedContents,
    check: str,
    seconds: dict[str, float],
    results: Sequence[Tensor],
) -> str | None:
    """Where a worker cannot be stopped and read: clock calls on new contents, each on its own, up to the arrival of the
    outputs. The reason to refuse side `check`, if any; `seconds` is what a call of each side is said to take.

    Here the work shows that was left for later (to a thread, a stream, the moment at which an output is read), and
    the work of which the timed batches were spared because an earlier call had seen the same contents: the outputs
    arrive later than those batches say, and later than another side's, which are as large.
    """
    which = setting.random.randrange(len(results))
    output = results[which]
    contents.used = range(contents.count)
    length = max(2, min(contents.count, math.ceil(ARRIVAL_S / min(seconds.values()))))
    order = setting.random.sample(range(contents.count), length)
    other = min((name for name in batches if name != check), key=lambda name: seconds[name])
    for name in (check, other):
        if batches[name].graph != batches[name].prepare(order, batches[name].graph):
            raise Inconclusive("what had been captured as a CUDA graph could not be captured again")
        batches[name].time()
    # A GPU computes an output in a hundredth of the time in which it reaches the host: there a part of each will do.
    elements = output.numel() if setting.kind == "cpu" else min(output.numel(), ARRIVAL_ELEMENTS)
    part = [setting.random.randint(0, output.numel() - elements), elements]
    most = max(1, min(len(order), ARRIVAL_BYTES // max(elements * output.itemsize, 1)))
    calls = setting.random.sample(range(len(order)), most)
    margin = LATE_SHARE * seconds[check] + LATE_NOISE * seconds[other] + JITTER_S[setting.kind] / len(calls)
    late = 0.0
    plain: list[float] = []  # seconds of the other side's batches now
    arrived: dict[str, list[float]] = {check: [], other: []}
    for rounds in range(1, ROUNDS[1] + 1):
        contents.renew(workers)
        for _ in range(2):  # the first drives out what was just written
            batches[other].drop()
            other_s = batches[other].time()
        plain.append(other_s)
        for name, times in arrived.items():
            times.append(batches[name].arrival_s(calls, part, contents, which))
        pace = max(1.0, min(plain) / (len(order) * seconds[other]))  # the machine may be slower now than it was
        said_s, fetch_s = len(order) * seconds[check] * pace, min(arrived[other]) - min(plain)
        late = (min(arrived[check]) - said_s - fetch_s) / len(calls)
        # The work is in every round: a single one without delay is enough, if none of the other side hides it.
        if rounds >= ROUNDS[0] and late <= margin and _spread(arrived[other]) <= margin * len(calls):
            return None
    if late <= margin:
        raise Inconclusive("no two rounds of an audit agreed")
    late_us, said_us = late * 1e6, seconds[check] * 1e6
    return f"work done after the clock had stopped: {late_us:.1f} us per call, on top of {said_us:.1f} us"


def _spread(seconds: Sequence[float]) -> float:
    """Between the two shortest, which are those that were disturbed least."""
    shortest, next_to_it = sorted(seconds)[:2]
    return next_to_it - shortest


def shared_outputs(batch: Batches) -> str | None:
    """Whether calls of the last batch return the same memory, and so were computed once. What is a call's input may be."""
    sizes = [layout.storage_numel * layout.dtype.itemsize for layout in batch.layouts()]
    placed = sorted(
        (address, sizes[i % len(sizes)])
        for i, address in enumerate(batch.addresses)
        if address not in batch.input_addresses and sizes[i % len(sizes)]
    )
    if any(b - a < nbytes for (a, nbytes), (b, _) in zip(placed, placed[1:])):
        return "calls of one batch return the same memory"
    return None


def goes_on(setting: Setting, batches: Mapping[str, Batches], check: str, case: Case, seed: int) -> WentOn:
    """After a batch of side `check`, all workers suspended, the GPU was still at work: what that says of it, which counts
    against it even where it does not recur.

    Raises RefusedWhileTimed where it recurs after each of its batches and after none of another side's.
    """
    other = next((name for name in batches if name != check), check)
    seen: dict[str, list[bool]] = {other: [], check: []}
    for _ in range(GOES_ON_ROUNDS):
        for name in setting.random.sample(list(seen), len(seen)):
            batches[name].drop()
            batches[name].time()
            seen[name].append(setting.probe.busy())
    went_on = WentOn(case, all(seen[check]), perhaps_others=other != check and any(seen[other]))
    if went_on.recurs and not went_on.perhaps_others:
        raise RefusedWhileTimed(case.name, seed, went_on.reason)
    return went_on


def foreign_work(setting: Setting, batch: Batches, contents: TimedContents) -> str | None:
    """See where the side under judgement computes, and on how many threads, in batches like those that are timed, on new
    contents, too, until it is clear. The reason to refuse it, if any."""
    if setting.kind != "cpu" or sys.platform != "linux":
        return None
    worker, seen, deadline = batch.worker, witness.Seen(), time.perf_counter() + WITNESS_S
    batch.drop()
    contents.renew({})
    with seen.weighing(worker.pid):
        batch.time()
    while not seen.enough() and time.perf_counter() < deadline:
        batch.drop()
        contents.renew({})
        with running(worker):
            worker.post("batch", repeats=1)
            seen.sample(worker.pid, lambda seconds: not select.select([worker.socket], [], [], seconds)[0])
            worker.answer(CALL_S)
    foreign = seen.foreign(worker.built) if setting.libraries == "none" else None
    return foreign or seen.crowd(setting.threads)


def done_too_soon(clocked: Mapping[str, Sequence[Clocked]], check: str) -> str | None:
    """Where the judge reads outputs itself: whether it waits for those of side `check` and of no other side.

    Such a side says that a batch is done before it is. The clock goes on, but its answer costs it no time then.
    """
    waits = {name: median(batch.read_s for batch in batches) for name, batches in clocked.items()}
    least = min((wait for name, wait in waits.items() if name != check), default=waits[check])
    allowed_s = LATE_READ_SHARE * median(batch.seconds for batch in clocked[check]) + LATE_READ_S
    if waits[check] - least <= allowed_s:
        return None
    return f"it says that a batch is done {(waits[check] - least) * 1e6:.0f} us before it is"


def slow_when_idle(batches: Mapping[str, Batches], check: str) -> str | None:
    """Whether a batch of no calls takes side `check` longer than another side: it would be a time to work, or to hide."""
    fastest = min(batch.empty_s for batch in batches.values())
    empty_s = batches[check].empty_s
    if empty_s <= fastest + max(EMPTY_S, 2 * fastest):
        return None
    return f"a batch of no calls takes it {empty_s * 1e3:.1f} ms, and another side {fastest * 1e3:.1f} ms"


def busy_between(untimed: Mapping[str, Sequence[float]], timed: Mapping[str, Sequence[float]], check: str) -> str | None:
    """Whether the batches that are not timed take side `check` much longer than those that are, and no other side."""
    ratios = {name: median(untimed[name]) / median(timed[name]) for name in timed if name in untimed}
    others = max((ratio for name, ratio in ratios.items() if name != check), default=1.0)
    if check not in ratios or ratios[check] <= 2.0 * max(others, 1.0):
        return None
    return f"batches that are not timed take it {ratios[check]:.1f} times as long as those that are"
