"""The warm parent's start: before PyTorch is imported, only for what is judged, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autokernel.gate.workers.launch import Launched
from autokernel.gate.workers.processes import WarmParent
from autokernel.spec import KERNELS, ROOT

RMSNORM = str(KERNELS / "rmsnorm" / "cpp_kernel.py")
# Runs a command in this process, and says of each warm parent that it starts whether PyTorch was there before it.
RECORDS = """
import subprocess, sys
from autokernel.cli.main import run

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        if "autokernel.gate.workers.zygote" in command:
            print("launched", "after" if "torch" in sys.modules else "before", file=sys.stderr, flush=True)
        super().__init__(command, **options)

subprocess.Popen = Popen
raise SystemExit(run(sys.argv[1], sys.argv[2:]))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """TMPDIR of a command: of the processes that it starts, a warm parent works below it."""
    yield tmp_path
    assert within(10, lambda: not parents(tmp_path)), "a warm parent was left behind"


def start(folder: Path, *words: str, **options: object) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **pipes, **options)


def parents(folder: Path) -> list[int]:
    """Warm parents that work below this folder, and are alive."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_parent = b"autokernel.gate.workers.zygote" in (process / "cmdline").read_bytes()
            if is_parent and Path(os.readlink(process / "cwd")).is_relative_to(folder):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def within(seconds: float, holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name, words",
    [
        ("bench", (RMSNORM, "--kernel", "softmax")),
        ("bench", ("--calibrate", "no_such_type")),
        ("check", (RMSNORM, RMSNORM, "--kernel", "softmax")),
    ],
)
def test_the_parent_starts_before_pytorch_is_imported_and_ends_where_nothing_is_judged(folder, name, words):
    ended = start(folder, "-c", RECORDS, name, *words)
    _, said = ended.communicate(timeout=60)
    assert ended.returncode in (1, 2), said
    assert [line for line in said.splitlines() if line.startswith("launched")] == ["launched before"]
    assert not parents(folder) and not list(folder.glob("autokernel-*"))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    "name, words, status",
    [
        ("bench", ("--help",), 0),
        ("bench", ("--version",), 0),
        ("bench", ("--no-such-option",), 2),
        ("bench", ("--device", "gpu"), 2),
        ("bench", ("no_such_file.py",), 2),
        ("bench", (RMSNORM, "--incumbent", "LICENSE"), 2),
        ("check", (RMSNORM, "no_such_file.py", "--kernel", "rmsnorm"), 2),
        ("check", ("--help",), 0),
        ("check", (RMSNORM, RMSNORM, "--kernel", "softmx"), 2),
        ("orchestrate", ("--help",), 0),
        ("orchestrate", ("status",), 2),
        ("verify", ("--tag", "no-such-run"), 2),
    ],
)
def test_what_judges_nothing_starts_no_parent(folder, name, words, status):
    if words == ("status",):
        words = ("status", "--tag", "x")  # bad use
    ended = start(folder, "-c", RECORDS, name, *words)
    _, said = ended.communicate(timeout=60)
    assert ended.returncode == status, said
    assert "launched" not in said and not list(folder.glob("autokernel-*"))


KILLS = [  # the diagonal first, for it has every signal and every moment
    pytest.param(begun, number, id=f"{begun}-{number.name}", marks=() if i == j else pytest.mark.slow)
    for i, begun in enumerate(("starting", "importing", "ready"))
    for j, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("begun", "number"), KILLS)
def test_a_command_that_is_killed_takes_its_parent_along(folder, begun, number):
    process = start(folder, "bench.py", RMSNORM, start_new_session=True)
    assert within(30, lambda: parents(folder))
    if begun == "importing":
        (parent,) = parents(folder)
        assert within(30, lambda: "libtorch_cpu" in Path(f"/proc/{parent}/maps").read_text())
    if begun == "ready":
        assert process.stderr.readline().strip() == RMSNORM
    process.send_signal(number)
    process.communicate(timeout=60)
    assert within(1, lambda: not parents(folder)), "it went on alone"


def test_a_parent_that_is_not_ready_ends_with_the_context_at_once():
    with Launched() as launched:
        assert launched.process.poll() is None
        started = time.monotonic()
    assert time.monotonic() - started < 1 and launched.process.returncode == -signal.SIGKILL
    assert not launched.scratch.exists()
    launched.close()


@pytest.mark.slow
def test_a_warm_parent_takes_over_what_was_launched():
    with Launched() as launched:
        parent = WarmParent("cpu", launched=launched)
        assert parent.process is launched.process and launched.is_ready
        assert parent.probe()["files"]
        parent.close()
        assert launched.process.returncode == 0, "it was not told, but killed: it would leave orphans behind"


@pytest.mark.slow
def test_a_parent_outlives_the_thread_that_started_it():
    """The kernel takes the thread for the parent: a judge that is made in one thread is used in another one."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        parent = pool.submit(WarmParent, "cpu").result()
    try:
        time.sleep(0.2)
        assert parent.probe()["files"]
    finally:
        parent.close()


def test_a_parent_that_cannot_be_used_is_ended():
    def fails() -> None:
        raise MemoryError("the device has none")

    with Launched() as launched:
        with pytest.raises(MemoryError):
            WarmParent("cpu", fails, launched)
        assert launched.is_closed and launched.process.returncode == -signal.SIGKILL
