"""Whose work it is: in a candidate's process PyTorch's operators refuse to compute, and no other library can be loaded.

The refusal is registered with PyTorch's dispatcher, below everything that Python can reach around: a kernel that hands its
job to torch.matmul, by whatever name, gets an exception instead of a product.
"""

import sys
import warnings
from collections.abc import Iterable

import torch

# What moves or makes memory and computes nothing. Every other operator of PyTorch is the work of a library.
# (Most of what a user would call `view` or `reshape` has no kernel of its own on a device, and never comes here.)
MEMORY_OPERATORS = frozenset(
    {"_copy_from", "_local_scalar_dense", "_reshape_alias", "_to_copy", "alias", "as_strided", "clone", "contiguous"}
    | {"copy_", "empty", "empty_like", "empty_strided", "fill_", "is_pinned", "_pin_memory", "record_stream", "resize_"}
    | {"set_", "unfold", "view", "view_as_complex", "view_as_real", "zero_"}
)
GEMM_OPERATORS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_addmm_activation"})
NUMERIC_LIBRARIES = (
    "numpy",
    "scipy",
    "numba",
    "jax",
    "cupy",
    "mkl",
    "tensorflow",
    "onnxruntime",
    "cutlass",
    "cuda.bindings",
)
DRIVERS = {"libcuda.so.1", "libnvidia-ml.so.1", "libamdhip64.so"}  # what PyTorch and Triton load when first needed


class LibraryCall(RuntimeError):
    """A kernel handed its work to a library."""


def refuse_libraries(device_type: str, gemms: bool) -> torch.library.Library:
    """From here on every computing operator on this device raises LibraryCall (matrix products only unless `gemms`).

    Returns the registration, which must be kept alive.
    """
    key = "CUDA" if device_type == "cuda" else "CPU"
    registration = torch.library.Library("aten", "IMPL")
    allowed = MEMORY_OPERATORS | (GEMM_OPERATORS if gemms else frozenset())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _operators(key):
            if name.split(".")[0] not in allowed:
                registration.impl(name, _refusal(name), key, allow_override=True)
    return registration


def _operators(key: str) -> Iterable[str]:
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
            yield name


def _refusal(name: str):
    def refuse(*args: object, **kwargs: object) -> None:
        raise LibraryCall(f"PyTorch's aten::{name} does the work, not the kernel")

    return refuse


def refuse_foreign_code(built: set[str], device_type: str) -> None:
    """Raise LibraryCall when Python loads native code that our builder did not make, by ctypes or as a module.

    An audit hook cannot be removed, and sees what any Python code does. `built` grows as the judge builds.
    """
    if device_type == "cpu":
        for module in [m for m in sys.modules if m.split(".")[0] in NUMERIC_LIBRARIES]:
            del sys.modules[module]
        torch.Tensor.numpy = torch.Tensor.__array__ = torch.Tensor.__dlpack__ = _no_view

    def hook(event: str, arguments: tuple) -> None:
        if event == "ctypes.dlopen" and str(arguments[0]) not in built | DRIVERS:
            raise LibraryCall(f"loads {arguments[0]}, which is not built from the kernel's source")
        if event == "ctypes.dlsym" and device_type == "cpu" and str(getattr(arguments[0], "_name", "")) not in built:
            raise LibraryCall(f"looks up {arguments[1]} in a library that is not the kernel's own")
        if event == "import" and device_type == "cpu" and str(arguments[0]).startswith(NUMERIC_LIBRARIES):
            raise LibraryCall(f"imports {arguments[0]}")

    sys.addaudithook(hook)


def _no_view(*args: object, **kwargs: object) -> None:
    raise LibraryCall("hands its data to another library")
