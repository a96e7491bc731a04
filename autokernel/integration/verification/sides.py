"""Ways to run a model, timed in turns: the original, torch.compile, and kernels with either for the rest.

All model work happens in fresh child processes, several of them: each carries a bias of its own, so the process is the unit
over which intervals are taken. Within one, the sides take turns (A B … B A) in random order on the same fresh inputs, under
one allocator with one setting: the C library's defaults unless the caller's environment says otherwise, because that is
what a user of the model gets. It matters: with glibc's defaults, an eager pass of compact LLaMA takes 20,000-40,000 page
faults in its large, freshly mapped outputs, 1-2 % of its CPU time; `Figures.page_faults` has the count of each side.
"""

import ctypes
import math
import os
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch._inductor import list_mode_options
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import clear_caches

from autokernel.hardware.threads import COMPILED_HERE
from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import MODES, OneTrace, Replacer
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, GRAPHS
from autokernel.integration.winner import Winner
from autokernel.model.capture import compile_model
from autokernel.model.match import SiteFinder
from autokernel.model.workload import Inputs, Workload

GRAPHED = (GRAPHS, AUTOTUNED)  # Inductor's modes with CUDA graphs
TIMED_S, MIN_ROUNDS, MAX_ROUNDS = 5.0, 2, 50  # of a process, where its sides do not settle before
SETTLED = 0.003  # standard error of a side's share of a round: between processes it differs by some 1 %
TRITON = "triton"  # in a side's cache, the folder of what Triton compiles
Model = Callable[..., Any]
FirstCalls = Mapping[str, Mapping[str, float]]  # workload -> side -> seconds


@dataclass(frozen=True)
class Variant:
    """One way to run the model: the kernels in it, and what has the rest of it (EAGER, INDUCTOR or a mode of Inductor)."""

    winners: tuple[Winner, ...] = ()
    fallback: str = EAGER

    @property
    def names(self) -> tuple[str, ...]:
        """What it is among the forms of one model."""
        return (self.fallback, *(winner.target.name for winner in self.winners))

    def replacer(self, finder: SiteFinder) -> Replacer:
        return Replacer(self.winners, None if self.fallback == EAGER else self.fallback, finder=finder)

    def build(self, model: nn.Module, replacer: Replacer | None) -> Model:
        if replacer:
            return compile_with_kernels(model, replacer)
        if self.fallback == EAGER:
            return model
        if self.fallback == AUTOTUNED:
            # Triton kernels that Inductor's processes compiled are compiled once more, one after the other: 11 to 21 s for
            # a linear layer, 1 to 3 s by threads (h200-max-autotune-by-threads.txt).
            how = COMPILED_HERE if torch.cuda.is_initialized() else {}
            return compile_model(model, options=list_mode_options(AUTOTUNED) | how)
        return compile_model(model, mode=self.fallback if self.fallback in MODES else None)


@dataclass(frozen=True)
class TimedPass:
    seconds: float
    page_faults: float


@dataclass(frozen=True)
class Sample:
    """One process: its rounds, each with a pass of every side that could be built."""

    rounds: tuple[dict[str, TimedPass], ...]
    first_call_s: Mapping[str, float]  # with compilation; of a side with a trace of its own, see forms()
    peak_mb: Mapping[str, float | None]  # of a pass beyond the weights, and what the side keeps, where it was measured
    errors: Mapping[str, str] = field(default_factory=dict)  # EAGER, INDUCTOR, … -> why it cannot run the model
    idle: Mapping[str, str] = field(default_factory=dict)  # see Sides.idle

    @staticmethod
    def decode(data: dict[str, Any]) -> "Sample":
        rounds = tuple({side: TimedPass(**v) for side, v in passes.items()} for passes in data["rounds"])
        return Sample(**data | {"rounds": rounds})

    def seconds(self, side: str) -> list[float]:
        return [passes[side].seconds for passes in self.rounds]


def allocator() -> str:
    given = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF")}
    return ", ".join(f"{k}={v}" for k, v in sorted(given.items())) or "defaults"


# --- in child processes ----------------------------------------------------------------------------------------------


