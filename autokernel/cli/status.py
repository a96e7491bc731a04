"""`orchestrate.py status`, `runs` and `log`: without PyTorch, whose import takes long; with it where runs are compared."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from autokernel.cli.arguments import Parser, tag
from autokernel.common.preflight import HOME
from autokernel.common.records import json_text
from autokernel.history.experiments import Experiment, Status
from autokernel.history.runs import NoRun, commit_times, find_folder, has_experiments, run_tags
from autokernel.history.status import known_rows, runs, status, subject


def main(words: Sequence[str], described: Mapping[str, str]) -> None:
    """Print what `status`, `runs` or `log` is asked for. `described`: what each is for."""
    parser = Parser(prog="orchestrate.py")
    commands = parser.add_subparsers(dest="command")
    for name in ("status", "runs", "log"):
        made = commands.add_parser(name, description=described[name])
        made.add_argument("--json", action="store_true", help="for programs")
    for name in ("status", "log"):
        commands.choices[name].add_argument("--tag", type=tag, help="the run's name (default: the latest)")
    commands.choices["log"].add_argument("--all", action="store_true", help="everything that was tried")
    commands.choices["runs"].add_argument("tags", type=tag, nargs="*", metavar="TAG", help="compare these")
    given = parser.parse_args(words)
    if given.command == "runs" and given.tags:
        from autokernel.report.tables import compare, compared

        print(json_text(compare(HOME, given.tags)) if given.json else compared(HOME, given.tags))
        return
    if given.command == "log":
        print(log(HOME, given.tag, given.all, given.json))
        return
    print(status(HOME, given.tag, given.json) if given.command == "status" else runs(HOME, given.json))


def log(root: Path, tag: str | None, is_all: bool, as_json: bool) -> str:
    """The experiments of a run that were kept, or all. Raises NoRun."""
    name = _with_experiments(root, tag)
    rows = [row for row in rows_with_notes(root, name) if is_all or row.status == Status.KEPT]
    if as_json:
        return json_text([asdict(row) for row in rows])
    if not rows:
        return "nothing was tried yet" if is_all else "nothing was kept yet (--all: everything that was tried)"
    if not sys.stdout.isatty():
        return "\n".join(f"{row.commit[:10]} {subject(row)}" for row in rows)
    from autokernel.report.log import log_table

    return log_table(rows, commit_times(root, name))


def _with_experiments(root: Path, tag: str | None) -> str:
    """The name of a run as find_folder() has it, or of one without a plan, as of edits by hand. Raises NoRun."""
    try:
        return find_folder(root, tag).name
    except NoRun:
        name = tag or next(iter(run_tags(root)), None)
        if name is None or not has_experiments(root, name):
            raise
        return name


def rows_with_notes(root: Path, tag: str) -> list[Experiment]:
    """The experiments of a run; where git and results.tsv differ, stderr says so."""
    known = known_rows(root, tag)
    for note in known.notes:
        print(f"note: {note}", file=sys.stderr)
    return known.rows
