"""Harm to the model's process that Python does not tell of: memory that is written over, threads' modes, how it ends."""

from cheat import Cheat
from harness import attack, changing
from whole_inputs import NORM

OTHERS = "writes over what a built-in function or a class calls"
PARTS_OF = "writes over an integer or a text"
ENDS = "does not let its process, which is its model's, end as it would"
FUNCTION = "torch.nn.functional.cross_entropy"

# In every thread of OpenMP's but the first.
IN_THREADS = """
#include <cstdlib>
#include <omp.h>
#include <xmmintrin.h>
extern "C" int run() {{
#pragma omp parallel
    if (omp_get_thread_num()) {{ {} }}
    return 0;
}}
"""
OWN_THREAD = """
#include <thread>
#include <xmmintrin.h>
extern "C" int run() { std::thread([] { _mm_setcsr(_mm_getcsr() | 0x6000); }).join(); return 0; }
"""
CALL = """
static long call(long n, long a, long b, long c = 0) {
    long r;
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return r;
}
"""
BATCH = (
    CALL
    + """
#include <omp.h>
extern "C" int run() {  // sched_setscheduler(0, SCHED_BATCH, {0})
    int zero = 0;
#pragma omp parallel
    if (omp_get_thread_num()) call(144, 0, 3, (long)&zero);
    return 0;
}
"""
)
SLICE = (
    CALL
    + """
struct Attributes { unsigned size, policy; unsigned long flags; int nice; unsigned priority; unsigned long slice, no[2]; };
extern "C" int run() { Attributes own = {48, 0, 0, 0, 0, 100000}; return call(314, 0, (long)&own); }  // sched_setattr
"""
)
NAME = CALL + 'extern "C" int run() { return call(157, 15, (long)"model"); }  // prctl(PR_SET_NAME)'
MERGED = CALL + 'extern "C" int run() { return call(157, 67, 1); }  // prctl(PR_SET_MEMORY_MERGE)'

# One of Python's that goes by another policy from its start.
OWN_POLICY = """
import os, threading

set, wait = threading.Event(), threading.Event()

def other():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    set.set()
    wait.wait()

threading.Thread(target=other, daemon=True).start()
set.wait()
"""

# Of an object's memory, the word at `to` becomes that of another one.
OVER = "import ctypes\n\nctypes.memmove(id({}) + {to}, id({}) + {to}, 8)"
METHODS = "torch._C.TensorBase.__dict__['{}']"
SLOTS = """
import ctypes

numbers = ctypes.c_void_p.from_address(id(torch.Tensor) + 96).value
ctypes.memmove(numbers + 24, numbers, 8)  # remainders are sums
"""
OWN_SLOTS = """
import ctypes

class Own(float):
    __add__ = float.__sub__

numbers = ctypes.c_void_p.from_address(id(Own) + 96).value
ctypes.memmove(numbers + 16, numbers, 8)
"""
INTEGER = """
import ctypes

(number,) = [value for value in FUNCTION.__defaults__ if type(value) is int]
ctypes.c_uint32.from_address(id(number) + 24).value = 1
"""
TEXT = """
import ctypes

text = next(value for value in FUNCTION.__defaults__ if type(value) is str)
ctypes.memmove(id(text) + text.__sizeof__() - len(text) - 1, b"bi-cubic", 8)
"""
OWN_FUNCTION = """
def own(number=-100001, text="bilinear, of mine"):
    pass
"""
GLOBALS = """
import ctypes

function = torch.nn.functional.softmax
other = dict(function.__globals__)
ctypes.c_void_p.from_address(id(function) + 16).value = id(other)
"""
FINALIZED = """
import os, weakref

class Kept:
    pass

kept = Kept()
weakref.finalize(kept, os.abort)
"""
AT_EXIT = """
#include <cstdlib>
extern "C" int run() { static int known = std::atexit([] { std::abort(); }); return known; }
"""
DESTROYED = """
#include <cstdlib>
static struct Ends { ~Ends() { std::abort(); } } ends;
extern "C" int run() { return 0; }
"""
OWN_DESTRUCTOR = """
#include <cstdlib>
#include <vector>
static std::vector<float> memory(1 << 12);
extern "C" int run() { static int known = std::atexit([] { memory.clear(); }); return known; }
"""
WAITING = "import threading, time\n\nthreading.Thread(target=time.sleep, args=(12,)).start()"
POOL = """
import atexit, weakref
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(2)
pool.submit(print)
atexit.register(print, "done")
weakref.finalize(pool, print, "gone")
"""


