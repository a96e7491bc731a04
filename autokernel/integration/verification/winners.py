"""The kernels that a run kept, read from git: all of them, or those that verify.py left in the model."""

import os
from pathlib import Path

from autokernel.common.preflight import HOME
from autokernel.gate.source import exists
from autokernel.history.progress import beginning, incumbent, rows_of
from autokernel.history.status import read_proofs
from autokernel.integration.verification.record import Verification
from autokernel.integration.winner import Winner
from autokernel.model.user_code import shown
from autokernel.run.workspace import PLAN, VERIFY, NoRun, Workspace, find_run
from autokernel.target import Plan

Kept = tuple[list[Winner], dict[str, float]]  # and each target's speedup over PyTorch by itself, where it is known


def open_run(run: str | Path | None = None) -> Workspace:
    """The run of this name or in this folder; without one $AUTOKERNEL_RUN, else the latest. Raises NoRun, BadTag."""
    run = os.environ.get("AUTOKERNEL_RUN") or None if run is None else str(run)
    if run and exists(Path(run) / PLAN):
        folder = Path(run).resolve()
        return Workspace(folder.parent.parent, folder.name)
    if run and os.sep in run:
        raise NoRun(f"there is no run in {shown(run)}: a run's folder has a {PLAN}, as workspace/NAME has")
    return find_run(HOME, run)


def kept(workspace: Workspace, plan: Plan) -> Kept:
    """The best kernel of each target; its starter, where the confirmation did not confirm that it was beaten."""
    rows, proofs = [entry.row for entry in workspace.ledger.entries()], read_proofs(workspace)
    winners, speedups = [], {}
    for target in plan.targets:
        best, proof = incumbent(rows_of(target, rows)), proofs.get(target.name)
        if best and proof and not proof.confirmed:
            best = beginning(rows_of(target, rows))
        if best:
            winners.append(Winner(target, workspace.ledger.source(best.commit)))
        if best and best.speedup_vs_pytorch:
            speedups[target.name] = best.speedup_vs_pytorch
    return winners, speedups


def verified(workspace: Workspace) -> tuple[Verification, list[Winner]]:
    """What verify.py found, and the kernels kept, of which verification.selected() chooses. Raises NoRun before it ran."""
    if not (workspace / VERIFY).exists():
        raise NoRun(f"run {workspace.tag!r} is not verified in its model yet: python verify.py --tag {workspace.tag}")
    return Verification.read(workspace / VERIFY), kept(workspace, workspace.plan)[0]
