"""The model with kernels in it: right ones pass and pay, wrong and slow ones are left out, a crash is contained."""

import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autokernel.common.records import write_json
from autokernel.gate import Interval
from autokernel.integration.verification import parity, selection, trial
from autokernel.integration.verification.forms import AUTOTUNED
from autokernel.integration.verification.notes import Notes
from autokernel.integration.verification.parity import compare, compare_built, compare_outputs, exact_model, outputs
from autokernel.integration.verification.processes import CLEANING, ChildDied, FreshProcess, in_fresh_process, rooms_for
from autokernel.integration.verification.record import (
    BUSY,
    COLUMNS,
    EAGER,
    INDUCTOR,
    Figures,
    KernelInModel,
    Verification,
    amdahl,
    baseline,
    ours,
)
from autokernel.integration.verification.sides import (
    TIMED_S,
    TRITON,
    Sample,
    Sides,
    TimedPass,
    Variant,
    build_sides,
    cache_of,
    compile_side,
    enough,
    sample_sides,
    tune_side,
)
from autokernel.integration.verification.traces import keep_traces, trace_built
from autokernel.integration.verification.trial import Process, Settings, verify
from autokernel.integration.winner import Winner
from autokernel.model import pieces
from autokernel.model.extraction import make_plan
from autokernel.model.profiler import profile_workload
from autokernel.model.workload import Workload, in_dtype
from autokernel.spec import ROOT, load_spec
from autokernel.target import Target, WeightedCase, encode
from tests.busy import skip_if_wide

MODEL = '''
import torch
import torch.nn.functional as F
from torch import nn
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1024) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Norms(nn.Sequential):
    """Nothing but RMSNorms over 8 MB, in the form that PyTorch computes slowest."""

    def __init__(self):
        super().__init__(*(Norm() for _ in range(4)))
'''
WRONG = "    y.mul_(1.01)\n    return y"
LATE = "    kernel_fn.calls = getattr(kernel_fn, 'calls', 0) + 1\n    return y.mul_(1.01) if kernel_fn.calls > 60 else y"
SLOW = "    import time\n    time.sleep(0.05)\n    return y"
SETTINGS = Settings(warmup=1, timed=10)


@pytest.fixture(autouse=True)
def quick_and_robust(monkeypatch):
    """Fewer processes, and one thread in each: threads that wait for each other on a busy machine measure the machine."""
    monkeypatch.setattr(trial, "SCREENING", (2, 3, 5))
    monkeypatch.setattr(trial, "PROCESSES", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "norms.py"
    path.write_text(MODEL)
    return make_plan(profile_workload(Workload(str(path), "Norms", input_shape=(2048, 1024)), 1, 2), kernel_type="rmsnorm")


def winner(plan, ending="    return y"):
    """The starter, with other last lines."""
    (target,) = plan.targets
    source = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()
    assert source.endswith("    return y\n")
    return Winner(target, source.removesuffix("    return y\n") + ending + "\n")


def test_a_right_kernel_is_itself_and_a_wrong_one_is_not(plan):
    workload = Workload.from_json(plan.workload)
    name = plan.targets[0].name
    [(right, sites)] = compare_outputs(workload, [Variant((winner(plan),))], None, None, seed=1)
    assert sites == {name: 4} and all(parity.passed for parity in right)
    assert len({parity.seed for parity in right}) == 3
    [(wrong, sites)] = compare_outputs(workload, [Variant((winner(plan, WRONG),))], None, None, seed=1)
    assert sites == {name: 4} and not any(parity.passed for parity in wrong)


def test_outputs_are_compared_where_forms_were_built(plan):
    workload, forms = (
        Workload.from_json(plan.workload),
        {"right": Variant((winner(plan),)), "wrong": Variant((winner(plan, WRONG),))},
    )
    build_sides(workload, {EAGER: Variant()} | forms, seed=3)
    by_form = compare_built(3, forms, None, None)
    assert [[p.passed for p in parity] for parity, _ in by_form] == [[True] * 3, [False] * 3]
    assert [sites for _, sites in by_form] == [{plan.targets[0].name: 4}] * 2


def test_a_pass_is_traced_without_kernels_and_with_those_that_pay(plan, tmp_path):
    """The kernels have the names of their targets; what an earlier verification left does not stay."""
    right, gain = winner(plan), Interval(1.1, 1.2, 1.3)
    target = right.target.name
    kernel = KernelInModel(target, "rmsnorm", right.name, 0.9, 2.0, 4, used=(EAGER,))
    pays = Verification("test", "cpu", True, (kernel,), speedups={EAGER: {EAGER: gain}})
    calls, traces = {}, tmp_path / "traces"
    workload, names = Workload.from_json(plan.workload), (EAGER, ours(EAGER))
    build_sides(workload, {EAGER: Variant(), ours(EAGER): Variant((right,))}, seed=1)
    assert trace_built(1, names, str(traces)) == ""
    (traces / "earlier.json.gz").touch()
    for path in keep_traces(pays, [workload.name], traces):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event.get("name") for event in events]
        calls[path.name] = [names.count(f"autokernel::{target}"), names.count("aten::rsqrt")]
    assert calls == {"before.json.gz": [0, 4], "after.json.gz": [4, 0]}
    assert keep_traces(Verification("test", "cpu", True), [workload.name], traces) == [] == list(traces.iterdir())

    (tmp_path / "file").touch()
    assert "exists" in trace_built(1, names, str(tmp_path / "file")), "the verification stands without them"
    assert keep_traces(pays, [workload.name], tmp_path / "none") == []


