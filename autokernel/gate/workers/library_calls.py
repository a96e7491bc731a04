"""Whose work it is: in a candidate's process PyTorch's operators refuse to compute, and no other library can be loaded.

The refusal is registered with PyTorch's dispatcher, below everything that Python can reach around: a kernel that hands its
job to torch.matmul, by whatever name, gets an exception instead of a product.
"""

import ctypes
import os
import re
import socket
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

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
# oneDNN's convolutions with what it can add to them, and the packing of their weights
CONVOLUTION_OPERATORS = frozenset(
    {"mkldnn::_convolution_pointwise", "mkldnn::_convolution_transpose_pointwise", "aten::to_mkldnn"}
    | {"mkldnn::_reorder_convolution_weight", "mkldnn::_reorder_convolution_transpose_weight"}
    | {"aten::mkldnn_reorder_conv2d_weight", "aten::mkldnn_reorder_conv3d_weight"}
)
ALLOWED = {  # beside MEMORY_OPERATORS, by what a kernel may call a library for
    "none": frozenset(),
    "gemm": frozenset(f"aten::{name}" for name in GEMM_OPERATORS),
    "convolution": CONVOLUTION_OPERATORS,
}
# Sparse, nested and quantised tensors have operators of their own.
DISPATCH_KEYS = {
    "cpu": ("CPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU", "QuantizedCPU", "MkldnnCPU"),
    "cuda": ("CUDA", "SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA", "QuantizedCUDA"),
}
# Registered for all devices, as what is made of other operators is; these ask a library directly: oneDNN (by way of which
# convolutions, of one element, are matrix products), NNPACK, FBGEMM.
DIRECT_OPERATORS = re.compile(
    r"aten::(mkldnn_convolution|_nnpack_spatial_convolution|fbgemm_\w+|_wrapped_quantized\w+|quantized_\w+_cell|"
    r"_?choose_qparams\w+)"
)
# What makes programs of TorchScript, or runs them: its own operators (prim::mkldnn_convolution) and its static runtime ask
# libraries without the dispatcher.
TORCHSCRIPT = re.compile(
    r"_jit_(script|pass|interpret)\w*|_jit_to_static_module|_fuse_to_static_module|_create_(function|graph)\w*|"
    r"_?import_ir_module\w*|parse_ir|_load_(for_lite|mobile|jit)_\w+"
)
# What loads native code or runs a graph by code of its own, without Python or the dispatcher: AOTInductor, nativert, NNC.
RUNTIMES = ("_aoti", "_nativert", "_te")
# Packages of what PyTorch itself is linked to: torch/, on ARM torch.libs/, and those of a GPU's maker, of whose libraries
# it calls some without a GPU, too. OpenMP's run-time library may be any package's. So may libquadmath, NumPy's say:
# once it is loaded, glibc's printf calls it, as oneDNN does with the numbers of what it adds to a convolution.
PYTORCHS = "torch", "nvidia", "rocm", "_rocm", "intel"
RUNTIME = "libgomp", "libomp", "libiomp", "libquadmath"
# Audit events of Python that the sandbox forbids; what they run first may be code of a library that was taken away.
PROCESSES = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
# Events that the layers of the sandbox refuse, where they are a kernel's.
NETWORK = {f"socket.{call}" for call in ("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname")}
INTERNET = socket.AF_INET, socket.AF_INET6
SIGNALLING = {"os.kill", "os.killpg"}
CHANGING_FILES = {f"os.{call}" for call in ("mkdir", "remove", "rename", "rmdir", "truncate", "chmod", "link", "symlink")}
CHANGING_FILES |= {f"os.{call}" for call in ("chown", "utime", "setxattr", "removexattr")}
ASKING = "torch", "platform"  # modules that go on without what they ask for: a library's version, the machine's name
HOST_LIBRARIES = ("numpy", "scipy", "mkl")  # compute on a CPU
KERNEL_LIBRARIES = ("numba", "jax", "tensorflow", "onnxruntime", "cupy", "cuda.bindings", "nvmath", "cutlass", "flash_attn")
KERNEL_LIBRARIES += ("flashinfer", "xformers", "transformer_engine", "apex", "liger_kernel", "tilelang", "bitsandbytes")
DRIVERS = {"libcuda.so.1", "libnvidia-ml.so.1", "libamdhip64.so"}  # what PyTorch and Triton load when first needed


