"""A user's own code, called: what it raises becomes one sentence of ours, the exception shown short, its file and line."""

import builtins
import difflib
import importlib.util
import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autokernel.common.preflight import HOME, ROOT, Refused, model_file, why_no_model
from autokernel.common.words import counted
from autokernel.hardware.processes import stream_of_parent
from autokernel.spec import import_file

TRACE = "\nException raised from "  # PyTorch's own places in C++ follow
LONGEST = 400  # characters of an exception that are shown
OURS = tuple(f"{package}{os.sep}" for package in (Path(__file__).parents[1], Path(torch.__file__).parent))
PYTHON, PACKAGES = f"{Path(os.__file__).parent}{os.sep}", ("site-packages", "dist-packages")
NEXT = "models/custom.py is a template"
OF_PYTHON = (builtins, json, os, time, subprocess, tempfile, Path)
PYTHONS = {module: dict(vars(module)) for module in OF_PYTHON}  # as they were before a model was imported
NEEDED = {"torch", "numpy", "autokernel", *sys.stdlib_module_names}  # packages of which no model takes a module from us

threads: set[threading.Thread] = set()  # begun by users' code, for which Python would wait at the end
_theirs = SimpleNamespace(folder=None, streams={}, argv=[""])  # where users' code has put itself, and its command line


class WorkloadError(Refused):
    """The model, its class, its arguments or its inputs are not what they must be; the message says which, and why."""


class LeftAtOnce(SystemExit):
    """os._exit() was called, which would have ended this process without a word."""


class ClosedFiles(Exception):
    """The files of this process were closed, and so what we write to with them."""


