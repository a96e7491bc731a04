"""What the scripts share: one line of error and exit status 2, the console, progress, --device, the check at the start."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autokernel.preflight import HOME, Refused, check, check_installed, fail

check_installed()  # before what it says is missing is imported

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

from autokernel.build import default_cache  # noqa: E402

__all__ = [
    "add_device_argument",
    "add_sandbox_argument",
    "check_machine",
    "console",
    "default_device",
    "fail",
    "preflight",
    "progress",
]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise


def console() -> Console:
    """For what people read while they wait: stderr, so that stdout has results alone.

    A terminal by a file descriptor of its own: number 2 goes to a log file while PyTorch's profiler and compiler work.
    """
    if sys.stderr.isatty():
        return _Console(file=os.fdopen(os.dup(2), "w"), highlight=False)
    return _Console(stderr=True, highlight=False)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A function to call with a line of text at every step: a bar on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
        yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{what}: {text}")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=_device, default=default_device(), help="cpu, cuda or cuda:1 (default here: %(default)s)"
    )


def add_sandbox_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--require-sandbox", action="store_true", help="refuse to run where a layer of the sandbox fails")


def _device(text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or text == "cuda:":
        raise argparse.ArgumentTypeError(f"{text!r} is none of cpu, cuda, cuda:1")
    available = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= available:
        raise argparse.ArgumentTypeError(f"there is no {text} here (devices of this kind that PyTorch sees: {available})")
    return text


def check_machine(language: str, experiments: bool = True) -> None:
    """Raises Refused, one clear line, if what kernels in `language` (cpp, triton, cuda) need is missing; experiments need
    git."""
    check(language, (HOME / "workspace", default_cache()), experiments)


def preflight(language: str, experiments: bool = True) -> None:
    """The same, for a script: it ends with that line."""
    try:
        check_machine(language, experiments)
    except Refused as reason:
        fail(reason)
