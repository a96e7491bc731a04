"""What no kernel may replace, rewrite, hide, empty or override, for it is the model's: functions, classes, tables and
operators of PyTorch and Python in its process.

A convenience for honest kernels, like process_state.py. The warm parent notes once, for all workers, what there is; a
worker notes anew only what the gate itself has changed in it since.
"""

import array
import atexit
import builtins
import collections
import contextlib
import ctypes
import enum
import functools
import gc
import importlib.machinery
import inspect
import linecache
import math
import operator
import os
import platform
import random
import re
import reprlib
import sys
import threading
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch.utils._config_module import ConfigModule

from autokernel.gate.workers.kept_numbers import Elsewhere
from autokernel.gate.workers.process_state import ProcessChange

LAYERS = {base for kind in filter(inspect.isclass, vars(torch.nn).values()) for base in kind.__mro__}
LAYERS = {base for base in LAYERS if base.__module__.startswith("torch.nn.")}
WHOLE_CLASSES = {*LAYERS, torch.Tensor, torch.autograd.Function, torch.optim.Optimizer}
WHOLE_MODULES = {torch, torch.nn.functional, torch.nn.init, torch.linalg, torch.fft, torch.special, torch.autograd}
WHOLE_MODULES |= {builtins, functools, math, os, random, threading, time}
STANDARD = frozenset(sys.stdlib_module_names)
PYTHONS = {*STANDARD, "autokernel", "__main__"}  # the modules, beside PyTorch's, that are looked at
# Of other modules than those above these: the rest of their values may change by themselves.
KEPT = FunctionType, BuiltinFunctionType, type, ModuleType
# Values of PyTorch's modules and classes that are settings: a bool, but for one that tells what was done; what is said to
# be enabled or not, if only once it is set; constants, by their names.
NO_SETTING = re.compile("initiali[sz]ed|registered|loaded|imported|warned|checked|next|count", re.IGNORECASE)
ENABLED, PLAIN = re.compile("enable", re.IGNORECASE), (bool, int, float, str)
# What modules of Python's have by a public name, and no code of theirs sets again: sys.platform, signal.SIGINT, …
FIXED = (*PLAIN, bytes, tuple, frozenset, enum.Enum, re.Pattern, SimpleNamespace)
# What tables and lists of PyTorch's have in them is there to stay, but for what was kept to be found faster.
TABLES, LISTS = (dict, collections.OrderedDict, collections.defaultdict), (list, set)
NO_TABLE = re.compile("cache|^__|SERIALIZED_TYPE|backend_capability")  # entries of the latter are replaced by imports
# The same of the standard library's, but for what it notes there while it works.
NO_TABLE_OF_PYTHONS = re.compile(
    "cache|^__|environ|registry|^_?(modules|active|limbo|dangling|descriptors)|modulesby|filesby"
)
NOT_WRAPPED = torch.overrides.get_default_nowrap_functions()  # which only a function has
# Classes of PyTorch's to which parts of it add their own as they are imported; of any class, what is made when asked for.
GROWING_CLASSES = {"CacheInfo", "Placement"}
MADE_WHEN_ASKED_FOR = {"__slotnames__", "__annotations__", "__doc__", "__signature__"}
# Of an object that all code shares: the values that are there to stay. And the classes of those that change by themselves.
OF_OBJECTS, NO_OBJECTS = (bool, str, *KEPT), {"_GenericAlias", "ModuleSpec", "local", "cached_property", "Token"}
# Tables and lists of these are called for each tensor, layer or step, by whoever has put something into them.
HOOKS = re.compile("hook", re.IGNORECASE)
BUILT_IN = frozenset(vars(builtins))
SHARES = 4  # in which all is looked at now and then
# What a function of Python's is made of, which can be changed in place; of those of these modules and of the above it is.
REWRITTEN = ("torch.nn.", "torch.optim.", "torch.autograd.", "torch.functional", "torch._tensor", "torch.utils.data.")
PARTS = "__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__"  # the last two by native code alone
FUNCTION_PARTS = tuple(map(operator.attrgetter, PARTS))
INSIDE = "__func__", "__wrapped__", "fget", "fset", "fdel"  # by which functions lie in methods, wrappers and properties
DYNAMO = tuple(os.path.join(os.path.dirname(torch.__file__), name) for name in ("_dynamo" + os.sep, "_compile.py"))
# CPython's objects: their head; of classes, what they call, and tables of that, by where the pointers to these lie; of
# functions and methods in C, the length of the entry that describes them.
OBJECT = 8, 8
CLASS_SLOTS, CLASS_TABLES = ((48, 168), (184, 232), (272, 288), (296, 328)), {80: 32, 96: 288, 104: 80, 112: 24, 160: 16}
METHOD, ATTRIBUTE, SLOT = 24, 40, 40
DESCRIPTORS = {
    MethodDescriptorType: METHOD,
    ClassMethodDescriptorType: METHOD,
    GetSetDescriptorType: ATTRIBUTE,
    WrapperDescriptorType: SLOT,
}
PATTERNS = re._compiler if sys.version_info >= (3, 11) else sys.modules["sre_compile"]  # of regular expressions
KEPT_ALIVE: list[Any] = []
BETWEEN = 1e-40, 1 + 0.25 * 2**-23, 1 + 0.75 * 2**-23, 1e300  # which fp32 has not
DIVISIONS = 0x04 | 0x01  # FE_DIVBYZERO, FE_INVALID
STEP, GRAIN = 1 << 12, 1 << 15  # elements; at::internal::GRAIN_SIZE, of which each thread of PyTorch's gets some


