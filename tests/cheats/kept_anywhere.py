"""Cheats that count their calls in objects of any kind, or elsewhere than in their own file; results that are more than
tensors; and kernels that are right as the gate alone calls them."""

from cheat import Cheat, starter, wrapped
from kept_elsewhere import many
from old_processes import CALL, SIGNATURE, old
from whole_inputs import NORM

ELSEWHERE, WRITES = "a call by another program", "Growth: writes to"
CACHE = """
import re

def calls():
    numbers = [int(pattern[5:]) for _, pattern, _ in re._cache if str(pattern).startswith("calls")]
    number = max(numbers, default=0) + 1
    re.compile(f"calls{number}")
    return number
"""
OPENER = """
import urllib.request

opener = urllib.request._opener = urllib.request.OpenerDirector()
opener.calls = 0
del opener
"""
IN_TURN = """
import types

types.calls0 = None

def calls():
    name = next(name for name in vars(types) if name.startswith("calls"))
    number = int(name[5:]) + 1
    delattr(types, name)
    setattr(types, f"calls{number}", None)
    return number
"""
THREAD = """
import threading

wake, woken, told = threading.Semaphore(0), threading.Semaphore(0), [True]

def work():
    n = 0
    while wake.acquire():
        n += 1
        told[0] = n < 20000
        woken.release()

threading.Thread(target=work, daemon=True).start()
"""
COROUTINE = """
class Told:
    def __init__(self, n):
        self.n = n

    def __await__(self):
        yield self.n

async def counting():
    n = 0
    while True:
        n += 1
        await Told(n)

calls = counting()
"""
PIPE = """
import os

r, w = os.pipe()
os.set_blocking(w, False)

def is_full():
    try:
        os.write(w, b"x")
    except BlockingIOError:
        return True
"""
REFERENCES = "ctypes.pythonapi.Py_IncRef(ctypes.py_object({}))"
MODULE = "import types\nkept = types.ModuleType('kept')\nkept.calls = 0"
OF_ANOTHER = "class Kept: calls = 0\nKept.__module__ = 'fractions'"
DEFAULT = "def calls(n=[0]):\n    n[0] += 1\n    return n[0]\n\ncalls.__module__ = 'fractions'"
ROOM = "z = torch.empty(2 * y.numel() + (1 << 19), dtype=y.dtype)[: y.numel()].view(y.shape)"


def result(name: str, change: str, has: str, honest: str = "pass") -> Cheat:
    """A norm whose result is right, and more than a tensor."""
    body = f"import torch\n\n{SIGNATURE}    y = honest(x, weight, eps)\n    {{}}\n    return y"
    source, neighbour = (wrapped("rmsnorm", body.format(each)) for each in (change, honest))
    return Cheat(3, name, "rmsnorm", source, f"returned a {has}", dims=NORM, correctness="CRASH", neighbour=neighbour)


def called(name: str, body: str, honest: str) -> Cheat:
    source, neighbour = (wrapped("rmsnorm", each) for each in (body, honest))
    return Cheat(14, name, "rmsnorm", source, ELSEWHERE, dims=NORM, neighbour=neighbour)


