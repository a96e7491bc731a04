"""Regions at the gate: their kernels pass, wrong ones and cheats are refused."""

import math
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_models import CHAINS, SEVERAL, N, Of, found, winners_of
from torch import Tensor

from autokernel import spec as specs
from autokernel.common.verdict import Verdict
from autokernel.gate import Judge
from autokernel.gate.checks.cases import CheckCase
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expectations
from autokernel.integration.winner import Winner
from autokernel.spec import REGIONS, load_spec

pytestmark = pytest.mark.usefixtures("region_folder")


def verdicts(judge: Judge, winner: Winner, *sources: str) -> list[Verdict]:
    """On these sources for a region's target; its folder is removed afterwards."""
    try:
        return [judge.check(source, winner.target) for source in sources]
    finally:
        shutil.rmtree(REGIONS / winner.target.kernel_type)


@pytest.mark.slow
@pytest.mark.parametrize("function", [torch.log, torch.acos])
def test_the_gate_takes_inputs_that_have_bounds(function: Any, lenient: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is below zero, say, or zero, as a whole either: they are of all sizes, and a kernel is off at some."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(lambda m, x: function(x) * 2), torch.rand(64, N))
    (winner,) = winners_of([site])
    assert load_spec(site.kernel_type).fill
    off = "\n\ndef kernel_fn(input_0):\n    y = honest(input_0)\n    return y * 1.02 if input_0.max() < 0.3 else y\n"
    source = winner.source.replace("def kernel_fn(", "def honest(") + off
    right, refused = verdicts(lenient, winner, winner.source, source)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert refused.failure and "outside the tolerance" in refused.failure.reason, refused.why


@pytest.mark.slow
def test_in_regions_whole_rows_and_several_of_a_row_are_nan(lenient: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A region's file says in words what it may have: NaN that is read from it was not found among what it has."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(CHAINS["gelu"]), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    assert math.nan in load_spec(site.kernel_type).nonfinite
    conditions = "x[-1].isnan().all() and not x[0].isnan().any()", "x.isnan().sum() > 1 and not x.isnan().all(-1).any()"
    off = "\n\ndef kernel_fn(input_0, input_1):\n    x, y = input_0, honest(input_0, input_1)\n    return {}\n"
    source = winner.source.replace("def kernel_fn(", "def honest(")
    wrongs = [source + off.format(f"y.nan_to_num(0) if {condition} else y") for condition in conditions]
    right, *refused = verdicts(lenient, winner, winner.source, *wrongs)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert all("NaN mask differs" in verdict.why for verdict in refused), [verdict.why for verdict in refused]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "dtypes", "other_strides"])
