"""Convolutions in regions on a CPU: oneDNN computes them, of weights that are packed once."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from region_models import Of, drawn, found, why_wrong, winners_of
from test_regions import kernel_of
from test_regions_at_the_gate import verdicts
from torch import Tensor, nn

from autokernel import spec as specs
from autokernel.gate import Judge
from autokernel.integration.apply import apply, explain, unapply
from autokernel.spec import CONVOLUTION, REGIONS, load_spec

pytestmark = pytest.mark.usefixtures("region_folder")
LAYOUTS = torch.contiguous_format, torch.channels_last


class Normed(nn.Module):
    """A convolution, a norm, and what is added and applied."""

    def __init__(self, norm: nn.Module, residual: bool = False, **options: object) -> None:
        super().__init__()
        self.convolution, self.norm, self.residual = nn.Conv2d(16, 32, **options), norm, residual

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.convolution(x))
        return F.silu(h + y if self.residual else h)


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm2d(32)
    for values in norm.running_var, norm.weight.data:
        values.uniform_(0.5, 2)
    return norm


MODELS = {
    "batch norm": lambda: Normed(batch_norm(), kernel_size=3, padding=1, bias=False),
    "a residual": lambda: Normed(batch_norm(), residual=True, kernel_size=3, padding=1, stride=2),
    "group norm": lambda: Normed(nn.GroupNorm(4, 32), kernel_size=(3, 1), padding=(2, 0), dilation=(2, 1)),
    "groups": lambda: Normed(nn.Identity(), kernel_size=5, groups=16),
}


def inputs_for(name: str, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 18, 18), torch.randn(2, 32, 9, 9)
    return x.contiguous(memory_format=layout), y.contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_what_follows_a_convolution_has_it_in_its_region(name: str, layout: torch.memory_format) -> None:
    model = MODELS[name]().to(memory_format=layout).eval()
    _, (site,) = found(model, *inputs_for(name, layout))
    spec, kernel = load_spec(site.kernel_type), kernel_of(site)
    assert spec.library_calls == CONVOLUTION and len(spec.static) == 1
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    result = kernel(**inputs)
    assert why_wrong(result, spec, inputs) is None and result.stride() == spec.results[0].strides
    inputs[spec.first][1, 2, 3, 4] = math.nan
    assert why_wrong(kernel(**inputs), spec, inputs, adversarial=True) is None


def volumes(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


# A convolution and what it is of.
KINDS = {
    "same": (lambda: nn.Conv2d(4, 8, (3, 5), padding="same", dilation=(2, 1)), torch.randn(2, 4, 17, 18)),
    "same, of even windows": (lambda: nn.Conv2d(4, 8, (4, 3), padding="same"), torch.randn(2, 4, 17, 18)),
    "same, of even windows apart": (
        lambda: nn.Conv1d(4, 8, 4, padding="same", groups=2, dilation=3),
        torch.randn(2, 4, 99),
    ),
    "valid": (lambda: nn.Conv1d(4, 8, 4, padding="valid"), torch.randn(2, 4, 99)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 8, (4, 3), (2, 3), 1, (1, 2), 2), torch.randn(2, 4, 17, 18)),
    "transposed, of rows": (lambda: nn.ConvTranspose1d(4, 8, 5, 3, 2, 1, dilation=2), torch.randn(2, 4, 99)),
    "transposed, of volumes": (lambda: nn.ConvTranspose3d(4, 8, 2, (2, 1, 1)), torch.randn(2, 4, 7, 8, 9)),
    "volumes": (lambda: nn.Conv3d(4, 8, (3, 1, 2), (1, 2, 1), (1, 0, 1)), volumes(torch.randn(2, 4, 7, 8, 9))),
    "volumes, same": (lambda: nn.Conv3d(4, 4, 2, padding="same", groups=4), torch.randn(2, 4, 7, 8, 9)),
    "to one channel": (lambda: nn.ConvTranspose2d(4, 1, 2, 2, bias=False), torch.randn(2, 4, 17, 18)),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_convolutions(name: str) -> None:
    torch.manual_seed(0)
    made, x = KINDS[name]
    model = nn.Sequential(made(), nn.GELU()).eval()
    _, (site,) = found(model, x)
    spec, kernel = load_spec(site.kernel_type), kernel_of(site)
    assert spec.library_calls == CONVOLUTION and len(spec.static) == 1
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    result = kernel(**inputs)
    assert why_wrong(result, spec, inputs) is None and result.stride() == spec.results[0].strides
    inputs[spec.first][(1, 2, *[3] * (x.dim() - 2))] = math.nan
    assert why_wrong(kernel(**inputs), spec, inputs, adversarial=True) is None


def test_products_of_a_transposed_convolution_are_those_of_what_it_takes() -> None:
    """Each element of it meets the whole window; of others, each element of the result."""
    flops = []
    for convolution in nn.ConvTranspose2d(4, 8, 2, 2), nn.Conv2d(4, 8, 3, padding=1):
        _, (site,) = found(nn.Sequential(convolution, nn.GELU()).eval(), torch.randn(2, 4, 32, 32))
        spec = load_spec(site.kernel_type)
        flops.append(spec.flops({}) - spec.results[0].numel)  # but for the activation
    assert flops == [2 * 4 * 8 * 2 * 2 * 2 * 32 * 32, 2 * 4 * 8 * 3 * 3 * 2 * 32 * 32]


def test_what_lies_as_it_is_made_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are images of one channel, which are in several layouts at once."""
    for made, x in KINDS.values():
        _, (site,) = found(nn.Sequential(made(), nn.GELU()).eval(), x)
        kernel, same = kernel_of(site), []
        laid_out = kernel.__globals__["_laid_out"]

        def watched(y: Tensor, stride: tuple[int, ...], laid_out: Callable = laid_out, same: list[bool] = same) -> Tensor:
            same.append((made := laid_out(y, stride)) is y)
            return made

        monkeypatch.setitem(kernel.__globals__, "_laid_out", watched)
        kernel(**{k: drawn(t) for k, t in site.case.tensors.items()})
        assert same == [True]


