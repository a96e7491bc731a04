"""The suite's own rules (conftest.py): what is timed runs alone, and a run in which too much of it is skipped fails."""

import json
import os
import subprocess
import sys

import pytest

from autokernel.spec import ROOT

TESTS = """
import json, os, time
import pytest

def noted(name):
    begin = time.monotonic()
    time.sleep(0.2)
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([name, os.getpid(), begin, time.monotonic()]) + chr(10))

@pytest.mark.timed
@pytest.mark.parametrize("n", range(3))
def test_timed(n):
    noted("timed")

@pytest.mark.parametrize("n", range(6))
def test_other(n):
    noted("other")

@pytest.mark.timed
@pytest.mark.parametrize("n", range(int(os.environ["SKIPS"])))
def test_skipped(n):
    pytest.skip("too much else goes on here")
"""


def run(folder, skips, *options):
    (folder / "test_these.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", *options]
    environment = os.environ | {"NOTES": str(folder / "notes"), "SKIPS": str(skips), "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, folder], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_what_is_timed_runs_alone_and_too_many_skips_fail(tmp_path):
    ended = run(tmp_path, 6)
    assert ended.returncode == 1 and "6 timed tests were skipped" in ended.stdout, ended.stdout + ended.stderr
    assert "9 passed, 6 skipped" in ended.stdout and "SKIPPED [6]" in ended.stdout
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    timed = [note for note in notes if note[0] == "timed"]
    assert len(notes) == 9 and len(timed) == 3 and len({process for _, process, _, _ in timed}) == 1
    assert len({process for _, process, _, _ in notes}) == 2
    for one in timed:
        assert not [other for other in notes if other is not one and other[2] < one[3] and one[2] < other[3]]


def test_a_few_skips_do_not_fail(tmp_path):
    ended = run(tmp_path, 5, "-n0", "-k", "test_skipped")
    assert ended.returncode == 0 and "5 skipped" in ended.stdout, ended.stdout + ended.stderr