@contextmanager
def _exit_is_told() -> Iterator[None]:
    """os._exit() raises LeftAtOnce; in a child that was forked meanwhile it is what it was."""
    real, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != process:
            real(status)
        raise LeftAtOnce(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = real


@contextmanager
def _end_of_children() -> Iterator[None]:
    """A child that was forked in users' code ends with it: it would go on as a second script of ours."""
    process, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        status = 1
        if os.getpid() == process:
            raise
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            print(f"a process that was forked has ended: {short(error)}", file=sys.stderr)
    finally:
        if os.getpid() != process:
            for stream in (sys.stdout, sys.stderr):
                _writable(stream)  # flushes it
            os._exit(status)


@contextmanager
def _in_its_place() -> Iterator[None]:
    """Users' code goes on in the folder that it has gone to; we stay in ours, with streams that can be written to.

    What it has put in their place is kept, or Python would close what they share. Our options are none of its own.
    """
    argv, sys.argv = sys.argv, _theirs.argv
    ours, streams = _folder_here(), [_Stream(number, name) for number, name in ((1, "stdout"), (2, "stderr"))]
    _go_to(_theirs.folder)
    try:
        with _its_modules():
            yield
    except BaseException:
        for stream in streams:
            stream.end_line()
        raise
    finally:
        _theirs.argv, sys.argv = getattr(sys, "argv", [""]), argv
        here = _folder_here()
        _theirs.folder = here if here != ours else None
        _go_to(ours)
        lost = any(stream.lost for stream in streams)
        for stream in streams:
            if found := stream.put_back():
                _theirs.streams[id(found)] = found
    if lost:
        raise ClosedFiles("it has closed all files of this process (os.closerange()?): it may close those that it opened")


@contextmanager
def _its_modules() -> Iterator[None]:
    """Users' code finds its own modules, be they named as ours, which come last; we find what we import later as before.

    Also where it has taken away what finds modules, or modules that we need; and what is ours to say is not said its way.
    """
    path, finders, hook = sys.path[:], sys.meta_path[:], sys.excepthook
    needed = {name: module for name, module in sys.modules.items() if module and name.partition(".")[0] in NEEDED}
    ours = [place for place in path if os.path.realpath(place) == str(ROOT)]  # where a script of ours was called from
    sys.path[:] = [place for place in path if place not in ours] + ours
    try:
        yield
    finally:
        sys.path[:] = path + [place for place in dict.fromkeys(sys.path) if place not in path]
        sys.meta_path += [finder for finder in finders if finder not in sys.meta_path]
        sys.modules.update({name: module for name, module in needed.items() if not sys.modules.get(name)})
        sys.excepthook = hook


class _Stream:
    """sys.stdout or sys.stderr, and the file descriptor that is meant by it."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name, self.ours, self.kept = number, name, getattr(sys, name), None
        self.written = "\n"
        with suppress(AttributeError):  # no stream at all
            self.ours.write = self._write
        with suppress(OSError):  # it is closed
            self.kept = os.dup(number)

    def _write(self, text: str) -> int:
        self.written = text or self.written
        return type(self.ours).write(self.ours, text)

    def end_line(self) -> None:
        """Where a line was begun, by a bar of progress or input(), which nobody answers: the error has one of its own."""
        with suppress(AttributeError, OSError, ValueError):  # closed, or taken apart
            if not self.written.endswith("\n"):
                self.ours.write("\n")
                self.ours.flush()

    @property
    def lost(self) -> bool:
        """Whether what was kept is closed: all descriptors were."""
        if self.kept is None:
            return False
        try:
            return not os.fstat(self.kept)
        except OSError:
            return True

    def put_back(self) -> Any:
        """What stood in its place, if anything."""
        with suppress(AttributeError):
            del self.ours.write
        if self.lost:
            self.kept = stream_of_parent(self.number)
        if self.kept is not None:
            os.dup2(self.kept, self.number)
            os.close(self.kept)
        found = getattr(sys, self.name)
        able = next(filter(_writable, (self.ours, found)), None)
        if not able and self.ours:
            able = open(self.number, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, self.name, able)
        return found if found is not self.ours else None


def _folder_here() -> str | None:
    with suppress(FileNotFoundError):  # it is gone
        return os.getcwd()
    return None


def _go_to(folder: str | None) -> None:
    if folder and Path(folder).is_dir():
        os.chdir(folder)


def _writable(stream: Any) -> bool:
    """Not closed, nor taken apart by detach(), nor no stream at all."""
    try:
        stream.flush()
    except ValueError:
        return False
    except (AttributeError, OSError):  # anything may be put there that has a write()
        pass
    return stream is not None


def replaced() -> list[str]:
    """What of Python's own a model has put something else in place of, such as builtins.print or json.dumps."""
    return [
        f"{module.__name__}.{name}"
        for module, known in PYTHONS.items()
        for name, value in known.items()
        if callable(value) and vars(module).get(name) is not value
    ]


@contextmanager
def user_code(what: str, advice: str = "", among_ours: bool = False) -> Iterator[None]:
    """`what` failed, the exception, and `advice` as a WorkloadError, whatever is raised inside: sys.exit(), os._exit().

    among_ours: there is code of ours inside, too; what no line of the user's takes part in stays as it is.
    """
    before = set(threading.enumerate())
    try:
        with _exit_is_told(), _in_its_place(), _end_of_children():
            yield
    except (KeyboardInterrupt, Refused):
        raise
    except BaseException as error:
        if among_ours and not _their_lines(error):
            raise
        raise WorkloadError(f"{what}: {short(error)}" + f"; {advice}" * bool(advice)) from error
    finally:
        threads.update(thread for thread in threading.enumerate() if thread not in before and not thread.daemon)


def short(error: BaseException) -> str:
    """TypeError: its message (net.py:12): the deepest line that is neither PyTorch's nor ours."""
    if isinstance(error, SystemExit):
        call = "os._exit" if isinstance(error, LeftAtOnce) else "sys.exit"
        text = f"it calls {call}({'' if error.code is None else repr(error.code)})"
    elif isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({_relative(error.filename)}:{error.lineno})"
    else:
        said = " ".join(_said(error).partition(TRACE)[0].split())
        text = type(error).__name__ + f": {said}" * bool(said)
    text = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    lines = _their_lines(error)
    return f"{text} ({_relative(lines[-1].filename)}:{lines[-1].lineno})" if lines else text


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's is code of the user's
        return "its message cannot be made"


def _their_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """Where it has been that is neither PyTorch's, nor the standard library's, nor ours; the deepest last."""
    return [line for line in traceback.extract_tb(error.__traceback__) if _is_theirs(line.filename)]


def _is_theirs(path: str) -> bool:
    of_python = path.startswith(PYTHON) and not path.removeprefix(PYTHON).startswith(PACKAGES)
    return not of_python and not path.startswith((*OURS, "<"))


def load_module(name: str) -> Any:
    """A Python file (preflight.model_file()), or an installed module by its name. Raises WorkloadError."""
    if not name.endswith(".py"):
        return _installed(name)
    path = model_file(name)
    if path is None:
        raise WorkloadError(why_no_model(name))
    path = path.resolve()
    own = _name_of(path)
    loaded = sys.modules.get(own)  # once: code that Dynamo compiled refers to its globals
    if loaded and _is_from(loaded, path):
        return loaded
    try:
        _theirs.argv = [name]  # as if it had been called without an option
        with user_code(f"{name} cannot be imported", _advice_on_names(path)):
            # As Python does. When it is imported later, what is Python's own comes first: PyTorch's compiler looks for it.
            sys.path.insert(0, str(path.parent))
            return import_file(path, own)
    except WorkloadError:
        sys.modules.pop(own, None)
        raise


def _advice_on_names(path: Path) -> str:
    folder, parts = path.absolute().parent, [path.stem] * (path.stem != "__init__")
    if (folder / "__init__.py").is_file():
        while (folder / "__init__.py").is_file():
            folder, parts = folder.parent, [folder.name, *parts]
        place = shlex.quote(str(folder))
        return f"it is a part of a package: name it as one, PYTHONPATH={place} and --module {'.'.join(parts)} for --model"
    if (folder / "autokernel.py").is_file() or (folder / "autokernel/__init__.py").is_file():
        return "import autokernel is this program, and not what stands beside your file: give that another name"
    return ""


def _name_of(path: Path) -> str:
    """That by which its neighbours import it, and processes that it starts, if it can mean nothing else; else one of ours.

    A model that a program has handed over is in a file of ours, whose name may be that of a module of the program's.
    """
    name, ours = path.stem, f"autokernel_model_{path.stem}"
    if name in sys.modules:
        return name if _is_from(sys.modules[name], path) else ours
    if not name.isidentifier() or path.is_relative_to(HOME / "workspace"):
        return ours
    meant = importlib.util.find_spec(name)
    return name if meant is None or meant.origin == str(path) else ours


def _is_from(module: Any, path: Path) -> bool:
    return getattr(module, "__file__", None) == str(path)


def _installed(name: str) -> Any:
    if not name or Path(name).exists():
        raise WorkloadError(f"{name or repr(name)} is no Python file: name one that ends in .py, or an installed module")
    _theirs.argv = [name]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with user_code(f"the module {name} cannot be imported"):
        try:
            named = all(part.isidentifier() for part in name.split("."))
            found = importlib.util.find_spec(name) if named else None  # which imports the packages that it is in
        except (ModuleNotFoundError, ValueError):
            found = None
        if not found:
            raise WorkloadError(f"there is no module {name!r} in {sys.executable} (a file's name must end in .py)")
        return importlib.import_module(name)


def find_class(module: Any, of: str, name: str) -> Any:
    """What the module calls `name`. Raises WorkloadError, which names the models that there are."""
    with user_code(f"{of} cannot be asked for {name}"):  # it may have a __getattr__()
        found = getattr(module, name, None)
    if found is None:
        own = [n for n, v in vars(module).items() if _is_model(v) and v.__module__ == module.__name__]
        near = difflib.get_close_matches(name, dir(module), 3, 0.4)
        advice = f"did you mean {', '.join(near)}?" if near else f"it defines no nn.Module; {NEXT}"
        if own:
            advice = f"--class-name is one of {', '.join(own)}"
        raise WorkloadError(f"{of} has no class {name or repr(name)}: {advice}")
    if not callable(found) or isinstance(found, nn.Module):
        kind = "an object" if isinstance(found, nn.Module) else f"of type {type(found).__name__}"
        raise WorkloadError(f"{name} in {of} is {kind}, no class of nn.Module: name that, or a function that makes one")
    return found


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def construct(make: Any, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The model that a class, or a function, makes of keyword arguments. Raises WorkloadError."""
    config_class = getattr(make, "config_class", None)
    kind = "" if inspect.isclass(make) else ", a function,"
    if not config_class:
        check_arguments(make, name + kind, arguments)
    advice = _advice(make, arguments)
    with user_code(f"{name}{kind} cannot be made of {dict(arguments) or 'no arguments'}", advice):
        if not config_class:
            model = make(**arguments)
        else:
            _warn_of_unknown(config_class, arguments)
            model = make(config_class(**arguments))
            model.config.use_cache = False
        return checked_model(model, name)


def check_arguments(make: Any, name: str, given: Mapping[str, Any]) -> None:
    """Raises WorkloadError where arguments of the constructor are missing, or it does not know them."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # built in
        return
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variable]
    takes = ", ".join(str(p.replace(annotation=p.empty)) for p in named)
    if missing := [p.name for p in named if p.default is p.empty and p.name not in given]:
        example = "{" + ", ".join(f'"{n}": …' for n in missing) + "}"
        raise WorkloadError(f"{name} needs {', '.join(missing)}: --model-args '{example}' (it takes {takes})")
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if (unknown := sorted(set(given) - {p.name for p in named})) and not open_ended:
        raise WorkloadError(f"{name} knows no {', '.join(unknown)}: --model-args takes {takes or 'nothing here'}")


def checked_model(model: Any, name: str) -> nn.Module:
    """Raises WorkloadError unless this is a model with numbers in it."""
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"{name} is no nn.Module: it makes a {type(model).__name__}; {NEXT}")
    if isinstance(model, torch.jit.ScriptModule):
        raise WorkloadError(f"{name} is TorchScript, which torch.compile does not take: name the nn.Module it was made of")
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):  # its operations are not to be seen
        raise WorkloadError(f"{name} is compiled already: give the nn.Module that torch.compile was given (._orig_mod)")
    if what := not_a_model(model):
        raise WorkloadError(what)
    if getattr(model.forward, "__func__", None) is nn.Module.forward and type(model).__call__ is nn.Module.__call__:
        raise WorkloadError(f"the model of {name} has no forward(): there is nothing to measure")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [n for n, t in tensors if t.is_meta]:
        raise WorkloadError(
            f"{name} has {len(empty)} tensors without data (on the device meta, {empty[0]} for one): its constructor must "
            "make them, or load them"
        )
    if lazy := [n for n, t in tensors if isinstance(t, nn.parameter.UninitializedTensorMixin)]:
        raise WorkloadError(f"{name} has lazy layers without a shape ({lazy[0]}): its constructor must run it once")
    return model


