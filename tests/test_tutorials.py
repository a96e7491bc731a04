"""docs/tutorials.md as a reader follows it: block after block in a new clone, each by a shell, with smaller work."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import psutil
import pytest

from autokernel.spec import ROOT
from tests.small_clone import clone_this, make_night
from tests.test_docs import Block, blocks

PAGE = "docs/tutorials.md"
SMALLER = {  # what stands in the page: what is run in its place
    "models/gpt2.py --class-name GPT2 --input-shape 1,256": "norm.py --class-name Norm --input-shape 512,768",
    "--minutes 10": "--experiments 1",
    "--autotune 50": "--autotune 4",
    "--port=6379": "--port=0 --num-cpus=2",
    "--workers 2 ": "--workers 1 --no-require-sandbox --agent starters ",
}
NOT_RUN = {
    "--agent tuner,claude": "an agent over night needs a language model's key, or the program of a coding agent",
    "ray start --address=HEAD": "it is for a second machine",
}
NEEDS = {"autokernel track tensorboard": "tensorboard", "ray": "ray"}  # a package that is installed by hand
SEEN = {  # a command: what it shows, or leaves
    "extract.py --tag first": "rmsnorm",
    "--agent starters": "start from cpp_kernel",
    "log --tag first": "kept",
    "--autotune": "could be timed",
    "--incumbent": "keep: ",
    "autokernel check": "passed: True",
    "status --tag night": "run night",
    "log --all --tag night": "too bold",
    "track tensorboard": "night",
    "--workers 2": "1 worker: ",
    "status --tag team": "start from cpp_kernel",
    "merge --tag team": "as fast as",
}
NORM = """import torch

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(768)

    def forward(self, x):
        return self.norm(x)
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Iterator[Path]:
    """A clone with a small model, the run `night` of an agent, and the programs `python` and `autokernel` of that clone."""
    folder = tmp_path_factory.mktemp("tutorials")
    clone_this(folder / "clone")
    make_night(folder / "clone")
    (folder / "clone" / "norm.py").write_text(NORM)
    others = folder / "others.git"  # whose clone it is: what is pushed does not come here
    for words in (f"init -q --bare {others}", f"remote set-url --push origin {others}", "config user.name test"):
        subprocess.run(["git", *words.split()], cwd=folder / "clone", check=True)
    subprocess.run(["git", "config", "user.email", "test@localhost"], cwd=folder / "clone", check=True)
    for name, words in {"python": "", "autokernel": "-m autokernel", "ray": "-m ray.scripts.scripts"}.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "clone"} exec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    yield folder
    for process in psutil.process_iter():  # of the cluster that was started: `ray stop` would end other people's as well
        if environment_of(process).get("TMPDIR") == str(folder):
            process.kill()
    shutil.rmtree(ray_folder(folder), ignore_errors=True)


def ray_folder(reader: Path) -> Path:
    """Short, for Ray has sockets in it; of this reader alone, so that `auto` finds no other cluster."""
    return Path(tempfile.gettempdir(), f"ray-{hashlib.sha256(bytes(reader)).hexdigest()[:8]}")


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.fixture(scope="module")
def results() -> dict[Block, subprocess.CompletedProcess]:
    """Of the blocks that were run: each is once, be the order of the tests what it may."""
    return {}


def tutorials() -> dict[str, list[Block]]:
    """The blocks below each heading of the page."""
    lines, found = (ROOT / PAGE).read_text().splitlines(), {}
    for block in blocks():
        if block.page == PAGE:
            heading = next(line for line in reversed(lines[: block.line]) if line.startswith("## "))
            found.setdefault(heading.removeprefix("## "), []).append(block)
    return found


def left_out(block: Block) -> str:
    """Why a block is not run here; empty if it is."""
    missing = (f"it needs {name}" for words, name in NEEDS.items() if words in block.text and not find_spec(name))
    return next(chain((reason for words, reason in NOT_RUN.items() if words in block.text), missing), "")


def run(block: Block, folder: Path) -> subprocess.CompletedProcess:
    text = block.text
    for said, what in SMALLER.items():
        text = text.replace(said, what)
    environment = {k: v for k, v in os.environ.items() if not re.match("AUTOKERNEL_(RUN|HOME)|ANTHROPIC_|OPENAI_|GIT_", k)}
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    environment |= {"RAY_TMPDIR": str(ray_folder(folder)), "RAY_USAGE_STATS_ENABLED": "0"}
    command = ["bash", "-euxo", "pipefail", "-c", text]
    into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=folder / "clone", env=environment, text=True, **into)


def test_what_is_replaced_or_left_out_is_there() -> None:
    text = "".join(block.text for of_one in tutorials().values() for block in of_one)
    assert len(tutorials()) == 4 and {block.language for of_one in tutorials().values() for block in of_one} == {"bash"}
    assert [words for words in (*SMALLER, *NOT_RUN, *NEEDS, *SEEN) if words not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for of_one in tutorials().values() for block in of_one], ids=str)
def test_a_block_runs_after_those_before_it(block, reader, results) -> None:
    if reason := left_out(block):
        pytest.skip(reason)
    of_one = next(of_one for of_one in tutorials().values() if block in of_one)
    for earlier in of_one[: of_one.index(block) + 1]:
        if earlier not in results and not left_out(earlier):
            results[earlier] = run(earlier, reader)
    ended = results[block]
    if ended.returncode == 2 and "undecided: " in ended.stdout:
        pytest.skip("the machine is too busy for a verdict")
    assert ended.returncode == 0, ended.stdout
    assert [shown for command, shown in SEEN.items() if command in block.text and shown not in ended.stdout] == []
