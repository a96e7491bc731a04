"""An edit that is judged outside of the loop: of a person (orchestrate.py record), or of an agent in any client (MCP)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from autokernel.agents import Proposal
from autokernel.common.backends import default_backend
from autokernel.common.console import check_machine
from autokernel.common.preflight import Refused
from autokernel.gate import Judge
from autokernel.gate.kernel_files import usual_sizes, usual_target
from autokernel.history.experiments import Experiment
from autokernel.report.branch import close_again
from autokernel.run.loop import Loop
from autokernel.run.workspace import PLAN, Workspace, find_run
from autokernel.spec import kernel_types, load_spec
from autokernel.target import Plan, Target

HAND = "hand"  # the run of edits that are made where there is none


def run_of(root: Path, tag: str | None) -> Workspace:
    """The run named `tag`, the latest if none is named; where there is no run with a plan, one without. Raises NoRun."""
    planned = any(root.glob(f"workspace/{tag or '*'}/{PLAN}"))
    return find_run(root, tag) if planned else Workspace(root, tag or HAND)


@dataclass(frozen=True)
class Edit:
    """A kernel's source, and what it is an edit for."""

    source: str
    workspace: Workspace
    plan: Plan
    target: Target


def edit_for(workspace: Workspace, source: str, target: str | None, device: str, called: str = "the source") -> Edit:
    """For a target of the run's plan, or, without a plan, for the default sizes of its type. Raises Refused."""
    usual = usual_target(source, called, None, device)
    if not (workspace / PLAN).exists():
        if target not in (None, usual.name):
            raise Refused(f"there is no target {target!r} where there is no run: this is an edit of {usual.name}")
        return Edit(source, workspace, Plan(usual.kernel_type, {}, device, 0.0, (usual,)), usual)
    plan = workspace.plan
    fitting = [t for t in plan.targets if target in (None, t.name) and t.kernel_type == usual.kernel_type]
    if not fitting:
        of_type = f"of type {usual.kernel_type}: python orchestrate.py plan lists them"
        raise Refused(f"run {workspace.tag!r} has no such target {of_type}")
    return Edit(source, workspace, plan, fitting[0])


def usual_plan(device: str) -> Plan:
    """Of a clone without a run: every kernel type that has a starter for the device, at its default sizes."""
    backend, kind = default_backend(device), torch.device(device).type
    specs = [load_spec(name) for name in kernel_types()]
    there = [spec.name for spec in specs if kind in spec.timing and f"{backend}_kernel" in spec.starters(backend)]
    targets = tuple(usual_sizes(name, backend, device) for name in there)
    return Plan("no model: the default sizes of each kernel type", {}, device, 0.0, targets)


def judge(
    edit: Edit,
    hypothesis: str,
    agent: str,
    say: Callable[[str], None],
    step: Callable[[str], None],
    require_sandbox: bool = False,
) -> Experiment:
    """One experiment: judged, committed, logged. Raises Refused, RunInProgress, SandboxIncomplete, MachineFault."""
    check_machine(edit.target.backend)
    with edit.workspace.locked(), Judge(edit.target.device, require_sandbox=require_sandbox) as gate:
        has_tree = edit.workspace.ledger.has_tree
        loop = Loop(edit.workspace, edit.plan, gate, say, step, worktree=has_tree, about_to_judge=edit.source)
        row = loop.attempt(edit.target, Proposal(edit.source, hypothesis, agent))
        close_again(edit.workspace)
    return row
