"""What verify.py found: the record that it writes, and its words for people."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autokernel.backend import Winner
from autokernel.gate.verdict import Interval

# What runs the rest of the model, or all of it where there are no kernels: PyTorch as it is, torch.compile, and its modes.
EAGER, INDUCTOR, GRAPHS, AUTOTUNED = "eager", "inductor", "reduce-overhead", "max-autotune"
BUSY = 0.15  # spread of passes above which the report says that the machine was disturbed (idle: 0.01-0.05)
UNEXPECTED = 0.1  # difference from Amdahl's prediction that is explained
ERROR_GROWTH = 3.0  # the optimised model's rms error against the exact one may be this many times the original's
AGREEMENT_LOSS = 0.01  # next tokens that may differ from the exact model's beyond those of the original (near ties)


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
    agreement_original: float | None = None  # share of next tokens (argmax over the last dim) equal to the exact model's
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
    speedup: float | None = None  # of the kernel by itself over PyTorch, as the gate measured it
    sites: int = 0  # calls in one pass that it replaces
    gains: Mapping[str, Interval] = field(default_factory=dict)  # model with all kernels over model with all but this one
    used: tuple[str, ...] = ()  # over what it stays
    why_not: str = ""  # it was not tried over anything

    @property
    def words(self) -> str:
        """What became of it, and why."""
        return self.why_not or "; ".join(
            f"{'stays' if over in self.used else 'left out'} over {over}, where the model is {gain}x as fast with it"
            for over, gain in self.gains.items()
        )


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
    """

    model: str
    device: str
    passed: bool
    kernels: tuple[KernelInModel, ...] = ()
    parity: Mapping[str, tuple[Parity, ...]] = field(default_factory=dict)  # of the kernels that are used over it
    figures: Mapping[str, Mapping[str, Figures]] = field(default_factory=dict)
    speedups: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)  # INDUCTOR, … -> why it cannot run this model
    processes: int = 0
    rounds: int = 0  # in all processes together
    spread: float | None = None  # by which the median pass was slower than the fastest: the machine's disturbance
    allocator: str = ""
    diagnosis: Mapping[str, tuple[Parity, ...]] = field(default_factory=dict)  # target -> outputs with its kernel alone
    seconds: float = 0.0

    def used_over(self, fallback: str | None) -> tuple[str, ...]:
        """Targets whose kernels are to be used where `fallback` (None, "inductor", …) has the rest of the model."""
        over = (fallback if fallback == GRAPHS else INDUCTOR) if fallback else EAGER
        return tuple(k.target for k in self.kernels if over in k.used) if self.passed else ()

    def staying(self, winners: Sequence[Winner], fallback: str | None) -> list[Winner]:
        """Those of `winners` that were verified, these very sources, and are to be used over `fallback`."""
        targets, judged = self.used_over(fallback), {kernel.kernel for kernel in self.kernels}
        return [w for w in winners if w.target.name in targets and w.name in judged]

    def used(self, over: str) -> tuple[KernelInModel, ...]:
        return tuple(kernel for kernel in self.kernels if over in kernel.used)

    @property
    def predicted(self) -> float | None:
        """Speedup over eager by Amdahl's law, from the shares and the kernels' own speedups."""
        return amdahl([(k.share, k.speedup) for k in self.used(EAGER)])

    @property
    def unexpected(self) -> tuple[KernelInModel, float] | None:
        """Where prediction and measurement differ: the kernel most to blame, and the gain that it promised in the model."""
        measured = self.speedups.get(EAGER, {}).get(EAGER)
        if not measured or not self.predicted or abs(measured.value / self.predicted - 1) <= UNEXPECTED:
            return None
        used = self.used(EAGER)
        parts = {k.target: (k.share, k.speedup) for k in used}
        without = {k.target: amdahl([part for target, part in parts.items() if target != k.target]) for k in used}
        promised = [(k, self.predicted / without[k.target]) for k in used]
        return max(promised, key=lambda pair: abs(math.log(pair[0].gains[EAGER].value / pair[1])))

    @property
    def best(self) -> str | None:
        """What is to have the rest of the model; None if no kernel is used, over nothing."""
        gained = {over: speedups[EAGER].value for over, speedups in self.speedups.items()}
        return max(gained, key=gained.__getitem__, default=None)

    @property
    def verdict(self) -> str:
        """One line for people."""
        if not self.passed:
            return "the optimised model is not the original any more: nothing is to be used"
        if not self.best:
            return "nothing to gain here: no kernel makes this model faster beyond doubt"
        speedups = self.speedups[self.best]
        gains = ", ".join(f"{speedup}x {name}" for name, speedup in speedups.items())
        faster = [name for name, speedup in speedups.items() if speedup.high < 1]
        alone = f"; {min(faster, key=lambda name: speedups[name].value)} alone is faster" if faster else ""
        proven = "" if speedups[EAGER].low > 1 else "not proven faster as a whole: "
        return f"{proven}over {self.best}, with {len(self.used(self.best))} of {len(self.kernels)} kernels: {gains}{alone}"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """COLUMNS of each workload and way to run it."""
        return [
            (
                f"{name} ({workload})" if len(self.figures) > 1 else name,
                f"{f.milliseconds:.2f}",
                f"{sides[EAGER].milliseconds / f.milliseconds:.3f}",
                "" if f.peak_mb is None else f"{f.peak_mb:.0f}",
                f"{f.first_call_s:.1f}",
                f"{f.page_faults:.0f}",
            )
            for workload, sides in self.figures.items()
            for name, f in sides.items()
        ]

    @property
    def lines(self) -> list[str]:
        """All else for people, a line each."""
        kernels = [f"{k.target} ({k.share:.1%} of the time, {k.sites} sites): {k.words}" for k in self.kernels]
        return [self.verdict, *self._gains(), *kernels, *self._doubts()]

    def _gains(self) -> Iterable[str]:
        for over, speedups in self.speedups.items():
            targets = ", ".join(k.target for k in self.used(over))
            gains = ", ".join(f"{speedup}x {name}" for name, speedup in speedups.items())
            yield f"kernels over {over}: {gains}; {targets}"
        for over, error in self.errors.items():
            yield f"no {over} to compare with: {error}"
        if self.predicted and self.speedups:
            yield f"Amdahl's law predicts {self.predicted:.3f}x eager from the kernels' own speedups"
        if self.unexpected:
            kernel, promised = self.unexpected
            yield (
                f"that is not what was measured, most of all because of {kernel.target}: "
                f"it promised the model {promised:.3f}x, and gives it {kernel.gains[EAGER]}x"
            )
        if self.rounds:
            yield f"{self.rounds} rounds in {self.processes} processes; allocator: {self.allocator}"

    def _doubts(self) -> Iterable[str]:
        if (self.spread or 0) > BUSY:
            yield (
                f"passes took {self.spread:.0%} longer than the fastest, in the middle: this machine was doing other work, "
                "and small gains cannot be told on it; python verify.py repeats the measurement"
            )
        for over, parity in self.parity.items():
            wrong = "" if all(p.passed for p in parity) else "are not the original's, and no kernel stays there: "
            yield f"outputs over {over} {wrong}{parity_line(parity)}"

    @staticmethod
    def read(path: Path) -> "Verification":
        data = json.loads(path.read_text())
        return Verification(
            **data
            | {
                "kernels": tuple(_kernel(k) for k in data["kernels"]),
                "parity": _parities(data["parity"]),
                "diagnosis": _parities(data["diagnosis"]),
                "figures": {w: {s: Figures(**f) for s, f in sides.items()} for w, sides in data["figures"].items()},
                "speedups": {over: _intervals(speedups) for over, speedups in data["speedups"].items()},
            }
        )


