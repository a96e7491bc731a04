"""Every cheat works where it is believed, and is refused here for its own reason."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import correctness
import not_the_job
import pytest
import timing
import torch
from cheat import Cheat, starter

from autokernel.gate import Judge
from autokernel.spec import ROOT, load_spec
from autokernel.target import Target, WeightedCase, default_target

NAIVE = Path(__file__).with_name("naive.py")
CHEATS = [*timing.CHEATS, *correctness.CHEATS, *not_the_job.CHEATS]
FAST = 1.5  # times what the honest starter is credited with


def naive_verdict(source: str, kernel_type: str, folder: Path, *options: str) -> dict:
    """What a caller of the naive gate, a copy of it in `folder`, is led to believe."""
    (folder / "naive.py").write_text(NAIVE.read_text())
    (folder / "kernel.py").write_text(source)
    command = [sys.executable, "naive.py", "kernel.py", kernel_type, *options]
    # One thread: PyTorch's and the kernel's would wait for each other on a busy machine. What it builds is its own.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOKERNEL_CACHE": str(folder.parent)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    lines = run.stdout.splitlines()
    assert lines, run.stderr
    return json.loads(lines[-1])


def naive_options(cheat: Cheat) -> tuple[str, ...]:
    return (*(f"--dims={json.dumps(dims)}" for dims in cheat.dims), *cheat.options)


@functools.cache
def honest_speedup(kernel_type: str, options: tuple[str, ...], folder: Path) -> float:
    return naive_verdict(starter(kernel_type), kernel_type, folder, *options)["speedup"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("honest")


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.id)
def test_it_works_on_a_naive_gate(cheat: Cheat, tmp_path: Path, folder: Path):
    verdict = naive_verdict(cheat.source, cheat.kernel_type, tmp_path, *naive_options(cheat))
    assert verdict["correct"]
    if cheat.works == "fast":
        assert verdict["speedup"] > FAST * honest_speedup(cheat.kernel_type, naive_options(cheat), folder)


def target(cheat: Cheat) -> Target:
    spec = load_spec(cheat.kernel_type)
    if not cheat.dims:
        return default_target(cheat.kernel_type, "cpp", "cpu", torch.float32)
    cases = tuple(WeightedCase(spec.case(dims, torch.float32)) for dims in cheat.dims)
    return Target(cheat.id, cheat.kernel_type, "cpp", "cpu", cases)


@pytest.fixture(scope="module")
def judges():
    """Our gate: as it is, and (True) one that lets kernels call PyTorch."""
    with Judge("cpu") as strict, Judge("cpu", allow_libraries=True) as lenient:
        for judge in (strict, lenient):
            judge.checks.timeout_s = 3.0
        yield {False: strict, True: lenient}


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.id)
def test_it_is_refused_for_its_reason(cheat: Cheat, judges: dict[bool, Judge]):
    judge = judges[cheat.libraries]
    if cheat.refused_by == "contest":
        verdict = judge.examine(cheat.source, target(cheat), incumbent=starter(cheat.kernel_type), quick=True)
        assert verdict.failure is None and not verdict.keep
        assert re.search(cheat.reason, verdict.why)
        assert verdict.speedup_vs_incumbent.value < 1
        return
    examine = judge.examine if cheat.refused_by == "examine" else judge.check
    verdict = examine(cheat.source, target(cheat))
    assert verdict.failure is not None, f"accepted: {verdict.speedup_vs_pytorch} times PyTorch"
    assert re.search(cheat.reason, verdict.failure.reason), verdict.failure
    assert verdict.correctness == cheat.correctness
    assert cheat.stage in ("", verdict.failure.stage)
    assert not verdict.keep
