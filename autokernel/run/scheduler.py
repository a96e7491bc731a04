"""Which target next, and when to move on: pure functions of the plan and the rows, so that a resumed run decides alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from autokernel.common.words import percent
from autokernel.history.experiments import Experiment
from autokernel.history.progress import MEMORY, Rules, Tally, move_on

if TYPE_CHECKING:  # it brings PyTorch along, and whoever only reads records does without
    from autokernel.target import Plan, Target

UNSEEN_EFFICIENCY = 0.5  # of a kernel without a known peak: half of its time is taken to be removable
HEADROOM_FLOOR = 0.02  # a percentage of peak is an estimate: nobody is held to be perfectly done
SMALL = 0.01  # of the model's time: all that a starter could save of it is less than many an experiment is expected to
STARTER_ATTEMPTS = 2  # at judging a starter that the machine did not let be judged
MAX_PATIENCE = 4  # rounds over all targets before a run is held to be out of ideas; each doubles what a target may use up


@dataclass(frozen=True)
class Weights:
    """What the expected gain is made with. Fitted by benchmarks/scheduler.py on recorded runs."""

    memory: float = MEMORY
    bonus: float = 0.1  # for what was tried seldom: nobody knows its success rate yet
    pull: float = 2.0  # of the target in hand: what was just learnt on it is worth something, and each change is a commit


@dataclass(frozen=True)
class Choice:
    target: Target
    reason: str


class Tallies:
    """Of each target of a run."""

    def __init__(self, plan: Plan, rows: Iterable[Experiment] = (), memory: float = MEMORY) -> None:
        self.of = {target.name: Tally(memory=memory) for target in plan.targets}
        self.made = 0  # experiments that say something
        self.current: str | None = None  # the target of the last row
        for row in rows:
            self.add(row)

    def add(self, row: Experiment) -> None:
        self.current = row.target
        if tally := self.of.get(row.target):
            before = tally.made
            tally.add(row)
            self.made += tally.made - before


def success_rate(rows: Tally | Sequence[Experiment], weights: Weights) -> float:
    """How often experiments were kept lately, with one success and one failure assumed before the first."""
    tally = Tally.of(rows, weights.memory)
    return (tally.worth_kept + 1) / (tally.worth + 2)


def gain_in_model(target: Target, best: Experiment | None) -> float:
    """How much faster what the model spends there is with the kernel of `best`: below 1, that would be left out."""
    return target.over_model(best.speedup_vs_pytorch) if best and best.speedup_vs_pytorch else 1.0


def expected_gain(target: Target, rows: Tally | Sequence[Experiment], made: int = 0, weights: Weights = Weights()) -> float:
    """Fraction of the model's time that the next experiment on `target`, whose rows these are, is expected to save.

    Share of the model's time that is left here (Amdahl) × the part of it above the measured limit × how often experiments
    here were kept lately, and a bonus for what was tried seldom (UCB1's form, of the `made` experiments of the run). The
    model's time here is the baseline's, which is that of torch.compile where it is faster than eager mode: a kernel that is
    slower will be left out, and has to get past it first.
    """
    tally = Tally.of(rows, weights.memory)
    best = tally.best
    gain = gain_in_model(target, best) * target.to_beat
    left = target.share * target.to_beat / max(gain, 1.0)
    at_limit = best.pct_peak / 100 if best and best.pct_peak else UNSEEN_EFFICIENCY
    pays = max(1 - at_limit / min(gain, 1.0), HEADROOM_FLOOR)
    if gain < 1:  # of what an experiment may save, only what is saved below the time to beat counts
        pays *= min(pays / max(1 / gain - at_limit / gain, HEADROOM_FLOOR), 1.0)
    bonus = weights.bonus * math.sqrt(math.log1p(made) / (tally.made + 1))
    return left * pays * (success_rate(tally, weights) + bonus)


def next_target(
    plan: Plan,
    rows: Tallies | Sequence[Experiment],
    rules: Rules,
    exhausted: Collection[str] = (),
    weights: Weights = Weights(),
    in_flight: Mapping[str, int] = MappingProxyType({}),
) -> Choice | None:
    """Every target's starter first, then the target with the largest expected gain in an hour.

    Starters first because one that is correct is a gain over PyTorch more often than an experiment is one over a starter;
    but that of a SMALL target when no experiment is expected to save as much as there is.
    The target in hand is not left for less than `pull` times its own expected gain.
    `exhausted` names targets for which the agent has nothing left. When every target has been left by a rule, those not
    at their limit are returned to with more patience, which leads an agent further up the playbook. None: there is nothing
    more to do.

    `in_flight`: how many experiments on a target are being judged by other workers. Targets without any come first. Then
    the n-th candidate against one incumbent is expected to gain an n-th: the best of them is kept, the others have to win
    once more.
    """
    known = rows if isinstance(rows, Tallies) else Tallies(plan, rows, weights.memory)
    of = known.of
    unseen = [t for t in plan.targets if not of[t.name].decided and of[t.name].count < STARTER_ATTEMPTS]
    unseen = [t for t in unseen if not in_flight.get(t.name)]
    largest = max(unseen, key=lambda t: t.share, default=None)
    starter = largest and Choice(largest, f"{largest.share:.1%} of the model's time; its starter is judged first")
    if starter and largest.share >= SMALL:
        return starter
    open_targets = [t for t in plan.targets if t.name not in exhausted and of[t.name].count]

    def gain(target: Target) -> float:
        return expected_gain(target, of[target.name], known.made, weights) / (1 + in_flight.get(target.name, 0))

    def gain_per_second(target: Target) -> float:
        """For its time, and somewhat more for the target in hand."""
        return gain(target) / of[target.name].seconds_each * (weights.pull if target.name == known.current else 1)

    for patience in range(MAX_PATIENCE):
        allowed = rules.patient(patience)
        candidates = [t for t in open_targets if not move_on(of[t.name], allowed)]
        if candidates:
            free = [t for t in candidates if not in_flight.get(t.name)]
            target = max(free or candidates, key=gain_per_second)
            if starter and gain(target) < largest.share:
                return starter
            seconds = of[target.name].seconds_each
            reason = f"{target.share:.1%} of the model's time, expected gain {percent(gain(target), 2)} of it"
            reason += f" for an experiment of {seconds:.0f} s in the gate"
            return Choice(target, reason + (f", round {patience + 1}: up the playbook" if patience else ""))
    return starter