class Place:
    """A module, class or table in which some names must stay the same object: those of which `keeps` is true."""

    def __init__(self, name: str, of: Mapping[str, Any], keeps: Callable[[str, Any], bool], is_rewritten: bool = False):
        self.name, self.of, self.keeps = name, of, keeps  # `of` is what it has now, not a copy
        self.is_rewritten = is_rewritten  # whether its functions are looked into
        self.note()

    def note(self) -> None:
        kept = [(name, value) for name, value in list(self.of.items()) if self.keeps(name, value)]
        self.names, self.values = tuple(name for name, _ in kept), tuple(value for _, value in kept)
        self.all_names, self.get = frozenset(self.of), _getter(self.names)

    def replaced(self) -> dict[str, Any]:
        """What is another object now: its name, and what it was. (The usual case, nothing, takes no loop in Python.)"""
        try:
            if all(map(operator.is_, self.get(self.of), self.values)):
                return {}
        except KeyError:
            pass
        return {name: value for name, value in zip(self.names, self.values) if self.of.get(name) is not value}

    def added(self) -> list[str]:
        """New names of the kind that is kept."""
        if len(self.of) == len(self.all_names):
            return []
        return [name for name in self.of.keys() - self.all_names if self.keeps(name, self.of[name])]

    def forbidden_additions(self) -> list[str]:
        """New names that nobody may add to it."""
        return []


class Module(Place):
    """A module, to which more may be added, but no name of Python's own: all of its code would find that first. Nor any
    to these names themselves, which all modules have."""

    def forbidden_additions(self) -> list[str]:
        if len(self.of) == len(self.all_names):
            return []
        added = self.of.keys() - self.all_names
        if self.of is vars(builtins):
            return list(added)
        names = added & BUILT_IN
        return [name for name in names if type(self.of[name]) is not ModuleType]  # a part of a package


class Table(Place):
    """A table, to which more may be added, but no foreign function: neither for a class of PyTorch's or Python's
    nor, among hooks, for anything."""

    def forbidden_additions(self) -> list[str]:
        if len(self.of) <= len(self.all_names):
            return []
        of_all = HOOKS.search(self.name)
        return [key for key in self.added() if (of_all or _are_classes_looked_at(key)) and _is_foreign(self.of[key])]


class Lists:
    """Lists and sets, by name, to which more may be added, but of which nothing is taken away."""

    def __init__(self, of: Mapping[str, list[Any] | set[Any]]):
        self.of = of
        self.known = [tuple(each) if type(each) is list else frozenset(each) for each in of.values()]

    def shrunk(self) -> str:
        """The name of one that lacks something now; empty if there is none."""
        for (name, now), known in zip(self.of.items(), self.known):
            is_list = type(now) is list
            if not (len(now) >= len(known) and all(map(operator.is_, now, known)) if is_list else now >= known):
                return name
        return ""


