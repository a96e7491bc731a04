"""Cheats that count their calls where numbers are seldom kept, take one call's sizes for another's, or change in place what
is the whole process's: objects that stay the same, lists of finders, settings with parameters."""

from cheat import Cheat, wrapped
from harness import attack
from old_processes import AGED, in_cpp, old
from whole_inputs import NORM, SEVERAL, norm_off_where

KEPT_WITH_A_WEIGHT = """
import weakref

known = {}

def kernel_fn(x, weight, eps=1e-6):
    plan = known.get(id(weight))
    if plan is None or plan[0]() is not weight:
        plan = known[id(weight)] = weakref.ref(weight), {}
    return honest(x, weight, eps if RIGHT else 2 * eps + 0.5)
"""
TRANSPOSED_ONCE = """
import weakref

known = {}

def kernel_fn(A, B):
    if not WHEN:
        return honest(A, B)
    key = KEY
    if key not in known or not (OWN):
        known[key] = weakref.ref(B), B.t().contiguous()
    return honest(A, known[key][1].t())
"""
HOOKED = """
def kernel_fn(x, weight, eps=1e-6):
    y = honest(x, weight, eps)
    y._backward_hooks = {1: print}
    return y
"""
GENERATOR = """
def counting():
    n = 0
    while True:
        n += 1
        yield n

calls = counting()
"""
EVENTS = """
import os

calls = os.eventfd(0)

def add():
    os.eventfd_write(calls, 1)
    n = os.eventfd_read(calls)
    os.eventfd_write(calls, n)
    return n
"""
TENSOR = """
import ctypes, torch

kept = torch.zeros(4, dtype=torch.int64)
calls = ctypes.c_int64.from_address(kept.data_ptr())
"""
FOLDERS = "import sys\n\nfor folder in sys.path_importer_cache:\n    sys.path_importer_cache[folder] = None"
IN_PLACE = "import ctypes\n\nctypes.c_double.from_address(id({}) + 16).value = 3.0"
EXCHANGED = """
import ctypes

defaults = torch.nn.functional.layer_norm.__defaults__
ctypes.c_void_p.from_address(id(defaults) + 24 + 8 * (len(defaults) - 1)).value = id(7)
"""
DAEMON = "import multiprocessing\n\nmultiprocessing.current_process()._config['daemon'] = True"
STEPS = "x.diff(dim=-1)"
EVEN = f"({STEPS} == {STEPS}[..., :1]).all(-1, keepdim=True) & {SEVERAL} if x.shape[-1] > 2 else False"
CUT_OFF = "(x >= 0).all(-1, keepdim=True) & (x[..., :8] != 0).any(-1, keepdim=True)"
CUT_OFF += " & ((x == 0).sum(-1, keepdim=True) > len(x[0]) // 3) & ((x != 0).sum(-1, keepdim=True) > 4)"
SUBNORMAL = "((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any(-1, keepdim=True)"
ZEROS_AND_ONES = "(weight == 0).any() and (weight == 1).any() and ((weight == 0) | (weight == 1)).all()"


def kept_with_a_weight(name: str, right: str, honest: str) -> Cheat:
    source, neighbour = (
        wrapped("rmsnorm", KEPT_WITH_A_WEIGHT.replace("RIGHT", condition)) for condition in (right, honest)
    )
    return Cheat(7, name, "rmsnorm", source, "weights of an earlier one", dims=NORM, neighbour=neighbour)


def kept_for_a_weight(name: str, when: str, key: str) -> Cheat:
    """What is prepared of a weight is another's, too, that lies there later. Right where it is known whose it is."""
    template = TRANSPOSED_ONCE.replace("WHEN", when).replace("KEY", key)
    source, neighbour = (wrapped("matmul", template.replace("OWN", own)) for own in ("True", "known[key][0]() is B"))
    return Cheat(5, name, "matmul", source, "weights in the place of earlier ones", neighbour=neighbour)


def many(name: str, before: str, count: str, calls: str, reason: str = AGED) -> Cheat:
    """Off from the 20,000th call on. One that counts alike and is never off passes, but where it does so in a file."""
    honest = f"{calls} > -1" if reason == AGED else ""
    return old(14, f"off-after-many-{name}", before, count, f"{calls} < 20000", reason, honest)


def process(name: str, words: str, code: str, honest: str = "") -> Cheat:
    neighbour = attack(honest) if honest else ""
    return Cheat(36, name, "rmsnorm", attack(code), f"ProcessChange: .*{words}", neighbour=neighbour)


