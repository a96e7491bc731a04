"""Modules of PyTorch's own that have another forward() while Dynamo may look at it, which computes what theirs does.

Where a break, such as a number that is read, is within a loop, Dynamo leaves out all of the function; and it compiles no
function of torch.nn's own by itself. So nn.Sequential, which calls its modules in a loop, costs them all their kernels
where one of them breaks, or what calls it does. Written line by line it breaks off at the one alone.

Where Dynamo takes in no recurrent module, it leaves out all that follows the first one in what calls it, without a word
where a graph comes before. As a call that no graph may have in it, the module is left out alone.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
WHY_RECURRENT = "nn.RNN, nn.GRU and nn.LSTM are left as they are where a compiler gets the rest"
FILE = "<autokernel: "  # how the names of the files begin in which our functions are said to be


class Forwards:
    """Of one model. `forwards` are given; line_by_line() adds those of its sequences."""

    def __init__(self, model: nn.Module, forwards: dict[nn.Module, MethodType]) -> None:
        self.model, self.forwards = model, dict(forwards)
        self.lock, self.inside = threading.Lock(), 0
        self.has_lines = False

    def line_by_line(self) -> bool:
        """Whether that was not so before."""
        if self.has_lines:
            return False
        self.has_lines = True
        sequences = [module for module in self.model.modules() if isinstance(module, nn.Sequential)]
        with self.lock:
            self.forwards |= {m: _line_by_line(m, i) for i, m in enumerate(sequences) if _is_torchs_own(m)}
        return True

    def in_place(self) -> AbstractContextManager[None]:
        return self._in_place() if self.forwards else nullcontext()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def _enter(self, step: int) -> None:
        """A method of the modules' own: who calls one meanwhile, or copies it, notices nothing."""
        with self.lock:
            self.inside += step
            for module, forward in self.forwards.items():
                if self.inside:
                    module.__dict__.setdefault("forward", forward)
                elif module.__dict__.get("forward") is forward:
                    del module.__dict__["forward"]


def recurrent_outside(
    model: nn.Module, outside: Callable[[str], AbstractContextManager[Any]]
) -> dict[nn.Module, MethodType]:
    """A model's recurrent modules -> a forward() between graphs. outside: what to enter around it, given the reason."""
    found = [m for m in model.modules() if isinstance(m, RECURRENT) and "forward" not in m.__dict__]
    return {m: MethodType(_outside(type(m).forward, outside), m) for m in found}


def _outside(forward: Callable[..., Any], outside: Callable[[str], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @torch.compiler.disable(reason=WHY_RECURRENT)
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        with outside(WHY_RECURRENT):
            return forward(*args, **kwargs)

    return uncompiled


def _is_torchs_own(sequence: nn.Sequential) -> bool:
    return type(sequence).forward is nn.Sequential.forward and "forward" not in sequence.__dict__


def _line_by_line(sequence: nn.Sequential, number: int) -> MethodType:
    """Its code is of this sequence alone: what Dynamo decides of a function it decides for all that share it."""
    names = tuple(sequence._modules)
    calls = "".join(f"    input = self._modules[{name!r}](input)\n" for name in names)
    code = f"def forward(self, input):\n    if tuple(self._modules) != NAMES:\n        return theirs(self, input)\n{calls}"
    made: dict[str, Any] = {"NAMES": names, "theirs": nn.Sequential.forward}
    exec(compile(f"{code}    return input\n", f"{FILE}{type(sequence).__name__} {number}>", "exec"), made)
    forward: FunctionType = made["forward"]
    forward.__qualname__ = nn.Sequential.forward.__qualname__  # in Python's words for wrong arguments
    return MethodType(forward, sequence)
