"""How models write the product of two matrices; inputs of more dimensions are flattened, a bias is added afterwards."""

import torch
import torch.nn.functional as F

from autokernel.model.match import Pattern


def rows(kernel, x, B):
    """x [..., K] @ B [K, N] by a kernel that knows two dimensions."""
    return kernel(A=x.flatten(0, -2), B=B).unflatten(0, x.shape[:-1])


def product(kernel, x, weight):
    return rows(kernel, x, weight)


def is_matrix(x, weight):
    return weight.dim() == 2


PATTERNS = [
    Pattern(
        lambda x, weight: F.linear(x, weight),
        {"x": (2, 3, 8), "weight": (5, 8)},
        lambda kernel, x, weight: rows(kernel, x, weight.t()),
    ),
    Pattern(
        lambda x, weight, bias: F.linear(x, weight, bias),
        {"x": (2, 3, 8), "weight": (5, 8), "bias": (5,)},
        lambda kernel, x, weight, bias: rows(kernel, x, weight.t()).add_(bias),
    ),
    Pattern(lambda x, weight: torch.matmul(x, weight), {"x": (2, 3, 8), "weight": (8, 5)}, product, where=is_matrix),
    Pattern(lambda A, B: torch.mm(A, B), {"A": (3, 8), "B": (8, 5)}),
    Pattern(
        lambda bias, A, B: torch.addmm(bias, A, B),
        {"bias": (5,), "A": (3, 8), "B": (8, 5)},
        lambda kernel, bias, A, B: kernel(A=A, B=B).add_(bias),
    ),
]
