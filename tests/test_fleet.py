"""The driver of many workers: who judges what, and what becomes of answers that are late, double, lost or out of date."""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import replace

import pytest
import torch

from autokernel.agents import AgentStopped, Context, Proposal
from autokernel.cli import commands
from autokernel.cli.orchestrate import make_parser
from autokernel.cli.pipeline import Workers
from autokernel.common.verdict import Correctness, Verdict
from autokernel.gate import Interval
from autokernel.hardware.machine import MachineFault, turn
from autokernel.history.experiments import STARTER, Status
from autokernel.history.progress import Rules, Tally, incumbent, rows_of, tried
from autokernel.history.status import status
from autokernel.history.workers import WorkerRecord, Workforce, read_workforce
from autokernel.report.summary import HTML, write_report
from autokernel.run.canary import Canaries
from autokernel.run.fleet import NO_WORKER_S, Answer, Event, Fleet, Task
from autokernel.run.loop import MAX_ATTEMPTS, Budget, Loop
from autokernel.run.scheduler import next_target
from autokernel.run.workspace import PLAN, REPORT, Workspace
from autokernel.spec import ROOT
from autokernel.target import Plan, default_target, starter_source
from benchmarks.kills import Coin
from benchmarks.ray_simulation import RecordedGate, SimulatedBook
from benchmarks.scheduler import Record
from benchmarks.simulated_pool import SimulatedPool
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh, state  # noqa: F401  `clone` is a fixture

TARGETS = tuple(
    replace(default_target(name, "cpp", "cpu", torch.float32), share=share)
    for name, share in (("rmsnorm", 0.5), ("softmax", 0.3))
)
NO_RULES = Rules(None, None, None, None)
FASTER, SLOWER = "# faster", "# slower"


def verdict(task: Task, keep: bool = False, undecided: str = "") -> Verdict:
    gain = Interval(1.1, 1.2, 1.3) if keep else Interval(0.8, 0.9, 1.0)
    made = Verdict(
        task.target.kernel_type,
        "cpp",
        "cpu",
        Correctness.PASS,
        keep and task.incumbent is not None,
        "as the test says",
        7,
        speedup_vs_pytorch=Interval(1.0, 1.5, 2.0),
        speedup_vs_incumbent=gain if task.incumbent else None,
        bench_time_seconds=10.0,
    )
    return made.as_undecided(undecided) if undecided else made


def by_source(worker: str, task: Task) -> tuple[float, Verdict]:
    """Ten seconds each; who says that it is faster is."""
    return 10.0, verdict(task, FASTER in task.source)


class Numbered:
    """An agent that proposes edits without end, each of the incumbent that it is shown; `words` are appended in turn."""

    def __init__(self, *words: str, most: int = 10**6) -> None:
        self.words, self.most, self.made = words or (SLOWER,), most, 0
        self.seen: list[Context] = []

    def propose(self, context: Context) -> Proposal | None:
        if self.made == self.most:
            return None
        self.seen.append(context)
        self.made += 1
        word = self.words[(self.made - 1) % len(self.words)]
        return Proposal(f"{context.incumbent}\n{word} {self.made}\n", f"edit {self.made}", "numbered")


@pytest.fixture
def workspace(clone) -> Workspace:  # noqa: F811
    workspace = Workspace(clone, "night")
    Plan("test", {}, "cpu", 1000.0, TARGETS).write(workspace / PLAN)
    return workspace


@pytest.fixture
def begun(workspace) -> Workspace:
    """A run whose starters were kept."""
    ledger = workspace.ledger
    ledger.open()
    for number, target in enumerate(TARGETS, 1):
        row = replace(
            ROW,
            experiment=number,
            target=target.name,
            agent=STARTER,
            speedup_vs_incumbent=None,
            kernel_type=target.kernel_type,
        )
        workspace.log.append([ledger.record(row, starter_source(target))])
    return workspace


def fleet_of(workspace: Workspace, pool: SimulatedPool, said: list[str], **options: object) -> Fleet:
    return Fleet(Loop(workspace, workspace.plan, None, said.append), pool, said.append, **options)


