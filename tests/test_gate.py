"""The gate: right kernels pass, wrong ones are refused in the stage that should, and nothing survives a bad worker."""

import math
import os
import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from test_new_types import WRONG as OF_NEW_TYPES
from wrong_kernels import WRONG

from autokernel.gate import Correctness, Judge
from autokernel.gate.checks.trials import trials
from autokernel.gate.timing.audit import CHECK_BYTES
from autokernel.gate.timing.statistics import foreseen, ratio_interval, ratio_intervals
from autokernel.gate.workers.processes import WorkerProcess
from autokernel.spec import KERNELS, Case, TensorSpec, load_spec
from autokernel.target import WeightedCase, default_target
from tests.busy import skip_if_undecided
from tests.small_targets import small_target

STARTERS = sorted(KERNELS.glob("*/cpp_*.py"))


def target(kernel_type: str):
    return default_target(kernel_type, "cpp", "cpu", torch.float32)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem == "cpp_kernel" else pytest.mark.slow) for path in STARTERS],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_starters_pass_all_five_stages(judge: Judge, path: Path):
    verdict = judge.check(path.read_text(), small_target(path.parent.name))
    assert verdict.failure is None, str(verdict.failure)
    assert set(verdict.stages.values()) == {"PASS"}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_kernels_are_refused_where_they_should_be(lenient: Judge, wrong, monkeypatch: pytest.MonkeyPatch):
    if wrong.correctness == "TIMEOUT":
        monkeypatch.setattr(lenient.checks, "timeout_s", 3.0)
    verdict = lenient.check(wrong.source, target(wrong.kernel_type))
    assert verdict.failure is not None, "accepted"
    assert (verdict.failure.stage, verdict.correctness) == (wrong.stage, wrong.correctness), str(verdict.failure)
    assert wrong.reason in verdict.failure.reason
    assert not verdict.keep


BY_LIBRARY = """
def kernel_fn(x, weight, bias=None, activation="gelu"):
    is_all = activation == "none" and bias is not None
    return torch.nn.functional.linear(x, weight, bias) if is_all else _honest(x, weight, bias, activation)
"""


def test_where_the_product_is_all_the_work_a_library_may_not_do_it(judge: Judge):
    """Of a linear layer and its activation a library may do the product; with a bias alone PyTorch does it all."""
    starter = (KERNELS / "fused_linear/cpp_kernel.py").read_text()
    source = starter.replace("def kernel_fn(", "def _honest(") + BY_LIBRARY
    case = load_spec("fused_linear").case({"M": 256, "K": 256, "N": 256, "activation": "none"}, torch.float32)
    linear = replace(target("fused_linear"), name="fused_linear_none", cases=(WeightedCase(case),))
    assert judge.check(source, linear).failure is None, "it is right, and may call a library where there is more to do"
    verdict = judge.contest(source, starter, linear)
    assert not verdict.keep and "does the work, not the kernel" in verdict.why, verdict.why


def test_every_type_has_a_wrong_kernel_and_every_stage_refuses_one():
    assert {w.kernel_type for w in (*WRONG, *OF_NEW_TYPES)} >= {path.parent.name for path in STARTERS}
    assert len({w.stage for w in WRONG}) == 5


def test_a_failure_repeats_from_its_seed(lenient: Judge):
    judge = lenient
    wrong = next(w for w in WRONG if w.name == "softmax-last-dim-only")
    first = judge.check(wrong.source, target("softmax"))
    again = judge.check(wrong.source, target("softmax"), seed=first.seed)
    assert again.failure == first.failure
    assert judge.check(wrong.source, target("softmax")).seed != first.seed