def test_an_error_within_tolerance_is_refused_if_the_original_is_much_more_exact(plan):
    """A relative error of 1e-4 passes atol = rtol = 1e-3, but PyTorch's own is 1e-7."""
    sloppy = winner(plan, "    y.mul_(1.0001)\n    return y")
    [(parities, _)] = compare_outputs(Workload.from_json(plan.workload), [Variant((sloppy,))], None, None, seed=2)
    assert all(parity.within_tolerance and not parity.passed for parity in parities)


class Cancelling(torch.nn.Module):
    """In bfloat16 its results are off by up to 0.25, whatever their size."""

    def __init__(self):
        super().__init__()
        self.far = torch.nn.Parameter(torch.tensor(64.0))

    def forward(self, x):
        return (x + self.far) - self.far


def test_more_exact_outputs_than_the_originals_are_right_and_one_wrong_number_is_not():
    workload = SimpleNamespace(dtype="bfloat16", inputs=lambda model, seed: ((torch.randn(64, 64).bfloat16(),), {}))
    model = in_dtype(Cancelling(), torch.bfloat16)

    def one_wrong(x):
        y = x.clone()
        y[5, 7] += 3
        return y

    forms = [lambda x: x, one_wrong, lambda x: x + 1]
    passed = [p.passed for p in compare(model, forms, exact_model(model), workload, (None, None), seed=1)]
    assert passed == [True, False, False]
    (strict,) = compare(model, forms[:1], exact_model(model), workload, (0.1, None), seed=1)
    assert not strict.passed, "what the user allows"


@pytest.mark.timed
@pytest.mark.slow
def test_a_fast_kernel_stays_and_the_record_survives(plan, tmp_path):
    (target,), lines = plan.targets, []
    result = verify(plan, [winner(plan)], {target.name: 2.0}, SETTINGS, lines.append)
    if (result.spread or 0) > BUSY:
        pytest.skip(f"passes take {result.spread:.0%} longer than the fastest: too much else goes on here")
    assert result.passed
    skip_if_wide(*result.kernels[0].gains.values())
    assert target.name in result.used_over(None)
    skip_if_wide(result.speedups[EAGER][EAGER])
    assert result.speedups[EAGER][EAGER].low > 1
    assert result.predicted == pytest.approx(1 / (1 - target.share / 2))
    (figures,) = result.figures.values()
    assert set(figures) >= {EAGER, "torch.compile", "torch.compile max-autotune", "kernels over eager"}
    assert figures[ours(EAGER)].milliseconds < figures[EAGER].milliseconds
    assert 8 < figures[EAGER].peak_mb < 200, "four norms over 8 MB, some intermediates each"
    assert figures[baseline(INDUCTOR)].first_call_s > 10 * figures[EAGER].first_call_s, "with compilation"
    assert result.allocator and all(f.page_faults >= 0 for f in figures.values())
    gain = result.kernels[0].gains[INDUCTOR]
    assert bool(result.kernels[0].used) and (INDUCTOR in result.kernels[0].used) == (gain.low >= 1)
    write_json(tmp_path / "verify.json", encode(result))
    assert Verification.read(tmp_path / "verify.json") == result
    assert any("Amdahl" in line for line in result.lines)
    assert len(result.rows) == len(figures) and all(len(row) == len(COLUMNS) for row in result.rows)


@pytest.mark.slow
def test_a_kernel_that_is_wrong_later_on_is_found_after_timing(plan):
    """Outputs are compared once more by a process in which the model ran many times."""
    (target,) = plan.targets
    result = verify(plan, [winner(plan, LATE)], {target.name: 2.0}, SETTINGS)
    if not result.passed:
        assert not result.used_over(None) and not result.speedups and set(result.parity)
        assert "not the original's" in result.advice("tag")[0]
    else:
        skip_if_wide(*result.kernels[0].gains.values())
        pytest.fail("it stayed nowhere, or is taken for right")


