"""Masks that a model makes of constants: what is_causal says is said so, anything else stays as it is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autokernel.gate.checks.inputs import fill_inputs
from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.nodes import aten
from autokernel.spec import Case, load_spec
from benchmarks.architectures import starters

LENGTH = 48


def ages(length):
    return torch.arange(length)[:, None] - torch.arange(length)


def in_place(length):
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[3, 1] = False
    return mask


CAUSAL = {
    "comparison": lambda n: ages(n) >= 0,
    "for each batch": lambda n: ((ages(n) >= 0) & torch.ones(2, n, dtype=torch.int64).cumsum(1).ge(1)[:, None, :])[:, None],
    "minus infinity": lambda n: torch.full((n, n), -math.inf).triu(1),
    "lowest": lambda n: torch.full((n, n), torch.finfo(torch.float32).min).triu(1),
}
OTHERS = {
    "window": lambda n: (ages(n) >= 0) & (ages(n) < n // 2),
    "without the last": lambda n: ages(n) > -n + 1,
    "in place": in_place,
    "random": lambda n: (ages(n) >= 0) | (torch.rand(n, n) > 2),
    "a little": lambda n: torch.full((n, n), -10.0).triu(1),
}


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        q, k, v = x.view(2, -1, 3, 4, 32).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, self.mask(x.shape[1])).sum(1)


def attention_in(model, *inputs):
    (graph,) = capture(model, inputs, {}).graphs
    (node,) = graph.module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    sizes = [n for n in graph.module.graph.nodes if n.op == "call_function" and len(n.meta["val"].shape) == 2]
    return (*node.args[3:], *[None, 0.0, False][len(node.args) - 3 :]), sizes


def given(length=LENGTH):
    return torch.randn(2, length, 384)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_left_out_and_so_is_what_makes_it(name):
    (mask, dropout, is_causal), sizes = attention_in(Attention(CAUSAL[name]), given())
    assert (mask, dropout, is_causal) == (None, 0.0, True)
    assert not sizes, "nothing of the mask is computed any more"


def test_a_mask_that_hides_nothing_is_left_out():
    (mask, _, is_causal), _ = attention_in(Attention(lambda n: ages(n) > -n), given())
    assert mask is None and not is_causal


def with_three_dims(length):
    """No fused kernel takes it, and without it one is taken, whose result has other strides."""
    return (ages(length) > -length)[None]


@pytest.mark.parametrize("fallback", (None, "inductor"))
def test_without_its_mask_attention_has_the_strides_that_it_had(fallback):
    class Heads(Attention):
        def forward(self, x):
            q, k, v = x.view(2, -1, 3, 4, 32).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, self.mask(x.shape[1]))

    (graph,) = capture(Heads(with_three_dims), (given(),), {}).graphs
    (node,) = graph.module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert node.args[3] is None and [user.target for user in node.users] == [aten.contiguous.default]
    (site,) = [site for site in SiteFinder().find(graph.module) if site.kernel_type == "flash_attention"]
    model, x = Heads(with_three_dims), given()
    for winners in ((), starters([site])):
        with torch.no_grad():
            ours, theirs = compile_with_kernels(model, Replacer(winners, fallback))(x), model(x)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert ours.stride() == theirs.stride() == (6144, 1536, 32, 1)


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_stays(name):
    (mask, _, is_causal), _ = attention_in(Attention(OTHERS[name]), given())
    assert mask is not None and not is_causal


def test_a_mask_of_other_lengths_is_counted_from_the_first_key():
    """As is_causal counts: with a cache the queries are the last ones, whose mask is another."""

    class Later(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first = first

        def forward(self, q, k):
            mask = torch.arange(8)[:, None] + self.first >= torch.arange(32)
            return F.scaled_dot_product_attention(q, k, k, mask)

    inputs = torch.randn(1, 2, 8, 32), torch.randn(1, 2, 32, 32)
    for first, left_out in {0: True, 24: False}.items():
        (mask, _, is_causal), _ = attention_in(Later(first), *inputs)
        assert (mask is None, bool(is_causal)) == (left_out, left_out)


def test_one_row_of_a_mask_for_all_queries_stays():
    """The first key alone is what is_causal shows to the first query, and not to others."""
    (mask, _, is_causal), _ = attention_in(Attention(lambda n: (torch.arange(n) < 1)[None]), given())
    assert mask is not None and not is_causal


def test_a_mask_that_is_given_or_that_the_model_keeps_stays():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", ages(LENGTH) >= 0)

        def forward(self, q, mask=None):
            return F.scaled_dot_product_attention(q, q, q, self.mask if mask is None else mask)

    q = torch.randn(1, 2, LENGTH, 32)
    for inputs in ((q,), (q, ages(LENGTH) >= 0)):
        (mask, _, is_causal), _ = attention_in(Kept(), *inputs)
        assert mask is not None and not is_causal


def as_transformers(padding):
    """Whom a query sees is asked for queries and keys, the former without meaning."""
    length = padding.shape[1]
    queries, keys = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None]
    seen = (queries >= 0) & padding[torch.arange(len(padding))[:, None, None, None], keys]
    return seen.expand(len(padding), -1, length, length)


PADDING = {
    "as transformers": as_transformers,
    "repeated": lambda padding: padding[:, None, None].expand(-1, 1, padding.shape[1], -1).contiguous(),
    "added": lambda padding: torch.where(padding[:, None, None], 0.0, -math.inf) + torch.zeros(padding.shape[1], 1),
}
NO_PADDING = {
    "what comes later as well": lambda padding: as_transformers(padding) & (ages(padding.shape[1]) >= 0),
    "from queries, too": lambda padding: padding[:, None, None] & padding[:, None, :, None],
    "written to": lambda padding: as_transformers(padding).clone().index_fill_(2, torch.tensor([1]), True),
    "for a second time": lambda padding: torch.where(torch.rand(padding.shape[1], 1) < 2, padding[:, None, None], False),
}


class Padded(Attention):
    def forward(self, x, padding):
        q, k, v = x.view(2, -1, 3, 4, 32).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, self.mask(padding)).sum(1)


def padding(length=LENGTH):
    return torch.arange(length) < torch.tensor([[length], [length - 9]])


@pytest.mark.parametrize("name", PADDING)
def test_a_mask_for_padding_has_one_row(name):
    model, inputs = Padded(PADDING[name]), (given(), padding())
    (graph,) = capture(model, inputs, {}).graphs
    (node,) = graph.module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert node.args[3].meta["val"].stride(-2) == 0
    (site,) = [site for site in SiteFinder().find(graph.module) if site.kernel_type == "flash_attention"]
    assert site.case.args["attn_mask"].strides[-2] == 0
    replacer = Replacer(starters([site]))
    torch.testing.assert_close(compile_with_kernels(model, replacer)(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)
    assert replacer.replaced


@pytest.mark.parametrize("name", NO_PADDING)
def test_a_mask_that_does_not_treat_queries_alike_keeps_its_rows(name):
    (graph,) = capture(Padded(NO_PADDING[name]), (given(), padding()), {}).graphs
    (node,) = graph.module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert node.args[3].meta["val"].stride(-2) != 0


@pytest.mark.parametrize("fallback", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_with_kernels_the_model_is_itself_in_every_length_and_trains(fallback):
    model = Attention(CAUSAL["for each batch"])
    (graph,) = capture(model, (given(),), {}).graphs
    (site,) = [site for site in SiteFinder().find(graph.module) if site.kernel_type == "flash_attention"]
    assert site.case.args["causal"]
    replacer = Replacer(starters([site]), fallback)
    optimised = compile_with_kernels(model, replacer)
    for length in (LENGTH, 40, 56):
        x = given(length)
        torch.testing.assert_close(optimised(x), model(x), atol=1e-5, rtol=1e-5)
    assert replacer.replaced
    x, y = (given().requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    optimised(x).square().sum().backward(), model(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_pytorch_makes_of_every_form_of_mask_is_right(device):
    """On a GPU its attention reads what lies beyond a float mask of one number for all keys, and averages where there are
    none."""
    spec = load_spec("flash_attention")
    masked = (args for args in spec.forms(torch.float16) if args["attn_mask"])
    for seed, args in enumerate(masked):
        made = fill_inputs(spec, Case(str(seed), args), seed)
        made |= {name: value.to(device) for name, value in made.items() if isinstance(value, torch.Tensor)}
        exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in made.items()}
        error = (spec.native(**made).double() - spec.oracle(**exact)).abs()
        assert error.max() < 1e-2, args["attn_mask"]
