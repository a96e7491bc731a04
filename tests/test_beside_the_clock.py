"""What a kernel could do beside the clock: each is tried against the gate itself, which must not be moved by it."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from autokernel.build import default_cache
from autokernel.gate import Correctness, Judge
from autokernel.gate.checks.inputs import Pool
from autokernel.gate.timing import audit, witness
from autokernel.gate.timing.batches import Clocked, TimedContents, per_call
from autokernel.gate.timing.contest import Measured, NotDecided
from autokernel.gate.timing.faults import RefusedWhileTimed
from autokernel.gate.timing.pairs import BATCH_S, PairResult, PairTimer, Side, seconds_of
from autokernel.gate.timing.statistics import keep_rule
from autokernel.gate.workers.channel import Placed
from autokernel.gate.workers.processes import WorkerFault, WorkerProcess, tasks
from autokernel.gate.workers.stopwatch import Allowance
from autokernel.gate.workers.views import POOL, copy_from_pool
from autokernel.spec import ROOT, load_spec
from autokernel.target import Target, WeightedCase, default_target
from tests.busy import skip_if_undecided
from tests.find_worker import FIND_WORKER

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
STARTER = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()

SLOW_TO_DO_NOTHING = (
    FIND_WORKER
    + """
import time

worker = find_worker()
if worker:
    batch = worker.do_batch

    def do_batch(repeats):
        if not worker.order:
            time.sleep(0.004)
        return batch(repeats)

    worker.do_batch = do_batch
"""
)


@pytest.mark.timed
def test_a_worker_that_is_slow_to_do_nothing_gains_nothing(judge: Judge):
    verdict = judge.contest(STARTER + SLOW_TO_DO_NOTHING, STARTER, TARGET)
    assert not verdict.keep
    if verdict.failure:
        assert "a batch of no calls takes it" in verdict.failure.reason
    elif verdict.decided:
        assert verdict.speedup_vs_incumbent.value < 1.1, verdict.why


IDLE_IN_SOME_BATCHES = (
    FIND_WORKER
    + """
worker = find_worker()
if worker:
    batch, state = worker.do_batch, {"batches": 0}

    def do_batch(repeats):
        state["batches"] += len(worker.order) > 2
        if state["batches"] % 4 > 1 or not worker.held:  # two in a row: every other batch is not timed
            answer = batch(repeats)
            state["held"] = worker.held
            return answer
        return {"enqueued_s": 0.0, "addresses": [y.data_ptr() for y in worker.held]}

    def do_drop():  # outputs stay, to be shown once more
        pass

    worker.do_batch, worker.do_drop = do_batch, do_drop
"""
)


@pytest.mark.timed
def test_an_output_of_every_timed_batch_is_read(judge: Judge):
    """Every other timed batch is not computed: as many as a median can hide."""
    verdict = judge.examine(STARTER + IDLE_IN_SOME_BATCHES, TARGET)
    if verdict.failure is None:
        skip_if_undecided(verdict)
    assert verdict.correctness == Correctness.FAIL, verdict.why
    assert "the output of a timed call" in verdict.failure.reason


ONE_IN_17_LEFT_OUT = """

honest, calls, last = kernel_fn, [0], {}

def kernel_fn(A, B):
    calls[0] += 1
    y = honest(A, B) if calls[0] % 17 or A.shape != (512, 768) or not last else last["y"].clone()
    last["y"] = y
    return y
