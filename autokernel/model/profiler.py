"""Where a model's device time goes: measured node by node on its graphs, added up by site, and elsewhere by operator.

All of a pass is accounted for: what no site covers has a reason, be it in a graph or in none. The pass is the model's own,
untouched: where a captured graph does other work (untouched.py), that is said, and its time is none of the model's.

What a kernel has to beat is what a user would deploy: for each site, the faster of eager mode and of what torch.compile
makes of the same nodes.
"""

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.profiler import ProfilerActivity, profile, record_function

from autokernel.common.stderr import diverted, results_alone
from autokernel.hardware.device import Device
from autokernel.hardware.roofline import Roofline
from autokernel.hardware.threads import COMPILED_HERE
from autokernel.model import untouched
from autokernel.model.agreement import extract_subgraph, inputs_of
from autokernel.model.breaks import reason
from autokernel.model.capture import IN_GRAPH, OUTSIDE, Capture, capture, compile_model
from autokernel.model.hotspots import Hotspot, ModelProfile, WorkloadPass
from autokernel.model.match import Refusal, RegionFinder, SiteFinder
from autokernel.model.options import ITERATIONS, WARMUP
from autokernel.model.patterns import Site
from autokernel.model.user_code import WorkloadError, user_code
from autokernel.model.workload import Workload
from autokernel.spec import Case, KernelSpec, load_spec
from autokernel.target import encoded

PREFIX = "autokernel:"  # of the ranges that mark nodes in a trace
WHOLE = "autokernel pass"  # the range of one pass
PASSES_S = 2.0  # for the latter, of a model whose pass is slow
OWN_KERNELS = "kernels of the model's own"  # that are launched by no operator
UNKNOWN = "Dynamo leaves it out, and says no reason"


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
class _Calls:
    """The calls of one operator, on arguments of one kind, in one pass that are in no graph, for one reason."""

    call: untouched.Call
    why: str
    calls: float
    time_us: float


# What runs in a captured model: a node (of a graph, its name), or what is in no graph (of a call, the reason).
Part = tuple[int, str] | tuple[untouched.Call, str]


@dataclass(frozen=True)
class _Measured:
    """One part of the workload: its graphs, what was found in them, and the time of each part in one untouched pass."""

    workload: Workload
    weight: float
    latency_us: float
    captured: Capture
    sites: list[list[Site]]  # of each graph
    refusals: list[list[Refusal]]
    shared: untouched.SharedOut[Part]
    outside: tuple[_Calls, ...]

    @property
    def device_time_us(self) -> float:
        return sum(self.shared.times.values()) + sum(self.shared.rest.values())

    @property
    def uncaptured_us(self) -> float:
        return sum(self.shared.times[calls.call, calls.why] for calls in self.outside)

    @property
    def differs(self) -> str:
        of_part = f" of {self.workload.name}" if self.workload.name else ""
        return untouched.in_words(self.shared, self.device_time_us, of_part)

    def calls(self, graph: int) -> float:
        return self.weight * self.captured.graphs[graph].calls


@results_alone()
def profile_workload(
    workload: Workload,
    warmup: int | None = None,
    iterations: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    trace: Path | None = None,
    baseline: str = "best",
    log: Path | None = None,
    regions: RegionFinder | None = None,
) -> ModelProfile:
    """Load, capture and measure. `say` gets a line per step; `trace` names a file for the profiler's Chrome trace,
    `log` one for what PyTorch's profiler and compiler print.

    warmup, iterations: how often a pass runs before it is measured, and while (default: 3 and 10; a slow one PASSES_S in
    all, at least 1 and 3).
    baseline: what kernels are held against (see options.BASELINES); without a working torch.compile it is eager.
    regions: makes kernel types of what no named one covers, see regions.growing.region_finder().
    """
    say("loading the model")
    model, _, _ = workload.load()
    device = torch.device(workload.device)
    finder = SiteFinder(regions=regions)
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        measured = [
            _measure(model, part, weight, finder, (warmup, iterations), say, trace, log) for part, weight in workload.parts
        ]
        if not any(m.device_time_us for m in measured):
            raise WorkloadError(
                f"a pass of {workload.class_name} runs no operation on tensors: there is nothing to make faster"
            )
        if baseline != "eager":
            with torch._inductor.config.patch(COMPILED_HERE):
                baseline = baseline if _can_compile(device, log) else "eager"
        examples = {_key(site): (m.captured.graphs[i].module, site) for m, i, site in _sites(measured)}
        ratios: dict[Any, float] = {}
        not_compiled: list[str] = []
        if baseline != "eager":
            say("measuring what torch.compile makes of each operation")
            with torch._inductor.config.patch(COMPILED_HERE):
                ratios, not_compiled = _compiled_over_eager(examples, device, *_repeats(warmup, iterations), log)
    peaks = Device.detect(device)
    hotspots = _hotspots(measured, ratios, baseline, peaks)
    if peaks.measured and any(h.headroom and h.headroom < 1 for h in hotspots):
        say("measuring the device's peaks again: some operations are faster, so other work had its share of it then")
        hotspots = _hotspots(measured, ratios, baseline, Device.detect(device, again=True))
    return ModelProfile(
        workload,
        workload.device,
        peaks.name,
        sum(m.weight * m.latency_us for m in measured),
        sum(m.weight * m.device_time_us for m in measured),
        sum(len(m.captured.graphs) for m in measured),
        tuple(dict.fromkeys(why for m in measured for why in m.captured.breaks)),
        hotspots,
        baseline,
        tuple(WorkloadPass(m.workload.name, m.weight, m.latency_us, m.device_time_us, m.uncaptured_us) for m in measured),
        tuple(dict.fromkeys((*finder.failures, *not_compiled))),
        tuple(filter(None, (m.differs for m in measured))),
        workload.not_given(model),
    )


