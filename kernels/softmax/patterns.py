"""How models write softmax."""

import torch

from autokernel.model.patterns import Pattern


def by_hand(x, dim):
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def in_float(kernel, x, dim):
    return kernel(x=x.to(torch.float32), dim=dim)


INPUTS = {"x": (1, 1, 1, 1, 1, 2), "dim": 5}
PATTERNS = [
    Pattern(lambda x, dim: torch.softmax(x, dim), INPUTS),
    Pattern(
        lambda x, dim: torch.softmax(x, dim, dtype=torch.float32),
        INPUTS,
        lambda kernel, x, dim: kernel(x=x.to(torch.float32), dim=dim),
    ),
    Pattern(by_hand, INPUTS),
]
