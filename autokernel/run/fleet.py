"""Many workers, one driver: which experiment goes to which worker, and what becomes of the answers. Knows nothing of Ray.

An experiment in flight has a ticket, which names its intent file, and a lease: a worker, the incumbent that it is judged
against, and a deadline. The driver alone writes git and results.tsv. An answer counts if its lease still holds.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from autokernel.agents import Agent, AgentStopped, Proposal
from autokernel.hardware.machine import MachineFault
from autokernel.history.experiments import STARTER, Experiment, Status
from autokernel.history.progress import Rules, incumbent, rows_of, tried
from autokernel.history.workers import WorkerRecord, Workforce
from autokernel.run.loop import MAX_ATTEMPTS, Budget, gave_up
from autokernel.run.scheduler import next_target
from autokernel.run.workspace import Intent
from autokernel.target import Plan, Target
from autokernel.verdict import Verdict

LEASE_S = 1800.0  # for one experiment, waiting for a turn on the cores included: 30 times what most take
DISTURBED = 2  # times that an experiment which the machine disturbed is judged again, elsewhere if another worker is idle
NO_WORKER_S = 600.0  # without any worker, after which the driver gives up
POLL_S = 1.0  # between two looks at signals and deadlines
TOLD_EVERY_S = 2.0  # workers.json


@dataclass(frozen=True)
class Task:
    """What a worker is asked. Candidate and incumbent travel together: they are judged in one call, on one device.

    Where `is_first`, the source is the target's own starter, and the worker looks for a faster one to judge.
    """

    lease: int
    target: Target
    source: str
    incumbent: str | None
    is_first: bool = False


@dataclass(frozen=True)
class Joined:
    worker: str
    node: str
    device: str


@dataclass(frozen=True)
class Lost:
    """A worker that is no more, or that could not finish what it was asked; it takes no other task under this name."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Answer:
    worker: str
    lease: int
    verdict: Verdict
    starter: Proposal | None = None  # what was judged, of a task that is a target's first


Event = Joined | Lost | Answer


class Pool(Protocol):
    """Workers. A name is never used twice: what takes the place of a lost worker joins under another one."""

    def now(self) -> float:
        """Seconds, on a clock that is not set."""

    def submit(self, worker: str, task: Task) -> None: ...

    def replace(self, worker: str) -> None:
        """End it, and start another one in its place."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened, waited for at most so long."""


class Book(Protocol):
    """A run's records and what makes experiments of them: autokernel.run.loop.Loop has all."""

    plan: Plan
    stopping: str

    @property
    def rows(self) -> Sequence[Experiment]: ...

    def signals(self) -> AbstractContextManager[None]: ...

    def interrupted(self) -> list[Intent]: ...

    def low_disk(self) -> str: ...

    def starter(self, target: Target) -> Proposal: ...

    def propose(self, agent: Agent, target: Target, in_flight: Sequence[Proposal]) -> Proposal | None: ...

    def begin(self, target: Target, proposal: Proposal, attempts: int, ticket: int) -> Intent: ...

    def conclude(self, intent: Intent, verdict: Verdict, against: str | None = None) -> Experiment: ...

    def source(self, commit: str) -> str: ...


@dataclass(frozen=True)
class Open:
    """An experiment that has been begun and not recorded."""

    intent: Intent
    disturbed: int = 0
    avoid: str = ""  # the worker that it was disturbed on

    @property
    def proposal(self) -> Proposal:
        return self.intent.proposal

    def __str__(self) -> str:
        return f"experiment [{self.intent.ticket}] on {self.intent.target} ({self.proposal.hypothesis[:60]})"


@dataclass(frozen=True)
class Lease:
    open: Open
    worker: str
    incumbent: str | None  # the commit
    began_s: float
    deadline_s: float


