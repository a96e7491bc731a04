"""results.tsv: what is written is read back, a torn line is dropped, rows of many writers stay whole."""

import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from autokernel.common.verdict import Correctness, Interval, Verdict
from autokernel.gate.timing.statistics import Decision, keep_rule
from autokernel.history.experiments import COLUMNS, Experiment, ExperimentLog, Status, experiment_from
from autokernel.history.ledger import message
from autokernel.history.status import subject
from autokernel.spec import ROOT

ROW = Experiment(
    experiment=1,
    tag="night",
    kernel_type="rmsnorm",
    throughput_tflops=0.0123456,
    latency_us=98.5,
    pct_peak=None,
    speedup_vs_pytorch=2.5,
    correctness="PASS",
    peak_vram_mb=None,
    description="CHUNK_ROWS 16 -> 4",
    target="rmsnorm_512x768_float32",
    status="kept",
    commit="0" * 40,
    speedup_vs_incumbent=1.083,
    speedup_low=1.051,
    speedup_high=1.116,
    seconds=4.5,
    seed=7,
    device="cpu",
    agent="tuner",
    tokens=0,
    cost_usd=0.0,
)


def test_columns_begin_with_the_public_ones():
    public = "experiment tag kernel_type throughput_tflops latency_us pct_peak speedup_vs_pytorch correctness peak_vram_mb"
    assert list(COLUMNS)[:10] == [*public.split(), "description"]


def test_rows_are_read_back_as_written(tmp_path):
    log = ExperimentLog(tmp_path / "results.tsv")
    assert log.read() == []
    rows = [replace(ROW, experiment=n) for n in (1, 2, 3)]
    log.append(rows[:2])
    log.append(rows[2:])
    assert log.read() == rows
    assert log.path.read_text().count("experiment\t") == 1


def test_text_cannot_break_the_table(tmp_path):
    log = ExperimentLog(tmp_path / "results.tsv")
    log.append([replace(ROW, description="a\tb\nc\r\n  d")])
    assert log.read()[0].description == "a b c d"


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path, cut):
    log = ExperimentLog(tmp_path / "results.tsv")
    log.append([ROW, replace(ROW, experiment=2)])
    os.truncate(log.path, log.path.stat().st_size - cut)
    assert [row.experiment for row in log.read()] == [1]
    log.append([replace(ROW, experiment=3)])
    assert [row.experiment for row in log.read()] == [1, 3]


def test_other_columns_are_refused(tmp_path):
    log = ExperimentLog(tmp_path / "results.tsv")
    log.path.write_text("experiment\tsomething\n1\t2\n")
    with pytest.raises(ValueError, match="other columns"):
        log.read()


def test_many_writers_keep_rows_whole(tmp_path):
    path = tmp_path / "results.tsv"
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path;"
        "from tests.test_experiments import ROW; from autokernel.history.experiments import ExperimentLog;"
        "log = ExperimentLog(Path(sys.argv[1]));"
        "[log.append([replace(ROW, experiment=n, tag=sys.argv[2])]) for n in range(20)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path, tag], cwd=ROOT) for tag in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    rows = ExperimentLog(path).read()
    for tag in "ab":
        assert [row.experiment for row in rows if row.tag == tag] == list(range(20))


@pytest.mark.parametrize(
    ("correctness", "keep", "status"),
    [
        (Correctness.PASS, True, Status.KEPT),
        (Correctness.PASS, False, Status.RESET),
        (Correctness.FAIL, False, Status.FAILED),
        (Correctness.CRASH, False, Status.CRASH),
        (Correctness.TIMEOUT, False, Status.TIMEOUT),
    ],
)
def test_a_verdict_becomes_a_row(correctness, keep, status):
    verdict = Verdict(
        "rmsnorm", "cpp", "cpu", correctness, keep, "why", seed=3, speedup_vs_incumbent=Interval(0.9, 1.0, 1.1)
    )
    known = {n: getattr(ROW, n) for n in ("experiment", "tag", "description", "target", "agent", "tokens", "cost_usd")}
    row = experiment_from(verdict, **known)
    assert (row.status, row.correctness, row.seed) == (status, correctness, 3)
    assert (row.speedup_low, row.speedup_vs_incumbent, row.speedup_high) == (0.9, 1.0, 1.1)


@pytest.mark.parametrize(
    "status, low, value, high, words",
    [
        ("kept", 1.051, 1.083, 1.116, "1.083x [1.051, 1.116]"),
        ("reset", 0.001, 0.72, 561.006, "about 0.72x, stopped early"),
        ("reset", 0.0, 0.72, math.inf, "about 0.72x, stopped early"),
        ("reset", None, 0.72, None, "about 0.72x, stopped early"),
        ("reset", 0.966, 0.999, 1.033, "0.999x [0.966, 1.033]"),
        ("kept", 1.2, 3.0, 7.5, "about 3.00x"),
        ("failed", None, None, None, ""),
    ],
)
def test_a_gain_says_what_its_pairs_can_tell(status, low, value, high, words):
    row = replace(ROW, status=status, speedup_low=low, speedup_vs_incumbent=value, speedup_high=high)
    assert row.gain == words
    assert subject(row) == f"#1 {ROW.target} {f'{status} {words}'.strip()}: {ROW.description}"
    assert message(row, "why").splitlines()[0] == f"#1 {ROW.target}: {f'{status} {words}'.strip()}: {ROW.description}"
    assert Experiment.from_cells(dict(zip(COLUMNS, row.row().split("\t")))) == row, "the table has the numbers"


def test_the_gate_says_after_how_many_pairs():
    decision = keep_rule([-0.4, -0.3, -0.2], {}, 0.01)
    assert decision == Decision(False, False, "not shown to be faster: about 0.74x after 3 pairs")
    decision = keep_rule([0.1 + 0.01 * (i % 2) for i in range(8)], {}, 0.01)
    assert decision.keep and re.fullmatch(r"faster than the incumbent: 1\.\d+x \[.*\] after 8 pairs", decision.why)
