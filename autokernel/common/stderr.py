"""What libraries and child processes say on file descriptor 2, in a log file: a terminal has a run's own lines alone.

What a model prints is on file descriptor 2 as well: number 1 has results alone.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path


def _open(log: Path | None) -> int:
    if log is None:
        return os.open(os.devnull, os.O_WRONLY)
    log.parent.mkdir(parents=True, exist_ok=True)
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


@contextmanager
def diverted(log: Path | None) -> Iterator[None]:
    """What this process, its C++ libraries and children that it starts meanwhile say: to the end of `log`, or nowhere."""
    sys.stderr.flush()
    kept, target = os.dup(2), _open(log)
    os.dup2(target, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(target)


@contextmanager
def results_alone() -> Iterator[None]:
    """What is printed meanwhile goes to file descriptor 2, wherever that leads; who closes sys.stdout closes no more.

    So does what C++ libraries and child processes write to descriptor 1.
    """
    file = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(file):
            yield
        with suppress(ValueError):  # the model's code has taken it apart
            file.close()
    finally:
        with suppress(OSError):  # the model's code has closed all descriptors: they are the parent's again
            os.dup2(kept, 1)
            os.close(kept)


def divert_for_good(log: Path, title: str) -> None:
    """For a child process: all that it prints, below a line with `title`."""
    target = _open(log)
    os.write(target, f"--- {time.strftime('%F %T')}, process {os.getpid()}: {title}\n".encode())
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
