"""Sites: every way to write an operation is found, what only looks like it is not, and both hold for whole models."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autokernel.capture import capture, trace
from autokernel.match import Pattern, SiteFinder, pattern_graphs
from autokernel.spec import kernel_types
from autokernel.workload import Workload
from models.llama import CompactLlama, RMSNorm

PATTERNS = [
    pytest.param(kernel_type, pattern, id=f"{kernel_type}-{i}-{pattern.example.__name__}")
    for kernel_type in kernel_types()
    for i, pattern in enumerate({id(p): p for p, _ in pattern_graphs(kernel_type)}.values())
]


def sites_of(function, *inputs):
    return SiteFinder(min_elements=0).find(trace(function, list(inputs), "fake"))


def types_of(function, *inputs):
    return [site.kernel_type for site in sites_of(function, *inputs)]


def rand(*shape):
    return torch.randn(shape)


def in_halves(t):
    return t.chunk(2, -1)[0].repeat(*[1] * (t.dim() - 1), 2)


def in_pairs(t):
    return t[..., ::2].repeat_interleave(2, -1)


@pytest.mark.parametrize(("kernel_type", "pattern"), PATTERNS)
def test_every_pattern_is_found_and_proven_in_its_own_example(kernel_type: str, pattern: Pattern) -> None:
    numbers = {k: v for k, v in pattern.inputs.items() if not isinstance(v, (tuple, torch.Tensor))}
    if "sm_scale" in numbers:
        numbers["sm_scale"] = 0.3
    tensors = {k: rand(*v) if isinstance(v, tuple) else v for k, v in pattern.inputs.items() if k not in numbers}

    def model(twice, *values):
        parameters = dict(zip(tensors, values))
        given = {name: twice(parameters[name]) for name in pattern.given}  # what the model guarantees shows in its graph
        return pattern.example(**parameters | given, **numbers)

    assert any(kernel_type in types_of(partial(model, twice), *tensors.values()) for twice in (in_halves, in_pairs))


def softcapped(q, k, v):
    return torch.softmax(torch.tanh(q @ k.transpose(-2, -1) / 5) * 5, -1) @ v


NEAR_MISSES = {
    "eps outside the root": (lambda x, w: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-3) * w, [(4, 8), (8,)]),
    "norm of another dim": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-3) * w, [(8, 8), (8,)]),
    "cubes": (lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3) * w, [(4, 8), (8,)]),
    "unbiased variance": (
        lambda x, w, b: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-3) * w + b,
        [(4, 8), (8,), (8,)],
    ),
    "soft cap": (softcapped, [(1, 2, 8, 4)] * 3),
    "dropout while training": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        [(1, 2, 8, 4)] * 3,
    ),
    "tanh GELU": (
        lambda x, g, u, d: F.linear(F.gelu(F.linear(x, g), approximate="tanh") * F.linear(x, u), d),
        [(4, 8), (16, 8), (16, 8), (8, 16)],
    ),
    "halves of cos differ": (
        lambda x, cos, sin: x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin,
        [(1, 2, 8, 8), (1, 1, 8, 8), (1, 1, 8, 8)],
    ),
    "sum of losses": (
        lambda x: F.cross_entropy(x, torch.arange(4), reduction="sum"),
        [(4, 8)],
    ),
    "label smoothing": (lambda x: F.cross_entropy(x, torch.arange(4), label_smoothing=0.1), [(4, 8)]),
}
HARMLESS = {"matmul", "softmax"}  # parts of a near miss that are what they seem


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_no_sites(name: str) -> None:
    function, shapes = NEAR_MISSES[name]
    assert set(types_of(function, *(rand(*shape) for shape in shapes))) <= HARMLESS


def test_an_intermediate_used_elsewhere_keeps_its_operation_in_the_model() -> None:
    def leaky(x, w):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
        return x * scale * w, scale

    assert types_of(leaky, rand(4, 8), rand(8)) == []


def test_numbers_are_bound_to_what_the_model_has() -> None:
    (site,) = sites_of(lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 0.25)), rand(4, 8), rand(8))
    assert site.kernel_type == "rmsnorm" and site.case.args["eps"] == 0.25


SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden": 128, "vocab_size": 100}
LLAMA = Workload(model_args=SMALL, input_shape=(1, 256))


def found(workload: Workload) -> Counter:
    model, args, kwargs = workload.load()
    graphs = capture(model, args, kwargs).graphs
    return Counter(site.kernel_type for graph in graphs for site in SiteFinder(min_elements=0).find(graph.module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_of_compact_llama_is_found(dtype: str) -> None:
    sites = found(Workload(model_args=SMALL, input_shape=(1, 256), dtype=dtype))
    per_model = {"rmsnorm": 5, "rotary_embedding": 4, "flash_attention": 2, "fused_mlp": 2, "matmul": 9}
    assert sites == per_model


HUGGING_FACE = {
    "LlamaForCausalLM": (
        {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 99}
        | {"num_key_value_heads": 2},
        {"rmsnorm": 3, "rotary_embedding": 2, "flash_attention": 1, "fused_mlp": 1, "matmul": 5},
    ),
    "GPT2LMHeadModel": (
        {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0},
        {"layernorm": 3, "flash_attention": 1, "matmul": 5},
    ),
    "BertModel": (
        {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 99},
        {"layernorm": 3, "flash_attention": 1, "matmul": 7},
    ),
}


@pytest.mark.parametrize("class_name", HUGGING_FACE)
def test_sites_of_hugging_face_models(class_name: str) -> None:
    pytest.importorskip("transformers")
    config, expected = HUGGING_FACE[class_name]
    assert found(Workload("transformers", class_name, config, (2, 32))) == expected


class Broken(nn.Module):
    """Three norms with graph breaks between them; the last is in a loop that Dynamo gives up on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = RMSNorm(8), RMSNorm(8)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.looped(self.first(x))

    def looped(self, x):
        for _ in range(3):
            x = self.second(x)
            torch._dynamo.graph_break()
        return x


def test_graph_breaks_make_several_graphs_with_their_calls_counted() -> None:
    captured = capture(Broken(), (rand(4, 8),), {})
    finder = SiteFinder(min_elements=0)
    calls = sum(graph.calls * len(finder.find(graph.module)) for graph in captured.graphs)
    assert len(captured.graphs) > 1 and captured.breaks
    assert calls == 5


def test_strides_are_the_models() -> None:
    model = CompactLlama(**SMALL)
    (graph,) = capture(model, (torch.randint(100, (1, 256)),), {}).graphs
    rotary = next(s for s in SiteFinder().find(graph.module) if s.kernel_type == "rotary_embedding")
    assert rotary.case.args["x"].shape == (1, 4, 256, 16)
    assert rotary.case.args["x"].strides == (256 * 64, 16, 64, 1)  # the transpose of a projection
