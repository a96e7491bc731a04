"""The profile adds up and can be read back; the plan has the model's shapes."""

import copy
import cProfile
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel import spec as specs
from autokernel.cli import extract
from autokernel.cli.profile import make_parser, show
from autokernel.hardware.device import Device
from autokernel.integration.verification.parity import outputs
from autokernel.model.extraction import make_plan, write_starters
from autokernel.model.hotspots import ModelProfile
from autokernel.model.profiler import _repeats, profile_workload
from autokernel.model.workload import Part, Workload, WorkloadError, in_dtype, workload_from
from autokernel.spec import ROOT
from autokernel.target import Plan
from tests import in_process

SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden": 128, "vocab_size": 2000}
WORKLOAD = Workload(model_args=SMALL, input_shape=(1, 256))


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_workload(WORKLOAD, warmup=1, iterations=3)


@pytest.mark.slow
def test_shares_sum_to_one_and_sites_have_limits(profile: ModelProfile) -> None:
    assert sum(h.share for h in profile.hotspots) == pytest.approx(1)
    assert sum(h.time_us for h in profile.hotspots) == pytest.approx(profile.device_time_us)
    assert {"rmsnorm", "rotary_embedding", "matmul"} <= {site.kernel_type for site in profile.sites}
    norm = next(site for site in profile.sites if site.kernel_type == "rmsnorm")
    assert norm.calls == 5 and norm.bound == "memory" and norm.headroom > 0
    assert any(h.kernel_type is None and "embedding" in h.name for h in profile.hotspots)
    assert profile.uncaptured == 0 and not any(h.why for h in profile.hotspots)


@pytest.mark.slow
def test_peaks_of_a_busy_machine_do_not_stay(tmp_path: Path, monkeypatch) -> None:
    """A hundredth of what the machine does, as it was measured once beside other work: nothing would be worth a kernel."""
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    true = Device.detect("cpu")
    (path,) = tmp_path.glob("peaks-*.json")
    known = json.loads(path.read_text())
    slow = {"tflops": {k: v / 100 for k, v in known["tflops"].items()}, "bandwidth_gb_s": known["bandwidth_gb_s"] / 100}
    path.write_text(json.dumps(known | slow))
    profile_workload(WORKLOAD, warmup=1, iterations=2, baseline="eager")
    assert Device.detect("cpu").peak_bandwidth_gb_s > true.peak_bandwidth_gb_s / 10


def test_a_profile_can_be_read_back(profile: ModelProfile, tmp_path: Path) -> None:
    profile.write(tmp_path / "profile.json")
    assert ModelProfile.read(tmp_path / "profile.json") == profile


