"""Messages between judge and worker: length-prefixed JSON on a socket, and tensors in shared memory.

Nothing that a worker sends is unpickled or executed: a message is JSON of bounded size, which the judge decodes by a schema
(answers.py), and a tensor is raw bytes.
"""

import json
import mmap
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autokernel.spec import TensorSpec

MAX_MESSAGE = 4 << 20
T = TypeVar("T")
GUARD = 256  # bytes of poison on either side of every tensor
POISON = 0xFF  # NaN in every floating-point format, -1 as an integer
# linux/fcntl.h; Python 3.10 lacks the names.
F_ADD_SEALS, SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 1033, 0x1, 0x2, 0x4, 0x10


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelTimeout(Exception):
    """The other side did not answer in time."""


class Channel:
    """One end of a socket that carries JSON messages."""

    def __init__(self, sock: socket.socket):
        self.socket = sock

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, ensure_ascii=False).encode(errors="replace")  # half a character, in an exception's words
        try:
            self.socket.settimeout(10)
            self.socket.sendall(struct.pack("!I", len(data)) + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None, decode: Callable[[bytes], T] = json.loads) -> T:
        """The next message.

        Raises ChannelTimeout after `timeout_s`, ChannelClosed when the other side has gone, ValueError when it is too long
        or `decode` says so.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = struct.unpack("!I", self._read(4, deadline))
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes is longer than any that is sent")
        return decode(self._read(length, deadline))

    def _read(self, count: int, deadline: float | None) -> bytes:
        chunks = b""
        while len(chunks) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise ChannelTimeout
            self.socket.settimeout(left)
            try:
                chunk = self.socket.recv(count - len(chunks))
            except TimeoutError:
                raise ChannelTimeout from None
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("the other side closed the channel")
            chunks += chunk
        return chunks


class Arena:
    """Shared memory of fixed, sparse size: pages cost nothing until they are written.

    An arena for inputs is sealed after the judge has mapped it: no later mapping can be writable, so that a kernel that
    writes to its inputs is stopped by the processor. No arena can be shrunk or grown by the other side, or sealed further.
    """

    def __init__(self, size: int, writable_by_others: bool):
        self.size = size
        if sys.platform == "linux":
            self.fd = os.memfd_create("autokernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        if sys.platform == "linux":
            import fcntl

            seals = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | (0 if writable_by_others else SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.fd, F_ADD_SEALS, seals)

    def opened(self) -> int:
        """A descriptor for one reader, to be closed: on Linux a file of its own, whose position, flags and locks no other
        reader shares."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY) if sys.platform == "linux" else os.dup(self.fd)

    def close(self) -> None:
        """Give the descriptor back, once: its number may be another file's then. The memory goes when the last tensor that
        views it does."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in an arena: `start` is the byte where its storage begins."""

    spec: TensorSpec
    start: int

    def encode(self) -> dict[str, Any]:
        return {
            "shape": list(self.spec.shape),
            "stride": list(self.spec.strides),
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "offset": self.spec.offset,
            "storage_numel": self.spec.storage_numel,
            "start": self.start,
        }

    @staticmethod
    def decode(data: dict[str, Any]) -> "Placed":
        spec = TensorSpec(tuple(data["shape"]), getattr(torch, data["dtype"]), tuple(data["stride"]), data["offset"])
        return Placed(spec, data["start"])

    @property
    def end(self) -> int:
        return self.start + self.spec.storage_numel * self.spec.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The tensor itself, as a view of the arena's bytes."""
        storage = memory[self.start : self.end].view(self.spec.dtype)
        return storage.as_strided(self.spec.shape, self.spec.strides, storage.storage_offset() + self.spec.offset)


def encoded_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of a call, its tensors without contents."""
    return {name: Placed(v, 0).encode() if isinstance(v, TensorSpec) else v for name, v in arguments.items()}


def place(specs: dict[str, TensorSpec], start: int) -> tuple[dict[str, Placed], int]:
    """Lay tensors out one after another with guards between them; returns them and the first free byte."""
    placed = {}
    for name, spec in specs.items():
        start = -(-(start + GUARD) // 64) * 64
        placed[name] = Placed(spec, start)
        start = placed[name].end + GUARD
    return placed, start
