"""A run that was begun before the package had folders for its stages goes on with today's code.

What lies in records/run/ was left by commit e9fac1f, killed while it judged the second experiment of the run `before`: the
files of workspace/before/, results.tsv, and by `git fast-export` the run's branch and refs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel.history.experiments import ExperimentLog
from autokernel.history.status import status
from autokernel.run.loop import Loop
from autokernel.run.workspace import PLAN, PROFILE, VERIFY, Workspace
from autokernel.spec import ROOT
from tests.test_ledger import sh

RECORDS = Path(__file__).parent / "records" / "run"
COMMIT = "e9fac1f"  # of the code that the run was begun with, and of its tree
TAG = "before"
MODEL_ARGS = '{"n_layers": 1, "dim": 384, "n_heads": 6, "n_kv_heads": 2, "hidden": 1024, "vocab_size": 4000}'


@pytest.fixture
def run(tmp_path: Path) -> Workspace:
    """The run as it was left, in a clone with today's code."""
    root = tmp_path / "clone"
    sh("git", "clone", "-q", str(ROOT), str(root), cwd=tmp_path)
    if subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=root, capture_output=True).returncode:
        pytest.skip(f"a shallow clone: it has no {COMMIT}")
    folder = root / "workspace" / TAG
    folder.mkdir(parents=True)
    for name in ("plan.json", "profile.json", "intent.json"):
        shutil.copy(RECORDS / name, folder)
    shutil.copy(RECORDS / "results.tsv", root)
    with open(RECORDS / "history.txt", "rb") as history:
        subprocess.run(["git", "fast-import", "--quiet"], cwd=root, stdin=history, check=True)
    sh("git", "worktree", "add", "-q", str(folder / "tree"), f"autokernel/{TAG}", cwd=root)
    return Workspace(root, TAG)


def test_its_records_are_those_of_a_run(run: Workspace):
    (start,) = before = run.log.read()
    assert (start.experiment, start.status, start.description) == (1, "kept", "start from cpp_kernel")
    assert [entry.row for entry in run.ledger.entries()] == before
    loop = Loop(run, run.plan, None, print)
    assert loop.rows == before and "#1" in status(run.root)
    (intent,) = run.read_intents()
    assert (intent.experiment, intent.target) == (2, run.plan.targets[0].name)


@pytest.mark.slow
@pytest.mark.timed  # beside other tests its verification takes minutes longer
def test_it_goes_on(run: Workspace, tmp_path: Path):
    """Its intent is judged as #2; nothing is profiled again, and nothing that there was changes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") and k != "ANTHROPIC_API_KEY"}
    environment |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (start,), (intent,) = run.log.read(), run.read_intents()
    asked = ["--device", "cpu", "--experiments", "1", "--top", "1", "--input-shape", "1,64", "--model-args", MODEL_ARGS]
    command = [sys.executable, "orchestrate.py", *asked]  # without --tag: the latest run of this model goes on
    done = subprocess.run(command, cwd=run.root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = ExperimentLog(run.root / "results.tsv").read()
    assert first == start and (second.tag, second.experiment) == (TAG, 2)
    assert second.description == intent.proposal.hypothesis
    assert [entry.row.commit for entry in run.ledger.entries()] == [first.commit, second.commit]
    assert all((run / name).read_bytes() == (RECORDS / name).read_bytes() for name in (PLAN, PROFILE))
    assert (run / VERIFY).is_file() and not run.read_intents()
