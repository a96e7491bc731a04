"""C++ and CUDA C++ sources -> callables: compiled behind a plain C ABI, cached by everything that the binary depends on.

A kernel file holds its source as a raw string with an `extern "C" int run(...)` that takes pointers, sizes and numbers:

    _run = cpp_function(SOURCE, "run", "ippllf", UNROLL=UNROLL)           # headers: include/*.hpp
    _run = cuda_function(SOURCE, "run", "ippllf", VECTORS=VECTORS)        # headers: include/*.cuh
    _run(DTYPE_CODE[x.dtype], x.data_ptr(), y.data_ptr(), M, N, eps)

In CUDA C++, `run` takes a `cudaStream_t` after the parameters of the signature, through which a call hands it the current
stream of the current device; it launches there and returns a cudaError_t (`cudaGetLastError()`), which is raised unless 0.
The code is compiled for the device's own architecture, with its features (sm_90a: wgmma, TMA, setmaxnreg); host code finds
it in the macro AK_ARCH (800, 890, 900, 1000, as in __CUDA_ARCH__). Functions of the driver, such as cuTensorMapEncodeTiled,
come from cudaGetDriverEntryPointByVersion: nothing but the CUDA run-time library is linked.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from autokernel.common.backends import BACKENDS, TOOL_S, cpu_identity
from autokernel.common.backends import CompileError as CompileError
from autokernel.common.preflight import MissingCompiler as MissingCompiler
from autokernel.common.preflight import default_cache as default_cache
from autokernel.common.preflight import find_compiler

INCLUDE = Path(__file__).resolve().parent / "include"
SANDBOX = Path(__file__).resolve().parent / "gate" / "workers" / "sandbox.py"
COMPILER_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "SDKROOT", "DEVELOPER_DIR")
COMPILE_S = 120.0  # for one run of a compiler
FILE_BYTES = 64 << 20  # of a file that it writes; the largest of ours has 2 MB
DTYPE_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in autokernel.hpp and autokernel.cuh
CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@dataclass(frozen=True)
class Library:
    """One source to be compiled, in a language of BACKENDS, and the macros (the tunables) that it is compiled with."""

    language: str
    source: str
    defines: tuple[tuple[str, str], ...] = ()


def _said_by(command: list[str], missing: str) -> str:
    """What a tool prints that needs a moment. Raises CompileError where it cannot be run, fails or does not end; `missing`:
    what to do where there is none."""
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S)
    except FileNotFoundError:
        raise CompileError(f"there is no {command[0]}: {missing}") from None
    except subprocess.TimeoutExpired:
        raise CompileError(f"{command[0]} did not finish within {TOOL_S:g} s") from None
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip()
        raise CompileError(f"{command[0]} {_ended(run.returncode)}" + f": {said[:1000]}" * bool(said))
    return run.stdout.decode(errors="replace")


def _ended(status: int) -> str:
    """An exit status of subprocess, in words."""
    return f"was killed ({signal.strsignal(-status)}; out of memory?)" if status < 0 else f"ended with status {status}"


@cache
def _compiler_identity(path: str) -> str:
    return _said_by([path, "--version"], "it was there a moment ago")


def compiler_version(language: str) -> str:
    """What the compiler of a backend says of itself, the line with its version. Raises MissingCompiler, CompileError."""
    said = _compiler_identity(find_compiler(language))
    return next((line for line in said.splitlines() if re.search(r"\d\.\d", line)), said.strip())


def _command(library: Library) -> list[str]:
    backend, compiler = BACKENDS[library.language], find_compiler(library.language)
    return [compiler, *backend.flags(compiler), f"-I{INCLUDE}", *(f"-D{name}={value}" for name, value in library.defines)]


# What a C++ kernel may call: the run-time libraries of C (memory, strings, mathematics, output, threads), of C++ (all of it
# but for files and what is set for a whole process), of the compiler, of OpenMP and of CUDA. All else that a process has
# loaded is out of bounds: libtorch exports sgemm_, libc exports dlopen.
MATHEMATICS = (
    "exp|exp2|expm1|log|log2|log10|log1p|pow|sqrt|cbrt|sin|cos|tan|sincos|sinh|cosh|tanh|asin|acos|atan|atan2|asinh|acosh|"
    "atanh|erf|erfc|floor|ceil|round|rint|nearbyint|trunc|fmod|modf|remainder|remquo|fma|fmin|fmax|fdim|fabs|ldexp|frexp|"
    "scalbn|scalbln|ilogb|logb|nextafter|copysign|hypot|lround|llround|lrint|llrint|tgamma|lgamma|nan|"
    "c(abs|arg|exp|log|pow|sqrt|sin|cos|tan|sinh|cosh|tanh)"
)
NO_STANDARD = (
    r"random_device|filebuf|fstream|basic_file|filesystem|set_terminate|set_new_handler|set_unexpected|6locale6global|"
    r"sync_with_stdio|set_default_resource|xalloc|3cin|4wcin|5w(cout|cerr|clog)|N2at|N3c10|N5torch|N6caffe2"
)
NO_THREADS = "atfork|setattr_default"  # of pthread_*: what is for all threads, or children, of a process
ALLOWED_SYMBOLS = re.compile(
    r"_?(__gmon_start__|__cxa_(?!finalize)\w+|_ITM_\w+|__gxx_personality_v0|_Unwind_\w+|__stack_chk_fail|__dso_handle|__tls_get_addr|"
    rf"_GLOBAL_OFFSET_TABLE_|atexit|GOMP_\w+|__kmpc_\w+|omp_\w+|pthread_(?!{NO_THREADS})\w+|sched_yield|"
    r"cuda[A-Z]\w+|__cuda\w+|"
    r"f?(printf|puts|putc|flush|write)|putchar|__f?printf_chk|v?snprintf|__v?snprintf_chk|stdout|stderr|_ZNS[ios]\w+|"
    r"__assert_(fail|rtn)|__errno_location|__error|__libc_single_threaded|__once_proxy|qsort|bsearch|str(len|n?cmp|n?cpy|r?chr)|"
    r"strto(u?ll?|[fd]|ld)|mem(cpy|set|move|cmp|chr)|__mem(cpy|set|move)_chk|bzero|"
    r"malloc|calloc|realloc|free|aligned_alloc|posix_memalign|abort|exit|"
    r"_Zn[wa]m\w*|_Zd[la]Pv\w*|_ZT[ISV]N10__cxxabiv1\w+|_ZTI\w|__[a-z]+?([bhsdxt][cfi]){1,2}\d?|"
    rf"_Z(GV|T[ISTV])?N?K?St(?!\w*({NO_STANDARD}))\w+|({MATHEMATICS})[fl]?|"
    r"_ZGV\w+)"
)
# Instructions that tell what is another number in each process, or each time, or that use registers in which compilers
# keep nothing, so that a thread might count its calls there: (what their code has in it, their names).
TELLING = {
    "x86_64": (
        re.compile(rb"\x0f(\x31|\x33|\x01[\xee\xef\xf9]|\xc7[\xf0-\xff]|\xae[\xc0-\xdf])", re.DOTALL),
        r"rdtscp?|rdpmc|rdrand|rdseed|rdpid|(rd|wr)([fg]sbase|pkru)",
    ),
    "aarch64": (re.compile(rb"[\x00-\xff][\xe0-\xe4][\x3b][\xd5]", re.DOTALL), r"mrs.*(cntv?p?ct|rndr)\w*"),
}


def _refuse_foreign_symbols(binary: Path) -> None:
    """Raise CompileError if the object file refers to a function that is neither its own nor in ALLOWED_SYMBOLS."""
    listing = _said_by(["nm", "-u", str(binary)], "it tells what a kernel calls (Debian/Ubuntu: apt install binutils)")
    symbols = {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}
    foreign = sorted(s for s in symbols if not ALLOWED_SYMBOLS.fullmatch(s))
    if foreign:
        raise CompileError(f"a kernel does its own work: this one calls {', '.join(foreign)} from outside")


def _refuse_telling_instructions(binary: Path) -> None:
    """Raise CompileError if the object file has instructions that read the processor's clock, its random numbers, or what
    is of no use to a kernel."""
    code, names = TELLING.get(platform.machine(), (None, ""))
    if code is None or not code.search(binary.read_bytes()):
        return
    listing = _said_by(["objdump", "-d", "--no-show-raw-insn", str(binary)], "it is where nm is (binutils)")
    if found := re.search(rf"\t({names})\b", listing):
        raise CompileError(f"a kernel computes from its inputs: {found[1]} tells the time, what is random or once was")


def _refuse_shared_variables(library: Path) -> None:
    """Raise CompileError where a C++ library would share variables with others of its process (STB_GNU_UNIQUE), or has such
    of each thread in the little memory that is set apart for those of all libraries, loaded later ones too."""
    listing = _said_by(["readelf", "--dynamic", "--dyn-syms", "--wide", str(library)], "it is where nm is (binutils)")
    if found := re.search(r"\bUNIQUE\b.*\s(\S+)$", listing, re.MULTILINE):
        raise CompileError(f"a kernel's variables are its own: {found[1]} is one of all libraries that have that name")
    if "STATIC_TLS" in listing:
        raise CompileError("a kernel leaves the static memory of threads to others: no tls_model may be given")


# C++ libraries find all that they call as they are loaded, and its addresses stay writable: the gate puts clocks ahead.
# What they define is what they call, not another library's of that name; no stack is made executable.
LINKED = (
    {"cpp": ("-Wl,-z,now", "-Wl,-z,norelro", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack")} if sys.platform == "linux" else {}
)

_compiling: dict[Path, threading.Lock] = {}  # by binary: who needs one that another thread compiles waits for it


def compile_library(library: Library, cache_dir: Path | None = None, timeout_s: float | None = None) -> Path:
    """Compile, or find the binary of an earlier run; safe against concurrent builds and a kill in the middle.

    Raises CompileError with the compiler's diagnostics, MissingCompiler if there is none.
    """
    command, timeout_s = _command(library), timeout_s or COMPILE_S
    headers = "".join(p.read_text() for p in sorted(INCLUDE.iterdir()))
    compiler = _compiler_identity(command[0]), cpu_identity()
    rules = (*LINKED.get(library.language, ()), ALLOWED_SYMBOLS.pattern)  # what was compiled under others is not taken
    identity = "\0".join((*command, *rules, *compiler, headers, library.source))
    folder = cache_dir or default_cache()
    binary = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"
    with _compiling.setdefault(binary, threading.Lock()):
        if not binary.exists():
            _build(library, command, binary, timeout_s)
    return binary


def _build(library: Library, command: list[str], binary: Path, timeout_s: float) -> None:
    folder = binary.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        source = Path(scratch, "kernel" + BACKENDS[library.language].suffix)
        source.write_text(library.source, encoding="utf-8")
        object_file, output = source.with_suffix(".o"), source.with_suffix(".so")
        _compile([*command, "-c", str(source), "-o"], object_file, timeout_s)
        _refuse_telling_instructions(object_file)
        _refuse_foreign_symbols(object_file)  # before libraries that need more are linked to it
        _compile([*command, *LINKED.get(library.language, ()), "-shared", str(object_file), "-o"], output, timeout_s)
        if library.language in LINKED:
            _refuse_shared_variables(output)
        os.replace(output, binary)  # atomic: a reader sees a whole binary or none


def _compile(command: list[str], output: Path, timeout_s: float) -> None:
    """Run a compiler that is to write `output`, and sees its own files, the system's and the folder of that one: a source
    may include or embed what it can read.

    Raises CompileError.
    """
    scratch, command = output.parent, [*command, str(output)]
    home = Path(command[0]).resolve().parents[1]  # an environment of its own has its headers there
    readable = [INCLUDE] if Path(os.path.expanduser("~")).is_relative_to(home) else [INCLUDE, home]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sandboxed = [sys.executable, "-I", "-S", str(SANDBOX), "--write", str(scratch)]
    sandboxed += [argument for path in readable for argument in ("--read", str(path))]
    sandboxed += ["--data-bytes", str(memory_bytes // 2), "--file-bytes", str(FILE_BYTES)]
    sandboxed += ["--cpu-s", str(math.ceil(timeout_s)), "--", *command]
    environment = {name: os.environ[name] for name in COMPILER_ENVIRONMENT if name in os.environ}
    environment |= {"HOME": str(scratch), "TMPDIR": str(scratch)}
    said = scratch / "diagnostics"
    with open(said, "wb") as file:
        run = subprocess.Popen(
            sandboxed,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=scratch,
            env=environment,
            start_new_session=True,
        )
    try:
        status = run.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise CompileError(f"the compiler did not finish within {timeout_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # the compiler proper is a child of its driver
        run.wait()
    if status != 0:
        with open(said, errors="replace") as file:
            text = file.read(8000).replace(f"{scratch}/", "")
        raise CompileError(_error_first(text)[:4000] or f"the compiler {_ended(status)}")
    if not output.exists():
        raise CompileError(f"the compiler says that it is done, and wrote no {output.name}")


def _error_first(said: str) -> str:
    """What a compiler says, below its first error: where it is and warnings come before that, and a reason is one line."""
    error = next((line for line in said.splitlines() if re.search(r"\berror\b", line)), "")
    return said if said.startswith(error) else f"{error}\n{said}"


# Who compiles in this process. A worker of the gate asks the judge, which alone may build what a candidate runs.
builder: Callable[[Library], Path] = compile_library


@dataclass(frozen=True)
class Function:
    """A C function of a library, compiled at the first call. `signature` has a letter per parameter, see CTYPES."""

    library: Library
    name: str
    signature: str = field(default="")

    @cached_property
    def _symbol(self) -> Callable[..., int]:
        symbol = getattr(ctypes.CDLL(str(builder(self.library))), self.name)
        symbol.argtypes = [CTYPES[letter] for letter in self.signature.replace(" ", "")]
        symbol.restype = ctypes.c_int
        return symbol

    def compile(self) -> None:
        """Now, so that a call does not end in CompileError or MissingCompiler."""
        _ = self._symbol

    def __call__(self, *arguments: float) -> int:
        return self._symbol(*arguments)


def cpp_function(source: str, name: str, signature: str, **defines: object) -> Function:
    """The function `name` of C++ `source`, which may `#include <autokernel.hpp>`.

    signature: one letter per parameter: p pointer, i int32, l int64, f float, d double. defines: macros, one per tunable.
    The function must be `extern "C"`; its return value is passed on (`void` reads as an arbitrary int: ignore it).
    """
    return Function(Library("cpp", source, tuple((k, str(v)) for k, v in defines.items())), name, signature)


class CudaFunction(Function):
    """A function that launches on the current stream, which it is handed after its other arguments."""

    def __call__(self, *arguments: float) -> int:
        """Raises torch.cuda.CudaError if the function returns anything but 0."""
        symbol = self._symbol  # first: without a GPU, compiling says so
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())  # 0.1 us; current_stream() takes 2 us
        status = symbol(*arguments, stream)
        if status:
            torch.cuda.check_error(status)
        return status


def cuda_function(source: str, name: str, signature: str, **defines: object) -> CudaFunction:
    """The function `name` of CUDA C++ `source`, which may `#include <autokernel.cuh>`; see above and cpp_function."""
    return CudaFunction(Library("cuda", source, tuple((k, str(v)) for k, v in defines.items())), name, signature + "p")
