"""How models write a sum or a maximum along one dimension, or over all."""

from autokernel.model.patterns import Pattern


def by_kernel(op):
    return lambda kernel, x, dim: kernel(x=x, dim=dim, op=op)


def keeping(op):
    return lambda kernel, x, dim: kernel(x=x, dim=dim, op=op).unsqueeze(dim)


INPUTS = {"x": (1, 1, 1, 1, 1, 2), "dim": 5}
PATTERNS = [
    Pattern(lambda x, dim: x.sum(dim), INPUTS, by_kernel("sum")),
    Pattern(lambda x, dim: x.sum(dim, keepdim=True), INPUTS, keeping("sum")),
    Pattern(lambda x: x.sum(), {"x": (2, 3)}, lambda kernel, x: kernel(x=x.flatten(), dim=0, op="sum")),
    Pattern(lambda x, dim: x.amax(dim), INPUTS, by_kernel("max")),
    Pattern(lambda x, dim: x.amax(dim, keepdim=True), INPUTS, keeping("max")),
    Pattern(lambda x, dim: x.max(dim).values, INPUTS, by_kernel("max")),
]
