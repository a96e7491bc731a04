"""What a worker may answer: one schema for each kind of request, by which the judge decodes every message of a worker.

A worker's message is its candidate's to forge. What does not fit, by type, range or length, is a ValueError of `decode`,
and a CRASH verdict on that kernel. What the values mean is checked where they are used: here are the bounds within which
nothing in the judge can raise, hang, or take much memory.
"""

import math
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct
from msgspec.json import Decoder

from autokernel.common.backends import BACKENDS
from autokernel.spec import TensorSpec

MAX_BYTES = 1 << 47  # of an address space
MAX_REQUEST = 1 << 53  # numbers of requests: JSON's integers
Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Sizes = Annotated[tuple[Size, ...], Meta(max_length=16)]  # one for each dim
Dtype = Literal[
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float8_e4m3fn", "float8_e5m2",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
Macro = tuple[
    Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,99}$")], Annotated[str, Meta(pattern="^[^\\x00]{0,1000}$")]
]


class Output(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that lies contiguously in the worker's arena from byte `start` on; `stride` is what it had in the worker."""

    shape: Sizes
    stride: Sizes
    dtype: Dtype
    start: Annotated[int, Meta(ge=0, le=MAX_BYTES, multiple_of=64)]

    def __post_init__(self) -> None:
        if len(self.stride) != len(self.shape):
            raise ValueError(f"{len(self.stride)} strides for {len(self.shape)} dims")
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride) if n)
        if max(reach, math.prod(max(n, 1) for n in self.shape)) > MAX_BYTES // 16:
            raise ValueError("a tensor that no memory holds")

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, getattr(torch, self.dtype))


class Error(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="error"):
    """The request failed: the kernel raised, most often."""

    id: int
    error: str
    detail: str


class Build(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="build"):
    """Not an answer yet: the kernel has a library to be built."""

    language: str
    source: str
    defines: Annotated[tuple[Macro, ...], Meta(max_length=256)]

    def __post_init__(self) -> None:
        if self.language not in BACKENDS or not BACKENDS[self.language].flags:
            raise ValueError("it names no language of ours that is compiled")


class Answer(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="answer"):
    """`id` is that of the request, which the worker could not know before it was asked."""

    id: int


class Called(Answer, frozen=True, tag="answer"):
    outputs: tuple[Output, ...]
    inputs: tuple[Output, ...]  # on a GPU: with their guards, as they are after the calls


class Prepared(Answer, frozen=True, tag="answer"):
    graph: bool  # captured as a CUDA graph


class Batch(Answer, frozen=True, tag="answer"):
    enqueued_s: Annotated[float, Meta(ge=0, le=1e6)]
    addresses: tuple[Size, ...]  # of the outputs; none in a graph


class Allocation(Struct, frozen=True, forbid_unknown_fields=True):
    """Of device memory: its address in the worker, and CUDA's handle for other processes, as hexadecimal digits."""

    base: Size
    handle: Annotated[str, Meta(pattern="^[0-9a-f]{128}$")]


class Exported(Answer, frozen=True, tag="answer"):
    inputs: tuple[tuple[Size, ...], ...]  # addresses by set
    outputs: tuple[Size, ...]
    allocations: Annotated[tuple[Allocation, ...], Meta(max_length=4096)]
    layouts: Annotated[tuple[Output, ...], Meta(max_length=64)]  # of the results of a call


class Fetched(Answer, frozen=True, tag="answer"):
    outputs: tuple[Output, ...]


class Memory(Answer, frozen=True, tag="answer"):
    peak_bytes: Size


class Kernels(Answer, frozen=True, tag="answer"):
    microseconds: dict[str, Annotated[float, Meta(ge=0, le=1e12)]]


class Profile(Answer, frozen=True, tag="answer"):
    table: str


class Probe(Answer, frozen=True, tag="answer"):
    layers: dict[str, bool]


KINDS = {
    "call": Called,
    "prepare": Prepared,
    "batch": Batch,
    "export": Exported,
    "fetch": Fetched,
    "memory": Memory,
    "kernels": Kernels,
    "profile": Profile,
    "probe": Probe,
}
# Requests that are answered by being done.
NOTHING = ("load", "load_eager", "warm", "pool", "sets", "refill", "drop", "leave")
DECODERS = {op: Decoder(Error | Build | KINDS.get(op, Answer)) for op in (*KINDS, *NOTHING)}


def decode(op: str, request: int, message: bytes) -> Answer | Error | Build:
    """What a worker sent after the request `op` of this number. Raises ValueError where it is none of the three."""
    try:
        answer = DECODERS[op].decode(message)
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from None
    if not isinstance(answer, Build) and answer.id != request:
        raise ValueError("it answers another request")
    return answer


def printable(text: str, longest: int) -> str:
    """What a worker wrote, without what a terminal or a table would obey; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text[:longest])