def not_awaited(result: Any) -> Any:
    """What a function has returned; Python would warn of a coroutine, which nobody awaits."""
    if inspect.iscoroutine(result):
        result.close()
    return result


def leaves(value: Any, what: str) -> list[Any]:
    """Of tuples, lists, dicts and dataclasses. Raises WorkloadError where one holds itself, or is nested without an end."""
    try:
        return flat(value)
    except RecursionError:
        raise WorkloadError(
            f"{what} holds itself, or is nested too deeply: give tensors, in tuples, lists or dicts"
        ) from None


def flat(value: Any) -> list[Any]:
    """tree_leaves(), into dataclasses as well, which PyTorch takes for leaves."""
    found = []
    for leaf in tree_leaves(value):
        held = [getattr(leaf, field.name, None) for field in fields(leaf)] if _is_record(leaf) else None
        found += [leaf] if held is None else flat(held)
    return found


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def not_a_model(model: Any) -> str:
    """What was given instead of a model; empty if it is one."""
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            return f"{model.__name__} is a class"
        if isinstance(model, torch.export.ExportedProgram):
            return "this is an exported program (its module() is a model)"
        function = " (call it in the forward() of one)" if inspect.isroutine(model) else ""
        return f"{shown(model)} is no nn.Module{function}"
    try:
        _ = [*model.modules(), *model.named_parameters(), *model.named_buffers()]
    except Exception as error:  # of any kind: these may be the model's own, and so is what they ask of its modules
        advice = "; a dataclass has a hash with @dataclass(eq=False)" if type(model).__hash__ is None else ""
        return f"{type(model).__name__} cannot list its modules and tensors ({short(error)}{advice})"
    return ""


