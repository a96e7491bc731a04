"""The loop: propose -> intent -> gate -> commit and ref -> row -> reset. The gate decides; nothing is judged here.

A kill at any point loses nothing: the intent says what was being judged, the ref says that it was, and rows that git has
and results.tsv lacks are written when the run goes on.
"""

import math
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Protocol

from autokernel.agents import Agent, AgentStopped, Bench, Context, PastExperiment, Proposal
from autokernel.build import default_cache
from autokernel.common.preflight import as_called
from autokernel.common.verdict import Correctness, Verdict
from autokernel.common.words import counted, four_figures
from autokernel.gate.checks.ahead import Ahead
from autokernel.gate.timing.autotune import Looked
from autokernel.hardware.machine import gpu_shared, low_disk, turn
from autokernel.history.experiments import STARTER, Experiment, Status, experiment_from
from autokernel.history.ledger import LedgerEntry
from autokernel.history.progress import Rules, Tally, incumbent, move_on, rows_of, tried
from autokernel.history.status import subject
from autokernel.run.environment import Watch
from autokernel.run.scheduler import next_target
from autokernel.run.starters import fastest_first, own_starter, ranked
from autokernel.run.workspace import PLAN, Intent, Workspace
from autokernel.spec import load_spec
from autokernel.target import Plan, Target, starter_source

NOTHING_LEFT = "the agent has nothing left to try"
MAX_ATTEMPTS = 2  # at judging one experiment: one during which the whole run ends twice is not judged again
PAUSES_S = (10.0, 30.0)  # before an experiment that the machine disturbed is judged again
PATIENCE, PATIENCE_S = 0.1, 60.0  # of the budget's time, and at least: what a run spends on that in all
DETAIL_LINES = 30  # of a failure's detail in its commit


class Judge(Protocol):
    """What the loop needs of autokernel.gate.Judge."""

    def examine(
        self,
        source: str,
        target: Target,
        incumbent: str | None = None,
        *,
        seed: int | None = None,
        progress: Callable[[str], None],
    ) -> Verdict: ...


@dataclass(frozen=True)
class Budget:
    """What this call may spend; None is unlimited."""

    seconds: float | None = None
    experiments: int | None = None
    at_least: int = 0  # experiments that are made even if they take longer: a slow machine sees the loop work too
    started_s: float | None = None  # time.monotonic() when the call began, and the experiments that the run had then:
    made_before: int | None = None  # given to a process that goes on with the call of one that was lost

    def begun(self, made: int, now_s: float) -> "Budget":
        """From now on, where it has not begun before; `made`: the experiments that the run has."""
        started_s = now_s if self.started_s is None else self.started_s
        return replace(self, started_s=started_s, made_before=made if self.made_before is None else self.made_before)

    @property
    def deadline_s(self) -> float:
        return math.inf if self.seconds is None else self.started_s + self.seconds

    def may_end(self, made: int) -> bool:
        """Whether the run has as many experiments as are made in any case."""
        return made - self.made_before >= self.at_least

    def over(self, made: int, now_s: float, each_s: float = 0.0) -> str:
        """Why nothing more is begun, of a budget that has begun; empty while something may be.

        each_s: what an experiment takes with its proposal. None begins that would take as much beyond the end as before it.
        """
        left_s = self.deadline_s - now_s
        if left_s <= each_s / 2 and self.may_end(made):
            rest = f" but for {left_s:.0f} s, and an experiment takes {each_s:.0f} s" if left_s >= 1 else ""
            minutes = self.seconds / 60
            return f"the {'minute is' if minutes == 1 else f'{minutes:.3g} minutes are'} used up{rest}"
        if self.experiments is not None and made - self.made_before >= self.experiments:
            return f"{counted(self.experiments, 'experiment')} {'was' if self.experiments == 1 else 'were'} made"
        return ""


def notes(verdict: Verdict) -> str:
    """The gate's words, for the commit: why, and for a refusal where, and the end of what it printed."""
    lines = [verdict.why]
    if verdict.failure:
        lines += [str(verdict.failure), *verdict.failure.detail.strip().splitlines()[-DETAIL_LINES:]]
    if verdict.speedup_vs_incumbent:
        for c in verdict.cases:
            lines.append(f"{c.case}: {four_figures(c.latency_us)} us, vs incumbent {c.speedup_vs_incumbent}")
    return "\n".join(lines)


