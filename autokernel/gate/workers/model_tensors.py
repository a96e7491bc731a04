"""The same inputs as tensors of a model: in memory that PyTorch allocated or that a file is mapped to, modules' parameters,
results of earlier layers.

A convenience for honest kernels, like all code in a worker: what a kernel sees beside shapes and numbers must not count.
"""

import ctypes
import mmap
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from autokernel.gate.workers.calls import memory_of

MOST_OF_A_FILE = 1 << 26  # bytes
MANY_TIMES = 10_000  # that a tensor was written to
LINE = 64  # bytes from the start of a page on, where large blocks of glibc's are PyTorch's
SAME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memcmp", ctypes.CDLL(None)))


def of_a_first_layer(inputs: Mapping[str, Any], weights: Collection[str]) -> dict[str, Any]:
    """Tensors that want gradients; on a CPU in mapped memory, from where large blocks begin, every other from a page on."""
    made, start = dict(inputs), LINE
    for name, v in inputs.items():
        if isinstance(v, Tensor):
            own = _mapped(v, start) if v.device.type == "cpu" else _over(v)
            made[name], start = own.requires_grad_(v.is_floating_point()), LINE - start
    return made


def of_a_server(inputs: Mapping[str, Any], weights: Collection[str]) -> dict[str, Any]:
    """Each in memory that PyTorch has allocated for it alone, to which much was written, weights as parameters that were
    trained: with gradients, hooks, what a program has noted on them and what is told of their end."""

    def made(name: str, v: Tensor) -> Tensor:
        own = _copied(v, torch.UntypedStorage(_nbytes(v)))
        if name in weights and v.is_floating_point():
            own = torch.nn.Parameter(own)
            own.grad = own.detach()
            own.register_hook(lambda gradient: None)
            own.noted_by_a_model = weakref.ref(own)
        torch._C._autograd._unsafe_set_version_counter((own,), (MANY_TIMES,))
        return own

    return {name: made(name, v) if isinstance(v, Tensor) else v for name, v in inputs.items()}


def of_a_later_layer(inputs: Mapping[str, Any], weights: Collection[str]) -> dict[str, Any]:
    """In files that PyTorch has mapped, as a checkpoint's, which it says is shared memory: from a page on, every other a
    little later. Weights are parameters that are not trained, others results of which gradients are wanted."""
    made, start = dict(inputs), 0
    for name, v in inputs.items():
        if not isinstance(v, Tensor):
            continue
        own, start = (_of_a_file if _nbytes(v) <= MOST_OF_A_FILE else _mapped)(v, start), LINE - start
        if not v.is_floating_point():
            made[name] = own
        elif name in weights:
            made[name] = torch.nn.Parameter(own, requires_grad=False)
        else:
            with torch.enable_grad():
                made[name] = own.requires_grad_().view(own.shape)
    return made


# How the calls after a first one are made, in turn.
MODELS: tuple[Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]], ...] = (
    of_a_first_layer,
    of_a_server,
    of_a_later_layer,
)


def check_unchanged(made: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raises ValueError where what was made of inputs has other contents now. (They themselves cannot be written to.)"""
    for name, v in inputs.items():
        if isinstance(v, Tensor) and v.numel() and SAME(v.data_ptr(), made[name].data_ptr(), _nbytes(v)):
            raise ValueError(f"kernel_fn changed its input {name}")


def check_gradients(made: Mapping[str, Any]) -> None:
    """Raises ValueError where a gradient that reaches one of these, on a CPU, does not go on as it is: because of a hook of
    the tensor, or of a node of the graph, which tells of none."""
    for name, v in made.items():
        leaf = v if not isinstance(v, Tensor) or v.is_leaf else v._base
        if isinstance(leaf, Tensor) and leaf.requires_grad and v.numel():
            known, leaf.grad = leaf.grad, None
            ones = torch.empty((), dtype=v.dtype).fill_(1).expand(v.shape)
            # As v.backward(ones) does it once it has imported SymPy, for half a second in each process.
            _engine_run_backward((v,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            passed, leaf.grad = leaf.grad, known
            if passed is None or not _are_ones(passed):
                raise ValueError(f"kernel_fn changed the gradients that go on from its input {name}")


def _are_ones(v: Tensor) -> bool:
    """Of numbers without gaps: whether the first is, and each the same as the one before."""
    first, size = v.data_ptr(), v.itemsize
    one = torch.empty(1, dtype=v.dtype).fill_(1)
    return not SAME(first, one.data_ptr(), size) and not SAME(first, first + size, (v.numel() - 1) * size)


def _over(v: Tensor) -> Tensor:
    """v in its own memory, but no inference tensor."""
    ordinary = torch.empty(0, dtype=v.dtype, device=v.device)
    return ordinary.set_(v.untyped_storage(), v.storage_offset(), v.shape, v.stride())


def _mapped(v: Tensor, start: int) -> Tensor:
    """v in pages of its own, from byte `start` on."""
    pages = mmap.mmap(-1, start + max(1, _nbytes(v)))
    return _copied(v, torch.frombuffer(pages, dtype=torch.uint8, offset=start).untyped_storage())


def _of_a_file(v: Tensor, start: int) -> Tensor:
    """v in a file of its own in the working folder, from byte `start` on; what is written to it stays in memory."""
    size = start + max(1, _nbytes(v))
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.truncate(size)
        return _copied(v, torch.UntypedStorage.from_file(file.name, False, size), start)


def _copied(v: Tensor, storage: torch.UntypedStorage, start: int = 0) -> Tensor:
    """v, gaps included, from byte `start` of a storage on."""
    ctypes.memmove(storage.data_ptr() + start, v.data_ptr(), _nbytes(v))
    return torch.empty(0, dtype=v.dtype).set_(storage, start // v.itemsize, v.shape, v.stride())


def _nbytes(v: Tensor) -> int:
    """Gaps included."""
    return len(memory_of(v)) if v.numel() else 0
