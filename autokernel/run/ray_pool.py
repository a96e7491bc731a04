"""Timing workers as Ray actors: a whole GPU each, or some of a node's CPU cores. Imported, and Ray with it, for --workers.

Each holds a gate of its own and judges candidate and incumbent in one call. Ray starts them, carries tasks and answers, and
tells of actors and nodes that died; a new actor takes the place of a lost one.
"""

import hashlib
import os
import pickle
import platform
import signal
import socket
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody outside

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autokernel.agents import Proposal
from autokernel.build import compiler_version, default_cache
from autokernel.common.backends import cpu_identity
from autokernel.common.preflight import ROOT, Refused, backends
from autokernel.common.verdict import Correctness, Verdict
from autokernel.common.words import counted
from autokernel.gate import Judge
from autokernel.gate.timing.autotune import Looked
from autokernel.hardware import nvml
from autokernel.hardware.device import device_name
from autokernel.hardware.machine import CPU_TIMING, gpu_shared, turn
from autokernel.run.canary import altered
from autokernel.run.environment import Watch
from autokernel.run.fleet import Answer, Event, Joined, Lost, Task
from autokernel.run.starters import fastest_first
from autokernel.target import Target

START_S = 600.0  # for all workers together: each imports PyTorch and starts a gate
REACHED_S = 10.0
MAX_STARTS = 3  # in a row that came to nothing, after which nobody takes the place of a lost worker
STORE_FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
CODE = ("autokernel/**/*.py", "autokernel/include/*", "kernels/**/*.py", "reference.py")  # what a verdict depends on


@dataclass(frozen=True)
class Facts:
    """What must be the same on all nodes, for their verdicts to be of one kind."""

    torch: str
    python: str
    autokernel: str  # a hash of its code
    compilers: str
    driver: str  # of the GPU; of a CPU ""
    device: str  # the name of the part
    threads: int  # of a kernel on a CPU; 0 on a GPU
    cpu_features: str = ""  # a hash of a CPU's: virtual machines hide its model, and code is compiled for them

    @staticmethod
    def here(device: str, threads: int) -> "Facts":
        compilers = ", ".join(compiler_version(backend) for backend in backends(device))
        driver = "" if device == "cpu" else nvml.driver_version(device)
        versions = (torch.__version__, platform.python_version(), code_hash(ROOT))
        features = hashlib.sha256(cpu_identity().encode()).hexdigest()[:8] if device == "cpu" else ""
        return Facts(*versions, compilers, driver, device_name(device), threads, features)

    @property
    def part(self) -> str:
        """The device in words."""
        return self.device + (f", {counted(self.threads, 'thread')}" if self.threads else "")

    def unlike(self, other: "Facts") -> str:
        """What differs, in words; empty if nothing does."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return ", ".join(f"{name} {mine} instead of {theirs}" for name, mine, theirs in pairs if mine != theirs)


def code_hash(root: Path) -> str:
    files = sorted({path for pattern in CODE for path in root.glob(pattern) if path.is_file()})
    told = "".join(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Place:
    """Where a worker runs: any GPU that is free (node ""), or one of `parts` equal parts of a node's cores."""

    node: str = ""
    part: int = 0
    parts: int = 1
    cores: int = 1


