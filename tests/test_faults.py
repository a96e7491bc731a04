"""Kernels that hang, crash, flood or lie: the right verdict in time, no process left, the next kernel unharmed."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
import torch

from autokernel.gate import Correctness, Judge
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WorkerProcess
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LIMIT_S = 3.0  # for one call
SPEC = load_spec("rmsnorm")
RIGHT = (SPEC.folder / "cpp_kernel.py").read_text()
# What comes after a kernel at fault: right in the first stage and wrong in the second, which is known at once.
RIGHT_AT_FIRST = RIGHT.replace("def kernel_fn(", "def _right(") + (
    "\n\ndef kernel_fn(x, weight, eps=1e-6):\n    y = _right(x, weight, eps)\n"
    f"    return y if x.shape == {tuple(SPEC.smoke.values())} else y.zero_()\n"
)
TARGET = Target("small", SPEC.name, "cpp", "cpu", (WeightedCase(SPEC.case(SPEC.smoke, torch.float32)),))


@dataclass(frozen=True)
class Fault:
    """`code` runs before a kernel that is right otherwise: in each call, or at import. `reason`: a pattern."""

    name: str
    code: str
    correctness: Correctness
    reason: str = ""
    at_import: bool = False


def cpp(body: str) -> str:
    return f"from autokernel.build import cpp_function\ncpp_function('''{body}''', 'run', '')()"


# Every socket that the process has: one of them leads to the judge.
SOCKETS = """import json, os, stat, struct, time
sockets = [int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')]
sockets = [fd for fd in sockets if stat.S_ISSOCK(os.fstat(fd).st_mode)]
"""
SAY = SOCKETS + "say = lambda data: [os.write(fd, struct.pack('!I', len(data)) + data) for fd in sockets]\n"
LATER = "\ntime.sleep(1000)"
NO_MEMORY = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.00 GiB.')"

FORGED = "the worker's answer is not what was asked for"
CRASH, TIMEOUT, PASS = Correctness.CRASH, Correctness.TIMEOUT, Correctness.PASS
FAULTS = (
    Fault("hang", "while True: pass", TIMEOUT, "no answer within 3 s"),
    Fault(
        "hang-in-c",
        cpp('extern "C" int run() { volatile int go = 1; while (go) {} return 0; }'),
        TIMEOUT,
        "no answer within 3 s",
    ),
    Fault("stop", "import os, signal\nos.killpg(0, signal.SIGSTOP)", TIMEOUT, "no answer within 3 s"),
    Fault("segfault", cpp('extern "C" int run() { *(volatile int*)8 = 1; return 0; }'), CRASH, "SIGSEGV"),
    Fault("abort", cpp('#include <cstdlib>\nextern "C" int run() { abort(); }'), CRASH, "SIGABRT"),
    Fault("words-that-are-no-text", r"raise ValueError('half \ud800 of a character')", CRASH, "ValueError: half "),
    Fault("memory", "hold = [bytearray(1 << 42)]", CRASH, "MemoryError"),
    Fault(
        "memory-in-c++",
        cpp('#include <vector>\nextern "C" int run() { std::vector<char> v(1ll << 42, 1); return v[7]; }'),
        CRASH,
        "out of memory",
    ),
    Fault("memory-of-torch", "torch.empty(1 << 42, dtype=torch.uint8)", CRASH, "memory"),
    Fault(
        "thread-bomb",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
        CRASH,
        "thread",
    ),
    Fault("fork-bomb", "import os\nwhile True: os.fork()", CRASH, "PermissionError"),
    Fault("shell", "import subprocess\nsubprocess.Popen(['sleep', '1000'])", CRASH, "PermissionError"),
    Fault("stdout", "block = b'x' * (1 << 20)\nimport os\nfor _ in range(1024): os.write(1, block)", PASS, at_import=True),
    Fault(
        "stderr",
        "block = b'x' * (1 << 20)\nimport os\nfor _ in range(1024): os.write(2, block)",
        CRASH,
        "File too large",
        True,
    ),
    Fault(
        "large-file",
        "file = open('large', 'wb')\nfor _ in range(1024): file.write(bytes(1 << 20))",
        CRASH,
        "File too large",
    ),
    Fault("real-time-signal", "import os\nos.kill(os.getpid(), 40)", CRASH, "killed by signal 40"),
    Fault("escape-codes", "raise ValueError('\\x1b[2J\\0wiped')", CRASH, r"^ValueError:  \[2J wiped$"),
    Fault("exit", "import os\nos._exit(0)", CRASH, "ended with status 0"),
    Fault("exit-at-import", "import os\nos._exit(0)", CRASH, "ended with status 0", True),
    Fault("exception-at-import", "raise ValueError('not today')", CRASH, "ValueError: not today", True),
    Fault("delete-itself", "import os\nos.remove('kernel.py')", PASS, at_import=True),
    Fault("close-the-channel", SOCKETS + "for fd in sockets: os.close(fd)", CRASH, "status|channel"),
    Fault(
        "garbage",
        SOCKETS + "for fd in sockets: os.write(fd, b'\\xff' * 4096)\nimport time" + LATER,
        CRASH,
        FORGED,
    ),
    Fault(
        "giant-message",
        SOCKETS + "for fd in sockets:\n  while True: os.write(fd, bytes(range(1, 256)) * 4096)",
        CRASH,
        FORGED,
    ),
    Fault("no-device-memory", NO_MEMORY, CRASH, "OutOfMemoryError: CUDA out of memory"),
    Fault("not-json", SAY + "say(b'hello')" + LATER, CRASH, FORGED),
    Fault("not-a-record", SAY + "say(b'17')" + LATER, CRASH, FORGED),
    Fault("deep-json", SAY + "say(b'[' * 1000000)" + LATER, CRASH, FORGED),
    Fault("no-outputs", SAY + "say(b'{}')" + LATER, CRASH, FORGED),
    Fault(
        "outputs-of-no-kind",
        SAY + "say(json.dumps({'outputs': 5, 'inputs': None}).encode())" + LATER,
        CRASH,
        FORGED,
    ),
    Fault(
        "half-a-message",
        SOCKETS + "import time\nfor fd in sockets: os.write(fd, b'\\0\\0\\1\\0{')" + LATER,
        TIMEOUT,
        "no answer",
    ),
    Fault(
        "strange-build",
        SAY + "say(json.dumps({'type': 'build', 'language': 'fortran', 'source': '', 'defines': 3}).encode())" + LATER,
        CRASH,
        FORGED,
    ),
    Fault(
        "deep-folders",
        "import os\nfor _ in range(3000):\n  os.mkdir('d')\n  os.chdir('d')",
        Correctness.FAIL,
        "changes the working",
        at_import=True,
    ),
)


def source(fault: Fault) -> str:
    if fault.at_import:
        return f"{fault.code}\n{RIGHT}"
    code = fault.code.replace("\n", "\n    ")
    return RIGHT.replace("def kernel_fn(", "def _right(") + (
        f"\n\ndef kernel_fn(x, weight, eps=1e-6):\n    import torch\n    {code}\n    return _right(x, weight, eps)\n"
    )


@pytest.fixture(scope="module")
def judge():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for one another on a busy machine make it slow
    with Judge("cpu") as judge:
        yield judge
        assert judge.check(RIGHT, TARGET).failure is None, "after all that was at fault"
    torch.set_num_threads(threads)


def processes(scratch: Path) -> set[int]:
    """Processes whose environment names this scratch folder: the warm parent and whatever descends from it."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.fsencode(scratch) in environ.read_bytes():
                found.add(int(environ.parent.name))
        except OSError:
            continue
    return found


# That take seconds, or a gigabyte, and are ends or floods of a kind that another fault has; and answers of a wrong form, of
# which test_channel.py has a hundred.
LATER = {"stop", "hang-in-c", "half-a-message", "deep-folders", "delete-itself", "memory-in-c++", "stderr"}
LATER |= {"not-a-record", "no-outputs", "outputs-of-no-kind", "strange-build"}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.slow] * (f.name in LATER), id=f.name) for f in FAULTS]
)
def test_a_fault_ends_in_its_verdict_and_leaves_nothing(judge: Judge, fault: Fault, monkeypatch: pytest.MonkeyPatch):
    if fault.correctness is TIMEOUT:
        monkeypatch.setattr(judge.checks, "timeout_s", LIMIT_S)
    started = time.monotonic()
    verdict = judge.check(source(fault), TARGET)
    assert verdict.correctness == fault.correctness, str(verdict.failure)
    if fault.correctness != PASS:
        assert time.monotonic() - started < LIMIT_S + 5
        assert verdict.failure.stage == "smoke_test"
        assert re.search(fault.reason, verdict.failure.reason), str(verdict.failure)
    assert processes(judge.parent.scratch) == {judge.parent.process.pid}
    assert not list(judge.parent.scratch.glob("worker-*"))
    unharmed = judge.check(RIGHT_AT_FIRST, TARGET)
    assert unharmed.stages["smoke_test"] == "PASS" and unharmed.failure.stage == "shape_sweep", unharmed


