"""The model with its kept kernels against the model without: the same outputs, and how much faster, end to end.

All model work happens in fresh child processes, several of them: each carries a bias of its own, so the process is the unit
over which intervals are taken. Within one, the sides take turns (A B … B A) in random order on the same fresh inputs, under
one allocator with one setting: the C library's defaults unless the caller's environment says otherwise, because that is
what a user of the model gets. It matters: with glibc's defaults, an eager pass of compact LLaMA takes 20,000-40,000 page
faults in its large, freshly mapped outputs, 1-2 % of its CPU time; `page_faults` has the count of each side.
"""

import copy
import json
import math
import os
import random
import resource
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autokernel.backend import Replacer, Winner, beside
from autokernel.gate.statistics import ratio_interval
from autokernel.gate.verdict import Interval
from autokernel.match import SiteFinder
from autokernel.target import Plan
from autokernel.workload import Inputs, Workload

ORIGINAL, COMPILED, OPTIMISED, OVER_INDUCTOR = "original", "torch.compile", "optimised", "optimised over Inductor"
CONFIDENCE = 0.95
PARITY_INPUTS = 3
BUSY = 0.15  # spread of passes above which the report says that the machine was disturbed (idle: 0.01-0.05)
TIMED_S, MIN_ROUNDS, MAX_ROUNDS = 5.0, 2, 50
PROCESSES = 4  # for the final figures
SCREENING = (3, 6)  # processes after which a kernel's gain is looked at: the undecided get the second number
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of outputs after many layers
ERROR_GROWTH = 3.0  # the optimised model's rms error against the exact one may be this many times the original's
AGREEMENT_LOSS = 0.01  # next tokens that may differ from the exact model's beyond those of the original (near ties)
EXACT_BYTES = 8 << 30  # largest model that is also run in float64


@dataclass(frozen=True)
class Settings:
    warmup: int = 2  # passes of each side before any is timed
    timed: int | None = None  # rounds per process, every side runs twice in each; None: TIMED_S of them, or MIN_ROUNDS
    atol: float | None = None  # None: by dtype, see TOLERANCE
    rtol: float | None = None
    diagnose: bool = False  # parity of every kernel alone, also when all together are right


@dataclass(frozen=True)
class Side:
    """One way to run the model: the kernels in it, and the backend for the rest of it."""

    winners: tuple[Winner, ...] = ()
    fallback: str | None = None

    def build(self, model: nn.Module, finder: SiteFinder) -> Callable[..., Any]:
        if self.winners:
            return beside(model, Replacer(self.winners, self.fallback, finder=finder))
        return torch.compile(model) if self.fallback else model


@dataclass(frozen=True)
class Parity:
    """The outputs on one fresh input. Errors are rms against the float64 model, relative to the rms of its output."""

    seed: int
    largest_difference: float  # between optimised and original
    within_tolerance: bool
    error_original: float | None  # None: the model could not be run in float64
    error_optimised: float | None
    agreement_original: float | None  # share of next tokens (argmax over the last dim) equal to the float64 model's
    agreement_optimised: float | None

    @property
    def passed(self) -> bool:
        if not self.within_tolerance:
            return False
        if self.error_original is None:
            return True
        no_worse = self.error_optimised <= max(ERROR_GROWTH * self.error_original, torch.finfo(torch.float32).eps)
        return no_worse and self.agreement_optimised >= self.agreement_original - AGREEMENT_LOSS


@dataclass(frozen=True)
class KernelInModel:
    """What became of one kept kernel."""

    target: str
    kernel_type: str
    share: float  # of the original's time, 0..1
    speedup: float | None  # of the kernel by itself over PyTorch, as the gate measured it
    sites: int  # calls in one pass that it replaces
    gain: Interval | None  # of the model with all kernels over the model with all but this one
    used: bool
    why: str
    kernel: str = ""  # name of its operator, which stands for its source


