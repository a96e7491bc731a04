"""Where a model's device time goes: measured node by node on its graphs, added up by site, and elsewhere by operator.

What a kernel has to beat is what a user would deploy: for each site, the faster of eager mode and of what torch.compile
makes of the same nodes.
"""

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
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.profiler import ProfilerActivity, profile, record_function

from autokernel.capture import IN_GRAPH, Capture, capture, value
from autokernel.device import Device
from autokernel.match import Refusal, Site, SiteFinder, WhyNot, cut, filled
from autokernel.spec import Case, KernelSpec, load_spec
from autokernel.target import decode_case, encode, encoded, write_json
from autokernel.workload import Workload

PREFIX = "autokernel:"  # of the ranges that mark nodes in a trace
WHOLE = "autokernel pass"  # the range of one pass
BASELINES = ("eager", "compile", "best")
UNCAPTURED = "outside of the captured graphs"


@dataclass(frozen=True)
class Hotspot:
    """All calls of one case in one pass; outside of sites (`kernel_type` None), all calls of one operator.

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

    @property
    def headroom(self) -> float | None:
        """The baseline's time over the time at the peak: how much faster a perfect kernel would be."""
        return self.limit_us and self.baseline_us / self.limit_us

    @property
    def removable_us(self) -> float:
        """What a perfect kernel would save of the baseline's time."""
        return max(self.baseline_us - self.limit_us, 0)


@dataclass(frozen=True)
class Refused:
    """Calls that look like an operation for which there are kernels, and why they are none."""

    kernel_type: str
    why: str
    calls: float


@dataclass(frozen=True)
class Pass:
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
    device_time_us: float  # sum over the nodes
    graphs: int
    graph_breaks: tuple[str, ...]
    hotspots: tuple[Hotspot, ...]
    baseline: str = "eager"  # one of BASELINES
    passes: tuple[Pass, ...] = ()
    refused: tuple[Refused, ...] = ()

    @cached_property
    def sites(self) -> tuple[Hotspot, ...]:
        return tuple(h for h in self.hotspots if h.kernel_type)

    @property
    def uncaptured(self) -> float:
        """Share of the time that is in no graph."""
        return sum(h.share for h in self.hotspots if h.name == UNCAPTURED)

    def write(self, path: Path) -> None:
        write_json(path, encode(self) | {"workload": self.workload.to_json()})

    @staticmethod
    def read(path: Path) -> "ModelProfile":
        data = json.loads(path.read_text())
        read = {
            "workload": Workload.from_json(data["workload"]),
            "hotspots": tuple(map(_decode_hotspot, data["hotspots"])),
            "graph_breaks": tuple(data["graph_breaks"]),
            "passes": tuple(Pass(**p) for p in data["passes"]),
            "refused": tuple(Refused(**r) for r in data["refused"]),
        }
        return ModelProfile(**data | read)


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


@dataclass(frozen=True)
class _Measured:
    """One part of the workload: its graphs, what was found in them, and the device time of each node in one pass."""

    workload: Workload
    weight: float
    latency_us: float
    captured: Capture
    sites: list[list[Site]]  # of each graph
    refusals: list[list[Refusal]]
    times: dict[tuple[int, str], float]  # (graph, node) -> µs
    uncaptured_us: float

    @property
    def device_time_us(self) -> float:
        return sum(self.times.values()) + self.uncaptured_us

    def calls(self, graph: int) -> float:
        return self.weight * self.captured.graphs[graph].calls


