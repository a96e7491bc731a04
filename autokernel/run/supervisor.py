"""Keeps a run going: the work is done in a child process, and when that is lost to a fault another one goes on.

Imports nothing heavy: it must outlive what may end the child (the kernel's memory killer, a driver that is reset).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from autokernel.common.preflight import terminal
from autokernel.hardware.machine import low_disk
from autokernel.hardware.processes import STATE, become_subreaper, die_with_parent, end_orphans

CLOSED_PIPE = 141  # 128 + SIGPIPE, as shells say it: whoever read what the run prints has gone
STOPS = (signal.SIGINT, signal.SIGTERM)
ENDED = {128 + number for number in STOPS} | {-number for number in STOPS}  # whoever has sent one wants no other process
AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the child cannot go on, but another one may
PAUSES_S = (2, 10, 30, 120, 600)  # before each new child, as long as none gets an experiment done
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}  # of code in the child itself


@dataclass(frozen=True)
class Call:
    """What a call of orchestrate.py works on, and since when: one budget for all the processes that it takes."""

    tag: str
    device: str
    started_s: float  # time.monotonic(), which all processes of a machine share
    made: int  # experiments that the run had before it


def noted(call: Call) -> Call:
    """The call as the first of its processes noted it: this one, where there was none before."""
    if STATE not in os.environ:
        return call
    with open(os.dup(int(os.environ[STATE])), "r+") as file:
        file.seek(0)
        if text := file.read():
            return Call(**json.loads(text))
        file.write(json.dumps(asdict(call)))
    return call


class Supervisor:
    """Runs `command` until it has ended by itself, or was stopped by a signal, or nothing helps."""

    def __init__(
        self, command: list[str], progress: Path, pauses_s: tuple[float, ...] = PAUSES_S, folders: Sequence[Path] = ()
    ) -> None:
        """progress: results.tsv, which grows with every experiment. folders: others on whose disks a run writes."""
        self.command, self.progress, self.pauses_s = command, progress, pauses_s
        self.folders = [progress.parent, *folders]
        self.child: subprocess.Popen | None = None
        self.stopping = 0  # the signal that came

    def run(self) -> int:
        """The exit status of the last child."""
        become_subreaper()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._pass_on)
        with tempfile.TemporaryFile("w+") as notes:
            restarts, ever, status = 0, False, 0
            while True:
                before, earlier = self._experiments(), status
                status = self._child(notes)
                tag = _noted_in(notes).get("tag")
                worked = self._experiments()[tag] != before[tag]
                ever = ever or worked
                lost = status not in {CLOSED_PIPE, *ENDED} and (status < 0 or status == AGAIN or (ever and status != 0))
                if not lost or self.stopping:
                    return status if status >= 0 else 128 - status  # as shells say it
                if status == earlier in CRASHES and not ever:
                    self._say(f"given up: the run's process, where the model's own code runs, ended {_words(status)} twice")
                    return 128 - status
                restarts = 0 if worked else restarts
                if restarts == len(self.pauses_s):
                    self._say(f"given up: {restarts} new processes in a row got no experiment done")
                    return 1
                pause_s = self.pauses_s[restarts]
                self._say(f"the run's process ended ({_words(status)}); another one goes on in {pause_s:g} s")
                self._wait(pause_s)
                restarts += 1
                if self.stopping:
                    return 128 + self.stopping

    def _child(self, notes: TextIO) -> int:
        known = _noted_in(notes)
        again = [f"--{name}={known[name]}" for name in ("tag", "device") if known]
        self.child = subprocess.Popen(
            [*self.command, *again],
            env=os.environ | {STATE: str(notes.fileno())},
            pass_fds=[number for number in (notes.fileno(), terminal()) if number is not None],
            stdin=subprocess.DEVNULL,  # a model's code may ask, in many processes; nobody answers
            start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is passed on once
            preexec_fn=die_with_parent,
        )
        if self.stopping:  # while it was being started
            self.child.send_signal(signal.SIGINT)
        status = self.child.wait()
        end_orphans()
        return status

    def _pass_on(self, number: int, frame: object) -> None:
        self.stopping = number
        if self.child and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _wait(self, pause_s: float) -> None:
        """Pause, and longer while the disk is full."""
        until, told = time.monotonic() + pause_s, False
        while not self.stopping and (time.monotonic() < until or (full := low_disk(self.folders))):
            if time.monotonic() >= until and not told:
                self._say(f"{full}: waiting for space")
                told = True
            time.sleep(0.1)

    def _experiments(self) -> Counter[str]:
        """How many each run has in the file that all runs of a clone share: its second column has their names."""
        text = self.progress.read_text(errors="replace") if self.progress.exists() else ""
        return Counter(name for line in text.split("\n") for name in line.split("\t")[1:2])

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _noted_in(notes: TextIO) -> dict[str, Any]:
    """The Call as the processes have noted it; nothing, where none came so far."""
    notes.seek(0)
    return json.loads(notes.read() or "{}")


def _words(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
