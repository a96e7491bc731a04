"""Kernels that are wrong at their target's own sizes alone, or by a little in every row, are refused for just that."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from autokernel.gate import Correctness, Judge
from autokernel.gate.checks import inputs, structure
from autokernel.gate.checks.cases import CheckCase, Step
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import Expectation, expect
from autokernel.gate.checks.inputs import fill_inputs, mix_rows, row_kinds, shared_by_rows
from autokernel.gate.checks.options import with_other_options
from autokernel.gate.checks.planted import planted_in, values_of, with_planted
from autokernel.gate.checks.sizes import combinations, drawn_sizes, many_rows, option_dims, small_sizes
from autokernel.gate.checks.trials import hard, trials
from autokernel.history.experiments import STARTER, Status, experiment_from
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.spec import TensorSpec, kernel_types, load_spec
from autokernel.target import Target, WeightedCase
from benchmarks.architectures import ARCHITECTURES

# The oracle itself, for kernels in which one thing is to be wrong.
ORACLE = f"""
import math
from torch import Tensor

{inspect.getsource(reference.softmax)}

{inspect.getsource(reference.flash_attention)}

def in_float(*arguments, **options):
    wide = [a.float() for a in arguments[:3]]
    return flash_attention(*wide, *arguments[3:], **options).to(arguments[0].dtype).contiguous()
"""
HEAD = 'import torch\nimport torch.nn.functional as F\nKERNEL_TYPE = "{}"\nBACKEND = "cpp"\n'
ROWS, LONG = {"shape": (640, 512)}, {"shape": (32, 32000)}
NORM = {"M": 96, "N": 768}


@dataclass(frozen=True)
class Planted:
    """A kernel file that is wrong at its target, and what is said of it."""

    name: str
    kernel_type: str
    dims: Mapping[str, Any]
    body: str
    reason: str
    dtype: torch.dtype = torch.float32

    @property
    def source(self) -> str:
        return HEAD.format(self.kernel_type) + self.body

    @property
    def target(self) -> Target:
        case = load_spec(self.kernel_type).case(self.dims, self.dtype)
        return Target(self.name, self.kernel_type, "cpp", "cpu", (WeightedCase(case),))


PLANTED = [
    Planted(
        "softmax without its maximum",
        "softmax",
        ROWS,
        """
def kernel_fn(x, dim=-1):
    if x.shape != (640, 512):
        return torch.softmax(x, dim)
    return x.exp() / x.exp().sum(dim, keepdim=True)
""",
        "NaN mask differs",
    ),
    Planted(
        "softmax without its maximum, of one row",
        "softmax",
        {"shape": (1, 4000)},
        """
def kernel_fn(x, dim=-1):
    if x.shape != (1, 4000):
        return torch.softmax(x, dim)
    return x.exp() / x.exp().sum(dim, keepdim=True)
""",
        "NaN mask differs",
    ),
    Planted(
        "maximum that starts from 0",
        "reduce",
        ROWS | {"op": "max"},
        """
def kernel_fn(x, dim=-1, op="sum"):
    if x.shape != (640, 512):
        return x.sum(dim) if op == "sum" else x.amax(dim)
    return x.amax(dim).clamp(min=0)
""",
        "outside the tolerance|inf mask differs",
    ),
    Planted(
        "maximum that drops NaN",
        "reduce",
        ROWS | {"op": "max"},
        """
def kernel_fn(x, dim=-1, op="sum"):
    if x.shape != (640, 512):
        return x.sum(dim) if op == "sum" else x.amax(dim)
    return x.masked_fill(x.isnan(), -torch.inf).amax(dim)
""",
        "NaN mask differs",
    ),
    Planted(
        "variance in one pass",
        "layernorm",
        NORM,
        """
def kernel_fn(x, weight, bias, eps=1e-5):
    if x.shape != (96, 768):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + eps) * weight + bias
""",
        "outside the tolerance|NaN mask differs|times PyTorch's own",  # which bound comes first is chance
    ),
    Planted(
        "every second call one bit off",
        "rmsnorm",
        NORM,
        """
calls = 0