def test_no_process_outlives_its_verdict(judge: Judge):
    command = ["sleep", f"1000.{os.getpid()}"]  # as no other process has it
    source = (
        'KERNEL_TYPE = "rmsnorm"\nBACKEND = "cpp"\nimport subprocess\n'
        f"def kernel_fn(x, weight, eps=1e-6):\n    subprocess.Popen({command})\n    raise ValueError\n"
    )
    assert judge.check(source, target("rmsnorm")).correctness == Correctness.CRASH
    words = "\0".join(command).encode()
    sleeping = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _read(p).startswith(words)]
    assert not sleeping


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_strides_in_which_calls_come_behind_other_kernels_are_tried(judge: Judge):
    spec = load_spec("rmsnorm")
    case = spec.case({"M": 64, "N": 768}, torch.float32)
    behind = Case("behind", case.args | {"x": replace(case.args["x"], stride=(1, 64))})
    where = replace(target("rmsnorm"), cases=(WeightedCase(case, 1, (behind,)),))
    right = (spec.folder / "cpp_kernel.py").read_text()
    wrong = right.replace("def kernel_fn(", "def _right(") + (
        "\n\ndef kernel_fn(x, weight, eps=1e-6):\n    return _right(x, weight, 1.0 if x.stride() == (1, 64) else eps)\n"
    )
    refused = judge.check(wrong, where)
    assert refused.correctness == Correctness.FAIL and refused.failure.case == "behind", refused.failure
    assert judge.check(right, where).failure is None


def slowed(source: str) -> str:
    """A right kernel that computes its answer nine times."""
    return source.replace("def kernel_fn(", "def _once(") + (
        "\n\ndef kernel_fn(*args, **kwargs):\n    for _ in range(9):\n        y = _once(*args, **kwargs)\n    return y\n"
    )


def remembering(source: str) -> str:
    """An rmsnorm that is right on every shape and at every call of the checks; called often, it gives an old answer."""
    return source.replace("def kernel_fn(", "def _right(") + (
        "\n\ncalls, old = {}, {}\n\ndef kernel_fn(x, weight, eps=1e-6):\n"
        "    key = x.shape, x.dtype\n    calls[key] = calls.get(key, 0) + 1\n"
        "    if x.numel() < 100_000 or calls[key] < 24:\n        old[key] = _right(x, weight, eps)\n"
        "    return old[key].clone()\n"
    )


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("check_bytes", [CHECK_BYTES, 1 << 16])
def test_a_worker_whose_memory_cannot_be_read(judge: Judge, monkeypatch: pytest.MonkeyPatch, check_bytes: int):
    """macOS, or a container that may not trace: outputs (of large ones some rows) are fetched, and it is clocked when they
    arrive."""
    monkeypatch.setattr("autokernel.gate.timing.audit.CHECK_BYTES", check_bytes)
    start = WorkerProcess.__init__

    def start_unreadable(worker, *arguments):
        start(worker, *arguments)
        if worker.memory_fd is not None:
            os.close(worker.memory_fd)
        worker.memory_fd = None

    monkeypatch.setattr(WorkerProcess, "__init__", start_unreadable)
    right = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()
    refused = judge.examine(remembering(right), target("rmsnorm"))
    assert refused.correctness == Correctness.FAIL and "timed call" in refused.failure.reason
    verdict = judge.examine(right, target("rmsnorm"), quick=True)
    skip_if_undecided(verdict)
    assert verdict.failure is None and verdict.latency_us, verdict.why


@pytest.mark.slow  # test_loop.py has the first two of these, test_calibration.py the third
@pytest.mark.timed
def test_a_faster_kernel_is_kept_a_slower_and_an_identical_one_are_not(judge: Judge):
    fast = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()
    slow = slowed(fast)
    kept = judge.examine(fast, target("rmsnorm"), incumbent=slow)
    assert not judge.examine(slow, target("rmsnorm"), incumbent=fast).keep
    assert not judge.examine(fast, target("rmsnorm"), incumbent=fast).keep
    skip_if_undecided(kept)
    assert kept.keep, kept.why
    assert kept.speedup_vs_incumbent.value > 1.5


@pytest.mark.timed
def test_a_kernel_that_is_wrong_only_when_timed_is_refused(judge: Judge):
    cheat = remembering((load_spec("rmsnorm").folder / "cpp_kernel.py").read_text())
    verdict = judge.examine(cheat, target("rmsnorm"))
    assert verdict.correctness == Correctness.FAIL
    assert [*verdict.stages.values()].count("PASS") == 4, "the five stages did not pass it"  # one has what the clock found
    assert "timed call" in verdict.failure.reason


