"""What the gate says of a kernel: the record that bench.py prints and the loop acts on."""

from dataclasses import dataclass, field
from enum import Enum

STAGES = ("smoke_test", "shape_sweep", "numerical_stability", "determinism", "edge_cases")


class Correctness(str, Enum):
    PASS = "PASS"
    FAIL = "FAIL"  # a wrong answer, or a refused source
    TIMEOUT = "TIMEOUT"
    CRASH = "CRASH"  # it ended its process or raised an exception

    __str__ = str.__str__


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    low: float
    value: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Failure:
    """Why a kernel was refused, with all that is needed to repeat it."""

    stage: str
    case: str
    seed: int
    reason: str  # one line
    detail: str = ""  # traceback, compiler output, last lines of stderr

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason} [{self.case}; seed {self.seed}]"


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
        """Whether this says anything of the kernel: the machine may have been too disturbed for it."""
        return not self.why.startswith("not decided")

    @property
    def pct_peak(self) -> float | None:
        """Percent of the peak that bounds this kernel."""
        return self.pct_peak_compute if self.bottleneck == "compute" else self.pct_peak_bandwidth
