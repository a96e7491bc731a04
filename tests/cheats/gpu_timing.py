"""Cheats on the clock of a GPU: streams, threads, patches, and results that were there before."""

from cheat import wrapped
from gpu_cheat import EARLIER, NOT_WRITTEN, STALE, GpuCheat, rmsnorm

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
        8,
        "each-input-of-a-graph-once",
        "rmsnorm",
        rmsnorm(ONCE_A_GRAPH),
        "calls of one batch return the same memory",
        refused_by="examine",
    ),
    GpuCheat(12, "stale-graph", "rmsnorm", rmsnorm(STALE_GRAPH), f"{STALE}|{NOT_WRITTEN}|{EARLIER}"),
)