class LibraryCall(RuntimeError):
    """A kernel handed its work to a library."""


def refuse_libraries(device_type: str, but: Collection[str]) -> None:
    """From here on every computing operator on this device, `but` these, raises LibraryCall.

    For good: the registrations are out of reach of the garbage collector, through which a kernel could find them.
    """
    allowed = {*(f"aten::{name}" for name in MEMORY_OPERATORS), *but}
    registrations: dict[tuple[str, str], Any] = {}  # by namespace and key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in DISPATCH_KEYS[device_type]:
            for name in (*_operators(key), *(_direct_operators() if key == DISPATCH_KEYS[device_type][0] else ())):
                namespace, _, operator = name.partition("::")
                if name.split(".")[0] in allowed:
                    continue
                if (namespace, key) not in registrations:
                    registrations[namespace, key] = torch._C._dispatch_library("IMPL", namespace, key, "", 0)
                registrations[namespace, key].impl(operator, key, _refusal(name), False)
    for registration in registrations.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(registration))
    _refuse_torchscript()
    _refuse_runtimes()


def _operators(key: str) -> Iterable[str]:
    """Those of ATen, and of what else PyTorch brings along (mkldnn::, quantized::), that have a kernel for this key.

    In one call: asking operator by operator took 25 ms a key."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def _direct_operators() -> Iterable[str]:
    for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        yield from (name for name in _operators(key) if DIRECT_OPERATORS.fullmatch(name.split(".")[0]))


def _refuse_torchscript() -> None:
    for name in filter(TORCHSCRIPT.fullmatch, dir(torch._C)):
        setattr(torch._C, name, _refusal(name))
    for name in ("create_function", "define"):
        setattr(torch._C.CompilationUnit, name, _refusal(name))
    get_operation = torch._C._jit_get_operation

    def get_known_operation(name: str) -> Any:  # by which torch.ops finds them
        if name.startswith(("prim::", "static_runtime::")):
            _refusal(name)()
        return get_operation(name)

    torch._C._jit_get_operation = get_known_operation


def _refuse_runtimes() -> None:
    for module in filter(None, (getattr(torch._C, name, None) for name in RUNTIMES)):  # not in every release
        for name, made in [(n, v) for n, v in vars(module).items() if callable(v)]:
            refusal = _refusal(f"{module.__name__}.{name}")
            setattr(module, name, refusal)
            if isinstance(made, type):  # which can be found without its name
                made.__init__ = refusal


def _refusal(name: str):
    def refuse(*args: object, **kwargs: object) -> None:
        raise LibraryCall(f"PyTorch's {name} does the work, not the kernel")

    return refuse


def refuse_foreign_code(built: set[str], device_type: str) -> tuple[list[str], list[str]]:
    """Raise LibraryCall when Python loads native code that our builder did not make, by ctypes or as a module.

    An audit hook cannot be removed, and sees what any Python code does. `built` grows as the judge builds. Returns a list
    that grows when another is added: Python passes over what ours would raise then; and what a kernel has tried that is
    refused here, or by the sandbox (on a CPU), and may go on without: in a model's process it succeeds.
    """
    added, tried = list[str](), list[str]()
    libraries = KERNEL_LIBRARIES + (HOST_LIBRARIES if device_type == "cpu" else ())
    for name in [m for m in sys.modules if m.startswith(libraries)]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))  # for good: freeing it would run its code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what says that it is deprecated, as torch.distributed.reduce_op does
        for module in list(sys.modules.values()):  # torch.storage.np
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if isinstance(value, ModuleType) and value.__name__.startswith(libraries):
                    setattr(module, name, _Absent(value.__name__))
    if device_type == "cpu":
        torch.Tensor.numpy = torch.Tensor.__array__ = torch.Tensor.__dlpack__ = _no_view
        _take_code_away()
    # Native modules: Python's own, in the folder that it has for them. On a GPU Triton loads some that it has compiled.
    native = tuple(os.path.join(os.path.realpath(path), "") for path in sys.path if path.endswith("lib-dynload"))
    realpath, scratch = os.path.realpath, os.path.join(os.path.realpath("."), "")

    def refusal_of(event: str, arguments: tuple) -> Exception | None:
        if event == "ctypes.dlopen" and str(arguments[0]) not in built | DRIVERS:
            return LibraryCall(f"loads {arguments[0]}, which is not built from the kernel's source")
        if event == "ctypes.dlsym" and str(getattr(arguments[0], "_name", "")) not in built | DRIVERS:
            return LibraryCall(f"looks up {arguments[1]} in a library that is not the kernel's own")
        if event == "ctypes.dlsym/handle":
            return LibraryCall(f"looks up {arguments[1]} by a handle")
        if event == "import" and str(arguments[0]).startswith(libraries):
            if _is_called_by("torch"):
                return ModuleNotFoundError(f"{arguments[0]} is not there for kernels")
            return LibraryCall(f"imports {arguments[0]}")
        if event in PROCESSES and device_type == "cpu":  # Triton starts compilers
            return PermissionError("a kernel starts no other process")
        if event == "import" and arguments[1] and device_type == "cpu" and not realpath(arguments[1]).startswith(native):
            return LibraryCall(f"loads {arguments[1]}, which is not built from the kernel's source")
        return None

    def hook(event: str, arguments: tuple) -> None:
        if event == "sys.addaudithook":
            added.append(event)
        refusal = refusal_of(event, arguments)
        what = str(refusal or _done_outside(event, arguments, scratch)) if device_type == "cpu" else ""
        if what and not _is_called_by(*ASKING):
            tried.append(what)
        if refusal:
            raise refusal

    sys.addaudithook(hook)
    added.clear()
    return added, tried


def _done_outside(event: str, arguments: tuple, scratch: str) -> str:
    """What it does to the network, another process or a file outside of a folder, or looks like that; else nothing."""
    if event in NETWORK or event == "socket.__new__" and arguments[1] in INTERNET:
        return f"asks the network ({event})"
    if event in SIGNALLING:
        return "" if arguments[0] == os.getpid() else "signals another process"
    if event == "open":
        _, mode, flags = arguments
        if not (set("wax+") & set(mode) if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return ""
    elif event not in CHANGING_FILES:
        return ""
    if not isinstance(arguments[0], str | bytes | os.PathLike):  # a file that is open
        return ""
    path = os.path.realpath(os.fsdecode(arguments[0]))
    return "" if path == os.devnull or os.path.join(path, "").startswith(scratch) else f"{event} of {path}"


def _is_called_by(*packages: str) -> bool:
    """Whether one of these is what calls here, by way of Python's own modules: PyTorch's modules, say, which may do without
    NumPy, as torch._dynamo for custom_op()."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith(("importlib", "subprocess", __name__)):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages


