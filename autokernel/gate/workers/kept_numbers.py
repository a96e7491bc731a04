"""The numbers that a kernel keeps in Python, wherever it keeps them: how each is read there, and how it is set.

A convenience for honest kernels, like all code in a worker.
"""

import array
import contextlib
import ctypes
import datetime
import decimal
import fractions
import functools
import gc
import io
import itertools
import mmap
import operator
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import (
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch

from autokernel.gate.workers.loaded_libraries import LONG, MOST_OF_A_BLOCK, WORD

ENTRIES = 1 << 17  # of a list that grows, at most
# What reading or writing a place raises in which a kernel has put something else since.
GONE = (AttributeError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError)
TO_FAST = ctypes.pythonapi.PyFrame_LocalsToFast if sys.version_info < (3, 13) else None
MOST_FOUND = 4096  # objects that are looked into
# Of an object that is made anew with each call: how deep its parts are looked for, and in how many of each.
DEPTH, FEW_PARTS = 3, 16
NUMBERS = int, float, str  # what the standard library counts in, beside iterators and lengths
WORDS = 64  # bytes that may be numbers in another form, at most
FEW_ENTRIES = 64  # of a table, whose last key may be a number
# Classes in C whose objects count in machine words, behind their class: iterators and these.
LRU_CACHE = type(functools.lru_cache(int))
IN_WORDS = io.BytesIO, io.StringIO, LRU_CACHE, decimal.Context, itertools.count
# Objects that stay as they are, which a kernel makes anew to count: their numbers are those of which they can be made.
MADE_ANEW = range, slice, frozenset, complex, datetime.timedelta, datetime.date, datetime.datetime, functools.partial
CONTAINERS = dict, list, deque, tuple, set, bytearray, CellType, GeneratorType, CoroutineType, FrameType, array.array
# What has nothing of a kernel's own in it, or numbers of its own.
NO_OBJECTS = type, ModuleType, FunctionType, CodeType, torch.Tensor, torch.dtype, torch.device, torch.UntypedStorage
Place = tuple[Callable[[], Any], Callable[[Any], None]]  # what reads it, and what puts something else there
DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Counter:
    """A number that a kernel keeps somewhere: how it is read there, and how it is set. `varies`: one that grows each time,
    by whatever, may count calls, too."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    varies: bool = False

    def value(self) -> int | float | None:
        """None where there is no number now."""
        with contextlib.suppress(*GONE):
            value = self.read()
            return value if type(value) in (int, float) else None

    def set(self, value: int | float) -> None:
        with contextlib.suppress(*GONE):
            self.write(value)


@dataclass(frozen=True)
class Elsewhere:
    """What a kernel has put into modules, classes and objects that are not its own: an owner of these places."""

    places: list[Place]
    tables: list[dict[Any, Any]] = field(default_factory=list)  # to which it has added names: of modules


def numbers_in_python(module: ModuleType, elsewhere: Elsewhere, memory: list[Any]) -> Iterator[Counter]:
    """The numbers that a kernel file keeps: in its variables, closures, containers and objects, generators and threads,
    too; lengths of what grows, and how many references there are. `memory`: to which is added what has numbers in memory of
    its own, such as tensors and iterators."""
    frames = [
        frame for first in sys._current_frames().values() for frame in _frames(first) if frame.f_globals is vars(module)
    ]
    seen, found = {id(vars(module))}, deque([vars(module), elsewhere, *frames])
    yield from map(_last_key, elsewhere.tables)
    while found and len(seen) < MOST_FOUND:
        owner = found.popleft()
        if type(owner) in (list, deque, dict, set, bytearray) and getattr(owner, "maxlen", None) is None:
            yield _length(owner)
        if type(owner) is dict and len(owner) <= FEW_ENTRIES:
            yield _last_key(owner)
        for read, write in _places(owner):
            try:
                value = read()
            except GONE:  # a slot, or a cell, that is empty
                continue
            if type(value) in weakref.ProxyTypes:  # it says that it is what it stands for, which may be gone
                continue
            is_new = id(value) not in seen
            yield from _numbers_at(value, read, write)
            yield from _numbers_inside(value, read, write, module, DEPTH)
            if is_new and not isinstance(value, (int, float, str, bytes)):
                seen.add(id(value))
                yield _references(value)
                if len(memory_of_its_own(value)):
                    memory.append(value)
                if _is_looked_into(value, module):
                    found.append(value)


def _numbers_at(value: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> Iterator[Counter]:
    """Those that a place with this value has in it."""
    if type(value) in (int, float):
        yield Counter(read, write, varies=type(value) is int)
    elif isinstance(value, (int, float, complex, fractions.Fraction, decimal.Decimal)) and type(value) is not bool:
        yield Counter(lambda: _as_int_or_float(read()), lambda n: write(type(read())(n)))
    elif type(value) in (bytearray, memoryview):
        yield from _numbers_in_bytes(value, read, write)
    elif type(value) in (str, bytes, tuple):
        if type(value) is bytes:
            yield from _numbers_in_bytes(value, read, write)
        yield Counter(lambda: len(read()), lambda n: write(_of_length(read(), n)))
        if type(value) is str and DIGITS.search(value):
            yield Counter(lambda: _number_in(read()), lambda n: write(_with_number(read(), n)))
    elif type(value) in MADE_ANEW:
        for i in range(len(_made_of(value))):
            yield Counter(lambda i=i: _made_of(read())[i], lambda n, i=i: write(_made_anew(read(), i, n)))
    elif type(value) is type(iter(range(0))):
        yield Counter(lambda: -_how_many_left(read()), lambda n: write(_with_so_many_left(read(), -n)))
    elif type(value) is itertools.repeat and _how_many_left(value):
        yield Counter(lambda: -_how_many_left(read()), lambda n: _leave(read(), max(0, -n)))
    elif type(value) is itertools.count:
        yield Counter(lambda: read().__reduce__()[1][0], lambda n: write(itertools.count(n)))


def _numbers_inside(value: Any, read: Callable[[], Any], write: Callable[[Any], None], module: ModuleType, depth: int):
    """Those in an object that a kernel may make anew with each call: each is looked up from the place that stays."""
    for get, put in _parts(value) if _is_looked_into(value, module) else ():

        def read_here(get: Callable[[Any], Any] = get) -> Any:
            return get(read())

        def write_here(part: Any, put: Callable[[Any, Any], Any] = put) -> None:
            if (whole := put(read(), part)) is not None:
                write(whole)

        try:
            part = get(value)
        except GONE:
            continue
        yield from _numbers_at(part, read_here, write_here)
        if depth > 1:
            yield from _numbers_inside(part, read_here, write_here, module, depth - 1)


def _parts(value: Any) -> Iterator[tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    """Of an object with few of them: what reads each, and what puts another there, or makes a whole one with it."""
    if isinstance(value, (tuple, list, dict)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        put = _tuple_with if isinstance(value, tuple) else lambda key, of, part: of.__setitem__(key, part)
        yield from ((operator.itemgetter(key), partial(put, key)) for key in keys[:FEW_PARTS])
    elif type(value) is FunctionType:
        yield from ((partial(_in_cell, i), partial(_put_in_cell, i)) for i in range(len(value.__closure__ or ())))
        yield operator.attrgetter("__code__.co_consts"), _put_constants
        for name in ("__defaults__", "__doc__", "__name__"):
            yield operator.attrgetter(name), partial(_put_attribute, name)
    elif not isinstance(value, (torch.Tensor, *CONTAINERS, *NO_OBJECTS)) or isinstance(value, type):
        own = ("args",) if isinstance(value, BaseException) else ("__name__", "__doc__") if isinstance(value, type) else ()
        slots = getattr(type(value), "__slots__", ())
        names = (*own, *getattr(value, "__dict__", {}), *([slots] if isinstance(slots, str) else slots))
        for name in [name for name in names if name in own or not name.startswith("__")][:FEW_PARTS]:
            yield operator.attrgetter(name), partial(_put_attribute, name)


def _numbers_in_bytes(value: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> Iterator[Counter]:
    """Whole numbers of up to 64 bits, as a processor has them or the other way round."""
    if not 1 < len(_bytes_of(value)) <= WORDS:
        return
    for start in range(0, len(_bytes_of(value)), LONG):
        for order in ("little", "big"):

            def read_here(start: int = start, order: str = order) -> int:
                return int.from_bytes(_bytes_of(read())[start : start + LONG], order)

            def write_here(n: int, start: int = start, order: str = order) -> None:
                whole = _bytes_of(read())
                length = len(whole[start : start + LONG])
                word = (int(n) % (1 << 8 * length)).to_bytes(length, order)
                if type(read()) is bytes:
                    write(whole[:start] + word + whole[start + length :])
                else:
                    memoryview(read()).cast("B")[start : start + length] = word

            yield Counter(read_here, write_here)


def _bytes_of(value: Any) -> bytes:
    return bytes(value) if len(value) <= WORDS else b""


def _tuple_with(place: int, whole: Any, part: Any) -> Any:
    parts = (*whole[:place], part, *whole[place + 1 :])
    return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)


def _in_cell(place: int, function: FunctionType) -> Any:
    return function.__closure__[place].cell_contents


def _put_in_cell(place: int, function: FunctionType, part: Any) -> None:
    function.__closure__[place].cell_contents = part


def _put_constants(function: FunctionType, constants: tuple[Any, ...]) -> None:
    function.__code__ = function.__code__.replace(co_consts=constants)


def _put_attribute(name: str, of: Any, part: Any) -> None:
    """Of one that lets none of its own be changed, too, such as a frozen dataclass."""
    try:
        object.__setattr__(of, name, part)
    except TypeError:  # of a class
        setattr(of, name, part)


def caches_of_python() -> tuple[dict[str, dict[Any, Any]], list[Any]]:
    """The standard library's own caches: tables, by name, and those of functions."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in sys.stdlib_module_names]
    names = [(f"{module.__name__}.{name}", value) for module in modules for name, value in list(vars(module).items())]
    tables = {name: value for name, value in names if type(value) is dict and "cache" in name.lower()}
    return tables, list({id(value): value for _, value in names if type(value) is LRU_CACHE}.values())


def numbers_of_python(memory: list[Any]) -> Iterator[Counter]:
    """The numbers that the standard library's modules keep for themselves, their classes, and objects of these: how many
    threads it has named, which levels of a log. A call that goes through them may count on them. `memory`: as above."""
    modules = [m for m in list(sys.modules.values()) if type(m) is ModuleType and _is_standard(m.__name__)]
    values = (value for module in modules for value in list(vars(module).values()))
    others = {id(one): one for one in values if _has_numbers_of_its_own(one)}
    for owner in (*modules, *others.values()):
        for name, value in list(vars(owner).items()):
            kind = type(value)
            if kind is MethodWrapperType or _counts_in_words(kind):
                counted = value.__self__ if kind is MethodWrapperType else value
                memory.extend([counted] if _counts_in_words(type(counted)) else [])
            elif kind in NUMBERS and not name.startswith("__"):
                yield from _numbers_at(value, partial(_named, owner, name), partial(setattr, owner, name))
            elif kind in (dict, list, deque, set) and not name.startswith("__"):
                yield _length(value)
                yield from [_last_key(value)] if kind is dict else []
                for place in _places(value) if kind is not set and len(value) <= FEW_ENTRIES else ():
                    if type(entry := place[0]()) in NUMBERS:
                        yield from _numbers_at(entry, *place)


def _named(owner: Any, name: str) -> Any:
    return vars(owner)[name]


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _has_numbers_of_its_own(value: Any) -> bool:
    """Whether it is a class of the standard library, or an object of one that has attributes."""
    kind = value if isinstance(value, type) else type(value)
    is_other = not _is_standard(kind.__module__) or issubclass(kind, NO_OBJECTS)
    return not is_other and isinstance(getattr(value, "__dict__", None), (dict, MappingProxyType))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def memory_of_its_own(value: Any) -> range:
    """Where a small tensor lies, an array or a structure of ctypes, bytes that can be written to, or what an object in C
    has behind its class."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
        start, nbytes = value.data_ptr(), value.nbytes if value.is_contiguous() else 0
    elif isinstance(value, (ctypes.Array, ctypes.Structure)):
        start, nbytes = ctypes.addressof(value), ctypes.sizeof(value)
    elif type(value) in (mmap.mmap, memoryview, bytearray):
        start, nbytes = _written_to(value)
    elif _counts_in_words(type(value)):
        return words_of(value)
    else:
        return range(0)
    return range(start, start + nbytes // WORD * WORD) if start % LONG == 0 and nbytes <= MOST_OF_A_BLOCK else range(0)


def _written_to(value: Any) -> tuple[int, int]:
    """Where these bytes are, and how many; none if they are closed, apart from each other or for reading only."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(value)), memoryview(value).nbytes
    except (TypeError, ValueError, BufferError):
        return 0, 0


def words_of(value: Any) -> range:
    """Of an object in C: its memory, behind the count of references and its class."""
    return range(id(value) + object.__basicsize__, id(value) + type(value).__basicsize__ // LONG * LONG)


def _counts_in_words(kind: type) -> bool:
    if kind is itertools.repeat:  # forever, where its word is below zero
        return False
    is_iterator = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools", "collections", "_collections")
    return kind in IN_WORDS or is_iterator and kind is not GeneratorType


def _is_looked_into(value: Any, module: ModuleType) -> bool:
    """Whether it is a container, an object of any class, or a class or function of the kernel file's own."""
    kind = type(value)
    if kind is FunctionType:
        return value.__globals__ is vars(module)
    if issubclass(kind, type):
        theirs = sys.modules.get(value.__module__)
        return value.__module__ == module.__name__ or getattr(theirs, value.__name__, None) is not value
    if kind is ModuleType:
        return sys.modules.get(value.__name__) is not value
    known = kind in CONTAINERS or issubclass(
        kind, (ctypes._SimpleCData, dict, tuple, ContextVar, torch.Generator, MethodType)
    )
    if known or _counts_in_words(kind) or kind is torch.Tensor:
        return True
    return not issubclass(kind, NO_OBJECTS) and (hasattr(value, "__dict__") or hasattr(kind, "__slots__"))


def _places(owner: Any) -> Iterator[Place]:
    """All that an object holds: what reads it, and what puts something else in its place."""
    if isinstance(owner, Elsewhere):
        yield from owner.places
    elif isinstance(owner, (dict, list, deque)):
        for key in list(owner) if isinstance(owner, dict) else range(min(len(owner), MOST_FOUND)):
            yield lambda key=key: owner[key], lambda value, key=key: owner.__setitem__(key, value)
    elif isinstance(owner, array.array):
        yield from (
            (lambda i=i: owner[i], lambda v, i=i: owner.__setitem__(i, _fitting(v, owner)))
            for i in range(min(len(owner), MOST_FOUND))
        )
    elif isinstance(owner, (set, bytearray)):  # of which there is but a length
        return
    elif isinstance(owner, (GeneratorType, CoroutineType, FrameType)):
        frame = owner if type(owner) is FrameType else getattr(owner, "gi_frame", None) or getattr(owner, "cr_frame", None)
        for name in frame.f_locals if frame else ():
            yield lambda name=name: frame.f_locals[name], lambda v, name=name: _set_local(frame, name, v)
    elif isinstance(owner, ctypes._SimpleCData):
        yield lambda: owner.value, lambda value: setattr(owner, "value", value)
    elif isinstance(owner, CellType):
        yield lambda: owner.cell_contents, lambda value: setattr(owner, "cell_contents", value)
    elif isinstance(owner, ContextVar):
        yield owner.get, owner.set
    elif isinstance(owner, torch.Generator):
        yield owner.initial_seed, owner.manual_seed
    elif isinstance(owner, (tuple, MethodType)) or _counts_in_words(type(owner)):
        yield from ((lambda value=value: value, _write_nothing) for value in gc.get_referents(owner))
    else:
        slots = getattr(type(owner), "__slots__", ())
        for name in (*getattr(owner, "__dict__", {}), *([slots] if isinstance(slots, str) else slots)):
            if not name.startswith("__"):
                yield lambda name=name: getattr(owner, name), lambda value, name=name: setattr(owner, name, value)
        if isinstance(owner, torch.Tensor):
            yield lambda: owner._version, lambda n: torch._C._autograd._unsafe_set_version_counter((owner,), (n,))
        for inside in (getattr(owner, "__closure__", None), getattr(owner, "__defaults__", None)):
            yield lambda inside=inside: inside, _write_nothing


def _fitting(number: int | float, numbers: array.array) -> int | float:
    """The number, or the one nearest to it that the array has room for: where a count that does not wrap stays."""
    if isinstance(number, float) or numbers.typecode in "fd":
        return number
    least, bits = (0, 0) if numbers.typecode.isupper() else (-1 << 8 * numbers.itemsize - 1, 1)
    return min(max(number, least), (1 << 8 * numbers.itemsize - bits) - 1)


def _write_nothing(value: Any) -> None:
    """For the elements of a tuple, which stays as it is."""


def _as_int_or_float(number: Any) -> int | float:
    """A number of any class."""
    return int(number) if isinstance(number, int) else float(number.real)


def _of_length(value: Any, length: int) -> Any:
    """A text, bytes or a tuple of this length: cut, or with its last element repeated."""
    return value + value[-1:] * (min(length, ENTRIES) - len(value)) if len(value) <= length else value[:length]


def _how_many_left(numbers: Any) -> int:
    return operator.length_hint(numbers)


def _leave(repeated: Any, left: int) -> None:
    """So many times, of an itertools.repeat, whose last word that is."""
    ctypes.c_ssize_t.from_address(words_of(repeated)[-LONG]).value = left


def _with_so_many_left(numbers: Any, left: int) -> Any:
    """An iterator of a range with so many numbers left; none where it would be at its end."""
    _, (whole,), *place = numbers.__reduce__()
    whole = whole[place[0] if place else 0 :]
    return iter(whole[len(whole) - max(0, left) :]) if left <= len(whole) else iter(range(whole.stop - left, whole.stop))


def _set_local(frame: Any, name: str, value: Any) -> None:
    """Of a function that waits to go on; before Python 3.13 what is written has to be carried over."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):
        TO_FAST(ctypes.py_object(frame), 0)


def _number_in(text: str) -> int:
    """The last one."""
    return int(DIGITS.findall(text)[-1])


def _with_number(text: str, number: int) -> str:
    """In the place of the last one."""
    *_, last = DIGITS.finditer(text)
    return f"{text[: last.start()]}{number}{text[last.end() :]}"


def _made_of(value: Any) -> tuple[Any, ...]:
    """Of one of MADE_ANEW."""
    if type(value) in (frozenset, functools.partial):
        return tuple(value) if type(value) is frozenset else value.args
    return value.__reduce__()[1]


def _made_anew(value: Any, place: int, number: int | float) -> Any:
    given = list(_made_of(value))
    given[place] = number
    if type(value) is frozenset:
        return frozenset(given)
    return (
        functools.partial(value.func, *given, **value.keywords) if type(value) is functools.partial else type(value)(*given)
    )


def _references(to: Any) -> Counter:
    """How many there are; more are added, and only these taken away."""
    count, at_last, added = ctypes.c_ssize_t.from_address(id(to)), 0, 0

    def read() -> int:
        nonlocal at_last
        at_last = count.value - added
        return at_last

    def write(number: int) -> None:
        nonlocal added
        wanted = max(0, number - at_last)
        count.value += wanted - added
        added = wanted

    return Counter(read, write)


def _last_key(of: dict[Any, Any]) -> Counter:
    """The number in it."""

    def last() -> Any:
        return next(reversed(of), None)

    def write(number: int) -> None:
        key = last()
        of[_with_number(key, number) if isinstance(key, str) else number] = of.pop(key)

    return Counter(lambda: _number_in(last()) if type(last()) is str else last(), write)


def _length(of: Any) -> Counter:
    """That of a container, which grows by entries of ours and gets shorter from its end."""

    def write(length: int) -> None:
        if type(of) is set:  # which has no last one
            of.difference_update([one for one in of if isinstance(one, _Entry)][: max(0, len(of) - length)])
        while type(of) is not set and len(of) > length:
            of.popitem() if type(of) is dict else of.pop()
        more = range(length - len(of)) if of and length <= ENTRIES else ()
        if more and type(of) in (dict, set):
            last = next(reversed(of)) if type(of) is dict else next(iter(of))
            entries = (_entry_like(last) for _ in more)
            of.update(dict.fromkeys(entries, of[last]) if type(of) is dict else entries)
        elif more:
            of.extend(itertools.repeat(of[-1], len(more)))

    return Counter(lambda: len(of), write)


class _Entry:
    """A key that equals no other."""

    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__


@functools.cache
def _kind_of_entry(kind: type) -> type:
    """Of keys beside those of `kind`, which are used as these are: compared, taken apart, read."""
    try:
        return type(_Entry.__name__, (_Entry, kind), {})
    except TypeError:  # of a class that has none derived from it, as bool
        return _Entry


def _entry_like(key: Any) -> Any:
    kind = _kind_of_entry(type(key))
    return kind(key) if isinstance(key, (int, float, str, bytes, tuple)) and kind is not _Entry else _Entry()
