"""Small random models of published architectures: what is found, that it is all replaced, that they stay the same."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from benchmarks.architectures import ARCHITECTURES, examine, starters

pytest.importorskip("transformers")

LLAMA = {"rmsnorm": 5, "rotary_embedding": 4, "flash_attention": 2, "fused_mlp": 2, "matmul": 9}
ENCODER = {"layernorm": 5, "flash_attention": 2, "fused_linear": 13}
FOUND = {
    "Llama": LLAMA,
    "Llama, explicit attention": LLAMA,
    "Mistral": LLAMA,
    "Qwen3": LLAMA | {"rmsnorm": 9},  # of queries and keys, too
    "Gemma": LLAMA,
    # Scores have a soft cap: attention is in parts.
    "Gemma 2": {"rmsnorm": 9, "rotary_embedding": 4, "bmm": 4, "softmax": 2, "fused_mlp": 2, "matmul": 9},
    "GPT-2": ENCODER | {"fused_linear": 8, "matmul": 1},  # one projection for Q, K and V
    "BERT": ENCODER,
    "T5": {"rmsnorm": 12, "flash_attention": 6, "fused_linear": 4, "matmul": 29},
    "ViT": ENCODER | {"fused_linear": 14},  # patches are rows
    "Mixtral": {kind: count for kind, count in LLAMA.items() if kind != "fused_mlp"}
    | {"softmax": 2, "reduce": 4, "matmul": 11, "grouped_matmul": 4},
    "Whisper encoder": ENCODER | {"fused_linear": 10, "matmul": 2},  # keys have no bias
    "Phi": {"layernorm": 3, "rotary_embedding": 4, "flash_attention": 2, "fused_linear": 13},
    "Phi 3": LLAMA | {"matmul": 5},  # merged projections
}

FAMILIES = ("GPT-2", "Llama", "BERT", "T5", "ViT", "Mixtral")  # the others are like one of these


def tiered(name: str):
    return pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow)


@pytest.mark.parametrize("name", [*map(tiered, ARCHITECTURES)])
@pytest.mark.slow_after(2)
def test_all_sites_are_found_and_replaced_and_the_model_stays_itself(name: str) -> None:
    examined = examine(ARCHITECTURES[name])
    assert examined.found == FOUND[name]
    assert examined.replaced == examined.found
    assert examined.refused == {}
    assert examined.largest_difference < 2e-6  # of the largest output, in float32


class OtherWays(nn.Module):
    """x [batch, 16, 64]; operations as no model above writes them. Some of them adapt a kernel's inputs or its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.qkv = nn.Parameter(torch.randn(64)), nn.Linear(64, 192)
        self.register_buffer("visible", torch.ones(1, 1, 16, 16).tril())
        self.register_buffer("angles", torch.randn(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        norms = F.layer_norm(x, (64,), self.weight, None, 1e-5), F.rms_norm(x, (64,), self.weight)
        plus_one = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(sum(norms)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(self.visible == 0, -torch.inf)
        y = torch.softmax(scores, -1) @ v
        a, b, cos, sin = y[..., :8], y[..., 8:], self.angles.cos(), self.angles.sin()
        backwards = torch.cat((a * cos + b * sin, a * (-sin) + b * cos), -1)
        sums = y.max(-1).values, y.sum(-1, keepdim=True), y.sum(), torch.softmax(y, -1, dtype=torch.float32)
        loss = -F.log_softmax(y[0, 0], -1).gather(-1, torch.arange(16).unsqueeze(-1)).mean()
        return plus_one, backwards, *sums, loss


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "inductor"])
def test_other_ways_to_write_operations_are_replaced_as_well(fallback: str | None) -> None:
    torch.manual_seed(0)
    model, x = OtherWays(), torch.randn(2, 16, 64)
    finder = SiteFinder(min_elements=0)
    sites = [site for graph in capture(model, (x,), {}).graphs for site in finder.find(graph.module)]
    one_each = ("layernorm", "fused_linear", "flash_attention", "rotary_embedding", "softmax", "cross_entropy")
    assert Counter(s.kernel_type for s in sites) == Counter(one_each) + Counter(rmsnorm=2, reduce=3)
    replacer = Replacer(starters(sites), fallback, finder=finder)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(compile_with_kernels(model, replacer)(x), model(x))
    assert len(replacer.replaced) == len(sites)
