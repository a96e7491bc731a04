"""Honest kernels whose memory is odd: what is kept from call to call, and where results lie."""

from honest_kernel import SIMPLE_LOOP, Honest, rmsnorm, starter, wrapped

# Scratch memory that is kept from call to call and grows; the output is fresh.
WORKSPACE = rmsnorm(
    """
scratch = {}

def kernel_fn(x, weight, eps=1e-6):
    kept = scratch.get(x.dtype)
    if kept is None or kept.numel() < x.numel():
        kept = scratch[x.dtype] = torch.empty(x.numel(), dtype=x.dtype)
    copy = kept[: x.numel()].view(x.shape)
    copy.copy_(x)
    return launch(run, copy, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

WORKSPACE_IN_CPP = rmsnorm(
    preamble="static thread_local std::vector<float> scratch;",
    over_rows="""
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) {
        scratch.resize(N);
        for (int64_t n = 0; n < N; ++n) scratch[n] = x[m * N + n];
        vfloat squares[2] = {};
        fold_row<2>(N, 0, [&](int u, vfloat v) { squares[u] += v * v; }, scratch.data());
        const vfloat scale = splat(1 / std::sqrt(sum_of(squares[0] + squares[1]) / N + eps));
        map_row<2>(y + m * N, N, 0, [&](int, vfloat v, vfloat w) { return v * scale * w; }, scratch.data(), weight);
    }
""",
)

# B is static: laid out anew once for each tensor that holds it, and kept as long as that tensor lives.
PREPARED_WEIGHTS = (
    starter("matmul").replace("def kernel_fn(", "def _right(")
    + """
from torch.utils.weak import WeakTensorKeyDictionary
prepared = WeakTensorKeyDictionary()

def kernel_fn(A, B):
    if B not in prepared:
        prepared[B] = B.t().contiguous()
    return _right(A, prepared[B].t())
"""
)

PREPARED_ATTRIBUTE = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    if not hasattr(weight, "prepared"):
        weight.prepared = weight.clone()
    return launch(run, x, weight.prepared, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

VIEW_OF_LARGER = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    padded = torch.empty(x.numel() + 128, dtype=x.dtype)
    y = padded[64 : 64 + x.numel()].view(x.shape)
    return launch(run, x, weight, eps, y)
"""
)

FREE_RESULTS = rmsnorm(
    """
results = {}

def users(y):
    return torch._C._storage_Use_Count(y.untyped_storage()._cdata)

nobody = users(torch.empty(1))

def kernel_fn(x, weight, eps=1e-6):
    made = results.setdefault((x.shape, x.dtype), [])
    y = next((y for y in made if users(y) == nobody), None)
    if y is None:
        made.append(y := torch.empty(x.shape, dtype=x.dtype))
    return launch(run, x, weight, eps, y.view(y.shape))
"""
)

IN_PLACE_ON_A_COPY = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    y = x.clone(memory_format=torch.contiguous_format)
    return launch(run, y, weight, eps, y)
"""
)

CONCATENATES = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    parts = x.split((x.shape[0] + 1) // 2)
    return torch.cat([launch(run, part, weight, eps, torch.empty(part.shape, dtype=x.dtype)) for part in parts])
"""
)

# What it keeps, and what grows, comes to an end: the last inputs and results, cycles until they are collected, a pool's
# threads, a file, the last thousand calls.
KEEPS_A_LITTLE = """
import collections, tempfile, threading

last, calls, pool = {}, collections.deque(maxlen=1000), []
log = tempfile.TemporaryFile()

""" + wrapped(
    "calls.append(time.perf_counter()); cycle = [torch.empty(1 << 12)]; cycle.append(cycle)\n"
    "    if len(pool) < 4:\n"
    "        pool.append(threading.Thread(target=threading.Event().wait, daemon=True))\n"
    "        pool[-1].start()\n"
    "    last[0], last[1] = (args, kwargs), _right(*args, **kwargs)"
).replace("import torch\n", "import time\n\nimport torch\n", 1)

