"""How models write a linear layer and the activation behind it, with and without a bias; and one with a bias alone."""

import torch
import torch.nn.functional as F

from autokernel.model import patches
from autokernel.model.activations import FORMS
from autokernel.model.patterns import Pattern

SIZES = {"x": (2, 3, 8), "weight": (5, 8)}


def plain(name, act):
    def call(kernel, x, weight):
        return kernel(x=x, weight=weight, bias=None, activation=name)

    return Pattern(lambda x, weight: act(F.linear(x, weight)), SIZES, call)


def biased(name, act):
    def call(kernel, x, weight, bias):
        return kernel(x=x, weight=weight, bias=bias, activation=name)

    def is_vector(x, weight, bias):
        return bias.shape == weight.shape[:1]

    return Pattern(lambda x, weight, bias: act(F.linear(x, weight, bias)), SIZES | {"bias": (5,)}, call, where=is_vector)


def flattened(name, act):
    """As GPT-2 by Hugging Face has it (transformers.pytorch_utils.Conv1D): the weight is [K, N]."""

    def example(x, weight, bias):
        return act(torch.addmm(bias, x.view(6, 8), weight).view(2, 3, 5))

    def call(kernel, x, weight, bias):
        return kernel(x=x, weight=weight.t(), bias=bias, activation=name)

    def is_vector(x, weight, bias):
        return bias.shape == weight.shape[1:]

    return Pattern(example, {"x": (2, 3, 8), "weight": (8, 5), "bias": (5,)}, call, where=is_vector)


def product(kernel, bias, A, B):
    return kernel(x=A, weight=B.t(), bias=bias, activation="none")


def has_vector(bias, A, B):
    return bias.shape == B.shape[1:]


def nothing(x):
    return x


def of_patches(dims):
    def example(x, weight, bias, **sides):
        return patches.convolved(x, weight, bias, sides)

    def call(kernel, x, weight, bias, **sides):
        rows = patches.rows_of(x, sides)
        return patches.as_convolved(kernel(x=rows, weight=weight.flatten(1), bias=bias, activation="none"))

    def are_side_by_side(x, weight, bias, **sides):
        return patches.are_side_by_side(x, weight, sides)

    return Pattern(example, {**patches.sizes_of(dims), "bias": (5,)}, call, where=are_side_by_side, is_rare=True)


PATTERNS = [
    *(way(*form) for form in FORMS for way in (biased, plain, flattened)),
    biased("none", nothing),
    Pattern(
        lambda bias, A, B: torch.addmm(bias, A, B),
        {"bias": (5,), "A": (3, 8), "B": (8, 5)},
        product,
        where=has_vector,
    ),
    *map(of_patches, (1, 2, 3)),
]