@pytest.mark.slow
def test_what_was_found_before_an_interruption_is_not_found_again(plan, tmp_path, monkeypatch):
    calls, notes = [], tmp_path / "verify.notes"

    class Told(FreshProcess):
        def start(self, function, *arguments):
            calls.append(getattr(function, "func", function))
            if calls.count(sample_sides) == 2 and calls[-1] is sample_sides:
                raise KeyboardInterrupt
            super().start(function, *arguments)

    monkeypatch.setattr(trial, "FreshProcess", Told)
    with pytest.raises(KeyboardInterrupt):
        verify(plan, [winner(plan)], settings=SETTINGS, notes=notes)
    assert calls[0] is compare_outputs and len(Notes(notes).known) == 2
    before = len(calls)
    with open(notes, "a") as file:
        file.write('\n{"cut off": [1.0, ')
    Notes(notes).write("another key", 1)
    assert len(Notes(notes).known) == 3, "what follows a line that was cut off is read"
    resumed = verify(plan, [winner(plan)], settings=SETTINGS, notes=notes)
    assert calls[before] is build_sides, "outputs were compared before the interruption"
    assert resumed.passed and resumed.kernels[0].sites == 4 and resumed.kernels[0].gains
    assert not notes.exists()


def halves(*seconds):
    return [{name: TimedPass(s, 0.0) for name, s in zip("ab", half)} for half in seconds]


def test_rounds_end_when_the_sides_have_settled():
    """A drift of the whole machine is no noise of the sides."""
    steady = halves((1.0, 2.0), (1.1, 2.2)) * 4
    assert enough(steady, None, 0.1) and not enough(steady[:4], None, 0.1), "so few may agree by chance"
    assert enough(steady[:2], None, TIMED_S), "another pass takes long and would tell little"
    noisy = halves((1.0, 2.0), (1.1, 2.0)) * 4
    assert (
        not enough(noisy, None, 0.1) and not enough(noisy[:2], None, 2 * TIMED_S) and enough(noisy[:4], None, 2 * TIMED_S)
    )
    assert not enough(steady, 5, 0.1) and enough(steady, 4, 0.1), "the user's own count"
    assert not enough([], None, 0.0)


def test_a_sample_survives_as_text():
    sample = Sample(({"eager": TimedPass(0.5, 3.0)},), {"eager": 1.5}, {"eager": None}, {"torch.compile": "no compiler"})
    assert Sample.decode(json.loads(json.dumps(encode(sample)))) == sample


@pytest.mark.timed
@pytest.mark.slow
def test_a_slow_kernel_is_left_out_and_nothing_is_gained(plan):
    result = verify(plan, [winner(plan, SLOW)], settings=SETTINGS)
    assert result.passed and result.used_over(None) == result.used_over("inductor") == () and not result.speedups
    skip_if_wide(*result.kernels[0].gains.values())
    assert all(gain.high < 1 for gain in result.kernels[0].gains.values())
    assert not result.best.kernels and result.without
    assert result.verdict.startswith(("leave it as it is", "use torch.compile("))


@pytest.mark.slow
def test_a_wrong_kernel_is_left_out_for_that_reason(plan):
    result = verify(plan, [winner(plan, WRONG)], settings=SETTINGS)
    assert result.used_over(None) == () and "wrong" in result.kernels[0].why_not
    assert not any(parity.passed for parity in result.diagnosis[plan.targets[0].name])


@pytest.mark.slow
def test_a_kernel_known_to_be_slower_than_pytorch_is_not_tried(plan):
    """What is measured nevertheless is the model without it: which form of it is to be deployed."""
    said = []
    result = verify(plan, [winner(plan)], {plan.targets[0].name: 0.9}, SETTINGS, said.append)
    assert result.used_over(None) == () and "slower than PyTorch" in result.kernels[0].why_not
    assert not any(line.startswith(("outputs", "with and without")) for line in said), "nothing was run with it"
    (figures,) = result.figures.values()
    assert set(figures) == {EAGER, "torch.compile", "torch.compile max-autotune"} and not result.best.kernels
    assert json.loads(json.dumps(encode(result)))["kernels"][0]["used"] == []


@pytest.mark.slow
def test_a_kernel_over_inductor_is_itself_too_beside_one_over_eager(plan):
    workload, name = Workload.from_json(plan.workload), plan.targets[0].name
    wrong = Variant((winner(plan, WRONG),))
    (right, sites), (other, other_sites) = compare_outputs(
        workload, [Variant((winner(plan),), INDUCTOR), wrong], None, None, seed=3
    )
    assert sites == other_sites == {name: 4}
    assert all(parity.passed for parity in right) and not any(parity.passed for parity in other)
    [(wrong_too, _)] = compare_outputs(workload, [replace(wrong, fallback=INDUCTOR)], None, None, seed=3)
    assert not any(parity.passed for parity in wrong_too)


