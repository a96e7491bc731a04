"""Where a graph computes what a kernel computes: patterns given as example code, matches proven by experiment.

A pattern is a way in which models write a kernel type's operation, a plain PyTorch function; `kernels/<type>/patterns.py`
lists them. It is traced like a model, and found in the model's graph by a small backtracking search that is deliberately
lenient: sizes, dims and dtypes match anything. What it finds becomes a site only when the model's own nodes and the oracle,
called with the arguments that the kernel would get, give the same numbers in float64.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from autokernel.capture import aten, storages, trace, value, written
from autokernel.spec import Case, KernelSpec, TensorSpec, import_file, kernel_types, load_spec

COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
MIN_ELEMENTS = 10_000  # of all tensors of a site, once for each of its nodes; below that a call costs more than the work
MAX_READINGS = 8  # ways to read one place as one pattern that are tried against the oracle
COSTLY_FLOPS = 1e8  # 10 ms in float64
TOLERANCE = 1e-8  # of the largest result, in float64; tanh-gelu for gelu is wrong by 1e-4


def plain_call(kernel: Callable[..., Any], **parameters: Any) -> Any:
    return kernel(**parameters)


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way to write an operation.

    example(**inputs) is the code as models have it. `inputs` gives each parameter a shape to be traced with (a tensor,
    where its dtype matters), or a number that occurs nowhere else: it stands for whatever number the model has there.
    call(kernel, **inputs) is the same result by way of the kernel: here layouts are adapted. `given` names parameters whose
    values the model restricts (both halves of HF's cos are equal): the proof computes them from the model's inputs instead
    of drawing them at random. `where` says, of the parameters, what the graph cannot show, such as a rank.
    """

    example: Callable[..., Tensor]
    inputs: Mapping[str, Any]
    call: Callable[..., Tensor] = plain_call
    given: tuple[str, ...] = ()
    where: Callable[..., bool] = lambda **_: True

    @property
    def numbers(self) -> dict[Any, str]:
        return {v: k for k, v in self.inputs.items() if isinstance(v, (int, float))}


@dataclass(frozen=True, eq=False)
class Site:
    """A place in a graph that a kernel of this type can compute: call(kernel, **parameters) replaces `output`."""

    kernel_type: str
    pattern: Pattern
    parameters: Mapping[str, Any]  # parameter of the pattern -> node or number
    nodes: frozenset[Node]
    output: Node
    case: Case
    variants: tuple[Case, ...] = ()  # the same call in other strides, once kernels compute all sites of the graph


@cache
def pattern_graphs(kernel_type: str) -> list[tuple[Pattern, fx.Graph]]:
    """Every pattern of a type, traced in float16, and, where that makes a difference, as it is in float32."""
    path = load_spec(kernel_type).folder / "patterns.py"
    if not path.is_file():
        return []
    patterns = import_file(path, f"autokernel_patterns_{kernel_type}").PATTERNS
    graphs = [(pattern, _trace_pattern(pattern)) for pattern in patterns]
    return [(pattern, form) for pattern, graph in graphs for form in (graph, _without_casts(graph)) if form]


def _trace_pattern(pattern: Pattern) -> fx.Graph:
    def tensor(v: Any) -> Tensor:
        return torch.empty(v, dtype=torch.float16) if isinstance(v, tuple) else v

    numbers = {k: v for k, v in pattern.inputs.items() if isinstance(v, (int, float))}
    tensors = {k: tensor(v) for k, v in pattern.inputs.items() if k not in numbers}

    def example(*values: Tensor) -> Tensor:
        return pattern.example(**dict(zip(tensors, values)), **numbers)

    with torch._guards.tracing(None):  # while Dynamo compiles a model, its fake mode would be used, and keep our sizes
        graph = trace(example, list(tensors.values()), "fake").graph
    for node, name in zip(graph.nodes, tensors):  # placeholders come first, in order
        node.meta["parameter"] = name
    return graph