def check(workspace: Workspace) -> list:
    """Git, results.tsv and the tree say the same; nothing is open, lost or doubled; kept in the order of rows."""
    rows, ledger = workspace.log.read(), workspace.ledger
    assert [row.experiment for row in rows] == list(range(1, len(rows) + 1))
    assert [row.row() for row in rows] == [entry.row.row() for entry in ledger.entries()]
    assert sh("git", "fsck", "--strict", "--no-dangling", cwd=workspace.root) == ""
    assert workspace.read_intents() == []
    assert (ledger.tree / "kernel.py").read_text() == ledger.source(ledger.head)
    kept = [row for row in rows if row.status == Status.KEPT]
    on_branch = sh("git", "rev-list", f"autokernel/{workspace.tag}", cwd=workspace.root).split()
    assert [row.commit for row in reversed(kept)] == [commit for commit in on_branch if commit in {r.commit for r in kept}]
    return rows


def test_every_worker_has_work_other_targets_first(workspace, clone):  # noqa: F811
    before, given = state(clone), []

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        given.append((pool.now(), worker, task.target.name, task.incumbent))
        return by_source(worker, task)

    pool, agent = SimulatedPool(3, judge), Numbered()
    reason = fleet_of(workspace, pool, []).run(agent, NO_RULES, Budget(experiments=9))
    assert reason == "9 experiments were made"
    rows = check(workspace)
    assert Counter(row.agent for row in rows) == {STARTER: 2, "numbered": 9}
    starters = [one for one in given if one[3] is None]
    assert [name for _, _, name, _ in starters] == [target.name for target in TARGETS]  # at once, each once
    assert {at for at, *_ in starters} == {0.0}
    later = [one for one in given if one[0] == 10.0]
    assert len(later) == 3 and {name for _, _, name, _ in later} == {target.name for target in TARGETS}
    assert pool.clock_s == 40.0  # two starters, then nine experiments on three workers
    assert state(clone) == before


def test_an_agent_sees_what_is_being_judged_on_its_target(begun):
    agent = Numbered()
    fleet_of(begun, SimulatedPool(4, by_source), []).run(agent, NO_RULES, Budget(experiments=4))
    third = agent.seen[2]
    (waiting,) = [trial for trial in third.trials if trial.row.agent != STARTER]
    assert waiting.row.status == Status.UNDECIDED and "being judged" in waiting.notes and SLOWER in waiting.source
    assert all(context.tree and context.incumbent == starter_source(context.target) for context in agent.seen)


def test_who_won_against_a_kernel_that_was_replaced_is_judged_again(begun):
    """Three winners against one incumbent: each is kept only against the one that was kept before it."""
    judged, said = [], []

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        judged.append((task.source, task.incumbent))
        again = sum(source == task.source for source, _ in judged) > 1
        return 10.0 + len(judged), verdict(task, keep=not again or "edit" not in task.source)

    one = replace(begun.plan, targets=TARGETS[:1])
    pool = SimulatedPool(3, judge)
    fleet = Fleet(Loop(begun, one, None, said.append), pool, said.append)
    fleet.run(Numbered(FASTER, most=3), NO_RULES, Budget())
    rows = check(begun)[2:]
    assert [row.status for row in rows] == ["kept", "kept", "kept"] and len(judged) == 6
    sources = [begun.ledger.source(row.commit) for row in rows]
    final = {source: incumbent for source, incumbent in judged}  # what each was judged against last
    assert [final[source] for source in sources] == [starter_source(TARGETS[0]), *sources[:2]]
    assert sum("judged again against the new one" in line for line in said) == 3


def test_an_older_incumbent_is_said_in_the_commit(begun):
    """Not faster than a kernel that was replaced meanwhile: recorded, with what it was judged against."""

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        return (5.0 if FASTER in task.source else 10.0), verdict(task, FASTER in task.source)

    one = replace(begun.plan, targets=TARGETS[:1])
    loop = Loop(begun, one, None, lambda line: None)
    Fleet(loop, SimulatedPool(2, judge), lambda line: None).run(Numbered(FASTER, SLOWER, most=2), NO_RULES, Budget())
    assert [row.status for row in check(begun)[2:]] == ["kept", "reset"]
    assert f"judged against {loop.rows[0].commit[:12]}" in loop.entries[-1].notes