def test_amdahl():
    assert amdahl([(0.5, 2.0)]) == pytest.approx(4 / 3)
    assert amdahl([(0.25, 2.0), (0.5, 4.0)]) == pytest.approx(1 / 0.5)
    assert amdahl([(0.5, None)]) is None


def kernel(name, share, speedup, gain):
    gains = {EAGER: Interval(gain, gain, gain)}
    return KernelInModel(name, "rmsnorm", name, share, speedup, 1, gains, (EAGER,))


@pytest.mark.parametrize(
    "measured, blamed",
    [(1.9, None), (2.1, None), (1.3, "slow"), (2.9, None)],  # 1 / (1 - 0.25 / 2 - 0.5 * 3 / 4) = 2 is predicted
)
def test_a_kernel_is_to_blame_where_amdahl_is_wrong(measured, blamed):
    """`slow` promised 2 / 1.143 = 1.75x and gives 1.05x; `good` keeps its promise, so none is to blame for more."""
    kernels = (kernel("good", 0.25, 2.0, 1.23), kernel("slow", 0.5, 4.0, 1.05))
    speedups = {EAGER: {EAGER: Interval(measured, measured, measured)}}
    found = Verification("m", "cpu", True, kernels, speedups=speedups)
    assert found.predicted == pytest.approx(2.0)
    assert (found.unexpected and found.unexpected[0].target) == blamed
    assert any("promised the model 1.75" in line for line in found.lines) == bool(blamed)


def test_without_kernels_nothing_is_predicted():
    unused = replace(kernel("slow", 0.5, 4.0, 0.9), used=())
    found = Verification("m", "cpu", True, (unused,), speedups={EAGER: {EAGER: Interval(0.9, 1.0, 1.1)}})
    assert found.predicted is None and not any("Amdahl" in line for line in found.lines)


def test_a_form_that_shares_its_memory_says_so():
    sides = {EAGER: Figures(1.0, 0.1, 20.0, 0.0), "graphs": Figures(1.0, 0.1, None, 0.0)}
    found = Verification("m", "cuda", True, figures={"": sides})
    assert [row[3] for row in found.rows] == ["20", "shared"]
    unknown = Verification("m", "cuda", True, figures={"": {EAGER: replace(sides[EAGER], peak_mb=None)}})
    assert [row[3] for row in unknown.rows] == [""]


def test_a_mix_of_workloads_is_compared_by_its_time():
    """A workload that is twice as fast and one that is as it was, three passes of it: 2·1 + 3·4 over 1 + 3·4."""

    def sample(slow, fast):
        passes = {"slow": TimedPass(slow, 0), "fast": TimedPass(fast, 0)}
        return Sample((passes, passes), {}, {})

    process = Process((sample(2.0, 1.0), sample(4.0, 4.0)), (1.0, 3.0))
    assert math.exp(process.log_ratio("slow", "fast")) == pytest.approx(14 / 13)


def test_what_is_settled_is_not_measured_again(plan, monkeypatch):
    """What the model gains with each kernel, process by process, decides which models the next one builds; so does what the
    kernel's own timing promises, where the first two tell too little."""
    gains = {"clear": [1.5, 1.51], "unclear": [1.06, 0.98, 1.06, 0.98, 1.06], "small": [1.02, 0.99]}
    gains |= {"hopeless": [1.1, 0.95, 0.99]}  # 1.01 on the whole: two processes more would not tell it from none
    winners = tuple(replace(winner(plan), target=replace(plan.targets[0], name=name, share=0.1)) for name in gains)
    asked, speedups = [], {"clear": 2.0, "unclear": 1.5, "small": 1.05, "hopeless": 2.0}

    def recorded(self, tasks, told, compile_first):
        taken = []
        for sides in tasks:
            seconds = {name: gains[name][len(asked)] if name in gains else 1.0 for name in sides}
            taken.append(Process((Sample(({name: TimedPass(s, 0) for name, s in seconds.items()},), {}, {}),), (1.0,)))
            asked.append(set(sides))
        return taken

    monkeypatch.setattr(trial.Verifier, "measure", recorded)
    monkeypatch.setattr(trial.Verifier, "fallbacks", (INDUCTOR,))
    verifier = trial.Verifier(((None, 1.0),), winners, SETTINGS, print, Notes(None), None, speedups)
    found = verifier.leave_one_out()[INDUCTOR]
    every, unclear = {*gains, ours(INDUCTOR)}, {"unclear", ours(INDUCTOR)}
    assert asked == [every | {baseline(INDUCTOR)}, every, unclear | {"hopeless"}, *[unclear] * 2]
    assert [w.target.name for w in found.selected] == ["clear"]
    clear, unclear = found.gains["clear"], found.gains["unclear"]
    assert clear.value == pytest.approx(1.505, abs=1e-3) and unclear.low < 1 < unclear.value


