"""What the rows of a run say of a target: its best kernel, and whether to move on. Pure functions, without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autokernel.history.experiments import STARTER, Experiment, Status

if TYPE_CHECKING:  # it brings PyTorch along, and whoever only reads records does without
    from autokernel.target import Target


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
    count = 0
    for row in reversed(decided(tried(rows))):
        if row.status == Status.KEPT:
            break
        count += 1
    return count


def loop_gain(rows: Sequence[Experiment]) -> float:
    """Speedup over the starter, as the steps multiply: to decide by; what is reported is measured by the confirmation."""
    return math.prod(row.speedup_vs_incumbent or 1.0 for row in rows if row.status == Status.KEPT)


def reasons_to_move_on(rows: Sequence[Experiment], rules: Rules) -> Iterator[str]:
    """Each rule that says to leave the target of `rows`, in words."""
    if rows and not incumbent(rows):
        yield "its starter did not pass the gate"
    best = incumbent(rows)
    if rules.pct_peak is not None and best and (best.pct_peak or 0) >= rules.pct_peak:
        yield f"at {best.pct_peak:.0f} % of the peak that bounds it"
    if rules.reverts is not None and reverts(rows) >= rules.reverts:
        yield f"{reverts(rows)} experiments in a row were not kept"
    hours = sum(row.seconds for row in rows) / 3600
    if rules.hours is not None and hours >= rules.hours:
        yield f"{hours:.1f} hours spent on it"
    if rules.speedup is not None and loop_gain(rows) >= rules.speedup:
        yield f"{loop_gain(rows):.2f}x over its starter"


def move_on(rows: Sequence[Experiment], rules: Rules) -> str | None:
    """Why to leave the target of `rows`: all that is true; None to stay."""
    return ", ".join(reasons_to_move_on(rows, rules)) or None


def amdahl(share: float, speedup: float) -> float:
    """End-to-end speedup when the part that takes `share` of the time gets `speedup` times faster."""
    return 1 / (1 - share + share / speedup)