class GivenUp(KeyboardInterrupt):
    """A signal has come while an agent was asked: nothing is in hand that could be finished."""


class Loop:
    """One run's experiments. Use inside `workspace.locked()`."""

    def __init__(
        self,
        workspace: Workspace,
        plan: Plan,
        judge: Judge,
        say: Callable[[str], None],
        step: Callable[[str], None] = lambda text: None,
        worktree: bool = True,
        pauses_s: Sequence[float] = PAUSES_S,
        about_to_judge: str = "",
    ) -> None:
        """`about_to_judge`: the source that the first experiment will have, which may stand in the run's tree."""
        self.workspace = workspace
        self.plan = plan
        self.judge = judge
        self.say = say
        self.step = step
        self.pauses_s = pauses_s
        self.patience_s = PATIENCE_S
        self.ledger = workspace.ledger
        self.ledger.expect(about_to_judge, *(intent.proposal.source for intent in workspace.read_intents()))
        self.ledger.open(worktree)
        self._tell_of_edits()
        self.entries = self.ledger.entries()
        self.stopping, self.stopped_by = "", 0  # by which signal
        self._asking = False  # an agent, who may take minutes
        self._sources: dict[str, str] = {}
        self._starters: dict[str, list[Proposal]] = {}  # by target, the fastest first, where they are known beforehand
        self._told = False
        self._recover_rows()

    @property
    def rows(self) -> list[Experiment]:
        return [entry.row for entry in self.entries]

    def _recover_rows(self) -> None:
        """Write the rows that git has and results.tsv lacks."""
        written = {row.experiment for row in self.workspace.log.read() if row.tag == self.workspace.tag}
        missing = [row for row in self.rows if row.experiment not in written]
        if self.entries:
            last = self.rows[-1]
            made = tried(self.rows)
            kept = sum(row.status == Status.KEPT for row in made)
            told = f"{counted(made, 'experiment')}, {kept} kept, beside {counted(len(self.rows) - len(made), 'starter')}"
            self.say(f"resuming {self.workspace.tag}: {told}; last {subject(last)}")
        if missing:
            self.workspace.log.append(missing)
            self.say(f"wrote {len(missing)} rows again that were only in git: {[row.experiment for row in missing]}")

    def interrupted(self) -> list[Intent]:
        """The experiments that a kill interrupted, to be judged again: all that have an intent and no row."""
        commits = {row.experiment: row.commit for row in self.rows}
        left = []
        for intent in self.workspace.read_intents():
            # Its number may be another's by now: that of a worker's experiment is the one it was to have.
            commit = commits.get(intent.experiment)
            if commit and self.source(commit) == intent.proposal.source:
                self.workspace.clear_intent(intent)
            else:
                left.append(again := replace(intent, attempts=intent.attempts + 1))
                if again.attempts <= MAX_ATTEMPTS:
                    self.say(f"{_named(intent)} was interrupted while it was judged; judging it again")
        return left

    def run(self, agent: Agent, rules: Rules, budget: Budget) -> str:
        """Experiments until the budget is used, nothing is left to try, or a signal; returns the reason in words."""
        budget = budget.begun(len(tried(self.rows)), time.monotonic())
        self.patience_s = max(PATIENCE_S, PATIENCE * (budget.seconds or 0))
        exhausted: set[str] = set()
        previous = None
        started_s, took_s = [], []  # by starters and by experiments
        with self.signals():
            for intent in self.interrupted():
                if not self.stopping:
                    self._judge(self.plan.target(intent.target), intent.proposal, intent.attempts, intent.ticket)
            self._rank_starters()
            while not self.stopping:
                began_s, made = time.monotonic(), len(tried(self.rows))
                if over := budget.over(made, began_s, median(took_s or started_s or [0.0])):
                    return over
                if full := self.low_disk():
                    self._wait_for_space(full, budget.deadline_s)
                    continue
                choice = next_target(self.plan, self.rows, rules, exhausted)
                if choice is None:
                    return "nothing is left to try on any target"
                target = choice.target
                if previous is not target:
                    self._announce(previous, choice.reason, target, rules, exhausted)
                    previous = target
                if not incumbent(rows_of(target, self.rows)):
                    self.start(target)
                    started_s.append(time.monotonic() - began_s)
                    continue
                judged_s = Tally.of(rows_of(target, self.rows)).seconds_each
                until_s = budget.deadline_s - judged_s / 2
                if not budget.may_end(made):
                    until_s = max(until_s, time.monotonic() + judged_s)
                try:
                    proposal = self._asked(agent, replace(self.context(target), until_s=until_s))
                except AgentStopped as reason:
                    return str(reason)
                if proposal is None and self.stopping:
                    break
                if proposal is None and (over := budget.over(made, time.monotonic(), judged_s)):
                    return over
                if proposal is None:
                    exhausted.add(target.name)
                    continue
                self.attempt(target, proposal)
                took_s.append(time.monotonic() - began_s)
        return self.stopping

    def _announce(self, previous: Target | None, reason: str, target: Target, rules: Rules, exhausted: set[str]) -> None:
        if previous:
            why = NOTHING_LEFT if previous.name in exhausted else move_on(rows_of(previous, self.rows), rules)
            self.say(f"leaving {previous.name}: {why or 'another target promises more for the time'}")
        self.say(f"target {target.name}: {reason}")

    def start(self, target: Target, source: str | None = None) -> Experiment:
        """A target's first row: its starter, or another kernel to start from, judged; the next one if it is refused."""
        if source:
            return self._judge(target, Proposal(source, "start from a given kernel", STARTER))
        for proposal in self._starters.pop(target.name, None) or fastest_first(target, self._bench):
            row = self._judge(target, proposal)
            if row.status != Status.FAILED:
                break
        return row

    def _rank_starters(self) -> None:
        """On a GPU, where compilers take most of a look's time and cores are free for them: for all targets at once."""
        waiting = [target for target in self.plan.targets if not rows_of(target, self.rows)]
        if self._bench and self.plan.device != "cpu" and len(waiting) > 1 and not self.stopping:
            self._starters = ranked(waiting, self._bench, lambda: self.stopping)

    def starter(self, target: Target) -> Proposal:
        """What a target's first task says where several workers judge: the worker looks for a faster one."""
        return own_starter(target)

    def attempt(self, target: Target, proposal: Proposal) -> Experiment:
        """One experiment against the target's incumbent; its starter is judged first if it has none."""
        if not rows_of(target, self.rows):
            self.start(target)
        return self._judge(target, proposal)

    def context(self, target: Target) -> Context:
        self._take_up(target)
        best = self.incumbent_source(target)
        assert best is not None, f"{target.name} has no incumbent: the scheduler leaves a target whose starter fails"
        return context_of(target, self.entries, self.source, best, self.ledger.tree, self._bench)

    @property
    def _bench(self) -> "InTurn | None":
        return InTurn(self.judge, self.step) if isinstance(self.judge, Bench) else None

    def propose(self, agent: Agent, target: Target, in_flight: Sequence[Proposal] = ()) -> Proposal | None:
        """The agent's next edit while others are being judged: it sees those as trials that are not decided."""
        context = self.context(target)
        unknown = _unjudged(target, "this is being judged")
        judged = [
            PastExperiment(_row(self.workspace.tag, 0, target, proposal, unknown), proposal.source, unknown.why)
            for proposal in in_flight
        ]
        proposal = self._asked(agent, replace(context, trials=(*context.trials, *judged)))
        if proposal:
            self.ledger.expect(proposal.source)
        self._reset()
        return proposal

    def _asked(self, agent: Agent, context: Context) -> Proposal | None:
        """What the agent answers; None where a signal comes before it does, for which it is not waited."""
        try:
            self._asking = True
            try:
                return agent.propose(context)
            finally:
                self._asking = False
        except GivenUp:
            return None

    def _reset(self) -> None:
        if self.ledger.has_tree:
            self.ledger.reset()
        self._tell_of_edits()

    def _tell_of_edits(self) -> None:
        while self.ledger.aside:
            kept = os.path.relpath(self.ledger.aside.pop())
            judges = as_called(f"python orchestrate.py record {shlex.quote(kept)} judges it")
            self.say(f"kernel.py of the run's tree was edited by hand: put aside as {kept} ({judges})")

    def incumbent_source(self, target: Target) -> str | None:
        """The target's best kernel, read from git."""
        best = incumbent(rows_of(target, self.rows))
        return best and self.source(best.commit)

    def source(self, commit: str) -> str:
        """The kernel.py of an experiment."""
        if commit not in self._sources:
            self._sources[commit] = self.ledger.source(commit)
        return self._sources[commit]

    def _take_up(self, target: Target) -> None:
        """Let the branch's kernel.py be this target's incumbent, or its starter: a change of target is its own commit."""
        best = self.incumbent_source(target)
        wanted = starter_source(target) if best is None else best
        if self.ledger.source(self.ledger.head) != wanted:
            self.ledger.start_target(
                target.name, wanted, "put in its starter" if best is None else "put back its best kernel"
            )
            self._reset()

    def begin(self, target: Target, proposal: Proposal, attempts: int = 1, ticket: int = 0) -> Intent:
        """Note what is about to be judged: after a kill it is judged again."""
        intent = Intent(self._next_number, target.name, proposal, attempts, ticket)
        self.workspace.write_intent(intent)
        return intent

    @property
    def _next_number(self) -> int:
        return max((row.experiment for row in self.rows), default=0) + 1

    def _judge(self, target: Target, proposal: Proposal, attempts: int = 1, ticket: int = 0) -> Experiment:
        intent = self.begin(target, proposal, attempts, ticket)
        if self.ledger.has_tree:
            self.ledger.write(proposal.source)
        if attempts <= MAX_ATTEMPTS:
            best = self.incumbent_source(target)
            step = partial(self._step, intent.experiment, target, proposal)
            verdict = self.undisturbed(
                target,
                lambda: self.judge.examine(
                    proposal.source, target, incumbent=best, seed=secrets.randbelow(2**31), progress=step
                ),
            )
        else:
            verdict = gave_up(target)
        return self.conclude(intent, verdict)

    def conclude(self, intent: Intent, verdict: Verdict, against: str | None = None) -> Experiment:
        """Commit and ref, row, reset: what was begun has happened. Its number is the next one, so that the numbers of what
        several workers judge tell the order in which it was kept. `against`: the commit of the kernel that it was judged
        against, where another one has become the incumbent meanwhile."""
        target, proposal = self.plan.target(intent.target), intent.proposal
        if not self.workspace.folder.exists():
            self.workspace.folder.mkdir(parents=True)
            self.plan.write(self.workspace / PLAN)
            self.say(f"{self.workspace.folder} was deleted while the run worked: its plan is written again")
        if intent.experiment != self._next_number:
            intent = replace(intent, experiment=self._next_number)
            self.workspace.write_intent(intent)
        if proposal.agent != STARTER:  # whose own commit is the change of target
            self._take_up(target)
        row = _row(self.workspace.tag, intent.experiment, target, proposal, verdict)
        told = notes(verdict) + (f"\njudged against {against[:12]}, the incumbent when it was begun" if against else "")
        row = self.ledger.record(row, proposal.source, told)
        self.entries.append(LedgerEntry(row, told))
        self.workspace.log.append([row])
        self._reset()
        self.workspace.clear_intent(intent)
        self.say(f"{subject(row)}{'' if row.status == Status.KEPT else f' ({verdict.why})'}")
        return row

    def undisturbed(self, target: Target, examine: Callable[[], Verdict]) -> Verdict:
        """The gate's verdict, alone on the device. What the machine disturbed is waited out and judged again.

        Raises MachineFault where this process cannot go on.
        """
        verdict = None
        for pause_s in (*self.pauses_s, None):
            began = time.monotonic()
            fault, last = gpu_shared(target.device), self.stopping or pause_s is None or self.patience_s <= 0
            if not fault or last:
                with turn(target.device, self._waiting, lambda: self.stopping):
                    watch = Watch(target.device, self.folders, self.say)
                    verdict = examine()
                fault = fault or watch.fault(verdict)
            if not fault or last or self.stopping:  # as it was told to be while the gate was at work
                break
            self.say(f"{fault}: judged again in {pause_s:g} s")
            self._sleep(pause_s)
            self.patience_s -= time.monotonic() - began
            if self.stopping and verdict:
                break
        return verdict.as_undecided(fault) if fault else verdict

    def _waiting(self, text: str) -> None:
        """The first wait for the device gets a line that stays: runs that take turns wait at every experiment."""
        (self.step if self._told else self.say)(text)
        self._told = True

    @property
    def folders(self) -> list[Path]:
        """On whose disks the run writes."""
        return [self.workspace.folder, Path(tempfile.gettempdir()), default_cache()]

    def low_disk(self) -> str:
        """Which disk that the run writes on is all but full, in words; empty if none is."""
        return low_disk(self.folders)

    def _wait_for_space(self, full: str, deadline: float) -> None:
        self.say(f"{full}: waiting for space")
        while self.low_disk() and not self.stopping and time.monotonic() < deadline:
            self._sleep(1)

    def _sleep(self, seconds: float) -> None:
        """A pause that a signal ends."""
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            time.sleep(0.1)

    def _step(self, number: int, target: Target, proposal: Proposal, stage: str) -> None:
        kept = sum(row.status == Status.KEPT for row in tried(self.rows))
        self.step(f"#{number} {target.name}: {proposal.hypothesis[:60]} [{stage}] ({kept} kept of {len(tried(self.rows))})")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM lets the experiment in hand be finished, and gives up the question that an agent is
        being asked; the second stops at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopping:
                if callable(earlier := before[number]):  # a script's, which knows its exit status
                    earlier(number, frame)
                raise KeyboardInterrupt
            self.stopping, self.stopped_by = f"stopped by {signal.Signals(number).name}", number
            if self._asking:
                self.say("stopping: what the agent was asked is given up (once more: stop now)")
                raise GivenUp
            self.say("stopping after the experiment in hand (once more: stop now)")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except KeyboardInterrupt:  # says nothing about what was being judged
            for intent in self.workspace.read_intents():
                self.workspace.write_intent(replace(intent, attempts=intent.attempts - 1))
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def context_of(
    target: Target,
    entries: Sequence[LedgerEntry],
    source: Callable[[str], str],
    incumbent: str,
    tree: Path | None = None,
    bench: Bench | None = None,
) -> Context:
    """What an agent may know of a target; source(commit) is the kernel of an experiment."""
    entries = [entry for entry in entries if entry.row.kernel_type == target.kernel_type]
    made = [PastExperiment(entry.row, source(entry.row.commit), entry.notes) for entry in entries]
    trials = tuple(trial for trial in made if trial.row.target == target.name)
    elsewhere = tuple(trial for trial in made if trial.row.target != target.name)
    return Context(target, load_spec(target.kernel_type), incumbent, trials, tree, elsewhere, bench)


