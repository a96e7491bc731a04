"""Where operations end: rows without keys, no rows, few classes, other ranks and widths. The model stays itself there."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autokernel
from autokernel.gate.checks.correctness import ELEMENT_TOLERANCE
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.patterns import Site
from autokernel.model.placement import RejectReason
from benchmarks.architectures import starters

LOWEST = torch.finfo(torch.float32).min
SHAPE = (2, 4, 40, 16)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Model(nn.Module):
    """A function as a model: Dynamo asks for one."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def sites_of(model: nn.Module, *inputs: Tensor) -> list[Site]:
    finder = SiteFinder()
    return [site for graph in capture(model, inputs, {}).graphs for site in finder.find(graph.module)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.25).masked_fill(mask, -math.inf).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q / 4 @ k.transpose(-2, -1) + mask).softmax(-1) @ v


def mask_of(number: float | bool, shape: tuple[int, ...]) -> Tensor:
    """Nothing hidden but every fifth row: wholly, by `number`."""
    mask = torch.full(shape, not number) if isinstance(number, bool) else torch.zeros(shape)
    mask.flatten(0, -2)[3::5] = number
    return mask


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "inductor"])
@pytest.mark.parametrize(
    ("attend", "number", "nan"),
    [
        (sdpa, False, False),
        (sdpa, -math.inf, False),
        (sdpa, LOWEST, False),
        (masked_fill, True, True),
        (added, -math.inf, True),
        (added, LOWEST, False),
    ],
)
def test_rows_without_keys_are_the_models_own(attend, number, nan, fallback) -> None:
    """0 where PyTorch's function has 0, NaN where softmax by hand has NaN; the gradients, too."""
    model, mask = Model(attend), mask_of(number, (2, 1, 40, 40))
    inputs = [torch.randn(SHAPE) for _ in "qkv"]
    sites = sites_of(model, *inputs, mask)
    assert [site.kernel_type for site in sites] == ["flash_attention"]
    applied = autokernel.apply(copy.deepcopy(model), starters(sites), fallback)

    def run(called: nn.Module) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        result = called(*leaves, mask)
        result[:, :, 3].sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    expected = run(model)
    assert expected[0][:, :, 3].isnan().all().item() is nan
    with torch.no_grad():
        torch.testing.assert_close(applied(*inputs, mask), expected[0], equal_nan=True)
    torch.testing.assert_close(run(applied), expected, equal_nan=True)


def loss(**options):
    return lambda logits, targets: F.cross_entropy(logits, targets, **options)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.cat((t[:, :32], t[:, :32]), -1) for t in (cos, sin))
    return x * cos + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


