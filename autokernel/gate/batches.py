"""What is timed: batches of one side's calls, and the contents of their inputs, which change before every batch."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autokernel.gate.channel import POISON, Placed, place
from autokernel.gate.inputs import POOL, Pool, changing, cut, fill_fixed
from autokernel.gate.processes import WorkerFault, WorkerProcess
from autokernel.spec import Case, TensorSpec

if TYPE_CHECKING:
    from autokernel.gate.timing import PairTimer

MAX_SETS = {"cpu": 1024, "cuda": 32}  # of inputs through which calls rotate
ROTATE_BYTES = {"cpu": 192 << 20, "cuda": 256 << 20}  # several times the last-level cache of current parts
MAX_GAPS = 16  # times as much memory as its elements take, over which an output may be spread
LAUNCHES = 64
CALL_S = 60.0


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
    """One side while it is timed; `stops`: the worker is suspended between its turns."""

    def __init__(self, worker: WorkerProcess, stops: bool):
        self.worker, self.stops, self.graph = worker, stops, False
        self.addresses: Any = None  # on a CPU: of the outputs of the last batch, a list if the worker is honest
        self.overhead_s = 0.0  # what the clock reads for a batch of no calls
        self.prepare([], graph=False)
        self.overhead_s = median(self.time() for _ in range(7))

    def prepare(self, order: list[int], graph: bool) -> bool:
        """Get ready for calls on these sets; returns whether they are captured in a CUDA graph, as `graph` asks."""
        with running(self.worker, self.stops):
            self.graph = self.worker.request("prepare", CALL_S, order=order, graph=graph)["graph"]
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
        self.addresses = answer.get("addresses")
        return max(seconds - self.overhead_s, 1e-7)

    def launch_us(self, order: list[int]) -> float:
        """Microseconds in which the host enqueues one call that is not captured, as the worker tells."""
        graph, calls = self.graph, order[:LAUNCHES]
        self.prepare(calls, graph=False)
        self.time()
        self.drop()
        seconds = float(self.worker.request("batch", CALL_S, repeats=1)["enqueued_s"])
        self.prepare(order, graph)
        return seconds / len(calls) * 1e6

    def fetch(self, calls: list[int]) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Outputs of some calls of the last batch, with their strides."""
        with running(self.worker, self.stops):
            return self.worker.fetch(self.worker.request("fetch", CALL_S, calls=calls)["outputs"])

    def fetch_part(self, calls: list[int], part: list[int]) -> Tensor:
        """A part (first element, elements) of the outputs of some calls of the last batch: [calls, elements]."""
        with running(self.worker, self.stops):
            described = self.worker.request("fetch", CALL_S, calls=calls, part=part)["outputs"]
            outputs = [y for y, _ in self.worker.fetch(described)]
        if [tuple(y.shape) for y in outputs] != [(len(calls), part[1])]:
            raise WorkerFault(
                self.worker, "CRASH", "the worker's answer makes no sense: it is not the part that was asked for"
            )
        return outputs[0]

    def layout(self) -> TensorSpec:
        """The shape, dtype and strides of an output of the last batch, as the worker tells."""
        ((y, strides),) = self.fetch([0])
        layout = TensorSpec(tuple(y.shape), y.dtype, strides)
        if len(strides) != y.dim() or min(strides, default=0) < 0 or layout.storage_numel > MAX_GAPS * max(1, y.numel()):
            raise WorkerFault(self.worker, "CRASH", f"the worker's answer makes no sense: strides {strides}")
        return layout

    def output(self, call: int, layout: TensorSpec) -> Tensor:
        """The output of a call of the last batch, read where it lies, while the worker is stopped."""
        if not isinstance(self.addresses, list) or call >= len(self.addresses):
            raise WorkerFault(self.worker, "CRASH", "the worker does not say where its outputs are")
        return self.worker.read(self.addresses[call], layout)

    def arrival_s(self, calls: list[int], part: list[int]) -> float:
        """Seconds of a batch, until a part (first element, elements) of these calls' outputs lies in shared memory."""
        with running(self.worker, self.stops):
            self.worker.request("drop", CALL_S)
            start = time.perf_counter()
            self.worker.request("batch", CALL_S, repeats=1)
            self.worker.request("fetch", CALL_S, calls=calls, part=part)
            return time.perf_counter() - start


