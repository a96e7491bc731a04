"""Small random models of published architectures: what is found, that it is all replaced, that they stay the same."""

import pytest

from benchmarks.architectures import ARCHITECTURES, examine

pytest.importorskip("transformers")

LLAMA = {"rmsnorm": 5, "rotary_embedding": 4, "flash_attention": 2, "fused_mlp": 2, "matmul": 9}
ENCODER = {"layernorm": 5, "flash_attention": 2, "matmul": 13}
FOUND = {
    "Llama": LLAMA,
    "Llama, explicit attention": LLAMA,
    "Mistral": LLAMA,
    "Qwen3": LLAMA | {"rmsnorm": 9},  # of queries and keys, too
    "Gemma": {"rmsnorm": 5, "rotary_embedding": 4, "flash_attention": 2, "matmul": 15},  # its GELU is the tanh one
    "Gemma 2": {"rmsnorm": 9, "rotary_embedding": 4, "softmax": 2, "matmul": 15},  # scores have a soft cap
    "GPT-2": ENCODER | {"matmul": 9},  # one projection for Q, K and V
    "BERT": ENCODER,
    "T5": {"rmsnorm": 12, "flash_attention": 6, "matmul": 33},
    "ViT": ENCODER,
    "Mixtral": {"rmsnorm": 5, "rotary_embedding": 4, "flash_attention": 2, "softmax": 2, "reduce": 4, "matmul": 11},
    "Whisper encoder": ENCODER | {"matmul": 12},
    "Phi": {"layernorm": 3, "rotary_embedding": 4, "flash_attention": 2, "matmul": 13},
    "Phi 3": LLAMA | {"matmul": 5},  # merged projections
}
REFUSED = {"Gemma 2": {"matmul: the operation is not defined for its shapes or options": 4}}  # products of batches


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_sites_are_found_and_replaced_and_the_model_stays_itself(name: str) -> None:
    examined = examine(ARCHITECTURES[name])
    assert examined.found == FOUND[name]
    assert examined.replaced == examined.found
    assert examined.refused == REFUSED.get(name, {})
    assert examined.largest_difference < 2e-6  # of the largest output, in float32
