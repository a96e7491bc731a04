"""A missing git, compiler, package or folder, and an old Python: one clear line, exit status 2, nothing half-done."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel.cli.main import COMMANDS
from autokernel.common.preflight import OLDEST, why_no_builds, why_outdated
from tests import in_process

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text())
PARSED = (
    "__init__.py",
    "preflight.py",
    "common/__init__.py",
    "common/preflight.py",
    "common/backends.py",
    "common/console.py",
)
PREFLIGHT = ("-m", "autokernel.preflight")


def run(*command, python=sys.executable, cwd=ROOT, **environment):
    return subprocess.run([python, *command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def assert_refused(result, *words):
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stdout == ""


@pytest.fixture
def bare_clone(tmp_path):
    """What git would clone, with the working tree's edits, and nothing that was built or left over here."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    shutil.copytree(ROOT / "autokernel", clone / "autokernel", dirs_exist_ok=True)
    return clone


def folder_with(tmp_path, *programs):
    """A PATH on which only these programs are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in programs:
        (folder / program).symlink_to(shutil.which(program))
    return str(folder)


def test_a_complete_machine_passes():
    result = run(*PREFLIGHT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_no_git(tmp_path):
    assert_refused(run(*PREFLIGHT, PATH=folder_with(tmp_path)), "git is not installed", "apt install git")


def test_no_compiler(tmp_path):
    assert_refused(run(*PREFLIGHT, PATH=folder_with(tmp_path, "git"), CXX=""), "C++ compiler", "apt install g++")


def test_no_c_compiler_for_triton(tmp_path):
    check = "from autokernel.common.console import preflight; preflight('triton')"
    assert_refused(run("-c", check, PATH=folder_with(tmp_path, "git"), CC=""), "C compiler", "apt install gcc")


def test_a_download_without_git_history(tmp_path):
    shutil.copytree(ROOT / "autokernel", tmp_path / "autokernel")
    (tmp_path / "kernels").mkdir()
    assert_refused(run(*PREFLIGHT, cwd=tmp_path, GIT_CEILING_DIRECTORIES=str(tmp_path.parent)), "not a git clone")


def test_unwritable_cache(tmp_path):
    """A file where the folder should be: refuses root as well, whom permission bits do not bind."""
    (tmp_path / "file").touch()
    check = "from autokernel.common.console import preflight; preflight('cpp')"
    assert_refused(run("-c", check, AUTOKERNEL_CACHE=str(tmp_path / "file/cache")), "cannot write to", "AUTOKERNEL_CACHE")


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_unwritable_clone(bare_clone):
    bare_clone.chmod(0o555)
    assert_refused(run(*PREFLIGHT, cwd=bare_clone), "cannot write to")


def test_packages_not_installed():
    """-S hides site-packages, as a Python outside of the virtual environment would."""
    assert_refused(run("-S", "-c", "import autokernel.common.console"), "not installed", "README.md")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "words", [(SCRIPTS[0],), *(("-m", "autokernel", name) for name in COMMANDS), *((name,) for name in SCRIPTS[1:])]
)
def test_scripts_and_commands_say_what_is_missing(words, tmp_path, bare_clone):
    """Each in a clone of its own so that what it leaves behind can be seen: nothing."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, bare_clone)
    before = subprocess.check_output(["git", "status", "--porcelain", "--ignored"], cwd=bare_clone)
    assert_refused(run("-S", "-B", *words, cwd=bare_clone), "not installed", "README.md")
    assert subprocess.check_output(["git", "status", "--porcelain", "--ignored"], cwd=bare_clone) == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_help_with_an_example_at_once(script):
    """Before PyTorch is imported, which takes seconds."""
    result = run("-X", "importtime", script, "--help")
    assert result.returncode == 0
    assert f"python {script}" in result.stdout
    assert not any(line.endswith("| torch") for line in result.stderr.splitlines())


@pytest.mark.parametrize("device", ["cpu:1", "cuda:99", "gpu", "cuda:", "cuda:x"])
def test_impossible_devices_are_refused(device):
    result = in_process.run("bench.py", "--device", device)
    assert result.returncode == 2 and device in result.stderr


