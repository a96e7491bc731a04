"""Patterns: each finds what it is meant for, and nothing that computes something else.

What is found is computed by the oracle instead, on random inputs, and compared with the original: for every pattern, for
near misses written by hand, and for every pattern with something changed in it at random.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from autokernel.model.match import SiteFinder
from autokernel.model.nodes import aten
from autokernel.model.patterns import Pattern, Site, patterns_of
from autokernel.model.placement import RejectReason
from autokernel.model.tracing import trace
from autokernel.spec import kernel_types, load_spec

PATTERNS = [
    pytest.param(kernel_type, pattern, id=f"{kernel_type}-{i}-{pattern.example.__name__}")
    for kernel_type in kernel_types()
    for i, pattern in enumerate({id(p): p for p, _ in patterns_of(kernel_type).graphs}.values())
]
NUMBERS = {"sm_scale": 0.3, "number": 0.3}
SHAPES = {(1, 1, 1, 1, 1, 2): (2, 1, 3, 1, 2, 4)}  # of reductions: nothing to be reduced would be nothing to be seen


class WithOracles(Interpreter):
    """A graph in which the oracles compute the sites."""

    def __init__(self, graph: GraphModule, sites: list[Site]):
        super().__init__(graph, garbage_collect_values=False)
        self.sites = {site.output: site for site in sites}

    def run_node(self, n: Node) -> Any:
        if n not in self.sites:
            return super().run_node(n)
        site = self.sites[n]
        given = {k: self.env[v] if isinstance(v, Node) else v for k, v in site.parameters.items()}
        return site.pattern.call(load_spec(site.kernel_type).oracle, **given)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def same_with_oracles(graph: GraphModule, sites: list[Site], inputs: list[Tensor]) -> None:
    expected = graph(*(t.clone() for t in inputs))  # some graphs change their inputs
    torch.testing.assert_close(WithOracles(graph, sites).run(*inputs), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def found(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    """The types of its sites, which compute the same."""
    graph = trace(function, list(inputs), "fake")
    sites = SiteFinder(min_elements=0).find(graph)
    same_with_oracles(graph, sites, list(inputs))
    return [site.kernel_type for site in sites]


def in_halves(t: Tensor) -> Tensor:
    return t.chunk(2, -1)[0].repeat(*[1] * (t.dim() - 1), 2)


def in_pairs(t: Tensor) -> Tensor:
    return t[..., ::2].repeat_interleave(2, -1)


def as_model(pattern: Pattern, twice: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The example of a pattern as a function of its tensors; `given` ones are made as models make them."""
    numbers = {k: NUMBERS.get(k, v) for k, v in pattern.inputs.items() if not isinstance(v, (tuple, Tensor))}
    shapes = {k: v for k, v in pattern.inputs.items() if k not in numbers}
    tensors = {k: rand(*SHAPES.get(v, v)) if isinstance(v, tuple) else v for k, v in shapes.items()}
    tensors |= {k: draw(**tensors) for k, draw in pattern.draws.items()}

    def model(*values: Tensor) -> Tensor:
        parameters = dict(zip(tensors, values))
        given = {name: twice(parameters[name]) for name in pattern.given}
        return pattern.example(**parameters | given, **numbers)

    return model, list(tensors.values())


@pytest.mark.parametrize(("kernel_type", "pattern"), PATTERNS)
def test_every_pattern_is_found_in_its_own_example(kernel_type: str, pattern: Pattern) -> None:
    ways = [as_model(pattern, twice) for twice in (in_halves, in_pairs)]
    assert any(kernel_type in found(model, *inputs) for model, inputs in ways)


# --- something changed at random -------------------------------------------------------------------------------------

OTHERS = {
    aten.add.Tensor: aten.sub.Tensor,
    aten.sub.Tensor: aten.add.Tensor,
    aten.mul.Tensor: aten.div.Tensor,
    aten.div.Tensor: aten.mul.Tensor,
    aten.rsqrt.default: aten.reciprocal.default,
    aten.sqrt.default: aten.exp.default,
    aten.silu.default: aten.tanh.default,
    aten.gelu.default: aten.relu.default,
    aten.relu.default: aten.abs.default,
    aten.neg.default: aten.abs.default,
}


