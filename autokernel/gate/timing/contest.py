"""The timed half of the gate: pairs of processes until the keep rule has decided, and the record of what was measured."""

import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from autokernel.common.verdict import CaseTiming, Correctness, Interval, Verdict
from autokernel.gate.timing.batches import Setting
from autokernel.gate.timing.device_probe import DeviceProbe
from autokernel.gate.timing.disturbance import throttled
from autokernel.gate.timing.faults import BaselineFault, RefusedWhileTimed
from autokernel.gate.timing.pairs import PairResult, PairTimer, Side
from autokernel.gate.timing.statistics import (
    CONFIDENCE,
    LOOKS,
    MINIMUM_GAIN,
    REPORTED_CONFIDENCE,
    keep_rule,
    noise_floor,
    product,
    ratio_interval,
)
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WarmParent, WorkerFault
from autokernel.gate.workers.stopwatch import Stopwatch
from autokernel.hardware.device import Device
from autokernel.hardware.roofline import Roofline
from autokernel.spec import load_spec
from autokernel.target import Target

BASELINE_PAIRS = 3  # pairs in which the baselines are timed beside candidate and incumbent
# Pairs without an incumbent; from LOOKS[0] on as many as it takes for an interval over PyTorch eager of ALONE_WIDTH, to
# each side of the log ratio. After ALONE_S one that says something is enough, if no audit went against the kernel.
ALONE_PAIRS, ALONE_WIDTH, ALONE_S = 8, 0.02, 10.0
NOISE_PAIRS = 4
DISCARDS = 4  # disturbed pairs for which there are others; then those that were timed count: both sides were disturbed
NO_RESULT = 8  # pairs that came to no result, after which nothing is decided
PAUSE_S, PAUSE_GROWTH = 0.5, 1.5  # after a disturbed pair: what disturbed it may soon be over
MEMORY_SHARE = 0.8  # of the device's memory; a kernel that needs more leaves none to the model
# A time below this share of the physical floor is a fault. Measured peaks are near the limit, but no law of physics.
FLOOR_SHARE, FLOOR_SHARE_MEASURED = 0.9, 0.5

CANDIDATE, INCUMBENT, EAGER, COMPILED = "candidate", "incumbent", "eager", "compiled"


class NotDecided(RuntimeError):
    """The machine was too disturbed for a verdict."""


@dataclass(frozen=True)
class Contestants:
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

    def add(self, pair: PairResult) -> None:
        """Raises NotDecided where audits refuse one pair after the other, which on a busy machine makes no strikes."""
        self.pairs.append(pair)
        if (struck := len(self.pairs) - self.clean) > NO_RESULT:
            raise NotDecided(f"audits refused {struck} pairs, with other processes at work")

    @property
    def clean(self) -> int:
        """Pairs by which looks are counted; one in which an audit went against the candidate counts for its ratio alone."""
        return sum(not pair.struck for pair in self.pairs)

    @property
    def circumstances(self) -> str:
        """What is to be known of the pairs that count, for people."""
        struck, busy = len(self.pairs) - self.clean, sum(bool(pair.disturbance) for pair in self.pairs)
        says = [f"audits refused {struck} pairs, which count against it"] * bool(struck)
        says += [f"{busy} of {len(self.pairs)} pairs on a busy machine"] * bool(busy)
        return "".join(f"; {what}" for what in says)