class TimingWorker:
    """The actor. Raises SandboxIncomplete."""

    def __init__(self, device: str, place: Place, require_sandbox: bool) -> None:
        self.device, self.cores = device, ()
        if device == "cpu":
            self.cores = own_cores(place)
            os.sched_setaffinity(0, self.cores)  # the gate's processes inherit it
            os.environ["OMP_NUM_THREADS"] = str(len(self.cores))
            torch.set_num_threads(len(self.cores))
        self.judge = Judge(device, require_sandbox=require_sandbox)

    def hello(self) -> tuple[str, str, Facts]:
        """The node's name, which device of its kind this is, and what must be alike."""
        unit = ray.get_runtime_context().get_node_id() if self.device == "cpu" else nvml.gpu_id(self.device)
        return socket.gethostname(), unit, Facts.here(self.device, len(self.cores))

    def work(self, task: bytes) -> bytes:
        """Of a packed task the packed answer: a verdict, and which starter it is of, if not of the task's source."""
        return packed(self.judged(unpacked(task)))

    def judged(self, task: Task) -> tuple[Verdict, Proposal | None]:
        """A verdict on the task's source; of a target's first task on the starter that looks fastest and does not fail, and
        which one that is."""
        if task.is_canary:
            return self.canary(task), None
        if not task.is_first:
            return self.examine(task), None
        for starter in fastest_first(task.target, self):
            verdict = self.examine(replace(task, source=starter.source))
            if verdict.correctness != Correctness.FAIL:
                break
        return verdict, starter

    def canary(self, task: Task) -> Verdict:
        """Of a kernel that is right, and quickly timed; FAIL as well where its altered answers are let pass."""
        wrong = self.examine(replace(task, source=altered(task.source)))
        if wrong.correctness == Correctness.PASS:
            return replace(wrong, correctness=Correctness.FAIL, undecided="", why="wrong answers were let pass")
        return self.examine(task)

    def autotune(self, sources: Iterable[str], target: Target, seconds: float, finals: bool = True) -> list[Looked]:
        """Alone on the GPU or the cores, and on the CPU."""
        with turn(self.device, lambda text: None, cores=self.cores), self._timing():
            return self.judge.autotune(sources, target, seconds, finals=finals)

    def _timing(self) -> AbstractContextManager[None]:
        """Cores of one CPU share caches, memory bandwidth and clocks."""
        return turn(CPU_TIMING, lambda text: None) if self.cores else nullcontext()

    def examine(self, task: Task) -> Verdict:
        """Alone on the GPU or the cores, and at timing alone on the CPU.

        What the machine disturbed is undecided: the driver has it judged again.
        """
        with ExitStack() as turns:
            turns.enter_context(turn(self.device, lambda text: None, cores=self.cores))

            def progress(stage: str) -> None:
                if stage == "timing":
                    turns.enter_context(self._timing())

            shared = gpu_shared(self.device)
            watch = Watch(self.device, [Path(tempfile.gettempdir()), default_cache()], lambda text: None)
            verdict = self.judge.examine(
                task.source, task.target, incumbent=task.incumbent, quick=task.is_canary, progress=progress
            )
            fault = shared or watch.fault(verdict)
        return verdict.as_undecided(fault) if fault else verdict


def packed(value: object) -> bytes:
    """Source and reports shrink to a quarter: up to 100 kB Ray sends them by themselves, and needs no object store."""
    return zlib.compress(pickle.dumps(value))


def unpacked(data: bytes) -> object:
    return pickle.loads(zlib.decompress(data))


def own_cores(place: Place) -> tuple[int, ...]:
    """The cores of one part: as many for each, so that every worker's kernels have the same number of threads."""
    allowed = sorted(os.sched_getaffinity(0))
    each = len(allowed) // place.parts
    return tuple(allowed[place.part * each : (place.part + 1) * each])


@dataclass
class Actor:
    handle: object
    place: Place
    starts: int  # in a row in this place, this one included
    call: object  # what it was asked last: a reference to the answer
    lease: int | None = None  # None: whether it has started
    unsent: Task | None = None  # for which the object store had no space


