"""How models write RMSNorm."""

import torch
import torch.nn.functional as F

from autokernel.model.patterns import Pattern


def normed(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def inverse_root(x, weight, eps):
    return normed(x, eps) * weight


def division(x, weight, eps):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def hugging_face(x, weight, eps):
    return weight * normed(x.float(), eps).to(x.dtype)


def t5(x, weight, eps):
    return weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)


def in_float(x, weight, eps):
    return (normed(x.float(), eps) * weight.float()).to(x.dtype)


def gemma(x, weight, eps):
    return (normed(x.float(), eps) * (1.0 + weight.float())).to(x.dtype)


def plus_one(kernel, x, weight, eps):
    return kernel(x=x, weight=weight + 1.0, eps=eps)


def module(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def bare_in_float(x, eps):
    return normed(x.float(), eps).to(x.dtype)


def bare_module(x, eps):
    return F.rms_norm(x, x.shape[-1:], None, eps)


def without_weight(kernel, x, eps):
    return kernel(x=x, weight=x.new_ones(x.shape[-1]), eps=eps)


BARE = {"x": (2, 3, 8), "eps": 0.0123}
INPUTS = BARE | {"weight": (8,)}
PATTERNS = [
    *(Pattern(example, INPUTS) for example in (inverse_root, division, hugging_face, t5, in_float, module)),
    Pattern(gemma, INPUTS, plus_one),
    *(Pattern(example, BARE, without_weight) for example in (normed, bare_in_float, bare_module)),
]
