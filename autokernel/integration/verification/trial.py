"""verify(): put the kept kernels into the model, drop those that do not pay there, and measure what remains."""

import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from autokernel.common.verdict import Interval
from autokernel.common.words import counted
from autokernel.gate.timing.statistics import foreseen, ratio_interval, ratio_intervals
from autokernel.hardware.machine import usable_cores
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, GRAPHS, INDUCTOR, baseline, ours
from autokernel.integration.verification.notes import Notes
from autokernel.integration.verification.parity import Compared, compare_built, compare_outputs, decode_parity
from autokernel.integration.verification.processes import FreshProcess, rooms_beside, rooms_for
from autokernel.integration.verification.record import (
    DEFAULTS,
    INTERVAL,
    Figures,
    KernelInModel,
    Parity,
    Settings,
    Verification,
)
from autokernel.integration.verification.selection import Names, chosen, hope, paying, rivals
from autokernel.integration.verification.sides import (
    FirstCalls,
    Sample,
    Variant,
    allocator,
    build_alone,
    build_sides,
    compile_side,
    sample_sides,
    tune_side,
)
from autokernel.integration.verification.traces import keep_traces, trace_built
from autokernel.integration.winner import Winner
from autokernel.model.workload import Workload
from autokernel.target import Plan

PROCESSES = 4  # for the final figures
SCREENING = (2, 3, 6)  # processes after which gains are looked at: all settled, or the last for those that come to MATTERS
CHOOSING = 3  # processes that compare sets of kernels
MATTERS = 0.01  # of the model's speed
# Of half of the interval that all processes would leave: of gains that come to this part of it one in six will be settled.
HOPE = 0.5
TUNING_S = 300.0  # that AUTOTUNED's first calls may go on for when all else is ready
COMPILING_CORES = 2  # for a process that compiles: PyTorch's compiler runs on one of them, and those of kernels beside it
KNOWN = "the kernels that pay"  # beside its rivals
T = TypeVar("T")
Ends = dict[str, Callable[..., Any]]  # what a process is asked when it has built its sides, each with its seed
Weighted = tuple[Workload, float]  # and its share of the passes


def verify(
    plan: Plan,
    winners: Sequence[Winner],
    speedups: Mapping[str, float] | None = None,
    settings: Settings = DEFAULTS,
    say: Callable[[str], None] = lambda line: None,
    notes: Path | None = None,
    log: Path | None = None,
    traces: Path | None = None,
) -> Verification:
    """Put `winners` into the plan's model, drop those that do not pay there, and measure what remains.

    speedups: each target's kernel over PyTorch by itself, for Amdahl's prediction. `say` gets a line for each step. notes:
    a file that is there while this works; after an interruption the same call goes on with what was found so far. log: a
    file for what the processes print. traces: a folder for a pass before and after; see traces.py. Kernels that are slower
    than PyTorch by themselves are not tried.
    """
    started, speedups = time.perf_counter(), speedups or {}
    workloads, notes = Workload.from_json(plan.workload).parts, Notes(notes)
    verifier = Verifier(workloads, tuple(winners), settings, say, notes, log, speedups, traces)
    if verifier.notes.known:
        say(f"goes on with what {counted(verifier.notes.known, 'process')} found before an interruption")
    for winner in winners:
        if speedups.get(winner.target.name, math.inf) < 1:
            verifier.leave_out(winner, "slower than PyTorch by itself")
    diagnosis = verifier.diagnose() if settings.diagnose else {}
    if verifier.winners and not all(p.passed for p in verifier.parity({EAGER: verifier.winners})[EAGER]):
        diagnosis = diagnosis or verifier.diagnose()
        verifier.leave_out_wrong(diagnosis)
    verifier.leave_out_absent()
    with verifier.tuning_meanwhile():
        screened = verifier.leave_one_out()
        verifier.choose_sets(screened.values())
        selected = {fallback: screened[over].selected for fallback, over in verifier.screened.items() if over in screened}
        parity, wrong, new = {}, set(), {None}
        while new:  # without what is wrong, the rest is measured once more
            known, compared = verifier.final({} if EAGER in wrong else selected)
            new = {fallback for fallback, of_inputs in compared.items() if not all(p.passed for p in of_inputs)}
            parity, wrong, selected = parity | compared, wrong | new, selected | dict.fromkeys(new, ())
    kernels = [
        KernelInModel(
            w.target.name,
            w.target.kernel_type,
            w.name,
            w.target.share,
            speedups.get(w.target.name) and w.target.over_model(speedups[w.target.name]),
            verifier.sites.get(w.target.name, 0),
            {fallback: s.gains[w.target.name] for fallback, s in screened.items() if w.target.name in s.gains},
            tuple(fallback for fallback, chosen in selected.items() if w in chosen),
            verifier.reasons.get(w.target.name, ""),
        )
        for w in winners
    ]
    known |= dict(parity=parity, diagnosis=diagnosis, errors=verifier.errors, spread=verifier.spread)
    seconds = time.perf_counter() - started
    found = Verification(plan.model, plan.device, EAGER not in wrong, tuple(kernels), **known, seconds=seconds)
    if traces:
        keep_traces(found, [workload.name for workload, _ in workloads], traces)
    verifier.notes.forget()
    return found


