"""What all tests share: Ctrl-C, caches, timed tests that run alone, and a limit on how many of those may say nothing."""

import atexit
import contextlib
import fcntl
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_TIMING_SKIPS = 5  # with more, the machine was too busy for the run to say anything of timing
ALONE = pytest.StashKey["Alone"]()
LOCKS = "AUTOKERNEL_TEST_LOCKS"  # a folder of the processes of one run: their locks, and
TIMED = "timed"  # the names of the timed tests, for the process that shares tests out, which collects none

# A suite that a shell starts in the background ignores Ctrl-C, and so would the runs that its tests start and stop.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Alone:
    """A lock between the processes of one run, on two files: tests share the `room`, a timed one has it to itself. Whoever
    waits for the room holds the `queue`, so that no other test begins before."""

    def __init__(self, folder: Path) -> None:
        self.queue, self.room = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("queue", "room"))

    @contextlib.contextmanager
    def entered(self, alone: bool) -> Iterator[None]:
        fcntl.flock(self.queue, fcntl.LOCK_EX)
        fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self.queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self.room, fcntl.LOCK_UN)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which pytest-xdist started."""
    return hasattr(config, "workerinput")


def is_timed(item: pytest.Item) -> bool:
    return item.get_closest_marker("timed") is not None or item.get_closest_marker("gpu") is not None


def pytest_configure(config: pytest.Config) -> None:
    if is_worker(config):
        config.stash[ALONE] = Alone(Path(os.environ[LOCKS]))
        return
    # In a process of its own: measures the CPU's peaks, once for all runs, and before two processes share its cores.
    measure = "from autokernel.hardware.device import Device; Device.detect('cpu')\n"
    measure += "from autokernel.build import default_cache; print(default_cache())"
    cache = subprocess.run([sys.executable, "-c", measure], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    # Named, so that a test whose home is elsewhere finds what was compiled before.
    os.environ["AUTOKERNEL_CACHE"] = cache.strip()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache.strip()) / "inductor"))
    # PyTorch's threads wait asleep: where another process has the core, spinning took four times as long (measured on the
    # five stages of a layernorm). The gate does not pass it on to kernels.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["AUTOKERNEL_PROVEN"] = proven = tempfile.mkdtemp(prefix="autokernel-tests-")  # what jobs prove is no user's
    config.add_cleanup(lambda: shutil.rmtree(proven, ignore_errors=True))
    os.environ["SECRET"] = "secret"  # which no kernel may read, from the start of all judges (tests/cheats/harness.py)
    os.environ[LOCKS] = locks = tempfile.mkdtemp(prefix="autokernel-tests-")
    config.add_cleanup(lambda: shutil.rmtree(locks))


@pytest.fixture
def nothing_compiled_before() -> None:
    import torch._dynamo

    torch._dynamo.reset()


@pytest.fixture
def region_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where regions' kernel types are made: a folder of its own, with nothing known from before."""
    monkeypatch.setattr("autokernel.spec.REGIONS", tmp_path / "regions")
    monkeypatch.setattr("autokernel.model.regions.growing._KNOWN", {})
    return tmp_path / "regions"


@contextlib.contextmanager
def started_judge(threads: contextlib.AbstractContextManager[None], **options: object) -> Iterator[object]:
    from autokernel.gate import Judge

    with threads:
        judge = Judge("cpu", **options)
    with judge:
        yield judge


@pytest.fixture(scope="session")
def judge_of_all_threads() -> Iterator[object]:
    with started_judge(contextlib.nullcontext()) as judge:
        yield judge


@pytest.fixture(scope="session")
def judge_of_one_thread() -> Iterator[object]:
    """On one thread: on two, where another test has the other core, each operation waits for what that test leaves."""
    from autokernel.hardware.threads import one_thread

    with started_judge(one_thread()) as judge:
        yield judge


@pytest.fixture(scope="session")
def lenient_of_all_threads() -> Iterator[object]:
    with started_judge(contextlib.nullcontext(), allow_libraries=True) as judge:
        yield judge


@pytest.fixture(scope="session")
def lenient_of_one_thread() -> Iterator[object]:
    from autokernel.hardware.threads import one_thread

    with started_judge(one_thread(), allow_libraries=True) as judge:
        yield judge


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> object:
    """The gate, for all tests that leave it as it is."""
    return request.getfixturevalue("judge_of_all_threads" if is_timed(request.node) else "judge_of_one_thread")


@pytest.fixture
def lenient(lenient_of_one_thread: object) -> object:
    """A gate that lets kernels call PyTorch: wrong results are easier to write in it. Nothing is timed by it."""
    return lenient_of_one_thread


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the test files import stays until the end: no garbage collection looks at these million objects. They took a
    third of the collecting of tests, and a quarter of what tests of the compiler took in this process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # or nanobind says at the end what has leaked


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Slow cases are marked before some are left out for their marks. Timed tests come last, whatever order plugins such as
    pytest-randomly have made: until then all processes have something to do."""
    mark_slow_cases(items)
    yield
    items.sort(key=is_timed)
    Path(os.environ[LOCKS], TIMED).write_text("\n".join(item.nodeid for item in items if is_timed(item)))


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Of a test with `slow_after(n)` the cases after the first n are slow."""
    cases: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow_after"):
            cases[item.function].append(item)
    for those in cases.values():
        those.sort(key=lambda item: tuple(item.callspec.indices.values()))
        (most,) = those[0].get_closest_marker("slow_after").args
        for item in those[most:]:
            item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file's tests run in one process, and all that is timed in one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        @functools.cached_property
        def timed(self) -> set[str]:
            return set(Path(os.environ[LOCKS], TIMED).read_text().splitlines())

        def _split_scope(self, nodeid: str) -> str:
            return TIMED if nodeid in self.timed else nodeid.partition("::")[0]

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout: to wait for other tests is not this one's time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    alone = item.config.stash.get(ALONE, None)
    with alone.entered(is_timed(item)) if alone else contextlib.nullcontext():
        return (yield)


def timing_skips(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", [])  # a whole file among them has no keywords
    return [report for report in skipped if "timed" in getattr(report, "keywords", ())]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not is_worker(session.config) and len(timing_skips(session.config)) > MAX_TIMING_SKIPS:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if len(skips := timing_skips(config)) > MAX_TIMING_SKIPS:
        line = f"{len(skips)} timed tests were skipped, more than {MAX_TIMING_SKIPS}: run them again on a quieter machine"
        terminalreporter.write_line(f"FAILED: {line}", red=True)


@pytest.fixture
def refusal(capsys):
    """What a script says on its way to exit status 2: one line of error, the last on stderr."""
    from autokernel.cli.arguments import script

    def run(main, *argv):
        with pytest.raises(SystemExit) as end:
            script(main, [str(word) for word in argv])
        said = capsys.readouterr()
        lines = said.err.splitlines()
        assert end.value.code == 2, said.err
        assert "Traceback" not in said.err and [line for line in lines if "error:" in line] == lines[-1:], said.err
        assert lines[-1].startswith("error: ") and len(lines[-1]) < 900
        return lines[-1]

    return run