# name -> (program, inputs): what no kernel of the type takes
NOT_TAKEN = {
    "attention of five dims": (F.scaled_dot_product_attention, [normal(2, 2, 2, 80, 32) for _ in "qkv"]),
    "values narrower than keys": (F.scaled_dot_product_attention, [normal(2, 4, 80, n) for n in (32, 32, 16)]),
    "values wider than keys": (F.scaled_dot_product_attention, [normal(2, 4, 80, n) for n in (32, 32, 64)]),
    "keys of one batch": (F.scaled_dot_product_attention, [normal(n, 4, 80, 32) for n in (3, 1, 1)]),
    "probabilities as targets": (loss(), [normal(400, 40), normal(400, 40).softmax(-1)]),
    "smoothed labels": (loss(label_smoothing=0.1), [normal(400, 40), torch.randint(40, (400,))]),
    "a sum of losses": (loss(reduction="sum"), [normal(400, 40), torch.randint(40, (400,))]),
    "classes in the second of three dims": (loss(), [normal(40, 40, 10), torch.randint(40, (40, 10))]),
    "angles of one position for all": (rotated, [normal(2, 16, 4, 64), normal(1, 64), normal(1, 64)]),
    "no rows": (F.linear, [normal(0, 128), normal(256, 128)]),
    "no images": (F.scaled_dot_product_attention, [normal(0, 4, 80, 32) for _ in "qkv"]),
    "nothing to sum": (lambda x, w: F.linear(x, w), [normal(64, 0), normal(256, 0)]),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_oracles_are_not_defined_for_is_no_site(name: str) -> None:
    function, inputs = NOT_TAKEN[name]
    found = [site.kernel_type for site in sites_of(Model(function), *inputs)]
    assert not found


def test_one_position_is_of_heads() -> None:
    """With one position, an x of heads reads like one of as many positions with a head each."""
    inputs = normal(8, 32, 1, 64), normal(1, 64), normal(1, 64)
    (site,) = sites_of(Model(rotated), *inputs)
    assert site.kernel_type == "rotary_embedding"
    assert site.case.args["x"].shape[2] == site.case.args["cos"].shape[0] == 1


@pytest.mark.parametrize("shape", [(1,), (16, 1), (16, 256)])
def test_weights_of_another_shape_are_not_a_norms(shape: tuple[int, ...]) -> None:
    """Kernels read one for each column. The norm is a site without them."""
    (site,) = sites_of(Model(weighed), normal(4, 16, 256), normal(*shape))
    assert (site.kernel_type, site.case.args["weight"].shape) == ("rmsnorm", (256,))
    assert site.output.users


def test_class_weights_are_not_left_out() -> None:
    weighted = Model(lambda logits, targets, weight: F.cross_entropy(logits, targets, weight))
    assert not sites_of(weighted, normal(400, 40), torch.randint(40, (400,)), torch.rand(40))


def test_a_proof_says_nothing_of_other_widths() -> None:
    """What is costly to prove is proven once for all sizes of one operator, not for shapes that kernels do not take."""
    finder = SiteFinder()

    def found(width: int) -> tuple[list[Site], list]:
        inputs = [normal(1, 4, 400, n) for n in (64, 64, width)]
        return finder.examine(capture(Model(F.scaled_dot_product_attention), tuple(inputs), {}).graphs[0].module)

    assert len(found(64)[0]) == 1
    sites, refusals = found(32)
    assert not sites and [refusal.why for refusal in refusals] == [RejectReason.SHAPES]


@pytest.mark.parametrize("classes", [1, 2, 5, 7])
def test_few_classes(classes: int) -> None:
    model, inputs = Model(loss()), (normal(20_000, classes), torch.randint(classes, (20_000,)))
    sites = sites_of(model, *inputs)
    assert [site.kernel_type for site in sites] == ["cross_entropy"]
    with torch.no_grad():
        torch.testing.assert_close(autokernel.apply(copy.deepcopy(model), starters(sites))(*inputs), model(*inputs))


class Residual(nn.Module):
    """Adds in place to what a norm has read, whose eps is PyTorch's own."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.linear, self.norm = nn.Linear(128, 128, dtype=dtype), nn.RMSNorm(128, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        h += self.linear(self.norm(h))
        return h


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eps_that_is_not_given_where_memory_changes(dtype: torch.dtype) -> None:
    """Rows so small that the eps decides what becomes of them."""
    model, x = Residual(dtype), (normal(128, 128) * 1e-4).to(dtype)
    sites = sites_of(model, x)
    assert [site.case.args["eps"] for site in sites if site.kernel_type == "rmsnorm"] == [torch.finfo(torch.float32).eps]
    options = {"rtol": ELEMENT_TOLERANCE[dtype], "atol": ELEMENT_TOLERANCE[dtype]}
    with torch.no_grad():
        torch.testing.assert_close(autokernel.apply(copy.deepcopy(model), starters(sites))(x), model(x), **options)


def test_no_rows_after_some() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256)).eval()
    x = normal(64, 128)
    applied = autokernel.apply(copy.deepcopy(model), starters(sites_of(model, x)))
    with torch.no_grad():
        for rows in (64, 0, 32, 64):
            torch.testing.assert_close(applied(x[:rows]), model(x[:rows]))
