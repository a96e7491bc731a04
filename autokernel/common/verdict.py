"""What the gate says of a kernel: the record that bench.py prints and the loop acts on."""

from dataclasses import dataclass, field, replace
from enum import Enum

STAGES = ("smoke_test", "shape_sweep", "numerical_stability", "determinism", "edge_cases")


class Correctness(str, Enum):
    PASS = "PASS"
    FAIL = "FAIL"  # a wrong answer, or a refused source
    TIMEOUT = "TIMEOUT"
    CRASH = "CRASH"  # it ended its process or raised an exception
    SKIP = "SKIP"  # the stages could not be gone through: nothing is known

    __str__ = str.__str__


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    low: float
    value: float
    high: float

    @property
    def wide(self) -> bool:
        """Whether, of a speedup, it says no more than its estimate: its ends are further apart than a factor of two."""
        return self.high > 2 * self.low

    def estimate(self, digits: int = 3) -> str:
        """Of a speedup: "1.083x"; "about 0.72x" where pairs were too few to say how much."""
        return f"about {self.value:.2f}x" if self.wide else f"{self.value:.{digits}f}x"

    def ends(self, digits: int = 3) -> str:
        """ " [1.051, 1.116]"; empty where they would say nothing: the only place that writes a speedup's interval."""
        return "" if self.wide else f" [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def __str__(self) -> str:
        """Of a speedup, for people: "1.083x [1.051, 1.116]", "about 0.72x"."""
        return self.estimate() + self.ends()


@dataclass(frozen=True)
class Failure:
    """Why a kernel was refused, with all that is needed to repeat it."""

    stage: str
    case: str
    seed: int
    reason: str  # one line
    detail: str = ""  # traceback, compiler output, last lines of stderr

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason} [{self.case}; inputs of seed {self.seed}]"


@dataclass(frozen=True)
class CaseTiming:
    """One case of the target, timed. Speedups are paired ratios of times: above 1 the candidate is faster."""

    case: str
    calls: float
    latency_us: float
    flops: int
    bytes_moved: int
    launch_us: float | None = None  # what the host takes for a call on a GPU; latencies there are those of CUDA graphs
    pytorch_latency_us: float | None = None
    compile_latency_us: float | None = None
    speedup_vs_pytorch: Interval | None = None
    speedup_vs_compile: Interval | None = None
    speedup_vs_incumbent: Interval | None = None


@dataclass(frozen=True)
class Verdict:
    """The gate's judgement of one kernel file on one target.

    `keep` is True only if all five stages passed and, where an incumbent was given, the candidate is faster than it beyond
    the interval and the noise floor, with no case slower beyond its interval; `why` says so in one line for people.
    latency_us is weighted by calls over the target's cases, and so are the speedups and the rates.
    """

    kernel_type: str
    backend: str
    device: str
    correctness: Correctness
    keep: bool
    why: str
    seed: int
    undecided: str = ""  # why this says nothing of the kernel: the machine was too disturbed, or out of memory
    stages: dict[str, str] = field(default_factory=dict)  # stage -> "PASS", "FAIL", "SKIP", …
    failure: Failure | None = None
    cases: tuple[CaseTiming, ...] = ()
    latency_us: float | None = None
    throughput_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    pct_peak_compute: float | None = None
    pct_peak_bandwidth: float | None = None
    arithmetic_intensity: float | None = None
    ridge_point: float | None = None
    bottleneck: str | None = None  # "memory" | "compute"
    peak_vram_mb: float | None = None
    pytorch_latency_us: float | None = None
    speedup_vs_pytorch: Interval | None = None
    compile_latency_us: float | None = None
    speedup_vs_compile: Interval | None = None
    speedup_vs_incumbent: Interval | None = None
    bench_time_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)  # where that time went; parallel workers add up

    @property
    def decided(self) -> bool:
        """Whether this says anything of the kernel."""
        return not self.undecided

    def as_undecided(self, reason: str) -> "Verdict":
        """The same, which says nothing of the kernel for `reason`."""
        return replace(self, keep=False, undecided=reason, why=f"undecided: {reason}")

    @property
    def pct_peak(self) -> float | None:
        """Percent of the peak that bounds this kernel."""
        return self.pct_peak_compute if self.bottleneck == "compute" else self.pct_peak_bandwidth
