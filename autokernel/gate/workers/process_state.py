"""What a kernel leaves as it finds it: settings of a whole process, on which the model around the kernel depends.

A convenience for honest kernels, like all code in a worker. The gate's other processes do not notice what changes in this
one, but a model that runs the kernel would: in PyTorch's threads, in the precision of its products, in denormal numbers.
"""

import builtins
import enum
import gc
import os
import re
import resource
import signal
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.modules import module as hooked

# Functions that say how PyTorch is set (is_grad_enabled, _get_cudnn_benchmark), but for what is no setting, or might touch
# a device in the warm parent.
NO_SETTINGS = "jit|exception|version|upgrader|cache|thread_name|torch_function_enabled|accelerator|available|preferred"
SETTINGS = re.compile(rf"(?!.*({NO_SETTINGS}))_?(get|is)_\w+")
VALUES = (bool, int, str, enum.Enum, torch.dtype)
SIGNALS = signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGFPE, signal.SIGCHLD, signal.SIGPIPE
LIMITS = resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_STACK, resource.RLIMIT_DATA, resource.RLIMIT_CPU
LINUX = sys.platform == "linux"
HOOKS = [name for name in vars(hooked) if re.fullmatch(r"_global_\w+_hooks", name)]
LAYERS = {kind for kind in vars(torch.nn).values() if isinstance(kind, type)}
PATCHED = (torch, torch.Tensor, torch.nn.functional, torch.ops.aten, builtins, *LAYERS)


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
    garbage_collection: tuple[Any, ...]
    limits: tuple[Any, ...]
    working_folder: str
    standard_streams: tuple[Any, ...]
    hooks_of_modules: tuple[int, ...]
    modes_of_pytorch: tuple[int, ...]
    settings_of_pytorch: dict[str, Any]

    @staticmethod
    def now() -> "ProcessState":
        return ProcessState(
            number_of_threads=torch.get_num_threads(),
            cores=frozenset(os.sched_getaffinity(0)) if LINUX else frozenset(),
            default_dtype=torch.get_default_dtype(),
            precision_of_products=(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
            seed_of_random_numbers=torch.initial_seed(),
            rounding=_rounding(),
            signal_handlers=(*map(signal.getsignal, SIGNALS), signal.getitimer(signal.ITIMER_REAL)),
            tracing=(sys.gettrace(), sys.getprofile(), sys.excepthook),
            garbage_collection=(gc.isenabled(), gc.get_threshold()),
            limits=(*map(resource.getrlimit, LIMITS), os.sched_getscheduler(0) if LINUX else 0),
            working_folder=_working_folder(),
            standard_streams=(sys.stdin, sys.stdout, sys.stderr),
            hooks_of_modules=tuple(len(getattr(hooked, name)) for name in HOOKS),
            modes_of_pytorch=(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
            settings_of_pytorch={name: said() for name, said in SAYING.items()},
        )

    def check(self) -> None:
        """Raises ProcessChange where the process is another now."""
        now = ProcessState.now()
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(now, field.name)
            if before != after:
                name = field.name.replace("_", " ")
                if isinstance(before, dict):
                    name, before, after = next(
                        (f"{name}, {k},", before[k], after[k]) for k in before if before[k] != after[k]
                    )
                what = f"changes the {name} of its process"
                raise ProcessChange(f"{what}, which is its model's: {after} instead of {before}")


class Patches:
    """Functions of PyTorch and Python, which a kernel must not replace, and operators, which it must not override."""

    def __init__(self) -> None:
        self.known = list(map(_attributes, PATCHED))
        self.overridden = overridden()

    def check(self) -> None:
        """Raises ProcessChange where one is another now."""
        for place, known in zip(PATCHED, self.known):
            now = _attributes(place)
            for name, value in known.items():
                if now.get(name) is not value and not _is_pytorchs(now.get(name)):
                    raise ProcessChange(f"replaces {place.__name__}.{name}, which is its model's")
        for name in overridden() - self.overridden:
            raise ProcessChange(f"overrides PyTorch's {name}, which is its model's")


def _is_pytorchs(value: Any) -> bool:
    """Whether a function is PyTorch's own: torch._dynamo, which a kernel may import, replaces torch.manual_seed."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__))


def _attributes(place: Any) -> dict[str, Any]:
    """Of a module or a class, as they are found; of a layer, its own."""
    if place in LAYERS or not isinstance(place, type):
        return dict(vars(place))
    return dict(ChainMap(*map(vars, place.__mro__)))


def overridden() -> set[str]:
    """ATen's operators that Python code has registered kernels for, as "aten/add.Tensor/CPU"."""
    return {name for name in torch.library._impls if name.startswith("aten/")}


def _working_folder() -> str:
    """Or why there is none: it is gone, or thousands of folders deep."""
    try:
        return os.getcwd()
    except OSError as error:
        return str(error)


def _rounding() -> tuple[float, ...]:
    """What the processor makes of results that lie between two numbers, and, made large again (where denormal numbers
    are zeros, they equal zero), of one that is too small for a normal number."""
    unit, least = sys.float_info.epsilon / 2, sys.float_info.min
    return least / 2 * 2.0**60, 1 + 1.5 * unit, 1 + 0.5 * unit, -1 - 0.5 * unit


def _saying() -> dict[str, Callable[[], Any]]:
    """The functions of SETTINGS by name, which take no argument and say one of the VALUES."""
    saying = {}
    with warnings.catch_warnings(record=True) as deprecated:
        warnings.simplefilter("always")
        for name in filter(SETTINGS.fullmatch, dir(torch._C)):
            deprecated.clear()
            try:
                said = getattr(torch._C, name)()
            except (TypeError, RuntimeError):  # it takes arguments, or is not for this machine
                continue
            if isinstance(said, VALUES) and not deprecated:
                saying[name] = getattr(torch._C, name)
    return saying


SAYING = _saying()
