"""Kept kernels as operators of PyTorch: torch.ops.autokernel.<name> traces, exports, has a gradient, and breaks no graph.

Registered with Library.define and impl, which cost the host least; benchmarks/host_cost.py measures how much.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from autokernel.spec import KernelSpec

Kernel = Callable[..., Tensor]

LIBRARY = torch.library.Library("autokernel", "FRAGMENT")  # what it registers lives as long as it does
# Kernels are proven for strides, and Inductor is to give them just these.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(name: str, spec: KernelSpec, kernel: Kernel, device_type: str) -> OpOverloadPacket:
    """`kernel`, whose kind is `spec`, as an operator with the parameters of its oracle, for devices of one type.

    Registered once in a process. The result is contiguous and belongs to the caller. The overload `no_grad` is for graphs
    in which no gradient is wanted: without a look at who wants one, a call costs the host 2 µs less.
    """
    if not hasattr(torch.ops.autokernel, name):
        schema = torch.library.infer_schema(spec.oracle, mutates_args=())
        for overload in (name, f"{name}.no_grad"):
            LIBRARY.define(overload + schema, tags=TAGS)
            LIBRARY.impl(overload, by_position(spec, kernel), device_type.upper())
            torch.library.register_fake(f"autokernel::{overload}", partial(fake, spec), lib=LIBRARY)
        LIBRARY.impl(name, differentiable(spec, getattr(torch.ops.autokernel, name).default), "Autograd")
    return getattr(torch.ops.autokernel, name)


def by_position(spec: KernelSpec, kernel: Kernel) -> Kernel:
    """`kernel` with the oracle's parameters in the oracle's order and with its defaults, whatever its own are."""
    parameters = inspect.signature(spec.oracle).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    names = tuple(parameters)

    def run(*arguments: Any) -> Tensor:
        return kernel(**(defaults | dict(zip(names, arguments)))).contiguous()

    return run


def original(spec: KernelSpec, *arguments: Any) -> Tensor:
    """What PyTorch programs write, in the dtype of the arguments: a kernel takes no notice of autocast either."""
    device_type = next(a.device.type for a in arguments if isinstance(a, Tensor))
    with torch.autocast(device_type, enabled=False):
        return by_position(spec, spec.eager)(*arguments)


def fake(spec: KernelSpec, *arguments: Any) -> Tensor:
    """A tensor like the kernel's result."""
    return torch.empty_like(original(spec, *arguments), memory_format=torch.contiguous_format)


def differentiable(spec: KernelSpec, op: OpOverload) -> Kernel:
    """`op` for tensors that may want gradients: those of the original, which the backward pass computes once more.

    By hand, because torch.library.register_autograd costs another 1 µs a call without gradients and 3 µs with them.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            ctx.arguments = [None if isinstance(a, Tensor) else a for a in arguments]
            ctx.places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
            ctx.save_for_backward(*(arguments[i] for i in ctx.places))
            with torch._C._AutoDispatchBelowAutograd():
                return op(*arguments)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            arguments, needed = list(ctx.arguments), ctx.needs_input_grad
            with torch.enable_grad():
                for i, saved in zip(ctx.places, ctx.saved_tensors):
                    arguments[i] = saved.view_as(saved)  # its own: one argument may have been computed from another
                result = original(spec, *arguments)
            wanted = [a for a, is_needed in zip(arguments, needed) if is_needed]
            again = torch.is_grad_enabled()  # whether the gradient is to have a gradient
            with torch.autocast(gradient.device.type, enabled=False):
                gradients = iter(torch.autograd.grad(result, wanted, gradient, create_graph=again, allow_unused=True))
            return tuple(next(gradients) if is_needed else None for is_needed in needed)

    def run(*arguments: Any) -> Tensor:
        if torch.is_grad_enabled():
            return Differentiable.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    return run
