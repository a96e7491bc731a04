"""`orchestrate.py next`, `plan` and `clean`, as those of commands.py, without what takes seconds to import."""

import argparse

from autokernel.build import default_cache
from autokernel.cli.status import rows_with_notes
from autokernel.common.preflight import HOME
from autokernel.common.records import json_text
from autokernel.history.progress import Rules
from autokernel.history.runs import run_tags
from autokernel.run.scheduler import next_target
from autokernel.run.workspace import PLAN, NoRun, Workspace, find_run, no_run, run_refs
from autokernel.target import encode


def next(arguments: argparse.Namespace) -> str:
    workspace = find_run(HOME, arguments.tag)
    choice = next_target(workspace.plan, rows_with_notes(workspace.root, workspace.tag), Rules())
    if arguments.json:
        return json_text(choice and {"target": encode(choice.target), "reason": choice.reason})
    return f"{choice.target.name}: {choice.reason}" if choice else "nothing is left to try on any target"


def plan(arguments: argparse.Namespace) -> str:
    plan = find_run(HOME, arguments.tag).plan
    if arguments.json:
        return json_text(encode(plan))
    lines = [f"{plan.model} on {plan.device}: {plan.model_latency_us / 1e3:.2f} ms a pass"]
    for target in plan.targets:
        lines += [f"{target.share:6.1%}  {target.name}, starts from {target.starter}"]
        lines += [f"          {case.calls:g} x {case.case.name}" for case in target.cases]
    return "\n".join(lines)


def clean(arguments: argparse.Namespace) -> str:
    if not arguments.tag:  # never the latest, as other commands have it
        if not (there := run_tags(HOME)):
            raise no_run(HOME, None)
        raise NoRun(f"clean removes the run that is named, python orchestrate.py clean TAG; there are: {', '.join(there)}")
    workspace = Workspace(HOME, arguments.tag)
    if not (workspace / PLAN).is_file() and not run_refs(HOME, arguments.tag):
        if workspace.folder.exists():
            raise NoRun(f"{workspace.folder} has no {PLAN}, and git no refs of it: that is no run, and is left as it is")
        raise no_run(HOME, arguments.tag)
    with workspace.locked():
        freed = workspace.remove()
    cache = default_cache()
    compiled = sum(path.stat().st_size for path in cache.glob("*") if path.is_file())
    if arguments.json:
        left = {"cache": str(cache), "compiled_bytes": compiled}
        return json_text({"run": workspace.tag, "freed_bytes": freed, **left})
    return "\n  ".join(
        [
            f"removed run {workspace.tag}: {freed / 1e6:.1f} MB freed (its rows stay in results.tsv)",
            "git gc frees its commits as well, once git holds them to be old enough",
            f"compiled kernels of all runs: {compiled / 1e6:.1f} MB in {cache}, which may be deleted at any time",
        ]
    )
