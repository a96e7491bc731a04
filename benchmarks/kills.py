"""Kills a real run at seeded random moments and looks for anything lost, doubled or left behind.

Usage:
    python benchmarks/kills.py --kills 200 --seed 1 --out benchmarks/kills.json

Two kinds of run are killed. `whole`: orchestrate.py with the real gate and a command as its agent, in a copy of this clone;
in turn its supervisor, its judge, the warm parent, a git process and all of them are killed, and it goes on. `records`: the
loop in a process of its own with a judge that answers at once by a coin, so that most of the time goes into git and
results.tsv, where a kill could do harm; half of its experiments are kept. `fleet`: the same with the driver of four
simulated workers, whose answers come in any order; it goes on with workers and without them in turn.

Reads:  this clone's files
Writes: the file named by --out; works in a temporary folder
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.agents import Agent
from autokernel.agents.scripted import ScriptedAgent
from autokernel.cli.arguments import Parser, count, script, seed
from autokernel.common.verdict import Correctness, Interval, Verdict
from autokernel.history.experiments import STARTER, Experiment, Status
from autokernel.history.progress import Rules, incumbent, rows_of
from autokernel.report.branch import close_branch
from autokernel.run.fleet import Fleet, Task
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import PLAN, Workspace
from autokernel.spec import ROOT
from autokernel.target import Plan, Target, default_target, starter_source
from benchmarks.simulated_pool import SimulatedPool

VICTIMS = ("orchestrator", "judge", "warm parent", "git", "group")
TAG = "kills"
AT_WORK_S = 300  # how long is waited for a run to get an experiment done: after four deaths in a row 120 s are a pause
NO_RULES = Rules(None, None, None, None)
NOTHING_LEFT = "nothing is left to try on any target"
USERS_EDIT = "an edit of the user's, not committed\n"


def sh(*command: str, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def wrong(source: str) -> str:
    """A kernel whose answers are wrong, so that the gate is done with it in a second."""
    return source.replace("    return y\n", "    y[..., 0].zero_()\n    return y\n")


def targets() -> tuple[Target, ...]:
    made = (default_target(name, "cpp", "cpu", torch.float32) for name in ("rmsnorm", "softmax"))
    return tuple(replace(target, share=0.4) for target in made)


def copy_of_this_clone(root: Path) -> Path:
    """The files of this working tree, committed in a repository of their own, and an edit that is not."""
    names = sh("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    sh("git", "init", "-q", "-b", "main", cwd=root)
    sh("git", "add", ".", cwd=root)
    sh("git", "-c", "user.name=u", "-c", "user.email=u@x", "commit", "-qm", "first", cwd=root)
    (root / "README.md").write_text(USERS_EDIT)
    return root


def started(root: Path) -> Workspace:
    """A run whose starters are kept, as records: what is killed here is not their timing."""
    workspace = Workspace(root, TAG)
    plan = Plan("kills", {}, "cpu", 1000.0, targets())
    plan.write(workspace / PLAN)
    ledger = workspace.ledger
    ledger.open()
    for number, target in enumerate(plan.targets, start=1):
        row = Experiment(
            number, TAG, target.kernel_type, None, 100.0, 40.0, 1.0, "PASS", 0.0, "start from cpp_kernel", target.name,
            "kept", "", None, None, None, 1.0, 0, "cpu", STARTER, 0, 0.0,
        )  # fmt: skip
        workspace.log.append([ledger.record(row, starter_source(target))])
    return workspace


def users_state(root: Path) -> tuple[object, ...]:
    """All that belongs to the user: HEAD, branch, index, status, files."""
    status = sh("git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", cwd=root)
    head, branch = (root / ".git/HEAD").read_text(), sh("git", "rev-parse", "main", cwd=root)
    return head, branch, (root / ".git/index").read_bytes(), status, (root / "README.md").read_text()


def check(workspace: Workspace, before: tuple[object, ...]) -> list[Experiment]:
    """The rows of a run that was resumed; fails if anything is lost, doubled, broken or touched."""
    root, ledger = workspace.root, workspace.ledger
    rows = [row for row in workspace.log.read() if row.tag == TAG]
    assert [row.experiment for row in rows] == list(range(1, len(rows) + 1)), "rows were lost or doubled"
    assert [row.row() for row in rows] == [entry.row.row() for entry in ledger.entries()], "git and results.tsv differ"
    commits = "".join(f"{row.commit}\n" for row in rows)
    found = subprocess.run(
        ["git", "cat-file", "--batch-check=%(objecttype)"], cwd=root, input=commits, capture_output=True, text=True
    ).stdout.split()
    assert found == ["commit"] * len(rows), "commits are missing"
    fsck = subprocess.run(["git", "fsck", "--no-dangling", "--strict"], cwd=root, capture_output=True, text=True)
    assert (fsck.returncode, fsck.stdout) == (0, ""), f"git fsck: {fsck.stdout} {fsck.stderr}"
    source = (ledger.tree / "kernel.py").read_text()
    assert source == ledger.source(ledger.head), "kernel.py is not the branch's"
    best = [incumbent(rows_of(target, rows)) for target in targets()]
    assert source in [ledger.source(row.commit) for row in best], "kernel.py is no incumbent"
    assert sh("git", "status", "--porcelain", cwd=ledger.tree) == "", "the run's tree is not clean"
    assert users_state(root) == before, "the user's files, index or branch were touched"
    assert not list(root.glob(".git/**/*.lock")), "git's locks were left behind"
    return rows


class Coin:
    """A judge that answers at once: every other kernel is faster."""

    def examine(
        self,
        source: str,
        target: Target,
        incumbent: str | None = None,
        *,
        seed: int | None = None,
        progress: Callable[[str], None],
    ) -> Verdict:
        keep = bool(seed & 1)
        gain = Interval(1.01, 1.02, 1.03) if keep else Interval(0.98, 0.99, 1.0)
        return Verdict(
            target.kernel_type, target.backend, "cpu", Correctness.PASS, keep, "by a coin", seed, speedup_vs_incumbent=gain
        )


def edits() -> Iterator[tuple[Callable[[str], str], str]]:
    """Without end, and no two alike."""
    while True:
        yield lambda incumbent: f"# {time.monotonic_ns()}\n{incumbent}", "a comment"


def work_alone(workspace: Workspace, agent: Agent) -> None:
    """The branch is closed every few experiments, as at the end of a run."""
    loop = Loop(workspace, workspace.plan, Coin(), lambda line: None)
    while loop.run(agent, NO_RULES, Budget(experiments=3)) != NOTHING_LEFT:
        close_branch(workspace)
    close_branch(workspace)


def work_on_workers(workspace: Workspace, agent: Agent) -> None:
    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        verdict = Coin().examine(task.source, task.target, seed=random.getrandbits(30), progress=print)
        return random.uniform(1, 10), verdict

    loop = Loop(workspace, workspace.plan, None, lambda line: None)
    Fleet(loop, SimulatedPool(4, judge), lambda line: None).run(agent, NO_RULES, Budget())


def kill_fleet(root: Path, kills: int, seed: int) -> dict[str, object]:
    return kill_records(root, kills, seed, work_on_workers)


def kill_records(
    root: Path, kills: int, seed: int, work: Callable[[Workspace, Agent], None] = work_alone
) -> dict[str, object]:
    """Kill the loop, or the git process that it is waiting for, `kills` times; look at everything after each resume."""
    chance = random.Random(seed)
    workspace = started(root)
    before = users_state(root)
    slowest_s, rows, killed, in_flight = 0.0, [], Counter(), Counter()
    for number in range(kills):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with open(os.devnull, "w") as silent:
                os.dup2(silent.fileno(), 1)
                os.dup2(silent.fileno(), 2)
            try:
                with workspace.locked():
                    random.seed(number)
                    work(workspace, ScriptedAgent(edits()))
            finally:  # an exception must not unwind what belongs to the parent
                os._exit(1)
        time.sleep(chance.uniform(0.02, 1.0))
        victim = ("orchestrator", "git", "group")[number % 3]
        killed[victim if _kill(victim, pid) else f"no {victim} found in time"] += 1
        if victim == "git":  # the loop ends by itself: it has lost its git in the middle of a step
            deadline = time.monotonic() + 5
            while not (ended := os.waitpid(pid, os.WNOHANG)[0]) and time.monotonic() < deadline:
                time.sleep(0.01)
            if not ended:
                os.kill(pid, signal.SIGKILL)
        if victim != "git" or not ended:
            os.waitpid(pid, 0)
        in_flight[len(workspace.read_intents())] += 1
        resumed = time.monotonic()
        with workspace.locked():
            (work if number % 2 else work_alone)(workspace, ScriptedAgent([]))
        slowest_s = max(slowest_s, time.monotonic() - resumed)
        known, rows = rows, check(workspace, before)
        assert not workspace.read_intents(), "an experiment is still open"
        assert [r.row() for r in rows[: len(known)]] == [r.row() for r in known], "rows have changed"
    kept = sum(row.status == Status.KEPT for row in rows)
    return {
        "kills": dict(killed),
        "experiments": len(rows),
        "kept": kept,
        "slowest_resume_s": round(slowest_s, 2),
        "kills with so many open experiments": dict(sorted(in_flight.items())),
    }


def descendants(pid: int) -> list[int]:
    """All descendants of a process, nearest first."""
    found, queue = [], [pid]
    while queue:
        below = _offspring(queue.pop(0))
        found += below
        queue += below
    return found


def _offspring(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _find(victim: str, pid: int) -> list[int]:
    """The processes of this kind below the orchestrator `pid`."""
    if victim == "orchestrator":
        return [pid]
    below = descendants(pid)
    if victim == "group":
        return [pid, *below]
    if victim == "judge":
        return [child for child in below if _command_of(child).split()[1:2] == ["orchestrate.py"]][:1]
    if victim == "warm parent":
        return [child for child in below if "autokernel.gate.workers.zygote" in _command_of(child)][:1]
    until = time.monotonic() + 0.5  # a git lives for a few milliseconds: look at those who start it, and quickly
    while time.monotonic() < until:
        for parent in [pid, *below]:
            if gits := [child for child in _offspring(parent) if _command_of(child).startswith("git ")]:
                return gits[:1]
    return []


def _kill(victim: str, pid: int, patience_s: float = 20.0) -> bool:
    """Whether there was such a process within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if found := _find(victim, pid):
            for each in found:
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return True
    return False


