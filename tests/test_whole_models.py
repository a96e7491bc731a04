"""benchmarks/models.py and what it measures: every model can be made small, and one is measured to the end."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from autokernel.integration.verification.forms import EAGER, INDUCTOR, ours
from autokernel.model.workload import Workload
from benchmarks.models import MODELS, WIDE, Stage, measure

SMALL = {
    "PaddedBertLarge": {"layers": 1, "batch": 2, "length": 32},
    "WhisperEncoder": {"layers": 1},
    "DiTXL": {"layers": 1, "batch": 2, "width": 64, "heads": 4},
    "ResNet50": {"batch": 2, "depths": [1, 1, 1, 1]},
    "UNetStage": {"batch": 1, "channels": 32, "size": 16},
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SIZES |= {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_hidden_layers": 1, "vocab_size": 500}


def small(workload: Workload) -> Workload:
    if workload.model == WIDE:
        return replace(workload, model_args=SMALL[workload.class_name])
    shape = (1, 16) if len(workload.input_shape) == 2 else (1, 3, 224, 224)
    kinds = {"layer_types": workload.model_args["layer_types"][:1]} if "layer_types" in workload.model_args else {}
    return replace(workload, model_args=workload.model_args | SIZES | kinds, input_shape=shape)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", [name for name, workload in MODELS.items() if workload.model in (WIDE, "transformers")])
def test_a_published_architecture_runs(name: str):
    workload = small(MODELS[name])
    model, args, kwargs = workload.load()
    with torch.no_grad():
        workload.try_pass(model, args, kwargs)


@pytest.mark.slow
def test_a_model_is_measured_to_the_end():
    """With kernels in it, whatever they are worth here."""
    gates, ends = tuple(threading.Barrier(1) for _ in range(3)), (time.time() + 3600,) * 3
    stage, said = Stage(threading.Lock(), gates, seconds=0.1, least=0.0, ends=ends), []
    llama = replace(small(MODELS["llama3-8b"]), input_shape=(1, 64), dtype="float32")
    with torch.no_grad():
        entry = measure(llama, 2, (EAGER, INDUCTOR), [], stage, said.append)
    assert {ours(EAGER), ours(INDUCTOR)} <= set(entry["sides"])
    assert len(entry["parity"]) == 4 and all(found["within_tolerance"] for found in entry["parity"])
    assert any("start from cpp_kernel" in line for line in said)
