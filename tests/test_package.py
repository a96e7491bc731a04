"""The package without its clone: what a wheel holds, where its runs go, and that it does the job in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from autokernel.spec import ROOT, kernel_types

PROGRAM = """
import sys, types
sys.modules["reference"] = theirs = types.ModuleType("reference")  # a user's own
from autokernel.common import preflight
from autokernel.spec import load_spec, kernel_types
from autokernel.history.ledger import repository
for name in kernel_types():
    assert load_spec(name).oracle.__module__ == "autokernel.reference", name
assert sys.modules["reference"] is theirs
preflight.make_home()
preflight.make_home()
log = repository(preflight.HOME).git.log("--format=%s")
print(preflight.IN_CLONE, preflight.HOME, log, *kernel_types(), sep="\\n")
"""
LEAST = 'minutes=None, experiments=1, top=1, run="first"'
AFTER = """
assert result.model is net and type(net) is Net and result.report.is_file(), result
assert result.applied == bool(result.speedup), result
assert verdict.correctness == "PASS", verdict
"""


def tutorial() -> str:
    """The code of docs/python.md, with the smallest job there is."""
    code = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs/python.md").read_text()))
    assert code.count("minutes=30") == 1
    return code.replace("minutes=30", LEAST) + AFTER


@pytest.fixture
def sources(tmp_path) -> Path:
    """What git would clone of the working tree: whatever is built stays there."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    copy = tmp_path / "sources"
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def run(*command: object, cwd: Path, **more: str) -> str:
    given = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "AUTOKERNEL_HOME"))}
    program = more.pop("input", None)
    ended = subprocess.run([*map(str, command)], cwd=cwd, env=given | more, input=program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_built_package_has_all_and_keeps_its_runs_where_the_user_works(sources, tmp_path) -> None:
    pytest.importorskip("setuptools", minversion=re.search(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text())[1])
    built, empty = tmp_path / "built", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", built, cwd=sources)
    held = {str(p.relative_to(built)) for p in built.rglob("*") if p.is_file()}
    beside = [p for name in ("kernels", "models", "playbook") for p in (sources / name).rglob("*") if p.is_file()]
    beside += [
        sources / name for name in ("reference.py", "kernel.py", "program.md", "kernelbench/program_kb.md", "LICENSE")
    ]
    package = [p for p in (sources / "autokernel").rglob("*") if p.is_file()]
    wanted = {f"autokernel/data/{p.relative_to(sources)}" for p in beside} | {str(p.relative_to(sources)) for p in package}
    assert wanted == held, wanted ^ held
    told = run(sys.executable, "-", cwd=empty, PYTHONPATH=str(built), input=PROGRAM).splitlines()
    assert told == ["False", str(empty / "autokernel-runs"), "The runs of AutoKernel begin", *kernel_types()]
    assert [path.name for path in empty.iterdir()] == ["autokernel-runs"]


@pytest.mark.slow
def test_the_wheel_does_the_job_in_an_empty_folder(sources, tmp_path) -> None:
    """Built from the source distribution, installed beside nothing but its dependencies."""
    dist, venv, empty = tmp_path / "dist", tmp_path / "venv", tmp_path / "empty"
    build = "from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]) if sys.argv[2] == 's' else "
    build = f"import sys; {build}b.build_wheel(sys.argv[1]))"
    archive = run(sys.executable, "-c", build, dist, "s", cwd=sources).split()[-1]
    shutil.unpack_archive(dist / archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = dist / run(sys.executable, "-c", build, dist, "w", cwd=unpacked).split()[-1]
    assert wheel.name.startswith("autokernel_torch-")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    empty.mkdir()
    command, scratch = venv / "bin" / "autokernel", {"TMPDIR": str(tmp_path)}
    said = run(python, "-", cwd=empty, input=tutorial(), **scratch)
    runs = empty / "autokernel-runs"
    assert f"{runs}/workspace/first/report.html" in said and "rmsnorm" in said
    assert list(empty.iterdir()) == [runs] and (runs / "results.tsv").is_file()
    assert "refs/autokernel/first/1" in run("git", "for-each-ref", cwd=runs)
    assert "first" in run(command, "runs", cwd=empty) and "run first: " in run(command, "status", cwd=empty)
    report = run(command, "report", cwd=empty)
    assert "autokernel log --all --tag first" in report and "orchestrate.py" not in report
