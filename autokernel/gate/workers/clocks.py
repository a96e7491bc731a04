"""The clocks and process numbers that a kernel can ask, Python's and its C++ library's, put ahead: a process made old.

A convenience for honest kernels, like all code in a worker. A kernel must make after months what it made before.
"""

import contextlib
import copyreg
import ctypes
import datetime
import os
import pickle
import queue
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from autokernel.gate.workers.loaded_libraries import called_functions, loaded

CLOCKS = "time", "monotonic", "perf_counter", "process_time", "thread_time"  # each in nanoseconds, too
DATES = "gmtime", "localtime", "ctime"  # of now, where no other time is given
PROCESS_NUMBERS = "getpid", "getppid"
WHEN_FORKED = "before", "after_in_parent", "after_in_child"  # of os.register_at_fork()
AHEAD_S, OTHER_PROCESS = 100 * 86400 + 4099, 7919  # by which they are put ahead; odd numbers, of many remainders
# Who waits for longer in Python looks at the clock so often, and is given that time when it is put ahead.
LONG_S, LOOKS_S = 5.0, 0.005  # so often all of them together, however many there are
MANY_WAIT = 100  # and are all given that time
USED = 10**9  # what Linux counts of an old process: page faults, switches
NANOSECONDS, SECONDS = ctypes.CFUNCTYPE(ctypes.c_int64), ctypes.CFUNCTYPE(ctypes.c_double)
# What a C++ library may call that tells the time (build.ALLOWED_SYMBOLS).
CLOCKS_OF_LIBRARIES = {
    b"_ZNSt6chrono3_V212steady_clock3nowEv": (NANOSECONDS, AHEAD_S * 10**9),
    b"_ZNSt6chrono3_V212system_clock3nowEv": (NANOSECONDS, AHEAD_S * 10**9),
    b"omp_get_wtime": (SECONDS, AHEAD_S),
}
# What it may call that waits until such a time, which is the last argument, of so many.
DEADLINES = {
    b"pthread_cond_clockwait": 4,
    b"pthread_cond_timedwait": 3,
    b"pthread_mutex_clocklock": 3,
    b"pthread_mutex_timedlock": 2,
}


