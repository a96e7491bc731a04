"""What is timed: batches of one side's calls, and the contents of their inputs, which change before every batch."""

import contextlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.inputs import Pool, changing, fill_fixed
from autokernel.gate.workers.channel import POISON, Placed, place
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WarmParent, WorkerProcess
from autokernel.gate.workers.stopwatch import Stopwatch
from autokernel.gate.workers.views import POOL, copy_from_pool
from autokernel.spec import Case, KernelSpec, TensorSpec
from autokernel.target import Target

MAX_SETS = {"cpu": 1024, "cuda": 32}  # of inputs through which calls rotate
ROTATE_BYTES = {"cpu": 192 << 20, "cuda": 256 << 20}  # several times the last-level cache of current parts
MAX_GAPS = 16  # times as much memory as its elements take, over which an output may be spread
LAUNCHES = 64
CALL_S = 60.0  # a timed batch at most, and any other request while kernels are timed
START_S = 60.0  # loading a kernel, and the first call of a case
EMPTY_BATCHES = 7
MAX_SETTLING = 12  # batches until a worker touches no memory for the first time any more
FEW_FAULTS = 16  # pages that a batch may touch for the first time all the same


@dataclass(frozen=True)
class Setting:
    """What is timed, where and with what: shared by all that has a part in a contest."""

    parent: WarmParent
    spec: KernelSpec
    target: Target
    threads: int  # of a kernel, on a CPU
    libraries: str  # what a kernel may call, see Worker.do_load
    memory: DeviceMemoryBudget
    watch: Stopwatch
    random: random.Random

    @property
    def kind(self) -> str:
        return "cuda" if self.target.device.startswith("cuda") else "cpu"

    def each(self, workers: Mapping[str, WorkerProcess], messages: Mapping[str, dict[str, Any]]) -> None:
        """Send every worker its message and await the answers; on a CPU one after another, for they share its cores."""
        if self.kind == "cpu":
            for name, worker in workers.items():
                with running(worker):
                    worker.request(timeout_s=START_S, **messages[name])
            return
        for name, worker in workers.items():
            worker.post(**messages[name])
        for worker in workers.values():
            worker.answer(START_S)


