"""Where a graph computes what a kernel computes: patterns given as example code, matches proven by experiment.

A pattern is a way in which models write a kernel type's operation, a plain PyTorch function; `kernels/<type>/patterns.py`
lists them. It is traced like a model, and found in the model's graph by a small backtracking search that is deliberately
lenient: sizes, dims and dtypes match anything. What it finds becomes a site only when the model's own nodes and the oracle,
called with the arguments that the kernel would get, give the same numbers in float64.

Models and PyTorch releases are many: what cannot be traced, read or proven is left as it is, and its reason is listed.

Searched is a simplified copy of a graph; sites, and all that is proven of them, are in terms of the graph itself.
"""

import hashlib
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

from autokernel.model import pattern_graphs
from autokernel.model.autocast import without_autocast
from autokernel.model.breaks import reason
from autokernel.model.contract import Contract
from autokernel.model.nodes import aten, layout, simplified, storages, value, written
from autokernel.model.pieces import pieces
from autokernel.model.rounding import rounds
from autokernel.model.tracing import trace
from autokernel.spec import Case, KernelSpec, TensorSpec, import_file, kernel_types, load_spec

COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
MIN_ELEMENTS = 10_000  # of all tensors of a site, once for each of its nodes; below that a call costs more than the work
MAX_READINGS = 8  # ways to read one place as one pattern that are tried against the oracle
COSTLY_FLOPS = 1e8  # 10 ms in float64
PROOF_TOLERANCE = 1e-8  # of the largest result, in float64; tanh-gelu for gelu is wrong by 1e-4