@dataclass(frozen=True)
class InTurn:
    """The gate as an agent may ask it: alone on the device, without a verdict that counts."""

    judge: Bench
    step: Callable[[str], None]

    def examine(self, source: str, target: Target, incumbent: str | None = None, quick: bool = True) -> Verdict:
        self.step(f"a quick look at an edit of {target.name}")
        with turn(target.device, self.step):
            return self.judge.examine(source, target, incumbent=incumbent, quick=True)

    def profile(self, source: str, target: Target) -> str:
        with turn(target.device, self.step):
            return self.judge.profile(source, target)

    def autotune(self, sources: Iterable[str], target: Target, seconds: float, finals: bool = True) -> list[Looked]:
        def progress(done: int, of: int) -> None:
            self.step(f"autotuning on {target.name}: {done} of {of} settings compiled")

        with turn(target.device, self.step):
            return self.judge.autotune(sources, target, seconds, progress, finals)

    def compile_ahead(self, wanted: Sequence[Ahead]) -> None:
        def progress(done: int, of: int) -> None:
            self.step(f"compiling what the targets may begin with: {done} of {of}")

        with turn(wanted[0][1].device, self.step):
            self.judge.compile_ahead(wanted, progress)


def _named(intent: Intent) -> str:
    return f"the experiment in {intent.file}" if intent.ticket else f"#{intent.experiment}"


def _row(tag: str, number: int, target: Target, proposal: Proposal, verdict: Verdict) -> Experiment:
    return experiment_from(
        verdict,
        experiment=number,
        tag=tag,
        description=proposal.hypothesis,
        target=target.name,
        agent=proposal.agent,
        tokens=proposal.tokens,
        cost_usd=proposal.cost_usd,
    )


def gave_up(target: Target, who: str = "the run") -> Verdict:
    return _unjudged(target, f"{who} ended {MAX_ATTEMPTS} times while this was judged; it is not judged again")


def _unjudged(target: Target, reason: str) -> Verdict:
    """An undecided verdict of what no gate has seen to its end."""
    verdict = Verdict(target.kernel_type, target.backend, target.device, Correctness.CRASH, keep=False, why="", seed=0)
    return verdict.as_undecided(reason)
