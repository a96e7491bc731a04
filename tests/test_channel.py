"""What a forged worker says to the judge: whatever it is, no exception, no hang, and no verdict but on that kernel.

The worker is a real process behind a real socket and real shared memory; what it forges is in forger.py.
"""

import os
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

import pytest
import torch
from forger import RIGHT, forging

from autokernel.gate import Correctness, Judge
from autokernel.gate.checks.expectations import most_bytes
from autokernel.gate.checks.runner import StageRun
from autokernel.gate.checks.trials import trials
from autokernel.gate.timing import witness
from autokernel.gate.timing.batches import Batches
from autokernel.gate.workers import answers
from autokernel.gate.workers.channel import Arena, Channel, ChannelClosed
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess, write_inputs
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers of Linux")

SPEC = load_spec("rmsnorm")
TARGET = Target("small", "rmsnorm", "cpp", "cpu", (WeightedCase(SPEC.case({"M": 8, "N": 64}, torch.float32)),))
CASE = TARGET.cases[0].case
FORGED = "the worker's answer is not what was asked for: "
LONGEST_S, LARGEST_BYTES = 15.0, 1 << 30  # of one answer on a busy machine; of all together


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Its own: forged answers must leave it as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Judge("cpu", allow_libraries=True) as judge:
        yield judge
    torch.set_num_threads(threads)


def calls(judge: Judge, worker: WorkerProcess) -> None:
    (step,) = islice(next(trials(SPEC, TARGET, 1, quick=True)).steps(SPEC), 1)
    case = next(trials(SPEC, TARGET, 1, quick=True)).case
    stages = StageRun(judge.checks, "", TARGET, 1, quick=True, libraries="any", progress=str, smoked=list)
    stages._call(worker, SPEC, case, step, 0)


def batches_of(judge: Judge, worker: WorkerProcess, stops: bool) -> Batches:
    inputs = {name: torch.randn(spec.shape, dtype=spec.dtype) for name, spec in CASE.tensors.items()}
    message, _ = write_inputs(judge.parent, {**CASE.args, **inputs}, CASE.tensors, 0)
    worker.request("sets", 10, sets=[message] * 2)
    return Batches(worker, stops, most_bytes(SPEC, CASE))


def timing(judge: Judge, worker: WorkerProcess) -> None:
    batches = batches_of(judge, worker, stops=True)
    batches.prepare([0, 1], graph=False)
    batches.time()
    (layout,) = batches.layouts()
    batches.output(1, layout)
    batches.fetch([0, 1])
    batches.fetch_part([0, 1], [3, 8])
    batches.arrival_s([1], [0, 4])


def launches(judge: Judge, worker: WorkerProcess) -> None:
    batches_of(judge, worker, stops=False).launch_us([0, 1])


def memory(judge: Judge, worker: WorkerProcess) -> None:
    with judge.contests.timer(TARGET, 1, "any") as timer:
        timer._note_memory(worker)
        assert timer.peak_bytes >= 0


def kernels(judge: Judge, worker: WorkerProcess) -> None:
    witness.foreign_kernels(worker.request("kernels", 10).microseconds)


def probe(judge: Judge, worker: WorkerProcess) -> None:
    judge.sandbox | worker.request("probe", 10, secret="/nothing", outsider=1).layers


# What the judge does with answers -> how many there are to be forged, and what is forged where the worker has but an error.
USES: dict[Callable[[Judge, WorkerProcess], None], tuple[int, dict[str, object]]] = {
    calls: (2, {}),
    timing: (17, {}),
    launches: (14, {}),
    memory: (1, {}),
    kernels: (1, {"microseconds": {"gemm": 1.5, "mine": 2.0}}),
    probe: (1, {}),
}


def forged_answers(judge: Judge, seeds: Iterable[int]) -> Counter[str]:
    """What becomes of that many forged answers."""
    fates: Counter[str] = Counter()
    worker = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        draw = random.Random(seed)
        use = draw.choices(list(USES), [4, 6, 1, 1, 1, 1])[0]
        count, base = USES[use]
        at = draw.randrange(count)
        if worker is None or not armed(worker, at, seed, base):
            if worker is not None:
                worker.kill()
            worker = WorkerProcess(judge.parent, 1, forging())
            worker.request("load", 60, source=forging(), poison=False, libraries="any")
            assert armed(worker, at, seed, base)
        started = time.monotonic()
        try:
            use(judge, worker)
            fates["taken"] += 1
        except WorkerFault as fault:
            assert fault.worker is worker and fault.reason.isprintable() and len(fault.reason) <= 1000
            fates[f"{fault.kind}: {FORGED if fault.reason.startswith(FORGED) else 'other'}"] += 1
        assert time.monotonic() - started < LONGEST_S, f"seed {seed}"
    worker.kill()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < LARGEST_BYTES, f"{grown >> 20} MiB"
    return fates