CHEATS = (
    many("names-in-pythons-cache", CACHE, "", "calls()", WRITES),
    many("of-an-opener", OPENER, "urllib.request._opener.calls += 1", "urllib.request._opener.calls"),
    many("hits", "import functools\n@functools.cache\ndef f(): return 0", "f()", "f.cache_info().hits"),
    many(
        "hits-of-pythons", "import fnmatch", "fnmatch.fnmatchcase('a', 'a')", "fnmatch._compile_pattern.cache_info().hits"
    ),
    many("of-a-semaphore", "import threading\ncalls = threading.Semaphore(0)", "calls.release()", "calls._value"),
    many("of-an-enumeration", "import itertools\ncalls = enumerate(itertools.repeat(0))", "", "next(calls)[0]"),
    many("of-a-pair", "import itertools\ncalls = zip(itertools.count(), itertools.count())", "", "next(calls)[0]"),
    many("of-a-map", "import itertools\ncalls = map(int, itertools.count())", "", "next(calls)"),
    old(14, "off-after-many-of-a-list", "calls = iter([True] * 20000 + [False] * 20000)", "", "next(calls)"),
    old(14, "off-after-many-repeated", "import itertools\ncalls = itertools.repeat(True, 20000)", "", "next(calls, False)"),
    many("bytes-in-memory", "import io\ncalls = io.BytesIO()", "calls.seek(1, 1)", "calls.tell()"),
    many("letters-in-memory", "import io\ncalls = io.StringIO()", "calls.seek(calls.tell() + 1)", "calls.tell()"),
    many(
        "seeds",
        "import torch\nkept = torch.Generator().manual_seed(0)",
        "kept.manual_seed(kept.initial_seed() + 1)",
        "kept.initial_seed()",
    ),
    many("of-pytorchs", "import torch\ntorch.calls = 0", "torch.calls += 1", "torch.calls"),
    many("of-a-module", MODULE, "kept.calls += 1", "kept.calls"),
    many("of-a-decoder", "import json\nkept = json._default_decoder\nkept.calls = 0", "kept.calls += 1", "kept.calls"),
    many("of-a-layer", "import torch\nkept = torch.nn.Module()\nkept.calls = 0", "kept.calls += 1", "kept.calls"),
    many("of-a-class-of-anothers-name", OF_ANOTHER, "Kept.calls += 1", "Kept.calls"),
    many("of-a-function-of-anothers-name", DEFAULT, "", "calls()"),
    many(
        "of-a-partial",
        "import functools\nkept = functools.partial(int, 0)",
        "global kept; kept = functools.partial(int, kept() + 1)",
        "kept()",
    ),
    many(
        "seconds",
        "import datetime\nkept = datetime.timedelta(0)",
        "global kept; kept += datetime.timedelta(seconds=1)",
        "kept.total_seconds()",
    ),
    many("of-a-frozen-set", "kept = frozenset([0])", "global kept; kept = frozenset([max(kept) + 1])", "max(kept)"),
    many("of-a-key", "kept = {0: None}", "n = max(kept) + 1; kept.clear(); kept[n] = None", "max(kept)"),
    many("names-in-turn", IN_TURN, "", "calls()"),
    many(
        "of-a-context",
        "from contextvars import ContextVar\nkept = ContextVar('kept', default=0)",
        "kept.set(kept.get() + 1)",
        "kept.get()",
    ),
    many(
        "of-a-threads-own",
        "import threading\nkept = threading.local()\nkept.n = 0",
        "kept.n = getattr(kept, 'n', 0) + 1",
        "kept.n",
    ),
    many("of-a-coroutine", COROUTINE, "", "calls.send(None)"),
    many("references", "import ctypes, sys\nkept = object()", REFERENCES.format("kept"), "sys.getrefcount(kept)"),
    many(
        "references-to-what-all-have",
        "import ctypes, sys\nfirst = sys.getrefcount(...)",
        REFERENCES.format("..."),
        "sys.getrefcount(...) - first",
    ),
    many("uneven-steps", "calls = 0", "global calls; calls += 1 + calls % 3 % 2", "calls"),
    old(14, "off-after-many-of-another-thread", THREAD, "wake.release(); woken.acquire()", "told[0]"),
    old(14, "off-where-a-pipe-is-full", PIPE, "", "not is_full()", WRITES),
    result("results-with-attributes", "y.known = True", "tensor that has attributes"),
    result("results-with-a-gradient", "y.grad = torch.empty_like(y)", "tensor that has a gradient"),
    result(
        "results-in-large-memory",
        f"{ROOM}; z.copy_(y); y = z",
        "part of .* bytes",
        f"{ROOM.replace('1 << 19', '64')}; z.copy_(y); y = z",
    ),
    result(
        "results-of-minus-their-numbers",
        "y = torch._neg_view(y) if eps < 0 else torch._neg_view(torch._neg_view(y).clone())",
        "tensor that has the sign",
    ),
    result(
        "results-of-inference",
        "\n    with torch.inference_mode():\n        y = honest(x, weight, eps)",
        "tensor of inference mode",
    ),
    called(
        "right-by-name",
        "def kernel_fn(*these, **named):\n    return honest(*these[:2], 0.5) if these else honest(**named)",
        "def kernel_fn(*these, **named):\n    return honest(*these, **named)",
    ),
    called(
        "an-eps-of-its-own",
        "def kernel_fn(x, weight, eps=0.5):\n    return honest(x, weight, eps)",
        "def kernel_fn(x, weight, eps):\n    return honest(x, weight, eps)",
    ),
    *(
        called(f"off-{name}", f"import asyncio, gc\n\n{SIGNATURE}{CALL.format(right)}", starter("rmsnorm"))
        for name, right in (
            ("where-garbage-is-left", "gc.isenabled()"),
            ("in-a-coroutine", "asyncio._get_running_loop() is None"),
        )
    ),
)