def profile_workload(
    workload: Workload,
    warmup: int = 3,
    iterations: int = 10,
    say: Callable[[str], None] = lambda _: None,
    trace: Path | None = None,
    baseline: str = "best",
) -> ModelProfile:
    """Load, capture and measure. `say` gets a line per step; `trace` names a file for the profiler's Chrome trace.

    baseline: what kernels are held against (see BASELINES); without a working torch.compile it is eager.
    """
    say("loading the model")
    model, _, _ = workload.load()
    device, finder = torch.device(workload.device), SiteFinder()
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        measured = [
            _measure(model, part, weight, finder, (warmup, iterations), say, trace) for part, weight in workload.parts
        ]
        if baseline != "eager" and not _can_compile(device):
            baseline = "eager"
        examples = {_key(site): (m.captured.graphs[i].module, site) for m, i, site in _sites(measured)}
        ratios: dict[Any, float] = {}
        if baseline != "eager":
            say("measuring what torch.compile makes of each operation")
            ratios = _compiled_over_eager(examples, device, warmup, iterations)
            torch._inductor.async_compile.shutdown_compile_workers()  # they would stay, beside all that is timed later
    return ModelProfile(
        workload,
        workload.device,
        Device.detect(device).name,
        sum(m.weight * m.latency_us for m in measured),
        sum(m.weight * m.device_time_us for m in measured),
        sum(len(m.captured.graphs) for m in measured),
        tuple(dict.fromkeys(why for m in measured for why in m.captured.breaks)),
        _hotspots(measured, ratios, baseline, Device.detect(device)),
        baseline,
        tuple(Pass(m.workload.name, m.weight, m.latency_us, m.device_time_us, m.uncaptured_us) for m in measured),
        _refused(measured),
    )


def _measure(
    model: nn.Module,
    workload: Workload,
    weight: float,
    finder: SiteFinder,
    repeats: tuple[int, int],
    say: Callable[[str], None],
    trace: Path | None,
) -> _Measured:
    of_part = f" of {workload.name}" if workload.name else ""
    device, (warmup, iterations) = torch.device(workload.device), repeats
    args, kwargs = workload.inputs(model, workload.seed)
    say(f"measuring one pass{of_part}")
    latency_us = _latency_us(lambda: model(*args, **kwargs), device, warmup, iterations)
    say(f"capturing the graphs{of_part}")
    outside: list[float] = []
    captured = capture(model, args, kwargs, lambda run: outside.append(_outside_us(run, device, warmup, iterations)))
    say(f"finding the operations that kernels can compute{of_part}")
    answers = [finder.examine(graph.module) for graph in captured.graphs]
    say(f"measuring each operation{of_part}")
    path = trace and trace.with_stem(f"{trace.stem}-{workload.name}" if workload.name else trace.stem)
    times = _node_times_us(captured, device, warmup, iterations, path)
    sites, refusals = [found for found, _ in answers], [refused for _, refused in answers]
    return _Measured(workload, weight, latency_us, captured, sites, refusals, times, outside[0])


def _outside_us(run: Callable[[], Any], device: torch.device, warmup: int, iterations: int) -> float:
    """Device time of one pass that operators outside of the captured graphs take."""
    for _ in range(warmup):
        run()
    with _silenced_stderr(), _profiler(device) as trace:
        for _ in range(iterations):
            with record_function(WHOLE):
                run()

    def outside(event: Any) -> float:
        if event.name == IN_GRAPH:
            return 0
        if "::" not in event.name:  # a range: a region that was compiled, a lookup
            return sum(map(outside, event.cpu_children))
        return _event_us(event, device)

    return statistics.median(sum(map(outside, e.cpu_children)) for e in _ranges(trace) if e.name == WHOLE)


def _ranges(trace: Any) -> Iterator[Any]:
    """The profiler's events on the host."""
    return (event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CPU)


def _event_us(event: Any, device: torch.device) -> float:
    return event.device_time_total if device.type == "cuda" else event.cpu_time_total


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
    for event in _ranges(run):
        if event.name.startswith(PREFIX):
            durations[event.name.removeprefix(PREFIX)].append(_event_us(event, device))
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


def _sites(measured: list[_Measured]) -> Iterator[tuple[_Measured, int, Site]]:
    return ((m, i, site) for m in measured for i, found in enumerate(m.sites) for site in found)


def _key(site: Site) -> tuple[str, str]:
    return site.kernel_type, encoded(site.case)


def _decode_hotspot(data: dict[str, Any]) -> Hotspot:
    case = data["case"] and decode_case(data["case"])
    return Hotspot(**data | {"case": case, "variants": tuple(map(decode_case, data["variants"]))})


