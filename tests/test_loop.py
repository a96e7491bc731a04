"""The loop through the real gate: what is kept, reset, refused, crashed or timed out; git and rows after each; resuming."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autokernel.agents import Agent, AgentOptions, Context, Proposal
from autokernel.agents.command import CommandAgent
from autokernel.agents.conversation import ModelAgent
from autokernel.agents.openai import ChatModel, client_for
from autokernel.agents.scripted import ScriptedAgent
from autokernel.gate import Interval, Judge
from autokernel.gate.workers.channel import ChannelClosed
from autokernel.hardware.machine import MachineFault
from autokernel.history.experiments import COLUMNS, STARTER
from autokernel.history.progress import Rules
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import PLAN, RunInProgress, Workspace
from autokernel.spec import ROOT
from autokernel.target import Plan, default_target, starter_source
from tests.busy import skip_if_wide
from tests.chat_api import serving
from tests.messages_api import Broken, Refusal
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh, state  # noqa: F401  `clone` is a fixture

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
PLAN_OF_ONE = Plan("test", {}, "cpu", 1000.0, (TARGET,))
FAST = starter_source(TARGET)
CALL = next(line for line in FAST.splitlines() if line.startswith("    _run("))
SLOW, SLOWER = (FAST.replace(CALL, "\n".join([CALL] * times)) for times in (16, 64))
WRONG = FAST.replace("    return y\n", "    y[..., 0].zero_()\n    return y\n")
ABORTS = FAST.replace("    return y\n", "    import os\n    os.abort()\n")
HANGS = FAST.replace("    return y\n", "    while True:\n        pass\n")
NO_RULES = Rules(None, None, None, None)


@pytest.fixture
def workspace(clone) -> Workspace:  # noqa: F811
    workspace = Workspace(clone, "night")
    PLAN_OF_ONE.write(workspace / PLAN)
    return workspace


def test_no_experiment_begins_that_would_end_longer_after_the_time_than_it_had_left():
    budget = Budget(seconds=180, at_least=1).begun(5, 1000.0)
    assert not budget.over(6, 1130.0, each_s=90.0)
    assert budget.over(6, 1140.0, 90.0) == "the 3 minutes are used up but for 40 s, and an experiment takes 90 s"
    assert budget.over(6, 1181.0) == "the 3 minutes are used up"
    assert not budget.over(5, 1181.0), "one is made, however long it takes"
    assert not Budget(experiments=2).begun(5, 1000.0).over(6, 1e6, 90.0)


def check(loop: Loop, status: str, source: str, incumbent: str) -> None:
    """The last experiment is told alike by git, by results.tsv and by the tree, and was `status`."""
    row = loop.workspace.log.read()[-1]
    if row.status == "undecided" and status in ("kept", "reset"):
        pytest.skip(f"too much else goes on for a verdict: {loop.entries[-1].notes}")
    if row.speedup_low is not None and status == "kept":
        skip_if_wide(Interval(row.speedup_low, row.speedup_vs_incumbent, row.speedup_high))
    assert (row.status, row.experiment) == (status, len(loop.workspace.log.read()))
    git, tree = loop.ledger, loop.ledger.tree
    assert sh("git", "rev-parse", f"refs/autokernel/night/{row.experiment}", cwd=tree) == row.commit
    assert git.source(row.commit) == source
    assert sh("git", "show", "--format=", "--name-only", row.commit, cwd=tree) == "kernel.py"
    subject = sh("git", "log", "-1", "--format=%s", row.commit, cwd=tree)
    assert subject.startswith(f"#{row.experiment} {TARGET.name}: {status}")
    assert (row.commit == git.head) == (status == "kept")
    assert git.source(git.head) == (tree / "kernel.py").read_text() == incumbent
    assert sh("git", "status", "--porcelain", cwd=tree) == ""
    assert not (loop.workspace / "intent.json").exists()
    assert {e.row.experiment: e.row.row() for e in git.entries()} == {
        r.experiment: r.row() for r in loop.workspace.log.read()
    }


def record_start(workspace: Workspace, source: str) -> None:
    """The row of a starter that was kept, unjudged: whether a busy machine lets it pass is not what is tested here."""
    ledger = workspace.ledger
    ledger.open()
    unlike = {"speedup_vs_incumbent": None, "speedup_low": None, "speedup_high": None}
    row = replace(ROW, target=TARGET.name, agent=STARTER, description="start from cpp_kernel", **unlike)
    workspace.log.append([ledger.record(row, source)])


@pytest.mark.timed
def test_every_outcome_through_the_real_gate(workspace, clone, judge, monkeypatch):  # noqa: F811
    before, said = state(clone), []

    def script(loop):
        check(loop, "kept", SLOW, SLOW)
        yield FAST, "one pass instead of sixteen is faster"
        check(loop, "kept", FAST, FAST)
        assert loop.rows[-1].speedup_low > 1
        yield SLOWER, "sixty-four passes are faster"
        check(loop, "reset", SLOWER, FAST)
        yield WRONG, "one column less is faster"
        check(loop, "failed", WRONG, FAST)
        assert loop.rows[-1].correctness == "FAIL" and loop.rows[-1].latency_us is None
        assert "smoke_test" in loop.entries[-1].notes
        yield ABORTS, "ending early is faster"
        check(loop, "crash", ABORTS, FAST)
        monkeypatch.setattr(judge.checks, "timeout_s", 3.0)  # which the others may exceed on a busy machine
        yield HANGS, "not ending is faster"
        check(loop, "timeout", HANGS, FAST)
        yield "def kernel_fn(:", "less syntax is faster"
        check(loop, "failed", "def kernel_fn(:", FAST)

    record_start(workspace, SLOW)
    with workspace.locked():
        loop = Loop(workspace, PLAN_OF_ONE, judge, said.append, pauses_s=())
        reason = loop.run(ScriptedAgent(script(loop)), NO_RULES, Budget())
    assert reason == "nothing is left to try on any target"
    assert [row.status for row in loop.rows] == ["kept", "kept", "reset", "failed", "crash", "timeout", "failed"]
    kept = sh("git", "log", "--format=%s", "main..autokernel/night", cwd=clone).splitlines()
    assert [line.split(":")[0] for line in kept] == [f"#{n} {TARGET.name}" for n in (2, 1)]
    assert state(clone) == before
    assert sh("git", "fsck", "--strict", cwd=clone) == ""
    again = Loop(workspace, PLAN_OF_ONE, None, said.append)
    assert [row.row() for row in again.rows] == [row.row() for row in loop.rows]
    assert "6 experiments, 1 kept, beside 1 starter; " in said[-1]


NIGHT = """
import sys
from pathlib import Path
from autokernel.agents.scripted import ScriptedAgent
from autokernel.gate import Judge
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import Workspace
from tests.test_loop import NO_RULES, PLAN_OF_ONE, TARGET, WRONG
def step(text):  # experiment 2 does not go on before this process's input does
    if text.startswith("#2 "):
        print(text)
        sys.stdin.readline()
