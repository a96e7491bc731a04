"""A live model and its inputs as a model's file, which the processes that measure it load like any other.

Classes and functions of a notebook or a __main__ travel with the model (by cloudpickle); those of modules are imported.
"""

import copyreg
import fcntl
import io
import keyword
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.export._unlift import _StatefulGraphModule
from torch.nn.utils import parametrize

from autokernel.model.sameness import digest
from autokernel.model.user_code import WorkloadError, checked_model, leaves, not_a_model, short, shown
from autokernel.model.workload import HANDED_OVER, Workload

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OWN_PICKLES = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
PROTOCOL = 3  # the first with names that are not ASCII; from 4 on sets have no order that digest() could take away
SPAWNED = "__mp_main__"  # what the __main__ of a program is called in a process that multiprocessing has started
FILE = '''"""{name}, as a program handed it over: model.pt beside this file has it, and the inputs that it was given."""

import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

AS_IT_IS = True  # keep its dtypes, and those of its inputs
HELD = Path(__file__).with_name("model.pt")
PATH = {path!r}  # where that program looks for modules, in its order
sys.path[:] = PATH + [path for path in sys.path if path not in PATH]


def {function}():
    return torch.load(HELD, map_location="cpu", weights_only=False)["model"]


def example_inputs():
    """As they were given, but for the order of the values in floating-point tensors: fresh inputs differ."""
    held = torch.load(HELD, map_location="cpu", weights_only=False)
    return tree_map_only(torch.Tensor, shuffled, (held["args"], held["kwargs"]))


def shuffled(tensor):
    """Masks of two values, and what has values that are not finite, stay; so do indices, whose order has a meaning, and
    what PyTorch cannot order: sparse and nested tensors, numbers of eight bits."""
    if tensor.layout != torch.strided or tensor.is_nested or not tensor.is_floating_point() or tensor.itemsize < 2:
        return tensor
    if not tensor.isfinite().all() or tensor.unique().numel() <= 2:
        return tensor
    return torch.empty_like(tensor).copy_(tensor.flatten()[torch.randperm(tensor.numel())].view(tensor.shape))
'''
TAKEN = compile(FILE.format(name="", function="made", path=[]), "", "exec").co_names  # names that the file needs itself


def hand_over(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], home: Path) -> Workload:
    """A workload that loads this very model. Raises WorkloadError, in one sentence, where that cannot be.

    Equal models have equal files below `home`, so that a run of one goes on when it is handed over again.
    """
    if what := not_a_model(model):
        raise WorkloadError(f"{what}: give a model and its inputs, as in autokernel.optimize(Net(), x)")
    name = type(model).__name__
    checked_model(model, name)
    device, dtype = _device(model, name), _dtype(model, name)
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise WorkloadError(
            f"kwargs are keyword arguments of forward() by their names, {{'mask': mask}}, not {shown(kwargs)}"
        )
    given = leaves((args, dict(kwargs)), f"what {name} is given")
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if once := next((value for value in given if isinstance(value, Iterator)), None):
        raise WorkloadError(
            f"{name} is given {shown(once)}, which ends after one pass: give a list or a tuple of its items"
        )
    if any(tensor.is_meta for tensor in tensors):
        raise WorkloadError(f"{name} is given tensors without data (on the device meta): give some with values")
    if not tensors:
        other = next((type(value) for value in given if value is not None), None)
        inside = f", but {other.__name__}: tensors are found in tuples, lists, dicts and dataclasses" if other else ""
        hint = inside or ": name the inputs that it is to be measured on after the model"
        raise WorkloadError(f"{name} is given no tensor{hint}")
    written = io.BytesIO()
    try:
        held = _Exported(model, args, dict(kwargs)) if isinstance(model, _StatefulGraphModule) else model
        torch.save({"model": held, "args": args, "kwargs": dict(kwargs)}, written, _Pickles, PROTOCOL)
    except Exception as error:  # of whatever kind: what is in a model decides
        if compiled := _compiled(model):
            raise WorkloadError(
                f"{compiled}() is compiled already: take @torch.compile off it, for the model is measured with and without"
            ) from error
        raise WorkloadError(
            f"{name} cannot be handed to the processes that measure it, for it cannot be pickled ({short(error)}): "
            "take that out of it, or name its file and class on the command line (autokernel optimize --model FILE)"
        ) from error
    function = name if name.isidentifier() and not keyword.iskeyword(name) and name not in TAKEN else "model"
    text = FILE.format(name=name, function=function, path=[os.path.abspath(path) for path in sys.path])
    folder = home / HANDED_OVER / digest(written)[:16]
    try:
        _write(folder, written, text)
    except OSError as error:  # no right to, a full disk
        why = f"cannot write the model to {folder.parent} ({error.strerror})"
        raise WorkloadError(
            f"{why}, from where it is measured: make room there, or use a folder that is writable"
        ) from error
    return Workload(str((folder / "model.py").relative_to(home)), function, input_shape=(), dtype=dtype, device=device)


