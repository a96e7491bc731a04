"""verify(): put the kept kernels into the model, drop those that do not pay there, and measure what remains."""

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from autokernel.gate.timing.statistics import ratio_interval
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, GRAPHS, INDUCTOR, baseline, ours
from autokernel.integration.verification.notes import Notes
from autokernel.integration.verification.parity import compare_outputs, decode_parity
from autokernel.integration.verification.record import Figures, KernelInModel, Parity, Verification
from autokernel.integration.verification.sides import Sample, Variant, allocator, in_fresh_process, time_sides
from autokernel.integration.winner import Winner
from autokernel.model.workload import Workload
from autokernel.target import Plan
from autokernel.verdict import Interval

CONFIDENCE = 0.95
PROCESSES = 4  # for the final figures
SCREENING = (2, 3, 6)  # processes after which gains are looked at: all settled, or the last for those that promise MATTERS
MATTERS = 0.01  # of the model's speed
T = TypeVar("T")
Weighted = tuple[Workload, float]  # and its share of the passes


@dataclass(frozen=True)
class Settings:
    warmup: int = 0  # rounds of passes of every side before any is timed; each has run twice by then
    timed: int | None = None  # rounds per process, every side runs twice in each; None: as many as fit a few seconds
    atol: float | None = None  # None: by dtype
    rtol: float | None = None
    diagnose: bool = False  # parity of every kernel alone, also when all together are right


