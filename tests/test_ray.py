"""Timing workers on a real Ray cluster here: killed, cut off, late, short of space; what does not fit is refused."""

import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from autokernel.agents.scripted import ScriptedAgent
from autokernel.cli.pipeline import Job, Workers, fleet
from autokernel.common.preflight import Refused
from autokernel.gate import Judge
from autokernel.history.experiments import STARTER, Status
from autokernel.history.workers import WORKERS, Workforce, read_workforce
from autokernel.model.workload import Workload
from autokernel.run.fleet import Answer, Fleet, Joined, Task
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import LOG, Workspace
from autokernel.spec import ROOT
from autokernel.target import default_target, starter_source
from tests.test_fleet import NO_RULES, begun, check, clone, state, workspace  # noqa: F401  fixtures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install -e '.[ray]'"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a core each"),
]
EXPERIMENTS = 6
UNPACKABLE = 150_000  # random bytes in a task: Ray sends up to 100 kB without its object store

DRIVER = """
import sys
from pathlib import Path
from autokernel.agents.scripted import ScriptedAgent
from autokernel.run.fleet import Fleet
from autokernel.run.loop import Budget, Loop
from autokernel.run.ray_pool import RayPool
from autokernel.run.workspace import Workspace
from tests.test_fleet import NO_RULES
from tests.test_ray import EXPERIMENTS, script
say = lambda line: print(line, flush=True)
workspace = Workspace(Path(sys.argv[1]), "night")
with workspace.locked():
    loop = Loop(workspace, workspace.plan, None, say)
    with RayPool("cpu", 2, None, require_sandbox=False, say=say) as pool:
        say(f"ready: {pool.facts}")
        fleet = Fleet(loop, pool, say, lambda workforce: workforce.write(workspace.folder))
        say(fleet.run(ScriptedAgent(script()), NO_RULES, Budget(experiments=EXPERIMENTS)))
"""


def wrong(number: int):
    """An edit whose answers are wrong, so that the gate is done with it in a few seconds; no two are alike."""
    return lambda incumbent: (
        incumbent.replace("    return y\n", f"    y[..., 0].fill_({number})\n    return y\n") + f"# {number}\n"
    )


def script() -> Iterator[tuple[object, str]]:
    """Without end: what is left of it after a kill is of no interest, the budget ends the run."""
    number = 0
    while True:
        number += 1
        yield wrong(number), f"wrong {number}"


