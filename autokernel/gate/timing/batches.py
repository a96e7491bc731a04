"""What is timed: batches of one side's calls, and the contents of their inputs, which change before every batch."""

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.inputs import Pool, changing, fill_fixed, line_dim, special, timed_kinds
from autokernel.gate.timing.device_probe import DeviceProbe
from autokernel.gate.workers.channel import POISON, Placed, place
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.mapped_memory import MappedMemory
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess
from autokernel.gate.workers.stopwatch import Stopwatch
from autokernel.gate.workers.views import POOL, copy_from_pool, dense, distinct, in_memory_order, write
from autokernel.hardware.threads import one_thread
from autokernel.spec import Case, KernelSpec, TensorSpec
from autokernel.target import Target

MAX_SETS = {"cpu": 1024, "cuda": 32}  # of inputs through which calls rotate
ROTATE_BYTES = {"cpu": 192 << 20, "cuda": 256 << 20}  # several times the last-level cache of current parts
MAX_POOL = 64 << 20  # elements
MAX_GAPS = 16  # times as much memory as its elements take, over which an output may be spread
LAUNCHES = 64
VERSIONS = 4  # of contents that cannot be cut from the pool
SCATTERED, SCATTER_SHARE = 16, 1 / 8  # places at which another version of them is taken, in so many of the sets
ODD_BATCHES, ODD_ROWS = 0.5, 0.25  # of the batches, in which one call has odd rows, and of its rows at most
CALL_S = 60.0  # a timed batch at most, and any other request while kernels are timed
START_S = 60.0  # loading a kernel, and the first call of a case
EMPTY_BATCHES = 7
WRITE_SLACK = 2.0  # times the least that it takes the judge to write a batch's inputs, which varies by more than half
MAX_SETTLING = 12  # batches until a worker touches no memory for the first time any more
FAULTED = 10
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
    probe: DeviceProbe | None = None  # of a GPU
    maps: bool = False  # a GPU's memory is mapped into the judge: it writes inputs and reads outputs itself

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
            worker.resume()
            worker.post(**messages[name])
        for worker in workers.values():
            worker.answer(START_S)
        for worker in workers.values():
            worker.stop()


@contextlib.contextmanager
def running(worker: WorkerProcess, stops: bool = True) -> Iterator[None]:
    """Let a worker run that is suspended but for this, if it `stops` between its turns."""
    if stops:
        worker.resume()
    yield
    if stops:
        worker.stop()


@dataclass(frozen=True)
class Clocked:
    """One batch by the judge's clock: seconds in all, and those in which the judge wrote inputs and read an output."""

    seconds: float
    write_s: float = 0.0
    read_s: float = 0.0


def per_call(batches: Mapping[str, Sequence[Clocked]], length: int) -> dict[str, list[float]]:
    """Seconds of a call by side, without the judge's part.

    Of reading the least is taken off, the same for all sides: who has the judge wait for an output pays for it. Writing is
    the judge's own work, while the worker is suspended, and varies; only what is far more than it ever takes counts.
    """
    every = [batch for side in batches.values() for batch in side]
    most_write_s, read_s = WRITE_SLACK * min(b.write_s for b in every), min(b.read_s for b in every)
    return {
        name: [max(b.seconds - min(b.write_s, most_write_s) - read_s, 1e-7) / length for b in side]
        for name, side in batches.items()
    }


