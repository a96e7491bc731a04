"""The kernels that paid in a model are there for other models: on this machine, under the same versions, and no others."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autokernel
from autokernel import spec as specs
from autokernel.agents.proven import ProvenFirst
from autokernel.agents.scripted import ScriptedAgent
from autokernel.cli import cache
from autokernel.cli.pipeline import offered
from autokernel.common.records import BadRecord
from autokernel.common.verdict import Interval
from autokernel.history.experiments import STARTER, ExperimentLog
from autokernel.history.progress import Rules
from autokernel.history.runs import NoRun
from autokernel.integration.verification import proven, winners
from autokernel.integration.verification.forms import EAGER
from autokernel.integration.verification.proven import ProvenKernel
from autokernel.integration.verification.record import KernelInModel, Verification
from autokernel.integration.winner import Winner
from autokernel.model import pattern_graphs
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import Workspace
from autokernel.spec import load_spec
from autokernel.target import Plan, Target, WeightedCase, default_target, starter_source
from tests import region_models as regions
from tests.small_clone import clone_this
from tests.test_experiments import ROW
from tests.test_ledger import clone  # noqa: F401  a fixture

ZEROS = 'KERNEL_TYPE, BACKEND = "rmsnorm", "cpp"\n\ndef kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n'
SECOND = """import torch

