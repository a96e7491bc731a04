"""Scripts run in this process: one of their own would import PyTorch first, for seconds."""

import contextlib
import io
import runpy
import sys
from dataclasses import dataclass

import pytest

from autokernel.hardware.processes import STEPS
from autokernel.spec import ROOT


@dataclass(frozen=True)
class Ended:
    """As subprocess.run() tells it of a process."""

    returncode: int
    stdout: str
    stderr: str


def run(script: str, *words: str) -> Ended:
    """As `python SCRIPT WORDS` in the root of this clone."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [script, *words])
        patch.setenv(STEPS, "")  # no process in between
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
    return Ended(ended.value.code or 0, out.getvalue(), err.getvalue())
