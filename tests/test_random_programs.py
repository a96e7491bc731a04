"""Programs made at random do the same with kernels at all of their sites; one that does not is made smaller."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from autokernel.model.match import SiteFinder
from benchmarks import random_programs
from benchmarks.random_programs import Program, check, described, fallback_of, make, smaller

AT_ONCE = 50  # programs in one test


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of tensors this small, more are only in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow if first else ()) for first in range(0, 300, AT_ONCE)],
)
def test_programs_made_at_random(first: int) -> None:
    failed = [o for o in map(check, map(make, range(first, first + AT_ONCE))) if o.why and not o.torchs]
    assert not failed, described(failed[0])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 600, AT_ONCE))
def test_programs_through_other_backends(first: int) -> None:
    outcomes = [check(make(seed), fallback_of(seed)) for seed in range(first, first + AT_ONCE)]
    failed = [o for o in outcomes if o.why and not o.torchs]
    assert not failed, described(failed[0])


def test_what_broadcasting_hands_on_stays_one_object() -> None:
    lines = ("r = v.reshape(v.shape)", "torch._dynamo.graph_break()", "s_ = r.contiguous()", "t = r * F.mse_loss(r, s_)")
    outcome = check(Program(0, lines, ("t", "r", "s_"), gradients=False, autocast=False), "aot_eager")
    assert outcome.sites and outcome.why is None


def test_a_program_that_fails_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that are wrong: the line with the site, what it needs, and what returns it, are left."""
    monkeypatch.setattr(random_programs, "KERNEL", random_programs.KERNEL.replace(".to(dtype)", ".to(dtype) + 1"))
    monkeypatch.setattr(random_programs, "finder", lambda: SiteFinder(min_elements=0))
    lines = ("y = x + 1.0", "r = F.layer_norm(y, (8,))", "z = r.transpose(1, 2)", "q.mul_(0.5)")
    program = Program(0, lines, ("r", "z", "y"), gradients=True, autocast=False)
    outcome = smaller(check(program))
    assert outcome.why and not outcome.torchs
    assert outcome.program.lines == lines[:3]
    assert not outcome.program.gradients and len(outcome.program.results) == 1


def test_a_region_that_computes_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = random_programs.evaluate
    monkeypatch.setattr(random_programs, "evaluate", lambda *given: [y + 1 for y in right(*given)])
    monkeypatch.setattr(random_programs, "finder", cache(random_programs.finder.__wrapped__))
    program = Program(0, ("r = (x * 2).sin() + q.sum()",), ("r",), gradients=False, autocast=False)
    assert "written as something else" in check(program).why
