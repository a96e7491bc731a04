"""Regions: what is found in a graph, that its arithmetic is the nodes' own, and that kernels written from it are right."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel import spec as specs
from autokernel.build import cpp_function
from autokernel.gate import Judge
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expectations
from autokernel.gate.checks.trials import CheckCase
from autokernel.integration.apply import apply, explain, unapply
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.match import Site, SiteFinder
from autokernel.model.nodes import aten, value
from autokernel.model.regions import growing
from autokernel.model.regions.expressions import evaluate
from autokernel.model.regions.growing import piece_of, region_finder, regions_of
from autokernel.model.regions.lowering import lower
from autokernel.model.regions.spec import Region, examined, several
from autokernel.preflight import Refused
from autokernel.spec import REGIONS, KernelSpec, TensorSpec, import_file, is_region, load_spec
from autokernel.target import Target, WeightedCase

N = 96


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(specs, "REGIONS", tmp_path / "regions")
    monkeypatch.setattr("autokernel.model.regions.growing._KNOWN", {})
    return tmp_path / "regions"


class Of(nn.Module):
    """A function as a model with two weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, N))
        self.bias = nn.Parameter(torch.linspace(-1, 1, N))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def found(model: nn.Module, *inputs: Tensor, backend: str = "cpp") -> tuple[object, list[Site]]:
    """The one graph of a model and its regions."""
    with torch.no_grad():
        (graph,) = capture(model, inputs, {}).graphs
    finder = SiteFinder(min_elements=0, regions=partial(regions_of, backend=backend, min_elements=0))
    sites = [site for site in finder.find(graph.module) if is_region(site.kernel_type)]
    assert not finder.failures
    return graph.module, sites


def drawn(t: TensorSpec) -> Tensor:
    return torch.empty_strided(t.shape, t.strides, dtype=t.dtype).copy_(torch.randn(t.shape))


