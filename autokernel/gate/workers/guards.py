"""Guarded memory: while a kernel is checked, every tensor it allocates is poisoned and lies between guard bands.

A convenience for honest kernels, like all code in a worker: it finds mistakes (an unwritten element, a stray write) that
the values alone may hide. It stops no attack.
"""

import ctypes
import warnings

import torch
from torch import Tensor

from autokernel.gate.workers.channel import GUARD, POISON

DTYPES = [t for t in vars(torch).values() if isinstance(t, torch.dtype) and not t.is_complex]


class StrayWrite(RuntimeError):
    """A kernel wrote outside the tensors that it allocated."""


class GuardedMemory:
    """Replaces PyTorch's allocation of tensors on one device, for the life of the process."""

    def __init__(self, device: torch.device):
        self.device = device
        with torch.inference_mode(False):  # in or out of it as whoever allocates a tensor is
            self.blank = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in (*DTYPES, torch.complex64)}
        self.made: list[tuple[Tensor, int]] = []  # (all bytes, of which between the guards)
        self.of_inference: set[int] = set()  # addresses of storages that would be inference tensors'
        self.registration = torch.library.Library("aten", "IMPL")
        key = "CUDA" if device.type == "cuda" else "CPU"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operator is overridden is the purpose
            self.registration.impl("empty.memory_format", self._empty, key, allow_override=True)
            self.registration.impl("empty_strided", self._empty_strided, key, allow_override=True)

    def check(self) -> None:
        """Raise StrayWrite if a guard band has changed since the last check; forgets what was allocated."""
        made, self.made = self.made, []
        for memory, inner in made:
            if memory.untyped_storage().nbytes() != memory.numel():
                continue  # resized, as operators do with workspace of theirs: the guards went with it
            for band in (memory[:GUARD], memory[GUARD + inner :]):
                band = band.cpu()  # and no operator on it: they refuse to compute here (ownwork.py)
                if ctypes.string_at(band.data_ptr(), GUARD) != bytes([POISON]) * GUARD:
                    raise StrayWrite(f"wrote outside its output or workspace, a tensor of {inner} bytes")

    def forget(self) -> None:
        """What was allocated since the last check."""
        self.made = []

    def _empty(self, size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Tensor:
        like = torch.empty(size, memory_format=memory_format or torch.contiguous_format, device="meta")
        return self._allocate(size, like.stride(), dtype)

    def _empty_strided(self, size, stride, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
        return self._allocate(size, stride, dtype)

    def _allocate(self, size: list[int], stride: list[int], dtype: torch.dtype | None) -> Tensor:
        dtype = dtype or torch.get_default_dtype()
        if dtype not in self.blank:
            raise TypeError(f"the gate has no guarded memory of dtype {dtype}")
        if not all(size):  # it may be resized later, and then takes memory of its own
            return self.blank[dtype].data.set_(torch.UntypedStorage(0, device=self.device), 0, size, stride)
        inner = (1 + sum((n - 1) * s for n, s in zip(size, stride))) * dtype.itemsize
        storage = torch.UntypedStorage(inner + 2 * GUARD, device=self.device)
        memory = self.blank[torch.uint8].data.set_(storage)
        memory.fill_(POISON)
        if torch.is_inference_mode_enabled():
            self.of_inference.add(storage.data_ptr())
        self.made.append((memory, inner))
        return self.blank[dtype].data.set_(storage, GUARD // dtype.itemsize, size, stride)