def _measure(
    model: nn.Module,
    workload: Workload,
    weight: float,
    finder: SiteFinder,
    repeats: tuple[int | None, int | None],
    say: Callable[[str], None],
    trace: Path | None,
    log: Path | None,
) -> _Measured:
    of_part = f" of {workload.name}" if workload.name else ""
    device = torch.device(workload.device)
    args, kwargs = workload.inputs(model, workload.seed)
    workload.try_pass(model, args, kwargs)
    say(f"measuring one pass{of_part}")
    outside: list[_Calls] = []
    with user_code(f"a pass of {workload.class_name} failed after one that did not", among_ours=True):
        fit = int(PASSES_S * 1e6 / _latency_us(lambda: model(*args, **kwargs), device, 0, 1))
        warmup, iterations = _repeats(*repeats, fit)
        latency_us = _latency_us(lambda: model(*args, **kwargs), device, warmup, iterations)
        with diverted(log):
            found = _calls(lambda: model(*args, **kwargs), device, warmup, iterations)
            spent = _added((calls.call, calls.time_us) for calls in found)
        say(f"capturing the graphs{of_part}")
        with diverted(log):
            captured = capture(model, args, kwargs, lambda run: outside.extend(_calls(run, device, warmup, iterations)))
    say(f"finding the operations that kernels can compute{of_part}")
    with diverted(log):
        answers = [finder.examine(graph.module) for graph in captured.graphs]
    say(f"measuring each operation{of_part}")
    path = trace and trace.with_stem(f"{trace.stem}-{workload.name}" if workload.name else trace.stem)
    with diverted(log):
        parts: dict[Part, dict[untouched.Call, float]] = _node_times_us(captured, device, warmup, iterations, path)
    parts |= {(calls.call, calls.why): {calls.call: calls.time_us} for calls in outside}
    sites, refusals = [found for found, _ in answers], [refused for _, refused in answers]
    shared = untouched.share_out(parts, spent)
    return _Measured(workload, weight, latency_us, captured, sites, refusals, shared, tuple(outside))


