"""Regions in whole models: the kernels that are put in, gradients, what is kept in a folder and in a package."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from region_models import CHAINS, N, Of, found, winners_of
from test_winners import found as verified
from torch import Tensor, nn

from autokernel.common.preflight import Refused
from autokernel.export.package import save
from autokernel.gate.checks.inputs import fill_inputs
from autokernel.integration.apply import apply, explain, unapply
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.nodes import aten
from autokernel.model.placement import RejectReason
from autokernel.model.regions.growing import region_finder
from autokernel.model.regions.spec import Region
from autokernel.spec import load_spec

pytestmark = pytest.mark.usefixtures("region_folder")


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


class Steps(nn.Module):
    """A loop over time, each of whose steps has a decay of its own."""

    def __init__(self, between: Callable[[Tensor, int], object]) -> None:
        super().__init__()
        self.read, self.between = nn.Linear(N, N), between

    def forward(self, x: Tensor, decays: Tensor) -> Tensor:
        decays, state, read = decays + 1, x, []
        for t in range(6):
            self.between(decays, t)
            state = state * decays[:, t].exp()
            state = state + self.read(state).tanh()
            read.append(self.read(state))
        return torch.stack(read, 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("between", "types"),
    [
        (lambda decays, t: None, 1),
        (lambda decays, t: decays[:, t].mul_(0.5), None),
        (lambda decays, t: torch.set_grad_enabled(t % 2 == 0), None),
    ],
    ids=["nothing", "a write", "a change of mode"],
)
def test_equal_steps_of_a_loop_are_regions_of_one_type(between: Callable[[Tensor, int], object], types: int | None) -> None:
    """Although each reads another part of a tensor, behind the first of its results. Not past what changes that."""
    torch.manual_seed(0)
    model, x, decays = Steps(between).eval(), torch.randn(8, N), -torch.rand(8, 6, N) - 1
    x.requires_grad_(), decays.requires_grad_()

    def results() -> list[Tensor]:
        with torch.enable_grad():
            result = model(x, decays)
            return [result.detach(), *torch.autograd.grad(result.square().sum(), (x, decays, *model.parameters()))]

    _, sites = found(model, x, decays)
    joined = [site.kernel_type for site in sites if len(site.outputs) > 1]
    assert types is None or (len(joined) == 5 and len(set(joined)) == types)
    expected = results()
    apply(model, winners_of(sites))
    with torch.no_grad():
        torch.testing.assert_close(model(x, decays), expected[0])
    for ours, theirs in zip(results(), expected):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
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
        h[0].mul_(2) if not torch.is_grad_enabled() else None
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
        y = (m.weight * y).sort(0)[0]  # which is in no region
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


def test_a_region_that_is_gone_is_said_in_a_line(region_folder: Path) -> None:
    with pytest.raises(Refused, match="region_add_0 is gone.*profile the model again"):
        load_spec("region_add_0")


def test_nothing_is_set_up_where_kernels_are_put_in(region_folder: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Of(CHAINS["silu"]), (torch.randn(64, N), torch.randn(64, N))
    _, sites = found(model, *inputs)
    winners, before = winners_of(sites), sorted(region_folder.iterdir())
    other = Of(CHAINS["gelu"])
    apply(other, winners)
    with torch.no_grad():
        other(*inputs)
    assert sorted(region_folder.iterdir()) == before and not explain(other).sites[winners[0].target.name]
    torch._dynamo.reset()


def test_a_saved_package_needs_no_region_folder(region_folder: Path, tmp_path: Path) -> None:
    """What finds a region and judges it travels with its kernels."""
    from autokernel.export.package import PARTS

    _, (site,) = found(Of(CHAINS["silu"]), torch.randn(64, N), torch.randn(64, N))
    assert {path.name for path in (region_folder / site.kernel_type).iterdir() if path.suffix in (".py", ".json")} == {
        *(set(PARTS) - {"patterns.py"}),
        "cpp_kernel.py",
    }


def test_inputs_that_make_nan_are_made_positive(region_folder: Path) -> None:
    _, sites = found(
        Of(lambda m, x, y: torch.log(x).amin(-1, keepdim=True) * y + 1), torch.rand(64, N) + 1, torch.randn(64, N)
    )
    (site,) = sites
    assert json.loads((region_folder / site.kernel_type / "region.json").read_text())["positive"] == ["input_0"]


BOUNDED = {  # of numbers of which most of a normal distribution is none
    "arccosine": (lambda m, x: torch.acos(x) * 2, (-1.0, 1.0)),
    "logit": (lambda m, x: torch.logit(x) * 2 + 1, (0.0, 1.0)),
    "hyperbolic arccosine": (lambda m, x: torch.acosh(x) * 2, (1.0, 4.0)),
    "of a sum": (lambda m, x: torch.acos((x * x).sum(-1, keepdim=True)) * x, (-0.1, 0.1)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_inputs_that_make_nan_are_drawn_from_where_they_make_none(name: str, region_folder: Path) -> None:
    function, ends = BOUNDED[name]
    _, (site,) = found(Of(function), torch.rand(64, N))
    region, spec = Region.read(region_folder / site.kernel_type), load_spec(site.kernel_type)
    assert region.ranges == {"input_0": ends}
    inputs = fill_inputs(spec, spec.case(spec.smoke, torch.float32), 0)
    assert spec.oracle(**inputs).isfinite().all()
    beyond = [v for v in region.nonfinite if math.isfinite(v)]
    assert beyond and not any(ends[0] <= v <= ends[1] for v in beyond)


def reasons(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, RejectReason]:
    """Of what is in no region, by operator."""
    with torch.no_grad():
        (graph,) = capture(Of(function), inputs, {}).graphs
    _, refusals = SiteFinder(regions=region_finder("cpu")).examine(graph.module)
    return {str(node.target): refusal.why for refusal in refusals for node in refusal.nodes}


@pytest.mark.parametrize(
    "function, operator, why",
    [
        (lambda m, x: torch.log(x - 1e6) * 2, "aten.log.default", RejectReason.DOMAIN),
        (lambda m, x: torch.erfinv(torch.tanh(x)), "aten.tanh.default", RejectReason.ALONE),
        (lambda m, x: x[:1] * 2 + 1, "aten.mul.Tensor", RejectReason.SMALL),
        (lambda m, x: x.double().exp() + 1, "aten.exp.default", RejectReason.UNWRITTEN),
        (lambda m, x: (w := x.unfold(0, 8, 1)).exp() * w, "aten.exp.default", RejectReason.REPEATS),
    ],
    ids=["domain", "alone", "small", "dtype", "windows"],
)
def test_what_is_no_region_is_refused_with_a_reason(
    function: Callable[..., Tensor], operator: str, why: RejectReason, region_folder: Path
) -> None:
    assert reasons(function, torch.rand(256, N))[operator] is why


def test_what_is_made_of_a_sorted_result_is_a_region(region_folder: Path) -> None:
    """An operation with several results that kernels do not compute is where a region's inputs come from."""
    model = Of(lambda m, x: torch.sort(x, -1)[0].tanh() * 2)
    _, (site,) = found(model, torch.randn(64, N))
    assert {str(node.target) for node in site.nodes} == {"aten.tanh.default", "aten.mul.Tensor"}


