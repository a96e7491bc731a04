"""A workload: a model and the inputs that it is measured on, as a record that can be written down and loaded again.

What a model runs in use is often a mix: prefill and decode, several batch sizes. A workload may have several parts, each
with a weight, and stands for them together.
"""

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autokernel.common.preflight import HOME, model_file
from autokernel.common.records import record_from
from autokernel.common.words import counted
from autokernel.model import example_inputs
from autokernel.model.options import CLASS_NAME, DTYPE, MODEL, SHORT, Part
from autokernel.model.user_code import (
    WorkloadError,
    checked_model,
    construct,
    described,
    find_class,
    leaves,
    load_module,
    not_awaited,
    shown,
    user_code,
)
from autokernel.spec import ROOT

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs
HANDED_OVER = Path("workspace", "models")  # below HOME: live models, see handover.py


@dataclass(frozen=True)
class Workload:
    """`model` is a Python file, or the name of an installed module ("transformers"). Weights and inputs are seeded.

    With a `mix`, `name` and `input_shape` are those of its first part, and `parts` are workloads of their own.
    """

    model: str = MODEL
    class_name: str = CLASS_NAME
    model_args: Mapping[str, Any] = field(default_factory=dict)  # of the constructor; of the config for transformers
    input_shape: tuple[int, ...] = (1, 512)  # (): example_inputs() of the model's file or class has them
    dtype: str = DTYPE
    device: str = "cpu"
    pretrained: str | None = None  # id of the weights, for classes with from_pretrained()
    seed: int = 0
    name: str = ""
    mix: tuple[Part, ...] = ()

    def __str__(self) -> str:
        if Path(self.model).is_relative_to(HANDED_OVER):
            return f"{self.class_name} on the inputs of its call ({Path(self.model).parent.name[:6]}), {self.dtype}"
        shape = ",".join(map(str, self.input_shape)) or "example_inputs()" * (not self.name)
        inputs = " + ".join(f"{p.weight:g} {p.name}" for p in self.mix) or f"{self.name} {shape}".strip()
        return f"{self.model}:{self.class_name} {inputs} {self.dtype}"

    @property
    def parts(self) -> tuple[tuple["Workload", float], ...]:
        """Each part as a workload, and its weight; without a mix, itself alone."""
        if not self.mix:
            return ((self, 1.0),)
        shapes = [part.input_shape or self.input_shape for part in self.mix]
        return tuple(
            (replace(self, name=part.name, input_shape=shape, mix=()), part.weight) for part, shape in zip(self.mix, shapes)
        )

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Workload":
        return record_from(data, Workload)

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model in eval mode on the device, and the args and kwargs to call it with. Raises WorkloadError."""
        cls = find_class(self._module(), self.model, self.class_name)
        model = self._pretrained(cls) if self.pretrained else self._made(cls)
        as_it_is = self._as_it_is  # asked here: in users' code a relative path may lead elsewhere
        with user_code(f"{self.class_name} cannot be moved to {self.device} as {self.dtype}"):
            model = (model if as_it_is else in_dtype(model, getattr(torch, self.dtype))).to(self.device)
            with suppress(NotImplementedError):  # what torch.export made has no modes
                model.eval()  # which may return None: a train() of the model's own, that freezes layers, is often without
        return model, *self.inputs(model, self.seed)

    def inputs(self, model: nn.Module, seed: int) -> Inputs:
        """Args and kwargs to call the model with, on its device; another seed gives other contents."""
        torch.manual_seed(seed)
        with torch.device("cpu"):  # whatever the model's code has made the default
            made = self._inputs(model)
        as_it_is = self._as_it_is
        with user_code(f"the inputs of {self.class_name} cannot be moved to {self.device} as {self.dtype}"):
            return tree_map_only(torch.Tensor, lambda tensor: self._place(tensor, as_it_is), made)

    def try_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One pass, of which nothing is kept. Raises WorkloadError where the model cannot do it, or returns no tensor."""
        named = self._bound(model, args, kwargs)
        given = f"of {self.class_name} in {self.dtype} on {described(named.items()) or 'no inputs'}"
        with user_code(f"a pass {given} failed", self._whose_inputs(model, args)), torch.no_grad():
            result = not_awaited(model(*args, **kwargs))
        tensors = [v for v in leaves(result, f"what a pass {given} returns") if isinstance(v, torch.Tensor)]
        if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            found = f"only {described([('', tensors[0])]).strip()}" if tensors else type(result).__name__
            raise WorkloadError(
                f"a pass {given} returns no tensor{' of floating-point numbers' * bool(tensors)}, but {found}: kernels are "
                "checked by what forward() returns (such a tensor, or tuples, lists, dicts and dataclasses of them)"
            )

    def not_given(self, model: nn.Module) -> tuple[str, ...]:
        """Of the inputs that forward() can do without, those that it is not given: what it does with them is not measured.

        Empty where the inputs are the user's own choice, or cannot be: there is no file of the model's.
        """
        if self._own_inputs(model) or not self.model.endswith(".py"):
            return ()
        args, kwargs = self.inputs(model, self.seed)
        given = self._bound(model, args, kwargs)
        return tuple(p.name for p in example_inputs.parameters(model) if p.default is None and p.name not in given)

    def _bound(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The inputs by the names of forward()'s parameters."""
        signature = inspect.signature(model.forward)
        try:
            return dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
            takes = str(inspect.Signature(bare))[1:-1] or "nothing"  # with the star before those that are given by name
            given = counted(args, "argument") + f" and {', '.join(kwargs)}" * bool(kwargs)
            what = f"forward() of {self.class_name} takes {takes}, and is given {given} ({error})"
            raise WorkloadError(f"{what}; {self._whose_inputs(model, args)}") from None

    def _whose_inputs(self, model: nn.Module, args: tuple[Any, ...]) -> str:
        if self._as_it_is:  # handed over by a Python program: its file is none of the user's
            is_one = len(args) == 1 and isinstance(args[0], (list, tuple))
            in_one = f" and not in a {type(args[0]).__name__}" if is_one else ""
            after = f"its inputs are given after the model, as {self.class_name} is called with them{in_one}"
            return f"{after}: (model, x, y), and those that have names as kwargs={{…}}"
        if own := self._own_inputs(model):
            return f"the inputs are those of example_inputs() in {own[1]}"
        return "other inputs: --input-shape, or example_inputs() as in models/custom.py"

    def _own_inputs(self, model: nn.Module) -> tuple[Any, str] | None:
        """example_inputs and where it stands: the model's file, else its class, of which it may be any kind of method."""
        if make := vars(self._module()).get("example_inputs"):
            return make, self.model
        if callable(getattr(type(model), "example_inputs", None)):
            return model.example_inputs, type(model).__name__
        return None

    def _module(self) -> Any:
        return load_module(self.model)

    def _made(self, cls: Any) -> nn.Module:
        """With weights of its own, made on the device: an H100 fills 0.7 billion of them in 0.1 s, its host in 9 s.

        On the CPU where its code needs that, or the device cannot hold the weights in float32.
        """
        if self.device != "cpu":
            try:
                torch.manual_seed(self.seed)
                with torch.device(self.device):
                    model = construct(cls, self.class_name, self.model_args)
                if not has_loose_tensors(model):
                    return model
            except WorkloadError:
                pass
            torch.cuda.empty_cache()
        torch.manual_seed(self.seed)
        return construct(cls, self.class_name, self.model_args)

    def _pretrained(self, cls: Any) -> nn.Module:
        torch.manual_seed(self.seed)
        with user_code(f"{self.class_name} cannot be made of the weights {self.pretrained!r}"):
            if not hasattr(cls, "from_pretrained"):
                raise WorkloadError(f"{self.class_name} has no from_pretrained(): leave out --pretrained")
            try:
                return checked_model(cls.from_pretrained(self.pretrained), self.class_name)
            except OSError as error:  # transformers' way to say that it is neither on disk nor to be had
                reason = str(error).splitlines()[0]
                print(f"warning: no weights of {self.pretrained!r} ({reason}); random weights", file=sys.stderr)
        return self._made(cls)

    def _inputs(self, model: nn.Module) -> Inputs:
        own = self._own_inputs(model)
        if own is None:
            with user_code(f"no inputs of shape {list(self.input_shape)} could be made for {self.class_name}"):
                return example_inputs.example_inputs(model, self.input_shape)
        make, of = own
        where = f"example_inputs() of {of}"
        if not callable(make):
            raise WorkloadError(f"{where} is no function but a {type(make).__name__}: see models/custom.py")
        takes = _parameters(make)
        named = any(p.default is p.empty for p in takes)
        with user_code(f"{where} failed", "without --workload NAME its name is ''" if named and not self.name else ""):
            made = not_awaited(self._call(make, named or bool(self.name and takes), where))
        if isinstance(made, Mapping):
            args, kwargs = (), dict(made)
        elif isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[1], Mapping):
            args, kwargs = _as_tuple(made[0]), dict(made[1])
        else:
            args, kwargs = _as_tuple(made), {}
        if strange := [name for name in kwargs if not isinstance(name, str)]:
            raise WorkloadError(
                f"{where} returns a dict with {shown(strange[0])}: it has the names of forward()'s arguments"
            )
        given = leaves((args, kwargs), f"what {where} returns")
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in given):
            raise WorkloadError(f"{where} returns nested tensors, which kernels do not take: give padded ones")
        if not any(isinstance(value, torch.Tensor) for value in given):
            raise WorkloadError(
                f"{where} returns {shown(made)}, not inputs: a tensor, a tuple of them, a dict of keyword arguments, or "
                "(args tuple, kwargs dict)"
            )
        return args, kwargs

    def _call(self, make: Callable[..., Any], named: bool, where: str) -> Any:
        """example_inputs(), or example_inputs(name)."""
        if named:
            return make(self.name)
        if self.name:
            raise WorkloadError(f"{where} takes no name: what is {self.name!r}?")
        return make()

    @property
    def _as_it_is(self) -> bool:
        """Whether the model's file says that `dtype` is its own, and nothing is to be cast to it."""
        return vars(self._module()).get("AS_IT_IS") is True

    def _place(self, tensor: torch.Tensor, as_it_is: bool) -> torch.Tensor:
        cast = tensor.is_floating_point() and not as_it_is
        dtype = getattr(torch, self.dtype) if cast else tensor.dtype
        return tensor.to(self.device, dtype)


