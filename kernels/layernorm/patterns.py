"""How models write LayerNorm."""

import torch
import torch.nn.functional as F

from autokernel.model.patterns import Pattern


def module(x, weight, bias, eps):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def in_float(x, weight, bias, eps):
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def in_the_weights_dtype(kernel, x, weight, bias, eps):
    """Under autocast on a CPU PyTorch's own operator mixes dtypes, and computes in that of the weights."""
    return kernel(x=x.to(weight.dtype), weight=weight, bias=bias, eps=eps).to(x.dtype)


def is_mixed(x, weight, bias, eps):
    return x.dtype != weight.dtype == bias.dtype == torch.float32


def variance(x, weight, bias, eps):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps) * weight + bias


def squares(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def squares_root(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def module_without_bias(x, weight, eps):
    return F.layer_norm(x, weight.shape, weight, None, eps)


def cohere(x, weight, eps):
    centred = x.float() - x.float().mean(-1, keepdim=True)
    return (weight.float() * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def without_bias(kernel, x, weight, eps):
    return kernel(x=x, weight=weight, bias=torch.zeros_like(weight), eps=eps)


def bare_module(x, eps):
    return F.layer_norm(x, x.shape[-1:], None, None, eps)


def bare_squares(x, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)


def bare_variance(x, eps):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps)


def without_both(kernel, x, eps):
    return kernel(x=x, weight=x.new_ones(x.shape[-1]), bias=x.new_zeros(x.shape[-1]), eps=eps)


BARE = {"x": (2, 3, 8), "eps": 0.0123}
WITHOUT_BIAS = BARE | {"weight": (8,)}
INPUTS = WITHOUT_BIAS | {"bias": (8,)}
PATTERNS = [
    *(Pattern(example, INPUTS) for example in (module, in_float, variance, squares, squares_root)),
    Pattern(module, INPUTS, in_the_weights_dtype, where=is_mixed),
    *(Pattern(example, WITHOUT_BIAS, without_bias) for example in (module_without_bias, cohere)),
    *(Pattern(example, BARE, without_both) for example in (bare_module, bare_squares, bare_variance)),
]
