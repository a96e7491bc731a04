"""How models write LayerNorm."""

import torch
import torch.nn.functional as F

from autokernel.match import Pattern


def module(x, weight, bias, eps):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def variance(x, weight, bias, eps):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps) * weight + bias


def squares(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


INPUTS = {"x": (2, 3, 8), "weight": (8,), "bias": (8,), "eps": 0.0123}
PATTERNS = [Pattern(example, INPUTS) for example in (module, variance, squares)]
