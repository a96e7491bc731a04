"""The judge: takes a kernel's source and a target, and says whether it is right, how fast it is, and whether to keep it."""

import ast
import contextlib
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import stdev

import torch

from autokernel.device import Device
from autokernel.gate import statistics
from autokernel.gate.channel import GUARD, Placed
from autokernel.gate.correctness import Step, Trial, expect, trials, wrong
from autokernel.gate.processes import WarmParent, WorkerFault, WorkerProcess, write_inputs
from autokernel.gate.timing import BystanderFault, PairResult, PairTimer, RefusedWhileTimed, Side
from autokernel.gate.verdict import STAGES, CaseTiming, Correctness, Failure, Interval, Verdict
from autokernel.spec import BACKENDS, Case, KernelSpec, load_spec
from autokernel.target import Target

LOAD_TIMEOUT_S = 60.0  # importing the source, and compiling what it compiles at import
CALL_TIMEOUT_S = 20.0  # one call of a trial; all trials are small
PAIRS = (3, 8, 16)  # process pairs after which the sequential test looks: give up, decide, decide at last
BASELINE_PAIRS = 3
CONFIDENCE = 0.99  # two-sided: one look keeps an identical kernel in at most 0.5 % of trials, before the noise floor
MINIMUM_GAIN = 0.005  # smaller gains are not worth a commit, whatever their interval


CANDIDATE, INCUMBENT, EAGER, COMPILED = "candidate", "incumbent", "eager", "compiled"