def other_operator(graph: GraphModule, node: Node) -> None:
    if node.target in OTHERS:
        node.target, node.kwargs = OTHERS[node.target], {}
        node.args = node.args[: len(node.target._schema.arguments)]


def other_number(graph: GraphModule, node: Node) -> None:
    node.args = tuple(a * 1.5 if isinstance(a, float) else a for a in node.args)


def bias(graph: GraphModule, node: Node) -> None:
    insert(graph, node, aten.add.Tensor, 0.5)


def gain(graph: GraphModule, node: Node) -> None:
    insert(graph, node, aten.mul.Tensor, 1.25)


def cap(graph: GraphModule, node: Node) -> None:
    insert(graph, node, aten.tanh.default)


def used_elsewhere(graph: GraphModule, node: Node) -> None:
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((output.args[0], node),)


def insert(graph: GraphModule, node: Node, target: Any, *numbers: float) -> None:
    with graph.graph.inserting_after(node):
        new = graph.graph.call_function(target, (node, *numbers))
    new.meta = node.meta
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("change", [other_operator, other_number, bias, gain, cap, used_elsewhere])
def test_patterns_with_something_changed_are_found_only_where_that_is_the_same(change: Callable[..., None]) -> None:
    choose, finder = random.Random(0), SiteFinder(min_elements=0)
    for case in choose.sample(PATTERNS, 40):
        model, inputs = as_model(case.values[1], in_halves)
        graph = trace(model, inputs, "fake")
        floating = [
            n
            for n in graph.graph.nodes
            if n.op == "call_function" and isinstance(n.meta["val"], Tensor) and n.meta["val"].is_floating_point()
        ]
        change(graph, choose.choice(floating))
        graph.recompile()
        same_with_oracles(graph, finder.find(graph), inputs)


# --- near misses ----------------------------------------------------------------------------------------------------


def normed(x: Tensor, eps: float = 1e-3) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / 2


def distances(n: int) -> Tensor:
    return torch.arange(n)[None, :] - torch.arange(n)[:, None]


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    return torch.softmax(scores(q, k) + slopes * distances(8), -1) @ v


