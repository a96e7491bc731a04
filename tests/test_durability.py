"""What a run survives: kills at any moment, a full disk, a machine that sleeps or is shared; and that nothing piles up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from git import GitCommandError

from autokernel.agents import Proposal
from autokernel.agents.scripted import ScriptedAgent
from autokernel.common.preflight import find_compiler
from autokernel.common.verdict import Correctness, Verdict
from autokernel.gate import Judge
from autokernel.hardware import machine
from autokernel.hardware.machine import Clocks, gpu_lost, low_disk, turn
from autokernel.history.experiments import Status
from autokernel.run.environment import Watch
from autokernel.run.loop import Budget, Loop
from autokernel.run.supervisor import AGAIN
from autokernel.run.workspace import Workspace
from autokernel.spec import ROOT
from benchmarks import kills, soak
from tests.test_ledger import clone, sh, state  # noqa: F401  `clone` is a fixture
from tests.test_loop import FAST, NO_RULES, PLAN_OF_ONE, TARGET, WRONG, started, workspace  # noqa: F401  fixtures

VERDICT = Verdict("rmsnorm", "cpp", "cpu", Correctness.PASS, True, "faster", seed=1)


@pytest.mark.parametrize("times", [12, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_in_git_and_rows(tmp_path, monkeypatch, times):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "clone").mkdir()
    figures = kills.kill_records(kills.copy_of_this_clone(tmp_path / "clone"), kills=times, seed=1)
    assert sum(figures["kills"].values()) == times and figures["kept"] > 2 and figures["slowest_resume_s"] < 5


@pytest.mark.slow
def test_kills_of_every_part_of_a_run(tmp_path):
    figures = kills.kill_whole(tmp_path, kills=6, seed=2)
    assert sum(figures["kills"].values()) >= 4  # on a busy machine a git may come too late to be killed


@pytest.mark.slow
def test_nothing_piles_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soak.check(soak.soak(tmp_path / "clone", experiments=100, every=20))


# What a supervised process does, by its turn (how many lines its file has), and what becomes of it: its status and turns.
SUPERVISED = {
    "ends by itself": ("raise SystemExit(0)", 0, 1),
    "a user's mistake": ("raise SystemExit(2)", 2, 1),
    "an error before anything was done": ("raise ValueError", 1, 1),
    "killed, then well": ("if turn < 3: os.kill(os.getpid(), 9)", 0, 3),
    "asks for another, then well": (f"raise SystemExit({AGAIN} if turn < 3 else 0)", 0, 3),
    "an error after an experiment, then well": ("if turn == 1: row('mine'); raise ValueError", 0, 2),
    "told to stop after an experiment": ("row('mine'); raise SystemExit(143)", 143, 1),
    "told to stop while it ends by itself": ("os.kill(os.getpid(), 15)", 143, 1),
    "a user's mistake while another run has an experiment done": ('row("other"); raise SystemExit(2)', 2, 1),
    "killed each time while another run has one done": ('row("other"); os.kill(os.getpid(), 9)', 1, 4),
    "killed each time": ("os.kill(os.getpid(), 9)", 1, 4),
    "a crash of its own code": ("os.kill(os.getpid(), 11)", 139, 2),
    "a crash, then well": ("if turn == 1: os.kill(os.getpid(), 11)", 0, 2),
    "killed each time after an experiment": ("row('mine'); os.kill(os.getpid(), 9 * (turn < 8))", 0, 8),
}
CHILD = """
import os, sys
with open("turns", "a+") as file:
    file.write("turn\\n")
    file.seek(0)
    turn = len(file.readlines())
from autokernel.run.supervisor import Call, noted
noted(Call("mine", "cpu", started_s=0.0, made=0))
def row(tag):
    with open("rows", "a") as rows:
        rows.write(f"{turn}\\t{tag}\\trmsnorm\\n")
