"""Which order of targets gains most: the public tool's, and ours, replayed on recorded runs.

Usage:
    python benchmarks/scheduler.py --fit cpu-compact-llama-fp32 --out benchmarks/scheduler.json \\
        --judge cpu-night h200-compact-llama-fp16 h200-gpt2-fp16 h200-llama7b-night

A recorded run has, for every target, its starter and a sequence of experiments with their verdicts. An agent proposes from
the history of the target alone, so each sequence stands for what would have come in any order of targets: a replay takes
the next one of whichever target a policy chooses. Where a record ends nothing more is kept, and an experiment takes the
mean time. The public tool (RightNow-AI/autokernel, orchestrate.py) works through the targets by share of the model's
time, leaves one by four rules (5 reverts in a row, 90 % of peak, 2 hours, 2x), and does not come back.

The gain is the model's, by Amdahl's law, from each target's best kernel: over PyTorch's own operation, which a starter
that is faster replaces; `over starters` counts only what experiments added. The area under the curve of gain - 1 over
experiments (starters included, as they take their time too) is compared; and over hours. The weights of ours are chosen
on the runs named by --fit, and told on those named by --judge.

Reads:  benchmarks/transcripts/NAME.tsv, and the shares in NAME.txt (its lines "  49.3%  target (…)")
Writes: the file named by --out
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.history.experiments import STARTER, Experiment, ExperimentLog, Status
from autokernel.history.progress import Rules, incumbent, move_on, rows_of
from autokernel.run.scheduler import Weights, next_target
from autokernel.spec import ROOT

RECORDS = ROOT / "benchmarks/transcripts"
GRID = {"memory": (0.7, 0.9, 1.0), "bonus": (0.0, 0.1, 0.3), "pull": (1.0, 1.5, 2.0, 4.0)}


@dataclass(frozen=True)
class Share:
    """A target, as much of it as the scheduler looks at."""

    name: str
    share: float
    to_beat: ClassVar[float] = 1.0  # the records know eager mode alone

    def over_model(self, speedup: float) -> float:
        """The models of the records were captured as they are."""
        return speedup


@dataclass(frozen=True)
class Shares:
    """A plan, as much of it as the scheduler looks at."""

    targets: tuple[Share, ...]


@dataclass(frozen=True)
class Record:
    name: str
    plan: Shares
    rows: dict[str, list[Experiment]]  # by target, in order

    @staticmethod
    def read(name: str) -> "Record":
        rows = ExperimentLog(RECORDS / f"{name}.tsv").read()
        shares = re.findall(r"(?m)^ +([\d.]+)%  (\S+) \(\d+ shapes\)$", (RECORDS / f"{name}.txt").read_text())
        targets = tuple(Share(target, float(share) / 100) for share, target in shares)
        return Record(name, Shares(targets), {t.name: rows_of(t, rows) for t in targets})

    @property
    def length(self) -> int:
        return sum(map(len, self.rows.values()))

    def next(self, target: str, made: Sequence[Experiment]) -> Experiment:
        """The next experiment on a target, of which there were `made` so far in the replay."""
        recorded, number = self.rows[target], sum(row.target == target for row in made)
        if number < len(recorded):
            return recorded[number]
        proper = recorded[1:] or recorded
        seconds = sum(row.seconds for row in proper) / len(proper)
        return replace(recorded[-1], status=str(Status.RESET), agent="beyond the record", seconds=seconds)


Policy = Callable[[Shares, Sequence[Experiment]], Share | None]


def static_order(plan: Shares, rows: Sequence[Experiment]) -> Share | None:
    """The public tool's: by share, each until a rule says to leave it, and never back."""
    left = {target.name for target in plan.targets if move_on(rows_of(target, rows), Rules())}
    for target in sorted(plan.targets, key=lambda t: -t.share):
        if target.name not in left:
            return target
    return None


def ours(weights: Weights) -> Policy:
    def choose(plan: Shares, rows: Sequence[Experiment]) -> Share | None:
        choice = next_target(plan, rows, Rules(), weights=weights)
        return choice and choice.target

    return choose


