"""A workload: a model and the inputs that it is measured on, as a record that can be written down and loaded again.

What a model runs in use is often a mix: prefill and decode, several batch sizes. A workload may have several parts, each
with a weight, and stands for them together.
"""

import argparse
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autokernel.spec import ROOT, import_file


class WorkloadError(ValueError):
    """The model's file, module or class does not exist; the message says which."""


Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs


@dataclass(frozen=True)
class Part:
    """One kind of pass in a mix: `weight` passes of it for every `weight` of the others."""

    name: str
    input_shape: tuple[int, ...] | None = None  # None: example_inputs(name) of the model's file has them
    weight: float = 1.0


@dataclass(frozen=True)
class Workload:
    """`model` is a Python file, or the name of an installed module ("transformers"). Weights and inputs are seeded.

    With a `mix`, `name` and `input_shape` are those of its first part, and `parts` are workloads of their own.
    """

    model: str = "models/llama.py"
    class_name: str = "CompactLlama"
    model_args: Mapping[str, Any] = field(default_factory=dict)  # of the constructor; of the config for transformers
    input_shape: tuple[int, ...] = (1, 512)
    dtype: str = "float32"
    device: str = "cpu"
    pretrained: str | None = None  # id of the weights, for classes with from_pretrained()
    seed: int = 0
    name: str = ""
    mix: tuple[Part, ...] = ()

    def __str__(self) -> str:
        shape = ",".join(map(str, self.input_shape))
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
        mix = (Part(**part | {"input_shape": _tuple(part["input_shape"])}) for part in data.get("mix", ()))
        return Workload(**{**data, "input_shape": _tuple(data["input_shape"]), "mix": tuple(mix)})

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model in eval mode on the device, and the args and kwargs to call it with."""
        module = self._module()
        if not hasattr(module, self.class_name):
            raise WorkloadError(f"{self.model} has no class {self.class_name}")
        torch.manual_seed(self.seed)
        model = self._construct(getattr(module, self.class_name)).to(getattr(torch, self.dtype)).to(self.device).eval()
        return model, *self.inputs(model, self.seed)

    def inputs(self, model: nn.Module, seed: int) -> Inputs:
        """Args and kwargs to call the model with, on its device; another seed gives other contents."""
        torch.manual_seed(seed)
        return tree_map_only(torch.Tensor, self._place, self._inputs(self._module(), model))

    def _module(self) -> Any:
        if not self.model.endswith(".py"):
            if importlib.util.find_spec(self.model) is None:
                raise WorkloadError(f"there is no module {self.model!r} (a file's name must end in .py)")
            return importlib.import_module(self.model)
        path = Path(self.model) if Path(self.model).exists() else ROOT / self.model
        if not path.exists():
            raise WorkloadError(f"there is no file {self.model}")
        sys.path.append(str(path.resolve().parent))  # its neighbours are imported by name
        name = f"autokernel_model_{path.stem}"
        loaded = sys.modules.get(name)  # once: code that Dynamo compiled refers to its globals
        return loaded if loaded and loaded.__file__ == str(path.resolve()) else import_file(path.resolve(), name)

    def _construct(self, cls: Any) -> nn.Module:
        if self.pretrained:
            try:
                return cls.from_pretrained(self.pretrained)
            except OSError as error:  # transformers' way to say that it is neither on disk nor to be had
                reason = str(error).splitlines()[0]
                print(f"warning: no weights of {self.pretrained!r} ({reason}); random weights", file=sys.stderr)
        if config := getattr(cls, "config_class", None):
            model = cls(config(**self.model_args))
            model.config.use_cache = False
            return model
        return cls(**self.model_args)

    def _inputs(self, module: Any, model: nn.Module) -> Inputs:
        if make := getattr(module, "example_inputs", None):
            made = self._call(make)
            if isinstance(made, Mapping):
                return (), dict(made)
            if len(made) == 2 and isinstance(made[1], Mapping):
                return tuple(made[0]), dict(made[1])
            return tuple(made), {}
        first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
        if not isinstance(first, nn.Embedding):
            return (torch.randn(self.input_shape),), {}
        tokens = torch.randint(first.num_embeddings, self.input_shape)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return (), {"input_ids": tokens, "decoder_input_ids": tokens.flip(-1)}
        return (tokens,), {}

    def _call(self, make: Callable[..., Any]) -> Any:
        """example_inputs() of the model's file, or example_inputs(name)."""
        if inspect.signature(make).parameters:
            return make(self.name)
        if self.name:
            raise WorkloadError(f"example_inputs() of {self.model} takes no name: what is {self.name!r}?")
        return make()

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device, dtype)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --class-name and so on; `workload_from` reads them. --device is added by cli.add_device_argument."""
    group = parser.add_argument_group("workload")
    group.add_argument("--model", default=Workload.model, metavar="FILE", help="Python file (default: %(default)s)")
    group.add_argument("--module", metavar="NAME", help="an installed module instead of a file: transformers")
    group.add_argument("--class-name", default=Workload.class_name, metavar="NAME", help="(default: %(default)s)")
    group.add_argument(
        "--model-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""of the constructor (of the config, for transformers): '{"n_layers": 4}'""",
    )
    group.add_argument("--input-shape", type=_shape, default=Workload.input_shape, metavar="1,512", help="(default: 1,512)")
    group.add_argument(
        "--workload",
        type=_part,
        action="append",
        default=[],
        dest="mix",
        metavar="'NAME:SHAPE*WEIGHT'",
        help="""one kind of pass in a mix, given several times instead of --input-shape: with --workload prefill:1,512
        --workload 'decode:8,1*64' there are 64 passes of 8,1 for each of 1,512; without :SHAPE the inputs are those of
        example_inputs(NAME) in the model's file""",
    )
    group.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default=Workload.dtype)
    group.add_argument("--pretrained", metavar="ID", help="weights to load, for classes that have from_pretrained()")


def workload_from(arguments: argparse.Namespace) -> Workload:
    mix = tuple(arguments.mix)
    if len({part.name for part in mix}) < len(mix):
        raise WorkloadError("two --workload have the same name")
    first = mix[0] if mix else Part("", arguments.input_shape)
    return Workload(
        model=arguments.module or arguments.model,
        class_name=arguments.class_name,
        model_args=arguments.model_args,
        input_shape=first.input_shape or arguments.input_shape,
        name=first.name,
        mix=mix,
        dtype=arguments.dtype,
        device=arguments.device,
        pretrained=arguments.pretrained,
    )


def _part(text: str) -> Part:
    form = re.fullmatch(r"([A-Za-z][\w-]*)(?::([\d,]+))?(?:\*(\d+(?:\.\d+)?))?", text)
    if not form or not float(form[3] or 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not like decode:8,1*64 (NAME:SHAPE*WEIGHT)")
    return Part(form[1], form[2] and _shape(form[2]), float(form[3] or 1))


def _tuple(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)


def _shape(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 1,512")
    return tuple(map(int, text.split(",")))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
