"""What counts a kernel's calls, put ahead: a kernel must make after many calls what it made in the first ones.

A convenience for honest kernels, like all code in a worker. Nobody waits a million calls for a kernel that is wrong after
these; one that counts them, in Python or in its library, shows where it does so.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from autokernel.gate.workers.kept_numbers import (
    Counter,
    Elsewhere,
    caches_of_python,
    memory_of_its_own,
    numbers_in_python,
    numbers_of_python,
    words_of,
)
from autokernel.gate.workers.loaded_libraries import LONG, WORD, WORD_OF, variables, with_what_they_point_to

CALL_COUNTS = 10_000, 30_000, 100_000, 1_000_000, 1_000_000_000  # after which a kernel is called
TYPES = {"I": WORD_OF, "d": ctypes.c_double, "f": ctypes.c_float}  # that variables may be
LEAST_STEP = 1e-9  # of a floating-point number: the bits of an integer are far less
BLOCK = 1 << 10  # bytes of variables that are compared at a time
Counting = tuple[Counter, int | float, int | float]  # what counts calls, its value at last, its step


class CallCounters:
    """The numbers that a kernel keeps, noted now and then: those that grow by the same amount with each call count its
    calls, and can be put ahead."""

    def __init__(self, module: ModuleType, libraries: set[str], elsewhere: Elsewhere):
        """elsewhere: what the kernel has put into modules and objects that are not its own."""
        self.memory: list[Any] = []  # tensors and the like that the kernel file keeps
        self.counters = [*numbers_in_python(module, elsewhere, self.memory), *numbers_of_python(self.memory)]
        self.variables = [*with_what_they_point_to(variables(libraries)), *map(memory_of_its_own, self.memory)]
        self.variables += map(words_of, caches_of_python()[1])
        self.calls, self.values, self.bytes = [], [], []  # each time: calls so far, numbers, memory of variables
        self.note(0)

    def note(self, calls: int) -> None:
        self.calls.append(calls)
        self.values.append([counter.value() for counter in self.counters])
        self.bytes.append([ctypes.string_at(part.start, len(part)) for part in self.variables])
        if len(self.calls) == 2:  # of all that there are, those that many calls have left as they were count none
            moved = [i for i, (before, after) in enumerate(zip(*self.values)) if before != after]
            self.counters = [self.counters[i] for i in moved]
            self.values = [[values[i] for i in moved] for values in self.values]

    def put_ahead(self, call: Callable[[int], None]) -> None:
        """Makes `call`, which is told numbers of calls: each time what counts calls stands where it would after so many. In
        the end it stands where it was."""
        found = [(counter, values[-1], step) for counter, values in self._noted() if (step := self._step(counter, values))]
        found = [one for one in found if type(one[2]) is int or abs(one[2]) > LEAST_STEP]
        counting = list(found)
        for calls in CALL_COUNTS:
            while counting:
                try:
                    self._set(counting, calls)
                    call(calls)
                    break
                except LookupError:  # of places that are used in turn there is none of so high a number
                    if not (turned := self._turned(counting, calls, call)):
                        raise
                    self._set(turned, self.calls[-1])
                    counting = [one for one in counting if one not in turned]
        self._set(found, self.calls[-1])

    def _set(self, counting: list[Counting], calls: int) -> None:
        for counter, value, step in counting:
            counter.set(value + step * (calls - self.calls[-1]) if calls != self.calls[-1] else value)

    def _turned(self, counting: list[Counting], failing: int, call: Callable[[int], None]) -> list[Counting]:
        """Those that begin anew before a call after so many would fail: the last call that does not is looked for, and the
        one after that is made, too."""
        last = self.calls[-1]
        while failing - last > 1:
            middle = (last + failing) // 2
            try:
                self._set(counting, middle)
                call(middle)
                last = middle
            except LookupError:
                failing = middle
        self._set(counting, last)
        before = [counter.value() for counter, *_ in counting]
        call(last)
        after = [counter.value() for counter, *_ in counting]
        turned = [
            one for one, was, now in zip(counting, before, after) if None not in (was, now) and (now - was) * one[2] < 0
        ]
        if turned:
            call(last + 1)
        return turned

    def is_in_memory(self) -> bool:
        """Whether something in a library, or in memory that the kernel keeps, counts calls."""
        return any(self._step(counter, values) for counter, values in self._noted_in_memory())

    def _noted(self) -> Iterator[tuple[Counter, list[Any]]]:
        """Each number, and what it was each time."""
        yield from zip(self.counters, map(list, zip(*self.values)))
        yield from self._noted_in_memory()

    def _noted_in_memory(self) -> Iterator[tuple[Counter, list[Any]]]:
        """The same of C++ variables, but only of those that were another one each time."""
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

    def _step(self, counter: Counter, values: list[Any]) -> int | float | None:
        """By how much a number changes with each call, if that is always the same; or else, for one that may vary and has
        moved on in one direction each time, with each call if not by as much, by how much on average."""
        if None in values or values[-1] == values[-2]:
            return None
        step, calls = values[-1] - values[-2], [*zip(self.calls, self.calls[1:])]
        if all(b - a == step * (to - since) for a, b, (since, to) in zip(values, values[1:], calls)):
            return step
        up, of_one_class = values[-1] > values[0], len(set(map(type, values))) == 1
        if abs(values[-1] - values[0]) < self.calls[-1] - self.calls[0]:  # as of a place in a few that are used in turn
            return None
        if counter.varies and of_one_class and all(b != a and (b > a) == up for a, b in zip(values, values[1:])):
            apart = math.gcd(*(b - a for a, b in zip(values, values[1:])))  # such as of places that are aligned
            steps = abs(values[-1] - values[0]) // (self.calls[-1] - self.calls[0]) // apart
            return max(1, steps) * (apart if up else -apart)
        return None


def _variable(address: int, kind: Any) -> Counter:
    """A C++ variable of this type of ctypes."""
    word, is_signed = kind.from_address(address), False

    def write(value: int | float) -> None:
        nonlocal is_signed
        word.value = min(value, 0x7FFFFFFF) if kind is WORD_OF else value
        if (value < 0) != is_signed and kind is WORD_OF and address % LONG == 0:  # it may be the half of a longer number
            other = kind.from_address(address + WORD)
            if other.value == 0xFFFFFFFF * is_signed:
                other.value, is_signed = 0xFFFFFFFF * (not is_signed), not is_signed

    return Counter(lambda: word.value, write)
