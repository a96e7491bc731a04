"""A missing git, compiler, package or folder, and an old Python: one clear line, exit status 2, nothing half-done."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text())
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
    check = "from autokernel.cli import preflight; preflight('triton')"
    assert_refused(run("-c", check, PATH=folder_with(tmp_path, "git"), CC=""), "C compiler", "apt install gcc")


def test_a_download_without_git_history(tmp_path):
    shutil.copytree(ROOT / "autokernel", tmp_path / "autokernel")
    assert_refused(run(*PREFLIGHT, cwd=tmp_path, GIT_CEILING_DIRECTORIES=str(tmp_path.parent)), "not a git clone")


def test_unwritable_cache(tmp_path):
    """A file where the folder should be: refuses root as well, whom permission bits do not bind."""
    (tmp_path / "file").touch()
    check = "from autokernel.cli import preflight; preflight('cpp')"
    assert_refused(run("-c", check, AUTOKERNEL_CACHE=str(tmp_path / "file/cache")), "cannot write to")


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_unwritable_clone(bare_clone):
    bare_clone.chmod(0o555)
    assert_refused(run(*PREFLIGHT, cwd=bare_clone), "cannot write to")


def test_packages_not_installed():
    """-S hides site-packages, as a Python outside of the virtual environment would."""
    assert_refused(run("-S", "-c", "import autokernel.cli"), "not installed", "README.md")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_say_what_is_missing(script, tmp_path, bare_clone):
    """Each script, in a clone of its own so that what it leaves behind can be seen: nothing."""
    shutil.copy(ROOT / script, bare_clone)
    before = subprocess.check_output(["git", "status", "--porcelain", "--ignored"], cwd=bare_clone)
    assert_refused(run("-S", "-B", script, cwd=bare_clone), "not installed", "README.md")
    assert subprocess.check_output(["git", "status", "--porcelain", "--ignored"], cwd=bare_clone) == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_help_with_an_example(script):
    result = run(script, "--help")
    assert result.returncode == 0
    assert f"python {script}" in result.stdout


@pytest.mark.parametrize("device", ["cpu:1", "cuda:99", "gpu", "cuda:", "cuda:x"])
def test_impossible_devices_are_refused(device):
    parse = "import argparse; from autokernel.cli import add_device_argument; parser = argparse.ArgumentParser();"
    result = run("-c", f"{parse} add_device_argument(parser); parser.parse_args(['--device', {device!r}])")
    assert result.returncode == 2 and device in result.stderr


@pytest.mark.parametrize("path", [*SCRIPTS, "autokernel/__init__.py", "autokernel/preflight.py", "autokernel/cli.py"])
def test_entry_points_parse_on_the_pythons_that_they_refuse(path):
    ast.parse((ROOT / path).read_text(), feature_version=(3, 7))


def old_pythons():
    """Interpreters too old for us that happen to be installed, for real runs."""
    found = {name: shutil.which(name) for name in ("python3.7", "python3.8", "python3.9")}
    works = {n: p for n, p in found.items() if p and subprocess.run([p, "-c", ""], capture_output=True).returncode == 0}
    return list(works.values())


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
    code = "from autokernel.cli import progress\nwith progress('Timing', 2) as step: step('one'); step('two')"
    result = run("-c", code)
    assert result.stdout == "" and result.stderr == "Timing\n  one\n  two\n"
