"""How models write gated MLPs: SwiGLU, GeGLU and their like, with separate and with merged gate and up weights."""

from itertools import product

import torch.nn.functional as F

from autokernel.model import activations
from autokernel.model.patterns import Pattern

ACTIVATIONS = [form for form in activations.FORMS if form[0] != "relu"]
SEPARATE = {"x": (2, 3, 8), "w_gate": (10, 8), "w_up": (10, 8), "w_down": (8, 10)}
MERGED = {"x": (2, 3, 8), "w_both": (20, 8), "w_down": (8, 10)}
SPLITS = [lambda both: both.chunk(2, -1), lambda both: both.split(10, -1), lambda both: (both[..., :10], both[..., 10:])]


def separate(name, act):
    def example(x, w_gate, w_up, w_down):
        return F.linear(act(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    def call(kernel, x, w_gate, w_up, w_down):
        return kernel(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, activation=name)

    return Pattern(example, SEPARATE, call)


def merged(name, act, split, gate):
    """The half `gate` (0 or 1) of the merged weight's outputs goes through the activation."""

    def example(x, w_both, w_down):
        halves = split(F.linear(x, w_both))
        return F.linear(act(halves[gate]) * halves[1 - gate], w_down)

    def call(kernel, x, w_both, w_down):
        halves = w_both.chunk(2)
        return kernel(x=x, w_gate=halves[gate], w_up=halves[1 - gate], w_down=w_down, activation=name)

    return Pattern(example, MERGED, call)


PATTERNS = [separate(*a) for a in ACTIVATIONS] + [
    merged(*activation, *way) for activation, *way in product(ACTIVATIONS, SPLITS, (0, 1))
]