def _hotspots(
    measured: list[_Measured], compiled_over_eager: dict[Any, float], baseline: str, device: Device
) -> tuple[Hotspot, ...]:
    """Sites first, by what a perfect kernel would save of the baseline's time; then the rest, by its time."""
    total = sum(m.weight * m.device_time_us for m in measured)
    left = {id(m): dict(m.times) for m in measured}
    by_case: dict[Any, list[tuple[_Measured, int, Site]]] = defaultdict(list)
    for m, i, site in _sites(measured):
        by_case[_key(site)].append((m, i, site))
    found = []
    for key, same in by_case.items():
        us = sum(m.weight * left[id(m)].pop((i, node.name), 0.0) for m, i, site in same for node in site.nodes)
        calls = sum(m.calls(i) for m, i, _ in same)
        kernel_type, case = same[0][2].kernel_type, same[0][2].case
        bound, limit_us = limit(load_spec(kernel_type), case, device)
        compiled_us = us * compiled_over_eager[key] if key in compiled_over_eager else None
        to_beat = {"eager": us, "compile": compiled_us or us, "best": min(us, compiled_us or us)}[baseline]
        variants = tuple({encoded(variant): variant for _, _, s in same for variant in s.variants}.values())
        times = limit_us * calls, compiled_us, to_beat
        spot = Hotspot(case.name, calls, us, us / total, kernel_type, case, bound, *times, variants)
        found.append(spot)
    rest = [h for m in measured for h in _operators(m, left[id(m)])]
    return tuple((*sorted(found, key=lambda h: -h.removable_us), *sorted(_merged(rest, total), key=lambda h: -h.time_us)))


def _operators(measured: _Measured, times: dict[tuple[int, str], float]) -> Iterator[Hotspot]:
    """What is in no site, by node; `share` is left to _merged()."""
    targets = [{node.name: str(node.target) for node in graph.module.graph.nodes} for graph in measured.captured.graphs]
    for (i, node), us in times.items():
        yield Hotspot(targets[i][node], measured.calls(i), measured.weight * us, 0)
    if measured.uncaptured_us:
        yield Hotspot(UNCAPTURED, measured.weight, measured.weight * measured.uncaptured_us, 0)


def _merged(hotspots: Iterable[Hotspot], total: float) -> Iterator[Hotspot]:
    by_name: dict[str, list[Hotspot]] = defaultdict(list)
    for hotspot in hotspots:
        by_name[hotspot.name].append(hotspot)
    for name, same in by_name.items():
        us = sum(h.time_us for h in same)
        yield Hotspot(name, sum(h.calls for h in same), us, us / total, baseline_us=us)


def _refused(measured: list[_Measured]) -> tuple[Refused, ...]:
    calls: dict[tuple[str, WhyNot], float] = defaultdict(float)
    for m in measured:
        for i, refusals in enumerate(m.refusals):
            for refusal in refusals:
                calls[refusal.kernel_type, refusal.why] += m.calls(i)
    return tuple(Refused(kernel_type, why.value, count) for (kernel_type, why), count in calls.items())


def _can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here: it needs a compiler, and headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception:  # of many kinds, from Inductor, Triton or the compiler itself
        return False
    return True


def _compiled_over_eager(
    examples: dict[Any, tuple[GraphModule, Site]], device: torch.device, warmup: int, iterations: int
) -> dict[Any, float]:
    """What is run for each site -> time as Inductor writes it, over that in eager mode: both by themselves, in turns."""
    torch._dynamo.reset()
    ways: list[tuple[Callable[..., Any], list[Any], str]] = []
    for index, (graph, site) in enumerate(examples.values()):
        given = [v for v in dict.fromkeys(site.parameters.values()) if isinstance(v, Node)]
        piece, inputs = cut(graph, [site.output], given, wide=False), [filled(value(node)) for node in given]
        with _silenced_stderr():  # of warnings
            compiled = torch._dynamo.lookup_backend("inductor")(piece, inputs)
        ways += [(piece, inputs, f"{PREFIX}eager:{index}"), (compiled, inputs, f"{PREFIX}compiled:{index}")]
    durations: dict[str, list[float]] = defaultdict(list)
    for repeats, run in ((warmup, nullcontext()), (iterations, _profiler(device))):
        with _silenced_stderr(), run as trace:
            for call, inputs, name in ways * repeats:
                with record_function(name):
                    call(*inputs)
    for event in _ranges(trace):
        if event.name.startswith(PREFIX):
            durations[event.name.removeprefix(PREFIX)].append(_event_us(event, device))
    medians = {name: statistics.median(us) for name, us in durations.items()}
    return {key: medians[f"compiled:{i}"] / medians[f"eager:{i}"] for i, key in enumerate(examples)}


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
