"""How models write the activations of reference.ACTIVATIONS: for the patterns of every kernel type that has one."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("silu", F.silu),
    ("silu", lambda x: x * torch.sigmoid(x)),
    ("gelu", F.gelu),
    ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    ("relu2", lambda x: F.relu(x).pow(2)),
    ("gelu_tanh", partial(F.gelu, approximate="tanh")),
    ("gelu_tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))),
    ("relu", F.relu),
]