def gain(value, width=0.01):
    return Interval(value - width, value, value + width)


def test_sets_of_kernels_are_told_from_what_each_gains_beside_the_others():
    gains = {"pays": gain(1.05), "seems": gain(1.005), "unclear": gain(0.995), "harms": gain(0.8)}
    assert selection.paying(gains) == ("pays",)
    assert selection.rivals(gains) == [("pays", "seems"), ("pays", "seems", "unclear"), tuple(gains)]
    assert selection.rivals({}) == selection.rivals({"pays": gain(1.05)}) == []
    assert selection.hope({}) == selection.hope({"pays": gain(1.05)}) == 1.0
    assert selection.hope({"harms": gain(0.9)}) == pytest.approx(0.9)
    assert selection.hope({"pays": gain(1.05), "seems": gain(1.02, 0.03)}) == pytest.approx(1.02)
    # Qwen3 over CUDA graphs on an H200: no kernel pays beside the others, and with all of them the model is 1.10x as fast
    qwen3 = dict.fromkeys("abc", gain(0.99, 0.02)) | {"rmsnorm": gain(1.016, 0.018)}
    assert not selection.paying(qwen3) and selection.hope(qwen3, 1.104) > 1.10


def test_another_set_stays_only_where_it_is_faster_beyond_doubt():
    sets = {("a",): gain(1.02), ("a", "b"): gain(1.05), ("a", "b", "c"): gain(1.08, 0.09)}
    assert selection.chosen(("c",), sets) == ("a", "b")
    assert selection.chosen((), {("a",): gain(1.005)}) == ()
    assert selection.chosen(("c",), {}) == ("c",)


def test_kernels_that_gain_only_together_stay(plan, monkeypatch):
    """A kernel less makes no difference, none at all does, as where any of them has the mask recognised."""
    winners = tuple(
        replace(winner(plan), target=replace(plan.targets[0], name=name, share=0.1)) for name in ("one", "other")
    )
    asked = []

    def recorded(self, tasks, told, compile_first):
        noise, taken = iter([1.0, 1.002, 0.999, 1.001, 1.0]), []
        for sides in tasks:
            seconds = {name: next(noise) * (1.0 if side.winners else 1.2) for name, side in sides.items()}
            taken.append(Process((Sample(({name: TimedPass(s, 0) for name, s in seconds.items()},), {}, {}),), (1.0,)))
            asked.append({name: len(side.winners) for name, side in sides.items()})
            noise = iter([1.0, 0.998, 1.001, 1.0, 0.999])
        return taken

    monkeypatch.setattr(trial.Verifier, "measure", recorded)
    monkeypatch.setattr(trial.Verifier, "fallbacks", (INDUCTOR,))
    verifier = trial.Verifier(((None, 1.0),), winners, SETTINGS, print, Notes(None), None, {"one": 1.05, "other": 1.05})
    screened = verifier.leave_one_out()
    assert not screened[INDUCTOR].selected
    verifier.choose_sets(screened.values())
    assert asked[-1][trial.KNOWN] == 0 and len(screened[INDUCTOR].selected) > 0
    (words,) = KernelInModel("one", "t", "k", 0.1, gains={INDUCTOR: gain(0.99)}, used=(INDUCTOR,)).words.split("; ")
    assert "in a set that is faster" in words


@pytest.mark.parametrize(
    "dtype, room, exact",
    [
        (torch.float32, 10_000, torch.float64),
        (torch.float16, 10_000, torch.float64),
        (torch.float16, 300, torch.float32),
        (torch.float32, 300, None),
        (torch.float16, 100, None),
    ],
)
def test_the_exact_model_is_the_widest_that_fits(dtype, room, exact, monkeypatch):
    monkeypatch.setattr(parity, "EXACT_BYTES", room)
    found = parity.exact_model(torch.nn.Linear(7, 8).to(dtype))  # 64 numbers
    assert (found and found.weight.dtype) == exact


