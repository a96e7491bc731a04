"""How models write a sum or a maximum along one dimension."""

from autokernel.match import Pattern

INPUTS = {"x": (1, 1, 1, 1, 1, 2), "dim": 5}
PATTERNS = [
    Pattern(lambda x, dim: x.sum(dim), INPUTS, lambda kernel, x, dim: kernel(x=x, dim=dim, op="sum")),
    Pattern(lambda x, dim: x.amax(dim), INPUTS, lambda kernel, x, dim: kernel(x=x, dim=dim, op="max")),
]