def gain(plan: Shares, rows: Sequence[Experiment], over_starters: bool) -> float:
    """The model's speedup with each target's best kernel so far."""
    left = 1.0
    for target in plan.targets:
        of_target = rows_of(target, rows)
        speedup = 1.0
        if over_starters:
            for row in of_target:
                speedup *= (row.speedup_vs_incumbent or 1.0) if row.status == Status.KEPT and row.agent != STARTER else 1.0
        elif best := incumbent(of_target):
            speedup = max(best.speedup_vs_pytorch or 1.0, 1.0)  # one that is slower is left out of the model
        left -= target.share * (1 - 1 / speedup)
    return 1 / left


@dataclass(frozen=True)
class Curve:
    gains: list[float]  # after each experiment
    hours: list[float]  # when it had ended

    def area(self, length: int) -> float:
        """Mean gain - 1 over so many experiments; a policy that has stopped keeps what it has."""
        gains = self.gains[:length] + self.gains[-1:] * (length - len(self.gains))
        return sum(g - 1 for g in gains) / length

    def area_in_time(self, hours: float) -> float:
        """Mean gain - 1 over so many hours."""
        ends = [min(end, hours) for end in self.hours[1:]] + [hours]
        return sum((g - 1) * max(end - min(start, hours), 0) for g, start, end in zip(self.gains, self.hours, ends)) / hours


def replay(record: Record, policy: Policy, over_starters: bool) -> Curve:
    rows: list[Experiment] = []
    gains, hours, clock_s = [], [], 0.0
    while len(rows) < record.length and (target := policy(record.plan, rows)):
        rows.append(record.next(target.name, rows))
        clock_s += rows[-1].seconds
        gains.append(gain(record.plan, rows, over_starters))
        hours.append(clock_s / 3600)
    return Curve(gains, hours)


def compare(record: Record, weights: Weights, over_starters: bool) -> dict[str, object]:
    """Static order and ours on one recorded run."""
    static, own = (replay(record, policy, over_starters) for policy in (static_order, ours(weights)))
    hours = sum(row.seconds for rows in record.rows.values() for row in rows) / 3600
    steps = sorted({1, 2, 3, 5, 8, 13, 21, 34, record.length} & set(range(1, record.length + 1)))

    def at(curve: Curve) -> dict[int, float]:
        return {n: round(curve.gains[min(n, len(curve.gains)) - 1], 3) for n in steps}

    def ratio(own_area: float, static_area: float) -> float | None:
        return round(own_area / static_area, 2) if static_area > 0 else None

    return {
        "experiments": record.length,
        "area ratio": ratio(own.area(record.length), static.area(record.length)),
        "area ratio in time": ratio(own.area_in_time(hours), static.area_in_time(hours)),
        "gain after N, static": at(static),
        "gain after N, ours": at(own),
    }


def fit(records: Sequence[Record]) -> Weights:
    """The weights with the largest area, over both kinds of gain; the first of those that do alike."""
    candidates = [Weights(**dict(zip(GRID, values))) for values in product(*GRID.values())]

    def score(weights: Weights) -> float:
        curves = [(replay(r, ours(weights), kind), r) for r in records for kind in (False, True)]
        return sum(curve.area(record.length) for curve, record in curves)

    default = Weights()
    return max([default, *candidates], key=lambda w: (round(score(w), 9), w == default))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--fit", nargs="+", default=["cpu-compact-llama-fp32"], metavar="NAME")
    parser.add_argument("--judge", nargs="+", default=["h200-gpt2-fp16", "h200-compact-llama-fp16"], metavar="NAME")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    weights = fit([Record.read(name) for name in arguments.fit])
    figures: dict[str, object] = {"fitted on": arguments.fit, "weights": asdict(weights)}
    for name in [*arguments.judge, *arguments.fit]:
        record = Record.read(name)
        figures[name] = {
            "over PyTorch": compare(record, weights, over_starters=False),
            "over starters": compare(record, weights, over_starters=True),
        }
    print(json.dumps(figures, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(script(main))