class RayPool:
    """autokernel.run.fleet.Pool on Ray. Use as a context manager. Raises Refused where the workers cannot all be had."""

    def __init__(
        self,
        device: str,
        workers: int | None,
        address: str | None,
        require_sandbox: bool,
        say: Callable[[str], None],
    ) -> None:
        """workers: None for one on each GPU, or on each node's CPU. address: of a cluster; None starts Ray on this machine,
        for as long as this lasts."""
        self.device, self.require_sandbox, self.say = device, require_sandbox, say
        self.actors: dict[str, Actor] = {}
        self.late: dict[object, tuple[str, int]] = {}  # what an actor that was replaced may yet answer, and of which lease
        self.known: deque[Event] = deque()
        self.here = Facts.here(device, 0)  # with which all workers must agree,
        self.facts: Facts | None = None  # and with the first one in its threads
        self.refused: list[str] = []  # why, of each that did not
        self._names = 0
        on_signal = signal.getsignal(signal.SIGTERM)
        options = {"address": address} if address else {"address": "local", "include_dashboard": False}
        if address and (nobody := unreachable(address)):
            raise Refused(f"no Ray cluster at {address}: {nobody}")
        try:
            ray.init(**options, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise Refused(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from None
        finally:
            signal.signal(signal.SIGTERM, on_signal)  # the loop has its own way to stop
        try:
            self._start_all(places(device, workers), is_any=workers is None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor.handle)
        self.actors.clear()
        ray.shutdown()

    def now(self) -> float:
        return time.monotonic()

    def submit(self, worker: str, task: Task) -> None:
        if actor := self.actors.get(worker):  # else its loss is among the events to come
            self._send(worker, actor, task)

    def _send(self, worker: str, actor: Actor, task: Task) -> None:
        """Or, while there is no space for it in the object store, say so, and try again later."""
        try:
            actor.call, actor.lease, actor.unsent = actor.handle.work.remote(packed(task)), task.lease, None
        except STORE_FULL as error:
            if not actor.unsent:
                self.say(f"{_words(error)}; what worker {worker} is to judge waits for space")
            actor.unsent = task

    def replace(self, worker: str) -> None:
        actor = self.actors.pop(worker)
        if actor.lease is not None:
            self.late[actor.call] = worker, actor.lease
        ray.kill(actor.handle)
        self._start(actor.place)

    def events(self, timeout_s: float) -> Sequence[Event]:
        for name, actor in self.actors.items():
            if actor.unsent:
                self._send(name, actor, actor.unsent)
        if not self.known:
            self._collect(timeout_s)
        events = list(self.known)
        self.known.clear()
        return events

    def _start_all(self, wanted: Sequence[Place], is_any: bool) -> None:
        """Until each has said what it is. Here a fault of any worker is a reason not to begin, but that its node is unlike
        the driver's where no number was asked for: then the run goes on with the rest."""
        for place in wanted:
            self._start(place)
        deadline = time.monotonic() + START_S
        while sum(isinstance(event, Joined) for event in self.known) < len(wanted) - len(self.refused):
            self._collect(1.0)
            if self.refused and not (is_any and len(self.refused) < len(wanted)):
                raise Refused(self.refused[0])
            for event in self.known:
                if isinstance(event, Lost):
                    raise Refused(f"worker {event.worker} did not start: {event.reason}")
            if time.monotonic() > deadline:
                there = sum(isinstance(event, Joined) for event in self.known)
                raise Refused(f"only {there} of {len(wanted)} workers started within {START_S:.0f} s: ask for fewer")

    def _start(self, place: Place, starts: int = 1) -> None:
        self._names += 1
        if self.device == "cpu":
            there = NodeAffinitySchedulingStrategy(place.node, soft=False)
            options = {"num_cpus": place.cores, "scheduling_strategy": there}
        else:
            options = {"num_cpus": 1, "num_gpus": 1}  # whole: a GPU that is shared cannot be timed
        handle = ray.remote(**options)(TimingWorker).remote(self.device, place, self.require_sandbox)
        self.actors[f"w{self._names}"] = Actor(handle, place, starts, handle.hello.remote())

    def _collect(self, timeout_s: float) -> None:
        calls = {actor.call: name for name, actor in self.actors.items() if actor.call is not None}
        waited = [*calls, *self.late]
        if not waited:
            time.sleep(timeout_s)
            return
        ready, _ = ray.wait(waited, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        for call in ready:
            if call in calls:
                self._ended(calls[call], call)
            else:
                self._ended_late(call)

    def _ended_late(self, call: object) -> None:
        """The end of an actor that was replaced, or its answer, which no lease waits for."""
        name, lease = self.late.pop(call)
        with suppress(ray.exceptions.RayError):  # its loss is known
            self.known.append(Answer(name, lease, *unpacked(ray.get(call))))

    def _ended(self, name: str, call: object) -> None:
        """An answer, a start, or the end of an actor."""
        actor = self.actors[name]
        lease, actor.call, actor.lease = actor.lease, None, None
        try:
            value = ray.get(call)
        except ray.exceptions.RayError as error:
            self._lost(name, _words(error))
            return
        if lease is not None:
            self.known.append(Answer(name, lease, *unpacked(value)))
            return
        node, unit, facts = value
        if differs := facts.unlike(replace(self.here, threads=(self.facts or facts).threads)):
            self._refuse(name, f"its node, {node}, has {differs}: all nodes of a run need the same")
            return
        self.facts, actor.starts = self.facts or facts, 0
        self.known.append(Joined(name, node, facts.part, unit))

    def _refuse(self, name: str, why: str) -> None:
        """What differs stays so: no other worker takes its place."""
        ray.kill(self.actors.pop(name).handle)
        self.refused.append(f"worker {name} is refused: {why}")
        self.say(self.refused[-1])

    def _lost(self, name: str, reason: str) -> None:
        """Whatever is left of it ends, and another takes its place unless that failed too often."""
        actor = self.actors.pop(name)
        ray.kill(actor.handle)
        if actor.starts >= MAX_STARTS:
            reason += f"; no worker takes its place: {actor.starts} in a row did not start"
        elif actor.place.node and actor.place.node not in {node["NodeID"] for node in alive()}:
            reason += "; no worker takes its place: its node is gone, and what may still come from there is dropped"
        else:
            self._start(actor.place, actor.starts + 1)
        self.known.append(Lost(name, reason))


def unreachable(address: str) -> str:
    """Why nobody answers at HOST:PORT, in words; empty if somebody does. Ray itself was seen to wait for eight minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if port.isdecimal():
            socket.create_connection((host, int(port)), timeout=REACHED_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def alive() -> list[dict]:
    """The nodes that have CPUs, as Ray tells of them."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def places(device: str, workers: int | None) -> list[Place]:
    """For so many workers; None: as many as there are GPUs, or nodes. Raises Refused where there are not as many."""
    if device != "cpu":
        there = int(ray.cluster_resources().get("GPU", 0))
        if not 0 < (wanted := there if workers is None else workers) <= there:
            raise Refused(f"{wanted or 'no'} workers with a GPU each: this cluster has {there} GPUs")
        return [Place()] * wanted
    nodes = sorted(alive(), key=lambda node: node["NodeID"])
    wanted = len(nodes) if workers is None else workers
    made = []
    for number, node in enumerate(nodes):
        parts = wanted // len(nodes) + (number < wanted % len(nodes))
        cores = int(node["Resources"]["CPU"])
        if parts > cores:
            raise Refused(f"{wanted} workers: a node has {cores} cores, and each worker needs one of its own")
        made += [Place(node["NodeID"], part, parts, cores // parts) for part in range(parts)]
    return made


def _words(error: Exception) -> str:
    """What happened to an actor, in a line."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, STORE_FULL):
        return "Ray's object store is full, and so is the disk for what it moves out (`ray memory` says whose it is)"
    lines = str(cause).strip().splitlines() or ["no more is known"]
    if "creation task" in lines[0]:  # then a traceback follows, whose end is what was raised
        return lines[-1].strip()
    for number, line in enumerate(lines):
        if " because " in line:  # "its node has died", and below it why; "its worker process has died", and guesses
            return ": ".join(text.strip().partition(". ")[0] for text in lines[number : number + 2])
    return f"{type(cause).__name__}: {lines[0]}"
