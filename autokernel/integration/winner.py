"""A kept kernel, on its way into a model."""

import hashlib
import os
from dataclasses import dataclass

import torch

from autokernel.build import default_cache
from autokernel.integration.ops import Kernel
from autokernel.spec import import_file, kernel_module
from autokernel.target import Target


@dataclass(frozen=True)
class Winner:
    """The source of the kernel that was kept for a target."""

    target: Target
    source: str

    @property
    def name(self) -> str:
        """Of its operator: equal names mean equal sources."""
        return f"{self.target.kernel_type}_{hashlib.sha256(self.source.encode()).hexdigest()[:16]}"

    @property
    def device_type(self) -> str:
        """Of its target: "cpu", "cuda"."""
        return torch.device(self.target.device).type

    def load(self) -> Kernel:
        """Its kernel_fn. Written to a file of its own first: Triton reads a kernel's source from its file."""
        path = default_cache() / "winners" / f"{self.name}.py"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(self.source)
            os.replace(scratch, path)
        return import_file(path, kernel_module(self.source)).kernel_fn