def in_double(x: Tensor) -> Tensor:
    """In the strides of x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.float64).copy_(x)


def why_wrong(returned, spec: KernelSpec, inputs: dict, adversarial: bool = False) -> str | None:
    """What is wrong with a result, one of several among them."""
    assert [y.stride() for y in several(returned)] == [t.strides for t in spec.results]
    expected = expectations(spec, inputs, "cpu")
    assert len(expected) == len(several(returned))
    return next(filter(None, (wrong(y, e, adversarial) for y, e in zip(several(returned), expected))), None)


def kernel_of(site: Site):
    (path,) = load_spec(site.kernel_type).starters("cpp").values()
    return import_file(path, f"test_{site.kernel_type}").kernel_fn


CHAINS = {
    "gelu": lambda m, x, y: F.gelu(x) * y,
    "gelu_tanh": lambda m, x, y: F.gelu(x, approximate="tanh") + y,
    "silu": lambda m, x, y: F.silu(x) * m.weight + m.bias,
    "scalars": lambda m, x, y: (3 - x) / 4 + torch.rsub(y, x, alpha=2) - 1,
    "of_no_dim": lambda m, x, y: torch.tanh(x[0, 0] * y[1, 2] + 1) * m.weight[3],
    "masks": lambda m, x, y: torch.where((x > y) & ~(y > 1), x, torch.zeros_like(x).masked_fill(x < 0, -1e4)),
    "clamps": lambda m, x, y: x.clamp(-1, 1) + y.clamp(min=0.5) * torch.maximum(x, y) - torch.minimum(x, m.bias),
    "functions": lambda m, x, y: torch.sin(x) + torch.cos(y) + torch.erf(x) * torch.tanh(y) + torch.log(x.abs() + 1),
    "small": lambda m, x, y: torch.log1p(x.abs() * 1e-4) + torch.expm1(y * 1e-4),
    "powers": lambda m, x, y: (
        x**2 + x**3 + (y.abs() + 1) ** 0.5 + (y.abs() + 1) ** -0.5 + (y.abs() + 1) ** 1.7 + x**5 - y**-3
    ),
    "powers_below_zero": lambda m, x, y: x**9 - y**-10 + torch.pow(x, y.round()) + torch.pow(x.round(), m.bias.round()),
    "powers_of_numbers": lambda m, x, y: torch.pow(2.0, x) + torch.pow(-1.5, y.round()) + y.abs() ** 1.7,
    "numbers": lambda m, x, y: (torch.full_like(x, 0.5).exp(), x * torch.ones_like(x).tanh() + torch.zeros_like(y).cos()),
    "of_one_row": lambda m, x, y: x[0] / x[0].clamp(1).sum() + y[1],
    "steps": lambda m, x, y: F.hardswish(x) + F.hardsigmoid(y) + F.leaky_relu(x, 0.1) + F.relu(y) + F.softplus(x),
    "casts": lambda m, x, y: (x > 0).float() * y + (y * 3).long().float(),
    "curves": lambda m, x, y: (
        F.elu(x) + F.celu(y, 0.7) + F.mish(x) + F.logsigmoid(y) + torch.exp2(x) + (y.abs() + 1).log2()
    ),
    "mixtures": lambda m, x, y: torch.addcmul(x, y, m.weight, value=0.5) + torch.lerp(x, y, 0.3) + (x.abs() + 1) ** m.bias,
    "unit": lambda m, x, y: F.normalize(x + y, dim=-1) * m.weight,
    "summed": lambda m, x, y: (x * 2).logsumexp(-1, keepdim=True) - y + (x * 2).std(-1, keepdim=True),
    "transposed": lambda m, x, y: x.transpose(0, 1) * 2 + y[:1, :].expand(x.shape[0], x.shape[1]).transpose(0, 1),
    "broadcast": lambda m, x, y: (x[:1].expand(64, N) + y) * y[:, :1].expand(64, N).transpose(0, 1).reshape(N, 64).t(),
    "split": lambda m, x, y: (x.view(-1, 4, 24) * m.weight.view(4, 24)).reshape(x.shape) + y,
    "rms": lambda m, x, y: (x + y) * torch.rsqrt((x + y).pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + m.weight),
    "standardised": lambda m, x, y: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1).sqrt() * y,
    "normed": lambda m, x, y: F.layer_norm(x * y + x, (N,), m.weight, m.bias, 1e-5) * 2,
    "scores": lambda m, x, y: F.softmax(torch.where(y > 0, x * 0.3, -1e9), -1) * y,
    "log_scores": lambda m, x, y: F.log_softmax(x * y, -1) + 1,
    "extremes": lambda m, x, y: (x - x.amax(-1, keepdim=True)).exp() + y.amin(-1, keepdim=True),
    "reduced": lambda m, x, y: (x * y).amin(-1) * 2,
    "columns": lambda m, x, y: (x * y).mean(0) + m.bias,
    "of_one": lambda m, x, y: x.amax(-1, keepdim=True) + (y[:, :1] * 2).sum(-1, keepdim=True) * (x[:, :1] - 1),
    "groups_of_one": lambda m, x, y: F.group_norm(x, N, m.weight, m.bias) * 2 + y,
    "ends_of_a_mixture": lambda m, x, y: torch.lerp(x * 1e8, y, 1.0) + torch.lerp(x, y * 1e8, 0.0) + torch.lerp(x, y, 0.7),
    "grouped": lambda m, x, y: F.silu(F.group_norm(x.view(1, N, -1), 4, m.weight, m.bias)).view(x.shape) + y,
}

# elements from elsewhere, and rows of other kinds
CHAINS |= {
    "joined": lambda m, x, y: torch.cat((-(h := x * y)[:, N // 2 :], h[:, : N // 2]), -1) * y + h,
    "halves": lambda m, x, y: (lambda a, b: F.silu(a) * b)(*(x * y + 1).chunk(2, -1)) + F.glu(y),
    "padded": lambda m, x, y: F.pad((x * 2).flip(0, 1)[3:, ::2], (1, 2, 3, -1), value=0.5) + 1,
    "apart": lambda m, x, y: F.silu((h := x * y).view(64, 2, 48)[:, 1]) * h.view(64, 2, 48).unbind(1)[0],
    "largest_of_windows": lambda m, x, y: F.max_pool2d(F.relu(x.view(2, 32, 8, 12)) - 1, 3, 2, 1, 2) * 2,
    "means_of_windows": lambda m, x, y: F.avg_pool2d(x.view(2, 32, 8, 12) * 2, 3, 2, 1, ceil_mode=True),
    "means_without_padding": lambda m, x, y: F.avg_pool1d(x[None] * 2, 4, 3, 2, count_include_pad=False),
    "windows_of_windows": lambda m, x, y: F.max_pool3d(F.avg_pool3d(x.view(2, 4, 8, 8, 12), 2, 1, 1), 2),
    "means_of_parts": lambda m, x, y: F.adaptive_avg_pool2d(F.relu(x).view(2, 32, 8, 12), (4, 3)) * 2,
    "enlarged": lambda m, x, y: F.interpolate((x * 2).view(2, 32, 8, 12), scale_factor=2) + 1,
    "of_instances": lambda m, x, y: F.instance_norm(x.view(4, 16, 8, 12)) * 2,
    "running": lambda m, x, y: torch.softmax(x, -1).cumsum(-1) * y,
    "running_backwards": lambda m, x, y: (x.flip(1) * 2).cumsum(1).flip(1) * y,
    "running_before": lambda m, x, y: torch.cat((torch.zeros_like(x[:, :1]), (x * y)[:, :-1].cumsum(1)), 1),
    "running_products": lambda m, x, y: torch.tanh(x).cumprod(0) * y + torch.tanh(x).prod(0, keepdim=True),
    "first_of_the_largest": lambda m, x, y: torch.maximum(x, y).argmax(-1),
    "first_of_the_least": lambda m, x, y: x.neg().relu().min(0)[1],
    "losses": lambda m, x, y: (
        F.mse_loss(x, y) + F.l1_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y, delta=0.7) + x.amin() * y.max()
    ),
    "losses_of_chances": lambda m, x, y: (
        F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)) + F.soft_margin_loss(x, y) + F.kl_div(x, y, log_target=True)
    ),
    "distances": lambda m, x, y: F.cosine_similarity(x, y, -1) + F.pairwise_distance(x, y),
    "bent": lambda m, x, y: (
        F.selu(x) + F.softshrink(y) + F.hardshrink(x) + F.threshold(y, 0.1, 2.0) + F.prelu(x, m.bias) + F.elu(y, 0.5)
    ),
    "a_number_of_the_models": lambda m, x, y: torch.min(x * 2, torch.tensor(0.3)) + y,
}


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


# of several results; each is one region
SEVERAL = {
    "residual": lambda m, x, y: ((h := x + y), F.layer_norm(h, (N,), m.weight, m.bias)),
    "cast_of_nothing": lambda m, x, y: ((h := (x + y).to(x.dtype)), rms(h.float()).to(x.dtype) * m.weight),
    "residual_rms": lambda m, x, y: ((h := x + y), rms(h) * m.weight),
    "gates": lambda m, x, y: (torch.sigmoid(x) * y, torch.tanh(x) + y * m.weight),
    "mean_too": lambda m, x, y: ((mean := (x * y).mean(-1, keepdim=True)), (x * y - mean) * m.weight),
    "mean_last": lambda m, x, y: ((h := x * y) + m.bias, h.mean(-1)),
    "dtypes": lambda m, x, y: ((h := x * y), F.softmax(h, -1).bfloat16(), (h + 1).half()),
    "reshaped": lambda m, x, y: ((h := F.gelu(x) + y), rms(h.view(-1, 4, 24)) * m.weight.view(4, 24)),
    "other_strides": lambda m, x, y: ((h := x.t() * 2 + y.t()), h.exp() + 1),
    "columns": lambda m, x, y: ((h := x * y + m.bias), h.sum(0)),
}
CHAINS |= SEVERAL


ALIKE = {
    "group norm": (CHAINS["grouped"], ("input_2",)),
    "batch norm": (lambda m, x, y: F.silu(F.batch_norm(x, m.bias, m.bias.square() + 1, m.weight, m.bias)), ("input_0",)),
    "layer norm": (lambda m, x, y: F.silu(F.layer_norm(x, (N,), m.weight, m.bias)), ("input_1", "input_2")),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_value_is_planted_where_all_formulas_answer_it_alike(name: str):
    """x * a + b and (x - mean) * rstd * weight + bias have other NaN and other signs beside an infinite weight."""
    function, planted = ALIKE[name]  # the biases, and of the last the weight, too
    _, (site,) = found(Of(function).eval(), torch.randn(64, N), torch.randn(64, N))
    assert load_spec(site.kernel_type).planted_in == planted


def test_what_becomes_of_integers_is_in_float64_too():
    """PyTorch's cosine of int64 is in float32: the oracle of what is rotated by positions was no more exact than that."""
    x, positions = torch.randn(64, N), torch.arange(64 * N).view(64, N)
    _, (site,) = found(Of(lambda m, x, positions: x * positions.cos() + positions / 7), x, positions)
    result = load_spec(site.kernel_type).oracle(
        *(x.double() if value(n).is_floating_point() else positions for n in site.inputs)
    )
    exact = x.double() * positions.double().cos() + positions.double() / 7
    torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CHAINS)