def plain_call(kernel: Callable[..., Any], **parameters: Any) -> Any:
    return kernel(**parameters)


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way to write an operation.

    example(**inputs) is the code as models have it. `inputs` gives each parameter a shape to be traced with (a tensor,
    where its dtype matters), or a number that occurs nowhere else: it stands for whatever number the model has there.
    call(kernel, **inputs) is the same result by way of the kernel: here layouts are adapted. `given` names parameters whose
    values the model restricts (both halves of HF's cos are equal): the proof computes them from the model's inputs instead
    of drawing them at random. `where` says, of the parameters, what the graph cannot show, such as a rank. `masks` names
    parameters that may hide whole rows from an operation, which the proof then tries.
    """

    example: Callable[..., Tensor]
    inputs: Mapping[str, Any]
    call: Callable[..., Tensor] = plain_call
    given: tuple[str, ...] = ()
    where: Callable[..., bool] = lambda **_: True
    masks: tuple[str, ...] = ()

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
    output: Node  # of several the last
    case: Case
    variants: tuple[Case, ...] = ()  # the same call in other strides, once kernels compute all sites of the graph
    others: tuple[Node, ...] = ()  # further results, in the order of the graph

    @property
    def outputs(self) -> tuple[Node, ...]:
        """What the kernel returns. Each of `inputs` comes before the first of them."""
        return (*self.others, self.output)

    @property
    def inputs(self) -> list[Node]:
        return list(dict.fromkeys(v for v in self.parameters.values() if isinstance(v, Node)))


@dataclass(frozen=True)
class Patterns:
    """The patterns of a kernel type as graphs; `failures` says why others are not searched for."""

    graphs: tuple[tuple[Pattern, fx.Graph], ...] = ()
    failures: tuple[str, ...] = ()


@cache
def patterns_of(kernel_type: str) -> Patterns:
    """Every pattern of a type, traced in float16, and, where that makes a difference, as it is in float32."""
    path = load_spec(kernel_type).folder / "patterns.py"
    if not path.is_file():
        return Patterns()
    try:
        patterns = import_file(path, f"autokernel_patterns_{kernel_type}").PATTERNS
    except Exception as error:  # whatever a file may raise
        return Patterns(failures=(f"the patterns of {kernel_type} are not searched for: {reason(error)}",))
    kept = pattern_graphs.file_for(path)
    forms, failures = pattern_graphs.read(kept, len(patterns)), {}
    if forms is None:
        forms = []
        for pattern in patterns:
            try:
                graph = _trace_pattern(pattern)
                forms.append([form for form in (graph, _without_casts(graph)) if form])
            except Exception as error:  # of any kind: what this release of PyTorch makes of the example
                forms.append([])
                failures[f"a pattern of {kernel_type} is not searched for: {reason(error)}"] = None
        if not failures:
            pattern_graphs.write(kept, forms)
    return Patterns(tuple((p, form) for p, graphs in zip(patterns, forms) for form in graphs), tuple(failures))


def _trace_pattern(pattern: Pattern) -> fx.Graph:
    def tensor(v: Any) -> Tensor:
        return torch.empty(v, dtype=torch.float16) if isinstance(v, tuple) else v

    numbers = {k: v for k, v in pattern.inputs.items() if isinstance(v, (int, float))}
    tensors = {k: tensor(v) for k, v in pattern.inputs.items() if k not in numbers}

    def example(*values: Tensor) -> Tensor:
        return pattern.example(**dict(zip(tensors, values)), **numbers)

    # While Dynamo compiles a model, its fake mode would be used, and keep our sizes.
    with torch._guards.tracing(None), without_autocast():
        graph, _ = simplified(trace(example, list(tensors.values()), "fake"))
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


class RejectReason(str, Enum):
    """Why a place that reads like a pattern is no site; of several readings, what the furthest failed at."""

    SHAPES = "the operation is not defined for its shapes or options"
    DTYPES = "it mixes dtypes"
    ROUNDED = "it rounds to fewer digits on the way than its inputs have"
    NEGATED = "an input is the negative of what its memory has"
    SMALL = "too small to be worth a call"
    ESCAPES = "an intermediate result is used elsewhere"
    LAYOUT = "its result shares memory, or has strides, that a kernel's result cannot have"
    WRITTEN = "what it reads is changed in place in between"
    SAVED = "its backward pass would read what may be changed before it runs"
    MODE = "gradients are switched on or off between its parts"
    PARTLY = "gradients are wanted of one of its results and not of another"
    NUMBERS = "it computes something else"
    FAILED = "it could not be examined"

    @property
    def rank(self) -> int:
        return list(RejectReason).index(self)


@dataclass(frozen=True, eq=False)
class Refusal:
    """A node that reads like the result of a kernel type's operation, and is part of no site; `nodes` are its whole."""

    kernel_type: str
    node: Node
    nodes: frozenset[Node]
    why: RejectReason


# (graph, sites of named types) -> further sites, some of them in the place of those
RegionFinder = Callable[[GraphModule, Sequence[Site]], Iterable[Site]]


@dataclass
class SiteFinder:
    """Finds the sites of graphs, larger patterns first; remembers what was proven, for models repeat their layers.

    `failures` lists, each once, the errors in what was tried for that: places that they befell are no sites.
    regions: makes kernel types of what is left, if that is wanted; finds those of `region_names` alone, if any are named.
    """

    min_elements: int = MIN_ELEMENTS
    regions: RegionFinder | None = None
    region_names: set[str] = field(default_factory=set)
    proofs: dict[Any, RejectReason | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def find(self, graph: GraphModule) -> list[Site]:
        return self.examine(graph)[0]

    def examine(self, graph: GraphModule) -> tuple[list[Site], list[Refusal]]:
        """Sites, and what only looks like one, in the order of the graph."""
        patterns = {kernel_type: patterns_of(kernel_type) for kernel_type in kernel_types()}
        self._note(*(failure for p in patterns.values() for failure in p.failures))
        searches = [(t, Search(pattern, g)) for t, p in patterns.items() for pattern, g in p.graphs]
        form, originals = simplified(graph)
        by_target: dict[Any, list[Node]] = {}
        for node in form.nodes:
            by_target.setdefault(node.target, []).append(node)
        sites: list[Site] = []
        claimed: set[Node] = set()
        refused: dict[tuple[str, Node], Refusal] = {}
        places = _Places(graph, originals)
        for kernel_type, search in sorted(searches, key=lambda s: -s[1].size):
            for node in by_target.get(search.result.target, ()):
                original = originals[node]
                if original in claimed:
                    continue
                for answer in self._answers(places, kernel_type, search, node, claimed):
                    if isinstance(answer, Site):
                        sites.append(answer)
                        claimed |= answer.nodes
                        break
                    known = refused.setdefault((kernel_type, original), answer)
                    refused[kernel_type, original] = max(known, answer, key=lambda refusal: refusal.why.rank)
        replaced: dict[Site, list[Site]] = {}  # by a region
        for site in self._regions(places, sites) if self.regions else ():
            replaced[site] = [named for named in sites if named.nodes & site.nodes]
            sites = [*(named for named in sites if named not in replaced[site]), site]
            claimed |= site.nodes
        placements = self._placed(graph, sites)
        while impossible := [site for site in sites if placements[site] is RejectReason.LAYOUT]:
            for site in impossible:
                sites.remove(site)
                sites += replaced.get(site, ())
                refusal = Refusal(site.kernel_type, site.output, site.nodes, RejectReason.LAYOUT)
                refused[site.kernel_type, site.output] = refusal
            claimed = {node for site in sites for node in site.nodes}
            if not any(replaced.get(site) for site in impossible):
                break
            placements = self._placed(graph, sites)
        for site in list(sites):
            if isinstance(placements[site], Placement) and placements[site].case != site.case:
                sites[sites.index(site)] = replace(site, variants=(placements[site].case,))
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        refusals = [refusal for refusal in refused.values() if refusal.node not in claimed]
        return sorted(sites, key=lambda s: order[s.output]), sorted(refusals, key=lambda r: order[r.node])

    def _placed(self, graph: GraphModule, sites: Sequence[Site]) -> dict[Site, "Placement | RejectReason"]:
        return dict(zip(sites, self.cases_after_replacement(graph, sites)[0]))

    def _regions(self, places: "_Places", sites: Sequence[Site]) -> list[Site]:
        found: list[Site] = []
        try:
            found += self.regions(places.graph, tuple(sites))
        except Exception as error:  # of any kind: a model's own operators, odd arguments
            self._note(f"some regions could not be found: {reason(error)}")
        return [site for site in found if not places.changed_during(site.nodes, site.parameters.values())]

    def _answers(
        self, places: "_Places", kernel_type: str, search: Search, node: Node, claimed: set[Node]
    ) -> Iterator[Site | Refusal]:
        """What becomes of each way to read `node` as this pattern."""
        try:
            yield from self._tried(places, kernel_type, search, node, claimed)
        except Exception as error:  # of any kind: a model's own operators, odd arguments, no memory for float64
            self._note(f"what reads like {kernel_type} could not be examined: {reason(error)}")
            failed = places.originals[node]
            yield Refusal(kernel_type, failed, frozenset((failed,)), RejectReason.FAILED)

    def _tried(
        self, places: "_Places", kernel_type: str, search: Search, node: Node, claimed: set[Node]
    ) -> Iterator[Site | Refusal]:
        output = places.originals[node]
        for reading in islice(search.readings(node), MAX_READINGS):
            read = {v for k, v in reading.items() if isinstance(k, Node) and k.op == "call_function"}
            parameters = {search.parameter(k): v for k, v in reading.items() if search.parameter(k)}
            parameters = {k: places.originals[v] if isinstance(v, Node) else v for k, v in parameters.items()}
            nodes = frozenset(map(places.originals.__getitem__, read))
            if nodes & claimed:
                continue
            fakes = {k: value(v) if isinstance(v, Node) else v for k, v in parameters.items()}
            refusal = partial(Refusal, kernel_type, output, nodes)
            case = _case(load_spec(kernel_type), search.pattern, fakes, value(output))
            if isinstance(case, RejectReason):
                yield refusal(case)
            elif sum(t.numel for t in case.tensors.values()) * len(read) < self.min_elements:
                yield refusal(RejectReason.SMALL)
            elif any(user not in read for n in read if n is not node for user in n.users):
                yield refusal(RejectReason.ESCAPES)
            elif rounds(nodes, [*(v for v in parameters.values() if isinstance(v, Node)), output]):
                yield refusal(RejectReason.ROUNDED)
            elif places.changed_during(nodes, parameters.values()):
                yield refusal(RejectReason.WRITTEN)
            else:
                site = Site(kernel_type, search.pattern, parameters, nodes, output, case)
                why = self._reject_reason(places, site)
                yield refusal(why) if why else site

    def _reject_reason(self, places: "_Places", site: Site) -> RejectReason | None:
        graph, given = places.graph, None
        if wanted := [site.parameters[name] for name in site.pattern.given]:
            inputs = [n for n in graph.graph.nodes if n.op == "placeholder" and isinstance(value(n), Tensor)]
            if places.changed_before(between(inputs, *wanted), site.output):
                return RejectReason.WRITTEN  # computed from the inputs alone, they would be others
            given = extract_subgraph(graph, wanted, inputs)
        original = extract_subgraph(graph, [site.output], site.inputs)
        key = (site.pattern, _content(original), given and _content(given), repr(site.case))
        if len(site.nodes) == 1 and load_spec(site.kernel_type).flops(site.case.args) > COSTLY_FLOPS:
            key = (site.pattern, _content(original))  # one operator, nothing lenient in it: one size speaks for all
        if key not in self.proofs:
            self.proofs[key] = RejectReason.FAILED  # if the proof ends in an error, which is not to be met at every layer
            with without_autocast():
                self.proofs[key] = None if _agree(site, original, given) else RejectReason.NUMBERS
        return self.proofs[key]

    def cases_after_replacement(
        self, graph: GraphModule, sites: Sequence[Site]
    ) -> tuple[list["Placement | RejectReason"], Callable[[Node], Any]]:
        """How each site's kernel is called beside the others', which return contiguous tensors; the results of nodes."""
        replaced = cases_after_replacement(graph, sites)
        self._note(*(f"behind a kernel, {reason(error)}" for error in replaced.errors))
        return [replaced.placement(site) for site in sites], replaced.result

    def _note(self, *failures: str) -> None:
        self.failures += [failure for failure in dict.fromkeys(failures) if failure not in self.failures]


def between(inputs: Iterable[Any], *outputs: Node) -> list[Node]:
    """The nodes of which `outputs` are computed from `inputs`, in no order."""
    found: dict[Node, None] = {}
    stop, pending = {v for v in inputs if isinstance(v, Node)}, list(outputs)
    while pending:
        node = pending.pop()
        if node not in stop and node not in found:
            found[node] = None
            pending += node.all_input_nodes
    return list(found)


def _content(piece: GraphModule) -> tuple[Any, ...]:
    """What a piece of a graph computes: its code, and the constants in it."""
    nodes = piece.graph.find_nodes(op="get_attr")
    return piece.code, tuple(_digest(getattr(piece, node.target)) for node in nodes)


def _digest(constant: Any) -> Any:
    if not isinstance(constant, Tensor):
        return constant
    numbers = constant.detach().cpu().contiguous()
    content = hashlib.sha256(numbers.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return content, constant.dtype, constant.shape, constant.stride()


class _Places:
    """A graph in which sites are looked for: which nodes those of its simplified form are, what memory is changed where."""

    def __init__(self, graph: GraphModule, originals: Mapping[Node, Node]):
        self.graph, self.originals = graph, originals
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.writes = [(i, changed) for node, i in self.order.items() if (changed := written(node))]

    def changed_during(self, nodes: Collection[Node], parameters: Iterable[Any]) -> bool:
        """Whether, between the first and the last of `nodes`, something changes that they or their parameters hold."""
        first, last = (pick(self.order[n] for n in nodes) for pick in (min, max))
        return self._changed([*nodes, *(v for v in parameters if isinstance(v, Node))], first, last)

    def changed_before(self, nodes: Iterable[Node], end: Node) -> bool:
        """Whether, before `end`, something changes that `nodes` or what they read hold."""
        return self._changed([v for n in nodes for v in (n, *n.all_input_nodes)], -1, self.order[end])

    def _changed(self, nodes: Iterable[Node], first: int, last: int) -> bool:
        if not self.writes:
            return False
        held = storages(nodes)
        return any(first < i < last and changed & held for i, changed in self.writes)


class Unread:
    """A result that takes any method call and stays itself: but for its dtype, what becomes of it does not matter here."""

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype  # that the pattern's `call` gives it; None: the kernel's own

    def to(self, dtype: torch.dtype) -> "Unread":
        return Unread(dtype)

    def __getattr__(self, name: str) -> Callable[..., "Unread"]:
        return lambda *_, **__: self


@dataclass(frozen=True)
class Placement:
    """How a kernel is called at a site, among others; `strides`: those that its results must be given before they go on."""

    case: Case
    strides: tuple[tuple[int, ...] | None, ...] = (None,)  # by result


def cases_after_replacement(graph: GraphModule, sites: Sequence[Site]) -> "_AfterReplacement":
    """How each site's kernel is called beside the others', which return contiguous tensors.

    Where something would take notice that a result is contiguous that was not, it gets the original's strides.
    """
    replaced = _AfterReplacement(graph, sites)
    while noticed := replaced.noticed() - replaced.restored:
        replaced.restored |= noticed
    return replaced


class _AfterReplacement:
    """Kernels at all of these sites; `restored`: the sites' outputs that get the original's strides."""

    def __init__(self, graph: GraphModule, sites: Sequence[Site]):
        self.sites = {output: site for site in sites for output in site.outputs}
        self.contract = Contract(graph.graph, {output: site.inputs for output, site in self.sites.items()})
        self.mode = next((value(node).fake_mode for node in self.sites if isinstance(value(node), FakeTensor)), None)
        self.placements: dict[Node, Placement | RejectReason] = {}
        self.restored: set[Node] = set()
        self.errors: list[Exception] = []

    def placement(self, site: Site) -> Placement | RejectReason:
        """Of all its results together."""
        found = [self.placements[output] for output in site.outputs if output in self.placements]
        refused = next((one for one in found if isinstance(one, RejectReason)), None)
        return refused or Placement(found[-1].case, tuple(strides for one in found for strides in one.strides))

    def result(self, node: Node) -> Any:
        """What a node's result is then, as a fake tensor."""
        return self.contract.changed.get(node, value(node))

    def noticed(self) -> set[Node]:
        with self.mode or nullcontext(), torch.no_grad(), without_autocast():
            return self.contract.noticed(self._result, self.mode)

    def _result(self, output: Node, current: Callable[[Any], Any]) -> Any:
        """What a site's kernel returns, or the original, where no kernel can be."""
        try:
            return self._placed(output, current)
        except Exception as error:  # of any kind: a kernel type's own functions, met by tensors in other strides
            self.errors.append(error)
            self.placements[output] = RejectReason.FAILED
            return value(output)

    def _placed(self, output: Node, current: Callable[[Any], Any]) -> Any:
        site, own = self.sites[output], value(output)
        spec, fakes = load_spec(site.kernel_type), {name: current(v) for name, v in site.parameters.items()}
        case = _case(spec, site.pattern, fakes, own)
        if isinstance(case, RejectReason):
            self.placements[output] = case
            return own
        result = site.pattern.call(partial(_kernel_result, spec), **fakes)
        if len(site.outputs) > 1:
            result = result[site.outputs.index(output)]
        strides = own.stride() if output in self.restored and layout(result) != layout(own) else None
        is_possible = (result.shape, result.dtype) == (own.shape, own.dtype) and output not in self.contract.aliases
        if not is_possible or (strides is not None and not _can_be_given(own)):
            self.placements[output] = RejectReason.LAYOUT
            return own
        self.placements[output] = Placement(case, (strides,))
        return own if strides is not None or layout(result) == layout(own) else result


def _can_be_given(fake: Tensor) -> bool:
    """Whether a new tensor can have this layout: it begins where its storage does, no element is in two places."""
    reach = 0
    for stride, size in sorted(zip(fake.stride(), fake.shape)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return fake.storage_offset() == 0


def _kernel_result(spec: KernelSpec, **arguments: Any) -> Any:
    if not spec.results:
        return torch.empty_like(spec.eager(**arguments), memory_format=torch.contiguous_format)
    return spec.made(next(v.device for v in arguments.values() if isinstance(v, Tensor)))


def _case(spec: KernelSpec, pattern: Pattern, fakes: Mapping[str, Any], output: Tensor) -> Case | RejectReason:
    """The arguments with which the kernel would be called here, if the pattern's `call` fits the shapes.

    Kernels know one floating-point dtype, in which they also answer; `call` may cast to it and back.
    """
    recorded: dict[str, Any] = {}

    def record(**arguments: Any) -> Any:
        bound = inspect.signature(spec.oracle).bind(**arguments)
        bound.apply_defaults()
        recorded.update(bound.arguments)
        return Unread()

    try:
        if not pattern.where(**fakes):
            return RejectReason.SHAPES
        answer = pattern.call(record, **fakes)
    except (RuntimeError, IndexError, ValueError):  # shapes that this way of writing does not have
        return RejectReason.SHAPES
    arguments = {k: _tensor_spec(v) if isinstance(v, Tensor) else v for k, v in recorded.items()}
    defaults = {k: p.default for k, p in inspect.signature(spec.oracle).parameters.items()}
    if any(v is None and defaults[k] is not None for k, v in arguments.items()) or not spec.takes(arguments):
        return RejectReason.SHAPES
    if any(isinstance(v, TensorSpec) and v.overlaps for v in arguments.values()):
        return RejectReason.SHAPES
    if any(isinstance(v, TensorSpec) and v.numel == 0 for v in arguments.values()):
        return RejectReason.SMALL
    if any(isinstance(v, Tensor) and v.is_neg() for v in recorded.values()):
        return RejectReason.NEGATED
    if spec.results:  # which says what they are
        return Case(_case_name(arguments), arguments)
    dtypes = {v.dtype for v in recorded.values() if isinstance(v, Tensor) and v.is_floating_point()}
    cast = answer.dtype if isinstance(answer, Unread) else None
    if len(dtypes) != 1 or output.dtype != (cast or next(iter(dtypes))):
        return RejectReason.DTYPES
    return Case(_case_name(arguments), arguments)


def site_case(spec: KernelSpec, pattern: Pattern, fakes: Mapping[str, Any], output: Tensor) -> Case | None:
    """The arguments with which a kernel of this type would be called here; None where it cannot be."""
    case = _case(spec, pattern, fakes, output)
    return None if isinstance(case, RejectReason) else case


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


def extract_subgraph(graph: GraphModule, outputs: list[Node], inputs: list[Node], wide: bool = True) -> GraphModule:
    """The nodes between `inputs` and `outputs` as a module of their own; `wide`: in which every number is a float64."""
    inputs = list(dict.fromkeys(inputs))
    piece = fx.Graph()
    copies = {node: piece.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    needed = set(between(inputs, *outputs))
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
    spec, generator = _tensor_spec(fake), torch.Generator(fake.device).manual_seed(0)
    size, place = (spec.storage_numel,), {"generator": generator, "device": fake.device}
    if fake.is_floating_point() or fake.is_complex():
        contents = torch.randn(size, **place, dtype=torch.promote_types(fake.dtype, torch.float32))
    else:
        contents = torch.randint(2, size, **place)
    return contents.to(fake.device, fake.dtype).as_strided(spec.shape, spec.strides, spec.offset)


def _draw(fake: Tensor, generator: torch.Generator, integers: int = 8) -> Tensor:
    """Random contents, on the generator's device: a host takes seconds for the weight of a large vocabulary.

    Rows of floating-point numbers have sizes from 1e-4 to 10, so that an eps shows.
    """
    place = {"generator": generator, "device": generator.device}
    if fake.dtype == torch.bool:
        return torch.rand(fake.shape, **place) > 0.2
    if not (fake.is_floating_point() or fake.is_complex()):
        return torch.randint(integers, fake.shape, **place)
    dtype = torch.complex128 if fake.is_complex() else torch.float64
    scale = 10 ** (5 * torch.rand((*fake.shape[:-1], 1)[: fake.dim()], **place, dtype=torch.float64) - 4)
    return torch.randn(fake.shape, **place, dtype=dtype).mul_(scale)


def _hide_rows(mask: Tensor, dtype: torch.dtype, first: int) -> Tensor:
    """A mask of `dtype` with every second row from `first` on False or -inf, and every other True or the lowest number."""
    hidden, other = (False, True) if dtype == torch.bool else (-torch.inf, torch.finfo(dtype).min)
    rows = mask.clone().reshape(-1, mask.shape[-1] if mask.dim() else 1)
    rows[first::2], rows[1 - first :: 2] = hidden, other
    return rows.reshape(mask.shape)


def _agree(site: Site, original: GraphModule, given: GraphModule | None) -> bool:
    """Whether the site's own nodes and the oracle give the same numbers, whatever the site's masks hide."""
    hiding = (None, 0, 1) if site.pattern.masks else (None,)
    return all(_agree_where(site, original, given, first) for first in hiding)


def _agree_where(site: Site, original: GraphModule, given: GraphModule | None, first_hidden: int | None) -> bool:
    device = value(site.output).device
    generator = torch.Generator(device).manual_seed(0)
    masks = [] if first_hidden is None else [site.parameters[name] for name in site.pattern.masks]
    # An integer may be the index of a class: what is out of bounds is an error, on a GPU one that ends the process.
    widths = [fake.shape[-1] for fake in map(value, original.inputs) if fake.is_floating_point() and fake.dim()]

    def draw(node: Node) -> Tensor:
        contents = _draw(value(node), generator, min([8, *widths]))
        return _hide_rows(contents, value(node).dtype, first_hidden) if node in masks else contents

    values = {node: draw(node) for node in original.inputs}
    if given is not None:
        random = [_draw(value(node), generator) for node in given.inputs]
        values |= zip((site.parameters[n] for n in site.pattern.given), given(*random))
    parameters = {k: values[v] if isinstance(v, Node) else v for k, v in site.parameters.items()}
    expected = original(*(values[node] for node in original.inputs))[0]
    try:
        with _Wide():
            got = site.pattern.call(load_spec(site.kernel_type).oracle, **parameters)
    except (RuntimeError, IndexError, ValueError):
        return False
    if got.shape != expected.shape:
        return False
    largest = max((y.nan_to_num(0, 0, 0).abs().max().item() for (y,) in pieces(expected)), default=0.0)
    near = partial(torch.allclose, rtol=0, atol=PROOF_TOLERANCE * largest, equal_nan=True)
    return all(near(y.to(expected.dtype), truth) for y, truth in pieces(got, expected))