class Batches:
    """One side while it is timed; `stops`: the worker is suspended between its turns; `most_bytes`: of an output;
    `results`: of a call, each an output."""

    def __init__(self, worker: WorkerProcess, stops: bool, most_bytes: int, results: int = 1):
        self.results = results
        self.worker, self.stops, self.most_bytes, self.graph = worker, stops, most_bytes, False
        self.addresses: tuple[int, ...] = ()  # of the outputs of the last batch, as the worker tells
        self.mapped: MappedMemory | None = None
        self.inputs: list[dict[str, Tensor]] = []  # mapped: those of each set whose contents change, as they lie in memory
        self.input_addresses: set[int] = set()  # mapped: of these, in the worker
        self.mapped_layouts: list[TensorSpec] = []  # of the results of a call
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
        self.addresses = self.addresses if self.graph else answer.addresses
        return max(seconds - self.overhead_s, 1e-7)

    def time_in_view(self, contents: "TimedContents", read: Callable[[], Tensor]) -> tuple["Clocked", Tensor]:
        """One batch from before its inputs have contents until an output has been read, which is returned, too.

        What the worker does earlier it does not do on these inputs; what it leaves for later is not in what was read.
        Where the GPU is still at work on it, reading waits, and the clock goes on.
        """
        start = time.perf_counter()
        contents.write(self)  # the worker is still suspended
        written = time.perf_counter()
        with running(self.worker, self.stops):
            answer = self.worker.request("batch", CALL_S, repeats=1)
            answered = time.perf_counter()
            self.addresses = self.addresses if self.graph else answer.addresses
            rows = read()
            torch.cuda.synchronize(rows.device)
            end = time.perf_counter()
        return Clocked(end - start - self.overhead_s, written - start, end - answered), rows

    def settled_s(self, least_s: float) -> float:
        """Seconds of the shortest of a few batches, until one touches no memory for the first time.

        Page faults make a batch up to FAULTED times as long (measured: softmax of 6144x512 on a CPU, whose first five
        batches had them); a length that is chosen by such a one is too short for the clock. Two are enough where even
        the shorter one is so much longer than the `least_s` that is asked for.
        """
        fastest, faults = self.time(), self.worker.page_faults()
        for number in range(1, MAX_SETTLING):
            self.drop()
            fastest = min(fastest, self.time())
            before, faults = faults, self.worker.page_faults()
            few = faults - before <= FEW_FAULTS or self.worker.parent.device != "cpu"
            if fastest > FAULTED * least_s or (number > 1 and (not self.stops or few)):
                break
        return fastest

    def launch_us(self, order: list[int]) -> float:
        """Microseconds in which the host enqueues one call that is not captured, as the worker tells."""
        graph, calls = self.graph, order[:LAUNCHES]
        self.prepare(calls, graph=False)
        self.time()
        self.drop()
        with running(self.worker, self.stops):
            seconds = self.worker.request("batch", CALL_S, repeats=1).enqueued_s
        self.prepare(order, graph)
        return seconds / len(calls) * 1e6

    def _of(self, calls: list[int], result: int) -> list[int]:
        """The numbers of these calls' outputs among all of a batch."""
        return [call * self.results + result for call in calls]

    def fetch(self, calls: list[int], result: int = 0) -> list[tuple[Tensor, tuple[int, ...]]]:
        """One result of some calls of the last batch, with its strides."""
        with running(self.worker, self.stops):
            described = self.worker.request("fetch", CALL_S, calls=self._of(calls, result)).outputs
            return self.worker.fetch(described, len(calls), self.most_bytes)

    def fetch_part(self, calls: list[int], part: list[int], result: int = 0) -> Tensor:
        """A part (first element, elements) of one result of some calls of the last batch: [calls, elements]."""
        with running(self.worker, self.stops):
            described = self.worker.request("fetch", CALL_S, calls=self._of(calls, result), part=part).outputs
            ((output, _),) = self.worker.fetch(described, 1, len(calls) * self.most_bytes)
        if tuple(output.shape) != (len(calls), part[1]):
            raise self.worker.forged(f"a tensor of shape {list(output.shape)} instead of the part of each output")
        return output

    def map(self, contents: "TimedContents", device: str) -> None:
        """On a GPU: map the memory of the inputs and of one batch's outputs."""
        self.mapped = self.mapped or MappedMemory(device)
        self.drop()
        self.time()
        with running(self.worker, self.stops):
            self._map(contents)

    def _map(self, contents: "TimedContents") -> None:
        exported = self.worker.request("export", CALL_S, names=contents.changing)
        layouts = [contents.case.tensors[name] for name in contents.changing]
        if len(exported.layouts) != self.results or len(exported.inputs) != contents.count:
            raise self.worker.forged(f"{len(exported.inputs)} sets of inputs instead of {contents.count}, or no output")
        self.mapped_layouts = [TensorSpec(one.shape, one.spec.dtype, one.stride) for one in exported.layouts]
        self.addresses = exported.outputs
        self.input_addresses = {address for addresses in exported.inputs for address in addresses}
        try:
            self.mapped.open({allocation.base: allocation.handle for allocation in exported.allocations})
            views = [self.mapped.views(addresses, layouts) for addresses in exported.inputs]
        except ValueError as error:
            raise self.worker.forged(error) from None
        plain = [[in_memory_order(x) if dense(x) else x for x in map(distinct, tensors)] for tensors in views]
        self.inputs = [dict(zip(contents.changing, tensors)) for tensors in plain]

    def mapped_output(
        self, contents: "TimedContents", call: int, layout: TensorSpec, start: int = 0, result: int = 0
    ) -> Tensor:
        """As output(), of mapped memory. Where it lies in memory that is not mapped yet, that is done now: it costs the
        worker the time."""
        address = self._address(call, result) + start * layout.dtype.itemsize
        try:
            return self.mapped.view(address, layout).clone()
        except ValueError:
            self._map(contents)
        try:
            return self.mapped.view(address, layout).clone()
        except ValueError as error:
            raise self.worker.forged(error) from None

    def unmap(self) -> None:
        if self.mapped:
            self.inputs = []
            self.mapped.close()

    def layouts(self) -> list[TensorSpec]:
        """The shape, dtype and strides of each result of a call of the last batch, as the worker tells."""
        layouts = self.mapped_layouts
        if not layouts:
            seen = [self.fetch([0], result)[0] for result in range(self.results)]
            layouts = [TensorSpec(tuple(y.shape), y.dtype, strides) for y, strides in seen]
        for layout in layouts:
            if layout.storage_numel > MAX_GAPS * max(1, layout.numel):
                raise self.worker.forged(f"strides {layout.strides} of a tensor of shape {list(layout.shape)}")
        return layouts

    def output(self, call: int, layout: TensorSpec, start: int = 0, result: int = 0) -> Tensor:
        """A result of a call of the last batch, from element `start` on, read where it lies."""
        return self.worker.read(self._address(call, result), layout, start * layout.dtype.itemsize)

    def _address(self, call: int, result: int) -> int:
        (number,) = self._of([call], result)
        if number >= len(self.addresses):
            raise self.worker.forged(f"{len(self.addresses)} addresses of outputs")
        return self.addresses[number]

    def arrival_s(
        self, calls: list[int], part: list[int], contents: "TimedContents | None" = None, result: int = 0
    ) -> float:
        """Seconds of a batch, until a part (first element, elements) of these calls' outputs lies in shared memory.

        Contents that the judge writes are written within them."""
        self.drop()
        start = time.perf_counter()
        if contents and self.mapped:
            contents.write(self)
        with running(self.worker, self.stops):
            self.worker.request("batch", CALL_S, repeats=1)
            self.worker.request("fetch", CALL_S, calls=self._of(calls, result), part=part)
            return time.perf_counter() - start