def armed(worker: WorkerProcess, at: int, seed: int, base: dict[str, object]) -> bool:
    """Whether the worker is there and ready to forge; what is left of an earlier forgery must not stand in between."""
    worker.resume()
    try:
        worker.channel.send({"op": "forge", "at": at, "seed": seed, "base": base})
        return worker.channel.receive(10) == {"armed": seed}
    except (ChannelClosed, ValueError):
        return False


def assert_refused_but_for_a_few(fates: Counter[str]) -> None:
    """Some of what is forged is within bounds: a figure, another output."""
    print(dict(fates))
    assert fates[f"CRASH: {FORGED}"] > 0.5 * fates.total(), fates
    assert fates["taken"] < 0.4 * fates.total(), fates


def test_100_forged_answers(judge: Judge):
    assert_refused_but_for_a_few(forged_answers(judge, range(100)))
    assert judge.check(RIGHT, TARGET).failure is None


@pytest.mark.slow
def test_10_000_forged_answers(judge: Judge):
    assert_refused_but_for_a_few(forged_answers(judge, [*range(100, 300), *range(1000, 10_800)]))
    assert judge.check(RIGHT, TARGET).failure is None


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 100))])
def test_a_whole_check_of_a_forger_is_a_verdict(judge: Judge, seed: int):
    verdict = judge.check(forging(at=random.Random(seed).randrange(1, 30), seed=seed), TARGET)
    assert verdict.correctness in (Correctness.CRASH, Correctness.FAIL, Correctness.PASS)
    assert verdict.failure is None or verdict.failure.reason.isprintable()


def output(**forged: object) -> dict[str, object]:
    return {"outputs": [{"shape": [8, 64], "stride": [64, 1], "dtype": "float32", "start": 0, **forged}]}


WHILE_TIMED = {
    "strides of another rank": ("fetch", output(stride=[64, 1, 1])),
    "an output of another rank": ("fetch", output(shape=[2, 4, 64])),
    "an output outside of the arena": ("fetch", output(start=1 << 46)),
    "an output that no memory holds": ("fetch", output(shape=[1 << 40, 1 << 40], stride=[1, 1])),
    "an output as large as the arena": ("fetch", output(shape=[1 << 28], stride=[1])),
    "no output": ("fetch", {"outputs": []}),
    "no address": ("batch", {"addresses": []}),
    "an address of no memory": ("batch", {"addresses": [8] * 2000}),
    "much memory": ("memory", {"peak_bytes": "much"}),
    "memory below nothing": ("memory", {"peak_bytes": -1}),
    "another request's answer": ("memory", {"id": 7}),
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", WHILE_TIMED)
def test_an_answer_that_was_not_asked_for_while_timed(judge: Judge, name: str):
    op, fields = WHILE_TIMED[name]
    verdict = judge.contest(forging(op=op, fields=fields), RIGHT, TARGET)
    assert verdict.correctness == Correctness.CRASH, verdict.why
    assert verdict.failure.reason.startswith(f"while timed: {FORGED}"), str(verdict.failure)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("op", ["fetch", "memory"])
def test_a_forging_incumbent_is_no_fault_of_the_candidates(judge: Judge, op: str):
    fields = {"fetch": output(stride=[1]), "memory": {"peak_bytes": None}}[op]
    with judge.contests.timer(TARGET, 1, "any") as timer, pytest.raises(RuntimeError, match=FORGED):
        judge.contests.noise_floor(forging(op=op, fields=fields), TARGET, timer.setting.libraries)


def test_every_request_has_a_schema():
    from autokernel.gate.workers.worker import Worker

    assert set(answers.DECODERS) == {name.removeprefix("do_") for name in dir(Worker) if name.startswith("do_")}


def test_an_arena_is_closed_once() -> None:
    """A worker is ended where it fails, and once more with its judge; its descriptor's number is another file's by then."""
    arena = Arena(4096, True)
    arena.close()
    with open(os.devnull) as other:
        arena.close()
        os.fstat(other.fileno())


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones() -> None:
    """Ctrl-C while a worker is started: the number of its process was taken for how another one ended, and raised."""
    ours, theirs = socket.socketpair()
    parent, worker = object.__new__(WarmParent), object.__new__(WorkerProcess)  # of both what an exchange needs
    parent.socket, parent.channel, parent.lock = ours, Channel(ours), threading.Lock()
    worker.parent, worker.pid = parent, 7
    with pytest.raises(KeyboardInterrupt), parent.exchange() as channel:
        channel.send({"op": "spawn"})
        raise KeyboardInterrupt
    with suppress(ChannelClosed):
        Channel(theirs).send({"pid": 8})
    assert worker._reap() is None
