"""The subcommands of orchestrate.py that judge, verify or report: each takes the arguments and returns what is printed."""

import argparse
import importlib.util
import os
import re
from dataclasses import asdict
from pathlib import Path

from autokernel.agents import agent_names, make_agent
from autokernel.cli.by_hand import edit_for, judge, run_of
from autokernel.cli.orchestrate import DEFAULT_EXPERIMENTS, DEFAULT_MINUTES
from autokernel.cli.pipeline import Job, Workers, check_of_run, run_job
from autokernel.cli.signals import RunStopped
from autokernel.common.backends import default_backend
from autokernel.common.console import fail, preflight
from autokernel.common.preflight import HOME
from autokernel.common.records import json_text
from autokernel.common.words import counted
from autokernel.export.package import save, why_not
from autokernel.gate.source import read_source
from autokernel.history import ledger
from autokernel.history.progress import Rules
from autokernel.history.status import subject
from autokernel.integration.verification.record import Verification
from autokernel.integration.verification.winners import verified
from autokernel.model.workload import Workload, workload_from
from autokernel.report.live import narrator
from autokernel.report.summary import HTML, write_report
from autokernel.run.loop import Budget
from autokernel.run.workspace import VERIFY, Workspace, default_tag, find_run
from autokernel.target import encode

OFF_BRANCH = "HEAD is detached: no branch has this commit yet, git switch -c NAME makes one that does"


def run(arguments: argparse.Namespace) -> str:
    agent = arguments.agent or ("claude" if os.environ.get("ANTHROPIC_API_KEY") else "tuner")
    try:
        agent_names(agent)
    except ValueError as error:
        fail(error)
    preflight(default_backend(arguments.device))
    names = ("budget_usd", "budget_tokens", "max_tokens", "price_in", "price_out")
    options = {name: getattr(arguments, name) for name in names}
    options |= {"model": arguments.agent_model, "url": arguments.agent_url, "minutes": arguments.agent_minutes}
    make_agent(agent, print, **options)  # what it lacks is said before a model is profiled
    fleet = _workers(arguments)
    limits = (arguments.max_reverts, arguments.max_pct_peak, arguments.max_hours, arguments.max_speedup)
    if arguments.repo_path and not arguments.kernelbench:
        fail("--repo-path is for --kernelbench, which is not given")
    if arguments.kernelbench:
        if arguments.module or (arguments.model, arguments.class_name) != (Workload.model, Workload.class_name):
            fail("--kernelbench works on a problem instead of a model: leave out the model, or --kernelbench")
        if fleet:
            fail("--workers is for a model's run: a KernelBench problem is judged on this machine")
        from autokernel.kernelbench import loop

        with narrator() as (say, *_):
            backend = default_backend(arguments.device)
            said, stopped_by = loop.run(arguments, agent, options, Rules(*limits), _budget(arguments), say, backend)
        said = json_text({"summary": said}) if arguments.json else said
        if stopped_by:
            raise RunStopped(said, stopped_by)
        return said
    workload = workload_from(arguments)
    required = bool(fleet) if arguments.require_sandbox is None else arguments.require_sandbox
    job = Job(workload, agent, options, arguments.top, Rules(*limits), _budget(arguments), required, fleet)
    workspace = Workspace(HOME, arguments.tag or default_tag(HOME, workload))
    check_of_run(workspace, workload)
    with workspace.locked(str(workload)):
        try:
            return _result(workspace, run_job(workspace, job), arguments.json)
        except RunStopped as stopped:
            stopped.args = (_result(workspace, str(stopped), arguments.json),)
            raise


def _result(workspace: Workspace, summary: str, as_json: bool) -> str:
    """What came of a run, whose first line is the verdict."""
    if not as_json:
        return summary
    report, record = workspace / HTML, workspace / VERIFY
    return json_text(
        {
            "run": workspace.tag,
            "verdict": summary.partition("\n")[0],
            "report": str(report) if report.exists() else None,
            "verification": encode(Verification.read(record)) if record.exists() else None,
            "summary": summary,
        }
    )


