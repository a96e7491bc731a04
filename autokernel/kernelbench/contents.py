"""What the tensors of a problem may be beside what its get_inputs() draws: its weights, labels and matrices of some form.

Whether a result is to be right after such a change is found by experiment (gate/checks/conditioning.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Change = Callable[[Tensor, torch.Generator], Tensor]
Filled = Callable[[dict[str, Any], torch.Generator], dict[str, Tensor]]  # KernelSpec.filled

LARGE = 1e4, -1e4
MEANS = 64.0, -1000.0  # of each free input
SIZES = 1e-12, 1 / 16, 16.0, 1e8, 1e12  # of all free inputs at once, and of each: none has squares beyond fp32
OF_WEIGHTS: dict[str, Change] = {
    "above zero": lambda x, g: x.abs(),
    "below zero": lambda x, g: -x.abs(),
    "a sixteenth": lambda x, g: x / 16,
    "times 16": lambda x, g: x * 16,
    "zero": lambda x, g: torch.zeros_like(x),
    "of one value": lambda x, g: torch.full_like(x, 0.75),
}
OF_EACH = "zero", "below zero"
# Of independent whole numbers: each of these is again such as may be drawn.
OF_INTEGERS: dict[str, Change] = {
    "alike": lambda x, g: x.flatten()[:1].reshape((1,) * x.dim()).expand_as(x).contiguous(),
    "in order": lambda x, g: x.flatten().sort().values.view_as(x),
    "in order, the largest first": lambda x, g: x.flatten().sort(descending=True).values.view_as(x),
    "the least": lambda x, g: torch.full_like(x, x.min()),
    "the largest": lambda x, g: torch.full_like(x, x.max()),
    "two in turn": lambda x, g: torch.where(torch.arange(x.numel()).view_as(x) % 2 == 0, x.min(), x.max()),
}
# Of matrices with zeros, as triangles: these stay where they are, and what is not finite lies beside them.
OF_HOLES: dict[str, Change] = {
    "of either sign": lambda x, g: x * (torch.randint(0, 2, x.shape, generator=g) * 2 - 1),
    "below zero": lambda x, g: -x.abs(),
    "times 30": lambda x, g: x * 30,
}


def kinds(
    weights: Sequence[str],
    new_weights: Callable[[], Mapping[str, Tensor]],
    others: Sequence[str],
    integers: Sequence[str],
    holed: Sequence[str],
    nonfinite: Sequence[float],
) -> dict[str, Filled]:
    """What is said of each kind, and what makes it. `others`: free inputs, the first among them; `integers`: independent
    whole numbers; `holed`: matrices of which a part is zeros."""
    made: dict[str, Filled] = {}
    if weights:
        made["weights as in a new module"] = lambda inputs, g: dict(new_weights())
    for what, change in OF_WEIGHTS.items():
        if weights:
            made[f"weights {what}"] = partial(_changed, weights, change)
        if len(weights) > 1 and what in OF_EACH:  # each call of a verdict takes tens of milliseconds
            made |= {f"{name} {what}": partial(_changed, [name], change) for name in weights}
    for name in integers:
        made |= {f"{name} {what}": partial(_changed, [name], change) for what, change in OF_INTEGERS.items()}
    for name in holed:
        made |= {f"{name} {what}": partial(_changed, [name], change) for what, change in OF_HOLES.items()}
    each = [[name] for name in (*others, *holed)]
    for names in each if len(others) < 2 else (others, *each):
        for size in SIZES:
            made[f"{' and '.join(names)} times {size:g}"] = partial(_changed, names, lambda x, g, size=size: x * size)
    for name in others:
        for mean in MEANS:
            made[f"{name} about {mean:g}"] = partial(_changed, [name], lambda x, g, mean=mean: x + mean)
    for name in (*others, *weights, *holed):
        # An infinite weight of a norm makes NaN where it is first multiplied by a mean.
        for value in (*((math.nan,) if name in weights else nonfinite), *LARGE):
            made[f"{value:g} in {name}"] = partial(_changed, [name], partial(_planted, value))
    return made


def _changed(names: Sequence[str], change: Change, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    free = {name: inputs[name] for name in names if inputs[name].numel()}
    return {name: change(x, generator).to(x.dtype).contiguous() for name, x in free.items()}


def _planted(value: float, x: Tensor, generator: torch.Generator) -> Tensor:
    """x with one such number somewhere, in place of one that is not zero, if there is any."""
    places = x.flatten().nonzero().flatten()
    places = places if len(places) else torch.arange(x.numel())
    return x.flatten().index_fill(0, places[torch.randint(len(places), (1,), generator=generator)], value).view_as(x)


def has_holes(x: Tensor, again: Tensor) -> bool:
    """Whether a part is zeros, the same in both draws, and others are random numbers: a triangle, a diagonal, no mask."""
    if not x.is_floating_point() or not x.numel():
        return False
    others = x[x != 0]
    if x.shape != again.shape or not torch.equal(x == 0, again == 0):
        return False
    return 0.1 < 1 - others.numel() / x.numel() < 1 and others.unique().numel() > others.numel() / 2