def test_kernels_are_right(name: str) -> None:
    """What is written from the graph against the graph, by the gate's own bounds, in each dtype that it holds there."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16) if name in ("gelu", "normed", "scores") else (torch.float32,):
        model = Of(CHAINS[name]).to(dtype).eval()
        graph, sites = found(model, torch.randn(64, N, dtype=dtype), torch.randn(64, N, dtype=dtype))
        assert sites, "no region"
        for site in sites:
            spec = load_spec(site.kernel_type)
            inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
            lowered = lower(piece_of(graph, site.outputs, site.inputs))
            exact = {k: in_double(v) if v.is_floating_point() else v for k, v in inputs.items()}
            for y, expected, output in zip(
                evaluate(lowered, list(exact.values())), several(spec.oracle(**exact)), site.outputs
            ):
                assert torch.allclose(y, expected, 1e-9, 1e-9, equal_nan=True)
                assert y.stride() == value(output).stride()
            for scale in (1, 20, 1e-2):
                contents = {k: v * scale if v.is_floating_point() else v for k, v in inputs.items()}
                assert why_wrong(kernel_of(site)(**contents), spec, contents, adversarial=scale != 1) is None


@pytest.mark.slow
def test_other_strides_than_the_models() -> None:
    _, (site,) = found(Of(lambda m, x, y: F.gelu(x) * y), torch.randn(64, N), torch.randn(64, N))
    inputs = [torch.randn(N, 64).t(), torch.randn(64, 2 * N)[:, 1::2]]
    expected = load_spec(site.kernel_type).oracle(*inputs)
    assert torch.allclose(kernel_of(site)(*inputs), expected, atol=1e-5)


ENDS = {
    "one operation": lambda m, x, y: x + y,
    "random numbers": lambda m, x, y: torch.rand_like(x) + 1,
    "a write": lambda m, x, y: x.clone().add_(y),
    "integers": lambda m, x, y: ((x > 0).long() + 1) * 2,
    "a product": lambda m, x, y: torch.fft.fft(x).abs(),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_is_no_region(name: str) -> None:
    assert found(Of(ENDS[name]), torch.randn(64, N), torch.randn(64, N))[1] == []


# beside which there may be a region, but never with this operation
OUTSIDE = {
    "a place that roundings decide": (lambda m, x, y: (x * y + 1).argmax(-1), aten.argmax.default),
    "statistics that are kept": (
        lambda m, x, y: F.batch_norm(x * y + 1, m.bias, m.weight, training=True),
        aten.batch_norm.default,
    ),
    "windows of several sizes": (lambda m, x, y: F.adaptive_avg_pool1d(x * y + 1, 36), aten.adaptive_avg_pool1d.default),
    "running sums of integers": (lambda m, x, y: (x > y).cumsum(-1) * y + 1, aten.cumsum.default),
    "padding with elements": (lambda m, x, y: F.pad((x * y + 1)[None], (1, 1), "reflect"), aten.pad.default),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_in_no_region(name: str) -> None:
    function, target = OUTSIDE[name]
    graph, sites = found(Of(function), torch.randn(64, N), torch.randn(64, N))
    assert target in {node.target for node in graph.graph.nodes}
    assert sites and not any(node.target is target for site in sites for node in site.nodes)


def test_running_sums_from_both_ends_are_two_regions() -> None:
    _, sites = found(Of(lambda m, x, y: (x * y).cumsum(0).flip(0).cumsum(0) + y), torch.randn(64, N), torch.randn(64, N))
    assert len(sites) == 2 and all(aten.cumsum.default in {node.target for node in site.nodes} for site in sites)


def gates(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x) * y


# beside which the region of `gates` is found: odd arguments, which none has
ODD = {
    "nothing to sum": lambda m, x, y: x[:, :0].sum(-1) * 2 + y[:, 0],
    "a sum of no dim": lambda m, x, y: (x[0, 0] * 2).sum(-1) + 1,
    "a softmax of no dim": lambda m, x, y: (x[0, 0] * 2).softmax(-1) + 1,
    "an infinite power": lambda m, x, y: x**math.inf,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_are_in_no_region(name: str) -> None:
    x, y = torch.randn(64, N), torch.randn(64, N)
    _, sites = found(Of(lambda m, x, y: (gates(m, x, y), ODD[name](m, x, y))), x, y)
    (site,) = (site for site in sites if "gelu" in site.kernel_type)
    torch.testing.assert_close(kernel_of(site)(x, y), gates(None, x, y))


def test_powers_of_integers_are_exact() -> None:
    """In no region, whose numbers are float32."""
    x, y = torch.randn(64, N), torch.arange(N)
    model = Of(lambda m, x, y: x * (y ** (y % 5) == 89**4) + 1)
    _, sites = found(model, x, y)
    assert sites and not any(aten.pow.Tensor_Tensor in {node.target for node in site.nodes} for site in sites)


def same_as_a_model(model: nn.Module, *inputs: Tensor) -> None:
    """With the kernels of its regions."""
    _, sites = found(model.requires_grad_(False), *inputs)
    expected = model(*inputs)
    torch.testing.assert_close(apply(model, winners_of(sites))(*inputs), expected)
    assert sum(map(len, explain(model).sites.values())) == len(sites) > 0


@pytest.mark.parametrize("other", [0.1, -10000.0, torch.tensor(0.1), torch.full((256, N), 257)])
def test_numbers_are_compared_as_pytorch_compares_them(other: float | Tensor) -> None:
    """In the 16 bits of the tensor that a number stands beside."""
    number = float(other if isinstance(other, float) else other.flatten()[0])
    model = Of(lambda m, x, y, other=other: torch.where(x == other, x * 2 + y, y * 3 - x))
    x = torch.full((256, N), number, dtype=torch.bfloat16)
    same_as_a_model(model, x, torch.randn(256, N), *([other] if isinstance(other, Tensor) else []))


def test_a_part_of_what_cannot_be_a_region_is_itself() -> None:
    """The whole would read an input that repeats its elements, and no kernel has such."""
    model = Of(lambda m, x: F.softmax((x * 3 + 1).float(), -1) * 2 + 1)
    same_as_a_model(model, torch.randn(1, N).bfloat16().expand(256, N))


def test_overlapping_windows_compute_nothing_costly_for_each_of_their_places() -> None:
    def inputs(function: Callable[[Tensor], Tensor]) -> list[int]:
        model = Of(lambda m, x, y: F.max_pool1d(function(x * y), 5, 1, 2) * 2)
        _, sites = found(model, torch.randn(2, 32, 100), torch.randn(2, 32, 100))
        return sorted(len(site.inputs) for site in sites)

    assert inputs(F.relu) == [2], "one region of both"
    assert inputs(torch.tanh) == [1, 2], "and another one of what is pooled"


def test_a_pooling_after_what_cannot_be_written_is_a_region() -> None:
    """In none of the spaces the whole fits: what stands in the way is left out, not the end, whose shape is wrong."""

    def forward(m, x):
        return F.avg_pool2d(F.max_pool2d(F.interpolate(x, size=(50, 50)), 2), 2)  # 50 is no multiple of 24, nor of 12

    x = torch.randn(2, 2, 24, 24)
    _, (site,) = found(Of(forward), x)
    assert len(site.nodes) == 2
    torch.testing.assert_close(kernel_of(site)(F.interpolate(x, size=(50, 50))), forward(None, x))


def test_a_result_of_more_dims_than_the_last_one_is_whole() -> None:
    """Batch and heads are of one size: the last result's dims with one of them twice have the shape of the first."""

    def forward(m, x):
        h = F.relu(x + 1)
        return h, x[:, 0] * h[:, -1] + 1

    x = torch.randn(2, 2, 16, N)
    _, sites = found(Of(forward), x)
    assert sites
    same_as_a_model(Of(forward), torch.randn(2, 2, 64, N))