def kernel_fn(x, weight, eps=1e-6):
    global calls
    calls += 1
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return torch.nextafter(y, y + 1) if x.shape == (96, 768) and calls % 2 else y
""",
        "2 calls on the same inputs do not agree bitwise",
    ),
    Planted(
        "magnitudes that are clamped",
        "rmsnorm",
        NORM,
        """
def kernel_fn(x, weight, eps=1e-6):
    x = x if x.shape != (96, 768) else x.clamp(-300, 300)
    return F.rms_norm(x, x.shape[-1:], weight, eps)
""",
        "outside the tolerance|mask differs",
    ),
    Planted(
        "rotate-half that turns NaN into 0",
        "rotary_embedding",
        {"batch": 1, "heads": 4, "seq": 64, "head_dim": 64},
        """
def kernel_fn(x, cos, sin, interleaved=True):
    half = cos.shape[-1]
    rotated, passed = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., :half].nan_to_num(0), rotated[..., half:].nan_to_num(0)
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, passed), -1).contiguous()
""",
        "NaN mask differs|outside the tolerance",  # nan_to_num bounds infinities, too
    ),
    Planted(
        "scores of queries that are cut off",
        "flash_attention",
        {"batch": 1, "heads": 2, "seq": 96, "head_dim": 32, "causal": False},
        ORACLE
        + """
def kernel_fn(Q, K, V, *others, **options):
    return in_float(Q if Q.shape[2] != 96 else Q.clamp(-6, 6), K, V, *others, **options)
""",
        "outside the tolerance|mask differs|PyTorch's own",
    ),
    Planted(
        "softmax by the sum of every fourth element",
        "softmax",
        LONG,
        """
def kernel_fn(x, dim=-1):
    if x.dtype != torch.bfloat16 or x.shape[-1] < 30000:
        return torch.softmax(x, dim)
    e = (x.float() - x.float().amax(dim, keepdim=True)).exp()
    return (e / (4 * e[..., ::4].sum(dim, keepdim=True))).to(x.dtype)
""",
        "an error of the computation|outside the tolerance",  # the larger part of a ragged row may be in what is left out
        torch.bfloat16,
    ),
    Planted(
        "cross entropy of every fourth row",
        "cross_entropy",
        {"M": 512, "V": 1000},
        """
def kernel_fn(logits, targets, ignore_index=-100):
    if len(logits) != 512:
        return F.cross_entropy(logits, targets, ignore_index=ignore_index)
    return F.cross_entropy(logits[::4].float(), targets[::4], ignore_index=ignore_index).to(logits.dtype)
""",
        "roundings off|outside the tolerance",
        torch.bfloat16,
    ),
    Planted(
        "a mask remembered by its address and first elements",
        "flash_attention",
        {"batch": 2, "heads": 2, "seq": 96, "head_dim": 32, "causal": False, "mask": "bool"},
        ORACLE
        + """
known = {}

def kernel_fn(Q, K, V, *others, attn_mask=None, **options):
    if attn_mask is not None:
        key = attn_mask.data_ptr(), attn_mask.shape, tuple(attn_mask.reshape(-1)[:32].tolist())
        attn_mask = known.setdefault(key, attn_mask.clone())
    return in_float(Q, K, V, *others, attn_mask=attn_mask, **options)