def test_a_lost_worker_and_its_experiment(begun):
    """It goes to another worker; one that takes two workers along is not judged a third time."""
    said, tries = [], Counter()

    def judge(worker: str, task: Task) -> tuple[float, Verdict | None]:
        tries[task.source] += 1
        deadly = "edit" in task.source and tries[task.source] == 1 or "2\n" in task.source
        return 3.0, None if deadly else verdict(task)

    pool = SimulatedPool(2, judge)
    fleet = fleet_of(begun, pool, said, tell=lambda workforce: workforce.write(begun.folder))
    fleet.run(Numbered(most=4), NO_RULES, Budget())
    rows = check(begun)[2:]
    assert Counter(row.status for row in rows) == {"reset": 3, "undecided": 1}
    (given_up,) = [row for row in rows if row.status == "undecided"]
    assert given_up.description == "edit 2" and max(tries.values()) == MAX_ATTEMPTS
    assert sum("is lost: killed" in line for line in said) == 2
    assert any("attempt 2 of 2" in line for line in said)
    workforce = read_workforce(begun.folder)
    assert sum(worker.failures for worker in workforce.workers) == 2
    assert sum(worker.experiments for worker in workforce.workers) == 3
    assert "killed" in status(begun.root) and "an hour" in status(begun.root)
    assert len(json.loads(status(begun.root, as_json=True))["workers"]["workers"]) >= 3


def test_a_worker_that_is_lost_before_its_first_answer_has_a_line_in_status():
    lost = WorkerRecord("a", "node", "cpu", 0.0, left_s=5.0, fault="its node died")
    (line,) = Workforce(60.0, [lost, WorkerRecord("b", "node", "cpu", 0.0, left_s=5.0)]).lines()
    assert "worker a" in line and line.endswith("its node died")


def test_a_straggler_is_ended_and_judged_elsewhere(begun):
    said = []

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        return (math.inf if worker == "w1" else 10.0), verdict(task)

    pool = SimulatedPool(2, judge)
    fleet_of(begun, pool, said, lease_s=60.0).run(Numbered(most=3), NO_RULES, Budget())
    assert len(check(begun)) == 5
    assert any("w1: no answer within 60 s; it is ended" in line for line in said)
    assert 60 <= pool.clock_s < 120


class Repeating(SimulatedPool):
    """Every answer comes twice, and that of a worker that was ended comes after all."""

    def events(self, timeout_s: float) -> list[Event]:
        events = list(super().events(timeout_s))
        return events + [event for event in events if isinstance(event, Answer)]


def test_an_answer_that_comes_twice_or_too_late_is_dropped(begun):
    said, slow = [], deque([100.0])

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        return (slow.popleft() if slow else 10.0), verdict(task)

    pool = Repeating(1, judge, restart_s=60.0)
    fleet_of(begun, pool, said, lease_s=50.0).run(Numbered(most=3), NO_RULES, Budget())
    assert [row.description for row in check(begun)[2:]] == ["edit 1", "edit 2", "edit 3"]
    assert sum("w1 came twice or too late: dropped" in line for line in said) == 2
    assert sum("w2 came twice or too late: dropped" in line for line in said) == 3


def test_what_the_machine_disturbed_is_judged_elsewhere(begun):
    on = []

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        on.append(worker)
        return 10.0, verdict(task, undecided="the machine slept" if worker == "w1" else "")

    fleet_of(begun, SimulatedPool(2, judge), []).run(Numbered(most=1), NO_RULES, Budget())
    assert on == ["w1", "w2"] and check(begun)[-1].status == Status.RESET


CANARY = default_target("matmul", "cpp", "cpu", torch.float32)


def canaries() -> Canaries:
    return Canaries(CANARY, starter_source(CANARY))