def test_what_is_to_beat_is_the_faster_of_eager_and_compiled(profile: ModelProfile) -> None:
    assert profile.baseline == "best"
    assert all(site.baseline_us == min(site.time_us, site.compiled_us) for site in profile.sites)
    removable = [site.removable_us for site in profile.sites]
    assert removable == sorted(removable, reverse=True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("baseline", ["eager", "compile"])
def test_one_baseline_alone(baseline: str) -> None:
    workload = replace(WORKLOAD, model_args=SMALL | {"n_layers": 1}, input_shape=(1, 64))
    profile = profile_workload(workload, warmup=1, iterations=2, baseline=baseline)
    assert profile.sites and all(s.baseline_us == (s.compiled_us or s.time_us) for s in profile.sites)
    assert all((s.compiled_us is None) == (baseline == "eager") for s in profile.sites)


@pytest.mark.slow
def test_a_mix_of_workloads_is_weighed(tmp_path: Path) -> None:
    mix = (Part("prefill", (1, 256)), Part("decode", (4, 1), 16))
    workload = replace(WORKLOAD, input_shape=mix[0].input_shape, name="prefill", mix=mix)
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload
    profile = profile_workload(workload, warmup=1, iterations=2, baseline="eager")
    assert [(p.name, p.weight) for p in profile.passes] == [("prefill", 1), ("decode", 16)]
    assert profile.latency_us == pytest.approx(sum(p.weight * p.latency_us for p in profile.passes))
    assert sum(h.share for h in profile.hotspots) == pytest.approx(1)
    calls = {s.case.args["A"].shape[0]: s.calls for s in profile.sites if s.kernel_type == "matmul" and "2000" in s.name}
    assert calls == {256: 1, 4: 16}  # of the lm_head
    plan = make_plan(profile, top=99)
    assert {c.calls for t in plan.targets for c in t.cases if c.case.name.startswith("A=4x")} <= {16, 32, 64}
    profile.write(tmp_path / "profile.json")
    assert ModelProfile.read(tmp_path / "profile.json") == profile


def test_plan_has_targets_by_what_they_may_save_with_the_models_shapes(profile: ModelProfile, tmp_path: Path) -> None:
    plan = make_plan(profile, top=99)
    largest = max(profile.sites, key=lambda site: site.removable_us)
    assert largest.case in [c.case for c in plan.targets[0].cases] or len(plan.targets[0].cases) > 1
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


def test_what_is_bound_by_memory_is_no_target_with_what_is_bound_by_compute(profile: ModelProfile) -> None:
    site = replace(profile.sites[0], bound="memory")
    assert len(make_plan(replace(profile, hotspots=(site, site))).targets) == 1
    assert len(make_plan(replace(profile, hotspots=(site, replace(site, bound="compute")))).targets) == 2


def test_what_takes_next_to_nothing_is_no_target_beside_others(profile: ModelProfile) -> None:
    product, norm, rotation = (
        next(site for site in profile.sites if site.kernel_type == name)
        for name in ("matmul", "rmsnorm", "rotary_embedding")
    )
    large = replace(product, share=0.5, time_us=500.0, baseline_us=500.0, limit_us=100.0)
    at_its_limit = replace(rotation, share=0.1, time_us=100.0, baseline_us=90.0, limit_us=100.0)
    tiny = replace(norm, share=4e-4, time_us=0.4, baseline_us=0.4, limit_us=0.1)
    planned = make_plan(replace(profile, hotspots=(tiny, at_its_limit, large)))
    assert [target.kernel_type for target in planned.targets] == ["matmul", "rotary_embedding"]
    assert [target.kernel_type for target in make_plan(replace(profile, hotspots=(tiny,))).targets] == ["rmsnorm"]
    asked = make_plan(replace(profile, hotspots=(large, tiny)), kernel_type="rmsnorm")
    assert [target.kernel_type for target in asked.targets] == ["rmsnorm"]


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


MODEL = """
import torch

class Mine(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.width, self.first, self.second = width, torch.nn.Linear(width, width), torch.nn.RMSNorm(width, 1e-6)

    def forward(self, x, *, scale=None):
        x = self.outside(self.first(x))
        return self.second(x) if scale is None else self.second(x) * scale

    @torch.compiler.disable
    def outside(self, x):
        return x.repeat(1, 20).sort(-1).values[:, : self.width]
"""


def load(tmp_path: Path, inputs: str, **options: Any) -> tuple[Workload, Any]:
    file = tmp_path / f"mine_{abs(hash(inputs))}.py"
    file.write_text(MODEL + inputs)
    workload = Workload(str(file), "Mine", {"width": 128}, **options)
    return workload, workload.load()


def test_inputs_by_name_for_the_parts_of_a_mix(tmp_path: Path) -> None:
    inputs = "def example_inputs(name): return {'x': torch.ones({'large': 300, 'small': 2}[name], 128)}\n"
    workload, (_, _, named) = load(tmp_path, inputs, name="large", mix=(Part("large"), Part("small", None, 3)))
    assert len(named["x"]) == 300
    sizes = [len(part.inputs(part.load()[0], 0)[1]["x"]) for part, _ in workload.parts]
    assert sizes == [300, 2]


def test_a_name_that_the_inputs_do_not_take_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="takes no name"):
        load(tmp_path, "def example_inputs(): return (torch.ones(2, 128),)\n", name="large", mix=(Part("large"),))