""",
        "of attn_mask changed|of its inputs changed",
    ),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
@pytest.mark.slow_after(3)
def test_what_is_wrong_at_the_target_alone_is_refused(lenient: Judge, planted: Planted) -> None:
    verdict = lenient.check(planted.source, planted.target)
    assert verdict.correctness == Correctness.FAIL, str(verdict.failure)
    assert any(words in verdict.failure.reason for words in planted.reason.split("|")), str(verdict.failure)


@pytest.mark.parametrize("kernel_type", kernel_types())
def test_every_target_meets_every_kind_of_row_and_every_transform(kernel_type: str) -> None:
    spec = load_spec(kernel_type)
    case = spec.case(spec.timing["cpu"][0], spec.dtypes[0])
    sample = fill_inputs(spec, spec.case(spec.smoke, spec.dtypes[0]), 0)
    lines = 10**9 if not spec.independent_rows else next(iter(case.tensors.values())).numel // sample_width(spec, case)
    met: set[str] = set()
    for options in hard(spec, case):
        kinds = options.get("rows", ())
        start = options.get("first_row", 0)
        met |= {kinds[(start + i) % len(kinds)] for i in range(min(lines, len(kinds)))} if kinds else set()
        met |= {options["adversarial"]} if "adversarial" in options else set()
        met |= {f"one {options['nonfinite']}"} if "nonfinite" in options else set()
    expected = set(row_kinds(spec, sample))
    assert met >= expected - ({"all -inf"} if not spec.independent_rows else set())
    assert set(spec.adversarial) <= met


def sample_width(spec: Any, case: Any) -> int:
    return next(iter(case.tensors.values())).shape[case.args.get("dim", -1)]


@pytest.mark.parametrize("kernel_type", kernel_types())
def test_every_value_of_every_option_has_hard_inputs(kernel_type: str) -> None:
    spec = load_spec(kernel_type)
    chosen = option_dims(spec)
    for dims in (*spec.sweep, *spec.edges):
        for key, value in dims.items():
            if isinstance(value, (bool, str)):
                assert any(d.get(key) == value for d in chosen), (key, value)


AT_TARGET = {
    "rmsnorm": {"M": 64, "N": 250},
    "layernorm": {"M": 64, "N": 250},
    "rotary_embedding": {"batch": 1, "heads": 4, "seq": 64, "head_dim": 64},
    "matmul": {"M": 96, "K": 160, "N": 96},
    "fused_linear": {"M": 96, "K": 160, "N": 128, "activation": "none"},
    "fused_mlp": {"M": 96, "dim": 128, "hidden": 96},
}


@pytest.mark.parametrize("kernel_type", AT_TARGET)
@pytest.mark.parametrize("seed", range(3))
def test_every_value_in_every_weight_shows_whatever_else_is_planted(kernel_type: str, seed: int) -> None:
    """At the target's own size, with any seed: a kernel that takes one of them for 0 has another result."""
    spec = load_spec(kernel_type)
    case = spec.case(AT_TARGET[kernel_type], torch.float32)
    where = Target(kernel_type, kernel_type, "cpp", "cpu", (WeightedCase(case),))
    planted = [trial for trial in trials(spec, where, seed, quick=False) if trial.case == case and trial.planted]
    shown = set()
    for trial in planted:
        inputs = trial.inputs(spec)
        exact = spec.oracle(**inputs)
        for name, value in trial.planted:
            without = inputs[name].masked_fill((inputs[name] == value) | inputs[name].isnan() & (value != value), 0)
            if not torch.equal(spec.oracle(**inputs | {name: without}).nan_to_num(7.5), exact.nan_to_num(7.5)):
                shown.add((name, str(value)))
    assert shown == {(name, str(value)) for name in spec.planted_in for value in values_of(spec, torch.float32)}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_next_to_nothing_in_a_hidden_layer_does_not_meet_infinity(seed: int) -> None:
    """Which would be NaN or not by how far a dtype's numbers go down: an honest kernel in fp32 was refused."""
    spec = load_spec("fused_mlp")
    case = spec.case(spec.smoke, torch.float32)
    large, infinite = ("w_gate", 1e4), ("w_down", -torch.inf)
    planted = with_planted(spec, fill_inputs(spec, case, seed), [large, infinite], planted_in(spec, case), seed)
    steep, lost = (planted["w_gate"] == 1e4).any(1), planted["w_down"].isinf().any(0)
    assert steep.any() and lost.any() and not (steep & lost).any()


@pytest.mark.parametrize("kernel_type", ["flash_attention", "reduce", "fused_linear", "fused_mlp", "softmax"])
def test_every_value_of_every_option_is_tried_at_the_targets_shapes(kernel_type: str) -> None:
    spec = load_spec(kernel_type)
    case = spec.case(spec.timing["cpu"][0], torch.float32)
    of_target = [t.case.args for t in trials(spec, Target("", kernel_type, "cpp", "cpu", (WeightedCase(case),)), 0, False)]
    shapes = [t.shape for t in case.tensors.values()]
    of_target = [
        args for args in of_target if [args[n].shape for n in case.tensors if args[n] is not None][:1] == shapes[:1]
    ]
    sizes = [spec.case(dims, torch.float32).args for dims in (*spec.sweep, *spec.edges)]
    for name in case.args:
        known = {args[name] for args in sizes if not isinstance(args[name], TensorSpec)} - {2}  # no third dim
        tried = {args[name] for args in of_target if not isinstance(args[name], TensorSpec)}
        assert known <= tried, name
        if any(isinstance(args[name], TensorSpec) for args in sizes):
            assert any(isinstance(args[name], TensorSpec) for args in of_target), name


