"""The five stages of correctness, run in workers: every trial's calls, each output held against the oracle."""

import contextlib
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autokernel.common.verdict import STAGES, Correctness, Failure
from autokernel.gate.checks.ahead import LOAD_TIMEOUT_S, CompilingAhead
from autokernel.gate.checks.cases import HELD_SETS, NEW_ADDRESS, CheckCase, Step, other_number
from autokernel.gate.checks.correctness import same_bits, wrong
from autokernel.gate.checks.expectations import expectations, most_bytes
from autokernel.gate.checks.inputs import changing
from autokernel.gate.checks.planted import rows_seen
from autokernel.gate.checks.trials import trials
from autokernel.gate.workers.channel import GUARD, Placed, place
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess, write_inputs
from autokernel.gate.workers.stopwatch import Stopwatch
from autokernel.hardware.threads import one_thread
from autokernel.spec import Case, KernelSpec, load_spec
from autokernel.target import Target

CALL_TIMEOUT_S = 20.0  # one call of a trial; all trials are small
# What a trial takes of a GPU's memory, in multiples of what one call moves: inputs in two precisions, several outputs in
# the worker, and here the result and its terms in fp64, four times as large as a result in 16 bit. One that takes more
# finds no memory, and is tried again with all of it.
TRIAL_COPIES = 16
# More workers join where what is left of the trials would take longer than this: most of it is then spent compiling.
LONG_S, JOIN_S = 3.0, 0.5  # and how often that is asked
# Up to these a trial's inputs, oracle and comparison are made on one thread: others spin, and on a busy machine work
# waits for them, two to three times as long in all (benchmarks/transcripts/cpu-stages.txt).
SMALL_NUMBERS, SMALL_FLOPS = 4 << 20, 1e9
HELD_THERE_BYTES = 1 << 28  # results that may take so much are copied to the GPU that compares them, and not here first
PLAIN = "def kernel_fn(): pass"  # a kernel file that leaves nothing behind
LARGE_BYTES = 1 << 30  # what PyTorch's allocator keeps of so much is given back, for the other processes


@dataclass
class Checked:
    """What became of the stages: "PASS", "FAIL", "SKIP", … for each, and the first failure."""

    stages: dict[str, str] = field(default_factory=lambda: dict.fromkeys(STAGES, "SKIP"))
    failure: Failure | None = None
    correctness: Correctness = Correctness.PASS
    undecided: str = ""  # why nothing can be said

    def fail(self, failure: Failure, kind: Correctness) -> None:
        self.failure, self.correctness = failure, kind
        self.stages[failure.stage] = kind.value


class Checks:
    """What the stages of all kernels share. `workers`: how many processes share the trials of a kernel, `most_workers`: how
    many do where it takes long, as far as the shared memory has room for their inputs; `compiling`: how many more compile
    ahead of them."""

    def __init__(
        self,
        parent: WarmParent,
        device: str,
        threads: int,
        workers: int,
        most_workers: int,
        compiling: int,
        memory: DeviceMemoryBudget,
        watch: Stopwatch,
    ):
        self.parent, self.device, self.threads, self.watch = parent, device, threads, watch
        self.workers, self.most_workers, self.compiling, self.memory = workers, most_workers, compiling, memory
        self.timeout_s = CALL_TIMEOUT_S


