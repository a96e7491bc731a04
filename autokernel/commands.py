"""The subcommands of orchestrate.py: each takes the parsed arguments and returns what is printed."""

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import git
import torch

from autokernel.agents import Proposal, agent_names
from autokernel.build import default_cache
from autokernel.cli import fail, preflight
from autokernel.display import narrator
from autokernel.experiments import Status
from autokernel.extraction import default_backend
from autokernel.gate import Judge
from autokernel.gate.judge import constants
from autokernel.job import Job, default_tag, run_job
from autokernel.loop import Budget, Loop
from autokernel.package import save, why_not
from autokernel.report import run_rows, write_report
from autokernel.scheduler import Rules, next_target
from autokernel.spec import ROOT, folder_of, kernel_types
from autokernel.status import subject
from autokernel.target import Plan, Target, default_target, encode
from autokernel.winners import verified
from autokernel.workload import workload_from
from autokernel.workspace import PLAN, NoRun, Workspace, find_run

DEFAULT_MINUTES, DEFAULT_EXPERIMENTS = 3, 10  # the latter beside those that judge the starters


def run(arguments: argparse.Namespace) -> str:
    agent = arguments.agent or ("claude" if os.environ.get("ANTHROPIC_API_KEY") else "tuner")
    try:
        agent_names(agent)
    except ValueError as error:
        fail(error)
    preflight(default_backend(arguments.device))
    options = {name: getattr(arguments, name) for name in ("budget_usd", "budget_tokens", "max_tokens")}
    options |= {"model": arguments.agent_model, "minutes": arguments.agent_minutes}
    limits = (arguments.max_reverts, arguments.max_pct_peak, arguments.max_hours, arguments.max_speedup)
    if arguments.kernelbench:
        from kernelbench import loop

        with narrator() as (say, *_):
            backend = default_backend(arguments.device)
            return loop.run(arguments, agent, options, Rules(*limits), _budget(arguments), say, backend)
    workload = workload_from(arguments)
    required = arguments.require_sandbox
    job = Job(workload, agent, options, arguments.top, Rules(*limits), _budget(arguments), required)
    workspace = Workspace(ROOT, arguments.tag or default_tag(ROOT, workload))
    with workspace.locked():
        return run_job(workspace, job)


def _budget(arguments: argparse.Namespace) -> Budget:
    minutes = arguments.hours * 60 if arguments.hours is not None else arguments.minutes
    if minutes is None and arguments.experiments is None:
        return Budget(seconds=DEFAULT_MINUTES * 60, at_least=DEFAULT_EXPERIMENTS)
    return Budget(None if minutes is None else minutes * 60, arguments.experiments)


def next(arguments: argparse.Namespace) -> str:
    workspace = find_run(ROOT, arguments.tag)
    choice = next_target(workspace.plan, run_rows(workspace), Rules())
    if arguments.json:
        return json.dumps(choice and {"target": encode(choice.target), "reason": choice.reason})
    return f"{choice.target.name}: {choice.reason}" if choice else "nothing is left to try on any target"


def plan(arguments: argparse.Namespace) -> str:
    plan = find_run(ROOT, arguments.tag).plan
    if arguments.json:
        return json.dumps(encode(plan))
    lines = [f"{plan.model} on {plan.device}: {plan.model_latency_us / 1e3:.2f} ms a pass"]
    for target in plan.targets:
        lines += [f"{target.share:6.1%}  {target.name}, starts from {target.starter}"]
        lines += [f"          {case.calls:g} x {case.case.name}" for case in target.cases]
    return "\n".join(lines)


def report(arguments: argparse.Namespace) -> str:
    return write_report(find_run(ROOT, arguments.tag))


def log(arguments: argparse.Namespace) -> str:
    rows = [row for row in run_rows(find_run(ROOT, arguments.tag)) if arguments.all or row.status == Status.KEPT]
    if arguments.json:
        return json.dumps([asdict(row) for row in rows])
    return "\n".join(f"{row.commit[:10]} {subject(row)}" for row in rows)


