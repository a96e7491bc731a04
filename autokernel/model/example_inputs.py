"""Inputs for a model whose file has no example_inputs(): from the parameters of its forward() and, of transformers' models,
from their config: tokens, images, sound, time series, and what a decoder begins with."""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from autokernel.model.user_code import WorkloadError, user_code

TOKENS = {"input_ids", "decoder_input_ids", "tokens", "token_ids", "idx", "ids"}
Shape = tuple[int, ...]


def example_inputs(model: nn.Module, shape: Shape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Args and kwargs. Raises WorkloadError where forward() needs what its parameters' names do not tell.

    `shape` is that of the one input. Where there are several, or a config says how large an image is, its first number is
    the batch, and its second the length of texts, as far as the model has positions for them.
    """
    name, takes = type(model).__name__, parameters(model)
    required = [p.name for p in takes if p.default is p.empty and p.kind not in VARIABLE]
    if getattr(model, "config", None) is not None and hasattr(model, "main_input_name"):
        return (), _of_config(model, shape, [p.name for p in takes], required)
    if len(required) < 2:
        return _of_one(model, next((p for p in takes if p.name in required), None) or next(iter(takes), None), shape)
    embedding = _embedding(model)
    if not embedding or not set(required) <= TOKENS | {"attention_mask"}:
        raise _unknown(name, required)
    return (), {
        n: torch.ones(shape, dtype=torch.long) if n not in TOKENS else _tokens(embedding.num_embeddings, shape)
        for n in required
    }


def _of_one(model: nn.Module, parameter: inspect.Parameter | None, shape: Shape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if parameter is None:
        return (), {}
    made = _one(model, parameter.name, shape)
    return ((), {parameter.name: made}) if parameter.kind is parameter.KEYWORD_ONLY else ((made,), {})


VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Those of forward() that can be given; **kwargs cannot."""
    every = inspect.signature(model.forward).parameters.values()
    return [p for p in every if p.kind is not inspect.Parameter.VAR_KEYWORD]


def _unknown(name: str, needed: Sequence[str]) -> WorkloadError:
    return WorkloadError(
        f"forward() of {name} needs {', '.join(needed)}, and what they are cannot be told from here: define "
        "example_inputs() in the model's file, as models/custom.py shows, or as a method of its class"
    )


def _embedding(model: nn.Module) -> nn.Embedding | None:
    return next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)


def _one(model: nn.Module, name: str, shape: Shape) -> Tensor:
    """Random numbers; tokens where the first layer is an embedding, or the parameter's name says that it takes them."""
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    embedding = first if isinstance(first, nn.Embedding) else _embedding(model) if name in TOKENS else None
    return torch.randint(embedding.num_embeddings, shape) if embedding else torch.randn(shape)


def _tokens(vocabulary: int, shape: Shape, special: Sequence[int] = ()) -> Tensor:
    """Ordinary tokens: a special one (padding, an image's place) changes what a model does."""
    ordinary = torch.ones(vocabulary)
    ordinary[[i for i in special if 0 <= i < vocabulary]] = 0
    if not ordinary.any():
        return torch.randint(vocabulary, shape)
    return torch.multinomial(ordinary, math.prod(shape), replacement=True).view(shape)


# ---- models of transformers ----


class _Config:
    """A config and those that it holds for one kind of input, the most special first."""

    def __init__(self, config: Any, *parts: str) -> None:
        held = [getattr(config, part, None) for part in parts]
        self.configs = [c for c in held if c is not None and not isinstance(c, (int, float, str, dict))] + [config]

    def get(self, *names: str) -> Any:
        return next((v for c in self.configs for n in names if (v := getattr(c, n, None)) is not None), None)


def _of_config(model: nn.Module, shape: Shape, takes: list[str], required: list[str]) -> dict[str, Any]:
    config, main = model.config, model.main_input_name
    wanted = {main, *required}
    if getattr(config, "is_encoder_decoder", False):
        wanted.add("decoder_input_ids")
    for part, names in _PARTS.items():
        if hasattr(config, part):
            wanted |= names
    if hasattr(config, "vocab_size") and hasattr(config, "image_size"):
        wanted.add("pixel_values")
    if not wanted & set(takes):  # main_input_name is that of another class
        wanted |= set(takes[:1])
    names = [name for name in takes if name in wanted]
    made = {name: _MAKERS[name](model, shape, len(names) > 1) if name in _MAKERS else None for name in names}
    if unknown := [name for name in names if made[name] is None]:
        raise _unknown(type(model).__name__, unknown)
    return _with_places_for_images(model, made)


_PARTS = {
    "text_config": {"input_ids"},
    "vision_config": {"pixel_values"},
    "audio_config": {"input_features", "input_values"},
}


def _text(model: nn.Module, shape: Shape, among_others: bool) -> Tensor | None:
    """Tokens of `shape`; beside other inputs, no longer than the model has positions."""
    part = _Config(model.config, "decoder", "text_config")
    vocabulary = part.get("vocab_size") or _vocabulary(model)
    if not vocabulary:
        return None
    if among_others:
        positions = part.get("max_target_positions", "max_position_embeddings", "n_positions") or shape[-1]
        shape = (shape[0], min((*shape, 16)[1], positions))
    return _tokens(vocabulary, shape, _special(part.configs))


