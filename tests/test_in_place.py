"""Operations in place on what nothing else holds get results of their own; all others stay as they are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from region_models import Of, found, winners_of
from torch import Tensor, nn

from autokernel.integration.apply import apply, explain, unapply
from autokernel.model.capture import capture
from autokernel.model.nodes import written

pytestmark = pytest.mark.usefixtures("region_folder", "nothing_compiled_before")
Forward = Callable[[nn.Module, Tensor], Tensor]


def held(m: nn.Module, x: Tensor) -> Tensor:
    h = x * 2
    y = h.relu_()
    return y + h


def seen_by_a_view(m: nn.Module, x: Tensor) -> Tensor:
    h = x * 2
    part = h[:, 1:]
    h.sigmoid_()
    return part + 1


def part_of_what_is_held(m: nn.Module, x: Tensor) -> Tensor:
    h = x * 2
    h[:, 1:].add_(1)
    return h


def of_an_input(m: nn.Module, x: Tensor) -> Tensor:
    return x.clamp_(-1, 1) * 2


def of_a_parameter(m: nn.Module, x: Tensor) -> Tensor:
    return x * m.weight.data.mul_(0.5).sum()


def given_back(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h, h.exp_()


def in_other_strides(m: nn.Module, x: Tensor) -> Tensor:
    return (x * 2)[:, ::2].add_(1).square()


def rounded(m: nn.Module, x: Tensor) -> Tensor:
    return (x * 8).int().mul_(2).float() + torch.zeros(x.shape, dtype=torch.float16).add_(x).float()


# Whether writes are left in the graph.
PROGRAMS: dict[Forward, bool] = {
    (lambda m, x: F.relu(x * 2, inplace=True) + 1): False,
    (lambda m, x: (x * 2).add_(x).mul_(3).view(-1)[1:].sigmoid_()): True,  # its result lies beside what it is a part of
    (lambda m, x: F.hardtanh(F.silu(x * 2, inplace=True), 0, 6, inplace=True).add_(x[0], alpha=2)): False,
    held: False,  # a graph has one name for both
    seen_by_a_view: True,
    part_of_what_is_held: True,
    of_an_input: True,
    of_a_parameter: True,
    given_back: False,
    in_other_strides: True,
    rounded: True,
}


@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda f: f.__name__)
def test_a_write_is_left_where_something_may_see_it(forward: Forward) -> None:
    model, x = Of(forward).eval(), torch.randn(4, 3000)
    with torch.no_grad():
        (graph,) = capture(model, (x.clone(),), {}).graphs
        assert any(written(node) for node in graph.module.graph.nodes) == PROGRAMS[forward]
        if forward is of_a_parameter:  # which is another one after each call
            return
        expected, results = model(x.clone()), graph.module(*(x.clone() if v.shape == x.shape else v for v in graph.inputs))
    for ours, theirs in zip(results, expected if isinstance(expected, tuple) else (expected,)):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


class Residual(nn.Module):
    """As networks of convolutions have them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.convolution(x))
        h += x
        return self.relu(h)


def test_residuals_in_place_are_part_of_a_region_and_in_training_of_none() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(), Residual()).eval(), torch.randn(2, 3, 30, 30)
    right = model(x)
    right.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        _, sites = found(model, x)
    assert len(sites) == 2 and all(site.kernel_type.startswith("region_batch_norm_add_relu") for site in sites)
    apply(model, winners_of(sites))
    with torch.no_grad():
        assert torch.allclose(model(x), right, atol=1e-5)
    assert sum(map(len, explain(model).sites.values())) == 2
    model.zero_grad()
    model(x).square().mean().backward()
    for ours, theirs in zip((p.grad for p in model.parameters()), gradients):
        assert torch.allclose(ours, theirs, atol=1e-5)
    unapply(model)
