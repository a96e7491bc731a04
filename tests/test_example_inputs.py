"""Inputs of a model: those of its own example_inputs(), and those made for models of transformers from their configs."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autokernel.model.example_inputs import example_inputs
from autokernel.model.options import add_workload_arguments
from autokernel.model.user_code import WorkloadError
from autokernel.model.workload import Workload, workload_from

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = SIZES | {"vocab_size": 100}
IMAGE = SIZES | {"image_size": 32, "patch_size": 8}
BOTH = {"text_config": TEXT | {"max_position_embeddings": 20}, "vision_config": IMAGE}
SEQ = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SEQ |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 120}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WHISPER = SEQ | SPECIAL | {"max_source_positions": 50, "max_target_positions": 40}
LLAVA = {
    "text_config": TEXT | {"model_type": "llama", "num_key_value_heads": 2},
    "vision_config": IMAGE | {"model_type": "clip_vision_model"},
    "image_token_id": 99,
}
SOUND_PICTURE = {"spec_size": 64, "num_mel_bins": 16, "depths": [1, 1], "num_attention_heads": [2, 2]}
SOUND_PICTURE |= {"patch_embeds_hidden_size": 16, "hidden_size": 32}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100}
MODELS = {
    "BertModel": (TEXT, (2, 16), {"input_ids": (2, 16)}),
    "XLNetLMHeadModel": ({"d_model": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100}, (2, 16), {"input_ids": (2, 16)}),
    "T5ForConditionalGeneration": (T5, (2, 16), {"input_ids": (2, 16), "decoder_input_ids": (2, 16)}),
    "T5EncoderModel": (T5, (2, 16), {"input_ids": (2, 16)}),
    "WhisperForConditionalGeneration": (
        WHISPER, (2, 512), {"input_features": (2, 80, 100), "decoder_input_ids": (2, 40)}
    ),
    "Speech2TextModel": (SEQ, (1, 64), {"input_features": (1, 64, 80), "decoder_input_ids": (1, 64)}),
    "Wav2Vec2Model": (SIZES | {"conv_dim": [16] * 7}, (1, 4000), {"input_values": (1, 4000)}),
    "ASTModel": (SIZES | {"max_length": 64}, (1, 512), {"input_values": (1, 64, 128)}),
    "ViTModel": (IMAGE, (2, 512), {"pixel_values": (2, 3, 32, 32)}),
    "ResNetModel": (
        {"depths": [1], "hidden_sizes": [16], "embedding_size": 16}, (1, 3, 64, 48), {"pixel_values": (1, 3, 64, 48)}
    ),
    "VideoMAEModel": (IMAGE | {"num_frames": 4}, (1, 512), {"pixel_values": (1, 4, 3, 32, 32)}),
    "VJEPA2Model": (
        SIZES | {f"pred_{name}": n for name, n in SIZES.items()} | {"crop_size": 32, "frames_per_clip": 4},
        *((1, 512), {"pixel_values_videos": (1, 4, 3, 32, 32)}),
    ),
    "DacModel": (
        {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "n_codebooks": 2, "codebook_size": 16}
        | {"downsampling_ratios": [2, 2], "upsampling_ratios": [2, 2]},
        *((2, 512), {"input_values": (2, 1, 512)}),
    ),
    "EncodecModel": (
        {"audio_channels": 2, "num_filters": 4, "hidden_size": 16, "codebook_size": 16, "upsampling_ratios": [4, 2]},
        *((1, 512), {"input_values": (1, 2, 512)}),
    ),
    "ClapModel": (
        {"text_config": TEXT, "projection_dim": 16, "audio_config": SOUND_PICTURE},
        *((2, 16), {"input_ids": (2, 16), "input_features": (2, 1, 256, 16)}),
    ),
    "PatchTSTModel": (
        {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_input_channels": 3, "context_length": 32},
        *((2, 512), {"past_values": (2, 32, 3)}),
    ),
    "CanineModel": (SIZES | {"num_hash_buckets": 64, "num_hash_functions": 2}, (2, 16), {"input_ids": (2, 16)}),
    "ParakeetForCTC": (
        {"encoder_config": SIZES | {"num_mel_bins": 16}, "vocab_size": 30, "pad_token_id": 29},
        *((1, 64), {"input_features": (1, 64, 16)}),
    ),
    "CLIPModel": (BOTH | {"projection_dim": 16}, (2, 512), {"input_ids": (2, 20), "pixel_values": (2, 3, 32, 32)}),
    "ViltModel": (IMAGE | TEXT, (1, 16), {"input_ids": (1, 16), "pixel_values": (1, 3, 32, 32)}),
    "LlavaForConditionalGeneration": (LLAVA, (2, 12), {"input_ids": (2, 28), "pixel_values": (2, 3, 32, 32)}),
}  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_runs_on_inputs_from_its_config(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    arguments, shape, expected = MODELS[name]
    workload = Workload("transformers", name, arguments, shape)
    model, args, kwargs = workload.load()
    assert args == () and {key: tuple(value.shape) for key, value in kwargs.items()} == expected
    workload.try_pass(model, args, kwargs)
    again = workload.inputs(model, 1)[1]
    assert not any(torch.equal(again[key], value) for key, value in kwargs.items())


def test_special_tokens_are_not_drawn():
    workload = Workload("transformers", "BartModel", SEQ | SPECIAL | {"vocab_size": 8}, (4, 64))
    assert set(workload.load()[2]["input_ids"].flatten().tolist()) == {3, 4, 5, 6, 7}


def test_how_many_features_a_sound_has_is_not_told_by_every_config():
    model = nn.Module()
    model.config, model.main_input_name = SimpleNamespace(), "input_features"
    model.forward = lambda input_features: input_features
    with pytest.raises(WorkloadError, match="needs input_features, and what they are cannot be told"):
        example_inputs(model, (1, 64))


def test_what_a_config_does_not_tell_is_said():
    workload = Workload("transformers", "TimeSeriesTransformerModel", {"prediction_length": 4}, (1, 64))
    said = r"needs past_values, past_time_features, .* example_inputs\(\) in the model's file, as models/custom"
    with pytest.raises(WorkloadError, match=said):
        workload.load()


def test_a_misspelt_name_of_a_config_is_said(capsys):
    Workload("transformers", "BertModel", TEXT | {"num_hiden_layers": 1}, (1, 8)).load()
    assert "warning: BertConfig has no 'num_hiden_layers': is it num_hidden_layers" in capsys.readouterr().err


class Tokens(nn.Module):
    """Its first parameters are no embedding's: what it takes is told by the parameter's name alone."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.embedding = nn.Embedding(50, 8)

    def forward(self, idx, attention_mask=None):
        return self.embedding(idx) + self.positions