workspace = Workspace(Path(sys.argv[1]), "night")
with workspace.locked(), Judge("cpu") as judge:
    loop = Loop(workspace, PLAN_OF_ONE, judge, print, step)
    print(loop.run(ScriptedAgent([(WRONG, "killed while judged"), (WRONG + "#", "second")]), NO_RULES, Budget()))
"""


@pytest.fixture
def started(workspace) -> Workspace:
    record_start(workspace, FAST)
    return workspace


@pytest.fixture
def night(started):
    """A run in a process of its own, in the middle of judging experiment 2, where it waits for a line."""
    command = [sys.executable, "-u", "-c", NIGHT, started.root]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("#2 "):
                break
        else:
            pytest.fail(f"it ended before experiment 2: {said}")
        yield process
        process.kill()


def test_resume_after_sigkill(workspace, clone, night, judge):  # noqa: F811
    """Killed while an experiment is judged: it is judged again, once, and nothing is lost or doubled."""
    before = state(clone)
    with pytest.raises(RunInProgress, match="night"), workspace.locked():
        pass
    night.kill()
    night.wait()

    said = []
    with workspace.locked():
        loop = Loop(workspace, PLAN_OF_ONE, judge, said.append)
        assert loop.run(ScriptedAgent([]), NO_RULES, Budget()) == "nothing is left to try on any target"
    assert [(row.experiment, row.status, row.description) for row in workspace.log.read()] == [
        (1, "kept", "start from cpp_kernel"),
        (2, "failed", "killed while judged"),
    ]
    assert any("judging it again" in line for line in said)
    check(loop, "failed", WRONG, FAST)
    assert state(clone) == before


@pytest.fixture
def two_rows(workspace, judge) -> Workspace:
    """A run of two failed experiments; a wrong kernel is judged in a second or two."""
    with workspace.locked():
        loop = Loop(workspace, PLAN_OF_ONE, judge, lambda line: None)
        loop.start(TARGET, WRONG)
        loop.start(TARGET, WRONG + "#")
    return workspace


def test_rows_that_git_has_are_written_again(two_rows):
    rows = two_rows.log.read()
    lines = two_rows.log.path.read_bytes().split(b"\n")
    two_rows.log.path.write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2][:30])  # the last row torn
    said = []
    Loop(two_rows, PLAN_OF_ONE, None, said.append)
    assert [row.row() for row in two_rows.log.read()] == [row.row() for row in rows]
    assert any("wrote 1 rows again" in line for line in said)
    two_rows.log.path.unlink()
    Loop(two_rows, PLAN_OF_ONE, None, said.append)
    assert [row.row() for row in two_rows.log.read()] == [row.row() for row in rows]
    Loop(two_rows, PLAN_OF_ONE, None, said.append)
    assert len(two_rows.log.read()) == 2


def test_git_log_alone_tells_the_night(two_rows):
    """Every column but the commit's own name stands in the message."""
    text = sh("git", "log", "-1", "--format=%B", "refs/autokernel/night/1", cwd=two_rows.root)
    row = two_rows.log.read()[0]
    assert "Status: failed" in text and f"Seed: {row.seed}" in text and "Hypothesis: start from" in text
    assert len(text.strip().split("\n\n")[-1].splitlines()) == len(COLUMNS) - 1


