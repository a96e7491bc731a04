"""Kernel files as users name them; and functions that were not written for this project, `file.py:function` or
`package.module:function`, as kernel files."""

import importlib.util
import inspect
import reprlib
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from autokernel.common.backends import BACKENDS, default_backend
from autokernel.gate.source import NotFound, binds, constants, exists, read_kernel, read_source
from autokernel.spec import is_kernel_type, kernel_types, load_spec
from autokernel.target import Target, default_target

CALL = """

# --- for the gate ---

_given_function = {function}


def kernel_fn({parameters}):
    return _given_function({names})


KERNEL_TYPE = "{kernel_type}"
BACKEND = "{backend}"
"""


def as_kernel_file(name: str, kernel_type: str, backend: str) -> str:
    """The source with a kernel_fn that calls the function by position, in the order of the oracle's parameters.

    A file is taken as it stands; a module is imported, which the gate allows only to kernels that may use libraries.
    """
    place, _, function = name.rpartition(":")
    if not function.isidentifier():
        raise NotFound(f"{name}: {function!r} is no name of a function")
    if Path(place).exists():
        source = text = read_source(Path(place))
        backend = str(constants(source).get("BACKEND", backend))
    elif place.endswith(".py") or not (module := _find_module(place)):
        raise NotFound(f"there is no file {place}, and no module of that name")
    else:
        source, is_python = f"from {place} import {function}\n", module.origin and module.origin.endswith(".py")
        text = Path(module.origin).read_text() if is_python else source
    if not binds(text, function):
        raise NotFound(f"{place} defines no {function}")
    oracle = inspect.signature(load_spec(kernel_type).oracle)
    parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in oracle.parameters.values())
    call = CALL.format(
        parameters=parameters,
        function=function,
        names=", ".join(oracle.parameters),
        kernel_type=kernel_type,
        backend=backend,
    )
    return source.rstrip() + "\n" + call


def source_of(name: Path, kernel_type: str | None, device: str) -> str:
    """The source of a kernel file, or of file.py:function with what the gate needs around it. Raises NotFound."""
    if ":" not in str(name) or exists(name):
        return read_kernel(name)
    if kernel_type not in kernel_types():
        raise NotFound(f"what does {name} compute? Say --kernel (in Python type=) with one of {', '.join(kernel_types())}")
    return as_kernel_file(str(name), kernel_type, default_backend(device))


def usual_target(
    source: str,
    name: object,
    kernel_type: str | None,
    device: str,
    dtype: str | torch.dtype | None = None,
    sizes: bool = False,
) -> Target:
    """The sizes of a kernel's type, for a kernel that no model asked for; `name` is for messages. Raises NotFound."""
    of_file = constants(source)
    if kernel_type and not is_kernel_type(kernel_type):
        raise NotFound(f"there is no kernel type {reprlib.repr(kernel_type)}; the types are {', '.join(kernel_types())}")
    kernel_type, backend = kernel_type or of_file.get("KERNEL_TYPE"), of_file.get("BACKEND")
    if not is_kernel_type(str(kernel_type)):
        raise NotFound(declared(name, "KERNEL_TYPE", kernel_type, f"; the types are {', '.join(kernel_types())}"))
    if (own := of_file.get("KERNEL_TYPE", kernel_type)) != kernel_type:
        raise NotFound(f"{name} is a kernel of {own}, and not of {kernel_type}: leave the type out, or change KERNEL_TYPE")
    if str(backend) not in BACKENDS:
        raise NotFound(declared(name, "BACKEND", backend, f"; the backends are {', '.join(BACKENDS)}"))
    row, kind = BACKENDS[str(backend)], device.partition(":")[0]
    if kind not in row.devices:
        ours = ", ".join(other.name for other in BACKENDS.values() if kind in other.devices)
        raise NotFound(f"{name} is in {row.title}, which is for {', '.join(row.devices)}; for {kind} there is {ours}")
    wanted = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if wanted and wanted not in load_spec(kernel_type).dtypes:
        raise NotFound(f"{kernel_type} is not for {dtype}")
    return usual_sizes(kernel_type, backend, device, wanted, sizes)


def usual_sizes(
    kernel_type: str, backend: str, device: str, dtype: torch.dtype | None = None, sizes: bool = False
) -> Target:
    """The default sizes of a kernel type, in `dtype` or the one that is most common on the device, if the type has it."""
    usual, dtypes = torch.float32 if device == "cpu" else torch.float16, load_spec(kernel_type).dtypes
    return default_target(kernel_type, backend, device, dtype or (usual if usual in dtypes else dtypes[0]), sizes)


def _find_module(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package in which it would be; "" and what begins with a dot
        return None


def declared(name: str, constant: str, found: object, wanted: str, value: str = "…") -> str:
    """What is wrong with a constant that every kernel file has, in a line; found: None where the file does not set it."""
    if found is None:
        return f'{name} sets no {constant}: add the line {constant} = "{value}"{wanted}'
    return f"{name}: {constant} is {reprlib.repr(found)}{wanted}"
