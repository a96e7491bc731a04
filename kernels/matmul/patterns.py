"""How models write the product of two matrices; inputs of more dimensions are flattened. fused_linear adds vectors."""

import torch
import torch.nn.functional as F

from autokernel.model import patches
from autokernel.model.patterns import Pattern


def rows(kernel, x, B):
    """x [..., K] @ B [K, N] by a kernel that knows two dimensions."""
    return kernel(A=x.flatten(0, -2), B=B).unflatten(0, x.shape[:-1])


def product(kernel, x, weight):
    return rows(kernel, x, weight)


def is_matrix(x, weight):
    return weight.dim() == 2


def is_matrix_added(added, A, B):
    return added.shape != B.shape[1:]


def of_patches(dims):
    def example(x, weight, **sides):
        return patches.convolved(x, weight, None, sides)

    def call(kernel, x, weight, **sides):
        return patches.as_convolved(rows(kernel, patches.rows_of(x, sides), weight.flatten(1).t()))

    def are_side_by_side(x, weight, **sides):
        return patches.are_side_by_side(x, weight, sides)

    return Pattern(example, patches.sizes_of(dims), call, where=are_side_by_side, is_rare=True)


PATTERNS = [
    Pattern(
        lambda x, weight: F.linear(x, weight),
        {"x": (2, 3, 8), "weight": (5, 8)},
        lambda kernel, x, weight: rows(kernel, x, weight.t()),
    ),
    Pattern(lambda x, weight: torch.matmul(x, weight), {"x": (2, 3, 8), "weight": (8, 5)}, product, where=is_matrix),
    Pattern(lambda A, B: torch.mm(A, B), {"A": (3, 8), "B": (8, 5)}),
    Pattern(
        lambda added, A, B: torch.addmm(added, A, B),
        {"added": (3, 5), "A": (3, 8), "B": (8, 5)},
        lambda kernel, added, A, B: kernel(A=A, B=B).add_(added),
        where=is_matrix_added,
    ),
    *map(of_patches, (1, 2, 3)),
]
