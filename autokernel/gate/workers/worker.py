"""The process in which a candidate runs: it is handed inputs and hands back raw bytes; nothing it says is believed.

`serve` is entered in a fresh fork of the warm parent (zygote.py). Code here is a convenience for honest kernels: every
claim is checked by the judge, which holds the expected values, the seeds and the clock.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autokernel import build
from autokernel.gate.workers import library_calls, mapped_memory, sandbox
from autokernel.gate.workers.calls import call, check_own, check_writable, contents, has_memory, memory_of, results_of
from autokernel.gate.workers.channel import GUARD, POISON, Channel, ChannelClosed, Placed
from autokernel.gate.workers.clocks import Clock
from autokernel.gate.workers.further_calls import FurtherCalls
from autokernel.gate.workers.growth import bytes_of_memory
from autokernel.gate.workers.guards import GuardedMemory
from autokernel.gate.workers.model_tensors import MODELS, check_gradients, check_unchanged
from autokernel.gate.workers.page_ends import PageEnds
from autokernel.gate.workers.patches import Patches
from autokernel.gate.workers.process_state import (
    ProcessChange,
    ProcessState,
    check_files,
    check_locks_of_openmp,
    check_this_thread,
    count_open_files,
    files_there,
    key_of_threads,
    of_this_thread,
    refuse_untold_settings,
    refuse_watchdogs,
)
from autokernel.gate.workers.views import copy_from_pool
from autokernel.spec import ROOT, kernel_module, load_spec

LATE_CYCLES = 1_000_000  # of the GPU's clock, half a millisecond
KEPT_BYTES = 256 << 20  # that PyTorch's allocator may keep for the next trial
MOST_FILES = 256  # that a kernel may keep open
MOST_KEYS = 64  # of pthread_key_create(), of which a process has a thousand
MOST_MEMORY = 256 << 20  # bytes that it may take before it is called: tables, libraries
SEVERAL = 2  # calls: more are made of kernels whose outputs are held
EVERY = 16  # requests for calls, after which another share of what takes long to look at is looked at again
TURNED_OFF_BY_INFERENCE = (
    torch.set_grad_enabled,
    torch._C._set_fwd_grad_enabled,
    torch._C._set_multithreading_enabled,
)
EXIT = ctypes.pythonapi.exit  # holds Python's lock, so that its other threads stay where they are
M_PERTURB = -6  # glibc's mallopt: fill what malloc returns with this byte


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
        self.tried: list[str] = []  # what the kernel has tried, and is refused
        self.answered = 0  # requests for calls of a kernel that is checked
        self.keys = 0  # of threads' own data that were taken before the kernel came
        self.files: dict[int, tuple[int, ...]] = {}  # that were open then
        self.clock: Clock | None = None  # while a kernel is checked
        self.page_ends = PageEnds()
        self.further: FurtherCalls | None = None  # of the function
        self.results = 1  # of a call
        self.held: list[Any] = []  # what calls returned
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
            except BaseException as error:  # a kernel that raises, be it SystemExit, is an outcome, not a fault of ours
                words = _in_words(error)
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

    def do_load(self, source: str, poison: bool, libraries: str, results: int = 1, assertions: bool = True) -> None:
        """Import a candidate's source as a module of its own. `libraries`: what it may call (see ALLOWED), or "any";
        `results`: how many it returns; `assertions`: whether its `assert` statements are there."""
        self.results = results
        build.builder = self.ask_judge_to_build
        if poison and sys.platform == "linux":
            ctypes.CDLL(None).mallopt(M_PERTURB, POISON)
        if self.cuda:
            torch.cuda.init()  # with the driver's libraries, before loading any is forbidden
        hooks: list[str] = []
        if libraries != "any":
            library_calls.refuse_libraries(self.device.type, library_calls.ALLOWED[libraries])
            hooks, self.tried = library_calls.refuse_foreign_code(self.built, self.device.type)
        path, name = Path("kernel.py").resolve(), kernel_module(source)
        path.write_text(source)
        if poison and not self.cuda:
            self.clock = Clock(name)
        if poison and libraries != "any":
            for turn_on in TURNED_OFF_BY_INFERENCE:  # as a model may be run: else nobody sees who turns it off
                turn_on(True)
            refuse_watchdogs()
            refuse_untold_settings()
            self.process, self.patches = ProcessState.now(), Patches(hooks, str(path), not self.cuda)
            self.keys, self.files = key_of_threads(), files_there()
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with torch.inference_mode(False):  # as a program imports it: tensors that it makes may be written to in any mode
            at_import, files, used = ProcessState.now() if self.process else None, count_open_files(), bytes_of_memory()
            if assertions:
                spec.loader.exec_module(module)
            else:
                exec(compile(source, path, "exec", dont_inherit=True, optimize=1), vars(module))
            if at_import:
                at_import.check()
                if (more := count_open_files() - files) > MOST_FILES:
                    raise ProcessChange(f"keeps {more} files open in its process, which is its model's")
                if (more := bytes_of_memory() - used) > MOST_MEMORY:
                    raise ProcessChange(f"keeps {more >> 20} MB from its import on in its process, which is its model's")
        self._check_tried()
        self.function = module.kernel_fn
        if self.process:
            self.process.check()
            self.patches.check()
        if poison:
            self.memory = GuardedMemory(self.device)
            if self.patches:
                self.patches.note_operators()  # we have overridden some
        elif self.cuda:
            torch.empty(1, device=self.device)  # the context takes a fifth of a second: now, while nobody waits for it
        elsewhere = {"elsewhere": self.patches.of_the_kernel} if self.patches else {}
        given = module, self.clock, self.memory, self.built
        self.further = FurtherCalls(self.function, self.results, *given, **elsewhere, calls_none=libraries == "none")

    def do_load_eager(self, kernel_type: str, compiled: bool) -> None:
        """The baseline: the spec's eager form, as it is or through torch.compile."""
        torch.backends.cuda.matmul.allow_tf32 = False
        eager, self.results = load_spec(kernel_type).eager, load_spec(kernel_type).result_count
        if compiled:  # a problem's modules are compiled themselves, one by one
            eager = eager.compiled() if hasattr(eager, "compiled") else torch.compile(eager, dynamic=False)
        self.function, self.further = eager, FurtherCalls(eager, self.results)

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
        rows: Sequence[str] = (),
        numbers: dict[str, float] | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Call the kernel on the sets in `order`, hold every output to the end, and hand all of them back.

        as_in_a_model: but for the first, as models would, each another; other_threads: with another number of PyTorch's.
        activations: many times more afterwards, these inputs in memory of their own each time, to see what is kept.
        """
        self._drop()
        memory: list[range] = []  # of the results so far; on one set the judge says first what their contents are
        for number, i in enumerate(order):
            late = self.cuda and number == len(order) // 2
            seen = [y.clone() for y in results_of(self.held[0], self.results)] if late and self.held else None
            if late:
                self._inputs_arrive_late()
            inputs = self.sets[i]
            with _other_threads(other_threads) if other_threads else contextlib.nullcontext():
                if as_in_a_model and number:
                    returned, inputs = self._call_as_in_a_model(inputs, weights, number - 1)
                else:
                    returned = call(self.function, inputs)
            check_own(results_of(returned, self.results), inputs, memory)
            if seen is not None:  # as the next kernel on this stream would see it
                copied = [mine.copy_(y) for mine, y in zip(seen, results_of(returned, self.results))]
                returned = copied if len(copied) > 1 else copied[0]
            self.held.append(returned)
            if len(set(order)) > 1:
                memory += map(memory_of, filter(has_memory, results_of(returned, self.results)))
        self._synchronize()
        if self.memory:
            self.memory.check()
        if self.process and self.patches:
            self.process.check()
            if not self.cuda:
                check_files(self.files)
            if (more := key_of_threads() - self.keys) > MOST_KEYS:
                raise ProcessChange(f"keeps {more} keys of threads' own data in its process, which is its model's")
            self.answered += 1
            if len(order) > SEVERAL:  # now and then, for it takes milliseconds
                self.patches.check()
            elif self.answered % EVERY == 1:
                self.patches.check_share()
        inputs = [region for regions in self.regions for region in regions.values()]
        outputs = self._outputs()
        if not self.cuda:
            check_writable(outputs[: self.results])  # holds none
        described = self._write([*outputs, *inputs])
        returned = [y.untyped_storage() for y in filter(has_memory, outputs)]
        is_foreign = any(not storage.resizable() for storage in returned)  # memory that PyTorch has not allocated
        stored, returned = [StorageWeakRef(storage) for storage in returned], []
        is_first = self.memory is not None and not self.cuda and not self.further.watched
        known = [(y.storage_offset() * y.itemsize, contents(y)) for y in filter(has_memory, outputs if is_first else ())]
        count = len(outputs)
        del outputs
        self._drop()
        is_kept = is_foreign or not all(storage.expired() for storage in stored)
        if is_first:
            self.further.watch(self.sets[0], stored, known)
        if is_kept:
            self.further.hold_for_many(self.sets[0])
        self.further.check_watched()
        if self.memory and not self.cuda and (at_the_end := self.page_ends.moved(self.sets[order[0]])):
            self.function(**at_the_end)
            self.memory.forget()
        if activations is not None and not self.cuda:
            self.further.run(self.sets[0], activations, weights, rows, numbers or {}, parameters or {})
            if self.process:
                self.process.check()
                check_locks_of_openmp()
        self._check_tried()
        self._give_back()
        return {"outputs": described[:count], "inputs": described[count:]}

    def _check_tried(self) -> None:
        if self.tried:
            raise ProcessChange(f"tries what is refused here, and would be done in its model's process: {self.tried[0]}")

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

    def do_leave(self, status: int) -> None:
        """End as a program does: once its threads have, all is done that is to be done at exit, in Python and in C++."""
        self._drop()
        self.sets = []
        threading._shutdown()
        atexit._run_exitfuncs()
        EXIT(status)

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

    def _call_as_in_a_model(
        self, inputs: dict[str, Any], weights: Sequence[str], number: int
    ) -> tuple[Any, dict[str, Any]]:
        """What the kernel returns, and on which tensors: of the model of this number, none of them inference tensors; on a
        CPU in another thread, as servers call."""

        @torch.inference_mode(False)
        @torch.no_grad()  # which an operator around the kernel sees to
        def called() -> tuple[Any, dict[str, Any]]:
            before = of_this_thread() if self.process else {}
            of_inference = self.memory.of_inference if self.memory else set()
            of_inference.clear()
            made = MODELS[number](inputs, weights)
            returned = call(self.function, made)
            if before:
                check_this_thread(before)
            if not self.cuda:
                check_unchanged(made, inputs)
                check_gradients(made)
            results = filter(has_memory, results_of(returned, self.results))
            if any(y.is_inference() or y.untyped_storage().data_ptr() in of_inference for y in results):
                raise ValueError("kernel_fn returned a tensor of inference mode, of which no model computes gradients")
            return returned, made

        if self.cuda:  # whose context a thread may not have
            return called()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(called).result()

    def _outputs(self) -> list[Any]:
        """The results of all calls that are held, one call's after another's."""
        return [y for returned in self.held for y in results_of(returned, self.results)]

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


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:4000]
    except BaseException:  # of a __str__() of its own
        return f"{type(error).__name__}: its message cannot be made"


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
