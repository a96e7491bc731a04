"""The backends: in which languages kernels are written, what compiles them and how, and for which devices they are.

Needs the standard library alone, as preflight.py does, which reads it; PyTorch only where CUDA C++ is compiled.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TOOL_S = 60.0  # for what a compiler says of itself, and nm of an object file: milliseconds


class CompileError(RuntimeError):
    """The compiler refused a kernel's source; the message is the compiler's, with lines of that source."""


@dataclass(frozen=True)
class Backend:
    """A language of kernels. Its starters are `kernels/<type>/<name>_kernel.py`."""

    name: str  # BACKEND of a kernel file
    title: str
    compilers: tuple[str | None, ...]  # programs: the first that compiles something is taken
    advice: str  # what to install where there is none
    suffix: str  # of a source file
    devices: tuple[str, ...]  # types of device for whose targets it is proposed
    flags: Callable[[str], list[str]] | None = None  # for a compiler's path; None: the language has a compiler in Python
    pip_compilers: str = ""  # where packages of pip have a compiler, as a pattern under site-packages
    python_headers: bool = False  # whether a C extension of Python is compiled to launch kernels
    needs_gpu: bool = False  # whether a gate on a CPU refuses it


@cache
def cpu_identity() -> str:
    """The CPU's model and features: -march=native makes a binary that only such a CPU can run."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "".join(re.findall(r"^(?:model name|flags|Features).*$", text, re.M)[:2])


def cpp_flags(compiler: str) -> list[str]:
    # No -ffast-math: it assumes that NaN and Inf do not occur and sets flush-to-zero for the whole process.
    arithmetic = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
    native = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
    if "-march=native" in native and "avx512f" in cpu_identity():
        native.append("-mprefer-vector-width=512")
    openmp = _if_known(compiler, "-fopenmp", b"#include <omp.h>\nint f() { return omp_get_max_threads(); }")
    # No variable of a template or an inline function is one with another library's of that name. (Clang's never are.)
    own = _if_known(compiler, "-fno-gnu-unique", b"") if sys.platform == "linux" else ()
    return ["-O3", "-std=c++17", "-fPIC", *native, *arithmetic, *own, *openmp]


@cache
def _if_known(compiler: str, flag: str, source: bytes) -> tuple[str, ...]:
    """A flag, where the compiler makes a library of `source` with it. (Without OpenMP kernels run on one thread.)"""
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, flag, "-shared", "-fPIC", "-x", "c++", "-", "-o", f"{folder}/probe.so"]
        try:
            probe = subprocess.run(command, input=source, capture_output=True, timeout=TOOL_S)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{compiler} did not finish a probe for {flag} within {TOOL_S:g} s") from None
    return (flag,) if probe.returncode == 0 else ()


def cuda_flags(compiler: str) -> list[str]:
    major, minor = _capability()
    arch = f"{major}{minor}" + ("a" if major >= 9 else "")
    target = [f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-DAK_ARCH={major}{minor}0"]
    quiet = ["-diag-suppress=177", "-lineinfo"]  # 177: a function that is not used, as those of a header are
    return ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", *quiet, *target]


def _capability() -> tuple[int, int]:
    """Of the GPU that CUDA C++ is compiled for. Raises CompileError where there is none."""
    import torch

    try:
        return torch.cuda.get_device_capability()
    except (AssertionError, RuntimeError) as error:  # the former from a PyTorch without CUDA
        raise CompileError(f"CUDA C++ is compiled for this machine's GPU, and PyTorch finds none ({error})") from None


ROWS = (  # of those for one device the first is its default, which the targets of a plan begin with
    Backend(
        name="triton",
        title="Triton",
        compilers=(os.environ.get("CC"), "gcc", "clang"),  # the names that Triton tries: it compiles its launcher in C
        advice="a C compiler (Debian/Ubuntu: apt install gcc; Fedora: dnf install gcc)",
        suffix=".c",
        devices=("cuda",),
        python_headers=True,
    ),
    Backend(
        name="cuda",
        title="CUDA C++",
        compilers=("nvcc", os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")),
        advice="nvcc, of NVIDIA's CUDA toolkit or from pip (pip install -e '.[cuda]')",
        suffix=".cu",
        devices=("cuda",),
        flags=cuda_flags,
        pip_compilers="nvidia/cu*/bin/nvcc",
        needs_gpu=True,
    ),
    Backend(
        name="cpp",
        title="C++",
        compilers=(os.environ.get("CXX"), "g++", "clang++", "c++"),
        advice="a C++ compiler "
        "(Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)",
        suffix=".cpp",
        devices=("cpu",),
        flags=cpp_flags,
    ),
)
BACKENDS = {row.name: row for row in ROWS}


def backends_for(device: str) -> tuple[str, ...]:
    """The names of those for a device ("cpu", "cuda:1"), its default first, whether or not they can be compiled here."""
    return tuple(row.name for row in ROWS if device.partition(":")[0] in row.devices)


def default_backend(device: str) -> str:
    return backends_for(device)[0]
