"""The folder of a run, workspace/<tag>: what is written once (profile, plan), the run's tree, and its lock."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from autokernel.agents import Proposal
from autokernel.common.preflight import Refused
from autokernel.common.records import BadRecord, reads, record_from, write_json
from autokernel.hardware.machine import locks
from autokernel.history.at_work import LOCK, note
from autokernel.history.experiments import ExperimentLog
from autokernel.history.ledger import GitLedger
from autokernel.history.runs import (  # noqa: F401 for whoever needs a run
    PLAN,
    PROFILE,
    PROOF,
    VERIFY,
    NoRun,
    find_folder,
    no_run,
    run_folder,
    run_folders,
    run_refs,
    run_tags,
)  # fmt: skip
from autokernel.model.workload import Workload
from autokernel.target import Plan

VERIFY_NOTES, REPORT = "verify.notes", "report.md"
TRACES = "traces"  # a folder: a pass of the model without kernels, and one with them
INTENT = "intent.json"
LOG = "stderr.log"  # of children and libraries


GRACE_S = 1.0  # for a child of a process that was killed, which holds its parent's files until it has become git


class RunInProgress(Refused, RuntimeError):
    """Another process works on this tag; the message says so."""


@dataclass(frozen=True)
class Intent:
    """An experiment that is about to be judged: what a resumed run needs in order to judge it again."""

    experiment: int
    target: str
    proposal: Proposal
    attempts: int = 1  # how often its judging was begun
    ticket: int = 0  # tells apart the experiments that several workers judge at once

    @property
    def file(self) -> str:
        return f"intent-{self.ticket}.json" if self.ticket else INTENT


@dataclass(frozen=True)
class Workspace:
    root: Path  # of the clone
    tag: str

    @property
    def folder(self) -> Path:
        return run_folder(self.root, self.tag)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def plan(self) -> Plan:
        return Plan.read(self / PLAN)

    @property
    def ledger(self) -> GitLedger:
        return GitLedger(self.root, self.tag, self.folder)

    @property
    def log(self) -> ExperimentLog:
        return ExperimentLog(self.root / "results.tsv")

    @contextmanager
    def locked(self, model: str = "") -> Iterator[None]:
        """Alone on this tag, until the process ends in whatever way. Raises RunInProgress.

        model: what is profiled first, where there is no plan yet.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self / LOCK, "a") as file:
            deadline = time.monotonic() + GRACE_S
            while not locks(file):
                if time.monotonic() > deadline:
                    raise RunInProgress(
                        f"run {self.tag!r} is in progress in another process, or being verified: wait for its end "
                        "(--tag NAME, in Python run=NAME, starts one beside it)"
                    )
                time.sleep(0.01)
            note(file, model)
            try:
                yield
            except Refused:
                self._forget_unbegun()
                raise

    def _forget_unbegun(self) -> None:
        """Remove the folder of a run that was refused before it had a plan: nothing is in it that anybody would miss."""
        made = list(self.folder.iterdir())
        if {path.name for path in made} <= {LOCK, LOG}:
            for path in made:
                path.unlink()
            self.folder.rmdir()

    def write_intent(self, intent: Intent) -> None:
        write_json(self / intent.file, asdict(intent))

    def read_intents(self) -> list[Intent]:
        """The experiments that are being judged: several, where several workers judge."""
        paths = [self / INTENT, *self.folder.glob("intent-*.json")]
        return sorted((_read_intent(path) for path in paths if path.exists()), key=lambda intent: intent.ticket)

    def clear_intent(self, intent: Intent) -> None:
        (self / intent.file).unlink(missing_ok=True)

    def remove(self) -> int:
        """Delete the run: refs, tree and folder. Returns the bytes that the folder held. results.tsv keeps its rows."""
        folder = self.folder  # workspace/<tag>, no link: rmtree follows none inside of it either
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
        self.ledger.remove()
        shutil.rmtree(folder, ignore_errors=True)
        return size


@reads("delete it: what was being judged is judged again only if an agent proposes it again")
def _read_intent(path: Path) -> Intent:
    return record_from(json.loads(path.read_text()), Intent)


def find_run(root: Path, tag: str | None) -> Workspace:
    """The run named `tag`, else the latest. Raises NoRun."""
    return Workspace(root, find_folder(root, tag).name)


def runs(root: Path) -> list[Workspace]:
    """The runs of this clone, the latest first."""
    return [Workspace(root, folder.name) for folder in run_folders(root)]


def default_tag(root: Path, workload: Workload) -> str:
    """The latest run of this workload that is not verified yet, else a new name: compactllama-nov21.

    A new one's folder is made at once: two commands that begin together get a name each.
    """
    for run in runs(root):
        try:
            if not (run / VERIFY).exists() and run.plan.workload == workload.to_json():
                return run.tag
        except BadRecord as error:
            print(f"run {run.tag!r} is passed over: {error}", file=sys.stderr)
    base = f"{re.sub(r'[^a-z0-9_]', '', workload.class_name.lower())[:60] or 'model'}-{date.today():%b%d}".lower()
    taken = set(run_tags(root))
    names = (base if n == 1 else f"{base}-{n}" for n in range(1, 1000))
    return next(tag for tag in names if tag not in taken and _made(root / "workspace" / tag))


def _made(folder: Path) -> bool:
    """Whether the folder is made by this call, and not there already, a link or another process's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