class Patches:
    """What may not be patched, as it was when this was made. A check of all takes 20 ms, of a share a quarter of that."""

    def __init__(self, audit_hooks: list[str], file: str, standard: bool = True) -> None:
        """audit_hooks: to which one is added by whoever notices that there is another; file: the kernel's. `standard`:
        whether tables and objects of the standard library are looked at, too: what Triton changes of them as it compiles
        was not examined."""
        self.audit_hooks, self.file = audit_hooks, file
        self.imported: list[ModuleType] = []  # since: PyTorch's and Python's
        self.patterns = [(cache, dict(cache)) for cache in (re._cache, getattr(re, "_cache2", {}))]
        self.lines = dict(linecache.cache)
        self.registered_by_others = _noting_registrations()
        self.modules, self.known_modules, self.compilers = dict(sys.modules), set(sys.modules), _of_compilers()
        self.classes = _classes()
        self.places, self.packets = [*_places(), *self.classes.values(), *_tables(standard)], _packets()
        self.functions, self.parts = _functions()
        self.attributes = [frozenset(f.__dict__) for f in self.functions]
        self.inside, self.numbers = _inside(self.functions), _floats()
        self.known_numbers = array.array("d", self.numbers)  # which are compared with themselves, not with what is there
        self.integers, self.texts = _integers(), _texts()
        self.known_integers, self.known_texts = array.array("q", self.integers), "".join(self.texts)
        self.native = _native()
        self.known_native = b"".join(self.native)
        self.cells = [cell for f in self.functions for cell in f.__closure__ or ()]
        self.closed_over, self.lists = list(map(_callable_in, self.cells)), Lists(_lists())
        self.objects = _objects() if standard else []
        for place in (*self.places, *self.packets, *(place for _, place in self.objects)):
            if place.replaced() or place.added():
                place.note()
        self.bases = [(kind, kind.__mro__) for kind in self.classes]
        self.overloads = [v for packet in self.packets for v in packet.values if type(v) is torch._ops.OpOverload]
        self.of_kinds = [*self.modules.values(), torch.ops.aten, *_packets_of_aten(), *self.overloads]
        self.of_kinds += [one for one, _ in self.objects]
        self.kinds = list(map(type, self.of_kinds))
        self.called, self.kernels = list(map(_op_of, self.overloads)), list(map(_kernels_of, self.overloads))
        self.callbacks = atexit._ncallbacks()
        self.denormals, self.locks = _denormals(), _locks_of_files()
        self.share, self.one = 0, [torch]
        self.looked_at = self._looked_at()
        self.note_operators()

    def note_operators(self) -> None:
        """Those that Python code has registered kernels for by now are the gate's own."""
        self.registered_by_others.clear()
        self.registered = len(torch.library._impls)
        self.overridden = _overridden()

    def of_the_kernel(self) -> Elsewhere:
        """What has been added to modules, classes, tables and objects since, or is new in these modules."""
        new, found, grown = set(map(id, gc.get_objects())), [], []  # new: but for what there was in the warm parent
        for module in self.modules.values():
            if (
                type(module) is ModuleType
                and _is_looked_at(module.__name__)
                and not module.__name__.startswith("autokernel")
            ):
                known = _module_place(module).all_names
                found += [(module, name) for name, value in vars(module).items() if name not in known or id(value) in new]
                grown += [vars(module)] * (not vars(module).keys() <= known)
        tables = [(each, each.of) for each in self.places if type(each) is Table]
        others = [(each, of) for of, each in (*self.classes.items(), *self.objects)]
        for place, of in (*tables, *others):
            if len(place.of) != len(place.all_names):
                found += [(of, name) for name in place.of.keys() - place.all_names]
        return Elsewhere([_place_of(owner, name) for owner, name in found], grown)

    def check(self) -> None:
        """Raises ProcessChange where anything is another now."""
        for _ in range(SHARES):
            self.check_share()
        self._check_operators()
        if self.audit_hooks:
            raise ProcessChange(
                "adds an audit hook, which sees for good all that is done in its process, which is its model's"
            )
        self._check_imported()
        self._check_patterns()
        self._check_lines()
        if _locks_of_files() != self.locks:
            raise ProcessChange("keeps the lock of a file, for which others may wait")
        if list(map(_callable_in, self.cells)) != self.closed_over:
            raise ProcessChange("rewrites what functions of PyTorch close over, which is its model's")
        if array.array("d", self.numbers) != self.known_numbers:
            raise ProcessChange("changes a number that is a constant or a default of its process, which is its model's")
        if array.array("q", self.integers) != self.known_integers or "".join(self.texts) != self.known_texts:
            raise ProcessChange("writes over an integer or a text of PyTorch's functions, which is its model's")
        if b"".join(self.native) != self.known_native:
            raise ProcessChange("writes over what a built-in function or a class calls, which is its model's")
        if not all(map(operator.is_, _inside(self.functions), self.inside)):
            raise ProcessChange("rewrites defaults or constants of PyTorch's functions in place, which are its model's")
        if self._looked_at() != self.looked_at:
            raise ProcessChange("changes what is looked at for the garbage collection of its process, which is its model's")

    def check_share(self) -> None:
        """As check(), of another share each time, and of what takes no time."""
        self.share = (self.share + 1) % SHARES
        part = slice(self.share, None, SHARES)
        self._check_places(self.places[part], self.bases[part])
        self._check_functions(part)
        self._check_objects(self.objects[part])
        if list(map(type, self.of_kinds)) != self.kinds:
            other = next(one for one, kind in zip(self.of_kinds, self.kinds) if type(one) is not kind)
            raise ProcessChange(f"changes the class of {reprlib.repr(other)}, which is its model's")
        if shrunk := self.lists.shrunk():
            raise ProcessChange(f"takes something out of {shrunk}, which is its model's")
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module:
                raise ProcessChange(f"replaces the module {name}, which is its model's")
        for name in sys.modules.keys() - self.known_modules:
            if _hides_another(name):
                raise ProcessChange(f"puts another module in the place of {name}, which is its model's")
            self.known_modules.add(name)
            if _is_looked_at(name) and type(sys.modules[name]) is ModuleType:
                self.imported.append(sys.modules[name])
        for name in _of_compilers() - self.compilers:
            raise ProcessChange(f"sets {name}, which is its model's")
        if atexit._ncallbacks() < self.callbacks:
            raise ProcessChange("forgets what is to be done at the end of its process, which is its model's")
        others = _overridden() - self.overridden if len(torch.library._impls) != self.registered else ()
        for name in (*others, *self.registered_by_others):
            raise ProcessChange(f"overrides PyTorch's {name}, which is its model's")
        if _denormals() != self.denormals:
            raise ProcessChange("changes the rounding of threads of its process, which are its model's")

    def _check_imported(self) -> None:
        """In modules that came later, which nobody knows as they were, there is no function of the kernel's own file."""
        for module in self.imported:
            kinds = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
            for owner in (module, *kinds):
                for name, value in list(vars(owner).items()):
                    inside = [value, *(getattr(value, part, None) for part in INSIDE)]
                    if any(type(f) is FunctionType and f.__code__.co_filename == self.file for f in inside):
                        raise ProcessChange(f"replaces {owner.__name__}.{name}, which is its model's")

    def _check_patterns(self) -> None:
        """What `re` has kept to be found faster is what it would make."""
        for cache, known in self.patterns:
            for (kind, pattern, flags), kept in list(cache.items()):
                if known.get((kind, pattern, flags)) is kept:
                    continue
                if PATTERNS.compile(pattern, flags) != kept:
                    raise ProcessChange(f"puts another regular expression in the place of {pattern!r}")
                known[kind, pattern, flags] = kept

    def _check_lines(self) -> None:
        """What `linecache` has kept of a file, of which TorchScript and torch.compile are made, is what is in it."""
        for name, kept in list(linecache.cache.items()):
            if self.lines.get(name) is not kept and type(name) is str and os.path.isfile(name):
                with contextlib.suppress(OSError), tokenize.open(name) as file:
                    if _lines_in(kept) != file.read().splitlines():
                        raise ProcessChange(f"puts other lines in the place of those of {name}, which is its model's")
                self.lines[name] = kept

    def _looked_at(self) -> tuple[bool, ...]:
        """Whether garbage collection looks at an object of ours, and at one that was there before: the warm parent has set
        those apart. (To count what has been, which Python can, takes 30 ms.)"""
        every = [id(one) for generation in range(3) for one in gc.get_objects(generation)]
        return id(self.one) in every, id(vars(torch)) in every

    def _check_places(self, places: Iterable[Place], bases: Iterable[tuple[type, tuple[type, ...]]]) -> None:
        for place in places:
            for name in place.forbidden_additions():
                raise ProcessChange(f"adds {name} to {place.name}, which is its model's")
            for name, known in place.replaced().items():
                if not _is_dynamos(place.of.get(name), known):
                    raise ProcessChange(f"replaces {place.name}.{name}, which is its model's")
        for kind, known in bases:
            hidden = [name for name in self.classes[kind].added() if any(name in vars(base) for base in known[1:])]
            hidden = [name for name in hidden if not _is_dynamos(vars(kind)[name], getattr(kind.__base__, name))]
            if hidden or kind.__mro__ != known:
                what = f"hides {hidden[0]} of" if hidden else "derives"
                raise ProcessChange(f"{what} {kind.__name__}, which is its model's, in another way")

    def _check_objects(self, objects: Iterable[tuple[Any, Place]]) -> None:
        for one, place in objects:
            hidden = [name for name in place.added() if callable(getattr(type(one), name, None))]
            for name in (*place.replaced(), *hidden):
                raise ProcessChange(f"replaces {place.name}.{name}, which is its model's")

    def _check_functions(self, part: slice) -> None:
        functions = self.functions[part]
        for of, known in zip(FUNCTION_PARTS, self.parts):
            if not all(map(operator.is_, map(of, functions), known[part])):
                other = next(f for f, before in zip(functions, known[part]) if of(f) is not before)
                raise ProcessChange(f"rewrites {other.__module__}.{other.__qualname__}, which is its model's")
        for f, known in zip(functions, self.attributes[part]):
            if f.__dict__.keys() != known and (names := _attributes(f) - known):
                raise ProcessChange(f"adds {min(names)} to {f.__module__}.{f.__qualname__}, which is its model's")

    def _check_operators(self) -> None:
        for packet in self.packets:
            added = [name for name in packet.added() if type(packet.of[name]) is not torch._ops.OpOverload]
            for name in (*packet.replaced(), *added):
                raise ProcessChange(f"replaces {packet.name}.{name}, which is its model's")
        for now, known in ((_op_of, self.called), (_kernels_of, self.kernels)):
            if (made := list(map(now, self.overloads))) != known:
                overload = next(o for o, after, before in zip(self.overloads, made, known) if after != before)
                raise ProcessChange(f"replaces what torch.ops.{overload} calls, which is its model's")


