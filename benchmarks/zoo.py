"""Sixty models, small and with random weights: Hugging Face's by their configs, and hand-written; for compatibility.py.

Nothing is downloaded. Sizes are about as small as sites are found at (match.MIN_ELEMENTS).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Any]  # keyword arguments of a call

TOKENS = {"vocab_size": 120, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VOCABULARY = range(3, 120)  # no token of a special meaning
ENCODER = TOKENS | {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
GROUPED = ENCODER | {"num_key_value_heads": 2}
HEADS_OF_32 = GROUPED | {"head_dim": 32}
GPT = TOKENS | {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 256}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SHARED_EXPERT = {"shared_expert_intermediate_size": 128, "decoder_sparse_step": 1}
LATENT = ENCODER | {  # multi-head latent attention: V is narrower than Q and K
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
IMAGES = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
VIT = IMAGES | {"image_size": 64, "patch_size": 8}
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SEQ2SEQ = TOKENS | {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1}
SEQ2SEQ |= {
    f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 256))
}
T5 = TOKENS | {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
AUDIO = IMAGES | {"vocab_size": 40, "conv_dim": [64] * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}
WITHOUT_DROPOUT = (  # two programs draw the same random numbers only if they draw them in one order
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "dropout_rate",
    "activation_dropout",
    "classifier_dropout",
    "embedding_dropout",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "feat_proj_dropout",
    "final_dropout",
    "mlp_dropout",
    "drop_path_rate",
    "summary_last_dropout",
    "emb_dropout",
    "ffn_dropout",
    "embed_dropout",
    "apply_spec_augment",
)


@dataclass(frozen=True)
class Entry:
    """A model, and what can be asked of it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]  # batch, size (tokens, pixels, samples: what may change)
    sizes: tuple[tuple[int, int], ...] = ((2, 64), (2, 80), (3, 64), (2, 64))
    pads: bool = False  # takes an attention_mask
    generates: bool = False
    trains: bool = True


def hugging_face(class_name: str, config: Inputs, **others: Any) -> nn.Module:
    import transformers

    cls = getattr(transformers, class_name)
    made = cls.config_class(**config, **others)
    for part in (made, *(v for v in vars(made).values() if isinstance(v, transformers.PretrainedConfig))):
        for name in WITHOUT_DROPOUT:
            if isinstance(getattr(part, name, None), (int, float)):
                setattr(part, name, type(getattr(part, name))(0))
    return cls(made)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY.start, VOCABULARY.stop, (batch, length))


