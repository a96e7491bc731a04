"""What 8, 64 and 1,000 workers would do: the driver's own scheduling code on a simulated clock, with recorded durations.

Usage:
    python benchmarks/ray_simulation.py --workers 1 8 64 1000 --out benchmarks/ray_simulation.json

The scheduler, leases and judging again are autokernel.run.fleet, as it runs. Workers, the gate and the agent are simulated:
an experiment takes as long as one that was recorded on that target, and ends as that did; who won against a kernel that was
replaced meanwhile wins again with a chance of one half. The clock also advances by what the driver's code takes here, by an
agent's time for each proposal (they are asked one after the other), and by the time that git, the intent file and
results.tsv take for an experiment, which is measured with the real ledger first.

`throughput`: recorded experiments drawn at random, 100 for each worker but at most 3,000. `efficiency` is the part of the
workers' time in which they judge, from the first to the last experiment, so that beginning and end count. `replay`: the
recorded experiments in their order, each once. It says how soon a night's experiments are through, not what an agent would
propose that learns less from one experiment to the next; beyond the record nothing is known.

Reads:  benchmarks/transcripts/NAME.tsv and NAME.txt
Writes: the file named by --out
"""

import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.agents import Agent, Proposal
from autokernel.agents.scripted import ScriptedAgent
from autokernel.cli.arguments import Parser, count, script, seed
from autokernel.common.verdict import Correctness, Interval, Verdict
from autokernel.history.experiments import STARTER, Experiment, Status, experiment_from
from autokernel.history.progress import Rules, tried
from autokernel.history.workers import Workforce
from autokernel.run.fleet import Event, Fleet, Task
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import Intent
from benchmarks.kills import copy_of_this_clone, edits, started
from benchmarks.scheduler import Record, Share, gain
from benchmarks.simulated_pool import Outcome, SimulatedPool

NO_RULES = Rules(None, None, None, None)
EACH, MOST = 100, 3000  # experiments for each worker, and in all
AGENTS_S = (0.0, 0.1, 30.0)  # for a proposal: none, the built-in tuner's order of magnitude, a language model's
REPLAYED = (1, 2, 4, 8, 16, 32, 64)  # workers
WINS_AGAIN = 0.5
RECORDED = 30  # experiments whose recording is timed


class SimulatedBook:
    """autokernel.run.fleet.Book without git: rows in memory."""

    stopping = ""

    def __init__(self, record: Record, pool: SimulatedPool, agent_s: float, record_s: float) -> None:
        self.plan, self.pool, self.agent_s, self.record_s = record.plan, pool, agent_s, record_s
        self.rows: list[Experiment] = []
        self.proposed = 0

    def signals(self) -> AbstractContextManager[None]:
        return nullcontext()

    def interrupted(self) -> list[Intent]:
        return []

    def low_disk(self) -> str:
        return ""

    def starter(self, target: Share) -> Proposal:
        return Proposal(f"{target.name} starter", "start", STARTER)

    def propose(self, agent: Agent, target: Share, in_flight: Sequence[Proposal]) -> Proposal:
        self.pool.clock_s += self.agent_s
        self.proposed += 1
        return Proposal(f"{target.name} {self.proposed}", "an edit", "simulated")

    def begin(self, target: Share, proposal: Proposal, attempts: int, ticket: int) -> Intent:
        return Intent(len(self.rows) + 1, target.name, proposal, attempts, ticket)

    def conclude(self, intent: Intent, verdict: Verdict, against: str | None = None) -> Experiment:
        self.pool.clock_s += self.record_s
        proposal, number = intent.proposal, len(self.rows) + 1
        known = {"tag": "simulated", "agent": proposal.agent, "tokens": 0, "cost_usd": 0.0}
        row = experiment_from(verdict, experiment=number, description=proposal.hypothesis, target=intent.target, **known)
        self.rows.append(replace(row, commit=f"{number:040d}"))
        return self.rows[-1]

    def source(self, commit: str) -> str:
        return commit


class RecordedGate:
    """Judges as it was recorded: in order, each once, or drawn at random."""

    def __init__(self, record: Record, chance: random.Random, in_order: bool) -> None:
        self.record, self.chance, self.in_order = record, chance, in_order
        self.given: dict[str, Experiment] = {}  # source -> what was recorded
        self.made: Counter[str] = Counter()

    def __call__(self, worker: str, task: Task) -> Outcome:
        again = task.source in self.given
        row = self.given.setdefault(task.source, self._next(task)) if not again else self.given[task.source]
        keep = row.status == Status.KEPT and (not again or self.chance.random() < WINS_AGAIN)
        return row.seconds, verdict_of(row, keep and task.incumbent is not None)

    def _next(self, task: Task) -> Experiment:
        name, rows = task.target.name, self.record.rows[task.target.name]
        if task.incumbent is None:
            return rows[0]
        self.made[name] += 1
        if not self.in_order:
            return self.chance.choice(rows[1:] or rows)
        return self.record.next(name, [rows[0]] * self.made[name])  # which looks at how many there are