# Workers of either kind, one of them stopped, one of them a parent of processes that have left its group.
KILLED = """
import subprocess
import sys
from autokernel.gate import Judge
from autokernel.gate.workers.processes import WorkerProcess

with Judge("cpu") as judge:
    children = "import os, time\\nfor _ in range(5):\\n  if os.fork() == 0: os.setsid(); os.fork(); time.sleep(1000)"
    with WorkerProcess(judge.parent, 1, "") as parent, WorkerProcess(judge.parent, 1, "kernel") as stopped:
        parent.post("load", source=children + "\\nwhile True: pass", poison=False, libraries="any")
        stopped.stop()
        print(judge.parent.scratch, flush=True)
        parent.answer(1000)
"""


def test_a_lack_of_device_memory_counts_only_if_it_stays(judge: Judge):
    """Other trials may have held it."""
    code = f"import sys\nif x.shape[0] == 1 and not hasattr(sys, 'said'):\n    sys.said = True\n    {NO_MEMORY}"
    verdict = judge.check(source(Fault("once", code, PASS)), TARGET)
    assert verdict.correctness == PASS, verdict.why


def test_a_gpus_memory_is_shared_out():
    memory_budget, order = DeviceMemoryBudget(10), []

    def large() -> None:
        with memory_budget.take(5):
            order.append("large")

    with memory_budget.take(6):
        waiting = Thread(target=large)
        waiting.start()
        with memory_budget.take(4):
            order.append("beside")
        assert order == ["beside"]
    waiting.join(10)
    assert order == ["beside", "large"]
    with memory_budget.take(1000):
        assert memory_budget.left == 0
    assert memory_budget.left == 10


