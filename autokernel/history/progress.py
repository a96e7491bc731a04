"""What the rows of a run say of a target: its best kernel, and whether to move on. Pure functions, without PyTorch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autokernel.history.experiments import STARTER, Experiment, Status

if TYPE_CHECKING:  # it brings PyTorch along, and whoever only reads records does without
    from autokernel.target import Target

MEMORY = 0.9  # what an experiment counts for in the success rate, per experiment made there since
RECENT = 5  # experiments on a target whose mean time is what the next one is taken to need


@dataclass(frozen=True)
class Rules:
    """When to leave a target. None switches a rule off."""

    reverts: int | None = 5  # experiments in a row that were not kept
    pct_peak: float | None = 90.0  # of the limit that bounds the kernel
    hours: float | None = 2.0
    speedup: float | None = 2.0  # over the target's starter

    def patient(self, rounds: int) -> Rules:
        """The rules of a later round: effort and gain may double each time; a kernel at its limit stays there."""
        grow = 2**rounds
        stretched = {
            n: v and v * grow for n, v in (("reverts", self.reverts), ("hours", self.hours), ("speedup", self.speedup))
        }
        return replace(self, **stretched)


class Tally:
    """What is asked of one target's rows before each experiment, kept as they come: there may be ten thousands."""

    def __init__(self, rows: Iterable[Experiment] = (), memory: float = MEMORY) -> None:
        self.memory = memory
        self.count = self.decided = self.made = 0  # rows; those that say something; of these, experiments proper
        self.best: Experiment | None = None  # the last row kept
        self.reverts = 0
        self.seconds = 0.0
        self.gain = 1.0
        self.worth = self.worth_kept = 0.0  # of the experiments that were made, the older the less, and of those kept
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._recent_proper: deque[float] = deque(maxlen=RECENT)
        for row in rows:
            self.add(row)

    @staticmethod
    def of(rows: Tally | Sequence[Experiment], memory: float = MEMORY) -> Tally:
        return rows if isinstance(rows, Tally) else Tally(rows, memory)

    def add(self, row: Experiment) -> None:
        kept, proper, says = row.status == Status.KEPT, row.agent != STARTER, row.status != Status.UNDECIDED
        self.count += 1
        self.decided += says
        self.seconds += row.seconds
        self._recent.append(row.seconds)
        if proper:
            self._recent_proper.append(row.seconds)
        if proper and says:
            self.made += 1
            self.reverts = 0 if kept else self.reverts + 1
            self.worth = self.worth * self.memory + 1
            self.worth_kept = self.worth_kept * self.memory + kept
        if kept:
            self.best = row
            self.gain *= row.speedup_vs_incumbent or 1.0

    @property
    def seconds_each(self) -> float:
        """What an experiment on this target takes; that of its starter says it before the first."""
        recent = self._recent_proper or self._recent
        return max(sum(recent) / len(recent), 1.0)


def rows_of(target: Target, rows: Sequence[Experiment]) -> list[Experiment]:
    return [row for row in rows if row.target == target.name]


def tried(rows: Sequence[Experiment]) -> list[Experiment]:
    """The experiments proper: without the rows that judge a starter."""
    return [row for row in rows if row.agent != STARTER]


def decided(rows: Sequence[Experiment]) -> list[Experiment]:
    """Of these, the rows that say something of a kernel: not those that the machine disturbed."""
    return [row for row in rows if row.status != Status.UNDECIDED]


def incumbent(rows: Sequence[Experiment]) -> Experiment | None:
    """The last row kept; of one target's rows: its best kernel."""
    return next((row for row in reversed(rows) if row.status == Status.KEPT), None)


def beginning(rows: Sequence[Experiment]) -> Experiment | None:
    """Of one target's rows: the starter that it began with, the first that passed the gate."""
    return next((row for row in rows if row.agent == STARTER and row.status == Status.KEPT), None)


def reverts(rows: Sequence[Experiment]) -> int:
    """How many experiments at the end of `rows` were not kept, one after the other."""
    return Tally(rows).reverts


def loop_gain(rows: Sequence[Experiment]) -> float:
    """Speedup over the starter, as the steps multiply: to decide by; what is reported is measured by the confirmation."""
    return Tally(rows).gain


def reasons_to_move_on(rows: Tally, rules: Rules) -> Iterator[str]:
    """Each rule that says to leave the target of `rows`, in words."""
    best = rows.best
    if rows.count and not best:
        yield "its starter did not pass the gate"
    if rules.pct_peak is not None and best and (best.pct_peak or 0) >= rules.pct_peak:
        yield f"at {best.pct_peak:.0f} % of the peak that bounds it"
    if rules.reverts is not None and rows.reverts >= rules.reverts:
        yield f"{rows.reverts} experiments in a row were not kept"
    hours = rows.seconds / 3600
    if rules.hours is not None and hours >= rules.hours:
        yield f"{hours:.1f} hours spent on it"
    if rules.speedup is not None and rows.gain >= rules.speedup:
        yield f"{rows.gain:.2f}x over its starter"


def move_on(rows: Tally | Sequence[Experiment], rules: Rules) -> str | None:
    """Why to leave the target of `rows`: all that is true; None to stay."""
    return ", ".join(reasons_to_move_on(Tally.of(rows), rules)) or None


def amdahl(share: float, speedup: float) -> float:
    """End-to-end speedup when the part that takes `share` of the time gets `speedup` times faster."""
    return 1 / (1 - share + share / speedup)
