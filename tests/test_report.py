"""What people see of a run: the page it leaves, the display while it works, and its status from records alone."""

import json
import math
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from autokernel.display import Run, estimated_speedup, narrator, panel, time_left
from autokernel.experiments import STARTER, Experiment, ExperimentLog, Status
from autokernel.gate.verdict import Interval
from autokernel.loop import Budget
from autokernel.report import write_report
from autokernel.report_html import Axes, page
from autokernel.spec import ROOT
from autokernel.target import Plan, write_json
from autokernel.workspace import Workspace
from tests.test_experiments import ROW
from tests.test_ledger import clone  # noqa: F401  a fixture
from tests.test_loop import TARGET, workspace  # noqa: F401  `workspace` is a fixture

OTHER = replace(TARGET, name="softmax_6144x512_float32", share=0.25)
PLAN = Plan("models/llama.py:CompactLlama 1,512 float32", {}, "cpu", 190_000.0, (replace(TARGET, share=0.5), OTHER))
VOID = {"meta", "input"}
OPTIONAL_END = {"li", "td", "th", "tr", "p", "html"}  # which HTML lets a writer leave out


def night(*statuses: str, target: str = TARGET.name) -> list[Experiment]:
    """A starter, then an experiment of each status."""
    start = replace(ROW, target=target, agent=STARTER, speedup_vs_incumbent=None, description="start from cpp_kernel")
    rows = [replace(ROW, target=target, experiment=i, status=s, pct_peak=40.0) for i, s in enumerate(statuses, 2)]
    return [start, *rows]