class Night:
    """A driver in a process of its own, with what it says."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-u", "-c", DRIVER, str(root)]
        output = open(root.parent / "said", "w")  # noqa: SIM115  as long as this lives
        self.log = Path(output.name)
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, times: int = 1, limit_s: float = 300.0) -> None:
        deadline = time.monotonic() + limit_s
        while self.said().count(text) < times:
            assert self.process.poll() is None and time.monotonic() < deadline, f"no {text!r} in: {self.said()[-3000:]}"
            time.sleep(0.05)

    def actors(self) -> list[psutil.Process]:
        """The processes of the workers, which Ray names so."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in below if "ray::TimingWorker" in " ".join(_command(one))]

    def end(self) -> None:
        """The driver alone, at once; then whatever Ray has left running, which its own supervisor would end."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        gone, left = psutil.wait_procs(below, 30)
        for one in left:
            one.kill()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_worker_and_the_driver_are_killed(begun, clone):  # noqa: F811
    """On two workers of one core each: nothing is lost or doubled, and the run goes on with workers and without."""
    before = state(clone)
    night = Night(clone)
    try:
        night.wait_for("ready: ")
        assert "threads=1" in night.said()
        night.wait_for("failed: wrong")
        victim = night.actors()[0]
        victim.kill()
        night.wait_for("is lost: ")
        night.wait_for("attempt 2 of 2")
        night.wait_for("failed: wrong", times=3)
    finally:
        night.end()
    open_, known = begun.read_intents(), begun.log.read()
    assert all(intent.ticket for intent in open_)
    assert read_workforce(begun.folder).workers and (begun / WORKERS).exists()

    again = Night(clone)  # with workers
    try:
        again.wait_for(f"{EXPERIMENTS} experiments were made", limit_s=400)
        assert again.process.wait(60) == 0
    finally:
        if again.process.poll() is None:
            again.end()
    assert again.said().count("interrupted while it was judged") == len(open_)
    rows = check(begun)
    assert [row.row() for row in rows[: len(known)]] == [row.row() for row in known]
    assert {intent.proposal.hypothesis for intent in open_} <= {row.description for row in rows}
    tried = [row for row in rows if row.agent != STARTER]
    states = Counter(row.status for row in tried)
    assert len(tried) == len(known) - 2 + EXPERIMENTS and set(states) <= {"failed", "undecided"}
    assert states["undecided"] <= 1, "but for the victim's, if the driver was killed while that was judged again"

    with begun.locked(), Judge("cpu") as judge:  # and without
        loop = Loop(begun, begun.plan, judge, print)
        loop.run(ScriptedAgent([(wrong(99), "on one machine")]), NO_RULES, Budget())
    assert check(begun)[-1].description == "on one machine"
    assert state(clone) == before


def test_what_ray_prints_of_a_lost_worker_is_no_result(begun, capfd):  # noqa: F811
    """It goes to the run's log: of --json, stdout has the JSON alone."""
    job = Job(Workload(device="cpu"), workers=Workers(1))
    Workforce(0.0, []).write(begun.folder)
    with fleet(begun, job, Loop(begun, begun.plan, None, lambda text: None), lambda text: None):
        below = psutil.Process().children(recursive=True)
        next(one for one in below if "ray::TimingWorker" in " ".join(_command(one))).kill()
        deadline = time.monotonic() + 60
        while "(raylet)" not in (begun / LOG).read_text() and time.monotonic() < deadline:
            sys.stdout.flush()
            time.sleep(0.1)
    assert "(raylet)" in (begun / LOG).read_text() and not capfd.readouterr().out


def test_nodes_that_do_not_fit_are_refused(monkeypatch, begun: Workspace):  # noqa: F811
    from autokernel.run import ray_pool

    with pytest.raises(Refused, match="cores, and each worker"):
        ray_pool.RayPool("cpu", 1000, None, require_sandbox=False, say=print)
    with pytest.raises(Refused, match="0 GPUs"):
        ray_pool.RayPool("cuda", None, None, require_sandbox=False, say=print)
    with pytest.raises(Refused, match="no Ray cluster at"):
        ray_pool.RayPool("cpu", 1, "127.0.0.1:1", require_sandbox=False, say=print)
    here = ray_pool.Facts.here
    monkeypatch.setattr(ray_pool.Facts, "here", staticmethod(lambda *given: replace(here(*given), torch="2.9.0")))
    with pytest.raises(Refused, match=re.escape(f"has torch {torch.__version__} instead of 2.9.0")):
        ray_pool.RayPool("cpu", 1, None, require_sandbox=False, say=print)  # the driver is the odd one here


def test_a_worker_that_falls_ill_is_in_quarantine(monkeypatch, begun: Workspace):  # noqa: F811
    """Its device computes wrongly after its first canary: the second one shows it, and others judge what it refused."""
    from autokernel.run import canary, ray_pool

    class Ill(ray_pool.TimingWorker):
        """On the second half of the cores every kernel has a wrong answer, after two that have not."""

        examined = 0

        def __init__(self, device: str, place: ray_pool.Place, require_sandbox: bool) -> None:
            super().__init__(device, place, require_sandbox)
            self.falls_ill = place.part == 1

        def examine(self, task):
            self.examined += 1
            ill = self.falls_ill and self.examined > 2
            return super().examine(replace(task, source=canary.altered(task.source)) if ill else task)

    monkeypatch.setattr(ray_pool, "TimingWorker", Ill)
    monkeypatch.setattr(canary, "SOON_S", 0.0)
    monkeypatch.setattr(canary, "REFUSED_IN_A_ROW", 1)
    said: list[str] = []
    with begun.locked():
        loop = Loop(begun, begun.plan, None, said.append)
        with ray_pool.RayPool("cpu", 2, None, require_sandbox=False, say=said.append) as pool:
            target = default_target("rmsnorm", "cpp", "cpu", torch.float32)
            canaries = canary.Canaries(target, starter_source(target))
            fleet = Fleet(loop, pool, said.append, lambda w: w.write(begun.folder), canaries=canaries)
            fleet.run(ScriptedAgent(script()), NO_RULES, Budget(experiments=4))
    (ill,) = [worker for worker in read_workforce(begun.folder).workers if worker.quarantine]
    assert ill.name == "w2" and "judged a known kernel wrongly" in ill.quarantine
    assert any(", again: w2 is in quarantine" in row.description for row in check(begun))


