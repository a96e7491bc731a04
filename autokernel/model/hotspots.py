"""A model's profile as a record: what its time goes to, operation by operation, and how much of that could be saved."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from autokernel.common.records import reads, record_from, write_json
from autokernel.model import account
from autokernel.model.account import Standing
from autokernel.model.workload import Workload
from autokernel.spec import Case
from autokernel.target import encode

MAX_BUSY = 1.5  # times a pass that its operations may take apart from it: the profiler's own cost is within that


@dataclass(frozen=True)
class Hotspot:
    """All calls of one case in one pass; outside of sites (`kernel_type` None), all calls of one operator, for one reason.

    Of a mix of workloads: in as many passes of each as its weight says.
    """

    name: str
    calls: float
    time_us: float  # of all calls, in eager mode
    share: float  # of the model's device time, 0..1
    kernel_type: str | None = None
    case: Case | None = None
    bound: str | None = None  # "memory" | "compute"
    limit_us: float | None = None  # what all calls would take at the device's peak
    compiled_us: float | None = None  # what all calls take as torch.compile writes them, where that was measured
    baseline_us: float | None = None  # of eager and torch.compile, what a kernel has to beat here
    variants: tuple[Case, ...] = ()  # the strides in which the same call comes behind other kernels
    why: str = ""  # it is in no site although it reads like one, or in no graph; empty: there is no kernel type for it
    captured: bool = True
    graph_us: float | None = None  # of all calls, where the captured graph makes others than the model; else as time_us

    @property
    def standing(self) -> Standing:
        if self.kernel_type:
            return Standing.COVERED
        if not self.captured:
            return Standing.UNCAPTURED
        return Standing.REFUSED if self.why else Standing.OTHER

    @property
    def headroom(self) -> float | None:
        """The baseline's time over the time at the peak: how much faster a perfect kernel would be."""
        return self.limit_us and self.baseline_us / self.limit_us

    @property
    def removable_us(self) -> float:
        """What a perfect kernel would save of the baseline's time."""
        return max(self.baseline_us - self.limit_us, 0)


@dataclass(frozen=True)
class WorkloadPass:
    """One part of the workload, by itself."""

    name: str  # empty: there is but one
    weight: float
    latency_us: float  # median wall time of one pass, eager
    device_time_us: float
    uncaptured_us: float  # part of device_time_us


@dataclass(frozen=True)
class ModelProfile:
    """A workload on one device: one pass, or of a mix as many passes of each part as its weight says.

    `hotspots` are all of its time: shares sum to 1. Sites come in the order of what a perfect kernel would save.
    """

    workload: Workload
    device: str  # as PyTorch knows it: "cuda:1"
    device_name: str
    latency_us: float  # median wall time, eager
    device_time_us: float  # of all operators in an untouched pass
    graphs: int
    graph_breaks: tuple[str, ...]
    hotspots: tuple[Hotspot, ...]
    baseline: str = "eager"  # one of options.BASELINES
    passes: tuple[WorkloadPass, ...] = ()
    left: tuple[str, ...] = ()  # errors in the search for sites, and in what was measured: what they befell is left out
    differs: tuple[str, ...] = ()  # which other work the captured graphs do than the model untouched
    not_given: tuple[str, ...] = ()  # of forward()'s inputs, those that it did without

    @property
    def without(self) -> str:
        """What is not measured because its input was not given, in words; empty if nothing is."""
        if not self.not_given:
            return ""
        return (
            f"forward() of {self.workload.class_name} was not given {', '.join(self.not_given)}: what it makes of that, "
            "perhaps a loss, is not measured; for that let example_inputs() give it, as models/custom.py shows"
        )

    @property
    def disturbed(self) -> str:
        """Why its times are not to be relied on, in words; empty if they are."""
        busy = self.device_time_us / self.latency_us
        if self.device != "cpu" or busy <= MAX_BUSY:
            return ""
        return (
            f"operations took {busy:.1f} times what the pass took, which was timed apart from them: measure again where "
            "nothing else runs; until then neither times nor shares are to be relied on"
        )

    @cached_property
    def sites(self) -> tuple[Hotspot, ...]:
        return tuple(h for h in self.hotspots if h.kernel_type)

    @property
    def uncaptured(self) -> float:
        """Share of the time that is in no graph."""
        return sum(h.share for h in self.hotspots if not h.captured)

    def to_json(self) -> dict[str, Any]:
        shares = {standing.name.lower(): share for standing, share in account.shares(self.hotspots).items()}
        told = {"shares": shares, "account": account.lines(self.hotspots)}  # for whoever reads the file itself
        return encode(self) | {"workload": self.workload.to_json()} | told

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    @staticmethod
    @reads("name another file, or, if it was a profile, delete it and run python profile.py again")
    def read(path: Path) -> "ModelProfile":
        return record_from(json.loads(path.read_text()), ModelProfile, lambda _, dtype: getattr(torch, dtype))
