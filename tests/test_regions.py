"""Regions: what is found in a graph, that its arithmetic is the nodes' own, and that kernels written from it are right."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel import spec as specs
from autokernel.build import cpp_function
from autokernel.gate.checks.correctness import expect, wrong
from autokernel.integration.apply import apply, explain, unapply
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.match import Site, SiteFinder
from autokernel.model.regions.growing import piece_of, regions_of
from autokernel.model.regions.lowering import evaluate, lower
from autokernel.preflight import Refused
from autokernel.spec import REGIONS, TensorSpec, import_file, is_region, load_spec
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


def kernel_of(site: Site):
    (path,) = load_spec(site.kernel_type).starters("cpp").values()
    return import_file(path, f"test_{site.kernel_type}").kernel_fn


CHAINS = {
    "gelu": lambda m, x, y: F.gelu(x) * y,
    "gelu_tanh": lambda m, x, y: F.gelu(x, approximate="tanh") + y,
    "silu": lambda m, x, y: F.silu(x) * m.weight + m.bias,
    "scalars": lambda m, x, y: (3 - x) / 4 + torch.rsub(y, x, alpha=2) - 1,
    "masks": lambda m, x, y: torch.where((x > y) & ~(y > 1), x, torch.zeros_like(x).masked_fill(x < 0, -1e4)),
    "clamps": lambda m, x, y: x.clamp(-1, 1) + y.clamp(min=0.5) * torch.maximum(x, y) - torch.minimum(x, m.bias),
    "functions": lambda m, x, y: torch.sin(x) + torch.cos(y) + torch.erf(x) * torch.tanh(y) + torch.log(x.abs() + 1),
    "small": lambda m, x, y: torch.log1p(x.abs() * 1e-4) + torch.expm1(y * 1e-4),
    "powers": lambda m, x, y: (
        x**2 + x**3 + (y.abs() + 1) ** 0.5 + (y.abs() + 1) ** -0.5 + (y.abs() + 1) ** 1.7 + x**5 - y**-3
    ),
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
    "grouped": lambda m, x, y: F.silu(F.group_norm(x.view(1, N, -1), 4, m.weight, m.bias)).view(x.shape) + y,
}


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
            lowered = lower(piece_of(graph, site.output, site.inputs))
            exact = {k: in_double(v) if v.is_floating_point() else v for k, v in inputs.items()}
            expected = spec.oracle(**exact)
            assert torch.allclose(
                evaluate(lowered, list(exact.values()), expected.shape), expected, 1e-9, 1e-9, equal_nan=True
            )
            for scale in (1, 20, 1e-2):
                contents = {k: v * scale if v.is_floating_point() else v for k, v in inputs.items()}
                reason = wrong(kernel_of(site)(**contents), expect(spec, contents, "cpu"), adversarial=scale != 1)
                assert reason is None, reason


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


def test_what_others_use_is_no_part() -> None:
    """A region has one result: what is used elsewhere ends the region before it."""
    graph, sites = found(
        Of(lambda m, x, y: ((h := F.gelu(x) * y), torch.tanh(h) + 1)), torch.randn(64, N), torch.randn(64, N)
    )
    assert sorted(len(site.nodes) for site in sites) == [2, 2]


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
    assert sum(map(len, explain(model).sites.values())) == len(sites) == 4
    model(x, scale).square().mean().backward()
    for ours, theirs in zip([x.grad, *(p.grad for p in model.parameters())], gradients):
        assert torch.allclose(ours, theirs, atol=1e-5)
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
        "outside the tolerance|agree",
    ),
    "NaN of the second input dropped": (
        "gelu",
        ("float(x1[i0])", "(x1[i0] == x1[i0] ? x1[i0] : 0.0f)"),
        "NaN mask differs",
    ),
    "the second input cut off": ("gelu", ("float(x1[i0])", "std::min(x1[i0], 25.0f)"), "outside the tolerance"),
    "a cast skipped": ("casts", ("= int64_t(c5)", "= c5"), "outside the tolerance"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_the_gate_refuses_cheats_on_regions(name: str, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    chain, change, reason = CHEATS[name]
    _, (site,) = found(Of(CHAINS[chain]), torch.randn(64, N), torch.randn(64, N))
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
