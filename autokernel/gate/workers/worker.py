"""The process in which a candidate runs: it is handed inputs and hands back raw bytes; nothing it says is believed.

`serve` is entered in a fresh fork of the warm parent (zygote.py). Code here is a convenience for honest kernels: every
claim is checked by the judge, which holds the expected values, the seeds and the clock.
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autokernel import build
from autokernel.gate.workers import library_calls, mapped_memory, sandbox
from autokernel.gate.workers.ageing import Ahead, Clock
from autokernel.gate.workers.channel import GUARD, POISON, Channel, ChannelClosed, Placed
from autokernel.gate.workers.growth import check_growth, check_idle
from autokernel.gate.workers.guards import GuardedMemory
from autokernel.gate.workers.other_programs import called_by_another_program
from autokernel.gate.workers.page_ends import PageEnds
from autokernel.gate.workers.patches import Patches
from autokernel.gate.workers.process_state import ProcessState, check_this_thread, of_this_thread
from autokernel.gate.workers.stopwatch import Allowance
from autokernel.gate.workers.views import copy_from_pool
from autokernel.spec import ROOT, kernel_module, load_spec

LATE_CYCLES = 1_000_000  # of the GPU's clock, half a millisecond
KEPT_BYTES = 256 << 20  # that PyTorch's allocator may keep for the next trial
SEVERAL = 2  # calls: more are made of kernels whose outputs are held
EVERY = 16  # requests for calls, after which another share of what takes long to look at is looked at again
# The result of a kernel that keeps its results is held for so many calls, or seconds of them; the fewest may take longer.
MANY, FEWEST, MANY_S, LONGEST_S = 1 << 12, 1 << 8, 0.02, 2.0
FORM = "class", "shape", "strides", "address", "dtype", "wish for gradients", "gradient", "hooks", "version"
AGES = 8  # in each of which a kernel is called once more
LAST_CALLS = 2  # of many, after each of which a kernel's variables are looked at
# Inputs of so many calls, if they are small, and allocations of random sizes are kept in turn: so others lie elsewhere, for
# so many calls, or seconds.
BEFORE, FURTHER, SMALL = 32, 1 << 12, 1 << 16  # bytes
PLACES, PLACES_S = 256, 0.03
MEMCMP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(("memcmp", ctypes.CDLL(None)))
M_PERTURB = -6  # glibc's mallopt: fill what malloc returns with this byte


class SharedResult(RuntimeError):
    """A kernel returned memory of a result that is held."""


class Disagreement(RuntimeError):
    """A kernel does not always make the same of the same."""


class Worker:
    """State of one worker: the loaded kernel and the inputs it has been given."""

    def __init__(self, channel: Channel, inputs: Tensor, outputs: Tensor, device: str):
        self.channel, self.inputs, self.outputs = channel, inputs, outputs
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.function: Callable[..., Any] | None = None
        self.sets: list[dict[str, Any]] = []
        self.regions: list[dict[tuple[str, int], Tensor]] = []  # on a GPU: each set's tensors, guards included
        self.pool: dict[torch.dtype, Tensor] = {}  # on a GPU: random numbers from which large inputs are cut
        self.memory: GuardedMemory | None = None
        self.process: ProcessState | None = None  # while a kernel is checked that calls no library
        self.patches: Patches | None = None
        self.answered = 0  # requests for calls of a kernel that is checked
        self.module: ModuleType | None = None  # the candidate's
        self.clock: Clock | None = None  # while a kernel is checked
        self.drawn = random.Random(os.getpid())
        self.before: deque[list[Any]] = deque(maxlen=BEFORE)  # what lies in memory beside the next call's tensors
        self.page_ends = PageEnds()
        self.watched: list[tuple[Any, int, bytes]] = []  # results of one call, which are held to the end: where and what
        self.results = 1  # of a call
        self.held: list[Any] = []  # what calls returned
        self.held_before: list[Any] = []  # layouts of inputs for which a result was held for many calls
        self.order: list[int] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.asking = threading.Lock()
        self.built: set[str] = set()  # libraries that the judge has built for the kernel

    def serve(self) -> None:
        while True:
            message = self.channel.receive()
            handler, request = getattr(self, f"do_{message.pop('op')}"), message.pop("id")
            try:
                answer = {"type": "answer", "id": request, **(handler(**message) or {})}
            except Exception as error:  # a kernel that raises is an outcome, not a fault of ours
                words = f"{type(error).__name__}: {error}"[:4000]
                answer = {"type": "error", "id": request, "error": words, "detail": _traceback()}
            if "error" in answer:  # which no longer holds the tensors of the frames that it went through
                with contextlib.suppress(RuntimeError):  # of a device that a kernel has broken
                    self._drop()
                    self._give_back()
            self.channel.send(answer)

    def ask_judge_to_build(self, library: build.Library) -> Path:
        """Compile through the judge: only it may build what runs here."""
        with self.asking:  # a kernel may have threads
            self.channel.send({"type": "build", **dataclasses.asdict(library)})
            answer = self.channel.receive()
        if "path" not in answer:
            raise build.CompileError(answer["error"])
        self.built.add(answer["path"])
        return Path(answer["path"])

    # Each do_<op> answers one message of the judge.

    def do_load(self, source: str, poison: bool, libraries: str, results: int = 1) -> None:
        """Import a candidate's source as a module of its own. `libraries`: what it may call: "none", "gemm", "any";
        `results`: how many it returns."""
        self.results = results
        build.builder = self.ask_judge_to_build
        if poison and sys.platform == "linux":
            ctypes.CDLL(None).mallopt(M_PERTURB, POISON)
        if self.cuda:
            torch.cuda.init()  # with the driver's libraries, before loading any is forbidden
        hooks: list[str] = []
        if libraries != "any":
            library_calls.refuse_libraries(self.device.type, gemms=libraries == "gemm")
            hooks = library_calls.refuse_foreign_code(self.built, self.device.type)
        path, name = Path("kernel.py").resolve(), kernel_module(source)
        path.write_text(source)
        if poison and not self.cuda:
            self.clock = Clock(name)
        if poison and libraries != "any":
            torch.set_grad_enabled(True)  # as a model may be run: in inference mode alone nobody sees who turns it off
            self.process, self.patches = ProcessState.now(), Patches(hooks, standard=not self.cuda)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        self.module, self.function = module, module.kernel_fn
        if self.process:
            self.process.check()
            self.patches.check()
        if poison:
            self.memory = GuardedMemory(self.device)
            if self.patches:
                self.patches.note_operators()  # we have overridden some
        elif self.cuda:
            torch.empty(1, device=self.device)  # the context takes a fifth of a second: now, while nobody waits for it

    def do_load_eager(self, kernel_type: str, compiled: bool) -> None:
        """The baseline: the spec's eager form, as it is or through torch.compile."""
        torch.backends.cuda.matmul.allow_tf32 = False
        eager, self.results = load_spec(kernel_type).eager, load_spec(kernel_type).result_count
        if compiled:  # a problem's modules are compiled themselves, one by one
            eager = eager.compiled() if hasattr(eager, "compiled") else torch.compile(eager, dynamic=False)
        self.function = eager

    def do_warm(self, cases: list[dict[str, Any]]) -> None:
        """One call on zeros of each case's shapes, for what a first call compiles and loads."""
        for case in cases:
            self.function(**{name: self._zeros(value) for name, value in case.items()})
        self._give_back()

    def do_pool(self, tensors: list[dict[str, Any]]) -> None:
        """Copy the pool of random numbers, once per dtype, to the device."""
        for placed in map(Placed.decode, tensors):
            self.pool[placed.spec.dtype] = placed.view(self.inputs).to(self.device)

    def do_sets(self, sets: list[dict[str, Any]]) -> None:
        """Receive input sets: placed tensors and plain values. Where a set's layout is as before, so are its addresses."""
        self._drop()
        old, self.regions = self.regions, [{} for _ in sets]
        old += [{}] * (len(sets) - len(old))
        self.sets = [
            {name: self._argument(name, value, old[i], self.regions[i]) for name, value in inputs.items()}
            for i, inputs in enumerate(sets)
        ]

    def do_refill(self, starts: list[dict[str, int]]) -> None:
        """New contents, cut from the pool, at the same addresses."""
        for inputs, names in zip(self.sets, starts):
            for name, start in names.items():
                copy_from_pool(self.pool[inputs[name].dtype], start, inputs[name])
        self._synchronize()

    def do_call(
        self,
        order: list[int],
        as_in_a_model: bool = False,
        other_threads: int = 0,
        activations: Sequence[str] | None = None,
        weights: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Call the kernel on the sets in `order`, hold every output to the end, and hand all of them back.

        as_in_a_model: but for the first, as a model in training would; other_threads: with another number of PyTorch's.
        activations: many times more afterwards, these inputs in memory of their own each time, to see what is kept.
        """
        self._drop()
        memory: list[range] = []  # of the results so far; on one set the judge says first what their contents are
        for number, i in enumerate(order):
            late = self.cuda and number == len(order) // 2
            seen = [y.clone() for y in self._results(self.held[0])] if late and self.held else None
            if late:
                self._inputs_arrive_late()
            call = self._call_as_in_a_model if as_in_a_model and number else self._call
            with _other_threads(other_threads) if other_threads else contextlib.nullcontext():
                returned = self._own(call(**self.sets[i]), self.sets[i], memory)
            if seen is not None:  # as the next kernel on this stream would see it
                copied = [mine.copy_(y) for mine, y in zip(seen, self._results(returned))]
                returned = copied if len(copied) > 1 else copied[0]
            self.held.append(returned)
            if len(set(order)) > 1:
                memory += map(_memory_of, filter(_has_memory, self._results(returned)))
        self._synchronize()
        if self.memory:
            self.memory.check()
        if self.process and self.patches:
            self.process.check()
            self.answered += 1
            if len(order) > SEVERAL:  # now and then, for it takes milliseconds
                self.patches.check()
            elif self.answered % EVERY == 1:
                self.patches.check_share()
        inputs = [region for regions in self.regions for region in regions.values()]
        outputs = self._outputs()
        described = self._write([*outputs, *inputs])
        returned = [y.untyped_storage() for y in filter(_has_memory, outputs)]
        is_foreign = any(not storage.resizable() for storage in returned)  # memory that PyTorch has not allocated
        stored, returned = [StorageWeakRef(storage) for storage in returned], []
        is_first = self.memory is not None and not self.cuda and not self.watched
        known = [(y.storage_offset() * y.itemsize, _contents(y)) for y in filter(_has_memory, outputs if is_first else ())]
        count = len(outputs)
        del outputs
        self._drop()
        is_kept = is_foreign or not all(storage.expired() for storage in stored)
        if is_first:
            self._watch(stored, known)
        if is_kept:
            self._hold_for_many_calls()
        self._check_watched()
        if self.memory and not self.cuda and (at_the_end := self.page_ends.moved(self.sets[order[0]])):
            self.function(**at_the_end)
            self.memory.forget()
        if activations is not None and not self.cuda:
            self._in_another_program()
            self._many_times(activations)
            self._written_anew(weights)
            check_idle()
        self._give_back()
        return {"outputs": described[:count], "inputs": described[count:]}

    def do_prepare(self, order: list[int], graph: bool) -> dict[str, Any]:
        """Get ready for timed batches of calls over the sets in `order`; with `graph`, captured as a CUDA graph."""
        self._drop()
        self.order = order
        if graph and self.cuda:
            self._capture()
        return {"graph": self.graph is not None}

    def do_batch(self, repeats: int) -> dict[str, Any]:
        """The timed region: `repeats` passes over the order; outputs of the last pass are held.

        The answer says where they lie, unless they stay where they are (in a graph): the judge reads them there.
        """
        start = time.perf_counter()
        function, sets, order = self.function, self.sets, self.order
        if self.graph is not None:
            for _ in range(repeats):
                self.graph.replay()
        else:
            for _ in range(repeats):
                self.held = [function(**sets[i]) for i in order]
        enqueued_s = time.perf_counter() - start
        self._synchronize()
        addresses = [] if self.graph is not None else [y.data_ptr() for y in self._outputs()]
        return {"enqueued_s": enqueued_s, "addresses": addresses}

    def do_fetch(self, calls: list[int], part: tuple[int, int] | None = None) -> dict[str, Any]:
        """Hand back some outputs of the last batch, or of each the `part` (first element, elements) as one. Where a call
        has several results, `calls` counts these."""
        outputs = self._outputs()
        outputs = [outputs[call] for call in calls]
        if part is not None:
            start, elements = part
            outputs = [torch.stack([y.reshape(-1)[start : start + elements] for y in outputs])]
        return {"outputs": self._write(outputs)}

    def do_export(self, names: list[str]) -> dict[str, Any]:
        """On a GPU: where these inputs of each set and the outputs of the last batch lie, and what maps that memory."""
        inputs = [[inputs[name].data_ptr() for name in names] for inputs in self.sets]
        outputs = [y.data_ptr() for y in self._outputs()]
        allocations = mapped_memory.export(address for addresses in (*inputs, outputs) for address in addresses)
        layouts = [self._described(y, 0) for y in self._outputs()[: self.results]]
        return {"inputs": inputs, "outputs": outputs, "allocations": allocations, "layouts": layouts}

    def do_drop(self) -> None:
        if self.graph is None:
            self.held = []

    def do_probe(self, secret: str, outsider: int) -> dict[str, Any]:
        return {"layers": sandbox.probe(Path(secret), outsider)}

    def do_memory(self) -> dict[str, Any]:
        """What one call takes of the device's memory, its inputs and output included."""
        if not self.cuda:
            return {"peak_bytes": 0}
        self._drop()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.function(**self.sets[0])
        inputs = sum(region.nbytes for region in self.regions[0].values())
        return {"peak_bytes": torch.cuda.max_memory_allocated(self.device) - before + inputs}

    def do_kernels(self) -> dict[str, Any]:
        """The device kernels of one call on each set, as CUPTI tells: name -> microseconds."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for inputs in self.sets:
                self.function(**inputs)
            self._synchronize()
        return {"microseconds": {event.key: event.self_device_time_total for event in recorded.key_averages()}}

    def do_profile(self) -> dict[str, Any]:
        """One warm call on the first input set under torch.profiler."""
        from torch.profiler import ProfilerActivity, profile

        self.function(**self.sets[0])
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.cuda else [])
        with profile(activities=activities) as recorded:
            self.function(**self.sets[0])
            self._synchronize()
        order = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
        return {"table": recorded.key_averages().table(sort_by=order, row_limit=12)}

    def _argument(self, name: str, value: Any, old: dict[tuple[str, int], Tensor], regions: dict) -> Any:
        if not isinstance(value, dict):
            return value
        placed = Placed.decode(value)
        if not self.cuda:
            return placed.view(self.inputs)
        size = placed.end - placed.start + 2 * GUARD  # guards travel along
        region = next((one for (_, start), one in regions.items() if start == placed.start), old.get((name, placed.start)))
        if region is None or region.numel() != size:
            region = torch.empty(size, dtype=torch.uint8, device=self.device)
        regions[name, placed.start] = region
        x = Placed(placed.spec, GUARD).view(region)
        if "pool" in value:
            region.fill_(POISON)
            copy_from_pool(self.pool[x.dtype], value["pool"], x)
        else:
            region.copy_(self.inputs[placed.start - GUARD : placed.end + GUARD])
        return x

    def _call(self, **inputs: Any) -> Any:
        """A call that leaves its inputs as they are: their contents the judge looks at, what they are beside them we do."""
        before = {name: _form(x) for name, x in inputs.items() if isinstance(x, Tensor)}
        returned = self.function(**inputs)
        for name, form in before.items():
            for what, known, now in zip(FORM, form, _form(inputs[name])):
                if now != known:
                    raise ValueError(f"kernel_fn changed the {what} of its input {name}: {now} instead of {known}")
        return returned

    def _call_as_in_a_model(self, **inputs: Any) -> Any:
        """Of tensors that want gradients, and are no inference tensors; on a CPU in another thread, as servers call."""

        @torch.inference_mode(False)
        @torch.no_grad()  # which an operator around the kernel sees to
        def call() -> Any:
            before = of_this_thread() if self.process else {}
            returned = self._call(**{name: _wanting_gradients(v) for name, v in inputs.items()})
            if before:
                check_this_thread(before)
            return returned

        if self.cuda:  # whose context a thread may not have
            return call()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    def _results(self, returned: Any) -> list[Any]:
        """Of one call."""
        if self.results == 1:
            return [returned]
        if not isinstance(returned, (tuple, list)) or len(returned) != self.results:
            raise TypeError(f"kernel_fn returned {type(returned).__name__}, not a tuple of {self.results} tensors")
        return list(returned)

    def _outputs(self) -> list[Any]:
        """The results of all calls that are held, one call's after another's."""
        return [y for returned in self.held for y in self._results(returned)]

    def _own(self, returned: Any, inputs: dict[str, Any], earlier: Sequence[range]) -> Any:
        """What a call returned, each result memory of its own: else who changes it in place would change something else.
        `earlier`: memory of the results of earlier calls that are still held."""
        storages = {(s := x.untyped_storage()).data_ptr(): s.nbytes() for x in inputs.values() if isinstance(x, Tensor)}
        seen: set[int] = set()
        for y in filter(_has_memory, self._results(returned)):
            memory, storage = _memory_of(y), y.untyped_storage().data_ptr()
            if y.requires_grad:
                raise ValueError("kernel_fn returned a tensor that wants gradients, which its operator sees to")
            if any(memory.start < start + nbytes and start < memory.stop for start, nbytes in storages.items()):
                raise ValueError("kernel_fn returned memory of an input, not a result of its own")
            if storage in seen:
                raise ValueError("kernel_fn returned two results in one memory")
            if any(memory.start < other.stop and other.start < memory.stop for other in earlier):
                raise SharedResult("kernel_fn returned memory of an earlier call's result, which may be in use")
            seen.add(storage)
        return returned

    def _hold_for_many_calls(self) -> None:
        """Of a kernel that keeps what it returned: a result that is held must be none that it returns again, however many
        it has in turn."""
        layouts = [(v.shape, v.stride(), v.dtype) for v in self.sets[0].values() if isinstance(v, Tensor)]
        if layouts in self.held_before:
            return
        self.held_before.append(layouts)
        first = self._results(self.function(**self.sets[0]))
        memory = [_memory_of(y) for y in filter(_has_memory, first)]
        many, ends_s = Allowance(MANY_S), time.perf_counter() + LONGEST_S
        for call in range(MANY):
            self._own(self.function(**self.sets[0]), self.sets[0], memory)
            if call >= FEWEST and many.is_spent() or time.perf_counter() > ends_s:
                break

    def _watch(self, stored: list[StorageWeakRef], known: list[tuple[int, bytes]]) -> None:
        """Hold the results of a call from now on: those that a kernel keeps, of which this is known, or else others."""
        for weak, (offset, content) in zip(stored, known):
            if not weak.expired() and (storage := torch.UntypedStorage._new_with_weak_ptr(weak.cdata)) is not None:
                held = torch.empty(0, dtype=torch.uint8).set_(storage)  # a user of that memory, as a model's tensor is
                self.watched.append((held, held.data_ptr() + offset, content))
        if not self.watched:
            results = self._results(self._call(**self.sets[0]))
            self.watched = [(y, y.data_ptr(), _contents(y)) for y in filter(_has_memory, results)]

    def _check_watched(self) -> None:
        if any(content and MEMCMP(address, content, len(content)) for _, address, content in self.watched):
            raise SharedResult("kernel_fn wrote into an earlier call's result, which may be in use")

    def _in_another_program(self) -> None:
        """A call by another than the gate, which is to agree bitwise with the gate's."""
        made = self._results(self._once(()))
        contents = list(map(_contents, made))
        told = self.clock.as_python_has_it()
        others = self._results(called_by_another_program(self.function, self.module, self.sets[0], self.results, told))
        if self.memory:
            self.memory.forget()
        if not all(map(_has_content, others, contents)):
            raise Disagreement("a call by another program than the gate does not agree bitwise with one of the gate's")

    def _many_times(self, activations: Sequence[str]) -> None:
        """Calls that keep nothing, on tensors of memory of their own, and agree bitwise with one on parts of a larger one,
        as the judge's are, whose results are held for so long. In the end as in a process that has run for months."""
        first, calls = self._results(self._once(())), 0
        contents = list(map(_contents, first))

        def again(when: str = "one of many calls on the same inputs", elsewhere: bool = False) -> None:
            nonlocal calls
            calls += 1
            for y, held, content in zip(self._results(self._once(activations, elsewhere)), first, contents):
                if content and y.data_ptr() == held.data_ptr():
                    raise SharedResult("kernel_fn returned memory of an earlier call's result, which may be in use")
                if not _has_content(y, content):
                    raise Disagreement(f"{when} does not agree bitwise with the first")

        ahead = Ahead(self.module, self.built)
        check_growth(again)
        within = Allowance(PLACES_S)
        for _ in range(PLACES):
            if within.is_spent():
                break
            again(elsewhere=True)
        self.before.clear()
        for _ in range(LAST_CALLS):
            ahead.note(calls)
            again()
        ahead.note(calls)
        for many in ahead.of_many_calls():
            again(f"a call as after {many} calls, by what counts them,")
        for _ in range(AGES):
            self.clock.put_ahead(self.built)
            again("a call in another process, by its number, months later")
        if not all(map(_has_content, first, contents)):
            raise SharedResult("kernel_fn wrote into an earlier call's result, which may be in use")

    def _written_anew(self, weights: Sequence[str]) -> None:
        """Two calls on the same tensors, between which others write to them behind PyTorch's back, as to a graph's that is
        replayed. Weights, which may be prepared once, are a module's parameters."""
        tensors = {name: v for name, v in self.sets[0].items() if isinstance(v, Tensor)}
        with torch.inference_mode(False), torch.no_grad():
            mine = self.sets[0] | {n: (_as_parameter if n in weights else _moved_out)(v) for n, v in tensors.items()}
            others = self.sets[0] | {name: _moved_out(v) for name, v in tensors.items()}
            self._call(**mine)
            for name in tensors.keys() - set(weights):
                x, changed = mine[name], _halves_exchanged(tensors[name])
                behind = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
                behind.copy_(changed)
                others[name].copy_(changed)
            made = [(y, _contents(y)) for y in self._results(self._call(**mine))]
            if not all(_has_content(y, known) for y, (_, known) in zip(self._results(self._call(**others)), made)):
                raise Disagreement("a call on tensors that have been written to does not agree bitwise with one on others")

    def _once(self, activations: Sequence[str], elsewhere: bool = False) -> Any:
        """What a call returns, of which nothing is kept. `elsewhere`: inputs lie where others did not: it takes memory."""
        more = self.drawn.randrange(FURTHER) if elsewhere else 0
        mine = {name: _moved_out(self.sets[0][name], more) for name in activations}
        if elsewhere:
            small = [x for x in mine.values() if x.nbytes <= SMALL]
            self.before.append([torch.UntypedStorage(self.drawn.randrange(1, FURTHER)), *small])
        returned = self.function(**self.sets[0] | mine)
        self._synchronize()
        if self.memory:
            self.memory.forget()
        return returned

    def _zeros(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        spec = Placed.decode(value).spec
        memory = torch.empty(spec.storage_numel, dtype=spec.dtype, device=self.device).zero_()
        return memory.as_strided(spec.shape, spec.strides, spec.offset)

    def _inputs_arrive_late(self) -> None:
        """On a GPU: write the inputs anew on the current stream, after a pause. A kernel on a stream of its own that does
        not wait for this one reads poison."""
        regions = [region for regions in self.regions for region in regions.values()]
        contents = [region.clone() for region in regions]
        for region in regions:
            region.fill_(POISON)
        self._synchronize()
        torch.cuda._sleep(LATE_CYCLES)
        for region, content in zip(regions, contents):
            region.copy_(content)

    def _capture(self) -> None:
        """Record the calls in a CUDA graph; a kernel that cannot be captured is timed call by call."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for i in self.order[:2]:
                self.function(**self.sets[i])
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # an old graph that is collected during a capture ends it
        try:
            with torch.cuda.graph(graph):
                self.held = [self.function(**self.sets[i]) for i in self.order]
        except RuntimeError:
            torch.cuda.set_stream(torch.cuda.default_stream(self.device))  # a capture that failed stays on its own
            torch.cuda.synchronize(self.device)
            self.held = []
            return
        finally:
            gc.enable()
        self.graph = graph

    def _drop(self) -> None:
        self.graph, self.held = None, []

    def _give_back(self) -> None:
        """Leave the device's memory that the allocator merely keeps to the other processes."""
        self._synchronize()
        if self.cuda and torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) > KEPT_BYTES:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _write(self, tensors: list[Any]) -> list[dict[str, Any]]:
        """Copy outputs as they lie in memory into the output arena, and describe them."""
        described, start = [], 0
        for y in tensors:
            if type(y) is not torch.Tensor:
                raise TypeError(f"kernel_fn returned {type(y).__name__}, not a torch.Tensor")
            if y.device.type != self.device.type:
                raise TypeError(f"kernel_fn returned a tensor on {y.device}, the inputs are on {self.device}")
            data = y.detach().contiguous().view(-1).view(torch.uint8) if y.numel() else torch.empty(0, dtype=torch.uint8)
            start = -(-start // 64) * 64
            self.outputs[start : start + data.numel()] = data
            described.append(self._described(y, start))
            start += data.numel()
        return described

    @staticmethod
    def _described(y: Tensor, start: int) -> dict[str, Any]:
        dtype = str(y.dtype).removeprefix("torch.")
        return {"shape": list(y.shape), "stride": list(y.stride()), "dtype": dtype, "start": start}


@contextlib.contextmanager
def _other_threads(count: int) -> Iterator[None]:
    """Another number of threads, as a model's program may set it: `count`, or one more where that is the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count + (count == threads))
    yield
    torch.set_num_threads(threads)


def _form(x: Tensor) -> tuple[Any, ...]:
    """What FORM names, of an input."""
    version = None
    with contextlib.suppress(RuntimeError):  # of an inference tensor
        version = x._version
    has_gradient, hooks = x.grad is not None, dict(x._backward_hooks or {})
    return type(x), x.shape, x.stride(), x.data_ptr(), x.dtype, x.requires_grad, has_gradient, hooks, version


def _has_memory(y: Any) -> bool:
    return type(y) is Tensor and y.numel() > 0 and y.layout == torch.strided


def _has_content(y: Tensor, content: bytes) -> bool:
    return not content or not MEMCMP(y.data_ptr(), content, len(content))


def _contents(y: Tensor) -> bytes:
    """Of a result as it lies in memory; none where that has gaps."""
    memory = _memory_of(y) if _has_memory(y) else range(0)
    return ctypes.string_at(memory.start, len(memory)) if len(memory) == y.numel() * y.itemsize else b""


def _memory_of(y: Tensor) -> range:
    """The addresses from its first element to its last."""
    last = sum((n - 1) * stride for n, stride in zip(y.shape, y.stride()))
    return range(y.data_ptr(), y.data_ptr() + (last + 1) * y.itemsize)


def _wanting_gradients(v: Any) -> Any:
    """An input in its own memory, but no inference tensor."""
    if not isinstance(v, Tensor):
        return v
    ordinary = torch.empty(0, dtype=v.dtype, device=v.device)
    ordinary.set_(v.untyped_storage(), v.storage_offset(), v.shape, v.stride())
    return ordinary.requires_grad_(v.is_floating_point())


def _moved_out(x: Tensor, more: int = 0) -> Tensor:
    """x in memory of its own, from the first byte on, with `more` bytes behind it; where it has gaps, among guards."""
    if not x.is_contiguous():
        return x.clone()
    storage = torch.UntypedStorage(x.numel() * x.itemsize + more, device=x.device)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride()).copy_(x)


def _as_parameter(x: Tensor) -> Tensor:
    """x as a module keeps it that is not trained, where it may."""
    return torch.nn.Parameter(_moved_out(x), requires_grad=False) if x.is_floating_point() else _moved_out(x)


def _halves_exchanged(x: Tensor) -> Tensor:
    """x, its halves along its first dim that has several in the other order."""
    dim = next((dim for dim, n in enumerate(x.shape) if n > 1), None)
    if dim is None:
        return x
    half = x.shape[dim] // 2
    return torch.cat((x.narrow(dim, half, x.shape[dim] - half), x.narrow(dim, 0, half)), dim)


def _traceback() -> str:
    return traceback.format_exc()[-4000:]


def run_worker(sock: socket.socket, inputs_fd: int, outputs_fd: int, errors_fd: int, request: dict[str, Any]) -> None:
    """Life of a forked worker, from its limits to its last message. Never returns."""
    import mmap

    os.setsid()
    sandbox.die_with_parent()
    scratch, cuda = Path(request["scratch"]), request["device"] != "cpu"
    sandbox.Limits(**request["limits"]).enter()
    caches = [Path(path) for path in request["writable"]]
    sandbox.enter_mounts(scratch, request["scratch_bytes"], [*caches, Path("/proc")] if cuda else caches)
    os.chdir(scratch)
    os.dup2(errors_fd, sys.stderr.fileno())  # standard input and output are the null device, as the warm parent's
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the warm parent's is out of reach
    readable, writable = sandbox.device_paths(cuda)
    held = sandbox.enter_landlock(
        [*sandbox.readable_paths(), *readable, *map(Path, request["readable"])],
        [scratch, *writable, *caches],
        listable=[ROOT],
    )
    sandbox.drop_capabilities(keep_file_access=held)
    sandbox.enter_seccomp(request["forks"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(request["threads"])
    inputs = torch.frombuffer(mmap.mmap(inputs_fd, request["size"], prot=mmap.PROT_READ), dtype=torch.uint8)
    outputs = torch.frombuffer(mmap.mmap(outputs_fd, request["size"]), dtype=torch.uint8)
    try:
        with torch.inference_mode():
            Worker(Channel(sock), inputs, outputs, request["device"]).serve()
    except ChannelClosed:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
