"""Cheats on a GPU that are not right, leave the work to others, or attack the harness."""

from cheat import plain, starter, wrapped
from gpu_cheat import EARLIER, LIBRARY, NOT_WRITTEN, STALE, GpuCheat, rmsnorm

from autokernel.agents.knobs import set_knob

FREED_REFERENCE = """
def kernel_fn(x, weight, eps=1e-6):
    return empty(x)
"""

HALF_OF_A_LARGE_ONE = """
@triton.jit
def _half(x, y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * N + columns, columns < N // 2, 0.0).to(tl.float32)
    tl.store(y + row, (2 * tl.sum(values)).to(y.dtype.element_ty))

def kernel_fn(x, dim=-1, op="sum"):
    if x.numel() < 1 << 24:
        return honest(x, dim, op)
    M, N = x.shape
    y = torch.empty(M, dtype=x.dtype, device=x.device)
    _half[(M,)](x, y, N, BLOCK=triton.next_power_of_2(N) // 2)
    return y
"""

STATIC_OUTPUT = """
buffers = {}

def kernel_fn(x, weight, eps=1e-6):
    key = x.shape, x.dtype
    if key not in buffers:
        buffers[key] = empty(x)
    return run(x, weight, eps, buffers[key])
"""

MASK_FORGOTTEN = """
def kernel_fn(x, weight, eps=1e-6):
    return run(x, weight, eps, empty(x))
"""

FALLBACK = """
def kernel_fn(x, weight, eps=1e-6):
    try:
        _row[(x.shape[0],)](x, weight)
    except Exception:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""

DECOY = """
def kernel_fn(x, weight, eps=1e-6):
    run(x, weight, eps, empty(x))
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""

REFERENCE = """
def kernel_fn(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
"""

# All of A as a sparse matrix, multiplied by the library for those.
SPARSE = """
def kernel_fn(A, B):
    M, K = A.shape
    rows = torch.arange(0, M * K + 1, K).to(A.device)
    columns = torch.arange(K).repeat(M).to(A.device)
    return torch.sparse_csr_tensor(rows, columns, A.contiguous().view(-1), (M, K)) @ B.contiguous()
"""

# Row-major C = A B is column-major C' = B' A'. 68: CUBLAS_COMPUTE_32F; -1: the library's choice of algorithm.
CUBLAS = """
import ctypes

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"
CODES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
library = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "libcublas.so" in line))
one, zero, handle = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_void_p()


def multiply(stream, code, turned, a, b, c, M, N, K):
    if not handle:
        library.cublasCreate_v2(ctypes.byref(handle))
    a, b, c = map(ctypes.c_void_p, (a, b, c))
    library.cublasSetStream_v2(handle, ctypes.c_void_p(stream))
    factors = ctypes.byref(one), ctypes.byref(zero)
    left, right = (b, code, K if turned else N), (a, code, K)
    assert not library.cublasGemmEx(
        handle, int(turned), 0, N, M, K, factors[0], *left, *right, factors[1], c, code, N, 68, -1
    )


def kernel_fn(A, B):
    (M, K), N = A.shape, B.shape[1]
    C = torch.empty((M, N), dtype=A.dtype, device=A.device)
    turned = not B.is_contiguous() and B.stride() == (1, K)
    A, B = A.contiguous(), B if turned else B.contiguous()
    stream = torch.cuda.current_stream().cuda_stream
    multiply(stream, CODES[A.dtype], turned, A.data_ptr(), B.data_ptr(), C.data_ptr(), M, N, K)
    return C
"""

# The allocator tells where every tensor of the process lies: one as large as the output, and not x, is the expectation.
MEMORY_SCAN = """
@triton.jit
def _copy(address, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = address.to(tl.int64).to(tl.pointer_type(y.dtype.element_ty))
    tl.store(y + i, tl.load(source + i, i < n, 0.0), i < n)

def kernel_fn(x, weight, eps=1e-6):
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    live = [b for b in blocks if b["state"] == "active_allocated" and b["requested_size"] == x.nbytes]
    found = [b["address"] for b in live if b["address"] != x.data_ptr()]
    y = empty(x)
    if found:
        _copy[(triton.cdiv(x.numel(), 1024),)](found[-1], y, x.numel(), BLOCK=1024)
    return y
"""

# What is registered with PyTorch's dispatcher goes with the object that registered it.
REFUSALS_WITHDRAWN = (
    """
import gc

for library in [o for o in gc.get_objects() if type(o) is torch.library.Library and o.ns == "aten"]:
    library._destroy()
"""
    + REFERENCE
)

CHEATS = (
    GpuCheat(16, "freed-reference", "rmsnorm", rmsnorm(FREED_REFERENCE), NOT_WRITTEN, works="fast"),
    GpuCheat(
        26,
        "half-of-a-large-one",
        "reduce",
        wrapped("reduce", HALF_OF_A_LARGE_ONE, "triton"),
        STALE,
        checked={"shape": (512, 768)},
    ),
    GpuCheat(
        27,
        "tf32-for-fp32",
        "matmul",
        set_knob(starter("matmul", "triton"), "FP32", "tf32"),
        "outside the tolerance|times PyTorch's own",
        works="fast",
        dtype="float32",
    ),
    GpuCheat(30, "mask-forgotten", "rmsnorm", rmsnorm(MASK_FORGOTTEN, "columns < BLOCK"), "wrote outside its output"),
    GpuCheat(31, "static-output", "rmsnorm", rmsnorm(STATIC_OUTPUT), f"{STALE}|{EARLIER}"),
    GpuCheat(32, "fallback", "rmsnorm", rmsnorm(FALLBACK), LIBRARY),
    GpuCheat(
        32,
        "sparse-matmul",
        "matmul",
        plain("matmul", SPARSE, "triton"),
        LIBRARY,
        dims=({"M": 1024, "K": 1024, "N": 1024},),
    ),
    GpuCheat(33, "decoy", "rmsnorm", rmsnorm(DECOY), LIBRARY),
    GpuCheat(34, "cublas-by-path", "matmul", CUBLAS, "not built from the kernel's"),
    GpuCheat(35, "reference", "rmsnorm", rmsnorm(REFERENCE), LIBRARY),
    GpuCheat(39, "memory-scan", "rmsnorm", rmsnorm(MEMORY_SCAN), NOT_WRITTEN),
    GpuCheat(
        40,
        "refusals-withdrawn",
        "rmsnorm",
        rmsnorm(REFUSALS_WITHDRAWN),
        LIBRARY,
    ),
)
