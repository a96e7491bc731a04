"""The kernels that paid in a model are there for other models: on this machine, under the same versions, and no others."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import autokernel
from autokernel.cli import cache
from autokernel.history.runs import NoRun
from autokernel.integration.verification import Verification, proven, winners
from autokernel.integration.verification.forms import EAGER
from autokernel.integration.verification.proven import ProvenKernel
from autokernel.integration.verification.record import KernelInModel
from autokernel.integration.winner import Winner
from autokernel.records import BadRecord
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase
from autokernel.verdict import Interval

ZEROS = 'KERNEL_TYPE, BACKEND = "rmsnorm", "cpp"\n\ndef kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n'
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


def norm_of(width: int, source: str = ZEROS) -> Winner:
    case = load_spec("rmsnorm").case({"M": 512, "N": width}, torch.float32)
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
    cache.main(["list"])
    assert "no kernel is kept" in capsys.readouterr().out
    remember(norm_of(64))
    cache.main(["list"])
    assert "rmsnorm" in (said := capsys.readouterr().out) and "yes" in said and "A model" in said
    cache.main(["list", "--json"])
    assert [kernel["counts"] for kernel in json.loads(capsys.readouterr().out)] == [True]
    cache.main(["clear"])
    assert "1 kernels forgotten" in capsys.readouterr().out and autokernel.proven() == []


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
