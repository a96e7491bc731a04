"""Published architectures at their real widths and a few layers deep, with random weights; for benchmarks/models.py.

transformers' own are named there by their configs; here is what those cannot say: layouts, masks, and models that
transformers does not have. `python profile.py --model benchmarks/wide_models.py --class-name DiTXL` has one by itself.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class PaddedBertLarge(nn.Module):
    """BERT-large's encoder (arXiv 1810.04805) on 32 texts of 512 tokens, padded: each has an attention mask of its own."""

    def __init__(self, layers: int = 4, batch: int = 32, length: int = 512) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
        self.model = BertModel(BertConfig(num_hidden_layers=layers, **sizes), add_pooling_layer=False)
        self.shape = (batch, length)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask=attention_mask).last_hidden_state

    def example_inputs(self) -> Inputs:
        batch, length = self.shape
        lengths = torch.randint(length // 4, length + 1, (batch, 1))
        tokens = torch.randint(1000, self.model.config.vocab_size, self.shape)
        return (tokens, (torch.arange(length) < lengths).long()), {}


class WhisperEncoder(nn.Module):
    """The encoder of Whisper-medium (arXiv 2212.04356): log-mel spectrograms [batch, 80, 3000], 30 s each."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        from transformers import WhisperConfig
        from transformers.models.whisper import modeling_whisper

        sizes = {"d_model": 1024, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096}
        self.model = modeling_whisper.WhisperEncoder(WhisperConfig(encoder_layers=layers, **sizes))

    def forward(self, spectrogram: Tensor) -> Tensor:
        return self.model(spectrogram).last_hidden_state


class DiTBlock(nn.Module):
    """Attention and an MLP; a condition shifts and scales their norms and gates their results (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(attention)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiTXL(nn.Module):
    """DiT-XL/2 (arXiv 2212.09748) without its label embedding: latents [batch, 4, 32, 32] and times [batch]."""

    def __init__(self, layers: int = 4, batch: int = 32, width: int = 1152, heads: int = 16) -> None:
        super().__init__()
        self.batch, self.width = batch, width
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm, self.last = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6), nn.Linear(width, 32)
        self.register_buffer("frequencies", torch.exp(torch.arange(128) * (-math.log(1e4) / 128)))

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(latents.dtype))
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return self.last(self.norm(x))

    def example_inputs(self) -> Inputs:
        return (torch.randn(self.batch, 4, 32, 32), torch.rand(self.batch) * 1000), {}


class ChannelsLast(nn.Module):
    """A model of images, its weights and images in channels_last."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.shape = model.to(memory_format=torch.channels_last), shape

    def forward(self, image: Tensor) -> Any:
        return self.model(image)

    def example_inputs(self) -> Inputs:
        return (torch.randn(self.shape).contiguous(memory_format=torch.channels_last),), {}


class ResNet50(ChannelsLast):
    """ResNet-50 (arXiv 1512.03385), all of its layers, on images [batch, 3, 224, 224]."""

    def __init__(self, batch: int = 32, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(depths=list(depths), num_labels=1000, return_dict=False)
        super().__init__(ResNetForImageClassification(config), (batch, 3, 224, 224))


class ResidualStage(nn.Module):
    """Two of a diffusion model's residual blocks, [batch, channels, height, width] -> the same."""

    def __init__(self, channels: int, groups: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(groups, channels) for _ in range(4))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 2):
            h = self.convolutions[first](F.silu(self.norms[first](x)))
            x = x + self.convolutions[first + 1](F.silu(self.norms[first + 1](h)))
        return x


class UNetStage(ChannelsLast):
    """Residual blocks of Stable Diffusion's U-Net (arXiv 2112.10752) at its highest resolution: [batch, 320, 64, 64]"""

    def __init__(self, batch: int = 8, channels: int = 320, size: int = 64) -> None:
        super().__init__(ResidualStage(channels), (batch, channels, size, size))