def _vocabulary(model: nn.Module) -> int | None:
    """Where no config of its own says: of as many tokens as there are embeddings."""
    found: nn.Module | None = None
    with suppress(NotImplementedError, AttributeError):  # models of transformers that do not know which these are
        found = model.get_input_embeddings()
    embedding = found if isinstance(found, nn.Embedding) else _embedding(model)
    return embedding.num_embeddings if embedding else None


def _mask(model: nn.Module, shape: Shape, among_others: bool) -> Tensor | None:
    text = _text(model, shape, among_others)
    return None if text is None else torch.ones_like(text)


def _special(configs: Sequence[Any]) -> list[int]:
    values = [v for c in configs for n, v in vars(c).items() if n.endswith(("token_id", "token_index"))]
    return [i for v in values for i in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(i, int)]


def _image(model: nn.Module, shape: Shape, among_others: bool) -> Tensor:
    """`shape` where it is an image's; else the config's [batch, channels, height, width], of a video [batch, frames, …]."""
    if len(shape) > 3:
        return torch.randn(shape)
    part = _Config(model.config, "encoder", "vision_config", "backbone_config")
    size = part.get("image_size", "input_size", "crop_size") or 224
    size = (size["height"], size["width"]) if isinstance(size, dict) else (size, size) if isinstance(size, int) else size
    frames = part.get("num_frames", "frames_per_clip")
    return torch.randn(shape[0], *filter(None, [frames]), part.get("num_channels", "in_channels", "in_chans") or 3, *size)


def _sound_features(model: nn.Module, shape: Shape, among_others: bool) -> Tensor | None:
    """[batch, mels, 2 x positions] as for Whisper, CLAP's [batch, 1, frames, mels], else [batch, frames, features]."""
    if len(shape) > 2:
        return torch.randn(shape)
    part = _Config(model.config, "encoder", "encoder_config", "audio_config")
    side, mels = part.get("spec_size"), part.get("num_mel_bins")
    if side and mels:  # which is cut into as many pieces of time as make a square
        return torch.randn(shape[0], 1, side * (side // mels), mels)
    features = part.get("input_feat_per_channel", "feature_projection_input_dim")
    if features is None and part.get("max_source_positions"):
        return torch.randn(shape[0], mels, 2 * part.get("max_source_positions"))
    features = features or mels
    return torch.randn(*(*shape, 512)[:2], features) if features else None


def _sound(model: nn.Module, shape: Shape, among_others: bool) -> Tensor:
    """Samples, of `shape`; in channels for a codec; the spectrogram of models whose config has the number of its bands."""
    part = _Config(model.config, "encoder", "encoder_config", "audio_config")
    if part.get("num_mel_bins") and part.get("max_length"):
        return torch.randn(shape[0], part.get("max_length"), part.get("num_mel_bins"))
    if part.get("upsampling_ratios") and len(shape) == 2:
        return torch.randn(shape[0], part.get("audio_channels") or 1, shape[-1])
    return torch.randn(shape)


def _series(model: nn.Module, shape: Shape, among_others: bool) -> Tensor | None:
    """`shape`, or [batch, steps, channels] of the config."""
    if len(shape) > 2:
        return torch.randn(shape)
    part = _Config(model.config)
    steps, channels = part.get("context_length"), part.get("num_input_channels")
    return torch.randn(shape[0], steps, channels) if steps and channels else None


_MAKERS: dict[str, Callable[[nn.Module, Shape, bool], Tensor | None]] = {  # None: its config does not tell
    "input_ids": _text,
    "decoder_input_ids": _text,
    "attention_mask": _mask,
    "pixel_values": _image,
    "pixel_values_videos": _image,
    "input_features": _sound_features,
    "input_values": _sound,
    "inputs": _sound,
    "past_values": _series,
}


def _with_places_for_images(model: nn.Module, made: dict[str, Any]) -> dict[str, Any]:
    """A text that is given to a language model with images begins with a token for each of their features."""
    config = model.config
    place = next((i for n in ("image_token_id", "image_token_index") if (i := getattr(config, n, None)) is not None), None)
    if place is None or not {"input_ids", "pixel_values"} <= set(made):
        return made
    weight = next(model.parameters())
    name = type(model).__name__
    with user_code(f"{name} does not tell how many tokens an image takes", "define example_inputs(): see models/custom.py"):
        images = made["pixel_values"].to(weight.device, weight.dtype)
        with torch.no_grad():
            features = model.get_image_features(pixel_values=images)
        features = getattr(features, "pooler_output", features)
        features = list(features) if isinstance(features, (tuple, list)) else [features]
        count = sum(f.numel() // f.shape[-1] for f in features) // images.shape[0]
    tokens = made["input_ids"]
    places = torch.full((tokens.shape[0], count), place)
    return made | {"input_ids": torch.cat([places, tokens], 1)}