def shown(value: Any) -> str:
    """What was given, in part of a line: a tensor's repr() has several."""
    return f"{' '.join(repr(value).split()):.60}"


def _advice(make: Any, arguments: Mapping[str, Any]) -> str:
    if hasattr(make, "_model_mapping"):  # of transformers' Auto classes
        return "it is a chooser: name the class that it would choose, such as LlamaForCausalLM, or weights: --pretrained ID"
    return "its arguments are given with --model-args" if arguments else ""


def _warn_of_unknown(config_class: Any, arguments: Mapping[str, Any]) -> None:
    """A config takes any name and says nothing: a misspelt one leaves the model at its full size."""
    try:
        usual = config_class()
    except Exception:  # some need arguments; then it will tell
        return
    known = [n for n in dir(usual) if not n.startswith("_")]
    for name in arguments:
        if not hasattr(usual, name):
            near = difflib.get_close_matches(name, known, 2)
            hint = f": is it {' or '.join(near)}?" * bool(near)
            print(f"warning: {config_class.__name__} has no {name!r}{hint}", file=sys.stderr)


def described(values: Iterable[tuple[str, Any]]) -> str:
    """input_ids int64 [1, 512], mask float32 [1, 512]"""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if type(value) in (list, tuple) and value and isinstance(value[0], torch.Tensor):
            return f"{type(value).__name__} of {counted(value, 'value')}, first {one(value[0])}"
        return f"{' '.join(repr(value).split()):.40}"

    return ", ".join(f"{name} {one(value)}" for name, value in values)


def _relative(path: str) -> str:
    """As short as it is told apart by: from here, or within the packages that are installed."""
    relative = os.path.relpath(path)
    return path.rpartition("site-packages/")[2] if relative.startswith("..") or "site-packages/" in path else relative