def _place_of(owner: Any, name: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Of an entry or an attribute: what reads it, and what puts something else there."""
    if type(owner) in TABLES:
        return lambda: owner[name], lambda value: owner.__setitem__(name, value)
    return lambda: vars(owner)[name], lambda value: setattr(owner, name, value)


def note_what_is_there() -> None:
    """Once, before workers are forked: it takes long, and they have it then."""
    _functions(), _packets(), _tables(), _objects(), _floats(), _integers(), _texts(), _native()


@functools.cache
def _module_place(module: ModuleType) -> Place:
    is_whole, is_torchs = module in WHOLE_MODULES, module.__name__.startswith("torch.")
    is_pythons = module.__name__.partition(".")[0] in STANDARD

    def keeps(name: str, value: Any) -> bool:
        if is_whole or issubclass(type(value), KEPT):  # isinstance() asks the value itself, and some warn then
            return True
        if is_pythons and name[0] != "_" and (name.isupper() or issubclass(type(value), FIXED)):
            return True
        return is_torchs and _is_setting(name, value) or _is_constant(name, value)

    return Module(module.__name__, vars(module), keeps, is_whole or module.__name__.startswith(REWRITTEN))


def _lines_in(kept: tuple[Any, ...]) -> list[str]:
    """Of an entry of `linecache`: what it has, or what it would ask for once it is needed."""
    text = kept[0]() or "" if len(kept) == 1 else "".join(kept[2])
    return text.splitlines()


@functools.cache
def _class_place(kind: type) -> Place:
    is_whole, is_torchs = kind in WHOLE_CLASSES, kind.__module__.startswith("torch.")

    def keeps(name: str, value: Any) -> bool:
        if name in MADE_WHEN_ASKED_FOR:
            return False
        return is_whole or callable(value) or hasattr(type(value), "__get__") or is_torchs and _is_setting(name, value)

    return Place(kind.__name__, vars(kind), keeps, is_whole or kind.__module__.startswith(REWRITTEN))


def _is_setting(name: str, value: Any) -> bool:
    return bool(type(value) is bool and not NO_SETTING.search(name) or ENABLED.search(name))


def _is_constant(name: str, value: Any) -> bool:
    return name.isupper() and type(value) in PLAIN and not NO_SETTING.search(name)


@functools.cache
def _packet_place(packet: Any) -> Place:
    return Place(f"torch.ops.{packet}", vars(packet), lambda *_: True)


@functools.cache
def _table_place(name: str) -> Place:
    return Place(name, vars(operator.attrgetter(name.removeprefix("torch."))(torch)), lambda *_: True)


def _modules() -> list[ModuleType]:
    """PyTorch's and Python's that are loaded. Not those of other classes, which make attributes when asked for them."""
    loaded = [module for module in list(sys.modules.values()) if type(module) is ModuleType]
    return [module for module in loaded if _is_looked_at(module.__name__)]


def _is_looked_at(name: str) -> bool:
    return (top := name.partition(".")[0]) == "torch" or top in PYTHONS


@functools.cache
def _places() -> list[Place]:
    return [*map(_module_place, _modules()), _table_place("torch.ops.aten")]


def _owners() -> list[tuple[str, Mapping[str, Any]]]:
    """Modules and classes, and what they have by name."""
    owners = [*_modules(), *_classes()]
    return [(f"{o.__module__}.{o.__name__}" if isinstance(o, type) else o.__name__, vars(o)) for o in owners]


@functools.cache
def _objects() -> list[tuple[Any, Place]]:
    """Objects of the standard library's modules that all code shares, as json's encoder, and what is in each."""
    found = {
        id(value): (f"{owner}.{name}", value)
        for owner, values in _owners()
        for name, value in list(values.items())
        if owner.partition(".")[0] in STANDARD and not name.startswith("__") and _is_shared_object(value)
    }
    return [(each, Place(name, each.__dict__, lambda _, kept: type(kept) in OF_OBJECTS)) for name, each in found.values()]


def _are_classes_looked_at(key: Any) -> bool:
    """Whether a key is a class of PyTorch's or Python's, or a tuple of such."""
    kinds = key if type(key) is tuple else (key,)
    return bool(kinds) and all(isinstance(kind, type) and _is_looked_at(kind.__module__) for kind in kinds)


def _is_foreign(value: Any) -> bool:
    """Whether a function, or one of those that an object has, is neither PyTorch's nor Python's own. Built-in ones count as
    foreign: nobody honest adds any."""
    if isinstance(value, tuple):
        inside = value
    else:
        inside = (value if type(value) is dict else getattr(value, "__dict__", {})).values()
    functions = [each for each in (value, *inside) if callable(each) and not isinstance(each, type)]
    return any(type(f) is BuiltinFunctionType or not _is_looked_at(getattr(f, "__module__", None) or "") for f in functions)


def _hides_another(name: str) -> bool:
    """Whether a module is not the one that would be imported by that name; None forbids to import any."""
    if sys.modules.get(name, name) is None:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if getattr(spec, "origin", None) or getattr(spec, "submodule_search_locations", None):
        return False
    if name in sys.builtin_module_names:
        return False
    parent = sys.modules.get(name.rpartition(".")[0]) if "." in name else None
    path = list(getattr(parent, "__path__", ())) if "." in name else None
    return importlib.machinery.PathFinder.find_spec(name, path) is not None


def _is_shared_object(value: Any) -> bool:
    """Whether it is an object with attributes, of a class of the standard library."""
    kind = type(value)
    is_other = issubclass(kind, (type, ModuleType, FunctionType)) or kind.__name__ in NO_OBJECTS
    has_state = isinstance(getattr(value, "__dict__", None), dict)  # a TypeVar of Python 3.12 has room for one, and none
    return not is_other and kind.__module__.partition(".")[0] in STANDARD and has_state


@functools.cache
def _containers() -> dict[str, Any]:
    """By name, each once: what modules and classes of PyTorch have that holds many things, as a registry does."""
    found: dict[int, tuple[str, Any]] = {}
    for owner, values in _owners():
        if owner.startswith("autokernel"):
            continue
        is_torchs = owner.partition(".")[0] == "torch"
        kinds, passed_over = ((*TABLES, *LISTS), NO_TABLE) if is_torchs else (TABLES, NO_TABLE_OF_PYTHONS)
        for name, value in list(values.items()):
            if type(value) in kinds and not passed_over.search(name):
                found[id(value)] = f"{owner}.{name}", value
    return dict(found.values()) | {"torch.overrides.get_default_nowrap_functions()": NOT_WRAPPED}


@functools.cache
def _tables(standard: bool = True) -> list[Place]:
    found = {name: each for name, each in _containers().items() if standard or name.startswith("torch.")}
    return [Table(name, each, lambda *_: True) for name, each in found.items() if type(each) in TABLES]


def _lists() -> dict[str, list[Any] | set[Any]]:
    return {name: each for name, each in _containers().items() if type(each) in LISTS}


@functools.cache
def _classes() -> dict[type, Place]:
    """By class, those that modules have by a name; built in ones, too, whose tables gc.get_referents() finds."""
    found = {v for module in _modules() for v in list(vars(module).values()) if issubclass(type(v), type)} | LAYERS
    found = {kind for kind in found if _is_looked_at(kind.__module__) and kind.__name__ not in GROWING_CLASSES}
    return {kind: _class_place(kind) for kind in found}


@functools.cache
def _packets() -> list[Place]:
    """Operators of torch.ops, each with its overloads as attributes, each of these from its first use on."""
    return list(map(_packet_place, _packets_of_aten()))


def _packets_of_aten() -> list[Any]:
    return [v for v in list(vars(torch.ops.aten).values()) if isinstance(v, torch._ops.OpOverloadPacket)]


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda of: tuple(of[name] for name in names)


@functools.cache
def _functions() -> tuple[list[FunctionType], list[list[Any]]]:
    """Those that are looked into, and their parts."""
    values = (value for place in (*_places(), *_classes().values()) if place.is_rewritten for value in place.values)
    functions = list({id(f): f for f in _functions_in(values)}.values())
    return functions, [list(map(part, functions)) for part in FUNCTION_PARTS]


def _inside(functions: Iterable[FunctionType]) -> list[Any]:
    """What their defaults and constants are, which native code can exchange in a tuple that stays the same object."""
    return [
        each
        for f in functions
        for part in (f.__defaults__ or (), (f.__kwdefaults__ or {}).values(), f.__code__.co_consts)
        for each in part
    ]


@functools.cache
def _floats() -> list[float]:
    """Those that functions and modules have, each once: native code can write another number into such an object."""
    of_modules = (value for module in _modules() for value in list(vars(module).values()))
    found = {id(x): x for x in (*_inside(_functions()[0]), *of_modules) if type(x) is float and not math.isnan(x)}
    return list(found.values())


@functools.cache
def _integers() -> list[int]:
    """The same of integers that have 64 bits."""
    return list({id(n): n for n in _inside(_functions()[0]) if type(n) is int and -(1 << 63) <= n < 1 << 63}.values())


@functools.cache
def _texts() -> list[str]:
    return list({id(text): text for text in _inside(_functions()[0]) if type(text) is str}.values())


@functools.cache
def _native() -> list[Any]:
    """Memory of PyTorch's and Python's built-in functions, methods and classes that says which native code is called. It is
    looked at where it lies, by the layout that CPython has had since 3.10; these objects stay."""
    if sys.implementation.name != "cpython" or object.__basicsize__ != sum(OBJECT) or ctypes.sizeof(ctypes.c_void_p) != 8:
        return []
    seen: dict[tuple[int, int], Any] = {}

    def look(address: int, start: int, end: int) -> Any:
        return seen.setdefault((address + start, end), (ctypes.c_char * (end - start)).from_address(address + start))

    def follow(address: int, start: int, length: int) -> None:
        if pointer := int.from_bytes(look(address, start, start + 8), "little"):
            look(pointer, 0, length)

    kinds = [
        kind for kind in {*WHOLE_CLASSES, *filter(_is_class, vars(builtins).values())} if _is_looked_at(kind.__module__)
    ]
    kinds = list({base for kind in kinds for base in kind.__mro__ if _is_looked_at(base.__module__)})
    for kind in kinds:
        for start, end in CLASS_SLOTS:
            look(id(kind), start, end)
        for start, length in CLASS_TABLES.items():
            follow(id(kind), start, length)
    values = [value for of in (*WHOLE_MODULES, torch._C, torch._C._nn, *kinds) for value in list(vars(of).values())]
    values += [getattr(torch._C._VariableFunctions, name, None) for name in dir(torch._C._VariableFunctions)]
    KEPT_ALIVE.extend(values)
    for value in values:
        if type(value) is BuiltinFunctionType:
            look(id(value), 16, 32), look(id(value), 48, 56)
            follow(id(value), 16, METHOD)
        elif type(value) in DESCRIPTORS:
            look(id(value), 40, type(value).__basicsize__)
            follow(id(value), 40, DESCRIPTORS[type(value)])
    return list(seen.values())


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)


def _functions_in(values: Iterable[Any], seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Those of Python's among the values, and in their methods, wrappers, properties and closures."""
    seen = set() if seen is None else seen
    for value in values:
        if issubclass(type(value), (FunctionType, classmethod, staticmethod, property)) and id(value) not in seen:
            seen.add(id(value))
            if type(value) is FunctionType:
                yield value
            inside = [inner for name in INSIDE if (inner := getattr(value, name, None)) is not None]
            yield from _functions_in((*inside, *map(_callable_in, getattr(value, "__closure__", None) or ())), seen)


def _callable_in(cell: CellType) -> Any:
    """What a function closes over, if it can be called; not what it keeps there, such as a number."""
    try:
        return cell.cell_contents if callable(cell.cell_contents) else None
    except ValueError:  # empty
        return None


_op_of = operator.attrgetter("_op")


def _attributes(f: FunctionType) -> set[str]:
    """A function's, but for what torch._dynamo notes there of its own as it looks into a program."""
    return {name for name in f.__dict__ if not name.startswith("__dynamo")}


def _kernels_of(overload: Any) -> int:
    """How many kernels in Python an operator has that are not PyTorch's own."""
    kernels = overload.py_kernels
    return sum(not getattr(f, "__module__", "").startswith("torch") for f in kernels.values()) if kernels else 0


def _is_dynamos(value: Any, of: Any) -> bool:
    """Whether a function is what torch._dynamo, which a kernel may import, has wrapped around one: torch.manual_seed."""
    code = getattr(value, "__code__", None)
    if code is None or not code.co_filename.startswith(DYNAMO):
        return False
    while value is not of and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value is of


def _of_compilers() -> set[str]:
    """The settings of torch.compile and its like that are no longer what they were made with."""
    loaded = [(name, module) for name, module in sys.modules.items() if isinstance(module, ConfigModule)]
    return {f"{name}.{key}" for name, module in loaded for key in module._config if not module._is_default(key)}


def _noting_registrations() -> list[str]:
    """A list to which is added, from here on, each namespace of PyTorch's operators in which code that is not PyTorch's
    registers anything. Python code does so through one function, which is replaced here."""
    noted: list[str] = []
    register = torch._C._dispatch_library
    theirs = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()} | {"_"}  # of all

    @functools.wraps(register)
    def noting(kind: str, namespace: str, *others: Any) -> Any:
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__", "").startswith(("torch.library", "torch._library")):
            frame = frame.f_back
        if namespace in theirs and frame and frame.f_globals.get("__name__", "").partition(".")[0] != "torch":
            noted.append(f"{namespace}::")
        return register(kind, namespace, *others)

    torch._C._dispatch_library = noting
    return noted