"""


@pytest.mark.timed
@pytest.mark.skipif(sys.platform != "linux", reason="reads a worker's memory")
@pytest.mark.parametrize("after", [ONE_IN_17_LEFT_OUT, ""], ids=["left-out", "honest"])
def test_calls_that_are_left_out_now_and_then_are_found(judge: Judge, after: str):
    spec = load_spec("matmul")
    case = WeightedCase(spec.case({"M": 512, "K": 768, "N": 768, "b_transposed": True}, torch.float32))
    source = (spec.folder / "cpp_kernel.py").read_text()
    sides = [Side("candidate", source + after), Side("eager")]
    with judge.contests.timer(Target("products", "matmul", "cpp", "cpu", (case,)), 0, "none") as timer:
        if not after:
            timer.pair(sides, "candidate")
            return
        with pytest.raises(RefusedWhileTimed, match="the output of a timed call"):
            for _ in range(8):
                timer.pair(sides, "candidate")


@pytest.mark.timed
def test_more_threads_than_all_sides_have_are_refused(judge: Judge):
    many = STARTER.replace("#pragma omp parallel for", "#pragma omp parallel for num_threads(16)")
    assert many != STARTER
    verdict = judge.examine(many, TARGET, quick=True)
    if verdict.failure is None and (verdict.undecided or "pairs on a busy machine" in verdict.why):
        pytest.skip(verdict.why)
    assert verdict.failure is not None, verdict.why
    assert "threads are at work" in verdict.failure.reason


def test_timed_inputs_are_products_of_slices_that_no_sum_over_the_pool_tells_of():
    values = torch.randn(POOL)
    for start, factor, strides in ((5, POOL - 7, (96, 1)), (POOL - 3, 11, (1, 64)), (0, 0, (96, 1))):
        out = torch.empty_strided((64, 96), strides)
        copy_from_pool(values, start, out, factor)
        places = torch.arange(64 * 96)
        flat = torch.as_strided(out, (64 * 96,), (1,))
        torch.testing.assert_close(flat, values[(start + places) % POOL] * values[(factor + places) % POOL])


def test_on_a_gpu_every_timed_input_has_memory_of_its_own(judge: Judge):
    """A worker gives inputs that lie at one place of the shared memory one tensor."""
    case = load_spec("flash_attention").case({"batch": 1, "heads": 2, "seq": 100, "head_dim": 64}, torch.float16)
    where = Target("attention", "flash_attention", "triton", "cuda", (WeightedCase(case),))
    with judge.contests.timer(where, 0, "none") as timer:
        contents = TimedContents(timer.setting, case, Pool(0))
        contents.hand_out({})
    for message in contents.messages:
        places = sorted((message[name]["start"], Placed.decode(message[name]).end) for name in case.tensors)
        assert len(places) == 3
        assert all(end <= start for (_, end), (start, _) in zip(places, places[1:])), places


def test_a_pool_that_is_there_several_times_over_is_cut_into_the_same_contents():
    values = torch.randn(POOL)
    once, longer = torch.empty(3, 2 * POOL + 5), torch.empty(3, 2 * POOL + 5)
    copy_from_pool(values, POOL - 3, once, 11)
    copy_from_pool(values.repeat(8), POOL - 3, longer, 11)
    assert torch.equal(once, longer)


def test_whoever_has_the_judge_wait_for_an_output_pays_for_it():
    honest = [Clocked(10.0 + write_s + 0.1, write_s, 0.1) for write_s in (2.0, 2.1, 3.3)]  # the judge's own work varies
    late = [Clocked(7.0 + 2.0 + 3.1, 2.0, 3.1)] * 3  # three seconds go by until what is read is there
    at_work = [Clocked(7.0 + 6.0 + 0.1, 6.0, 0.1)] * 3  # on the GPU while the judge writes, which takes that much longer
    taken = per_call({"honest": honest, "late": late, "at work": at_work}, 2)
    assert taken["honest"] == pytest.approx([5.0] * 3)
    assert taken["late"] == pytest.approx([5.0] * 3)
    assert taken["at work"] == pytest.approx([4.5] * 3)


def test_some_slow_batches_are_part_of_what_a_kernel_costs():
    assert seconds_of([1.0] * 12) == 1.0
    assert seconds_of([1.0] * 11 + [3.0]) == 1.0  # one that something else disturbed
    assert seconds_of([1.0] * 7 + [10.0] * 5) == pytest.approx(0.8 * 57 / 12)


def test_work_in_batches_that_are_not_timed_goes_against_a_kernel():
    timed = {"candidate": [1.0, 1.1, 0.9], "eager": [2.0, 2.0, 2.1]}
    assert audit.busy_between({"candidate": [1.2, 1.0, 1.1], "eager": [2.2, 2.0, 2.0]}, timed, "candidate") is None
    assert audit.busy_between({"candidate": [2.9, 3.1, 3.0], "eager": [2.2, 2.0, 2.0]}, timed, "candidate")
    assert audit.busy_between({"candidate": [2.9, 3.1, 3.0], "eager": [6.2, 6.0, 6.3]}, timed, "candidate") is None


def test_pairs_that_an_audit_refused_count_but_bring_no_look_nearer():
    clean, struck = PairResult({"candidate": (1.0,)}), PairResult({"candidate": (1.2,)}, struck=True)
    measured = Measured(pairs=[clean, clean, clean, struck])
    assert measured.clean == 3
    assert "audits refused 1 pair" in measured.circumstances
    with pytest.raises(NotDecided):
        for _ in range(20):
            measured.add(struck)
    gains = [0.30, 0.31, 0.30]
    assert not keep_rule(gains, {}, 0.005, look=3).keep
    assert not keep_rule([*gains, 0.29, 0.30], {}, 0.005, look=3).keep  # five ratios, and still the first look
    assert keep_rule([*gains, 0.29, 0.30, 0.31, 0.30, 0.30], {}, 0.005, look=8).keep
    assert not keep_rule([*gains, 0.29, 0.30, 0.31, 0.30, 0.30, 0.0, 0.0, 0.0], {}, 0.28, look=8).keep


@pytest.mark.slow
@pytest.mark.timed
def test_no_batch_is_chosen_by_page_faults(judge: Judge, monkeypatch):
    """The first batches touch memory that later ones have, and take six times as long: two calls seemed to be enough."""
    seconds, choose = [], PairTimer._order

    def chosen(self, batches, *rest):
        found = choose(self, batches, *rest)
        for batch in batches.values():
            seconds.append(min((batch.drop(), batch.time())[1] for _ in range(10)))
        return found

    monkeypatch.setattr(PairTimer, "_order", chosen)
    spec = load_spec("softmax")  # 12.6 MB of inputs and as many of results, in about a millisecond
    case = WeightedCase(spec.case({"shape": (6144, 512)}, torch.float32))
    source = (spec.folder / "cpp_kernel.py").read_text()
    judge.compare(source, source, Target("softmax_6144x512", "softmax", "cpp", "cpu", (case,)))
    assert median(seconds) > 0.8 * BATCH_S["cpu"], seconds


@pytest.mark.slow
def test_a_long_call_is_a_batch_of_its_own(judge: Judge, monkeypatch):
    """Of a call that is long beside the clock's 5 ms more of them tell no more, and take as many times as long."""
    orders, choose = [], PairTimer._order

    def chosen(self, batches, *rest):
        found = choose(self, batches, *rest)
        orders.append(found[0])
        return found

    monkeypatch.setattr(PairTimer, "_order", chosen)
    slow = STARTER.replace("def kernel_fn(", "def _right(")
    slow += (
        "\nimport time\n\ndef kernel_fn(x, weight, eps=1e-6):\n    time.sleep(0.06)\n    return _right(x, weight, eps)\n"
    )
    for source in (slow, STARTER):
        with judge.contests.timer(TARGET, 7, "none") as timer:
            timer.pair([Side("one", source), Side("other", source)], "one")
    assert len(orders[0]) == 1 < len(orders[1])