@pytest.mark.parametrize(
    "path",
    [*SCRIPTS, *(f"autokernel/{name}" for name in PARSED)],
)
def test_entry_points_parse_on_the_pythons_that_they_refuse(path):
    ast.parse((ROOT / path).read_text(), feature_version=(3, 7))


def old_pythons():
    """Interpreters too old for us that happen to be installed, for real runs."""
    found = {name: shutil.which(name) for name in ("python3.7", "python3.8", "python3.9")}
    works = {n: p for n, p in found.items() if p and subprocess.run([p, "-c", ""], capture_output=True).returncode == 0}
    return list(works.values())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", [PREFLIGHT, *((script,) for script in SCRIPTS)], ids=lambda command: command[-1])
def test_old_python(command):
    pythons = old_pythons()
    if not pythons:
        pytest.skip("no Python older than 3.10 is installed")
    for python in pythons:
        assert_refused(run("-B", *command, python=python), "needs Python 3.10 or newer")


def test_old_python_pretended():
    """The same check where no old Python is installed."""
    pretend = "import sys; sys.version_info = (3, 9, 18); import autokernel"
    assert_refused(run("-c", pretend), "needs Python 3.10 or newer, this is 3.9")


def test_progress_is_plain_lines_off_a_terminal():
    code = "from autokernel.common.console import progress\nwith progress('Timing', 2) as step: step('one'); step('two')"
    result = run("-c", code)
    assert result.stdout == "" and result.stderr == "Timing\n  one\n  two\n"


HERE = ((3, 12), "cpython", "linux", "x86_64", ("glibc", "2.31"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({0: (3, 10), 4: ("glibc", "2.28")}, None),
        ({2: "darwin", 3: "arm64", 4: ("", "")}, None),
        ({3: "aarch64"}, None),
        ({0: (3, 99)}, "no builds for cpython 3.99: start again with CPython"),
        ({1: "pypy"}, "no builds for pypy 3.12: start again with CPython"),
        ({2: "win32", 3: "AMD64"}, "this is win32: on Windows use WSL"),
        ({2: "darwin"}, "no builds for darwin on x86_64: use a machine with arm64"),
        ({3: "riscv64"}, "no builds for linux on riscv64: use a machine with x86_64 or aarch64"),
        ({4: ("glibc", "2.17")}, "need glibc 2.28, here is glibc 2.17: use"),
        ({4: ("", "")}, "need glibc 2.28, here is another C library: use"),
    ],
)
def test_a_system_without_builds_of_pytorch_is_told_before_anything_is_downloaded(change, says) -> None:
    reason = why_no_builds(*(change.get(i, known) for i, known in enumerate(HERE)))
    assert says in reason if says else reason is None


@pytest.mark.parametrize(
    ("project", "version", "fits"),
    [
        ("torch", "2.9.0", True),
        ("torch", "2.15.0+cu132", True),
        ("torch", "2.10.0a0+git1a2b", True),
        ("torch", "2.8.1", False),
    ]
    + [("torch", "1.13.1", False), ("triton", "3.5.0", True), ("triton", "3.10.1", True), ("triton", "3.4.9", False)],
)
def test_an_outdated_pytorch_or_triton_is_told_with_what_to_install(project, version, fits) -> None:
    reason = why_outdated(project, version)
    assert reason is None if fits else f"{project} {version} is too old" in reason and "-m pip install --upgrade" in reason


def test_pip_installs_what_the_preflight_takes() -> None:
    wanted = dict(re.findall(r'"(torch|triton)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    assert wanted == {project: ".".join(map(str, oldest)) for project, oldest in OLDEST.items()}


def test_no_script_starts_with_an_outdated_pytorch(tmp_path) -> None:
    """As metadata says it: nothing of PyTorch is imported."""
    old = tmp_path / "torch-2.8.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    for script in ("orchestrate.py", "profile.py"):
        assert_refused(run(script, PYTHONPATH=str(tmp_path)), "torch 2.8.0 is too old")


def test_a_pytorch_that_cannot_be_imported_says_why():
    """A setting that makes no sense to it, here; as well a library of its own that is not there."""
    kernel = "kernels/softmax/cpp_kernel.py"
    assert_refused(run("bench.py", kernel, TORCH_LOGS="no_such"), "PyTorch cannot be imported", "no_such")