def test_ctrl_c_finishes_the_experiment_in_hand(workspace, night):
    night.send_signal(signal.SIGINT)
    output = night.communicate("\n", timeout=120)[0]
    assert night.returncode == 0 and "stopped by SIGINT" in output.splitlines()[-1]
    assert [row.description for row in workspace.log.read()][1:] == ["killed while judged"]
    assert workspace.read_intents() == []


def asked_through(name: str, told: Path) -> Iterator[Agent]:
    """An agent that is asked and does not answer; `told` is there once it is asked."""
    if name == "a command":
        yield CommandAgent(f"echo '# half an edit' >> kernel.py; echo >> other.py; echo $$ > {told}; exec sleep 600", print)
        return

    def silent(request: dict) -> Broken:
        told.write_text("asked")
        return Broken("stalled") if name == "an endpoint" else Refusal(429, "slow down", {"Retry-After": "600"})

    with serving(silent) as api:
        options = AgentOptions(budget_usd=100.0)
        yield ModelAgent(print, ChatModel("qwen", client_for(api.url, "test"), 2.0, 8.0), options)


@pytest.mark.parametrize("name", ["an endpoint", "an endpoint that asks for a pause", "a command"])
def test_a_signal_while_an_agent_is_asked_does_not_wait_for_its_answer(started, tmp_path, name):
    """It was waited for, up to half an hour, and judged: the run was deaf to all but a second signal."""
    told, said = tmp_path / "told", []

    def stop() -> None:
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        time.sleep(1.0 if "pause" in name else 0.0)  # until the answer is there
        began_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    with started.locked(), contextmanager(asked_through)(name, told) as agent:
        began_s, sender = [], threading.Thread(target=stop)
        sender.start()
        loop = Loop(started, PLAN_OF_ONE, None, said.append)
        assert loop.run(agent, NO_RULES, Budget()) == "stopped by SIGTERM"
        assert time.monotonic() - began_s[0] < 3 and loop.stopped_by == signal.SIGTERM
    assert said[-1].startswith("stopping: what the agent was asked is given up")
    assert len(started.log.read()) == 1 and not started.read_intents()
    if name != "a command":
        (asked,) = agent._purse.calls.values()
        assert (asked.usd > 0.2) == (name == "an endpoint"), "what may have been paid for counts in full"
        return
    assert not Path("/proc", told.read_text().strip()).exists()
    assert (started.ledger.tree / "other.py").read_text() == "other\n"
    assert Loop(started, PLAN_OF_ONE, None, said.append) and "put aside as" in said[-2]
    (aside,) = started.folder.glob("kernel_edited_*.py")
    assert aside.read_text() == FAST + "# half an edit\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_twice_stops_now_and_it_goes_on_later(workspace, night, number, judge):
    night.send_signal(number)
    assert "stopping after" in night.stdout.readline()
    night.send_signal(number)
    assert night.wait(60) != 0
    (intent,) = workspace.read_intents()
    assert len(workspace.log.read()) == 1 and intent.proposal.hypothesis == "killed while judged"
    assert intent.attempts == 0, "who stops a run says nothing about what was being judged"
    with workspace.locked():
        loop = Loop(workspace, PLAN_OF_ONE, judge, print)
        loop.run(ScriptedAgent([]), NO_RULES, Budget())
    check(loop, "failed", WRONG, FAST)


