"""A worker's device memory, mapped into the judge's process: CUDA's sharing between processes (IPC), asked of the driver.

So the judge writes inputs and reads outputs without the worker, which is neither asked nor told.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autokernel.spec import TensorSpec

LAZY_PEER_ACCESS = 1  # cuIpcOpenMemHandle's only flag


class Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("data", ctypes.c_ubyte * 64),)


def _ask(function: str, *arguments: Any) -> None:
    """Call the driver. Raises ValueError where it refuses."""
    error = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if error:
        raise ValueError(f"{function}: CUDA error {error}")


def _range(address: int) -> tuple[int, int]:
    """Base and bytes of the allocation in which an address of this process lies."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _ask("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def export(addresses: Iterable[int]) -> list[dict[str, Any]]:
    """The allocations of this process in which the addresses lie, as another process can open them."""
    sizes: dict[int, int] = {}
    for address in addresses:
        if not any(base <= address < base + size for base, size in sizes.items()):
            base, size = _range(address)
            sizes[base] = size
    exported = []
    for base in sizes:
        handle = Handle()
        _ask("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        exported.append({"base": base, "handle": bytes(handle.data).hex()})
    return exported


class MappedMemory:
    """Allocations of another process, found by the addresses that they have there."""

    def __init__(self, device: str):
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.allocations: dict[int, Tensor] = {}  # address there -> bytes

    def open(self, handles: dict[int, str]) -> None:
        """Map these (address there -> handle) in the place of those before. Raises ValueError where one is none."""
        self.close()
        for base, handle in handles.items():
            pointer = ctypes.c_uint64()
            flags = ctypes.c_uint(LAZY_PEER_ACCESS)
            _ask("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), Handle.from_buffer_copy(bytes.fromhex(handle)), flags)
            # The size is the driver's word, not the other process's.
            storage = torch._C._construct_storage_from_data_pointer(pointer.value, self.device, _range(pointer.value)[1])
            self.allocations[base] = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def view(self, address: int, layout: TensorSpec) -> Tensor:
        """The tensor whose first element the other process has at this address. Raises ValueError where there is none."""
        count, itemsize = layout.storage_numel - layout.offset, layout.dtype.itemsize
        for base, memory in self.allocations.items():
            start = address - base
            if 0 <= start <= memory.numel() - count * itemsize and start % itemsize == 0:
                elements = memory[start : start + count * itemsize].view(layout.dtype)
                return elements.as_strided(layout.shape, layout.strides, elements.storage_offset())
        raise ValueError(f"no tensor of {count * itemsize} bytes at the address that it names")

    def views(self, addresses: Sequence[int], layouts: Sequence[TensorSpec]) -> list[Tensor]:
        return [self.view(address, layout) for address, layout in zip(addresses, layouts, strict=True)]

    def close(self) -> None:
        """Unmap all; no kernel of ours may still be at work there."""
        torch.cuda.synchronize(self.device)
        while self.allocations:
            _, memory = self.allocations.popitem()
            pointer = memory.data_ptr()
            del memory
            with contextlib.suppress(ValueError):  # its owner is gone
                _ask("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))