def of_canary(task: Task, latency_us: float = 100.0, right: bool = True) -> tuple[float, Verdict]:
    made = replace(verdict(task), latency_us=latency_us, keep=False)
    return 1.0, made if right else replace(made, correctness=Correctness.FAIL, why="777 instead of 1")


def test_a_worker_that_answers_wrongly_is_in_quarantine(begun):
    """What it refused, and what it held to have won, is judged by another one; it is given nothing more."""
    on, said = Counter(), []

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        sick = worker == "w1" and pool.now() > 20
        if task.is_canary:
            return of_canary(task, right=not sick)
        on[worker, pool.now() > 200] += 1
        if sick:
            wrong = replace(verdict(task), correctness=Correctness.FAIL, why="777 instead of 1")
            return 10.0, wrong if SLOWER in task.source else verdict(task, keep=True)
        return 10.0, verdict(task)

    pool = SimulatedPool(2, judge)
    tell = lambda workforce: workforce.write(begun.folder)  # noqa: E731
    fleet = fleet_of(begun, pool, said, tell=tell, canaries=canaries())
    fleet.run(Numbered(SLOWER, SLOWER, FASTER), NO_RULES, Budget(experiments=16))
    rows = check(begun)[2:]
    assert not any(row.status == Status.KEPT for row in rows) and on["w1", False] and not on["w1", True]
    refused = [row.description for row in rows if row.status == Status.FAILED]
    again = {row.description.partition(", again:")[0] for row in rows if ", again: w1 is in quarantine" in row.description}
    assert refused and set(refused) <= again and len(again) < 10
    assert len({row.description for row in rows}) == len(rows)
    assert any("w1 is in quarantine: it judged a known kernel wrongly (777 instead of 1)" in line for line in said)
    assert "in quarantine: it judged a known" in status(begun.root)
    write_report(begun)
    assert all("w1 (simulated, simulated) was put in quarantine" in (begun / name).read_text() for name in (REPORT, HTML))


@pytest.mark.slow
@pytest.mark.parametrize("workers, quarantined", [(1, []), (2, ["w1"])])
def test_a_slow_worker_is_in_quarantine_if_there_is_another(begun, workers, quarantined):
    """Twice in a row, against what it took at first; once is chance."""
    once = deque([1000.0])

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        if not task.is_canary:
            return 300.0, verdict(task)
        late = pool.now() > 2000
        slow_once = worker != "w1" and late and once
        return of_canary(task, once.pop() if slow_once else 160.0 if worker == "w1" and late else 100.0)

    pool = SimulatedPool(workers, judge)
    fleet = fleet_of(begun, pool, [], canaries=canaries())
    fleet.run(Numbered(), NO_RULES, Budget(experiments=40))
    check(begun)
    assert [record.name for record in fleet.workers.values() if record.quarantine] == quarantined
    assert all("160 us instead of 100, 2 times" in fleet.workers[name].quarantine for name in quarantined)


@pytest.mark.slow
def test_a_worker_that_is_slow_from_the_beginning(begun):
    """Against the others of its kind; on another kind of device nothing is known."""

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        return of_canary(task, 200.0 if worker == "w2" else 100.0) if task.is_canary else (10.0, verdict(task))

    for device, quarantined in (("simulated", ["w2"]), ("another", [])):
        pool = SimulatedPool(3, judge)
        pool.coming = [
            (at, number, replace(event, device=device if event.worker == "w2" else "simulated"))
            for at, number, event in pool.coming
        ]
        fleet = fleet_of(begun, pool, [], canaries=canaries())
        fleet.run(Numbered(), NO_RULES, Budget(experiments=6))
        assert [record.name for record in fleet.workers.values() if record.quarantine] == quarantined


def test_a_canary_that_is_not_answered_ends_its_worker(begun):
    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        return of_canary(task)[:1] + (None,) if worker == "w1" else (math.inf, None) if worker == "w2" else by_canary(task)

    def by_canary(task: Task) -> tuple[float, Verdict]:
        return of_canary(task) if task.is_canary else (10.0, verdict(task))

    pool, said = SimulatedPool(3, judge), []
    fleet_of(begun, pool, said, lease_s=60.0, canaries=canaries()).run(Numbered(), NO_RULES, Budget(experiments=20))
    assert len(check(begun)) == 22
    assert any("w1 is lost: killed" in line for line in said) and any("w2: no answer within 60 s" in line for line in said)