@dataclass
class Sides:
    """A workload's model, and the ways to run it that were built of it."""

    workload: Workload
    model: nn.Module
    models: dict[str, Model] = field(default_factory=dict)
    first_call_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float | None] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    finder: SiteFinder = field(default_factory=SiteFinder)
    replacers: dict[str, Replacer] = field(default_factory=dict)  # of sides with kernels
    pooled: bool = False  # whether a side has CUDA graphs

    def build(self, sides: Mapping[str, Variant], inputs: Inputs, caches: str | None = None, peaks: bool = True) -> None:
        """Make each side and run it; in the folder `caches` each has one of its own for what it compiles. `peaks`: whether
        to measure what memory each takes, which is one more pass.

        Where torch.compile fails (no compiler, no headers), it has no sides, and `errors` says why. What CUDA graphs
        keep is told of the first side that has them: all of a process share one pool.
        """
        if caches:  # so that no side pays for the import of the compiler
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=self.workload.device))
        replacers = {name: side.replacer(self.finder) for name, side in sides.items() if side.winners}
        self.replacers |= replacers
        candidates, together = forms(sides, self.model, replacers)
        for name, side in sides.items():
            if side.fallback in self.errors:
                continue
            candidate, before = candidates[name], kept_mb(self.workload.device)
            start = time.perf_counter()
            try:
                with cache_in(cache_of(caches, name)) if caches else nullcontext():
                    candidate(*inputs[0], **inputs[1])
                    wait_for(self.workload.device)
            except Exception as error:
                if side.winners:
                    raise
                self.errors[side.fallback] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                continue
            seconds, self.models[name] = time.perf_counter() - start, candidate
            if self.workload.device != "cpu":  # CUDA graphs: recorded at the second call, replayed from the third on
                for _ in range(2):
                    candidate(*inputs[0], **inputs[1])
            if name in together:
                continue
            self.first_call_s.setdefault(name, seconds)
            if not peaks:
                continue
            kept, working = kept_mb(self.workload.device) - before, pass_mb(candidate, inputs, self.workload.device)
            self.peak_mb[name] = None if working is None or (side.fallback in GRAPHED and self.pooled) else kept + working
            self.pooled |= side.fallback in GRAPHED

    @property
    def idle(self) -> dict[str, str]:
        """Sides that were to have kernels and have none, as where no graph could be compiled with them, and why."""
        idle = {name: r for name, r in self.replacers.items() if name in self.models and not r.replaced}
        return {name: "; ".join(r.left) or "none of its graphs has a place for them" for name, r in idle.items()}

    def round(self, inputs: Inputs, shuffle: random.Random) -> list[dict[str, TimedPass]]:
        """Every side in random order, and once more backwards: its two passes, in the two halves."""
        order = shuffle.sample(sorted(self.models), len(self.models))
        halves = order, order[::-1]
        return [{s: _timed(self.models[s], inputs, self.workload.device) for s in half} for half in halves]

    def sample(self, warmup: int, timed: int | None, seed: int) -> Sample:
        """`timed` rounds, or as many as it takes until all sides have SETTLED or TIMED_S are over; each on inputs of its
        own, the mean of its two passes for each side."""
        shuffle = random.Random(seed)
        for index in range(warmup):
            self.round(self.workload.inputs(self.model, seed - index - 1), shuffle)
        halves: list[dict[str, TimedPass]] = []
        start = time.perf_counter()
        while not enough(halves, timed, time.perf_counter() - start):
            halves += self.round(self.workload.inputs(self.model, seed + len(halves) // 2), shuffle)
        return Sample(tuple(paired(halves)), self.first_call_s, self.peak_mb, self.errors, self.idle)


def forms(
    sides: Mapping[str, Variant], model: nn.Module, replacers: Mapping[str, Replacer]
) -> tuple[dict[str, Model], set[str]]:
    """What to call for each side; and those that come of one trace: two or more with kernels over the same fallback.

    They run as they would of traces of their own, but the first call of the first of them makes them all.
    """
    made, together = {}, set()
    for fallback in {side.fallback for side in sides.values()}:
        kernels = {name: replacer for name, replacer in replacers.items() if sides[name].fallback == fallback}
        if len(kernels) > 1:
            trace = OneTrace(kernels)
            compiled = compile_with_kernels(model, trace)
            made |= {name: partial(trace.run, name, compiled) for name in kernels}
            together |= kernels.keys()
    return {name: made.get(name) or side.build(model, replacers.get(name)) for name, side in sides.items()}, together


built: dict[int, Sides] = {}  # in this process, by their seed


def build_sides(
    workload: Workload,
    sides: Mapping[str, Variant],
    seed: int,
    caches: str | None = None,
    peaks: bool = True,
    first_calls: FirstCalls | None = None,
) -> None:
    """The first half of one process's measurement; see Sides.build() for `caches` and `peaks`. `first_calls`: what those of
    sides took that were compiled before."""
    model, _, _ = workload.load()
    known = dict((first_calls or {}).get(str(workload), {}))
    built[seed] = Sides(workload, model, first_call_s=known)
    with torch.no_grad():
        built[seed].build(sides, workload.inputs(model, seed), caches, peaks)


def build_alone(
    seed: int, sides: Mapping[str, Variant], caches: str | None = None, first_calls: FirstCalls | None = None
) -> None:
    """More sides of a process, which time kernels as they compile: nothing else may run on the machine meanwhile."""
    own = built[seed]
    own.first_call_s |= (first_calls or {}).get(str(own.workload), {})
    with torch.no_grad():
        own.build(sides, own.workload.inputs(own.model, seed), caches)


def compile_side(workload: Workload, name: str, side: Variant, seed: int, caches: str | None = None) -> float:
    """Seconds of its first call. Others are at work beside this process: what it compiled is kept, which of Inductor's
    Triton kernels it found the fastest is forgotten."""
    started = time.time()
    build_sides(workload, {name: side}, seed, caches, peaks=False)
    for choice in (cache_of(caches, name) if caches else Path(cache_dir())).rglob("*.best_config"):
        with suppress(FileNotFoundError):  # another such process was faster
            if choice.stat().st_mtime >= started:
                choice.unlink()
    return built[seed].first_call_s[name]


def tune_side(workloads: Sequence[Workload], name: str, side: Variant, seed: int, caches: str) -> FirstCalls:
    """Seconds of its first calls, by a process beside which others are at work: Triton's kernels are kept, and nothing of
    what was found the fastest."""
    found = {str(workload): {name: compile_side(workload, name, side, seed, caches)} for workload in workloads}
    for entry in cache_of(caches, name).iterdir():
        if entry.name != TRITON:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return found


def sample_sides(seed: int, warmup: int, timed: int | None) -> Sample:
    """The second: nothing else may run on the machine meanwhile."""
    with torch.no_grad():
        return built[seed].sample(warmup, timed, seed)


def cache_of(caches: str, side: str) -> Path:
    return Path(caches, re.sub(r"\W", "_", side))


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Inductor and Triton keep what they compile there, and know of nothing compiled elsewhere."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / TRITON)}
    before = {name: os.environ.get(name) for name in places}
    clear_caches()
    os.environ.update(places)
    try:
        yield
    finally:
        for name, place in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: place} if place else {})


