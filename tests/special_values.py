"""Inputs with special values: kernel type -> name -> maker of the arguments in a dtype."""

import math
from functools import partial

import torch

INF, NAN = math.inf, math.nan


def rows(*special, width=300, dtype):
    """A row of random numbers, then one for each of `special`: a number all along it, or (number, where it stands)."""
    x = torch.randn(1 + len(special), width)
    for row, what in zip(x[1:], special):
        number, where = what if isinstance(what, tuple) else (what, slice(None))
        row[where] = number
    return x.to(dtype)


ROWS = (-INF, INF, NAN, 0.0, (NAN, 7), (INF, -1), (-INF, slice(0, 150)), (-INF, 0))


def softmax(dtype, dim=-1):
    x = rows(*ROWS, dtype=dtype)
    return {"x": x if dim else x.T.contiguous(), "dim": dim}


def reduce(dtype, op, dim=-1):
    return softmax(dtype, dim) | {"op": op}


def normed(dtype, eps, bias):
    x = rows(*ROWS, dtype=dtype)
    weight = torch.randn(x.shape[1]).to(dtype)
    return {"x": x, "weight": weight, "eps": eps} | ({"bias": torch.randn(x.shape[1]).to(dtype)} if bias else {})


def entropy(dtype, special, ignored=slice(0, 0)):
    logits = rows(special, dtype=dtype)
    targets = torch.tensor([5, 9])
    targets[ignored] = -100
    return {"logits": logits, "targets": targets}


def attention(dtype, safe_softmax, causal, mask):
    """Queries 3, 13, … see no key, and query 5, under a mask of numbers, the lowest number wherever it looks."""
    Q, K, V = (torch.randn(2, heads, 70, 32).to(dtype) for heads in (4, 2, 2))
    seen = torch.rand(2, 1, 70, 70) < 2 / 3
    seen[:, :, 3::10] = False
    if mask == "float":
        attn_mask = torch.randn(seen.shape).to(dtype).masked_fill(~seen, -INF)
        attn_mask[:, :, 5] = torch.finfo(dtype).min
    else:
        attn_mask = seen if mask == "bool" else None
        if mask is None:  # scores of -inf by themselves: all of them in one row, the first hundred in another
            Q, K = Q.abs(), K.abs()
            Q[:, :, 3], K[:, :, :40, 0] = -INF, K[:, :, :40, 0].clamp(min=0.1)
    return {"Q": Q, "K": K, "V": V, "causal": causal, "attn_mask": attn_mask, "safe_softmax": safe_softmax}


SPECIAL = {
    "softmax": {"rows": softmax, "columns": partial(softmax, dim=0)},
    "reduce": {f"{op} {dim}": partial(reduce, op=op, dim=dim) for op in ("sum", "max") for dim in (-1, 0)},
    "layernorm": {"rows": partial(normed, eps=1e-5, bias=True)},
    "rmsnorm": {"rows": partial(normed, eps=1e-6, bias=False)},
    "cross_entropy": {
        "all ignored": partial(entropy, special=0.0, ignored=slice(None)),
        "a row of -inf": partial(entropy, special=-INF),
        "an ignored row of NaN": partial(entropy, special=NAN, ignored=1),
        "NaN": partial(entropy, special=(NAN, 0)),
        "inf": partial(entropy, special=(INF, 0)),
        "an impossible target": partial(entropy, special=(-INF, 9)),
        "others impossible": partial(entropy, special=(-INF, slice(10, None))),
    },
    "flash_attention": {
        f"{mask} mask{' causal' * causal}{'' if safe else ' by hand'}": partial(
            attention, safe_softmax=safe, causal=causal, mask=mask
        )
        for mask in ("bool", "float", None)
        for causal in (False, True)
        for safe in (True, False)
    },
}