def sliding_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = (distances(8) <= 0) & (distances(8) > -3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def leaky(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    return x * scale * w, scale


def changed_in_between(x: Tensor, w: Tensor) -> Tensor:
    """The norm's input changes, under another name, before it is scaled."""
    h = x.reshape(4, 8)
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)
    x.add_(1)
    return h * scale * w


QKV = [(1, 2, 8, 4)] * 3
BY_PARTS = ("bmm", "softmax", "bmm")  # of attention
NORM = [(4, 8), (8,)]
ROTARY = [(1, 2, 8, 8), (1, 1, 8, 8), (1, 1, 8, 8)]
MLP = [(4, 8), (16, 8), (16, 8), (8, 16)]
LINEAR = [(4, 8), (16, 8), (16,)]


def quick_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return y * torch.sigmoid(1.702 * y)


@dataclass(frozen=True)
class NearMiss:
    function: Callable[..., Any]
    shapes: list[tuple[int, ...]]
    types: tuple[str, ...] = ()  # what is found all the same, because it is what it seems


NEAR_MISSES = {
    "eps outside the root": NearMiss(lambda x, w: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-3) * w, NORM),
    "eps outside the inverse root": NearMiss(
        lambda x, w: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-3) * w, NORM
    ),
    "eps for the square": NearMiss(lambda x, w: x * torch.rsqrt((x + 1e-3).pow(2).mean(-1, keepdim=True)) * w, NORM),
    "sum for the mean": NearMiss(
        lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-3) * w, NORM, ("reduce",)
    ),
    "norm of another dim": NearMiss(
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-3) * w, [(8, 8), (8,)]
    ),
    "cubes": NearMiss(lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3) * w, NORM),
    "a gain of one more": NearMiss(lambda x, w: normed(x) * (1 + w), NORM, ("rmsnorm",)),
    "a gain by number": NearMiss(lambda x, w: normed(x) * w * 1.5, NORM, ("rmsnorm",)),
    "an added bias": NearMiss(lambda x, w, b: normed(x) * w + b, [*NORM, (8,)], ("rmsnorm",)),
    "a bias before the gain": NearMiss(lambda x, w, b: (normed(x) + b) * w, [*NORM, (8,)], ("rmsnorm",)),
    "an intermediate is used elsewhere": NearMiss(leaky, NORM),
    "changed in between": NearMiss(changed_in_between, NORM),
    "unbiased variance": NearMiss(
        lambda x, w, b: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-3) * w + b, [*NORM, (8,)]
    ),
    "eps beside the deviation": NearMiss(
        lambda x, w, b: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=False) + 1e-3) * w + b,
        [*NORM, (8,)],
    ),
    "soft cap": NearMiss(lambda q, k, v: torch.softmax(torch.tanh(scores(q, k) / 5) * 5, -1) @ v, QKV, BY_PARTS),
    "ALiBi": NearMiss(alibi, QKV, ("flash_attention",)),  # as a mask, which the model computes
    "sliding window": NearMiss(sliding_window, QKV, ("flash_attention",)),  # the same
    "softmax of the wrong dim": NearMiss(lambda q, k, v: torch.softmax(scores(q, k), -2) @ v, QKV, BY_PARTS),
    "scaled after the softmax": NearMiss(
        lambda q, k, v: (torch.softmax(q @ k.transpose(-2, -1), -1) / 2) @ v, QKV, BY_PARTS
    ),
    "probabilities are used elsewhere": NearMiss(
        lambda q, k, v: (torch.softmax(scores(q, k), -1) @ v, torch.softmax(scores(q, k), -1).sum()),
        QKV,
        ("bmm", "flash_attention", "reduce", "softmax"),
    ),
    "sigmoid for GELU": NearMiss(
        lambda x, g, u, d: F.linear(F.linear(x, g) * torch.sigmoid(1.702 * F.linear(x, g)) * F.linear(x, u), d),
        MLP,
        ("matmul",) * 4,
    ),
    "a bias of the gate": NearMiss(
        lambda x, g, u, d, b: F.linear(F.silu(F.linear(x, g, b)) * F.linear(x, u), d),
        [*MLP, (16,)],
        ("fused_linear", "matmul", "matmul"),
    ),
    "gate without a product": NearMiss(
        lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) + F.linear(x, u), d),
        MLP,
        ("fused_linear", "matmul", "matmul"),
    ),
    "an activation of another scale": NearMiss(quick_gelu, LINEAR, ("fused_linear",)),
    "an activation whose argument is used elsewhere": NearMiss(
        lambda x, w, b: (y := F.linear(x, w, b)).relu() + y, LINEAR, ("fused_linear",)
    ),
    "an activation with a slope": NearMiss(lambda x, w, b: F.leaky_relu(F.linear(x, w, b)), LINEAR, ("fused_linear",)),
    "a matrix added before the activation": NearMiss(
        lambda x, w, b, m: F.gelu(F.linear(x, w) + m), [*LINEAR, (4, 16)], ("matmul",)
    ),
    "another gelu by tanh": NearMiss(
        lambda x, w, b: 0.5 * (y := F.linear(x, w, b)) * (1 + torch.tanh(0.8 * (y + 0.044715 * y**3))),
        LINEAR,
        ("fused_linear",),
    ),
    "halves of cos differ": NearMiss(lambda x, cos, sin: x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin, ROTARY),
    "rotated the other way": NearMiss(
        lambda x, cos, sin: x * in_halves(cos) + torch.cat((x[..., 4:], x[..., :4]), -1) * in_halves(sin), ROTARY
    ),
    "sum of losses": NearMiss(lambda x: F.cross_entropy(x, torch.arange(4), reduction="sum"), [(4, 8)]),
    "label smoothing": NearMiss(lambda x: F.cross_entropy(x, torch.arange(4), label_smoothing=0.1), [(4, 8)]),
    "weighted classes": NearMiss(lambda x, w: F.cross_entropy(x, torch.arange(4), w.abs()), [(4, 8), (8,)]),
    "log softmax": NearMiss(lambda x: torch.log_softmax(x, -1), [(4, 8)]),
    "a product of batches": NearMiss(lambda a, b: a @ b, [(2, 4, 8), (2, 8, 4)], ("bmm",)),
    "a product of one matrix with many": NearMiss(lambda a, b: a @ b, [(4, 8), (2, 8, 3)], ("bmm",)),
    "a product of batches, added": NearMiss(torch.baddbmm, [(2, 1, 4), (2, 4, 8), (2, 8, 4)], ("bmm",)),
    "a product of batches, half of it added": NearMiss(
        lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), [(2, 1, 4), (2, 4, 8), (2, 8, 4)]
    ),
    "a product with a vector": NearMiss(lambda a, b: a @ b, [(2, 4, 8), (8,)]),
    "a mean": NearMiss(lambda x: x.mean(-1), [(4, 8)]),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_no_sites_or_compute_the_same(name: str) -> None:
    miss = NEAR_MISSES[name]
    assert sorted(found(miss.function, *(rand(*shape) for shape in miss.shapes))) == sorted(miss.types)


