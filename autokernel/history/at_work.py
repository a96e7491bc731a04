"""Which processes work on runs, and on what: a file that each has locked for as long as it lives, in whatever way it ends.

Without PyTorch. A run that is being profiled has no plan yet: nothing else tells of it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autokernel.common.preflight import Refused

LOCK, PROFILING = "lock", "profiling"  # of a whole job or an experiment; of profile.py


@dataclass(frozen=True)
class AtWork:
    """A process that works on a run."""

    tag: str
    pid: int
    model: str

    def __str__(self) -> str:
        return f"process {self.pid} is profiling {self.model}" if self.model else f"process {self.pid} is at work on it"


def note(file: IO[str], model: str) -> None:
    """In a file that is locked: who has it locked, and for which model."""
    file.truncate(0)
    file.write(f"{os.getpid()} {model}")
    file.flush()


@contextmanager
def profiling(folder: Path, model: str) -> Iterator[None]:
    """While it lasts profile.py is seen at work on the run of this folder. Raises Refused where another one is."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / PROFILING, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _holder(folder / PROFILING) or "another process profiles a model"
            raise Refused(f"{who} for run {folder.name!r}: wait for it, or give another --tag") from None
        note(file, model)
        try:
            yield
        finally:
            (folder / PROFILING).unlink(missing_ok=True)
            with suppress(OSError):  # something is in it
                folder.rmdir()


def at_work(folder: Path) -> AtWork | None:
    """Who works on the run of this folder."""
    return next(filter(None, (_holder(folder / name) for name in (LOCK, PROFILING))), None)


def _holder(path: Path) -> AtWork | None:
    with suppress(OSError), open(path, errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, model = file.read().partition(" ")
            return AtWork(path.parent.name, int(pid), model) if pid.isdecimal() else None
    return None