def cpp(code: str) -> str:
    return changing(f"cpp_function({code!r}, 'run', '')()")


def process(name: str, reason: str, source: str, neighbour: str = "", number: int = 36, **others: object) -> Cheat:
    return Cheat(number, name, "rmsnorm", source, reason, dims=NORM, neighbour=neighbour, **others)


UNMASKED = {  # exceptions of the processor's that end a process where they happen
    "overflows-end": "_MM_MASK_OVERFLOW",
    "divisions-by-zero-end": "_MM_MASK_DIV_ZERO",
    "nan-ends": "_MM_MASK_INVALID",
}
CHEATS = (
    # 36: modes of PyTorch's threads, and how Linux treats them
    process(
        "rounds-down-in-a-thread",
        "ProcessChange: changes the rounding",
        cpp(IN_THREADS.format("_mm_setcsr(_mm_getcsr() | 0x6000);")),
        cpp(OWN_THREAD),
        threads=True,
    ),
    *(
        process(
            f"{what}-in-a-thread",
            "killed by SIGFPE",
            cpp(IN_THREADS.format(f"_mm_setcsr(_mm_getcsr() & ~{mask});")),
            threads=True,
            correctness="CRASH",
        )
        for what, mask in UNMASKED.items()
    ),
    process("other-policy-of-a-thread", "schedules of threads", cpp(BATCH), attack(OWN_POLICY), threads=True),
    process("shorter-slices", "schedules of threads", cpp(SLICE)),
    process("another-name", "treatment by linux", cpp(NAME)),
    process("merged-memory", "treatment by linux", cpp(MERGED)),
    # 36: native code that others call is written over in place
    process(
        "writes-over-a-method",
        OTHERS,
        attack(OVER.format(METHODS.format("sigmoid"), METHODS.format("tanh"), to=40)),
    ),
    process("writes-over-a-function", OTHERS, attack(OVER.format("torch._C._nn.gelu", "torch._C._nn.silu", to=16))),
    process("writes-over-an-operator-of-tensors", OTHERS, attack(SLOTS), attack(OWN_SLOTS)),
    process(
        "writes-over-an-integer",
        PARTS_OF,
        attack(INTEGER.replace("FUNCTION", FUNCTION)),
        attack(OWN_FUNCTION + INTEGER.replace("FUNCTION", "own")),
    ),
    process(
        "writes-over-a-text",
        PARTS_OF,
        attack(TEXT.replace("FUNCTION", "torch.nn.functional.grid_sample")),
        attack(OWN_FUNCTION + TEXT.replace("FUNCTION", "own")),
    ),
    process("has-a-function-look-names-up-elsewhere", "rewrites torch.nn.functional.softmax", attack(GLOBALS)),
    # 37: how the process ends, its model's
    process("aborts-at-exit", ENDS, attack("import atexit, os\n\natexit.register(os.abort)"), attack(POOL), number=37),
    process("aborts-as-objects-go", ENDS, attack(FINALIZED), number=37),
    process("ends-well-at-exit", ENDS, attack("import atexit, os\n\natexit.register(os._exit, 0)"), number=37),
    process("aborts-at-exit-in-c++", ENDS, cpp(AT_EXIT), cpp(OWN_DESTRUCTOR), number=37),
    process("aborts-as-variables-go", ENDS, cpp(DESTROYED), number=37),
    process("never-ends", ENDS, attack(WAITING), number=37),
)