def merge(arguments: argparse.Namespace) -> str:
    """The verified winners of a run as a package, committed on the branch that is checked out where it is written."""
    workspace = find_run(ROOT, arguments.tag)
    verification, winners = verified(workspace)
    folder = (arguments.to or Path(re.sub(r"\W", "_", f"kernels_{workspace.tag}"))).resolve()
    if reason := why_not(folder):
        fail(reason)
    saved = save(folder, verification, winners)
    if not saved:
        return verification.verdict
    lines = [f"{w.target.name}: {w.name}" for w in saved]
    subject = f"{folder.name}: {len(saved)} kernels for {verification.model}"
    user = git.Repo(folder, search_parent_directories=True).git  # with the user's own identity, hooks and signature
    user.add("--force", "--", str(folder))
    if not user.status("--porcelain", "--", str(folder)):
        return f"{folder} has them already"
    try:
        user.commit("--quiet", "--message", "\n".join([subject, "", verification.verdict, "", *lines]), "--", str(folder))
    except git.GitCommandError as error:
        fail(f"{folder} is written, but git did not commit it: {error.stderr.strip()}")
    return "\n  ".join([f"committed {subject}", *lines, f"to use them: import {folder.name}; {folder.name}.apply(model)"])


def clean(arguments: argparse.Namespace) -> str:
    workspace = Workspace(ROOT, arguments.tag)
    if not workspace.folder.exists():
        raise NoRun(f"there is no run named {arguments.tag!r}")
    with workspace.locked():
        freed = workspace.remove()
    cache = default_cache()
    compiled = sum(path.stat().st_size for path in cache.glob("*") if path.is_file())
    return "\n  ".join(
        [
            f"removed run {workspace.tag}: {freed / 1e6:.1f} MB freed (its rows stay in results.tsv)",
            "git gc frees its commits as well, once git holds them to be old enough",
            f"compiled kernels of all runs: {compiled / 1e6:.1f} MB in {cache}, which may be deleted at any time",
        ]
    )


def record(arguments: argparse.Namespace) -> str:
    """Judge a kernel file as one experiment. A file of the user's own is read and left as it is."""
    workspace = find_run(ROOT, arguments.tag) if _planned(arguments.tag) else Workspace(ROOT, arguments.tag or "hand")
    tree_file = workspace.ledger.tree / "kernel.py"
    path = arguments.file or tree_file
    if not path.is_file():
        fail(f"there is no {os.path.relpath(path)}: name the kernel file to be judged")
    source = path.read_text()
    target, plan = _target_of(source, path, workspace, arguments)
    preflight(target.backend)
    with workspace.locked(), Judge(target.device, require_sandbox=arguments.require_sandbox) as judge:
        with narrator() as (say, step, *_):
            loop = Loop(workspace, plan, judge, say, step, worktree=workspace.ledger.has_tree)
            row = loop.attempt(target, Proposal(source, arguments.hypothesis, "hand"))
        return f"{subject(row)}\nthe best {target.kernel_type} so far: git show autokernel/{workspace.tag}:kernel.py"


def _planned(tag: str | None) -> bool:
    pattern = tag or "*"
    return any(ROOT.glob(f"workspace/{pattern}/{PLAN}"))


def _target_of(source: str, path: Path, workspace: Workspace, arguments: argparse.Namespace) -> tuple[Target, Plan]:
    """The target that the file is an edit for: of the run's plan, or, without a plan, the default sizes of its type."""
    try:
        declared = constants(source)
    except SyntaxError as error:
        fail(f"{path} is not Python: {error}")
    kernel_type, backend = declared.get("KERNEL_TYPE"), declared.get("BACKEND")
    if not (folder_of(str(kernel_type)) / "spec.py").is_file():
        fail(f"{path} has KERNEL_TYPE {kernel_type!r}; there are: {', '.join(kernel_types())}")
    if (workspace / PLAN).exists():
        plan = workspace.plan
        fitting = [t for t in plan.targets if arguments.target in (None, t.name) and t.kernel_type == kernel_type]
        if not fitting:
            fail(f"run {workspace.tag!r} has no such target of type {kernel_type}: python orchestrate.py plan lists them")
        return fitting[0], plan
    dtype = torch.float16 if arguments.device.startswith("cuda") else torch.float32
    target = default_target(kernel_type, backend, arguments.device, dtype)
    return target, Plan(kernel_type, {}, arguments.device, 0.0, (target,))