def test_a_win_counts_once_its_worker_and_a_second_device_say_so(begun):
    """The canary comes between the win and its row; another GPU then says whether it is faster there, too."""
    judged = []

    def judge(worker: str, task: Task) -> tuple[float, Verdict]:
        if task.is_canary:
            return of_canary(task)
        judged.append((worker, task.source.rpartition("edit")[2] or task.source[-12:]))
        believes = FASTER in task.source and not (worker == "w2" and "1\n" in task.source)
        return 10.0 if worker == "w1" else 25.0, verdict(task, keep=believes)

    pool = SimulatedPool(2, judge)
    pool.coming = [(at, number, replace(event, unit=event.worker)) for at, number, event in pool.coming]
    one, said = replace(begun.plan, targets=TARGETS[:1]), []
    loop = Loop(begun, one, None, said.append)
    watched = canaries()
    Fleet(loop, pool, said.append, canaries=watched).run(Numbered(FASTER, most=3), NO_RULES, Budget())
    rows = check(begun)[2:]
    assert [row.status for row in rows].count("kept") >= 1
    for row in rows:
        source = begun.ledger.source(row.commit)
        assert {worker for worker, end in judged if source.endswith(end)} == {"w1", "w2"}, row.description
    (first,) = [row for row in rows if row.description == "edit 1"]
    assert first.status == Status.RESET
    assert any("it won on w1, but not on w2" in entry.notes for entry in loop.entries)
    assert any("judged once more, on a second device" in line for line in said)


def test_who_is_due_for_a_canary(begun):
    """At first, each half hour, and soon after answers that may be the worker's fault."""
    refused = replace(verdict(Task(1, TARGETS[0], "", None)), correctness=Correctness.FAIL)
    disturbed = verdict(Task(1, TARGETS[0], "", None), undecided="the machine slept")
    for answers, suspect in (([refused] * 4, False), ([refused] * 5, True), ([disturbed], True)):
        watched = canaries()
        watched.joined("w1", "simulated")
        assert watched.due("w1", 0.0)
        watched.asked("w1", 0.0)
        for answer in answers:
            watched.judged("w1", answer)
        assert not watched.due("w1", 299.0) and watched.due("w1", 301.0) == suspect and watched.due("w1", 1800.0)


def test_the_canary_of_a_plan(begun):
    """Its kernel is the starter; altered, it is the same but for its answer."""
    for device in ("cpu", "cuda"):
        made = Canaries.of(replace(begun.plan, device=device))
        assert made.source == starter_source(made.target) and made.target.device == device


def test_without_any_worker_the_driver_gives_up(begun):
    class Empty(SimulatedPool):
        def _start(self, after_s: float) -> None:
            pass

    pool = Empty(1, by_source)
    with pytest.raises(MachineFault, match="no worker"):
        fleet_of(begun, pool, []).run(Numbered(), NO_RULES, Budget())
    assert pool.clock_s > NO_WORKER_S


def test_a_run_goes_on_with_workers_and_without(begun):
    """A driver that is gone in the middle: what it had in flight is judged again, by one machine or by workers."""

    class Killed(BaseException):
        pass

    def dies(worker: str, task: Task) -> tuple[float, Verdict]:
        if pool.now() >= 20:
            raise Killed
        return by_source(worker, task)

    pool = SimulatedPool(3, dies)
    with pytest.raises(Killed):
        fleet_of(begun, pool, []).run(Numbered(FASTER, SLOWER), NO_RULES, Budget())
    open_ = begun.read_intents()
    assert len(open_) >= 1 and all(intent.ticket for intent in open_)

    said = []
    alone = Loop(begun, begun.plan, Coin(), said.append)  # on one machine
    alone.run(Numbered(most=2), NO_RULES, Budget())
    assert sum("interrupted while it was judged" in line for line in said) == len(open_)
    before = check(begun)
    assert {intent.proposal.hypothesis for intent in open_} <= {row.description for row in before}

    loop = Loop(begun, begun.plan, None, said.append)
    loop.begin(TARGETS[0], Proposal(starter_source(TARGETS[0]) + SLOWER, "of one machine", "numbered"))  # and is killed
    fleet_of(begun, SimulatedPool(2, by_source), said).run(Numbered(most=2), NO_RULES, Budget())
    rows = check(begun)
    assert len(rows) == len(before) + 3 and [r.row() for r in rows[: len(before)]] == [r.row() for r in before]
    assert "of one machine" in {row.description for row in rows[len(before) :]}