@contextlib.contextmanager
def running(worker: WorkerProcess, stops: bool = True) -> Iterator[None]:
    """Let a worker run that is suspended but for this, if it `stops` between its turns."""
    if stops:
        worker.resume()
    yield
    if stops:
        worker.stop()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch work in this process on one thread: others would spin for a while when their work is done."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Batches:
    """One side while it is timed; `stops`: the worker is suspended between its turns; `most_bytes`: of an output."""

    def __init__(self, worker: WorkerProcess, stops: bool, most_bytes: int):
        self.worker, self.stops, self.most_bytes, self.graph = worker, stops, most_bytes, False
        self.addresses: tuple[int, ...] = ()  # on a CPU: of the outputs of the last batch, as the worker tells
        self.overhead_s = 0.0  # taken off each batch: see same_overhead()
        self.prepare([], graph=False)
        self.empty_s = median(self.time() for _ in range(EMPTY_BATCHES))  # what the clock reads for a batch of no calls

    def prepare(self, order: list[int], graph: bool) -> bool:
        """Get ready for calls on these sets; returns whether they are captured in a CUDA graph, as `graph` asks."""
        with running(self.worker, self.stops):
            self.graph = self.worker.request("prepare", CALL_S, order=order, graph=graph).graph
        return self.graph

    def drop(self) -> None:
        """Let go of the outputs of the last batch."""
        with running(self.worker, self.stops):
            self.worker.request("drop", CALL_S)

    def time(self) -> float:
        """Seconds that one batch takes. A worker that stops runs for nothing else."""
        start = time.perf_counter()
        with running(self.worker, self.stops):
            answer = self.worker.request("batch", CALL_S, repeats=1)
            seconds = time.perf_counter() - start
        self.addresses = answer.addresses
        return max(seconds - self.overhead_s, 1e-7)

    def settled_s(self) -> float:
        """Seconds of the shortest of three batches or more, until one touches no memory for the first time.

        Page faults make a batch up to ten times as long (measured: softmax of 6144x512 on a CPU, whose first five batches
        had them); a length that is chosen by such a one is too short for the clock.
        """
        fastest, faults = self.time(), self.worker.page_faults()
        for number in range(1, MAX_SETTLING):
            self.drop()
            fastest = min(fastest, self.time())
            before, faults = faults, self.worker.page_faults()
            if number > 1 and (not self.stops or faults - before <= FEW_FAULTS):
                break
        return fastest

    def launch_us(self, order: list[int]) -> float:
        """Microseconds in which the host enqueues one call that is not captured, as the worker tells."""
        graph, calls = self.graph, order[:LAUNCHES]
        self.prepare(calls, graph=False)
        self.time()
        self.drop()
        seconds = self.worker.request("batch", CALL_S, repeats=1).enqueued_s
        self.prepare(order, graph)
        return seconds / len(calls) * 1e6

    def fetch(self, calls: list[int]) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Outputs of some calls of the last batch, with their strides."""
        with running(self.worker, self.stops):
            described = self.worker.request("fetch", CALL_S, calls=calls).outputs
            return self.worker.fetch(described, len(calls), self.most_bytes)

    def fetch_part(self, calls: list[int], part: list[int]) -> Tensor:
        """A part (first element, elements) of the outputs of some calls of the last batch: [calls, elements]."""
        with running(self.worker, self.stops):
            described = self.worker.request("fetch", CALL_S, calls=calls, part=part).outputs
            ((output, _),) = self.worker.fetch(described, 1, len(calls) * self.most_bytes)
        if tuple(output.shape) != (len(calls), part[1]):
            raise self.worker.forged(f"a tensor of shape {list(output.shape)} instead of the part of each output")
        return output

    def layout(self) -> TensorSpec:
        """The shape, dtype and strides of an output of the last batch, as the worker tells."""
        ((y, strides),) = self.fetch([0])
        layout = TensorSpec(tuple(y.shape), y.dtype, strides)
        if layout.storage_numel > MAX_GAPS * max(1, y.numel()):
            raise self.worker.forged(f"strides {strides} of a tensor of shape {list(y.shape)}")
        return layout

    def output(self, call: int, layout: TensorSpec, start: int = 0) -> Tensor:
        """The output of a call of the last batch, from element `start` on, read where it lies; the worker is stopped."""
        if call >= len(self.addresses):
            raise self.worker.forged(f"{len(self.addresses)} addresses of outputs")
        return self.worker.read(self.addresses[call], layout, start * layout.dtype.itemsize)

    def arrival_s(self, calls: list[int], part: list[int]) -> float:
        """Seconds of a batch, until a part (first element, elements) of these calls' outputs lies in shared memory."""
        with running(self.worker, self.stops):
            self.worker.request("drop", CALL_S)
            start = time.perf_counter()
            self.worker.request("batch", CALL_S, repeats=1)
            self.worker.request("fetch", CALL_S, calls=calls, part=part)
            return time.perf_counter() - start


def same_overhead(batches: Iterable[Batches]) -> None:
    """Take the same off all sides' times, the shortest empty batch of any: nobody gains by being slow to do nothing."""
    batches = list(batches)
    for batch in batches:
        batch.overhead_s = min(other.empty_s for other in batches)