class TimedContents:
    """The inputs of one case while it is timed: the same addresses throughout, new contents before a batch is timed.

    Weights, and inputs of a special kind such as class indices, keep their contents (a kernel may prepare them); all
    others change, so that an output kept from an earlier call is wrong. On a CPU the judge writes them where the workers
    read them; on a GPU workers cut them from a pool of random numbers at places that the judge names.
    """

    def __init__(self, timer: "PairTimer", case: Case, pool: Pool):
        self.timer, self.case, self.pool = timer, case, pool
        self.changing = changing(timer.spec, case)
        set_bytes = max(1, sum(t.nbytes for t in case.tensors.values()))
        self.count = max(2, min(MAX_SETS[timer.kind], -(-ROTATE_BYTES[timer.kind] // set_bytes)))
        self.set_bytes = set_bytes
        self.memory = timer.parent.inputs.bytes
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
        if self.timer.kind == "cuda":
            end = self._hand_out_pool(workers)
        cut_there = set(self.changing) if self.timer.kind == "cuda" else set()
        here = {name: spec for name, spec in case.tensors.items() if name not in cut_there}
        for _ in range(self.count):
            start = end
            placed, end = place(here, start)
            self.memory[start:end] = POISON
            views = {name: where.view(self.memory) for name, where in placed.items() if name not in self.changing}
            fill_fixed(self.timer.spec, case, views, self.pool)
            placed |= {name: Placed(case.tensors[name], 0) for name in cut_there}
            tensors = {name: where.encode() for name, where in placed.items()}
            self.messages.append({name: tensors.get(name, value) for name, value in case.args.items()})
        self._draw()
        messages = [
            {name: value | {"pool": places[name]} if name in cut_there else value for name, value in message.items()}
            for message, places in zip(self.messages, self.places)
        ]
        self.timer.each(workers, dict.fromkeys(workers, {"op": "sets", "sets": messages}))

    def renew(self, workers: dict[str, WorkerProcess]) -> None:
        """New contents for all that changes."""
        self._draw()
        if self.timer.kind == "cuda":
            self.timer.each(workers, dict.fromkeys(workers, {"op": "refill", "starts": self.places}))

    def inputs(self, index: int) -> dict[str, Any]:
        """The contents of one set as they are now, as CPU tensors and plain values."""
        inputs = dict(self.case.args)
        for name, spec in self.case.tensors.items():
            if self.timer.kind == "cuda" and name in self.changing:
                inputs[name] = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
                cut(self.pool.values(spec.dtype), self.places[index][name], inputs[name])
            else:
                inputs[name] = Placed.decode(self.messages[index][name]).view(self.memory)
        return inputs

    def _draw(self) -> None:
        self.places = [{name: self.pool.place() for name in self.changing} for _ in range(self.count)]
        if self.timer.kind == "cuda":
            return
        with one_thread():
            for i in self.used:
                for name, start in self.places[i].items():
                    view = Placed.decode(self.messages[i][name]).view(self.memory)
                    cut(self.pool.values(view.dtype), start, view)

    def _hand_out_pool(self, workers: dict[str, WorkerProcess]) -> int:
        """Let the workers copy the pool, in the dtypes that are needed, to the device; returns the first free byte."""
        dtypes = {self.case.tensors[name].dtype for name in self.changing}
        placed, end = place({str(dtype): TensorSpec((POOL,), dtype) for dtype in dtypes}, 0)
        for where in placed.values():
            where.view(self.memory).copy_(self.pool.values(where.spec.dtype))
        message = {"op": "pool", "tensors": [where.encode() for where in placed.values()]}
        self.timer.each(workers, dict.fromkeys(workers, message))
        return end