def verdict_of(row: Experiment, keep: bool) -> Verdict:
    """As much of a recorded verdict as a row has."""
    passed = row.correctness == Correctness.PASS
    gain_here = Interval(row.speedup_low or 0.0, row.speedup_vs_incumbent, row.speedup_high or math.inf)
    pytorch = row.speedup_vs_pytorch
    return Verdict(
        row.kernel_type,
        "recorded",
        row.device,
        Correctness.PASS if passed else Correctness.FAIL,
        keep,
        "as recorded",
        row.seed,
        bottleneck="compute",
        pct_peak_compute=row.pct_peak,
        speedup_vs_pytorch=pytorch and Interval(pytorch, pytorch, pytorch),
        speedup_vs_incumbent=gain_here if row.speedup_vs_incumbent else None,
        bench_time_seconds=row.seconds,
    )


class TimedPool(SimulatedPool):
    """The clock also advances by what the driver takes between two calls of events()."""

    left_s = 0.0  # when events() returned last, on the clock of this process's own time
    driver_s = 0.0

    def events(self, timeout_s: float) -> Sequence[Event]:
        if self.left_s:
            taken = time.process_time() - self.left_s
            self.driver_s += taken
            self.clock_s += taken
        events = super().events(timeout_s)
        self.left_s = time.process_time()
        return events


def simulate(record: Record, workers: int, experiments: int, agent_s: float, record_s: float, seed: int, in_order: bool):
    """The pool and the book at the end, and the process's memory after half and all of the experiments, in MB."""
    gate = RecordedGate(record, random.Random(seed), in_order)
    pool = TimedPool(workers, gate)
    book = SimulatedBook(record, pool, agent_s, record_s)
    process, memory = psutil.Process(), []

    def tell(workforce: Workforce) -> None:
        if not memory and len(book.rows) > experiments / 2:
            memory.append(process.memory_info().rss / 1e6)

    fleet = Fleet(book, pool, lambda line: None, tell)
    fleet.run(None, NO_RULES, Budget(experiments=experiments))
    assert not fleet.leases and len(tried(book.rows)) == experiments
    return pool, book, [*memory, process.memory_info().rss / 1e6]


def throughput(record: Record, workers: int, agent_s: float, record_s: float, seed: int) -> dict[str, object]:
    experiments = min(EACH * workers, MOST)
    pool, book, memory = simulate(record, workers, experiments, agent_s, record_s, seed, in_order=False)
    return {
        "workers": workers,
        "agent_s": agent_s,
        "experiments": experiments,
        "hours": round(pool.clock_s / 3600, 3),
        "experiments an hour": round(3600 * len(book.rows) / pool.clock_s, 1),
        "efficiency": round(pool.busy_s / pool.clock_s / workers, 3),
        "driver_ms an experiment": round(1e3 * pool.driver_s / len(book.rows), 3),
        "memory_mb at half and at the end": [round(mb, 1) for mb in memory],
    }


def replay(record: Record, workers: int, record_s: float, seed: int) -> dict[str, object]:
    pool, book, _ = simulate(record, workers, record.length - len(record.plan.targets), 0.0, record_s, seed, in_order=True)
    hours = pool.clock_s / 3600
    reached = gain(record.plan, book.rows, over_starters=False)
    return {
        "workers": workers,
        "hours": round(hours, 3),
        "gain": round(reached, 3),
        "gain - 1 an hour": round((reached - 1) / hours, 3),
        "efficiency": round(pool.busy_s / pool.clock_s / workers, 3),
    }


def measured_record_s() -> float:
    """What an experiment costs in files and git, an agent's context included: on two targets in turn, so that the branch
    changes from one to the other each time."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = started(copy_of_this_clone(Path(folder)))
        with workspace.locked():
            loop, agent = Loop(workspace, workspace.plan, None, lambda line: None), ScriptedAgent(edits())
            taken = []
            for ticket in range(1, RECORDED + 1):
                began, target = time.perf_counter(), loop.plan.targets[ticket % 2]
                proposal = loop.propose(agent, target)
                verdict = Verdict(target.kernel_type, target.backend, "cpu", Correctness.PASS, False, "at once", 0)
                loop.conclude(loop.begin(target, proposal, 1, ticket), verdict)
                taken.append(time.perf_counter() - began)
            return median(taken)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--workers", type=count, nargs="+", default=[1, 8, 64, 1000])
    parser.add_argument("--records", nargs="+", default=["cpu-night", "h200-llama7b-night"], metavar="NAME")
    parser.add_argument("--seed", type=seed, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    record_s = measured_record_s()
    words = sys.argv[1:] if argv is None else argv
    figures: dict[str, object] = {
        "command": " ".join(["python benchmarks/ray_simulation.py", *words]),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "git and files, ms an experiment, median": round(1e3 * record_s, 1),
    }
    for name in arguments.records:
        record = Record.read(name)
        seconds = [row.seconds for rows in record.rows.values() for row in rows]
        settings = [(workers, agent_s) for workers in arguments.workers for agent_s in AGENTS_S]
        figures[name] = {
            "seconds an experiment, mean": round(sum(seconds) / len(seconds), 1),
            "throughput": [throughput(record, *setting, record_s, arguments.seed) for setting in settings],
            "replay": [replay(record, workers, record_s, arguments.seed) for workers in REPLAYED],
        }
    print(json.dumps(figures, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(script(main))
