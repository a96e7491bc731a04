"""Programs made at random do the same with kernels at all of their sites; one that does not is made smaller."""

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("first", range(0, 300, AT_ONCE))
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


def test_strides_that_fake_tensors_do_not_have_are_the_originals() -> None:
    lines = ("r = v.transpose(-2, -1)", "t = F.max_pool1d(r.flatten(0, -3), 3, 1, 1)", "u = r * 0.5 + 1")
    assert check(Program(0, lines, ("u", "t"), gradients=False, autocast=False)).why is None


def test_what_is_written_where_something_was_detached_is_no_part_of_it() -> None:
    lines = ("r1 = v.flip(-1) * 2", "r2 = F.linear(v, s.frozen, s.b)", "r4 = torch.softmax(r1, 1)", "r5 = r4.detach()")
    program = Program(0, (*lines, "r5.copy_(k)"), ("r2", "r5"), gradients=True, autocast=True, write_before_backward=True)
    outcome = check(program)
    assert outcome.sites and outcome.why is None


def test_a_result_of_which_another_graph_makes_nothing_has_no_gradient() -> None:
    lines = ("r2 = F.gelu(q)", "torch._dynamo.graph_break()", "r3 = F.linear(r2, s.u)")
    program = Program(0, (*lines, "r7 = k + k.relu().argmax(-1, keepdim=True)"), ("r7",), gradients=True, autocast=False)
    outcome = check(program, "aot_eager")
    assert outcome.sites and outcome.why is None


@pytest.mark.parametrize(
    "site", ["(k.relu() + k.sum(-1, keepdim=True)).detach()", "(k.relu() + k.sum(-1, keepdim=True) > 0).float()"]
)
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_a_site_that_no_gradient_goes_through(site: str, fallback: str | None) -> None:
    """Beside one of which a gradient is wanted, from an input that wants one."""
    program = Program(0, (f"r1 = {site}", "r2 = F.layer_norm(k, (8,))"), ("r1", "r2"), gradients=True, autocast=False)
    outcome = check(program, fallback)
    assert outcome.sites > 1 and outcome.why is None


@pytest.mark.slow
def test_what_a_compiler_alone_keeps_is_not_the_kernels() -> None:
    """AOTAutograd keeps v, where it would keep the places of the largest elements without a kernel behind them."""
    lines = ("r1 = v.max(1, keepdim=True).values", "r2 = F.avg_pool1d(r1.flatten(0, -3) * 2, 2)")
    program = Program(0, lines, ("r2",), gradients=True, autocast=False, write_before_backward=True)
    outcome = check(program, "aot_eager")
    assert outcome.sites and (outcome.why is None or outcome.torchs)


TIES = [  # in bfloat16
    Program(
        32406,
        ("r1 = F.scaled_dot_product_attention(v.bfloat16(), v.bfloat16(), v.bfloat16())",)
        + ("r3 = r1 + r1.relu().argmax(-1, keepdim=True)",),
        ("r3", "r1"),
        gradients=False,
        autocast=False,
        changing=True,
    ),
    Program(
        35516,
        ("r2 = F.linear(F.silu(F.linear(v, s.w)) * F.linear(v, s.u), s.frozen)", "r3 = r2.max(1, keepdim=True).values"),
        ("r3", "r2"),
        gradients=True,
        autocast=True,
    ),
]


@pytest.mark.parametrize("program", TIES)
def test_a_place_that_roundings_decide_is_not_compared(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is: not even one row of a kernel's may be wrong there."""
    outcome = check(program)
    assert outcome.sites and outcome.why is None and outcome.by_rounding
    one_row = ".to(dtype).flatten(0, -2).index_fill(0, torch.tensor([1]), 2.0).view_as(results)"
    monkeypatch.setattr(random_programs, "KERNEL", random_programs.KERNEL.replace(".to(dtype)", one_row))
    monkeypatch.setattr(random_programs, "finder", lambda: SiteFinder(min_elements=0))
    assert check(program).why


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


def test_some_programs_leave_the_record_of_all_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, some = tmp_path / "all.json", tmp_path / "some.json"
    monkeypatch.setattr(random_programs, "RECORD", whole)
    for words in ((), ("--record", str(some))):
        monkeypatch.setattr(sys, "argv", ["random_programs.py", "-n", "1", *words])
        with pytest.raises(SystemExit, match="0|False"):
            random_programs.main()
    assert not whole.exists() and json.loads(some.read_text())["programs"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_other_roundings_leave_counts_and_the_largest_numbers(seed: int) -> None:
    """Models with experts route by both: an off count, or an infinity for a mask, is no rounding."""
    x = torch.arange(64.0) % 4
    largest = torch.finfo(torch.float16).max
    with random_programs._Rounded(seed):
        counts = torch.histc(x, bins=4, min=0, max=3)
        masked = torch.zeros(64, dtype=torch.float16).masked_fill(x > 1, -largest)
        moved = x.sin()
    assert counts.tolist() == [16] * 4 and masked.isfinite().all() and not torch.equal(moved, x.sin())
