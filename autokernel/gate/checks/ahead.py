"""Compiles kernels of many targets side by side before the first of them is looked at: no verdict, and nothing is timed.

The build cache keeps what becomes of C++ and CUDA C++; what Triton compiles is found by other workers of the same source.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from autokernel.gate.checks.runner import LOAD_TIMEOUT_S
from autokernel.gate.workers.channel import encoded_arguments
from autokernel.gate.workers.device_memory import DeviceMemoryBudget
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess
from autokernel.spec import load_spec
from autokernel.target import Target

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
            load = {"source": source, "poison": False, "libraries": "any", "results": spec.result_count}
            worker.request("load", LOAD_TIMEOUT_S, **load)
            worker.request("warm", LOAD_TIMEOUT_S, cases=list(map(encoded_arguments, cases)))
            compiled.append((source, target))
        with lock:
            done += 1
            progress(done, len(wanted))

    with ThreadPoolExecutor(processes) as pool:
        for future in [pool.submit(work, *one) for one in wanted]:
            future.result()
    return compiled