def text(batch: int, length: int) -> Inputs:
    return {"input_ids": tokens(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def decoder(class_name: str, config: Inputs, generates: bool = True, **others: Any) -> Entry:
    return Entry(partial(hugging_face, class_name, config, **others), text, pads=True, generates=generates)


def encoder(class_name: str, config: Inputs = ENCODER, **others: Any) -> Entry:
    return decoder(class_name, config, generates=False, **others)


def seq2seq(class_name: str, config: Inputs) -> Entry:
    def inputs(batch: int, length: int) -> Inputs:
        return text(batch, length) | {"decoder_input_ids": tokens(batch, length // 2)}

    return Entry(partial(hugging_face, class_name, config), inputs, pads=True)


def images(class_name: str, config: Inputs, **others: Any) -> Entry:
    """Only the batch changes."""
    sizes = ((2, 64), (3, 64), (1, 64), (2, 64))
    make = partial(hugging_face, class_name, config, **others)
    return Entry(make, lambda batch, pixels: {"pixel_values": torch.randn(batch, 3, pixels, pixels)}, sizes)


def speech(class_name: str, config: Inputs) -> Entry:
    sizes = ((2, 8000), (2, 9600), (1, 8000), (2, 8000))
    return Entry(
        partial(hugging_face, class_name, config),
        lambda batch, samples: {"input_values": torch.randn(batch, samples)},
        sizes,
    )


def clip() -> nn.Module:
    text_config = ENCODER | {"max_position_embeddings": 96}
    return hugging_face("CLIPModel", {"text_config": text_config, "vision_config": VIT, "projection_dim": 64})


def clip_inputs(batch: int, length: int) -> Inputs:
    return text(batch, length) | {"pixel_values": torch.randn(batch, 3, 64, 64)}


def whisper() -> nn.Module:
    return hugging_face("WhisperForConditionalGeneration", SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 64})


def whisper_inputs(batch: int, length: int) -> Inputs:
    return {"input_features": torch.randn(batch, 16, 128), "decoder_input_ids": tokens(batch, length)}


# --- written by hand -------------------------------------------------------------------------------------------------


class LanguageLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(120, 128),
            nn.LSTM(128, 128, 2, batch_first=True),
            nn.Linear(128, 120),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class UNet(nn.Module):
    """Two scales, group norms, a skip connection, attention over pixels in the middle."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, 2 * width),
            nn.Linear(2 * width, 6 * width),
            nn.Linear(2 * width, 2 * width),
        )
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.silu(self.enter(x))
        deep = F.silu(self.norm(self.down(wide)))
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(deep.flatten(2).transpose(1, 2)).chunk(3, -1))
        mixed = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        deep = deep + mixed.transpose(1, 2).unflatten(2, deep.shape[2:])
        return self.leave(torch.cat((self.up(deep), wide), 1))


class ModulatedBlock(nn.Module):
    """DiT's block: layer norms without weights, shifted and scaled by a condition."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6), nn.Linear(width, 6 * width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.GELU(approximate="tanh"), nn.Linear(256, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        h = self.norm(x) * (1 + b) + a
        x = x + c * self.attention(h, h, h, need_weights=False)[0]
        return x + f * self.mlp(self.norm(x) * (1 + e) + d)


class Mixer(nn.Module):
    def __init__(self, places: int = 64, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_places = nn.Sequential(nn.Linear(places, 256), nn.GELU(), nn.Linear(256, places))
        self.over_channels = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_places(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.second(x))


class Branching(nn.Module):
    """Control flow that depends on data, a higher-order operator, checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layers[0](x))
        x = self.layers[1](x) if x.mean() > 0 else self.layers[1](-x)
        x = torch.utils.checkpoint.checkpoint(lambda t: torch.softmax(self.layers[2](t), -1), x, use_reentrant=False)
        return x * 2


class ResidualInPlace(nn.Module):
    """Norms and residuals that are added in place, masks that are written to, results that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(128, 256), nn.Linear(256, 128), nn.RMSNorm(128)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 1.0
        for _ in range(2):
            h += self.b(F.silu(self.a(self.norm(h))))
        halves = h.chunk(2, -1)
        return halves[0], torch.softmax(h, -1).transpose(1, 2)


def features(batch: int, length: int) -> Inputs:
    return {"x": torch.randn(batch, length, 128)}


def picture(batch: int, pixels: int) -> Inputs:
    return {"x": torch.randn(batch, 3, pixels, pixels)}


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


BATCHES = ((2, 64), (3, 64), (1, 64), (2, 64))
ZOO: dict[str, Entry] = {
    "Llama": decoder("LlamaForCausalLM", GROUPED),
    "Llama, explicit attention": decoder("LlamaForCausalLM", GROUPED, attn_implementation="eager"),
    "Mistral, window": decoder("MistralForCausalLM", GROUPED | {"sliding_window": 16}),
    "Qwen2": decoder("Qwen2ForCausalLM", GROUPED),
    "Qwen3": decoder("Qwen3ForCausalLM", HEADS_OF_32),
    "Qwen2-MoE": decoder("Qwen2MoeForCausalLM", EXPERTS | SHARED_EXPERT),
    "Qwen3-MoE": decoder("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 32}),
    "Gemma": decoder("GemmaForCausalLM", HEADS_OF_32),
    "Gemma 2": decoder("Gemma2ForCausalLM", HEADS_OF_32 | {"sliding_window": 16}),
    "Gemma 3": decoder("Gemma3ForCausalLM", HEADS_OF_32 | {"sliding_window": 16}),
    "Phi": decoder("PhiForCausalLM", ENCODER),
    "Phi 3": decoder("Phi3ForCausalLM", GROUPED),
    "GPT-2": decoder("GPT2LMHeadModel", GPT),
    "GPT-Neo": decoder(
        "GPTNeoForCausalLM",
        TOKENS | {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "GPT-NeoX (Pythia)": decoder("GPTNeoXForCausalLM", ENCODER),
    "GPT-J": decoder("GPTJForCausalLM", GPT | {"rotary_dim": 16}),
    "OPT": decoder("OPTForCausalLM", ENCODER | {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "BLOOM (ALiBi)": decoder("BloomForCausalLM", TOKENS | {"hidden_size": 128, "n_layer": 2, "n_head": 4}),
    "Falcon": decoder("FalconForCausalLM", ENCODER),
    "MPT (ALiBi)": decoder("MptForCausalLM", TOKENS | {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    "StableLM": decoder("StableLmForCausalLM", GROUPED),
    "StarCoder 2": decoder("Starcoder2ForCausalLM", GROUPED),
    "OLMo 2": decoder("Olmo2ForCausalLM", GROUPED),
    "Cohere": decoder("CohereForCausalLM", GROUPED),
    "Granite": decoder("GraniteForCausalLM", GROUPED),
    "DeepSeek V3": decoder("DeepseekV3ForCausalLM", LATENT),
    "Mixtral": decoder("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "gpt-oss": decoder("GptOssForCausalLM", HEADS_OF_32 | {"num_local_experts": 4, "sliding_window": 16}),
    "Mamba": decoder("MambaForCausalLM", TOKENS | {"hidden_size": 128, "num_hidden_layers": 2}),
    "BERT": encoder("BertModel"),
    "RoBERTa": encoder("RobertaModel"),
    "DistilBERT": encoder("DistilBertModel", TOKENS | {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256}),
    "ALBERT": encoder("AlbertModel", ENCODER | {"embedding_size": 64}),
    "ELECTRA": encoder("ElectraModel", ENCODER | {"embedding_size": 64}),
    "DeBERTa v2": encoder(
        "DebertaV2Model", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    ),
    "ModernBERT": encoder("ModernBertModel", ENCODER | {"local_attention": 32, "cls_token_id": 1, "sep_token_id": 2}),
    "MPNet": encoder("MPNetModel"),
    "XLNet": encoder("XLNetModel", TOKENS | {"d_model": 128, "n_layer": 2, "n_head": 4, "d_inner": 256}),
    "T5": seq2seq("T5ForConditionalGeneration", T5),
    "BART": seq2seq("BartForConditionalGeneration", SEQ2SEQ),
    "Pegasus": seq2seq("PegasusForConditionalGeneration", SEQ2SEQ),
    "ViT": images("ViTModel", VIT),
    "DeiT": images("DeiTModel", VIT),
    "BEiT": images("BeitModel", VIT),
    "DINOv2": images("Dinov2Model", VIT),
    "Swin": images(
        "SwinModel",
        {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "ConvNeXt": images("ConvNextModel", {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1]}),
    "SegFormer": images("SegformerModel", {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]}),
    "ResNet": images("ResNetModel", {"hidden_sizes": [32, 64, 96, 128], "embedding_size": 32, "depths": [1, 1, 1, 1]}),
    "CLIP": Entry(clip, clip_inputs, pads=True),
    "Whisper": Entry(whisper, whisper_inputs, ((2, 32), (2, 48), (1, 32), (2, 32))),
    "Wav2Vec2": speech("Wav2Vec2Model", AUDIO),
    "HuBERT": speech("HubertModel", AUDIO),
    "LSTM": Entry(LanguageLSTM, lambda batch, length: {"x": tokens(batch, length)}),
    "U-Net": Entry(
        UNet, lambda batch, pixels: {"x": torch.randn(batch, 3, pixels, pixels)}, ((2, 32), (3, 32), (2, 48), (2, 32))
    ),
    "DiT block": Entry(ModulatedBlock, lambda batch, n: features(batch, n) | {"condition": torch.randn(batch, 128)}),
    "MLP-Mixer": Entry(Mixer, features, BATCHES),
    "Branches, cond, checkpoints": Entry(Branching, features),
    "Residuals in place": Entry(ResidualInPlace, features, trains=False),  # PyTorch itself refuses to
    "nn.TransformerEncoder": Entry(transformer_encoder, lambda batch, length: {"src": torch.randn(batch, length, 128)}),
}
