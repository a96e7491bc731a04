"""Whose work it is: in a candidate's process PyTorch's operators refuse to compute, and no other library can be loaded.

The refusal is registered with PyTorch's dispatcher, below everything that Python can reach around: a kernel that hands its
job to torch.matmul, by whatever name, gets an exception instead of a product.
"""

import ctypes
import sys
import warnings
from collections.abc import Iterable

import torch

# What makes or moves memory, or lists indices, and computes nothing. All other operators are the work of a library.
# (Most of what a user would call `view` or `reshape` has no kernel of its own on a device, and never comes here.)
MEMORY_OPERATORS = frozenset(
    {"_copy_from", "_local_scalar_dense", "_reshape_alias", "_to_copy", "alias", "as_strided", "cat", "clone", "contiguous"}
    | {
        "arange",
        "copy_",
        "empty",
        "empty_like",
        "empty_strided",
        "fill_",
        "is_pinned",
        "_pin_memory",
        "record_stream",
        "resize_",
    }
    | {"set_", "unfold", "view", "view_as_complex", "view_as_real", "zero_"}
)
GEMM_OPERATORS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_addmm_activation"})
# Sparse, nested and quantised tensors have operators of their own.
DISPATCH_KEYS = {
    "cpu": ("CPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU", "QuantizedCPU", "MkldnnCPU"),
    "cuda": ("CUDA", "SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA", "QuantizedCUDA"),
}
HOST_LIBRARIES = ("numpy", "scipy", "mkl")  # compute on a CPU
KERNEL_LIBRARIES = ("numba", "jax", "tensorflow", "onnxruntime", "cupy", "cuda.bindings", "nvmath", "cutlass", "flash_attn")
KERNEL_LIBRARIES += ("flashinfer", "xformers", "transformer_engine", "apex", "liger_kernel", "tilelang", "bitsandbytes")
DRIVERS = {"libcuda.so.1", "libnvidia-ml.so.1", "libamdhip64.so"}  # what PyTorch and Triton load when first needed


class LibraryCall(RuntimeError):
    """A kernel handed its work to a library."""


def refuse_libraries(device_type: str, gemms: bool) -> None:
    """From here on every computing operator on this device raises LibraryCall (matrix products only unless `gemms`).

    For good: the registrations are out of reach of the garbage collector, through which a kernel could find them.
    """
    allowed = MEMORY_OPERATORS | (GEMM_OPERATORS if gemms else frozenset())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in DISPATCH_KEYS[device_type]:
            registration = torch._C._dispatch_library("IMPL", "aten", key, "", 0)
            for name in _operators(key):
                if name.split(".")[0] not in allowed:
                    registration.impl(name, key, _refusal(name), False)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(registration))


def _operators(key: str) -> Iterable[str]:
    """Those of ATen that have a kernel for this key. In one call: asking operator by operator took 25 ms a key."""
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        namespace, _, name = qualified.partition("::")
        if namespace == "aten":
            yield name


def _refusal(name: str):
    def refuse(*args: object, **kwargs: object) -> None:
        raise LibraryCall(f"PyTorch's aten::{name} does the work, not the kernel")

    return refuse


def refuse_foreign_code(built: set[str], device_type: str) -> None:
    """Raise LibraryCall when Python loads native code that our builder did not make, by ctypes or as a module.

    An audit hook cannot be removed, and sees what any Python code does. `built` grows as the judge builds.
    """
    libraries = KERNEL_LIBRARIES + (HOST_LIBRARIES if device_type == "cpu" else ())
    for module in [m for m in sys.modules if m.startswith(libraries)]:
        del sys.modules[module]
    if device_type == "cpu":
        torch.Tensor.numpy = torch.Tensor.__array__ = torch.Tensor.__dlpack__ = _no_view

    def hook(event: str, arguments: tuple) -> None:
        if event == "ctypes.dlopen" and str(arguments[0]) not in built | DRIVERS:
            raise LibraryCall(f"loads {arguments[0]}, which is not built from the kernel's source")
        if event == "ctypes.dlsym" and str(getattr(arguments[0], "_name", "")) not in built | DRIVERS:
            raise LibraryCall(f"looks up {arguments[1]} in a library that is not the kernel's own")
        if event == "ctypes.dlsym/handle":
            raise LibraryCall(f"looks up {arguments[1]} by a handle")
        if event == "import" and str(arguments[0]).startswith(libraries):
            raise LibraryCall(f"imports {arguments[0]}")

    sys.addaudithook(hook)


def _no_view(*args: object, **kwargs: object) -> None:
    raise LibraryCall("hands its data to another library")