def has_loose_tensors(model: nn.Module) -> bool:
    """Whether a module has tensors that are neither parameters nor buffers: they stay on the device where they are made."""
    moved = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own = ({k: v for k, v in vars(m).items() if k not in ("_parameters", "_buffers", "_modules")} for m in model.modules())
    return any(isinstance(leaf, torch.Tensor) and id(leaf) not in moved for leaf in tree_leaves(list(own)))


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model` with its weights in `dtype`; complex ones, whose imaginary parts to() would drop, in what goes with it."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        if t.is_complex():
            return t.to(torch.promote_types(dtype, torch.complex64))
        return t.to(dtype) if t.is_floating_point() else t

    return model._apply(cast)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those that it has names for; of what is built in, none are known."""
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in every if p.kind not in example_inputs.VARIABLE]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def workload_from(arguments: argparse.Namespace) -> Workload:
    mix = tuple(arguments.mix)
    if len({part.name for part in mix}) < len(mix):
        raise WorkloadError("two --workload have the same name")
    first = mix[0] if mix else Part("", arguments.input_shape)
    model = arguments.model if arguments.module is None else arguments.module
    own_inputs = _names_example_inputs(model, arguments.class_name, imported=arguments.module is not None)
    unsaid = SHORT if (model, arguments.class_name) == (MODEL, CLASS_NAME) else Workload.input_shape
    if own_inputs and arguments.input_shape:
        print(f"warning: --input-shape is not used: example_inputs() in {model} makes the inputs", file=sys.stderr)
    elif mix and arguments.input_shape and all(part.input_shape for part in mix):
        print("warning: --input-shape is not used: each --workload has a shape of its own", file=sys.stderr)
    return Workload(
        model=_wherever_we_are(model),
        class_name=arguments.class_name,
        model_args=arguments.model_args,
        input_shape=() if own_inputs else first.input_shape or arguments.input_shape or unsaid,
        name=first.name,
        mix=mix,
        dtype=arguments.dtype,
        device=arguments.device,
        pretrained=arguments.pretrained,
    )


def _wherever_we_are(model: str) -> str:
    """A file of this folder by its whole path: the same command in another folder would find another one, or none."""
    path = Path(model)
    in_clone = any((root / model).resolve() == path.resolve() for root in (HOME, ROOT))
    return str(path.absolute()) if path.is_file() and not in_clone else model


def _names_example_inputs(model: str, class_name: str, imported: bool) -> bool:
    """Whether a model's file or its class there has an example_inputs(), without running it; of a module, whose class may
    stand in another file, by importing it. Raises WorkloadError."""
    if imported:
        module = load_module(model)
        return any("example_inputs" in dir(place) for place in (module, find_class(module, model, class_name)))
    path = model_file(model)
    text = path.read_text(errors="replace") if path and path.suffix == ".py" else ""
    at_the_top = re.search(r"^(def |from .*import .*|)example_inputs\b", text, re.MULTILINE)
    return bool(at_the_top) or "example_inputs" in _methods(text, class_name)


def _methods(text: str, class_name: str) -> set[str]:
    """Of a class and of those in the same file that it inherits from; none where the text is not Python."""
    try:
        classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found, pending = set(), [class_name]
    while pending:
        if made := classes.pop(pending.pop(), None):
            found |= {node.name for node in made.body if isinstance(node, ast.FunctionDef)}
            pending += [base.id for base in made.bases if isinstance(base, ast.Name)]
    return found
