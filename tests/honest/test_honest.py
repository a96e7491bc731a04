"""The gate passes odd but honest kernels, timed calls included, and keeps one that is faster on a single shape."""

import pytest
import torch
from honest_kernel import SLOWED, Honest, starter
from honest_kernels import HONEST

from autokernel.gate import Correctness, Judge
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase
from tests.busy import skip_if_undecided, skip_if_wide
from tests.small_targets import small_target


def repeated(source: str, times: int | str) -> str:
    """The same kernel, slower: it computes its answer `times` times."""
    return source.replace("def kernel_fn(", "def _once(") + (
        f"\ndef kernel_fn(**args):\n    for _ in range({times}):\n        y = _once(**args)\n    return y\n"
    )


# Those whose calls differ most from one to the next, and so what the timed part could take for a cheat.
TIMED_FIRST = {"autotuned", "workspace-kept", "prepared-weights"}


def parameters(timed: bool):
    """Each kernel is asked once in the first tier: whole verdicts have the five stages in them. Those of several threads
    run alone: beside another test each of their calls waits for what that one leaves of a core, four times as long."""
    for honest in HONEST:
        marks = [pytest.mark.xfail(strict=True, reason=honest.refused)] if honest.refused else []
        if timed != (honest.name in TIMED_FIRST):
            marks.append(pytest.mark.slow)
        if honest.threads:
            marks.append(pytest.mark.timed)
        yield pytest.param(honest, id=honest.name, marks=marks)


@pytest.mark.parametrize("honest", list(parameters(timed=False)))
def test_honest_kernels_are_right(request: pytest.FixtureRequest, honest: Honest):
    judge = request.getfixturevalue("judge_of_all_threads" if honest.threads else "judge_of_one_thread")
    verdict = judge.check(honest.source, small_target(honest.kernel_type))
    assert verdict.failure is None, f"{verdict.failure}\n{verdict.failure.detail}"
    assert verdict.correctness == Correctness.PASS
    assert set(verdict.stages.values()) == {"PASS"}


@pytest.mark.timed
@pytest.mark.parametrize("honest", list(parameters(timed=True)))
def test_honest_kernels_pass_and_are_timed(judge: Judge, honest: Honest):
    target = small_target(honest.kernel_type)
    verdict = judge.examine(honest.source, target, incumbent=repeated(starter(honest.kernel_type), SLOWED))
    assert verdict.failure is None, f"{verdict.failure}\n{verdict.failure.detail}"
    assert verdict.correctness == Correctness.PASS
    assert set(verdict.stages.values()) == {"PASS"}
    if honest.kept:
        skip_if_undecided(verdict)
        assert verdict.keep, verdict.why


@pytest.mark.slow
@pytest.mark.timed
def test_much_faster_on_one_shape_and_equal_on_the_others_is_kept(judge: Judge):
    spec = load_spec("rmsnorm")
    cases = tuple(WeightedCase(spec.case({"M": M, "N": 768}, torch.float32)) for M in (128, 256, 512))
    target = Target("rmsnorm_three_shapes", "rmsnorm", "cpp", "cpu", cases)
    fast = starter("rmsnorm")
    verdict = judge.examine(fast, target, incumbent=repeated(fast, f"{SLOWED} if args['x'].shape[0] == 256 else 1"))
    assert verdict.failure is None, str(verdict.failure)
    skip_if_undecided(verdict)
    assert verdict.keep, verdict.why
    equal, faster, also_equal = (c.speedup_vs_incumbent for c in verdict.cases)
    skip_if_wide(equal, faster, also_equal)
    assert faster.value > 1.5 > max(equal.value, also_equal.value), verdict.cases
