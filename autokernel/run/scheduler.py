"""Which target next, and when to move on: pure functions of the plan and the rows, so that a resumed run decides alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from autokernel.history.experiments import Experiment, Status
from autokernel.history.progress import Rules, decided, incumbent, move_on, rows_of, tried

if TYPE_CHECKING:  # it brings PyTorch along, and whoever only reads records does without
    from autokernel.target import Plan, Target

UNSEEN_EFFICIENCY = 0.5  # of a kernel without a known peak: half of its time is taken to be removable
HEADROOM_FLOOR = 0.02  # a percentage of peak is an estimate: nobody is held to be perfectly done
STARTER_ATTEMPTS = 2  # at judging a starter that the machine did not let be judged
RECENT = 5  # experiments on a target whose mean time is what the next one is taken to need
MAX_PATIENCE = 4  # rounds over all targets before a run is held to be out of ideas; each doubles what a target may use up


@dataclass(frozen=True)
class Weights:
    """What the expected gain is made with. Fitted by benchmarks/scheduler.py on recorded runs."""

    memory: float = 0.9  # what an experiment counts for in the success rate, per experiment made there since
    bonus: float = 0.1  # for what was tried seldom: nobody knows its success rate yet
    pull: float = 2.0  # of the target in hand: what was just learnt on it is worth something, and each change is a commit


@dataclass(frozen=True)
class Choice:
    target: Target
    reason: str


def success_rate(rows: Sequence[Experiment], weights: Weights) -> float:
    """How often experiments were kept lately, with one success and one failure assumed before the first."""
    made = decided(tried(rows))
    worth = [weights.memory**age for age in range(len(made))]
    kept = sum(w for w, row in zip(worth, reversed(made)) if row.status == Status.KEPT)
    return (kept + 1) / (sum(worth) + 2)


def seconds_each(rows: Sequence[Experiment]) -> float:
    """What an experiment on this target takes; that of its starter says it before the first."""
    recent = [row.seconds for row in (tried(rows) or rows)[-RECENT:]]
    return max(sum(recent) / len(recent), 1.0)


def gain_in_model(target: Target, best: Experiment | None) -> float:
    """How much faster what the model spends there is with the kernel of `best`: below 1, that would be left out."""
    return target.over_model(best.speedup_vs_pytorch) if best and best.speedup_vs_pytorch else 1.0


def expected_gain(target: Target, rows: Sequence[Experiment], made: int = 0, weights: Weights = Weights()) -> float:
    """Fraction of the model's time that the next experiment on `target`, whose rows these are, is expected to save.

    Share of the model's time that is left here (Amdahl) × the part of it above the measured limit × how often experiments
    here were kept lately, and a bonus for what was tried seldom (UCB1's form, of the `made` experiments of the run). The
    model's time here is the baseline's, which is that of torch.compile where it is faster than eager mode: a kernel that is
    slower will be left out, and has to get past it first.
    """
    best = incumbent(rows)
    gain = gain_in_model(target, best) * target.to_beat
    left = target.share * target.to_beat / max(gain, 1.0)
    at_limit = best.pct_peak / 100 if best and best.pct_peak else UNSEEN_EFFICIENCY
    pays = max(1 - at_limit / min(gain, 1.0), HEADROOM_FLOOR)
    if gain < 1:  # of what an experiment may save, only what is saved below the time to beat counts
        pays *= min(pays / max(1 / gain - at_limit / gain, HEADROOM_FLOOR), 1.0)
    bonus = weights.bonus * math.sqrt(math.log1p(made) / (len(decided(tried(rows))) + 1))
    return left * pays * (success_rate(rows, weights) + bonus)


def next_target(
    plan: Plan,
    rows: Sequence[Experiment],
    rules: Rules,
    exhausted: Collection[str] = (),
    weights: Weights = Weights(),
    in_flight: Mapping[str, int] = MappingProxyType({}),
) -> Choice | None:
    """Every target's starter first, then the target with the largest expected gain in an hour.

    Starters first because one that is correct is a gain over PyTorch more often than an experiment is one over a starter.
    The target in hand is not left for less than `pull` times its own expected gain.
    `exhausted` names targets for which the agent has nothing left. When every target has been left by a rule, those not
    at their limit are returned to with more patience, which leads an agent further up the playbook. None: there is nothing
    more to do.

    `in_flight`: how many experiments on a target are being judged by other workers. Targets without any come first. Then
    the n-th candidate against one incumbent is expected to gain an n-th: the best of them is kept, the others have to win
    once more.
    """
    of = {target.name: rows_of(target, rows) for target in plan.targets}  # once: with many workers rows are many
    unseen = [t for t in plan.targets if not decided(of[t.name]) and len(of[t.name]) < STARTER_ATTEMPTS]
    unseen = [t for t in unseen if not in_flight.get(t.name)]
    if unseen:
        target = max(unseen, key=lambda t: t.share)
        return Choice(target, f"{target.share:.1%} of the model's time; its starter is judged first")
    open_targets = [t for t in plan.targets if t.name not in exhausted and of[t.name]]
    current = rows[-1].target if rows else None
    made = len(decided(tried(rows)))

    def gain(target: Target) -> float:
        return expected_gain(target, of[target.name], made, weights) / (1 + in_flight.get(target.name, 0))

    def gain_per_second(target: Target) -> float:
        """For its time, and somewhat more for the target in hand."""
        return gain(target) / seconds_each(of[target.name]) * (weights.pull if target.name == current else 1)

    for patience in range(MAX_PATIENCE):
        allowed = rules.patient(patience)
        candidates = [t for t in open_targets if not move_on(of[t.name], allowed)]
        if candidates:
            free = [t for t in candidates if not in_flight.get(t.name)]
            target = max(free or candidates, key=gain_per_second)
            seconds = seconds_each(of[target.name])
            reason = f"{target.share:.1%} of the model's time, expected gain {gain(target):.2%} of it"
            reason += f" for an experiment of {seconds:.0f} s"
            return Choice(target, reason + (f", round {patience + 1}: up the playbook" if patience else ""))
    return None