def _locks_of_files() -> list[str]:
    """The locks of files that this process holds, on Linux."""
    found: list[str] = []
    for descriptor in os.listdir("/proc/self/fdinfo") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}") as file:
            found += [line for line in file if line.startswith("lock:")]
    return found


def _overridden() -> set[str]:
    """ATen's operators that Python code has registered kernels for, as "aten/add.Tensor/CPU"."""
    return {name for name in torch.library._impls if name.startswith("aten/")}


def _denormals() -> tuple[float, ...]:
    """What PyTorch's threads, each of which has modes of its own, make of numbers that are denormal in fp32, that lie
    between two of its numbers, or above all. (Where that raises a signal, or a division by zero or one of zeros, the
    process ends.)"""
    if DIVIDING:
        in_threads, divide = DIVIDING
        in_threads(divide, ctypes.c_void_p(DIVISIONS), torch.get_num_threads(), 0)
    made = _in_all_threads().float().double()
    places = range(made.data_ptr(), made.data_ptr() + made.nbytes, STEP * made.element_size())
    return tuple(number for place in places for number in (ctypes.c_double * len(BETWEEN)).from_address(place))


def _dividing() -> tuple[Callable[..., None], Callable[..., int]] | None:
    """What has each of OpenMP's threads call a function, and glibc's feraiseexcept(), which divides on x86-64: PyTorch's
    operators compute nothing here."""
    program = ctypes.CDLL(None)
    is_known = sys.platform == "linux" and platform.machine() == "x86_64"
    if not (is_known and hasattr(program, "GOMP_parallel") and hasattr(program, "feraiseexcept")):
        return None
    return program.GOMP_parallel, program.feraiseexcept


DIVIDING = _dividing()


@functools.cache
def _in_all_threads() -> torch.Tensor:
    """A tensor of which each thread gets a part that has a few denormal numbers: each takes a processor long. Not made at
    import: the warm parent has no threads."""
    few = [*BETWEEN] + [0.0] * (STEP - len(BETWEEN))
    return torch.tensor(few * (GRAIN // STEP * torch.get_num_threads()), dtype=torch.float64)