SUPERVISED = """
import sys
from pathlib import Path
from autokernel.run.supervisor import Supervisor
raise SystemExit(Supervisor(sys.argv[1:], Path("results.tsv"), pauses_s=(0.1,) * 1000).run())
"""  # as orchestrate.py does it, but without its pauses


class Night:
    """orchestrate.py at work in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kernel_type = "$(sed -n 's/^KERNEL_TYPE = \"\\(.*\\)\"/\\1/p' kernel.py)"
        edit = f'cp {root}/edit-{kernel_type}.py kernel.py; echo "# $(date +%N)" >> kernel.py'
        for target in targets():
            (root / f"edit-{target.kernel_type}.py").write_text(wrong(starter_source(target)))
        words = ["--tag", TAG, "--device", "cpu", "--agent", f"command: {edit}", "--max-reverts", "1000000"]
        self.command = [sys.executable, "-c", SUPERVISED, sys.executable, "orchestrate.py", "run", *words]
        self.environment = os.environ | {"TMPDIR": str(root / "tmp")}  # whose turns are not those of other runs here
        (root / "tmp").mkdir()
        self.log = open(root / "night.log", "a+")  # noqa: SIM115  as long as this lives
        self.process: subprocess.Popen | None = None
        self.starts = 0

    def ensure(self) -> int:
        """Its process id; started if it does not run."""
        if self.process is None or self.process.poll() is not None:
            self.starts += 1
            self.process = subprocess.Popen(
                self.command,
                cwd=self.root,
                env=self.environment,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
        return self.process.pid

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def stop(self) -> None:
        """As its user would."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        finally:
            if self.process.poll() is None:
                self.process.kill()


