"""Time several callables on the same inputs in one process: batches of calls, interleaved, forwards and backwards."""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ROTATE_BYTES = {"cuda": 256 << 20, "cpu": 96 << 20}  # four times an H200's L2: no call finds its data in a cache
MAX_SETS = 64
BATCH_S = {"cuda": 1.5e-3, "cpu": 5e-3}  # marking a batch's start and end takes a few microseconds
ROUNDS = 24

Mark = Any  # torch.cuda.Event on a GPU, seconds on a CPU


def sets_needed(bytes_moved: int, kind: str) -> int:
    return min(max(math.ceil(ROTATE_BYTES[kind] / bytes_moved), 2), MAX_SETS)


def mark(kind: str) -> Mark:
    if kind == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Batch:
    """Calls through all the input sets, some times over: one CUDA graph where they can be captured, else one by one.

    The outputs of a whole rotation are kept, so that none is written over one that is still in the cache.
    """

    def __init__(self, call: Callable[..., Tensor], sets: Sequence[dict[str, Any]], kind: str) -> None:
        self.call, self.sets, self.kind = call, sets, kind
        self.outputs: list[Any] = [None] * len(sets)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = len(sets)
        self.run()
        self._capture()
        rotations = math.ceil(BATCH_S[kind] / seconds_between(*self.run()))
        if rotations > 1:
            self.calls *= rotations
            self._capture()

    def run(self) -> tuple[Mark, Mark]:
        """Start a batch; returns the marks at its start and end."""
        start = mark(self.kind)
        if self.graph:
            self.graph.replay()
        else:
            self._call()
        return start, mark(self.kind)

    def _call(self) -> None:
        for i in range(self.calls):
            self.outputs[i % len(self.sets)] = self.call(**self.sets[i % len(self.sets)])

    def _capture(self) -> None:
        """On a GPU, where it can be done: make the calls one graph."""
        if self.kind == "cpu":
            return
        self.graph, graph = None, torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gc.disable()  # a graph that is collected during a capture ends it
        try:
            with torch.cuda.graph(graph):
                self._call()
        except RuntimeError:  # it reads a result on the host, for one
            torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that failed stays on its own
            torch.cuda.synchronize()
            return
        finally:
            gc.enable()
        self.graph = graph
        self.run()


def interleaved(batches: Mapping[str, Batch], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds a call, by name, one for each round: the geometric mean of its two batches in that round.

    In a round everyone runs once in a random order and once in the reverse, so that a drifting clock and the neighbour
    before weigh on all alike.
    """
    order, shuffle = list(batches), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        marks = [(name, batches[name].run()) for name in (*order, *reversed(order))]
        took = [(name, seconds_between(*both) / batches[name].calls * 1e6) for name, both in marks]
        for name in order:
            first, second = (us for other, us in took if other == name)
            times[name].append(math.sqrt(first * second))
    return times
