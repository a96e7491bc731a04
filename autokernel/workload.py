"""A workload: a model and the inputs that it is measured on, described in a record that can be written down and loaded again."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autokernel.spec import ROOT, import_file

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
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Workload":
        return Workload(**{**data, "input_shape": tuple(data["input_shape"])})

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model in eval mode on the device, and the args and kwargs to call it with."""
        module = self._module()
        torch.manual_seed(self.seed)
        model = self._construct(getattr(module, self.class_name)).to(getattr(torch, self.dtype)).to(self.device).eval()
        args, kwargs = self._inputs(module, model)
        return model, *tree_map_only(torch.Tensor, self._place, (args, kwargs))

    def _module(self) -> Any:
        if not self.model.endswith(".py"):
            return importlib.import_module(self.model)
        path = Path(self.model) if Path(self.model).exists() else ROOT / self.model
        return import_file(path.resolve(), f"autokernel_model_{path.stem}")

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
        if isinstance(first, nn.Embedding):
            return (torch.randint(first.num_embeddings, self.input_shape),), {}
        return (torch.randn(self.input_shape),), {}

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device, dtype)