@pytest.mark.parametrize("workers", [None, 2])
def test_a_node_that_is_unlike_the_drivers(monkeypatch, workers):
    """Where all are asked for, the run goes on without it; where a number is, it does not begin."""
    from ray.cluster_utils import Cluster

    from autokernel.run import ray_pool

    on_signal = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    signal.signal(signal.SIGTERM, on_signal)
    odd = cluster.add_node(num_cpus=1).node_id

    class Odd(ray_pool.TimingWorker):
        def hello(self):
            node, unit, facts = super().hello()
            return node, unit, replace(facts, compilers="g++ 1.0") if unit == odd else facts

    monkeypatch.setattr(ray_pool, "TimingWorker", Odd)
    said: list[str] = []
    try:
        if workers:
            with pytest.raises(Refused, match=r"worker w\d is refused: its node, .*, has compilers g\+\+ 1.0 instead of"):
                ray_pool.RayPool("cpu", workers, cluster.address, require_sandbox=False, say=said.append)
        else:
            with ray_pool.RayPool("cpu", workers, cluster.address, require_sandbox=False, say=said.append) as pool:
                assert len(pool.actors) == 1 and "g++ 1.0" in " ".join(said)
                (joined,) = pool.events(1.0)
                assert joined.unit and joined.unit != odd
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, on_signal)


class Machines:
    """A cluster of two nodes on this machine, a core each; the driver belongs to the first."""

    def __init__(self, **system_config: object) -> None:
        from ray.cluster_utils import Cluster

        on_signal, self.cores = signal.getsignal(signal.SIGTERM), sorted(os.sched_getaffinity(0))
        try:
            os.sched_setaffinity(0, self.cores[:1])  # a node's processes inherit it
            self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": system_config})
            os.sched_setaffinity(0, self.cores[1:2])
            self.node = self.cluster.add_node(num_cpus=1)
        finally:
            os.sched_setaffinity(0, self.cores)
            signal.signal(signal.SIGTERM, on_signal)
        self.raylet = psutil.Process(self.node.all_processes["raylet"][0].process.pid)

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *exc: object) -> None:
        on_signal = signal.getsignal(signal.SIGTERM)
        self.cluster.shutdown()
        signal.signal(signal.SIGTERM, on_signal)

    def processes(self) -> list[psutil.Process]:
        """Of the second node: what Ray has started there, and what that has."""
        return [self.raylet, *self.raylet.children(recursive=True)]


def test_a_node_is_cut_off_and_comes_back(begun: Workspace):  # noqa: F811
    """Nothing of it runs or answers for longer than Ray waits: what was judged there is judged by the other node's worker.
    When it comes back, whatever is left of its worker ends, and changes no row."""
    from autokernel.run import ray_pool

    cut: list[psutil.Process] = []
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "failed: wrong" in line and not cut:
            cut.extend(machines.processes())
            for process in cut:
                process.suspend()
        if "is lost" in line:
            for process in cut:
                process.resume()

    checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000}
    with Machines(health_check_failure_threshold=3, **checks) as machines, begun.locked():
        loop = Loop(begun, begun.plan, None, say)
        with ray_pool.RayPool("cpu", 2, machines.cluster.address, require_sandbox=False, say=say) as pool:
            fleet = Fleet(loop, pool, say, lambda w: w.write(begun.folder))
            reason = fleet.run(ScriptedAgent(script()), NO_RULES, Budget(experiments=EXPERIMENTS))
        _, left = psutil.wait_procs(cut, 30)
    assert reason == f"{EXPERIMENTS} experiments were made" and not left
    assert Counter(row.status for row in check(begun) if row.agent != STARTER) == {Status.FAILED: EXPERIMENTS}
    (gone,) = [worker for worker in read_workforce(begun.folder).workers if worker.left_s is not None]
    assert "its node is gone" in gone.fault and sum("is lost: " in line for line in said) == 1
    assert "judged again by another worker, attempt 2 of 2" in " ".join(said)