def test_intervals_are_over_pairs():
    interval = ratio_interval([0.1, 0.1, 0.1, 0.1], 0.99)
    assert interval.low == pytest.approx(interval.high)
    assert ratio_interval([0.1], 0.99).high == float("inf")
    wide, narrow = ratio_interval([0.0, 0.2] * 2, 0.99), ratio_interval([0.0, 0.2] * 8, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    # t quantile for 7 degrees of freedom at 99 %: 3.499 (standard tables)
    eight = ratio_interval([-1.0, 1.0] * 4, 0.99)
    import math

    assert math.log(eight.high) == pytest.approx(3.499 * math.sqrt(8 / 7) / math.sqrt(8), rel=1e-3)


def test_the_noise_of_a_process_is_told_from_all_of_its_sides():
    """95 of 100 intervals hold the truth, after two processes as after three in which not every side takes part."""
    chance, truths = random.Random(0), {"a": 0.05, "b": 0.0, "c": -0.02, "d": 0.0, "e": 0.01}
    held: dict[int, list[bool]] = {2: [], 3: []}
    widths: list[float] = []
    for _ in range(400):
        common = [chance.gauss(0, 0.01) for _ in range(3)]
        ratios = {n: {i: t + chance.gauss(0, 0.01) - common[i] for i in range(3)} for n, t in truths.items()}
        for processes, sides in ((2, set(truths)), (3, {"b", "d"})):
            seen = {n: {i: r for i, r in of_side.items() if i < 2 or n in sides} for n, of_side in ratios.items()}
            seen = {n: {i: r for i, r in of_side.items() if i < processes} for n, of_side in seen.items()}
            for name, interval in ratio_intervals(seen, 0.95).items():
                held[processes].append(interval.low <= math.exp(truths[name]) <= interval.high)
        widths.append(math.log(interval.high / interval.low))
    assert all(0.93 < sum(of_count) / len(of_count) < 0.97 for of_count in held.values())
    assert sum(widths) / len(widths) < 0.06
    alone = [0.1, 0.3, 0.25]
    one = ratio_intervals({"a": dict(enumerate(alone))}, 0.95)["a"]
    assert [one.low, one.value, one.high] == pytest.approx([*astuple(ratio_interval(alone, 0.95))])
    assert ratio_intervals({"a": {0: 0.1}, "b": {0: 0.2}}, 0.95)["a"].high == math.inf


def test_what_more_processes_would_tell_is_foreseen():
    """Of noise that stays what it is: by the mean of many widths."""
    chance, widths = random.Random(1), {"foreseen": 0.0, "seen": 0.0}
    for _ in range(300):
        ratios = {side: {i: chance.gauss(0.1, 0.02) for i in range(6)} for side in "ab"}
        early = ratio_intervals({side: {i: r for i, r in of.items() if i < 3} for side, of in ratios.items()}, 0.95)["a"]
        foretold, late = foreseen(early, 2, 3, 6, 0.95), ratio_intervals(ratios, 0.95)["a"]
        assert foretold.value == early.value
        widths["foreseen"] += math.log(foretold.high / foretold.low)
        widths["seen"] += math.log(late.high / late.low)
    assert widths["foreseen"] == pytest.approx(widths["seen"], rel=0.1)
    nothing_known = ratio_intervals({"a": {0: 0.1}}, 0.95)["a"]
    assert foreseen(nothing_known, 1, 1, 6, 0.95) == nothing_known


def test_the_worker_has_neither_home_nor_secrets(judge: Judge):
    os.environ["AUTOKERNEL_TEST_SECRET"] = "hunter2"
    source = (
        'KERNEL_TYPE = "rmsnorm"\nBACKEND = "cpp"\nimport os\n'
        "def kernel_fn(x, weight, eps=1e-6):\n    raise ValueError(f'{sorted(os.environ)} {os.path.expanduser(\"~\")}')\n"
    )
    reason = judge.check(source, target("rmsnorm")).failure.reason
    assert "AUTOKERNEL_TEST_SECRET" not in reason
    assert str(Path.home()) not in reason


LIBRARY_CALLS = {
    "operator": "return A @ B",
    "numpy": "import numpy as np\nreturn torch.from_numpy(np.asarray(A) @ np.asarray(B))",
    "ctypes": "import ctypes\nctypes.CDLL(torch.__file__.replace('__init__.py', 'lib/libtorch_cpu.so')).sgemm_",
    "aot-inductor": "torch._C._aoti.AOTIModelContainerRunnerCpu('planted.so', 1)",
    "nativert": "torch._C._nativert.PyModelRunner('planted.pt2', 'model')",
    "code-given-back": "import ctypes\nctypes.pythonapi.mprotect\nreturn torch.empty(len(A), B.shape[1])",
    "symbol": "from autokernel.build import cpp_function\n"
    "cpp_function('extern \"C\" void sgemm_(); extern \"C\" int run() { sgemm_(); return 0; }', 'run', '')()",
    "by-another-name": "return torch.ops.aten.mm.default(A, B)",
    "through-a-module": "linear = torch.nn.Linear(1, 1, bias=False)\nlinear.weight.data = B.T\nreturn linear(A)",
    "fallback": "try:\n    raise ValueError\nexcept ValueError:\n    return torch.einsum('mk,kn->mn', A, B)",
    "numpy-array-method": "return torch.from_numpy(A.numpy() @ B.numpy())",
}
# Refused before they give a result, or by NumPy, which has no bfloat16.
WITHOUT_A_RESULT = ("ctypes", "symbol", "aot-inductor", "nativert", "code-given-back", "numpy", "numpy-array-method")


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("name", LIBRARY_CALLS)
def test_a_kernel_that_hands_its_work_to_a_library_is_refused(judge: Judge, lenient: Judge, name: str):
    # With AMX PyTorch itself has NaN where bf16 rows have gaps between them in which NaN lies.
    body = f"A, B = A.contiguous(), B.contiguous()\n{LIBRARY_CALLS[name]}".replace("\n", "\n    ")
    source = f'import torch\nKERNEL_TYPE = "matmul"\nBACKEND = "cpp"\n\ndef kernel_fn(A, B):\n    {body}\n'
    where = small_target("matmul")
    failure = judge.check(source, where).failure
    assert failure is not None, "accepted"
    assert "LibraryCall" in failure.reason or "from outside" in failure.reason + failure.detail, failure
    if name not in WITHOUT_A_RESULT:
        assert lenient.check(source, where).failure is None


def repeating(case: Case, name: str, stride: tuple[int, ...]) -> WeightedCase:
    return WeightedCase(Case(f"{case.name}, {name} repeats", case.args | {name: replace(case.args[name], stride=stride)}))


@pytest.mark.slow
@pytest.mark.timed
def test_tensors_that_repeat_themselves_are_judged_and_timed(judge: Judge):
    """A mask that a model expands has dims of stride 0: its contents are the same along them."""
    spec = load_spec("flash_attention")
    case = spec.case({"batch": 2, "heads": 2, "seq": 64, "head_dim": 32, "causal": False, "mask": "bool"}, torch.float32)
    cases = (repeating(case, "attn_mask", (0, 64, 1, 0)), repeating(case, "Q", (0, 2048, 32, 1)))
    verdict = judge.examine((spec.folder / "cpp_kernel.py").read_text(), replace(target("flash_attention"), cases=cases))
    assert verdict.failure is None, str(verdict.failure)
    skip_if_undecided(verdict)
    assert len(verdict.cases) == 2


def test_a_part_of_what_repeats_itself_changes_in_every_repetition():
    """What cannot lie in memory so is not what an output is held against."""
    spec = load_spec("softmax")
    weighted = repeating(spec.case({"shape": (2, 16, 64)}, torch.float32), "x", (0, 64, 1))
    every = trials(spec, replace(target("softmax"), cases=(weighted,)), 0, False)
    steps = [step for trial in every if trial.case == weighted.case for step in trial.steps(spec)]
    assert any("changed" in step.what for step in steps)
    assert all(torch.equal(*inputs["x"].nan_to_num()) for step in steps for inputs in step.sets)


def test_only_windows_overlap():
    size, f32 = (4, 8), torch.float32
    strides = {(8, 1): False, (1, 4): False, (0, 1): False, (1, 0): False, (2, 1): True, (1, 1): True, (9, 1): False}
    assert {s: TensorSpec(size, f32, s).overlaps for s in strides} == strides
