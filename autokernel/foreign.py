"""Functions that were not written for this project, as kernel files: `file.py:function` or `package.module:function`."""

import importlib.util
import inspect
from pathlib import Path

from autokernel.gate.judge import constants
from autokernel.spec import load_spec

CALL = """

# --- for the gate ---


def kernel_fn({parameters}):
    return {function}({names})


KERNEL_TYPE = "{kernel_type}"
BACKEND = "{backend}"
"""


class NotFound(Exception):
    """No such file, module or function, in one line."""


def as_kernel_file(name: str, kernel_type: str, backend: str) -> str:
    """The source with a kernel_fn that calls the function by position, in the order of the oracle's parameters.

    A file is taken as it stands; a module is imported, which the gate allows only to kernels that may use libraries.
    """
    place, _, function = name.rpartition(":")
    if Path(place).is_file():
        source = Path(place).read_text()
        backend = str(constants(source).get("BACKEND", backend))
    elif not place.endswith(".py") and importlib.util.find_spec(place):
        source = f"from {place} import {function}\n"
    else:
        raise NotFound(f"there is no file {place}, and no module of that name")
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
