"""LLaMA as Meta wrote it (RMSNorm, complex RoPE, grouped-query attention, SwiGLU) with random weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotation(head_dim: int, max_seq: int, theta: float = 10000.0) -> Tensor:
    """exp(i · position · frequency): complex64 [max_seq, head_dim / 2]."""
    frequency = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(max_seq).float(), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def apply_rotary(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [batch, seq, heads, head_dim] by complex freqs [seq, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[None, :, None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden: int):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs)
        return x + self.feed_forward(self.ffn_norm(x))


class CompactLlama(nn.Module):
    """A LLaMA of 125 M parameters. Tokens [batch, seq] int64 -> logits [batch, seq, vocab_size]."""

    def __init__(
        self,
        dim: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        n_kv_heads: int = 4,
        hidden: int = 2048,
        vocab_size: int = 32000,
        max_seq: int = 2048,
    ):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden) for _ in range(n_layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.register_buffer("freqs", rotation(dim // n_heads, max_seq), persistent=False)

    def _apply(self, fn, recurse=True):
        """Move `freqs` with the model, but keep it complex64: `.half()` would discard its imaginary part."""
        freqs = self.freqs
        super()._apply(lambda t: t if t is freqs else fn(t), recurse)
        self.freqs = freqs.to(self.output.weight.device)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        x, freqs = self.tok_embeddings(tokens), self.freqs[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, freqs)
        return self.output(self.norm(x))


class MiniLlama(CompactLlama):
    """Its first four layers, 74 M parameters: the model of a run that names none."""

    def __init__(self, n_layers: int = 4, **sizes: int):
        super().__init__(n_layers=n_layers, **sizes)


class Llama7B(CompactLlama):
    """LLaMA-7B's shapes; `n_layers` may be cut to fit (13 GB in float16 with all 32)."""

    def __init__(self, n_layers: int = 32, max_seq: int = 2048):
        super().__init__(4096, n_layers, 32, 32, 11008, 32000, max_seq)