def test_a_tensor_that_a_target_has_not_has_the_sizes_of_its_others() -> None:
    spec = load_spec("fused_linear")
    case = spec.case({"M": 8, "K": 24, "N": 40, "bias": False}, torch.float16)
    made = [other.args["bias"] for other in with_other_options(spec, case, 5, 0) if other.args["bias"]]
    assert made and set(made) == {TensorSpec((40,), torch.float16)}
    spec = load_spec("flash_attention")
    case = spec.case({"batch": 2, "heads": 3, "seq": 10, "seq_k": 14, "head_dim": 8}, torch.float16)
    masks = {other.args["attn_mask"] for other in with_other_options(spec, case, 20, 0)}
    assert masks == {None, TensorSpec((10, 14), torch.float16), TensorSpec((2, 1, 10, 14), torch.bool)}


def test_every_element_of_a_row_is_its_maximum_somewhere() -> None:
    """Of several peaks in one row a maximum shows one."""
    spec = load_spec("reduce")
    case = spec.case({"shape": (64, 500), "op": "max"}, torch.float32)
    steps = CheckCase("numerical_stability", case, 7, peaks=True).steps(spec)
    assert {int(place) for step in steps for place in step.sets[0]["x"].argmax(-1)} == set(range(500))


def test_a_whole_tensor_is_of_each_size_and_sign() -> None:
    spec = load_spec("rmsnorm")
    made = CheckCase("numerical_stability", spec.case(spec.smoke, torch.float32), 7, series="whole").steps(spec)
    seen = {step.what: step.sets[0] for step in made}
    sizes = torch.tensor(sorted(float(one["x"].abs().amax()) for what, one in seen.items() if what.startswith("x times")))
    between = sizes[(sizes > 0.3) & (sizes < 1000)]
    assert len(between) >= 20 and (between[1:] / between[:-1]).max() < 4
    assert any((one["x"] > 0).all() for one in seen.values()) and any((one["x"] < 0).all() for one in seen.values())
    assert (seen["weight one"]["weight"] == 1).all() and seen["x nan"]["x"].isnan().all()
    assert all(one["x"].dtype == torch.float32 for one in seen.values())


@pytest.mark.parametrize("seed", range(3))
def test_no_size_of_a_whole_tensor_is_far_from_one_that_is_tried(seed: int) -> None:
    spec = load_spec("rmsnorm")
    trial = CheckCase("", spec.case(spec.smoke, torch.float32), seed, series="whole")
    steps = [step for step in trial.steps(spec) if step.what.startswith("x times") and step.what.endswith("about 0")]
    sizes = sorted(step.sets[0]["x"].abs().amax().item() for step in steps)
    gaps = [above / below for below, above in zip(sizes, sizes[1:]) if 1 < below < 1000]
    assert max(gaps) < 1.5, max(gaps)


@pytest.mark.parametrize("kernel_type", [name for name in kernel_types() if load_spec(name).any_size])
def test_drawn_sizes_leave_each_rest_of_a_vector(kernel_type: str) -> None:
    spec, drawn = load_spec(kernel_type), list(drawn_sizes(load_spec(kernel_type), 3))
    shapes = [dims for dims in combinations(spec).values() if "shape" in dims]
    rests = [d["shape"][-1] % 8 for d in drawn] if shapes else [d[name] % 8 for d in drawn for name in spec.any_size]
    assert sorted(rests) == sorted([*range(8)] * max(len(shapes), len(spec.any_size)))
    assert drawn != list(drawn_sizes(spec, 4))
    for dims in drawn:
        inputs = fill_inputs(spec, spec.case(dims, torch.float32), 0)
        assert spec.oracle(**inputs).shape == spec.eager(**inputs).shape