class Experts(nn.Module):
    """By PyTorch's operator, which takes no float64."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x):
        return F.grouped_mm(x, self.weight, offs=torch.tensor([5, 5, 20], dtype=torch.int32))


class InFloat32(nn.Linear):
    def forward(self, x):
        assert x.dtype == torch.float32, "no other dtype is written for"
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "exact"),
    [
        pytest.param(
            Experts, "float64", marks=pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="not in this PyTorch")
        ),
        (lambda: InFloat32(16, 8), None),
    ],
)
def test_a_model_that_does_not_run_in_float64_is_compared_all_the_same(model, exact):
    workload = SimpleNamespace(dtype="float32", inputs=lambda model, seed: ((torch.randn(20, 16),), {}))
    model = model()
    with torch.no_grad():
        right, wrong = compare(model, [model, lambda x: model(x) + 1], exact_model(model), workload, (None, None), seed=1)
    assert right.passed and not wrong.passed and right.exact == exact
    assert not exact or 0 < right.error_original < 1e-6


@pytest.mark.parametrize("shape", [(3, 5, 7), (7,), (), (0, 4), (4, 0)])
def test_outputs_are_compared_piece_by_piece_as_they_are_at_once(shape, monkeypatch):
    y, truth = torch.randn(shape), torch.randn(shape, dtype=torch.float64)
    monkeypatch.setattr(pieces, "PIECE", 10)
    pairs = list(pieces.pieces(y, truth))
    assert sum(a.numel() for a, _ in pairs) == y.numel() and all(a.shape == b.shape for a, b in pairs)
    if not y.numel():
        return
    whole = ((y.double() - truth).pow(2).mean() / truth.pow(2).mean()).sqrt().item()
    assert parity._relative_rms(y, truth) == pytest.approx(whole)
    assert parity._agreement(y, truth) == pytest.approx((y.argmax(-1) == truth.argmax(-1)).double().mean().item())


@dataclass
class OnCpu:
    """All that is asked of a workload by who only starts processes for it."""

    device: str = "cpu"


def begin(workload, seed):
    _times.append(time.monotonic())


def end(seed):
    return [*_times, time.monotonic()]


_times: list[float] = []  # of a child process


def none(device):
    return 0, 0


def five(device):
    return 5, 2


@pytest.mark.slow  # the next test has processes side by side as well
@pytest.mark.parametrize("room, cores, widths", [(five, 2, [1, 3]), (five, 8, [1, 3]), (none, 8, [1, 1, 1, 1])])
def test_processes_begin_side_by_side_where_they_have_room_and_end_one_by_one(room, cores, widths, monkeypatch):
    """On two cores three, rather than two and then one alone."""
    monkeypatch.setattr(trial, "usable_cores", lambda: range(cores))
    monkeypatch.setattr(trial, "rooms_beside", room)
    said = []
    verifier = trial.Verifier(((OnCpu(), 1.0),), (), SETTINGS, said.append, Notes(None))
    answers = verifier.answers(dict, begin, [(OnCpu(),)] * 4, [{"end": end}] * 4, list("abcd"))
    built = [int(line.split("by ")[1].split()[0]) for line in said if line.startswith("models")]
    assert built == widths and [line[0] for line in said if line in list("abcd")] == list("abcd")
    assert verifier.room == dict(zip((begin.__name__, compile_side.__name__), room("cpu")))
    begun, ended = zip(*(answer["end"] for answer in answers))
    assert list(ended) == sorted(ended) and (room is none or max(begun[1:]) < min(ended[1:]))


def tune(seed, first_calls):
    began = time.monotonic()
    time.sleep(0.3)
    _times.append((began, time.monotonic()))


def test_what_times_kernels_as_it_compiles_is_built_alone_once_and_then_by_the_others(monkeypatch):
    """Two workloads, each by two processes that begin at once."""
    monkeypatch.setattr(trial, "usable_cores", lambda: range(8))
    first, second = OnCpu(), OnCpu("cpu:0")
    verifier = trial.Verifier(((first, 1.0), (second, 1.0)), (), SETTINGS, lambda line: None, Notes(None))
    verifier.room = {begin.__name__: 5}
    questions = [(first,), (second,)] * 2
    answers = verifier.answers(dict, begin, questions, [{"end": end}] * 4, list("abcd"), tune=tune)
    spans = [next(t for t in answer["end"] if isinstance(t, list)) for answer in answers]
    (a, b), others = spans[:2], spans[2:]
    assert a[1] <= b[0] and all(b[1] <= began for began, _ in others)
    assert max(began for began, _ in others) < min(ended for _, ended in others)


def rooms_with(count):
    numbers = torch.ones(count, dtype=torch.uint8)
    return rooms_for("cpu", 3) if numbers.all() else None


def test_what_a_form_has_taken_tells_how_many_processes_have_room():
    little, much = (in_fresh_process("cpu", rooms_with, count) for count in (1, 1 << 30))
    assert much < little


def cache_hits(workload, sides):
    torch._dynamo.utils.counters.clear()
    build_sides(workload, sides, seed=3)
    return torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
def test_what_is_compiled_side_by_side_is_found_by_who_measures(plan, tmp_path, monkeypatch):
    """Alone in its process, a form has the same key in AOTAutograd's cache as among others of its trace."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trial, "usable_cores", lambda: range(8))
    workload = Workload.from_json(plan.workload)
    kernels = {"one": winner(plan), "other": winner(plan, "    return y.clone()"), "broken": winner(plan, "    return")}
    sides = {baseline(INDUCTOR): Variant((), INDUCTOR), EAGER: Variant(), baseline(AUTOTUNED): Variant((), AUTOTUNED)}
    sides |= {name: Variant((kernel,), INDUCTOR) for name, kernel in kernels.items()}
    said = []
    verifier = trial.Verifier(((workload, 1.0),), (), SETTINGS, said.append, Notes(None))
    assert verifier.compile(sides) == {}  # as long as nothing is known of the memory that it takes
    verifier.room[compile_side.__name__] = 2
    found = verifier.compile(sides)
    assert found.keys() == {str(workload)} and all(seconds > 0 for seconds in found[str(workload)].values())
    compiled = {baseline(INDUCTOR), "one", "other"}
    assert compiled <= found[str(workload)].keys() <= compiled | {"broken"}
    assert said == [f"torch.compile has its first calls, in {count}" for count in ("3 processes", "1 process")]
    assert in_fresh_process("cpu", cache_hits, workload, {name: sides[name] for name in sorted(compiled)}) == 3


