"""One call: its inputs stay as they are, and its results are its own."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.workers.channel import GUARD

FORM = (
    "class",
    "shape",
    "strides",
    "address",
    "dtype",
    "wish for gradients",
    "gradient",
    "hooks",
    "version",
    "sign",
    "names",
)
MORE: dict[str, Callable[[Tensor], bool]] = {  # what no result has: it would be what a model makes of it
    "attributes": lambda y: bool(y.__dict__),
    "a gradient": lambda y: y.grad is not None,
    "the sign of its numbers elsewhere": lambda y: y.is_neg() or y.is_conj(),
    "names of its dims": lambda y: any(getattr(y, "names", ())),
}
MOST_MEMORY, SPARE_BYTES = 4, 1 << 20  # of a result, in multiples of its own, and beside these
MEMCMP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(("memcmp", ctypes.CDLL(None)))

# Whether a tensor's memory is another's until one of them is written to. Asking for its address is as good as a write.
is_copied_later: Callable[[Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda y: False)


class SharedResult(RuntimeError):
    """A kernel returned memory of a result that is held."""


def call(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """What it returns, its inputs as they were: their contents the judge looks at, what they are beside them is looked at
    here. Raises ValueError."""
    before = {name: _form(x) for name, x in inputs.items() if isinstance(x, Tensor)}
    returned = function(**inputs)
    for name, form in before.items():
        for what, known, now in zip(FORM, form, _form(inputs[name])):
            if now != known:
                raise ValueError(f"kernel_fn changed the {what} of its input {name}: {now} instead of {known}")
    return returned


def _form(x: Tensor) -> tuple[Any, ...]:
    """What FORM names, of an input."""
    version = None
    with contextlib.suppress(RuntimeError):  # of an inference tensor
        version = x._version
    has_gradient, hooks = x.grad is not None, (dict(x._backward_hooks or {}), dict(x._post_accumulate_grad_hooks or {}))
    sign, names = (x.is_neg(), x.is_conj()), getattr(x, "names", None)  # the latter before PyTorch 2.13
    what = type(x), x.shape, x.stride(), x.data_ptr(), x.dtype, x.requires_grad, has_gradient, hooks, version
    return *what, sign, names


def results_of(returned: Any, count: int) -> list[Any]:
    """The results of one call of a kernel that has so many. Raises TypeError."""
    if count == 1:
        return [returned]
    if not isinstance(returned, (tuple, list)) or len(returned) != count:
        raise TypeError(f"kernel_fn returned {type(returned).__name__}, not a tuple of {count} tensors")
    return list(returned)


def check_own(results: Sequence[Any], inputs: Mapping[str, Any], earlier: Sequence[range]) -> None:
    """Each result of a call has memory of its own: else who changes it in place would change something else.

    earlier: memory of the results of earlier calls that are still held. Raises ValueError or SharedResult.
    """
    storages = {(s := x.untyped_storage()).data_ptr(): s.nbytes() for x in inputs.values() if isinstance(x, Tensor)}
    seen: set[int] = set()
    for y in filter(has_memory, results):
        if is_copied_later(y):
            raise ValueError("kernel_fn returned a tensor whose memory is another's until somebody writes to it")
        memory, storage = memory_of(y), y.untyped_storage().data_ptr()
        if y._backward_hooks:
            raise ValueError("kernel_fn returned a tensor that has hooks")
        if y.requires_grad:
            raise ValueError("kernel_fn returned a tensor that wants gradients, which its operator sees to")
        if what := next((word for word, has in MORE.items() if has(y)), None):
            raise ValueError(f"kernel_fn returned a tensor that has {what}")
        if y.data_ptr() % y.itemsize:
            raise ValueError("kernel_fn returned a tensor whose numbers lie across the addresses of such numbers")
        if any(memory.start < start + nbytes and start < memory.stop for start, nbytes in storages.items()):
            raise ValueError("kernel_fn returned memory of an input, not a result of its own")
        if storage in seen:
            raise ValueError("kernel_fn returned two results in one memory")
        if any(memory.start < other.stop and other.start < memory.stop for other in earlier):
            raise SharedResult("kernel_fn returned memory of an earlier call's result, which may be in use")
        if y.untyped_storage().nbytes() > MOST_MEMORY * y.nbytes + SPARE_BYTES + 2 * GUARD:  # the gate's own
            raise ValueError(f"kernel_fn returned a part of {y.untyped_storage().nbytes()} bytes, all held by its result")
        seen.add(storage)


def check_writable(results: Sequence[Any]) -> None:
    """Raises ValueError where a result's memory cannot be written to, as a model writes that goes on with it in place: the
    first byte and the last, as they are, by Linux, which only says so."""
    receiver, sender = os.pipe()
    try:
        for memory in map(memory_of, filter(has_memory, results)):
            for address in (memory[0], memory[-1]):
                byte = (ctypes.c_char * 1).from_address(address)
                os.write(sender, byte.raw)
                os.readv(receiver, [byte])
    except OSError:
        raise ValueError("kernel_fn returned memory that cannot be written to") from None
    finally:
        os.close(receiver)
        os.close(sender)


def has_memory(y: Any) -> bool:
    return type(y) is Tensor and y.numel() > 0 and y.layout == torch.strided


def memory_of(y: Tensor) -> range:
    """The addresses from its first element to its last."""
    last = sum((n - 1) * stride for n, stride in zip(y.shape, y.stride()))
    return range(y.data_ptr(), y.data_ptr() + (last + 1) * y.itemsize)


def contents(y: Tensor) -> bytes:
    """Of a result as it lies in memory; none where that has gaps."""
    memory = memory_of(y) if has_memory(y) else range(0)
    return ctypes.string_at(memory.start, len(memory)) if len(memory) == y.numel() * y.itemsize else b""


def has_content(y: Tensor, content: bytes) -> bool:
    return is_at(y.data_ptr(), content)


def is_at(address: int, content: bytes) -> bool:
    """Whether memory has this content; none is everywhere."""
    return not content or not MEMCMP(address, content, len(content))
