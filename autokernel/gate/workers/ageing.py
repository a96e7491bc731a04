"""A process made old in a moment: its clocks, its number and whatever counts its calls are put far ahead, where a kernel
must make what it made before.

A convenience for honest kernels, like all code in a worker. Nobody waits a million calls for a kernel that is wrong after
these; one that counts them, in Python or in its library, shows where it does so.
"""

import array
import contextlib
import ctypes
import datetime
import itertools
import operator
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import CellType, FunctionType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any

import torch

CLOCKS = "time", "monotonic", "perf_counter", "process_time", "thread_time"  # each in nanoseconds, too
DATES = "gmtime", "localtime", "ctime"  # of now, where no other time is given
NUMBERS = "getpid", "getppid"
AHEAD_S, OTHER_PROCESS = 100 * 86400 + 4099, 7919  # by which they are put ahead; odd numbers, of many remainders
CALLS = 10_000, 30_000, 100_000, 1_000_000, 1_000_000_000  # after which a kernel is called
ENTRIES = 1 << 17  # of a list that grows, at most
NANOSECONDS, SECONDS = ctypes.CFUNCTYPE(ctypes.c_int64), ctypes.CFUNCTYPE(ctypes.c_double)
# What a C++ library may call that tells the time (build.ALLOWED_SYMBOLS).
OF_LIBRARIES = {
    b"_ZNSt6chrono3_V212steady_clock3nowEv": (NANOSECONDS, AHEAD_S * 10**9),
    b"_ZNSt6chrono3_V212system_clock3nowEv": (NANOSECONDS, AHEAD_S * 10**9),
    b"omp_get_wtime": (SECONDS, AHEAD_S),
}
MOST_FOUND, MOST_BYTES, BLOCK = 4096, 1 << 20, 1 << 10  # objects that are looked into; of a library's variables
WORD_OF = ctypes.c_uint32
WORD, LONG = ctypes.sizeof(WORD_OF), ctypes.sizeof(ctypes.c_uint64)
KINDS = {"I": WORD_OF, "d": ctypes.c_double}  # that variables may be
LEAST_STEP = 1e-9  # of a double: the bits of an integer are far less
MOST_OF_A_BLOCK = 1 << 12  # bytes on the heap
THREADS = b"pthread_create", b"_ZNSt6thread"  # of a library: they may wait for a variable that counts
# Of elf(5). Where a library is loaded, glibc makes addresses of what its dynamic section has; others leave it as it is.
PT_LOAD, PT_DYNAMIC, PT_TLS, PT_GNU_RELRO, WRITABLE = 1, 2, 7, 0x6474E552, 2
DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL, DT_PLTRELSZ = 5, 6, 7, 8, 23, 2
RELA, SYMBOL = 24, 24  # bytes of an entry
GONE = AttributeError, LookupError, TypeError, ValueError  # what a kernel has put something else in place of
PAGE = os.sysconf("SC_PAGE_SIZE")
TO_FAST = ctypes.pythonapi.PyFrame_LocalsToFast if sys.version_info < (3, 13) else None


