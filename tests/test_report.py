"""What people see of a run: the page it leaves, the display while it works, and its status from records alone."""

import json
import math
import os
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from io import StringIO

import pytest
import torch
from rich.console import Console

from autokernel.common.records import write_json
from autokernel.common.verdict import Interval
from autokernel.common.words import percent
from autokernel.history.experiments import STARTER, Experiment, ExperimentLog, Status
from autokernel.history.status import Proof, kernel_line, started_with
from autokernel.model.extraction import make_plan
from autokernel.model.hotspots import Hotspot, ModelProfile
from autokernel.model.workload import Workload
from autokernel.report import charts
from autokernel.report.branch import close_again, close_branch
from autokernel.report.html import Story, page
from autokernel.report.live import Run, estimated_speedup, narrator, panel, time_left
from autokernel.report.log import log_table
from autokernel.report.summary import KNOWN_BY, NONE_KEPT, NOT_PROVEN_AGAIN, PROVEN_AGAIN, known_by, obstacles, write_report
from autokernel.report.tables import NONE, compare, compared
from autokernel.run.loop import Budget
from autokernel.run.workspace import PLAN as PLAN_FILE
from autokernel.run.workspace import NoRun, Workspace
from autokernel.spec import ROOT, load_spec
from autokernel.target import Plan
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh  # noqa: F401  `clone` is a fixture
from tests.test_loop import TARGET, workspace  # noqa: F401  `workspace` is a fixture

OTHER = replace(TARGET, name="softmax_6144x512_float32", share=0.25)
PLAN = Plan("models/llama.py:CompactLlama 1,512 float32", {}, "cpu", 190_000.0, (replace(TARGET, share=0.5), OTHER))
VOID = {"meta", "input", "br"}
OPTIONAL_END = {"li", "td", "th", "tr", "p", "html"}  # which HTML lets a writer leave out


def night(*statuses: str, target: str = TARGET.name) -> list[Experiment]:
    """A starter, then an experiment of each status."""
    start = replace(ROW, target=target, agent=STARTER, speedup_vs_incumbent=None, description="start from cpp_kernel")
    rows = [replace(ROW, target=target, experiment=i, status=s, pct_peak=40.0) for i, s in enumerate(statuses, 2)]
    return [start, *rows]


def test_what_was_kept_is_said_to_beat_the_starter_that_the_target_began_with():
    rows = night("kept")
    words = "start from cuda_kernel, at a look 1.25 times as fast as triton_kernel"
    rows[0] = replace(rows[0], description=words, speedup_vs_pytorch=0.97, pct_peak=58.0)
    rows[1] = replace(rows[1], speedup_vs_pytorch=1.17)
    why = f"{Interval(1.1, 1.2, 1.3)} over {started_with(rows[0])}"
    line = kernel_line(TARGET, rows, Proof(TARGET.name, rows[1].commit, Interval(1.1, 1.2, 1.3), True, why))
    gain = f"{rows[1].speedup_vs_incumbent:.2f}x what it began with; "
    assert f"cuda_kernel 0.97x PyTorch eager, at 58 % of its limit; the loop kept 1 change, {gain}" in line
    assert line.endswith("; what was kept is 1.200x [1.100, 1.300] over cuda_kernel")
    assert kernel_line(TARGET, rows[:1], None).endswith("; no experiments")


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
    verdict, *commands = closing.split("\n\n")[0].splitlines()
    assert all(line.strip() in words for line in [verdict, *KNOWN_BY])
    assert all(command.partition("   (")[0].strip() in words for command in commands)
    for expected in ("two < three & more", "1.083x [1.051, 1.116]", "What next", "Roofline", TARGET.name):
        assert expected in words
    for experiment in range(2, 2 + len(Status)):  # each change, against the kernel that it was an edit of
        assert f"+step {experiment}" in words
    assert "-step 1" in words and words.count("-step 2") == len(Status) - 1
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_was_timed_again_is_said_to_have_been(workspace):  # noqa: F811
    """Not where nothing was kept, nor of a kernel that was kept since."""
    plan, rows = workspace.plan, night("kept")
    proofs = {TARGET.name: Proof(TARGET.name, rows[1].commit, Interval(1.1, 1.2, 1.3), True, "")}
    assert known_by(plan, night("reset"), {}) == [*KNOWN_BY, NONE_KEPT]
    assert known_by(plan, rows, {}) == [*KNOWN_BY, NOT_PROVEN_AGAIN]
    assert known_by(plan, rows, proofs) == [*KNOWN_BY, PROVEN_AGAIN]
    rows += [replace(rows[1], experiment=3, commit="f" * 40)]
    assert known_by(plan, rows, proofs) == [*KNOWN_BY, NOT_PROVEN_AGAIN]


