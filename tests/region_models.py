"""Chains of operations that become regions, and what their kernels are held against."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expectations
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.patterns import Site
from autokernel.model.regions.growing import regions_of
from autokernel.model.regions.spec import several
from autokernel.spec import KernelSpec, TensorSpec, is_region, load_spec
from autokernel.target import Target, WeightedCase

N = 96


class Of(nn.Module):
    """A function as a model with two weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, N))
        self.bias = nn.Parameter(torch.linspace(-1, 1, N))
        self.register_buffer("places", torch.arange(64 * 4).view(64, 4) * 7 % 64)

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
    """Integers are places in a dim of `found`'s inputs."""
    contents = torch.randn(t.shape) if t.dtype.is_floating_point else torch.randint(64, t.shape)
    return torch.empty_strided(t.shape, t.strides, dtype=t.dtype).copy_(contents)


def why_wrong(returned, spec: KernelSpec, inputs: dict, adversarial: bool = False) -> str | None:
    """What is wrong with a result, one of several among them."""
    assert [y.stride() for y in several(returned)] == [t.strides for t in spec.results]
    expected = expectations(spec, inputs, "cpu")
    assert len(expected) == len(several(returned))
    return next(filter(None, (wrong(y, e, adversarial) for y, e in zip(several(returned), expected))), None)


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
    "powers_below_zero": lambda m, x, y: (
        x**9 - y**-10 + torch.pow(x, y.clamp(-9, 9).round()) + torch.pow(x.round(), m.bias.round())
    ),
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
    "read_across": lambda m, x, y: (x.t().contiguous() * 2 + y.view(N, 64)).exp() * x.view(N, 64)[:, :1],
    "normed_across": lambda m, x, y: F.layer_norm(x.view(2, N, 32).mT * 2, (N,), m.weight, m.bias) + y.view(2, 32, N),
    "padded_across": lambda m, x, y: F.pad(x.view(2, 32, N).mT, (1, 2)).tanh() * 2 + F.pad(y.view(2, 32, N).mT, (3, 0)),
    "transposed_matrices": lambda m, x, y: (x.view(2, 32, N) * y.view(2, 32, N)).mT.exp() + x.view(2, 1, -1)[..., :32] + 1,
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
    "stacked": lambda m, x, y: torch.stack((x * 2, y.sin(), m.weight.expand(64, N)), 1).flatten(1) + 1,
    "rolled": lambda m, x, y: torch.roll((x * y).view(2, 32, N), (-3, 5), (1, 2)).exp() + y.roll(70, 0).view(2, 32, N),
    "triangles": lambda m, x, y: (x * y).tril(-1) + torch.triu((x + y).view(2, 32, N), 2).view(64, N) * m.weight,
    "of_ones": lambda m, x, y: (x * y).masked_fill(torch.ones(64, N, dtype=torch.bool).triu(1), -1e9) + m.weight,
    "repeated": lambda m, x, y: (x[:, :6] * y[:, :6]).repeat(2, 1, 16)[1] + (y[:, :32] * 2).repeat_interleave(3, 1),
    "apart": lambda m, x, y: F.silu((h := x * y).view(64, 2, 48)[:, 1]) * h.view(64, 2, 48).unbind(1)[0],
    "largest_of_windows": lambda m, x, y: F.max_pool2d(F.relu(x.view(2, 32, 8, 12)) - 1, 3, 2, 1, 2) * 2,
    "largest_in_planes": lambda m, x, y: (
        F.max_pool2d(F.relu(x.view(4, 32, 48)) - 1, 3, 1, 1) + F.avg_pool2d(y.view(4, 32, 48), 5, 1, 2)
    ),
    "mirrored_planes": lambda m, x, y: F.avg_pool2d((x.view(4, 32, 48) * 2).flip(-1), (3, 1), 1, (1, 0)) * 3,
    "planes_with_edges": lambda m, x, y: (
        F.pad(x.view(2, 64, 48)[:, ::2].bfloat16(), (3, 2, 1, 1)).exp()
        * F.pad(y.view(2, 64, 48)[:, :32, ::2] > 0, (0, 29, 2, 0), value=True)
    ),
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
    "grouped_after_gelu": lambda m, x, y: F.group_norm(F.gelu(x.view(2, 32, N)) * 2, 4, m.weight[:32], m.bias[:32]) + 1,
    "normed_twice": lambda m, x, y: F.layer_norm(
        torch.tanh(F.layer_norm(torch.sigmoid(x) + y, (N,))), (N,), m.weight, m.bias
    ),
    "logsumexp_over_channels": lambda m, x, y: torch.tanh((x * y).view(2, 32, N).logsumexp(1) + m.bias),
    "softmax_over_channels": lambda m, x, y: F.softmax(F.gelu(x.view(2, 32, N)), 1) * y.view(2, 32, N),
    "normed_over_channels": lambda m, x, y: (
        ((h := (x + y).view(2, 32, N)) - h.mean(1, keepdim=True))
        / (h.var(1, keepdim=True) + 1e-5).sqrt()
        * m.weight[:32, None]
    ),
    "extremes_of_channels": lambda m, x, y: (h := (x + y).view(4, 16, N)).amin(1) * h.amax(1) + h.argmax(1) - h.prod(1),
    "sums_of_columns_far_apart": lambda m, x, y: ((x * y).view(2, 32, 4, 24).sum((0, 2)), x + 1)[0],
    "a_number_of_the_models": lambda m, x, y: torch.min(x * 2, torch.tensor(0.3)) + y,
}


