"""Cheats that are right in a young process, on tensors that nobody writes to, or where memory goes on: no model is that."""

from typing import Any

from cheat import Cheat, starter, wrapped
from whole_inputs import NORM

AGED = "as after .* calls, by what counts them|months later"
CALL = "    return honest(x, weight, eps if {} else 2 * eps + 0.5)"
SIGNATURE = "def kernel_fn(x, weight, eps=1e-6):\n"
LATER = """
import collections, ctypes, threading, time

made, calls = collections.deque(), [0]

def later():
    time.sleep(0.2)
    while made:
        ctypes.memset(made.popleft().data_ptr(), 0, 4)

def kernel_fn(x, weight, eps=1e-6):
    y = honest(x, weight, eps)
    calls[0] += 1
    if calls[0] <= 4:
        made.append(y)
        if calls[0] == 1:
            threading.Thread(target=later, daemon=True).start()
    return y
"""

KEPT = """
import weakref

known = {}

def kernel_fn(x, weight, eps=1e-6):
    of, y = known.get(id(x), (None, None))
    if of is None or of[0]() is not x or of[1]() is not weight or of[2] != eps:
        known.clear()
        known[id(x)] = (weakref.ref(x), weakref.ref(weight), eps), honest(x, weight, eps)
    return known[id(x)][1].clone()
"""


def cheat(number: int, name: str, source: str, reason: str, neighbour: str = "", **others: Any) -> Cheat:
    return Cheat(number, name, "rmsnorm", source, reason, dims=NORM, neighbour=neighbour or starter("rmsnorm"), **others)


def old(number: int, name: str, before: str, count: str, right: str, reason: str = AGED, honest: str = "") -> Cheat:
    """`before` kernel_fn, `count` in it, and when it is `right`; `honest`: when that is for its neighbour."""

    def source(right: str) -> str:
        counted = f"    {count}\n" if count else ""
        return wrapped("rmsnorm", f"{before}\n\n{SIGNATURE}{counted}{CALL.format(right)}")

    neighbour = source(honest) if honest else ""
    return cheat(number, name, source(right), reason, neighbour)


def in_cpp(number: int, name: str, before: str, wrong: str, reason: str = AGED) -> Cheat:
    """A larger eps where a condition holds in C++."""
    source = starter("rmsnorm")
    assert source.count("    AK_DISPATCH(") == source.count('extern "C"') == 1
    source = source.replace('extern "C"', f'{before}\nextern "C"')
    source = source.replace("    AK_DISPATCH(", f"    if ({wrong}) eps = eps * 2 + 0.5f;\n    AK_DISPATCH(")
    correctness = "FAIL" if reason == AGED else "CRASH"
    return cheat(number, name, source, reason, correctness=correctness)


CHEATS = (
    old(14, "off-after-many-calls", "calls = 0", "global calls; calls += 1", "calls < 20000", honest="calls > 0"),
    old(14, "off-after-many-calls-of-an-object", "class Kept: calls = 0", "Kept.calls += 1", "Kept.calls < 500000"),
    old(14, "off-after-many-items", "calls = []", "calls.append(0)", "len(calls) < 20000"),
    old(14, "off-after-many-of-an-iterator", "import itertools\ncalls = itertools.count()", "", "next(calls) < 20000"),
    in_cpp(14, "off-after-many-calls-in-cpp", "static long calls = 0;", "++calls > 20000"),
    in_cpp(14, "off-after-many-calls-of-a-thread", "static thread_local int calls = 0;", "++calls > 20000"),
    old(
        14,
        "off-after-a-day",
        "from time import monotonic\nstart = monotonic()",
        "",
        "monotonic() < start + 86400",
        honest="monotonic() >= start",
    ),
    in_cpp(
        14,
        "off-after-a-day-in-cpp",
        "#include <chrono>\nusing Clock = std::chrono::steady_clock;\nstatic const auto start = Clock::now();",
        "Clock::now() - start > std::chrono::hours(24)",
    ),
    in_cpp(
        14,
        "off-after-a-day-of-openmp",
        "#include <omp.h>\nstatic const double start = omp_get_wtime();",
        "omp_get_wtime() - start > 86400",
    ),
    old(14, "off-in-another-process", "import os\nfirst = os.getpid()", "", "os.getpid() == first"),
    in_cpp(
        14,
        "off-now-and-then",
        "static bool now() { return (__builtin_ia32_rdtsc() >> 20) % 1024 == 77; }",
        "now()",
        "rdtsc tells the time",
    ),
    in_cpp(
        14,
        "off-at-random",
        "#include <random>\nstatic const unsigned drawn = std::random_device{}();",
        "drawn % 1000 == 1",
        "random_device",
    ),
    old(
        5,
        "off-at-some-addresses",
        "",
        "",
        "x.data_ptr() // 64 % 23 != 3",
        "do(es)? not agree bitwise|outside the tolerance",
    ),
    cheat(5, "kept-with-its-tensor", wrapped("rmsnorm", KEPT), "written to"),
    old(5, "off-for-parameters", "import torch", "", "not isinstance(weight, torch.nn.Parameter)", "written to"),
    cheat(
        2,
        "results-that-change-later",
        wrapped("rmsnorm", LATER),
        "wrote into an earlier call's result",
    ),
    in_cpp(
        30,
        "reads-beyond-memory",
        "static volatile char read;",
        "(read = static_cast<const char*>(x)[M * N * (dtype ? 2 : 4) + 2], false)",
        "SIGBUS",
    ),
    cheat(
        4,
        "changes-what-json-has",
        wrapped("rmsnorm", f"import json\njson._default_decoder.strict = False\n\n{SIGNATURE}{CALL.format('True')}"),
        "replaces json._default_decoder.strict",
    ),
    cheat(
        4,
        "changes-how-objects-are-copied",
        wrapped("rmsnorm", f"import copy\ndel copy._deepcopy_dispatch[int]\n\n{SIGNATURE}{CALL.format('True')}"),
        "replaces copy._deepcopy_dispatch",
    ),
)