"""
SUPERVISOR = """
import sys
from pathlib import Path
from autokernel.run.supervisor import Supervisor
raise SystemExit(Supervisor([sys.executable, "-c", sys.argv[1]], Path("rows").resolve(), (0.01, 0.01, 0.01)).run())
"""


@pytest.mark.parametrize("case", SUPERVISED)
def test_supervisor(case, tmp_path):
    code, status, turns = SUPERVISED[case]
    command = [sys.executable, "-c", SUPERVISOR, CHILD + code]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert len((tmp_path / "turns").read_text().splitlines()) == turns


STOPPED = """
import signal, subprocess, sys, time
orphan = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
signal.signal(signal.SIGINT, lambda *_: print("told", flush=True))
print(orphan.pid, flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_run_once_and_nothing_outlives_it(number, tmp_path):
    command = [sys.executable, "-c", SUPERVISOR, STOPPED]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as supervisor:
        orphan = int(supervisor.stdout.readline())
        if number == signal.SIGINT:
            supervisor.send_signal(number)
            assert supervisor.stdout.readline() == "told\n"
            supervisor.send_signal(signal.SIGTERM)
        else:
            supervisor.send_signal(number)
        assert supervisor.stdout.readline() == ""  # the child is gone as well
        assert supervisor.wait(10) == (-number if number == signal.SIGKILL else 128 + signal.SIGTERM)
    if number == signal.SIGKILL:  # whoever is killed cannot tidy up
        os.kill(orphan, signal.SIGKILL)
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(orphan, 0)


@pytest.mark.parametrize(
    ("later", "fault", "said"),
    [
        (Clocks(100.0, 100.0, 100.0), "", ""),
        (Clocks(3700.0, 100.0, 3700.0), "slept for 3600 s", ""),
        (Clocks(3700.0, 100.0, 100.0), "", "set by +3600 s"),
        (Clocks(-3500.0, 100.0, 100.0), "", "set by -3600 s"),
    ],
)
def test_sleep_and_clocks(later, fault, said, monkeypatch):
    lines = []
    monkeypatch.setattr(Clocks, "now", lambda: Clocks(90.0, 90.0, 90.0))
    watch = Watch("cpu", [], lines.append)
    monkeypatch.setattr(Clocks, "now", lambda: later)
    assert fault in watch.fault(VERDICT) and bool(watch.fault(VERDICT)) == bool(fault)
    assert said in "".join(lines) and bool(lines) == bool(said)


def test_clocks_agree_here():
    before = Clocks.now()
    time.sleep(0.01)
    assert abs(before.slept_s(Clocks.now())) < 0.01


def test_a_full_disk_is_no_kernels_fault(tmp_path, monkeypatch):
    crashed = replace(VERDICT, correctness=Correctness.CRASH, keep=False)
    watch = Watch("cpu", [tmp_path, tmp_path / "not there"], print)
    assert watch.fault(crashed) == "" and low_disk([tmp_path]) == ""
    monkeypatch.setattr(machine, "LOW_DISK_BYTES", 1 << 62)
    assert "is full" in watch.fault(crashed) and watch.fault(VERDICT) == ""


def test_a_gpu_that_is_not_there():
    assert gpu_lost("cpu") == ""
    if not torch.cuda.is_available():
        assert "does not answer" in gpu_lost("cuda")


# The functions of libnvidia-ml.so that are asked, of a driver whose first GPU is used by us and, it may be, by process 1.
DRIVER = """
#include <unistd.h>
typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, part; } Process;
typedef struct { unsigned gpu, memory; } Rates;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { *handle = (void*)1; return index ? 2 : 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* found) {
    if (*count < OTHERS + 1) { *count = OTHERS + 1; return 7; }
    for (unsigned i = 0; i <= OTHERS; i++) found[i] = (Process){i ? 1 : getpid()};
    *count = OTHERS + 1;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void* handle, Rates* rates) { *rates = (Rates){BUSY, 0}; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* reasons) { *reasons = REASONS; return 0; }
"""
ASKED = """
import json
from autokernel.gate.timing.disturbance import throttled
from autokernel.hardware.machine import gpu_shared
print(json.dumps([gpu_shared("cuda"), throttled("cuda"), gpu_shared("cuda:1"), gpu_shared("cpu"), throttled("cpu")]))
"""


def asked_of(folder: Path) -> list[object]:
    """What a process says of GPUs that finds its driver's library in `folder`, if there is one."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return json.loads(
        subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, check=True).stdout
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("others", "busy", "told"), [(0, 90, False), (1, 90, True), (1, 3, False)])
def test_other_processes_on_the_gpu(others, busy, told, tmp_path):
    library, reasons = tmp_path / "libnvidia-ml.so.1", 0x40 if told else 0x4
    numbers = [f"-DOTHERS={others}", f"-DBUSY={busy}", f"-DREASONS={reasons}"]
    command = [find_compiler("cpp"), "-x", "c", "-", "-shared", "-fPIC", *numbers, "-o", str(library)]
    subprocess.run(command, input=DRIVER.encode(), check=True)
    shared, slow, *nothing = asked_of(tmp_path)
    assert shared == ("cuda is used by other processes: [1]" if told else "")
    assert slow == ("the GPU is throttled (clock event reasons 0x40)" if told else None)
    assert nothing == ["", "", None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_nothing_is_known(tmp_path):
    assert asked_of(tmp_path) == ["", None, "", "", None]


class Disturbed:
    """A judge on a machine that is disturbed `times` times, and then left alone."""

    def __init__(self, times: int) -> None:
        self.verdicts = [VERDICT.as_undecided("others took 80 %")] * times

    def examine(self, source, target, incumbent=None, *, seed=None, progress):
        return self.verdicts.pop() if self.verdicts else VERDICT


@pytest.mark.parametrize(("times", "status"), [(1, Status.KEPT), (2, Status.KEPT), (3, Status.UNDECIDED)])
def test_what_the_machine_disturbs_is_judged_again_and_never_a_revert(started, times, status):  # noqa: F811
    said = []
    with started.locked():
        loop = Loop(started, PLAN_OF_ONE, Disturbed(times), said.append, pauses_s=(0, 0))
        loop.run(ScriptedAgent([(FAST + "#", "an edit")]), NO_RULES, Budget())
    assert loop.rows[-1].status == status
    assert sum("judged again" in line for line in said) == min(times, 2)


def test_what_was_disturbed_is_not_judged_again_once_the_run_is_to_stop(started):  # noqa: F811
    said, judge = [], Disturbed(1)
    with started.locked():
        loop = Loop(started, PLAN_OF_ONE, judge, said.append, pauses_s=(600,))
        disturbed = judge.examine

        def stopped(*args, **options):
            loop.stopping = "stopped by SIGINT"
            return disturbed(*args, **options)

        judge.examine = stopped
        loop.run(ScriptedAgent([(FAST + "#", "an edit")]), NO_RULES, Budget())
    assert loop.rows[-1].status == Status.UNDECIDED and not any("judged again" in line for line in said)


def test_what_waits_to_be_judged_again_is_not_once_the_run_is_to_stop(started, monkeypatch):  # noqa: F811
    """It was judged once more, with the machine as busy as before: minutes after the signal."""
    judge = Disturbed(1)
    with started.locked():
        loop = Loop(started, PLAN_OF_ONE, judge, lambda line: None, pauses_s=(600,))
        monkeypatch.setattr(loop, "_sleep", lambda seconds: setattr(loop, "stopping", "stopped by SIGINT"))
        loop.run(ScriptedAgent([(FAST + "#", "an edit")]), NO_RULES, Budget())
    assert loop.rows[-1].status == Status.UNDECIDED


def test_a_run_whose_folder_is_deleted_meanwhile_goes_on(started):  # noqa: F811
    said, judge = [], Disturbed(0)
    with started.locked():
        loop = Loop(started, PLAN_OF_ONE, judge, said.append, pauses_s=())

        def deleted(*args, **options):
            shutil.rmtree(started.folder)
            return VERDICT

        judge.examine = deleted
        loop.run(ScriptedAgent([(FAST + "#", "an edit")]), NO_RULES, Budget())
    assert [row.status for row in started.log.read()] == [Status.KEPT] * 2 and started.plan == PLAN_OF_ONE
    assert any("was deleted while the run worked" in line for line in said)


OUT_OF_SPACE, NO_SPACE = (OSError, GitCommandError), "No space left|Out of diskspace|write error|unable to write"


def test_full_disk(tmp_path):
    """A file system without space: the run waits, says so, and goes on when there is some."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", tmp_path]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        _fill_and_free(tmp_path)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def _fill_and_free(tmp_path):
    run = kills.started(kills.copy_of_this_clone(tmp_path))
    before = kills.users_state(tmp_path)
    filler = tmp_path / ".git/filler"

    def script():
        yield lambda source: kills.wrong(source), "with space"
        with open(filler, "wb") as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"\0" * (1 << 16))
                file.flush()
        yield lambda source: kills.wrong(source) + "#", "without space"

    with run.locked(), Judge("cpu") as judge, pytest.raises(OUT_OF_SPACE, match=NO_SPACE):
        Loop(run, run.plan, judge, print).run(ScriptedAgent(script()), NO_RULES, Budget())
    said = []

    def say(line):
        said.append(line)
        if "waiting for space" in line:
            filler.unlink()

    with pytest.raises(OUT_OF_SPACE, match=NO_SPACE), run.locked():
        Loop(run, run.plan, None, say)
    filler.unlink(missing_ok=True)
    with run.locked(), Judge("cpu") as judge:
        loop = Loop(run, run.plan, judge, say)
        with open(filler, "wb") as file:
            file.write(b"\0" * (shutil.disk_usage(tmp_path).free - (8 << 20)))
        loop.run(ScriptedAgent([(lambda source: kills.wrong(source) + "##", "with space again")]), NO_RULES, Budget())
    rows = kills.check(run, before)
    assert [row.description for row in rows if row.agent == "scripted"][-1] == "with space again"
    assert any("waiting for space" in line for line in said)


