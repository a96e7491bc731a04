"""Fresh child processes in which a model runs: each carries a bias of its own, and none can take its parent with it."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch

from autokernel.common.stderr import divert_for_good, diverted
from autokernel.hardware.machine import free_memory
from autokernel.hardware.processes import die_with_parent
from autokernel.spec import ROOT

CLEANING = "autokernel.integration.verification.fork_server"
IMPORTED = [CLEANING, "torch._dynamo", "autokernel.integration.verification"]


class ChildDied(RuntimeError):
    """The process in which the model ran came to a violent end (a kernel's fault, or no memory)."""


class FreshProcess:
    """A new process that works on `device`, and answers one call after another; leaving its context ends it.

    All that it prints goes to the end of `log`, if there is one, with `name`.

    It is forked from one that has imported what takes seconds, and has done nothing with it. Where CUDA would not work then
    (importing all of Inductor asks it what there is), or nothing can be forked so, the process starts from nothing.
    """

    def __init__(self, device: str, name: str, log: Path | None = None):
        self.log, self.asked = log, None
        self.pool = ProcessPoolExecutor(1, _context(device, log), initializer=partial(_begin, log, name))

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it compute function(*arguments), meanwhile."""
        try:
            self.asked = _submitted(self.pool, self.log, function, *arguments)
        except BrokenProcessPool:
            raise _died() from None

    def answer(self, timeout_s: float | None = None) -> Any:
        """What the started call returned; the exception that it raised; ChildDied after a crash, TimeoutError after that
        time."""
        try:
            return self.asked.result(timeout_s)
        except BrokenProcessPool:
            raise _died() from None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.answer()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It and all that it has started stand still meanwhile."""
        found, stopped = [psutil.Process(pid) for pid in self.pool._processes or {}], []
        while found:
            process = found.pop()
            with suppress(psutil.NoSuchProcess):
                process.suspend()  # before its children are looked for: it starts no more
                stopped.append(process)
                found += process.children()
        try:
            yield
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def __enter__(self) -> "FreshProcess":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error:  # or leaving the pool would wait for its answer
            self.kill()
        self.close()

    def kill(self) -> None:
        for process in (self.pool._processes or {}).values():
            process.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        self.pool.shutdown()


def in_fresh_process(device: str, function: Callable[..., Any], *arguments: Any, log: Path | None = None) -> Any:
    """function(*arguments) in a FreshProcess."""
    with FreshProcess(device, function.__name__, log) as process:
        return process.ask(function, *arguments)


noted: dict[str, int] = {}  # in this process, by device: the most of a GPU's memory that it had taken when it noted it


def note_memory(device: str) -> None:
    """In a child process: what it takes from here on, those that compile do not take."""
    if device != "cpu":
        noted[device] = torch.cuda.max_memory_reserved(device)


def rooms_beside(device: str) -> tuple[int, int]:
    """In a child process: how many more like it half of the free memory holds, by the most that it has taken so far; and
    how many more that take of a GPU's what it had taken when it noted that, or else the same."""
    most = 0 if device == "cpu" else torch.cuda.max_memory_reserved(device)
    like_it, less = (_rooms(device, 1, of_gpu) for of_gpu in (most, noted.get(device, most)))
    return like_it, less


def rooms_for(device: str, forms: int) -> int:
    """In a child process that has run one form of a model: how many processes with so many forms half of the free memory
    holds. Each form may keep of a GPU's memory what the one has taken (CUDA graphs do); of the host's, all of them together
    take as much again."""
    return _rooms(device, 2, 0 if device == "cpu" else forms * torch.cuda.max_memory_reserved(device))


def _rooms(device: str, of_host: int, of_gpu: int) -> int:
    """How many processes half of the free memory holds: each takes so many times the most that this one has taken of the
    host's memory, and so many bytes of the GPU's."""
    peak = next((int(line.split()[1]) << 10 for line in _lines(Path("/proc/self/status")) if line.startswith("VmHWM")), 0)
    room = free_memory() // 2 // (of_host * max(peak, psutil.Process().memory_info().rss))
    if device == "cpu":
        return room
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return min(room, free // 2 // max(1, of_gpu))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _died() -> ChildDied:
    return ChildDied("the process in which the optimised model ran has died")


def _begin(log: Path | None, name: str) -> None:
    """The first that a child does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which ends it
    die_with_parent()
    Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    if log:
        divert_for_good(log, name)


def _end_with(parent: BaseProcess) -> None:
    """Where it was forked: its parent to Linux is the process that forked it, which lives as long as its children do."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _submitted(pool: ProcessPoolExecutor, log: Path | None, function: Callable[..., Any], *arguments: Any) -> Future:
    with _to_log(log):  # the child starts now, with this file descriptor 2, and imports torch
        return pool.submit(function, *arguments)


def _to_log(log: Path | None) -> AbstractContextManager[Any]:
    return diverted(log) if log else nullcontext()


@contextmanager
def _where_we_are_imported() -> Iterator[None]:
    """A server that forks looks for what it imports in the folder in which it starts (Python 3.11's, there first), which
    may have modules called like ours: another clone's, a reference.py of the user's. What it forks is where we are."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""  # a folder that is gone
    os.chdir(ROOT)
    try:
        yield
    finally:
        if here:
            os.chdir(here)


@cache
def start_forking(device: str, log: Path | None) -> None:
    """Start what each FreshProcess is forked from: its imports take seconds, which may pass before they are wanted."""
    if sys.platform != "linux":
        return
    imported = [*IMPORTED, "torch._inductor.compile_fx"] if device == "cpu" else IMPORTED
    get_context("forkserver").set_forkserver_preload(imported)
    with _to_log(log), _where_we_are_imported():
        forkserver.ensure_running()


@cache
def _context(device: str, log: Path | None) -> BaseContext:
    spawn, fork = get_context("spawn"), get_context("forkserver")
    if sys.platform != "linux":
        return spawn
    start_forking(device, log)
    with ProcessPoolExecutor(1, fork, initializer=partial(_begin, log, _works.__name__)) as pool:
        return fork if _submitted(pool, log, _works, device).result() else spawn


def _works(device: str) -> bool:
    try:
        return bool(torch.ones(1, device=device).item())
    except (RuntimeError, AssertionError):  # "CUDA unknown error", in a process forked from one that asked; no CUDA at all
        return False