def _write(folder: Path, written: io.BytesIO, text: str) -> None:
    """Whole or not at all; threads and processes that write the same model take turns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    turn = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if (folder / "model.py").exists():
            return
        scratch = folder.with_suffix(".part")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir()
            (scratch / "model.pt").write_bytes(written.getbuffer())
            (scratch / "model.py").write_text(text)
            scratch.replace(folder)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)  # of a full disk, some room
            raise
    finally:
        os.close(turn)


class _Pickler(cloudpickle.Pickler):
    """Also of what PyTorch refuses to pickle: modules whose weights are computed, as by torch.nn.utils.parametrizations,
    whose class was made for them alone, and TorchScript, which has a file of its own. What is defined in a __main__
    travels from a process that multiprocessing has started, too."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return _script, (_written(obj),)
        if getattr(obj, "__module__", None) == SPAWNED and isinstance(obj, type):
            return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
        if getattr(obj, "__module__", None) == SPAWNED and isinstance(obj, FunctionType):
            return self._dynamic_function_reduce(obj)
        if not isinstance(obj, nn.Module):
            return super().reducer_override(obj)
        if not parametrize.is_parametrized(obj):
            return _with_slots(obj) or super().reducer_override(obj)
        cls = type(obj).__bases__[0]
        own = getattr(cls, "__getstate__", vars)  # before Python 3.11 most have none
        return _parametrized, (cls, tuple(obj.parametrizations)), own(obj)


def _with_slots(module: nn.Module) -> tuple[Any, ...] | None:
    """A module with __slots__, which nn.Module leaves behind; None where it has none, or says itself how it is pickled."""
    cls = type(module)
    if any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in OWN_PICKLES):
        return None
    slots = {name: getattr(module, name) for name in copyreg._slotnames(cls) if hasattr(module, name)}
    if not slots:
        return None
    make, args, state = module.__reduce_ex__(2)[:3]
    state = state[0] if isinstance(state, tuple) else state  # without a __getstate__ of PyTorch's, Python has both
    return make, args, (state, slots), None, None, _set_slots


def _set_slots(module: nn.Module, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    module.__setstate__(state[0])
    for name, value in state[1].items():
        object.__setattr__(module, name, value)  # as it was: nn.Module's own would make a weight of a parameter


class _Exported:
    """What torch.export made, `ExportedProgram.module()`, which PyTorch does not pickle: it is exported once more."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.program = torch.export.export(model, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        written = io.BytesIO()
        torch.export.save(self.program, written)
        return _exported, (written.getvalue(),)


class _Pickles:
    """What torch.save() takes for a module that pickles."""

    Pickler = _Pickler


def _parametrized(cls: type[nn.Module], names: Iterable[str]) -> nn.Module:
    """A module of a class like that of one whose tensors `names` are computed, without contents."""
    made = cls.__new__(cls)
    parametrize._inject_new_class(made)
    for name in names:
        parametrize._inject_property(made, name)
    return made


def _written(script: torch.jit.ScriptModule | torch.jit.ScriptFunction) -> bytes:
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript itself
        torch.jit.save(script, written)
    return written.getvalue()


def _script(written: bytes) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(io.BytesIO(written), map_location="cpu")


def _exported(written: bytes) -> nn.Module:
    return torch.export.load(io.BytesIO(written)).module()


def _compiled(model: nn.Module) -> str:
    """The first function of a class of its modules that torch.compile has decorated; empty if there is none."""
    for kind in {type(module): None for module in model.modules()}:
        for name, value in vars(kind).items():
            if hasattr(value, "_torchdynamo_orig_callable"):
                return f"{kind.__name__}.{name}"
    return ""


def _device(model: nn.Module, name: str) -> str:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    if len(devices) > 1:
        raise WorkloadError(f"{name} is on several devices ({', '.join(sorted(map(str, devices)))}): put it on one")
    device = devices.pop()
    return "cuda" if device == torch.device("cuda:0") else str(device)


def _dtype(model: nn.Module, name: str) -> str:
    """That of most of its numbers, by which outputs are compared."""
    numbers: Counter[torch.dtype] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        numbers[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    dtype = max(numbers, key=numbers.__getitem__, default=torch.float32)
    dtype = dtype if dtype.is_floating_point else torch.float32
    if dtype not in DTYPES:
        raise WorkloadError(f"{name} is in {dtype}: there are kernels for float32, float16 and bfloat16")
    return str(dtype).removeprefix("torch.")
