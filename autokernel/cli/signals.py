"""Ctrl-C and SIGTERM: a script ends with one line and the status that shells expect, and leaves no process behind."""

import os
import signal
from os import _exit  # the real one: while a model's code runs, os._exit is not
from types import FrameType

STOPPED = {signal.SIGINT: "stopped by Ctrl-C", signal.SIGTERM: "stopped by SIGTERM"}


class Stopped(KeyboardInterrupt):
    """One of these signals has come; arguments.script() ends with its line."""

    def __init__(self, number: int) -> None:
        super().__init__(STOPPED[signal.Signals(number)])
        self.status = 128 + number  # as shells say it


class RunStopped(Exception):
    """A signal has ended a run after the experiment in hand: what came of it, in words, and the exit status."""

    def __init__(self, said: str, number: int) -> None:
        super().__init__(said)
        self.status = 128 + number


def catch_signals() -> None:
    """For a script, before PyTorch is imported: from now on these signals raise Stopped, the first one alone.

    While something is imported, which may swallow an exception or print it, the program ends at once. A signal that is
    ignored, as under nohup, stays so.
    """
    for number in STOPPED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def let_signals_come() -> None:
    """Those that the process that started this one has blocked, until they end it in its own way."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED)


def _stop(number: int, frame: FrameType | None) -> None:
    for known in STOPPED:
        signal.signal(known, signal.SIG_IGN)
    stopped = Stopped(number)
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{stopped}\n".encode())
            _exit(stopped.status)
        frame = frame.f_back
    raise stopped
