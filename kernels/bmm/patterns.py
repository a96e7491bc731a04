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


def are_fewer(A, B):
    """Of A there are fewer, perhaps but one."""
    of_a, of_b = A.shape[:-2], B.shape[:-2]
    return A.dim() > 1 and B.dim() > 2 and of_a != of_b and of_b == torch.broadcast_shapes(of_a, of_b)


def for_all(kernel, A, B):
    return kernel(A=A.expand(B.shape[:-2] + A.shape[-2:]), B=B)


def with_added(kernel, A, B, C):
    return kernel(A=A, B=B).add_(C)


PATTERNS = [
    Pattern(lambda A, B: torch.bmm(A, B), {"A": (2, 3, 8), "B": (2, 8, 5)}),
    Pattern(lambda A, B: torch.matmul(A, B), {"A": (2, 3, 4, 8), "B": (2, 3, 8, 5)}, where=are_batches),
    Pattern(lambda A, B, C: torch.baddbmm(C, A, B), {"A": (2, 3, 8), "B": (2, 8, 5), "C": (2, 3, 5)}, with_added),
    Pattern(lambda A, B: torch.matmul(A, B), {"A": (2, 3, 4, 8), "B": (1, 3, 8, 5)}, with_all, where=has_fewer),
    Pattern(lambda A, B: torch.matmul(A, B), {"A": (1, 3, 4, 8), "B": (2, 3, 8, 5)}, for_all, where=are_fewer),
]
