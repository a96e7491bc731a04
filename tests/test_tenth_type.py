"""One more kernel type is an oracle and a folder: those of docs/extending.md are added to a clone, and judged."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from autokernel.spec import ROOT

PAGE = (ROOT / "docs/extending.md").read_text()
ORACLE, SPEC, KERNEL, PATTERNS, *_ = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
SEARCHED = """
from autokernel.model.patterns import patterns_of
found = patterns_of("gelu")
assert found.graphs and not found.failures, found.failures
"""


@pytest.mark.slow
@pytest.mark.parametrize("right", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_gelu_type_is_an_oracle_and_a_folder(tmp_path, right: bool):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "workspace", "__pycache__"))
    with open(clone / "reference.py", "a") as file:
        file.write("\n\n" + ORACLE)
    folder = clone / "kernels" / "gelu"
    folder.mkdir()
    (folder / "spec.py").write_text(SPEC)
    (folder / "cpp_kernel.py").write_text(KERNEL if right else KERNEL.replace("0.5f * v * (1 +", "0.5f * v * (0.99f +"))
    (folder / "patterns.py").write_text(PATTERNS)
    environment = os.environ | {"PYTHONPATH": str(clone)}
    if right:
        subprocess.run([sys.executable, "-c", SEARCHED], cwd=clone, env=environment, check=True)
    command = [sys.executable, "bench.py", "kernels/gelu/cpp_kernel.py", "--json", "--quick", "--device", "cpu"]
    run = subprocess.run(command, cwd=clone, capture_output=True, text=True, env=environment)
    assert run.returncode == (0 if right else 1), run.stderr
    verdict = json.loads(run.stdout)
    assert (verdict["kernel_type"], verdict["correctness"]) == ("gelu", "PASS" if right else "FAIL")