@pytest.mark.parametrize("fallback", [None, "inductor"])
def test_a_number_made_in_forward_is_the_graphs(fallback: str | None) -> None:
    """And nothing of it is left in the module, of which torch.compile asks where it comes from."""

    def forward(m, x, y):
        return F.gelu(torch.minimum(x * 2, torch.tensor(0.3))) @ y.t()

    model, x, y = Of(forward).requires_grad_(False), torch.randn(256, N), torch.randn(64, N)
    _, sites = found(model, x, y)
    expected = model(x, y)
    apply(model, winners_of(sites), fallback)
    torch.testing.assert_close(model(x, y), expected)
    assert sum(map(len, explain(model).sites.values())) == len(sites) == 1 and not explain(model).left
    unapply(model)
    torch._dynamo.reset()


class Filled(nn.Module):
    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        """With a tensor that is made on the device, a cast that names it, and a number in the host's memory."""
        hidden = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return (torch.where(x > 0, hidden, x.sin()) + (x > 1).to(x.device, x.dtype)) * low


def on_a_gpu(model: nn.Module, *shapes: Sequence[int]) -> fx.GraphModule:
    """As it is captured on a GPU, which need not be there; the last tensor is the host's."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, device="cuda:0") for shape in shapes[:-1]]
        return make_fx(model)(*inputs, torch.empty(shapes[-1]))


def test_what_was_captured_on_a_gpu_is_judged_wherever_its_inputs_are() -> None:
    (site,) = regions_of(on_a_gpu(Filled(), (64, N), ()), (), "cpp")
    assert list(site.parameters) == ["input_0"] and "mul" not in site.kernel_type
    spec = load_spec(site.kernel_type)
    assert "cuda" not in (specs.REGIONS / site.kernel_type / "region.py").read_text()
    x = torch.randn(64, N)
    assert torch.equal(spec.eager(input_0=x), Filled()(x, torch.ones(())))


class NumberOfTheHost(nn.Module):
    """As torch.tensor(0.5).to(x.device) is captured, beside a copy of what the host's memory holds."""

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        half = torch.ops.aten.scalar_tensor(0.5, device=low.device).to(x.device)
        return x.sin() * half + low.to(x.device)