class Judge:
    """The gate on one device. Owns the warm parent; use as a context manager."""

    def __init__(self, device: str = "cpu", allow_libraries: bool = False):
        """allow_libraries: do not refuse kernels that hand their work to PyTorch or another library."""
        self.allow_libraries = allow_libraries
        self.device = Device.detect(device)
        self.name = device
        self.timeout_s = CALL_TIMEOUT_S
        self.threads = torch.get_num_threads()
        # On a GPU most of the time goes into compiling a Triton kernel for each shape class: on several cores at once.
        self.workers = 1 if device == "cpu" else max(1, min(12, (os.cpu_count() or 1) - 2))
        self.parent = WarmParent(device)
        self.sandbox = self.parent.probe()  # layer -> whether it holds here
        self._noise: dict[tuple[str, str], float] = {}

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.parent.close()

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

        quick: one dtype, smoke and sweep only, three pairs; such a verdict never keeps. The seed is fresh unless given.
        `progress` is told the name of each stage as it begins.
        """
        started = time.perf_counter()
        seed = secrets.randbits(48) if seed is None else seed
        stages = dict.fromkeys(STAGES, "SKIP")
        failure, kind = self._correct(source, target, seed, quick, stages, progress)
        if failure is not None:
            return self._untimed(target, source, kind, stages, failure, seed, str(failure), started)
        progress("timing")
        return self._timed(source, target, incumbent, seed, quick, compile_baseline, stages, started)

    def check(self, source: str, target: Target, seed: int | None = None) -> Verdict:
        """The five stages alone: correctness, nothing timed."""
        started = time.perf_counter()
        seed = secrets.randbits(48) if seed is None else seed
        stages = dict.fromkeys(STAGES, "SKIP")
        failure, kind = self._correct(source, target, seed, False, stages, lambda stage: None)
        why = str(failure) if failure else "correct"
        return self._untimed(target, source, kind, stages, failure, seed, why, started)

    def compare(self, candidate: str, incumbent: str, target: Target, seed: int | None = None) -> Verdict:
        """Time two kernels against each other in eight fresh pairs of processes on fresh inputs; no early stop."""
        started = time.perf_counter()
        seed = secrets.randbits(48) if seed is None else seed
        spec = load_spec(target.kernel_type)
        timer = PairTimer(self.parent, spec, target, self.threads, seed, self._libraries(target))
        sides = (Side(CANDIDATE, candidate), Side(INCUMBENT, incumbent))
        stages = dict.fromkeys(STAGES, "SKIP")
        try:
            pairs = [timer.pair(sides, CANDIDATE) for _ in range(PAIRS[1])]
        except (WorkerFault, RefusedWhileTimed) as fault:
            failure, kind = _timing_failure(fault, target, seed)
            return self._untimed(target, candidate, kind, stages, failure, seed, str(failure), started)
        return self._measured(target, candidate, stages, seed, pairs, timer.peak_bytes, started)

    def noise_floor(self, source: str, target: Target) -> float:
        """The gain below which nothing is kept on this target: what the same kernel shows against itself (A/A)."""
        key = (target.name, target.backend)
        if key not in self._noise:
            timer = PairTimer(
                self.parent,
                load_spec(target.kernel_type),
                target,
                self.threads,
                secrets.randbits(48),
                self._libraries(target),
            )
            sides = (Side(CANDIDATE, source), Side(INCUMBENT, source))
            ratios = [timer.pair(sides, CANDIDATE).log_ratio(INCUMBENT, CANDIDATE, target.cases) for _ in range(4)]
            self._noise[key] = max(MINIMUM_GAIN, 2 * stdev(ratios) / math.sqrt(PAIRS[1]))
        return self._noise[key]

    def profile(self, source: str, target: Target) -> str:
        """What ran in one call on the target's first case: torch.profiler's table, as the worker reports it."""
        spec, case = load_spec(target.kernel_type), target.cases[0].case
        with WorkerProcess(self.parent, self.threads, source) as worker:
            worker.request("load", LOAD_TIMEOUT_S, source=source, poison=False, libraries="any")
            inputs = Trial("profile", case, secrets.randbits(48)).inputs(spec)
            worker.request("sets", CALL_TIMEOUT_S, sets=[write_inputs(self.parent, inputs, case.tensors, 0)[0]])
            return str(worker.request("profile", LOAD_TIMEOUT_S)["table"])

    def _libraries(self, target: Target) -> str:
        """What a kernel of this type may call: "none", "gemm" or "any"."""
        return "any" if self.allow_libraries else "gemm" if load_spec(target.kernel_type).library_calls else "none"

    def _refused(self, source: str, target: Target, seed: int) -> Failure | None:
        """What can be said of the source without running it."""
        try:
            declared = constants(source)
        except SyntaxError as error:
            return Failure("smoke_test", "source", seed, f"not Python: {error}")
        for name, wanted in (("KERNEL_TYPE", (target.kernel_type,)), ("BACKEND", BACKENDS)):
            if declared.get(name) not in wanted:
                return Failure("smoke_test", "source", seed, f"{name} is {declared.get(name)!r}, not one of {wanted}")
        return None

    def _correct(
        self,
        source: str,
        target: Target,
        seed: int,
        quick: bool,
        stages: dict[str, str],
        progress: Callable[[str], None],
    ) -> tuple[Failure | None, Correctness]:
        """Run the five stages; fills in `stages`, returns the first failure and its kind."""
        refused = self._refused(source, target, seed)
        if refused:
            stages[refused.stage] = "FAIL"
            return refused, Correctness.FAIL
        spec = load_spec(target.kernel_type)
        todo = list(trials(spec, target, seed, quick))
        left = Counter(trial.stage for trial in todo)
        failures: dict[int, tuple[Failure, Correctness]] = {}
        repeatable: list[tuple[Trial, list[torch.Tensor], WorkerProcess]] = []
        libraries = self._libraries(target)
        queue, lock = iter(enumerate(todo)), threading.Lock()

        def advance(number: int, worker: WorkerProcess) -> None:
            """Try one trial after another until none is left or one has failed."""
            slot = number * (self.parent.size // self.workers)
            index, trial = -1, todo[0]
            try:
                worker.request("load", LOAD_TIMEOUT_S, source=source, poison=True, libraries=libraries)
                while True:
                    with lock:
                        index, trial = next(queue, (-1, todo[0]))
                        if index < 0 or failures:
                            return
                        if stages[trial.stage] == "SKIP":
                            stages[trial.stage] = "RUN"
                            progress(trial.stage)
                    outputs = self._try(worker, spec, trial, slot)
                    with lock:
                        if trial.held and not isinstance(outputs, str):
                            repeatable.append((trial, outputs, worker))
                        if isinstance(outputs, str):
                            failure = Failure(trial.stage, trial.label, trial.seed, outputs)
                            failures[index] = failure, Correctness.FAIL
                            return
                        left[trial.stage] -= 1
                        if not left[trial.stage]:
                            stages[trial.stage] = "PASS"
            except WorkerFault as fault:
                failure = Failure(trial.stage, trial.label, trial.seed, fault.reason, fault.detail)
                failures[index] = failure, Correctness(fault.kind)

        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(WorkerProcess(self.parent, self.threads, source)) for _ in range(self.workers)]
            if len(workers) == 1:
                advance(0, workers[0])
            else:
                with ThreadPoolExecutor(len(workers)) as pool:
                    list(pool.map(advance, range(len(workers)), workers))
            if repeatable and not failures:
                trial, outputs, first = repeatable[0]
                try:
                    second = next((w for w in workers if w is not first), None)
                    if second is None:
                        second = stack.enter_context(WorkerProcess(self.parent, self.threads, source))
                        second.request("load", LOAD_TIMEOUT_S, source=source, poison=True, libraries=libraries)
                    reason = self._again(second, spec, trial, outputs)
                    if reason:
                        failures[0] = Failure(trial.stage, trial.label, trial.seed, reason), Correctness.FAIL
                except WorkerFault as fault:
                    failure = Failure(trial.stage, trial.label, trial.seed, fault.reason, fault.detail)
                    failures[0] = failure, Correctness(fault.kind)
        for stage, state in stages.items():
            stages[stage] = "SKIP" if state == "RUN" else state
        if not failures:
            return None, Correctness.PASS
        failure, kind = failures[min(failures)]
        stages[failure.stage] = kind.value
        return failure, kind

    def _try(self, worker: WorkerProcess, spec: KernelSpec, trial: Trial, slot: int) -> str | list[torch.Tensor]:
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
                reason = reason or wrong(first, expect(spec, inputs, self.name), adversarial=bool(trial.adversarial))
                if reason is None and any(not _same_bits(first, y) for y in again):
                    reason = f"{len(again) + 1} calls on the same inputs do not agree bitwise"
            if reason:
                return f"{step.what}: {reason}" if step.what else reason
        return outputs

    def _call(self, worker: WorkerProcess, case: Case, step: Step, slot: int) -> list[torch.Tensor] | str:
        """The outputs of one step's calls, or what is wrong with how they were handed over."""
        end, messages = slot + step.shift, []
        for inputs in step.sets:
            message, end = write_inputs(self.parent, inputs, case.tensors, end)
            messages.append(message)
        worker.request("sets", self.timeout_s, sets=messages)
        answer = worker.request("call", self.timeout_s, order=step.order)
        outputs, after = worker.fetch(answer["outputs"]), worker.fetch(answer["inputs"])
        if len(outputs) != len(step.order):
            return f"{len(outputs)} outputs for {len(step.order)} calls"
        for y, strides in outputs:
            if not torch.empty_strided(y.shape, strides, device="meta").is_contiguous():
                return f"strides {strides} instead of contiguous {tuple(y.stride())}"
        placed = [(name, where[name]) for where in messages for name in case.tensors]
        for (name, where), (memory, _) in zip(placed, after):  # none on a CPU, where inputs cannot be written to
            where = Placed.decode(where)
            before = self.parent.inputs.bytes[where.start - GUARD : where.end + GUARD]
            if not torch.equal(memory, before):
                inside = not torch.equal(memory[GUARD:-GUARD], before[GUARD:-GUARD])
                return f"changed its input {name}" if inside else f"wrote beside its input {name}"
        return [y for y, _ in outputs]

    def _again(self, worker: WorkerProcess, spec: KernelSpec, trial: Trial, seen: list[torch.Tensor]) -> str | None:
        """Make a held trial's calls in a second process, where they must give the bits that they gave in the first."""
        (step,) = trial.steps(spec)
        outputs = self._call(worker, trial.case, step, 0)
        if isinstance(outputs, str):
            return outputs
        return None if all(map(_same_bits, seen, outputs)) else "two processes do not agree bitwise on the same inputs"

    def _timed(
        self,
        source: str,
        target: Target,
        incumbent: str | None,
        seed: int,
        quick: bool,
        compile_baseline: bool,
        stages: dict[str, str],
        started: float,
    ) -> Verdict:
        """Sequential paired timing; the verdict on a kernel that has passed the five stages."""
        contest = [Side(CANDIDATE, source)] + ([Side(INCUMBENT, incumbent)] if incumbent else [])
        baselines = [Side(EAGER)] + ([Side(COMPILED, compiled=True)] if compile_baseline else [])
        floor = self.noise_floor(incumbent, target) if incumbent and not quick else MINIMUM_GAIN
        timer = PairTimer(self.parent, load_spec(target.kernel_type), target, self.threads, seed, self._libraries(target))
        pairs: list[PairResult] = []
        looks = PAIRS[:1] if quick else PAIRS if incumbent else PAIRS[:2]
        try:
            for look in looks:
                while len(pairs) < look:
                    # Without an incumbent the baseline is what the kernel is compared with, in every pair.
                    sides = contest + (baselines if len(pairs) < BASELINE_PAIRS else baselines[: 0 if incumbent else 1])
                    pairs.append(timer.pair(sides, CANDIDATE))
                verdict = self._measured(target, source, stages, seed, pairs, timer.peak_bytes, started)
                verdict = _decided(verdict, floor, incumbent is not None and not quick and look > PAIRS[0])
                if incumbent and (verdict.keep or _unpromising(pairs, target, floor)):
                    break
        except (WorkerFault, RefusedWhileTimed) as fault:
            failure, kind = _timing_failure(fault, target, seed)
            stages[failure.stage] = kind.value
            return self._untimed(target, source, kind, stages, failure, seed, str(failure), started)
        except BystanderFault as fault:
            why = f"not decided: the other side failed while timed: {fault}".split("\n")[0]
            return self._untimed(target, source, Correctness.PASS, stages, None, seed, why, started)
        return verdict

    def _measured(
        self,
        target: Target,
        source: str,
        stages: dict[str, str],
        seed: int,
        pairs: Sequence[PairResult],
        peak_bytes: int,
        started: float,
    ) -> Verdict:
        """The record of what was timed; `keep` is decided by the caller."""
        spec, cases, calls = load_spec(target.kernel_type), target.cases, sum(c.calls for c in target.cases)

        def ratio(side: str, index: int | None = None) -> Interval | None:
            seen = [p for p in pairs if side in p.seconds]
            if not seen:
                return None
            ratios = [
                p.log_ratio(side, CANDIDATE, cases) if index is None else p.case_log_ratio(side, CANDIDATE, index)
                for p in seen
            ]
            return statistics.ratio_interval(ratios, CONFIDENCE)

        def seconds(side: str, index: int) -> float | None:
            times = [p.seconds[side][index] for p in pairs if side in p.seconds]
            return statistics.mean(times) if times else None

        def microseconds(side: str, index: int) -> float | None:
            value = seconds(side, index)
            return None if value is None else value * 1e6

        timings = tuple(
            CaseTiming(
                case=c.case.name,
                calls=c.calls,
                latency_us=microseconds(CANDIDATE, i),
                flops=spec.flops(c.case.args),
                bytes_moved=spec.bytes_moved(c.case.args),
                pytorch_latency_us=microseconds(EAGER, i),
                compile_latency_us=microseconds(COMPILED, i),
                speedup_vs_pytorch=ratio(EAGER, i),
                speedup_vs_compile=ratio(COMPILED, i),
                speedup_vs_incumbent=ratio(INCUMBENT, i),
            )
            for i, c in enumerate(cases)
        )

        def weighted(field: str) -> float | None:
            values = [getattr(t, field) for t in timings]
            return None if None in values else sum(v * t.calls for v, t in zip(values, timings)) / calls

        latency_us, flops, moved = weighted("latency_us"), weighted("flops"), weighted("bytes_moved")
        peak_flops, peak_bytes_s = self.device.peak_tflops(target.dtype) * 1e12, self.device.peak_bandwidth_gb_s * 1e9
        ridge = peak_flops / peak_bytes_s
        return Verdict(
            kernel_type=target.kernel_type,
            backend=_backend(source),
            device=self.device.name,
            correctness=Correctness.PASS,
            keep=False,
            why="",
            seed=seed,
            stages=dict(stages),
            cases=timings,
            latency_us=latency_us,
            throughput_tflops=flops / latency_us / 1e6,
            bandwidth_gb_s=moved / latency_us / 1e3,
            pct_peak_compute=100 * flops / (latency_us * 1e-6) / peak_flops,
            pct_peak_bandwidth=100 * moved / (latency_us * 1e-6) / peak_bytes_s,
            arithmetic_intensity=flops / moved,
            ridge_point=ridge,
            bottleneck="compute" if flops / moved > ridge else "memory",
            peak_vram_mb=peak_bytes / 2**20,
            pytorch_latency_us=weighted("pytorch_latency_us"),
            speedup_vs_pytorch=ratio(EAGER),
            compile_latency_us=weighted("compile_latency_us"),
            speedup_vs_compile=ratio(COMPILED),
            speedup_vs_incumbent=ratio(INCUMBENT),
            bench_time_seconds=time.perf_counter() - started,
        )

    def _untimed(
        self,
        target: Target,
        source: str,
        kind: Correctness,
        stages: dict[str, str],
        failure: Failure | None,
        seed: int,
        why: str,
        started: float,
    ) -> Verdict:
        seconds = time.perf_counter() - started
        backend = _backend(source) or target.backend
        return Verdict(
            target.kernel_type,
            backend,
            self.device.name,
            kind,
            False,
            why,
            seed,
            dict(stages),
            failure,
            bench_time_seconds=seconds,
        )


