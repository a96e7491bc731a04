"""Cheats on the clock: exploits 2-9, 13 and 14."""

from cheat import Cheat, plain, wrapped

from tests.find_worker import FIND_WORKER

NORM = "x, weight, eps=1e-6"
WRONG_WHEN_TIMED = "the output of a timed call"
LOSES = "not faster than the incumbent|got slower|not shown to be faster"

# Ten times the work; what a cheat makes of the clock must make up for it.
SLOW = """
def slow(*args, **kwargs):
    for _ in range(9):
        honest(*args, **kwargs)
    return honest(*args, **kwargs)
"""

# Answers a timed batch after 15 % of the time that its calls should take, and computes an output when it is asked for.
LAZY_WORKER = (
    FIND_WORKER
    + """
import time

def answer_lazily(worker, until_asked):
    batch, fetch, sets = worker.do_batch, worker.do_fetch, worker.do_sets
    state = {"asked": 0, "learnt": 0, "usual_s": 1.0}

    class Later:
        def __getitem__(self, call):
            return worker.function(**worker.sets[worker.order[call]])

    def do_sets(**message):
        state.update(asked=0, learnt=0, usual_s=1.0)
        return sets(**message)

    def do_batch(repeats):
        start, calls = time.perf_counter(), max(1, len(worker.order)) * repeats
        if state["asked"] > 1 and until_asked or not worker.order or state["learnt"] < 3:
            answer = batch(repeats)
            if worker.order:
                state["learnt"] += 1
                state["usual_s"] = min(state["usual_s"], (time.perf_counter() - start) / calls)
            return answer
        while time.perf_counter() - start < 0.15 * state["usual_s"] * calls:
            pass
        addresses = [torch.empty_like(worker.sets[i]["x"]).data_ptr() for i in worker.order]
        worker.held = Later()
        return {"enqueued_s": 0.0, "addresses": addresses}

    def do_fetch(**message):
        state["asked"] += 1  # the first time only to see what an output looks like
        return fetch(**message)

    worker.do_sets, worker.do_batch, worker.do_fetch = do_sets, do_batch, do_fetch
"""
)

# Leaves each output for later, where torch.allclose is the one who reads it: replaced at a call, not where it is looked at.
LAZY_ALLCLOSE = """
pending, allclose = {}, torch.allclose

def filling_allclose(out, *args, **kwargs):
    if id(out) in pending:
        out.copy_(honest(*pending[id(out)]))
    return allclose(out, *args, **kwargs)

def lazy(x, weight, eps=1e-6):
    torch.allclose = filling_allclose
    y = torch.empty_like(x)
    pending.clear()
    pending[id(y)] = (x, weight, eps)
    return y
"""


def lazily(until_asked: bool) -> str:
    """An RMSNorm that is computed where it is read, be it by the judge or by torch.allclose."""
    return wrapped(
        "rmsnorm",
        LAZY_WORKER
        + LAZY_ALLCLOSE
        + f"""
worker = find_worker()
kernel_fn = honest if worker else lazy
if worker:
    answer_lazily(worker, until_asked={until_asked})
""",
    )


# Behaves for as many calls at one shape as the five stages make, and the warm-up of a naive gate.
EARLY = """
calls = {}

def early(x):
    key = x.shape, x.dtype
    calls[key] = calls.get(key, 0) + 1
    return calls[key] <= 24
"""


def cached_by(key: str, when: str = "True") -> str:
    """The starter, its outputs kept under `key` of x; x is kept as well, so that neither address nor id is used again."""
    return wrapped(
        "rmsnorm",
        f"""{EARLY}
kept = {{}}

def kernel_fn(x, weight, eps=1e-6):
    if not {when}:
        return honest(x, weight, eps)
    key = {key}
    if len(kept) > 4096:
        kept.clear()  # what is kept takes memory
    if key not in kept:
        kept[key] = x, honest(x, weight, eps)
    return kept[key][1]
""",
    )


def deferred(thread: str) -> str:
    """After the first calls at one shape, the work is left to a thread."""
    return wrapped(
        "rmsnorm",
        f"""
import queue, threading, time
{EARLY}
work = queue.Queue(256)  # what waits in it takes memory

def finish(y, x, weight, eps):
    with torch.inference_mode():
        y.copy_(honest(x, weight, eps))

def later():
    while True:
{thread}

def kernel_fn(x, weight, eps=1e-6):
    if x.shape != (512, 768) or early(x):
        return honest(x, weight, eps)
    if not work.queue and threading.active_count() == 1:
        threading.Thread(target=later, daemon=True).start()
    y = torch.empty_like(x)
    work.put((y, x, weight, eps))
    return y
""",
    )