def _without_casts(graph: fx.Graph) -> fx.Graph | None:
    """The graph in one floating-point dtype, where casts between them are nothing; None if it has none."""
    casts = [n for n in graph.nodes if n.target is aten.to.dtype and n.args[1].is_floating_point]
    if not casts:
        return None
    copy, copies = fx.Graph(), {}
    copy.output(copy.graph_copy(graph, copies))
    for node in map(copies.__getitem__, casts):
        node.replace_all_uses_with(node.args[0])
        copy.erase_node(node)
    return copy


# --- search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """The ways to read a node of a model's graph as the result of a pattern's graph."""

    pattern: Pattern
    graph: fx.Graph

    @property
    def result(self) -> Node:
        return next(iter(reversed(self.graph.nodes))).args[0]

    @property
    def size(self) -> int:
        return sum(node.op == "call_function" for node in self.graph.nodes)

    def readings(self, node: Node) -> Iterator[dict[Any, Any]]:
        """Pattern node or name of a number -> what it stands for."""
        return self._match(self.result, node, {})

    def _match(self, ours: Any, theirs: Any, bound: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """Each way to extend `bound` so that `ours`, a piece of the pattern, stands for `theirs`."""
        if isinstance(ours, (list, tuple)) and any(isinstance(v, Node) or self._number(v) for v in ours):
            if isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
                yield from self._match_all(list(zip(ours, theirs)), bound)
        elif not isinstance(ours, Node):
            name = self._number(ours)
            if name is not None and not isinstance(theirs, Node) and bound.get(name, theirs) == theirs:
                yield {**bound, name: theirs}
            elif name is None and _similar(ours, theirs):
                yield bound
        elif ours in bound:
            if bound[ours] is theirs:
                yield bound
        elif isinstance(theirs, Node) and ours.op == "placeholder":
            if isinstance(value(theirs), Tensor):
                yield {**bound, ours: theirs}
        elif isinstance(theirs, Node) and ours.target == theirs.target:
            bound = {**bound, ours: theirs}
            pairs = _paired_arguments(ours, theirs)
            yield from self._match_all(pairs, bound)
            if ours.target in COMMUTATIVE:
                (a, x), (b, y), *rest = pairs
                yield from self._match_all([(a, y), (b, x), *rest], bound)

    def _match_all(self, pairs: list[tuple[Any, Any]], bound: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        if not pairs:
            yield bound
            return
        for extended in self._match(*pairs[0], bound):
            yield from self._match_all(pairs[1:], extended)

    @staticmethod
    def parameter(key: Any) -> str | None:
        """The parameter of the pattern that a key of a reading means, if it means one."""
        return key.meta.get("parameter") if isinstance(key, Node) else key

    def _number(self, literal: Any) -> str | None:
        is_number = isinstance(literal, (int, float)) and not isinstance(literal, bool)
        return self.pattern.numbers.get(literal) if is_number else None


def _similar(ours: Any, theirs: Any) -> bool:
    """Whether a literal of a pattern may stand for one of a model: only flags, words and odd numbers must agree."""
    if None in (ours, theirs) and isinstance(ours or theirs, (int, float)):
        return False
    if isinstance(ours, (bool, str, float)) or isinstance(theirs, (bool, str)):
        return ours == theirs
    return not isinstance(theirs, Node)


def _paired_arguments(ours: Node, theirs: Node) -> list[tuple[Any, Any]]:
    """Arguments in the order of the operator's schema, defaults filled in."""
    if not isinstance(ours.target, torch._ops.OpOverload):
        return list(zip(ours.args, theirs.args))

    def filled(node: Node) -> list[Any]:
        schema = node.target._schema.arguments
        return [*node.args] + [node.kwargs.get(a.name, a.default_value) for a in schema[len(node.args) :]]

    return list(zip(filled(ours), filled(theirs)))


# --- sites -----------------------------------------------------------------------------------------------------------


class WhyNot(str, Enum):
    """Why a place that reads like a pattern is no site; of several readings, what the furthest failed at."""

    SHAPES = "the operation is not defined for its shapes or options"
    DTYPES = "it mixes dtypes"
    SMALL = "too small to be worth a call"
    ESCAPES = "an intermediate result is used elsewhere"
    WRITTEN = "what it reads is changed in place in between"
    NUMBERS = "it computes something else"

    @property
    def rank(self) -> int:
        return list(WhyNot).index(self)


@dataclass(frozen=True, eq=False)
class Refusal:
    """A node that reads like the result of a kernel type's operation, and is part of no site."""

    kernel_type: str
    node: Node
    why: WhyNot


@dataclass
class SiteFinder:
    """Finds the sites of graphs, larger patterns first; remembers what was proven, for models repeat their layers."""

    min_elements: int = MIN_ELEMENTS
    proofs: dict[Any, bool] = field(default_factory=dict)

    def find(self, graph: GraphModule) -> list[Site]:
        return self.examine(graph)[0]

    def examine(self, graph: GraphModule) -> tuple[list[Site], list[Refusal]]:
        """Sites, and what only looks like one, in the order of the graph."""
        searches = [(t, Search(pattern, g)) for t in kernel_types() for pattern, g in pattern_graphs(t)]
        by_target: dict[Any, list[Node]] = {}
        for node in graph.graph.nodes:
            by_target.setdefault(node.target, []).append(node)
        sites: list[Site] = []
        claimed: set[Node] = set()
        refused: dict[tuple[str, Node], WhyNot] = {}
        memory = _Memory(graph)
        for kernel_type, search in sorted(searches, key=lambda s: -s[1].size):
            for node in by_target.get(search.result.target, ()):
                if node in claimed:
                    continue
                for answer in self._answers(graph, memory, kernel_type, search, node, claimed):
                    if isinstance(answer, Site):
                        sites.append(answer)
                        claimed |= answer.nodes
                        break
                    known = refused.setdefault((kernel_type, node), answer)
                    refused[kernel_type, node] = max(known, answer, key=lambda why: why.rank)
        for i, case in enumerate(in_company(graph, sites)):
            if isinstance(case, Case) and case != sites[i].case:
                sites[i] = replace(sites[i], variants=(case,))
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        refusals = [Refusal(kernel_type, node, why) for (kernel_type, node), why in refused.items() if node not in claimed]
        return sorted(sites, key=lambda s: order[s.output]), sorted(refusals, key=lambda r: order[r.node])

    def _answers(
        self, graph: GraphModule, memory: "_Memory", kernel_type: str, search: Search, node: Node, claimed: set[Node]
    ) -> Iterator[Site | WhyNot]:
        """What becomes of each way to read `node` as this pattern."""
        for reading in islice(search.readings(node), MAX_READINGS):
            nodes = frozenset(v for k, v in reading.items() if isinstance(k, Node) and k.op == "call_function")
            parameters = {search.parameter(k): v for k, v in reading.items() if search.parameter(k)}
            if nodes & claimed:
                continue
            fakes = {k: value(v) if isinstance(v, Node) else v for k, v in parameters.items()}
            case = _case(load_spec(kernel_type), search.pattern, fakes, value(node))
            if isinstance(case, WhyNot):
                yield case
            elif sum(t.numel for t in case.tensors.values()) * len(nodes) < self.min_elements:
                yield WhyNot.SMALL
            elif any(user not in nodes for n in nodes if n is not node for user in n.users):
                yield WhyNot.ESCAPES
            elif memory.changes_during(nodes, parameters.values()):
                yield WhyNot.WRITTEN
            else:
                site = Site(kernel_type, search.pattern, parameters, nodes, node, case)
                yield site if self._is_proven(graph, site) else WhyNot.NUMBERS

    def _is_proven(self, graph: GraphModule, site: Site) -> bool:
        wanted = [site.parameters[name] for name in site.pattern.given]
        given = cut(graph, wanted, [n for n in graph.graph.nodes if n.op == "placeholder"]) if wanted else None
        original = cut(graph, [site.output], [v for v in site.parameters.values() if isinstance(v, Node)])
        key = (site.pattern, original.code, given and given.code, repr(site.case))
        if len(site.nodes) == 1 and load_spec(site.kernel_type).flops(site.case.args) > COSTLY_FLOPS:
            key = (site.pattern, original.code)  # one operator, nothing lenient in it: one size speaks for all
        if key not in self.proofs:
            self.proofs[key] = _agree(site, original, given)
        return self.proofs[key]


class _Memory:
    """Which memory the nodes of a graph change in place, and where."""

    def __init__(self, graph: GraphModule):
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.writes = [(i, changed) for node, i in self.order.items() if (changed := written(node))]

    def changes_during(self, nodes: Collection[Node], parameters: Iterable[Any]) -> bool:
        """Whether, between the first and the last of `nodes`, something changes that they or their parameters hold."""
        if not self.writes:
            return False
        first, last = (pick(self.order[n] for n in nodes) for pick in (min, max))
        held = storages([*nodes, *(v for v in parameters if isinstance(v, Node))])
        return any(first < i < last and changed & held for i, changed in self.writes)


class Unread:
    """A result that takes any method call and stays itself: what becomes of a kernel's result does not matter here."""

    def __getattr__(self, name: str) -> Callable[..., "Unread"]:
        return lambda *_, **__: self


def in_company(graph: GraphModule, sites: Sequence[Site]) -> list[Case | WhyNot]:
    """The case of each site once kernels, whose results are contiguous, compute all of these."""
    by_output = {site.output: site for site in sites}
    cases: dict[Node, Case | WhyNot] = {}
    changed: dict[Node, Any] = {}  # values that are not the graph's own
    mode = next((value(node).fake_mode for node in by_output if isinstance(value(node), FakeTensor)), None)

    def current(node: Any) -> Any:
        v = changed.get(node, value(node)) if isinstance(node, Node) else node
        is_constant = isinstance(v, Tensor) and not isinstance(v, FakeTensor)
        return mode.from_tensor(v) if is_constant and mode else v

    with mode or nullcontext(), torch.no_grad():
        for node in graph.graph.nodes:
            if site := by_output.get(node):
                fakes = {name: current(v) for name, v in site.parameters.items()}
                spec = load_spec(site.kernel_type)
                cases[node] = _case(spec, site.pattern, fakes, value(node))
                if isinstance(cases[node], Case):
                    result = site.pattern.call(partial(_contiguous_result, spec), **fakes)
                    if _strides(result) != _strides(value(node)):
                        changed[node] = result
            elif node.op == "call_function" and not changed.keys().isdisjoint(node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), current)
                changed[node] = node.target(*args, **kwargs)
    return [cases[site.output] for site in sites]


def _contiguous_result(spec: KernelSpec, **arguments: Any) -> Tensor:
    return torch.empty_like(spec.eager(**arguments), memory_format=torch.contiguous_format)


def _strides(fake: Tensor) -> tuple[Any, ...]:
    return fake.stride(), fake.storage_offset()


def _case(spec: KernelSpec, pattern: Pattern, fakes: Mapping[str, Any], output: Tensor) -> Case | WhyNot:
    """The arguments with which the kernel would be called here, if the pattern's `call` fits the shapes.

    Kernels know one floating-point dtype, in which they also answer.
    """
    recorded: dict[str, Any] = {}

    def record(**arguments: Any) -> Any:
        bound = inspect.signature(spec.oracle).bind(**arguments)
        bound.apply_defaults()
        recorded.update(bound.arguments)
        return Unread()

    try:
        if not pattern.where(**fakes):
            return WhyNot.SHAPES
        pattern.call(record, **fakes)
    except (RuntimeError, IndexError, ValueError):  # shapes that this way of writing does not have
        return WhyNot.SHAPES
    dtypes = {v.dtype for v in (*recorded.values(), output) if isinstance(v, Tensor) and v.is_floating_point()}
    if len(dtypes) != 1:
        return WhyNot.DTYPES
    arguments = {k: _tensor_spec(v) if isinstance(v, Tensor) else v for k, v in recorded.items()}
    return Case(_case_name(arguments), arguments)


def _tensor_spec(fake: Tensor) -> TensorSpec:
    stride = None if fake.is_contiguous() else tuple(fake.stride())
    alignment = fake.storage_offset() % 16  # elements; where a tensor starts beyond its alignment is all the same
    return TensorSpec(tuple(fake.shape), fake.dtype, stride, alignment)


def _case_name(arguments: Mapping[str, Any]) -> str:
    def word(v: Any) -> str:
        if not isinstance(v, TensorSpec):
            return f"{v:g}" if isinstance(v, float) else str(v)
        layout = "" if v.stride is None else "/" + "x".join(map(str, v.stride))
        return "x".join(map(str, v.shape)) + layout

    dtype = next(v.dtype for v in arguments.values() if isinstance(v, TensorSpec) and v.dtype.is_floating_point)
    return (
        ",".join(f"{k}={word(v)}" for k, v in arguments.items() if v is not None) + f" {str(dtype).removeprefix('torch.')}"
    )


# --- proof -----------------------------------------------------------------------------------------------------------


def cut(graph: GraphModule, outputs: list[Node], inputs: list[Node], wide: bool = True) -> GraphModule:
    """The nodes between `inputs` and `outputs` as a module of their own; `wide`: in which every number is a float64."""
    inputs = list(dict.fromkeys(inputs))
    piece = fx.Graph()
    copies = {node: piece.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    needed, pending = set(), list(outputs)
    while pending:
        node = pending.pop()
        if node not in needed and node not in copies:
            needed.add(node)
            pending += node.all_input_nodes
    for i, node in enumerate(n for n in graph.graph.nodes if n in needed):
        copies[node] = copy = piece.node_copy(node, copies.__getitem__)
        copy.name = f"node_{i}"
        if wide:
            copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), _wide)
    piece.output(tuple(copies[node] for node in outputs))
    module = GraphModule(graph, piece)
    module.inputs = inputs
    return module


