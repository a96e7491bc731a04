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
from autokernel.common.verdict import Verdict
from autokernel.hardware.machine import MachineFault
from autokernel.history.experiments import STARTER, Experiment, Status
from autokernel.history.progress import Rules, tried
from autokernel.history.workers import WorkerRecord, Workforce
from autokernel.run.canary import Canaries
from autokernel.run.loop import MAX_ATTEMPTS, Budget, gave_up
from autokernel.run.scheduler import Tallies, next_target
from autokernel.run.workspace import Intent
from autokernel.target import Plan, Target

LEASE_S = 1800.0  # for one experiment, waiting for a turn on the cores included: 30 times what most take
DISTURBED = 2  # times that an experiment which the machine disturbed is judged again, elsewhere if another worker is idle
NO_WORKER_S = 600.0  # without any worker, after which the driver gives up
POLL_S = 1.0  # between two looks at signals and deadlines
TOLD_EVERY_S = 2.0  # workers.json


@dataclass(frozen=True)
class Task:
    """What a worker is asked. Candidate and incumbent travel together: they are judged in one call, on one device.

    Where `is_first`, the source is the target's own starter, and the worker looks for a faster one to judge. Where
    `is_canary`, it is known to be right, and the verdict says how the worker does.
    """

    lease: int
    target: Target
    source: str
    incumbent: str | None
    is_first: bool = False
    is_canary: bool = False


@dataclass(frozen=True)
class Joined:
    worker: str
    node: str
    device: str
    unit: str = ""  # which one: workers on the cores of one CPU share it


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
    won_on: str = ""  # the worker on which it won, where it is to win on a second device, too

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
    won: Answer | None = None  # which counts once a canary has shown that its worker answers rightly


