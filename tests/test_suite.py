"""The suite's own rules (conftest.py): what is timed runs alone, and a run in which too much of it is skipped fails."""

import json
import os
import subprocess
import sys
from itertools import groupby

import pytest

from autokernel.spec import ROOT

TESTS = """
import json, os, time
import pytest

def noted(name):
    begin = time.monotonic()
    time.sleep(float(os.environ["NAP_S"]))
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


REVERSING = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.reverse()
"""


def run(folder, skips, *options, nap_s=0.2):
    (folder / "test_these.py").write_text(TESTS)
    (folder / "reversing.py").write_text(REVERSING)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, "-p", "tests.conftest"]
    environment = {"NOTES": str(folder / "notes"), "SKIPS": str(skips), "NAP_S": str(nap_s)}
    environment = os.environ | environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return subprocess.run([*command, folder], cwd=ROOT, env=environment, capture_output=True, text=True)


def notes_of(folder):
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.slow
def test_what_is_timed_runs_alone_and_too_many_skips_fail(tmp_path):
    ended = run(tmp_path, 6)
    assert ended.returncode == 1 and "6 timed tests were skipped" in ended.stdout, ended.stdout + ended.stderr
    assert "9 passed, 6 skipped" in ended.stdout and "SKIPPED [6]" in ended.stdout
    notes = notes_of(tmp_path)
    timed = [note for note in notes if note[0] == "timed"]
    assert len(notes) == 9 and len(timed) == 3 and len({process for _, process, _, _ in timed}) == 1
    assert len({process for _, process, _, _ in notes}) == 2
    for one in timed:
        assert not [other for other in notes if other is not one and other[2] < one[3] and one[2] < other[3]]


def test_a_few_skips_do_not_fail_and_timed_tests_come_last_in_any_order(tmp_path):
    """Of a plugin, too, that makes its own order of the tests, as pytest-randomly does."""
    ended = run(tmp_path, 5, "-n0", "-p", "no:randomly", "-p", "reversing", nap_s=0)
    assert ended.returncode == 0 and "9 passed, 5 skipped" in ended.stdout, ended.stdout + ended.stderr
    assert [kind for kind, _ in groupby(name for name, *_ in notes_of(tmp_path))] == ["other", "timed"]
