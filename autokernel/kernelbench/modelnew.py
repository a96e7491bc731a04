"""A module's class as a kernel: `inputs.*` are the arguments of forward, `weights.*` its state dict, `init` its making.

How problems in the format of KernelBench (Model, ModelNew) come through the gate: both sides, and the expected values.
"""

import ast
import copy
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors  # torch.zeros, torch.tensor, …
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

SEED = 0  # of what a module draws while it is made, and of what is not in its state dict
WEIGHTS = "weights."
RANDOM = (torch.rand, torch.randn, torch.normal)
_drawing = threading.RLock()  # PyTorch has one random state for all threads, and the gate has several


def make(module_class: Callable[..., nn.Module], init: str) -> nn.Module:
    """A module as KernelBench makes it: after a seed, and in training mode."""
    with seeded(SEED):
        return module_class(*ast.literal_eval(init)).requires_grad_(False)


def _keeps_closures(module: nn.Module) -> bool:
    """Whether some attribute is a function that has parts of the module in it, as minGPT's block has: in a copy it is the
    same function, of the first module's parts."""
    values = tree_leaves([list(vars(m).values()) for m in module.modules()])
    return any(isinstance(v, FunctionType) and (v.__closure__ or v.__defaults__) for v in values)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn in here follows from `seed`, and leaves the random state as it was."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class InDouble(TorchFunctionMode):
    """As if float64 were the default dtype, in this thread alone: of what is made of no tensor, or of integers.

    Random numbers are those that are drawn without it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype != torch.float32 or kwargs.get("dtype") is not None:
            return result
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if any(v.is_floating_point() or v.is_complex() for v in given):
            return result
        if func in RANDOM:
            return result.double()
        if not given:
            return func(*args, **kwargs | {"dtype": torch.float64}) if func in _device_constructors() else result
        return func(*tree_map_only(Tensor, Tensor.double, args), **tree_map_only(Tensor, Tensor.double, kwargs))


class _Kept:
    """A module, and what it was made with: of its weights, where they are and what they were."""

    def __init__(self, module: nn.Module, init: str, weights: Sequence[Tensor]):
        self.module, self.init, self.weights = module, init, [(w.detach(), w.clone()) for w in weights]

    def is_of(self, init: str, weights: Sequence[Tensor]) -> bool:
        if init != self.init:
            return False
        pairs = zip(weights, self.weights, strict=True)
        return all(_is_same(w, here) and torch.equal(w, before) for w, (here, before) in pairs)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def as_kernel(module_class: Callable[..., nn.Module], used: bool = True, compiled: bool = False) -> Callable[..., Tensor]:
    """kernel_fn(init, **{"inputs.0": …, "weights.fc.bias": …}), which makes one module for each set of weights.

    Parameters are the very memory that is given, buffers are copies: in training mode they change. `used`: a new module is
    first called on other inputs, so that what it keeps from one call to the next is wrong in the first that counts; and the
    same weights at the same addresses, be they other tensors of Python's, have the module that they had before, as in use.
    `compiled`: through torch.compile, as kernel_fn.compiled() is.
    """
    modules = WeakTensorKeyDictionary()  # first weight of a set -> the others, and the module
    without_weights: dict[str, nn.Module] = {}
    templates: dict[str, nn.Module] = {}
    latest: list[_Kept] = []  # the one that was made last

    def new(init: str) -> nn.Module:
        """A module of its own, but for the parameters, which are about to be replaced: drawing them can take seconds."""
        if used:
            return make(module_class, init)
        with _drawing:
            template = templates[init] = templates.get(init) or make(module_class, init)
        if _keeps_closures(template):
            return make(module_class, init)
        return copy.deepcopy(template, {id(parameter): parameter for parameter in template.parameters()})

    def prepare(init: str, arguments: dict[str, Any], inputs: list[Any]) -> nn.Module:
        weights = {k.removeprefix(WEIGHTS): v for k, v in arguments.items() if k.startswith(WEIGHTS)}
        module = new(init)
        example = next(v for v in arguments.values() if isinstance(v, Tensor))
        own = module.state_dict()
        if own.keys() != weights.keys() and [t.shape for t in own.values()] == [t.shape for t in weights.values()]:
            weights = dict(zip(own, weights.values()))  # the same state dict by other names
        buffers = {name for name, _ in module.named_buffers()}
        module.load_state_dict({k: v.clone() if k in buffers else v.detach() for k, v in weights.items()}, assign=True)
        module.to(example.device)
        if compiled:
            module.compile(dynamic=False)
        if used:
            module(*(v.flip(tuple(range(v.dim()))) if isinstance(v, Tensor) else v for v in inputs))
        return module

    def kernel_fn(init: str, **arguments: Any) -> Tensor:
        inputs = []
        for name, value in arguments.items():
            if name.startswith(WEIGHTS):
                others = [*arguments.values()][len(inputs) + 1 :]
                known, module = modules.get(value, ((), None))
                if module is None or any(map(operator.is_not, known, others)):
                    weights = [value, *others]
                    module = next((kept.module for kept in latest if kept.is_of(init, weights)), None)
                    if module is None:
                        module = prepare(init, arguments, inputs)
                        latest[:] = [_Kept(module, init, weights)] if used else []
                    modules[value] = others, module
                return module(*inputs).contiguous()
            inputs.append(value)
        if init not in without_weights:
            without_weights[init] = prepare(init, arguments, inputs)
        return without_weights[init](*inputs).contiguous()

    kernel_fn.compiled = lambda: as_kernel(module_class, used, compiled=True)
    return kernel_fn