class Contests:
    """Times kernels on one device. Keeps the noise floors and the incumbents' baselines that it has measured."""

    def __init__(
        self,
        parent: WarmParent,
        device: Device,
        name: str,
        threads: int,
        memory: DeviceMemoryBudget,
        watch: Stopwatch,
        maps: bool = False,
    ):
        self.parent, self.device, self.name, self.threads, self.watch = parent, device, name, threads, watch
        self.memory, self.maps = memory, maps
        self.probe = DeviceProbe(name) if name.startswith("cuda") else None
        self._noise: dict[tuple[str, str], float] = {}
        self._baselines: dict[tuple, dict[str, list[Interval]]] = {}

    def timer(self, target: Target, seed: int, libraries: str) -> PairTimer:
        spec = load_spec(target.kernel_type)
        chance = random.Random(seed)
        setting = Setting(
            self.parent, spec, target, self.threads, libraries, self.memory, self.watch, chance, self.probe, self.maps
        )
        return PairTimer(setting, seed)

    def prepare(self, timer: PairTimer, contestants: Contestants) -> None:
        """Start the processes of the first pairs, while the candidate is still being checked."""
        timer.prepare(self._sides(contestants, timer.target, 0), CANDIDATE, LOOKS[0])

    def decide(self, timer: PairTimer, contestants: Contestants) -> Verdict:
        """Sequential paired timing, to a verdict on a kernel that is known to be right.

        Raises RefusedWhileTimed and WorkerFault for the candidate's doing, BaselineFault and NotDecided for others'.
        """
        target, incumbent = timer.target, contestants.incumbent
        measured = Measured(baselines=self._known(contestants, target))
        most = LOOKS[0] if contestants.quick else LOOKS[-1] if incumbent else ALONE_PAIRS
        started_s = time.monotonic()
        while True:
            before = measured.clean
            sides = self._sides(contestants, target, before)
            until = BASELINE_PAIRS if before < BASELINE_PAIRS else next(n for n in (*LOOKS, most) if before < n <= most)
            timer.prepare(sides, CANDIDATE, until - before)
            measured.add(self._clean_pair(timer, sides))
            if (clean := measured.clean) == before or clean < LOOKS[0]:
                continue
            measured.peak_bytes, measured.launch_us = timer.peak_bytes, timer.launch_us
            self._check_roofline_floor(measured.pairs, target, timer.seed)
            if not incumbent:
                verdict = self._record(target, timer.seed, measured)
                late = time.monotonic() > started_s + ALONE_S and clean == len(measured.pairs)
                if clean < most and wide(verdict.speedup_vs_pytorch, late):
                    continue
                return replace(verdict, why=f"correct; {verdict.speedup_vs_pytorch} PyTorch eager{measured.circumstances}")
            if not measured.baselines:
                self._baselines[_key(contestants, target)] = _baselines(measured.pairs, target)
            ratios = [p.log_ratio(INCUMBENT, CANDIDATE, target.cases) for p in measured.pairs]
            by_case = {
                c.case.name: [p.case_log_ratio(INCUMBENT, CANDIDATE, i) for p in measured.pairs]
                for i, c in enumerate(target.cases)
            }
            decision = keep_rule(ratios, by_case, self._noise.get(_place(target), MINIMUM_GAIN), clean)
            if decision.keep:  # by the least floor; what this target's is takes pairs, and only now matters
                decision = keep_rule(ratios, by_case, self.noise_floor(incumbent, target, timer.setting.libraries), clean)
            if not decision.more or clean >= most:
                break
        verdict = self._record(target, timer.seed, measured)
        if decision.keep:
            timer.corroborate(contestants.contest[0])
        verdict = replace(verdict, keep=decision.keep and not contestants.quick, why=decision.why + measured.circumstances)
        return self._with_reservations(verdict, timer)

    def compare(self, timer: PairTimer, contestants: Contestants) -> Verdict:
        """Two kernels against each other in eight fresh pairs, no early stop; nothing is kept."""
        measured = Measured()
        while measured.clean < ALONE_PAIRS:
            timer.prepare(contestants.contest, CANDIDATE, ALONE_PAIRS - measured.clean)
            measured.add(self._clean_pair(timer, contestants.contest))
        measured.peak_bytes = timer.peak_bytes
        return self._record(timer.target, timer.seed, measured)

    def _sides(self, contestants: Contestants, target: Target, pairs: int) -> list[Side]:
        """Who takes part in the pair after `pairs` pairs. The baseline does in each where it is the only opponent."""
        if pairs < BASELINE_PAIRS and not self._known(contestants, target):
            return contestants.contest + contestants.baselines
        return contestants.contest + ([] if contestants.incumbent else contestants.baselines[:1])

    def _known(self, contestants: Contestants, target: Target) -> dict[str, list[Interval]]:
        return self._baselines.get(_key(contestants, target), {}) if contestants.incumbent else {}

    def noise_floor(self, source: str, target: Target, libraries: str) -> float:
        """The gain below which nothing is kept on this target: what the same kernel shows against itself (A/A)."""
        key = _place(target)
        if key not in self._noise:
            sides = Contestants(source, source).contest
            with self.timer(target, secrets.randbits(48), libraries) as timer:
                timer.prepare(sides, CANDIDATE, NOISE_PAIRS)
                try:
                    pairs = [self._clean_pair(timer, sides) for _ in range(NOISE_PAIRS)]
                except (WorkerFault, RefusedWhileTimed) as fault:  # of the incumbent: the candidate is not to blame
                    raise BaselineFault(fault.reason) from fault
            self._noise[key] = noise_floor([p.log_ratio(INCUMBENT, CANDIDATE, target.cases) for p in pairs])
        return self._noise[key]

    def _clean_pair(self, timer: PairTimer, sides: Sequence[Side]) -> PairResult:
        """A pair during which the machine was left to us; one of a busy machine, where there is no other to be had.

        Load that others make falls on both sides, which take turns: it widens the interval, and so asks for more pairs.
        Raises NotDecided if no pair comes to a result.
        """
        while True:
            pair = timer.pair(sides, CANDIDATE)
            if not pair.disturbance or pair.struck or pair.seconds and timer.discarded >= DISCARDS:
                return pair
            timer.discarded += 1
            if timer.discarded > NO_RESULT:
                raise NotDecided(f"{pair.disturbance} in {timer.discarded} pairs")
            time.sleep(PAUSE_S * PAUSE_GROWTH ** min(timer.discarded - 1, DISCARDS))

    def _check_roofline_floor(self, pairs: Sequence[PairResult], target: Target, seed: int) -> None:
        """A time below what the device can attain is a fault of the measurement or of the kernel, never a record.

        Peaks that were measured are measured once more first: something else may have been at work then.
        """
        impossible = self._impossible(pairs, target)
        if impossible and self.device.measured:
            self.device = Device.detect(self.name, again=True)
            impossible = self._impossible(pairs, target)
        if impossible:
            raise RefusedWhileTimed(impossible[0], seed, impossible[1])

    def _impossible(self, pairs: Sequence[PairResult], target: Target) -> tuple[str, str] | None:
        """The first case whose time is below the device's floor, and what is wrong with it, in words."""
        spec, share = load_spec(target.kernel_type), FLOOR_SHARE_MEASURED if self.device.measured else FLOOR_SHARE
        for i, weighted in enumerate(target.cases):
            args = weighted.case.args
            seconds = median(p.seconds[CANDIDATE][i] for p in pairs)  # a disturbed pair must not make up for the others
            roofline = Roofline.of(self.device, target.dtype, spec.flops(args), spec.bytes_moved(args))
            floors = {"compute": roofline.compute_s}
            if pairs[0].rotated_bytes[i] > 2 * self.device.l2_bytes:  # else they may come from a cache
                floors["move"] = roofline.memory_s
            for what, floor_s in floors.items():
                if seconds < share * floor_s:
                    took = f"{seconds * 1e6:.1f} us, {floor_s * 1e6:.1f} us to {what} it all"
                    return weighted.case.name, f"faster than the device can be: {took}"
        return None

    def _with_reservations(self, verdict: Verdict, timer: PairTimer) -> Verdict:
        """A keep, unless the kernel takes too much memory or the GPU was throttled when it was measured."""
        if not verdict.keep:
            return verdict
        share = timer.memory_share
        if share > MEMORY_SHARE:
            return replace(verdict, keep=False, why=f"{share:.0%} of the device's memory in use; {verdict.why}")
        reason = throttled(self.name)
        return verdict.as_undecided(f"{reason}; {verdict.why}") if reason else verdict

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

        latency_us = weighted("latency_us")
        roofline = Roofline.of(self.device, target.dtype, weighted("flops"), weighted("bytes_moved"))
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
            throughput_tflops=roofline.flops / latency_us / 1e6,
            bandwidth_gb_s=roofline.bytes_moved / latency_us / 1e3,
            pct_peak_compute=1e8 * roofline.compute_s / latency_us,
            pct_peak_bandwidth=1e8 * roofline.memory_s / latency_us,
            arithmetic_intensity=roofline.arithmetic_intensity,
            ridge_point=roofline.ridge_point,
            bottleneck=roofline.bottleneck,
            peak_vram_mb=measured.peak_bytes / 2**20,
            pytorch_latency_us=weighted("pytorch_latency_us"),
            speedup_vs_pytorch=ratio(EAGER),
            compile_latency_us=weighted("compile_latency_us"),
            speedup_vs_compile=ratio(COMPILED),
            speedup_vs_incumbent=ratio(INCUMBENT),
        )


def wide(speedup: Interval | None, late: bool = False) -> bool:
    """Whether more pairs would tell a speedup noticeably better; `late`: whether they are needed to tell anything."""
    if speedup is None or speedup.low <= 0 or late:
        return speedup is None or speedup.wide
    return math.log(speedup.high / speedup.low) > 2 * ALONE_WIDTH


def _place(target: Target) -> tuple[str, str]:
    """Where a noise floor was measured."""
    return target.name, target.backend


def _key(contestants: Contestants, target: Target) -> tuple:
    """What an incumbent's baselines depend on."""
    return contestants.incumbent, repr(target), contestants.compiled


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
