"""What must be there before anything starts: git, a compiler, folders to write to. Needs the standard library alone.

`python3 -m autokernel.preflight` checks a machine before anything is downloaded; every script checks again when it starts.
The package's __init__ has refused an old Python before this file is read. Both must parse on the Pythons they refuse.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Iterable, NoReturn, Optional  # noqa: UP035 as above

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = {
    "cpp": (os.environ.get("CXX"), "g++", "clang++", "c++"),
    "triton": (os.environ.get("CC"), "gcc", "clang"),  # the names that Triton tries: it compiles its launcher in C
    "cuda": ("nvcc", os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")),
}
ADVICE = {
    "cpp": "a C++ compiler (Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)",
    "triton": "a C compiler (Debian/Ubuntu: apt install gcc; Fedora: dnf install gcc)",
    "cuda": "nvcc, of NVIDIA's CUDA toolkit or from pip (pip install -e '.[cuda]')",
}


class MissingCompiler(RuntimeError):
    """No compiler for this language is installed; the message says what to install."""


def fail(message: object) -> NoReturn:
    """End the program: one line on stderr that says what to do, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_installed() -> None:
    """Fail in a Python that has no PyTorch: that outside of the virtual environment, most often."""
    if importlib.util.find_spec("torch") is None:
        advice = "paste the first line of README.md, then use .venv/bin/python"
        fail(f"AutoKernel is not installed in {sys.executable}: {advice}")


def find_compiler(language: str) -> str:
    """Path of the compiler for "cpp", "cuda" or "triton" kernels. Raises MissingCompiler."""
    found = list(filter(None, (shutil.which(name) for name in COMPILERS[language] if name)))
    if language == "cuda":
        found += map(str, sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True))  # of pip's
    if not found:
        raise MissingCompiler(f"{language} kernels need {ADVICE[language]}")
    return found[0]


def backends(device: str) -> tuple[str, ...]:
    """The backends whose kernels run on `device` and can be compiled here; that of its starters first."""
    if device.partition(":")[0] == "cpu":
        return ("cpp",)
    try:
        find_compiler("cuda")
    except MissingCompiler:
        return ("triton",)
    return ("triton", "cuda")


def check(language: str, folders: Iterable[Path], experiments: bool = True) -> None:
    """End the program with one clear line if the compiler for `language`, write access to a folder or, where experiments
    are to be recorded, git is missing."""
    if experiments:
        _check_git()
    try:
        find_compiler(language)
    except MissingCompiler as error:
        fail(error)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if language == "triton" and not header.exists():
        fail(f"Triton needs Python's headers, there is no {header} (Debian/Ubuntu: apt install python3-dev)")
    for folder in folders:
        reason = _why_not_writable(folder)
        if reason:
            fail(reason)


def _check_git() -> None:
    git = shutil.which("git")
    if not git:
        fail("git is not installed (Debian/Ubuntu: apt install git; macOS: xcode-select --install)")
    head = subprocess.run([git, "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True)
    if head.returncode != 0:
        reason = head.stderr.decode(errors="replace").strip().splitlines()[0]
        fail(f"experiments are git commits, and {ROOT} is not a git clone that git can read ({reason})")


def _why_not_writable(folder: Path) -> Optional[str]:  # noqa: UP045 as above
    """By writing to the folder, or to the nearest parent that exists: permission bits do not tell of read-only mounts."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"cannot write to {folder} ({error.strerror}): make it writable, or use a clone in a folder that is"


def main() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        fail("this Python cannot make virtual environments (Debian/Ubuntu: apt install python3-venv)")
    check("cpp", (ROOT,))


if __name__ == "__main__":
    main()