def enough(halves: Sequence[dict[str, TimedPass]], timed: int | None, seconds: float) -> bool:
    """Whether to stop after these halves of rounds, which took so long."""
    rounds = len(halves) // 2
    if timed or rounds >= MAX_ROUNDS:
        return rounds >= (timed or MAX_ROUNDS)
    if seconds > TIMED_S and rounds >= MIN_ROUNDS:
        return True
    few = 1 if seconds > TIMED_S / 2 else 4  # of which chance makes a small error
    return rounds >= few and _standard_error(halves) <= SETTLED


def _standard_error(halves: Sequence[dict[str, TimedPass]]) -> float:
    """Of the mean logarithm of a side's time against all sides' in the same half of a round; the largest of all sides."""
    shares: dict[str, list[float]] = {side: [] for side in halves[0]}
    for half in halves:
        logs = {side: math.log(timed.seconds) for side, timed in half.items()}
        for side, log in logs.items():
            shares[side].append(log - mean(logs.values()))
    return max(stdev(of_side) for of_side in shares.values()) / math.sqrt(len(halves))


def paired(halves: Sequence[dict[str, TimedPass]]) -> list[dict[str, TimedPass]]:
    """Rounds of two halves each: the means of each side's two passes."""
    return [
        {
            side: TimedPass((a.seconds + b.seconds) / 2, (a.page_faults + b.page_faults) / 2)
            for side, a, b in ((side, first[side], second[side]) for side in first)
        }
        for first, second in zip(halves[::2], halves[1::2])
    ]


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _timed(model: Model, inputs: Inputs, device: str) -> TimedPass:
    args, kwargs = inputs
    wait_for(device)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    model(*args, **kwargs)
    wait_for(device)
    seconds = time.perf_counter() - start
    return TimedPass(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def kept_mb(device: str) -> float:
    """Memory of the GPU that this process holds on to; of a CPU's memory, too much else is in the process to tell."""
    if device == "cpu":
        return 0.0
    torch._C._cuda_clearCublasWorkspaces()  # as recording a CUDA graph does
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / 1e6


def pass_mb(model: Model, inputs: Inputs, device: str) -> float | None:
    """Memory that one pass takes at its peak, beyond what is there before it; None where the system does not tell."""
    if device == "cpu":
        return _resident_mb(model, inputs)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model(*inputs[0], **inputs[1])
    wait_for(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def _resident_mb(model: Model, inputs: Inputs) -> float | None:
    """By the kernel's own count of resident memory: the highest since it was told to forget, less that of the start."""
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not forget.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back: it counts anew
    forget.write_text("5")
    before = status.read_text()
    model(*inputs[0], **inputs[1])
    kilobytes = [int(re.search(rf"{key}:\s*(\d+)", t)[1]) for key, t in (("VmRSS", before), ("VmHWM", status.read_text()))]
    return (kilobytes[1] - kilobytes[0]) * 1024 / 1e6