def _repeats(warmup: int | None, iterations: int | None, fit: int = ITERATIONS) -> tuple[int, int]:
    """How often to run before something is measured, and while: as asked for, else as often as fits."""
    return max(1, min(WARMUP, fit // 3)) if warmup is None else warmup, iterations or max(3, min(ITERATIONS, fit))


def _calls(run: Callable[[], Any], device: torch.device, warmup: int, iterations: int) -> Iterator[_Calls]:
    """What the operators outside of captured graphs take of one pass: medians over the iterations."""
    for _ in range(warmup):
        run()
    with _profiler(device) as trace:
        for _ in range(iterations):
            with record_function(WHOLE):
                run()
    found: dict[tuple[untouched.Call, str], list[tuple[int, float]]] = defaultdict(list)  # calls and µs, pass by pass
    for one_pass in (event for event in _ranges(trace) if event.name == WHOLE):
        times: dict[tuple[untouched.Call, str], list[float]] = defaultdict(list)
        for call, us, why in _under(one_pass, UNKNOWN, device):
            times[call, why].append(us)
        for key, each in times.items():
            found[key].append((len(each), sum(each)))
    for (call, why), passes in found.items():
        calls, us = zip(*passes, *[(0, 0.0)] * (iterations - len(passes)))
        if total := statistics.median(us):
            yield _Calls(call, why, statistics.median(calls), total)


def _under(event: Any, why: str, device: torch.device) -> Iterator[tuple[untouched.Call, float, str]]:
    """The outermost operators that run in no graph under a range of a trace, their µs, and the reason of the range.

    And the kernels of a GPU that no operator launched: a model's own.
    """
    if own := sum(k.duration for k in event.kernels if k.name != event.name):  # of its name: the range itself, on the GPU
        yield (OWN_KERNELS, ""), own, why
    for child in event.cpu_children:  # of a range: of ours, of a region that was compiled, of a lookup
        if "::" in child.name:
            operator = child.name.removesuffix("_")  # in place or not: a graph may have it in the other form (in_place.py)
            yield (operator, f"{child.input_shapes} {child.concrete_inputs}"), _event_us(child, device), why
        elif child.name != IN_GRAPH:
            is_outside = child.name.startswith(OUTSIDE)
            yield from _under(child, child.name.removeprefix(OUTSIDE) if is_outside else why, device)


def _added(times: Iterable[tuple[untouched.Call, float]]) -> dict[untouched.Call, float]:
    added: dict[untouched.Call, float] = defaultdict(float)
    for call, us in times:
        added[call] += us
    return added


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
) -> dict[tuple[int, str], dict[untouched.Call, float]]:
    """(graph, node) -> device time of each of its operators in one pass: medians over the iterations, times the calls."""
    graphs = [_MarkedInterpreter(captured, i) for i in range(len(captured.graphs))]

    def one_pass() -> None:
        for interpreter, graph in zip(graphs, captured.graphs):
            interpreter.run(*graph.inputs)

    for _ in range(warmup):
        one_pass()
    with _profiler(device) as run:
        for _ in range(iterations):
            one_pass()
    if trace:
        run.export_chrome_trace(str(trace))
    durations: dict[str, dict[untouched.Call, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in _ranges(run):
        if event.name.startswith(PREFIX):
            once = _added((call, us) for call, us, _ in _under(event, "", device))
            for call, us in once.items():
                durations[event.name.removeprefix(PREFIX)][call].append(us)
    found = {}
    for name, calls in durations.items():
        graph, _, node = name.partition(":")
        times = captured.graphs[int(graph)].calls
        found[int(graph), node] = {call: statistics.median(us) * times for call, us in calls.items()}
    return found


def _profiler(device: torch.device) -> AbstractContextManager[Any]:
    on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True, record_shapes=True)


def _sites(measured: list[_Measured]) -> Iterator[tuple[_Measured, int, Site]]:
    return ((m, i, site) for m in measured for i, found in enumerate(m.sites) for site in found)


def _key(site: Site) -> tuple[str, str]:
    return site.kernel_type, encoded(site.case)


def _hotspots(
    measured: list[_Measured], compiled_over_eager: dict[Any, float], baseline: str, device: Device
) -> tuple[Hotspot, ...]:
    """Sites first, by what a perfect kernel would save of the baseline's time; then the rest, by its time."""
    total = sum(m.weight * m.device_time_us for m in measured)
    left = {id(m): dict(m.shared.times) for m in measured}
    by_case: dict[Any, list[tuple[_Measured, int, Site]]] = defaultdict(list)
    for m, i, site in _sites(measured):
        by_case[_key(site)].append((m, i, site))
    found = []
    for key, same in by_case.items():
        nodes = [(m, (i, node.name)) for m, i, site in same for node in site.nodes]
        graph_us = sum(m.weight * m.shared.as_captured.get(part, 0.0) for m, part in nodes)
        us = sum(m.weight * left[id(m)].pop(part, 0.0) for m, part in nodes)
        calls = sum(m.calls(i) for m, i, _ in same)
        kernel_type, case = same[0][2].kernel_type, same[0][2].case
        bound, limit_us = limit(load_spec(kernel_type), case, device)
        compiled_us = us * compiled_over_eager[key] if key in compiled_over_eager else None
        to_beat = {"eager": us, "compile": compiled_us or us, "best": min(us, compiled_us or us)}[baseline]
        variants = tuple({encoded(variant): variant for _, _, s in same for variant in s.variants}.values())
        times = limit_us * calls, compiled_us, to_beat, variants
        found.append(Hotspot(case.name, calls, us, us / total, kernel_type, case, bound, *times, graph_us=graph_us))
    rest = [h for m in measured for h in _operators(m, left[id(m)])]
    return tuple((*sorted(found, key=lambda h: -h.removable_us), *sorted(_merged(rest, total), key=lambda h: -h.time_us)))


def _operators(measured: _Measured, times: dict[Part, float]) -> Iterator[Hotspot]:
    """What is in no site, by node, of all that the untouched model spends time in; `share` is left to _merged()."""
    targets = [{n.name: _named(n.target) for n in graph.module.graph.nodes} for graph in measured.captured.graphs]
    reasons = [_reasons(refusals) for refusals in measured.refusals]
    outside = {(calls.call, calls.why): calls for calls in measured.outside}
    for part, us in times.items():
        if calls := outside.get(part):
            name, count = calls.call[0], measured.weight * calls.calls
            yield Hotspot(name, count, measured.weight * us, 0, why=calls.why, captured=False)
        elif us:
            i, node = part
            yield Hotspot(targets[i][node], measured.calls(i), measured.weight * us, 0, why=reasons[i].get(node, ""))
    for name, us in measured.shared.rest.items():
        yield Hotspot(name, measured.weight, measured.weight * us, 0)


def _named(target: Any) -> str:
    """An operator, a method, or a function."""
    return str(target) if isinstance(target, (str, OpOverload)) else getattr(target, "__name__", str(target))


def _reasons(refusals: Iterable[Refusal]) -> dict[str, str]:
    """Why the nodes that read like part of an operation are in no site of it; some read like several."""
    words: dict[str, list[str]] = defaultdict(list)
    for refusal in refusals:
        for node in refusal.nodes:
            words[node.name].append(f"not taken for {refusal.kernel_type}: {refusal.why.value}")
    return {name: "; ".join(dict.fromkeys(whys)) for name, whys in words.items()}


def _merged(hotspots: Iterable[Hotspot], total: float) -> Iterator[Hotspot]:
    alike: dict[tuple[str, str, bool], list[Hotspot]] = defaultdict(list)
    for h in hotspots:
        alike[h.name, h.why, h.captured].append(h)
    for (name, why, captured), same in alike.items():
        us = sum(h.time_us for h in same)
        yield Hotspot(name, sum(h.calls for h in same), us, us / total, baseline_us=us, why=why, captured=captured)


def _can_compile(device: torch.device, log: Path | None) -> bool:
    """Whether torch.compile works here: it needs a compiler, and headers."""
    try:
        with diverted(log):
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception:  # of many kinds, from Inductor, Triton or the compiler itself
        return False
    return True


def _compiled_over_eager(
    examples: dict[Any, tuple[GraphModule, Site]], device: torch.device, warmup: int, iterations: int, log: Path | None
) -> tuple[dict[Any, float], list[str]]:
    """What is run for each site -> time as Inductor writes it, over that in eager mode: both by themselves, in turns.

    And why there is none for a site, which then has its time in eager mode to beat.
    """
    torch._dynamo.reset()
    ways: list[tuple[Callable[..., Any], list[Any], str]] = []
    failures: list[str] = []
    for index, (graph, site) in enumerate(examples.values()):
        given = [v for v in dict.fromkeys(site.parameters.values()) if isinstance(v, Node)]
        piece, inputs = extract_subgraph(graph, [*site.outputs], given, wide=False), inputs_of(site, given)
        try:
            with diverted(log):
                compiled = torch._dynamo.lookup_backend("inductor")(piece, inputs)
                compiled(*inputs)
        except Exception as error:  # of any kind, from Inductor, Triton or the compiler itself
            failures.append(f"torch.compile of {site.kernel_type} {site.case.name}: {reason(error)}")
            continue
        ways += [(piece, inputs, f"{PREFIX}eager:{index}"), (compiled, inputs, f"{PREFIX}compiled:{index}")]
    durations: dict[str, list[float]] = defaultdict(list)
    for repeats, run in ((warmup, nullcontext()), (iterations, _profiler(device))):
        with diverted(log), run as trace:
            for call, inputs, name in ways * repeats:
                with record_function(name):
                    call(*inputs)
    for event in _ranges(trace):
        if event.name.startswith(PREFIX):
            durations[event.name.removeprefix(PREFIX)].append(_event_us(event, device))
    medians = {name: statistics.median(us) for name, us in durations.items()}
    measured = {key: (medians.get(f"compiled:{i}"), medians.get(f"eager:{i}")) for i, key in enumerate(examples)}
    return {key: compiled / eager for key, (compiled, eager) in measured.items() if compiled and eager}, failures


def limit(spec: KernelSpec, case: Case, device: Device) -> tuple[str, float]:
    """What bounds a call, "memory" or "compute", and its least time in µs: its FLOPs or its bytes at the peak rate."""
    roofline = Roofline.of(device, case.dtype, spec.flops(case.args), spec.bytes_moved(case.args))
    return roofline.bottleneck, roofline.floor_s * 1e6


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
        compile_model(model)(*args, **kwargs)
    for logger in loggers:
        logger.removeHandler(handler)
    torch._logging.set_logs()
