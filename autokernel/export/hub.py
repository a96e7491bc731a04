"""A kernel file as a project of the Hugging Face Kernel Hub: sources for its kernel-builder, and a variant that loads now.

Layout and metadata as the package `kernels` 0.17 documents them (docs/source/builder/writing-kernels.md and
kernel-requirements.md of github.com/huggingface/kernels): build.toml of edition 5, `torch-noarch` for pure Python,
`torch` with a binding for compiled code, build/<variant>/ with a metadata.json.
"""

import base64
import hashlib
import inspect
import json
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from autokernel.build import INCLUDE, CudaFunction, compile_library
from autokernel.common.preflight import HOME, Refused
from autokernel.export.folders import NotOurs, why_not, write_anew
from autokernel.gate.source import constants
from autokernel.spec import ROOT, KernelSpec, import_file, is_region, load_spec

VERSION = 1
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")  # what kernels takes
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
VARIANTS = ("cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu")  # likewise
BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "MIT"
backends = [{backends}]
{hub}
"""
FLAKE = """{
  description = "DESCRIPTION";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
INIT = '''"""{what}"""

from . import layers
from .kernel import kernel_fn as {function}

__all__ = ["{function}", "layers"]
'''
NO_LAYERS = '"""No layer of models computes just this."""\n'
LAYERS = {
    "rmsnorm": '''"""Layers whose forward() takes the place of a model's, through kernels.kernelize."""

import torch
from torch import nn

from .kernel import kernel_fn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim, as in Llama."""

    can_torch_compile: bool = False
    has_backward: bool = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return kernel_fn(x=hidden_states, weight=self.weight, eps=self.variance_epsilon)
''',
    "layernorm": '''"""Layers whose forward() takes the place of a model's, through kernels.kernelize."""

import torch
from torch import nn

from .kernel import kernel_fn


class LayerNorm(nn.Module):
    """As torch.nn.LayerNorm over the last dim, with weight and bias."""

    can_torch_compile: bool = False
    has_backward: bool = False
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernel_fn(x=x, weight=self.weight, bias=self.bias, eps=self.eps)
''',
}
BINDING = '''"""What a kernel of AutoKernel asks of its builder: here, the operators of the compiled extension."""

import torch

from ._ops import ops

DTYPE_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def cuda_function(source, name, signature, **defines):
    """The function `name` of the extension: called with pointers and numbers, it launches on the current stream."""

    def call(*values):
        status = getattr(ops, name)(*values)
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")

    return call
'''
C_OPS = '''"""The functions of the library beside this file, built by AutoKernel, called as its operators would be."""

import ctypes
from pathlib import Path

import torch

TYPES = {{"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}}
FUNCTIONS = {functions!r}  # name -> its parameters; the stream is added
_library = ctypes.CDLL(str(Path(__file__).with_name("{library}")))


class ops:
    """As torch.ops.<name> is used."""


def _bind(name, signature):
    function = getattr(_library, name)
    function.argtypes = [TYPES[c] for c in signature] + [ctypes.c_void_p]
    return staticmethod(lambda *values: function(*values, torch.cuda.current_stream().cuda_stream))


for _name, _signature in FUNCTIONS.items():
    setattr(ops, _name, _bind(_name, _signature))
'''
C_TYPES = {"p": "void*", "i": "int32_t", "l": "int64_t", "f": "float", "d": "double"}
TEST = '''"""The kernel against plain PyTorch in float64. Run with the package `kernels` installed: pytest tests"""

import math
from pathlib import Path

import kernels
import pytest
import torch
from torch import Tensor

kernel = kernels.get_local_kernel(Path(__file__).resolve().parent.parent)

{definitions}


{oracle}

CASES = {cases}


def tensor(shape, dtype, low, high):
    t = torch.randn(shape) if high is None else torch.randint(low, high, shape)
    return t.to(dtype).to("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", CASES)
def test_{function}(case):
    torch.manual_seed(0)
    inputs = {{k: tensor(*v) if isinstance(v, tuple) else v for k, v in case.items()}}
    exact = {{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}}
    expected, y = {oracle_name}(**exact), kernel.{function}(**inputs)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
'''


class NotExported(Refused):
    """Why a kernel cannot be made a project, in one line."""


@dataclass(frozen=True)
class Project:
    """What the files of a project are made from. `measured`: lines for the card about speed, and how it was measured."""

    name: str  # "my-rmsnorm"
    source: str
    repo_id: str = ""
    measured: str = ""
    backends: tuple[str, ...] = ("cuda",)

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def spec(self) -> KernelSpec:
        return load_spec(str(constants(self.source)["KERNEL_TYPE"]))

    @property
    def compiled(self) -> bool:
        return constants(self.source)["BACKEND"] == "cuda"

    @property
    def unique(self) -> str:
        """The name under which loaded versions are told apart."""
        return f"_{self.python_name}_{hashlib.sha256(self.source.encode()).hexdigest()[:8]}"


def write(project: Project, folder: Path) -> Path:
    """All files of the project; returns the folder of the variant that loads on this machine.

    Raises NotExported, and NotOurs where the folder has files of others.
    """
    if not NAME.fullmatch(project.name):
        raise NotExported(f"{project.name!r} is no name for a kernel: two lower case letters or more, digits, inner dashes")
    if project.repo_id and not REPO_ID.fullmatch(project.repo_id):
        raise NotExported(f"{project.repo_id!r} is no name of a repository on the Hub, such as me/my-rmsnorm")
    if unknown := set(project.backends) - set(VARIANTS):
        raise NotExported(f"{min(unknown)!r} is no backend of the Hub's: they are {', '.join(VARIANTS)}")
    if constants(project.source).get("BACKEND") not in ("triton", "cuda"):
        raise NotExported("the hub's kernels are for GPUs: a Triton or a CUDA kernel can be exported, a C++ one cannot")
    if is_region(project.spec.name):
        raise NotExported(
            "it computes a part of one model, at that model's sizes: python verify.py --save makes a package of it"
        )
    if reason := why_not(folder):
        raise NotOurs(reason)
    functions = _functions(project) if project.compiled else []
    package = _package(project)
    files = {f"torch-ext/{project.python_name}/{name}": text for name, text in package.items()}
    files |= {"build.toml": _build_toml(project, functions), "CARD.md": _card(project), "LICENSE": _license()}
    files |= {"flake.nix": FLAKE.replace("DESCRIPTION", f"{project.name}: {_summary(project)}"), "tests/__init__.py": ""}
    files |= {f"tests/test_{project.python_name}.py": _test(project)}
    files |= _native(project, functions) if functions else {}
    variants = [_variant(project, backend) for backend in project.backends]
    with TemporaryDirectory() as scratch:
        for variant, backend in zip(variants, project.backends):
            _write_variant(project, Path(scratch, "build", variant), backend, package, functions)
        built = {str(p.relative_to(scratch)): p.read_bytes() for p in Path(scratch).rglob("*") if p.is_file()}
    write_anew(folder, files | built)
    return folder / "build" / variants[0]


def _summary(project: Project) -> str:
    return (inspect.getdoc(project.spec.oracle) or project.spec.name).split("\n")[0]


def _package(project: Project) -> dict[str, str]:
    """The Python files, as kernel-builder and every variant have them."""
    spec = project.spec
    source = project.source
    files = {"layers.py": LAYERS.get(spec.name, NO_LAYERS)}
    if project.compiled:
        source = source.replace("from autokernel.build import", "from .binding import")
        files["binding.py"] = BINDING
    if re.search(r"^\s*(from|import) autokernel\b", source, re.M):
        raise NotExported("it imports more of autokernel than a binding can stand for")
    return files | {"kernel.py": source, "__init__.py": INIT.format(what=_summary(project), function=spec.name)}


def _functions(project: Project) -> list[CudaFunction]:
    """The compiled functions of a kernel file, all of one library."""
    scratch = HOME / "workspace" / f"export_{project.unique}.py"
    scratch.parent.mkdir(exist_ok=True)
    scratch.write_text(project.source)
    try:
        module = import_file(scratch, f"autokernel_export{project.unique}")
    finally:
        scratch.unlink()
    if hasattr(module.kernel_fn, "all"):
        raise NotExported("its SETTINGS by sizes are a library each; an extension is one library: take them out")
    functions = [v for v in vars(module).values() if isinstance(v, CudaFunction)]
    if len({f.library for f in functions}) != 1:
        raise NotExported("it chooses among libraries as it runs; an extension is one library, made beforehand")
    if "AK_ARCH" in functions[0].library.source:
        raise NotExported("its host code is for one architecture; an extension is built for several at once")
    return functions


def _signature(function: CudaFunction) -> str:
    """Its parameters without the stream."""
    return function.signature.replace(" ", "")[:-1]


def _native(project: Project, functions: list[CudaFunction]) -> dict[str, str]:
    """The CUDA source and its binding to PyTorch."""
    place, library = f"{project.python_name}_cuda", functions[0].library
    defines = "".join(f"#define {k} {v}\n" for k, v in library.defines)
    arch = "#ifndef AK_ARCH\n#define AK_ARCH 800  // host code asks for nothing newer\n#endif\n"
    files = {f"{place}/kernel.cu": arch + defines + library.source}
    files |= {f"{place}/{path.name}": path.read_text() for path in _headers(library.source)}
    declared, wrapped, defined = [], [], []
    for f in functions:
        types = [C_TYPES[c] for c in _signature(f)]
        declared.append(f'extern "C" int {f.name}({", ".join([*types, "cudaStream_t"])});')
        given = [f"{'double' if c in 'fd' else 'int64_t'} a{i}" for i, c in enumerate(_signature(f))]
        casts = ["reinterpret_cast<void*>" if c == "p" else C_TYPES[c] for c in _signature(f)]
        passed = [f"{cast}(a{i})" for i, cast in enumerate(casts)]
        schema = ", ".join(f"{'float' if c in 'fd' else 'int'} a{i}" for i, c in enumerate(_signature(f)))
        body = f"return {f.name}({', '.join([*passed, 'c10::cuda::getCurrentCUDAStream()'])});"
        wrapped.append(f"int64_t {f.name}_op({', '.join(given)}) {{\n    {body}\n}}")
        defined.append(f'    ops.def("{f.name}({schema}) -> int");')
        defined.append(f'    ops.impl("{f.name}", c10::DispatchKey::CompositeExplicitAutograd, &{f.name}_op);')
    headers = ("<c10/cuda/CUDAStream.h>", "<torch/library.h>", '"registration.h"', '"torch_binding.h"')
    includes = "\n".join(f"#include {header}" for header in headers)
    library_block = "\n".join(["TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {", *defined, "}"])
    binding = "\n\n".join([includes, *wrapped, library_block, "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n"])
    header = "#pragma once\n#include <cuda_runtime.h>\n\n#include <cstdint>\n\n" + "\n".join(declared) + "\n"
    return files | {"torch-ext/torch_binding.cpp": binding, "torch-ext/torch_binding.h": header}


def _headers(source: str) -> list[Path]:
    """Those of ours that it includes, and what they include."""
    found: list[Path] = []
    pending = [source]
    while pending:
        for name in re.findall(r"#include <([\w.]+)>", pending.pop()):
            path = INCLUDE / name
            if path.exists() and path not in found:
                found.append(path)
                pending.append(path.read_text())
    return found


def _build_toml(project: Project, functions: list[CudaFunction]) -> str:
    backends = ", ".join(f'"{b}"' for b in project.backends)
    hub = f'\n[general.hub]\nrepo-id = "{project.repo_id}"\n' if project.repo_id else ""
    text = BUILD.format(name=project.name, version=VERSION, backends=backends, hub=hub)
    if not functions:
        return text + "[torch-noarch]\n"
    place = f"{project.python_name}_cuda"
    sources = [f"{place}/kernel.cu", *(f"{place}/{path.name}" for path in _headers(functions[0].library.source))]
    return text + "\n".join(
        [
            "[torch]",
            'src = ["torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h"]',
            "",
            f"[kernel.{place}]",
            'backend = "cuda"',
            'depends = ["torch"]',
            f"include = [{json.dumps(place)}]",
            f"src = {json.dumps(sources)}",
            "",
        ]
    )


def _variant(project: Project, backend: str) -> str:
    """The folder's name: what the package `kernels` looks for on such a machine."""
    if not project.compiled:
        return f"torch-{backend}"
    version = "".join(torch.__version__.split(".")[:2])
    cuda = "cu" + (torch.version.cuda or "130").replace(".", "")
    abi = "cxx11" if torch.compiled_with_cxx11_abi() else "cxx98"
    return f"torch{version}-{abi}-{cuda}-{platform.machine()}-{platform.system().lower()}"


def _write_variant(
    project: Project, folder: Path, backend: str, package: Mapping[str, str], functions: list[CudaFunction]
) -> None:
    files = dict(package)
    folder.mkdir(parents=True)
    about: dict[str, object] = {"type": backend}
    if functions:
        library = f"{project.unique}.so"
        shutil.copy(compile_library(functions[0].library), folder / library)
        signatures = {f.name: _signature(f) for f in functions}
        files["_ops.py"] = C_OPS.format(functions=signatures, library=library)
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        about["archs"] = [f"{major}.{minor}"]
    for name, text in files.items():
        (folder / name).write_text(text)
    metadata = {"name": project.name, "id": f"{project.unique}_{backend}", "version": VERSION, "license": "MIT"}
    metadata |= {"python-depends": [], "backend": about, "digest": _digest(folder)}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _digest(folder: Path) -> dict[str, object]:
    def of(path: Path) -> str:
        return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()

    return {"algorithm": "sha256", "files": {path.name: of(path) for path in sorted(folder.iterdir())}}


def _license() -> str:
    return (ROOT / "LICENSE").read_text()


def _card(project: Project) -> str:
    spec = project.spec
    dtypes = ", ".join(str(d).removeprefix("torch.") for d in spec.dtypes)
    shapes = "\n".join(f"- {dict(dims)}" for dims in (spec.smoke, *spec.sweep, *spec.edges))
    where = project.repo_id or f"YOUR-NAME/{project.name}"
    built = (
        "The variant under `build/` was built by AutoKernel's own builder (nvcc, a plain C library called through ctypes)\n"
        "for one GPU architecture. kernel-builder makes the others from `build.toml` and the binding in `torch-ext/`.\n"
        if project.compiled
        else "The kernel is Python alone: Triton compiles it where it runs.\n"
    )
    claim = "Proven right by AutoKernel's gate" if project.measured else "Not judged when this was written; to be right"
    layer = "`layers.py` has a layer for `kernels.kernelize`.\n" if spec.name in LAYERS else ""
    return f"""---
library_name: kernels
license: mit
---

# {project.name}

{inspect.getdoc(spec.oracle)}

```python
from kernels import get_kernel

{project.python_name} = get_kernel("{where}", version={VERSION}, trust_remote_code=True)
y = {project.python_name}.{spec.name}({", ".join(inspect.signature(spec.oracle).parameters)})
```

{layer}It has no backward pass.

## Shapes

{claim} in {dtypes} against the definition above in float64, bitwise the same in every call, with strides, with hard
inputs, and at these sizes among others:

{shapes}

## Speed

{project.measured or "Not measured: no verdict was given when this card was written."}

## How it was made

By AutoKernel. {built}
The Nix build of kernel-builder and the upload to the Hub were not run by the tool that wrote this.

## License

MIT
"""


def _test(project: Project) -> str:
    """A test that needs no more than the package: the oracle is written out in it."""
    spec = project.spec
    reference = sys.modules[spec.oracle.__module__]
    names = re.findall(r"\b[A-Za-z_]\w*\b", inspect.getsource(spec.oracle))
    functions = [getattr(reference, n) for n in dict.fromkeys(names) if inspect.isfunction(getattr(reference, n, None))]
    helpers = [f for f in functions if f is not spec.oracle and f.__module__ == reference.__name__]
    activations = inspect.getsource(reference).split("ACTIVATIONS = ")[1].split("\n\n")[0]
    definitions = [f"ACTIVATIONS = {activations}"] if "ACTIVATIONS" in names else []
    definitions += [inspect.getsource(f).replace(f"def {f.__name__}", f"def {f.__name__}") for f in helpers]
    dtype = torch.float16 if torch.float16 in spec.dtypes else spec.dtypes[0]
    cases = [_case(spec.case(dims, dtype).args, spec) for dims in (spec.smoke, *spec.edges)]
    return TEST.format(
        definitions="\n\n".join(definitions),
        oracle=inspect.getsource(spec.oracle),
        oracle_name=spec.oracle.__name__,
        function=spec.name,
        cases="[\n" + "".join(f"    {case},\n" for case in cases) + "]",
    )


def _case(args: Mapping[str, object], spec: KernelSpec) -> str:
    def described(name: str, value: object) -> str:
        if not hasattr(value, "dtype"):
            return repr(value)
        high = None if value.dtype.is_floating_point else 8
        return f"({value.shape!r}, {value.dtype!r}, 0, {high})"

    return "{" + ", ".join(f'"{k}": {described(k, v)}' for k, v in args.items()) + "}"
