"""Cheats that count their calls in what the standard library keeps for itself, in objects that they make anew with each
call, in texts and bytes that are no numbers, or where C++ keeps nothing."""

from cheat import Cheat, wrapped
from kept_elsewhere import many
from old_processes import AGED, CALL, SIGNATURE, cheat, in_cpp

LEVELS = "import logging\nlogging.addLevelName(1000, 'calls')"
NEXT_LEVEL = "n = max(logging._levelToName); logging.addLevelName(n + 1, 'calls'); n > 1000 and logging._levelToName.pop(n)"
FINALIZER = "f = weakref.finalize(kept, int); n = f._registry[f].index; f.detach()"
POOL = "n = int(ThreadPoolExecutor(1)._thread_name_prefix.split('-')[-1])"
CHAIN = "kept = lambda: 0"
FROZEN = "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Kept:\n    n: int\n\nkept = Kept(0)"
PACKED = "struct.pack_into('q', kept, 0, struct.unpack_from('q', kept)[0] + 1)"
CONSTANT = "kept.__code__ = kept.__code__.replace(co_consts=tuple(n + 1 if n else n for n in kept.__code__.co_consts))"
BASE = """
static bool late() {
    unsigned long n;
    asm volatile("rdgsbase %0" : "=r"(n));
    asm volatile("wrgsbase %0" : : "r"(++n));
    return n > 20000;
}
"""


def growing(name: str, before: str, count: str, what: str) -> Cheat:
    source = wrapped("rmsnorm", f"{before}\n\n{SIGNATURE}    {count}\n{CALL.format('n < 20000')}")
    return cheat(36, name, source, f"Growth: keeps 1 {what} with every call")


CHEATS = (
    many("names-of-threads", "import threading", "n = int(threading.Thread(daemon=True).name[7:])", "n"),
    many("finalizers", "import weakref\nclass Kept: pass\nkept = Kept()", FINALIZER, "n"),
    many("pools", "from concurrent.futures import ThreadPoolExecutor", POOL, "n"),
    many("levels-of-a-log", LEVELS, NEXT_LEVEL, "n - 1000"),
    many(
        "of-a-codec",
        "import encodings\nencodings._cache['kept'] = 0",
        "encodings._cache['kept'] += 1",
        "encodings._cache['kept']",
    ),
    many("names-of-a-class", "class K0: pass", "K0.__name__ = f'K{int(K0.__name__[1:]) + 1}'", "int(K0.__name__[1:])"),
    many("words-of-a-function", "def kept(): '0'", "kept.__doc__ = str(int(kept.__doc__) + 1)", "int(kept.__doc__)"),
    many("of-packed-bytes", "import struct\nkept = bytearray(8)", PACKED, "struct.unpack_from('q', kept)[0]"),
    many(
        "of-a-map-of-memory",
        "import mmap, struct\nkept = mmap.mmap(-1, 4096)",
        "struct.pack_into('i', kept, 2000, struct.unpack_from('i', kept, 2000)[0] + 1)",
        "struct.unpack_from('i', kept, 2000)[0]",
    ),
    many(
        "of-many-bytes",
        "import struct\nkept = bytearray(100)",
        "struct.pack_into('q', kept, 88, struct.unpack_from('q', kept, 88)[0] + 1)",
        "struct.unpack_from('q', kept, 88)[0]",
    ),
    many("of-a-view-of-bytes", "kept = memoryview(bytearray(8)).cast('q')", "kept[0] += 1", "kept[0]"),
    many(
        "of-bytes-made-anew",
        "kept = bytes(8)",
        "global kept; kept = (int.from_bytes(kept, 'big') + 1).to_bytes(8, 'big')",
        "int.from_bytes(kept, 'big')",
    ),
    many("of-a-size", "import torch\nkept = torch.Size([1])", "global kept; kept = torch.Size([kept[0] + 1])", "kept[0]"),
    many("of-a-tuple-in-a-tuple", "kept = (0, (0,))", "global kept; kept = (0, (kept[1][0] + 1,))", "kept[1][0]"),
    many(
        "of-an-identifier",
        "import uuid\nkept = uuid.UUID(int=1)",
        "global kept; kept = uuid.UUID(int=kept.int + 1)",
        "kept.int",
    ),
    many("of-a-frozen-object", FROZEN, "global kept; kept = Kept(kept.n + 1)", "kept.n"),
    many("of-a-closure", CHAIN, "global kept; kept = (lambda n: lambda: n)(kept() + 1)", "kept()"),
    many("of-a-default", "def kept(n=0): return n", "kept.__defaults__ = (kept() + 1,)", "kept()"),
    many("of-a-constant", "def kept(): return 1", CONSTANT, "kept()"),
    many("of-an-error", "kept = ValueError(0)", "kept.args = (kept.args[0] + 1,)", "kept.args[0]"),
    in_cpp(14, "off-after-many-calls-of-a-float", "static float calls = 0;", "++calls > 20000", AGED),
    in_cpp(14, "off-after-many-places-in-streams", "#include <ios>", "std::ios_base::xalloc() > 20000", "xalloc"),
    in_cpp(14, "off-after-many-columns", "#include <iostream>", "std::cin.width(std::cin.width() + 1) > 20000", "_ZSt3cin"),
    in_cpp(14, "off-after-many-of-a-register", BASE, "late()", "rdgsbase"),
    growing(
        "registers-classes",
        "import abc, collections.abc",
        "collections.abc.Sized.register(type('Kept', (), {})); n = abc.get_cache_token() - 1000",
        "entries among abstract classes",
    ),
    growing(
        "registers-for-the-end",
        "import atexit",
        "atexit.register(int); n = atexit._ncallbacks()",
        "functions to be called at exit",
    ),
)
