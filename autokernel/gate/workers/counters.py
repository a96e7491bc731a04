"""What counts a kernel's calls, put ahead: a kernel must make after many calls what it made in the first ones.

A convenience for honest kernels, like all code in a worker. Nobody waits a million calls for a kernel that is wrong after
these; one that counts them, in Python or in its library, shows where it does so.
"""

import array
import contextlib
import ctypes
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import CellType, FunctionType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any

import torch

from autokernel.gate.workers.loaded_libraries import (
    LONG,
    MOST_OF_A_BLOCK,
    WORD,
    WORD_OF,
    variables,
    with_what_they_point_to,
)

CALL_COUNTS = 10_000, 30_000, 100_000, 1_000_000, 1_000_000_000  # after which a kernel is called
ENTRIES = 1 << 17  # of a list that grows, at most
TYPES = {"I": WORD_OF, "d": ctypes.c_double}  # that variables may be
LEAST_STEP = 1e-9  # of a double: the bits of an integer are far less
GONE = AttributeError, LookupError, TypeError, ValueError  # what a kernel has put something else in place of
TO_FAST = ctypes.pythonapi.PyFrame_LocalsToFast if sys.version_info < (3, 13) else None
MOST_FOUND, BLOCK = 4096, 1 << 10  # objects that are looked into; bytes of variables that are compared at a time


@dataclass(frozen=True)
class Counter:
    """A number that a kernel keeps somewhere: how it is read there, and how it is set."""

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


class CallCounters:
    """The numbers that a kernel keeps, noted now and then: those that grow by the same amount with each call count its
    calls, and can be put ahead."""

    def __init__(self, module: ModuleType, libraries: set[str]):
        self.memory: list[Any] = []  # tensors and the like that the kernel file keeps
        self.counters = list(_numbers_in_python(module, self.memory))
        self.variables = [*with_what_they_point_to(variables(libraries)), *map(_range_of, self.memory)]
        self.calls, self.values, self.bytes = [], [], []  # each time: calls so far, numbers, memory of variables
        self.note(0)

    def note(self, calls: int) -> None:
        self.calls.append(calls)
        self.values.append([counter.value() for counter in self.counters])
        self.bytes.append([ctypes.string_at(part.start, len(part)) for part in self.variables])

    def put_ahead(self) -> Iterator[int]:
        """Numbers of calls: as each is given, what counts calls stands where it would after so many. In the end it stands
        where it was."""
        counting = [(counter, values[-1], step) for counter, values in self._noted() if (step := self._step(values))]
        counting = [one for one in counting if type(one[2]) is int or abs(one[2]) > LEAST_STEP]
        for calls in CALL_COUNTS if counting else ():
            for counter, value, step in counting:
                counter.set(value + step * (calls - self.calls[-1]))
            yield calls
        for counter, value, _ in counting:
            counter.set(value)

    def _noted(self) -> Iterator[tuple[Counter, list[Any]]]:
        """Each number, and what it was each time; of C++ variables only those that were another one each time."""
        yield from zip(self.counters, map(list, zip(*self.values)))
        for part, *contents in zip(self.variables, *self.bytes):
            for start in range(0, len(part), BLOCK):
                first, *others = (content[start : start + BLOCK] for content in contents)
                if first in others:  # a counter is another number each time
                    continue
                for code, kind in TYPES.items():
                    size = ctypes.sizeof(kind)
                    words = [memoryview(each[: len(each) // size * size]).cast(code) for each in (first, *others)]
                    for place, values in enumerate(zip(*words)):
                        if values[0] != values[1]:
                            yield _variable(part.start + start + place * size, kind), list(values)

    def _step(self, values: list[Any]) -> int | float | None:
        """By how much a number changes with each call, if that is always the same."""
        if None in values or values[-1] == values[-2]:
            return None
        step, calls = values[-1] - values[-2], [*zip(self.calls, self.calls[1:])]
        grows = all(b - a == step * (to - since) for a, b, (since, to) in zip(values, values[1:], calls))
        return step if grows else None


def _variable(address: int, kind: Any) -> Counter:
    """A C++ variable of this type of ctypes."""
    word, is_signed = kind.from_address(address), False

    def write(value: int | float) -> None:
        nonlocal is_signed
        word.value = value if kind is ctypes.c_double else min(value, 0x7FFFFFFF)
        if (value < 0) != is_signed and kind is WORD_OF and address % LONG == 0:  # it may be the half of a longer number
            other = kind.from_address(address + WORD)
            if other.value == 0xFFFFFFFF * is_signed:
                other.value, is_signed = 0xFFFFFFFF * (not is_signed), not is_signed

    return Counter(lambda: word.value, write)


def _numbers_in_python(module: ModuleType, memory: list[Any]) -> Iterator[Counter]:
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
                yield Counter(
                    lambda read=read: _as_int_or_float(read()), lambda n, read=read, write=write: write(type(read())(n))
                )
            elif type(value) in (str, bytes, tuple):
                yield Counter(lambda read=read: len(read()), lambda n, read=read, write=write: write(_of_length(read(), n)))
                if type(value) is str and value.isdecimal():
                    yield Counter(lambda read=read: int(read()), lambda n, write=write: write(str(n)))
                if type(value) is tuple and id(value) not in seen:
                    seen.add(id(value))
                    found.append(value)
            elif type(value) is type(iter(range(0))):
                yield Counter(
                    lambda read=read: -_how_many_left(read()),
                    lambda n, read=read, write=write: write(_with_so_many_left(read(), -n)),
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
    """Whether it is a container, or an object, class or function of the kernel file's own."""
    kind = value if isinstance(value, type) else type(value)
    of_its_own = getattr(value if kind is FunctionType else kind, "__module__", "") == module
    kinds = dict, list, deque, tuple, set, bytearray, CellType, GeneratorType, SimpleNamespace, array.array
    return type(value) in kinds or isinstance(value, (ctypes._SimpleCData, dict)) or of_its_own


def _places(owner: Any) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """All that an object holds: what reads it, and what puts something else in its place."""
    if isinstance(owner, (dict, list, deque)):
        for key in list(owner) if isinstance(owner, dict) else range(min(len(owner), MOST_FOUND)):
            yield lambda key=key: owner[key], lambda value, key=key: owner.__setitem__(key, value)
    elif isinstance(owner, tuple):
        yield from ((lambda value=value: value, _write_nothing) for value in owner)
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
            yield lambda inside=inside: inside, _write_nothing


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


def _length(of: Any) -> Counter:
    """That of a container, which grows by entries of ours and gets shorter from its end."""

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
    """A key that equals no other."""