def _wide(v: Any) -> Any:
    return torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v


class _Wide(TorchFunctionMode):
    """Casts in a pattern's `call` to another floating-point dtype stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs or {}), _wide)
        return func(*args, **kwargs)


def filled(fake: Tensor) -> Tensor:
    """Random contents in the dtype, on the device and with the strides of `fake`."""
    spec, generator = _tensor_spec(fake), torch.Generator().manual_seed(0)
    size = (spec.storage_numel,)
    if fake.is_floating_point() or fake.is_complex():
        contents = torch.randn(size, generator=generator, dtype=torch.promote_types(fake.dtype, torch.float32))
    else:
        contents = torch.randint(2, size, generator=generator)
    return contents.to(fake.device, fake.dtype).as_strided(spec.shape, spec.strides, spec.offset)


def _draw(fake: Tensor, generator: torch.Generator) -> Tensor:
    """Random contents; rows of floating-point numbers have sizes from 1e-4 to 10, so that an eps shows."""
    if fake.dtype == torch.bool:
        return torch.rand(fake.shape, generator=generator) > 0.2
    if not (fake.is_floating_point() or fake.is_complex()):
        return torch.randint(8, fake.shape, generator=generator)
    dtype = torch.complex128 if fake.is_complex() else torch.float64
    scale = 10 ** (5 * torch.rand((*fake.shape[:-1], 1)[: fake.dim()], generator=generator, dtype=torch.float64) - 4)
    return torch.randn(fake.shape, generator=generator, dtype=dtype) * scale


def _agree(site: Site, original: GraphModule, given: GraphModule | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    device = value(site.output).device

    def draw(node: Node) -> Tensor:
        return _draw(value(node), generator).to(device)

    values = {node: draw(node) for node in original.inputs}
    if given is not None:
        values |= zip((site.parameters[n] for n in site.pattern.given), given(*map(draw, given.inputs)))
    parameters = {k: values[v] if isinstance(v, Node) else v for k, v in site.parameters.items()}
    expected = original(*(values[node] for node in original.inputs))[0]
    try:
        with _Wide():
            got = site.pattern.call(load_spec(site.kernel_type).oracle, **parameters)
    except (RuntimeError, IndexError, ValueError):
        return False
    if got.shape != expected.shape:
        return False
    largest = expected.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(got.to(expected.dtype), expected, rtol=0, atol=TOLERANCE * largest, equal_nan=True)