@dataclass(frozen=True)
class OverInductor:
    """The model with Inductor for all but the kernels, compared with torch.compile: fewer of them may pay there."""

    gains: Mapping[str, Interval]  # target -> gain of its kernel, as KernelInModel has it for the model as it is
    used: tuple[str, ...]  # targets whose kernels stay
    parity: tuple[Parity, ...] = ()
    optimised_ms: float | None = None
    speedup: Interval | None = None  # over the original, eager
    speedup_vs_compile: Interval | None = None

    def __str__(self) -> str:
        if not self.used:
            return "with Inductor for the rest no kernel pays: torch.compile alone is as fast"
        return (
            f"with Inductor for the rest a pass takes {self.optimised_ms:.1f} ms: {self.speedup}x the original, "
            f"{self.speedup_vs_compile}x torch.compile, with {', '.join(self.used)}"
        )


@dataclass(frozen=True)
class Verification:
    """What verify.py prints and writes to verify.json. Speedups are paired ratios of times, over processes."""

    model: str
    device: str
    kernels: tuple[KernelInModel, ...]
    parity: tuple[Parity, ...]  # of the kernels that are used
    passed: bool
    original_ms: float | None = None
    compiled_ms: float | None = None
    optimised_ms: float | None = None
    speedup: Interval | None = None  # over the original, eager
    speedup_vs_compile: Interval | None = None
    predicted: float | None = None  # by Amdahl, from the shares and the kernels' own speedups
    over_inductor: OverInductor | None = None
    compile_error: str = ""  # why there is no torch.compile to compare with
    processes: int = 0
    rounds: int = 0  # in all processes together
    spread: float | None = None  # by which the median pass was slower than the fastest: the machine's disturbance
    allocator: str = ""
    page_faults: Mapping[str, float] | None = None  # per pass, by side
    diagnosis: Mapping[str, tuple[Parity, ...]] | None = None  # of each kernel alone
    seconds: float = 0.0

    @property
    def used(self) -> tuple[str, ...]:
        return tuple(kernel.target for kernel in self.kernels if kernel.used)

    def used_over(self, fallback: str | None) -> tuple[str, ...]:
        """Targets whose kernels are to be used where `fallback` (None, "inductor") has the rest of the model."""
        over = self.over_inductor.used if self.over_inductor else ()
        return () if not self.passed else over if fallback else self.used

    def staying(self, winners: Sequence[Winner], fallback: str | None) -> list[Winner]:
        """Those of `winners` that were verified, these very sources, and are to be used over `fallback`."""
        targets, judged = self.used_over(fallback), {kernel.kernel for kernel in self.kernels}
        return [w for w in winners if w.target.name in targets and w.name in judged]

    @property
    def verdict(self) -> str:
        """One line for people."""
        if not self.passed:
            return "the optimised model is not the original any more: nothing is to be used"
        if not self.used and self.used_over("inductor"):
            return str(self.over_inductor)
        if not self.used:
            return "nothing to gain here: no kernel makes this model faster beyond doubt"
        if self.speedup.low <= 1:
            return f"not proven faster as a whole: {self.speedup}x the original"
        return f"{self.speedup}x the original, with {len(self.used)} of {len(self.kernels)} kernels"

    @property
    def lines(self) -> list[str]:
        """The whole for people, a line each."""
        lines = [self.verdict]
        if self.speedup:
            lines += [
                f"a pass takes {self.optimised_ms:.1f} ms, {self.original_ms:.1f} ms before",
                f"against torch.compile: {self.speedup_vs_compile or self.compile_error}"
                + (f"x ({self.compiled_ms:.1f} ms)" if self.compiled_ms else ""),
                str(self.over_inductor or ""),
                f"Amdahl's law predicts {self.predicted:.3f}x from the kernels' own speedups" if self.predicted else "",
                f"{self.rounds} rounds in {self.processes} processes; allocator: {self.allocator}",
            ]
        for kernel in self.kernels:
            gain = f"the model is {kernel.gain}x as fast with it as without; " if kernel.gain else ""
            lines.append(
                f"{'used' if kernel.used else 'left out'}: {kernel.target} ({kernel.share:.1%} of the time): "
                f"{gain}{kernel.why}"
            )
        if (self.spread or 0) > BUSY:
            lines.append(
                f"passes took {self.spread:.0%} longer than the fastest, in the middle: this machine was doing other work, "
                "and small gains cannot be told on it; python verify.py repeats the measurement"
            )
        if self.parity:
            worst = max(self.parity, key=lambda p: p.largest_difference)
            lines.append(
                f"outputs on {len(self.parity)} fresh inputs differ from the original's by at most "
                f"{worst.largest_difference:.2g}"
            )
            if worst.error_original is not None:
                lines.append(
                    f"error against float64: {max(p.error_optimised for p in self.parity):.2g} "
                    f"(the original's: {max(p.error_original for p in self.parity):.2g}); next tokens as in float64: "
                    f"{min(p.agreement_optimised for p in self.parity):.2%} "
                    f"(the original's: {min(p.agreement_original for p in self.parity):.2%})"
                )
        return [line for line in lines if line]

    @staticmethod
    def read(path: Path) -> "Verification":
        data = json.loads(path.read_text())
        kernels = tuple(KernelInModel(**k | {"gain": k["gain"] and Interval(**k["gain"])}) for k in data["kernels"])
        intervals = _intervals(data)
        diagnosis = data["diagnosis"] and {k: tuple(Parity(**p) for p in v) for k, v in data["diagnosis"].items()}
        parity = tuple(Parity(**p) for p in data["parity"])
        read = {"kernels": kernels, "parity": parity, "diagnosis": diagnosis}
        if over := data.get("over_inductor"):
            gains = {target: Interval(**gain) for target, gain in over["gains"].items()}
            parity = tuple(Parity(**p) for p in over["parity"])
            changed = {"gains": gains, "used": tuple(over["used"]), "parity": parity}
            read["over_inductor"] = OverInductor(**over | _intervals(over) | changed)
        return Verification(**data | intervals | read)


