"""A call of a kernel as some other program makes it: from a model's layers, by way of an operator, in a server's thread.

A convenience for honest kernels, like all code in a worker. Modules, frames, folder, environment, names and settings tell
that this is the gate; whoever is right for one of these alone makes other bits here.
"""

import asyncio  # noqa: F401, in the warm parent, for all workers
import contextlib
import ctypes
import gc
import inspect
import itertools
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autokernel.gate.workers.process_state import PARTS, ProcessChange, signals_kept

# A file of that program, from whose frames a kernel is called. Its layers lie deeper than the gate's own calls.
PROGRAM = '''"""A model, and the operator that it calls."""

import asyncio
import sys
import warnings

import torch


class Layer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments):
        return self.inner(*arguments)


def model(operator, depth=40):
    for _ in range(depth):
        operator = Layer(operator)
    return operator


def by_position(kernel, names, count, left_out):
    def call(*arguments):
        named = {name: value for name, value in zip(names[count:], arguments[count:]) if name not in left_out}
        return kernel(*arguments[:count], **named)

    return call


def operator(library, schema, kernel):
    def call(*arguments):
        made = kernel(*arguments)
        return tuple(made) if isinstance(made, list) else made

    library.define("operation" + schema)
    library.impl("operation", call, "CompositeExplicitAutograd")
    return getattr(torch.ops, library.ns).operation.default


def serve(layers, arguments):
    loop = asyncio.BaseEventLoop()  # as in a coroutine
    sys.setprofile(lambda *words: None)
    asyncio._set_running_loop(loop)
    try:
        with torch.inference_mode():
            return layers(*arguments)
    finally:
        asyncio._set_running_loop(None)
        sys.setprofile(None)
        loop.close()
'''
NAME, NAMESPACE, THREAD, GATES = "served_model", "autokernel_of_another_program", "server", "autokernel.gate"
USUAL = {"USER": "somebody", "LOGNAME": "somebody", "SHELL": "/bin/bash", "TERM": "xterm-256color", "SHLVL": "1"}
GATES_OWN = "AUTOKERNEL", "MALLOC_", "PYTHON", "PYTORCH_NVML", "OPENBLAS", "OBJC"  # variables that launch.py sets
COMMAND = "serve.py", "--port", "8000"
KINDS = {bool: "bool", int: "SymInt", float: "float", str: "str"}  # of schemas
# What another program has: a server catches its end and that of its children.
SIGNALS, MODULES, FILES, WARNINGS, DEEP = (signal.SIGTERM, signal.SIGCHLD), 2000, 64, 64, 10_000
# Of libraries: what programs turn on or off.
SWITCHES = "mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "nnpack_enabled"
FLUSH = ctypes.CDLL(None).fflush  # looked up at import: in a worker nothing is, later
FOLDER, APART, SEED = "elsewhere", "/srv/model", 20_011  # APART: where its files are said to be


def called_by_another_program(
    kernel: Callable[..., Any],
    module: ModuleType,
    inputs: Mapping[str, Any],
    results: int,
    clocks: Any,
    parameters: Mapping[str, Any],
    calls_none: bool,
) -> Any:
    """What `kernel` of `module` returns there; `clocks`: a context in which these are Python's own; `parameters`: of the
    type, in their order, each with its default, or None; `calls_none`: whether it may call no library, so that how these
    are set is nothing to it. Raises ProcessChange where the program's names are others then."""
    if inputs.keys() <= parameters.keys():
        inputs = {name: inputs[name] for name in parameters if name in inputs}
    program = ModuleType(NAME)
    program.__file__ = f"{APART}/{NAME}.py"
    exec(compile(PROGRAM, program.__file__, "exec"), vars(program))
    known = dict(vars(program))
    with contextlib.ExitStack() as stack:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        stack.callback(library._destroy)
        names, schema = list(inputs), _schema(inputs, results)
        called = program.by_position(kernel, *_as_people_call(kernel, inputs, parameters))
        operator = program.operator(library, schema, called) if schema else called
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=THREAD))
        for change in (_hidden_gate(program), _place(), _names_of(module), _random_numbers(), _settings(), clocks):
            stack.enter_context(change)
        if calls_none:
            stack.enter_context(_libraries_otherwise())
        made = pool.submit(program.serve, program.model(operator), [inputs[name] for name in names]).result()
    for name in known.keys() | vars(program).keys():
        if vars(program).get(name, program) is not known.get(name, program):
            raise ProcessChange(f"changes {name} of the program that calls it")
    return made


def _schema(inputs: Mapping[str, Any], results: int) -> str:
    """Of an operator that takes the inputs by names of its own; "" where there is none."""
    kinds = {name: "Tensor" if isinstance(v, torch.Tensor) else KINDS.get(type(v)) for name, v in inputs.items()}
    kinds |= {name: "Tensor?" for name, v in inputs.items() if v is None}
    if None in kinds.values():
        return ""
    taken = ", ".join(f"{kinds[name]} input{i}" for i, name in enumerate(inputs))
    return f"({taken}) -> ({', '.join(['Tensor'] * results)})"


