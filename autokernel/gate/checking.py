"""The five stages of correctness, run in workers: every trial's calls, each output held against the oracle."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.channel import GUARD, Placed, place
from autokernel.gate.correctness import HELD_SETS, NEW_ADDRESS, Step, Trial, expect, same_bits, trials, wrong
from autokernel.gate.processes import WarmParent, WorkerFault, WorkerProcess, write_inputs
from autokernel.gate.room import Room
from autokernel.gate.stopwatch import Stopwatch
from autokernel.gate.verdict import STAGES, Correctness, Failure
from autokernel.spec import Case, KernelSpec, load_spec
from autokernel.target import Target

LOAD_TIMEOUT_S = 60.0  # importing the source, and compiling what it compiles at import
CALL_TIMEOUT_S = 20.0  # one call of a trial; all trials are small
# What a trial takes of a GPU's memory, in multiples of what one call moves: inputs in two precisions, several outputs in
# the worker, and here the comparison's own tensors, all of them fp64.
TRIAL_COPIES = 40
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
    """Runs the stages for one kernel after another. `workers`: how many processes share the trials of a kernel, where
    the shared memory has room for their inputs."""

    def __init__(self, parent: WarmParent, device: str, threads: int, workers: int, room: Room, watch: Stopwatch):
        self.parent, self.device, self.threads, self.workers, self.watch = parent, device, threads, workers, watch
        self.room = room
        self.timeout_s = CALL_TIMEOUT_S

    def run(
        self,
        source: str,
        target: Target,
        seed: int,
        quick: bool,
        libraries: str,
        progress: Callable[[str], None],
        smoked: Callable[[], None],
    ) -> Checked:
        """All stages up to the first failure; `progress` is told the name of each stage as it begins, `smoked` is called
        when the smoke test has passed."""
        checked, spec = Checked(), load_spec(target.kernel_type)
        todo = list(trials(spec, target, seed, quick))
        largest = max(place(trial.case.tensors, 0)[1] for trial in todo)
        count = max(1, min(self.workers, self.parent.size // (HELD_SETS * largest + NEW_ADDRESS)))
        left = Counter(trial.stage for trial in todo)
        failures: dict[int, tuple[Failure, Correctness]] = {}
        repeatable: list[tuple[Trial, list[Tensor], WorkerProcess]] = []
        queue, lock = iter(enumerate(todo)), threading.Lock()
        busy: dict[WorkerProcess, int] = {}  # worker -> the index of the trial it is at
        given_up: set[WorkerProcess] = set()

        def attempt(index: int, trial: Trial, make: Callable[[], Any]) -> Any:
            """What `make` returns; a worker's fault, or a reason that it returns, is the trial's failure."""
            try:
                made = make()
            except WorkerFault as fault:
                if fault.worker not in given_up:
                    fail(index, self._failure(trial, fault.reason, fault.detail), Correctness(fault.kind))
                return None
            if isinstance(made, str):
                fail(index, self._failure(trial, made), Correctness.FAIL)
            return made

        def fail(index: int, failure: Failure, kind: Correctness) -> None:
            """Note a failure, and give up the workers that are at later trials: only an earlier one can matter more."""
            with lock:
                failures[index] = failure, kind
                later = [worker for worker, at in busy.items() if at > index]
                given_up.update(later)
            for worker in later:
                worker.end()

        def advance(number: int, worker: WorkerProcess) -> None:
            """Try one trial after another until none is left or one has failed."""
            slot = number * (self.parent.size // count)
            busy[worker] = len(todo)  # loading, for whatever comes next
            attempt(-1, todo[0], lambda: self._load(worker, source, libraries))
            while not failures:
                with lock:
                    index, trial = next(queue, (-1, todo[0]))
                    if index < 0:
                        return
                    busy[worker] = index
                    if checked.stages[trial.stage] == "SKIP":
                        checked.stages[trial.stage] = "RUN"
                        progress(trial.stage)
                make = partial(self._try, worker, spec, trial, slot)
                outputs = attempt(index, trial, partial(self._fitted, spec, trial, make))
                with lock:
                    left[trial.stage] -= 1
                    if not left[trial.stage] and not failures:
                        checked.stages[trial.stage] = "PASS"
                        if trial.stage == STAGES[0]:
                            smoked()
                    if trial.held and isinstance(outputs, list):
                        repeatable.append((trial, outputs, worker))

        with contextlib.ExitStack() as stack:
            workers = [self._worker(stack, source) for _ in range(count)]
            if len(workers) == 1:
                advance(0, workers[0])
            else:
                with ThreadPoolExecutor(len(workers)) as pool:
                    list(pool.map(advance, range(len(workers)), workers))
            if repeatable and not failures:
                trial, outputs, first = repeatable[0]
                again = partial(self._again, stack, workers, first, source, libraries, spec, trial, outputs)
                attempt(0, trial, partial(self._fitted, spec, trial, again))
        for stage, state in checked.stages.items():
            checked.stages[stage] = "SKIP" if state == "RUN" else state
        if failures:
            checked.fail(*failures[min(failures)])
        return checked

    def _worker(self, stack: contextlib.ExitStack, source: str) -> WorkerProcess:
        with self.watch("processes"):
            return stack.enter_context(WorkerProcess(self.parent, self.threads, source))

    def _load(self, worker: WorkerProcess, source: str, libraries: str) -> None:
        with self.watch("load"):
            worker.request("load", LOAD_TIMEOUT_S, source=source, poison=True, libraries=libraries)

    def _failure(self, trial: Trial, reason: str, detail: str = "") -> Failure:
        return Failure(trial.stage, trial.label, trial.seed, reason, detail)

    def _fitted(self, spec: KernelSpec, trial: Trial, make: Callable[[], Any]) -> Any:
        """What `make` returns, beside other trials as far as the device's memory goes; where it did not, without them."""
        nbytes = TRIAL_COPIES * spec.bytes_moved(trial.case.args)
        try:
            with self.room.take(nbytes), _given_back(nbytes):
                return make()
        except torch.OutOfMemoryError:  # ours
            pass
        except WorkerFault as fault:
            if not fault.out_of_device_memory:
                raise
        with self.room.take(self.room.nbytes), _given_back(nbytes):
            return make()

    def _try(self, worker: WorkerProcess, spec: KernelSpec, trial: Trial, slot: int) -> str | list[Tensor]:
        """Make a trial's calls, their inputs written to the arena from byte `slot` on, and hold every output to the oracle.

        Returns why the trial failed, or the outputs of its last step.
        """
        for step in trial.steps(spec):
            outputs = self._call(worker, trial.case, step, slot)
            if isinstance(outputs, str):
                return outputs
            reason = None
            for index, inputs in enumerate(step.sets):
                first, *again = [y for y, i in zip(outputs, step.order) if i == index]
                with self.watch("oracle"):
                    expectation = expect(spec, inputs, self.device)
                reason = reason or wrong(first, expectation, adversarial=bool(trial.adversarial))
                if reason is None and not all(same_bits(first, y) for y in again):
                    reason = f"{len(again) + 1} calls on the same inputs do not agree bitwise"
            if reason:
                return f"{step.what}: {reason}" if step.what else reason
        return outputs

    def _call(self, worker: WorkerProcess, case: Case, step: Step, slot: int) -> str | list[Tensor]:
        """The outputs of one step's calls, or what is wrong with how they were handed over."""
        end, messages = slot + step.shift, []
        for inputs in step.sets:
            message, end = write_inputs(self.parent, inputs, case.tensors, end)
            messages.append(message)
        with self.watch("trials"):
            worker.request("sets", self.timeout_s, sets=messages)
            answer = worker.request("call", self.timeout_s, order=step.order)
        outputs, after = worker.fetch(answer["outputs"]), worker.fetch(answer["inputs"])
        if len(outputs) != len(step.order):
            return f"{len(outputs)} outputs for {len(step.order)} calls"
        for y, strides in outputs:
            if not torch.empty_strided(y.shape, strides, device="meta").is_contiguous():
                return f"strides {strides} instead of contiguous {tuple(y.stride())}"
        placed = [(name, Placed.decode(where[name])) for where in messages for name in case.tensors]
        for (name, where), (memory, _) in zip(placed, after):  # none on a CPU, where inputs cannot be written to
            before = self.parent.inputs.bytes[where.start - GUARD : where.end + GUARD]
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
        trial: Trial,
        seen: list[Tensor],
    ) -> str | None:
        """Make a held trial's calls in a second process, where they must give the bits that they gave in the `first`."""
        second = next((worker for worker in workers if worker is not first), None)
        if second is None:
            second = self._worker(stack, source)
            self._load(second, source, libraries)
        (step,) = trial.steps(spec)
        outputs = self._call(second, trial.case, step, 0)
        if isinstance(outputs, str):
            return outputs
        return None if all(map(same_bits, seen, outputs)) else "two processes do not agree bitwise on the same inputs"


@contextlib.contextmanager
def _given_back(nbytes: int) -> Iterator[None]:
    """Leave what took so much of a GPU's memory to the other processes afterwards."""
    try:
        yield
    finally:
        if nbytes >= LARGE_BYTES and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