def test_tokens_are_told_by_the_name_of_a_parameter():
    (tokens,), kwargs = example_inputs(Tokens(), (2, 16))
    assert tokens.dtype == torch.int64 and tokens.shape == (2, 16) and tokens.max() < 50 and kwargs == {}


GPT = """
import torch
from torch import nn
class Base(nn.Module):
    {inputs}
class GPT(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(8, 8)
    def forward(self, idx, targets=None):
        logits = self.layer(idx)
        return logits, targets if targets is None else nn.functional.cross_entropy(logits[0], targets[0])
"""
METHODS = [
    "def example_inputs(self): return 2 * (torch.ones(1, len(self.layer.weight), dtype=torch.long),)",
    "@staticmethod\n    def example_inputs(): return 2 * (torch.ones(1, 8, dtype=torch.long),)",
    "@classmethod\n    def example_inputs(cls): return {n: torch.ones(1, 8, dtype=torch.long) for n in ('idx', 'targets')}",
    "def example_inputs(self, name=''): return 2 * (torch.ones(1, 8, dtype=torch.long),)",
]


def gpt(folder, inputs):
    (folder / "gpt.py").write_text(GPT.format(inputs=inputs))
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    arguments = parser.parse_args(["--model", str(folder / "gpt.py"), "--class-name", "GPT"])
    arguments.device = "cpu"
    return workload_from(arguments)


@pytest.mark.parametrize("inputs", METHODS)
def test_inputs_may_come_from_a_method_of_the_class(tmp_path, inputs):
    workload = gpt(tmp_path, inputs)
    assert "example_inputs()" in str(workload)
    model, args, kwargs = workload.load()
    assert model(*args, **kwargs)[1] is not None
    assert workload.not_given(model) == ()


def test_an_input_that_is_not_given_is_told(tmp_path):
    workload = gpt(tmp_path, "example_inputs = None")
    assert workload.input_shape == (1, 512)
    assert workload.not_given(workload.load()[0]) == ("targets",)


def test_a_method_of_another_class_gives_no_inputs(tmp_path):
    workload = gpt(tmp_path, "pass\nclass Other:\n    def example_inputs(self): return 3")
    assert workload.input_shape == (1, 512) and workload.load()[1][0].shape == (1, 512)


def test_what_is_built_in_may_make_inputs(tmp_path):
    workload = gpt(tmp_path, "pass\nfrom builtins import dict as example_inputs")
    with pytest.raises(WorkloadError, match=r"example_inputs\(\) of .* returns {}, not inputs"):
        workload.load()


def test_an_input_that_is_taken_by_its_name_alone():
    class Named(nn.Linear):
        def forward(self, *others: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
            return super().forward(pixels)

    model = Named(8, 4)
    args, kwargs = example_inputs(model, (2, 8))
    assert not args and model(**kwargs).shape == (2, 4)
