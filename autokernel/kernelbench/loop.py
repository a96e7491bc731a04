"""The loop on problems of KernelBench: each is a run of its own, with one target, whose starter is our own ModelNew."""

import argparse
from collections.abc import Callable
from pathlib import Path

from autokernel.agents import make_agent
from autokernel.common import console
from autokernel.common.preflight import HOME
from autokernel.gate import Judge
from autokernel.history.experiments import Status
from autokernel.history.progress import Rules, tried
from autokernel.kernelbench import bridge
from autokernel.kernelbench.problems import NotJudged
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import PLAN, Workspace

Say = Callable[[str], None]


def optimise(setup: bridge.Setup, judge: Judge, agent: str, options: dict, rules: Rules, budget: Budget, say: Say) -> Loop:
    """Experiments on one problem, in the run that has its name; it goes on where it was."""
    workspace = Workspace(HOME, setup.problem.name)
    with workspace.locked():
        if not (workspace / PLAN).exists() or workspace.plan.targets != (setup.target,):
            bridge.plan_of(setup).write(workspace / PLAN)
        loop = Loop(workspace, bridge.plan_of(setup), judge, say)
        spent = sum(row.cost_usd for row in loop.rows)
        say(f"{setup.problem.name}: {loop.run(make_agent(agent, say, spent_usd=spent, **options), rules, budget)}")
    return loop


def best(setup: bridge.Setup, judge: Judge, agent: str, experiments: int, say: Say) -> str:
    """The source of the best ModelNew after so many experiments; the starter if not even that is right."""
    loop = optimise(setup, judge, agent, {}, Rules(), Budget(experiments=experiments), say)
    return loop.incumbent_source(setup.target) or setup.source


def run(
    arguments: argparse.Namespace, agent: str, options: dict, rules: Rules, budget: Budget, say: Say, default_backend: str
) -> tuple[str, int]:
    """`orchestrate.py --kernelbench LEVEL[:PROBLEM]`: the loop on a problem, or on each of a level with its own budget.

    Returns what came of each, and the number of the signal that ended it, or 0.
    """
    level, _, number = arguments.kernelbench.partition(":")
    if not level.isdecimal() or number and not number.isdecimal():
        console.fail(f"--kernelbench takes LEVEL or LEVEL:PROBLEM, such as 1:23, not {arguments.kernelbench!r}")
    files = bridge.level_files(bridge.repository(arguments.repo_path), int(level))
    files = [path for path in files if not number or bridge.number_of(path) == int(number)]
    if not files:
        console.fail(f"there is no problem {arguments.kernelbench}")
    limit = bridge.LIMIT if arguments.device == "cpu" else None
    lines, stopped_by = [], 0
    with Judge(arguments.device, require_sandbox=arguments.require_sandbox) as judge:
        for path in files:
            line, stopped_by = _one(
                path, judge, default_backend, arguments.device, limit, agent, options, rules, budget, say
            )
            lines.append(line)
            if stopped_by:
                break
    return "\n".join(lines), stopped_by


def _one(
    path: Path, judge: Judge, backend: str, device: str, limit: bridge.Cost | None, agent: str, options: dict, rules: Rules,
    budget: Budget, say: Say,
) -> tuple[str, int]:  # fmt: skip
    try:
        setup = bridge.set_up(path, backend, device, limit)
    except NotJudged as reason:
        return f"{bridge.name_of(path)}: not judged: {reason}", 0
    kernels = ", ".join(setup.rewriting.kernel_types) if setup.rewriting else f"none of ours ({setup.why}): starts as Model"
    say(f"{setup.problem.name} {path.stem}, sizes {setup.problem.reduced or 'as published'}; kernels: {kernels}")
    loop = optimise(setup, judge, agent, options, rules, budget, say)
    kept = [row for row in tried(loop.rows) if row.status == Status.KEPT]
    known = [row for row in loop.rows if row.speedup_vs_pytorch and row.status == Status.KEPT]
    speed = f"{known[-1].speedup_vs_pytorch:.2f}x eager" if known else "no speed known"
    end = ", stopped" if loop.stopping else ""
    return f"{setup.problem.name}: {len(kept)} kept of {len(tried(loop.rows))} experiments, {speed}{end}", loop.stopped_by