def test_a_convolution_of_no_batch_stays_outside() -> None:
    _, sites = found(nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU(), nn.Tanh()).eval(), torch.randn(4, 40, 40))
    assert [load_spec(site.kernel_type).static for site in sites] == [frozenset()]


class Shared(nn.Module):
    """One weight in convolutions of other groups, strides and sizes; a bias whose elements lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 4, 3, 3)), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        bias = self.bias.view(16, 2)[:, 1]
        h = F.conv2d(x[:, :4], self.weight, bias) + F.conv2d(x, self.weight, groups=4)
        return F.silu(h + F.conv2d(y[:, ::8], self.weight, stride=2, padding=8, dilation=2))


def test_a_weight_is_packed_for_each_convolution_that_it_is_in() -> None:
    _, (site,) = found(Shared().eval(), torch.randn(2, 16, 18, 18), torch.randn(2, 32, 19, 19))
    spec = load_spec(site.kernel_type)
    assert len(spec.static) == 1
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    assert any(t.dim() == 1 and t.stride() == (2,) for t in inputs.values())
    kernel = kernel_of(site)
    for _ in range(2):
        assert why_wrong(kernel(**inputs), spec, inputs) is None


class Rows(nn.Module):
    """Convolutions of rows, what is left of whose results is read as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = nn.Conv1d(12, 12, 4, padding=3, groups=12)
        self.wide = nn.Conv1d(12, 24, 5, stride=2, dilation=3)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.causal(x)[..., : x.shape[-1]]) * x
        return F.gelu(self.norm(self.wide(h).transpose(1, 2)))


