"""What must be there before anything starts: a Python and a system that PyTorch has builds for, git, a compiler, folders to
write to. Needs the standard library alone.

`python3 -m autokernel.preflight` checks a machine before anything is downloaded; every script checks again when it starts.
The package's __init__ has refused an old Python before this file is read. Both must parse on the Pythons they refuse.
"""

import argparse
import contextlib
import difflib
import errno
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Iterable, NoReturn, Optional  # noqa: UP035 as above

from autokernel.common.backends import BACKENDS, backends_for, default_backend

PACKAGE = Path(__file__).resolve().parent.parent
DATA = PACKAGE / "data"  # of an installed package: what stands beside it in a clone
IN_CLONE = not DATA.is_dir()
ROOT = PACKAGE.parent if IN_CLONE else DATA  # of kernels/, reference.py, models/, playbook/
KERNELS = ROOT / "kernels"
# Of workspace/, results.tsv and the git repository that they belong to: the clone, else a folder where the user works.
for_programs = False  # whether fail() says it in JSON, too
HOME = ROOT if IN_CLONE else Path(os.environ.get("AUTOKERNEL_HOME") or "autokernel-runs").absolute()
SCRIPT = re.compile(r"(\bpython )?(?<![\w./-])(profile|extract|orchestrate|bench|verify|export_hf)\.py\b(?: ([a-z]+)\b)?")
NEWEST_PYTHON = (3, 15)  # for which PyTorch (2.15) has builds; the oldest stands in __init__.py
MACHINES = {"linux": ("x86_64", "aarch64"), "darwin": ("arm64",)}  # and for which
OLDEST = {"torch": (2, 9), "triton": (3, 5)}  # as in pyproject.toml, which an installed package does not have
GLIBC = (2, 28)  # of Linux, at least
OF_A_RUN = ("status", "runs", "next", "plan", "record", "report", "log", "merge", "clean")  # commands of orchestrate.py
LEAST = {  # what a process must be allowed: by too little, PyTorch hangs in its import, and kernels seem to crash
    resource.RLIMIT_NOFILE: (64, "{:g} open files (ulimit -n)"),  # with 20 a right kernel crashed, with 32 not
    resource.RLIMIT_AS: (2**30, "{:g} bytes of memory (ulimit -v)"),  # importing PyTorch 2.13 for CPUs maps 0.64 GB
}
LONGEST_WORD = 400  # of an error, shown in full: a path, most often
TERMINAL = "AUTOKERNEL_TERMINAL"  # in the environment of a command that a Python program started: the number of a file


class Refused(Exception):
    """What was asked for cannot be done; the message says why, in one line, and what to do. Ends a script with status 2."""


class MissingCompiler(Refused, RuntimeError):
    """No compiler for this language is installed, or none that works; the message says what to install."""


def as_called(text: str, all_ours: bool = False, elsewhere: bool = False) -> str:
    """`text` with its command lines as they run where the user stands.

    `python verify.py` becomes `autokernel verify`, where that command was called or there is no such script; outside of the
    clone `python CLONE/verify.py`. all_ours: nothing in it is a user's, whose own file may be a verify.py; then so where
    only that is named. elsewhere: it is read in other clones, too, so no path of this one is in it.
    """
    if IN_CLONE and not "".join(sys.argv[:1]).startswith("autokernel "):  # a model may have emptied it
        return text if elsewhere or _in_clone() else SCRIPT.sub(_with_path, text)

    def command(found: "re.Match[str]") -> str:
        python, script, word = found.groups()
        if not python and not all_ours:
            return found.group()
        if script == "orchestrate" and word in OF_A_RUN:
            return "autokernel " + word
        name = {"orchestrate": "optimize", "export_hf": "export"}.get(script, script)
        return "autokernel " + name + (" " + word if word else "")

    return SCRIPT.sub(command, text)


def _in_clone() -> bool:
    try:
        return Path.cwd() == ROOT
    except OSError:  # the folder is gone
        return False


def _with_path(found: "re.Match[str]") -> str:
    python, script, _ = found.groups()
    return found.group().replace(f"{script}.py", shlex.quote(str(ROOT / f"{script}.py")), 1) if python else found.group()


def program(script: str, name: str) -> "list[str]":
    """The command line of a script of the clone; where there is none, of `autokernel NAME`, which does the same."""
    path = ROOT / (script + ".py")
    return [sys.executable, str(path)] if path.is_file() else installed(name)


def installed(*words: str) -> "list[str]":
    """`autokernel WORDS`. By its file: with -m, Python would take an autokernel.py of the folder that we are called in."""
    return [sys.executable, str(PACKAGE / "__main__.py"), *words]


