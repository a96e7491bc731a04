"""Sites in whole models: all that there are, their calls, and the model's own shapes and strides."""

from collections import Counter

import pytest
import torch
from torch import nn

from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.workload import Workload
from benchmarks.architectures import starters
from models.llama import CompactLlama, RMSNorm

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
        {"layernorm": 3, "flash_attention": 1, "fused_linear": 4, "matmul": 1},
    ),
    "BertModel": (
        {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 99},
        {"layernorm": 3, "flash_attention": 1, "fused_linear": 7},
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("class_name", HUGGING_FACE)
def test_sites_of_hugging_face_models(class_name: str) -> None:
    pytest.importorskip("transformers")
    config, expected = HUGGING_FACE[class_name]
    assert found(Workload("transformers", class_name, config, (2, 32))) == expected


class Attending(nn.Module):
    """nn.MultiheadAttention, which returns weights unless it is told otherwise."""

    def __init__(self, result: int) -> None:
        super().__init__()
        self.result, self.attention = result, nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=hidden)[self.result]


@pytest.mark.parametrize(("result", "types"), [(0, ["fused_linear", "flash_attention", "fused_linear"]), (1, ["bmm"])])
def test_weights_that_nobody_uses_are_no_reason_against_attention(result: int, types: list[str]) -> None:
    x, hidden = torch.randn(2, 6, 32), torch.arange(6) > torch.tensor([[3], [5]])
    (graph,) = capture(Attending(result), (x, hidden), {}).graphs
    sites = [site.kernel_type for site in SiteFinder(min_elements=0).find(graph.module)]
    assert [name for name in sites if name in {*types, "flash_attention"}] == types


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


@pytest.mark.slow
def test_graph_breaks_make_several_graphs_with_their_calls_counted() -> None:
    captured = capture(Broken(), (torch.randn(4, 8),), {})
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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("activation", "norm_first", "padded"), [("relu", True, False), ("gelu", False, True), ("relu", True, True)]
)
def test_the_fast_path_of_nn_transformer_encoder_is_written_out(activation: str, norm_first: bool, padded: bool) -> None:
    """In eval mode a layer is one operator; the second sequence has padding, the third nothing but."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation=activation, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, 32, 64), torch.arange(32) >= torch.tensor([[32], [20], [0]])
    masked = {"src_key_padding_mask": padding} if padded else {}
    finder = SiteFinder(min_elements=0)
    (graph,) = capture(model, (x,), masked).graphs
    sites = finder.find(graph.module)
    assert Counter(s.kernel_type for s in sites) == {"fused_linear": 8, "layernorm": 4, "flash_attention": 2}
    replacer = Replacer(starters(sites), finder=finder)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(x, **masked)
        torch.testing.assert_close(
            compile_with_kernels(model, replacer)(x, **masked), expected, equal_nan=True, rtol=1e-4, atol=1e-5
        )
    assert len(replacer.replaced) == len(sites) and bool(expected.isnan().any()) == padded
