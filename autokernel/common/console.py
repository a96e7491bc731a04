"""What the scripts share: one line of error and exit status 2, the console, progress, --device, the check at the start.

PyTorch and rich are imported where they are used: a script parses its arguments without them.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autokernel.common.preflight import HOME, Refused, check, check_installed, fail, terminal

if TYPE_CHECKING:
    from rich.console import Console

check_installed()  # before what it says is missing is imported

__all__ = [
    "add_device_argument",
    "add_sandbox_argument",
    "check_machine",
    "console",
    "default_device",
    "device_here",
    "fail",
    "preflight",
    "progress",
    "settle_device",
]


def console() -> "Console":
    """For what people read while they wait: stderr, so that stdout has results alone.

    A terminal by a file descriptor of its own: number 2 goes to a log file while PyTorch's profiler and compiler work.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise

    number = terminal()
    if number is not None:
        return _Console(file=os.fdopen(os.dup(number), "w"), highlight=False)
    return _Console(stderr=True, highlight=False)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A function to call with a line of text at every step: a bar on a terminal, plain lines elsewhere."""
    if terminal() is None:
        print(what, file=sys.stderr, flush=True)
        yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{what}: {text}")


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """--device, which `settle_device` settles: what there is takes PyTorch to know."""

    def device(text: str) -> str:
        try:
            return _device(text)
        except Refused as why:
            raise argparse.ArgumentTypeError(str(why)) from None

    parser.add_argument("--device", type=device, help="cpu, cuda or cuda:1 (default: a GPU, if there is one)")


def add_sandbox_argument(parser: argparse.ArgumentParser, workers: bool = False) -> None:
    """`workers`: there it may be said that it is not required, for they require it by themselves."""
    what = "refuse to run where a layer of the sandbox fails"
    if workers:
        what += " (default: with --workers, on every node)"
        parser.add_argument("--require-sandbox", action=argparse.BooleanOptionalAction, help=what)
    else:
        parser.add_argument("--require-sandbox", action="store_true", help=what)


def _device(text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or text == "cuda:":
        raise Refused(f"{text!r} is none of cpu, cuda, cuda:1")
    return text


def device_here(asked: str | None) -> str:
    """The device that is asked for, else a GPU if there is one. Raises Refused where it is not here."""
    import torch

    device = default_device() if asked is None else _device(str(asked))
    kind, _, index = device.partition(":")
    available = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= available:
        raise Refused(f"there is no {device} here (devices of this kind that PyTorch sees: {available})")
    return device


def settle_device(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Put a device that is here into `options`: the one named, else a GPU if there is one. Ends the script if it is not."""
    try:
        options.device = device_here(options.device)
    except Refused as why:
        parser.error(f"argument --device: {why}")


def check_machine(language: str, experiments: bool = True) -> None:
    """Raises Refused, one clear line, if what kernels in `language` (cpp, triton, cuda) need is missing; experiments need
    git and a folder for their runs."""
    from autokernel.build import default_cache

    check(language, (*[HOME / "workspace"] * experiments, default_cache()), experiments)


def preflight(language: str, experiments: bool = True) -> None:
    """The same, for a script: it ends with that line."""
    try:
        check_machine(language, experiments)
    except Refused as reason:
        fail(reason)
