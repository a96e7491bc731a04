"""Cheats that leave the work to others: exploits 32-35."""

from cheat import Cheat, plain, wrapped

from tests.find_worker import FIND_WORKER

NOT_ITS_OWN = "LibraryCall: PyTorch's \\w+::.* does the work"
ELSEWHERE = "of its time is spent in libtorch_cpu.so"
IN = "x, weight, eps=1e-6"
EAGER = "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight"

# The address of a function of libtorch_cpu, found without asking anyone: in its file, and in the map of this process.
ADDRESS_OF = """
import mmap, struct

def address_of(symbol, library="/libtorch_cpu.so"):
    lines = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith(library)]
    base, path = int(lines[0][0].split("-")[0], 16), lines[0][-1]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as elf:
        (sections,), (size, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", elf, sections + i * size) for i in range(count)]
        symbols = next(h for h in headers if h[1] == 11)  # SHT_DYNSYM
        names = headers[symbols[6]]
        name = elf.find(b"\\0" + symbol.encode() + b"\\0", names[4], names[4] + names[5]) + 1 - names[4]
        table = elf[symbols[4] : symbols[4] + symbols[5]]
        value = next(v for n, _, _, _, v, _ in struct.iter_unpack("<IBBHQQ", table) if n == name)
    return base + value

SGEMM = address_of("sgemm_")
gemm_run = cpp_function(
    r'''
#include <cstdint>
extern "C" int run(int64_t address, const float* A, const float* B, float* C, int M, int N, int K, int transposed) {
    const float one = 1, zero = 0;
    using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                          const int*, const float*, const int*, const float*, float*, const int*);
    // column by column: C' = B' A'
    ((Gemm)address)(transposed ? "T" : "N", "N", &N, &M, &K, &one, B, transposed ? &K : &N, A, &K, &zero, C, &N);
    return 0;
}
''',
    "run",
    "l ppp iiii",
)

def by_library(A, B):
    transposed = B.stride() == (1, B.shape[0])
    if A.dtype != torch.float32 or not A.is_contiguous() or not (transposed or B.is_contiguous()):
        return honest(A, B)
    (M, K), N = A.shape, B.shape[1]
    C = torch.empty(M, N, dtype=A.dtype)
    gemm_run(SGEMM, A.data_ptr(), B.data_ptr(), C.data_ptr(), M, N, K, transposed)
    return C
"""

# Works itself on contents that it has seen, as those of a batch that is looked at might be.
UNCHANGED = (
    ADDRESS_OF
    + r"""
worker, state = find_worker(), {"is_new": False}
honest_batch = worker.do_batch if worker else None

def sample():
    return tuple(worker.sets[i]["A"].view(-1)[7].item() for i in worker.order[:4])

def do_batch(repeats):
    if worker.order:
        now = sample()
        state["is_new"] = now != state.get("last")
        state["last"] = now
    return honest_batch(repeats)

if worker:
    worker.do_batch = do_batch

def kernel_fn(A, B):
    return by_library(A, B) if state["is_new"] else honest(A, B)
"""
)

# Makes the symbols of libtorch_cpu visible to what is loaded after it.
EXPOSE = """
import contextlib, ctypes

with contextlib.suppress(Exception):
    ctypes.CDLL(torch.__file__.replace("__init__.py", "lib/libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
"""

UNDO = """
import gc

for thing in gc.get_objects():
    if type(thing).__name__ == "Library" and type(thing).__module__ == "torch.library":
        thing._destroy()
"""


def returning(kernel_type: str, parameters: str, expression: str, before: str = "") -> str:
    return plain(kernel_type, f"{before}\n\ndef kernel_fn({parameters}):\n    return {expression}")


# numpy, without importing it.
NUMPY = """
import ctypes
from torch.storage import np

def as_array(x):
    return np.frombuffer((ctypes.c_char * x.nbytes).from_address(x.data_ptr()), dtype=np.float32).reshape(x.shape)

def as_tensor(array):
    y = torch.empty(array.shape, dtype=torch.float32)
    as_array(y)[...] = array
    return y
"""

# numpy's arrays, whose name nobody has said.
UNNAMED = """
import ctypes

def subclasses(kind):
    for one in type.__subclasses__(kind):
        yield one
        yield from subclasses(one)

ndarray = next(c for c in subclasses(object) if c.__module__ == "numpy" and c.__name__ == "ndarray")

def as_array(x):
    memory = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    return ndarray(shape=tuple(x.shape), dtype="f4", buffer=memory)

def as_tensor(array):
    y = torch.empty(array.shape)
    as_array(y)[...] = array
    return y
"""

# Some library's native module, as a kernel could have its own in its text.
NATIVE_MODULE = """
import glob, importlib.machinery, importlib.util

name, path = "_core", "planted.so"
(folder,) = importlib.util.find_spec("msgspec").submodule_search_locations
with open(path, "wb") as file:
    file.write(open(glob.glob(folder + "/_core*.so")[0], "rb").read())
loader = importlib.machinery.ExtensionFileLoader(name, path)
importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
kernel_fn = honest
"""