IN_BATCHES = {
    "one head": lambda q, k, v, mask: torch.softmax(q @ k.mT / 3 + mask, -1) @ v,
    "PyTorch's function": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
    "bmm": lambda q, k, v, mask: torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 0.3 + mask[0], -1), v),
    "baddbmm": lambda q, k, v, mask: torch.bmm(torch.softmax(torch.baddbmm(mask, q * 0.3, k.mT), -1), v),
}


@pytest.mark.parametrize("name", IN_BATCHES)
def test_attention_has_any_number_of_dims(name: str) -> None:
    q, k, v = rand(6, 4, 8), rand(6, 5, 8), rand(6, 5, 8)
    for mask in (rand(1, 4, 5), rand(6, 4, 5), rand(6, 1, 5)):
        assert found(IN_BATCHES[name], q, k, v, mask) == ["flash_attention"]


RANDOM = {
    "in the attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), []),
    "of the probabilities": (
        lambda q, k, v: F.dropout(torch.softmax(scores(q, k), -1), 0.1) @ v,
        ["bmm", "softmax", "bmm"],
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_while_training_stays(name: str) -> None:
    function, types = RANDOM[name]
    graph = trace(function, [rand(*shape) for shape in QKV], "fake")
    assert [site.kernel_type for site in SiteFinder(min_elements=0).find(graph)] == types


# --- what is refused, and what is bound -----------------------------------------------------------------------------

REASONS = {
    RejectReason.SHAPES: ("matmul", lambda a, b: a @ b, [(2, 4, 8), (8,)]),
    RejectReason.DTYPES: ("softmax", lambda x: torch.softmax(x, -1, dtype=torch.float64), [(4, 8)]),
    RejectReason.ESCAPES: ("rmsnorm", leaky, NORM),
    RejectReason.WRITTEN: ("rmsnorm", changed_in_between, NORM),
    RejectReason.NUMBERS: ("rotary_embedding", NEAR_MISSES["halves of cos differ"].function, ROTARY),
}


@pytest.mark.parametrize("why", REASONS)
def test_what_is_refused_has_a_reason(why: RejectReason) -> None:
    kernel_type, function, shapes = REASONS[why]
    sites, refusals = SiteFinder(min_elements=0).examine(trace(function, [rand(*shape) for shape in shapes], "fake"))
    assert sites == [] and (kernel_type, why) in [(r.kernel_type, r.why) for r in refusals]


def test_small_sites_are_refused_as_small() -> None:
    _, refusals = SiteFinder().examine(trace(lambda x, w: normed(x) * w, [rand(4, 8), rand(8)], "fake"))
    assert {(r.kernel_type, r.why) for r in refusals} == {("rmsnorm", RejectReason.SMALL)}  # with and without its weight
    rows = [rand(8, 512), rand(512)]  # one kernel for six: worth a call, although a sum of as much is not
    assert [site.kernel_type for site in SiteFinder().find(trace(lambda x, w: normed(x) * w, rows, "fake"))] == ["rmsnorm"]
    assert SiteFinder().find(trace(lambda x, w: x.sum(-1), rows, "fake")) == []


def test_numbers_are_bound_to_what_the_model_has() -> None:
    graph = trace(lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 0.25)), [rand(4, 8), rand(8)], "fake")
    (site,) = SiteFinder(min_elements=0).find(graph)
    assert site.kernel_type == "rmsnorm" and site.case.args["eps"] == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_an_eps_that_is_not_given_is_pytorchs(dtype: torch.dtype, weighted: bool) -> None:
    x, w = (rand(4, 64) * 1e-4).to(dtype), torch.ones(64, dtype=dtype)
    graph = trace(lambda x, w: F.rms_norm(x, (64,), w if weighted else None), [x, w], "fake")
    (site,) = SiteFinder(min_elements=0).find(graph)
    ours = load_spec("rmsnorm").oracle(x.double(), w.double(), site.case.args["eps"])
    torch.testing.assert_close(F.rms_norm(x, (64,), w), ours.to(dtype))