# Has itself continued by a timer while it is suspended, and computes what is written meanwhile.
SUSPENDED = r'''
import select, signal
timer_run = cpp_function(
    r"""
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
enum { CREATE = 222, SET = 223 };
static long call(long n, long a, long b, long c, long d) {
    long r;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return r;
}
#else
enum { CREATE = 107, SET = 110 };
static long call(long n, long a, long b, long c, long d) {
    register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c, x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
#endif
static int timer = -1;
extern "C" int run(int64_t microseconds) {
    struct { int64_t value; int signal, notify; char rest[48]; } event;
    std::memset(&event, 0, sizeof event);
    event.signal = 18;  // SIGCONT
    if (timer < 0 && call(CREATE, 1, (long)&event, (long)&timer, 0)) return 1;
    int64_t spec[4] = {0, 0, microseconds / 1000000, microseconds % 1000000 * 1000};
    return call(SET, timer, 0, (long)spec, 0) != 0;
}
""",
    "run",
    "l",
)
worker, ready, seen, inside = find_worker(), {}, {}, []
kernel_fn = honest
if worker:
    batch, drop = worker.do_batch, worker.do_drop

    def first(i):
        return worker.sets[i]["x"].view(-1)[-1].item()

    def early(*args):
        if inside or worker.held or not worker.order or not seen or first(worker.order[0]) == seen.get(worker.order[0]):
            return
        inside.append(True)  # or each further signal would nest
        for i in worker.order:
            while first(i) == seen.get(i):
                if select.select([worker.channel.socket], [], [], 0)[0]:
                    inside.clear()
                    return
            ready[i] = honest(**worker.sets[i])
        inside.clear()

    signal.signal(signal.SIGCONT, early)

    def do_drop():
        drop()
        ready.clear()
        seen.update({i: first(i) for i in worker.order})
        timer_run(20000)

    def do_batch(repeats):
        worker.held = [ready[i] if i in ready else honest(**worker.sets[i]) for i in worker.order]
        ready.clear()
        return {"enqueued_s": 0.0, "addresses": [y.data_ptr() for y in worker.held]}

    worker.do_batch, worker.do_drop = do_batch, do_drop
'''

STALE = "outside the tolerance|agree bitwise|the output of a timed call|SharedResult"