class Verifier:
    """The kernels still in play, and the measurements that decide which of them stay."""

    def __init__(
        self,
        workloads: tuple[Weighted, ...],
        winners: tuple[Winner, ...],
        settings: Settings,
        say: Callable[[str], None],
        notes: Notes,
        log: Path | None = None,
        speedups: Mapping[str, float] | None = None,
        traces: Path | None = None,
    ):
        self.workloads, self.winners, self.settings, self.say, self.notes = workloads, winners, settings, say, notes
        self.log, self.speedups, self.traces = log, speedups or {}, traces
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.processes: list[Process] = []
        self.sites: dict[str, int] = {}  # target -> calls in one pass that its kernel replaces
        self.compared: dict[tuple[str, ...], tuple[Parity, ...]] = {}  # names of a Variant -> its outputs' parity
        self.room: dict[str, int] = {}  # what a process does -> how many more have room beside it
        self.tuning: Tuning | None = None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What may have the rest of the model beside kernels."""
        return (EAGER, INDUCTOR) if self.workloads[0][0].device == "cpu" else (EAGER, INDUCTOR, GRAPHS)

    @property
    def screened(self) -> dict[str, str]:
        """Fallback -> over which one it is looked at what the model gains by each kernel.

        With CUDA graphs and without them, torch.compile runs the same code.
        """
        return {fallback: fallback if fallback == EAGER else self.fallbacks[-1] for fallback in self.fallbacks}

    def leave_out(self, winner: Winner, why: str) -> None:
        self.winners = tuple(w for w in self.winners if w is not winner)
        self.reasons[winner.target.name] = why
        self.say(f"{winner.target.name} is left out: {why}")

    def parity(self, kernels: Mapping[str, tuple[Winner, ...]], fallback: str = "") -> dict[str, tuple[Parity, ...]]:
        """Of the outputs with some kernels each, over `fallback`, or else over the one that is their name here.

        What differs in its fallback is compared by one process, to one original.
        """
        sides = {name: Variant(winners, fallback or name) for name, winners in kernels.items()}
        new = [side for side in sides.values() if side.names not in self.compared]
        for side in new:
            self.say(f"outputs over {side.fallback} with {', '.join(w.target.name for w in side.winners)}")
        tasks = [(side,) for side in new] if fallback else [tuple(new)] * bool(new)
        s = self.settings
        asked = [(workload, task, s.atol, s.rtol) for task in tasks for workload, _ in self.workloads]
        found = self.answers(decode_parity, compare_outputs, asked)
        for task, of_task in zip(tasks, _grouped(found, len(self.workloads))):
            self.take_parity(task, of_task)
        return {name: self.compared[side.names] for name, side in sides.items()}

    def take_parity(self, sides: Sequence[Variant], of_workloads: Sequence[Compared]) -> None:
        for side, of_side in zip(sides, zip(*of_workloads)):
            self.sites |= {w.target.name: sum(sites[w.target.name] for _, sites in of_side) for w in side.winners}
            self.compared[side.names] = tuple(p for parity, _ in of_side for p in parity)

    def diagnose(self) -> dict[str, tuple[Parity, ...]]:
        return self.parity({w.target.name: (w,) for w in self.winners}, EAGER)

    def leave_out_wrong(self, diagnosis: Mapping[str, tuple[Parity, ...]]) -> None:
        for winner in self.winners:
            if not all(p.passed for p in diagnosis[winner.target.name]):
                self.leave_out(winner, "the model's outputs are wrong with it")

    def leave_out_absent(self) -> None:
        for winner in self.winners:
            if not self.sites[winner.target.name]:
                self.leave_out(winner, "its operation was not found in the model again")

    def promised(self, winner: Winner) -> float:
        """The share of the model's time that a kernel saves by its own timing; without one, all of its operation's."""
        speedup = self.speedups.get(winner.target.name, math.inf)
        return winner.target.share * (1 - 1 / winner.target.over_model(speedup))

    @contextmanager
    def tuning_meanwhile(self) -> Iterator[None]:
        """AUTOTUNED has its first calls beside what is done here, until final() wants to have it, where there are cores and
        memory for one more process."""
        workloads = tuple(workload for workload, _ in self.workloads)
        if not self.winners or self.compilers < 3 or workloads[0].device == "cpu":
            yield
            return
        with (
            TemporaryDirectory(ignore_cleanup_errors=True) as caches,
            FreshProcess(workloads[0].device, tune_side.__name__, self.log) as process,
        ):
            self.tuning = Tuning(process, caches)
            self.tuning.start(workloads)
            yield

    def leave_one_out(self) -> dict[str, "Screening"]:
        """What the model gains by each kernel, over each fallback."""
        small = {w.target.name for w in self.winners if self.promised(w) < MATTERS}
        fallbacks = dict.fromkeys(self.screened.values()) if self.winners else ()
        screenings = [Screening(fallback, self.winners, small) for fallback in fallbacks]
        for processes in SCREENING:
            # The first over torch.compile is first of all, and alone where nothing is known of what it takes: the others
            # find compiled what they share with it.
            unsettled = [s for s in reversed(screenings) if s.without]
            asked = [(s, i, s.sides(i)) for s in unsettled for i in range(len(s.taken), processes)]
            told = [f"with and without each kernel, over {s}, process {i + 1}" for s, i, _ in asked]
            taken = self.measure([sides for _, _, sides in asked], told, compile_first=processes == SCREENING[0])
            for (screening, _, _), process in zip(asked, taken):
                screening.taken.append(process)
            for screening in screenings:
                screening.look(is_first=processes == SCREENING[0])
        return {screening.fallback: screening for screening in screenings}

    def choose_sets(self, screenings: Collection["Screening"]) -> None:
        """Over each fallback the kernels that pay, or another set of them where that is faster, beyond doubt."""
        open_ones = [s for s in screenings if hope(s.told, s.gained) >= 1 + MATTERS]
        asked = [(s, i) for s in open_ones for i in range(CHOOSING)]
        told = [f"sets of kernels, over {s}, process {i + 1} of {CHOOSING}" for s, i in asked]
        taken = self.measure([s.sets for s, _ in asked], told, compile_first=True) if asked else []
        for screening, processes in zip(open_ones, _grouped(taken, CHOOSING)):
            screening.choose(processes)
        for screening in screenings:
            self.say(f"{len(screening.selected)} of {len(self.winners)} kernels stay over {screening}")

    def final(self, selected: Mapping[str, tuple[Winner, ...]]) -> tuple[dict[str, object], dict[str, tuple[Parity, ...]]]:
        """What remains beside the model untouched and every torch.compile, on data that decided nothing; and its outputs
        over each fallback, which the last process compares when it has been timed."""
        selected = {fallback: winners for fallback, winners in selected.items() if winners}
        modes = (*self.fallbacks, AUTOTUNED)
        sides = {baseline(fallback): Variant((), fallback) for fallback in modes if fallback not in self.errors}
        kernels = {ours(fallback): Variant(winners, fallback) for fallback, winners in selected.items()}
        sides |= kernels
        told = [f"{', '.join(sides)}, process {i + 1} of {PROCESSES}" for i in range(PROCESSES)]
        kept = nullcontext(self.tuning.caches) if self.tuning else TemporaryDirectory(ignore_cleanup_errors=True)
        with kept as caches:
            last = self.after_timing(kernels)
            if self.together(sides) > 1:
                taken = self.measure([sides] * PROCESSES, told, caches, last=last, compile_first=True)
            else:  # the first finds empty what compilers keep, alone
                self.tuned()
                taken = self.measure([sides], told[:1], caches)
                taken += self.measure([sides] * (PROCESSES - 1), told[1:], caches, peaks=False, last=last)
        if kernels and all(found["parity"] for found in taken[-1].last):
            self.take_parity(tuple(kernels.values()), [decode_parity(found["parity"]) for found in taken[-1].last])
        if untraced := [found["untraced"] for found in taken[-1].last if found.get("untraced")]:
            self.say(f"no traces: {untraced[0]}")
        built = [name for name in sides if name in taken[0].names]
        modes = [fallback for fallback in modes if baseline(fallback) in built]
        found = {
            "figures": {str(w): figures(taken, i, built) for i, (w, _) in enumerate(self.workloads)},
            "speedups": {
                fallback: {baseline(mode): speedup(taken, baseline(mode), ours(fallback)) for mode in modes}
                for fallback in selected
                if ours(fallback) in built
            },
            "without": {fallback: speedup(taken, EAGER, baseline(fallback)) for fallback in modes if fallback != EAGER},
            "processes": PROCESSES,
            "rounds": sum(len(sample.rounds) for process in taken for sample in process.samples),
            "allocator": allocator(),
        }
        return found, self.parity(selected)  # in a process of its own, where the last one lacked memory

    def after_timing(self, kernels: Mapping[str, Variant]) -> Ends:
        """What the last process does when it has been timed: it has all forms built, and each ran many times."""
        asked: Ends = {}
        if kernels:
            asked["parity"] = partial(compare_built, sides=kernels, atol=self.settings.atol, rtol=self.settings.rtol)
        if kernels and self.traces:
            asked["untraced"] = partial(trace_built, names=(baseline(EAGER), *kernels), folder=str(self.traces))
        return asked

    def measure(
        self,
        tasks: Sequence[Mapping[str, Variant]],
        told: Sequence[str],
        caches: str | None = None,
        peaks: bool = True,
        last: Ends | None = None,
        compile_first: bool = False,
    ) -> list["Process"]:
        """Every side of each task, in a fresh process for each workload; what is `told` of it as it is timed. `last`: what
        those of the last task do after it. `compile_first`: those of the first task side by side, as compile() does it;
        then all tasks begin at once, and AUTOTUNED is built by one process, and then by the others."""
        s, count = self.settings, len(self.workloads)
        alone = {n: side for n, side in tasks[0].items() if side.fallback == AUTOTUNED} if tasks and compile_first else {}
        tasks = [{name: side for name, side in sides.items() if name not in alone} for sides in tasks]
        asked = [(workload, sides) for sides in tasks for workload, _ in self.workloads]
        told = [f"{line}{f', {w}' if count > 1 else ''}" for line in told for w, _ in self.workloads]
        build = partial(build_sides, caches=caches, peaks=peaks)
        compiled = partial(self.compile, tasks[0], caches) if compile_first and tasks else None
        tune = partial(build_alone, sides=alone, caches=caches) if alone else None
        ends: list[Ends] = [{"sample": partial(sample_sides, warmup=s.warmup, timed=s.timed)}] * len(asked)
        ends[-count:] = [end | (last or {}) for end in ends[-count:]]
        answers = self.answers(dict, build, asked, ends, told, compiled, tune)
        weights = tuple(weight for _, weight in self.workloads)
        taken = [
            Process(tuple(Sample.decode(found["sample"]) for found in of_task), weights, tuple(of_task))
            for of_task in _grouped(answers, count)
        ]
        for process in taken:
            self.processes.append(process)
            self.errors |= process.errors
        for name, why in dict(item for process in taken for s in process.samples for item in s.idle.items()).items():
            self.say(f"{name}: no kernel is in it ({why})")
        return taken

    def answers(
        self,
        decode: Callable[[Any], T],
        begin: Callable[..., Any],
        questions: Sequence[tuple[Any, ...]],
        ends: Sequence[Ends] = (),
        told: Sequence[str] = (),
        compiled: Callable[[], FirstCalls] | None = None,
        tune: Callable[..., None] | None = None,
    ) -> list[T]:
        """What a fresh process answers to each question, begin(*question, seed): as many side by side as have room.

        Where there are `ends`, the answers are those of end(seed), by their names, which come after it and while no other
        process does anything; `told` says of which question. What was answered before an interruption is not asked again.
        `compiled` comes before all of it, and is for build_sides(); `tune` between the two, by the first process of each
        question alone, and then by the others, who find what it has compiled.
        """
        name = getattr(begin, "func", begin).__name__
        asked = list(zip(questions, [tuple(end) for end in ends] or [()] * len(questions)))
        keys = [self.notes.key(repr((name, torch.__version__, question, self.settings))) for question in asked]
        missing = [i for i, key in enumerate(keys) if key not in self.notes.known]
        if missing and compiled:
            begin = partial(begin, first_calls=compiled())
        have_tuned: set[str] = set()
        while missing:
            room = 1 + self.room.get(name, 0)  # the first shows what one takes
            width = max(1, min(room, len(usable_cores())))
            if len(missing) == width + 1 <= room:  # rather than the last one alone
                width += 1
            batch, missing = missing[:width], missing[width:]
            if ends:
                self.say(f"models are built, by {counted(batch, 'process')}")
            with ExitStack() as stack:
                seeds = {i: secrets.randbits(31) for i in batch}
                processes = {i: stack.enter_context(FreshProcess(questions[i][0].device, name, self.log)) for i in batch}
                try:
                    for i, process in processes.items():
                        process.start(begin, *questions[i], seeds[i])
                    begun = {i: process.answer() for i, process in processes.items()}
                    if tune:
                        self.tune(tune, {i: str(questions[i][0]) for i in batch}, processes, seeds, have_tuned)
                    elif ends and self.tuning:
                        stack.enter_context(self.tuning.paused())
                    for i, process in processes.items():
                        if ends:
                            self.say(told[i])
                            begun[i] = {what: process.ask(end, seeds[i]) for what, end in ends[i].items()}
                        self.notes.write(keys[i], begun[i])
                        if name not in self.room:
                            self.room[name], to_compile = process.ask(rooms_beside, questions[i][0].device)
                            self.room.setdefault(compile_side.__name__, to_compile)
                        process.close()  # what it holds, the next one may need
                except Exception:
                    if self.log:
                        self.say(f"{name} failed; what its process printed is in {os.path.relpath(self.log)}")
                    raise
        return [decode(self.notes.known[key]) for key in keys]

    def tune(
        self,
        build: Callable[..., None],
        workloads: Mapping[int, str],
        processes: Mapping[int, FreshProcess],
        seeds: Mapping[int, int],
        known: set[str],
    ) -> None:
        """AUTOTUNED, in each of these processes: while nothing else is at work in the first of a workload that is not
        `known`; then in the others, who find compiled and chosen what it needs."""
        build = partial(build, first_calls=self.tuned())
        others = dict(processes)
        for i, workload in workloads.items():
            if workload not in known:
                self.say(f"{baseline(AUTOTUNED)} chooses its kernels, in a process alone")
                known.add(workload)
                others.pop(i).ask(build, seeds[i])
        for i, process in others.items():
            process.start(build, seeds[i])
        for process in others.values():
            process.answer()

    def tuned(self) -> FirstCalls:
        """What AUTOTUNED's first calls took, if they were made meanwhile: waits for them."""
        tuning, self.tuning = self.tuning, None
        return tuning.ended() if tuning else {}

    @property
    def compilers(self) -> int:
        """How many processes may compile side by side."""
        return min(1 + self.room.get(compile_side.__name__, 0), len(usable_cores()) // COMPILING_CORES)

    def together(self, sides: Mapping[str, Variant]) -> int:
        """How many of these sides compile() has compiled side by side, where it does at all."""
        compiled = [side for side in sides.values() if side.fallback not in (EAGER, AUTOTUNED)]
        return len(compiled) if self.compilers > 1 else 0

    def compile(self, sides: Mapping[str, Variant], caches: str | None = None) -> FirstCalls:
        """Have each side's first call made by a process of its own, side by side, where there are cores and memory for it:
        whoever calls them later finds them compiled, in `caches` if there are any. Seconds of the calls.

        Without those of AUTOTUNED, which times kernels while it compiles. What fails is left to who calls it later.
        """
        found: dict[str, dict[str, float]] = {}
        width = self.compilers - bool(self.tuning)
        names = [name for name, side in sides.items() if side.fallback not in (EAGER, AUTOTUNED)]
        missing = [(workload, name) for workload, _ in self.workloads for name in names]
        if self.together(sides) < 2:
            return found
        while missing:
            batch, missing = missing[:width], missing[width:]
            self.say(f"torch.compile has its first calls, in {counted(batch, 'process')}")
            with ExitStack() as stack:
                asked = []
                for workload, name in batch:
                    process = stack.enter_context(FreshProcess(workload.device, compile_side.__name__, self.log))
                    process.start(compile_side, workload, name, sides[name], secrets.randbits(31), caches)
                    asked.append((workload, name, process))
                for workload, name, process in asked:
                    with suppress(Exception):
                        found.setdefault(str(workload), {})[name] = process.answer()
                        if build_sides.__name__ not in self.room:
                            self.room[build_sides.__name__] = process.ask(rooms_for, workload.device, len(sides)) - 1
                    process.close()
        return found

    @property
    def spread(self) -> float | None:
        samples = [sample for process in self.processes for sample in process.samples]
        seconds = [sample.seconds(side) for sample in samples for side in sample.rounds[0]]
        return median(median(s) / min(s) for s in seconds) - 1 if seconds else None


class Tuning:
    """AUTOTUNED's first calls, by a process beside which others build what they measure. Triton's kernels stay in `caches`,
    for who has its first call once more, with nothing else at work, and chooses among them anew."""

    def __init__(self, process: FreshProcess, caches: str):
        self.process, self.caches, self.paused_s = process, caches, 0.0

    def start(self, workloads: Sequence[Workload]) -> None:
        side = Variant((), AUTOTUNED)
        self.process.start(tune_side, workloads, baseline(AUTOTUNED), side, secrets.randbits(31), self.caches)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.process.paused():
            since = time.perf_counter()
            try:
                yield
            finally:
                self.paused_s += time.perf_counter() - since

    def ended(self) -> FirstCalls:
        """What they took, each without its part of the pauses. What failed, fails again for who builds it."""
        try:
            found: FirstCalls = self.process.answer(TUNING_S)
        except Exception:
            found = {}
            self.process.kill()
        self.process.close()
        paused_s = self.paused_s / max(1, len(found))
        return {workload: {name: s - paused_s for name, s in calls.items()} for workload, calls in found.items()}


@dataclass
class Screening:
    """Over one fallback: what the model gains by each kernel beside all the others, until that is settled. `small`: the
    names of those that promise less than what MATTERS."""

    fallback: str
    winners: tuple[Winner, ...]
    small: Collection[str] = ()
    taken: list["Process"] = field(default_factory=list)
    gains: dict[str, Interval] = field(default_factory=dict)
    without: dict[str, Variant] = field(init=False)  # sides whose gain is not settled, each without one kernel
    names: Names | None = None  # of the kernels that stay, if not those that pay one by one

    def __post_init__(self) -> None:
        others = {w.target.name: tuple(o for o in self.winners if o is not w) for w in self.winners}
        self.without = {name: Variant(kernels, self.fallback) for name, kernels in others.items()}

    def __str__(self) -> str:
        return self.fallback

    def sides(self, process: int) -> dict[str, Variant]:
        """For that process. What torch.compile makes of the model alone comes first; without the only kernel it is that."""
        is_apart = self.fallback != EAGER and len(self.winners) > 1 and process == 0
        alone = {baseline(self.fallback): Variant((), self.fallback)} if is_apart else {}
        return alone | self.without | {ours(self.fallback): Variant(self.winners, self.fallback)}

    def look(self, is_first: bool) -> None:
        """Which gains are settled by now: such kernels cost later processes no model of their own."""
        if any(self.fallback in process.errors for process in self.taken):  # where torch.compile fails, none stays over it
            self.gains, self.without = {}, {}
            return
        timed = {w.target.name: [i for i, p in enumerate(self.taken) if w.target.name in p.names] for w in self.winners}
        ratios = {
            name: {i: self.taken[i].log_ratio(name, ours(self.fallback)) for i in known}
            for name, known in timed.items()
            if known
        }
        known = ratio_intervals(ratios, INTERVAL)
        self.gains |= {name: known[name] for name in self.without}
        self.without = {name: side for name, side in self.without.items() if self.goes_on(name, is_first, len(ratios))}

    def goes_on(self, name: str, is_first: bool, sides: int) -> bool:
        """Whether a kernel's gain is measured once more. The first look does not tell small gains from none: what their own
        timing promises does. Later ones do, and whether the last process may settle them."""
        gain = self.gains[name]
        if gain.low >= 1:
            return False
        if is_first:
            return gain.value >= 1 + MATTERS or name not in self.small
        last = foreseen(gain, sides, len(self.taken), SCREENING[-1], INTERVAL)
        return gain.value >= 1 + MATTERS and math.log(gain.value) >= HOPE * math.log(last.value / last.low)

    @property
    def gained(self) -> float | None:
        """What the model gains by all kernels together, where that was looked at."""
        alone, every = baseline(self.fallback), ours(self.fallback)
        ratios = [process.log_ratio(alone, every) for process in self.taken if alone in process.names]
        return math.exp(mean(ratios)) if ratios else None

    @property
    def told(self) -> dict[str, Interval]:
        """The gains without what may be noise: of kernels that promise little and were not measured until settled."""
        unsure = {name for name, gain in self.gains.items() if name in self.small and gain.low < 1 < gain.high}
        return self.gains | {name: replace(self.gains[name], value=1.0) for name in unsure}

    @property
    def rival_sets(self) -> dict[str, Names]:
        return {f"set {i + 1}": names for i, names in enumerate(rivals(self.gains))}

    @property
    def sets(self) -> dict[str, Variant]:
        """The kernels that pay, and their rivals."""
        sets = {KNOWN: paying(self.gains)} | self.rival_sets
        return {side: Variant(self.of(names), self.fallback) for side, names in sets.items()}

    def choose(self, processes: Sequence["Process"]) -> None:
        ratios = {
            side: {i: p.log_ratio(KNOWN, side) for i, p in enumerate(processes) if {side, KNOWN} <= p.names}
            for side in self.rival_sets
        }
        known = ratio_intervals({side: of_side for side, of_side in ratios.items() if of_side}, INTERVAL)
        self.names = chosen(paying(self.gains), {self.rival_sets[side]: speedup for side, speedup in known.items()})

    def of(self, names: Names) -> tuple[Winner, ...]:
        return tuple(w for w in self.winners if w.target.name in names)

    @property
    def selected(self) -> tuple[Winner, ...]:
        """The kernels that stay."""
        return self.of(paying(self.gains) if self.names is None else self.names)


@dataclass(frozen=True)
class Process:
    """One process of each workload; what is compared is the time of all workloads, by their weights."""

    samples: tuple[Sample, ...]
    weights: tuple[float, ...]
    last: tuple[Mapping[str, Any], ...] = ()  # what else each answered

    @property
    def errors(self) -> dict[str, str]:
        return {fallback: error for sample in self.samples for fallback, error in sample.errors.items()}

    @property
    def names(self) -> set[str]:
        """Of sides that all workloads have."""
        return set.intersection(*(set(sample.rounds[0]) for sample in self.samples))

    def log_ratio(self, slow: str, fast: str) -> float:
        """Of the times of all workloads; in each, the median of the rounds' paired ratios."""
        times = [weight * median(s.seconds(fast)) for s, weight in zip(self.samples, self.weights)]
        ratios = [median(math.log(a / b) for a, b in zip(s.seconds(slow), s.seconds(fast))) for s in self.samples]
        return math.log(sum(t * math.exp(r) for t, r in zip(times, ratios)) / sum(times))


def _grouped(values: Sequence[T], count: int) -> list[Sequence[T]]:
    return [values[i : i + count] for i in range(0, len(values), count)]


def speedup(processes: Sequence[Process], slow: str, fast: str) -> Interval:
    """Of `fast` over `slow`: an interval over processes."""
    return ratio_interval([process.log_ratio(slow, fast) for process in processes], INTERVAL)


def figures(processes: Sequence[Process], workload: int, sides: Sequence[str]) -> dict[str, Figures]:
    """Of each side in one workload. Only the first process's first calls found the caches of compilers empty."""
    samples = [process.samples[workload] for process in processes]
    return {
        side: Figures(
            1e3 * median(s for sample in samples for s in sample.seconds(side)),
            samples[0].first_call_s[side],
            samples[0].peak_mb[side],
            mean(passes[side].page_faults for sample in samples for passes in sample.rounds),
        )
        for side in sides
    }