def _workers(arguments: argparse.Namespace) -> Workers | None:
    """None: this process judges by itself, and Ray is not imported."""
    if arguments.workers is None and arguments.ray_address is None:
        return None
    if importlib.util.find_spec("ray") is None:
        fail("--workers and --ray-address need Ray: pip install -e '.[ray]'")
    if ":" in arguments.device:
        fail(f"--device {arguments.device}: with --workers it is cuda, and each worker has a GPU of its own")
    return Workers(None if arguments.workers in (None, "auto") else arguments.workers, arguments.ray_address)


def _budget(arguments: argparse.Namespace) -> Budget:
    minutes = arguments.hours * 60 if arguments.hours is not None else arguments.minutes
    if minutes is None and arguments.experiments is None:
        return Budget(seconds=DEFAULT_MINUTES * 60, at_least=DEFAULT_EXPERIMENTS)
    return Budget(None if minutes is None else minutes * 60, arguments.experiments)


def report(arguments: argparse.Namespace) -> str:
    workspace = find_run(HOME, arguments.tag)
    return _result(workspace, write_report(workspace), arguments.json)


def merge(arguments: argparse.Namespace) -> str:
    """The verified winners of a run as a package, committed on the branch that is checked out where it is written."""
    workspace = find_run(HOME, arguments.tag)
    verification, winners = verified(workspace)
    folder = (arguments.to or Path(re.sub(r"\W", "_", f"kernels_{workspace.tag}"))).resolve()
    if reason := why_not(folder):
        fail(reason)
    repo = ledger.around(folder)
    saved = save(folder, verification, winners)
    told = {"verdict": verification.verdict, "folder": None, "kernels": [], "committed": False, "use": None}
    if not saved:
        return json_text(told) if arguments.json else f"{verification.verdict}\nnothing to merge"
    use = f"import {folder.name}; {verification.fastest_with_kernels.code(None, folder.name)}"
    kernels = [{"target": w.target.name, "kernel": w.name} for w in saved]
    told |= {"folder": str(folder), "kernels": kernels, "use": use}
    lines = [f"{w.target.name}: {w.name}" for w in saved]
    off_branch = [] if repo is None or not repo.head.is_detached else [OFF_BRANCH]
    subject = f"{folder.name}: {counted(saved, 'kernel')} for {verification.model}"
    try:
        told["committed"] = ledger.commit(repo, folder, "\n".join([subject, "", verification.verdict, "", *lines]))
    except ledger.GitFailed as error:
        fail(
            f"{folder} is written, but not committed: {ledger.why_nobodys(repo) or ledger.in_words(error)}: "
            "mend that, and the same command commits it, or commit the folder yourself"
        )
    if arguments.json:
        return json_text(told)
    if not told["committed"]:
        return f"{folder} has them already"
    return "\n  ".join([f"committed {subject}", verification.verdict, *lines, f"to use them: {use}", *off_branch])


def record(arguments: argparse.Namespace) -> str:
    """Judge a kernel file as one experiment. A file of the user's own is read and left as it is."""
    workspace = run_of(HOME, arguments.tag)
    path = arguments.file or workspace.ledger.tree / "kernel.py"
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        fail(f"{os.path.relpath(path)} {what}: name the kernel file to be judged")
    edit = edit_for(workspace, read_source(path), arguments.target, arguments.device, str(path))
    with narrator() as (say, step, *_):
        row = judge(edit, arguments.hypothesis, "hand", say, step, arguments.require_sandbox)
    kernel_type = edit.target.kernel_type
    if arguments.json:
        return json_text(asdict(row))
    return f"{subject(row)}\nthe best {kernel_type} so far: git show autokernel/{workspace.tag}:kernel.py"