@pytest.mark.slow
def test_what_cannot_be_captured_is_said_with_its_share_of_the_time(tmp_path: Path) -> None:
    workload, _ = load(tmp_path, "def example_inputs(): return (torch.randn(300, 128),), {'scale': torch.ones(1)}\n")
    with cProfile.Profile() as around:
        profile = profile_workload(workload, warmup=1, iterations=3, baseline="eager")
    around.create_stats()
    assert any(function == "_hotspots" for _, _, function in around.stats)  # which comes last
    assert {site.kernel_type for site in profile.sites} == {"fused_linear", "rmsnorm"}
    assert any("disable" in reason for reason in profile.graph_breaks)
    assert 0.01 < profile.uncaptured < 1  # a sort of 20 times as much
    assert sum(h.share for h in profile.hotspots) == pytest.approx(1)


def test_example_inputs_of_an_installed_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class may stand in another file of it; whoever is told of the workload is told whose inputs these are."""
    package = tmp_path / "package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("from .net import Net\n")
    method = "    @staticmethod\n    def example_inputs():\n        return (torch.ones(3, 4),)\n"
    (package / "net.py").write_text(f"import torch\nclass Net(torch.nn.ReLU):\n{method}")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--module", package.name, "--class-name", "Net", "--device", "cpu"]
    workload = workload_from(make_parser().parse_args(words))
    assert workload.input_shape == () and "example_inputs()" in str(workload)
    assert workload.load()[1][0].shape == (3, 4)


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


def test_the_scripts_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "REGIONS", specs.HOME / "workspace" / "regions")  # where the other processes look
    options = ("--model-args", json.dumps(SMALL), "--input-shape", "1,256", "--device", "cpu")
    output = tmp_path / "profile.json"
    run = script(
        "profile.py",
        *options,
        "--baseline",
        "eager",
        "--warmup-iters",
        "1",
        "--profile-iters",
        "2",
        "--output",
        str(output),
        "--json",
    )
    assert run.returncode == 0, run.stderr
    assert sum(h["share"] for h in json.loads(run.stdout)["hotspots"]) == pytest.approx(1)
    plan = script("extract.py", "--profile", str(output), "--report", "--json", "--top", "3")
    assert plan.returncode == 0, plan.stderr
    assert len(json.loads(plan.stdout)["targets"]) == 3
    table = in_process.run("extract.py", "--profile", str(output), "--report", "--kernel-type", "rmsnorm")
    assert "rmsnorm_1x256x64_float32" in table.stdout
    other = in_process.run("extract.py", "--profile", str(output), "--report", "--backend", "triton")
    assert "Triton kernels do not run on cpu" in other.stderr and "do not run" not in table.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile.py", "--model", "nowhere.py"),
        ("profile.py", "--input-shape", "1,x"),
        ("profile.py", "--profile-iters", "0"),
        ("profile.py", "--model-args", "[1]"),
        ("profile.py", "--workload", "decode:8,1*0"),
        ("profile.py", "--workload", "a:1,8", "--workload", "a:1,9"),
        ("extract.py", "--tag", "no-such-run"),
    ],
)
def test_bad_use_ends_with_status_2(arguments: tuple[str, ...]) -> None:
    run = in_process.run(*arguments)
    assert run.returncode == 2 and "error:" in run.stderr and "Traceback" not in run.stderr


COMPLEX = """
import torch

