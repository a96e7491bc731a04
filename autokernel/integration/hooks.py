"""Hooks and classes of a model's modules: Dynamo takes no notice of what changes of them once it has compiled a call."""

from collections.abc import Iterator, ValuesView
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils.hooks import RemovableHandle

FUNCTIONS = (FunctionType, staticmethod, classmethod, property)  # as they stand in a class
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


class Methods:
    """The functions of the classes of `model`'s modules, forward() and what it calls: a program may set them to others."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.compiled: dict[type[nn.Module], dict[str, Any]] = {}  # class -> those with which the model is compiled
        self.held: list[tuple[ValuesView[Any], list[Any]]] = []  # all that they have now, and had when last looked at
        self.found = ""

    def other(self) -> str:
        """The name of one that is another than the model is compiled with, which are those of its first call; or empty."""
        if not self.compiled:
            self.compiled = {cls: _functions_of(cls) for cls in map(type, self.model.modules())}
        elif self._are_as_before():
            return self.found
        classes = {one for cls in self.compiled for one in _made_from(cls)}
        self.held = [(vars(one).values(), [*vars(one).values()]) for one in classes]
        self.found = next(self._others(), "")
        return self.found

    def _are_as_before(self) -> bool:
        """At every call: lists are compared in a sixth of the time that their elements take in Python."""
        try:
            return all([*now] == held for now, held in self.held)
        except Exception:  # of any kind: what stands in a class may not be compared
            return False

    def _others(self) -> Iterator[str]:
        for cls, functions in self.compiled.items():
            now = _functions_of(cls)
            yield from (f"{cls.__name__}.{name}" for name, v in functions.items() if now.get(name) is not v)


def _made_from(cls: type) -> list[type]:
    """Itself and others, but nn.Module: into that Dynamo puts functions of its own, at the first call of a process."""
    return [one for one in cls.__mro__ if one not in (nn.Module, object)]


def _functions_of(cls: type) -> dict[str, Any]:
    """By name, as they stand in the class and those that it is made from: to look one up may make an object of it."""
    found = {name: v for one in reversed(_made_from(cls)) for name, v in vars(one).items()}
    return {name: v for name, v in found.items() if isinstance(v, FUNCTIONS)}