EINSUMS = {  # equations, shapes, what they are; None: of elements, or of dims of which there are several
    "attention": (
        lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / 2, -1), v),
        QKV,
        "flash_attention",
    ),
    "attention, heads inside": (
        lambda q, k, v: torch.einsum("bhqk,bkhd->bqhd", torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1), v),
        QKV,
        "flash_attention",
    ),
    "linear": (lambda x, w: torch.einsum("b s d, f d -> b s f", x, w), [(2, 3, 8), (5, 8)], "matmul"),
    "transposed result": (lambda a, b: torch.einsum("ij,jk->ki", a, b), [(3, 8), (8, 5)], "matmul"),
    "other strides": (lambda a, b: torch.einsum("bij,bjk->ibk", a, b), [(2, 3, 8), (2, 8, 5)], "bmm"),
    "heads of a projection": (lambda x, w: torch.einsum("btd,dhk->bthk", x, w), [(2, 3, 8), (8, 4, 5)], "matmul"),
    "projection of heads": (lambda x, w: torch.einsum("bthk,hkd->btd", x, w), [(2, 3, 4, 5), (4, 5, 8)], "matmul"),
    "states of chunks": (lambda a, b: torch.einsum("bzch,bzhpn->bchpn", a, b), [(2, 3, 4, 5), (2, 3, 5, 6, 7)], "bmm"),
    "rows of a batch": (lambda a, b: torch.einsum("bqrhd,bkhd->bhqrk", a, b), [(2, 3, 4, 5, 8), (2, 6, 5, 8)], "bmm"),
    "sum of rows": (lambda a, b: torch.einsum("ij,kj->i", a, b), [(3, 8), (5, 8)], "reduce matmul"),
    "diagonal": (lambda a, b: torch.einsum("ii,ij->ij", a, b), [(8, 8), (8, 8)], None),
    "broadcast": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 1), (8, 5)], "reduce"),
    "three": (lambda a, b, c: torch.einsum("tk,tke,tkc->tec", a, b, c), [(8, 2), (8, 2, 3), (8, 2, 4)], "bmm"),
    "contracted": (lambda a, b: torch.tensordot(a, b, ([2], [1])), [(2, 3, 8), (5, 8)], "matmul"),
    "implicit": (lambda a, b: torch.einsum("ij,kj", a, b), [(3, 8), (5, 8)], "matmul"),
    "ellipsis": (lambda a, b: torch.einsum("...j,jk->...k", a, b), [(2, 3, 8), (8, 5)], "matmul"),
    "ellipses": (lambda a, b: torch.einsum("...ij,b...jk->b...ik", a, b), [(3, 4, 8), (2, 3, 8, 5)], "bmm"),
    "ellipses of a batch": (lambda a, b: torch.einsum("b...j,b...kj->b...k", a, b), [(2, 3, 8), (2, 3, 5, 8)], "bmm"),
    "ellipses of matrices": (lambda a, b: torch.einsum("...ij,...kj->...ik", a, b), [(2, 3, 4, 8), (2, 3, 5, 8)], "bmm"),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_an_einsum_is_what_it_computes(name: str) -> None:
    function, shapes, kernel_type = EINSUMS[name]
    assert found(function, *(rand(*shape) for shape in shapes)) == (kernel_type or "").split()