class Filter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.rfft(x, dim=1) @ self.weight
"""


def test_complex_weights_keep_their_imaginary_parts(tmp_path: Path) -> None:
    """In the model that is profiled, in the more exact one beside it, and in what the two are compared by."""
    (tmp_path / "filter.py").write_text(COMPLEX)
    workload = Workload(str(tmp_path / "filter.py"), "Filter", input_shape=(2, 16, 64))
    model, (x,), _ = workload.load()
    assert model.weight.dtype == torch.complex64 and model.weight.imag.abs().max() > 0
    wide = in_dtype(copy.deepcopy(model), torch.float64)
    assert wide.weight.dtype == torch.complex128
    (ours,), (truth,) = outputs(model(x)), outputs(wide(x.double()))
    assert ours.shape == (2, 9, 64, 2)
    torch.testing.assert_close(ours.double(), truth, atol=1e-3, rtol=1e-4)


def test_times_that_do_not_fit_the_pass_are_said(profile: ModelProfile, capsys) -> None:
    show(replace(profile, latency_us=profile.device_time_us / 8))
    assert "operations took 8.0 times what the pass took" in capsys.readouterr().out
    show(replace(profile, latency_us=profile.device_time_us * 1.05))
    assert "times what the pass took" not in capsys.readouterr().out


def test_an_operation_above_its_limit_is_said_once(profile: ModelProfile, capsys) -> None:
    show(profile)
    assert "% of a limit" not in capsys.readouterr().out
    spots = [replace(h, limit_us=3 * h.time_us) if h.limit_us else h for h in profile.hotspots]
    show(replace(profile, hotspots=tuple(spots)))
    said = capsys.readouterr().out
    assert said.count("300 % of a limit: this machine's peaks were measured while other work ran on it") == 1


@pytest.mark.parametrize(
    "asked, fit, made",
    [((None, None), 1000, (3, 10)), ((None, None), 4, (1, 4)), ((None, None), 0, (1, 3)), ((0, 50), 1, (0, 50))],
)
def test_a_slow_pass_is_repeated_less_often_unless_it_is_asked_for(asked, fit, made):
    assert _repeats(*asked, fit) == made


def test_what_torch_export_made_is_a_model(tmp_path: Path) -> None:
    """It refuses to be asked for the mode of inference, being in the one that it was exported in."""
    file = tmp_path / "exported.py"
    file.write_text(
        "import torch\n\n\ndef net():\n    layers = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Tanh())\n"
        "    return torch.export.export(layers.eval(), (torch.ones(4, 8),)).module()\n\n\n"
        "def example_inputs():\n    return (torch.randn(4, 8),)\n"
    )
    model, (x,), _ = Workload(str(file), "net").load()
    assert model(x).shape == x.shape


def test_a_type_that_the_model_lacks_is_told_with_those_that_it_has(profile: ModelProfile, tmp_path: Path, capsys) -> None:
    """That a kernel can replace none of its operations was said of every model."""
    for hotspots, said in ((profile.hotspots, "matmul, "), ((), "python profile.py --tag default says why of each")):
        replace(profile, hotspots=hotspots).write(tmp_path / "profile.json")
        with pytest.raises(SystemExit):
            extract.main(["--report", "--profile", str(tmp_path / "profile.json"), "--kernel-type", "cross_entropy"])
        assert said in capsys.readouterr().err


def test_a_type_without_a_starter_is_no_target_and_says_so(profile: ModelProfile, tmp_path: Path, capsys) -> None:
    """It went missing from the table without a word, as a new type does whose starter is still to be written."""
    profile.write(tmp_path / "profile.json")
    words = ["--report", "--profile", str(tmp_path / "profile.json"), "--json", "--backend", "cuda"]
    extract.main(words)
    assert "no starter" not in capsys.readouterr().err
    hotspots = [replace(h, kernel_type="bmm") if h.kernel_type == "rmsnorm" else h for h in profile.hotspots]
    replace(profile, hotspots=tuple(hotspots)).write(tmp_path / "profile.json")
    extract.main(words)
    assert "which has no starter in cuda: kernels/bmm/cuda_kernel.py" in capsys.readouterr().err
