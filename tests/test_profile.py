"""The profile adds up and can be read back; the plan has the model's shapes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel.extraction import make_plan, write_starters
from autokernel.profiler import ModelProfile, profile_workload
from autokernel.spec import ROOT
from autokernel.target import Plan
from autokernel.workload import Workload, WorkloadError

SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden": 128, "vocab_size": 2000}
WORKLOAD = Workload(model_args=SMALL, input_shape=(1, 256))


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_workload(WORKLOAD, warmup=1, iterations=3)


def test_shares_sum_to_one_and_sites_have_limits(profile: ModelProfile) -> None:
    assert sum(h.share for h in profile.hotspots) == pytest.approx(1)
    assert sum(h.time_us for h in profile.hotspots) == pytest.approx(profile.device_time_us)
    assert {"rmsnorm", "rotary_embedding", "matmul"} <= {site.kernel_type for site in profile.sites}
    norm = next(site for site in profile.sites if site.kernel_type == "rmsnorm")
    assert norm.calls == 5 and norm.bound == "memory" and norm.headroom > 0
    assert any(h.kernel_type is None and "embedding" in h.name for h in profile.hotspots)


def test_a_profile_can_be_read_back(profile: ModelProfile, tmp_path: Path) -> None:
    profile.write(tmp_path / "profile.json")
    assert ModelProfile.read(tmp_path / "profile.json") == profile


def test_plan_has_targets_by_share_with_the_models_shapes(profile: ModelProfile, tmp_path: Path) -> None:
    plan = make_plan(profile, top=99)
    shares = [target.share for target in plan.targets]
    assert shares == sorted(shares, reverse=True)
    assert len({target.name for target in plan.targets}) == len(plan.targets)
    matmuls = [t for t in plan.targets if t.kernel_type == "matmul"]
    lm_head = next(t for t in matmuls if any(c.case.args["B"].shape == (64, 2000) for c in t.cases))
    assert len(lm_head.cases) == 1 and len(matmuls) > 1  # apart from the layers' own
    norm = next(t for t in plan.targets if t.kernel_type == "rmsnorm")
    assert norm.cases[0].case.args["x"].shape == (1, 256, 64) and norm.cases[0].calls == 5
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    for path, target in zip(write_starters(plan, tmp_path), plan.targets):
        assert path.stem == target.name and f'KERNEL_TYPE = "{target.kernel_type}"' in path.read_text()


def test_plan_of_one_type(profile: ModelProfile) -> None:
    assert {t.kernel_type for t in make_plan(profile, kernel_type="rmsnorm").targets} == {"rmsnorm"}
    assert len(make_plan(profile, top=2).targets) == 2


@pytest.mark.parametrize("wrong", [{"model": "nowhere.py"}, {"model": "no_such_module"}, {"class_name": "NoSuchClass"}])
def test_a_workload_that_does_not_exist_says_so(wrong: dict[str, str]) -> None:
    with pytest.raises(WorkloadError, match="nowhere|no_such|NoSuch"):
        Workload(**wrong).load()


def test_two_loads_are_the_same_model_and_inputs() -> None:
    (a, (tokens_a,), _), (b, (tokens_b,), _) = WORKLOAD.load(), WORKLOAD.load()
    assert tokens_a.equal(tokens_b) and a.output.weight.equal(b.output.weight)
    assert not a.training


@pytest.mark.parametrize(
    ("body", "args", "kwargs"),
    [("(torch.ones(2, 3),)", 1, []), ("{'x': torch.ones(2, 3)}", 0, ["x"]), ("((), {'x': torch.ones(2, 3)})", 0, ["x"])],
)
def test_example_inputs_of_a_file(tmp_path: Path, body: str, args: int, kwargs: list[str]) -> None:
    file = tmp_path / "mine.py"
    (tmp_path / "neighbour_of_mine.py").write_text("OUTPUTS = 4\n")
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses, torch\n"
        "from neighbour_of_mine import OUTPUTS\n"
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    outputs: int = OUTPUTS\n"
        "class Mine(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(3, Config().outputs)\n"
        "    def forward(self, x): return super().forward(x)\n"
        f"def example_inputs(): return {body}\n"
    )
    model, values, named = Workload(str(file), "Mine", dtype="bfloat16").load()
    assert len(values) == args and list(named) == kwargs
    assert model(*values, **named).dtype == model.weight.dtype


IMPORTS = """
import cProfile, importlib, profile, pstats, sys, torch
assert hasattr(profile, "Profile") and "site-packages" not in profile.__file__, profile.__file__
cProfile.Profile().runcall(lambda: None)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
torch.compile(model, backend="eager")(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def test_other_programs_still_get_the_standard_librarys_profile() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, check=True)
    assert importlib.util.find_spec("profile") is not None


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_scripts_in_a_row(tmp_path: Path) -> None:
    options = ("--model-args", json.dumps(SMALL), "--input-shape", "1,256", "--device", "cpu")
    output = tmp_path / "profile.json"
    run = script("profile.py", *options, "--warmup-iters", "1", "--profile-iters", "2", "--output", str(output), "--json")
    assert run.returncode == 0, run.stderr
    assert sum(h["share"] for h in json.loads(run.stdout)["hotspots"]) == pytest.approx(1)
    plan = script("extract.py", "--profile", str(output), "--report", "--json", "--top", "3")
    assert plan.returncode == 0, plan.stderr
    assert len(json.loads(plan.stdout)["targets"]) == 3
    table = script("extract.py", "--profile", str(output), "--report", "--kernel-type", "rmsnorm")
    assert "rmsnorm_1x256x64_float32" in table.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile.py", "--model", "nowhere.py"),
        ("profile.py", "--input-shape", "1,x"),
        ("profile.py", "--profile-iters", "0"),
        ("profile.py", "--model-args", "[1]"),
        ("extract.py", "--tag", "no-such-run"),
    ],
)
def test_bad_use_ends_with_status_2(arguments: tuple[str, ...]) -> None:
    run = script(*arguments)
    assert run.returncode == 2 and "error:" in run.stderr and "Traceback" not in run.stderr
