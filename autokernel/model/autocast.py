"""Autocast in a graph: the casts that it makes, written out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)
from torch.utils._pytree import tree_leaves

from autokernel.model.nodes import aten
from autokernel.model.one_node import as_one_node


@contextmanager
def autocast_as_nodes() -> Iterator[None]:
    """Around an operator whose casts no trace shows: there, autocast itself is in the graph."""
    tracer, entered = get_proxy_mode().tracer, []
    for kind in autocast_devices():
        state = (kind, torch.get_autocast_dtype(kind), True, None)
        entered.append(tracer.create_proxy("call_function", torch.amp.autocast_mode._enter_autocast, state, {}))
    yield
    for proxy in reversed(entered):
        tracer.create_proxy("call_function", torch.amp.autocast_mode._exit_autocast, (proxy,), {})


def set_autocast(device_type: str, is_enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device_type, is_enabled)
    torch.set_autocast_dtype(device_type, dtype)


def autocast_devices() -> list[str]:
    """The kinds of device for which autocast is on."""
    return [kind for kind in autocast_keys() if torch.is_autocast_enabled(kind)]


@contextmanager
def without_autocast() -> Iterator[None]:
    switched = autocast_devices()
    for kind in switched:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in switched:
            torch.set_autocast_enabled(kind, True)


@cache
def autocast_keys() -> dict[str, Any]:
    """Kind of device -> the dispatch key under which PyTorch has what autocast does with each operator there."""
    return {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


@cache
def autocast_operators() -> dict[Any, Callable[..., Any]]:
    """Operators that autocast sees to, and how to trace them: by these, which call the operators.

    Those that it has kernels of its own for, and those that PyTorch makes of such.
    """
    made_of_others = set(_registered("CompositeImplicitAutograd"))
    functions = {operator: partial(of_autocast, operator) for operator in _cast_for() - made_of_others}
    return functions | {operator: partial(casts_inside, operator) for operator in made_of_others}


def _registered(key: str) -> Iterator[OpOverload]:
    """The operators that have a kernel of their own under a dispatch key."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and hasattr(getattr(aten, packet, None), overload or "default"):
            yield getattr(getattr(aten, packet), overload or "default")


def casts_inside(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Of one that PyTorch makes of others: where autocast casts in there alone, a node with autocast on."""
    result = of_autocast(operator, *args, **kwargs)
    is_on = any(not torch._C._dispatch_tls_is_dispatch_key_excluded(autocast_keys()[kind]) for kind in autocast_devices())
    if result is not NotImplemented or not is_on or operator._schema.is_mutable:
        return result
    if not _has_casts_inside(operator, args, kwargs):
        return NotImplemented
    with autocast_as_nodes():
        return as_one_node(operator, args, kwargs)


def _has_casts_inside(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    def calls() -> list[Any]:
        with disable_proxy_modes_tracing(), _Calls() as mode:
            operator(*args, **kwargs)
        return mode.seen

    made_of, tensors = calls(), [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if len({t.dtype for t in tensors if t.is_floating_point()}) > 1:  # without casts it would raise, which PyTorch logs
        return any(made in _cast_for() for made, _ in made_of)
    with without_autocast():
        return made_of != calls()


@cache
def _cast_for() -> set[OpOverload]:
    """The operators that autocast has kernels of its own for."""
    return {operator for key in autocast_keys().values() for operator in _registered(key.name)}


class _Calls(TorchDispatchMode):
    """The operators that are called, and the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((func, [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result


def of_autocast(operator: Any, *args: Any, **kwargs: Any) -> Any:
    kind = next((v.device.type for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)), None)
    if kind not in autocast_keys() or not torch.is_autocast_enabled(kind):
        return NotImplemented
    key = autocast_keys()[kind]
    if torch._C._dispatch_tls_is_dispatch_key_excluded(key) or not operator.has_kernel_for_dispatch_key(key):
        return NotImplemented
    return operator._op_dk(key, *args, **kwargs)
