"""Where a run stands, from its records alone: without PyTorch, whose import takes longer than all of this."""

import json
import math
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from autokernel.common.preflight import as_called
from autokernel.common.records import PLAN_REMEDY, BadRecord, json_text, reads, record_from
from autokernel.common.table import plain
from autokernel.common.verdict import Interval
from autokernel.common.words import counted
from autokernel.history.at_work import AtWork, at_work
from autokernel.history.experiments import START, STARTER, Experiment, ExperimentLog, Status
from autokernel.history.ledger import EDITED, GitFailed, GitLedger, NoRepository, in_words
from autokernel.history.progress import incumbent, rows_of, tried
from autokernel.history.runs import (
    PLAN,
    PROOF,
    VERIFY,
    NoRun,
    being_profiled,
    find_folder,
    no_run,
    run_folder,
    run_tags,
)  # fmt: skip
from autokernel.history.workers import read_workforce


class Named(Protocol):
    """A target, or as much of it as is needed here."""

    name: str
    share: float


@dataclass(frozen=True)
class TargetOutline:
    name: str
    share: float


@dataclass(frozen=True)
class Outline:
    """A plan, as far as it can be read without PyTorch."""

    model: str
    targets: tuple[TargetOutline, ...]


@dataclass(frozen=True)
class Proof:
    """What became of a target's best kernel when it was timed once more against its starter."""

    target: str
    commit: str
    gain: Interval | None  # over the starter that it began with; None: that was not beaten, or it failed here
    confirmed: bool  # the interval lies above 1, or there was nothing to confirm
    why: str


def read_proofs(folder: Path) -> dict[str, Proof]:
    """Target -> proof, as written at the end of a run; empty before. Raises BadRecord."""
    return _read_proofs(folder / PROOF) if (folder / PROOF).exists() else {}


@reads("delete it, and the same command proves its kernels again")
def _read_proofs(path: Path) -> dict[str, Proof]:
    return {proof.target: proof for proof in record_from(json.loads(path.read_text()), list[Proof])}


@dataclass(frozen=True)
class Known:
    """What is known of a run's experiments: git's refs are the truth of it, results.tsv a copy."""

    rows: list[Experiment]
    notes: tuple[str, ...] = ()  # where the two differ, for people


def known_rows(root: Path, tag: str) -> Known:
    """The experiments of a run as git has them, or as results.tsv has them where git knows none."""
    path = root / "results.tsv"
    try:
        table = [row for row in ExperimentLog(path).read() if row.tag == tag]
        notes = []
    except BadRecord as error:
        table, notes = [], [str(error)]
    try:
        rows = [entry.row for entry in GitLedger(root, tag, run_folder(root, tag)).entries()]
    except (NoRepository, GitFailed, BadRecord) as error:
        return Known(table, (*notes, f"from results.tsv alone: {in_words(error)}"))
    lacking = len({row.experiment for row in rows} - {row.experiment for row in table})
    if lacking:
        notes += [f"results.tsv lacks {lacking} of {counted(rows, 'experiment')} that git has: told from git"]
    if table and not rows:
        known = counted(table, "experiment")
        notes += [f"git lacks the {known} of {tag} that results.tsv has (another clone's?): told from there"]
    return Known(rows or table, tuple(notes))


def _edits(folder: Path, root: Path) -> list[str]:
    """What stands edited in a run's tree and no run has written there, and what was put aside of such edits."""
    judges = "python orchestrate.py record{} judges it"
    found = []
    with suppress(NoRepository, GitFailed):
        if GitLedger(root, folder.name, folder).edited() is not None and not any(folder.glob("intent*.json")):
            found += [f"kernel.py of its tree is edited, and not judged yet ({judges.format('')})"]
    for path in sorted(folder.glob(EDITED)):
        name = os.path.relpath(path)  # as the command takes it, from where the user stands
        how = judges.format(f" {shlex.quote(name)}")
        found += [f"{name} was an edit of it by hand ({how}; delete it when it is of no use)"]
    return [as_called(line) for line in found]


def _folder(root: Path, tag: str | None) -> tuple[Path, AtWork | None]:
    """Of a run as find_folder() has it, or of one that is being profiled, and who works on it. Raises NoRun, BadTag."""
    try:
        folder = find_folder(root, tag)
    except NoRun:
        found = next((one for one in being_profiled(root) if tag in (None, one.tag)), None)
        if not found:
            raise
        return run_folder(root, found.tag), found
    working = at_work(folder)
    return folder, working and replace(working, model="")  # it has a plan, and is profiled no more