class Reader(HTMLParser):
    """What is in a page: its open tags at the end, what it loads from elsewhere, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        while self.open and self.open[-1] != tag and self.open[-1] in OPTIONAL_END:
            self.open.pop()
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def run(workspace) -> Workspace:  # noqa: F811
    """Experiments of every status, in git as the loop leaves them."""
    ledger = workspace.ledger
    ledger.open()
    rows = night("kept", "reset", "failed", *set(Status) - {"kept", "reset", "failed"})
    rows[2] = replace(rows[2], description="two < three & more")
    workspace.log.append([ledger.record(row, f"step {row.experiment}\n") for row in rows])
    return workspace


def test_the_page_has_everything_and_loads_nothing(run):
    closing = write_report(run)
    page = Reader((run / "report.html").read_text())
    words = "".join(page.words)
    assert set(page.open) <= OPTIONAL_END and page.loaded == []
    assert closing in words
    for expected in ("two < three & more", "1.083x [1.051, 1.116]", "What to try next", "Roofline", TARGET.name):
        assert expected in words
    for experiment in range(2, 2 + len(Status)):  # each change, against the kernel that it was an edit of
        assert f"+step {experiment}" in words
    assert "-step 1" in words and words.count("-step 2") == len(Status) - 1
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_model_gained_is_drawn():
    from autokernel.verification.record import EAGER, Figures, KernelInModel, Verification

    sides = {name: Figures(ms, 1.0, None, 0) for name, ms in ((EAGER, 190.0), ("kernels over eager", 95.0))}
    kernel = KernelInModel(TARGET.name, "rmsnorm", "k", 0.5, 2.5, 4, {EAGER: Interval(1.9, 2.0, 2.1)}, (EAGER,))
    speedups = {EAGER: {EAGER: Interval(1.9, 2.0, 2.1)}}
    verification = Verification(PLAN.model, "cpu", True, (kernel,), {}, {"1,512": sides}, speedups)
    text = "".join(Reader(page("a run", "", PLAN, night("kept"), verification, {}, [])).words)
    assert "95.00 ms, 2.00x" in text and "stays over eager" in text


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [(1, 1), (0.47, 1.03), (1, 400), (1e-3, 5e4), (0.999, 1.001)])
def test_ticks_are_few_round_and_inside(values, log):
    axes = Axes(values, values, log)
    ticks = axes._ticks(axes.y0, axes.y1)
    assert 1 <= len(ticks) <= 12
    assert all(axes.y0 <= axes.scale(tick) <= axes.y1 for tick in ticks)
    assert all(f"{tick:.4g}".strip("0.")[:1] in "125" or not log for tick in ticks if tick)


@dataclass(frozen=True)
class Gain:
    rows: tuple[Experiment, ...]
    expected: float


GAINS = {
    "nothing yet": Gain((), 1.0),
    "half of the time 2.5 times as fast": Gain(tuple(night()), 1 / (0.5 + 0.5 / 2.5)),
    "slower ones are left out": Gain((replace(ROW, target=TARGET.name, speedup_vs_pytorch=0.5),), 1.0),
    "both": Gain((*night(), *night(target=OTHER.name)), 1 / (0.25 + 0.75 / 2.5)),
}


@pytest.mark.parametrize("gain", GAINS.values(), ids=GAINS)
def test_the_estimate_is_amdahls(gain):
    assert math.isclose(estimated_speedup(PLAN, gain.rows), gain.expected)


def followed(rows: list[Experiment], **budget) -> Run:
    return Run("night", PLAN, lambda: rows, Budget(**{"started_s": 1000.0, "made_before": 0} | budget))


@pytest.mark.parametrize("width", [120, 60])
def test_the_display_says_where_the_run_is(width):
    rows = [replace(row, cost_usd=0.25, tokens=1000) for row in night("kept", "reset", "crash", "undecided")]
    out = Console(width=width, record=True, file=StringIO())
    out.print(panel(followed(rows, seconds=3600.0), "judging #6", 1600.0))
    text = out.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    for expected in (
        "now",
        "judging #6",
        "target",
        TARGET.name,
        "best",
        "1.08x its starter",
        "last",
        "#5",
        "1.43x end to end",
    ):
        assert expected in text
    if width == 120:
        for expected in ("playbook tier", "24 experiments/h", "1 kept of 4", "$1.25", "5,000 tokens", "0:50:00 left"):
            assert expected in text


def test_time_left_is_counted_in_what_is_limited():
    rows = night("kept", "reset")
    assert time_left(followed(rows, experiments=10), 1600.0) == "8 experiments left"
    assert time_left(followed(rows), 1600.0) == "until nothing is left to try"


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    with open(tmp_path / "out", "w") as file, narrator(Console(file=file, width=40)) as (say, step, phase, follow):
        follow(followed(night("kept")))
        step("judging")
        say("#2 kept: a [line] that is longer than the forty columns of this file")
        phase("process 1 of 4")
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["#2 kept: a [line] that is longer than the forty columns of this file", "  process 1 of 4"]


CURSOR = "\x1b[?25h"  # is shown again: the terminal is left as it was found


def read_until(terminal: int, *expected: str) -> str:
    """What a terminal was sent, as soon as all that is expected was among it."""
    seen, deadline = "", time.monotonic() + 60
    while not all(words in seen for words in expected):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 1 << 16).decode()
    return seen


def test_a_terminal_shows_the_run_and_keeps_the_lines():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as file:
        with narrator(Console(file=file, width=100, height=30)) as (say, step, phase, follow):
            follow(followed(night("kept")))
            step("judging #3")
            say("a line that stays")
            read_until(master, "a line that stays", "judging #3", "run night", "experiments/h")
        read_until(master, CURSOR)
    os.close(master)


def test_status_of_ten_thousand_rows_needs_no_pytorch(tmp_path):
    rows = night(*["reset"] * 9999)
    ExperimentLog(tmp_path / "results.tsv").append(rows)
    write_json(
        tmp_path / "workspace" / "night" / "plan.json", {"model": "m", "targets": [{"name": TARGET.name, "share": 0.5}]}
    )
    program = (
        "import sys, json; from pathlib import Path; from autokernel.status import status; root = Path(sys.argv[1]);"
        "print(json.dumps([status(root), json.loads(status(root, as_json=True)), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    words, record, with_torch = json.loads(done.stdout)
    assert "9999 experiments, none kept" in words and "#10000" in words
    assert record["counts"]["reset"] == 9999 and record["last"]["experiment"] == 10000
    assert not with_torch
