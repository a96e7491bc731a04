"""Where a model's device time goes: measured node by node on its graphs, added up by site, and elsewhere by operator."""

import json
import logging
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.profiler import ProfilerActivity, profile, record_function

from autokernel.capture import Capture, capture
from autokernel.device import Device
from autokernel.match import Site, SiteFinder
from autokernel.spec import Case, KernelSpec, load_spec
from autokernel.target import decode_case, encode, encoded, write_json
from autokernel.workload import Workload

PREFIX = "autokernel:"  # of the ranges that mark nodes in a trace


@dataclass(frozen=True)
class Hotspot:
    """All calls of one case in one pass; outside of sites (`kernel_type` None), all calls of one operator."""

    name: str
    calls: int
    time_us: float  # of all calls
    share: float  # of the model's device time, 0..1
    kernel_type: str | None = None
    case: Case | None = None
    bound: str | None = None  # "memory" | "compute"
    limit_us: float | None = None  # what all calls would take at the device's peak

    @property
    def headroom(self) -> float | None:
        """Measured time over the time at the peak: how much faster a perfect kernel would be."""
        return self.limit_us and self.time_us / self.limit_us


@dataclass(frozen=True)
class ModelProfile:
    """One pass of a workload on one device. `hotspots`, the costliest first, are all of its time: shares sum to 1."""

    workload: Workload
    device: str  # as PyTorch knows it: "cuda:1"
    device_name: str
    latency_us: float  # median wall time of one pass, eager
    device_time_us: float  # sum over the nodes
    graphs: int
    graph_breaks: tuple[str, ...]
    hotspots: tuple[Hotspot, ...]

    @cached_property
    def sites(self) -> tuple[Hotspot, ...]:
        return tuple(h for h in self.hotspots if h.kernel_type)

    def write(self, path: Path) -> None:
        write_json(path, encode(self) | {"workload": self.workload.to_json()})

    @staticmethod
    def read(path: Path) -> "ModelProfile":
        data = json.loads(path.read_text())
        hotspots = tuple(Hotspot(**h | {"case": h["case"] and decode_case(h["case"])}) for h in data["hotspots"])
        workload = Workload.from_json(data["workload"])
        return ModelProfile(
            **data | {"workload": workload, "hotspots": hotspots, "graph_breaks": tuple(data["graph_breaks"])}
        )


class _MarkedInterpreter(Interpreter):
    """Runs a graph node by node, each inside a range of the profiler."""

    def __init__(self, capture: Capture, index: int):
        super().__init__(capture.graphs[index].module)
        self.index = index

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with record_function(f"{PREFIX}{self.index}:{n.name}"):
            return super().run_node(n)


def profile_workload(
    workload: Workload,
    warmup: int = 3,
    iterations: int = 10,
    say: Callable[[str], None] = lambda _: None,
    trace: Path | None = None,
) -> ModelProfile:
    """Load, capture and measure. `say` gets a line per step; `trace` names a file for the profiler's Chrome trace."""
    say("loading the model")
    model, args, kwargs = workload.load()
    device = torch.device(workload.device)
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        say("measuring one pass")
        latency_us = _latency_us(lambda: model(*args, **kwargs), device, warmup, iterations)
        say("capturing its graphs")
        captured = capture(model, args, kwargs)
        say("finding the operations that kernels can compute")
        finder = SiteFinder()
        sites = [finder.find(graph.module) for graph in captured.graphs]
        say("measuring each operation")
        times = _node_times_us(captured, device, warmup, iterations, trace)
    return ModelProfile(
        workload,
        workload.device,
        Device.detect(device).name,
        latency_us,
        sum(times.values()),
        len(captured.graphs),
        captured.breaks,
        _hotspots(captured, sites, times, Device.detect(device)),
    )


def _latency_us(call: Callable[[], Any], device: torch.device, warmup: int, iterations: int) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(warmup + iterations):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[warmup:]) * 1e6


