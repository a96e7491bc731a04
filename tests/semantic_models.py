"""Models of a few lines that tests put kernels into, and what is the same of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.random_programs import Everywhere, finder
from models.llama import RMSNorm


def everywhere(fallback: str | None = None) -> Everywhere:
    return Everywhere((), fallback, finder=finder())


class Function(nn.Module):
    """`function` of the module, which has two linear layers and a norm, and of inputs."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), RMSNorm(8)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(call(x), list(model.parameters()), allow_unused=True))
