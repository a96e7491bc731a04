"""Where a run stands, from its records alone: without PyTorch, whose import takes longer than all of this."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from autokernel.experiments import STARTER, Experiment, ExperimentLog, Status
from autokernel.gate.verdict import Interval
from autokernel.preflight import ROOT, fail
from autokernel.scheduler import incumbent, rows_of, tried

PLAN, PROOF = "plan.json", "proof.json"


class NoRun(LookupError):
    """There is no run of this name, or none at all; the message says what to do."""


class Named(Protocol):
    """A target, or as much of it as is needed here."""

    name: str
    share: float


@dataclass(frozen=True)
class Outline:
    name: str
    share: float


@dataclass(frozen=True)
class Proof:
    """What became of a target's best kernel when it was timed once more against its starter."""

    target: str
    commit: str
    gain: Interval | None  # over the starter; None: the best kernel is the starter, or it failed here
    confirmed: bool  # the interval lies above 1, or there was nothing to confirm
    why: str


def run_folders(root: Path) -> list[Path]:
    """The folders of this clone's runs, the latest first."""
    plans = sorted(root.glob(f"workspace/*/{PLAN}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [plan.parent for plan in plans]


def find_folder(root: Path, tag: str | None) -> Path:
    """Of the run named `tag`, else of the latest. Raises NoRun."""
    found = next((folder for folder in run_folders(root) if tag in (None, folder.name)), None)
    if found is None:
        raise NoRun(f"there is no run{f' named {tag!r}' if tag else ''} yet: python orchestrate.py starts one")
    return found


def read_proofs(folder: Path) -> dict[str, Proof]:
    """Target -> proof, as written at the end of a run; empty before."""
    path = folder / PROOF
    records = json.loads(path.read_text()) if path.exists() else []
    return {r["target"]: Proof(**r | {"gain": r["gain"] and Interval(**r["gain"])}) for r in records}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="orchestrate.py status", description="where the run stands")
    parser.add_argument("--tag", help="the run's name (default: the latest)")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(words)
    try:
        print(status(ROOT, arguments.tag, arguments.json))
    except NoRun as error:
        fail(error)


def status(root: Path, tag: str | None = None, as_json: bool = False) -> str:
    """A line for each target, and the last experiment. Raises NoRun."""
    folder = find_folder(root, tag)
    rows = [row for row in ExperimentLog(root / "results.tsv").read() if row.tag == folder.name]
    if as_json:
        counts = {str(s): sum(row.status == s for row in rows) for s in Status}
        return json.dumps({"tag": folder.name, "counts": counts, "last": asdict(rows[-1]) if rows else None})
    plan, proofs = json.loads((folder / PLAN).read_text()), read_proofs(folder)
    targets = [Outline(target["name"], target["share"]) for target in plan["targets"]]
    lines = [f"run {folder.name}: {plan['model']}"]
    lines += [kernel_line(t, rows_of(t, rows), proofs.get(t.name)) for t in targets]
    return "\n  ".join(lines + ([f"last: {subject(rows[-1])}"] if rows else []))


def kernel_line(target: Named, rows: Sequence[Experiment], proof: Proof | None) -> str:
    """One target: what its starter gives over PyTorch, and what the loop added."""
    start = next((row for row in rows if row.agent == STARTER), None)
    if start is None:
        return f"{target.name} ({target.share:.1%} of the time): not reached"
    if not incumbent(rows):
        return f"{target.name} ({target.share:.1%} of the time): its starter did not pass the gate ({start.status})"
    starter = f"starter {start.speedup_vs_pytorch:.2f}x PyTorch eager" if start.speedup_vs_pytorch else "starter correct"
    if start.pct_peak:
        starter += f", at {start.pct_peak:.0f} % of its limit"
    loop = f"{len(tried(rows))} experiments, none kept"
    if proof and proof.gain and proof.commit == incumbent(rows).commit:
        verdict = "" if proof.confirmed else " (not confirmed: the starter stands)"
        loop = f"the loop {proof.gain} over the starter{verdict}"
    elif any(row.status == Status.KEPT for row in tried(rows)):
        loop = "the loop kept a faster one, not proven again yet"
    return f"{target.name} ({target.share:.1%} of the time): {starter}; {loop}"


def subject(row: Experiment) -> str:
    """An experiment in one line: `#7 rmsnorm_512x768_float32 kept 1.083x [1.051, 1.116]: CHUNK_ROWS 16 -> 4`."""
    return f"#{row.experiment} {row.target} {f'{row.status} {row.gain}'.strip()}: {row.description}"