def called_as_we_are(script: str, name: str) -> "list[str]":
    """The command line of the same for a process of its own, called as we are: it speaks of itself by that name."""
    return installed(name) if "".join(sys.argv[:1]).startswith("autokernel ") else program(script, name)


def terminal() -> "int | None":
    """The number of the file that is the terminal on which progress is shown; None where there is none."""
    given = os.environ.get(TERMINAL)
    if given and given.isdigit() and os.isatty(int(given)):  # what an agent starts inherits the name alone
        return int(given)
    return 2 if terminal_of_stderr() is not None else None


def terminal_of_stderr() -> "int | None":
    """The number of stderr's file where it is a terminal; a program may have closed it, or put anything in its place."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # none at all, a notebook's or a logger's, closed
        return None
    return number if os.isatty(number) else None


def default_cache() -> Path:
    """What is kept for all runs: $AUTOKERNEL_CACHE, else ~/.cache/autokernel. Without a home, it is temporary."""
    home = Path(os.path.expanduser("~"))  # itself, where there is none
    home = home if home.is_absolute() else Path(tempfile.gettempdir(), f"home-{os.getuid()}")
    named = os.environ.get("AUTOKERNEL_CACHE")
    return Path(named or Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "autokernel")).absolute()


def proven_folder() -> Path:
    """Of the kernels that paid in some model: $AUTOKERNEL_PROVEN, else a folder of the cache."""
    return Path(os.environ.get("AUTOKERNEL_PROVEN") or default_cache() / "proven")


def named(text: str) -> str:
    """The type of an option that must say something: an empty one is most often a variable of a shell's that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: say what it is to be, or leave the option out")
    return text


def known_agents() -> "list[str]":
    """The files of agents/ that define make(say, options, spent_usd, argument), but `command`, which needs words."""
    files = (PACKAGE / "agents").glob("*.py")
    return sorted({path.stem for path in files if "\ndef make(" in path.read_text()} - {"command"})


def model_file(name: str) -> Optional[Path]:  # noqa: UP045 as above
    """A Python file of this folder, of that of the runs, or one that ships with AutoKernel; None: there is none."""
    return next((path for path in (Path(name), HOME / name, ROOT / name) if path.is_file()), None)


def why_no_model(name: str) -> str:
    """What is said where there is no such file, with what is called nearly so."""
    folder = next((path.parent for path in (Path(name), ROOT / name) if path.parent.is_dir()), Path.cwd())
    there = [p.stem for p in folder.glob("*.py") if p.is_file()]  # a link may lead nowhere
    found = [f"{stem}.py" for stem in difflib.get_close_matches(Path(name).stem, there, 3)]
    return f"there is no file {name}" + f": is it {' or '.join(found)}?" * bool(found)


def kernel_types(folder: Path = KERNELS) -> "list[str]":
    return sorted(path.parent.name for path in folder.glob("*/spec.py"))


def fail(message: object) -> NoReturn:
    """End the program: one line on stderr that says what to do, exit status 2. What is given as a word may be a text.

    Where JSON was asked for, stdout has the line as well, in JSON: for_programs, which command lines set.
    """
    words = [word if len(word) <= LONGEST_WORD else word[:200] + "…" + word[-50:] for word in str(message).split()]
    text = as_called("".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(words)))  # as what would colour it
    (sys.stderr or sys.__stderr__).write("error: " + text + "\n")
    if for_programs:
        with contextlib.suppress(OSError):  # who asked has gone
            print(json.dumps({"error": text}), flush=True)
    raise SystemExit(2)


def version() -> str:
    """`autokernel 0.1.0 (commit 1d70086), Python 3.12.3, torch 2.13.0`; the last without its import (seconds)."""
    from autokernel import __version__  # here: a saved package has no such name, and asks for no version

    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = IN_CLONE and subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch"
    ours = f"autokernel {__version__}{f' (commit {commit})' if commit else ''}"
    return f"{ours}, Python {platform.python_version()}, {torch}"


def why_no_builds(python: tuple, implementation: str, system: str, machine: str, libc: tuple) -> Optional[str]:  # noqa: UP045
    """Why PyTorch cannot be installed on such a system, and what to do; None if it can."""
    if implementation != "cpython" or python > NEWEST_PYTHON:
        this = "{} {}.{}".format(implementation, *python)
        return f"PyTorch has no builds for {this}: start again with CPython 3.10 to {'.'.join(map(str, NEWEST_PYTHON))}"
    if system not in MACHINES:
        return f"AutoKernel runs on Linux and macOS, this is {system}: on Windows use WSL (wsl --install)"
    if machine not in MACHINES[system]:
        return f"PyTorch has no builds for {system} on {machine}: use a machine with {' or '.join(MACHINES[system])}"
    if system == "linux" and (libc[0] != "glibc" or _release(libc[1]) < GLIBC):
        found = " ".join(libc).strip() or "another C library"
        return f"PyTorch's builds need glibc {GLIBC[0]}.{GLIBC[1]}, here is {found}: use a newer system, or a container"
    return None