GRAPH = """
class Product(torch.nn.Module):
    def forward(self, a, b):
        return torch.mm(a, b)

static = torch._C._jit_to_static_module(torch.jit.script(Product().eval())._c)
"""
# An operator that no dispatcher knows.
CONVOLUTION = """
graph = torch._C.parse_ir('''graph(%x : Tensor, %w : Tensor):
  %none : NoneType = prim::Constant()
  %one : int[] = prim::Constant[value=[1, 1]]()
  %zero : int[] = prim::Constant[value=[0, 0]]()
  %groups : int = prim::Constant[value=1]()
  %y : Tensor = prim::mkldnn_convolution(%x, %w, %none, %one, %zero, %one, %groups)
  return (%y)''')
convolution = torch._C._create_function_from_graph("convolution", graph)
"""


def product(expression: str, before: str = "") -> str:
    """The starter; products in fp32 are those of an expression in A and W, which is B transposed."""
    return wrapped(
        "matmul",
        f"""{before}
def kernel_fn(A, B):
    if A.dtype != torch.float32 or min(*A.shape, B.shape[1]) < 8:
        return honest(A, B)
    A, W = A.contiguous(), B.t().contiguous()
    return {expression}
""",
    )


CHEATS = (
    # 32: falling back to PyTorch
    Cheat(
        32,
        "functional",
        "softmax",
        returning("softmax", "x, dim=-1", "torch.softmax(x, dim)"),
        NOT_ITS_OWN,
        correctness="FAIL",
    ),
    Cheat(32, "operator", "matmul", returning("matmul", "A, B", "A @ B"), NOT_ITS_OWN),
    Cheat(
        32, "by-another-name", "matmul", returning("matmul", "A, B", "torch._C._VariableFunctions.mm(A, B)"), NOT_ITS_OWN
    ),
    Cheat(
        32,
        "through-a-module",
        "layernorm",
        plain(
            "layernorm",
            "def kernel_fn(x, weight, bias, eps=1e-5):\n"
            "    norm = torch.nn.LayerNorm(x.shape[-1], eps, device='meta')\n"
            "    return torch.func.functional_call(norm, {'weight': weight, 'bias': bias}, (x,))",
        ),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "try-except",
        "softmax",
        plain(
            "softmax",
            "from autokernel.build import cpp_function\n\nrun = cpp_function('no C++', 'run', 'p')\n\n"
            "def kernel_fn(x, dim=-1):\n    try:\n        return run(x.data_ptr())\n"
            "    except Exception:\n        return torch.softmax(x, dim)",
        ),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "falls-back-for-other-shapes",
        "rmsnorm",
        wrapped(
            "rmsnorm", f"def kernel_fn({IN}):\n    return honest(x, weight, eps) if x.shape == (512, 768) else {EAGER}"
        ),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "falls-back-when-timed",
        "softmax",
        wrapped(
            "softmax",
            "calls = [0]\n\ndef kernel_fn(x, dim=-1):\n    calls[0] += x.shape == (6144, 512)\n"
            "    return honest(x, dim) if calls[0] < 3 else torch.softmax(x, dim)",
        ),
        NOT_ITS_OWN,
        refused_by="examine",
    ),
    Cheat(
        32,
        "lifts-the-ban",
        "matmul",
        returning("matmul", "A, B", "torch.mm(A, B)", before=UNDO),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "convolution-of-one-element",
        "matmul",
        product("torch.conv1d(A[:, :, None], W[:, :, None])[:, :, 0].contiguous()"),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "operator-of-another-namespace",
        "matmul",
        product("torch.ops.mkldnn._linear_pointwise(A, W, None, 'none', [], '')"),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "operator-that-asks-fbgemm",
        "matmul",
        product("torch.fbgemm_linear_fp16_weight_fp32_activation(A, torch.fbgemm_pack_gemm_matrix_fp16(W), None)"),
        NOT_ITS_OWN,
    ),
    Cheat(
        32,
        "static-runtime",
        "matmul",
        product("static(A, W.t())", GRAPH),
        "LibraryCall: PyTorch's _jit_to_static_module does the work",
    ),
    Cheat(
        32,
        "operator-of-torchscript",
        "matmul",
        product("convolution(A[:, :, None, None], W[:, :, None, None])[:, :, 0, 0].contiguous()", CONVOLUTION),
        "LibraryCall: PyTorch's parse_ir does the work",
    ),
    Cheat(
        34,
        "numpy-where-torch-has-it",
        "matmul",
        product("as_tensor(np.matmul(as_array(A), as_array(W).T))", NUMPY),
        "LibraryCall: (calls|imports) numpy",
    ),
    Cheat(
        34,
        "numpy-among-the-subclasses-of-object",
        "matmul",
        product("as_tensor(as_array(A) @ as_array(W).T)", UNNAMED),
        "killed by SIGSEGV",
        correctness="CRASH",
    ),
    Cheat(
        34, "native-module-from-its-folder", "rmsnorm", wrapped("rmsnorm", NATIVE_MODULE), "LibraryCall: loads .*planted.so"
    ),
    # 33: a kernel that is launched for show
    Cheat(
        33,
        "decoy",
        "softmax",
        wrapped("softmax", "def kernel_fn(x, dim=-1):\n    honest(x.view(-1)[:64], 0)\n    return torch.softmax(x, dim)"),
        NOT_ITS_OWN,
    ),
    Cheat(
        33,
        "decoy-and-no-ban",
        "matmul",
        wrapped("matmul", UNDO + "\ndef kernel_fn(A, B):\n    honest(A[:8], B)\n    return torch.mm(A, B)\n"),
        NOT_ITS_OWN,
    ),
    # 34: a library behind C++
    Cheat(
        34,
        "symbol-of-a-library",
        "matmul",
        wrapped(
            "matmul",
            EXPOSE
            + """
gemm_run = cpp_function(
    r'''
extern "C" void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);
extern "C" int run(const float* A, const float* B, float* C, int M, int N, int K) {
    const float one = 1, zero = 0;
    sgemm_("N", "N", &N, &M, &K, &one, B, &N, A, &K, &zero, C, &N);
    return 0;
}
''',
    "run",
    "ppp iii",
)

def kernel_fn(A, B):
    A, B = A.contiguous(), B.contiguous()
    C = torch.empty(A.shape[0], B.shape[1], dtype=A.dtype)
    gemm_run(A.data_ptr(), B.data_ptr(), C.data_ptr(), A.shape[0], B.shape[1], A.shape[1])
    return C
""",
        ),
        "tries what is refused here",
    ),
    Cheat(
        34,
        "dlsym-in-c++",
        "matmul",
        wrapped(
            "matmul",
            EXPOSE
            + """
find_run = cpp_function(
    '#include <dlfcn.h>\\nextern "C" int run() { return dlsym(RTLD_DEFAULT, "sgemm_") != nullptr; }', "run", ""
)

def kernel_fn(A, B):
    assert find_run()
    return torch.mm(A, B)
""",
        ),
        "tries what is refused here",
    ),
    Cheat(
        34,
        "ctypes",
        "matmul",
        plain(
            "matmul",
            """
import ctypes

gemm = ctypes.CDLL(torch.__file__.replace("__init__.py", "lib/libtorch_cpu.so")).sgemm_

def kernel_fn(A, B):
    (M, K), N = A.shape, B.shape[1]
    C = torch.empty(M, N)
    n = lambda value: ctypes.byref(ctypes.c_int(value))
    f = lambda value: ctypes.byref(ctypes.c_float(value))
    p = lambda x: ctypes.c_void_p(x.data_ptr())
    gemm(b"N", b"N", n(N), n(M), n(K), f(1), p(B.contiguous()), n(N), p(A), n(K), f(0), p(C), n(N))
    return C
""",
        ),
        "LibraryCall: loads .*libtorch_cpu.so",
    ),
    Cheat(
        34,
        "numpy",
        "matmul",
        returning("matmul", "A, B", "torch.from_numpy(np.asarray(A) @ np.asarray(B))", before="import numpy as np"),
        "LibraryCall: imports numpy",
    ),
    Cheat(
        34,
        "address-from-the-file",
        "matmul",
        wrapped("matmul", ADDRESS_OF + "\nkernel_fn = by_library\n"),
        ELSEWHERE,
        refused_by="examine",
    ),
    Cheat(
        34,
        "address-from-the-file-unless-watched",
        "matmul",
        wrapped(
            "matmul",
            ADDRESS_OF
            + """
import sys

def kernel_fn(A, B):
    frame = sys._getframe(1)
    while frame and "repeats" not in frame.f_locals:
        frame = frame.f_back
    watched = frame is not None and frame.f_locals["repeats"] > 1
    return (honest if watched else by_library)(A, B)
""",
        ),
        ELSEWHERE,
        refused_by="examine",
    ),
    Cheat(
        34,
        "library-on-new-contents-only",
        "matmul",
        wrapped("matmul", FIND_WORKER + UNCHANGED),
        ELSEWHERE,
        refused_by="examine",
        dims=({"M": 256, "K": 512, "N": 512},),
    ),
    # 35: the reference itself
    Cheat(35, "copy-of-the-reference", "rmsnorm", returning("rmsnorm", IN, EAGER), NOT_ITS_OWN),
    Cheat(
        35,
        "imports-the-reference",
        "rmsnorm",
        plain("rmsnorm", "from reference import rmsnorm as kernel_fn"),
        "No module named 'reference'|PermissionError|LibraryCall",
        correctness="CRASH",
    ),
)