def test_a_kernel_above_the_peak_is_said_once(run):
    above = [replace(ROW, target=TARGET.name, experiment=number, pct_peak=100.0 + number) for number in (20, 30)]
    run.log.append([run.ledger.record(row, f"step {row.experiment}\n") for row in above])
    assert write_report(run).count("130 % of a limit: this machine's peaks were measured while other work ran") == 1


def test_the_branch_ends_with_every_winner_and_what_the_run_came_to(run):
    close_branch(run)
    shown = sh("git", "show", f"autokernel/{run.tag}", cwd=run.root)
    assert "kernels_of_this_run: test is not verified yet: no kernel is to be used in it" in shown
    best, *others = sh("git", "ls-tree", "--name-only", f"autokernel/{run.tag}:kernels_of_this_run", cwd=run.root).split()[
        ::-1
    ]
    assert (best, others) == (f"{TARGET.name}.py", ["README.md"])
    assert sh("git", "show", f"autokernel/{run.tag}:kernels_of_this_run/{best}", cwd=run.root) == "step 2"
    assert f"- {TARGET.name}" in sh("git", "show", f"autokernel/{run.tag}:kernels_of_this_run/README.md", cwd=run.root)


def test_a_branch_that_was_closed_stays_so_after_an_edit_by_hand(run):
    close_again(run)
    assert not run.ledger.closed  # a run that goes on has nothing to close yet
    close_branch(run)
    last = len(run.ledger.entries())
    run.log.append([run.ledger.record(replace(night("kept")[-1], experiment=last + 1), "by hand\n")])
    close_again(run)
    assert sh("git", "show", f"autokernel/{run.tag}:kernels_of_this_run/{TARGET.name}.py", cwd=run.root) == "by hand"


def test_a_plan_without_a_run_has_no_branch_to_close(workspace):  # noqa: F811
    """As after profile.py, extract.py and verify.py."""
    close_again(workspace)
    assert not sh("git", "branch", "--list", "autokernel/*", cwd=workspace.root)


@pytest.mark.slow
def test_the_traces_of_a_pass_are_named_where_there_are_any(run):
    named = [f"workspace/{run.tag}/traces/{name}" for name in ("before.json.gz", "after.json.gz")]
    assert not any(path in write_report(run) for path in named)
    (run / "traces").mkdir()
    for path in named:
        (run.root / path).touch()
    closing, words = write_report(run), "".join(Reader((run / "report.html").read_text()).words)
    assert all(path in closing and path in words for path in named)


def test_what_the_model_gained_is_drawn():
    from autokernel.integration.verification.record import EAGER, Figures, KernelInModel, Verification

    sides = {name: Figures(ms, 1.0, None, 0) for name, ms in ((EAGER, 190.0), ("kernels over eager", 95.0))}
    kernel = KernelInModel(TARGET.name, "rmsnorm", "k", 0.5, 2.5, 4, {EAGER: Interval(1.9, 2.0, 2.1)}, (EAGER,))
    speedups = {EAGER: {EAGER: Interval(1.9, 2.0, 2.1)}}
    verification = Verification(PLAN.model, "cpu", True, (kernel,), {}, {"1,512": sides}, speedups)
    story = Story("night", PLAN, night("kept"), verification.advice("night"), verification)
    drawn = page(story)
    text = "".join(Reader(drawn).words)
    assert "2.00x [1.90, 2.10] 95 ms" in text and "stays over eager" in text
    code = 'autokernel.apply(model, "night")'
    order = ("is 2.00x as fast as eager", "Before and after", code, "Targets", "Progress", "Roofline", "Experiments")
    assert sorted(order, key=text.index) == list(order)
    ends = re.search(r'class="whisker" style="left: ([\d.]+)%; width: ([\d.]+)%', drawn)
    one = re.search(r'class="one" style="left: ([\d.]+)%', drawn)
    assert math.isclose(float(ends[1]) / float(one[1]), 1.9, rel_tol=1e-3)
    assert math.isclose(float(ends[2]) / float(one[1]), 0.2, rel_tol=1e-2)


