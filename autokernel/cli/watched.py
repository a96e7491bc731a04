"""A script in whose process a model's own code runs, and a parent that says in one line what ended that, if a signal did.

The child notes its steps in a file of the parent's, where Python's faulthandler puts the lines that a crash was at.
"""

import faulthandler
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from autokernel.cli.signals import STOPPED
from autokernel.common.preflight import called_as_we_are, check_installed, fail, terminal
from autokernel.hardware.processes import STATE, STEPS, die_with_parent
from autokernel.run.supervisor import CRASHES

BY_ITSELF = {"-h", "--help", "--version"}  # no model's code runs then
LINE = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)  # of a traceback of faulthandler's, the deepest first
CRASH = "Fatal Python error: "
REASONS = {
    signal.SIGKILL: "most often because memory ran out",
    **dict.fromkeys(map(abs, CRASHES), "native code has crashed"),
}


def is_watched(words: Sequence[str]) -> bool:
    """Whether this is a child already, or has no need of a parent."""
    return STEPS in os.environ or STATE in os.environ or bool(BY_ITSELF & set(words))


def watch(script: str, words: Sequence[str]) -> int:
    """Run a script in a child; its exit status. Ends with one line where a signal ended it."""
    check_installed()  # not in the child, whose Python has all that is installed
    command = called_as_we_are(script, script)
    with tempfile.TemporaryFile("w+", errors="replace") as steps:
        child = subprocess.Popen(
            [*command, *words],
            env=os.environ | {STEPS: str(steps.fileno())},
            pass_fds=[number for number in (steps.fileno(), terminal()) if number is not None],
            stdin=subprocess.DEVNULL,  # a model's code may ask, in many processes; nobody answers
            preexec_fn=_begin_child,
        )
        with _passing_on_to(child) as stopped:
            status = child.wait()
        steps.seek(0)
        noted = steps.read()
    if status < 0 and not stopped:
        fail(_in_words(noted, signal.Signals(-status)))
    return status if status >= 0 else 128 - status  # as shells say it


def _begin_child() -> None:
    """A signal waits until the child has its own way to end by it: let_signals_come()."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED)


@contextmanager
def _passing_on_to(child: subprocess.Popen) -> Iterator[list[int]]:
    """A terminal's Ctrl-C reaches both, `kill` this process alone. Gives the signals that came, as they come."""
    came: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        if child.poll() is None:
            child.send_signal(number)

    caught = [number for number in STOPPED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in caught}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_words(noted: str, number: signal.Signals) -> str:
    steps, _, crash = noted.partition(CRASH)
    title, *rest = steps.splitlines() or ["starting"]
    step = f", {rest[-1]}" if rest else ""
    theirs = [f" at {path}:{line}" for path, line in LINE.findall(crash) if not _of_a_library(path)]
    why = f" ({REASONS[number]})" if number in REASONS else ""
    return f"{title}{step}: the process was ended by {number.name}{theirs[0] if theirs else ''}{why}"


def _of_a_library(path: str) -> bool:
    return path.startswith(("<", str(Path(os.__file__).parent), str(Path(__file__).parents[1]))) or "site-packages" in path


def noting(title: str, say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, which notes for the parent, if there is one, what is being done."""
    if not os.environ.get(STEPS):
        return say
    number = int(os.environ[STEPS])

    def note(text: str) -> None:
        with suppress(OSError):  # a full disk, or the model's code has closed it
            os.write(number, f"{text}\n".encode(errors="replace"))

    def noted(text: str) -> None:
        note(text)
        say(text)

    note(title)
    faulthandler.enable(number, all_threads=False)
    return noted