COLUMNS = ("a pass of the model", "ms", "x eager", "MB", "first call, s", "page faults")


def baseline(over: str) -> str:
    """The name of the model without kernels."""
    return {EAGER: EAGER, INDUCTOR: "torch.compile"}.get(over, f"torch.compile {over}")


def ours(over: str) -> str:
    return f"kernels over {over}"


def parity_line(parity: Sequence[Parity]) -> str:
    worst = max(parity, key=lambda p: p.largest_difference)
    line = f"on {len(parity)} fresh inputs: at most {worst.largest_difference:.2g} from the original's"
    if worst.exact is None:
        return line
    return (
        f"{line}; error against {worst.exact} {max(p.error_optimised for p in parity):.2g} "
        f"(the original's: {max(p.error_original for p in parity):.2g}); next tokens as in {worst.exact} "
        f"{min(p.agreement_optimised for p in parity):.2%} "
        f"(the original's: {min(p.agreement_original for p in parity):.2%})"
    )


def amdahl(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """End-to-end speedup when each (share of the time, speedup) part gets that much faster; None if one is unknown."""
    if any(speedup is None for _, speedup in parts):
        return None
    return 1 / (1 - sum(share * (1 - 1 / speedup) for share, speedup in parts))


def _kernel(data: Mapping[str, Any]) -> KernelInModel:
    return KernelInModel(**data | {"gains": _intervals(data["gains"]), "used": tuple(data["used"])})


def _intervals(data: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval(**interval) for name, interval in data.items()}


def _parities(data: Mapping[str, Any]) -> dict[str, tuple[Parity, ...]]:
    return {name: tuple(Parity(**p) for p in parities) for name, parities in data.items()}
