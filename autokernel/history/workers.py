"""The timing workers of a run, workers.json: who they are, what each has judged, and what went wrong. Without PyTorch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from autokernel.common.records import reads, record_from, write_json
from autokernel.common.words import counted

WORKERS = "workers.json"


@dataclass
class WorkerRecord:
    """What the driver knows of a worker: one GPU, or some cores of a CPU."""

    name: str
    node: str
    device: str
    joined_s: float  # after the driver began
    left_s: float | None = None  # None: it is there
    experiments: int = 0  # answers that counted
    busy_s: float = 0.0  # from handing out to the answer, of those that failed too
    failures: int = 0  # experiments that it did not bring to an end
    fault: str = ""  # the last one, in words
    quarantine: str = ""  # why it is given nothing more; empty: it is
    unit: str = ""  # of several devices of a kind: which


@dataclass(frozen=True)
class Workforce:
    """All workers of the latest call with --workers, up to `seconds` after it began."""

    seconds: float
    workers: list[WorkerRecord]

    def write(self, folder: Path) -> None:
        write_json(folder / WORKERS, asdict(self))

    def lines(self) -> list[str]:
        """A line for each worker that is there, has done something, or was lost."""
        return [self._line(w) for w in self.workers if w.left_s is None or w.experiments or w.failures or w.fault]

    def quarantined(self) -> list[str]:
        """A line for each worker that was found to answer wrongly or slowly."""
        sick = [worker for worker in self.workers if worker.quarantine]
        return [f"worker {one.name} ({one.node}, {one.device}) was put in quarantine: {one.quarantine}" for one in sick]

    def _line(self, worker: WorkerRecord) -> str:
        there_s = (self.seconds if worker.left_s is None else worker.left_s) - worker.joined_s
        line = f"worker {worker.name} ({worker.node}, {worker.device}): {counted(worker.experiments, 'experiment')}"
        if there_s > 0:
            line += f", {3600 * worker.experiments / there_s:.1f} an hour, busy {worker.busy_s / there_s:.0%} of the time"
        if worker.failures:
            line += f", {worker.failures} not finished"
        line += f"; in quarantine: {worker.quarantine}" if worker.quarantine else ""
        return line + (f"; {worker.fault}" if worker.fault else "")


def read_workforce(folder: Path) -> Workforce | None:
    """None where the run has had no workers. Raises BadRecord."""
    return _read(folder / WORKERS) if (folder / WORKERS).exists() else None


@reads("delete it: a run with --workers writes it again")
def _read(path: Path) -> Workforce:
    return record_from(json.loads(path.read_text()), Workforce)