def test_a_worker_says_which_starter_it_judged(workspace):
    class Looking(SimulatedPool):
        def submit(self, worker: str, task: Task) -> None:
            asked.append(task)
            chosen = Proposal(task.source + FASTER, "start from another", STARTER) if task.is_first else None
            self._add(10.0, Answer(worker, task.lease, verdict(task), chosen))

    asked: list[Task] = []
    fleet_of(workspace, Looking(2, by_source), []).run(Numbered(most=1), NO_RULES, Budget())
    rows = check(workspace)
    assert [row.description for row in rows] == ["start from another"] * 2 + ["edit 1"]
    assert [task.is_first for task in asked] == [True, True, False]
    first = {row.target: workspace.ledger.source(row.commit) for row in rows[:2]}
    assert first == {target.name: starter_source(target) + FASTER for target in TARGETS}
    assert asked[2].incumbent == first[asked[2].target.name], "what was chosen is the incumbent"


def test_what_was_recorded_is_not_judged_again(begun):
    """Killed between the commit and the end of its intent; another's number is no reason to leave it out."""
    loop = Loop(begun, begun.plan, None, lambda line: None)
    first, second = (Proposal(starter_source(TARGETS[0]) + word, word, "numbered") for word in (FASTER, SLOWER))
    intents = [loop.begin(TARGETS[0], proposal, 1, ticket) for ticket, proposal in enumerate((first, second), 1)]
    assert {intent.experiment for intent in intents} == {3}
    task = Task(1, TARGETS[0], first.source, starter_source(TARGETS[0]))
    loop.conclude(intents[0], verdict(task))
    begun.write_intent(intents[0])  # as if it had not been cleared
    left = Loop(begun, begun.plan, None, lambda line: None).interrupted()
    assert [(intent.proposal, intent.attempts) for intent in left] == [(second, 2)]
    assert [intent.ticket for intent in begun.read_intents()] == [2]


def test_budgets_and_signals_let_what_is_in_flight_be_finished(begun):
    pool = SimulatedPool(3, by_source)
    assert fleet_of(begun, pool, []).run(Numbered(), NO_RULES, Budget(seconds=15)) == "the 0.25 minutes are used up"
    assert len(check(begun)) == 2 + 6

    fleet = fleet_of(begun, SimulatedPool(2, lambda worker, task: stop() or by_source(worker, task)), [])

    def stop() -> None:
        fleet.book.stopping = "stopped by SIGINT"

    assert fleet.run(Numbered(), NO_RULES, Budget()) == "stopped by SIGINT"
    assert len(check(begun)) == 2 + 6 + 1


def test_a_signal_while_an_agent_is_asked_lets_what_is_in_flight_be_finished(begun):
    """The agent is not waited for, nor asked about another target."""
    asked = []

    class Slow(Numbered):
        def propose(self, context: Context) -> Proposal | None:
            asked.append(context.target.name)
            if len(asked) == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            return super().propose(context)

    assert fleet_of(begun, SimulatedPool(2, by_source), []).run(Slow(), NO_RULES, Budget()) == "stopped by SIGINT"
    assert len(check(begun)) == 2 + 1 and len(asked) == 2


def test_an_agent_that_has_to_stop_ends_the_run_once_all_is_recorded(begun):
    class Capped(Numbered):
        def propose(self, context: Context) -> Proposal | None:
            if self.made == 2:
                raise AgentStopped("the cap is reached")
            return super().propose(context)

    assert fleet_of(begun, SimulatedPool(4, by_source), []).run(Capped(), NO_RULES, Budget()) == "the cap is reached"
    assert len(check(begun)) == 4