class TimedContents:
    """The inputs of one case while it is timed: the same addresses throughout, new contents before a batch is timed.

    Weights, and inputs of a special kind such as class indices, keep their contents (a kernel may prepare them); all
    others change, so that an output kept from an earlier call is wrong. On a CPU the judge writes them where the workers
    read them: products of two slices of a pool, so that no sums over the pool, which a worker might learn, tell of them. On
    a GPU workers cut them from a pool of random numbers at places that the judge names.
    """

    def __init__(self, setting: Setting, case: Case, pool: Pool):
        self.setting, self.case, self.pool = setting, case, pool
        self.changing = changing(setting.spec, case)
        set_bytes = max(1, sum(t.nbytes for t in case.tensors.values()))
        self.count = max(2, min(MAX_SETS[setting.kind], -(-ROTATE_BYTES[setting.kind] // set_bytes)))
        self.set_bytes = set_bytes
        self.memory = setting.parent.inputs.bytes
        self.used: Sequence[int] = range(self.count)  # the sets that are called, in this order
        self.messages: list[dict] = []  # one per set, as workers receive them
        self.places: list[dict[str, int]] = []  # one per set: where in the pool its changing inputs are cut

    @property
    def nbytes(self) -> int:
        """Of all that the calls of a batch are given."""
        return len(set(self.used)) * self.set_bytes

    def hand_out(self, workers: dict[str, WorkerProcess]) -> None:
        """Place and fill every set, and let the workers have them."""
        case, end = self.case, 0
        if self.setting.kind == "cuda":
            end = self._hand_out_pool(workers)
        cut_there = set(self.changing) if self.setting.kind == "cuda" else set()
        here = {name: spec for name, spec in case.tensors.items() if name not in cut_there}
        for _ in range(self.count):
            start = end
            placed, end = place(here, start)
            self.memory[start:end] = POISON
            views = {name: where.view(self.memory) for name, where in placed.items() if name not in self.changing}
            fill_fixed(self.setting.spec, case, views, self.pool)
            placed |= {name: Placed(case.tensors[name], 0) for name in cut_there}
            tensors = {name: where.encode() for name, where in placed.items()}
            self.messages.append({name: tensors.get(name, value) for name, value in case.args.items()})
        self._draw()
        messages = self.messages
        if cut_there:
            messages = [
                {name: value | {"pool": places[name]} if name in cut_there else value for name, value in message.items()}
                for message, places in zip(messages, self.places)
            ]
        self.setting.each(workers, dict.fromkeys(workers, {"op": "sets", "sets": messages}))

    def renew(self, workers: dict[str, WorkerProcess]) -> None:
        """New contents for all that changes."""
        self._draw()
        if self.setting.kind == "cuda":
            self.setting.each(workers, dict.fromkeys(workers, {"op": "refill", "starts": self.places}))

    def inputs(self, index: int) -> dict[str, Any]:
        """The contents of one set as they are now, as CPU tensors and plain values."""
        inputs = dict(self.case.args)
        for name, spec in self.case.tensors.items():
            if self.setting.kind == "cuda" and name in self.changing:
                inputs[name] = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
                copy_from_pool(self.pool.values(spec.dtype), self.places[index][name], inputs[name])
            else:
                inputs[name] = Placed.decode(self.messages[index][name]).view(self.memory)
        return inputs

    def _draw(self) -> None:
        if self.setting.kind == "cuda":
            self.places = [{name: self.pool.place() for name in self.changing} for _ in range(self.count)]
            return
        with one_thread():
            for i in self.used:
                for name in self.changing:
                    view = Placed.decode(self.messages[i][name]).view(self.memory)
                    copy_from_pool(self.pool.values(view.dtype), self.pool.place(), view, self.pool.place())

    def _hand_out_pool(self, workers: dict[str, WorkerProcess]) -> int:
        """Let the workers copy the pool, in the dtypes that are needed, to the device; returns the first free byte."""
        dtypes = {self.case.tensors[name].dtype for name in self.changing}
        placed, end = place({str(dtype): TensorSpec((POOL,), dtype) for dtype in dtypes}, 0)
        for where in placed.values():
            where.view(self.memory).copy_(self.pool.values(where.spec.dtype))
        message = {"op": "pool", "tensors": [where.encode() for where in placed.values()]}
        self.setting.each(workers, dict.fromkeys(workers, message))
        return end