def test_what_others_wrote_is_text_and_not_markup():
    """Names of models, hypotheses, errors, kernels: also in the words that a browser shows over a mark."""
    evil = '</title><script>alert("x")</script>&amp;'
    start, *rows = night("kept", "failed")
    rows = [replace(start, description=evil), *(replace(row, description=evil, agent=evil) for row in rows)]
    rows[1] = replace(rows[1], commit="c" * 40)
    plan = replace(PLAN, targets=(replace(TARGET, share=0.5),))
    lists = dict.fromkeys(("notes", "obstacles", "known_by", "records", "following", "ideas"), [evil])
    diffs = {"c" * 40: f"@@\n+{evil}\n-{evil}\n {evil}"}
    story = Story(evil, plan, rows, [evil, evil], uncovered=[(0.5, evil)], facts={evil: evil}, diffs=diffs, **lists)
    text = page(story)
    reader = Reader(text)
    assert "<script>alert" not in text and text.count("<script>") == 1 and reader.open == []
    told = 2 + 2 + 1 + 2 + len(lists) + 3  # tag, advice, uncovered, facts, each list's line, and those of the diff
    of_rows = 3 + 2 + 1 + 3  # descriptions, agents, the change that was kept, marks in a chart
    assert "".join(reader.words).count(evil) == told + of_rows


def test_a_dollar_sign_is_no_formula(tmp_path):
    rows = [replace(row, description=r"$\frac{ $1 for 2") for row in night("kept")]
    charts.save_progress(tmp_path / "progress.png", [TARGET], rows)
    assert r"$\frac{ $1 for 2" in charts.progress(rows)


TIMES = ([1.0], [0.47, 1.03], [1, 400], [0.999, 1.001])


def labels(chart: str) -> list[float]:
    """The numbers along both axes of a chart."""
    return [float(text) for text in re.findall(r"<text [^>]*>([-−\d.e+]+)</text>", chart.replace("−", "-"))]


@pytest.mark.parametrize("speedups", TIMES)
def test_a_chart_of_progress_has_ticks_and_a_mark_for_each_experiment(speedups):
    rows = night(*["reset"] * len(speedups))
    rows[1:] = [replace(row, speedup_vs_incumbent=speedup) for row, speedup in zip(rows[1:], speedups)]
    chart = charts.progress(rows)
    titles = [unescape(title) for title in re.findall(r"<title>(.*?)</title>", chart)]
    assert sorted(titles) == [f"#{row.experiment} {row.status} {row.gain}: {row.description}" for row in rows]
    assert 4 <= len(labels(chart)) <= 24
    assert len(re.findall(r"<use [^>]*fill: var\(--page\)", chart)) == 1, "the starter has no speedup: it is hollow"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("rates", [(1, 1), (0.47, 1.03), (1, 400), (1e-3, 5e4), (0.999, 1.001)])
def test_a_roofline_has_round_ticks_on_both_axes(rates):
    start, best = night("kept")
    rows = [replace(row, throughput_tflops=rate, pct_peak=50.0) for row, rate in zip((start, best), rates)]
    points = list(charts.points([TARGET], rows))
    assert [point.name for point in points] == ["rmsnorm"] * 2
    for width in (charts.WIDE, charts.NARROW):
        chart = charts.roofline(points, width)
        titles = [unescape(title) for title in re.findall(r"<title>(.*?)</title>", chart)]
        assert titles == [point.words for point in points]
        ticks = labels(chart)
        assert 2 <= len(ticks) <= 24 and all(float(f"{tick:.2g}") == tick for tick in ticks), ticks
        assert chart.count(">rmsnorm<") == 1, "the best kernel has its name beside it"


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