@pytest.mark.slow
def test_a_warm_parent_that_is_killed_is_no_crash_of_the_kernel(started):
    """It takes its workers along: the experiment is still open afterwards, and another process judges it."""
    with started.locked(), Judge("cpu") as judge:
        timer = threading.Timer(3.0, judge.parent.process.kill)
        timer.start()
        with pytest.raises((MachineFault, ChannelClosed)):
            Loop(started, PLAN_OF_ONE, judge, print).attempt(TARGET, Proposal(HANGS, "not ending", "scripted"))
    assert len(started.log.read()) == 1 and started.read_intents()[0].experiment == 2


def test_a_budget_of_experiments_and_the_starter_that_fails(workspace, judge):
    with workspace.locked():
        loop = Loop(workspace, PLAN_OF_ONE, judge, lambda line: None)
        loop.start(TARGET, WRONG)
        agent = ScriptedAgent([(FAST, "never asked for")])
        assert loop.run(agent, Rules(), Budget()) == "nothing is left to try on any target"
        assert loop.run(agent, Rules(), Budget(experiments=0)) == "0 experiments were made"
    assert len(loop.rows) == 1


def test_a_search_that_ends_with_the_time_ends_the_run(started):
    """None of an agent means then that no time is left, not that nothing is left to try."""
    judged_s, left_s = ROW.seconds, []

    class Searching:
        def propose(self, context: Context) -> None:
            left_s.append(context.until_s - time.monotonic())
            time.sleep(max(0.0, left_s[0]))

    with started.locked():
        loop = Loop(started, PLAN_OF_ONE, None, lambda line: None)
        reason = loop.run(Searching(), NO_RULES, Budget(seconds=judged_s / 2 + 2))
    assert "used up but for" in reason
    assert left_s == [pytest.approx(2, abs=1)]


def test_clean_removes_the_run(two_rows):
    before = sh("git", "for-each-ref", "refs/heads/main", cwd=two_rows.root)
    assert two_rows.remove() > 0
    assert not two_rows.folder.exists()
    assert sh("git", "for-each-ref", cwd=two_rows.root) == before
    assert len(two_rows.log.read()) == 2