class Second(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(768, eps=1e-6)

    def forward(self, x):
        return self.norm(x)
"""
FASTER = {EAGER: {EAGER: Interval(1.9, 2.0, 2.1)}}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch) -> None:
    """Nothing is known on this machine, and there is no run."""
    monkeypatch.setenv("AUTOKERNEL_PROVEN", str(tmp_path / "proven"))
    monkeypatch.setattr(winners, "HOME", tmp_path)
    torch._dynamo.reset()


def norm_of(width: int, source: str = ZEROS, dtype: torch.dtype = torch.float32) -> Winner:
    case = load_spec("rmsnorm").case({"M": 512, "N": width}, dtype)
    return Winner(Target(f"rmsnorm_512x{width}", "rmsnorm", "cpp", "cpu", (WeightedCase(case),)), source)


def verified(*kernels: Winner, used: tuple[str, ...] = (EAGER,)) -> Verification:
    rows = [KernelInModel(w.target.name, "rmsnorm", w.name, 0.5, 2.0, 1, used=used) for w in kernels]
    return Verification("A model", "cpu", True, tuple(rows), speedups=FASTER)


def remember(*kernels: Winner, **options: object) -> list[ProvenKernel]:
    return proven.remember(verified(*kernels, **options), kernels, {w.target.name: 2.0 for w in kernels}, "A model")


def test_a_model_without_a_run_gets_the_kernels_that_fit_it():
    remember(norm_of(64), norm_of(128))
    fits, fits_not, x = Norm(64), Norm(96), torch.randn(512, 64)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="2 kernels that paid in other models on this machine"):
            autokernel.apply(fits)
        assert fits(x).abs().max() == 0 and autokernel.unapply(fits)(x).abs().max() > 0
        assert autokernel.apply(fits, autokernel.proven())(x).abs().max() == 0
        autokernel.apply(fits_not, autokernel.proven())
        torch.testing.assert_close(fits_not(torch.ones(512, 96)), torch.ones(512, 96))


def test_where_nothing_is_known_the_advice_is_as_before():
    with pytest.raises(NoRun, match="starts one"):
        autokernel.apply(Norm(64))
    remember(norm_of(64))
    with pytest.raises(NoRun, match="night"):  # a run that is named is meant
        autokernel.apply(Norm(64), "night")


def test_kernels_that_did_not_pay_are_not_kept():
    assert remember(norm_of(64), used=()) == [] == autokernel.proven()


@pytest.mark.parametrize("other", [{"torch": "2.0.0"}, {"triton": "1.0"}, {"machine": "another"}], ids=str)
def test_what_was_proven_elsewhere_does_not_count(other):
    (kernel,) = remember(norm_of(64))
    assert len(autokernel.proven()) == 1
    kernel.path.unlink()
    replace(kernel, **other).write()
    assert autokernel.proven() == [] and len(proven.entries()) == 1


def test_the_latest_kernel_of_the_same_sizes_stays_alone():
    remember(norm_of(64, ZEROS))
    remember(norm_of(64, ZEROS + "# better\n"))
    (kernel,) = autokernel.proven()
    assert kernel.source.endswith("# better\n")


def test_a_target_of_several_sizes_is_known_size_by_size():
    wide, narrow = norm_of(128), norm_of(64)
    both = Winner(replace(wide.target, cases=wide.target.cases + narrow.target.cases), ZEROS)
    remember(both)
    assert len(autokernel.proven()) == len({w.target.name for w in autokernel.proven()}) == 2


def test_list_and_clear(capsys):
    cache.main([])
    assert "no kernel is kept" in capsys.readouterr().out
    remember(norm_of(64))
    cache.main(["list"])
    assert "rmsnorm" in (said := capsys.readouterr().out) and "yes" in said and "A model" in said
    cache.main(["list", "--json"])
    assert [kernel["counts"] for kernel in json.loads(capsys.readouterr().out)] == [True]
    cache.main(["clear"])
    assert "1 kernel forgotten" in capsys.readouterr().out and autokernel.proven() == []


def test_traced_patterns_are_listed_and_cleared(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path / "cache"))
    for name in ("softmax-1", "softmax-2"):
        pattern_graphs.write(tmp_path / f"cache/{pattern_graphs.FOLDER}/{name}.json", [])
    cache.main(["list"])
    assert "2 files of traced patterns" in capsys.readouterr().out
    cache.main(["clear", "--json"])
    assert json.loads(capsys.readouterr().out) == {"kernels": 0, "files_of_patterns": 2} and pattern_graphs.files() == []


def test_what_cannot_be_read_can_be_cleared():
    (kernel,) = remember(norm_of(64))
    kernel.path.write_text("{}")
    cache.main(["clear"])
    assert not kernel.path.exists()


@pytest.mark.slow
def test_what_is_printed_for_programs_is_json_alone(capsys):
    (kernel,) = remember(norm_of(64))
    kernel.path.unlink()
    gone = replace(kernel.winner.target, kernel_type="region_gone_0", cases=kernel.winner.target.cases)
    replace(kernel, winner=Winner(gone, ZEROS)).write()
    cache.main(["prove", "--json"])
    said = capsys.readouterr()
    assert json.loads(said.out) == [] == autokernel.proven() and "no kernel type region_gone_0" in said.err


def test_a_file_that_is_no_kernel_is_named():
    (kernel,) = remember(norm_of(64))
    kernel.path.write_text("{}")
    with pytest.raises(BadRecord, match=kernel.path.name):
        autokernel.proven()


@pytest.mark.slow
@pytest.mark.timed
def test_after_an_update_kernels_are_proven_anew(capsys):
    """A right kernel counts again, a wrong one does not."""
    case = load_spec("rmsnorm").case({"M": 512, "N": 768}, torch.float32)
    target = Target("rmsnorm_512x768", "rmsnorm", "cpp", "cpu", (WeightedCase(case),))
    right = Winner(target, (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text())
    for kernel in remember(right, norm_of(64)):
        kernel.path.unlink()
        replace(kernel, torch="2.0.0").write()
    cache.main(["prove", "--json"])
    (known,) = autokernel.proven()
    assert known.source == right.source, capsys.readouterr().out


# ---- regions, whose kernel types are made of models ----


@pytest.fixture
def region(tmp_path, monkeypatch) -> Winner:
    """The starter of one that was found in a model, as if it had paid there."""
    monkeypatch.setattr(specs, "REGIONS", tmp_path / "regions")
    monkeypatch.setattr(specs, "KEPT_REGIONS", tmp_path / "proven/regions")
    monkeypatch.setattr("autokernel.model.regions.growing._KNOWN", {})
    _, (site,) = regions.found(regions.Of(regions.CHAINS["silu"]), *torch.randn(2, 64, regions.N))
    (winner,) = regions.winners_of([site])
    remember(winner)
    return winner


def test_a_region_is_known_where_its_clone_is_not(region, tmp_path):
    shutil.rmtree(tmp_path / "regions")
    load_spec.cache_clear()
    model, inputs = regions.Of(regions.CHAINS["silu"]), torch.randn(2, 64, regions.N)
    with torch.no_grad():
        expected = model(*inputs)
        torch.testing.assert_close(autokernel.apply(model, autokernel.proven())(*inputs), expected)
    assert sum(map(len, autokernel.explain(model).sites.values())) == 1
    assert not (tmp_path / "regions").exists()


def test_a_second_model_with_the_same_region_is_offered_its_kernel(region, tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / "regions")
    load_spec.cache_clear()
    monkeypatch.setattr("autokernel.model.regions.growing._KNOWN", {})
    _, sites = regions.found(regions.Of(regions.CHAINS["silu"]), *torch.randn(2, 64, regions.N))
    (second,) = regions.winners_of(sites)
    assert [entry.winner.source for entry in proven.known_for(second.target)] == [region.source]
    _, others = regions.found(regions.Of(regions.CHAINS["gelu"]), *torch.randn(2, 64, regions.N))
    assert proven.known_for(regions.winners_of(others)[0].target) == []


def test_a_kernel_whose_region_nobody_knows_any_more_does_not_count(region, tmp_path):
    for place in ("regions", "proven/regions"):
        shutil.rmtree(tmp_path / place)
    assert autokernel.proven() == [] and len(proven.entries()) == 1


def test_clear_forgets_what_regions_compute(region, tmp_path):
    assert any((tmp_path / "proven/regions").iterdir())
    cache.main(["clear"])
    assert not (tmp_path / "proven/regions").exists()


# ---- a second model begins with them ----


@pytest.mark.parametrize(
    "width, dtype, offers",
    [(256, torch.float32, True), (512, torch.float32, False), (64, torch.bfloat16, False)],
    ids=["four times as wide", "eight times as wide", "another dtype"],
)
def test_shapes_that_are_alike_are_offered_what_paid(width, dtype, offers):
    remember(norm_of(64))
    assert len(proven.known_for(norm_of(width, dtype=dtype).target)) == offers
    assert proven.known_for(default_target("softmax", "cpp", "cpu", torch.float32)) == []


def test_the_kernel_of_the_nearest_shapes_comes_first_and_each_once():
    remember(norm_of(64, ZEROS + "# far\n"))
    remember(norm_of(128), norm_of(256))
    near, far = proven.known_for(norm_of(256).target)
    assert (near.winner.source, far.winner.source) == (ZEROS, ZEROS + "# far\n")
    assert near.winner.target.cases[0].case.args["x"].shape == (512, 256)


def test_another_machines_kernels_are_not_offered_but_those_of_other_versions_are():
    (kernel,) = remember(norm_of(64))
    kernel.path.unlink()
    replace(kernel, machine="another").write()
    assert proven.known_for(norm_of(64).target) == []
    replace(kernel, torch="2.0.0").write()
    assert len(proven.known_for(norm_of(64).target)) == 1


def test_a_known_kernel_is_an_experiment_that_the_gate_decides(clone, judge):  # noqa: F811
    """One that is wrong is refused and logged, and then the agent is asked; a run that goes on does not try it again."""
    target, said = replace(norm_of(768).target, starter="cpp_kernel"), []
    remember(norm_of(768), Winner(norm_of(1024).target, starter_source(target)))
    workspace, plan = Workspace(clone, "second"), Plan("Another model", {}, "cpu", 1000.0, (target,))
    with workspace.locked():
        ledger = workspace.ledger
        ledger.open()
        start = replace(ROW, target=target.name, agent=STARTER, speedup_vs_incumbent=None, description="start")
        workspace.log.append([ledger.record(replace(start, tag="second"), starter_source(target))])
        loop = Loop(workspace, plan, judge, said.append, pauses_s=())
        (proposal,) = offered(loop, target)  # not its own starter
        agent = ProvenFirst({target.name: [proposal]}, ScriptedAgent([(ZEROS + "# edited\n", "the agent's")]))
        loop.run(agent, Rules(None, None, None, None), Budget())
        assert offered(loop, target) == []
    _, known, edited = ExperimentLog(clone / "results.tsv").read()
    assert (known.agent, known.status, edited.agent) == ("proven", "failed", "scripted")
    assert known.description == "what paid in A model (M=512,N=768 float32), 2.00x PyTorch there"
    assert any("what paid in A model" in line and "failed" in line for line in said)


@pytest.mark.slow
@pytest.mark.timed
def test_a_second_models_run_judges_the_first_ones_kernel_before_its_agents_edits(tmp_path):
    """As processes: what is said on the terminal, and the row and the commit that it has."""
    root, model = tmp_path / "clone", tmp_path / "second.py"
    clone_this(root)
    model.write_text(SECOND)
    tuned = load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text() + "# tuned for the first model\n"
    remember(norm_of(1024, tuned))
    environment = os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "orchestrate.py", "--model", model, "--class-name", "Second", "--device", "cpu"]
    command += ["--input-shape", "512,768", "--agent", "tuner", "--experiments", "1", "--tag", "second"]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ": after its starter, 1 kernel that paid in other models on this machine" in ended.stderr
    (row,) = (row for row in ExperimentLog(Path(root, "results.tsv")).read() if row.agent == "proven")
    assert row.description.startswith("what paid in A model (M=512,N=1024 float32)") and row.correctness in ("PASS", "")
    subject = subprocess.run(["git", "show", "-s", "--format=%s", row.commit], cwd=root, capture_output=True, text=True)
    assert "what paid in A model" in subject.stdout