def test_an_answer_that_comes_as_its_worker_is_replaced(begun: Workspace):  # noqa: F811
    """The driver sees it after the lease has ended, and can say that it is dropped; of the end itself nothing is told."""
    from autokernel.run import ray_pool

    edit, _ = next(script())
    target = begun.plan.targets[0]
    with ray_pool.RayPool("cpu", 1, None, require_sandbox=False, say=print) as pool:
        (joined,) = pool.events(0)
        pool.submit(joined.worker, Task(7, target, edit(starter_source(target)), None))
        answer = pool.actors[joined.worker].call
        assert ray_pool.ray.wait([answer], timeout=120)[0]
        pool.replace(joined.worker)
        (late,) = pool.events(60)
        assert isinstance(late, Answer) and (late.worker, late.lease) == (joined.worker, 7)
        (new,) = pool.actors
        pool.submit(new, Task(8, target, edit(starter_source(target)), None))
        pool.replace(new)  # before it has answered
        assert not [event for event in pool.events(5) if not isinstance(event, Joined)] and not pool.late


def test_the_object_store_is_full(monkeypatch, tmp_path, begun: Workspace):  # noqa: F811
    """And the disk that Ray would move objects to. What is small is judged all the same, what is not waits for space."""
    import numpy as np
    import ray

    from autokernel.run import ray_pool

    held, said, answered = [], [], tmp_path / "answered"

    class Wordy(ray_pool.TimingWorker):
        """Its first report is too long to be sent without the store."""

        def judged(self, task):
            verdict, starter = super().judged(task)
            if not answered.exists():
                answered.touch()
                verdict = replace(verdict, stages={"longest": secrets.token_hex(UNPACKABLE)})
            return verdict, starter

    def fill(space: int = 4 << 20) -> None:
        while space > 1 << 14:
            try:
                held.append(ray.put(np.zeros(space, np.uint8)))
            except ray_pool.STORE_FULL:
                space //= 2

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("#") and any("waits for space" in line for line in said):
            held.clear()

    def edits() -> Iterator[tuple[object, str]]:
        for number, (edit, words) in enumerate(script()):
            yield (long(edit) if number == 2 else edit), words

    def long(edit):
        return lambda incumbent: edit(incumbent) + f"# {secrets.token_hex(UNPACKABLE)}\n"

    monkeypatch.setattr(ray_pool, "TimingWorker", Wordy)
    no_disk = {"local_fs_capacity_threshold": 0.0, "automatic_object_spilling_enabled": False}
    with one_node(object_store_memory=80 << 20, _system_config=no_disk) as address, begun.locked():
        loop = Loop(begun, begun.plan, None, say)
        with ray_pool.RayPool("cpu", 2, address, require_sandbox=False, say=say) as pool:
            fill()
            fleet = Fleet(loop, pool, say, lambda w: w.write(begun.folder))
            reason = fleet.run(ScriptedAgent(edits()), NO_RULES, Budget(experiments=EXPERIMENTS))
            held.clear()
    assert reason == f"{EXPERIMENTS} experiments were made"
    assert sum("object store is full" in line and "waits for space" in line for line in said) == 1
    assert sum("is lost: Ray's object store is full" in line for line in said) == 1
    tried = [row for row in check(begun) if row.agent != STARTER]
    assert sorted(row.description for row in tried) == [f"wrong {number + 1}" for number in range(EXPERIMENTS)]
    assert {row.status for row in tried} == {Status.FAILED}


@contextmanager
def one_node(**options: object) -> Iterator[str]:
    """The address of a cluster of one node on this machine."""
    from ray.cluster_utils import Cluster

    on_signal = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **options})
    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, on_signal)


@pytest.fixture(autouse=True)
def default_sigterm() -> Iterator[None]:
    """As a test in this process may leave it, Ray or not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before
