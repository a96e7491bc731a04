"""What people see while a run works: lines that stay and, on a terminal, below them where the run stands."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autokernel.agents import PastExperiment
from autokernel.agents.playbook import fitting_tier
from autokernel.common.console import console
from autokernel.common.words import counted
from autokernel.history.experiments import Experiment, Status
from autokernel.history.progress import incumbent, loop_gain, rows_of, tried
from autokernel.history.status import subject
from autokernel.report.log import STYLES
from autokernel.run.loop import Budget
from autokernel.run.scheduler import gain_in_model
from autokernel.target import Plan, Target

VERDICTS = 5  # the last ones shown


@dataclass(frozen=True)
class Run:
    """What the display follows: the rows are asked for anew each time it is drawn."""

    tag: str
    plan: Plan
    rows: Callable[[], Sequence[Experiment]]
    budget: Budget  # with the time at which the call began, and the experiments that the run had then

    def made(self) -> int:
        return len(tried(self.rows())) - self.budget.made_before


class Screen(NamedTuple):
    say: Callable[[str], None]  # a line that stays
    step: Callable[[str], None]  # what is being done: a terminal shows it while it lasts
    phase: Callable[[str], None]  # the same, when it lasts so long that elsewhere it gets a line
    follow: Callable[[Run], None]  # the run whose state a terminal shows from now on


@contextmanager
def narrator(out: Console | None = None) -> Iterator[Screen]:
    """The screen of a run: plain lines where there is no terminal."""
    out = out or console()

    def say(line: str) -> None:
        out.print(line, markup=False, soft_wrap=True)

    if not out.is_terminal:
        yield Screen(say, lambda text: None, lambda text: say(f"  {text}"), lambda run: None)
        return
    picture = _Picture()
    with Live(get_renderable=picture.draw, console=out, refresh_per_second=4, transient=True):
        yield Screen(say, picture.step, picture.step, picture.follow)


class _Picture:
    def __init__(self) -> None:
        self.spinner = Spinner("line", "starting")
        self.run: Run | None = None

    def step(self, text: str) -> None:
        self.spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))

    def follow(self, run: Run) -> None:
        self.run = run

    def draw(self) -> RenderableType:
        return panel(self.run, self.spinner, time.monotonic()) if self.run else self.spinner


def panel(run: Run, doing: RenderableType, now_s: float) -> Panel:
    """Target, tier, best so far, last verdicts, estimate for the model, pace, cost and time left."""
    rows = run.rows()
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="bold", width=6, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_row("now", doing)
    if rows:
        target = run.plan.target(rows[-1].target)
        grid.add_row("target", target_line(target, rows_of(target, rows)))
        grid.add_row("best", best_line(rows_of(target, rows)))
    for label, row in zip(["last", *[""] * (VERDICTS - 1)], reversed(rows[-VERDICTS:])):
        grid.add_row(label, Text(subject(row), style=STYLES.get(row.status, "red")))
    grid.add_row("model", model_line(run.plan, rows))
    grid.add_row("pace", pace_line(run, now_s))
    return Panel(grid, title=f"run {run.tag}: {run.plan.model} on {run.plan.device}", title_align="left")


def target_line(target: Target, rows: Sequence[Experiment]) -> str:
    tier = fitting_tier([PastExperiment(row, "", "") for row in rows])
    return f"{target.name}, {target.share:.1%} of the time, playbook tier {tier}"


def best_line(rows: Sequence[Experiment]) -> str:
    best = incumbent(rows)
    if best is None:
        return "nothing correct yet"
    parts = [f"{loop_gain(rows):.2f}x its starter (#{best.experiment})"]
    parts += [f"{best.speedup_vs_pytorch:.2f}x PyTorch eager"] if best.speedup_vs_pytorch else []
    parts += [f"{best.pct_peak:.0f} % of the peak that bounds it"] if best.pct_peak else []
    return ", ".join(parts)


def estimated_speedup(plan: Plan, rows: Sequence[Experiment]) -> float:
    """Of the model, end to end, by Amdahl's law from the best kernels' own speedups; one that is slower is left out."""
    left = 1.0
    for target in plan.targets:
        gain = max(gain_in_model(target, incumbent(rows_of(target, rows))), 1.0)
        left -= target.share * (1 - 1 / gain)
    return 1 / left


def model_line(plan: Plan, rows: Sequence[Experiment]) -> str:
    gain, before_ms = estimated_speedup(plan, rows), plan.model_latency_us / 1e3
    return f"about {gain:.2f}x end to end, {before_ms:.1f} ms -> {before_ms / gain:.1f} ms (by Amdahl's law, not verified)"


def pace_line(run: Run, now_s: float) -> str:
    rows, made = run.rows(), run.made()
    hours = max(now_s - run.budget.started_s, 1e-9) / 3600
    kept = sum(row.status == Status.KEPT for row in tried(rows))
    parts = [f"{made / hours:.0f} experiments/h", f"{kept} kept of {len(tried(rows))}"]
    parts += [f"${sum(row.cost_usd for row in rows):.2f}, {sum(row.tokens for row in rows):,} tokens"]
    return ", ".join([*parts, time_left(run, now_s)])


def time_left(run: Run, now_s: float) -> str:
    """Until the budget is used up, in hours and minutes; in experiments where these are what is limited."""
    if run.budget.seconds is not None:
        seconds = max(run.budget.started_s + run.budget.seconds - now_s, 0)
        return f"{timedelta(seconds=round(seconds))} left"
    if run.budget.experiments is not None:
        return f"{counted(max(run.budget.experiments - run.made(), 0), 'experiment')} left"
    return "until nothing is left to try"