def _release(version: str) -> tuple:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def why_outdated(project: str, installed: str) -> Optional[str]:  # noqa: UP045 as above
    """What to do where `installed`, the version of "torch" or "triton" here, is too old."""
    oldest = OLDEST[project]
    if _release(installed) >= oldest:
        return None
    return (
        f"{project} {installed} is too old: {sys.executable} -m pip install --upgrade '{project}>={oldest[0]}.{oldest[1]}'"
    )


def _check_versions() -> None:
    """Fail if PyTorch or Triton are installed here and too old."""
    for project in OLDEST:
        try:
            reason = why_outdated(project, importlib.metadata.version(project))
        except importlib.metadata.PackageNotFoundError:
            continue
        if reason:
            fail(reason)


def check_installed() -> None:
    """Fail in a Python without PyTorch (that outside of the virtual environment, most often), with too old a one, or where
    a process may have too little for it."""
    if importlib.util.find_spec("torch") is None:
        advice = "paste the first line of README.md, then use .venv/bin/python"
        fail(f"AutoKernel is not installed in {sys.executable}: {advice}")
    _check_versions()
    for limit, (least, words) in LEAST.items():
        allowed = resource.getrlimit(limit)[0]
        if allowed != resource.RLIM_INFINITY and allowed < least:
            fail(f"a process may have no more than {words.format(allowed)} here: allow it {least} or more")


def find_compiler(language: str) -> str:
    """Path of the compiler for kernels in a language, by its name in BACKENDS. Raises MissingCompiler."""
    row = BACKENDS[language]
    found = list(filter(None, (shutil.which(name) for name in row.compilers if name)))
    if row.pip_compilers:
        found += map(str, sorted(Path(sysconfig.get_path("purelib")).glob(row.pip_compilers), reverse=True))
    reasons = []
    for compiler in found:
        reason = why_not_compiling(compiler, row.suffix)
        if not reason:
            return compiler
        reasons.append(f"{compiler} compiles nothing ({reason})")
    raise MissingCompiler("; ".join([f"{language} kernels need {row.advice}", *reasons]))


