"""What verify.py found: the record that it writes, and its words for people."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autokernel.common.records import reads, record_from
from autokernel.common.verdict import Interval
from autokernel.common.words import counted
from autokernel.gate.timing.statistics import product
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, GRAPHS, INDUCTOR, Form, baseline, ours
from autokernel.integration.winner import Winner

BUSY = 0.15  # spread of passes above which the report says that the machine was disturbed (idle: 0.01-0.05)
UNEXPECTED = 0.1  # difference from Amdahl's prediction that is explained
ERROR_GROWTH = 3.0  # the optimised model's rms error against the exact one may be this many times the original's
AGREEMENT_LOSS = 0.01  # top-1 answers that may differ from the exact model's beyond those of the original (near ties)
INTERVAL = 0.95  # confidence of a verification's intervals


@dataclass(frozen=True)
class Settings:
    """How a verification measures and compares."""

    warmup: int = 0  # rounds of passes of every side before any is timed; each has run twice by then
    timed: int | None = None  # rounds per process, every side runs twice in each; None: until they settle, or a few seconds
    atol: float | None = None  # None: by dtype
    rtol: float | None = None
    diagnose: bool = False  # parity of every kernel alone, also when all together are right


DEFAULTS = Settings()


@dataclass(frozen=True)
class Parity:
    """The outputs on one fresh input. Errors are rms against a more exact model, relative to the rms of its output."""

    workload: str
    seed: int
    largest_difference: float  # between optimised and original
    within_tolerance: bool
    exact: str | None = None  # dtype of the more exact model; None: there is none
    error_original: float | None = None
    error_optimised: float | None = None
    agreement_original: float | None = None  # share of argmax over the last dim equal to the exact model's
    agreement_optimised: float | None = None

    @property
    def passed(self) -> bool:
        if not self.within_tolerance:
            return False
        if self.exact is None:
            return True
        no_worse = self.error_optimised <= max(ERROR_GROWTH * self.error_original, torch.finfo(torch.float32).eps)
        return no_worse and self.agreement_optimised >= self.agreement_original - AGREEMENT_LOSS


@dataclass(frozen=True)
class KernelInModel:
    """What became of one kept kernel, over each of EAGER, INDUCTOR, …: other ones may pay where Inductor fuses the rest."""

    target: str
    kernel_type: str
    kernel: str  # name of its operator, which stands for its source
    share: float  # of the original's time, 0..1
    speedup: float | None = None  # of the kernel by itself, as the gate measured it, over what the model spends there
    sites: int = 0  # calls in one pass that it replaces
    gains: Mapping[str, Interval] = field(default_factory=dict)  # model with all kernels over model with all but this one
    used: tuple[str, ...] = ()  # over what it stays
    why_not: str = ""  # it was not tried over anything

    @property
    def words(self) -> str:
        """What became of it, and why."""
        return self.why_not or "; ".join(self._over(fallback, gain) for fallback, gain in self.gains.items())

    def _over(self, fallback: str, gain: Interval) -> str:
        if fallback in self.used:
            how = "" if gain.low >= 1 else " in a set that is faster than the kernels which pay one by one"
            return f"stays over {fallback}{how}, where the model is {gain} as fast with it"
        doubt = ", which is not beyond doubt" if gain.low < 1 <= gain.value else ""
        return f"left out over {fallback}, where the model is {gain} as fast with it beside all others{doubt}"


@dataclass(frozen=True)
class Figures:
    """One way to run one workload."""

    milliseconds: float  # of a pass, the median
    first_call_s: float  # with compilation
    peak_mb: float | None  # memory of a pass beyond the weights
    page_faults: float  # of a pass, the CPU's


@dataclass(frozen=True)
class Verification:
    """What verify.py prints and writes to verify.json. Speedups are paired ratios of times, over processes.

    `figures`: workload -> way to run it ("torch.compile", "kernels over eager") -> Figures; see baseline() and ours().
    `speedups`: what has the rest of our model -> baseline -> how much faster ours is, over all workloads by their weights.
    `without`: INDUCTOR, … -> how much faster the model is there without kernels than as it is, untouched.
    """

    model: str
    device: str
    passed: bool
    kernels: tuple[KernelInModel, ...] = ()
    parity: Mapping[str, tuple[Parity, ...]] = field(default_factory=dict)  # of the kernels that are used over it
    figures: Mapping[str, Mapping[str, Figures]] = field(default_factory=dict)
    speedups: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    without: Mapping[str, Interval] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)  # INDUCTOR, … -> why it cannot run this model
    processes: int = 0
    rounds: int = 0  # in all processes together
    spread: float | None = None  # by which the median pass was slower than the fastest: the machine's disturbance
    allocator: str = ""
    diagnosis: Mapping[str, tuple[Parity, ...]] = field(default_factory=dict)  # target -> outputs with its kernel alone
    seconds: float = 0.0

    def used_over(self, fallback: str | None) -> tuple[str, ...]:
        """Targets whose kernels are to be used where `fallback` (None, "inductor", …) has the rest of the model."""
        graphs = fallback == GRAPHS and self.device != "cpu"  # which has no CUDA graphs: that mode is the default's
        name = (GRAPHS if graphs else INDUCTOR) if fallback else EAGER
        return tuple(k.target for k in self.used(name)) if self.pays(name) else ()

    def selected(self, winners: Sequence[Winner], fallback: str | None) -> list[Winner]:
        """Those of `winners` that were verified, these very sources, and are to be used over `fallback`."""
        targets, judged = self.used_over(fallback), {kernel.kernel for kernel in self.kernels}
        return [w for w in winners if w.target.name in targets and w.name in judged]

    def used(self, fallback: str) -> tuple[KernelInModel, ...]:
        return tuple(kernel for kernel in self.kernels if fallback in kernel.used)

    def pays(self, fallback: str) -> bool:
        """Whether the model with kernels is beyond doubt faster than untouched, and not slower than without them there."""
        gains = self.speedups.get(fallback)
        if not (self.passed and gains and self.used(fallback)):
            return False
        return gains[EAGER].low > 1 and gains.get(baseline(fallback), gains[EAGER]).low >= 1

    def alone(self, fallback: str | None) -> bool:
        """Whether the model without kernels is beyond doubt not slower through `fallback` than untouched."""
        return fallback in self.without and self.without[fallback].low >= 1

    @property
    def plainest(self) -> Form:
        """What is to be deployed without kernels: the fastest that beats the model as it is beyond doubt, or else that."""
        faster = {fallback: gain.value for fallback, gain in self.without.items() if gain.low > 1}
        return Form(max(faster, key=faster.__getitem__, default=EAGER))

    @property
    def fastest_with_kernels(self) -> Form | None:
        return self._fastest_of(list(filter(self.pays, self.speedups)))

    @property
    def best(self) -> Form:
        """What is to be deployed: the fastest of all that was measured, with kernels only where nothing beats them.

        What they must not be slower than, beyond doubt, is the fastest way without any.
        """
        rival = self.plainest.name
        unbeaten = [fallback for fallback, gains in self.speedups.items() if self.pays(fallback) and gains[rival].low >= 1]
        return self._fastest_of(unbeaten) or self.plainest

    def _fastest_of(self, fallbacks: Sequence[str]) -> Form | None:
        """Of the model with kernels over each of these."""
        return (
            Form(max(fallbacks, key=lambda fallback: self.speedups[fallback][EAGER].value), kernels=True)
            if fallbacks
            else None
        )

    @property
    def predicted(self) -> float | None:
        """Speedup over eager by Amdahl's law, from the shares and the kernels' own speedups; None without kernels there."""
        return amdahl([(k.share, k.speedup) for k in used]) if (used := self.used(EAGER)) else None

    @property
    def unexpected(self) -> tuple[KernelInModel, float] | None:
        """Where prediction and measurement differ: the kernel most to blame, and the gain that it promised in the model.

        None if there is no kernel that differs in the same direction.
        """
        measured = self.speedups.get(EAGER, {}).get(EAGER)
        if not measured or not self.predicted or abs(measured.value / self.predicted - 1) <= UNEXPECTED:
            return None
        used = self.used(EAGER)
        parts = {k.target: (k.share, k.speedup) for k in used}
        without = {k.target: amdahl([part for target, part in parts.items() if target != k.target]) for k in used}
        promised = [(k, self.predicted / without[k.target]) for k in used]
        direction = math.copysign(1, measured.value - self.predicted)
        kernel, gain = max(promised, key=lambda pair: direction * math.log(pair[0].gains[EAGER].value / pair[1]))
        return (kernel, gain) if direction * (kernel.gains[EAGER].value - gain) > 0 else None

    @property
    def verdict(self) -> str:
        """What to do, in one line for people: the first of every report."""
        best = self.best
        gains, count = self.speedups.get(best.fallback, {}), len(self.used(best.fallback))
        if best.kernels:
            others = "".join(f", {g.estimate(2)} {name}" for name, g in gains.items() if name != EAGER)
            used = f"{count} of {len(self.kernels)} kernels over {best.fallback}"
            return f"{self.model} is {_as_fast(gains[EAGER])}{others}, with {used}"
        wrong = "" if self.passed else "the outputs with kernels are not the original's, and none is to be used; "
        if best == Form():
            return f"{wrong}leave it as it is: {self._closest}"
        with_it = f"{self.model} is {_as_fast(self.without[best.fallback])} with it"
        return f"{wrong}use {best.call}, without kernels: {with_it}{self._kernels_there(best)}"

    @property
    def _closest(self) -> str:
        """Of an untouched model: what came nearest to making it faster."""
        gains = {baseline(fallback): gain for fallback, gain in self.without.items()}
        gains |= {ours(fallback): gains[EAGER] for fallback, gains in self.speedups.items() if self.passed}
        if not gains:
            return f"no kernel makes {self.model} faster beyond doubt"
        name = max(gains, key=lambda name: gains[name].value)
        doubt = ", which is not beyond doubt" if gains[name].value > 1 else ""
        return f"the fastest other way to run {self.model}, {name}, is {_as_fast(gains[name])}{doubt}"

    def _kernels_there(self, plain: Form) -> str:
        """Beside torch.compile without kernels: the best that there is with them."""
        gains = {fallback: speedups[plain.name] for fallback, speedups in self.speedups.items() if self.passed}
        fallback = max(gains, key=lambda name: gains[name].value, default=None)
        return f"; kernels over {fallback} would be {gains[fallback]} of that" if fallback else ""

    def advice(self, run: str) -> list[str]:
        """The verdict, and the lines to paste: code for a program, and commands."""
        code, packaged = self.best.code(run), self.best.code(None, "fast_model")
        commands = [
            f"python verify.py --tag {run} --save fast_model   (the same as a package: import fast_model; {packaged})",
            f"python orchestrate.py merge --tag {run}   (such a package, committed on your branch)",
        ]
        return [self.verdict, *([code] if code else []), *(commands if self.best.kernels else [])]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """COLUMNS of each workload and way to run it."""
        return [
            (
                f"{name} ({workload})" if len(self.figures) > 1 else name,
                f"{f.milliseconds:.2f}",
                f"{sides[EAGER].milliseconds / f.milliseconds:.3f}",
                _megabytes(f, sides),
                f"{f.first_call_s:.1f}",
                f"{f.page_faults:.0f}",
            )
            for workload, sides in self.figures.items()
            for name, f in sides.items()
        ]

    @property
    def lines(self) -> list[str]:
        """All beside the verdict for people, a line each."""
        kernels = [f"{k.target} ({k.share:.1%} of the time, {counted(k.sites, 'site')}): {k.words}" for k in self.kernels]
        return [*self.gains(), *kernels, *self.doubts()]

    def gains(self) -> Iterable[str]:
        """Of the whole model, in every way of running it."""
        for fallback, speedups in self.speedups.items():
            targets = ", ".join(k.target for k in self.used(fallback))
            gains = ", ".join(f"{speedup} {name}" for name, speedup in speedups.items())
            unused = "" if self.pays(fallback) else "; not used there: not faster beyond doubt than the model without them"
            yield f"kernels over {fallback}: {gains}; {targets}{unused}"
        for fallback, gain in self.without.items():
            yield f"{baseline(fallback)} without kernels: {gain} eager"
        for fallback, error in self.errors.items():
            yield f"no {fallback} to compare with: {error}"
        if self.predicted and self.speedups:
            yield f"Amdahl's law predicts {self.predicted:.3f}x eager from the kernels' own speedups"
        if self.unexpected:
            kernel, promised = self.unexpected
            yield (
                f"that is not what was measured, most of all because of {kernel.target}: "
                f"it promised the model {promised:.3f}x, and gives it {kernel.gains[EAGER]}"
            )
        if self.rounds:
            yield f"{counted(self.rounds, 'round')} in {counted(self.processes, 'process')}; allocator: {self.allocator}"

    def doubts(self) -> Iterable[str]:
        """What a reader must know of the measurement and of the outputs."""
        if (self.spread or 0) > BUSY:
            yield (
                f"passes took {self.spread:.0%} longer than the fastest, in the middle: this machine was doing other work, "
                "and small gains cannot be told on it; python verify.py repeats the measurement"
            )
        for fallback, parity in self.parity.items():
            wrong = "" if all(p.passed for p in parity) else "are not the original's, and no kernel stays there: "
            yield f"outputs over {fallback} {wrong}{parity_line(parity)}"

    @staticmethod
    @reads("delete it and run python verify.py again")
    def read(path: Path) -> "Verification":
        data = json.loads(path.read_text())
        read = record_from(data, Verification)
        return read if "without" in data else replace(read, without=_without(read.speedups))


COLUMNS = ("a pass of the model", "ms", "x eager", "MB", "first call, s", "page faults")


def parity_line(parity: Sequence[Parity]) -> str:
    worst = max(parity, key=lambda p: p.largest_difference)
    line = f"on {len(parity)} fresh inputs: at most {worst.largest_difference:.2g} from the original's"
    if worst.exact is None:
        return line
    return (
        f"{line}; error against {worst.exact} {max(p.error_optimised for p in parity):.2g} "
        f"(the original's: {max(p.error_original for p in parity):.2g}); top-1 as in {worst.exact} "
        f"{min(p.agreement_optimised for p in parity):.2%} "
        f"(the original's: {min(p.agreement_original for p in parity):.2%})"
    )


def amdahl(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """End-to-end speedup when each (share of the time, speedup) part gets that much faster; None if one is unknown."""
    if any(speedup is None for _, speedup in parts):
        return None
    return 1 / (1 - sum(share * (1 - 1 / speedup) for share, speedup in parts))


def _megabytes(figures: Figures, sides: Mapping[str, Figures]) -> str:
    """Of CUDA graphs, a form after the first has no memory of its own: they share a pool. Else empty: it cannot be told."""
    if figures.peak_mb is not None:
        return f"{figures.peak_mb:.0f}"
    return "shared" if any(side.peak_mb is not None for side in sides.values()) else ""


def _as_fast(gain: Interval) -> str:
    return f"{gain.estimate(2)} as fast as eager{gain.ends(2)}"


def _without(speedups: Mapping[str, Mapping[str, Interval]]) -> dict[str, Interval]:
    """For records of before these were measured: from what kernels give over eager, and over each of the others."""
    gains = next(iter(speedups.values()), {})
    modes = [mode for mode in (INDUCTOR, GRAPHS, AUTOTUNED) if baseline(mode) in gains]
    return {mode: product(gains[EAGER], _inverse(gains[baseline(mode)])) for mode in modes}


def _inverse(gain: Interval) -> Interval:
    return Interval(1 / gain.high, 1 / gain.value, 1 / gain.low if gain.low else math.inf)
