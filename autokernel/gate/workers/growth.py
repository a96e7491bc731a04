"""What a kernel takes with every call and keeps: memory, threads, open files, entries in Python's tables. A server that
calls it runs out of them.

A convenience for honest kernels, like all code in a worker: a leak is found before the model has it.
"""

import abc
import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import os
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autokernel.gate.workers.kept_numbers import caches_of_python

PARTS, PART_S = 3, 0.01  # what grows in each of so many parts of this length goes on growing
FEWEST, MOST, LONGEST_S = 16, 2000, 4.0  # calls of a part; of slow kernels, longer than this in all, nothing is said
OF_A_CALL = 0.5  # threads and files a call, or the like: fewer are a pool that fills
BYTES_OF_A_CALL = 1024  # that malloc() has given out, which it tells to the byte
LEAST_BYTES = 1 << 18  # of memory in a part: allocators' own reserves grow by less, or not in each part
IDLE_S, LONG_S = 0.02, 0.5  # no thread waits awake for longer: libgomp's do for milliseconds, Intel's for 0.2 s
LOOK_S, BUSY = 0.06, 0.2  # how long threads are looked at; the part of a core that one has at least, if it computes
PAGE = os.sysconf("SC_PAGE_SIZE")


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2. Bytes are in use in its heaps, `uordblks`, and in blocks apart, `hblkhd`."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def _heap() -> Callable[[], Heap] | None:
    """None before glibc 2.33, and elsewhere. Looked up at import: in a worker nothing is, later."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is not None:
        ask.restype = Heap
    return ask


HEAP = _heap()


class Growth(RuntimeError):
    """A kernel keeps something of each call, or cores after all of them."""


@dataclass(frozen=True)
class Usage:
    """The names of the fields are what is said of one that grows."""

    threads: int
    open_files: int
    bytes_in_use: int
    bytes_of_memory: int
    functions_to_be_called_at_exit: int
    entries_among_abstract_classes: int

    @staticmethod
    def now() -> "Usage":
        heap = HEAP() if HEAP else Heap()
        return Usage(
            threads=len(os.listdir("/proc/self/task")),
            open_files=len(os.listdir("/proc/self/fd")),
            bytes_in_use=heap.uordblks + heap.hblkhd,
            bytes_of_memory=bytes_of_memory(heap),
            functions_to_be_called_at_exit=atexit._ncallbacks(),
            entries_among_abstract_classes=abc.get_cache_token(),
        )


def bytes_of_memory(heap: Heap | None = None) -> int:
    """What this process has in memory, without what malloc() holds for later, which grows for a while; 0 but on Linux."""
    if sys.platform != "linux":
        return 0
    heap = heap or (HEAP() if HEAP else Heap())
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE - heap.fordblks


def check_growth(call: Callable[[], object]) -> None:
    """Makes many calls in several parts; raises Growth where there is more after every part than before. On Linux."""
    if sys.platform != "linux":
        return
    seconds = min(_seconds(call) for _ in range(3))
    count = min(MOST, max(FEWEST, int(PART_S / max(seconds, 1e-6))))
    if PARTS * count * seconds > LONGEST_S:
        return
    caches = caches_of_python()[0]
    used, files = [Usage.now()], [_files() | _keys(caches)]
    for _ in range(PARTS):
        for _ in range(count):
            call()
        used.append(Usage.now())
        files.append(_files() | _keys(caches))
    for name in files[0]:
        if all(before.get(name) != after.get(name) for before, after in zip(files, files[1:])):
            raise Growth(
                f"writes to {name} with every call, or moves on in it, and computes what is neither a file's nor a cache's"
            )
    if _grown(used, count):
        gc.collect()
        used[-1] = Usage.now()  # without what waited for a collection
    for name, each in _grown(used, count).items():
        raise Growth(f"keeps {each:.4g} {name.replace('_', ' ')} with every call, for good")


def check_idle() -> None:
    """Raises Growth where threads are at work though nobody calls."""
    for seconds in (IDLE_S, LONG_S):
        time.sleep(seconds)
        started_s = time.process_time()
        time.sleep(LOOK_S)
        if time.process_time() - started_s < BUSY * LOOK_S:
            return
    raise Growth("goes on computing after its calls, on cores that are its model's")


def _keys(tables: dict[str, dict[Any, Any]]) -> dict[str, Any]:
    return {f"Python's {name}": list(map(id, table)) for name, table in tables.items()}


def _files() -> dict[str, Any]:
    """What Linux tells of each file that this process has open, but for standard streams, or has in its folder: when it was
    written to, the position in it, what an event counts. Only plain files where there is CUDA, which has events."""
    streams, found = {_status(fd)[:2] for fd in range(3)}, {}
    plain_alone = torch.cuda.is_initialized()
    for descriptor in os.listdir("/proc/self/fdinfo"):
        if plain_alone and not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            continue
        with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}") as file:
            said, status = file.read(), _status(int(descriptor))
            if status[:2] not in streams:
                found[f"its open file {descriptor}"] = said, status, _bytes_to_read(int(descriptor))
    for entry in os.scandir("."):
        found[entry.name] = _status(entry.path)
    return found


def _bytes_to_read(descriptor: int) -> int:
    """That a pipe or a socket holds."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


def _status(file: int | str) -> tuple[int, ...]:
    """Which file it is (the first two), how large, and when it was written to."""
    try:
        status = os.stat(file)
    except OSError:  # closed, or gone
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _grown(used: list[Usage], count: int) -> dict[str, float]:
    """What grows in every part of `count` calls, and by how much with each call."""
    grown = {}
    for name in Usage.__dataclass_fields__:
        values = [getattr(usage, name) for usage in used]
        least = {"bytes_in_use": BYTES_OF_A_CALL * count, "bytes_of_memory": LEAST_BYTES}
        if all(after - before >= least.get(name, OF_A_CALL * count) for before, after in zip(values, values[1:])):
            grown[name] = (values[-1] - values[0]) / (count * PARTS)
    return grown