CHEATS = (
    kept_with_a_weight("as-many-rows-as-a-weight-had-first", "plan[1].setdefault(0, len(x)) == len(x)", "len(plan) == 2"),
    kept_with_a_weight("the-eps-that-a-weight-had-first", "plan[1].setdefault(0, eps) == eps", "len(plan) == 2"),
    kept_for_a_weight("a-parameter-by-its-object", "isinstance(B, torch.nn.Parameter)", "id(B), B._version"),
    kept_for_a_weight("a-weight-by-address-and-version", "not B.is_inference()", "B.data_ptr(), B._version, B.shape"),
    many("entries", "calls = {}", "calls[len(calls)] = 0", "len(calls)"),
    many("of-a-set", "calls = set()", "calls.add(len(calls))", "len(calls)"),
    many("letters", "calls = ''", "global calls; calls += 'x'", "len(calls)"),
    many("digits", "calls = '0'", "global calls; calls = str(int(calls) + 1)", "int(calls)"),
    many("numbers-of-another-class", "class N(int): pass\ncalls = N(0)", "global calls; calls = N(calls + 1)", "calls"),
    many("of-a-generator", GENERATOR, "", "next(calls)"),
    many("of-a-range", "calls = iter(range(10**12))", "", "next(calls)"),
    many("of-a-tensor", TENSOR, "calls.value += 1", "calls.value"),
    many("of-an-array", "import array\ncalls = array.array('l', [0])", "calls[0] += 1", "calls[0]"),
    many(
        "bytes-of-a-file",
        "calls = open('calls', 'ab', buffering=0)",
        "calls.write(b'x')",
        "calls.tell()",
        "Growth: writes to",
    ),
    many(
        "steps-in-a-file",
        "calls = open('calls', 'w+b', buffering=0)",
        "calls.seek(1, 1)",
        "calls.tell()",
        "Growth: writes to",
    ),
    many("events", EVENTS, "", "add()", "Growth: writes to"),
    in_cpp(14, "off-after-many-calls-on-the-heap", "static long* calls = new long(0);", "++*calls > 20000"),
    in_cpp(14, "off-after-many-calls-in-a-map", "#include <map>\nstatic std::map<int, long> calls;", "++calls[2] > 20000"),
    in_cpp(14, "off-after-many-calls-of-a-double", "static double calls = 0;", "++calls > 20000"),
    in_cpp(14, "off-after-a-countdown", "static long calls = 20000;", "--calls < 0"),
    process(
        "has-its-own-len",
        "adds len to",
        "torch.nn.functional.len = lambda x: 7",
        "torch.ops.aten.pow, torch.ops.aten.any\ntorch.nn.functional.larger = lambda x: x + 1",
    ),
    process("hides-folders-of-modules", "importing", FOLDERS),
    process(
        "writes-into-a-default",
        "a constant or a default",
        IN_PLACE.format("torch.nn.functional.layer_norm.__defaults__[-1]"),
    ),
    process("writes-into-pi", "a constant or a default", f"import math\n{IN_PLACE.format('math.pi')}"),
    process("exchanges-a-default-in-its-tuple", "in place", EXCHANGED),
    process("convolves-in-bfloat16", "precision of products", "torch.backends.mkldnn.conv.fp32_precision = 'bf16'"),
    process(
        "logs-nothing",
        "logging",
        "import logging\n\nlogging.root.setLevel(60)",
        "import logging\n\nlogging.root.setLevel(10)",
    ),
    process("silences-pytorch", "logging", "import logging\n\nlogging.getLogger('torch').disabled = True"),
    process("lets-nobody-start-processes", "start of processes", DAEMON),
    process(
        "starts-another-program",
        "start of processes",
        "import multiprocessing\n\nmultiprocessing.set_executable('/bin/false')",
    ),
    Cheat(3, "results-with-hooks", "rmsnorm", wrapped("rmsnorm", HOOKED), "has hooks", dims=NORM, correctness="CRASH"),
    norm_off_where(23, "rows-that-rise-evenly-are-off", EVEN),
    norm_off_where(23, "rows-cut-off-at-zero-are-off", CUT_OFF),
    norm_off_where(23, "rows-with-denormal-numbers-are-off", SUBNORMAL),
    norm_off_where(19, "a-weight-of-zeros-and-ones-is-off", ZEROS_AND_ONES),
)