class Clock:
    """The clocks and process numbers of Python and of C++ libraries, which can be put ahead. None ever goes back. What a
    kernel file has registered to be done in a forked process is done then, too."""

    def __init__(self, module: str) -> None:
        """module: the name of the kernel file's."""
        self.ahead, self.replaced = 0, {}  # by address: what a library calls instead
        self.of_python: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, Python's own, and ours
        self.in_children: list[Callable[[], Any]] = []
        now, today = time.time, time.localtime
        for name in CLOCKS:
            self._replace(time, name, self._later(getattr(time, name), AHEAD_S))
            self._replace(time, f"{name}_ns", self._later(getattr(time, f"{name}_ns"), AHEAD_S * 10**9))
        for name, step in (("clock_gettime", AHEAD_S), ("clock_gettime_ns", AHEAD_S * 10**9)):
            if hasattr(time, name):
                self._replace(time, name, self._later(getattr(time, name), step))
        for name in PROCESS_NUMBERS:
            self._replace(os, name, self._later(getattr(os, name), OTHER_PROCESS))

        def then() -> float:
            return now() + self.ahead * AHEAD_S

        for name in DATES:
            self._replace(time, name, _with_other_now(getattr(time, name), 0, then))
        self._replace(time, "asctime", _with_other_now(time.asctime, 0, lambda: today(then())))
        self._replace(time, "strftime", _with_other_now(time.strftime, 1, lambda: today(then())))
        times, usage = os.times, resource.getrusage
        self._replace(os, "times", lambda: type(seen := times())(map(self._ahead_of, seen)))
        self._replace(resource, "getrusage", lambda who: type(seen := usage(who))(map(self._ahead_of, seen)))
        self._replace_waits()
        self._replace(datetime, "datetime", _datetime_ahead(lambda: datetime.timedelta(seconds=self.ahead * AHEAD_S)))
        self._note_what_is_done_in_children(module)

    def _later(self, known: Callable[..., Any], step: int) -> Callable[..., Any]:
        return lambda *which: known(*which) + self.ahead * step

    def _replace(self, module: ModuleType, name: str, ours: Any) -> None:
        known = getattr(module, name)
        ours = ours if isinstance(ours, type) else _Function(ours)
        ours.__name__, ours.__qualname__, ours.__module__ = name, name, module.__name__
        self.of_python.append((module, name, known, ours))
        setattr(module, name, ours)

    def _ahead_of(self, used: float) -> float:
        """Seconds that a process has taken, or what else it has used, if it has used any."""
        return used + self.ahead * (AHEAD_S if isinstance(used, float) else USED * bool(used))

    def _replace_waits(self) -> None:
        """Python's threads that wait for long wait by the clock that is put ahead."""
        self.waiting = 0  # threads
        sleep, wait, look, now = time.sleep, threading.Condition.wait, select.select, time.monotonic.function

        def until(seconds: float | None, once: Callable[[float | None], Any]) -> Any:
            """once(), again and again, until it returns something or the time is over."""
            if seconds is None or seconds < LONG_S:
                return once(seconds)
            end_s, done = now() + seconds, None
            self.waiting += 1
            try:
                while not done and (left := end_s - now()) > 0:
                    done = once(min(left, LOOKS_S * self.waiting))
            finally:
                self.waiting -= 1
            return done

        def wait_in_turns(condition: threading.Condition, timeout: float | None = None) -> bool:
            return bool(until(timeout, lambda seconds: wait(condition, seconds)))

        def look_in_turns(*files: Any) -> Any:
            nothing = [], [], []
            timeout = files[3] if len(files) > 3 else None
            return until(timeout, lambda s: None if (seen := look(*files[:3], s)) == nothing and s else seen) or nothing

        self.give_turn = lambda: sleep(2 * LOOKS_S * min(self.waiting, MANY_WAIT)) if self.waiting else None
        for module, name in ((threading, "_time"), (queue, "time")):  # by which these count what is left of a time limit
            self._replace(module, name, now)
        self._replace(time, "sleep", lambda seconds: until(seconds, sleep))
        self._replace(select, "select", look_in_turns)
        wait_in_turns.__name__, wait_in_turns.__qualname__ = wait.__name__, wait.__qualname__
        wait_in_turns.__module__ = wait.__module__
        self.of_python.append((threading.Condition, "wait", wait, wait_in_turns))
        threading.Condition.wait = wait_in_turns

    def _note_what_is_done_in_children(self, module: str) -> None:
        register = os.register_at_fork

        def noting(**functions: Callable[[], Any]) -> None:
            if sys._getframe(2).f_globals.get("__name__") == module:
                self.in_children += [functions[when] for when in WHEN_FORKED if when in functions]
            register(**functions)

        self._replace(os, "register_at_fork", noting)

    @contextlib.contextmanager
    def as_python_has_it(self) -> Iterator[None]:
        """Meanwhile modules have Python's own functions again, by which nobody can tell. Only while none is put ahead."""
        for module, name, known, _ in self.of_python:
            setattr(module, name, known)
        try:
            yield
        finally:
            for module, name, _, ours in self.of_python:
                setattr(module, name, ours)

    def put_ahead(self, libraries: set[str]) -> None:
        """Once more by AHEAD_S, and in another process. libraries: files of the kernel's, which ask clocks themselves."""
        self.ahead += 1
        for function in self.in_children:
            function()
        for library in loaded(libraries):
            for address, name in called_functions(library):
                if address in self.replaced:
                    continue
                called = ctypes.c_void_p.from_address(address)
                if found := CLOCKS_OF_LIBRARIES.get(name):
                    self.replaced[address] = self._replace_in_library(called, *found)
                elif count := DEADLINES.get(name):
                    self.replaced[address] = self._replace_wait(called, count)
        self.give_turn()

    def _replace_in_library(self, called: ctypes.c_void_p, kind: Any, step: int) -> Any:
        """Put in the place of the function that is called there one that tells the time ahead."""
        known = kind(called.value)
        return _put_in_place(called, kind(lambda: known() + self.ahead * step))

    def _replace_wait(self, called: ctypes.c_void_p, count: int) -> Any:
        """The same of one that waits until a time, which was told ahead: else it waits for months."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * count)
        known = kind(called.value)

        def wait(*given: int) -> int:
            seconds, nanoseconds = (ctypes.c_int64 * 2).from_address(given[-1])
            until = (ctypes.c_int64 * 2)(max(0, seconds - self.ahead * AHEAD_S), nanoseconds)
            return known(*given[:-1], ctypes.addressof(until))

        return _put_in_place(called, kind(wait))


class _Function:
    """A function that is no method of a class that has it, as Python's own in C is none, and is pickled by its name."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)

    def __reduce__(self) -> str:
        return self.__qualname__


def _put_in_place(called: ctypes.c_void_p, ours: Any) -> Any:
    """`ours`, which is called there from now on. (The builder leaves these addresses writable.)"""
    called.value = ctypes.cast(ours, ctypes.c_void_p).value
    return ours


def _with_other_now(known: Callable[..., Any], place: int, then: Callable[[], Any]) -> Callable[..., Any]:
    """`known`, a function of module time that takes a time as its argument number `place`, or else that of now: then `then`
    says what now is."""

    def told(*given: Any) -> Any:
        is_now = len(given) <= place or given[place] is None
        return known(*given[:place], then()) if is_now and len(given) >= place else known(*given)

    return told


def _datetime_ahead(ahead: Callable[[], datetime.timedelta]) -> type:
    """datetime.datetime with a now() that is so far ahead. What it makes are objects of Python's own class."""
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

    copyreg.pickle(known, lambda one: (datetime.datetime, one.__reduce_ex__(pickle.DEFAULT_PROTOCOL)[1]))  # by this name
    return Told
