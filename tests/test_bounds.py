"""How near to float64 an output must be, row by row: what is luck, and what nothing excuses."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autokernel.gate.checks import correctness, expectations
from autokernel.gate.checks.cases import CheckCase
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import Expectation, expect
from autokernel.gate.checks.inputs import fill_inputs, with_layout
from autokernel.gate.checks.planted import planted_in, with_planted
from autokernel.hardware.threads import one_thread
from autokernel.spec import kernel_types, load_spec

ROWS, WIDTH = 40, 256
LUCKY = 7  # the row in which PyTorch's error is small


def expected(rows: int, noise: float = 0.0) -> Expectation:
    """`rows` rows have values, which PyTorch has to 1e-6, in one row to 1e-12; the others are zero, and its `noise`."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    exact[rows:] = 0
    native = exact + 1e-6 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    native[LUCKY] = exact[LUCKY] + 1e-9 * torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    native[rows:] = noise
    exact[LUCKY] *= 1e-3  # its own rounding is small, too
    native[LUCKY] *= 1e-3
    return Expectation(exact, native.float(), exact.abs(), torch.ones(()))


def off_by(error: float, expectation: Expectation, rows: slice) -> Tensor:
    y = expectation.exact.clone()
    y[rows] += error * torch.randn(y[rows].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sign()
    y[expectation.exact == 0] = 0
    return y.float()


@pytest.mark.parametrize("rows", [ROWS, ROWS // 5])
def test_where_pytorch_is_lucky_its_usual_error_is_allowed_also_if_most_rows_are_zero(rows: int):
    expectation = expected(rows)
    assert wrong(off_by(1e-8, expectation, slice(LUCKY, LUCKY + 1)), expectation) is None
    assert "in row 7 is" in wrong(off_by(1e-6, expectation, slice(LUCKY, LUCKY + 1)), expectation)


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_what_pytorch_makes_of_zeros_excuses_no_other_row(noise: float):
    expectation = expected(ROWS // 5, noise)
    y = off_by(6e-5, expectation, slice(3, 4))
    assert "in row 3 is" in wrong(y, expectation)


def test_where_little_is_left_of_a_row_what_roundings_of_the_inputs_change_is_allowed():
    """One element is positive, small, and by chance as PyTorch has it: of functions of which nothing else is known."""
    expectation = expected(ROWS)
    exact, native = expectation.exact.clone(), expectation.native.double()
    exact[LUCKY], native[LUCKY] = 0, 0
    exact[LUCKY, 3] = native[LUCKY, 3] = 2**-8
    lucky = Expectation(exact, native.float(), exact.abs(), torch.ones(()))
    changed = torch.zeros_like(exact)
    changed[LUCKY, 3] = 1e-7
    known = replace(lucky, perturbation=lambda: changed)
    near, far = exact.clone(), exact.clone()
    near[LUCKY, 3] += 1e-6
    far[LUCKY, 3] += 1e-5
    assert "in row 7 is" in wrong(near.float(), lucky)
    assert wrong(near.float(), known) is None
    assert "in row 7 is" in wrong(far.float(), known)


def test_attention_whose_terms_cancel_may_round_its_weights_to_the_inputs_dtype_and_to_no_other():
    """Values of both signs leave little of a row; PyTorch, which rounds the same weights, has it right by luck."""
    spec = load_spec("flash_attention")
    inputs = fill_inputs(
        spec, spec.case({"batch": 2, "heads": 4, "kv_heads": 2, "seq": 96, "head_dim": 64}, torch.float16), 0
    )
    inputs["V"] = inputs["V"] / 8 + torch.tensor([2.0, -3.5]).half()[torch.arange(96) % 2][:, None]
    inputs["sm_scale"] = 1.0

    def attention(Q, K, V, sm_scale, dtype, **_):
        weights = torch.softmax(
            (Q.double() @ K.double().repeat_interleave(2, 1).mT * sm_scale).masked_fill(future, -torch.inf), -1
        )
        return (weights.mul(0.7).to(dtype).double() / 0.7 @ V.double().repeat_interleave(2, 1)).half()

    future = torch.ones(96, 96, dtype=torch.bool).triu(1)
    expectation = expect(spec, inputs, "cpu")
    lucky = replace(expectation, by_pytorch=expectation.exact.half())
    honest, coarse = (attention(**inputs, dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    assert wrong(honest, replace(lucky, perturbation=None)), "PyTorch's luck alone would have it refused"
    assert wrong(honest, lucky) is None
    assert wrong(coarse, lucky)


def test_pytorchs_errors_do_not_cancel_what_numbers_in_between_may_move_a_row_by():
    """A weight's rounding moves rows together: in PyTorch by a little more than it may in the RMS here, and less there, and
    one row not at all, by luck, so that what numbers in between may come to is asked for."""
    exact = 0.1 + 0.01 * torch.randn(8, 128, dtype=torch.float64, generator=torch.manual_seed(0))
    moved, more = torch.tensor(2e-3, dtype=torch.float64), torch.tensor([1.01, 0.99]).double().repeat(64)
    native = exact - moved * more
    native[3] = exact[3]
    expectation = Expectation(exact, native, known_dtype=torch.bfloat16)
    assert wrong((exact - moved).bfloat16(), expectation), "it is not as lucky"
    expectation = replace(expectation, perturbation=lambda: moved.expand_as(exact))
    assert wrong((exact - moved).bfloat16(), expectation) is None
    assert wrong((exact - 10 * moved).bfloat16(), expectation)


def test_where_an_input_repeats_its_numbers_the_errors_of_a_row_may_be_one_error():
    """Of a weight with one number for the whole hidden layer each result is a multiple of one sum, whose terms cancel."""
    spec, dtype = load_spec("fused_mlp"), torch.bfloat16
    case = with_layout(spec.case(spec.smoke, dtype), "repeated", "w_down")

    def mlp(x, w_gate, w_up, w_down, hidden_layer, **_):
        hidden = hidden_layer(F.silu(F.linear(x.float(), w_gate.float())) * F.linear(x.float(), w_up.float()))
        return F.linear(hidden.float(), w_down.float()).to(dtype)

    def shifted(x):
        return x + 0.05 * x.abs().mean()

    for seed in (663, 1212):
        inputs = next(CheckCase("edge_cases", case, seed).steps(spec)).sets[0]
        expectation = expect(spec, inputs, "cpu")
        honest = mlp(**inputs, hidden_layer=lambda x: x.to(dtype))
        assert "scaled by" in wrong(honest, replace(expectation, projection=None)), (
            "each of a row's errors alone is one of rounding"
        )
        assert wrong(honest, expectation, repeats=True) is None
        assert wrong(mlp(**inputs, hidden_layer=shifted), expectation, repeats=True)


def test_where_few_of_a_hidden_layer_count_their_roundings_scale_a_row_and_what_scales_it_by_more_is_refused():
    """Of 19 a few count, and squares of small numbers are below fp16's normal ones: all 1,537 results of a row are made of
    the same roundings, which those of the results average out beside; and PyTorch is lucky in one of three rows."""
    spec, dtype = load_spec("fused_mlp"), torch.float16
    case = spec.case({"M": 3, "dim": 1537, "hidden": 19, "activation": "relu2"}, dtype)

    def mlp(x, w_gate, w_up, w_down, scale=1.0, **_):
        gate, up = F.linear(x.float(), w_gate.float()), F.linear(x.float(), w_up.float())
        hidden = (F.relu(gate).square() * up * scale).to(dtype).float()
        return F.linear(hidden, w_down.float()).to(dtype)

    by_luck = 0
    for seed in range(40):
        inputs = next(CheckCase("edge_cases", case, seed, distribution="small").steps(spec)).sets[0]
        inputs["w_down"] = inputs["w_down"] * 256  # so that the results themselves are normal numbers
        expectation = expect(spec, inputs, "cpu")
        lucky = replace(expectation, by_pytorch=expectation.exact.to(dtype))
        by_luck += "scaled by" in (wrong(mlp(**inputs), replace(lucky, projection=None)) or "")
        assert wrong(mlp(**inputs), lucky) is None
        for each in (expectation, lucky):
            assert wrong(mlp(**inputs, scale=1.1), each)
    assert by_luck > 4


@pytest.mark.parametrize("size", [1e-6, 1e-5])
def test_rows_below_the_normal_numbers_of_fp16_may_be_rounded_to_its_steps_and_not_be_zero(size: float):
    """As decays make them, exp(sum) * x: a step there is a large part of a number, and PyTorch is lucky in some rows."""
    generator = torch.Generator().manual_seed(0)
    x, decay = (torch.randn(4096, n, generator=generator, dtype=torch.float64) for n in (32, 1))
    exact = x * size * torch.exp(-decay.abs())
    honest = exact.half()
    for by_pytorch in (exact, (x.half() * (size * torch.exp(-decay.abs())).half())):
        expectation = Expectation(exact, by_pytorch, exact.abs(), torch.ones(()), known_dtype=torch.float16)
        assert wrong(honest, expectation) is None
        assert wrong(honest * 0, expectation), "flushed to zero"
        assert wrong((exact * 1.1).half(), expectation), "scaled"


@pytest.mark.parametrize("name", ["fused_mlp", "flash_attention"])
def test_what_roundings_make_of_a_row_together_is_what_they_make_of_a_result_that_is_its_products_sum(name: str):
    """Both are linear in their last matrix: the row's products with some other are results of that matrix's products."""
    spec = load_spec(name)
    square = {"seq": 64, "head_dim": 64} if name == "flash_attention" else {}
    inputs = fill_inputs(spec, spec.case(spec.smoke | square, torch.float64), 0)
    exact = spec.oracle(**inputs)
    onto = torch.randn(exact.shape, dtype=torch.float64, generator=torch.manual_seed(1))
    together = spec.roundings(2**-8, onto=onto, **inputs)
    turned = {"V": inputs["V"] @ onto.mT} if square else {"w_down": onto @ inputs["w_down"]}
    torch.testing.assert_close(together, spec.roundings(2**-8, **inputs | turned).diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("name", ["w_gate", "w_up"])
def test_where_all_of_a_hidden_layer_is_made_of_one_sum_that_cancels_it_may_be_added_up_in_fp32_and_no_coarser(name: str):
    """One row of a weight for all: where its terms cancel, PyTorch has a whole row of results right by luck."""
    spec = load_spec("fused_mlp")
    inputs = fill_inputs(spec, with_layout(spec.case(spec.smoke, torch.float32), "expanded", name), 0)
    x, weight = inputs["x"], inputs[name]
    x[8] -= (x[8] @ weight[0] - 1e-3) / weight[0].square().sum() * weight[0]

    def mlp(x, w_gate, w_up, w_down, rounded, **_):
        def product(weight: Tensor) -> Tensor:
            parts = [rounded(x[:, i, None]) * rounded(weight[:, i]) for i in range(x.shape[1])]
            return sum(parts[1:], parts[0])  # one after the other, each sum rounded to fp32

        return ((F.silu(product(w_gate).double()) * product(w_up).double()) @ w_down.double().mT).float()

    expectation = expect(spec, inputs, "cpu")
    lucky = replace(expectation, by_pytorch=expectation.exact.float())
    honest, coarse = mlp(**inputs, rounded=lambda x: x), mlp(**inputs, rounded=lambda x: x.half().float())
    assert "in row 8" in wrong(honest, replace(lucky, perturbation=None)), "PyTorch's luck alone would have it refused"
    assert wrong(honest, lucky, repeats=True) is None
    assert wrong(coarse, lucky, repeats=True)


def test_attention_whose_scores_are_long_sums_may_round_them_in_fp32_and_no_coarser():
    """Scores of 100 of which several count: PyTorch, which sums their products in its own order, has them right by luck."""
    spec = load_spec("flash_attention")
    inputs = fill_inputs(spec, spec.case({"batch": 1, "heads": 4, "seq": 96, "head_dim": 64}, torch.float32), 0)
    inputs |= {"Q": 3.5 + 0.03 * inputs["Q"], "K": 3.5 + 0.03 * inputs["K"]}

    def attention(Q, K, V, split, **_):
        parts = [split(Q[..., i, None]) @ split(K[..., i, None]).mT for i in range(Q.shape[3])]
        scores = sum(parts[1:], parts[0]) / 8  # one product after the other, each sum rounded to fp32
        return (torch.softmax(scores.masked_fill(future, -torch.inf).double(), -1) @ V.double()).float()

    future = torch.ones(96, 96, dtype=torch.bool).triu(1)
    expectation = expect(spec, inputs, "cpu")
    lucky = replace(expectation, by_pytorch=expectation.exact.float())
    honest, coarse = attention(**inputs, split=Tensor.float), attention(**inputs, split=lambda x: x.half().float())
    assert "times PyTorch's own" in wrong(honest, replace(lucky, perturbation=None)), "its luck alone would refuse it"
    assert wrong(honest, lucky) is None
    assert wrong(coarse, lucky)


def test_attention_may_round_scores_in_fp32_beside_what_a_float_mask_adds_to_all_of_them_and_no_coarser():
    """A mask of -65504 on all keys of a query: of their scores fp32 keeps a few bits, which PyTorch has right by luck."""
    spec = load_spec("flash_attention")
    inputs = fill_inputs(spec, spec.case({"batch": 1, "heads": 4, "seq": 96, "head_dim": 64}, torch.float16), 0)
    inputs |= {"causal": False, "attn_mask": torch.full((96, 96), -65504.0, dtype=torch.float16)}

    def attention(Q, K, V, attn_mask, rounded, **_):
        powers = rounded(Q.double() @ K.double().mT / 8 * math.log2(math.e))
        powers = rounded(powers.double() + rounded(attn_mask.double() * math.log2(math.e)).double())
        return (torch.softmax(powers.double() * math.log(2), -1) @ V.double()).half()

    expectation = expect(spec, inputs, "cpu")
    lucky = replace(expectation, by_pytorch=expectation.exact.half())
    honest = attention(**inputs, rounded=Tensor.float)
    coarse = attention(**inputs, rounded=lambda x: (x / 256).bfloat16().float() * 256)
    assert wrong(honest, replace(lucky, perturbation=None)), "its luck alone would refuse it"
    assert wrong(honest, lucky) is None
    assert wrong(coarse, lucky)
    doubles = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    lowest = doubles | {"attn_mask": torch.full((96, 96), torch.finfo(torch.float32).min, dtype=torch.float64)}
    equal = doubles | {"attn_mask": None, "Q": 0 * doubles["Q"]}  # all scores: nothing is left of others beside the lowest
    torch.testing.assert_close(spec.roundings(2**-10, **lowest), spec.roundings(2**-10, **equal), rtol=1e-3, atol=0)


def test_a_gated_mlp_may_round_its_hidden_layer_where_two_large_weights_leave_little_and_pytorch_is_lucky_in_a_row():
    """In each of 2,048 rows three results are made of next to nothing else; in some of them PyTorch has all three right."""
    spec = load_spec("fused_mlp")
    case = spec.case({"M": 2048, "dim": 320, "hidden": 512}, torch.bfloat16)
    planted = ("w_gate", 1e4), ("w_down", -1e4)
    inputs = CheckCase("numerical_stability", case, 0, planted=planted).inputs(spec)
    expectation = expect(spec, inputs, "cpu")
    x, w_gate, w_up, w_down = (inputs[name] for name in ("x", "w_gate", "w_up", "w_down"))

    def kernel(scale: float) -> Tensor:
        """The products' results are rounded, as PyTorch's are, and what is made of them once."""
        gate, up = (x @ w_gate.t()).float(), (x @ w_up.t()).float()
        return (gate / (1 + torch.exp(-gate)) * up * scale).bfloat16() @ w_down.t()

    assert wrong(kernel(1.0), expectation, adversarial=True) is None
    assert wrong(kernel(1.0), replace(expectation, perturbation=None), adversarial=True), "by PyTorch's luck"
    assert "outside the tolerance" in wrong(kernel(1.03), expectation, adversarial=True)


def test_what_terms_amount_to_is_asked_for_where_results_alone_do_not_tell():
    """The magnitude of a region takes longer than its results; it only ever allows more."""
    asked = []

    def grown() -> tuple[Tensor, Tensor]:
        asked.append(True)
        return torch.ones_like(exact), torch.ones(())

    exact = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    expectation = Expectation(exact, exact.float(), exact, torch.full((), 1e-3, dtype=torch.float64), grown=grown)
    assert wrong(exact.float(), expectation) is None and not asked
    assert wrong(exact.float() + 2e-6, expectation) is None and asked, "of terms near 1 that is 17 roundings"
    assert "times PyTorch's own" in wrong(exact.float() + 1e-5, expectation)
    assert wrong(exact.float()[2:5] + 2e-6, expectation.rows(2, 3)) is None
    times = len(asked)
    halves = replace(expectation, by_pytorch=exact.bfloat16())
    assert wrong(exact.bfloat16(), halves) is None and len(asked) == times
    assert wrong((exact + 5e-5).bfloat16(), halves) is None and len(asked) > times


RANGES = {torch.float16: 6e4, torch.bfloat16: 1e38, torch.float32: 1e38}
SHAPES = (40, 256), (3, 17), (1,), (), (1500, 70), (7, 5), (300, 3), (2, 3, 40, 64), (48, 2048)


def drawn(seed: int) -> tuple[Tensor, Expectation, bool]:
    """A result, what it should be and whether inputs are ill-conditioned: of any size, dtype, error and exception."""
    generator, random = torch.Generator().manual_seed(seed), Random(seed)
    dtype, shape = random.choice(list(RANGES)), random.choice(SHAPES)

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def one_in(count: float) -> Tensor:
        return torch.rand(shape, generator=generator) < 1 / count

    exact = noise() * (1.0, torch.finfo(dtype).tiny * 10, RANGES[dtype] / 3, 10 ** (2 * noise()))[seed % 4]
    exact = exact.clamp(-RANGES[dtype] * 1.2, RANGES[dtype] * 1.2)
    if random.random() < 0.2:
        exact = exact.masked_fill(one_in(50), random.choice([math.nan, math.inf, -math.inf]))
    size = exact.abs()

    largest = size.nan_to_num(0, 0, 0).amax(-1, keepdim=True) if shape else size
    middle = (size > 0.3 * size.nan_to_num(0, 0, 0).mean()) & (size < size.nan_to_num(0, 0, 0).mean())

    def near(level: float) -> Tensor:
        kind = random.choice([noise(), noise().abs(), torch.ones(shape), 5 * noise() * one_in(50), middle.double()])
        error = level * torch.finfo(dtype).eps * kind * random.choice([size, size, exact, largest])
        return torch.where(size.isfinite(), exact + error, exact).to(dtype)

    y, native = near(10 ** random.uniform(-1, 2 if dtype == torch.float32 else 0.5)), near(10 ** random.uniform(-4, 0))
    if random.random() < 0.4:
        native = native.masked_fill(random.choice([one_in(2), one_in(1000), size > 0.5 * largest]), math.inf)
    terms, scale, grown = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64), None
    if shape and random.random() < 0.4:
        terms = size.nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        scale = (8 * terms).clamp(max=1)
    elif random.random() < 0.4:
        larger = size.clamp(min=10 ** random.uniform(-3, 1))
        grown = partial(tuple, (larger, scale))
    some = torch.zeros((), dtype=torch.bool)
    picked, untold = (one_in(3) if random.random() < 0.1 else some for _ in range(2))
    is_steady = bool(native.isfinite()[exact.to(dtype).isfinite()].all())
    others = {"grown": grown, "is_steady": lambda: is_steady, "relative": random.random() < 0.3}
    expectation = Expectation(exact, native, size, scale, terms=terms, picked=picked, untold=untold, **others)
    return y, expectation, random.random() < 0.3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("part", range(4))
def test_what_is_right_part_by_part_is_right_as_a_whole(part: int, monkeypatch: pytest.MonkeyPatch):
    """A result is first compared in parts, by what each of them alone allows, and at first without PyTorch's own: that must
    never pass what the comparison of the whole refuses."""
    monkeypatch.setitem(expectations.AT_ONCE, "cpu", 1 << 12)
    passed = refused = 0
    for seed in range(150 * part, 150 * (part + 1)):
        y, expectation, adversarial = drawn(seed)
        whole = correctness._wrong(y, expectation.with_grown() if expectation.grown else expectation, adversarial)
        right = correctness._right_in_parts(y, expectation, adversarial)
        assert not (right and whole), (seed, whole)
        passed, refused = passed + right, refused + bool(whole)
    assert passed > 25 and refused > 25, "neither is rare among them"


@pytest.mark.parametrize(("y", "is_right"), [(-0.0435638, True), (-0.0436, True), (-0.0437, False)])
def test_a_sum_of_many_numbers_is_as_exact_as_fp32_allows(y: float, is_right: bool):
    """PyTorch's own of 100,000 numbers was -0.0435638, 1.05e-4 off, where little was left of them."""
    exact, terms = (torch.tensor(v, dtype=torch.float64) for v in (-0.0434583, 316.0))
    expected = Expectation(exact, torch.tensor(-0.0435638), exact.abs(), torch.ones_like(exact), terms=terms)
    assert (wrong(torch.tensor(y), expected) is None) == is_right


def test_a_row_that_has_a_loss_has_a_rival():
    """Another class than its own: without one the loss is 1e-14, and nothing is exact enough for it."""
    spec = load_spec("cross_entropy")
    for seed in range(300):
        (step,) = CheckCase("", spec.case({"M": 8, "V": 7}, torch.float32), seed, decisive="few_rows").steps(spec)
        assert spec.eager(**step.sets[0]) > 0.1


def test_two_values_of_a_kind_share_a_row():
    spec = load_spec("rotary_embedding")
    case = spec.case(spec.sweep[0], torch.float32)
    inputs, every = fill_inputs(spec, case, 0), planted_in(spec, case)
    for seed in range(50):
        changed = with_planted(spec, inputs, [("cos", math.nan)], every, seed)["cos"]
        assert sorted(count.item() for count in changed.isnan().sum(-1).flatten() if count)[-1] >= 2


def test_a_finite_number_in_the_place_of_an_infinity_is_no_rounding():
    exact = torch.full((4, 32), math.inf, dtype=torch.float64)
    expectation = Expectation(exact, exact.float(), exact, torch.ones((), dtype=torch.float64))
    assert wrong(exact.float(), expectation) is None
    assert "inf mask differs" in wrong(torch.full((4, 32), 3e38), expectation)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", [name for name in kernel_types() if load_spec(name).finite_below])
def test_pytorchs_form_is_finite_where_it_is_said_to_be(name: str):
    """So that it need not be asked for: of the largest numbers of either sign, all alike and by chance."""
    spec = load_spec(name)
    for dims, dtype in product((spec.smoke, *spec.sweep, *spec.edges), spec.dtypes):
        case, is_wide = spec.case(dims, dtype), dtype in expectations.WIDE
        for fill in (torch.ones_like, lambda x: torch.randn_like(x).sign()):
            inputs = fill_inputs(spec, case, 0)
            free = {k: x for k, x in inputs.items() if isinstance(x, Tensor) and k not in spec.fill}
            inputs |= {k: fill(x) * spec.finite_below * (1 - 2**-7) for k, x in free.items() if is_wide}
            expectation = expect(spec, inputs, "cpu")
            assert expectation.known_dtype == expectation.native.dtype == dtype
            assert expectation.is_steady() == is_wide or any(k in spec.fill for k in case.tensors)
            exact = expectation.exact.to(dtype)
            assert not is_wide or (expectation.native.isfinite() | ~exact.isfinite()).all(), case.name


def test_what_pytorch_makes_in_sixteen_bits_is_made_on_as_many_threads_as_a_kernels_process_has():
    """Two threads' sums are rounded to 16 bit before they are added: on one thread PyTorch's error is less."""
    spec, before, natives = load_spec("reduce"), torch.get_num_threads(), []
    inputs = fill_inputs(spec, spec.case({"shape": (100000,)}, torch.float16), 0)
    inputs["x"] = torch.cat((torch.full((50000,), 0.0101), torch.full((50000,), -0.0099))).half()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        natives.append(expect(spec, inputs, "cpu").native)
        with one_thread():
            assert torch.equal(expect(spec, inputs, "cpu").native, natives[-1])
    torch.set_num_threads(before)
    assert not torch.equal(*natives), "for what the above says something"


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_where_few_sums_cancel_pytorch_s_luck_is_no_bound(shape: tuple[int, ...]):
    """113 numbers whose norm is 6 add up to 0.04: one rounding of a partial sum of 4 is 5e-7."""
    exact, norm = torch.full(shape, 0.0411563, dtype=torch.float64), torch.full(shape, 6.1, dtype=torch.float64)
    expectation = Expectation(exact, exact.float(), terms=norm)
    assert wrong((exact + 4.8e-7).float(), expectation) is None
    assert "times PyTorch's own" in wrong((exact + 1e-5).float(), expectation)
    assert "times PyTorch's own" in wrong((exact + 4.8e-7).float(), replace(expectation, terms=torch.zeros(())))
