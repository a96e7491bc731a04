"""A small clone with runs of its own, and a process in it that has imported PyTorch and forks one for every command."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autokernel.hardware.processes import STEPS
from autokernel.history.experiments import STARTER
from autokernel.history.ledger import GitLedger
from autokernel.run.workspace import PLAN, Workspace
from autokernel.spec import ROOT
from autokernel.target import Plan, default_target, starter_source
from tests.test_experiments import ROW

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
PLAN_OF_ONE = Plan("test", {}, "cpu", 1000.0, (TARGET,))

# Reads a line of JSON for each command; its child runs the script as Python would.
ZYGOTE = """
import gc, json, os, resource, runpy, sys, traceback
sys.path.insert(0, os.getcwd())
import autokernel.cli.commands, autokernel.model.profiler, autokernel.model.extraction, autokernel.integration.verification
import autokernel.integration.verification.winners, autokernel.export.package, autokernel.export.hub
import autokernel.history.status, autokernel.cli.orchestrate
assert autokernel.__file__.startswith(os.getcwd())
gc.freeze()  # or the children copy all of it when they collect
print(flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, path in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        os.environ |= asked["environment"]
        os.chdir(asked["cwd"])
        if asked["file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_bytes"],) * 2)
        sys.argv = asked["words"]
        status = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)  # PyTorch's own end takes longer than most commands
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def clone_this(root: Path) -> None:
    """A clone of this one, as its working tree is; its branch is main, whatever this one's is."""
    subprocess.run(["git", "clone", "-q", ROOT, root], check=True)
    subprocess.run(["git", "checkout", "-q", "-B", "main"], cwd=root, check=True)
    asked = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, root / name)


def write_plan(run: Workspace) -> None:
    replace(PLAN_OF_ONE, workload={"of": run.tag}).write(run / PLAN)


def make_night(root: Path) -> None:
    """The run `night`, the latest: a starter, one experiment that was kept, one that failed."""
    night = Workspace(root, "night")
    write_plan(night)
    source, ledger = starter_source(TARGET), night.ledger
    ledger.open()
    start = replace(ROW, target=TARGET.name, agent=STARTER, speedup_vs_incumbent=None, description="start")
    failed = replace(ROW, target=TARGET.name, experiment=3, status="failed", correctness="FAIL", description="too bold")
    rows = [start, replace(ROW, target=TARGET.name, experiment=2), failed]
    night.log.append([ledger.record(row, f"{source}# {row.experiment}\n") for row in rows])
    ledger.reset()
    os.utime(night / PLAN, (2e9, 2e9))  # the latest


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str


class SmallClone:
    """The runs `night` (a starter, one kept, one failed) and `unproven` (a plan), beside and below a user's folders."""

    def __init__(self, home: Path) -> None:
        self.home, self.root, self.changed = home, home / "clone", False
        clone_this(self.root)
        self._git("add", "--all")
        self._git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "changed", "--allow-empty")
        for place in (home / "beside", home):
            place.mkdir(exist_ok=True)
            (place / "sentinel").write_text("mine")
        self.make_runs()
        self.zygote = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], cwd=self.root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "AUTOKERNEL_", "ANTHROPIC_", "OPENAI_"))}
            | {"HOME": str(home), "PYTHONPATH": str(self.root), "GIT_CONFIG_NOSYSTEM": "1", STEPS: ""},
        )  # fmt: skip
        self.zygote.stdout.readline()

    def make_runs(self) -> None:
        """Both runs anew, and nothing else in workspace/, whatever a command left there."""
        self.changed = False
        subprocess.run(["rm", "-rf", "workspace", "results.tsv"], cwd=self.root, check=True)
        self._git("worktree", "prune")
        self._git("checkout", "-q", "--force", "main")
        refs = self._git("for-each-ref", "--format=delete %(refname)", "refs/autokernel", "refs/heads/autokernel")
        subprocess.run(["git", "update-ref", "--stdin"], cwd=self.root, input=refs, text=True, check=True)
        write_plan(Workspace(self.root, "unproven"))
        make_night(self.root)

    def run(self, words: Sequence[str], cwd: Path | None = None, file_bytes: int | None = None, **environment: str) -> Done:
        """`python WORDS`, in the clone; no file may be larger than `file_bytes` (ulimit -f)."""
        out, err = self.home / "beside/stdout", self.home / "beside/stderr"
        words = [str(self.root / words[0]), *words[1:]]
        asked = {"words": words, "cwd": str(cwd or self.root), "environment": environment, "file_bytes": file_bytes}
        self.zygote.stdin.write(json.dumps(asked | {"stdout": str(out), "stderr": str(err)}) + "\n")
        self.zygote.stdin.flush()
        return Done(int(self.zygote.stdout.readline()), out.read_text(), err.read_text())

    def _git(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(["git", *words], cwd=cwd or self.root, capture_output=True, text=True, check=True)
        return done.stdout

    def git(self, *words: str) -> str:
        return self._git(*words)

    def ledger(self, tag: str) -> GitLedger:
        return Workspace(self.root, tag).ledger

    def close(self) -> None:
        self.zygote.stdin.close()
        self.zygote.send_signal(signal.SIGTERM)
        self.zygote.wait()


def small_clone(home: Path) -> Iterator[SmallClone]:
    clone = SmallClone(home)
    yield clone
    clone.close()