def _node_times_us(
    captured: Capture, device: torch.device, warmup: int, iterations: int, trace: Path | None
) -> dict[tuple[int, str], float]:
    """(graph, node) -> device time of its calls in one pass: the median over the iterations, times the graph's calls."""
    graphs = [_MarkedInterpreter(captured, i) for i in range(len(captured.graphs))]

    def one_pass() -> None:
        for interpreter, graph in zip(graphs, captured.graphs):
            interpreter.run(*graph.inputs)

    for _ in range(warmup):
        one_pass()
    with _silenced_stderr(), _profiler(device) as run:
        for _ in range(iterations):
            one_pass()
    if trace:
        run.export_chrome_trace(str(trace))
    durations = defaultdict(list)
    for event in run.events():
        if event.name.startswith(PREFIX) and event.device_type == torch.autograd.DeviceType.CPU:
            on_device = event.device_time_total if device.type == "cuda" else event.cpu_time_total
            durations[event.name.removeprefix(PREFIX)].append(on_device)
    calls = [graph.calls for graph in captured.graphs]
    keys = {name: (int(name.split(":")[0]), name.split(":")[1]) for name in durations}
    return {keys[name]: statistics.median(us) * calls[keys[name][0]] for name, us in durations.items()}


def _profiler(device: torch.device) -> AbstractContextManager[Any]:
    on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True)


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """The profiler's C++ parts write lines of their own to file descriptor 2, whatever the log level."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _hotspots(
    captured: Capture, sites: list[list[Site]], times: dict[tuple[int, str], float], device: Device
) -> tuple[Hotspot, ...]:
    total = sum(times.values())
    hotspots, left = [], dict(times)
    by_case: dict[Any, list[tuple[int, Site]]] = defaultdict(list)
    for i, found in enumerate(sites):
        for site in found:
            by_case[site.kernel_type, encoded(site.case)].append((i, site))
    for same in by_case.values():
        us = sum(left.pop((i, node.name), 0.0) for i, site in same for node in site.nodes)
        calls = sum(captured.graphs[i].calls for i, _ in same)
        first = same[0][1]
        bound, limit_us = limit(load_spec(first.kernel_type), first.case, device)
        hotspots.append(
            Hotspot(first.case.name, calls, us, us / total, first.kernel_type, first.case, bound, limit_us * calls)
        )
    return tuple(sorted((*hotspots, *_operators(captured, left, total)), key=lambda h: -h.time_us))


def _operators(captured: Capture, times: dict[tuple[int, str], float], total: float) -> Iterable[Hotspot]:
    by_operator: dict[str, list[tuple[int, float]]] = defaultdict(list)
    targets = [{node.name: str(node.target) for node in graph.module.graph.nodes} for graph in captured.graphs]
    for (i, node), us in times.items():
        by_operator[targets[i][node]].append((captured.graphs[i].calls, us))
    for operator, costs in by_operator.items():
        us = sum(us for _, us in costs)
        yield Hotspot(operator, sum(calls for calls, _ in costs), us, us / total)


def limit(spec: KernelSpec, case: Case, device: Device) -> tuple[str, float]:
    """What bounds a call, "memory" or "compute", and its least time in µs: its FLOPs or its bytes at the peak rate."""
    memory_us = spec.bytes_moved(case.args) / device.peak_bandwidth_gb_s / 1e3
    compute_us = spec.flops(case.args) / device.peak_tflops(case.dtype) / 1e6
    return ("compute", compute_us) if compute_us > memory_us else ("memory", memory_us)


def snapshot_memory(workload: Workload, path: Path) -> None:
    """Every allocation of one pass on a GPU, with stack traces, for https://pytorch.org/memory_viz."""
    model, args, kwargs = workload.load()
    torch.cuda.memory._record_memory_history()
    with torch.no_grad():
        model(*args, **kwargs)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def log_compilation(workload: Workload, path: Path) -> None:
    """What torch.compile says while it compiles the model: graph breaks, recompilations, the code that it generates."""
    model, args, kwargs = workload.load()
    handler = logging.FileHandler(path, mode="w")
    torch._logging.set_logs(graph_breaks=True, recompiles=True, output_code=True)
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor", "torch.__graph_breaks")]
    for logger in loggers:
        logger.addHandler(handler)
    with torch.no_grad():
        torch.compile(model)(*args, **kwargs)
    for logger in loggers:
        logger.removeHandler(handler)
    torch._logging.set_logs()