def _take_code_away() -> None:
    """Native code of other packages, which came with PyTorch's imports, runs no more: who calls it is ended by a signal.

    Objects of a library can be found without its name (among the subclasses of object, by the garbage collector). On Linux.
    """
    if sys.platform != "linux":
        return
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    packages = {Path(path).resolve() for path in folders if path.endswith("-packages")}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *path = line.split(maxsplit=5)
        file = Path(*path)
        if "x" in rights and is_of_another_package(file, packages):
            start, end = (int(address, 16) for address in addresses.split("-"))
            if ctypes.pythonapi.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 0):
                raise OSError(f"the code of {file} cannot be taken away")
    ctypes.pythonapi.__dict__.pop("mprotect", None)  # which would give it back


def is_of_another_package(file: Path, packages: Iterable[Path]) -> bool:
    """Whether native code in one of the folders `packages` is none that PyTorch needs."""
    owners = [file.relative_to(folder).parts[0] for folder in packages if file.is_relative_to(folder)]
    return bool(owners) and not owners[0].startswith(PYTORCHS) and not file.name.startswith(RUNTIME)


class _Absent(ModuleType):
    """In the place of a library that another module has imported."""

    def __getattr__(self, name: str) -> None:
        raise LibraryCall(f"calls {self.__name__}.{name}")


def _no_view(*args: object, **kwargs: object) -> None:
    raise LibraryCall("hands its data to another library")