THREADS = """
import threading

KERNEL_TYPE, BACKEND = "rmsnorm", "cpp"
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def kernel_fn(x, weight, eps):
    return x
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_are_kept_apart_from_the_first(judge: Judge):
    cores = os.sched_getaffinity(0)
    with WorkerProcess(judge.parent, 1, THREADS) as worker:
        worker.request("load", 30, source=THREADS, poison=False, libraries="any")
        worker.pin()
        first, *others = sorted(int(task.name) for task in tasks(worker.pid))
        assert os.sched_getaffinity(first) == cores and len(others) >= 3
        assert all(len(os.sched_getaffinity(other) - {min(cores)}) == 1 for other in others)


MAPS_MEMORY = """
import mmap, threading

def map_and_unmap():
    while True:
        mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x8000).close()  # MAP_POPULATE

KERNEL_TYPE, BACKEND = "rmsnorm", "cpp"
threading.Thread(target=map_and_unmap, daemon=True).start()

def kernel_fn(x, weight, eps):
    return x
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_is_stopped_stands_still_whatever_system_call_it_is_in(judge: Judge):
    def cpu_ns(pid: int) -> int:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks(pid))

    with WorkerProcess(judge.parent, 1, MAPS_MEMORY) as worker:
        worker.request("load", 60.0, source=MAPS_MEMORY, poison=False, libraries="any")
        for _ in range(5):
            time.sleep(0.05)
            worker.stop()
            before = cpu_ns(worker.pid)
            time.sleep(0.1)
            assert cpu_ns(worker.pid) == before
            worker.resume()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stands, counts", [(True, 0.0), (False, 6e-3)])
def test_a_thread_that_leaves_its_core_late_has_not_run_while_it_was_suspended(judge: Judge, monkeypatch, stands, counts):
    """As where a hypervisor takes the core away meanwhile. One that has been continued has."""
    with WorkerProcess(judge.parent, 1, "") as worker:
        times = iter([1.0, 1.003, 1.006])
        monkeypatch.setattr(worker, "cpu_s", lambda: next(times, 1.006))
        stood = iter([True])
        monkeypatch.setattr("autokernel.gate.workers.processes.stopped", lambda task: stands or next(stood, False))
        worker.stop()
        assert 1.006 - worker.suspended_s == pytest.approx(counts)
        with pytest.raises(WorkerFault, match="6000 us while it was suspended") if counts else contextlib.nullcontext():
            worker.resume()


