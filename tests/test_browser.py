"""The report in a real browser: nothing cut off on a phone or a desktop, light and dark; its table sorts and filters."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autokernel.common.verdict import Interval
from autokernel.history.experiments import Experiment, ExperimentLog
from autokernel.history.status import Proof
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, INDUCTOR
from autokernel.integration.verification.record import Figures, KernelInModel, Verification
from autokernel.report import charts
from autokernel.report.html import Story, page
from autokernel.spec import ROOT
from autokernel.target import Plan, default_target
from tests.browser import PATH, Browser, browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PATH is None, reason="there is no Chromium here (Debian: apt install chromium-headless-shell)"),
]
NIGHT = ExperimentLog(ROOT / "benchmarks/transcripts/cpu-night.tsv").read()
SHARES = dict(zip(dict.fromkeys(row.target for row in NIGHT), (0.524, 0.221, 0.170, 0.029, 0.025)))
TARGETS = tuple(
    replace(default_target(row.kernel_type, "cpp", "cpu", torch.float32), name=row.target, share=SHARES[row.target])
    for row in NIGHT[: len(SHARES)]  # the starters
)
PLAN = Plan("models/llama.py:CompactLlama 1,128 float32", {}, "cpu", 154_000.0, TARGETS)
GAIN, LOSS = Interval(2.171, 2.374, 2.596), Interval(0.930, 0.970, 1.010)
KERNELS = tuple(
    KernelInModel(t.name, t.kernel_type, t.name, t.share, 2.0, 12, {EAGER: GAIN, INDUCTOR: GAIN}, (EAGER, INDUCTOR))
    for t in TARGETS
)
SIDES = {name: Figures(ms, 0.2, 23.0, 267) for name, ms in ((EAGER, 191.68), ("kernels over inductor", 80.48))}
FASTER = Verification(
    PLAN.model, "cpu", True, KERNELS, {}, {"1,128": SIDES}, {INDUCTOR: {EAGER: GAIN, "torch.compile": GAIN}},
    {INDUCTOR: LOSS, AUTOTUNED: Interval(0.001, 0.72, 561.0)}, processes=4, rounds=16, spread=0.4, allocator="defaults",
)  # fmt: skip
SLOWER = replace(FASTER, speedups={EAGER: {EAGER: LOSS}}, kernels=tuple(replace(k, used=()) for k in KERNELS))
WORD = "without_a_single_place_at_which_a_line_could_be_broken_" * 5


def told(rows: list[Experiment], verification: Verification | None = None, **known) -> Story:
    verdict = f"{PLAN.model} is not verified yet: no kernel is to be used in it"
    advice = verification.advice("night") if verification else [verdict, "python verify.py --tag night   (verifies it)"]
    return Story("night", PLAN, rows, advice, verification, **known)


DIFFS = {row.commit: f"@@ -1 +1 @@\n-BLOCK = 1\n+BLOCK = 2  # {WORD}" for row in NIGHT[5:]}
PROOFS = {t.name: Proof(t.name, NIGHT[-1].commit, GAIN, True, "") for t in TARGETS}
STAGES = {
    "verified": told(NIGHT, FASTER, diffs=DIFFS, proofs=PROOFS, known_by=["a gate"], facts={"machine": "a CPU"}),
    "not verified yet": told(NIGHT[:60], diffs=DIFFS),
    "no experiment": told([]),
    "nothing kept": told([row for row in NIGHT if row.agent == "starter" or row.status != "kept"]),
    "leave it as it is": told(NIGHT[:5], SLOWER),
    "every starter failed": told([replace(row, status="crash", pct_peak=None) for row in NIGHT[:5]]),
    "told from git": told(NIGHT, notes=["results.tsv lacks 249 of the 249 experiments that git has: told from git"]),
    "long words": told([replace(row, description=WORD, agent=WORD[:80], cost_usd=1.0) for row in NIGHT[:30]], notes=[WORD],
                       ideas=[WORD], obstacles=[WORD], uncovered=[(0.1, WORD)], facts={"machine": WORD}),
}  # fmt: skip


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def written(story: Story, folder: Path) -> Path:
    (folder / "report.html").write_text(page(story))
    return folder / "report.html"


# Elements that reach beyond the window, but for those in a container that scrolls.
BEYOND = """[...document.body.querySelectorAll("*")].filter(node => !node.closest(".scroll table")
    && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.outerHTML.slice(0, 200))"""
# Of a chart's text: its size on the screen.
LETTERS = """[...document.querySelectorAll("svg text")].filter(node => node.checkVisibility())
    .map(node => parseFloat(getComputedStyle(node).fontSize) * Math.hypot(node.getScreenCTM().a, node.getScreenCTM().b))"""
DRAWN = """["svg text", ".wide path[style*='--ink']"].map(name => {
    const style = getComputedStyle(document.querySelector(name));
    return name == "svg text" ? style.fill : style.stroke })"""
COLOURS = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_cut_off(tab, tmp_path, stage):
    path = written(STAGES[stage], tmp_path)
    for width in (400, 1400):
        for dark in (False, True):
            assert tab.open(path, width, dark) == []
            tab.js("document.querySelectorAll('details').forEach(node => node.open = true)")
            assert tab.js("document.documentElement.scrollWidth <= innerWidth"), tab.js(BEYOND)
            assert tab.js(BEYOND) == []
            assert min(tab.js(LETTERS), default=10) >= 9.5, "readable on a phone"


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 765


def test_light_and_dark(tab, tmp_path):
    path = written(STAGES["verified"], tmp_path)
    for dark in (False, True):
        tab.open(path, 1400, dark)
        ink, background = map(brightness, tab.js(COLOURS))
        assert (ink > 0.8 and background < 0.2) if dark else (ink < 0.2 and background == 1)
        text, line = tab.js(DRAWN)
        assert all(abs(brightness(colour) - background) > 0.35 for colour in (text, line)), (text, line, background)


SHOWN = (
    "[...document.querySelectorAll('#experiments tbody tr')].filter(row => !row.hidden).map(row => +row.cells[0].innerText)"
)


def test_the_experiments_are_sorted_and_filtered(tab, tmp_path):
    tab.open(written(STAGES["verified"], tmp_path), 1400)
    click = "[...document.querySelectorAll('{}')].find(node => node.innerText == '{}').click()"
    everything = [row.experiment for row in NIGHT]
    assert tab.js(SHOWN) == everything
    tab.js(click.format("#experiments th button", "speedup"))
    assert tab.js(SHOWN) == sorted(everything, key=lambda n: NIGHT[n - 1].speedup_vs_incumbent or 0)
    tab.js(click.format("#experiments th button", "#"))
    tab.js(click.format("#experiments th button", "#"))
    assert tab.js(SHOWN) == everything[::-1]
    tab.js(click.format("#controls button", "reset"))
    assert tab.js(SHOWN) == [row.experiment for row in NIGHT[::-1] if row.status == "kept"]
    tab.js("filter.value = 'RMSNORM start'; filter.dispatchEvent(new Event('input'))")
    assert tab.js(SHOWN) == [5] and tab.js("shown.innerText") == "1 of 249"


def test_only_targets_that_gained_are_plotted(tab, tmp_path):
    tab.open(written(STAGES["verified"], tmp_path), 1400)
    gained = [t.name for t in TARGETS if t.kernel_type != "rmsnorm"]
    assert tab.js("[...document.querySelectorAll('.plots h3')].map(node => node.innerText)") == gained
    assert len(charts.PALETTE) == tab.js(
        "[...document.styleSheets[0].cssRules].find(rule => rule.selectorText == ':root').style.length"
    )
    tab.open(written(STAGES["nothing kept"], tmp_path), 1400)
    assert tab.js("document.querySelector('.plots')") is None


def test_it_prints(tab, tmp_path):
    tab.open(written(STAGES["verified"], tmp_path), 1400, dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert brightness(tab.js(COLOURS)[1]) == 1 and tab.js("getComputedStyle(controls).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="")
