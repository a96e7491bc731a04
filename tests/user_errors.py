"""What the tests of a user's errors share: a model whose code can go wrong, the options for it, a script as a child."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RMSNORM = ROOT / "kernels/rmsnorm/cpp_kernel.py"
HEAD = ("--class-name", "Net", "--input-shape", "4,64", "--device", "cpu")
QUICK = (*HEAD, "--baseline", "eager")

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self{parameters}):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        {init}

    def forward(self, x):
        {forward}
        return self.layer(x)
"""


def net(parameters="", init="pass", forward="pass", after=""):
    return NET.format(parameters=parameters, init=init, forward=forward) + after


def started(*command, token="none", **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKEN_OF_A_TEST": token}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=environment, **pipes, **options)