@dataclass(frozen=True)
class Canary:
    """One that a worker is judging."""

    lease: int
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
        canaries: Canaries | None = None,
    ) -> None:
        """`tell` is given what is known of the workers, every few seconds and at the end."""
        self.book, self.pool, self.say, self.tell, self.lease_s = book, pool, say, tell, lease_s
        self.canaries = canaries
        self.leases: dict[int, Lease] = {}
        self.on_canary: dict[str, Canary] = {}  # by worker
        self.unsure: dict[str, list[Open]] = {}  # what a worker has refused since its last canary
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
        self._made = len(tried(book.rows))
        self._tallies = Tallies(book.plan, book.rows)

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
        self._send_canaries()
        while self.idle and not self.book.stopping:
            if not (found := self._match()):
                self._begin(agent, rules, budget)
                if not (found := self._match()):
                    break
            self._lease(*found)
        if not self.leases and (self.book.stopping or (self.reason and not self.queue)):
            return True
        if self.leases or self.idle or self.on_canary:
            self.manned_s = self.pool.now()
        elif self.pool.now() > self.manned_s + NO_WORKER_S:
            sick = [record.name for record in self.workers.values() if record.quarantine]
            words = f"; in quarantine: {', '.join(sick)}" if sick else ""
            raise MachineFault(f"there has been no worker for {NO_WORKER_S:.0f} s{words}")
        return False

    def _match(self) -> tuple[Open, str] | None:
        """The first that waits and that an idle worker may judge, out of the queue, and that worker."""
        for one in self.queue:
            if self.idle and (worker := self._worker_for(one)):
                self.queue.remove(one)
                return one, worker
        return None

    def _worker_for(self, one: Open) -> str | None:
        """Who has been idle for longest, and not the one that disturbed it if there is another. For what has won
        on one device, one on a second device, if there is any."""
        if one.won_on and (second := self._second_devices(one.won_on)):
            return next((name for name in self.idle if name in second), None)
        return next((name for name in self.idle if name != one.avoid), next(iter(self.idle)))

    def _at_work(self, but: str) -> list[WorkerRecord]:
        """The workers, but for one, that may judge."""
        records = self.workers.values()
        return [record for record in records if record.left_s is None and not record.quarantine and record.name != but]

    def _second_devices(self, worker: str) -> set[str]:
        """Workers on other devices of the same kind."""
        first = self.workers[worker]
        alike = (record for record in self._at_work(worker) if record.device == first.device)
        return {record.name for record in alike if record.unit != first.unit}

    def _take_up(self, intent: Intent) -> None:
        """An experiment that an earlier process has begun, with or without workers."""
        self._tickets = max(self._tickets, intent.ticket)
        self._open(Open(intent))

    def _begin(self, agent: Agent, rules: Rules, budget: Budget) -> None:
        """Let an experiment begin, if one may: `reason` says why none does, unless it is to wait for what is in flight."""
        begun = [*(lease.open for lease in self.leases.values()), *self.queue]
        in_flight = Counter(one.intent.target for one in begun)
        made = self._made + sum(one.proposal.agent != STARTER for one in begun)
        while not (self.reason or self.book.stopping):
            self.reason = budget.over(made, self.pool.now())
            if self.reason:
                return
            if full := self.book.low_disk():
                if full != self._full:
                    self.say(f"{full}: waiting for space")
                self._full = full
                return
            self._full = ""
            choice = next_target(self.book.plan, self._tallies, rules, self.exhausted | self.waiting, in_flight=in_flight)
            if choice is None:
                self.reason = "" if begun else "nothing is left to try on any target"
                return
            target = choice.target
            if not self._best(target):
                self._new(target, self.book.starter(target))
                return
            others = [one.proposal for one in begun if one.intent.target == target.name]
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

    def _lease(self, one: Open, worker: str) -> None:
        del self.idle[worker]
        target = self._targets[one.intent.target]
        best = self._best(target)
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
            self.workers[event.worker] = WorkerRecord(event.worker, event.node, event.device, seconds, unit=event.unit)
            self.idle[event.worker] = None
            if self.canaries:
                self.canaries.joined(event.worker, event.device)
        elif isinstance(event, Lost):
            self._lost(event)
        else:
            self._answered(event)

    def _answered(self, answer: Answer) -> None:
        canary = self.on_canary.get(answer.worker)
        if canary and canary.lease == answer.lease:
            del self.on_canary[answer.worker]
            self._canary_answered(answer)
            return
        lease = self.leases.get(answer.lease)
        if lease is None or lease.won:
            self.say(f"an answer of {answer.worker} came twice or too late: dropped")
            return
        verdict, record = answer.verdict, self.workers[lease.worker]
        record.busy_s += self.pool.now() - lease.began_s
        record.experiments += 1
        if self.canaries:
            self.canaries.judged(lease.worker, verdict)
            if _is_win(lease, verdict) and lease.incumbent == self._incumbent(lease.open):
                self.leases[answer.lease] = replace(lease, won=answer, deadline_s=math.inf)  # that of the canary holds
                self._send_canary(lease.worker)
                return
        del self.leases[answer.lease]
        self.idle[lease.worker] = None
        self._decide(lease, answer)

    def _decide(self, lease: Lease, answer: Answer) -> None:
        one, verdict = lease.open, answer.verdict
        if verdict.undecided and one.disturbed < DISTURBED and not self.book.stopping:
            self.say(f"{one}: {verdict.undecided} ({lease.worker}): judged again")
            self.queue.append(replace(one, disturbed=one.disturbed + 1, avoid=lease.worker))
        elif verdict.keep and lease.incumbent != self._incumbent(one):  # wins do not add up
            self.say(f"{one} won, but against a kernel that was replaced meanwhile: judged again against the new one")
            self.queue.appendleft(replace(one, won_on=""))
        elif _is_win(lease, verdict) and not one.won_on and self._second_devices(lease.worker):
            self.say(f"{one} won on {lease.worker}: judged once more, on a second device")
            self.queue.appendleft(replace(one, won_on=lease.worker))
        else:
            if one.won_on and verdict.decided and not verdict.keep:
                verdict = self._not_confirmed(one, lease.worker, verdict)
            if answer.starter and answer.starter != one.proposal:
                target, intent = self._targets[one.intent.target], one.intent
                one = Open(self.book.begin(target, answer.starter, intent.attempts, intent.ticket))
            row = self._conclude(one, verdict, None if lease.incumbent == self._incumbent(one) else lease.incumbent)
            if self.canaries and row.status != Status.KEPT:
                self.unsure.setdefault(lease.worker, []).append(one)

    def _not_confirmed(self, one: Open, second: str, verdict: Verdict) -> Verdict:
        """Two devices of a kind say different things: either may be at fault."""
        for worker in (one.won_on, second) if self.canaries else ():
            self.canaries.doubted(worker)
        return replace(verdict, why=f"it won on {one.won_on}, but not on {second}: {verdict.why}")

    def _send_canaries(self) -> None:
        """To idle workers that are due for one."""
        if self.canaries and not self.reason and not self.book.stopping:
            for worker in [name for name in self.idle if self.canaries.due(name, self.pool.now())]:
                del self.idle[worker]
                self._send_canary(worker)

    def _send_canary(self, worker: str) -> None:
        self._lease_numbers += 1
        now, number = self.pool.now(), self._lease_numbers
        self.on_canary[worker] = Canary(number, now, now + self.lease_s)
        self.canaries.asked(worker, now)
        self.pool.submit(worker, Task(number, self.canaries.target, self.canaries.source, None, is_canary=True))

    def _canary_answered(self, answer: Answer) -> None:
        """The worker goes on, and what it held to have won counts; or it is in quarantine."""
        worker, verdict = answer.worker, answer.verdict
        fault = self.canaries.fault(worker, verdict, [record.name for record in self._at_work(worker)])
        if not fault and self.canaries.due(worker, self.pool.now()):
            self._send_canary(worker)
            return
        held = [number for number, lease in self.leases.items() if lease.worker == worker]
        won = [self.leases.pop(number) for number in held]
        if fault:
            self._quarantine(worker, fault, won)
            return
        self.idle[worker] = None
        if verdict.decided:
            self.unsure.pop(worker, None)
        for lease in won:
            self._decide(lease, lease.won)

    def _quarantine(self, worker: str, reason: str, won: Sequence[Lease]) -> None:
        """It stays where it is, so that no other worker takes its device, and is given nothing. What it judged since its
        last canary is judged by others: as experiments of their own where there are rows already."""
        self.workers[worker].quarantine = reason
        refused = self.unsure.pop(worker, [])
        self.say(f"worker {worker} is in quarantine: {reason}; {len(won) + len(refused)} experiments are given out again")
        for lease in won:
            self._open(replace(lease.open, avoid=worker, won_on=""))
        for one in refused:
            words = f"{one.proposal.hypothesis}, again: {worker} is in quarantine"
            proposal = replace(one.proposal, hypothesis=words, tokens=0, cost_usd=0.0)
            self._new(self._targets[one.intent.target], proposal)

    def _best(self, target: Target) -> Experiment | None:
        return self._tallies.of[target.name].best

    def _incumbent(self, one: Open) -> str | None:
        best = self._best(self._targets[one.intent.target])
        return best and best.commit

    def _conclude(self, one: Open, verdict: Verdict, against: str | None = None) -> Experiment:
        row = self.book.conclude(one.intent, verdict, against)
        self._made += row.agent != STARTER
        self._tallies.add(row)
        self.waiting.discard(one.intent.target)
        return row

    def _lost(self, lost: Lost) -> None:
        self.say(f"worker {lost.worker} is lost: {lost.reason}")
        self._gone(lost.worker, lost.reason)

    def _end_stragglers(self) -> None:
        """A worker that does not answer in time is ended: on a device, nothing may run beside what is timed there."""
        now = self.pool.now()
        late = [lease.worker for lease in self.leases.values() if now >= lease.deadline_s]
        late += [worker for worker, canary in self.on_canary.items() if now >= canary.deadline_s]
        for worker in late:
            fault = f"no answer within {self.lease_s:.0f} s"
            self.say(f"worker {worker}: {fault}; it is ended, and another one takes its place")
            self.pool.replace(worker)
            self._gone(worker, fault)

    def _gone(self, worker: str, fault: str) -> None:
        """What it had in hand goes to another worker."""
        self.idle.pop(worker, None)
        self.on_canary.pop(worker, None)
        if record := self.workers.get(worker):
            record.left_s, record.fault = self.pool.now() - self.began_s, fault
        for number in [number for number, lease in self.leases.items() if lease.worker == worker]:
            self._again(self.leases.pop(number))

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


def _is_win(lease: Lease, verdict: Verdict) -> bool:
    return verdict.keep and lease.incumbent is not None
