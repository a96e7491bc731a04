"""A kernel against the one that it is to replace: is it right, is it slower beyond doubt? What `autokernel check` says."""

from collections.abc import Callable
from dataclasses import dataclass

from autokernel.common.verdict import Correctness, Interval, Verdict
from autokernel.gate.judge import Judge
from autokernel.target import Target

TARGET = "all sizes"


@dataclass(frozen=True)
class Comparison:
    """`correctness` is of the new kernel; `timing` is None where that is wrong, or could not be told."""

    correctness: Verdict
    timing: Verdict | None = None

    @property
    def undecided(self) -> str:
        """Why nothing can be said of the kernel: the machine's fault, or the old kernel's."""
        return self.correctness.undecided or (self.timing.undecided if self.timing else "")

    @property
    def right(self) -> bool:
        """Whether it passed the five stages, and was not refused while it was timed."""
        return all(verdict.correctness == Correctness.PASS for verdict in (self.correctness, self.timing) if verdict)

    @property
    def speedups(self) -> dict[str, Interval]:
        """Of new over old, as 99.8 % intervals: over all sizes, then size by size where there are several."""
        if not self.timing or not self.timing.speedup_vs_incumbent:
            return {}
        by_case = {case.case: case.speedup_vs_incumbent for case in self.timing.cases if len(self.timing.cases) > 1}
        return {TARGET: self.timing.speedup_vs_incumbent, **{name: s for name, s in by_case.items() if s}}

    @property
    def slower(self) -> dict[str, Interval]:
        """Where it is slower beyond doubt: the whole interval lies below 1."""
        return {name: speedup for name, speedup in self.speedups.items() if speedup.high < 1}

    @property
    def passed(self) -> bool:
        return self.right and not self.undecided and not self.slower

    @property
    def why(self) -> str:
        """The outcome in one line."""
        if not self.right:
            failed = self.timing if self.timing and self.timing.failure else self.correctness
            return f"wrong: {failed.failure}"
        if self.undecided:
            return f"undecided: {self.undecided}"
        if self.slower:
            return "slower: " + ", ".join(f"{name} {speedup}" for name, speedup in self.slower.items())
        speedup = self.speedups[TARGET]
        return f"right, and {'faster' if speedup.low > 1 else 'not slower beyond doubt'}: {speedup}"


def compare(
    judge: Judge,
    old: str,
    new: str,
    target: Target,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Comparison:
    """Five stages of correctness of `new`; where it is right, eight pairs of fresh processes against `old`."""
    progress("correctness")
    correctness = judge.check(new, target, seed)
    if correctness.correctness != Correctness.PASS or correctness.undecided:
        return Comparison(correctness)
    progress("timing against the old kernel")
    return Comparison(correctness, judge.compare(new, old, target, correctness.seed))
