"""Optimise a PyTorch model's kernels, and look at what was done.

    autokernel profile --model net.py --class-name Net --input-shape 8,128    where its time goes
    autokernel optimize --model net.py --class-name Net --input-shape 8,128   the whole job: profile, experiments, verify
    autokernel report                                                         what came of the latest run
    autokernel bench mine.py                                                  is a kernel of yours right, and how fast?

`autokernel optimize` alone works on a small LLaMA for some minutes: a first look. The same command goes on where a run
stopped. `autokernel COMMAND --help` has a command's options; in Python: import autokernel; autokernel.apply(model).
"""

import atexit
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from autokernel.cli.arguments import Parser, open_streams, script
from autokernel.cli.signals import catch_signals
from autokernel.cli.watched import BY_ITSELF, is_watched, watch
from autokernel.common import preflight
from autokernel.common.preflight import OF_A_RUN, fail, model_file, why_no_model

JSON = "--json"  # what every command calls the option by which its output is for programs
OF_A_MODEL = ("profile", "orchestrate")  # scripts with an option --model, a file
WATCHED = ("profile",)  # in whose process a model's own code runs; orchestrate.py has a supervisor


@dataclass(frozen=True)
class Command:
    """A module of autokernel/cli/ with make_parser() and main(argv), and what it is for."""

    module: str
    what: str


COMMANDS = {
    "profile": Command("profile", "where a model's time goes, and what faster kernels would give"),
    "extract": Command("extract", "the operations worth a kernel, each with its shapes and a file to start from"),
    "optimize": Command("orchestrate", "the whole job: profile, extract, experiments, verify, report"),
    "bench": Command("bench", "judge a kernel file: correctness, then speed against PyTorch"),
    "verify": Command("verify", "the kept kernels back in their model: right, and how much faster?"),
    "status": Command("orchestrate", "where a run stands"),
    "runs": Command("orchestrate", "which runs there are"),
    "report": Command("orchestrate", "the summary of a run; writes its report.html again"),
    "log": Command("orchestrate", "the experiments of a run"),
    "plan": Command("orchestrate", "the targets of a run, and their shares of the time"),
    "next": Command("orchestrate", "the next target, and why"),
    "record": Command("orchestrate", "judge an edited kernel file as an experiment of a run"),
    "merge": Command("orchestrate", "the verified winners as a package, committed on your branch"),
    "clean": Command("orchestrate", "remove a run"),
    "check": Command("check", "for continuous integration: is a changed kernel right, and not slower than it was?"),
    "cache": Command("cache", "the kernels that were proven on this machine, for other models: list, prove, clear"),
    "track": Command("track", "the experiments of a run in TensorBoard, MLflow or Weights & Biases"),
    "mcp": Command("mcp_server", "a server for coding agents: targets, history, edits, verdicts (started by their client)"),
    "export": Command("export_hf", "write a kernel as a project of the Hugging Face Kernel Hub"),
    "completion": Command("completion", "print a script by which a shell (bash, zsh and others) completes these commands"),
}


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """The exit status of the script autokernel/cli/<name>.py, whose main() takes `argv`."""
    catch_signals()  # before PyTorch is imported
    words = sys.argv[1:] if argv is None else argv
    preflight.for_programs = JSON in words
    if name in OF_A_MODEL:
        _check_model(words)
    try:
        status = script(_main(name), argv)
    except SystemExit as end:
        status = end.code or 0
    user_code = sys.modules.get("autokernel.model.user_code")  # not every command has a model
    if user_code and any(thread.is_alive() for thread in user_code.threads):
        _end_now(status)
    return status


def _check_model(words: Sequence[str]) -> None:
    """Ends with one line where there is no such file: it takes PyTorch seconds to be imported, which the others need."""
    if BY_ITSELF & set(words):
        return
    named = [after for word, after in zip(words, words[1:]) if word == "--model"]
    named += [word.removeprefix("--model=") for word in words if word.startswith("--model=")]
    for model in named:
        with suppress(OSError):  # a name that is none, of which the script says more
            if model.endswith(".py") and model_file(model) is None:
                fail(why_no_model(model))


def _main(name: str) -> Callable[[Sequence[str] | None], int | None]:
    """main() of a module, which is imported when it is called; that of a script with a parent runs the script."""
    if name in WATCHED and not is_watched(sys.argv[1:]):
        return lambda words: watch(name, sys.argv[1:] if words is None else words)

    def imported(words: Sequence[str] | None) -> int | None:
        preflight.check_installed()  # before what may be missing is imported
        return importlib.import_module(f"autokernel.cli.{name}").main(words)

    return imported


def _end_now(status: int) -> NoReturn:
    """Python would wait for a thread of the model's own, which may never end."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or a model has put something else there
            stream.flush()
    os._exit(status)


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="autokernel", usage="autokernel COMMAND [OPTIONS]")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.what, add_help=False)
    return parser


def main() -> int:
    """The console command `autokernel`."""
    open_streams()
    preflight.for_programs = JSON in sys.argv
    name, *words = sys.argv[1:] or ["--help"]
    command = COMMANDS.get(name)
    if command is None:
        sys.argv[0] = "autokernel "  # as as_called() knows it
        if not name.startswith("-"):
            near = [one for one, known in COMMANDS.items() if known.module == name]  # as the scripts are called
            near = near or difflib.get_close_matches(name.lower(), COMMANDS, 1)
            meant = f", did you mean {near[0]}?" if near else ""
            fail(f"there is no command {name!r}{meant}: the commands are {', '.join(COMMANDS)} (autokernel --help)")
        make_parser().parse_args([name, *words])
        fail(f"{name} is no option of autokernel by itself: a command comes first (autokernel --help)")
    sys.argv = [f"autokernel {name}", *words]
    return run(command.module, [name, *words] if name in OF_A_RUN else words)
