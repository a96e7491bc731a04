"""BERT base (110 M parameters) with random weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, dim: int, n_heads: int, hidden: int):
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm_1 = nn.LayerNorm(dim, eps=1e-12)
        self.intermediate, self.output = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm_2 = nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm_1(x + self.out(attended))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class Bert(nn.Module):
    """Tokens [batch, seq] int64 -> hidden states [batch, seq, dim]."""

    def __init__(
        self,
        dim: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        hidden: int = 3072,
        vocab_size: int = 30522,
        max_seq: int = 512,
    ):
        super().__init__()
        self.words = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_seq, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(Layer(dim, n_heads, hidden) for _ in range(n_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        return x
