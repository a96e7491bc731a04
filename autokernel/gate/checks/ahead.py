"""Compiles kernels of many targets side by side before the first of them is judged: no verdict, and nothing is timed.

The build cache keeps what becomes of C++ and CUDA C++; what Triton compiles is found by other workers of the same source.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from autokernel.gate.checks.runner import LOAD_TIMEOUT_S
from autokernel.gate.checks.trials import option_dims
from autokernel.gate.workers.channel import encoded_arguments
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess
from autokernel.spec import Case, load_spec
from autokernel.target import Target

COPIES = 4  # of what one call moves, that a first call takes of a GPU's memory


@dataclass(frozen=True)
class Ahead:
    """One source and the calls for which it is to be compiled: a target's own, or `everywhere` in the five stages."""

    source: str
    target: Target
    everywhere: bool = False

    def tasks(self) -> Iterator[tuple["Ahead", list[Case]]]:
        """The calls, those of each dtype by themselves: a compiler takes as long for each."""
        yield self, [weighted.case for weighted in self.target.cases]
        spec = load_spec(self.target.kernel_type)
        sizes = [spec.smoke, *spec.sweep, *spec.edges, *option_dims(spec)]
        for dtype in spec.dtypes if self.everywhere else ():
            yield self, [spec.case(dims, dtype) for dims in sizes]


def compile_ahead(
    parent: WarmParent,
    memory: DeviceMemoryBudget,
    processes: int,
    wanted: Sequence[Ahead],
    progress: Callable[[int, int], None],
) -> None:
    """Call each source once in each of its calls, in as many `processes` at once; what fails will say so when it is judged.
    `progress` is told how many of how many have been compiled."""
    tasks, done, lock = [task for one in wanted for task in one.tasks()], 0, threading.Lock()

    def work(one: Ahead, cases: list[Case]) -> None:
        nonlocal done
        spec = load_spec(one.target.kernel_type)
        moved = max(spec.bytes_moved(case.args) for case in cases)
        with suppress(WorkerFault), memory.take(COPIES * moved), WorkerProcess(parent, 1, one.source) as worker:
            load = {"source": one.source, "poison": False, "libraries": "any", "results": spec.result_count}
            worker.request("load", LOAD_TIMEOUT_S, **load)
            for case in cases:
                worker.request("warm", LOAD_TIMEOUT_S, cases=[encoded_arguments(case.args)])
        with lock:
            done += 1
            progress(done, len(tasks))

    with ThreadPoolExecutor(processes) as pool:
        for future in [pool.submit(work, *task) for task in tasks]:
            future.result()