class StageRun:
    """The stages for one kernel: its trials in order, each taken by the next worker that is free.

    `progress` is told the name of each stage as it begins, `smoked` is called when the smoke test has passed.
    """

    def __init__(
        self,
        checks: Checks,
        source: str,
        target: Target,
        seed: int,
        quick: bool,
        libraries: str,
        progress: Callable[[str], None],
        smoked: Callable[[], None],
    ):
        self.checks, self.source, self.libraries = checks, source, libraries
        self.progress, self.smoked = progress, smoked
        self.spec, self.checked = load_spec(target.kernel_type), Checked()
        self.trials = list(trials(self.spec, target, seed, quick))
        largest = max(place(trial.case.tensors, 0)[1] for trial in self.trials)
        self.count = max(1, min(checks.most_workers, checks.parent.size // (HELD_SETS * largest + NEW_ADDRESS)))
        self.left = Counter(trial.stage for trial in self.trials)
        self.failures: dict[int, tuple[Failure, Correctness]] = {}  # by the index of the trial
        self.repeatable: list[tuple[CheckCase, list[Tensor], WorkerProcess]] = []  # held trials that passed
        self.results = self.spec.result_count  # of a call
        self.lock = threading.Lock()  # of all that follows, and of the above
        self.queue = iter(enumerate(self.trials))
        self.busy: dict[WorkerProcess, int] = {}  # worker -> the index of the trial it is at
        self.given_up: set[WorkerProcess] = set()
        self.started_s, self.ended = time.monotonic(), threading.Event()

    def run(self) -> Checked:
        """All stages up to the first failure."""
        checks, cases = self.checks, [trial.case.args for trial in self.trials]
        ahead = CompilingAhead(checks.parent, checks.memory, checks.compiling, self.source, self.spec, cases)
        with contextlib.ExitStack() as stack:
            workers = [self._worker(stack, self.source) for _ in range(min(self.count, checks.workers))]
            stack.enter_context(ahead)
            if self.count == 1:
                self._advance(0, workers[0])
            else:
                with ThreadPoolExecutor(self.count) as pool:
                    first = [pool.submit(self._advance, number, worker) for number, worker in enumerate(workers)]
                    late = [pool.submit(self._join, number, stack) for number in range(len(workers), self.count)]
                    try:
                        for future in (*first, *late):
                            future.result()
                    finally:  # the pool waits for what was begun: where a signal ends this, nothing more is
                        with self.lock:
                            self.queue = iter(())
            if self.repeatable and not self.failures:
                trial, outputs, first = self.repeatable[0]
                again = partial(self._again, stack, workers, first, self.source, self.libraries, self.spec, trial, outputs)
                self._attempt(0, trial, partial(self._fitted, self.spec, trial, again))
            if not self.failures:
                ahead.finish()
        for stage, state in self.checked.stages.items():
            self.checked.stages[stage] = "SKIP" if state == "RUN" else state
        if self.failures:
            self.checked.fail(*self.failures[min(self.failures)])
        return self.checked

    def _join(self, number: int, stack: contextlib.ExitStack) -> None:
        """Be one worker more, once what is left turns out to take long."""
        while not self.ended.wait(JOIN_S):
            left = sum(self.left.values())
            if (time.monotonic() - self.started_s) * left > LONG_S * max(1, len(self.trials) - left):
                self._advance(number, self._worker(stack, self.source))
                return

    def _advance(self, number: int, worker: WorkerProcess) -> None:
        """Try one trial after another until none is left or one has failed."""
        slot = number * (self.checks.parent.size // self.count)
        self.busy[worker] = len(self.trials)  # loading, for whatever comes next
        self._attempt(-1, self.trials[0], lambda: self._load(worker, self.source, self.libraries))
        while not self.failures and (taken := self._next(worker)):
            index, trial = taken
            make = partial(self._try, worker, self.spec, trial, slot)
            outputs = self._attempt(index, trial, partial(self._fitted, self.spec, trial, make))
            with self.lock:
                self.left[trial.stage] -= 1
                if not self.left[trial.stage] and not self.failures:
                    self.checked.stages[trial.stage] = "PASS"
                    if trial.stage == STAGES[0]:
                        self.smoked()
                if trial.held and isinstance(outputs, list):
                    self.repeatable.append((trial, outputs, worker))
        self.ended.set()

    def _next(self, worker: WorkerProcess) -> tuple[int, CheckCase] | None:
        """The next trial and its index; None if there is none."""
        with self.lock:
            taken = next(self.queue, None)
            if taken:
                index, trial = taken
                self.busy[worker] = index
                if self.checked.stages[trial.stage] == "SKIP":
                    self.checked.stages[trial.stage] = "RUN"
                    self.progress(trial.stage)
            return taken

    def _attempt(self, index: int, trial: CheckCase, make: Callable[[], Any]) -> Any:
        """What `make` returns; a worker's fault, or a reason that it returns, is the trial's failure."""
        try:
            made = make()
        except WorkerFault as fault:
            if fault.worker not in self.given_up:
                self._fail(index, self._failure(trial, fault.reason, fault.detail), Correctness(fault.kind))
            return None
        if isinstance(made, str):
            self._fail(index, self._failure(trial, made), Correctness.FAIL)
        return made

    def _fail(self, index: int, failure: Failure, kind: Correctness) -> None:
        """Note a failure, and give up the workers that are at later trials: only an earlier one can matter more."""
        with self.lock:
            self.failures[index] = failure, kind
            later = [worker for worker, at in self.busy.items() if at > index]
            self.given_up.update(later)
        for worker in later:
            worker.end()

    def _worker(self, stack: contextlib.ExitStack, source: str) -> WorkerProcess:
        with self.checks.watch("processes"):
            return stack.enter_context(WorkerProcess(self.checks.parent, self.checks.threads, source))

    def _load(self, worker: WorkerProcess, source: str, libraries: str, assertions: bool = True) -> None:
        with self.checks.watch("load"):
            load = {"source": source, "poison": True, "libraries": libraries, "results": self.results}
            load |= {"assertions": assertions}
            worker.request("load", LOAD_TIMEOUT_S, **load)

    def _failure(self, trial: CheckCase, reason: str, detail: str = "") -> Failure:
        return Failure(trial.stage, trial.label, trial.seed, reason, detail)

    def _fitted(self, spec: KernelSpec, trial: CheckCase, make: Callable[[], Any]) -> Any:
        """What `make` returns, beside other trials as far as the device's memory goes; where it did not, without them."""
        nbytes = TRIAL_COPIES * spec.bytes_moved(trial.case.args)
        try:
            with self.checks.memory.take(nbytes), _given_back(nbytes):
                return make()
        except torch.OutOfMemoryError:  # ours
            pass
        except WorkerFault as fault:
            if not fault.out_of_device_memory:
                raise
        with self.checks.memory.take(self.checks.memory.nbytes), _given_back(nbytes):
            return make()

    def _try(self, worker: WorkerProcess, spec: KernelSpec, trial: CheckCase, slot: int) -> str | list[Tensor]:
        """Make a trial's calls, their inputs written to the arena from byte `slot` on, and hold every output to the oracle.

        Returns why the trial failed, or the outputs of its last step, one call's results after another's.
        """
        with one_thread() if _is_small(spec, trial.case) else contextlib.nullcontext():
            return self._try_steps(worker, spec, trial, slot)

    def _try_steps(self, worker: WorkerProcess, spec: KernelSpec, trial: CheckCase, slot: int) -> str | list[Tensor]:
        outputs: str | list[Tensor] = []  # of no step, where no input may be of one kind as a whole
        for step in trial.steps(spec, self.checks.device):
            outputs = self._call(worker, spec, trial.case, step, slot)
            if isinstance(outputs, str):
                return outputs
            reason, rows = None, rows_seen(spec, trial.case, trial.seed) if trial.planted else None  # None: all
            for index, inputs in enumerate(step.sets):
                seen = inputs | {name: _rows_of(inputs[name], rows) for name in spec.sliced}
                with self.checks.watch("oracle"):
                    expected = expectations(spec, seen, self.checks.device)
                for result, expectation in enumerate(expected):
                    made = [_rows_of(y, rows) for y in outputs[result :: len(expected)]]
                    first, *again = [y for y, i in zip(made, step.order) if i == index]
                    is_luck = trial.ill_conditioned or step.in_steps and first.dtype == torch.float32
                    why = wrong(first, expectation, is_luck, trial.repeats)
                    if why is None and not all(same_bits(first, y) for y in again):
                        why = f"{len(again) + 1} calls on the same inputs do not agree bitwise"
                    reason = reason or why and f"{_which(result, len(expected))}{why}"
            if reason:
                return f"{step.what}: {reason}" if step.what else reason
        return outputs

    def _call(self, worker: WorkerProcess, spec: KernelSpec, case: Case, step: Step, slot: int) -> str | list[Tensor]:
        """The results of one step's calls, or what is wrong with how they were handed over."""
        end, messages = slot + step.shift, []
        for inputs in step.sets:
            message, end = write_inputs(self.checks.parent, inputs, case.tensors, end)
            shared = {name: _in_shape(message[other], message[name]["shape"]) for name, other in step.shared.items()}
            messages.append(message | shared)
        with self.checks.watch("trials"):
            worker.request("sets", self.checks.timeout_s, sets=messages)
            activations = changing(spec, case) if step.many else None
            made = {"as_in_a_model": step.as_in_a_model, "other_threads": step.other_threads, "activations": activations}
            if step.as_in_a_model or step.many:
                made["weights"] = sorted(spec.static)
            if step.many:
                numbers = {name: other_number(v) for name, v in step.sets[0].items() if isinstance(v, float)}
                made |= {"rows": spec.sliced, "numbers": numbers, "parameters": _defaults(spec)}
            answer = worker.request("call", self.checks.timeout_s, order=step.order, **made)
        most = most_bytes(spec, case)
        held_on = self.checks.device if most >= HELD_THERE_BYTES else "cpu"
        outputs = worker.fetch(answer.outputs, len(step.order) * self.results, most, held_on)
        for i, (y, strides) in enumerate(outputs):
            result = i % self.results
            wanted = spec.results[result].strides if spec.results else tuple(y.stride())
            also = spec.result_strides(case.args) if spec.result_strides else wanted
            differs = all(any(a != b for a, b, n in zip(strides, w, y.shape) if n > 1) for w in (wanted, also))
            if y.numel() and len(strides) == len(wanted) and differs:
                kind = "" if spec.results and spec.results[result].stride else "contiguous "
                return f"{_which(result, self.results)}strides {strides} instead of {kind}{wanted}"
        placed = [(name, Placed.decode(where[name])) for where in messages for name in case.tensors]
        if self.checks.device == "cpu":  # where inputs cannot be written to
            placed = []
        largest = max((where.end - where.start for _, where in placed), default=0) + 2 * GUARD
        after = worker.look(answer.inputs, len(placed), largest)
        for (name, where), (memory, _) in zip(placed, after):
            before = self.checks.parent.inputs.bytes[where.start - GUARD : where.end + GUARD]
            if memory.shape != before.shape or memory.dtype != before.dtype:
                raise worker.forged(f"the memory of its input {name} in another shape")
            if not torch.equal(memory, before):
                inside = not torch.equal(memory[GUARD:-GUARD], before[GUARD:-GUARD])
                return f"changed its input {name}" if inside else f"wrote beside its input {name}"
        return [y for y, _ in outputs]

    def _again(
        self,
        stack: contextlib.ExitStack,
        workers: list[WorkerProcess],
        first: WorkerProcess,
        source: str,
        libraries: str,
        spec: KernelSpec,
        trial: CheckCase,
        seen: list[Tensor],
    ) -> str | None:
        """Make a held trial's calls in a second process, where they must give the bits that they gave in the `first`. On a
        CPU in one where PyTorch computes and libraries load, as in a model: whoever tells by that is off there. It leaves
        assertions out, as `python -O` does: what works in one is off there. Then it ends as a program does, by itself."""
        is_free, second = self.checks.device == "cpu" and libraries != "any", None
        if not is_free:
            second = next((worker for worker in workers if worker is not first), None)
        if second is None:
            second = self._worker(stack, source)
            self._load(second, source, "any" if is_free else libraries, assertions=False)
        (step,) = trial.steps(spec, self.checks.device)
        outputs = self._call(second, spec, trial.case, step, 0)
        if isinstance(outputs, str):
            return outputs
        if not all(map(same_bits, seen, outputs)):
            return "two processes do not agree bitwise on the same inputs"
        if self.checks.device != "cpu" or sys.platform != "linux" or (reason := second.check_end()) is None:
            return None
        plain = self._worker(stack, PLAIN)  # here PyTorch's own libraries may not end as they should
        self._load(plain, PLAIN, "any")
        return reason if plain.check_end() is None else None


def _is_small(spec: KernelSpec, case: Case) -> bool:
    return sum(t.numel for t in case.tensors.values()) <= SMALL_NUMBERS and spec.flops(case.args) <= SMALL_FLOPS


def _rows_of(y: Tensor, rows: Tensor | None) -> Tensor:
    """Those of a result or an input; one that has not so many is wrong as a whole."""
    return y if rows is None or not y.dim() or len(y) <= rows[-1] else y[rows]


def _in_shape(placed: dict[str, Any], shape: list[int]) -> dict[str, Any]:
    """A tensor as it is placed, its last two dims the other way round where that is its shape."""
    if placed["shape"] == shape:
        return placed
    *outer, row, column = placed["stride"]
    return placed | {"shape": shape, "stride": [*outer, column, row]}


def _defaults(spec: KernelSpec) -> dict[str, Any]:
    """The parameters of a type's oracle in their order, each with its default; None where there is none."""
    parameters = inspect.signature(spec.oracle).parameters
    return {name: p.default if type(p.default) in (bool, int, float, str) else None for name, p in parameters.items()}


def _which(result: int, results: int) -> str:
    return f"result {result}: " if results > 1 else ""


@contextlib.contextmanager
def _given_back(nbytes: int) -> Iterator[None]:
    """Leave what took so much of a GPU's memory to the other processes afterwards."""
    try:
        yield
    finally:
        if nbytes >= LARGE_BYTES and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
