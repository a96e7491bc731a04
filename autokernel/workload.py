"""A workload: a model and the inputs that it is measured on, as a record that can be written down and loaded again."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
class Workload:
    """`model` is a Python file, or the name of an installed module ("transformers"). Weights and inputs are seeded."""

    model: str = "models/llama.py"
    class_name: str = "CompactLlama"
    model_args: Mapping[str, Any] = field(default_factory=dict)  # of the constructor; of the config for transformers
    input_shape: tuple[int, ...] = (1, 512)
    dtype: str = "float32"
    device: str = "cpu"
    pretrained: str | None = None  # id of the weights, for classes with from_pretrained()
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.model}:{self.class_name} {','.join(map(str, self.input_shape))} {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "input_shape": list(self.input_shape)}  # as JSON gives it back

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Workload":
        return Workload(**{**data, "input_shape": tuple(data["input_shape"])})

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
            made = make()
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
    group.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default=Workload.dtype)
    group.add_argument("--pretrained", metavar="ID", help="weights to load, for classes that have from_pretrained()")


def workload_from(arguments: argparse.Namespace) -> Workload:
    return Workload(
        model=arguments.module or arguments.model,
        class_name=arguments.class_name,
        model_args=arguments.model_args,
        input_shape=arguments.input_shape,
        dtype=arguments.dtype,
        device=arguments.device,
        pretrained=arguments.pretrained,
    )


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
