"""Compiles kernels ahead of those who wait for them, side by side: no verdict comes of it, and nothing is timed.

The build cache keeps what becomes of C++ and CUDA C++; what Triton compiles is found by other workers of the same source.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from autokernel.gate.workers.channel import ChannelClosed, ChannelTimeout, encoded_arguments
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess
from autokernel.spec import Args, KernelSpec, load_spec
from autokernel.target import Target

LOAD_TIMEOUT_S = 60.0  # importing the source, and compiling what it compiles at import
COPIES = 4  # of what one call moves, that a first call takes of a GPU's memory
Ahead = tuple[str, Target]  # a source, and the target for whose calls it is to be compiled


def compile_ahead(
    parent: WarmParent,
    memory: DeviceMemoryBudget,
    processes: int,
    wanted: Sequence[Ahead],
    progress: Callable[[int, int], None],
) -> list[Ahead]:
    """Call each source once in each of its target's cases, in as many `processes` at once; those of which all calls came to
    an end. What fails says so when it is looked at. `progress` is told how many of how many have been compiled."""
    done, lock, compiled = 0, threading.Lock(), []

    def work(source: str, target: Target) -> None:
        nonlocal done
        spec, cases = load_spec(target.kernel_type), [weighted.case.args for weighted in target.cases]
        moved = max(map(spec.bytes_moved, cases))
        with suppress(WorkerFault), memory.take(COPIES * moved), WorkerProcess(parent, 1, source) as worker:
            _load(worker, source, spec)
            _call_once(worker, cases)
            compiled.append((source, target))
        with lock:
            done += 1
            progress(done, len(wanted))

    with ThreadPoolExecutor(processes) as pool:
        try:
            for future in [pool.submit(work, *one) for one in wanted]:
                future.result()
        finally:  # the pool waits for what was begun: where a signal ends this, nothing more is
            pool.shutdown(wait=False, cancel_futures=True)
    return compiled


class CompilingAhead:
    """Workers that call one source in one case after another, so that its trials find it compiled: their own workers wait
    for a compiler, most of the time, and several for the same one. A context manager; what it leaves behind is at most a
    compiler that ends by itself."""

    def __init__(
        self,
        parent: WarmParent,
        memory: DeviceMemoryBudget,
        processes: int,
        source: str,
        spec: KernelSpec,
        cases: Iterable[Args],
    ):
        self.parent, self.memory, self.source, self.spec = parent, memory, source, spec
        self.left, self.lock = list({repr(case): case for case in cases}.values()), threading.Lock()
        self.workers: list[WorkerProcess] = []
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(processes, len(self.left)))]

    def __enter__(self) -> "CompilingAhead":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.left.clear()
            for worker in self.workers:
                worker.end()

    def finish(self) -> None:
        """Begin no case more, and wait until nothing compiles: what comes next is timed."""
        with self.lock:
            self.left.clear()
        for thread in self.threads:
            thread.join()

    def _work(self) -> None:
        gone = ChannelClosed, ChannelTimeout, OSError  # the parent, after a verdict that nobody waits here for
        with suppress(WorkerFault, *gone), WorkerProcess(self.parent, 1, self.source) as worker:
            with self.lock:
                self.workers.append(worker)
            _load(worker, self.source, self.spec)
            while (case := self._next()) is not None:
                with self.memory.take(COPIES * self.spec.bytes_moved(case)):
                    _call_once(worker, [case])

    def _next(self) -> Args | None:
        """The last one that is left: trials begin with the first."""
        with self.lock:
            return self.left.pop() if self.left else None


def _load(worker: WorkerProcess, source: str, spec: KernelSpec) -> None:
    worker.request("load", LOAD_TIMEOUT_S, source=source, poison=False, libraries="any", results=spec.result_count)


def _call_once(worker: WorkerProcess, cases: Sequence[Args]) -> None:
    worker.request("warm", LOAD_TIMEOUT_S, cases=list(map(encoded_arguments, cases)))