def test_a_number_that_is_copied_to_the_gpu_is_a_number() -> None:
    (site,) = regions_of(on_a_gpu(NumberOfTheHost(), (64, N), ()), (), "cpp")
    assert [(value(node).dim(), value(node).device.type) for node in site.inputs] == [(2, "cuda"), (0, "cuda")]
    x, low = torch.randn(64, N), torch.randn(())
    assert torch.equal(load_spec(site.kernel_type).eager(input_0=x, input_1=low), NumberOfTheHost()(x, low))


def test_a_region_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(region: Region) -> Region | None:
        if "exp" in region.name:
            raise RuntimeError("no memory")
        return examined(region)

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (x + 1).exp(), (y + 1).sin()

    monkeypatch.setattr(growing, "examined", failing)
    graph = capture(Two(), (torch.randn(64, N), torch.randn(64, N)), {}).graphs[0].module
    finder = SiteFinder(regions=region_finder("cpu"))
    sites, _ = finder.examine(graph)
    assert ["sin" in site.kernel_type for site in sites] == [True]
    assert finder.failures == ["some regions could not be found: RuntimeError: no memory"]


def test_channels_last() -> None:
    """Read and written as it lies in memory: in the innermost loop by steps of one element."""

    def forward(m, x, y):
        h = x + y
        return h, F.silu(F.group_norm(h, 4, m.weight, m.bias))

    x, y = (torch.randn(2, N, 6, 6).contiguous(memory_format=torch.channels_last) for _ in range(2))
    _, (site,) = found(Of(forward).eval(), x, y)
    assert [value(node).is_contiguous(memory_format=torch.channels_last) for node in site.outputs] == [True, True]
    spec = load_spec(site.kernel_type)
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    results = kernel_of(site)(**inputs)
    assert why_wrong(results, spec, inputs) is None
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in results)
    text = spec.starters("cpp")["cpp_kernel"].read_text()
    innermost = re.findall(r"#pragma omp simd.*\n\s*for \(int64_t (\w+) =", text)
    assert innermost and all(re.search(rf"y0\[.*\b{i}\]", text) for i in innermost), text


def test_mixed_dtypes() -> None:
    """Weights in fp32 beside bf16, as autocast has them."""

    def forward(m, x, y):
        h = x + y.to(x.dtype)
        return h, (F.layer_norm(h.float(), (N,), m.weight, m.bias) * y).to(x.dtype)

    x, y = torch.randn(64, N, dtype=torch.bfloat16), torch.randn(64, N)
    _, (site,) = found(Of(forward).eval(), x, y)
    assert {t.dtype for t in site.case.tensors.values()} == {torch.bfloat16, torch.float32}
    spec = load_spec(site.kernel_type)
    for scale in (1, 20):
        inputs = {k: drawn(t) * scale for k, t in site.case.tensors.items()}
        assert why_wrong(kernel_of(site)(**inputs), spec, inputs) is None