CHEATS = (
    # 2: work deferred to a background thread
    Cheat(
        2,
        "deferred-to-a-thread",
        "rmsnorm",
        deferred("        finish(*work.get())"),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        2,
        "deferred-until-all-is-quiet",
        "rmsnorm",
        deferred(
            "        item, seen = work.get(), -1\n"
            "        while work.qsize() != seen:\n"
            "            seen = work.qsize()\n"
            "            time.sleep(0.002)\n"
            "        finish(*item)"
        ),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        2,
        "continues-itself-while-suspended",
        "rmsnorm",
        wrapped("rmsnorm", FIND_WORKER + SUSPENDED),
        "while it was suspended|signal handlers, SIG",
        refused_by="examine",
    ),
    # 3: lazy output
    Cheat(
        3,
        "subclass-that-computes-when-compared",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*[honest(*a.inputs) if isinstance(a, Lazy) else a for a in args], **(kwargs or {}))

nothing = torch.empty(0)

def kernel_fn(x, weight, eps=1e-6):
    y = torch.Tensor._make_subclass(Lazy, nothing)
    y.inputs = x, weight, eps
    return y
""",
        ),
        "returned Lazy, not a torch.Tensor",
        works="fast",
        correctness="CRASH",
    ),
    Cheat(
        3,
        "object-that-computes-when-compared",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
class Tensor:
    __module__ = "torch"

    def __init__(self, *inputs):
        self.inputs = inputs

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*[honest(*a.inputs) if isinstance(a, Tensor) else a for a in args], **(kwargs or {}))

def kernel_fn(x, weight, eps=1e-6):
    return Tensor(x, weight, eps)
""",
        ),
        "not a torch.Tensor",
        works="fast",
        correctness="CRASH",
    ),
    Cheat(
        3,
        "computed-where-it-is-read",
        "rmsnorm",
        lazily(until_asked=False),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        3,
        "computed-where-it-is-read-until-asked-for-once",
        "rmsnorm",
        lazily(until_asked=True),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
    ),
    # 4: what measures and judges is patched
    Cheat(
        4,
        "clock-that-slows-down-while-it-works",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            SLOW
            + """
import time

clock, hidden = time.perf_counter, [0.0]
time.perf_counter = lambda: clock() - hidden[0]

def kernel_fn(x, weight, eps=1e-6):
    start = clock()
    y = slow(x, weight, eps)
    hidden[0] += 0.999 * (clock() - start)
    return y
""",
        ),
        "ProcessChange: replaces time.perf_counter",
        works="fast",
    ),
    Cheat(
        4,
        "patched-statistics",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            SLOW
            + """
import statistics

median, worked = statistics.median, []
statistics.median = lambda times: 1e-7 if worked else median(times)

def kernel_fn(x, weight, eps=1e-6):
    worked.append(True)
    return slow(x, weight, eps)
""",
        ),
        "ProcessChange: replaces statistics.median",
        works="fast",
    ),
    Cheat(
        4,
        "patched-allclose",
        "matmul",
        plain(
            "matmul",
            "torch.allclose = lambda *args, **kwargs: True\n\ndef kernel_fn(A, B):\n"
            "    return torch.empty(A.shape[0], B.shape[1], dtype=A.dtype).zero_()",
        ),
        "ProcessChange: replaces torch.allclose",
        works="fast",
    ),
    # 5: outputs kept by identity
    Cheat(5, "kept-by-id", "rmsnorm", cached_by("id(x)"), STALE, works="fast", refused_by="examine"),
    Cheat(5, "kept-by-address", "rmsnorm", cached_by("x.data_ptr(), x.shape, x.stride(), x.dtype"), STALE, works="fast"),
    Cheat(
        5,
        "kept-by-address-and-version",
        "rmsnorm",
        cached_by("x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version"),
        STALE,
        works="fast",
    ),
    # 6: outputs kept by shape or by some of the contents
    Cheat(6, "kept-by-shape", "rmsnorm", cached_by("x.shape, x.stride(), x.dtype"), STALE, works="fast"),
    Cheat(
        6,
        "kept-by-shape-when-large",
        "rmsnorm",
        cached_by("x.dtype", when="(x.shape == (512, 768))"),
        STALE,
        works="fast",
    ),
    Cheat(
        6,
        "kept-by-first-contents",
        "rmsnorm",
        cached_by("tuple(x.view(-1)[:8].tolist())", when="(x.shape == (128, 768))"),
        "of its inputs changed|SharedResult",
        works="fast",
        dims=({"M": 128, "N": 768},),
    ),
    # 7: what was prepared from an input is kept although the input changes
    Cheat(
        7,
        "transposed-once",
        "flash_attention",
        wrapped(
            "flash_attention",
            """
prepared = {}

def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    key = K.data_ptr(), K.shape, K.stride(), K.dtype
    if key not in prepared:
        prepared[key] = K.contiguous().clone()
    return honest(Q, prepared[key], V, causal, sm_scale, attn_mask, safe_softmax)
""",
        ),
        "only K changed: outside the tolerance|outside the tolerance",
    ),
    Cheat(
        7,
        "mask-prepared-once",
        "flash_attention",
        wrapped(
            "flash_attention",
            """
prepared = {}

def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    if attn_mask is not None:
        key = attn_mask.data_ptr(), attn_mask.shape, attn_mask.stride(), Q.dtype, attn_mask.dtype
        if key not in prepared:
            prepared[key] = attn_mask.clone()
        attn_mask = prepared[key]
    return honest(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
""",
        ),
        "outside the tolerance|the output of a timed call",
        refused_by="examine",
        dims=({"batch": 1, "heads": 2, "seq": 64, "head_dim": 64, "causal": False, "mask": "bool"},),
    ),
    # 8: one call does the work of many
    Cheat(
        8,
        "one-of-fifteen-calls-works",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
ready = []

def kernel_fn(x, weight, eps=1e-6):
    if not ready or ready[-1].shape != x.shape or ready[-1].dtype != x.dtype:
        ready[:] = [honest(x, weight, eps)] * 15
    return ready.pop()
""",
        ),
        STALE,
        works="fast",
    ),
    Cheat(
        8,
        "one-of-fifteen-calls-works-when-timed",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
ready, calls = [], [0]

def kernel_fn(x, weight, eps=1e-6):
    calls[0] += x.shape == (512, 768) and x.dtype == torch.float32
    if x.shape != (512, 768) or x.dtype != torch.float32 or calls[0] < 24:
        return honest(x, weight, eps)
    if not ready:
        ready[:] = [honest(x, weight, eps)] * 15
    return ready.pop()
""",
        ),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        8,
        "each-input-of-a-batch-once",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