def in_channels_last(x: Tensor, *arguments: Tensor) -> Tensor:
    return F.conv2d(x.to(memory_format=torch.channels_last), *arguments)


PICTURE, BIAS = (2, 3, 8, 12), (5,)
CONVOLUTIONS = {
    "patches": (lambda x, w, b: F.conv2d(x, w, b, stride=4), [PICTURE, (5, 3, 4, 4), BIAS], "fused_linear"),
    "patches of a video": (lambda x, w: F.conv3d(x, w, stride=(2, 4, 2)), [(2, 3, 4, 8, 6), (5, 3, 2, 4, 2)], "matmul"),
    "patches of sound": (lambda x, w: F.conv1d(x, w, stride=4), [(2, 3, 8), (5, 3, 4)], "matmul"),
    "of one element": (in_channels_last, [PICTURE, (5, 3, 1, 1), BIAS], "fused_linear"),
    "of one element, in planes": (F.conv2d, [PICTURE, (5, 3, 1, 1), BIAS], None),
    "padded": (lambda x, w, b: F.conv2d(x, w, b, stride=4, padding=2), [PICTURE, (5, 3, 4, 4), BIAS], None),
    "overlapping": (lambda x, w, b: F.conv2d(x, w, b, stride=2), [PICTURE, (5, 3, 4, 4), BIAS], None),
    "apart": (lambda x, w, b: F.conv2d(x, w, b, stride=4), [PICTURE, (5, 3, 2, 2), BIAS], None),
    "by groups": (lambda x, w, b: F.conv2d(x, w, b, stride=4, groups=3), [PICTURE, (6, 1, 4, 4), (6,)], None),
    "dilated": (lambda x, w, b: F.conv2d(x, w, b, stride=4, dilation=2), [PICTURE, (5, 3, 4, 4), BIAS], None),
    "with a rest": (lambda x, w, b: F.conv2d(x, w, b, stride=4), [(2, 3, 9, 12), (5, 3, 4, 4), BIAS], None),
    "by name": (lambda x, w, b: F.conv2d(x, w, b, 2, "valid"), [PICTURE, (5, 3, 2, 2), BIAS], None),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_windows_that_lie_side_by_side_are_rows_of_a_product(name: str) -> None:
    function, shapes, kernel_type = CONVOLUTIONS[name]
    assert found(function, *(rand(*shape) for shape in shapes)) == ([kernel_type] if kernel_type else [])


GROUPED = {
    "experts": (lambda x, w, offs: F.grouped_mm(x, w, offs=offs), (20, 16), (3, 16, 8), True),
    "of linear layers": (lambda x, w, offs: F.grouped_mm(x, w.mT, offs=offs), (20, 16), (3, 8, 16), True),
    "groups of terms": (lambda x, w, offs: F.grouped_mm(x.mT, w, offs=offs), (24, 16), (24, 8), False),
    "groups of columns": (lambda x, w, offs: F.grouped_mm(x, w, offs=offs), (3, 8, 16), (16, 24), False),
}


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_of_rows_are_found(name: str) -> None:
    """As PyTorch writes them, in bfloat16 alone where their shapes are asked for."""
    function, rows, matrices, is_found = GROUPED[name]
    x, weight = rand(*rows).bfloat16(), rand(*matrices).bfloat16()
    graph = trace(function, [x, weight, torch.tensor([8, 8, 16], dtype=torch.int32)], "fake")
    sites = SiteFinder(min_elements=0).find(graph)
    assert [site.kernel_type for site in sites] == ["grouped_matmul"] * is_found


def test_a_loss_of_shifted_flattened_rows_is_found() -> None:
    """Next-token prediction: the last position has no target, and some are to be ignored."""

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].reshape(-1, 9).float(), tokens[:, 1:].reshape(-1), ignore_index=3)

    assert found(loss, rand(2, 5, 9), torch.randint(9, (2, 5))) == ["cross_entropy"]
