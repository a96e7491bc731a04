"""The judge: takes a kernel's source and a target, and says whether it is right, how fast it is, and whether to keep it."""

import os
import reprlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from autokernel.common.backends import BACKENDS
from autokernel.common.verdict import Correctness, Failure, Verdict
from autokernel.gate.checks.ahead import LOAD_TIMEOUT_S, Ahead, compile_ahead
from autokernel.gate.checks.cases import CheckCase
from autokernel.gate.checks.expectations import TypeFault
from autokernel.gate.checks.runner import CALL_TIMEOUT_S, Checked, Checks, StageRun
from autokernel.gate.source import constants
from autokernel.gate.timing.autotune import Autotuner, Looked
from autokernel.gate.timing.batches import maps_memory
from autokernel.gate.timing.contest import Contestants, Contests, NotDecided
from autokernel.gate.timing.faults import BaselineFault, RefusedWhileTimed
from autokernel.gate.timing.pairs import PairTimer
from autokernel.gate.workers import answers, sandbox
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.launch import Launched
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess, write_inputs
from autokernel.gate.workers.stopwatch import Stopwatch
from autokernel.hardware.allocator import give_freed_memory_back, keep_freed_memory
from autokernel.hardware.device import Device
from autokernel.hardware.machine import MachineFault, gpu_lost
from autokernel.spec import ANY_LIBRARY, CONVOLUTION, load_spec
from autokernel.target import Target

# That share the trials of a kernel on a GPU, each with a context of half a gigabyte, and that do where it takes long to
# compile, or compile ahead: not more than the device has so many bytes.
WORKERS, MOST_WORKERS, WORKER_BYTES = 6, 12, 4 << 30
LONGEST_PROFILE = 100_000  # characters
NO_MEMORY = "the device has no memory for what the oracle computes"