class Patches(nn.Module):
    """As vision transformers embed them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, 24, 5, 3), nn.Parameter(torch.randn(1, 100, 24))

    def forward(self, x: Tensor) -> Tensor:
        return (self.patches(x).flatten(2).transpose(1, 2) + self.places).relu()


@pytest.mark.parametrize("made, x", [(Rows, torch.randn(2, 12, 301)), (Patches, torch.randn(2, 3, 32, 32))])
def test_views_of_convolutions(made: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    model = made().eval()
    _, sites = found(model, x)
    assert all(load_spec(site.kernel_type).library_calls == CONVOLUTION for site in sites)
    assert len(sites) == (2 if made is Rows else 1)
    for site in sites:
        spec, inputs = load_spec(site.kernel_type), {k: drawn(t) for k, t in site.case.tensors.items()}
        assert why_wrong(kernel_of(site)(**inputs), spec, inputs) is None
    with torch.no_grad():
        right = model(x)
        apply(model, winners_of(sites))
        assert torch.allclose(model(x), right, atol=1e-5) and model(x).stride() == right.stride()
    assert sum(map(len, explain(model).sites.values())) == len(sites)
    unapply(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)])
def test_pooling_is_a_region_by_itself(pool: nn.Module) -> None:
    x = torch.randn(2, 16, 40, 40)
    _, (site,) = found(pool, x)
    (name,) = site.case.tensors
    assert torch.allclose(kernel_of(site)(**{name: x}), pool(x))


class Taken(nn.Module):
    """A convolution's result is used twice: by what could be a region with it, and by what cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.convolution(x)
        return F.silu(h * 2) + 1, h


def test_a_convolution_that_others_use_stays_outside() -> None:
    _, (site,) = found(Taken().eval(), torch.randn(2, 8, 20, 20))
    assert "conv2d" not in site.kernel_type


def test_in_a_model_weights_that_were_packed_are_packed_anew_where_they_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm_of(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.GELU()).eval()
    x = torch.randn(2, 8, 24, 24)
    _, sites = found(model, x)
    apply(model, winners_of(sites))

    def check() -> None:
        with torch.no_grad():
            right = exact(x.double())
            assert torch.allclose(model(x).double(), right, atol=1e-5)

    def exact(x: Tensor) -> Tensor:
        a, b, _, c, _ = (m for m in model)
        h = F.conv2d(x, a.weight.double(), a.bias.double())
        h = F.batch_norm(h, *(v.double() for v in (b.running_mean, b.running_var, b.weight, b.bias)), eps=b.eps).relu()
        return F.gelu(F.conv2d(h, c.weight.double(), c.bias.double()))

    check()
    assert sum(map(len, explain(model).sites.values())) == 2
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    check()
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items() if v.is_floating_point()}, strict=False)
    check()
    x.requires_grad_()
    model(x).sum().backward()
    ours, x.grad = x.grad, None
    exact(x.double()).sum().backward()
    assert torch.allclose(ours, x.grad, atol=1e-4)
    unapply(model)
    torch._dynamo.reset()


def test_kinds_of_convolutions_in_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 8, 4, padding="same"), nn.GELU(), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.SiLU()),
        *(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 8, (1, 3, 3)), nn.Tanh()),
    ).eval()
    x, exact = torch.randn(2, 4, 18, 18, requires_grad=True), copy.deepcopy(model).double()
    _, sites = found(model, x.detach())
    assert all(load_spec(site.kernel_type).library_calls == CONVOLUTION for site in sites)
    exact(x.double()).sum().backward()
    right, x.grad = x.grad, None
    apply(model, winners_of(sites))
    with torch.no_grad():
        assert torch.allclose(model(x).double(), exact(x.double()), atol=1e-5)
    assert sum(map(len, explain(model).sites.values())) == len(sites) == 3
    model(x).sum().backward()
    assert torch.allclose(x.grad, right, atol=1e-4)
    for own, theirs in zip(model.parameters(), exact.parameters()):
        assert torch.allclose(own.grad.double(), theirs.grad, rtol=1e-4, atol=1e-3)
    unapply(model)
    torch._dynamo.reset()