class Clock:
    """The clocks and process numbers of Python and of C++ libraries, which can be put ahead. None ever goes back. What a
    kernel file has registered to be done in a forked process is done then, too."""

    def __init__(self, module: str) -> None:
        """module: the name of the kernel file's."""
        self.ahead, self.replaced = 0, {}  # by address: what a library calls instead
        self.of_python: list[tuple[ModuleType, str, Any, Any]] = []  # where a clock is, Python's own, and what is there
        self.in_children: list[Callable[[], Any]] = []
        now, today = time.time, time.localtime
        for name in CLOCKS:
            self._replace(time, name, self._later(getattr(time, name), AHEAD_S))
            self._replace(time, f"{name}_ns", self._later(getattr(time, f"{name}_ns"), AHEAD_S * 10**9))
        for name, step in (("clock_gettime", AHEAD_S), ("clock_gettime_ns", AHEAD_S * 10**9)):
            if hasattr(time, name):
                self._replace(time, name, self._later(getattr(time, name), step))
        for name in NUMBERS:
            self._replace(os, name, self._later(getattr(os, name), OTHER_PROCESS))

        def then() -> float:
            return now() + self.ahead * AHEAD_S

        for name in DATES:
            self._replace(time, name, _of_now(getattr(time, name), 0, then))
        self._replace(time, "asctime", _of_now(time.asctime, 0, lambda: today(then())))
        self._replace(time, "strftime", _of_now(time.strftime, 1, lambda: today(then())))
        times = os.times
        self._replace(os, "times", lambda: type(seen := times())((*seen[:4], seen[4] + self.ahead * AHEAD_S)))
        self._replace(datetime, "datetime", _dates(lambda: datetime.timedelta(seconds=self.ahead * AHEAD_S)))
        self._note_what_is_done_in_children(module)

    def _later(self, known: Callable[..., Any], step: int) -> Callable[..., Any]:
        return lambda *which: known(*which) + self.ahead * step

    def _replace(self, module: ModuleType, name: str, told: Any) -> None:
        known = getattr(module, name)
        told.__name__, told.__qualname__, told.__module__ = name, name, module.__name__
        self.of_python.append((module, name, known, told))
        setattr(module, name, told)

    def _note_what_is_done_in_children(self, module: str) -> None:
        register = os.register_at_fork

        def noting(**functions: Callable[[], Any]) -> None:
            if sys._getframe(1).f_globals.get("__name__") == module and "after_in_child" in functions:
                self.in_children.append(functions["after_in_child"])
            register(**functions)

        self._replace(os, "register_at_fork", noting)

    @contextlib.contextmanager
    def as_python_has_it(self) -> Iterator[None]:
        """Where none has been put ahead yet: its own functions and classes, by which nobody can tell."""
        for module, name, known, _ in self.of_python:
            setattr(module, name, known)
        try:
            yield
        finally:
            for module, name, _, told in self.of_python:
                setattr(module, name, told)

    def put_ahead(self, libraries: set[str]) -> None:
        self.ahead += 1
        for function in self.in_children:
            function()
        for library in _loaded(libraries):
            for address, name in _calls(library):
                if address not in self.replaced and (found := OF_LIBRARIES.get(name)):
                    self.replaced[address] = self._told_to_libraries(ctypes.c_void_p.from_address(address), *found)

    def _told_to_libraries(self, called: ctypes.c_void_p, kind: Any, step: int) -> Any:
        """What is called there from now on: the builder leaves these addresses writable."""
        known = kind(called.value)
        told = kind(lambda: known() + self.ahead * step)
        called.value = ctypes.cast(told, ctypes.c_void_p).value
        return told


def _of_now(known: Callable[..., Any], place: int, then: Callable[[], Any]) -> Callable[..., Any]:
    """A function of time.py, which takes the time by this place, if not that of now."""

    def told(*given: Any) -> Any:
        is_now = len(given) <= place or given[place] is None
        return known(*given[:place], then()) if is_now and len(given) >= place else known(*given)

    return told


def _dates(ahead: Callable[[], datetime.timedelta]) -> type:
    """datetime.datetime, whose now is so far ahead; what it makes are Python's own."""
    known = datetime.datetime

    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, known)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, known)

    class Told(known, metaclass=Kind):
        def __new__(cls, *words: Any, **options: Any) -> datetime.datetime:
            return known.__new__(known if cls is Told else cls, *words, **options)

        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return known.now(tz) + ahead()

        @classmethod
        def today(cls) -> datetime.datetime:
            return known.today()  # of time.time(), which is ahead

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return known.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)

    return Told


def _calls(library: "Library") -> Iterator[tuple[int, bytes]]:
    """Where a library has the addresses of functions of others, and their names: by its relocations (elf(5))."""
    dynamic = next((library.base + s.address for s in library.segments if s.kind == PT_DYNAMIC), None)
    known: dict[int, int] = {}
    while dynamic and (tag := ctypes.c_int64.from_address(dynamic).value):
        value = ctypes.c_uint64.from_address(dynamic + 8).value
        is_relative = tag in (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL) and value < library.base
        known[tag] = value + library.base * is_relative
        dynamic += 16
    for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        for place in range(known.get(table, 0), known.get(table, 0) + known.get(size, 0), RELA):
            where, symbol = (ctypes.c_uint64.from_address(place + at).value for at in (0, 8))
            if symbol >> 32:
                name = ctypes.c_uint32.from_address(known[DT_SYMTAB] + SYMBOL * (symbol >> 32)).value
                yield library.base + where, ctypes.string_at(known[DT_STRTAB] + name)


@dataclass(frozen=True)
class Counter:
    """A number, how it is read and how it is set."""

    read: Callable[[], Any]
    write: Callable[[Any], None]

    def value(self) -> int | float | None:
        """None where there is no number now."""
        with contextlib.suppress(*GONE):
            value = self.read()
            return value if type(value) in (int, float) else None

    def set(self, value: int | float) -> None:
        with contextlib.suppress(*GONE):
            self.write(value)