def test_a_kernel_that_ran_while_it_was_suspended_is_measured_again_once_where_others_are_at_work(judge: Judge):
    target = default_target("rmsnorm", "cpp", "cpu", torch.float32)
    with judge.contests.timer(target, 1, "none") as timer, WorkerProcess(judge.parent, 1, "") as worker:
        ran, other = WorkerFault(worker, "FAIL", "it ran", suspended=True), WorkerFault(worker, "FAIL", "it was wrong")
        quiet, busy = SimpleNamespace(share=0.0), SimpleNamespace(share=0.5)
        given = [(ran, worker, quiet), (other, worker, busy), (ran, None, busy), (ran, worker, busy), (ran, worker, busy)]
        assert [timer._is_excused(*case) for case in given] == [False, False, False, True, False]


DECOYS = """
import os, sys, threading, time
from pathlib import Path

import torch
from autokernel.build import cpp_function

torch.set_num_threads(1)
spin = cpp_function('extern "C" int spin(long n) { volatile long i = 0; while (i < n) i = i + 1; return 0; }', "spin", "l")

def decoy():
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    spin(1 << 62)  # one call: between two, a thread that gets no time would keep the interpreter's lock

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # all on one core, where idle ones get next to nothing
for _ in range(6):
    threading.Thread(target=decoy, daemon=True).start()
spin(1)
a = torch.randn(384, 384)
print("ready", flush=True)
while True:
    a @ a
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_that_leave_the_core_to_a_library_do_not_hide_it():
    command = [sys.executable, "-c", DECOYS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
    ) as busy:
        assert busy.stdout.readline() == b"ready\n"
        seen, deadline = witness.Seen(), time.perf_counter() + 3.0
        with seen.weighing(busy.pid):
            time.sleep(0.5)

        def running(seconds: float) -> bool:
            time.sleep(seconds)
            return time.perf_counter() < deadline

        seen.sample(busy.pid, running)
        maps = Path(f"/proc/{busy.pid}/maps").read_text().splitlines()
        busy.kill()
    own = {line.split(maxsplit=5)[-1] for line in maps if f"{default_cache()}/" in line}
    assert own, "the decoys' code is not loaded"
    assert seen.foreign(own), seen.shares()


# Own work, and some of PyTorch's, a fifth of the time or more.
PARTLY = """
import sys, time

import torch
from autokernel.build import cpp_function

torch.set_num_threads(1)
spin = cpp_function('extern "C" int spin(long n) { volatile long i = 0; while (i < n) i = i + 1; return 0; }', "spin", "l")
a, b = torch.randn(256, 256), torch.randn(1 << 20)
other = {"product": lambda: a @ a, "sum": lambda: b.sum(), "copy": lambda: b.clone()}[sys.argv[1]]

def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

other()
turns = int(2 * min(seconds(other) for _ in range(5)) / min(seconds(lambda: spin(10000)) for _ in range(5)) * 10000)
print("ready", flush=True)
while True:
    other()
    spin(turns)
"""


@pytest.mark.slow_after(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("other", ["product", "sum", "copy"])
def test_a_kernel_computes_nothing_in_a_library_and_may_copy_there(other: str):
    command = [sys.executable, "-c", PARTLY, other]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
    ) as busy:
        assert busy.stdout.readline() == b"ready\n"
        seen, deadline = witness.Seen(), time.perf_counter() + 0.5
        seen.sample(busy.pid, lambda seconds: time.sleep(seconds) or time.perf_counter() < deadline)
        maps = Path(f"/proc/{busy.pid}/maps").read_text().splitlines()
        busy.kill()
    own = {line.split(maxsplit=5)[-1] for line in maps if f"{default_cache()}/" in line}
    assert bool(seen.foreign(own)) == (other != "copy"), seen.shares()


def test_as_much_is_looked_at_where_others_have_the_cores():
    """What a thread waits for a core is none of what it may work: so it is while it sleeps."""
    waited, worked = Allowance(0.05), Allowance(0.05)
    time.sleep(0.1)
    assert not waited.is_spent()
    started_s = time.thread_time()
    while time.thread_time() < started_s + 0.06:
        pass
    assert worked.is_spent()
