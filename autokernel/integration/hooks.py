"""Hooks and classes of a model's modules: Dynamo takes no notice of what changes of them once it has compiled a call."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils.hooks import RemovableHandle

KINDS = ("forward", "forward_pre", "backward", "backward_pre")


class Hooks:
    """Of `model`, and those of all modules. The ones that the model adds in a call of its own are part of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.registered = -1  # PyTorch's count of all hooks when they were last looked for
        self.held: list[tuple[dict[int, Any], tuple[int, ...]]] = []
        self.now: set[int] = set()
        self.compiled: set[int] | None = None  # with which the model is compiled

    def are_others(self) -> bool:
        """Whether there are others than the model is compiled with, which are those of its first call."""
        self._look()
        if self.compiled is None:
            self.compiled = self.now
        return self.now != self.compiled

    def called(self) -> None:
        """After a call of the compiled model."""
        if self._look():
            self.compiled = self.now | (self.compiled or set())

    def _look(self) -> bool:
        """Whether anything is new."""
        if self.registered == RemovableHandle.next_id and all(tuple(hooks) == ids for hooks, ids in self.held):
            return False
        self.registered = RemovableHandle.next_id
        self.held = [(hooks, tuple(hooks)) for hooks in self._all() if hooks]
        self.now = {number for _, ids in self.held for number in ids}
        return True

    def _all(self) -> Iterator[dict[int, Any]]:
        for kind in KINDS:
            yield getattr(of_all_modules, f"_global_{kind}_hooks")
        for module in self.model.modules():
            for kind in KINDS:
                yield getattr(module, f"_{kind}_hooks")


class Forwards:
    """forward() of the classes of `model`'s modules, which a program may set to another function."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.compiled: dict[type[nn.Module], Any] = {}  # with which the model is compiled

    def other(self) -> type[nn.Module] | None:
        """A class that has another one than the model is compiled with, which are those of its first call."""
        if not self.compiled:
            self.compiled = {cls: _forward_of(cls) for cls in map(type, self.model.modules())}
        return next((cls for cls, forward in self.compiled.items() if _forward_of(cls) is not forward), None)


def _forward_of(cls: type[nn.Module]) -> Any:
    """As it stands in the class: to look it up there may make an object of it."""
    return next((vars(c)["forward"] for c in cls.__mro__ if "forward" in vars(c)), None)
