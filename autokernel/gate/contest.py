"""The timed half of the gate: pairs of processes until the keep rule has decided, and the record of what was measured."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from autokernel.device import Device
from autokernel.gate.disturbance import throttled
from autokernel.gate.processes import WarmParent
from autokernel.gate.room import Room
from autokernel.gate.statistics import (
    CONFIDENCE,
    LOOKS,
    MINIMUM_GAIN,
    REPORTED_CONFIDENCE,
    keep_rule,
    noise_floor,
    product,
    ratio_interval,
)
from autokernel.gate.stopwatch import Stopwatch
from autokernel.gate.timing import PairResult, PairTimer, RefusedWhileTimed, Side
from autokernel.gate.verdict import CaseTiming, Correctness, Interval, Verdict
from autokernel.spec import load_spec
from autokernel.target import Target

BASELINE_PAIRS = 3  # pairs in which the baselines are timed beside candidate and incumbent
ALONE_PAIRS = 8  # pairs without an incumbent
NOISE_PAIRS = 4
DISCARDS = 8  # disturbed pairs, after which nothing is decided
PAUSE_S, PAUSE_GROWTH = 0.5, 1.5  # after a disturbed pair: what disturbed it may soon be over
MEMORY_SHARE = 0.8  # of the device's memory; a kernel that needs more leaves none to the model
# A time below this share of the physical floor is a fault. Measured peaks are near the limit, but no law of physics.
FLOOR_SHARE, FLOOR_SHARE_MEASURED = 0.9, 0.5

CANDIDATE, INCUMBENT, EAGER, COMPILED = "candidate", "incumbent", "eager", "compiled"


class NotDecided(RuntimeError):
    """The machine was too disturbed for a verdict."""


@dataclass(frozen=True)
class Entry:
    """What is to be timed. quick: three pairs, which never keep; compiled: torch.compile is timed as well."""

    source: str
    incumbent: str | None = None
    quick: bool = False
    compiled: bool = False

    @property
    def contest(self) -> list[Side]:
        return [Side(CANDIDATE, self.source)] + ([Side(INCUMBENT, self.incumbent)] if self.incumbent else [])

    @property
    def baselines(self) -> list[Side]:
        return [Side(EAGER)] + ([Side(COMPILED, compiled=True)] if self.compiled else [])


@dataclass
class Measured:
    """The pairs of one contest; `baselines`: side -> intervals of its time over the incumbent's, in all and by case, where
    an earlier contest with the same incumbent has timed it."""

    pairs: list[PairResult] = field(default_factory=list)
    baselines: dict[str, list[Interval]] = field(default_factory=dict)
    peak_bytes: int = 0
    launch_us: dict[str, float] = field(default_factory=dict)


class Contests:
    """Times kernels on one device. Keeps the noise floors and the incumbents' baselines that it has measured."""

    def __init__(self, parent: WarmParent, device: Device, name: str, threads: int, room: Room, watch: Stopwatch):
        self.parent, self.device, self.name, self.threads, self.watch = parent, device, name, threads, watch
        self.room = room
        self._noise: dict[tuple[str, str], float] = {}
        self._baselines: dict[tuple, dict[str, list[Interval]]] = {}

    def timer(self, target: Target, seed: int, libraries: str) -> PairTimer:
        spec = load_spec(target.kernel_type)
        return PairTimer(self.parent, spec, target, self.threads, seed, libraries, self.room, self.watch)

    def prepare(self, timer: PairTimer, entry: "Entry") -> None:
        """Start the processes of the first pairs, while the candidate is still being checked."""
        timer.prepare(self._sides(entry, timer.target, 0), CANDIDATE, LOOKS[0])

    def decide(self, timer: PairTimer, entry: "Entry") -> Verdict:
        """Sequential paired timing, to a verdict on a kernel that is known to be right.

        Raises RefusedWhileTimed and WorkerFault for the candidate's doing, BystanderFault and NotDecided for others'.
        """
        target, incumbent = timer.target, entry.incumbent
        measured = Measured(baselines=self._known(entry, target))
        looks = LOOKS[:1] if entry.quick else LOOKS if incumbent else (ALONE_PAIRS,)
        for look in looks:
            while len(measured.pairs) < look:
                sides = self._sides(entry, target, len(measured.pairs))
                until = BASELINE_PAIRS if len(measured.pairs) < BASELINE_PAIRS else look
                timer.prepare(sides, CANDIDATE, until - len(measured.pairs))
                measured.pairs.append(self._clean_pair(timer, sides))
            measured.peak_bytes, measured.launch_us = timer.peak_bytes, timer.launch_us
            self._refuse_the_impossible(measured.pairs, target, timer.seed)
            if incumbent and not measured.baselines:
                self._baselines[_key(entry, target)] = _baselines(measured.pairs, target)
            verdict = self._record(target, timer.seed, measured)
            if not incumbent:
                return replace(verdict, why=f"correct; {verdict.speedup_vs_pytorch} times PyTorch eager")
            ratios = [p.log_ratio(INCUMBENT, CANDIDATE, target.cases) for p in measured.pairs]
            by_case = {
                c.case.name: [p.case_log_ratio(INCUMBENT, CANDIDATE, i) for p in measured.pairs]
                for i, c in enumerate(target.cases)
            }
            floor = MINIMUM_GAIN if entry.quick else self.noise_floor(incumbent, target, timer.libraries)
            decision = keep_rule(ratios, by_case, floor)
            if not decision.more:
                break
        if decision.keep:
            timer.corroborate(entry.contest[0])
        return self._with_reservations(replace(verdict, keep=decision.keep and not entry.quick, why=decision.why), timer)

    def compare(self, timer: PairTimer, entry: "Entry") -> Verdict:
        """Two kernels against each other in eight fresh pairs, no early stop; nothing is kept."""
        measured = Measured()
        while len(measured.pairs) < ALONE_PAIRS:
            timer.prepare(entry.contest, CANDIDATE, ALONE_PAIRS - len(measured.pairs))
            measured.pairs.append(self._clean_pair(timer, entry.contest))
        measured.peak_bytes = timer.peak_bytes
        return self._record(timer.target, timer.seed, measured)

    def _sides(self, entry: "Entry", target: Target, pairs: int) -> list[Side]:
        """Who takes part in the pair after `pairs` pairs. The baseline does in each where it is the only opponent."""
        if pairs < BASELINE_PAIRS and not self._known(entry, target):
            return entry.contest + entry.baselines
        return entry.contest + ([] if entry.incumbent else entry.baselines[:1])

    def _known(self, entry: "Entry", target: Target) -> dict[str, list[Interval]]:
        return self._baselines.get(_key(entry, target), {}) if entry.incumbent else {}

    def noise_floor(self, source: str, target: Target, libraries: str) -> float:
        """The gain below which nothing is kept on this target: what the same kernel shows against itself (A/A)."""
        key = (target.name, target.backend)
        if key not in self._noise:
            sides = Entry(source, source).contest
            with self.timer(target, secrets.randbits(48), libraries) as timer:
                timer.prepare(sides, CANDIDATE, NOISE_PAIRS)
                pairs = [self._clean_pair(timer, sides) for _ in range(NOISE_PAIRS)]
            self._noise[key] = noise_floor([p.log_ratio(INCUMBENT, CANDIDATE, target.cases) for p in pairs])
        return self._noise[key]

    def _clean_pair(self, timer: PairTimer, sides: Sequence[Side]) -> PairResult:
        """A pair during which the machine was left to us. Raises NotDecided if there is none to be had."""
        while True:
            pair = timer.pair(sides, CANDIDATE)
            if not pair.disturbance:
                return pair
            timer.discarded += 1
            if timer.discarded > DISCARDS:
                raise NotDecided(f"not decided: {pair.disturbance} in {timer.discarded} pairs")
            time.sleep(PAUSE_S * PAUSE_GROWTH ** (timer.discarded - 1))

    def _refuse_the_impossible(self, pairs: Sequence[PairResult], target: Target, seed: int) -> None:
        """A time below what the device can attain is a fault of the measurement or of the kernel, never a record."""
        spec, device = load_spec(target.kernel_type), self.device
        share = FLOOR_SHARE_MEASURED if device.measured else FLOOR_SHARE
        for i, weighted in enumerate(target.cases):
            args = weighted.case.args
            seconds = median(p.seconds[CANDIDATE][i] for p in pairs)  # a disturbed pair must not make up for the others
            floors = {"compute": spec.flops(args) / (device.peak_tflops(target.dtype) * 1e12)}
            if pairs[0].rotated_bytes[i] > 2 * device.l2_bytes:  # else they may come from a cache
                floors["move"] = spec.bytes_moved(args) / (device.peak_bandwidth_gb_s * 1e9)
            for what, floor_s in floors.items():
                if seconds < share * floor_s:
                    reason = (
                        f"faster than the device can be: {seconds * 1e6:.1f} us, {floor_s * 1e6:.1f} us to {what} it all"
                    )
                    raise RefusedWhileTimed(weighted.case.name, seed, reason)

    def _with_reservations(self, verdict: Verdict, timer: PairTimer) -> Verdict:
        """A keep, unless the kernel takes too much memory or the GPU was throttled when it was measured."""
        if not verdict.keep:
            return verdict
        share = timer.memory_share
        if share > MEMORY_SHARE:
            return replace(verdict, keep=False, why=f"{share:.0%} of the device's memory in use; {verdict.why}")
        reason = throttled(self.name)
        return replace(verdict, keep=False, why=f"not decided: {reason}; {verdict.why}") if reason else verdict

    def _record(self, target: Target, seed: int, measured: Measured) -> Verdict:
        """What was measured; whether to keep it is the caller's to decide."""
        spec, cases, calls = load_spec(target.kernel_type), target.cases, sum(c.calls for c in target.cases)
        pairs = measured.pairs

        def ratio(side: str, index: int | None = None) -> Interval | None:
            seen = [p for p in pairs if side in p.seconds]
            if not seen and side in measured.baselines:
                return product(measured.baselines[side][0 if index is None else index + 1], ratio(INCUMBENT, index))
            if not seen:
                return None
            return _ratio(seen, side, CANDIDATE, target, index, CONFIDENCE if side == INCUMBENT else REPORTED_CONFIDENCE)

        def microseconds(index: int) -> float:
            return mean(p.seconds[CANDIDATE][index] for p in pairs) * 1e6

        def timing(i: int) -> CaseTiming:
            args, latency_us = cases[i].case.args, microseconds(i)
            eager, compiled = ratio(EAGER, i), ratio(COMPILED, i)
            return CaseTiming(
                case=cases[i].case.name,
                calls=cases[i].calls,
                latency_us=latency_us,
                launch_us=measured.launch_us.get(cases[i].case.name),
                flops=spec.flops(args),
                bytes_moved=spec.bytes_moved(args),
                pytorch_latency_us=eager and latency_us * eager.value,
                compile_latency_us=compiled and latency_us * compiled.value,
                speedup_vs_pytorch=eager,
                speedup_vs_compile=compiled,
                speedup_vs_incumbent=ratio(INCUMBENT, i),
            )

        timings = tuple(timing(i) for i in range(len(cases)))

        def weighted(name: str) -> float | None:
            values = [getattr(t, name) for t in timings]
            return None if None in values else sum(v * t.calls for v, t in zip(values, timings)) / calls

        latency_us, flops, moved = weighted("latency_us"), weighted("flops"), weighted("bytes_moved")
        peak_flops, peak_bytes_s = self.device.peak_tflops(target.dtype) * 1e12, self.device.peak_bandwidth_gb_s * 1e9
        ridge = peak_flops / peak_bytes_s
        return Verdict(
            kernel_type=target.kernel_type,
            backend=target.backend,
            device=self.device.name,
            correctness=Correctness.PASS,
            keep=False,
            why="",
            seed=seed,
            cases=timings,
            latency_us=latency_us,
            throughput_tflops=flops / latency_us / 1e6,
            bandwidth_gb_s=moved / latency_us / 1e3,
            pct_peak_compute=100 * flops / (latency_us * 1e-6) / peak_flops,
            pct_peak_bandwidth=100 * moved / (latency_us * 1e-6) / peak_bytes_s,
            arithmetic_intensity=flops / moved,
            ridge_point=ridge,
            bottleneck="compute" if flops / moved > ridge else "memory",
            peak_vram_mb=measured.peak_bytes / 2**20,
            pytorch_latency_us=weighted("pytorch_latency_us"),
            speedup_vs_pytorch=ratio(EAGER),
            compile_latency_us=weighted("compile_latency_us"),
            speedup_vs_compile=ratio(COMPILED),
            speedup_vs_incumbent=ratio(INCUMBENT),
        )


def _key(entry: Entry, target: Target) -> tuple:
    """What an incumbent's baselines depend on."""
    return entry.incumbent, repr(target), entry.compiled


def _ratio(
    pairs: Sequence[PairResult], slow: str, fast: str, target: Target, index: int | None, confidence: float
) -> Interval:
    """Interval of slow's time over fast's: over the target (index None), or in one case."""
    if index is None:
        return ratio_interval([p.log_ratio(slow, fast, target.cases) for p in pairs], confidence)
    return ratio_interval([p.case_log_ratio(slow, fast, index) for p in pairs], confidence)


def _baselines(pairs: Sequence[PairResult], target: Target) -> dict[str, list[Interval]]:
    """Intervals of each baseline's time over the incumbent's: over the target first, then case by case."""
    known = {}
    for side in (EAGER, COMPILED):
        seen = [p for p in pairs if side in p.seconds]
        if seen:
            indices = [None, *range(len(target.cases))]
            known[side] = [_ratio(seen, side, INCUMBENT, target, i, REPORTED_CONFIDENCE) for i in indices]
    return known
