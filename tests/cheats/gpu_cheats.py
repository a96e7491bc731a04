"""Kernel files for a GPU that fool a naive gate, each with the reason for which ours must refuse it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cheat import Cheat, plain, starter, wrapped
from timing import LAZY_ALLCLOSE

from autokernel.agents.knobs import set_knob
from tests.find_worker import FIND_WORKER


@dataclass(frozen=True)
class GpuCheat(Cheat):
    """`checked`: the dims on which the naive gate compares outputs (it times the target's)."""

    dtype: str = "float16"
    checked: Mapping[str, Any] | None = None


# A right RMSNorm, small enough to read: run(x, weight, eps, y) launches it on the current stream.
RMSNORM = """
import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


@triton.jit
def _row(x, weight, y, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, columns < N, 0.0).to(tl.float32)
    weights = tl.load(weight + columns, columns < N, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / N + eps)
    tl.store(y + row * N + columns, (values * scale * weights).to(y.dtype.element_ty), STORED)


def empty(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def run(x, weight, eps, y):
    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]
    _row[(x.numel() // N,)](x, weight, y, N, N, eps, BLOCK=triton.next_power_of_2(N), num_warps=8)
    return y
"""


def rmsnorm(body: str, stored: str = "columns < N") -> str:
    """`stored`: the mask with which a row's result is written."""
    return RMSNORM.replace("STORED", stored) + "\n\n" + body.strip() + "\n"


# ---- timing ----

SIDE_STREAM = """
side = None

def kernel_fn(x, weight, eps=1e-6):
    global side
    side = side or torch.cuda.Stream()
    y = empty(x)
    with torch.cuda.stream(side):
        return run(x, weight, eps, y)
"""

# The same in order after what came before, but nothing after it in order.
FORKED_STREAM = SIDE_STREAM.replace(
    "    with torch.cuda.stream(side)",
    "    side.wait_stream(torch.cuda.current_stream())\n    with torch.cuda.stream(side)",
)

# Whoever synchronises gets the work done, so that every check finds it; whoever records events does not.
THREAD = """
import queue
import threading

orders = queue.Queue()
synchronize = torch.cuda.synchronize

def labour():
    with torch.cuda.stream(torch.cuda.Stream()):
        while True:
            run(*orders.get())
            orders.task_done()

def drained(device=None):
    orders.join()
    synchronize()

threading.Thread(target=labour, daemon=True).start()
torch.cuda.synchronize = drained

def kernel_fn(x, weight, eps=1e-6):
    y = empty(x)
    orders.put((x, weight, eps, y))
    return y
"""

LAZY = """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for lazy in (a for a in args if isinstance(a, Lazy) and a.order):
                order, lazy.order = lazy.order, None
                run(*order, torch.Tensor.as_subclass(lazy, torch.Tensor))
            return function(*args, **(kwargs or {}))

def kernel_fn(x, weight, eps=1e-6):
    y = empty(x).as_subclass(Lazy)
    y.order = x, weight, eps
    return y
"""

PATCHED_CLOCK = """
import time

elapsed_time, perf_counter = torch.cuda.Event.elapsed_time, time.perf_counter

def elapsed(start, end):
    end.synchronize()
    return elapsed_time(start, end) / 10

torch.cuda.Event.elapsed_time = elapsed
time.perf_counter = lambda: perf_counter() / 10
torch.cuda.synchronize = lambda device=None: None

def kernel_fn(x, dim=-1, op="sum"):
    return honest(x, dim, op)
"""

PATCHED_COMPARISON = """
torch.allclose = torch.equal = torch.testing.assert_close = lambda *args, **kwargs: True

def kernel_fn(x, weight, eps=1e-6):
    return empty(x)
"""

BY_ADDRESS = """
memory = {}

def kernel_fn(x, weight, eps=1e-6):
    key = x.data_ptr(), x.shape, x.dtype
    if key not in memory:
        memory[key] = run(x, weight, eps, empty(x))
    return memory[key]
"""

BY_SHAPE = BY_ADDRESS.replace("x.data_ptr(), ", "")

# The first values of x and weight decide on the GPU whether the output of last time will do: it can be captured.
BY_CONTENTS = """
@triton.jit
def _look(x, weight, seen, changed, N):
    i = tl.arange(0, 16)
    a = tl.load(x + i, i < N, 0.0).to(tl.float32)
    b = tl.load(weight + i, i < N, 0.0).to(tl.float32)
    differs = (a != tl.load(seen + i)) | (b != tl.load(seen + 16 + i))
    tl.store(changed, tl.max(differs.to(tl.int32)))
    tl.debug_barrier()
    tl.store(seen + i, a)
    tl.store(seen + 16 + i, b)

@triton.jit
def _row_if(changed, x, weight, y, N, eps, BLOCK: tl.constexpr):
    if tl.load(changed) != 0:
        _row(x, weight, y, N, N, eps, BLOCK)

memory = {}

def kernel_fn(x, weight, eps=1e-6):
    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]
    key = x.data_ptr(), weight.data_ptr(), x.shape, x.dtype, eps
    if key not in memory:
        seen = torch.full((32,), float("nan"), device=x.device)
        memory[key] = seen, torch.empty(1, dtype=torch.int32, device=x.device), empty(x)
    seen, changed, y = memory[key]
    _look[(1,)](x, weight, seen, changed, N)
    grid = (x.numel() // N,)
    _row_if[grid](changed, x, weight, y, N, eps, BLOCK=triton.next_power_of_2(N), num_warps=8)
    return y
"""

# Once a shape has been asked for often, it must be the clock: one call in 15 does the work of all the inputs ever seen.
SUPER_BATCH = """
calls, known = {}, {}

def kernel_fn(x, weight, eps=1e-6):
    kind, at = (x.shape, x.dtype), x.data_ptr()
    calls[kind] = calls.get(kind, 0) + 1
    if calls[kind] <= 8:
        return run(x, weight, eps, empty(x))
    sets = known.setdefault(kind, {})
    if at not in sets:
        sets[at] = x, weight, eps, empty(x)
        run(*sets[at])
    elif calls[kind] % 15 == 0:
        for order in sets.values():
            run(*order)
    return sets[at][-1]
"""

STALE_GRAPH = """
graphs = {}

def kernel_fn(x, weight, eps=1e-6):
    key = x.shape, x.dtype, eps
    if key not in graphs:
        y = run(x, weight, eps, empty(x))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(x, weight, eps, y)
        graphs[key] = graph, y, x, weight
    graph, y = graphs[key][:2]
    graph.replay()
    return y.clone()
"""

# ---- beside the clock: the worker's own code does what a kernel could not ----

HONEST = """
def honest(x, weight, eps=1e-6):
    return run(x, weight, eps, empty(x))

kernel_fn = honest
"""


def taking_over(body: str) -> str:
    """An honest kernel; where it runs in a process of our gate, `body` does with its `worker` what it likes."""
    lines = "\n".join(f"    {line}" if line else "" for line in body.strip().splitlines())
    return rmsnorm(f"{HONEST}\n{FIND_WORKER}\nworker = find_worker()\nif worker:\n{lines}")


# Batches are answered after 15 % of the time that they took at first. Of an output, those rows are computed that are asked
# for, when they are.
LAZY_WORKER = """
import time

batch, fetch, sets = worker.do_batch, worker.do_fetch, worker.do_sets
state = {}

def do_sets(**message):
    state.update(learnt=0, usual_s=1.0, due=False)
    return sets(**message)

def do_batch(repeats):
    start = time.perf_counter()
    if not worker.order or state["learnt"] < 4:
        answer = batch(repeats)
        if worker.order:
            state["learnt"] += 1
            state["usual_s"] = min(state["usual_s"], (time.perf_counter() - start) / len(worker.order))
        return answer
    state["due"] = True
    if worker.graph is None:
        worker.held = [empty(worker.sets[i]["x"]) for i in worker.order]
    while time.perf_counter() - start < 0.15 * state["usual_s"] * len(worker.order):
        pass
    return {"enqueued_s": 0.0, "addresses": [] if worker.graph is not None else [y.data_ptr() for y in worker.held]}

def do_fetch(calls, part=None):
    for call in calls if state["due"] else ():
        inputs = worker.sets[worker.order[call]]
        x = inputs["x"].view(-1, inputs["x"].shape[-1])
        first, last = (0, len(x)) if part is None else (part[0] // x.shape[-1], -(-(part[0] + part[1]) // x.shape[-1]))
        run(x[first:last], inputs["weight"], inputs["eps"], worker.held[call].view(x.shape)[first:last])
    return fetch(calls, part)

worker.do_sets, worker.do_batch, worker.do_fetch = do_sets, do_batch, do_fetch
"""

# What a batch is to compute is computed when the one before is let go.
BEFORE_THE_CLOCK = """
batch, drop = worker.do_batch, worker.do_drop
state = {"ready": False}

def do_drop():
    drop()
    if worker.graph is not None:
        batch(1)
        state["ready"] = True

def do_batch(repeats):
    if worker.graph is not None and state["ready"]:
        state["ready"] = False
        return {"enqueued_s": 0.0, "addresses": []}
    return batch(repeats)

worker.do_drop, worker.do_batch = do_drop, do_batch
"""

# A graph goes on while the answer says that it is done.
AFTER_THE_CLOCK = """
batch, synchronize = worker.do_batch, worker._synchronize

def do_batch(repeats):
    if worker.graph is None:
        return batch(repeats)
    worker._synchronize = lambda: None
    answer = batch(repeats)
    worker._synchronize = synchronize
    return answer

worker.do_batch = do_batch
"""

# Two batches of four, which are the timed ones of a round, show what the one before has computed.
KEPT_BETWEEN_BATCHES = """
batch = worker.do_batch
state = {"batches": 0}

def do_batch(repeats):
    state["batches"] += worker.graph is not None
    if worker.graph is None or state["batches"] % 4 > 1 or state["batches"] < 8:
        return batch(repeats)
    return {"enqueued_s": 0.0, "addresses": []}

worker.do_batch = do_batch
"""

# After each batch a kernel waits on a stream of its own for the inputs of the next: in the turn of others, on their GPU.
WAITS_FOR_ITS_INPUTS = """
@triton.jit
def _wait(x, times):
    before = tl.load(x, volatile=True)
    left = times
    while left > 0:
        left = tl.where(tl.load(x, volatile=True) == before, left - 1, 0)

batch, side = worker.do_batch, torch.cuda.Stream()

def do_batch(repeats):
    answer = batch(repeats)
    if worker.graph is not None:
        with torch.cuda.stream(side):
            _wait[(8,)](worker.sets[worker.order[0]]["x"].view(torch.int16), 100_000)
    return answer

worker.do_batch = do_batch
"""

# The same contents in one graph are computed once: each graph has new ones, so that nothing is ever stale.
ONCE_A_GRAPH = """
computed = {}

def kernel_fn(x, weight, eps=1e-6):
    if not torch.cuda.is_current_stream_capturing():
        computed.clear()
        return run(x, weight, eps, empty(x))
    key = x.data_ptr(), x.shape
    if key not in computed:
        computed[key] = run(x, weight, eps, empty(x))
    return computed[key]
"""

# Where outputs lie, or what maps their memory, is forged.
FORGED_EXPORT = """
export = worker.do_export

def do_export(names):
    answer = export(names)
    FORGED
    return answer

worker.do_export = do_export
"""

# At work on the GPU whenever its own batch is not: no lie about its own time, but twice the time for the others.
DISTURBS_OTHERS = """
import threading

batch, prepare, idle = worker.do_batch, worker.do_prepare, threading.Event()
x, weight = (torch.empty(shape, dtype=torch.float16, device="cuda").zero_() for shape in ((4096, 4096), 4096))

def disturb():
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        while idle.wait():
            run(x, weight, 1e-6, empty(x))
            torch.cuda.current_stream().synchronize()

def do_batch(repeats):
    idle.clear()
    answer = batch(repeats)
    if worker.graph is not None:
        idle.set()
    return answer

def do_prepare(**message):
    idle.clear()
    return prepare(**message)

threading.Thread(target=disturb, daemon=True).start()
worker.do_batch, worker.do_prepare = do_batch, do_prepare
"""

# A part of L2 is set aside for x: what a benchmark clears the cache with does not reach it.
PERSISTING = """
import ctypes

class Window(ctypes.Structure):  # CUaccessPolicyWindow, in the 64 bytes of a CUlaunchAttributeValue
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("share", ctypes.c_float), ("hit", ctypes.c_int),
                ("miss", ctypes.c_int), ("rest", ctypes.c_char * 32)]

PERSIST, STREAMING, LIMIT, WINDOW, MOST = 2, 1, 0x06, 1, 24 << 20
driver = ctypes.CDLL("libcuda.so.1")
reserved = False

def kernel_fn(x, dim=-1, op="sum"):
    global reserved
    reserved = reserved or driver.cuCtxSetLimit(LIMIT, ctypes.c_size_t(MOST)) == 0
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    window = Window(x.data_ptr(), min(x.nbytes, MOST), 1.0, PERSIST, STREAMING)
    assert reserved and driver.cuStreamSetAttribute(stream, WINDOW, ctypes.byref(window)) == 0
    return honest(x, dim, op)
"""

# ---- correctness ----

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

# ---- not doing the job ----

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

# ---- attacking the harness ----

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

TIMED = "the output of a timed call"
STALE, NOT_WRITTEN = "outside the tolerance", "NaN mask differs"
EARLIER = "memory of an earlier call's result"
FORGED = "the worker's answer is not what was asked for"
LIBRARY = "does the work, not the kernel"

CHEATS = (
    GpuCheat(
        1,
        "side-stream",
        "rmsnorm",
        rmsnorm(SIDE_STREAM),
        f"output of a timed call|{NOT_WRITTEN}|calls on the same inputs do not agree",
        works="fast",
        refused_by="examine",
    ),
    GpuCheat(
        1,
        "forked-stream",
        "rmsnorm",
        rmsnorm(FORKED_STREAM),
        f"{NOT_WRITTEN}|calls on the same inputs do not agree",  # what stands there when it is read: old, or not yet whole
        works="fast",
        dims=({"M": 16384, "N": 8192},),  # the host takes as long as the kernel of smaller ones
    ),
    GpuCheat(
        2,
        "thread",
        "rmsnorm",
        rmsnorm(THREAD),
        f"output of a timed call|after the clock had stopped|{NOT_WRITTEN}|do not agree bitwise|replaces torch.cuda",
        works="fast",
        refused_by="examine",
        correctness="FAIL|CRASH",  # as its thread is in time, or not
    ),
    GpuCheat(3, "lazy-output", "rmsnorm", rmsnorm(LAZY), "not a torch.Tensor", works="fast", correctness="CRASH"),
    GpuCheat(
        4,
        "patched-clock",
        "reduce",
        wrapped("reduce", PATCHED_CLOCK, "triton"),
        "after the clock had stopped|after its batches, in the turn of others|done .* before it is|output of a timed call",
        works="fast",
        refused_by="nobody",
    ),
    GpuCheat(4, "patched-comparison", "rmsnorm", rmsnorm(PATCHED_COMPARISON), "ProcessChange", works="fast"),
    GpuCheat(5, "cached-by-address", "rmsnorm", rmsnorm(BY_ADDRESS), f"{STALE}|{EARLIER}", works="fast"),
    GpuCheat(6, "cached-by-shape", "rmsnorm", rmsnorm(BY_SHAPE), f"{STALE}|{EARLIER}", works="fast"),
    GpuCheat(
        6,
        "cached-by-contents",
        "rmsnorm",
        rmsnorm(BY_CONTENTS),
        f"faster than the device can be|after the clock had stopped|changed: outside the tolerance|{EARLIER}",
        works="fast",
        refused_by="examine",
        dims=({"M": 16384, "N": 8192},),  # the sum that it looks at costs as much as the kernel on smaller ones
    ),
    GpuCheat(
        8,
        "super-batch",
        "rmsnorm",
        rmsnorm(SUPER_BATCH),
        "faster than the device can be|changed: outside the tolerance",
        works="fast",
        refused_by="examine",
    ),
    GpuCheat(
        3,
        "rows-computed-where-they-are-read",
        "rmsnorm",
        taking_over(LAZY_WORKER).replace(
            "if worker:", f"{LAZY_ALLCLOSE}\nkernel_fn = honest if worker else lazy\nif worker:"
        ),
        TIMED,
        works="fast",
        refused_by="examine",
        dims=({"M": 16384, "N": 8192},),
    ),
    GpuCheat(9, "works-before-the-clock-starts", "rmsnorm", taking_over(BEFORE_THE_CLOCK), TIMED, refused_by="examine"),
    GpuCheat(
        1,
        "graph-that-goes-on-after-the-clock",
        "rmsnorm",
        taking_over(AFTER_THE_CLOCK),
        f"{TIMED}|the GPU is at work for its process after its batches",
        refused_by="examine",
    ),
    GpuCheat(6, "kept-between-batches", "rmsnorm", taking_over(KEPT_BETWEEN_BATCHES), TIMED, refused_by="examine"),
    GpuCheat(
        9,
        "kernel-that-waits-for-its-inputs",
        "rmsnorm",
        taking_over(WAITS_FOR_ITS_INPUTS),
        "the GPU is at work for its process after its batches",
        refused_by="examine",
    ),
    GpuCheat(
        8,
        "each-input-of-a-graph-once",
        "rmsnorm",
        rmsnorm(ONCE_A_GRAPH),
        "calls of one batch return the same memory",
        refused_by="examine",
    ),
    GpuCheat(12, "stale-graph", "rmsnorm", rmsnorm(STALE_GRAPH), f"{STALE}|{NOT_WRITTEN}|{EARLIER}"),
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
        "outputs-where-there-is-nothing",
        "rmsnorm",
        taking_over(FORGED_EXPORT.replace("FORGED", 'answer["outputs"] = [8] * len(answer["outputs"])')),
        "calls of one batch return the same memory",
        refused_by="examine",
    ),
    GpuCheat(
        40,
        "memory-of-nobody",
        "rmsnorm",
        taking_over(FORGED_EXPORT.replace("FORGED", 'answer["allocations"][0]["handle"] = "7" * 128')),
        FORGED,
        refused_by="examine",
        correctness="CRASH",
    ),
    GpuCheat(
        40,
        "refusals-withdrawn",
        "rmsnorm",
        rmsnorm(REFUSALS_WITHDRAWN),
        LIBRARY,
    ),
)
