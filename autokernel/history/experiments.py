"""One experiment is one row: the fields of Experiment are the columns of results.tsv, in their order."""

import fcntl
import math
import os
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from autokernel.common.records import reads, record_from
from autokernel.common.verdict import Correctness, Interval, Verdict

STARTER = "starter"  # the agent of a target's first row: the starter itself, judged before anything is tried on it
START = "start from "  # and the name of that kernel: how the description of such a row begins


class Status(str, Enum):
    KEPT = "kept"
    RESET = "reset"  # correct, but not faster beyond doubt
    FAILED = "failed"  # a wrong answer, or refused
    CRASH = "crash"
    TIMEOUT = "timeout"
    UNDECIDED = "undecided"  # the machine did not let it be judged: says nothing of the kernel

    __str__ = str.__str__


REFUSED = {Correctness.FAIL: Status.FAILED, Correctness.CRASH: Status.CRASH, Correctness.TIMEOUT: Status.TIMEOUT}


@dataclass(frozen=True)
class Experiment:
    """A row of results.tsv. None is an empty cell: not measured, or it does not apply."""

    experiment: int
    tag: str
    kernel_type: str
    throughput_tflops: float | None
    latency_us: float | None
    pct_peak: float | None
    speedup_vs_pytorch: float | None
    correctness: str
    peak_vram_mb: float | None
    description: str  # the hypothesis
    target: str
    status: str
    commit: str
    speedup_vs_incumbent: float | None
    speedup_low: float | None
    speedup_high: float | None
    seconds: float
    seed: int
    device: str
    agent: str
    tokens: int
    cost_usd: float

    @property
    def gain(self) -> str:
        """The measured speedup in words: "1.083x [1.051, 1.116]", "about 0.72x, stopped early"; empty where there is none.

        The gate gives up after few pairs on what does not promise to be kept: its interval may then be of any width.
        """
        if self.speedup_vs_incumbent is None:
            return ""
        gain = Interval(self.speedup_low or 0.0, self.speedup_vs_incumbent, self.speedup_high or math.inf)
        return f"{gain}, stopped early" if gain.wide and self.status == Status.RESET else str(gain)

    def row(self) -> str:
        return "\t".join(cell(getattr(self, name)) for name in COLUMNS)

    @staticmethod
    def from_cells(cells: dict[str, str]) -> "Experiment":
        """Raises ValueError. An empty cell is None where it may be."""
        given = {name: None if cells[name] == "" and name in OPTIONAL else cells[name] for name in COLUMNS}
        return record_from(given, Experiment, text=True)


COLUMNS = typing.get_type_hints(Experiment)  # name -> type, in the order of the columns
OPTIONAL = {name for name, kind in COLUMNS.items() if type(None) in typing.get_args(kind)}


def cell(value: object) -> str:
    """One line without tabs; numbers to six digits, which is more than any measurement here has."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())


def _status(verdict: Verdict, agent: object) -> Status:
    if verdict.correctness == Correctness.PASS and (verdict.keep or agent == STARTER):
        return Status.KEPT  # a correct starter is what the first experiment has to beat
    if not verdict.decided:
        return Status.UNDECIDED
    return REFUSED.get(verdict.correctness, Status.RESET)


def experiment_from(verdict: Verdict, **known: object) -> Experiment:
    """The row of a verdict; `known` has what the verdict does not: number, tag, target, description, agent and cost."""
    speedup = verdict.speedup_vs_incumbent
    measured = {
        "kernel_type": verdict.kernel_type,
        "throughput_tflops": verdict.throughput_tflops,
        "latency_us": verdict.latency_us,
        "pct_peak": verdict.pct_peak,
        "speedup_vs_pytorch": verdict.speedup_vs_pytorch and verdict.speedup_vs_pytorch.value,
        "correctness": str(verdict.correctness) if verdict.decided or verdict.correctness == Correctness.PASS else "",
        "peak_vram_mb": verdict.peak_vram_mb,
        "status": str(_status(verdict, known["agent"])),
        "commit": "",
        "speedup_vs_incumbent": speedup and speedup.value,
        "speedup_low": speedup and speedup.low,
        "speedup_high": speedup and speedup.high,
        "seconds": verdict.bench_time_seconds,
        "seed": verdict.seed,
        "device": verdict.device,
    }
    return Experiment(**measured, **known)


class ExperimentLog:
    """results.tsv: appended row by row, each synced to disk. A line that a crash tore off is dropped; git still has it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Experiment]:
        """Raises BadRecord where the file is not a table of ours."""
        return _read(self.path) if self.path.exists() else []

    def append(self, experiments: Iterable[Experiment]) -> None:
        """Runs of several tags share the file: the lock keeps their rows whole."""
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            lines = [] if whole else ["\t".join(COLUMNS)]
            lines += [e.row() for e in experiments]
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


@reads("move it away, and a run writes its rows again from git")
def _read(path: Path) -> list[Experiment]:
    text = path.read_text(encoding="utf-8-sig")  # as spreadsheets write it
    header = "\t".join(COLUMNS)
    first, *lines = text.split("\n")
    if not (first == header or not lines and header.startswith(first)):
        raise ValueError("it has other columns than this version writes")
    return [Experiment.from_cells(_cells(number, line)) for number, line in enumerate(lines[:-1], 2)]


def _cells(number: int, line: str) -> dict[str, str]:
    cells = line.split("\t")
    if len(cells) != len(COLUMNS):
        raise ValueError(f"line {number} has {len(cells)} cells instead of {len(COLUMNS)}")
    return dict(zip(COLUMNS, cells))