def test_an_experiment_takes_the_driver_as_long_after_many_rows():
    """Rows are read once, when the run begins, and what is asked of them is kept: the same as of all of them."""

    class Once(SimulatedBook):
        reads = 0

        @property
        def rows(self) -> list:
            self.reads += 1
            return self.__dict__.setdefault("made", [])

        @rows.setter
        def rows(self, rows: list) -> None:
            assert not rows

    record = Record.read("cpu-night")
    pool = SimulatedPool(8, RecordedGate(record, random.Random(1), in_order=False))
    book = Once(record, pool, 0.0, 0.0)
    fleet = Fleet(book, pool, lambda line: None)
    begun = book.reads
    fleet.run(None, NO_RULES, Budget(experiments=200))
    made = list(book.rows)
    assert len(tried(made)) == 200 and begun <= 2
    assert book.reads - begun < 4.5 * len(made)  # four by the book itself, to number an experiment and append its row
    for target in book.plan.targets:
        anew, kept = Tally(rows_of(target, made)), fleet._tallies.of[target.name]
        assert vars(anew) == vars(kept) and anew.best == incumbent(rows_of(target, made))


def test_the_scheduler_with_experiments_in_flight():
    plan = Plan("test", {}, "cpu", 1000.0, TARGETS)
    names = [target.name for target in TARGETS]
    assert next_target(plan, [], NO_RULES, in_flight={names[0]: 1}).target.name == names[1]
    assert next_target(plan, [], NO_RULES, in_flight=dict.fromkeys(names, 1)) is None
    rows = [replace(ROW, target=name, agent=STARTER, seconds=10.0) for name in names]
    assert next_target(plan, rows, NO_RULES, in_flight={names[0]: 1}).target.name == names[1]
    given: Counter[str] = Counter()
    for _ in range(16):
        given[next_target(plan, rows, NO_RULES, in_flight=given).target.name] += 1
    assert given[names[1]] > 1 and sum(given.values()) == 16  # shared out by what each promises


def test_turns_on_cores_of_one_cpu(tmp_path, monkeypatch):
    """Workers on different cores time at once; who needs the same cores, or the whole CPU, waits."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Waits(Exception):
        pass

    def waits(text: str) -> None:
        raise Waits

    with turn("cpu", waits, cores=(0,)):
        with turn("cpu", waits, cores=(1, 2)):
            pass
        for cores in ((0, 1), ()):
            with pytest.raises(Waits), turn("cpu", waits, cores=cores):
                pass
    with turn("cpu", waits), pytest.raises(Waits), turn("cpu", waits, cores=(5,)):
        pass
    with turn("cpu", waits):
        pass


@pytest.mark.slow
def test_without_workers_ray_is_not_imported():
    """Nor by the modules that know of workers."""
    code = "import sys, autokernel.cli.commands, autokernel.run.fleet, autokernel.cli.status; "
    code += "from autokernel.cli.orchestrate import make_parser; make_parser().parse_args(['run']); "
    code += "print([name for name in sys.modules if name.partition('.')[0] == 'ray'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_command_line_takes(monkeypatch, capsys):
    """--workers needs Ray, and is for a model on all of a kind of device; without it there is no fleet."""

    def given(*words: str) -> argparse.Namespace:
        return make_parser().parse_args(["run", "--device", "cpu", *words])

    assert commands._workers(given()) is None and given().require_sandbox is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert commands._workers(given("--workers", "auto")) == Workers(None, None)
    assert commands._workers(given("--workers", "2", "--ray-address", "auto")) == Workers(2, "auto")
    assert commands._workers(given("--ray-address", "auto")) == Workers(None, "auto")
    assert given("--workers", "2", "--no-require-sandbox").require_sandbox is False
    with pytest.raises(SystemExit):
        given("--workers", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        commands._workers(given("--workers", "2"))
    assert "pip install -e '.[ray]'" in capsys.readouterr().err
