"""How models write products of batches of matrices; what attention's and other kernels take is theirs."""

import torch

from autokernel.model.patterns import Pattern


def are_batches(A, B):
    return A.dim() > 2 and A.shape[:-2] == B.shape[:-2]


def has_fewer(A, B):
    """Of B there are fewer, each for several matrices of A."""
    of_a, of_b = A.shape[:-2], B.shape[:-2]
    return B.dim() > 2 and of_a != of_b and of_a == torch.broadcast_shapes(of_a, of_b)


def with_all(kernel, A, B):
    return kernel(A=A, B=B.expand(A.shape[:-2] + B.shape[-2:]))


PATTERNS = [
    Pattern(lambda A, B: torch.bmm(A, B), {"A": (2, 3, 8), "B": (2, 8, 5)}),
    Pattern(lambda A, B: torch.matmul(A, B), {"A": (2, 3, 4, 8), "B": (2, 3, 8, 5)}, where=are_batches),
    Pattern(lambda A, B: torch.matmul(A, B), {"A": (2, 3, 4, 8), "B": (1, 3, 8, 5)}, with_all, where=has_fewer),
]
