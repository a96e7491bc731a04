"""How models write RMSNorm."""

import torch
import torch.nn.functional as F

from autokernel.match import Pattern


def inverse_root(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def division(x, weight, eps):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def hugging_face(x, weight, eps):
    h = x.to(torch.float32)
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def meta(x, weight, eps):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).type_as(x) * weight


def module(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


INPUTS = {"x": (2, 3, 8), "weight": (8,), "eps": 0.0123}
PATTERNS = [
    *(Pattern(example, INPUTS) for example in (inverse_root, division, hugging_face, meta)),
    Pattern(module, INPUTS, where=lambda eps, **_: eps is not None),
]