def batch_norm_of(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    norm.running_var.uniform_(0.5, 2)
    return norm


def test_the_gate_takes_one_and_lets_a_library_do_nothing_else(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)  # where the gate's own processes look
    _, sites = found(MODELS["batch norm"]().eval(), *inputs_for("batch norm", torch.channels_last))
    (winner,) = winners_of(sites)
    other = winner.source.replace("    return y\n", "    return y.mul_(1)\n")
    assert other != winner.source
    verdict, refused = verdicts(judge, winner, winner.source, other)
    assert verdict.failure is None, f"{verdict.failure}\n{verdict.failure.detail}"
    assert "does the work" in str(refused.failure)


@pytest.mark.parametrize(("padding", "planted_in"), [(0, ("input_1", "input_2")), (2, ("input_2",))])
def test_a_weight_that_meets_padding_has_no_nan(padding: int, planted_in: tuple[str, ...]) -> None:
    """oneDNN makes no products with padding; the exact form makes them of a dilated convolution, and NaN of NaN."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=padding, dilation=2, groups=4), nn.GELU()).eval()
    _, (site,) = found(model, torch.randn(2, 8, 14, 14))
    assert load_spec(site.kernel_type).planted_in == planted_in


@pytest.mark.slow
@pytest.mark.parametrize("name", ["same, of even windows", "transposed", "volumes"])
def test_the_gate_takes_kinds_of_convolutions(name: str, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    torch.manual_seed(0)
    made, x = KINDS[name]
    _, sites = found(nn.Sequential(made(), nn.GELU()).eval(), x)
    (winner,) = winners_of(sites)
    other = winner.source.replace("(x, packed[key], bias,", "(x, packed[key], None,")
    assert other != winner.source
    verdict, refused = verdicts(judge, winner, winner.source, other)
    assert verdict.failure is None, f"{verdict.failure}\n{verdict.failure.detail}"
    assert "outside the tolerance" in str(refused.failure)


# An activation, as oneDNN adds it to a convolution, and why the gate refuses that.
ADDED = {
    "relu": (F.relu, '"relu", [], ""', "NaN mask differs"),
    "hardtanh": (F.hardtanh, '"hardtanh", [-1.0, 1.0], ""', "NaN mask differs"),
    "silu": (F.silu, '"swish", [], ""', None),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ADDED)
def test_what_onednn_adds_may_lose_no_nan(name: str, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", REGIONS)
    activation, added, reason = ADDED[name]
    model = nn.Sequential(nn.Conv2d(8, 8, 3), Of(lambda m, x: activation(x))).to(memory_format=torch.channels_last)
    _, sites = found(model.eval(), torch.randn(2, 8, 14, 14).contiguous(memory_format=torch.channels_last))
    (winner,) = winners_of(sites)
    source = winner.source.replace('"none", [], ""', added)
    source = source.replace("    inputs = [", "    return convolved_0\n    inputs = [")
    assert source.count("return convolved_0") == source.count(added) == 1
    (verdict,) = verdicts(judge, winner, source)
    assert reason in verdict.why if reason else verdict.failure is None, verdict.why


def test_a_weight_is_packed_once_where_gradients_are_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MODELS["batch norm"]().eval(), inputs_for("batch norm", torch.channels_last)
    _, sites = found(model, *x)
    apply(model, winners_of(sites))
    packed, pack = [], torch.ops.mkldnn._reorder_convolution_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_convolution_weight", lambda *a: packed.append(a) or pack(*a))
    for _ in range(3):
        y = model(*x)
    assert y.requires_grad and len(packed) == 1
    with torch.no_grad():
        model.convolution.weight.mul_(2)
    (again,) = {model(*x).sum().item() for _ in range(2)}
    assert len(packed) == 2 and again != y.sum().item()
    with torch.no_grad():
        model(*x)
    assert len(packed) == 2
    unapply(model)
    torch._dynamo.reset()
