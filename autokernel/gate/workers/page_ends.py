"""Inputs that end where memory does: a kernel that reads beyond one is ended there, where guards of ours would let it."""

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 1 << 16  # of an input
VECTOR = 8  # elements: where these fill a row, no vector of a kernel's lies across its end


class PageEnds:
    """Memory for inputs, made when it is first needed, and used again."""

    def __init__(self) -> None:
        self.made: dict[str, Tensor] = {}  # by the name of an input

    def moved(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """`inputs`, each at the end of its memory; None where none leaves a rest of vectors, or one is large."""
        tensors = {name: v for name, v in inputs.items() if isinstance(v, Tensor) and v.numel()}
        if sys.platform != "linux" or not all(v.is_contiguous() and v.nbytes <= MOST_BYTES for v in tensors.values()):
            return None
        if not any(v.dim() and v.shape[-1] % VECTOR for v in tensors.values()):
            return None
        return dict(inputs) | {name: self._moved(name, v) for name, v in tensors.items()}

    def _moved(self, name: str, v: Tensor) -> Tensor:
        if name not in self.made:
            self.made[name] = _memory()
        at_the_end = torch.empty(0, dtype=v.dtype)
        at_the_end.set_(self.made[name].untyped_storage(), (MOST_BYTES - v.nbytes) // v.itemsize, v.shape, v.stride())
        return at_the_end.copy_(v)


def _memory() -> Tensor:
    """MOST_BYTES of it, beyond which lies what ends a process that reads it: a page of a file that has no such page."""
    with tempfile.TemporaryFile(dir=".") as file:
        file.truncate(MOST_BYTES + mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), MOST_BYTES + mmap.PAGESIZE)
        os.ftruncate(file.fileno(), MOST_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8, count=MOST_BYTES)