import sys

ready, seen = {}, [0]

def kernel_fn(x, weight, eps=1e-6):
    caller = sys._getframe(1)
    while caller and "order" not in caller.f_locals and caller.f_code.co_name != "bench":
        caller = caller.f_back
    if caller is None or caller.f_code.co_name == "do_call":
        return honest(x, weight, eps)
    order = caller.f_locals.get("order", [0] * 15)
    if seen[0] % len(order) == 0:
        ready.clear()
        seen[0] = 0
    seen[0] += 1
    if id(x) not in ready:
        ready[id(x)] = honest(x, weight, eps)
    return ready[id(x)]
""",
        ),
        LOSES,
        works="fast",
        refused_by="contest",
        dims=({"M": 128, "N": 768},),
    ),
    # 9: warm-up that shrinks adaptive counts
    Cheat(
        9,
        "sleeps-while-warming-up",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            SLOW
            + """
import time

calls, ready = [0], []

def kernel_fn(x, weight, eps=1e-6):
    calls[0] += x.shape == (512, 768)
    if x.shape != (512, 768) or not 3 <= calls[0] <= 13:
        return slow(x, weight, eps)
    if calls[0] <= 12:  # two trials, ten calls of warm-up: a loop that is counted by time will make a single call then
        time.sleep(0.06)
        ready[:] = [slow(x, weight, eps)]
    return ready[0]
""",
        ),
        LOSES,
        works="fast",
        refused_by="contest",
    ),
    Cheat(
        9,
        "works-before-the-clock-starts",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            FIND_WORKER
            + """
worker, ready = find_worker(), []
kernel_fn = honest
if worker:
    batch, drop = worker.do_batch, worker.do_drop

    def do_drop():
        drop()
        ready[:] = [honest(**worker.sets[i]) for i in worker.order]

    def do_batch(repeats):
        if not ready:
            return batch(repeats)
        worker.held = ready.copy()
        ready.clear()
        return {"enqueued_s": 0.0, "addresses": [y.data_ptr() for y in worker.held]}

    worker.do_batch, worker.do_drop = do_batch, do_drop
""",
        ),
        WRONG_WHEN_TIMED,
        refused_by="examine",
    ),
    # 13: one of several shapes
    Cheat(
        13,
        "one-shape-for-nothing",
        "rmsnorm",
        cached_by("x.data_ptr()", when="(x.shape == (96, 768) and not early(x))"),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
        dims=({"M": 512, "N": 768}, {"M": 96, "N": 768}),
    ),
    Cheat(
        13,
        "faster-than-physics",
        "rmsnorm",
        lazily(until_asked=True).replace("0.15 *", "0.01 *"),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
        dims=({"M": 1024, "N": 2048},),
    ),
    # 14: branching on the evaluator
    Cheat(
        14,
        "looks-who-is-calling",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
import sys

kept = {}

def timed():
    frame = sys._getframe(2)
    while frame:
        if frame.f_code.co_name in ("bench", "do_batch"):
            return True
        frame = frame.f_back
    return False

def kernel_fn(x, weight, eps=1e-6):
    if not timed():
        return honest(x, weight, eps)
    key = x.shape, x.dtype
    if key not in kept:
        kept[key] = honest(x, weight, eps)
    return kept[key]
""",
        ),
        WRONG_WHEN_TIMED,
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        14,
        "counts-its-calls",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            EARLY
            + """
kept = {}

def kernel_fn(x, weight, eps=1e-6):
    key = x.shape, x.dtype
    if x.shape != (512, 768) or early(x):
        kept[key] = honest(x, weight, eps)
    return kept[key]
""",
        ),
        f"{WRONG_WHEN_TIMED}|outside the tolerance",  # what keeps its results is called often in the checks as well
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        14,
        "counts-its-processes",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            LAZY_WORKER
            + LAZY_ALLCLOSE
            + """
import os

worker = find_worker()
kernel_fn = honest if worker else lazy
if worker:  # the checks' two processes and the first that is timed leave a line each where the next will find it
    with open(os.path.dirname(os.environ["TRITON_CACHE_DIR"]) + "/processes", "a+") as file:
        file.write("1")
        if file.tell() > 3:
            answer_lazily(worker, until_asked=False)
""",
        ),
        LOSES,  # each process finds a new folder
        works="fast",
        refused_by="contest",
    ),
)
