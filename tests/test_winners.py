"""The winners of a run: into a model by the run's name, and only those that verify.py found to pay."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autokernel.backend import apply
from autokernel.gate import Interval
from autokernel.spec import ROOT
from autokernel.target import Plan, default_target, encode, write_json
from autokernel.verification import KernelInModel, Verification
from autokernel.workspace import PLAN, VERIFY, NoRun, Workspace
from tests.test_experiments import ROW
from tests.test_ledger import clone  # noqa: F401  a fixture

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
WRONG = "def kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n"  # shows where it runs


@pytest.fixture
def run(clone) -> Workspace:  # noqa: F811
    """One that kept one kernel, which verify.py found to pay."""
    workspace = Workspace(clone, "night")
    Plan("test", {}, "cpu", 1000.0, (TARGET,)).write(workspace / PLAN)
    workspace.ledger.open(worktree=False)
    row = replace(ROW, experiment=1, tag="night", kernel_type="rmsnorm", target=TARGET.name, status="kept")
    workspace.ledger.record(row, WRONG)
    pays = KernelInModel(TARGET.name, "rmsnorm", 0.5, 2.0, 1, Interval(1.1, 1.2, 1.3), True, "pays in the model")
    write_json(workspace / VERIFY, encode(Verification("test", "cpu", (pays,), (), True)))
    return workspace


def is_replaced(norm: nn.Module, x: Tensor, run: Workspace) -> bool:
    torch._dynamo.reset()
    return bool(apply(norm, run.folder)(x).abs().max() == 0)


RUNNER = """
import sys, torch
sys.path.append(sys.argv[1])
norm = torch.nn.RMSNorm(768, eps=1e-6).requires_grad_(False)
compiled = torch.compile(norm, backend="autokernel", options={"run": sys.argv[2], "fallback": "inductor"})
assert compiled(torch.randn(512, 768)).abs().max() == 0, "the original ran"
"""


def test_torch_finds_the_backend_by_its_name(run, tmp_path) -> None:
    """As an installed package is found: by the entry point that pyproject.toml declares."""
    (declared,) = re.findall(
        r"\[project.entry-points.torch_dynamo_backends\]\n(.+)\n", (ROOT / "pyproject.toml").read_text()
    )
    installed = tmp_path / "site" / "autokernel-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: autokernel\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{declared.replace(chr(34), '')}\n")
    environment = os.environ | {"PYTHONPATH": str(installed.parent)}
    subprocess.run([sys.executable, "-c", RUNNER, str(ROOT), str(run.folder)], env=environment, check=True)


def test_only_what_verify_left_in_is_applied(run) -> None:
    norm, x = nn.RMSNorm(768, eps=1e-6).requires_grad_(False), torch.randn(512, 768)
    assert is_replaced(norm, x, run)
    record = json.loads((run / VERIFY).read_text())
    record["kernels"][0]["used"] = False
    (run / VERIFY).write_text(json.dumps(record))
    assert not is_replaced(norm, x, run)
    (run / VERIFY).unlink()
    with pytest.raises(NoRun, match="not verified"):
        apply(norm, run.folder)