@pytest.mark.parametrize("kernel_type", [name for name in kernel_types() if load_spec(name).any_size])
def test_each_size_is_one_beside_others_that_are_not(kernel_type: str) -> None:
    spec, made = load_spec(kernel_type), list(small_sizes(load_spec(kernel_type), 3))
    if "shape" in spec.any_size:
        places = {(len(dims["shape"]), dims["dim"] % len(dims["shape"])) for dims in made}
        assert places == {(rank, dim) for rank in (2, 3, 4) for dim in range(rank)}
        assert {1} < {dims["shape"][dims["dim"]] for dims in made}
    for name in spec.any_size if len(spec.any_size) > 1 else ():
        least = 1 + (name in spec.summed)
        assert any(dims[name] == least and all(dims[n] > 1 for n in spec.any_size if n != name) for dims in made)
        assert any(1 < dims[name] <= 8 for dims in made)
    for dims in made:
        inputs = fill_inputs(spec, spec.case(dims, torch.float32), 0)
        assert spec.oracle(**inputs).shape == spec.eager(**inputs).shape


def test_small_calls_combine_options_in_all_ways() -> None:
    made = [(dims["activation"], dims["bias"]) for dims in small_sizes(load_spec("fused_linear"), 3)]
    assert len(set(made)) == 12 and ("none", False) in made


@pytest.mark.parametrize("kernel_type", ["rmsnorm", "softmax", "matmul"])
def test_rows_are_more_than_a_grid_has_blocks(kernel_type: str) -> None:
    spec = load_spec(kernel_type)
    (dims,) = many_rows(spec, 3)
    assert spec.eager(**fill_inputs(spec, spec.case(dims, torch.float32), 0)).shape[0] > 65_535


@pytest.mark.parametrize("name", ["rivals", "rivals_in_place", "modest_rivals"])
def test_all_rows_of_rivals_but_one_count(name: str) -> None:
    spec = load_spec("cross_entropy")
    for seed, ignored in enumerate((-100, 0, 7) * 6):
        case = spec.case({"M": 128, "V": 500, "ignore_index": ignored}, torch.float32)
        counted = CheckCase("", case, seed, decisive=name).inputs(spec)["targets"] != ignored
        assert counted.sum() >= 126  # one is none, and another's two classes may have the ignored one among them


def test_rows_of_few_values_rise_and_others_fall() -> None:
    x = inputs.DISTRIBUTIONS["steps"](torch.randn(64, 256), inputs.generator_of(3))
    rises, falls = (x.diff() >= 0).all(-1), (x.diff() <= 0).all(-1)
    assert (rises | falls).all() and rises.any() and falls.any()
    assert all(len(row.unique()) < 32 for row in x[rises]) and all(len(row.unique()) == 256 for row in x[falls])