def verify(
    plan: Plan,
    winners: Sequence[Winner],
    speedups: Mapping[str, float] | None = None,
    settings: Settings = Settings(),
    say: Callable[[str], None] = lambda line: None,
    notes: Path | None = None,
    log: Path | None = None,
) -> Verification:
    """Put `winners` into the plan's model, drop those that do not pay there, and measure what remains.

    speedups: each target's kernel over PyTorch by itself, for Amdahl's prediction. `say` gets a line for each step. notes:
    a file that is there while this works; after an interruption the same call goes on with what was found so far. log: a
    file for what the processes print. Kernels that are slower than PyTorch by themselves are not tried.
    """
    started, speedups = time.perf_counter(), speedups or {}
    verifier = Verifier(Workload.from_json(plan.workload).parts, tuple(winners), settings, say, Notes(notes), log)
    if verifier.notes.known:
        say(f"goes on with what {len(verifier.notes.known)} processes found before an interruption")
    for winner in winners:
        if speedups.get(winner.target.name, math.inf) < 1:
            verifier.leave_out(winner, "slower than PyTorch by itself")
    diagnosis = verifier.diagnose() if settings.diagnose else {}
    if verifier.winners and not all(p.passed for p in verifier.parity(verifier.winners, EAGER)):
        diagnosis = diagnosis or verifier.diagnose()
        verifier.leave_out_wrong(diagnosis)
    verifier.leave_out_absent()
    selected, gains, parity = {}, {}, {}
    for fallback in verifier.fallbacks:
        selected[fallback], gains[fallback] = verifier.leave_one_out(fallback)
        if selected[fallback]:
            parity[fallback] = verifier.parity(selected[fallback], fallback)
            selected[fallback] = selected[fallback] if all(p.passed for p in parity[fallback]) else ()
    kernels = [
        KernelInModel(
            w.target.name,
            w.target.kernel_type,
            w.name,
            w.target.share,
            speedups.get(w.target.name) and w.target.over_model(speedups[w.target.name]),
            verifier.sites.get(w.target.name, 0),
            {fallback: gain[w.target.name] for fallback, gain in gains.items() if w.target.name in gain},
            tuple(fallback for fallback, chosen in selected.items() if w in chosen),
            verifier.reasons.get(w.target.name, ""),
        )
        for w in winners
    ]
    passed = all(p.passed for p in parity.get(EAGER, ()))
    known = dict(parity=parity, diagnosis=diagnosis, errors=verifier.errors)
    known |= verifier.final({fallback: chosen for fallback, chosen in selected.items() if chosen and passed})
    seconds = time.perf_counter() - started
    verifier.notes.forget()
    return Verification(plan.model, plan.device, passed, tuple(kernels), **known, spread=verifier.spread, seconds=seconds)


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
    ):
        self.workloads, self.winners, self.settings, self.say, self.notes = workloads, winners, settings, say, notes
        self.log = log
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.processes: list[Process] = []
        self.sites: dict[str, int] = {}  # target -> calls in one pass that its kernel replaces

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What may have the rest of the model beside kernels."""
        return (EAGER, INDUCTOR) if self.workloads[0][0].device == "cpu" else (EAGER, INDUCTOR, GRAPHS)

    def leave_out(self, winner: Winner, why: str) -> None:
        self.winners = tuple(w for w in self.winners if w is not winner)
        self.reasons[winner.target.name] = why
        self.say(f"{winner.target.name} is left out: {why}")

    def parity(self, winners: tuple[Winner, ...], fallback: str) -> tuple[Parity, ...]:
        self.say(f"outputs over {fallback} with {', '.join(w.target.name for w in winners)}")
        side, s = Variant(winners, fallback), self.settings
        found = [self.ask(decode_parity, compare_outputs, workload, side, s.atol, s.rtol) for workload, _ in self.workloads]
        self.sites |= {w.target.name: sum(sites[w.target.name] for _, sites in found) for w in winners}
        return tuple(p for parity, _ in found for p in parity)

    def diagnose(self) -> dict[str, tuple[Parity, ...]]:
        return {w.target.name: self.parity((w,), EAGER) for w in self.winners}

    def leave_out_wrong(self, diagnosis: Mapping[str, tuple[Parity, ...]]) -> None:
        for winner in self.winners:
            if not all(p.passed for p in diagnosis[winner.target.name]):
                self.leave_out(winner, "the model's outputs are wrong with it")

    def leave_out_absent(self) -> None:
        for winner in self.winners:
            if not self.sites[winner.target.name]:
                self.leave_out(winner, "its operation was not found in the model again")

    def leave_one_out(self, fallback: str) -> tuple[tuple[Winner, ...], dict[str, Interval]]:
        """The kernels with which the model is faster than without them, their whole intervals at or above 1; all gains.

        Where torch.compile fails, no kernel stays over it.
        """
        winners = self.winners
        # What torch.compile makes of the model alone comes first; without the only kernel, it is that.
        alone = {baseline(fallback): Variant((), fallback)} if fallback != EAGER and len(winners) > 1 else {}
        without = {w.target.name: Variant(tuple(o for o in winners if o is not w), fallback) for w in winners}
        taken: list[Process] = []
        gains: dict[str, Interval] = {}
        for processes in SCREENING if winners else ():
            while len(taken) < processes:
                self.say(f"with and without each kernel, over {fallback}, process {len(taken) + 1}")
                taken.append(self.measure(alone | without | {ours(fallback): Variant(winners, fallback)}))
                alone = {}
                if fallback in taken[-1].errors:
                    return (), {}
            gains |= {name: speedup([p for p in taken if name in p.names], name, ours(fallback)) for name in without}
            small = 1 + MATTERS if processes > SCREENING[0] else 0.0  # the first look does not tell small gains from none
            # What is settled costs later processes no model of its own.
            without = {n: side for n, side in without.items() if gains[n].low < 1 and gains[n].value >= small}
            if not without:
                break
        selected = tuple(w for w in winners if gains[w.target.name].low >= 1)
        self.say(f"{len(selected)} of {len(winners)} kernels stay over {fallback}")
        return selected, gains

    def final(self, selected: Mapping[str, tuple[Winner, ...]]) -> dict[str, object]:
        """What remains beside the model untouched and every torch.compile, on data that decided nothing."""
        modes = (*self.fallbacks, AUTOTUNED)
        sides = {baseline(fallback): Variant((), fallback) for fallback in modes if fallback not in self.errors}
        sides |= {ours(fallback): Variant(winners, fallback) for fallback, winners in selected.items()}
        taken = []
        with TemporaryDirectory(ignore_cleanup_errors=True) as caches:  # empty for the first process
            for index in range(PROCESSES):
                self.say(f"{', '.join(sides)}, process {index + 1} of {PROCESSES}")
                taken.append(self.measure(sides, caches))
        built = [name for name in sides if name in taken[0].names]
        modes = [fallback for fallback in modes if baseline(fallback) in built]
        return {
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

    def measure(self, sides: Mapping[str, Variant], caches: str | None = None) -> "Process":
        """Every side, in a fresh process for each workload."""
        decode, s = Sample.decode, self.settings
        samples = [
            self.ask(decode, time_sides, workload, sides, s.warmup, s.timed, caches=caches)
            for workload, _ in self.workloads
        ]
        process = Process(tuple(samples), tuple(weight for _, weight in self.workloads))
        self.processes.append(process)
        self.errors |= process.errors
        return process

    def ask(
        self, decode: Callable[[Any], T], function: Callable[..., T], workload: Workload, *arguments: Any, **places: Any
    ) -> T:
        """function(workload, *arguments, seed, **places) by a fresh process; or what one found before an interruption.

        Where it works (`places`) makes no other question of it.
        """

        def answer() -> T:
            seed = secrets.randbits(31)
            call = partial(function, **places)
            try:
                return in_fresh_process(workload.device, call, workload, *arguments, seed, log=self.log)
            except Exception:
                if self.log:
                    self.say(f"{function.__name__} failed; what its process printed is in {os.path.relpath(self.log)}")
                raise

        return self.notes.once(repr((function.__name__, torch.__version__, workload, arguments)), answer, decode)

    @property
    def spread(self) -> float | None:
        samples = [sample for process in self.processes for sample in process.samples]
        seconds = [sample.seconds(side) for sample in samples for side in sample.rounds[0]]
        return median(median(s) / min(s) for s in seconds) - 1 if seconds else None


@dataclass(frozen=True)
class Process:
    """One process of each workload; what is compared is the time of all workloads, by their weights."""

    samples: tuple[Sample, ...]
    weights: tuple[float, ...]

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


def speedup(processes: Sequence[Process], slow: str, fast: str) -> Interval:
    """Of `fast` over `slow`: an interval over processes."""
    return ratio_interval([process.log_ratio(slow, fast) for process in processes], CONFIDENCE)


def figures(processes: Sequence[Process], workload: int, sides: Sequence[str]) -> dict[str, Figures]:
    """Of each side in one workload. Only in the first process were the caches of compilers empty."""
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