def naps(count, seed):
    for _ in range(count):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("gain", "doubted"),
    [(Interval(0.5, 1.1, 2.0), True), (Interval(0.8, 0.9, 0.95), False), (Interval(1.0, 1.1, 1.2), False)],
)
def test_a_kernel_that_seems_to_pay_is_left_out_with_its_reason(gain, doubted):
    words = KernelInModel("t", "rmsnorm", "k", 0.5, gains={EAGER: gain}).words
    assert words.startswith("left out over eager") and words.endswith("not beyond doubt") == doubted


KILLED = f"""
import os, signal
from multiprocessing import forkserver

forkserver.set_forkserver_preload(["{CLEANING}"])
forkserver.ensure_running()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a fork server is Linux's alone")
def test_a_kill_leaves_no_folder_of_the_fork_server(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=60).returncode == -signal.SIGKILL
    assert (left := list(tmp_path.glob("pymp-*")))
    end = time.monotonic() + 60
    while any(folder.exists() for folder in left) and time.monotonic() < end:
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def test_a_process_stands_still_while_it_is_paused():
    with FreshProcess("cpu", naps.__name__) as process:
        process.start(naps, 20, 0)
        with process.paused():
            time.sleep(1)
            assert not process.asked.done()
        process.answer()


def test_what_goes_on_for_too_long_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "TUNING_S", 0.2)
    with FreshProcess("cpu", naps.__name__) as process:
        process.start(naps, 3000, 0)
        began = time.monotonic()
        assert trial.Tuning(process, str(tmp_path)).ended() == {}
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_what_is_tuned_meanwhile_is_chosen_again(plan, tmp_path):
    workload = Workload.from_json(plan.workload)
    with FreshProcess("cpu", tune_side.__name__) as process:
        tuning = trial.Tuning(process, str(tmp_path))
        tuning.start([workload])
        with tuning.paused():
            time.sleep(0.5)
        found = tuning.ended()
    assert tuning.paused_s >= 0.5 and found[str(workload)].keys() == {baseline(AUTOTUNED)}
    (cache,) = tmp_path.iterdir()
    assert cache == cache_of(str(tmp_path), baseline(AUTOTUNED)) and {entry.name for entry in cache.iterdir()} <= {TRITON}


@pytest.mark.slow
def test_processes_that_find_all_compiled_are_built_at_once(plan, monkeypatch):
    monkeypatch.setattr(trial, "usable_cores", lambda: range(8))
    workload, kernel, said = Workload.from_json(plan.workload), winner(plan), []
    verifier = trial.Verifier(((workload, 1.0),), (kernel,), SETTINGS, said.append, Notes(None))
    verifier.room = {compile_side.__name__: 2, build_sides.__name__: 2}
    found, compared = verifier.final({EAGER: (kernel,), INDUCTOR: (kernel,)})
    assert said[:2] == ["torch.compile has its first calls, in 2 processes", "models are built, by 2 processes"]
    assert sum(line.startswith("models") for line in said) == 1 and verifier.errors == {}
    figures = found["figures"][str(workload)]
    assert figures.keys() >= {baseline(AUTOTUNED), baseline(INDUCTOR), ours(INDUCTOR), EAGER, ours(EAGER)}
    assert all(side.first_call_s > 0 and side.milliseconds > 0 for side in figures.values())
    assert all(parity.passed for of_inputs in compared.values() for parity in of_inputs)


def test_a_crash_is_reported():
    with pytest.raises(ChildDied):
        in_fresh_process("cpu", os.abort)


def chatter() -> None:
    warnings.warn("a warning of a library", stacklevel=1)
    os.write(2, b"a line of C++\n")
    print("a line of the model")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # forked, and spawned
def test_what_a_child_prints_is_in_its_log_and_nowhere_else(device, tmp_path, capfd):
    log = tmp_path / "new" / "stderr.log"
    in_fresh_process(device, chatter, log=log)
    text = log.read_text()
    assert all(line in text for line in ("a warning of a library", "a line of C++", "a line of the model", ": chatter"))
    assert capfd.readouterr() == ("", "")


ORPHAN = """
import os, signal
from autokernel.integration.verification.processes import FreshProcess

