"""Child processes that never outlive their parent (Linux; elsewhere nothing is done), and how a command of ours ended."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STATE, STEPS = "AUTOKERNEL_NOTES", "AUTOKERNEL_STEPS"  # in the environment of a script's child: numbers of shared files


def become_subreaper() -> None:
    """What a child leaves behind becomes our own: an agent or a git that would go on beside the next child."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_orphans() -> None:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while listing.exists() and (orphans := [int(pid) for pid in listing.read_text().split()]):
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def die_with_parent() -> None:
    """Called in a new child: it does not work on unseen when this process is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def stream_of_parent(number: int) -> int | None:
    """What the script that waits for this process has as its stdout or stderr, opened anew; None where there is none."""
    if os.environ.keys() & {STATE, STEPS}:
        with suppress(OSError):  # no Linux, or a socket
            return os.open(f"/proc/{os.getppid()}/fd/{number}", os.O_WRONLY | os.O_APPEND)
    return None


def why_ended(said: Sequence[str], status: int) -> str:
    """Why a command of ours came to no result, of the lines that it said: its error, else how it ended and all of them."""
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    if errors:
        return errors[-1]
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return "\n".join([f"the command {how}" + "; it said last:" * bool(said), *said])