@functools.cache
def why_not_compiling(compiler: str, suffix: str) -> str:
    """Why a compiler cannot make an object file of one function, in its own words; empty if it can. Some 30 ms, once."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe" + suffix)
            source.write_text("int probe(int x) { return x + 1; }\n")
            command = [compiler, "-c", str(source), "-o", os.path.join(folder, "probe.o")]
            run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
            if run.returncode == 0 and not os.path.exists(command[-1]):
                return "it says that it has, but wrote no object file"
    except subprocess.TimeoutExpired:
        return "no answer within 60 s"
    except OSError as error:
        if error.errno == errno.ENOSPC:  # no fault of the compiler's
            raise
        return str(error)
    if run.returncode == 0:
        return ""
    words = run.stderr.decode(errors="replace").strip()
    full = os.strerror(errno.ENOSPC)
    if full in words:  # where Python has its temporary files may be another folder
        raise OSError(errno.ENOSPC, full, os.environ.get("TMPDIR") or folder)
    return words.splitlines()[0] if words else f"exit status {run.returncode}"


def backends(device: str) -> tuple[str, ...]:
    """The backends whose kernels run on `device` and can be compiled here; that of its starters first."""
    default, *others = backends_for(device)
    return (default, *filter(_has_compiler, others))


def _has_compiler(language: str) -> bool:
    try:
        return bool(find_compiler(language))
    except MissingCompiler:
        return False


def check(language: str, folders: Iterable[Path], experiments: bool = True) -> None:
    """Raises Refused, one clear line, if the compiler for `language`, write access to a folder or, where experiments are to
    be recorded, git is missing."""
    if experiments and not IN_CLONE:
        make_home()
    reason = why_no_repository(HOME) if experiments else None
    if reason:
        raise Refused(reason)
    find_compiler(language)
    backend, header = BACKENDS[language], Path(sysconfig.get_path("include"), "Python.h")
    if backend.python_headers and not header.exists():
        raise Refused(
            f"{backend.title} needs Python's headers, there is no {header} (Debian/Ubuntu: apt install python3-dev)"
        )
    for folder in folders:
        reason = why_not_writable(folder)
        if reason:
            raise Refused(reason)
    reason = why_nothing_loads()
    if reason:
        raise Refused(reason)


def why_nothing_loads() -> Optional[str]:  # noqa: UP045 as above
    """Why what is compiled cannot be loaded from where it is put: each kernel would look as if it crashed."""
    for folder, name in ((default_cache(), "AUTOKERNEL_CACHE"), (Path(tempfile.gettempdir()), "TMPDIR")):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if os.statvfs(str(existing)).f_flag & getattr(os, "ST_NOEXEC", 0):
            return f"{folder} is mounted noexec, and kernels are compiled there: set {name} to a folder that is not"
    return None


def check_writable(*paths: Path) -> None:
    """Before hours are spent on what is to be written there: end with one line if a file of such a name cannot be."""
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe, a terminal
            continue
        reason = "it is a folder: name a file" if path.is_dir() else why_not_writable(path.parent)
        if reason:
            fail(f"{path}: {reason}")


def why_no_repository(root: Path) -> Optional[str]:  # noqa: UP045 as above
    """Why experiments cannot be commits at `root`, and what to do; None if they can.

    An unpacked archive has no .git of its own: git would find that of a folder above it, which is another project's.
    """
    git = shutil.which("git")
    if not git:
        return "git is not installed (Debian/Ubuntu: apt install git; macOS: xcode-select --install)"
    words = ("rev-parse", "--show-toplevel", "--verify", "HEAD")
    asked = subprocess.run([git, "-C", str(root), *words], capture_output=True, env={**os.environ, "LC_ALL": "C"})
    reason = (asked.stderr.decode(errors="replace").strip().splitlines() or [""])[0]
    if asked.stdout:
        top = os.fsdecode(asked.stdout.splitlines()[0])
        if os.path.samefile(top, root):
            if not asked.returncode:
                return None
            if "Needed a single revision" in reason:
                return f"experiments follow the commit that is checked out, and the branch in {root} has none: git commit"
        else:
            reason = f"git takes it for a part of {top}"
    damaged = (root / ".git").exists()
    advice = "its .git is damaged: mend it, or clone it anew beside this one" if damaged else "git clone it"
    advice = "mend that file" if "bad config" in reason else advice
    advice = f"git config --global --add safe.directory {root}" if "dubious ownership" in reason else advice
    return f"experiments are git commits, and {root} is not a git clone that git can read ({reason}): {advice}"


def make_home() -> None:
    """For an installed package: the repository of its runs, which begins with what an agent reads in a run's tree."""
    if not shutil.which("git") or not why_no_repository(HOME):
        return
    HOME.mkdir(parents=True, exist_ok=True)
    for name in ("kernel.py", "program.md", "reference.py"):
        shutil.copy(str(DATA / name), str(HOME / name))
    (HOME / ".gitignore").write_text("/workspace/\n/results.tsv\n")
    settings = {"user.name": "AutoKernel", "user.email": "autokernel@localhost", "commit.gpgsign": "false"}
    git = ["git", "-C", str(HOME), "-c", "core.hooksPath=" + os.devnull]
    git += [word for name, value in settings.items() for word in ("-c", name + "=" + value)]
    commit = ["commit", "--quiet", "--message", "The runs of AutoKernel begin"]
    for words in (["init", "--quiet"], ["add", "--all"], commit):
        done = subprocess.run(git + words, capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused(f"cannot make the git repository {HOME}: {done.stderr.strip()}")


def why_not_writable(folder: Path) -> Optional[str]:  # noqa: UP045 as above
    """By writing to the folder, or to the nearest parent that exists: permission bits do not tell of read-only mounts."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(str(path)))  # a link to nowhere, too
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(1 << 16))  # nothing is written to a full disk, but a file can be made
            file.flush()
            return None
    except OSError as error:
        above = (folder.absolute(), *folder.absolute().parents)
        other = "name another folder"
        if default_cache().absolute() in above:
            other = "set AUTOKERNEL_CACHE to a folder that is"
        elif ROOT in above or HOME in above:
            other = "use a clone in a folder that is"
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        return f"cannot write to {folder} ({error.strerror}): {remedy}, or {other}"


def main() -> None:
    machine, libc = platform.machine(), platform.libc_ver()
    reason = why_no_builds(sys.version_info[:2], sys.implementation.name, sys.platform, machine, libc)
    if reason:
        fail(reason)
    if sys.prefix != sys.base_prefix:  # in the virtual environment: outside of it, what is installed does not matter
        _check_versions()
    if importlib.util.find_spec("ensurepip") is None:
        fail("this Python cannot make virtual environments (Debian/Ubuntu: apt install python3-venv)")
    check(default_backend("cpu"), (ROOT,))