TURNS = """
import sys, time
from autokernel.hardware.machine import turn
for _ in range(3):
    with turn("cuda:7", lambda waiting: None):
        print("in\\n", end="", flush=True)
        time.sleep(0.2)
        print("out\\n", end="", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_two_runs_take_turns_on_a_device(tmp_path):
    with open(tmp_path / "said", "w") as said:
        runs = [subprocess.Popen([sys.executable, "-c", TURNS], cwd=ROOT, stdout=said) for _ in range(2)]
        assert [run.wait(60) for run in runs] == [0, 0]
    assert (tmp_path / "said").read_text().split() == ["in", "out"] * 6
    with turn("cuda:7", print), turn("cuda:6", print):
        taken = turn("cuda:7", print, stopping=lambda: True)
        with pytest.raises(KeyboardInterrupt), taken:
            pass


def test_another_run_beside_this_one(started, judge):  # noqa: F811
    """Two tags in one clone, at once: each in its own tree."""
    other = Workspace(started.root, "other")
    with started.locked(), other.locked():
        first, second = (Loop(run, PLAN_OF_ONE, judge, print) for run in (started, other))
        second.start(TARGET, WRONG)
        first.attempt(TARGET, Proposal(WRONG, "first", "scripted"))
    assert [row.tag for row in started.log.read()] == ["night", "other", "night"]
    assert (started.ledger.tree, other.ledger.tree) == (started / "tree", other / "tree")