def test_nothing_outlives_a_killed_judge(judge: Judge):
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as killed:
        scratch = Path(killed.stdout.readline().strip())
        wanted = 1 + 2 + 10  # the warm parent, its workers, their children
        assert within(20, lambda: len(processes(scratch)) == wanted), processes(scratch)
        killed.kill()
    assert within(5, lambda: not processes(scratch)), processes(scratch)
    assert scratch.exists()
    with Judge("cpu"):
        assert not scratch.exists()
        assert judge.parent.scratch.exists()


def within(seconds: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done()


def test_a_worker_leaves_no_process_even_in_a_session_of_its_own(judge: Judge):
    """For kernels that may start processes, as compilers do: those of a C++ kernel on a CPU are refused above."""
    bomb = "import os, time\nfor _ in range(6):\n  if os.fork() == 0: os.setsid()\ntime.sleep(1000)"
    with WorkerProcess(judge.parent, 1, "") as worker:
        worker.post("load", source=bomb, poison=False, libraries="any")
        assert within(10, lambda: len(processes(judge.parent.scratch)) == 1 + 2**6)
    assert processes(judge.parent.scratch) == {judge.parent.process.pid}


@pytest.mark.slow
def test_a_full_scratch_folder_is_the_kernels_own_trouble(judge: Judge):
    if not judge.sandbox["scratch"]:
        pytest.skip("scratch folders are on a disk here")
    fill = "for i in range(64):\n  with open(f'full-{i}', 'wb') as file: file.write(bytes(1 << 26))"
    verdict = judge.check(source(Fault("full", fill, CRASH)), TARGET)
    assert "No space left on device" in verdict.failure.reason
    assert judge.check(RIGHT, TARGET).failure is None
