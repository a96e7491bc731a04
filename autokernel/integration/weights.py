"""Weights as a kernel is given them: one that is written to becomes another tensor, for it may have been prepared."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from autokernel.model.nodes import another

MANY = 4096  # tensors that are known, from which on those that are gone are forgotten
# What is made is no view of what it is made of: a result may be changed in place, and another keeps it alive.
NO_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def with_known_weights(static: Collection[str], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, whose arguments `static` keep their contents as long as they are the same tensor.

    What is written through `.data` nobody tells. A CUDA graph, which is replayed whatever was written since, records what
    is prepared of a weight as well.
    """
    known = KnownWeights()

    def call(**arguments: Any) -> Any:
        for name in static:
            if isinstance(weight := arguments[name], Tensor):
                arguments[name] = known.of(weight)
        return kernel(**arguments)

    return call if static else kernel


def view_of(weight: Tensor) -> Tensor:
    """`weight` as another tensor, of which a kernel takes what it prepared of `weight`."""
    view = another(weight)
    view.viewed = weight
    return view


class KnownWeights:
    """What stands for each weight that a kernel has been given."""

    def __init__(self) -> None:
        self.known: dict[int, _Known] = {}  # by the tensor's address, which another one may have later

    def of(self, weight: Tensor) -> Tensor:
        """The tensor that stands for its contents now."""
        weight = getattr(weight, "viewed", weight)
        if _is_new_each_time(weight):
            return _alias(weight)
        known = self.known.get(id(weight))
        if known and known.stands_for(weight):
            return weight if known.alias is None else known.alias
        return self._renewed(weight, known)

    def _renewed(self, weight: Tensor, old: "_Known | None") -> Tensor:
        key, alias, is_parameter = id(weight), None, isinstance(weight, Parameter)
        weak = None if is_parameter else ref(weight)  # with one, PyTorch could not swap a module's parameters
        if old and old.may_be(weight):
            alias = _alias(weight)
            weak = ref(weight, lambda _: self.known.pop(key, None))
        elif len(self.known) >= MANY:
            self.known = {key: known for key, known in self.known.items() if not known.is_gone}
        self.known[key] = _Known(weak, weight._version, weight.data_ptr(), alias)
        return weight if alias is None else alias


@dataclass(slots=True)
class _Known:
    """A tensor of which a kernel may have prepared something, and what tells that it was written to."""

    weight: ReferenceType[Tensor] | None  # None: a parameter that was not written to, or another one later
    version: int
    address: int
    alias: Tensor | None  # what it is to the kernel since it was written to; it lives as long as the tensor

    @property
    def is_gone(self) -> bool:
        return self.weight is not None and self.weight() is None

    def may_be(self, weight: Tensor) -> bool:
        return isinstance(weight, Parameter) if self.weight is None else self.weight() is weight

    def stands_for(self, weight: Tensor) -> bool:
        return self.may_be(weight) and self.version == weight._version and self.address == weight.data_ptr()


def _is_new_each_time(weight: Tensor) -> bool:
    """Whether nothing tells that it was written to, or what is prepared of it by weak reference would be in the way."""
    if weight.is_inference():  # which has no version
        return True
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return isinstance(weight, Parameter) and torch.__future__.get_swap_module_params_on_conversion()


def _alias(weight: Tensor) -> Tensor:
    """The same, but no view of it, which would keep it alive."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(NO_VIEWS):
        return another(weight)
