"""Compiling ahead of the trials of a kernel: what they need is there, and nothing goes on when the verdict is there."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autokernel.gate import Judge
from autokernel.gate.checks.ahead import CompilingAhead
from autokernel.spec import load_spec
from autokernel.target import default_target

SPEC = load_spec("vectorsum")
TARGET = default_target("vectorsum", "cpp", "cpu", torch.float32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOKERNEL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def judge(cache: Path) -> Iterator[Judge]:
    with Judge("cpu") as judge:
        judge.checks.compiling = 2
        yield judge


def never_compiled() -> str:
    (path, *_) = SPEC.starters("cpp").values()
    return path.read_text().replace("#include", f"// {random.random()}\n#include", 1)


def test_each_case_is_compiled(judge: Judge, cache: Path):
    known = set(cache.rglob("*.so"))
    cases = [SPEC.case(SPEC.smoke, dtype).args for dtype in SPEC.dtypes for _ in range(3)]
    with CompilingAhead(judge.parent, judge.checks.memory, 2, never_compiled(), SPEC, cases) as ahead:
        assert len(ahead.left) <= len(SPEC.dtypes)  # each once
        while ahead.left:
            time.sleep(0.01)
        ahead.finish()
        made = set(cache.rglob("*.so")) - known
        assert len(made) >= len(SPEC.dtypes) and not any(thread.is_alive() for thread in ahead.threads)


def test_the_verdict_is_the_same_and_nothing_goes_on_after_it(judge: Judge):
    before, right = set(threading.enumerate()), never_compiled()
    assert judge.check(right, TARGET).correctness == "PASS"
    assert set(threading.enumerate()) <= before
    wrong = judge.check(f"{right}\nright = kernel_fn\ndef kernel_fn(x):\n    return right(x[1:])\n", TARGET)
    assert wrong.failure.stage == "smoke_test" and "instead of" in wrong.failure.reason


def test_what_does_not_compile_is_let_go(judge: Judge):
    started = time.monotonic()
    broken = judge.check(never_compiled().replace("#include", "#error of ours\n#include", 1), TARGET)
    assert broken.failure.stage == "smoke_test" and "of ours" in f"{broken.failure}"
    with CompilingAhead(
        judge.parent, judge.checks.memory, 1, never_compiled(), SPEC, [SPEC.case(SPEC.smoke, torch.float32).args]
    ):
        pass
    assert time.monotonic() - started < 30
