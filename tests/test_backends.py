"""One more backend is a row: that of docs/extending.md is added to a clone, where a kernel in its language is judged."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from autokernel.common.backends import BACKENDS, ROWS, default_backend
from autokernel.common.preflight import backends
from autokernel.gate.workers import answers
from autokernel.spec import ROOT

PAGE = (ROOT / "docs/extending.md").read_text().partition("## A backend")[2]
ROW, KERNEL = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
TABLE = re.compile(r"(?ms)^ROWS = \(.*?(?=^\)$)")
IN_CLONE = """
import json, sys
from autokernel.gate.judge import Judge
from autokernel.gate.kernel_files import usual_target
from autokernel.common.preflight import backends
from autokernel.spec import load_spec
sources = json.load(sys.stdin)
target = usual_target(sources["right"], "", None, "cpu")
with Judge("cpu") as judge:
    verdicts = {name: judge.check(source, target) for name, source in sources.items()}
said = {name: [verdict.backend, verdict.correctness] for name, verdict in verdicts.items()}
print(json.dumps({"backends": backends("cpu"), "starters": list(load_spec("rmsnorm").starters("c")), "said": said}))
"""
WRONG = {
    "no eps": ("sqrt(squares / N + eps)", "sqrt(squares / N)"),
    "no C": ("    return 0;", "    return 0"),
    "a library": ("double squares = 0", "extern float sdot_(); double squares = sdot_()"),
}


@pytest.mark.slow
def test_a_backend_is_a_row(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "workspace", "__pycache__"))
    table = clone / "autokernel/common/backends.py"
    table.write_text(TABLE.sub(lambda rows: f"{rows[0]}{ROW.rstrip()},\n", table.read_text()))
    (clone / "kernels/rmsnorm/c_kernel.py").write_text(KERNEL)
    assert all(right in KERNEL for right, _ in WRONG.values())
    sources = {"right": KERNEL} | {name: KERNEL.replace(right, wrong) for name, (right, wrong) in WRONG.items()}
    environment = os.environ | {"PYTHONPATH": str(clone)}
    command, given = [sys.executable, "-c", IN_CLONE], json.dumps(sources)
    run = subprocess.run(command, cwd=clone, input=given, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["backends"] == ["cpp", "c"] and found["starters"] == ["c_kernel"]
    outcomes = {"right": "PASS", "no eps": "FAIL", "no C": "CRASH", "a library": "CRASH"}
    assert found["said"] == {name: ["c", outcome] for name, outcome in outcomes.items()}


def test_each_backend_has_a_name_and_each_device_a_default():
    assert list(BACKENDS) == [row.name for row in ROWS]
    assert [default_backend(device) for device in ("cpu", "cuda", "cuda:1")] == ["cpp", "triton", "triton"]
    assert backends("cpu") == ("cpp",) and backends("cuda")[0] == "triton"


@pytest.mark.parametrize("language", ["triton", "rust", ""])
def test_what_is_not_compiled_by_the_judge_cannot_be_asked_for(language):
    message = {"type": "build", "language": language, "source": "", "defines": ()}
    with pytest.raises(ValueError, match="names no language of ours"):
        answers.decode("load", 1, json.dumps(message).encode())