def status(root: Path, tag: str | None = None, as_json: bool = False) -> str:
    """A line for each target, and the last experiment. Raises NoRun, BadRecord."""
    folder, working = _folder(root, tag)
    known = known_rows(root, folder.name)
    beside = [f"beside it {one} (run {one.tag})" for one in being_profiled(root) if one != working]
    rows, notes = known.rows, (*known.notes, *_edits(folder, root), *([str(working)] if working else []), *beside)
    workforce = read_workforce(folder)
    if as_json:
        workers = asdict(workforce) if workforce else None
        counts = {str(s): sum(row.status == s for row in rows) for s in Status}
        last = asdict(rows[-1]) if rows else None
        told = {"tag": folder.name, "counts": counts, "last": last, "notes": notes, "workers": workers}
        return json_text(told | {"process": working.pid if working else None})
    if not (folder / PLAN).is_file():
        return "\n  ".join([f"run {folder.name}: no plan yet", *notes])
    plan, proofs = read_outline(folder / PLAN), read_proofs(folder)
    lines = [f"run {folder.name}: {plan.model}"]
    lines += [kernel_line(t, rows_of(t, rows), proofs.get(t.name)) for t in plan.targets]
    lines += workforce.lines() if workforce else []
    return "\n  ".join([*lines, *([f"last: {subject(rows[-1])}"] if rows else []), *notes])


@reads(PLAN_REMEDY)
def read_outline(path: Path) -> Outline:
    return record_from(json.loads(path.read_text()), Outline)


def runs(root: Path, as_json: bool = False) -> str:
    """All runs, the latest first, then those of which only git's refs are left. Raises NoRun where there are none."""
    found = listed(root)
    if as_json:
        return json_text(found)
    if not found:
        if working := being_profiled(root):
            return "\n".join(f"run {one.tag}: {one}" for one in working)
        raise no_run(root, None)
    rows = [(r["tag"], str(r["experiments"]), str(r["kept"]), r["verified"], r["changed"], r["model"]) for r in found]
    return "\n".join(plain(("run", "experiments", "kept", "verified", "last change", "model"), rows))


def listed(root: Path) -> list[dict[str, Any]]:
    """All runs, the latest first, for programs."""
    return [_listed(root, tag) for tag in run_tags(root)]


def _listed(root: Path, tag: str) -> dict[str, Any]:
    folder = run_folder(root, tag)
    rows = known_rows(root, tag).rows
    changed = max((path.stat().st_mtime for path in folder.glob("*") if path.is_file()), default=None)
    try:
        model = read_outline(folder / PLAN).model if (folder / PLAN).is_file() else f"no {PLAN}: only refs in git"
    except BadRecord as error:
        model = str(error)
    return {
        "tag": tag,
        "experiments": len(tried(rows)),
        "kept": sum(row.status == Status.KEPT for row in tried(rows)),
        "verified": "yes" if (folder / VERIFY).is_file() else "no",
        "changed": f"{datetime.fromtimestamp(changed):%Y-%m-%d %H:%M}" if changed else "",
        "model": model,
    }


def kernel_line(target: Named, rows: Sequence[Experiment], proof: Proof | None) -> str:
    """One target: what the kernel that it began with gives over PyTorch, and what the loop added."""
    start = next((row for row in rows if row.agent == STARTER), None)
    if start is None:
        return f"{target.name} ({target.share:.1%} of the time): not reached"
    if not incumbent(rows):
        return f"{target.name} ({target.share:.1%} of the time): its starter did not pass the gate ({start.status})"
    began = started_with(start)
    began += f" {start.speedup_vs_pytorch:.2f}x PyTorch eager" if start.speedup_vs_pytorch else " correct"
    if start.pct_peak:
        began += f", at {start.pct_peak:.0f} % of its limit"
    made = tried(rows)
    kept = [row for row in made if row.status == Status.KEPT]
    loop = f"{counted(made, 'experiment')}, none kept" if made else "no experiments"
    if kept:  # PyTorch was timed at other moments in each experiment: what was kept is told by the contests between kernels
        gain = math.prod(row.speedup_vs_incumbent or 1.0 for row in kept)
        loop = f"the loop kept {counted(kept, 'change')}, {gain:.2f}x what it began with"
    if proof and proof.gain and proof.commit == incumbent(rows).commit:
        verdict = "" if proof.confirmed else " (not confirmed: that one stands)"
        loop += f"; what was kept is {proof.why}{verdict}"
    elif kept:
        loop += ", not proven again yet"
    return f"{target.name} ({target.share:.1%} of the time): {began}; {loop}"


def started_with(start: Experiment) -> str:
    """The name of a starter, from its row."""
    return start.description.removeprefix(START).split(",")[0]


def subject(row: Experiment) -> str:
    """An experiment in one line: `#7 rmsnorm_512x768_float32 kept 1.083x [1.051, 1.116]: CHUNK_ROWS 16 -> 4`."""
    return f"#{row.experiment} {row.target} {f'{row.status} {row.gain}'.strip()}: {row.description}"