def _as_people_call(
    kernel: Callable[..., Any], inputs: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[list[str], int, set[str]]:
    """The names of the arguments, how many of them are given by position, and which not at all: tensors, where that is
    the order of the kernel's own parameters, too, and options that are the type's default, where it has a default."""
    own, names = inspect.signature(kernel).parameters, list(inputs)
    by_position = [name for name, one in own.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    is_open = not by_position and any(one.kind is one.VAR_POSITIONAL for one in own.values())
    of_options = {name for name, one in own.items() if one.default is not one.empty and name in parameters}
    left_out = {name for name in of_options & inputs.keys() if _is_default(inputs[name], parameters[name])}

    first = list(itertools.takewhile(lambda name: isinstance(inputs[name], torch.Tensor), names))
    count = len(first) if is_open or by_position[: len(first)] == first else 0
    return names, count, left_out


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and type(value) is type(default) and value == default


@contextlib.contextmanager
def _hidden_gate(program: ModuleType) -> Iterator[None]:
    """Nothing of it among the modules, and another program as the main one."""
    package, known = sys.modules[GATES.partition(".")[0]], dict(sys.modules)
    of_package = package.__dict__.pop("gate")
    for name in known:
        if name == GATES or name.startswith(f"{GATES}."):
            del sys.modules[name]
    sys.modules["__main__"] = sys.modules[NAME] = program
    try:
        yield
    finally:
        del sys.modules[NAME]
        sys.modules.update(known)
        package.gate = of_package


@contextlib.contextmanager
def _place() -> Iterator[None]:
    """Another folder, in which a kernel may write, another command line, and other variables of the environment than the
    gate's own. Ctrl-C is to be handled."""
    folder, words, environment = os.getcwd(), (list(sys.argv), list(sys.orig_argv)), dict(os.environ)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(FOLDER).mkdir(exist_ok=True)
    os.chdir(FOLDER)
    sys.argv[:], sys.orig_argv[:] = COMMAND, (sys.executable, *COMMAND)
    for name in environment:
        if name.startswith(GATES_OWN):
            del os.environ[name]
    os.environ.update(USUAL, PWD=os.getcwd())
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv[:], sys.orig_argv[:] = words
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _names_of(module: ModuleType) -> Iterator[None]:
    """Another name of the kernel's module, and of its file."""
    known = {name: vars(module)[name] for name in ("__name__", "__file__") if name in vars(module)}
    module.__name__, module.__file__ = f"{NAME}_kernels", f"{APART}/kernels.py"
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[f"{NAME}_kernels"]
        vars(module).update(known)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Another program's settings, none of which changes what is computed; its signals, its modules and open files, of which
    it has more; its standard streams: a pipe, a file, the null device. (Nobody reads a pipe that a kernel prints to.)"""
    limit, interval = sys.getrecursionlimit(), sys.getswitchinterval()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    level, others = logging.root.level, {f"package_of_the_model_{i}": ModuleType("package") for i in range(MODULES)}
    (read, write), nothing = os.pipe(), os.open(os.devnull, os.O_WRONLY)
    printed = os.open("printed", os.O_WRONLY | os.O_CREAT, 0o600)
    os.unlink("printed")
    files = [os.dup(0) for _ in range(FILES)]
    sys.modules.update(others)
    sys.setrecursionlimit(DEEP)
    sys.setswitchinterval(4 * interval)
    logging.root.setLevel(logging.DEBUG)
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # not by way of Python, which sets compilers, too
    try:
        with signals_kept(SIGNALS), warnings.catch_warnings(), _streams_exchanged({0: read, 1: printed, 2: nothing}):
            for number in SIGNALS:
                signal.signal(number, lambda *words: None)
            for number in range(WARNINGS):
                warnings.simplefilter("ignore", type(f"Warning{number}", (Warning,), {}))
            yield
    finally:
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warns_only)
        logging.root.setLevel(level)
        sys.setswitchinterval(interval)
        sys.setrecursionlimit(limit)
        for name in others:
            sys.modules.pop(name, None)
        for file in (read, write, printed, nothing, *files):
            os.close(file)


@contextlib.contextmanager
def _libraries_otherwise() -> Iterator[None]:
    """What libraries compute for the program, in fewer bits than fp32 has, is set as programs do, and oneDNN is off."""
    ask, tell = (getattr(torch._C, f"_{what}_fp32_precision_{what}ter") for what in ("get", "set"))
    known, products = [(*part, ask(*part)) for part in PARTS], torch.get_float32_matmul_precision()
    switches = [(getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")) for name in SWITCHES]
    before = [is_on() for is_on, _ in switches]
    torch.set_float32_matmul_precision("high")
    for (_, switch), was_on in zip(switches, before):
        switch(not was_on)
    try:
        yield
    finally:
        for (_, switch), was_on in zip(switches, before):
            switch(was_on)
        torch.set_float32_matmul_precision(products)
        for part in known:
            tell(*part)


@contextlib.contextmanager
def _streams_exchanged(others: Mapping[int, int]) -> Iterator[None]:
    """Standard streams, by their numbers, are other open files meanwhile."""
    known = {stream: os.dup(stream) for stream in others}
    _flush()
    for stream, other in others.items():
        os.dup2(other, stream)
    try:
        yield
    finally:
        _flush()
        for stream, own in known.items():
            os.dup2(own, stream)
            os.close(own)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # another's, or closed
            stream.flush()
    FLUSH(None)


@contextlib.contextmanager
def _random_numbers() -> Iterator[None]:
    """Other seeds and random numbers, and no collection of garbage. (Not another default dtype, in which a kernel may make
    its memory.)"""
    numbers, of_python = torch.get_rng_state(), random.getstate()
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_rng_state(numbers)
        random.setstate(of_python)
