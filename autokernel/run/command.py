"""A command in a process of its own, as Python programs start it: its lines go to a log or a function as they come."""

import contextlib
import logging
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

from autokernel.common.preflight import HOME, TERMINAL, Refused, as_called, terminal_of_stderr
from autokernel.hardware.processes import die_with_parent, why_ended
from autokernel.model.user_code import shown
from autokernel.model.workload import Workload

LOG = logging.getLogger("autokernel.api")  # the name that Python programs know
END_S = 10.0  # for a command that is interrupted
LAST = 20  # lines of a command that failed, in which the reason is looked for
OPTION = re.compile(r"argument --([a-z]+)(.*) \([^()]* --help\)$")  # as a command line has it: in Python, an argument
Progress = Callable[[str], None]


class CommandFailed(Refused, RuntimeError):
    """A command that was started for the caller came to no result; the message is what it said last."""


def told(progress: Any) -> Progress:
    """Who is told what is being done. Raises Refused."""
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise Refused(f"progress is a function that takes a line, True or False, not {shown(progress)}")
    return LOG.info


def workload_options(workload: Workload) -> list[str]:
    """The workload as options of a command."""
    named = {"model": workload.model, "class-name": workload.class_name, "dtype": workload.dtype, "device": workload.device}
    if workload.input_shape:
        named["input-shape"] = ",".join(map(str, workload.input_shape))
    return [f"--{name}={value}" for name, value in named.items()]


def run_command(words: list[str], progress: Progress | bool, right: tuple[int, ...] = (0,)) -> list[str]:
    """Run a command; its lines go to `progress` or the log as they come, the last ones are returned. Raises CommandFailed.

    An interrupt ends it first, and so does the caller's end.
    """
    say, words = told(progress), [*map(str, words)]
    environment = os.environ | {"AUTOKERNEL_HOME": str(HOME), "PYTHONUNBUFFERED": "1"}
    shown_on = terminal_of_stderr() if progress is True else None
    terminal = [] if shown_on is None else [os.dup(shown_on)]
    environment |= {TERMINAL: str(terminal[0])} if terminal else {}
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        pass_fds=terminal,
        start_new_session=True,  # a terminal's or a notebook's interrupt comes here, and is passed on
        preexec_fn=die_with_parent,  # a run goes on where it stopped; unseen, it would keep the device from others
    )
    for number in terminal:
        os.close(number)
    said: deque[str] = deque(maxlen=LAST)
    try:
        for line in process.stdout:
            said.append(line.rstrip())
            say(said[-1])
        process.stdout.close()
    except BaseException:
        for _ in range(2):  # the first ends a run after the experiment in hand, the second at once
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
                break
        raise
    if process.wait() not in right:
        raise CommandFailed(as_called(OPTION.sub(r"\1\2", why_ended(said, process.returncode))))
    return list(said)
