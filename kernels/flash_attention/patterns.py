"""How models write attention: PyTorch's function, and softmax(QKᵀ)V by hand, each also with repeated key-value heads."""

from itertools import product

import torch
import torch.nn.functional as F

from autokernel.match import Pattern

QKV = {"Q": (2, 4, 6, 8), "K": (2, 2, 6, 8), "V": (2, 2, 6, 8)}
MASK = {"attn_mask": (1, 1, 6, 6)}


def as_is(t):
    return t


def expanded(t):
    """Hugging Face's repeat_kv."""
    return t[:, :, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8)


def interleaved(t):
    return t.repeat_interleave(2, 1)


def function(repeat, causal, masked, grouped):
    def example(Q, K, V, sm_scale, attn_mask=None):
        K, V = repeat(K), repeat(V)
        return F.scaled_dot_product_attention(Q, K, V, attn_mask, is_causal=causal, scale=sm_scale, enable_gqa=grouped)

    def call(kernel, Q, K, V, sm_scale, attn_mask=None):
        return kernel(Q=Q, K=K, V=V, causal=causal, sm_scale=sm_scale, attn_mask=attn_mask)

    heads = {} if grouped or repeat is not as_is else {"K": QKV["Q"], "V": QKV["Q"]}
    return Pattern(example, QKV | heads | (MASK if masked else {}) | {"sm_scale": 0.0123}, call)


# scores(Q, Kᵀ, number), and sm_scale in terms of the number
SCALINGS = [
    (lambda Q, Kt, number: Q @ Kt * number, lambda number: number),
    (lambda Q, Kt, number: Q @ Kt / number, lambda number: 1 / number),
    (lambda Q, Kt, number: (Q * number) @ Kt, lambda number: number),
    (lambda Q, Kt, number: (Q / number) @ Kt, lambda number: 1 / number),
    (lambda Q, Kt, number: Q @ Kt, lambda number: 1.0),
]
SOFTMAXES = [
    lambda scores: torch.softmax(scores, -1),
    lambda scores: torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype),
]


def by_hand(repeat, scaling, softmax, masked):
    scores, sm_scale = scaling

    def example(Q, K, V, number=None, attn_mask=None):
        s = scores(Q, repeat(K).transpose(-2, -1), number)
        return softmax(s if attn_mask is None else s + attn_mask) @ repeat(V)

    def call(kernel, Q, K, V, number=None, attn_mask=None):
        return kernel(Q=Q, K=K, V=V, causal=False, sm_scale=sm_scale(number), attn_mask=attn_mask)

    heads = {} if repeat is not as_is else {"K": QKV["Q"], "V": QKV["Q"]}
    number = {} if scaling is SCALINGS[-1] else {"number": 0.0123}
    return Pattern(example, QKV | heads | (MASK if masked else {}) | number, call)


PATTERNS = [
    *(function(as_is, *flags) for flags in product((True, False), repeat=3)),
    *(function(repeat, *flags, False) for repeat in (expanded, interleaved) for flags in product((True, False), repeat=2)),
    *(by_hand(*way) for way in product((as_is, expanded), SCALINGS, SOFTMAXES, (True, False))),
]
