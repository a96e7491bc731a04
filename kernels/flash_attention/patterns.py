"""How models write attention: PyTorch's function, and softmax(QKᵀ)V by hand, each also with repeated key-value heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from autokernel.model.patterns import Pattern

B, H, KV, S, D = 2, 4, 2, 6, 8


@dataclass(frozen=True)
class Heads:
    """How few key-value heads become many, and what the kernel, which knows about few, gets of them."""

    shape: tuple[int, ...]  # of K and V
    repeat: Callable[[Tensor], Tensor]
    few: Callable[[Tensor], Tensor] = lambda t: t


MANY = Heads((B, H, S, D), lambda t: t)
FOLDED = Heads((H, S, D), lambda t: t)  # with the batch
FEW = Heads((B, KV, S, D), lambda t: t)
REPEATED = [
    Heads((B, KV, S, D), lambda t: t[:, :, None].expand(B, KV, H // KV, S, D).reshape(B, H, S, D)),  # Hugging Face's
    Heads((B, KV, S, D), lambda t: t.repeat_interleave(H // KV, 1)),
    Heads(  # Meta's, on [batch, seq, heads, head_dim]
        (B, S, KV, D),
        lambda t: t[:, :, :, None].expand(B, S, KV, H // KV, D).reshape(B, S, H, D).transpose(1, 2),
        lambda t: t.transpose(1, 2),
    ),
]


def of_batches(call):
    """`call`, for Q, K and V of three dims, too: of one head, or of those of a batch in one dim."""

    def with_heads(kernel, Q, K, V, **others):
        if Q.dim() != 3:
            return call(kernel, Q, K, V, **others)
        masks = {name: t for name, t in others.items() if "mask" in name and t is not None and t.dim() == 3}
        others |= {name: t.unsqueeze(1) for name, t in masks.items()}
        return call(kernel, Q.unsqueeze(1), K.unsqueeze(1), V.unsqueeze(1), **others).squeeze(1)

    return with_heads


def inputs(heads, **others):
    made = {"Q": (*heads.shape[:-3], H, S, D), "K": heads.shape, "V": heads.shape}
    return made | {k: v for k, v in others.items() if v is not None}


def function(heads, causal, masked, grouped=False):
    def example(Q, K, V, sm_scale, attn_mask=None):
        K, V = heads.repeat(K), heads.repeat(V)
        return F.scaled_dot_product_attention(Q, K, V, attn_mask, is_causal=causal, scale=sm_scale, enable_gqa=grouped)

    def call(kernel, Q, K, V, sm_scale, attn_mask=None):
        return kernel(Q=Q, K=heads.few(K), V=heads.few(V), causal=causal, sm_scale=sm_scale, attn_mask=attn_mask)

    parameters = inputs(heads, sm_scale=0.0123, attn_mask=(1, 1, S, S) if masked else None)
    call = of_batches(call) if heads is MANY else call
    return Pattern(example, parameters, call, masks=("attn_mask",) if masked else ())


# scores(matmul, Q, Kᵀ, number), and sm_scale in terms of the number
SCALINGS = [
    (lambda mm, Q, Kt, number: mm(Q, Kt) * number, lambda number: number),
    (lambda mm, Q, Kt, number: mm(Q, Kt) / number, lambda number: 1 / number),
    (lambda mm, Q, Kt, number: mm(Q * number, Kt), lambda number: number),
    (lambda mm, Q, Kt, number: mm(Q / number, Kt), lambda number: 1 / number),
    (lambda mm, Q, Kt, number: mm(Q, Kt), lambda number: 1.0),
]
# scores with a mask, an example of a mask, and the kernel's attn_mask in terms of it
MASKS = [
    (lambda scores, mask: scores, None, lambda mask: None),
    (lambda scores, mask: scores + mask, (1, 1, S, S), lambda mask: mask),
    (
        lambda scores, mask: scores.masked_fill(mask, -math.inf),
        torch.ones(1, 1, S, S, dtype=torch.bool).triu(1),
        lambda mask: mask.logical_not(),
    ),
]
SOFTMAXES = [
    lambda scores: torch.softmax(scores, -1),
    lambda scores: torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype),
]


def by_hand(heads, scaling, masking, softmax):
    (scores, sm_scale), (masked, mask, attn_mask) = scaling, masking

    def example(Q, K, V, number=None, mask=None):
        K = heads.repeat(K).transpose(-2, -1)
        return softmax(masked(scores(torch.matmul, Q, K, number), mask)) @ heads.repeat(V)

    def call(kernel, Q, K, V, number=None, mask=None):
        K, V = heads.few(K), heads.few(V)
        options = {"causal": False, "sm_scale": sm_scale(number), "safe_softmax": False}
        return kernel(Q=Q, K=K, V=V, attn_mask=attn_mask(mask), **options)

    call = of_batches(call) if heads is MANY else call
    number = None if scaling is SCALINGS[-1] else 0.0123
    return Pattern(example, inputs(heads, number=number, mask=mask), call, masks=() if mask is None else ("mask",))


def in_batches(scaling, masking, added=False):
    """By bmm(), as nn.MultiheadAttention has it that is to return weights; `added`: the mask is, by baddbmm()."""
    (scores, _), (masked, mask, _) = scaling, masking

    def example(Q, K, V, number=None, mask=None):
        mm = partial(torch.baddbmm, mask) if added else torch.bmm
        weights = scores(mm, Q, K.transpose(-2, -1), number)
        return torch.bmm(torch.softmax(weights if added else masked(weights, mask), -1), V)

    call = by_hand(MANY, scaling, masking, SOFTMAXES[0]).call
    mask = mask[1:] if isinstance(mask, tuple) else mask if mask is None else mask[0]
    number = None if scaling is SCALINGS[-1] else 0.0123
    return Pattern(example, inputs(FOLDED, number=number, mask=mask), call, masks=() if mask is None else ("mask",))


def both_are_taken() -> bool:
    """Whether PyTorch's function takes a mask beside is_causal: on CPUs, before 2.14."""
    t = torch.zeros(1, 1, 1, 1)
    try:
        F.scaled_dot_product_attention(t, t, t, t, is_causal=True)
    except RuntimeError:
        return False
    return True


# (causal, masked)
OPTIONS = [(True, False), (False, True), (False, False), *([(True, True)] if both_are_taken() else [])]
PATTERNS = [
    *(function(FEW, *options, grouped=True) for options in OPTIONS),
    *(function(heads, *options) for heads, options in product((MANY, *REPEATED), OPTIONS)),
    *(by_hand(*way) for way in product((MANY, *REPEATED), SCALINGS, MASKS, SOFTMAXES)),
    *(in_batches(*way) for way in product(SCALINGS, MASKS)),
    *(in_batches(scaling, MASKS[1], added=True) for scaling in SCALINGS[2:]),
]