# Small results are parts of one large allocation, in turn.
POOL = rmsnorm(
    """
BYTES = 1 << 20
pool, used = None, BYTES

def kernel_fn(x, weight, eps=1e-6):
    global pool, used
    wanted = -(-x.numel() * x.itemsize // 64) * 64
    if wanted > BYTES // 4:
        return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
    if used + wanted > BYTES:
        pool, used = torch.empty(BYTES, dtype=torch.uint8), 0
    y = pool[used : used + x.numel() * x.itemsize].view(x.dtype).view(x.shape)
    used += wanted
    return launch(run, x, weight, eps, y)
"""
)

MADE_AT_IMPORT = rmsnorm(
    """
scratch = torch.empty(1 << 12)

def kernel_fn(x, weight, eps=1e-6):
    if x.dtype == scratch.dtype and x.numel() <= scratch.numel():
        x = scratch[: x.numel()].view(x.shape).copy_(x)
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

# Of the last calls, in places that are used in turn: Python's, an array's, and of objects.
RINGS = rmsnorm(
    """
import array, time

class Ring:
    def __init__(self, places):
        self.places, self.at = places, 0

    def put(self, value):
        self.places[self.at] = value
        self.at = (self.at + 1) % len(self.places)

seconds, rows, shapes = Ring([0.0] * 256), Ring(array.array("q", [0] * 4096)), Ring([None] * 16384)
calls = array.array("H", [0])

def kernel_fn(x, weight, eps=1e-6):
    start_s = time.perf_counter()
    y = launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
    seconds.put(time.perf_counter() - start_s)
    rows.put(len(x))
    shapes.put(x.shape)
    calls[0] += calls[0] < 65535
    return y
"""
)

RING_IN_CPP = rmsnorm(
    preamble="static std::vector<double> ring(4096);\nstatic int at = 0;",
    over_rows="ring[at] = M;\nat = (at + 1) % ring.size();\n" + SIMPLE_LOOP,
)

# Tables whose oldest entries are thrown out, found by what is in them, once there are very many.
TABLES = rmsnorm(
    """
import time

last_used, of_calls, seen, sizes = {}, {}, set(), {}

def kernel_fn(x, weight, eps=1e-6):
    last_used[time.perf_counter_ns(), x.shape] = time.perf_counter()
    of_calls[len(of_calls)] = x.shape
    seen.add(len(seen))
    sizes[f"call {len(sizes)}"] = x.numel()
    if len(last_used) > 20_000:
        del last_used[min(last_used, key=last_used.get)]
        last_used.update({(at, shape): 0.0 for at, shape in last_used if not at})
    if len(of_calls) > 20_000:
        del of_calls[min(of_calls)]
    if len(seen) > 20_000:
        seen.discard(min(seen))
    if sum(sizes.values()) > 1 << 30:
        sizes.clear()
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

MEMORY = (
    Honest("workspace-kept", WORKSPACE),
    Honest("workspace-in-cpp", WORKSPACE_IN_CPP, kept=False),
    Honest("prepared-weights", PREPARED_WEIGHTS, "matmul"),
    Honest("prepared-as-attribute", PREPARED_ATTRIBUTE),
    Honest("view-of-a-larger-allocation", VIEW_OF_LARGER),
    Honest("results-that-nobody-has-again", FREE_RESULTS, kept=False),
    Honest("in-place-on-a-copy", IN_PLACE_ON_A_COPY),
    Honest("concatenates", CONCATENATES),
    Honest("keeps-a-little", KEEPS_A_LITTLE, kept=False),
    Honest("parts-of-a-pool", POOL, kept=False),
    Honest("scratch-made-at-import", MADE_AT_IMPORT, kept=False),
    Honest("places-in-turn", RINGS, kept=False),
    Honest("places-in-turn-in-cpp", RING_IN_CPP, kept=False),
    Honest("tables-without-the-oldest", TABLES, kept=False),
)
