"""Every cheat works where it is believed, and is refused here for its own reason."""

import contextlib
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import alike_inputs
import another_program
import behind_python
import beside_the_work
import corners
import correctness
import filled_inputs
import forms
import gpu_cheats
import harness
import kept_anywhere
import kept_by_python
import kept_elsewhere
import left_changed
import models_tensors
import nearly_right
import not_the_job
import old_processes
import other_options
import partly_right
import placements
import pytest
import tables
import timing
import torch
import unusual_inputs
import unusual_numbers
import usual_kinds
import usual_weights
import whole_inputs
from cheat import Cheat, starter
from second_tier import LATER
from with_a_change import OUTSIDE

from autokernel.build import default_cache
from autokernel.common.verdict import Verdict
from autokernel.gate import Judge
from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.integration.winner import Winner
from autokernel.spec import ROOT, load_spec
from autokernel.target import Target, WeightedCase, default_target
from tests.small_targets import small_target

NAIVE = Path(__file__).with_name("naive.py")
MODULES = (
    timing,
    correctness,
    partly_right,
    nearly_right,
    unusual_inputs,
    unusual_numbers,
    filled_inputs,
    whole_inputs,
    corners,
    forms,
    placements,
    old_processes,
    another_program,
    other_options,
    not_the_job,
    harness,
    tables,
    kept_elsewhere,
    kept_anywhere,
    kept_by_python,
    models_tensors,
    usual_kinds,
    usual_weights,
    alike_inputs,
    behind_python,
    beside_the_work,
    left_changed,
)
CHEATS = [cheat for module in MODULES for cheat in module.CHEATS]
WRONG_NUMBERS = "times PyTorch's own|roundings|one element is off"
FAST = 1.5  # times what the honest starter is credited with by the same gate


@dataclass(frozen=True)
class Workplace:
    """A folder, a process and a server on this machine that are no business of a kernel's."""

    folder: Path
    bystander: int
    port: int

    def told(self, source: str) -> str:
        words = {"WORKPLACE": self.folder, "BYSTANDER": self.bystander, "PORT": self.port}
        return functools.reduce(lambda text, word: text.replace(word, str(words[word])), words, source)


