"""The keep rule's rates on simulated noise, and calibration's own arithmetic; one small sample of the real thing."""

import json
import math
import random
from argparse import Namespace
from pathlib import Path

import pytest

from autokernel.gate.calibration import calibration
from autokernel.gate.calibration.calibration import Experiment, Samples, clopper_pearson, decide, summarise
from autokernel.gate.calibration.planted import CPP, TRITON, Dial, planted_source, planted_target


class Noise:
    """Log-ratios of pairs, as `decide` draws them, from a seed."""

    def __init__(self, kind: str, sd: float):
        self.random, self.kind, self.sd = random.Random(2), kind, sd

    def __call__(self, shift: float) -> float:
        r = self.random
        if self.kind == "normal":
            return r.gauss(shift, self.sd)
        if self.kind == "heavy":  # Student's t with 3 degrees of freedom
            return shift + self.sd * r.gauss(0, 1) / math.sqrt(r.gammavariate(1.5, 2) / 3)
        return r.gauss(shift, self.sd * (10 if r.random() < 0.05 else 1))  # one pair in twenty is disturbed

    def kept(self, gain: float, experiments: int) -> int:
        return sum(decide(self, math.log1p(gain)).keep for _ in range(experiments))


NOISES = [("normal", 0.01), ("normal", 0.003), ("normal", 0.03), ("heavy", 0.01), ("outliers", 0.01)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, sd, trials",
    [
        (*NOISES[0], 5_000),
        (*NOISES[-1], 5_000),
        *(pytest.param(*noise, 40_000, marks=pytest.mark.slow) for noise in NOISES),
    ],
)
def test_an_identical_kernel_is_kept_in_three_of_a_thousand_at_most(kind: str, sd: float, trials: int):
    """Under normal noise the rate is just below 3 in 1,000 by design, and many a sample shows more: what may not be is a
    rate above it beyond chance. The few trials refuse 7 in 1,000, the many 4."""
    assert clopper_pearson(Noise(kind, sd).kept(0.0, trials), trials).low <= 0.003


@pytest.mark.parametrize("kind, sd", NOISES[:2] + NOISES[3:])
def test_a_loss_of_one_percent_is_never_kept(kind: str, sd: float):
    assert Noise(kind, sd).kept(-0.01, 1000) == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "kind, sd, gain, share",
    [("normal", 0.003, 0.01, 0.95), ("normal", 0.01, 0.02, 0.98), ("normal", 0.03, 0.05, 0.95), ("heavy", 0.01, 0.02, 0.9)],
)
def test_a_gain_beyond_the_noise_is_kept(kind: str, sd: float, gain: float, share: float):
    assert Noise(kind, sd).kept(gain, 400) >= share * 400


def test_losers_stop_early_and_close_cases_go_on():
    noise = Noise("normal", 0.01)
    assert max(decide(noise, -0.1).pairs for _ in range(200)) == calibration.LOOKS[0]
    assert {decide(noise, 0.005).pairs for _ in range(200)} >= set(calibration.LOOKS)
    assert all(s.pairs in calibration.LOOKS[1:] for s in (decide(noise, 0.02) for _ in range(200)) if s.keep)


def test_exact_intervals_of_rates():
    # the rule of three, and Clopper and Pearson's own table: 0.025 = 0.975^… for 0 and 10 of 10
    assert clopper_pearson(0, 1000).high == pytest.approx(1 - 0.025 ** (1 / 1000))
    assert clopper_pearson(10, 10).low == pytest.approx(0.025 ** (1 / 10))
    assert (clopper_pearson(0, 5).low, clopper_pearson(5, 5).high) == (0, 1)
    some = clopper_pearson(3, 1000)
    assert (some.low, some.high) == (pytest.approx(0.00062, abs=1e-5), pytest.approx(0.00874, abs=1e-5))


@pytest.mark.slow
def test_a_summary_tells_experiments_from_resampling():
    noise = Noise("normal", 0.01)
    pairs = [noise(0.0) for _ in range(200)]
    experiments = [Experiment(0.0, False, 1.001, 3.0)] * 9 + [Experiment(0.0, True, 1.02, 4.0)]
    experiments += [Experiment(0.02, True, 1.02, 5.0)] * 4
    summary = summarise("some", Samples("case", 10.0, pairs, experiments=experiments))
    same, faster = summary.powers
    assert (same.kept, same.trials, same.rate.value) == (1, 10, 0.1)
    assert 0 < same.resampled < 0.004
    assert (faster.gain, faster.kept, faster.trials, faster.measured) == (0.02, 4, 4, pytest.approx(0.02))
    assert 0.005 < summary.detectable_gain <= 0.025
    assert summary.pair_sd == pytest.approx(0.01, rel=0.2) and abs(summary.lag_1) < 0.3
    silent = summarise("few", Samples("case", 10.0, pairs[:8]))
    assert silent.detectable_gain is None and silent.powers[0].resampled is None


def test_a_dial_makes_one_side_longer():
    dial = Dial(planted_target(calibration.BANDS[0], "cpp", "cpu"), 1000, 2000.0)
    assert dial.contestants(0.02) == (planted_source("cpp", 1000), planted_source("cpp", 1040))
    assert dial.contestants(-0.01) == (planted_source("cpp", 1020), planted_source("cpp", 1000))
    assert all(text.count("STEPS = 0") == 1 for text in (CPP, TRITON))


@pytest.mark.slow
def test_a_record_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A round of real pairs and a real contest on this machine's CPU, then a run that adds nothing."""
    out = tmp_path / "record.json"
    options = Namespace(
        calibrate=["rmsnorm"], device="cpu", dtype=None, allow_libraries=False, trials=1, budget=60, out=out, json=False
    )
    for trials in (1, 0):
        options.trials = trials
        assert calibration.main(options) == 0
        record = json.loads(out.read_text())
        samples = record["samples"]["rmsnorm"]
        assert len(record["runs"]) == 2 - trials
        assert len(samples["experiments"]) + len(samples["undecided"]) == 1
        assert len(samples["pairs"]) + samples["discarded"] == calibration.PAIRS_A_ROUND
    assert record["device"]
    assert "false_keeps:" in capsys.readouterr().out