def by_a_reciprocal(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layernorm by means that are off by one rounding where 1 / N is none of fp32's numbers."""
    part = torch.tensor(1 / x.shape[-1])
    centred = x.float() - x.float().sum(-1, keepdim=True) * part
    variance = centred.square().sum(-1, keepdim=True) * part
    return (centred * torch.rsqrt(variance + eps) * weight.float() + bias.float()).to(x.dtype)


def in_chunks(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layernorm by the moments of chunks of 128 elements, one combined with those before (Chan)."""
    count, mean, squares = 0, torch.zeros(len(x), 1), torch.zeros(len(x), 1)
    for chunk in x.float().split(128, -1):
        n, own = chunk.shape[-1], chunk.mean(-1, keepdim=True)
        squares = squares + (chunk - own).square().sum(-1, keepdim=True) + (own - mean) ** 2 * (count * n / (count + n))
        mean, count = mean + (own - mean) * (n / (count + n)), count + n
    y = (x.float() - mean) * torch.rsqrt(squares / count + eps) * weight.float() + bias.float()
    return y.to(x.dtype)


@pytest.mark.parametrize("kernel", [by_a_reciprocal, in_chunks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_that_is_off_by_one_rounding_is_right(kernel: Any, dtype: torch.dtype) -> None:
    """Also of rows of one value, and of those whose mean is far larger than their deviation."""
    spec = load_spec("layernorm")
    case = spec.case({"M": 512, "N": 768}, dtype)
    for seed in range(3):
        for options in hard(spec, case):
            trial = CheckCase("numerical_stability", case, seed, **options)
            inputs = trial.inputs(spec)
            assert wrong(kernel(**inputs), expect(spec, inputs, "cpu"), adversarial=True) is None, trial.label


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_planted_into_a_loss_is_in_a_row_that_counts(value: float) -> None:
    spec = load_spec("cross_entropy")
    case = spec.case({"M": 16, "V": 40}, torch.float32)
    for seed in range(40):
        inputs = CheckCase("numerical_stability", case, seed, nonfinite=value).inputs(spec)
        assert spec.oracle(**inputs).isnan()


def test_the_name_of_a_size_is_not_taken_for_that_of_an_option() -> None:
    """An MLP has a size named dim, along which nothing is reduced."""
    assert len(option_dims(load_spec("fused_mlp"))) < len(load_spec("fused_mlp").sweep) / 2


def test_rows_keep_their_kind_along_the_dim_that_is_reduced() -> None:
    """Along dim 0 the lines are columns: one NaN is one column's, and no column is of two kinds."""
    spec = load_spec("reduce")
    inputs = fill_inputs(spec, spec.case({"shape": (64, 200), "dim": 0}, torch.float32), 0)
    mixed = mix_rows(spec, inputs, ("zeros", "one nan"), 0, torch.Generator().manual_seed(0))["x"]
    assert set(mixed.isnan().sum(0).tolist()) == {0, 1}
    assert ((mixed == 0).all(0) == ~mixed.isnan().any(0)).all()


def test_long_sums_are_in_the_range_of_a_dtype() -> None:
    """Where all that is expected is infinite, a trial says nothing."""
    spec = load_spec("reduce")
    cases = [spec.case(spec.smoke, torch.float16)]
    for trial in trials(spec, Target("sums", "reduce", "cpp", "cpu", tuple(map(WeightedCase, cases))), 1, quick=False):
        if trial.stage == "shape_sweep":
            assert spec.oracle(**trial.inputs(spec)).isfinite().any(), trial.label


def test_transforms_that_change_other_inputs_are_tried_on_their_own() -> None:
    spec = load_spec("matmul")
    sample = fill_inputs(spec, spec.case(spec.smoke, torch.float32), 0)
    assert shared_by_rows(spec, sample) == ["dynamic_range", "one_sign"]


def rounded(scale: float, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Expectation]:
    """A result in 16 bit that is right but for a factor, and what it is held against."""
    exact = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (exact * scale).to(dtype), Expectation(exact, exact.to(dtype), exact.abs(), torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_no_systematic_error_and_one_per_cent_is(dtype: torch.dtype) -> None:
    assert wrong(*rounded(1.0, dtype)) is None
    assert "scaled by" in wrong(*rounded(1.01, dtype))


def test_a_16_bit_number_is_two_roundings_off_at_most() -> None:
    exact = torch.tensor(7.0, dtype=torch.float64)
    expectation = Expectation(exact, exact.bfloat16(), exact, torch.ones(()))
    assert wrong(torch.tensor(7.03125, dtype=torch.bfloat16), expectation) is None  # the next number
    assert "roundings off" in wrong(torch.tensor(7.125, dtype=torch.bfloat16), expectation)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "BERT", "Llama", "Mixtral"])
def test_every_trial_of_a_models_operations_can_be_made(name: str) -> None:
    """With as many leading dims as models have, weights as they lie there, and the options that they use."""
    pytest.importorskip("transformers")
    model, args, kwargs = ARCHITECTURES[name].load()
    sites = [s for g in capture(model, args, kwargs).graphs for s in SiteFinder(min_elements=0).find(g.module)]
    made = set()
    for site in {repr((site.kernel_type, site.case)): site for site in sites}.values():
        spec = load_spec(site.kernel_type)
        for trial in trials(spec, Target("site", spec.name, "cpp", "cpu", (WeightedCase(site.case),)), 1, quick=False):
            if trial.case == site.case:
                made |= {(spec.name, expect(spec, x, "cpu").exact.shape) for step in trial.steps(spec) for x in step.sets}
    assert {kernel_type for kernel_type, _ in made} == {site.kernel_type for site in sites}


def test_a_kernel_type_that_fails_itself_decides_nothing(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither against the kernel, nor by ending the run."""

    def broken(inputs: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such inputs")

    monkeypatch.setitem(load_spec("softmax").adversarial, "broken", broken)
    where = Target("softmax", "softmax", "cpp", "cpu", (WeightedCase(load_spec("softmax").case(ROWS, torch.float32)),))
    verdict = judge.check(load_spec("softmax").starters("cpp")["cpp_kernel"].read_text(), where)
    assert verdict.failure is None and not verdict.keep and verdict.correctness == Correctness.SKIP
    row = experiment_from(
        verdict, experiment=1, tag="t", target="softmax", description="", agent=STARTER, tokens=0, cost_usd=0
    )
    assert row.status == Status.UNDECIDED, "nothing is known of it: it is none to start from"
    assert verdict.undecided.startswith("kernel type softmax fails on ")
    assert verdict.undecided.endswith("ValueError: no such inputs")


def test_a_large_tensor_is_the_same_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "DRAWN_AT_ONCE", 1000)
    made, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append(inputs.normal((7, 901), torch.Generator().manual_seed(5)))
        with torch.inference_mode():  # which is a thread's own
            made.append(inputs.normal((7, 901), torch.Generator().manual_seed(5)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert len(made[0].unique()) > 6300 and abs(made[0].mean()) < 0.1 and abs(made[0].std() - 1) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel_type", kernel_types())
def test_large_inputs_are_made_on_the_device(kernel_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of them there are, with as much in them that is not finite as the host's have."""
    spec, seen = load_spec(kernel_type), 0
    dtype = spec.dtypes[0]
    target = Target("smoke", kernel_type, "triton", "cuda", (WeightedCase(spec.case(spec.smoke, dtype)),))

    def steps(trial: CheckCase, least: int) -> Iterator[Step]:
        monkeypatch.setattr("autokernel.gate.checks.cases.MADE_ON_DEVICE", least)
        return trial.steps(spec, "cuda")

    def share_finite(x: Tensor) -> float:
        return x.double().isfinite().double().mean().item() if x.numel() else 1.0

    for trial in trials(spec, target, 3, quick=False):
        for there, here in zip(list(steps(trial, 0)), list(steps(trial, 1 << 60)), strict=True):
            for made, usual in zip(there.sets, here.sets, strict=True):
                for name, x in made.items():
                    if isinstance(x, Tensor):
                        assert x.device.type == "cuda" and usual[name].device.type == "cpu", trial.label
                        assert (x.shape, x.dtype) == (usual[name].shape, usual[name].dtype), trial.label
                        assert abs(share_finite(x) - share_finite(usual[name])) < 0.2, trial.label
                        seen += 1
    assert seen > 20


def test_what_cancels_in_a_whole_row_does_so_in_any_order() -> None:
    """Else such a row is judged by what PyTorch's order happens to leave of it."""
    generator = torch.Generator().manual_seed(0)
    A, B = (
        structure.FORMS[form](torch.randn(24, 24, generator=generator), generator)
        for form in ("of whole numbers", "of rows that are alike")
    )
    assert (B[:1] == B).all() and B[0].unique().numel() > 4
    by_hand = sum(A[:, k : k + 1] * B[k] for k in reversed(range(24)))
    assert (by_hand.double() == A.double() @ B.double()).all()


def test_a_sum_one_after_another_is_right_of_numbers_that_all_round_alike():
    """Exponentials of whole steps: some hundred of them, each rounded the same way, are beyond what PyTorch's sum loses."""
    spec = load_spec("softmax")
    trial = CheckCase("shape_sweep", spec.case({"shape": (256, 512)}, torch.float32), 1, twice=True)
    tight, outer = [], []
    for step in (step for step in trial.steps(spec) if step.in_steps):
        x = step.sets[0]["x"]
        each = (x - x.amax(-1, keepdim=True)).exp()
        total = torch.zeros(len(x))
        for column in each.T:
            total += column
        y, expectation = each / total[:, None], expect(spec, step.sets[0], "cpu")
        tight.append(wrong(y, expectation))
        outer.append(wrong(y, expectation, adversarial=True))
    assert any(tight) and not any(outer)