def kill_whole(root: Path, kills: int, seed: int, longest_s: float = 5.0) -> dict[str, object]:
    """Kill parts of a running orchestrate.py `kills` times, at any moment of its start or its work."""
    chance = random.Random(seed)
    workspace = started(copy_of_this_clone(root))
    before = users_state(root)
    night, killed, missed = Night(root), Counter(), Counter()
    pids: set[int] = set()
    for number in range(kills):
        pid, victim = night.ensure(), VICTIMS[number % len(VICTIMS)]
        if number % 2:  # while it works; else at any moment, of its start most often
            rows_before, until = len(workspace.log.read()), time.monotonic() + AT_WORK_S
            while len(workspace.log.read()) == rows_before and time.monotonic() < until:
                time.sleep(0.05)
        time.sleep(chance.uniform(0.1, longest_s / 5 if number % 2 else longest_s))
        pids |= {pid, *descendants(pid)}
        (killed if _kill(victim, pid) else missed)[victim] += 1
        if victim in ("orchestrator", "group"):
            night.process.wait()
    known = len(workspace.log.read())
    began = time.monotonic()
    night.ensure()
    while len(workspace.log.read()) <= known + 1 and time.monotonic() < began + AT_WORK_S:
        time.sleep(0.1)
    night.stop()
    assert len(workspace.log.read()) > known, f"it did not go on after the last kill: {night.said()[-2000:]}"
    rows = check(workspace, before)
    assert not workspace.read_intents(), "an experiment is still open"
    shared = ("autokernel-turn-", "torchinductor_")  # one for all runs
    folders = [path.name for path in (root / "tmp").iterdir() if not path.name.startswith(shared)]
    assert len(folders) <= 1, f"temporary folders pile up: {folders}"
    left = [pid for pid in pids if _command_of(pid) and "autokernel" in _command_of(pid)]
    assert not left, f"processes were left behind: {[_command_of(pid) for pid in left]}"
    return {
        "kills": dict(killed),
        "not found in time": dict(missed),
        "starts by hand": night.starts,
        "experiments": len(rows),
        "by status": dict(Counter(str(row.status) for row in rows)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--kills", type=count, default=200, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=1)
    parser.add_argument("--only", choices=("records", "fleet", "whole"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    figures: dict[str, object] = {"seed": arguments.seed}
    for name, kill in {"records": kill_records, "fleet": kill_fleet, "whole": kill_whole}.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder, "clone")
                root.mkdir()
                tempfile.tempdir = folder  # whose turns are not those of other runs here
                if name != "whole":
                    copy_of_this_clone(root)
                figures[name] = kill(root, arguments.kills, arguments.seed)
                print(name, figures[name], flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(script(main))