CHAINS |= {
    "whole_parts": lambda m, x, y: (
        (x.round() + (y * 3).round(decimals=1) * x.trunc() + y.frac().sign()) * torch.fmod(x, y)
        + torch.remainder(y, -0.7)
        + torch.floor_divide(x, y)
    ),
    "angles": lambda m, x, y: (
        torch.atan2(x, y) + x.atan() - torch.tanh(x).asin() * torch.tanh(y).acos() + torch.hypot(x, y) + (y * 0.2).tan()
    ),
    "hyperbolic": lambda m, x, y: (
        torch.sinh(x.clamp(-9, 9))
        - torch.cosh(y.clamp(-9, 9))
        + x.asinh() * (y.abs() + 1).acosh()
        + (y.tanh() * 0.9).atanh()
    ),
    "logarithms": lambda m, x, y: (
        (x.abs() + 1).log10() * torch.logaddexp(x, y)
        + torch.logaddexp2(y, m.bias)
        + torch.xlogy(x, y.abs() + 0.1)
        + torch.erfc(x)
        + torch.logit(y, 0.1)
    ),
    "truths": lambda m, x, y: (
        torch.where((x > 2).any(-1, keepdim=True) ^ torch.isfinite(y), x, y.nan_to_num(1.0)) * m.weight
        + (x > -1).all(-1, keepdim=True)
        + (y > x).sum(-1, keepdim=True)
    ),
    "both_extremes": lambda m, x, y: (lambda low, high: (x - low) / (high - low))(*(x + y).aminmax(dim=-1, keepdim=True)),
    "variance_and_mean": lambda m, x, y: (lambda v, mean: (x - mean) / (v + 1).sqrt())(
        *torch.var_mean(x * 2, -1, keepdim=True)
    ),
    "shuffled": lambda m, x, y: (
        F.pixel_unshuffle(F.channel_shuffle(F.pixel_shuffle((x * y).view(2, 32, 8, 12), 2), 4), 4)
        .movedim(1, -1)
        .swapaxes(0, 1)
        + m.weight[:1]
    ),
    "between": lambda m, x, y: F.interpolate(x.view(2, 32, 8, 12) * 2, scale_factor=(3, 2), mode="bilinear") + 1,
    "largest_of_parts": lambda m, x, y: F.adaptive_max_pool2d(F.gelu(x).view(2, 32, 8, 12), (4, 3)) * 2,
    "differences": lambda m, x, y: (x * y).diff(dim=0) + m.bias,
}
# Of special numbers, which chains seldom see: each function's result is a row. A clamp may return either 0 of two signs.
EDGES = {
    "whole_parts": lambda x, y: (
        *(x.round(), x.clamp(-1e36, 1e36).round(decimals=2), x.round(decimals=-1), x.trunc(), x.fix()),
        *(x.frac(), x.floor(), x.ceil(), x.sign(), torch.copysign(x, y), torch.signbit(x).float()),
        *(torch.heaviside(x, y), torch.fmax(x, y), torch.fmin(x, y)),
    ),
    "remainders": lambda x, y: (
        *(torch.fmod(x, y), torch.fmod(x, -0.75), torch.remainder(x, y), torch.remainder(x, -0.75)),
        *(torch.floor_divide(x, y), x // 0.375, torch.div(x, y, rounding_mode="trunc")),
        torch.div(x, -0.375, rounding_mode="floor"),
    ),
    "angles": lambda x, y: (torch.atan2(x, y), x.atan(), x.asin(), x.acos(), x.tan(), torch.hypot(x, y)),
    "hyperbolic": lambda x, y: (x.sinh(), x.cosh(), x.asinh(), x.acosh(), x.atanh()),
    "logarithms": lambda x, y: (
        *(x.log10(), torch.logaddexp(x * 8, y * 8), torch.logaddexp2(x * 8, y * 8), torch.xlogy(x, y)),
        *(torch.special.xlog1py(x, y), x.erfc(), x.logit(), x.logit(0.125), torch.special.entr(x)),
    ),
    "truths": lambda x, y: (
        *(x.nan_to_num(), x.nan_to_num(1.0, 2.0, 3.0), torch.isfinite(x).float(), torch.isposinf(x).float()),
        *(torch.isneginf(x).float(), torch.clamp(x, y, y + 1) + 0.0, torch.logical_xor(x, y).float()),
    ),
}


def special() -> tuple[Tensor, Tensor]:
    """All pairs of some numbers, in float32."""
    sizes = [0.0, 1e-40, 1e-4, 0.25, 0.5, 0.7, 1.0, 1.5, 2.5, 3.5, 7.0, 15.0, 88.9, 8388607.5, 3e9, 3e38, math.inf]
    x = torch.tensor([*sizes, *(-size for size in sizes), math.nan])
    return x.repeat_interleave(len(x)), x.repeat(len(x))


def edges(name: str) -> nn.Module:
    return Of(lambda m, x, y: torch.stack(EDGES[name](x, y)))


def assert_same_at_edges(found: Tensor, exact: Tensor) -> None:
    """float32 against float64, rounded: PyTorch's own float32 has NaN where its vectors divide to infinity in fmod."""
    expected = exact.float()
    torch.testing.assert_close(found, expected, rtol=4e-6, atol=1e-43, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(found.signbit()[zeros], expected.signbit()[zeros])


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


# of several results; each is one region
# What is a region on a GPU alone.
ON_GPUS = {
    "convolved": lambda m, x, y: F.silu(
        F.conv1d(x.view(8, 24, 32), m.weight.view(24, 1, 4), m.bias[:24], padding=3, groups=24)[..., :32]
    ),
    "convolved_across": lambda m, x, y: F.conv1d(
        x.view(8, 32, 24).mT, m.weight.view(24, 1, 4), groups=24, dilation=2
    ).tanh(),
    "convolved_plane": lambda m, x, y: F.conv2d(
        x.view(1, 8, 24, 32), m.weight.view(16, 1, 2, 3), None, 2, (1, 1), groups=8
    ),
}
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


CHAINS |= {
    "embedded": lambda m, x, y: F.layer_norm(F.embedding(m.places, x) + y[:, None], (N,), m.weight, m.bias),
    "taken": lambda m, x, y: torch.exp(x[m.places[:, 0]] * y.index_select(0, m.places[:, 1])) + x,
    "gathered": lambda m, x, y: y.view(64, N).gather(1, m.places) * 2 + x[m.places, m.places].tanh(),
}
CHAINS |= SEVERAL


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