@pytest.mark.parametrize("width", [160, 80])
def test_the_log_is_a_table_on_a_terminal(width):
    _, kept, reset = night("kept", "reset")
    vague = replace(reset, speedup_vs_incumbent=0.72, speedup_low=0.001, speedup_high=561.006, commit="c" * 40)
    out = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    lines = log_table([kept, vague], {"c" * 40: "11-23 02:39"}, out).splitlines()
    assert max(map(len, lines)) <= width and "561" not in "".join(lines)
    words = " ".join(" ".join(lines).replace("│", " ").split())
    for expected in ("outcome", "11-23 02:39", "kept", "1.083x [1.051, 1.116]", "CHUNK_ROWS"):
        assert expected in words
    if width == 160:
        assert "about 0.72x, stopped early" in words and TARGET.name in words


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_target_is_named_by_what_it_computes(mask):
    """It was by its mask where that is larger: the target of a float16 model was called one of bool."""
    case = load_spec("flash_attention").case(
        {"batch": 1, "heads": 1, "seq": 128, "head_dim": 64, "mask": mask}, torch.float16
    )
    spot = Hotspot("attention", 1, 10.0, 1.0, "flash_attention", case, "memory", 5.0, baseline_us=9.0)
    profile = ModelProfile(Workload(), "cpu", "a CPU", 10.0, 10.0, 1, (), (spot,))
    (target,) = make_plan(profile).targets
    shape = "1x1x128x64" if mask == "bool" else "128x128"
    assert target.name == f"flash_attention_{shape}_float16"


@pytest.mark.parametrize(
    ("covered", "told"), [(0.6, "60% of it; the other 40% is not worked on here"), (0.999, "100% of it")]
)
def test_what_is_not_worked_on_is_told_where_there_is_any(covered, told):
    spot = Hotspot("aten.sort.default", 1, 10.0, 1.0)
    profile = ModelProfile(Workload(), "cpu", "a CPU", 10.0, 10.0, 1, (), (spot,))
    plan = Plan("m", {}, "cpu", 10.0, (replace(TARGET, share=covered),))
    assert obstacles(profile, plan)[1] == f"the targets are {told}"


def test_runs_beside_each_other(run):
    other = Workspace(run.root, "other")
    replace(run.plan, model="another", targets=(replace(OTHER, name="softmax"), *run.plan.targets)).write(other / PLAN_FILE)
    first, second = compare(run.root, ["night", "other"])
    assert (first["experiments"], first["kept"], second["experiments"]) == (len(Status), 1, 0)
    assert "about 1.08x its starter" in first["targets"][TARGET.name] and "no kernel" in second["targets"]["softmax"]
    told = compared(run.root, ["night", "other"], Console(file=StringIO()))
    head, *lines = told.splitlines()
    assert head.split() == ["night", "other"] and any(line.startswith("softmax ") and NONE in line for line in lines)
    wide = compared(run.root, ["night", "other"], Console(width=100, force_terminal=True, color_system=None))
    assert max(map(len, wide.splitlines())) <= 100 and "another" in wide
    with pytest.raises(NoRun):
        compare(run.root, ["night", "nothing"])


def test_status_of_ten_thousand_rows_needs_no_pytorch(tmp_path):
    rows = night(*["reset"] * 9999)
    ExperimentLog(tmp_path / "results.tsv").append(rows)
    write_json(
        tmp_path / "workspace" / "night" / "plan.json", {"model": "m", "targets": [{"name": TARGET.name, "share": 0.5}]}
    )
    program = (
        "import sys, json; from pathlib import Path; from autokernel.history.status import status\n"
        "root = Path(sys.argv[1]);"
        "print(json.dumps([status(root), json.loads(status(root, as_json=True)), sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    words, record, modules = json.loads(done.stdout)
    assert "9999 experiments, none kept" in words and "#10000" in words
    assert record["counts"]["reset"] == 9999 and record["last"]["experiment"] == 10000
    assert not {"torch", "matplotlib", "jinja2"} & set(modules)


def test_charts_are_drawn_in_silence_where_there_is_no_home(tmp_path):
    (tmp_path / "file").touch()
    gone = {name: str(tmp_path / "file" / name) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    environment = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"}
    command = [sys.executable, "-c", "import autokernel.report.charts"]
    ended = subprocess.run(command, cwd=ROOT, env=environment | gone, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("share", "digits", "words"),
    [(0.004, 0, "less than 1%"), (0.006, 0, "1%"), (0.123, 0, "12%"), (1e-5, 2, "less than 0.01%"), (0.1156, 2, "11.56%")],
)
def test_what_is_more_than_nothing_does_not_read_as_nothing(share, digits, words):
    assert percent(share, digits) == words