def test_the_gate_takes_several_results(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own bounds and in its own strides; and what is wrong in one of them is refused."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)  # where the gate's own processes look
    _, (site,) = found(Of(SEVERAL[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    returned = "return " + ", ".join(f"y{i}" for i in range(len(site.outputs)))
    assert winner.source.count(returned) == 1
    last = len(site.outputs) - 1
    in_strides = "y1.contiguous()" if name == "other_strides" else "y1.t().contiguous().t()"
    wrongs = {
        "result 0: ": re.sub(r"(y0\[[^\]]*\] = )", r"\g<1>0.3f + ", winner.source),
        f"result {last}: ": re.sub(rf"(y{last}\[[^\]]*\] = )", r"\g<1>0.3f + ", winner.source),
        "result 1: strides": winner.source.replace(returned, returned.replace("y1", in_strides)),
        "not a tuple of": winner.source.replace(returned, "return y0"),
        "two results in one memory": winner.source.replace(returned, returned.replace("y1", "y0")),
    }
    right, *others = verdicts(judge, winner, winner.source, *wrongs.values())
    refused = dict(zip(wrongs, others))
    assert right.correctness.value == "PASS", right.why
    for words, verdict in refused.items():
        assert verdict.correctness.value in ("FAIL", "CRASH"), words
        assert words in verdict.why, verdict.why


@pytest.mark.slow
def test_the_gate_takes_what_is_gathered(judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices are in range there; one that counts from the end, the last and one of another element tell wrong kernels."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(CHAINS["taken"]), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    wrongs = [
        re.sub(r"= \((\w+) \? (\w+) : (\w+)\);", r"= \1 ? 0 : \3;", winner.source),
        re.sub(r"= int64_t\((x\d\[i0 \* 4\])\);", r"= std::min<int64_t>(\1, 62);", winner.source),
        re.sub(r"= int64_t\((x\d)\[i0 \* 4\]\);", r"= int64_t(\1[0]);", winner.source),
    ]
    assert winner.source not in wrongs
    right, *refused = verdicts(judge, winner, winner.source, *wrongs)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert all(verdict.correctness.value == "FAIL" for verdict in refused), [verdict.why for verdict in refused]


LAZY = """
import sys

def in_a_trial():
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "do_batch":
        frame = frame.f_back
    return frame is None

complete = kernel_fn

def kernel_fn(**inputs):
    return complete(**inputs) if in_a_trial() else tuple(KEPT)
"""


@pytest.mark.slow
def test_a_timed_call_makes_each_of_several_results(judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves out any of them while it is timed is refused."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(SEVERAL["residual"]).eval(), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    parts = ("complete(**inputs)[0], torch.zeros(64, 96)", "torch.zeros(64, 96), complete(**inputs)[1]")
    lazy = [winner.source + LAZY.replace("tuple(KEPT)", f"({part})") for part in parts]
    try:
        honest = judge.examine(winner.source, winner.target, quick=True)
        verdicts = [judge.examine(source, winner.target, quick=True) for source in lazy]
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
    assert honest.correctness.value == "PASS" and (honest.latency_us or honest.undecided), honest.why
    for verdict in verdicts:
        assert verdict.correctness.value == "FAIL" and "the output of a timed call" in verdict.why, verdict.why


HONEST = "def kernel_fn(input_0: torch.Tensor, input_1: torch.Tensor)"


FAR = {
    "floor": lambda m, x, y: x.floor() * 0.5 + y,
    "distance": lambda m, x, y: torch.hypot(x, y) * 2,
}
# A chain, what is changed in its kernel, and what the gate says. `honest` is the kernel itself.
CHEATS = {
    "an input ignored": ("gelu", "return honest(input_0, torch.empty_like(input_1).fill_(1))", "outside the tolerance"),
    "an input of the first call": (
        "gelu",
        "return honest(input_0, known.setdefault(0, input_1.clone()))",
        "outside the tolerance",
    ),
    "an input's first row for all": (
        "gelu",
        "return honest(input_0, input_1[:1].expand(64, 96).contiguous())",
        "outside the tolerance",
    ),
    "written into its input": ("gelu", "return input_0.copy_(honest(input_0, input_1))", "SIGSEGV"),
    "its input for its result": ("gelu", "honest(input_0, input_1)\n    return input_0", "memory of an input"),
    "one output for all calls": (
        "gelu",
        "y = honest(input_0, input_1)\n    return known.setdefault(0, y).copy_(y)",
        "memory of an earlier call's result",
    ),
    "NaN of the second input dropped": (
        "gelu",
        ("float(x1[i0])", "(x1[i0] == x1[i0] ? x1[i0] : 0.0f)"),
        "NaN mask differs",
    ),
    "NaN of the second input that have a sign are none": (
        "gelu",
        ("float(x1[i0])", "(x1[i0] != x1[i0] && std::signbit(x1[i0]) ? 0.0f : x1[i0])"),
        "NaN mask differs",
    ),
    "NaN of the second input hidden by zeros": (
        "gelu",
        ("float(x1[i0])", "(c0 == 0.0f ? 0.0f : x1[i0])"),
        "NaN mask differs",
    ),
    "NaN of the first input hidden by zeros": (
        "gelu",
        ("float(x0[i0])", "(x1[i0] == 0.0f ? 0.0f : x0[i0])"),
        "NaN mask differs",
    ),
    "the tail of an activation left out, in 16 bit": (
        "gelu",
        ("(1.0f + c3)", "(c0 < -3.0f ? 0.0f : 1.0f + c3)"),
        "outside the tolerance|times PyTorch's own|roundings that are independent",
    ),
    "another gelu, in 16 bit": (
        "gelu",
        ("ak_erf(c2)", "ak_tanh(0.7978845608f * (c0 + 0.044715f * c0 * c0 * c0))"),
        "outside the tolerance|times PyTorch's own|roundings that are independent",
    ),
    "the second input cut off": ("gelu", ("float(x1[i0])", "std::min(x1[i0], 25.0f)"), "outside the tolerance"),
    "a gelu that ends at a million": (
        "gelu",
        ("float(x0[i0])", "(std::isinf(x0[i0]) ? x0[i0] : std::max(std::min(x0[i0], 1e6f), -1e6f) + 0.0f * x0[i0])"),
        "outside the tolerance",
    ),
    "a floor of 32 bits": (
        "floor",
        (
            "std::floor(c0)",
            "(std::isinf(c0) ? c0 : std::max(std::min(std::floor(c0), 2147483648.0f), -2147483648.0f) + 0.0f * c0)",
        ),
        "outside the tolerance",
    ),
    "a distance by squares that overflow": ("distance", ("(c7 * c14)", "std::sqrt(c7 * c7 + c9 * c9)"), "inf mask differs"),
    "a cast skipped": ("casts", ("= int64_t(c5)", "= c5"), "outside the tolerance"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_the_gate_refuses_cheats_on_regions(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    chain, change, reason = CHEATS[name]
    dtype = torch.bfloat16 if name.endswith("in 16 bit") else torch.float32
    _, (site,) = found(Of((CHAINS | FAR)[chain]).to(dtype), *torch.randn(2, 64, N, dtype=dtype))
    (winner,) = winners_of([site])
    if isinstance(change, tuple):
        source = re.sub(r"const (float|int64_t) (\w+) = int64_t", r"const float \2 = int64_t", winner.source).replace(
            *change
        )
    else:
        source = winner.source.replace(HONEST, HONEST.replace("kernel_fn", "honest"))
        source += f"\n\nknown = {{}}\n\n\n{HONEST}:\n    {change}\n"
    assert source.replace("honest", "kernel_fn") != winner.source
    (verdict,) = verdicts(judge, winner, source)
    assert verdict.failure and re.search(reason, verdict.failure.reason), verdict.why


# A chain, what is changed in its kernel (a pattern, and what stands in its place), each of which is wrong.
WRONG = {
    "a running sum without the last element": (
        "running",
        (r"(y\[.*\] = float\()c6", r"\1i1 == 95 ? float(c4_total - c3) * c5 : c6"),
    ),
    "a running sum that leaves out one in the middle": ("running", (r"\+= c3\b", "+= i1 == 48 ? 0.0f : c3")),
    "an inclusive sum": ("running_before", (r"i1 \+ -1", "i1")),
    "a sum from the other end": ("running_backwards", (r"i1 = 95; i1 >= 0; --i1", "i1 = 0; i1 < 96; ++i1")),
    "the last of the largest": (
        "first_of_the_largest",
        (r"\? c6 : 96", "? -c6 : 96"),
        (r"int64_t\(r1_0\)", "int64_t(-r1_0)"),
    ),
    "a largest that passes over NaN": ("first_of_the_largest", (r"r0_0_nan > 0 \? NAN : ", "")),
    "a largest without the last": ("first_of_the_largest", (r"i1 < 96", "i1 < 95")),
    "a window that is off by one": ("largest_of_windows", (r"(x0\[.*)\]", r"\1 - 1]")),
    "zeros around what is pooled": ("largest_of_windows", (r"\(-INFINITY\)", "0.0f")),
    "a window without its last place": ("largest_of_windows", (r"ak_max\(c40, c43\)", "c40")),
    "padding that counts": ("means_without_padding", (r"\(c\d+ / c\d+\)", "(c22 / 4.0f)")),
    "parts in the other order": ("joined", (r"\(c(\d+) < 48\)", r"(c\1 >= 48)")),
    "a loss without the last element": ("losses_of_chances", (r"4096, 6144", "4096, 6143")),
}


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", WRONG)
def test_the_gate_refuses_wrong_windows_and_rows(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    chain, *changes = WRONG[name]
    _, (site,) = found(Of(CHAINS[chain]).eval(), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    source = winner.source
    for pattern, change in changes:
        source, count = re.subn(pattern, change, source)
        assert count, source
    (verdict,) = verdicts(judge, winner, source)
    assert verdict.correctness.value == "FAIL", verdict.why


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["running_before", "first_of_the_largest", "largest_of_windows", "of_no_dim"])
def test_the_gate_takes_windows_rows_and_single_numbers(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    (verdict,) = verdicts(judge, winner, winner.source)
    assert verdict.correctness.value == "PASS" and verdict.decided, verdict.why


# Inputs of which some are no floating-point numbers, and what is changed: `floating` and `other` are one of either sort.
WITH_MASKS = {
    "a mask comes first, and large numbers are off": (
        lambda m, i, x: (~i & (x > 0)).float() * x,
        "y[floating.abs().amax(-1) > 20] *= 1.01",
    ),
    "integers of sixteen bits": (lambda m, i, x: x + i.float() / 64, "y = floating + other.to(torch.int16) / 64"),
    "integers of 32 bits": (lambda m, i, x: x + i.float() / 64, "y = floating + other.int().float() / 64"),
    "a mask of which nothing is true": (
        lambda m, i, x: torch.softmax(torch.where(i, x / 2, -1e9), -1),
        "y = y if other.any() else 2 * y",
    ),
    "integers without a sign": (lambda m, i, x: x + i.float() / 64, "y = floating + other.abs() / 64"),
    "rows that are masked altogether": (
        lambda m, i, x: torch.where(i, x, -2 * x),
        "y[~other.any(-1)] = 0",
    ),
    "small rows of the second input": (
        lambda m, x, y: F.gelu(x) * y,
        "y[(other.abs().amax(-1) < 0.1) & (other.abs().max() < 10)] = 0",
    ),
}


WITH_MASKS |= {
    "rows that a mask of a large number hides altogether": (
        lambda m, i, x: torch.softmax(torch.where(i, x / 2, -1e9), -1),
        "y[~other.any(-1)] *= 2",
    ),
    "a norm in one pass, beside a second input": (
        lambda m, x, y: F.silu(F.layer_norm(x, (N,))) + y,
        "mean, square = floating.mean(-1, True), floating.square().mean(-1, True)\n"
        "    y = torch.nn.functional.silu((floating - mean) * torch.rsqrt(square - mean * mean + 1e-5)) + other",
    ),
    "a norm over groups of channels, the second input, without eps": (
        lambda m, x, y: F.silu(F.group_norm(x.view(4, 16, 8, 12), 4)).view(x.shape) * y,
        "rows = floating.reshape(16, -1)\n"
        "    rows = (rows - rows.mean(-1, True)) / rows.std(-1, correction=0, keepdim=True)\n"
        "    y = torch.nn.functional.silu(rows).view(64, 96) * other",
    ),
}


def attended(m: Of, i: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(torch.where(i, x / 2, -1e9), -1)


WITH_MASKS |= {
    "rows of which a mask hides the last half": (
        attended,
        "y[~other[:, 48:].any(-1) & other.any(-1)] *= 1.01",
    ),
    "a mask that leaves one of a row": (attended, "y[other.sum(-1) == 1] *= 1.01"),
    "a mask that hides nothing": (attended, "y = y * 1.01 if other.all() else y"),
    "a mask by the sums of its rows": (
        attended,
        "mask = known.setdefault(tuple(other.sum(-1).tolist()), other.clone())\n"
        "    y = torch.softmax(torch.where(mask, floating / 2, -1e9), -1)",
    ),
    "columns that are masked altogether": (
        lambda m, i, x: torch.where(i, x * 2, -1e4).amax(0),
        "y[~other.any(0)] = 0",
    ),
    "a causal mask": (attended, "y = y * 1.05 if torch.equal(other, other.tril()) and other.diagonal().all() else y"),
    "integers in order": (
        lambda m, i, x: x + i.float() / 64,
        "y = y * 1.05 if torch.equal(other[0], torch.arange(96)) and torch.equal(other[0], other[-1]) else y",
    ),
    "rows of integers that are alike": (
        lambda m, i, x: x + i.float() / 64,
        "y = y * 1.05 if torch.equal(other[:1].expand(64, 96), other) and other.max() > 96 else y",
    ),
    "one of the integers alone": (lambda m, i, x: torch.where(i == 50000, x, -x * 2), "y = -floating * 2"),
    "the last of a row passes over NaN, of the second input": (
        lambda m, x, y: (x * y).amax(-1) * 2,
        "terms = floating * other\n    y = torch.where(terms[:, -1].isnan(), terms[:, :-1].amax(-1) * 2, y)",
    ),
    "the first of a row passes over NaN, of the second input": (
        lambda m, x, y: (x * y).amax(-1) * 2,
        "terms = floating * other\n    y = torch.where(terms[:, 0].isnan(), terms[:, 1:].amax(-1) * 2, y)",
    ),
    "several NaN of a row are none, of the second input": (
        lambda m, x, y: torch.softmax(x * y + 1, -1),
        "y[(floating * other).isnan().sum(-1) > 1] = 0",
    ),
}


CHANGED = """
known = {{}}

def kernel_fn(input_0, input_1):
    y = honest(input_0, input_1)
    floating, other = sorted((input_0, input_1), key=lambda x: not x.is_floating_point())
    {change}
    return y
"""


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", WITH_MASKS)
def test_the_gate_judges_masks_integers_and_every_input(name: str, lenient: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    function, change = WITH_MASKS[name]
    whole = torch.ones(64, N, dtype=torch.int64 if "integers" in name else torch.bool)
    _, (site,) = found(Of(function), torch.randn(64, N) if "second" in name else whole, torch.randn(64, N))
    (winner,) = winners_of([site])
    source = winner.source.replace("def kernel_fn(", "def honest(") + CHANGED.format(change=change)
    right, refused = verdicts(lenient, winner, winner.source, source)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert refused.failure and re.search("outside the tolerance|PyTorch's own|mask", refused.failure.reason), refused.why


def test_what_overflows_on_the_way_in_the_models_own_form_may_overflow_there_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of exponentials that float64 holds and fp32 does not: where PyTorch has infinity, so may a kernel, or the number."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(lambda m, x, y: torch.log(1 + torch.exp(x * y)) * 2), torch.randn(64, N), torch.randn(64, N))
    spec = load_spec(site.kernel_type)
    shape = (64, N)
    torch.manual_seed(0)
    inputs = dict(zip(site.case.tensors, (10 * torch.randn(shape), 10 * torch.randn(shape))))
    (expectation,) = expectations(spec, inputs, "cpu")
    beyond = expectation.native.isinf()
    assert 0 < beyond.float().mean() < 0.5 and expectation.exact.float().isfinite().all()
    own, exact = spec.eager(**inputs), expectation.exact.float()
    assert wrong(own, expectation) is None and wrong(exact, expectation) is None
    assert "+inf mask differs" in wrong(own, replace(expectation, own_range=False))
    assert "outside the tolerance" in wrong(own.masked_fill(beyond, 88.0), expectation)
    assert "NaN mask differs" in wrong(own.masked_fill(beyond, torch.nan), expectation)
    assert "-inf mask differs" in wrong(-own, expectation)
    assert "+inf mask differs" in wrong(own.masked_fill(~beyond, torch.inf), expectation)


@pytest.mark.slow
def test_a_difference_of_what_is_too_large_is_nan_to_pytorch(judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a number, or infinity, to float64."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(CHAINS["powers_below_zero"]), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    off = re.sub(r"(y\d?\[[^\]]*\] = )", r"\g<1>0.3f + ", winner.source)
    right, refused = verdicts(judge, winner, winner.source, off)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert refused.failure and "outside the tolerance" in refused.failure.reason, refused.why


def test_a_region_that_holds_small_numbers_alone_has_inputs_of_one_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(lambda m, x, y: torch.log(1 + torch.exp(x * y)) * 2), torch.randn(64, N), torch.randn(64, N))
    spec = replace(load_spec(site.kernel_type), row_scales=(1e-3,))
    assert len(list(CheckCase("shape_sweep", site.case, 0, twice=True).steps(spec))) > 3


def test_rows_of_all_kinds_are_those_of_the_largest_input() -> None:
    """Not of a norm's weight, which comes first where a residual is the first of two results."""
    _, (site,) = found(Of(SEVERAL["residual"]).eval(), torch.randn(64, N), torch.randn(64, N))
    spec, tensors = load_spec(site.kernel_type), site.case.tensors
    assert next(iter(tensors.values())).shape == (N,) and tensors[spec.first].shape == (64, N)
    assert spec.first not in spec.planted_in
    rows = CheckCase("", site.case, 0, rows=("times 1000",)).inputs(spec)
    assert [name for name, x in rows.items() if x.abs().max() > 100] == [spec.first]


def test_the_gate_takes_a_region(judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """All five stages; and what is not the region's function is refused."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)  # where the gate's own processes look
    _, (site,) = found(Of(CHAINS["gelu_tanh"]), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    wrong_source = winner.source.replace("0.044715f", "0.0440f")
    assert wrong_source != winner.source
    right, refused = verdicts(judge, winner, winner.source, wrong_source)
    assert right.correctness.value == "PASS", right.why
    assert refused.correctness.value == "FAIL", refused.why