process = FreshProcess("cpu", "orphan")
print(process.ask(os.getpid), process.ask(os.getppid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_asked_them(tmp_path):
    said = tmp_path / "pids"
    with said.open("w") as file:
        assert subprocess.run([sys.executable, "-c", ORPHAN], stdout=file).returncode == -signal.SIGKILL
    children = [psutil.Process(pid) for pid in map(int, said.read_text().split()) if psutil.pid_exists(pid)]
    assert said.stat().st_size and not psutil.wait_procs(children, 20)[1]


def test_a_process_for_a_device_that_does_not_work_in_a_fork_is_spawned():
    """Here none does but the CPU; in a process forked from one that has asked CUDA what there is, CUDA does not."""
    assert in_fresh_process("cuda", os.getppid) == os.getpid()
    assert (in_fresh_process("cpu", os.getppid) == os.getpid()) == (sys.platform != "linux")


ELSEWHERE = """
from autokernel.integration.verification.processes import in_fresh_process

if __name__ == "__main__":
    print(in_fresh_process("cpu", eval, "__import__('os').getcwd(), __import__('autokernel.spec').spec.__file__"))
"""


def test_processes_import_us_wherever_a_program_is_started(tmp_path):
    """Python 3.11's server that forks looks for modules in the folder in which it is started, before all others."""
    (tmp_path / "program.py").write_text(ELSEWHERE)
    for name in ("autokernel/__init__.py", "reference.py"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text("raise RuntimeError('not ours')")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command, here = [sys.executable, str(tmp_path / "program.py")], tmp_path / "here"
    ended = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert ended.stdout == f"{(str(here), str(ROOT / 'autokernel/spec.py'))}\n", ended.stderr


def test_without_a_compiler_there_is_no_torch_compile_and_the_reason_is_said(tmp_path):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1))
    sides = Sides(Workload(), model)
    settings = {"cpp.cxx": (str(tmp_path / "missing-compiler"),), "force_disable_caches": True}
    with torch.no_grad(), torch._inductor.config.patch(settings):
        sides.build({baseline(over): Variant((), over) for over in (EAGER, INDUCTOR)}, ((torch.randn(4, 8),), {}))
    assert list(sides.models) == [EAGER] and sides.errors[INDUCTOR]


def test_a_side_without_the_kernels_that_it_was_to_have_says_so():
    """It would be timed as the model is, and no kernel would have gained anything."""
    torch._dynamo.reset()
    norm, x = torch.nn.RMSNorm(64), torch.randn(8, 64)
    spec = load_spec("rmsnorm")
    elsewhere = WeightedCase(spec.case(spec.smoke, torch.float32))
    target = Target("norm", "rmsnorm", "cpp", "cpu", (elsewhere,))
    winner = Winner(target, spec.starters("cpp")["cpp_kernel"].read_text())
    sides = Sides(Workload(), norm)
    with torch.no_grad():
        sides.build({EAGER: Variant((), EAGER), ours(EAGER): Variant((winner,), EAGER)}, ((x,), {}))
    assert sides.idle == {ours(EAGER): "none of its graphs has a place for them"}


@pytest.mark.slow
def test_every_side_is_compiled_from_scratch_in_a_cache_of_its_own(tmp_path):
    """Also what another cache has: the first sides have compiled the same graph for the second ones."""
    for folder in (tmp_path / "before", tmp_path / "after"):
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1))
        sides = Sides(Workload(), model)
        with torch.no_grad():
            sides.build({baseline(INDUCTOR): Variant((), INDUCTOR)}, ((torch.randn(4, 8),), {}), str(folder))
        (cache,) = folder.iterdir()
        assert list(cache.rglob("*.so")), "the graph's kernels were built here"


@dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


def test_what_is_compared_of_a_dataclass():
    x, y = torch.ones(2), torch.zeros(3)
    assert [t.shape for t in outputs(Output(x, {"more": [Output(y), torch.arange(3), Output]}))] == [(2,), (3,)]