class Judge:
    """The gate on one device. Owns the warm parent; use as a context manager."""

    def __init__(
        self,
        device: str = "cpu",
        allow_libraries: bool = False,
        require_sandbox: bool = False,
        launched: Launched | None = None,
    ):
        """allow_libraries: do not refuse kernels that hand their work to PyTorch or another library.
        require_sandbox: raise SandboxIncomplete where a layer of the sandbox does not hold.
        launched: the warm parent's process, where it was started before PyTorch was imported here; now ours to end."""
        self.allow_libraries = allow_libraries
        self.watch = Stopwatch()
        self.parent = WarmParent(device, partial(_load_oracle_libraries, device), launched)
        try:
            self.device = Device.detect(device)  # a new one is measured: not while the warm parent starts
            with ThreadPoolExecutor(1) as pool:
                seeded = pool.submit(self.parent.seed_caches)
                self.sandbox = self.parent.probe()  # layer -> whether it holds here
                maps = maps_memory(self.parent)
                seeded.result()
            if require_sandbox:
                sandbox.require(self.sandbox)
        except BaseException:
            self.parent.close()
            raise
        keep_freed_memory()  # of what the oracle computes
        # Beside a GPU one will do: an OpenMP pool took 3 to 8 ms to wake for a copy of 64 KiB, on 16 virtual cores.
        self.threads = torch.get_num_threads() if device == "cpu" else 1
        memory = DeviceMemoryBudget.of(device)
        # On a GPU most of the time goes into compiling a kernel for each dtype and shape class: on several cores at once.
        workers, most, compiling = 1, 1, 0
        if device != "cpu":
            cores = max(1, (os.cpu_count() or 1) - 2)
            workers = min(WORKERS, cores)
            most = max(workers, min(MOST_WORKERS, cores, memory.nbytes // WORKER_BYTES))
            compiling = max(0, min(cores, memory.nbytes // WORKER_BYTES) - workers)
        self.compiled: set[tuple[str, str]] = set()  # sources, and the names of the targets for which they are
        self.checks = Checks(self.parent, device, self.threads, workers, most, compiling, memory, self.watch)
        self.contests = Contests(self.parent, self.device, device, self.threads, memory, self.watch, maps)

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.parent.close()
        give_freed_memory_back()

    def examine(
        self,
        source: str,
        target: Target,
        incumbent: str | None = None,
        quick: bool = False,
        seed: int | None = None,
        compile_baseline: bool = False,
        progress: Callable[[str], None] = lambda stage: None,
    ) -> Verdict:
        """Five stages of correctness, then paired timing: against the incumbent if given, and PyTorch eager.

        quick: one dtype, smoke test, shape sweep, three pairs; such a verdict never keeps. The seed is fresh unless given.
        `progress` is told the name of each stage as it begins.
        """
        started, seed = self._begin(seed)
        contestants = Contestants(source, incumbent, quick, compile_baseline)
        with self.contests.timer(target, seed, self._libraries(target, timed=True)) as timer:
            checked = self._check(source, target, seed, quick, progress, lambda: self.contests.prepare(timer, contestants))
            if checked.failure is not None or checked.undecided:
                return self._untimed(source, target, checked, seed, started)
            progress("timing")
            return self._timed(self.contests.decide, timer, contestants, checked, started)

    def check(self, source: str, target: Target, seed: int | None = None) -> Verdict:
        """The five stages alone: correctness, nothing timed."""
        started, seed = self._begin(seed)
        checked = self._check(source, target, seed)
        return self._untimed(source, target, checked, seed, started)

    def contest(self, source: str, incumbent: str, target: Target, seed: int | None = None) -> Verdict:
        """The timing and the keep rule alone, of two kernels that are known to be right."""
        started, seed = self._begin(seed)
        with self.contests.timer(target, seed, self._libraries(target, timed=True)) as timer:
            return self._timed(self.contests.decide, timer, Contestants(source, incumbent), Checked(), started)

    def compare(self, candidate: str, incumbent: str, target: Target, seed: int | None = None) -> Verdict:
        """Time two kernels against each other in eight fresh pairs of processes on fresh inputs; no early stop."""
        started, seed = self._begin(seed)
        with self.contests.timer(target, seed, self._libraries(target, timed=True)) as timer:
            return self._timed(self.contests.compare, timer, Contestants(candidate, incumbent), Checked(), started)

    def autotune(
        self,
        sources: Iterable[str],
        target: Target,
        seconds: float = 60.0,
        progress: Callable[[int, int], None] = lambda done, of: None,
        finals: bool = True,
    ) -> list[Looked]:
        """How fast each of many sources looks, the fastest first, and why others could not be timed. No verdict: nothing is
        kept by it. `progress` is told how many have been compiled; finals: the best few are timed once more, apart."""
        sources = list(sources)
        is_compiled = all((source, target.name) in self.compiled for source in sources)
        with self.contests.timer(target, secrets.randbits(48), "any") as timer:
            return Autotuner(timer, self._compiling, progress).run(sources, seconds, is_compiled, finals)

    def compile_ahead(self, wanted: Sequence[Ahead], progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compile kernels of many targets side by side before the first of them is judged. No verdict, and nothing is
        timed."""
        made = compile_ahead(self.parent, self.checks.memory, self._compiling, wanted, progress)
        self.compiled |= {(source, target.name) for source, target in made}

    @property
    def _compiling(self) -> int:
        """Processes that compile at once."""
        return (os.cpu_count() or 1) if self.device.type == "cpu" else self.checks.most_workers

    def profile(self, source: str, target: Target) -> str:
        """What ran in one call on the target's first case: torch.profiler's table, as the worker reports it."""
        spec, case = load_spec(target.kernel_type), target.cases[0].case
        inputs = CheckCase("profile", case, secrets.randbits(48)).inputs(spec)
        with WorkerProcess(self.parent, self.threads, source) as worker:
            try:
                load = {"source": source, "poison": False, "libraries": "any", "results": spec.result_count}
                worker.request("load", LOAD_TIMEOUT_S, **load)
                worker.request("sets", CALL_TIMEOUT_S, sets=[write_inputs(self.parent, inputs, case.tensors, 0)[0]])
                table = worker.request("profile", LOAD_TIMEOUT_S).table
            except WorkerFault as fault:
                return f"no profile: {fault.reason}"
        return answers.printable(table, LONGEST_PROFILE)

    def _begin(self, seed: int | None) -> tuple[float, int]:
        self.watch.seconds.clear()
        return time.perf_counter(), secrets.randbits(48) if seed is None else seed

    def _libraries(self, target: Target, timed: bool = False) -> str:
        """What a kernel of this type may call, as a worker is told; where it is timed, at the target's shapes alone."""
        spec = load_spec(target.kernel_type)
        if self.allow_libraries or spec.library_calls == ANY_LIBRARY:
            return "any"
        is_all = timed and any(spec.is_library_work(weighted.case.args) for weighted in target.cases)
        if not spec.library_calls or is_all:
            return "none"
        return "convolution" if spec.library_calls == CONVOLUTION else "gemm"

    def _check(
        self,
        source: str,
        target: Target,
        seed: int,
        quick: bool = False,
        progress: Callable[[str], None] = lambda stage: None,
        smoked: Callable[[], None] = lambda: None,
    ) -> Checked:
        refused = _refused(source, target, seed, self.device.type)
        if refused:
            checked = Checked()
            checked.fail(refused, Correctness.FAIL)
            return checked
        try:
            stages = StageRun(self.checks, source, target, seed, quick, self._libraries(target), progress, smoked)
            return stages.run()
        except torch.OutOfMemoryError:
            return Checked(undecided=NO_MEMORY)
        except TypeFault as fault:
            return Checked(undecided=str(fault))
        except RuntimeError:
            if lost := gpu_lost(str(self.device)):
                raise MachineFault(lost) from None
            raise

    def _timed(
        self,
        contest: Callable[[PairTimer, Contestants], Verdict],
        timer: PairTimer,
        contestants: Contestants,
        checked: Checked,
        started: float,
    ) -> Verdict:
        """The verdict of a contest. What goes wrong in it belongs to the shape sweep, whose shapes are the target's."""
        undecided = ""
        try:
            verdict = replace(contest(timer, contestants), stages=checked.stages, phase_seconds=dict(self.watch.seconds))
            return replace(verdict, bench_time_seconds=time.perf_counter() - started)
        except RefusedWhileTimed as refused:
            checked.fail(Failure("shape_sweep", refused.case, refused.seed, refused.reason), Correctness.FAIL)
        except WorkerFault as fault:
            case = timer.target.cases[0].case.name
            failure = Failure("shape_sweep", case, timer.seed, f"while timed: {fault.reason}", fault.detail)
            checked.fail(failure, Correctness(fault.kind))
        except BaselineFault as fault:
            undecided = f"the other side failed while timed: {fault}".split("\n")[0]
        except (NotDecided, TypeFault) as reason:
            undecided = str(reason)
        except torch.OutOfMemoryError:
            undecided = NO_MEMORY
        verdict = self._untimed(contestants.source, timer.target, checked, timer.seed, started)
        return verdict.as_undecided(undecided) if undecided else verdict

    def _untimed(self, source: str, target: Target, checked: Checked, seed: int, started: float) -> Verdict:
        if checked.failure is not None and self.parent.process.poll() is not None:  # which takes its workers along
            raise MachineFault("the gate's warm parent was ended from outside: what failed was not the kernel")
        verdict = Verdict(
            kernel_type=target.kernel_type,
            backend=_backend(source) or target.backend,
            device=self.device.name,
            correctness=Correctness.SKIP if checked.undecided else checked.correctness,
            keep=False,
            why=str(checked.failure) if checked.failure else "correct",
            seed=seed,
            stages=checked.stages,
            failure=checked.failure,
            bench_time_seconds=time.perf_counter() - started,
            phase_seconds=dict(self.watch.seconds),
        )
        return verdict.as_undecided(checked.undecided) if checked.undecided else verdict


def _load_oracle_libraries(device: str) -> None:
    """Now, while the warm parent starts, and not in the first kernel's stages."""
    if device != "cpu":
        torch.mm(*torch.ones(2, 8, 8, dtype=torch.float64, device=device))


def _refused(source: str, target: Target, seed: int, device: str) -> Failure | None:
    """What can be said of the source without running it."""
    try:
        declared = constants(source)
    except SyntaxError as error:
        return Failure("smoke_test", "source", seed, f"not Python: {error}")
    for name, wanted in (("KERNEL_TYPE", (target.kernel_type,)), ("BACKEND", tuple(BACKENDS))):
        if declared.get(name) not in wanted:
            said = reprlib.repr(declared.get(name))
            return Failure("smoke_test", "source", seed, f"{name} is {said}, not one of {wanted}")
    backend = BACKENDS[declared["BACKEND"]]
    if backend.needs_gpu and device == "cpu":
        reason = f"BACKEND is {backend.name!r}: it needs a GPU, and this gate judges on the CPU"
        return Failure("smoke_test", "source", seed, reason)
    return None


def _backend(source: str) -> str | None:
    try:
        return str(constants(source)["BACKEND"])
    except (SyntaxError, KeyError):
        return None
