"""The last word on what was kept: each best kernel against its starter, in fresh processes on fresh inputs.

The loop keeps many small steps, each measured once and chosen because it looked good; their product flatters. Loop gain
is therefore this one measurement, made after the choice.
"""

from collections.abc import Callable

from autokernel.history.progress import beginning, incumbent, rows_of
from autokernel.history.status import Proof, started_with
from autokernel.integration.winner import Winner
from autokernel.run.loop import Loop
from autokernel.target import Target


def prove(loop: Loop, target: Target, say: Callable[[str], None], step: Callable[[str], None]) -> Proof:
    rows = rows_of(target, loop.rows)
    best, start = incumbent(rows), beginning(rows)
    source, starter = loop.source(best.commit), loop.source(start.commit)
    if source == starter:
        return Proof(target.name, best.commit, None, True, "the starter was not beaten")
    step(f"{target.name}: the kept kernel against its starter, in fresh processes")
    verdict = loop.undisturbed(target, lambda: loop.judge.compare(source, starter, target))
    gain = verdict.speedup_vs_incumbent
    confirmed = gain is not None and gain.low > 1
    why = f"{gain} over {started_with(start)}" if gain else verdict.why
    say(f"confirmation of {target.name}: {why}{'' if confirmed else ': not confirmed, the starter stands'}")
    return Proof(target.name, best.commit, gain, confirmed, why)


def winners_of(loop: Loop, proofs: list[Proof]) -> list[Winner]:
    """What goes into the model: the confirmed kernels, and starters where nothing better was confirmed."""
    winners = []
    for proof in proofs:
        target = loop.plan.target(proof.target)
        rows = rows_of(target, loop.rows)
        best = incumbent(rows) if proof.confirmed else beginning(rows)
        winners.append(Winner(target, loop.source(best.commit)))
    return winners


def speedup_vs_pytorch(loop: Loop, winner: Winner) -> float | None:
    """Of a winner over PyTorch by itself, as the gate measured that very source."""
    rows = reversed(rows_of(winner.target, loop.rows))
    return next((row.speedup_vs_pytorch for row in rows if loop.source(row.commit) == winner.source), None)
