"""What every command line shares without PyTorch: numbers that make sense, names of runs, --version, how a script ends.

`if __name__ == "__main__": raise SystemExit(script(main))` ends every script, so that what a user can mend of whatever
main() raises is one line on stderr and exit status 2.
"""

import argparse
import codecs
import difflib
import errno
import locale
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autokernel.cli.signals import let_signals_come
from autokernel.common.cprofile import load_cprofile
from autokernel.common.preflight import Refused, as_called, fail, named, version, why_not_writable
from autokernel.history.runs import BadTag, checked_tag
from autokernel.run.supervisor import CLOSED_PIPE

INTERRUPTED = 130  # 128 + SIGINT, as shells say it
NEGATIVE = re.compile(r"-[\d.]")  # what begins so is a value, and no option: --input-shape -1,512
YEAR_H = 366 * 24
LONGEST = 400  # characters of another's words
OF_GIT = ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "OBJECT_DIRECTORY", "NAMESPACE", "PREFIX")
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # which PyTorch makes when it is imported
OF_FOLDERS = ("AUTOKERNEL_CACHE", "AUTOKERNEL_PROVEN", "AUTOKERNEL_HOME", "XDG_CACHE_HOME", "TMPDIR", INDUCTOR)
USED_UP = {  # what a process may have no more of, as the shell or the container that it was started in says
    errno.ENOMEM: "memory is used up (ulimit -v, a container's limit)",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "no more processes can be started (ulimit -u, a container's limit)",
}
WRITE_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a full disk, a quota, `ulimit -f`, a broken disk
NOT_OURS = (  # the file system's refusals, which say nothing of our code
    *(*WRITE_FAILED, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


class Parser(argparse.ArgumentParser):
    """Keeps a docstring's lines, has --version, and says what is wrong in one line."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | options
        super().__init__(description=description, **options)
        self._negative_number_matcher = NEGATIVE
        self.add_argument("--version", action=_Version, nargs=0, help="print it, with Python's and PyTorch's, and end")

    def format_help(self) -> str:
        return as_called(super().format_help(), all_ours=True)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help that cannot be written is an error, as any other output is: argparse would say nothing of it."""
        (file or sys.stderr).write(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know it says itself, and not the program: it knows what is called nearly so."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = [difflib.get_close_matches(w.partition("=")[0], self._option_string_actions, 1, 0.7) for w in unknown]
            meant = f", did you mean {' and '.join(options)}?" if (options := [o for found in near for o in found]) else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        fail(f"{message} ({'' if self.prog.startswith('autokernel') else 'python '}{self.prog} --help)")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        print(version())
        parser.exit()


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return _within(text, value, f"at least {least}", least <= value, most)

    return parse


def number(above: float | None = None, least: float = 0.0, most: float | None = None) -> Callable[[str], float]:
    """The type of an option that takes a finite number: more than `above`, or at least `least`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number")
        enough = value >= least if above is None else value > above
        return _within(text, value, f"at least {least:g}" if above is None else f"more than {above:g}", enough, most)

    return parse


def _within(text: str, value: Any, lower: str, enough: bool, most: float | None) -> Any:
    if not enough or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{text} is out of range: {lower}{'' if most is None else f', at most {most:g}'}")
    return value


count = whole(1, 10**9)  # of what must be there at all
count_or_none = whole(0, 10**9)
positive = number(above=0.0)
nonnegative = number()
seed = whole(0, 2**63 - 1)  # as torch.manual_seed() takes it


def named_path(text: str) -> Path:
    """The type of what names a file or a folder. An empty one would be the folder in which the user works."""
    return Path(named(text))


def tag(text: str) -> str:
    """The type of --tag. A shell completes the name of a run's folder to TAG/."""
    try:
        return checked_tag(text.rstrip("/") or text)
    except BadTag as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def workers(text: str) -> int | str:
    """The type of --workers."""
    return text if text == "auto" else count(text)


def new_file(text: str) -> Path:
    """The type of an option that names a file to be written: one that exists is not overwritten."""
    file = named_path(text)
    if file.exists():
        raise argparse.ArgumentTypeError(f"{text!r} exists: name another file, or remove it")
    return file


def open_streams() -> None:
    """Where one is closed (`>&-`) its number would be that of the next file: what is printed goes nowhere then."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is taken
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def in_utf8() -> None:
    """Start this program again in Python's UTF-8 mode where the locale's encoding is another: files of ours are UTF-8."""
    if not sys.flags.utf8_mode and codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for the processes that are started from here
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def script(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """The exit status of a script; `main` takes its arguments, None for those of the process, and may return one.

    A reader that has gone (`| head`) ends it quietly.
    """
    open_streams()
    in_utf8()
    try:
        os.getcwd()
    except FileNotFoundError:
        fail("the folder that you are in is gone: change to one that is there")
    load_cprofile()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's are: a file's name may be no text in UTF-8
    for name in OF_GIT:  # as a hook of git sets them: this clone is meant, whatever repository we are called from
        os.environ.pop(f"GIT_{name}", None)
    for name in filter(os.environ.get, OF_FOLDERS):  # processes that are started from here are in folders of their own
        os.environ[name] = os.path.abspath(os.environ[name])
    if (place := os.environ.get(INDUCTOR)) and (reason := why_not_writable(Path(place))):
        fail(f"${INDUCTOR}: {reason}")
    try:
        try:
            let_signals_come()
            return main(argv) or 0
        finally:
            sys.stdout.flush()
    except Refused as error:
        fail(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return CLOSED_PIPE
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped", file=sys.stderr)
        return getattr(stopped, "status", INTERRUPTED)
    except OSError as error:
        if _is_torchs(error):  # a library of its own that is not there, say
            fail(_in_words(error))
        if error.errno in USED_UP and not hasattr(error, "characters_written"):  # as a pipe that is full has
            fail(f"{USED_UP[error.errno]}: raise the limit, and the same command does it again")
        if error.errno not in NOT_OURS or error.filename is None and error.errno not in WRITE_FAILED:
            raise
        fail(f"{error.filename or 'output cannot be written'}: {error.strerror}")
    except MemoryError:
        fail(f"{USED_UP[errno.ENOMEM]}: raise the limit, and the same command does it again")
    except Exception as error:
        fail(_in_words(error))


def _in_words(error: Exception) -> str:
    """What git said, why PyTorch cannot be imported, or that a model's code stands in the place of Python's own.

    Else this is a mistake of ours, raised.
    """
    if _is_torchs(error):
        said = " ".join(str(error).strip().partition("\n")[0].split())
        limited = "map segment" in said and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        why = f"; {USED_UP[errno.ENOMEM]}: raise the limit" if limited else ""
        return f"PyTorch cannot be imported in {sys.executable}: {type(error).__name__}: {said[:LONGEST]}{why}"
    ledger, users = (sys.modules.get(f"autokernel.{name}") for name in ("history.ledger", "model.user_code"))
    if ledger and isinstance(error, ledger.GitFailed):
        return ledger.in_words(error)
    if users and (names := users.replaced()):
        return f"the model's code has replaced {', '.join(names)}, which is needed here ({users.short(error)}): leave it be"
    raise error


def _is_torchs(error: Exception) -> bool:
    """Whether it came of importing PyTorch, as where $TORCH_LOGS makes no sense to it: Python then has no such module."""
    trace, within = error.__traceback__, False
    while trace and not within:
        within, trace = trace.tb_frame.f_globals.get("__name__") == "torch", trace.tb_next
    return within and "torch" not in sys.modules