def maps_memory(parent: WarmParent) -> bool:
    """Whether the memory of a worker on this device can be mapped here, as is tried with one; not under WSL, say."""
    spec = TensorSpec((1,), torch.float32)
    if not parent.device.startswith("cuda"):
        return False
    with contextlib.closing(MappedMemory(parent.device)) as mapped, WorkerProcess(parent, 1, "") as worker:
        try:
            worker.request("sets", START_S, sets=[{"y": place({"y": spec}, 0)[0]["y"].encode()}])
            exported = worker.request("export", START_S, names=["y"])
            mapped.open({allocation.base: allocation.handle for allocation in exported.allocations})
            mapped.view(exported.inputs[0][0], spec).zero_()
        except (WorkerFault, ValueError, OSError):
            return False
    return True


def same_overhead(batches: Iterable[Batches]) -> None:
    """Take the same off all sides' times, the shortest empty batch of any: nobody gains by being slow to do nothing."""
    batches = list(batches)
    for batch in batches:
        batch.overhead_s = min(other.empty_s for other in batches)


@dataclass(frozen=True)
class Odd:
    """The set of inputs of a timed batch that has rows in its first tensor as the others have not, from `line` on."""

    index: int
    line: int


class TimedContents:
    """The inputs of one case while it is timed: the same addresses throughout, new contents before a batch is timed.

    Weights keep their contents (a kernel may prepare them); all others change, so that an output kept from an earlier call
    is wrong: products of two slices of a pool, so that no sums over the pool, which a worker might learn, tell of them.
    Those of a special kind, such as masks and class indices, begin as one of a few contents and end as another (on a GPU
    they stay as they are). The judge writes them where the workers read them. On a GPU whose memory it cannot map, workers
    cut them from their copy of the pool at places that the judge names.

    On a CPU one call of a batch may have rows as only checks have them else (far larger, not finite, all zeros): a kernel
    that knows that it is timed is to be as careful then.
    """

    def __init__(self, setting: Setting, case: Case, pool: Pool):
        self.setting, self.case, self.pool = setting, case, pool
        self.special = special(setting.spec, case) if setting.kind == "cpu" else []
        self.changing = changing(setting.spec, case) + self.special
        set_bytes = max(1, sum(t.nbytes for t in case.tensors.values()))
        self.count = max(2, min(MAX_SETS[setting.kind], -(-ROTATE_BYTES[setting.kind] // set_bytes)))
        self.set_bytes = set_bytes
        self.memory = setting.parent.inputs.bytes
        self.used: Sequence[int] = range(self.count)  # the sets that are called, in this order
        self.messages: list[dict] = []  # one per set, as workers receive them
        self.places: list[dict[str, int]] = []  # one per set: where in the pool its changing inputs are cut
        self.factors: list[dict[str, int]] = []  # and those that they are multiplied with; none until the judge writes
        self.values: dict[torch.dtype, Tensor] = {}  # mapped: the pool, on the device
        self.kinds = timed_kinds(setting.spec, case) if setting.kind == "cpu" else {}
        self.odd: Odd | None = None

    @property
    def nbytes(self) -> int:
        """Of all that the calls of a batch are given."""
        return len(set(self.used)) * self.set_bytes

    def hand_out(self, workers: dict[str, WorkerProcess]) -> None:
        """Place and fill every set, and let the workers have them."""
        case, end = self.case, 0
        if self.setting.kind == "cuda":
            end = self._hand_out_pool(workers)
        cut_there = self.changing if self.setting.kind == "cuda" else []
        here = {name: spec for name, spec in case.tensors.items() if name not in cut_there}
        for _ in range(self.count):
            start = end
            placed, end = place(here, start)
            self.memory[start:end] = POISON
            views = {name: where.view(self.memory) for name, where in placed.items() if name not in self.changing}
            fill_fixed(self.setting.spec, case, views, self.pool)
            placed |= place({name: case.tensors[name] for name in cut_there}, end)[0]  # which takes no memory here
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
        """New contents for all that changes. Mapped: to be written by write()."""
        self._draw()
        if self.setting.maps:
            self.factors = self._places()
        elif self.setting.kind == "cuda":
            self.setting.each(workers, dict.fromkeys(workers, {"op": "refill", "starts": self.places}))

    def write(self, batch: Batches) -> None:
        """Mapped: write the contents where this side reads them, in the order of the calls, and drive them out of the
        cache. Returns when that is done."""
        for index in dict.fromkeys(self.used):
            for name, view in batch.inputs[index].items():
                copy_from_pool(self._on_device(view.dtype), self.places[index][name], view, self.factors[index][name])
        self._flush.zero_()
        torch.cuda.synchronize(self._flush.device)

    def _on_device(self, dtype: torch.dtype) -> Tensor:
        """The pool, so long that most inputs are cut in one piece."""
        if dtype not in self.values:
            longest = max(self.case.tensors[name].numel for name in self.changing)
            times = 1 + -(-min(longest, MAX_POOL) // POOL)
            self.values[dtype] = self.pool.values(dtype).to(self.setting.target.device).repeat(times)
        return self.values[dtype]

    @cached_property
    def _flush(self) -> Tensor:
        """Memory that fills the cache twice."""
        device = self.setting.target.device
        nbytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def inputs(self, index: int) -> dict[str, Any]:
        """The contents of one set as they are now, as tensors (mapped: those that change, on the GPU) and plain values."""
        inputs = dict(self.case.args)
        for name, spec in self.case.tensors.items():
            if self.setting.kind == "cuda" and name in self.changing:
                values = self._on_device(spec.dtype) if self.setting.maps else self.pool.values(spec.dtype)
                inputs[name] = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=values.device)
                factor = self.factors[index][name] if self.factors else None
                copy_from_pool(values, self.places[index][name], inputs[name], factor)
            else:
                inputs[name] = Placed.decode(self.messages[index][name]).view(self.memory)
        return inputs

    def _places(self) -> list[dict[str, int]]:
        return [{name: self.pool.place() for name in self.changing} for _ in range(self.count)]

    def _draw(self) -> None:
        if self.setting.kind == "cuda":
            self.places = self._places()
            return
        with one_thread():
            for i in self.used:
                for name in self.changing:
                    view = self._view(i, name)
                    if name in self.special:
                        write(view, self._spliced(name))
                    else:
                        copy_from_pool(self.pool.values(view.dtype), self.pool.place(), view, self.pool.place())
            self.odd = self._make_odd()

    def _make_odd(self) -> Odd | None:
        """Where every row has results of its own, a row of each kind, one after the other; else one row."""
        chance = self.setting.random
        if not self.kinds or not self.used or chance.random() >= ODD_BATCHES:
            return None
        index = chance.choice(self.used)
        rows = self._view(index, self.setting.spec.first_of(self.case.tensors)).movedim(line_dim(self.case.args), -1)
        lines = rows[..., 0].numel()
        most = int(ODD_ROWS * lines) if self.setting.spec.independent_rows else 1
        kinds = chance.sample(list(self.kinds), max(1, min(len(self.kinds), most)))
        line = chance.randint(0, lines - len(kinds))
        places = torch.unravel_index(torch.arange(line, line + len(kinds)), rows.shape[:-1])
        for number, kind in enumerate(kinds):
            row = rows[tuple(int(place[number]) for place in places)]
            row.copy_(self.kinds[kind](row[None].clone(), torch.zeros(1, dtype=torch.int64), self.pool.generator)[0])
        return Odd(index, line)

    def _view(self, index: int, name: str) -> Tensor:
        return Placed.decode(self.messages[index][name]).view(self.memory)

    @cached_property
    def _versions(self) -> dict[str, list[Tensor]]:
        """A few contents of each input of a special kind."""
        fill, args, chance = self.setting.spec.fill, self.case.args, self.pool.generator
        return {
            name: [fill[name](args[name], args, chance).to(args[name].dtype) for _ in range(VERSIONS)]
            for name in self.special
        }

    def _spliced(self, name: str) -> Tensor:
        """Contents of a special kind that no call has seen: up to some element those of one version, then another's; in
        some sets the other way round at a few places."""
        begin, end = self.setting.random.sample(self._versions[name], 2)
        cut = self.setting.random.randint(0, begin.numel())
        begin_, end_ = begin.reshape(-1), end.reshape(-1)
        spliced = torch.cat((begin_[:cut], end_[cut:]))
        if len(spliced) and self.setting.random.random() < SCATTER_SHARE:
            at = torch.randint(len(spliced), (SCATTERED,), generator=self.pool.generator)
            spliced[at] = torch.where(at < cut, end_[at], begin_[at])
        return spliced.view(begin.shape)

    def _hand_out_pool(self, workers: dict[str, WorkerProcess]) -> int:
        """Let the workers copy the pool, in the dtypes that are needed, to the device; returns the first free byte."""
        dtypes = {self.case.tensors[name].dtype for name in self.changing}
        placed, end = place({str(dtype): TensorSpec((POOL,), dtype) for dtype in dtypes}, 0)
        for where in placed.values():
            where.view(self.memory).copy_(self.pool.values(where.spec.dtype))
        message = {"op": "pool", "tensors": [where.encode() for where in placed.values()]}
        self.setting.each(workers, dict.fromkeys(workers, message))
        return end