def _intervals(data: Mapping[str, Any]) -> dict[str, Interval | None]:
    return {k: data[k] and Interval(**data[k]) for k in ("speedup", "speedup_vs_compile")}


def verify(
    plan: Plan,
    winners: Sequence[Winner],
    speedups: Mapping[str, float] | None = None,
    settings: Settings = Settings(),
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Put `winners` into the plan's model, drop those that do not pay there, and measure what remains.

    speedups: each target's kernel over PyTorch by itself, for Amdahl's prediction. `say` gets a line for each step.
    Kernels that are slower than PyTorch by themselves are not tried.
    """
    started, speedups = time.perf_counter(), speedups or {}
    workload = Workload.from_json(plan.workload)
    trial = _Trial(workload, tuple(winners), settings, say)
    for winner in winners:
        if speedups.get(winner.target.name, math.inf) < 1:
            trial.leave_out(winner, "slower than PyTorch by itself")
    diagnosis = trial.diagnose() if settings.diagnose else None
    if trial.winners and not all(p.passed for p in trial.parity()):
        diagnosis = diagnosis or trial.diagnose()
        trial.leave_out_wrong(diagnosis)
    trial.leave_out_absent()
    stay, gains = trial.leave_one_out(None)
    stay_over, gains_over = trial.leave_one_out("inductor")
    parity = trial.parity(stay) if stay else ()
    parity_over = trial.parity(stay_over, "inductor") if stay_over else ()
    stay_over = stay_over if all(p.passed for p in parity_over) else ()
    kernels = tuple(
        KernelInModel(
            w.target.name,
            w.target.kernel_type,
            w.target.share,
            speedups.get(w.target.name),
            trial.sites.get(w.target.name, 0),
            gains.get(w.target.name),
            w in stay,
            trial.reasons.get(w.target.name, "pays in the model" if w in stay else "does not pay beyond doubt"),
            w.name,
        )
        for w in winners
    )
    passed = all(p.passed for p in parity)
    known = dict(model=plan.model, device=plan.device, kernels=kernels, parity=parity, passed=passed, diagnosis=diagnosis)
    known["over_inductor"] = OverInductor(gains_over, tuple(w.target.name for w in stay_over), parity_over)
    if passed and (stay or stay_over):
        known |= trial.final(stay, stay_over, known["over_inductor"])
        known["predicted"] = amdahl([(k.share, k.speedup) for k in kernels if k.used])
    return Verification(**known, spread=trial.spread, seconds=time.perf_counter() - started)


def amdahl(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """End-to-end speedup when each (share of the time, speedup) part gets that much faster; None if one is unknown."""
    if any(speedup is None for _, speedup in parts):
        return None
    return 1 / (1 - sum(share * (1 - 1 / speedup) for share, speedup in parts))


class _Trial:
    """The kernels still in play, and the measurements that decide which of them stay."""

    def __init__(self, workload: Workload, winners: tuple[Winner, ...], settings: Settings, say: Callable[[str], None]):
        self.workload, self.winners, self.settings, self.say = workload, winners, settings, say
        self.reasons: dict[str, str] = {}
        self.samples: list[Sample] = []
        self.sites: dict[str, int] = {}  # target -> calls in one pass that its kernel replaces

    def leave_out(self, winner: Winner, why: str) -> None:
        self.winners = tuple(w for w in self.winners if w is not winner)
        self.reasons[winner.target.name] = why
        self.say(f"{winner.target.name} is left out: {why}")

    def parity(self, winners: tuple[Winner, ...] | None = None, fallback: str | None = None) -> tuple[Parity, ...]:
        side = Side(self.winners if winners is None else winners, fallback)
        self.say(f"outputs with {', '.join(w.target.name for w in side.winners)}")
        parity, sites = in_fresh_process(compare_outputs, self.workload, side, self.settings, secrets.randbits(31))
        self.sites |= sites
        return parity

    def diagnose(self) -> dict[str, tuple[Parity, ...]]:
        return {w.target.name: self.parity((w,)) for w in self.winners}

    def leave_out_wrong(self, diagnosis: Mapping[str, tuple[Parity, ...]]) -> None:
        for winner in self.winners:
            if not all(p.passed for p in diagnosis[winner.target.name]):
                self.leave_out(winner, "the model's outputs are wrong with it")

    def leave_out_absent(self) -> None:
        for winner in self.winners:
            if not self.sites[winner.target.name]:
                self.leave_out(winner, "its operation was not found in the model again")

    def leave_one_out(self, fallback: str | None) -> tuple[tuple[Winner, ...], dict[str, Interval]]:
        """The kernels with which the model is faster than without them, their whole intervals at or above 1; all gains.

        Where torch.compile fails, no kernel stays over it.
        """
        winners = self.winners
        sides = {OPTIMISED: Side(winners, fallback)}
        sides |= {w.target.name: Side(tuple(o for o in winners if o is not w), fallback) for w in winners}
        if fallback:
            sides = {COMPILED: Side((), fallback)} | sides
        over = "Inductor" if fallback else "the model as it is"
        samples: list[Sample] = []
        gains: dict[str, Interval] = {}
        for processes in SCREENING if winners else ():
            while len(samples) < processes:
                self.say(f"with and without each kernel, over {over}, process {len(samples) + 1}")
                samples.append(self._sample(sides))
                if samples[-1].compile_error:
                    return (), {}
            gains = {w.target.name: _speedup(samples, w.target.name, OPTIMISED) for w in winners}
            if all(gain.low >= 1 or gain.high < 1 for gain in gains.values()):
                break
        stay = tuple(w for w in winners if gains[w.target.name].low >= 1)
        self.say(f"{len(stay)} of {len(winners)} kernels stay over {over}")
        return stay, gains

    def final(self, stay: tuple[Winner, ...], stay_over: tuple[Winner, ...], over: OverInductor) -> dict[str, Any]:
        """Original, torch.compile and what remains over either, on data that decided nothing."""
        sides = {ORIGINAL: Side(), COMPILED: Side((), "inductor")}
        sides |= {OPTIMISED: Side(stay)} if stay else {}
        sides |= {OVER_INDUCTOR: Side(stay_over, "inductor")} if stay_over else {}
        samples = []
        for index in range(PROCESSES):
            self.say(f"{', '.join(sides)}, process {index + 1} of {PROCESSES}")
            samples.append(self._sample(sides))
        measured = samples[0].rounds[0]

        def milliseconds(side: str) -> float | None:
            return 1e3 * median(s for sample in samples for s in sample.seconds(side)) if side in measured else None

        def speedup(slow: str, fast: str) -> Interval | None:
            return _speedup(samples, slow, fast) if {slow, fast} <= set(measured) else None

        return {
            "original_ms": milliseconds(ORIGINAL),
            "compiled_ms": milliseconds(COMPILED),
            "optimised_ms": milliseconds(OPTIMISED),
            "speedup": speedup(ORIGINAL, OPTIMISED),
            "speedup_vs_compile": speedup(COMPILED, OPTIMISED),
            "over_inductor": replace(
                over,
                optimised_ms=milliseconds(OVER_INDUCTOR),
                speedup=speedup(ORIGINAL, OVER_INDUCTOR),
                speedup_vs_compile=speedup(COMPILED, OVER_INDUCTOR),
            ),
            "compile_error": samples[0].compile_error,
            "processes": PROCESSES,
            "rounds": sum(len(s.rounds) for s in samples),
            "allocator": allocator(),
            "page_faults": {
                side: mean(passes[side].page_faults for sample in samples for passes in sample.rounds)
                for side in samples[0].rounds[0]
            },
        }

    def _sample(self, sides: dict[str, Side]) -> "Sample":
        sample = in_fresh_process(time_sides, self.workload, sides, self.settings, secrets.randbits(31))
        self.samples.append(sample)
        return sample

    @property
    def spread(self) -> float | None:
        seconds = [sample.seconds(side) for sample in self.samples for side in sample.rounds[0]]
        return median(median(s) / min(s) for s in seconds) - 1 if seconds else None


def _speedup(samples: Sequence["Sample"], slow: str, fast: str) -> Interval:
    """Of `fast` over `slow`: the median of paired log-ratios in each process, then an interval over processes."""
    pairs = [[math.log(a / b) for a, b in zip(s.seconds(slow), s.seconds(fast))] for s in samples]
    return ratio_interval([median(pair) for pair in pairs], CONFIDENCE)


def allocator() -> str:
    given = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF")}
    return ", ".join(f"{k}={v}" for k, v in sorted(given.items())) or "defaults"


# --- in child processes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    seconds: float
    page_faults: float


@dataclass(frozen=True)
class Sample:
    """One process: its rounds, each with a pass of every side."""

    rounds: tuple[dict[str, Pass], ...]
    compile_error: str = ""

    def seconds(self, side: str) -> list[float]:
        return [passes[side].seconds for passes in self.rounds]


class ChildDied(RuntimeError):
    """The process in which the model ran came to a violent end (a kernel's fault, or no memory)."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a new interpreter. Its exceptions arrive here; a crash raises ChildDied."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ChildDied("the process in which the optimised model ran has died") from None


def compare_outputs(
    workload: Workload, side: Side, settings: Settings, seed: int
) -> tuple[tuple[Parity, ...], dict[str, int]]:
    """The optimised model against the original and against float64, on fresh inputs; sites replaced, by target."""
    model, _, _ = workload.load()
    replacer = Replacer(side.winners, side.fallback)
    with torch.no_grad():
        optimised, exact = beside(model, replacer), _exact(model)
        parity = [_compare(model, optimised, exact, workload, settings, seed + i) for i in range(PARITY_INPUTS)]
    replaced = Counter(replacement.target for replacement in replacer.replaced)
    return tuple(parity), {w.target.name: replaced[w.target.name] for w in side.winners}


def _exact(model: nn.Module) -> nn.Module | None:
    """The same weights in float64, unless they would not fit."""
    numel = sum(p.numel() for p in model.parameters())
    return copy.deepcopy(model).double() if numel * 8 <= EXACT_BYTES else None


def _compare(
    model: nn.Module,
    optimised: Callable[..., Any],
    exact: nn.Module | None,
    workload: Workload,
    settings: Settings,
    seed: int,
) -> Parity:
    args, kwargs = workload.inputs(model, seed)
    ours, theirs = outputs(optimised(*args, **kwargs)), outputs(model(*args, **kwargs))
    assert [y.shape for y in ours] == [y.shape for y in theirs], "the optimised model returns other shapes"
    difference = max((a.double() - b.double()).abs().nan_to_num().max().item() for a, b in zip(ours, theirs))
    default = TOLERANCE.get(getattr(torch, workload.dtype), TOLERANCE[torch.float32])
    atol, rtol = (default if given is None else given for given in (settings.atol, settings.rtol))
    within = all(torch.allclose(a, b, rtol, atol, equal_nan=True) for a, b in zip(ours, theirs))
    if exact is None:
        return Parity(seed, difference, within, None, None, None, None)
    wide = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    truth = outputs(exact(*wide[0], **wide[1]))[0]
    return Parity(
        seed,
        difference,
        within,
        *(_relative_rms(y[0], truth) for y in (theirs, ours)),
        *((y[0].argmax(-1) == truth.argmax(-1)).double().mean().item() for y in (theirs, ours)),
    )


def outputs(result: Any) -> list[Tensor]:
    """The floating-point tensors of whatever a model returns; the first are its logits."""
    return [y for y in tree_leaves(result) if isinstance(y, Tensor) and y.is_floating_point()]


def _relative_rms(y: Tensor, truth: Tensor) -> float:
    return ((y.double() - truth).pow(2).mean() / truth.pow(2).mean()).sqrt().item()


def time_sides(workload: Workload, sides: dict[str, Side], settings: Settings, seed: int) -> Sample:
    """One process's measurement of every side: a side is the kernels in it, or None for torch.compile."""
    model, _, _ = workload.load()
    shuffle = random.Random(seed)
    with torch.no_grad():
        models, compile_error = _build(model, sides, workload.inputs(model, seed))
        for index in range(settings.warmup):
            _round(models, workload.inputs(model, seed - index - 1), workload.device, shuffle)
        rounds: list[dict[str, Pass]] = []
        end = time.perf_counter() + TIMED_S
        while not _enough(len(rounds), settings, end):
            rounds.append(_round(models, workload.inputs(model, seed + len(rounds)), workload.device, shuffle))
    return Sample(tuple(rounds), compile_error)


def _enough(rounds: int, settings: Settings, end: float) -> bool:
    if settings.timed:
        return rounds >= settings.timed
    return rounds >= MAX_ROUNDS or (rounds >= MIN_ROUNDS and time.perf_counter() > end)


def _round(
    models: Mapping[str, Callable[..., Any]], inputs: Inputs, device: str, shuffle: random.Random
) -> dict[str, Pass]:
    """Every side in random order, and once more backwards: the mean of its two passes."""
    order = shuffle.sample(sorted(models), len(models))
    passes = [(side, _pass(models[side], inputs, device)) for side in (*order, *reversed(order))]
    return {
        side: Pass(*(sum(values) / 2 for values in zip(*(astuple(p) for name, p in passes if name == side))))
        for side in models
    }


def _pass(model: Callable[..., Any], inputs: Inputs, device: str) -> Pass:
    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    args, kwargs = inputs
    wait()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    model(*args, **kwargs)
    wait()
    seconds = time.perf_counter() - start
    return Pass(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def _build(model: nn.Module, sides: Mapping[str, Side], inputs: Inputs) -> tuple[dict[str, Callable[..., Any]], str]:
    """The callable of each side, run once; without Inductor if torch.compile fails, and why (no compiler, no headers)."""
    models: dict[str, Callable[..., Any]] = {}
    compile_error, finder = "", SiteFinder()
    for name, side in sides.items():
        if side.fallback and compile_error:
            continue
        candidate = side.build(model, finder)
        try:
            candidate(*inputs[0], **inputs[1])
        except Exception as error:
            if side.winners:
                raise
            compile_error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            models[name] = candidate
    return models, compile_error