@pytest.fixture
def workplace(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workplace]:
    """Its process and its server are started for cheats that name one of them, or look for one: most do not."""
    files = {"naive.py": NAIVE.read_bytes(), "home/.ssh/id_rsa": b"secret", "neighbour/kernel.py": b"secret"}
    for name, content in (files | {"cache/victim.so": b"honest", "site-packages/README": b""}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = request.getfixturevalue("cheat").source
    if not any(word in source for word in ("BYSTANDER", "PORT", "/proc")):
        yield Workplace(tmp_path, 0, 0)
        return
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    with subprocess.Popen(sleep) as bystander, socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "bystander").write_text(str(bystander.pid))
        threading.Thread(target=await_visitor, args=(server, tmp_path / "visitor"), daemon=True).start()
        yield Workplace(tmp_path, bystander.pid, server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        bystander.kill()


def await_visitor(server: socket.socket, trace: Path) -> None:
    with contextlib.suppress(OSError):  # closed when the test is over
        server.accept()
        trace.touch()


class NaiveGate:
    """Runs the naive gate: processes forked, one after the other, from one that has imported PyTorch."""

    def __init__(self) -> None:
        # One thread: PyTorch's and the kernel's would wait for each other. Its own binaries: it refuses none.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, NAIVE, "--serve"],
            env=os.environ | threads | {"PYTHONPATH": str(ROOT), "AUTOKERNEL_CACHE": str(default_cache() / "naive")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()

    def run(self, source: str, kernel_type: str, folder: Path, *options: str) -> str:
        """What a process in `folder` prints, which gets a copy of the gate."""
        (folder / "naive.py").write_bytes(NAIVE.read_bytes())
        (folder / "kernel.py").write_text(source)
        words, environment = ["kernel.py", kernel_type, *options], {"SECRET": "secret"}
        print(
            json.dumps({"folder": str(folder), "environment": environment, "words": words}),
            file=self.server.stdin,
            flush=True,
        )
        ended, _, _ = select.select([self.server.stdout], [], [], 120)
        assert ended and self.server.stdout.readline() == "ended\n", "no end of it within 120 s"
        return (folder / "stdout").read_text()

    def verdict(self, source: str, kernel_type: str, folder: Path, *options: str) -> dict[str, Any]:
        """What a caller of the naive gate is led to believe."""
        printed = self.run(source, kernel_type, folder, *options)
        assert printed, (folder / "stderr").read_text()
        return json.loads(printed.splitlines()[-1])


def naive_options(cheat: Cheat) -> tuple[str, ...]:
    return (*(f"--dims={json.dumps(dims)}" for dims in cheat.dims), *cheat.options)


@functools.cache
def honest_speedup(naive: NaiveGate, kernel_type: str, options: tuple[str, ...], folder: Path) -> float:
    return naive.verdict(starter(kernel_type), kernel_type, folder, *options)["speedup"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("honest")


@pytest.fixture(scope="module")
def naive() -> Iterator[NaiveGate]:
    with contextlib.closing(NaiveGate()) as gate:
        yield gate


def is_later(cheat: Cheat) -> bool:
    return cheat.id in LATER.get(cheat.kernel_type, ())


def cheats(timed: Callable[[Cheat], bool]) -> list[Any]:
    marks = ([pytest.mark.timed] * timed(cheat) + [pytest.mark.slow] * is_later(cheat) for cheat in CHEATS)
    return [pytest.param(cheat, id=cheat.id, marks=those) for cheat, those in zip(CHEATS, marks)]


@pytest.mark.slow
@pytest.mark.parametrize("cheat", cheats(timed=lambda cheat: cheat.works == "fast"))
def test_it_works_on_a_naive_gate(cheat: Cheat, workplace: Workplace, folder: Path, naive: NaiveGate):
    arguments = workplace.told(cheat.source), cheat.kernel_type, workplace.folder, *naive_options(cheat)
    if cheat.harmed:
        naive.run(*arguments)
        assert cheat.harmed(workplace.folder)
        return
    for _ in range(3):  # as few calls as a naive gate times, another process can disturb
        verdict = naive.verdict(*arguments)
        assert verdict["correct"]
        if cheat.works != "fast":
            return
        if verdict["speedup"] > FAST * honest_speedup(naive, cheat.kernel_type, naive_options(cheat), folder):
            return
        honest_speedup.cache_clear()
    pytest.fail(f"{verdict['speedup']} times as fast as PyTorch is not much faster than the honest kernel")


def target(cheat: Cheat) -> Target:
    if not cheat.dims:
        given = small_target if cheat.refused_by == "check" else partial(default_target, backend="cpp", device="cpu")
        return given(cheat.kernel_type, dtype=cheat.dtype)
    spec = load_spec(cheat.kernel_type)
    cases = tuple(WeightedCase(spec.case(dims, cheat.dtype)) for dims in cheat.dims)
    return Target(cheat.id, cheat.kernel_type, "cpp", "cpu", cases)


@pytest.fixture
def checking(cheat: Cheat, request: pytest.FixtureRequest) -> Judge:
    """Our gate, or one that lets kernels call PyTorch, where no clock runs: kernels have one thread, for on two each
    operation waits until another test's rest."""
    return request.getfixturevalue("lenient_of_one_thread" if cheat.libraries else "judge_of_one_thread")


@pytest.fixture
def judge(cheat: Cheat, request: pytest.FixtureRequest) -> Judge:
    """That gate, with all threads where they matter."""
    if cheat.refused_by == "check" and not cheat.threads:
        return request.getfixturevalue("checking")
    return request.getfixturevalue("lenient_of_all_threads" if cheat.libraries else "judge_of_all_threads")


@pytest.mark.parametrize("cheat", cheats(timed=lambda cheat: cheat.refused_by != "check"))
def test_it_is_refused_for_its_reason(cheat: Cheat, judge: Judge, workplace: Workplace, monkeypatch: pytest.MonkeyPatch):
    source = workplace.told(cheat.source)
    if cheat.number == 43:
        monkeypatch.setenv("AUTOKERNEL_CACHE", str(workplace.folder / "cache"))
    if cheat.refused_by == "contest":
        for _ in range(3):  # three pairs each: in so few, another process can make anything look faster
            verdict = examined(judge, source, target(cheat), incumbent=starter(cheat.kernel_type), quick=True)
            pays = not verdict.failure and verdict.speedup_vs_incumbent.value >= 1.2
            if re.search(cheat.reason, verdict.why) and not pays:
                return
        pytest.fail(f"it pays, or is refused for another reason: {verdict.why}")
    if cheat.refused_by == "examine":
        verdict = examined(judge, source, target(cheat))
    else:
        verdict = refused(judge, source, target(cheat))
    assert verdict.failure is not None, f"accepted: {verdict.why}"
    # What a kernel leaves out may hold what is planted: NaN, infinities. Which bound wrong numbers exceed first is chance.
    reason = f"{cheat.reason}|mask differs" + f"|{WRONG_NUMBERS}" * (OUTSIDE in cheat.reason)
    assert re.search(reason, verdict.failure.reason), str(verdict.failure)
    assert verdict.correctness == cheat.correctness
    assert cheat.stage in ("", verdict.failure.stage)
    assert not verdict.keep
    assert not (cheat.harmed and cheat.harmed(workplace.folder))


@pytest.mark.slow
@pytest.mark.parametrize("cheat", [pytest.param(cheat, id=cheat.id) for cheat in CHEATS if cheat.neighbour])
def test_its_honest_neighbour_passes(cheat: Cheat, checking: Judge):
    verdict = checking.check(cheat.neighbour, target(cheat))
    assert verdict.failure is None, str(verdict.failure)


def refused(judge: Judge, source: str, where: Target) -> Verdict:
    """Of one check; where it accepts, as it may where inputs drawn at random happen to miss it, two more must refuse."""
    first = judge.check(source, where)
    if first.failure is not None:
        return first
    again = [judge.check(source, where) for _ in range(2)]
    return next((verdict for verdict in again if verdict.failure is None), again[0])


def examined(judge: Judge, source: str, where: Target, **options: Any) -> Verdict:
    """A verdict; skips where the gate finds the machine too disturbed for one, and so would keep nothing, three times."""
    for _ in range(3):
        verdict = judge.examine(source, where, **options)
        if verdict.decided:
            return verdict
    pytest.skip(verdict.why)


# Why a number has no kernel file that cheats and is refused.
EXCEPTIONS = {
    10: "its results are right: test_gpu_cheats.py shows that a part of L2 that is set aside gains little",
    11: "no kernel's doing: test_gpu_cheats.py shows that what a kernel could find in L2 is timed from memory",
    15: "no kernel computes gradients: its operator has those of the plain form (see the test below)",
}


def test_every_exploit_is_tried():
    tried = {cheat.number for cheat in (*CHEATS, *gpu_cheats.CHEATS)}
    assert tried | set(EXCEPTIONS) == set(range(1, 44))
    assert not tried & set(EXCEPTIONS)


def test_the_first_tier_has_every_exploit_and_every_reason():
    known = {(cheat.kernel_type, cheat.id) for cheat in CHEATS}
    assert {(kernel_type, name) for kernel_type, names in LATER.items() for name in names} <= known, "renamed"
    first = [cheat for cheat in CHEATS if not is_later(cheat)]
    assert {cheat.number for cheat in first} == {cheat.number for cheat in CHEATS}
    of_all, of_first = ({(c.number, c.reason) for c in those if c.refused_by == "check"} for those in (CHEATS, first))
    assert of_first == of_all
    assert {"check", "examine", "contest"} <= {cheat.refused_by for cheat in first}


def test_a_kernel_that_severs_gradients_has_those_of_the_plain_form():
    """Exploit 15: the operator around a kernel computes them, from the form in which PyTorch programs write it."""
    x = torch.randn(512, 768)
    winner = Winner(default_target("rmsnorm", "cpp", "cpu", torch.float32), starter("rmsnorm"))
    model = torch.nn.RMSNorm(768, eps=1e-6)
    replacer = Replacer([winner])
    optimised = compile_with_kernels(model, replacer)
    with torch.no_grad():
        optimised(x)
    assert len(replacer.replaced) == 1, "the kernel is not used at all"
    optimised(x).sum().backward()
    severed = model.weight.grad
    assert severed is not None
    model.weight.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(severed, model.weight.grad)