class Ahead:
    """What a kernel keeps, seen after some calls each time; what grows by as much with each is put ahead."""

    def __init__(self, module: ModuleType, libraries: set[str]):
        self.memory: list[Any] = []  # tensors and the like that the kernel file keeps
        self.counters = list(_in_python(module, self.memory))
        self.variables = [*_with_what_they_point_to(_variables(libraries)), *map(_range_of, self.memory)]
        self.calls, self.values, self.bytes = [], [], []  # of each time: calls so far, numbers, variables of libraries
        self.note(0)

    def note(self, calls: int) -> None:
        self.calls.append(calls)
        self.values.append([counter.value() for counter in self.counters])
        self.bytes.append([ctypes.string_at(part.start, len(part)) for part in self.variables])

    def of_many_calls(self) -> Iterator[int]:
        """So many calls, each when what counts them has been put there; at the end it is as it was."""
        known = [(counter, values[-1], step) for counter, values in self._seen() if (step := self._step(values))]
        known = [one for one in known if type(one[2]) is int or abs(one[2]) > LEAST_STEP]
        for calls in CALLS if known else ():
            for counter, value, step in known:
                counter.set(value + step * (calls - self.calls[-1]))
            yield calls
        for counter, value, _ in known:
            counter.set(value)

    def _seen(self) -> Iterator[tuple[Counter, list[Any]]]:
        yield from zip(self.counters, map(list, zip(*self.values)))
        for part, *contents in zip(self.variables, *self.bytes):
            for start in range(0, len(part), BLOCK):
                first, *others = (content[start : start + BLOCK] for content in contents)
                if first in others:  # a counter is another number each time
                    continue
                for code, kind in KINDS.items():
                    size = ctypes.sizeof(kind)
                    words = [memoryview(each[: len(each) // size * size]).cast(code) for each in (first, *others)]
                    for place, values in enumerate(zip(*words)):
                        if values[0] != values[1]:
                            yield _variable(part.start + start + place * size, kind), list(values)

    def _step(self, values: list[Any]) -> int | float | None:
        """By how much a number changes with each call, always."""
        if None in values or values[-1] == values[-2]:
            return None
        step, calls = values[-1] - values[-2], [*zip(self.calls, self.calls[1:])]
        grows = all(b - a == step * (to - since) for a, b, (since, to) in zip(values, values[1:], calls))
        return step if grows else None


class Segment(ctypes.Structure):
    """ELF's Elf64_Phdr."""

    _fields_ = [("kind", ctypes.c_uint32), ("flags", ctypes.c_uint32)]
    _fields_ += [(name, ctypes.c_uint64) for name in ("offset", "address", "physical", "file_size", "size", "align")]


class Loaded(ctypes.Structure):
    """dl_iterate_phdr(3)'s struct dl_phdr_info."""

    _fields_ = [("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("segments", ctypes.POINTER(Segment))]
    _fields_ += [("count", ctypes.c_uint16), ("adds", ctypes.c_uint64), ("subs", ctypes.c_uint64)]
    _fields_ += [("tls_module", ctypes.c_size_t), ("tls", ctypes.c_void_p)]


@dataclass(frozen=True)
class Library:
    """One that is loaded. `tls`: where this thread's own variables lie."""

    name: str
    base: int
    segments: list[Segment]
    tls: int | None


VISIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Loaded), ctypes.c_size_t, ctypes.c_void_p)
# Looked up at import: in a worker nothing is, later. macOS has none.
VISIT_ALL = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None)


def _loaded(libraries: set[str]) -> list[Library]:
    found = []

    def visit(loaded: Any, size: int, data: Any) -> int:
        of = loaded.contents
        if (name := os.fsdecode(of.name or b"")) in libraries:
            found.append(Library(name, of.base, [of.segments[i] for i in range(of.count)], of.tls))
        return 0

    if VISIT_ALL is not None and sys.platform == "linux":
        VISIT_ALL(VISIT(visit), None)
    return found


def _variables(libraries: set[str]) -> list[range]:
    """Where variables of these libraries lie, this thread's own among them, but of those that may have threads."""
    found = []
    for library in _loaded(libraries):
        if _has_threads(library.name):
            continue
        constant = max((library.base + s.address + s.size for s in library.segments if s.kind == PT_GNU_RELRO), default=0)
        for segment in library.segments:
            start = library.base + segment.address
            end = start + segment.size
            if segment.kind == PT_LOAD and segment.flags & WRITABLE:
                found.append(range(max(start, -(-constant // PAGE) * PAGE), end))
            elif segment.kind == PT_TLS and library.tls:
                found.append(range(library.tls, library.tls + segment.size))
    whole = (range(-(-part.start // LONG) * LONG, part.stop // WORD * WORD) for part in found)
    return [part for part in whole if 0 < len(part) <= MOST_BYTES]


def _has_threads(library: str) -> bool:
    with open(library, "rb") as file:
        content = file.read()
    return any(name in content for name in THREADS)


def _with_what_they_point_to(variables: list[range]) -> list[range]:
    """Beside a library's variables what these have on the heap, and what lies there has in turn: blocks of glibc's, whose
    sizes stand before them. Not where there is CUDA, whose run-time library is a part of each kernel's, with its heap."""
    if sys.platform != "linux" or not variables or torch.cuda.is_initialized():
        return variables
    heap = _heap()
    found, looked_at, left = {part.start: part for part in variables}, deque(variables), MOST_BYTES
    while looked_at and left > 0:
        part = looked_at.popleft()
        for at in memoryview(ctypes.string_at(part.start, len(part) // LONG * LONG)).cast("Q"):
            if at in heap and at not in found and (size := _block_size(at, heap)):
                found[at] = range(at, at + size)
                looked_at.append(found[at])
                left -= size
    return list(found.values())


def _heap() -> range:
    """Where malloc() has small blocks of the first thread."""
    with open("/proc/self/maps") as file:
        bounds = [line.split()[0].split("-") for line in file if "[heap]" in line]
    return range(int(bounds[0][0], 16), int(bounds[-1][1], 16)) if bounds else range(0)


def _block_size(at: int, heap: range) -> int:
    """Of a block that malloc() has returned; 0 where it is none, or is large. Its size stands before it, and in the
    next one's that it is in use."""
    if at % 16 or at - 16 < heap.start:
        return 0
    said = ctypes.c_uint64.from_address(at - LONG).value
    size = said & ~7
    if said & 6 or not 32 <= size <= MOST_OF_A_BLOCK or size % 16 or at - 16 + size + LONG not in heap:
        return 0
    in_use = ctypes.c_uint64.from_address(at - LONG + size).value & 1
    return size - LONG if in_use else 0


def _variable(address: int, kind: Any) -> Counter:
    word, is_signed = kind.from_address(address), False

    def write(value: int | float) -> None:
        nonlocal is_signed
        word.value = value if kind is ctypes.c_double else min(value, 0x7FFFFFFF)
        if (value < 0) != is_signed and kind is WORD_OF and address % LONG == 0:  # it may be the half of a longer number
            other = kind.from_address(address + WORD)
            if other.value == 0xFFFFFFFF * is_signed:
                other.value, is_signed = 0xFFFFFFFF * (not is_signed), not is_signed

    return Counter(lambda: word.value, write)


def _in_python(module: ModuleType, memory: list[Any]) -> Iterator[Counter]:
    """The numbers that a kernel file keeps: in its variables, closures, containers and objects, generators too, and lengths
    of what grows. `memory`: to which tensors are added, and what else has numbers in memory of its own."""
    seen, found = {id(vars(module))}, deque([vars(module)])
    while found and len(seen) < MOST_FOUND:
        owner = found.popleft()
        if type(owner) in (list, deque, dict, set, bytearray) and getattr(owner, "maxlen", None) is None:
            yield _length(owner)
        for read, write in _places(owner):
            try:
                value = read()
            except GONE:  # a slot, or a cell, that is empty
                continue
            if type(value) in (int, float):
                yield Counter(read, write)
            elif isinstance(value, (int, float, complex, Fraction, Decimal)) and type(value) is not bool:
                yield Counter(lambda read=read: _plain(read()), lambda n, read=read, write=write: write(type(read())(n)))
            elif type(value) in (str, bytes, tuple):
                yield Counter(lambda read=read: len(read()), lambda n, read=read, write=write: write(_of_length(read(), n)))
                if type(value) is str and value.isdecimal():
                    yield Counter(lambda read=read: int(read()), lambda n, write=write: write(str(n)))
                if type(value) is tuple and id(value) not in seen:
                    seen.add(id(value))
                    found.append(value)
            elif type(value) is type(iter(range(0))):
                yield Counter(
                    lambda read=read: -_left(read()), lambda n, read=read, write=write: write(_with_left(read(), -n))
                )
            elif type(value) is itertools.count:
                yield Counter(lambda read=read: read().__reduce__()[1][0], lambda n, write=write: write(itertools.count(n)))
            elif id(value) not in seen and len(_range_of(value)):
                seen.add(id(value))
                memory.append(value)
            elif id(value) not in seen and _is_looked_into(value, module.__name__):
                seen.add(id(value))
                found.append(value)


def _range_of(value: Any) -> range:
    """Where a small tensor lies, or an array or a structure of ctypes."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
        start, nbytes = value.data_ptr(), value.nbytes if value.is_contiguous() else 0
    elif isinstance(value, (ctypes.Array, ctypes.Structure)):
        start, nbytes = ctypes.addressof(value), ctypes.sizeof(value)
    else:
        return range(0)
    return range(start, start + nbytes // WORD * WORD) if start % LONG == 0 and nbytes <= MOST_OF_A_BLOCK else range(0)


def _is_looked_into(value: Any, module: str) -> bool:
    kind = value if isinstance(value, type) else type(value)
    of_its_own = getattr(value if kind is FunctionType else kind, "__module__", "") == module
    kinds = dict, list, deque, tuple, set, bytearray, CellType, GeneratorType, SimpleNamespace, array.array
    return type(value) in kinds or isinstance(value, (ctypes._SimpleCData, dict)) or of_its_own


def _places(owner: Any) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Where something can be in an object: what reads it there, and what puts another there."""
    if isinstance(owner, (dict, list, deque)):
        for key in list(owner) if isinstance(owner, dict) else range(min(len(owner), MOST_FOUND)):
            yield lambda key=key: owner[key], lambda value, key=key: owner.__setitem__(key, value)
    elif isinstance(owner, tuple):
        yield from ((lambda value=value: value, _nowhere) for value in owner)
    elif isinstance(owner, array.array):
        yield from (
            (lambda i=i: owner[i], lambda v, i=i: owner.__setitem__(i, v)) for i in range(min(len(owner), MOST_FOUND))
        )
    elif isinstance(owner, (set, bytearray)):  # of which there is but a length
        return
    elif isinstance(owner, GeneratorType):
        for name in owner.gi_frame.f_locals if owner.gi_frame else ():
            yield lambda name=name: owner.gi_frame.f_locals[name], lambda v, name=name: _set_local(owner.gi_frame, name, v)
    elif isinstance(owner, ctypes._SimpleCData):
        yield lambda: owner.value, lambda value: setattr(owner, "value", value)
    elif isinstance(owner, CellType):
        yield lambda: owner.cell_contents, lambda value: setattr(owner, "cell_contents", value)
    else:
        for name in (*getattr(owner, "__dict__", {}), *getattr(type(owner), "__slots__", ())):
            if not name.startswith("__"):
                yield lambda name=name: getattr(owner, name), lambda value, name=name: setattr(owner, name, value)
        for inside in (getattr(owner, "__closure__", None), getattr(owner, "__defaults__", None)):
            yield lambda inside=inside: inside, _nowhere


def _nowhere(value: Any) -> None:
    """A tuple, which stays as it is."""


def _plain(number: Any) -> int | float:
    """One of another class, as Python's own."""
    return int(number) if isinstance(number, int) else float(number.real)


def _of_length(value: Any, length: int) -> Any:
    """A text, bytes or a tuple that is longer by its last element, again and again."""
    return value + value[-1:] * (min(length, ENTRIES) - len(value)) if len(value) <= length else value[:length]


def _left(numbers: Any) -> int:
    return operator.length_hint(numbers)


def _with_left(numbers: Any, left: int) -> Any:
    """An iterator of a range with so many numbers left; none where it would be at its end."""
    _, (whole,), *place = numbers.__reduce__()
    whole = whole[place[0] if place else 0 :]
    return iter(whole[len(whole) - max(0, left) :]) if left <= len(whole) else iter(range(whole.stop - left, whole.stop))


def _set_local(frame: Any, name: str, value: Any) -> None:
    """Of a function that waits to go on; before Python 3.13 what is written has to be carried over."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):
        TO_FAST(ctypes.py_object(frame), 0)


def _length(of: Any) -> Counter:
    def write(length: int) -> None:
        if type(of) is set:  # which has no last one
            of.difference_update([one for one in of if type(one) is _Entry][: max(0, len(of) - length)])
        while type(of) is not set and len(of) > length:
            of.popitem() if type(of) is dict else of.pop()
        more = range(length - len(of)) if of and length <= ENTRIES else ()
        if type(of) in (dict, set):
            of.update({_Entry(): None for _ in more})
        elif more:
            of.extend(itertools.repeat(of[-1], len(more)))

    return Counter(lambda: len(of), write)


class _Entry:
    """A key that is no other's."""