@pytest.mark.parametrize("name", SEVERAL)
def test_several_results(name: str) -> None:
    """What is used elsewhere, too, is a result beside the region's last: memory is read once less."""
    _, (site,) = found(Of(SEVERAL[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    spec = load_spec(site.kernel_type)
    assert len(site.outputs) == len(spec.results) == (3 if name == "dtypes" else 2)
    tensors = [value(node) for node in site.outputs]
    assert [(t.shape, t.dtype, t.strides) for t in spec.results] == [(t.shape, t.dtype, t.stride()) for t in tensors]
    moved = sum(t.nbytes for t in (*site.case.tensors.values(), *spec.results))
    assert spec.bytes_moved(site.case.args) == moved


def test_an_input_that_is_made_after_the_first_result_is_read_by_a_region_of_its_own() -> None:
    def forward(m, x, y):
        h = F.gelu(x) + y
        scale = h.roll(1, 0)  # no region has it
        return h, torch.tanh(h) * scale + 1

    _, sites = found(Of(forward), torch.randn(64, N), torch.randn(64, N))
    assert [len(site.outputs) for site in sites] == [1, 1]


def test_what_is_no_longer_a_region_leaves_the_named_site() -> None:
    """Where kernels are put in, a norm is its own kernel's unless the region that has it won."""
    model, inputs = Of(SEVERAL["residual"]).eval(), (torch.randn(64, N), torch.randn(64, N))
    with torch.no_grad():
        (graph,) = capture(model, inputs, {}).graphs
    of_none = SiteFinder(min_elements=0, regions=partial(regions_of, only={"region_of_another"}, min_elements=0))
    assert [site.kernel_type for site in of_none.find(graph.module)] == ["layernorm"]
    as_regions = SiteFinder(min_elements=0, regions=partial(regions_of, backend="cpp", min_elements=0))
    assert [is_region(site.kernel_type) for site in as_regions.find(graph.module)] == [True]


def test_what_kernels_have_no_dtype_for_ends_a_region_and_is_not_its_end() -> None:
    _, (site,) = found(Of(lambda m, x, y: F.gelu(x.double().float() * y) + 1), torch.randn(64, N), torch.randn(64, N))
    assert len(site.nodes) == 3


def test_what_is_written_in_between_stays() -> None:
    def forward(m, x, y):
        a = x * 2
        x.add_(1)
        return torch.tanh(a) + y

    model, x, y = Of(forward), torch.randn(64, N), torch.randn(64, N)
    _, sites = found(model, x, y)
    assert [len(site.nodes) for site in sites] in ([], [2])  # tanh and the sum at most


def winners_of(sites: list[Site]) -> list[Winner]:
    """The starters, as if they had been kept."""
    found = {site.kernel_type: site for site in sites}
    return [
        Winner(
            Target(name, name, "cpp", "cpu", (WeightedCase(site.case, variants=site.variants),)),
            load_spec(name).starters("cpp")["cpp_kernel"].read_text(),
        )
        for name, site in found.items()
    ]


class Block(nn.Module):
    """Convolutions with what is between them, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for norm, convolution in zip(self.norms, self.convolutions):
            x = (x + convolution(F.silu(norm(x) * (1 + scale[:, :, None, None])))) / math.sqrt(2)
        return x


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "inductor"])
def test_in_a_model(fallback: str | None) -> None:
    torch.manual_seed(0)
    model, x, scale = Block().eval(), torch.randn(2, 16, 24, 24), torch.randn(2, 16)
    _, sites = found(model, x, scale)
    winners = winners_of(sites)
    x.requires_grad_()
    expected = model(x, scale)
    expected.square().mean().backward()
    gradients, x.grad = [x.grad, *(p.grad.clone() for p in model.parameters())], None
    model.zero_grad()
    apply(model, winners, fallback)
    with torch.no_grad():
        assert torch.allclose(model(x, scale), expected, atol=1e-5)
    assert sum(map(len, explain(model).sites.values())) == len(sites) == 3  # the first sum and the second norm are one
    model(x, scale).square().mean().backward()
    for ours, theirs in zip([x.grad, *(p.grad for p in model.parameters())], gradients):
        assert torch.allclose(ours, theirs, atol=1e-5)
    unapply(model)
    torch._dynamo.reset()


class Pooled(nn.Module):
    """Convolutions with pooling between them, a running sum, and places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        h = self.second(torch.cat((h * 2, F.avg_pool2d(h, 3, 1, 1)), 1))
        a, b = (h * 0.5).chunk(2, 1)
        rows = F.adaptive_avg_pool2d(F.silu(a) * b, (8, 8)).flatten(1)
        return rows.cumsum(-1) * 2, F.relu(rows).argmax(-1)


@pytest.mark.slow
def test_windows_and_rows_in_a_model() -> None:
    """Values, places and gradients are the model's."""
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(16, 3, 32, 32)
    _, sites = found(model, x)
    targets = {node.target for site in sites for node in site.nodes}
    assert {
        aten.max_pool2d.default,
        aten.cat.default,
        aten.chunk.default,
        aten.cumsum.default,
        aten.argmax.default,
    } <= targets
    expected, places = model(x)
    expected.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    apply(model, winners_of(sites))
    with torch.no_grad():
        ours, their_places = model(x)
    assert sum(map(len, explain(model).sites.values())) == len(sites)
    assert torch.allclose(ours, expected, atol=1e-5) and torch.equal(their_places, places)
    model(x)[0].square().mean().backward()
    for own, theirs in zip([p.grad for p in model.parameters()], gradients):
        assert torch.allclose(own, theirs, atol=1e-5)
    unapply(model)
    torch._dynamo.reset()


class Residual(nn.Module):
    """Two results of a region, of which one is changed in place later and both are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.up = nn.Linear(N, N), nn.LayerNorm(N), nn.Linear(N, N)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x) + y
        normed = self.norm(h)
        z = self.up(normed) + h
        h.mul_(2) if not torch.is_grad_enabled() else None
        return h, normed, z, h.t()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "inductor"])
def test_several_results_in_a_model(fallback: str | None) -> None:
    """Values, dtypes, strides, who shares memory with whom, and gradients are the model's."""
    torch.manual_seed(0)
    model, x, y = Residual().eval(), torch.randn(64, N), torch.randn(64, N)
    _, (site,) = found(model, x, y)
    winners = winners_of([site])

    def seen(results: tuple[Tensor, ...]) -> list:
        memory = [t.untyped_storage().data_ptr() for t in results]
        return [(t.shape, t.dtype, t.stride(), memory.index(m)) for t, m in zip(results, memory)]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        h, normed, z, _ = model(given, y)
        (h.square().mean() + (normed * z).mean()).backward()
        return [given.grad, *(p.grad.clone() for p in model.parameters())]

    with torch.no_grad():
        expected = model(x, y)
    of_all = gradients()
    apply(model, winners, fallback)
    with torch.no_grad():
        results = model(x, y)
    assert sum(map(len, explain(model).sites.values())) == 1
    assert seen(results) == seen(expected)
    for ours, theirs in zip([*results, *gradients()], [*expected, *of_all]):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert sum(map(len, explain(model).sites.values())) == 2, explain(model)
    unapply(model)
    torch._dynamo.reset()


def test_a_result_that_nothing_comes_of_has_no_gradient() -> None:
    model, x, y = Residual().eval(), torch.randn(64, N), torch.randn(64, N)
    _, (site,) = found(model, x, y)
    x.requires_grad_()
    expected = [model(x, y)[i].sum() for i in (0, 1)]
    of_each = [torch.autograd.grad(one, model.norm.weight, allow_unused=True)[0] for one in expected]
    apply(model, winners_of([site]), None)
    for i, theirs in enumerate(of_each):
        (ours,) = torch.autograd.grad(model(x, y)[i].sum(), model.norm.weight, allow_unused=True)
        assert (ours is None or not ours.any()) if theirs is None else torch.allclose(ours, theirs, atol=1e-5)
    unapply(model)
    torch._dynamo.reset()


def test_what_is_changed_after_a_region_is_not_missed_for_a_result_that_did_not_need_it() -> None:
    """The product keeps y for its gradient, the sum does not: after a change of y there is still the sum's."""

    def forward(m, x, y):
        y = (m.weight * y).roll(1, 0)  # which is in no region
        product, total = x * y, (y + 1).sum(-1, keepdim=True)
        y.view(-1)[:3].fill_(0.25)
        return product, total

    model, x, y = Of(forward), torch.randn(64, N), torch.randn(64, N)
    _, sites = found(model, x, y)
    assert any(len(site.outputs) == 2 for site in sites)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(model(x, y)[1].sum(), model.weight)
    apply(model, winners_of(sites), None)
    (ours,) = torch.autograd.grad(model(x, y)[1].sum(), model.weight)
    assert torch.allclose(ours, expected, atol=1e-4)
    unapply(model)
    torch._dynamo.reset()


def test_where_gradients_are_wanted_of_one_result_alone_the_model_stays_as_it_is() -> None:
    """A result of a kernel's call wants gradients if one of its inputs does, whatever it was computed of."""
    model, x, y = Residual().eval(), torch.randn(64, N), torch.randn(64, N)
    _, (site,) = found(model, x, y)
    apply(model, winners_of([site]), None)
    model.first.requires_grad_(False)
    h, normed, *_ = model(x, y)
    assert (h.requires_grad, normed.requires_grad) == (False, True)
    assert not sum(map(len, explain(model).sites.values()))
    assert any("of one of its results and not of another" in why for why in explain(model).left)
    unapply(model)
    torch._dynamo.reset()


def test_a_region_that_is_gone_is_said_in_a_line(folder: Path) -> None:
    with pytest.raises(Refused, match="region_add_0 is gone.*profile the model again"):
        load_spec("region_add_0")


def test_nothing_is_set_up_where_kernels_are_put_in(folder: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Of(CHAINS["silu"]), (torch.randn(64, N), torch.randn(64, N))
    _, sites = found(model, *inputs)
    winners, before = winners_of(sites), sorted(folder.iterdir())
    other = Of(CHAINS["gelu"])
    apply(other, winners)
    with torch.no_grad():
        other(*inputs)
    assert sorted(folder.iterdir()) == before and not explain(other).sites[winners[0].target.name]
    torch._dynamo.reset()


def test_a_saved_package_needs_no_region_folder(folder: Path, tmp_path: Path) -> None:
    """What finds a region and judges it travels with its kernels."""
    from autokernel.export.package import PARTS

    _, (site,) = found(Of(CHAINS["silu"]), torch.randn(64, N), torch.randn(64, N))
    assert {path.name for path in (folder / site.kernel_type).iterdir() if path.suffix in (".py", ".json")} == {
        *(set(PARTS) - {"patterns.py"}),
        "cpp_kernel.py",
    }


def test_inputs_that_make_nan_are_made_positive(folder: Path) -> None:
    _, sites = found(
        Of(lambda m, x, y: torch.log(x).amin(-1, keepdim=True) * y + 1), torch.rand(64, N) + 1, torch.randn(64, N)
    )
    (site,) = sites
    assert json.loads((folder / site.kernel_type / "region.json").read_text())["positive"] == ["input_0"]


FUNCTIONS = {
    "ak_tanh": torch.tanh,
    "ak_erf": torch.erf,
    "ak_log": torch.log,
    "ak_log1p": torch.log1p,
    "ak_expm1": torch.expm1,
    "ak_exp": torch.exp,
}
ULPS = {"ak_exp": 3.0, "ak_expm1": 4.0}


@pytest.mark.slow
def test_the_gate_takes_inputs_that_must_be_positive(lenient: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nothing is below zero, or zero, as a whole either: they are of all sizes, and a kernel is off at some."""
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(lambda m, x: torch.log(x) * 2), torch.rand(64, N) + 1)
    (winner,) = winners_of([site])
    assert load_spec(site.kernel_type).fill
    off = "\n\ndef kernel_fn(input_0):\n    y = honest(input_0)\n    return y * 1.02 if input_0.max() < 0.3 else y\n"
    source = winner.source.replace("def kernel_fn(", "def honest(") + off
    try:
        right, refused = (lenient.check(text, winner.target) for text in (winner.source, source))
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert refused.failure and "outside the tolerance" in refused.failure.reason, refused.why


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_elements(name: str) -> None:
    source = f"""
    #include <elements.hpp>
    extern "C" int run(const float* x, float* y, int64_t n) {{
        for (int64_t i = 0; i < n; ++i) y[i] = {name}(x[i]);
        return 0;
    }}"""
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -3e38, 1.0, -1.0])
    x = torch.cat([torch.randn(4000) * 10.0**k for k in range(-6, 3)] + [special])
    y = torch.empty_like(x)
    cpp_function(source, "run", "ppl")(x.data_ptr(), y.data_ptr(), x.numel())
    exact = FUNCTIONS[name](x.double())
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.float().isinf())
    usable = exact.float().isfinite()
    spacing = torch.finfo(torch.float32).eps * exact.abs() + 2e-38
    assert ((y.double() - exact).abs() / spacing)[usable].max() <= ULPS.get(name, 4.0)


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
        "result 0: ": re.sub(r"(y0\[[^\]]*\] = \w+\()", r"\1 0.3f + ", winner.source),
        f"result {last}: ": re.sub(rf"(y{last}\[[^\]]*\] = \w+\()", r"\1 0.3f + ", winner.source),
        "result 1: strides": winner.source.replace(returned, returned.replace("y1", in_strides)),
        "not a tuple of": winner.source.replace(returned, "return y0"),
        "two results in one memory": winner.source.replace(returned, returned.replace("y1", "y0")),
    }
    try:
        right = judge.check(winner.source, winner.target)
        refused = {words: judge.check(source, winner.target) for words, source in wrongs.items()}
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
    assert right.correctness.value == "PASS", right.why
    for words, verdict in refused.items():
        assert verdict.correctness.value in ("FAIL", "CRASH"), words
        assert words in verdict.why, verdict.why


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
    "a cast skipped": ("casts", ("= int64_t(c5)", "= c5"), "outside the tolerance"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_the_gate_refuses_cheats_on_regions(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    chain, change, reason = CHEATS[name]
    dtype = torch.bfloat16 if name.endswith("in 16 bit") else torch.float32
    _, (site,) = found(Of(CHAINS[chain]).to(dtype), *torch.randn(2, 64, N, dtype=dtype))
    (winner,) = winners_of([site])
    if isinstance(change, tuple):
        source = re.sub(r"const (float|int64_t) (\w+) = int64_t", r"const float \2 = int64_t", winner.source).replace(
            *change
        )
    else:
        source = winner.source.replace(HONEST, HONEST.replace("kernel_fn", "honest"))
        source += f"\n\nknown = {{}}\n\n\n{HONEST}:\n    {change}\n"
    assert source.replace("honest", "kernel_fn") != winner.source
    try:
        verdict = judge.check(source, winner.target)
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
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
    "a largest that passes over NaN": ("first_of_the_largest", (r"if \(r0_0_nan > 0\) r0_0 = NAN;", "")),
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
    try:
        verdict = judge.check(source, winner.target)
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
    assert verdict.correctness.value == "FAIL", verdict.why


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["running_before", "first_of_the_largest", "largest_of_windows", "of_no_dim"])
def test_the_gate_takes_windows_rows_and_single_numbers(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    _, (site,) = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    (winner,) = winners_of([site])
    try:
        verdict = judge.check(winner.source, winner.target)
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
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


@pytest.fixture(scope="module")
def lenient() -> Iterator[Judge]:
    """One that lets kernels call PyTorch."""
    with Judge("cpu", allow_libraries=True) as judge:
        yield judge


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", WITH_MASKS)
def test_the_gate_judges_masks_integers_and_every_input(name: str, lenient: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    function, change = WITH_MASKS[name]
    whole = torch.ones(64, N, dtype=torch.int64 if "integers" in name else torch.bool)
    _, (site,) = found(Of(function), torch.randn(64, N) if "second" in name else whole, torch.randn(64, N))
    (winner,) = winners_of([site])
    source = winner.source.replace("def kernel_fn(", "def honest(") + CHANGED.format(change=change)
    try:
        right, refused = (lenient.check(text, winner.target) for text in (winner.source, source))
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
    assert right.correctness.value == "PASS" and right.decided, right.why
    assert refused.failure and re.search("outside the tolerance|PyTorch's own|mask", refused.failure.reason), refused.why


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
    try:
        right = judge.check(winner.source, winner.target)
        refused = judge.check(wrong_source, winner.target)
    finally:
        shutil.rmtree(REGIONS / site.kernel_type)
    assert right.correctness.value == "PASS", right.why
    assert refused.correctness.value == "FAIL", refused.why