def _backend(source: str) -> str | None:
    try:
        return str(constants(source)["BACKEND"])
    except (SyntaxError, KeyError):
        return None


def constants(source: str) -> dict[str, object]:
    """Module-level NAME = literal assignments of a kernel file. Raises SyntaxError."""
    constants = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return constants


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def _hopeless(speedup: Interval, floor: float) -> bool:
    """Whether the interval rules out a gain worth keeping."""
    return speedup.high < 1 + floor


def _unpromising(pairs: Sequence[PairResult], target: Target, floor: float) -> bool:
    """Whether more pairs are not worth their time: the estimate and one standard error on top miss the floor.

    It can only end in a reset, so that it keeps nothing that the keep rule would not.
    """
    ratios = [p.log_ratio(INCUMBENT, CANDIDATE, target.cases) for p in pairs]
    return statistics.mean(ratios) + stdev(ratios) / math.sqrt(len(ratios)) < math.log(1 + floor)


def _decided(verdict: Verdict, floor: float, may_keep: bool) -> Verdict:
    """The keep rule, on a verdict with its timings."""
    speedup = verdict.speedup_vs_incumbent
    if speedup is None:
        return replace(verdict, why=f"correct; {verdict.speedup_vs_pytorch} times PyTorch eager")
    slower = [c for c in verdict.cases if c.speedup_vs_incumbent.high < 1]
    if slower:
        why = f"{slower[0].case} got slower: {slower[0].speedup_vs_incumbent}"
    elif speedup.low > 1 and speedup.value > 1 + floor:
        why = f"faster than the incumbent: {speedup}" + ("" if may_keep else " (too few pairs to keep)")
        return replace(verdict, keep=may_keep, why=why)
    elif speedup.low > 1:
        why = f"the gain {speedup} is within the noise floor of {floor:.1%}"
    elif _hopeless(speedup, floor):
        why = f"not faster than the incumbent: {speedup}"
    else:
        why = f"not shown to be faster: {speedup}"
    return replace(verdict, why=why)


def _timing_failure(fault: Exception, target: Target, seed: int) -> tuple[Failure, Correctness]:
    """A fault during timing: a wrong timed output belongs to the sweep, whose shapes are the target's."""
    if isinstance(fault, RefusedWhileTimed):
        return Failure("shape_sweep", fault.case, fault.seed, fault.reason), Correctness.FAIL
    case = target.cases[0].case.name
    return Failure("shape_sweep", case, seed, f"while timed: {fault.reason}", fault.detail), Correctness(fault.kind)