class Fleet:
    """One run's experiments on many workers. Use inside `workspace.locked()`."""

    def __init__(
        self,
        book: Book,
        pool: Pool,
        say: Callable[[str], None],
        tell: Callable[[Workforce], None] = lambda workforce: None,
        lease_s: float = LEASE_S,
    ) -> None:
        """`tell` is given what is known of the workers, every few seconds and at the end."""
        self.book, self.pool, self.say, self.tell, self.lease_s = book, pool, say, tell, lease_s
        self.leases: dict[int, Lease] = {}
        self.queue: deque[Open] = deque()  # begun, and on no worker
        self.workers: dict[str, WorkerRecord] = {}
        self.idle: dict[str, None] = {}  # in the order in which they became so
        self.exhausted: set[str] = set()
        self.waiting: set[str] = set()  # targets for which the agent has nothing until it is told more
        self.reason = ""  # why no more experiments are begun
        self.began_s = self.manned_s = pool.now()
        self.told_s = -math.inf  # of the workers that are there at first it is told at once
        self._tickets = self._lease_numbers = 0
        self._full = ""  # the disk that has no space, as it was told
        self._targets = {target.name: target for target in book.plan.targets}
        # What is asked of the rows for each experiment, kept as they come: there may be ten thousands.
        self._made = len(tried(book.rows))
        self._best = {name: incumbent(rows_of(target, book.rows)) for name, target in self._targets.items()}

    def run(self, agent: Agent, rules: Rules, budget: Budget) -> str:
        """Experiments until the budget is used, nothing is left to try, or a signal; returns the reason in words.

        Raises MachineFault where no worker is left.
        """
        self.reason = ""
        budget = budget.begun(self._made, self.pool.now())
        with self.book.signals():
            for intent in self.book.interrupted():
                self._take_up(intent)
            try:
                while not self._finished(agent, rules, budget):
                    for event in self.pool.events(POLL_S):
                        self._on(event)
                    self._end_stragglers()
                    self._tell()
            finally:
                self._tell(now=True)
        return self.book.stopping or self.reason

    def _finished(self, agent: Agent, rules: Rules, budget: Budget) -> bool:
        """Hand out what there is; whether nothing more will come. A signal lets what is in flight be finished."""
        while self.idle and not self.book.stopping:
            if not self.queue:
                self._begin(agent, rules, budget)
            if not self.queue:
                break
            self._lease(self.queue.popleft())
        if not self.leases and (self.book.stopping or (self.reason and not self.queue)):
            return True
        if self.leases or self.idle:
            self.manned_s = self.pool.now()
        elif self.pool.now() > self.manned_s + NO_WORKER_S:
            raise MachineFault(f"there has been no worker for {NO_WORKER_S:.0f} s")
        return False

    def _take_up(self, intent: Intent) -> None:
        """An experiment that an earlier process has begun, with or without workers."""
        self._tickets = max(self._tickets, intent.ticket)
        self._open(Open(intent))

    def _begin(self, agent: Agent, rules: Rules, budget: Budget) -> None:
        """Let an experiment begin, if one may: `reason` says why none does, unless it is to wait for what is in flight."""
        rows = self.book.rows
        in_flight = Counter(lease.open.intent.target for lease in self.leases.values())
        made = self._made + sum(lease.open.proposal.agent != STARTER for lease in self.leases.values())
        while not self.reason:
            self.reason = budget.over(made, self.pool.now())
            if self.reason:
                return
            if full := self.book.low_disk():
                if full != self._full:
                    self.say(f"{full}: waiting for space")
                self._full = full
                return
            self._full = ""
            choice = next_target(self.book.plan, rows, rules, self.exhausted | self.waiting, in_flight=in_flight)
            if choice is None:
                self.reason = "" if self.leases else "nothing is left to try on any target"
                return
            target = choice.target
            if not self._best[target.name]:
                self._new(target, self.book.starter(target))
                return
            others = [lease.open.proposal for lease in self.leases.values() if lease.open.intent.target == target.name]
            try:
                proposal = self.book.propose(agent, target, others)
            except AgentStopped as stopped:
                self.reason = str(stopped)
                return
            if proposal is not None:
                self._new(target, proposal)
                return
            (self.waiting if others else self.exhausted).add(target.name)

    def _new(self, target: Target, proposal: Proposal) -> None:
        self._tickets += 1
        self._open(Open(self.book.begin(target, proposal, 1, self._tickets)))

    def _open(self, one: Open) -> None:
        """Into the queue, unless it was tried too often."""
        if one.intent.attempts <= MAX_ATTEMPTS:
            self.queue.append(one)
        else:
            self._conclude(one, gave_up(self._targets[one.intent.target], "the run or its worker"))

    def _lease(self, one: Open) -> None:
        """To the worker that has been idle for longest, and not to the one that disturbed it if there is another."""
        worker = next((name for name in self.idle if name != one.avoid), next(iter(self.idle)))
        del self.idle[worker]
        target = self._targets[one.intent.target]
        best = self._best[target.name]
        self._lease_numbers += 1
        now = self.pool.now()
        lease = Lease(one, worker, best and best.commit, now, now + self.lease_s)
        self.leases[self._lease_numbers] = lease
        if one.intent.attempts > 1:  # for a driver that goes on after this one
            self.book.begin(target, one.proposal, one.intent.attempts, one.intent.ticket)
        source = self.book.source(best.commit) if best else None
        is_first = best is None and one.proposal == self.book.starter(target)
        self.pool.submit(worker, Task(self._lease_numbers, target, one.proposal.source, source, is_first))

    def _on(self, event: Event) -> None:
        if isinstance(event, Joined):
            seconds = self.pool.now() - self.began_s
            self.workers[event.worker] = WorkerRecord(event.worker, event.node, event.device, seconds)
            self.idle[event.worker] = None
        elif isinstance(event, Lost):
            self._lost(event)
        else:
            self._answered(event)

    def _answered(self, answer: Answer) -> None:
        lease = self.leases.pop(answer.lease, None)
        if lease is None:
            self.say(f"an answer of {answer.worker} came twice or too late: dropped")
            return
        one, verdict = lease.open, answer.verdict
        record = self.workers[lease.worker]
        record.busy_s += self.pool.now() - lease.began_s
        record.experiments += 1
        self.idle[lease.worker] = None
        if verdict.undecided and one.disturbed < DISTURBED and not self.book.stopping:
            self.say(f"{one}: {verdict.undecided} ({lease.worker}): judged again")
            self.queue.append(replace(one, disturbed=one.disturbed + 1, avoid=lease.worker))
        elif verdict.keep and lease.incumbent != self._incumbent(one):  # wins do not add up
            self.say(f"{one} won, but against a kernel that was replaced meanwhile: judged again against the new one")
            self.queue.appendleft(one)
        else:
            if answer.starter and answer.starter != one.proposal:
                target, intent = self._targets[one.intent.target], one.intent
                one = Open(self.book.begin(target, answer.starter, intent.attempts, intent.ticket))
            self._conclude(one, verdict, None if lease.incumbent == self._incumbent(one) else lease.incumbent)

    def _incumbent(self, one: Open) -> str | None:
        best = self._best[one.intent.target]
        return best and best.commit

    def _conclude(self, one: Open, verdict: Verdict, against: str | None = None) -> None:
        row = self.book.conclude(one.intent, verdict, against)
        self._made += row.agent != STARTER
        if row.status == Status.KEPT:
            self._best[row.target] = row
        self.waiting.discard(one.intent.target)

    def _lost(self, lost: Lost) -> None:
        self.idle.pop(lost.worker, None)
        number = next((number for number, lease in self.leases.items() if lease.worker == lost.worker), None)
        if record := self.workers.get(lost.worker):
            record.left_s, record.fault = self.pool.now() - self.began_s, lost.reason
        self.say(f"worker {lost.worker} is lost: {lost.reason}")
        if number is not None:
            self._again(self.leases.pop(number))

    def _end_stragglers(self) -> None:
        """A worker that does not answer in time is ended: on a device, nothing may run beside what is timed there."""
        now = self.pool.now()
        for number, lease in list(self.leases.items()):
            if now >= lease.deadline_s:
                del self.leases[number]
                record = self.workers[lease.worker]
                record.left_s, record.fault = now - self.began_s, f"no answer within {self.lease_s:.0f} s"
                self.say(f"worker {lease.worker}: {record.fault}; it is ended, and another one takes its place")
                self.pool.replace(lease.worker)
                self._again(lease)

    def _again(self, lease: Lease) -> None:
        """What a worker did not finish is judged by another one, MAX_ATTEMPTS times in all."""
        record = self.workers[lease.worker]
        record.failures += 1
        record.busy_s += self.pool.now() - lease.began_s
        intent = replace(lease.open.intent, attempts=lease.open.intent.attempts + 1)
        if intent.attempts <= MAX_ATTEMPTS:
            self.say(f"{lease.open} is judged again by another worker, attempt {intent.attempts} of {MAX_ATTEMPTS}")
        self._open(replace(lease.open, intent=intent))

    def _tell(self, now: bool = False) -> None:
        seconds = self.pool.now()
        if now or seconds >= self.told_s + TOLD_EVERY_S:
            self.told_s = seconds
            self.tell(Workforce(seconds - self.began_s, list(self.workers.values())))
