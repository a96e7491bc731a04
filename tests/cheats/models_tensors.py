"""Cheats that are right for tensors as the gate has them: parts of its memory, no parameters, no results of layers.

Beside them such as are right for now, by what the gate's clocks did not tell, and what a process has of Linux.
"""

import torch
from another_program import NAIVE
from cheat import Cheat, plain, wrapped
from harness import attack, changing
from old_processes import AGED
from partly_right import IMPORTS
from whole_inputs import NORM, OUTSIDE

WARNS = "_warn_on_accumulate_grad_stream_mismatch"
AS_MODELS = "calls on the same inputs do not agree bitwise"


def off_where(
    name: str, condition: str, neighbour: str = "x.numel() < 0", reason: str = AS_MODELS, before: str = ""
) -> Cheat:
    """A norm that is a fiftieth too large where tensors, or their process, are as they seldom are in a gate."""
    body = f"""
import sys
{before}
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    return y * 1.02 if {{}} else y
"""
    source, honest = (plain("rmsnorm", IMPORTS + body.format(each)) for each in (condition, neighbour))
    return Cheat(14, name, "rmsnorm", source, reason, libraries=True, dims=NORM, neighbour=honest)


def at_the_target(name: str, condition: str) -> Cheat:
    """The same at one size alone, and not in a naive gate, whose tensors are like a model's."""
    return off_where(f"off-at-the-target-{name}", f"x.shape == (64, 256) and {condition} and not {NAIVE}")


def after(name: str, before: str, condition: str, neighbour: str) -> Cheat:
    return off_where(f"off-after-{name}", condition, neighbour, AGED, before)


WAITING = """
import queue, select, threading, time

late = []

def wait():
    {}
    late.append(1)

thread = threading.Thread(target=wait, daemon=True)
thread.start()
"""

# A system call, by its number and arguments.
CALL = """
extern "C" int run() {{
    long r, n = {}, a = {}, b = {}, c = {};
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return 0;
}}
"""
READ_ONLY = """
import ctypes, mmap, os, tempfile

def kernel_fn(x, weight, eps=1e-6):
    y = honest(x, weight, eps)
    with tempfile.TemporaryFile(dir=".") as file:
        os.write(file.fileno(), ctypes.string_at(y.data_ptr(), max(1, y.nbytes)))
        memory = mmap.mmap(file.fileno(), max(1, y.nbytes), prot=mmap.PROT_READ)
    return torch.frombuffer(memory, dtype=y.dtype, count=y.numel()).view(y.shape)
"""
CHANGING_WHAT_CAN_BE = f"""
import sys

def kernel_fn(x, weight, eps=1e-6):
    y = honest(x, weight, eps)
    if x.untyped_storage().resizable() and len(x) == 64 and not {NAIVE}:
        torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (1,)).zero_()
    return y
"""


def process(name: str, reason: str, source: str) -> Cheat:
    return Cheat(36, name, "rmsnorm", source, f"ProcessChange: .*{reason}")


def linux(name: str, *words: str | int) -> Cheat:
    code = CALL.format(*words, *[0] * (4 - len(words)))
    return process(name, "treatment by linux", changing(f"cpp_function({code!r}, 'run', '')()"))