def test_what_is_made_of_elements_that_share_a_place_is_beside_the_region(region_folder: Path) -> None:
    """Or after it: of what is expanded before the model has it."""
    x, y = torch.randn(1, N).expand(64, N), torch.randn(64, N)
    _, (site,) = found(Of(lambda m, x, y: (x.exp() + y).tanh() * 2), x, y)
    assert {str(node.target) for node in site.nodes} == {"aten.add.Tensor", "aten.tanh.default", "aten.mul.Tensor"}
    _, (site,) = found(Of(lambda m, x, y: (y.tanh() * 2) + x), x, y)
    assert {str(node.target) for node in site.nodes} == {"aten.tanh.default", "aten.mul.Tensor"}


TWO_NORMS = """
import torch
from torch import nn

class TwoNorms(nn.Module):
    def forward(self, x, w, v):
        x = torch.tanh(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * v

inputs = torch.randn(512, 1024), torch.randn(1024), torch.randn(1024)
"""
IN_A_PACKAGE = """
import fast_norms
from fast_norms.autokernel.integration.apply import explain
with torch.no_grad():
    model = fast_norms.apply(TwoNorms().eval())
    model(*inputs)
print(explain(model))
"""


def test_a_saved_package_finds_a_region_beside_another_type_s_operation(region_folder, tmp_path) -> None:
    """Without that type's patterns the region would grow over it, and be another one, which no kernel is for."""
    exec(TWO_NORMS, names := {"__name__": "two_norms"})
    (winner,) = winners_of(found(names["TwoNorms"](), *names["inputs"])[1])
    verification = verified(winner.source, ("eager",))
    pays = replace(verification.kernels[0], target=winner.target.name, kernel=winner.name)
    assert save(tmp_path / "fast_norms", replace(verification, kernels=(pays,)), [winner])
    command = [sys.executable, "-c", f"{TWO_NORMS}\n{IN_A_PACKAGE}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"{winner.target.name}: in 1 sites" in done.stdout, done.stdout + done.stderr
