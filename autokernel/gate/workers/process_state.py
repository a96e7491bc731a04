"""What a kernel leaves as it finds it: settings of a whole process, on which the model around the kernel depends.

A convenience for honest kernels, like all code in a worker. The gate's other processes do not notice what changes in this
one, but a model that runs the kernel would: in PyTorch's threads, in the precision of its products, in denormal numbers.
"""

import gc
import os
import signal
import sys
from collections import ChainMap
from dataclasses import dataclass, fields
from typing import Any

import torch

PATCHED = (torch, torch.Tensor, torch.nn.functional, torch.ops.aten)


class ProcessChange(RuntimeError):
    """A kernel changed a setting of its whole process."""


@dataclass(frozen=True)
class ProcessState:
    """The names of the fields are what is said of one that changed."""

    number_of_threads: int
    cores: frozenset[int]
    default_dtype: torch.dtype
    precision_of_products: tuple[Any, ...]
    seed_of_random_numbers: int
    rounding: tuple[float, ...]
    signal_handlers: tuple[Any, ...]
    tracing: tuple[Any, ...]
    garbage_collection: bool

    @staticmethod
    def now() -> "ProcessState":
        return ProcessState(
            number_of_threads=torch.get_num_threads(),
            cores=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
            default_dtype=torch.get_default_dtype(),
            precision_of_products=(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
            seed_of_random_numbers=torch.initial_seed(),
            rounding=_rounding(),
            signal_handlers=tuple(map(signal.getsignal, (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV))),
            tracing=(sys.gettrace(), sys.getprofile()),
            garbage_collection=gc.isenabled(),
        )

    def check(self) -> None:
        """Raises ProcessChange where the process is another now."""
        now = ProcessState.now()
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(now, field.name)
            if before != after:
                what = f"changes the {field.name.replace('_', ' ')} of its process"
                raise ProcessChange(f"{what}, which is its model's: {after} instead of {before}")


class Patches:
    """Functions of PyTorch, which a kernel must not replace."""

    def __init__(self) -> None:
        self.known = list(map(_attributes, PATCHED))

    def check(self) -> None:
        """Raises ProcessChange where one is another now."""
        for place, known in zip(PATCHED, self.known):
            now = _attributes(place)
            for name, value in known.items():
                if now.get(name) is not value and not _is_pytorchs(now.get(name)):
                    raise ProcessChange(f"replaces {place.__name__}.{name}, which is its model's")


def _is_pytorchs(value: Any) -> bool:
    """Whether a function is PyTorch's own: torch._dynamo, which a kernel may import, replaces torch.manual_seed."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__))


def _attributes(place: Any) -> dict[str, Any]:
    """Of a module or a class, as they are found."""
    return dict(ChainMap(*map(vars, getattr(place, "__mro__", (place,)))))


def _rounding() -> tuple[float, ...]:
    """What the processor makes of results that lie between two numbers, and, made large again (where denormal numbers
    are zeros, they equal zero), of one that is too small for a normal number."""
    unit, least = sys.float_info.epsilon / 2, sys.float_info.min
    return least / 2 * 2.0**60, 1 + 1.5 * unit, 1 + 0.5 * unit, -1 - 0.5 * unit