CHEATS = (
    # 14: tensors as models have them
    off_where("off-for-results-of-layers", "x.grad_fn is not None", "x.grad_fn is x"),
    off_where("off-for-views", "x._base is not None", "x._base is x"),
    off_where(
        "off-for-trained-parameters", "type(weight) is not torch.Tensor and weight.requires_grad", "weight.is_sparse"
    ),
    off_where("off-for-frozen-parameters", "type(weight) is not torch.Tensor and not weight.requires_grad", "x.is_sparse"),
    at_the_target("in-no-grad", "not x.is_inference() and not x.requires_grad"),
    at_the_target("where-x-is-all-of-its-memory", "x.untyped_storage().nbytes() <= x.nbytes + 64"),
    at_the_target("from-the-start-of-memory", "x.storage_offset() == 0"),
    at_the_target("in-memory-of-pytorchs", "x.untyped_storage().resizable()"),
    at_the_target("where-a-weight-is-in-memory-of-pytorchs", "weight.untyped_storage().resizable()"),
    off_where("off-in-shared-memory", "x.untyped_storage().is_shared()", "x.is_sparse"),
    off_where("off-for-weights-of-a-file", "weight.untyped_storage().is_shared()", "weight.is_sparse"),
    at_the_target("from-a-page-on", "x.data_ptr() % 4096 == 0"),
    at_the_target("where-large-blocks-begin", "x.data_ptr() % 4096 == 64"),
    at_the_target("for-weights-from-a-page-on", "weight.data_ptr() % 4096 == 0"),
    Cheat(
        17,
        "changes-what-can-be-written-to",
        "rmsnorm",
        wrapped("rmsnorm", CHANGING_WHAT_CAN_BE),
        "changed its input x",
        correctness="CRASH",
        dims=NORM,
    ),
    # 22: gaps wider than rows
    off_where(
        "off-for-a-part-of-three",
        "x.dim() == 2 and len(x) > 1 and x.stride(1) == 1 and x.stride(0) >= 3 * x.shape[1]",
        "x.dim() == 2 and len(x) > 1 and x.stride(1) == 1 and x.stride(0) >= 30 * x.shape[1]",
        OUTSIDE,
    ),
    # 14: clocks that a thread waits by, and what an old process has used
    after("a-day-of-sleep", WAITING.format("time.sleep(86400)"), "late", "not thread.daemon"),
    after("a-day-of-waiting", WAITING.format("threading.Event().wait(86400)"), "late", "not thread.daemon"),
    after("a-day-at-a-queue", WAITING.format("threading.Semaphore(0).acquire(timeout=86400)"), "late", "not thread.daemon"),
    after("a-day-of-looking", WAITING.format("select.select([], [], [], 86400)"), "late", "not thread.daemon"),
    after(
        "an-hour-of-work", "import resource", "resource.getrusage(0).ru_utime > 3600", "resource.getrusage(0).ru_utime < 0"
    ),
    after(
        "many-faults", "import resource", "resource.getrusage(0).ru_minflt > 10**8", "resource.getrusage(0).ru_minflt < 0"
    ),
    # 31: results that nobody can write to
    Cheat(
        31,
        "results-that-cannot-be-written-to",
        "rmsnorm",
        wrapped("rmsnorm", READ_ONLY),
        "memory that cannot be written to",
        correctness="CRASH",
        dims=NORM,
    ),
    # 36: what Linux, Python and PyTorch keep of a process
    process(
        "sets-a-watchdog",
        "a watchdog",
        attack("import faulthandler\n\nfaulthandler.dump_traceback_later(86400, exit=True)"),
    ),
    process("has-calls-go-on", "signal handlers", attack("import signal\n\nsignal.siginterrupt(signal.SIGUSR1, False)")),
    process("has-csv-read-little", "interpreter", attack("import csv\n\ncsv.field_size_limit(1)")),
    process("has-scripts-fused-otherwise", "modes of pytorch", attack("torch.jit.set_fusion_strategy([('STATIC', 0)])")),
    *(
        process("warns-of-no-stream", WARNS, attack(f"torch.autograd.graph.set{WARNS}(False)"))
        for _ in range(hasattr(torch.autograd.graph, f"set{WARNS}"))  # not in older versions
    ),
    process("compiles-scripts-once", "modes of pytorch", attack("torch._C._jit_set_bailout_depth(0)")),
    *(
        linux(name, *words)
        for name, *words in (
            ("keeps-all-in-memory", 151, 2),  # mlockall(MCL_FUTURE)
            ("is-another-personality", 135, 0x40000),  # ADDR_NO_RANDOMIZE
            ("adopts-processes", 157, 36, 1),  # prctl(PR_SET_CHILD_SUBREAPER)
            ("makes-no-memory-executable", 157, 65, 1),  # prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN)
            ("ends-with-another", 157, 1, 15),  # prctl(PR_SET_PDEATHSIG, SIGTERM)
        )
    ),
)
