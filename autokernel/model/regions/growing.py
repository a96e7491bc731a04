"""Finds regions in a graph: operations on elements and rows, from their inputs to few results.

First each result that others use, with all that nothing but it is made of: a cone. Then cones are joined where one reads
what the other writes or reads, so that memory is read and written less often. Sites of named types that are nothing but
such operations (norms, softmax) may be joined too; as they are they stay sites of their types.
"""

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from autokernel.common.backends import default_backend
from autokernel.model.agreement import between, extract_subgraph
from autokernel.model.breaks import reason
from autokernel.model.match import MIN_ELEMENTS, REGION, Refusal, RegionFinder
from autokernel.model.nodes import aten, has_effects, is_idle, value
from autokernel.model.patterns import Pattern, Site
from autokernel.model.placement import RejectReason, site_case
from autokernel.model.regions import (  # noqa: F401  rules
    convolutions,
    cpp_file,
    elementwise,
    enlarging,
    gathers,
    losses,
    reductions,
    rows,
    special,
    triton,
    windows,
)
from autokernel.model.regions.expressions import Lowered, Result
from autokernel.model.regions.lowering import PARTED, RULES, VIEWS, Unsupported, lower, result_spec
from autokernel.model.regions.spec import Region, examined, source_of
from autokernel.model.rounding import CASTS, rounding
from autokernel.spec import CONVOLUTION, DTYPES, TensorSpec, folder_of, load_spec, several

NOTHING = {aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default, aten.dropout.default}
NOTHING |= {
    aten.broadcast_tensors.default,
    aten.lift_fresh_copy.default,
    aten.scalar_tensor.default,
    aten.zeros_like.default,
}
MOST_INPUTS, MOST_RESULTS = 16, 4
FEWEST = 2  # operations of a region: one alone has nothing to be fused with
# But pooling on a CPU, where PyTorch's own is several times slower than a loop of vectors, in NCHW above all.
POOLING = re.compile(r"(max|avg)_pool[123]d\b")
LEAST_SAVED = 0.1  # of the bytes that two cones move, for which they are joined
NAMED = 3  # operators in a region's name
WRITERS = {"cpp": cpp_file.write, "triton": triton.write}
# Regions that are set up, or why not: of one that a model repeats in its layers this is found once.
_KNOWN: dict[str, RejectReason | None] = {}


def region_finder(device: str, fewest: int = FEWEST) -> RegionFinder:
    """Makes kernel types for a device ("cpu", "cuda:1") of what is in no site, where that is so many operations."""
    return partial(regions_of, backend=default_backend(device), fewest=fewest)


@dataclass(frozen=True, eq=False)
class Cone:
    """Nodes whose results are used for `outputs` alone, and what they take; outputs in the order of the graph.

    parts: what it was joined of. site: that it is in already.
    """

    outputs: tuple[Node, ...]
    nodes: frozenset[Node]
    inputs: tuple[Node, ...]
    parts: tuple["Cone", ...] = ()
    site: Site | None = None

    @property
    def has_site(self) -> bool:
        return self.site is not None or any(part.has_site for part in self.parts)


@dataclass(frozen=True, eq=False)
class Convolved:
    """Of a region with convolutions: what its loops read, these among it."""

    read: Sequence[Node]
    specs: Sequence[TensorSpec]
    made: Sequence[convolutions.Convolution]


def regions_of(
    graph: GraphModule,
    sites: Collection[Site],
    backend: str = "",
    only: Collection[str] | None = None,
    min_elements: int = MIN_ELEMENTS,
    fewest: int = FEWEST,
) -> Iterator[Site | Refusal]:
    """A site for each region, outside of `sites` or in the place of some of them; what looks like one and is none.

    Sets up kernel types that are new, with a starter for `backend`; with `only`, the names of those that are wanted, none,
    and refuses none.
    min_elements: of inputs and results, once for each operation. fewest: operations.
    What fails with one of them is raised after the others.
    """
    regions, failed = _Regions(graph, sites, backend, only, min_elements, fewest), None
    for cone in regions.joined(regions.cones()):
        try:
            yield from regions.sites_of(regions.with_convolutions(cone))
        except Exception as error:  # of any kind: a model's own operators, odd arguments
            failed = failed or error
    if only is None:
        yield from (Refusal(REGION, node, frozenset((node,)), why) for node, why in regions.left.items())
    if failed:
        raise failed


class _Regions:
    """The cones of one graph, and what becomes of them."""

    def __init__(
        self,
        graph: GraphModule,
        sites: Collection[Site],
        backend: str,
        only: Collection[str] | None,
        min_elements: int,
        fewest: int,
    ):
        self.graph, self.sites, self.backend, self.only = graph, sites, backend, only
        self.min_elements, self.fewest = min_elements, fewest
        self.order: dict[Node, float] = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.stretch = _stretches(graph)
        self.lowered: dict[Cone, tuple[GraphModule, Lowered]] = {}
        self.convolved: dict[Cone, Convolved] = {}
        self.left: dict[Node, RejectReason] = {}  # why nodes are in no cone although there is a rule for each

    def cones(self) -> list[Cone]:
        """Each with one result; whatever comes of them, the same graph has the same ones everywhere."""
        taken, live = {node for site in self.sites for node in site.nodes}, _live(self.graph, self.sites)
        found = [
            Cone((site.output,), site.nodes, tuple(site.inputs), site=site)
            for site in self.sites
            if all(map(_fits, site.nodes)) and not _passes_on(site.output)
        ]
        for node in reversed(self.graph.graph.nodes):
            is_free = node not in taken and node in live and _fits(node) and _is_one(node) and not _passes_on(node)
            if is_free and (cone := self._cone(node, taken)):
                found.append(cone)
                taken |= cone.nodes
        return found

    def _cone(self, output: Node, taken: Collection[Node]) -> Cone | None:
        """The largest cone of `output` that can be written as arithmetic on elements."""
        barred: set[Node] = set()
        while cone := _grown(output, taken | barred, self.order):
            repeated = {n for n in cone.inputs if _repeats(_tensor_spec(value(n)))}
            if readers := {n for n in cone.nodes if not repeated.isdisjoint(map(_before_broadcast, n.all_input_nodes))}:
                self.left |= dict.fromkeys(readers, RejectReason.REPEATS)
                barred |= readers  # what they take, and what comes of them, may be regions all the same
                continue
            piece = piece_of(self.graph, cone.outputs, cone.inputs)
            try:
                self.lowered[cone] = piece, _lowered(piece)
                return cone
            except Unsupported as why:
                node = _originals(cone, piece, self.order).get(why.node, output)
                barred.add(output if node in barred else node)  # in spite of that it is there, as what broadcasts an input
                self.left[node] = RejectReason.UNWRITTEN
        return None

    def joined(self, cones: list[Cone]) -> list[Cone]:
        """The cones, of which those pairs that save most are joined first, until none is left that saves much."""
        tried: set[frozenset[Node]] = set()
        while True:
            gone, made = set(), []
            for a, b in self._pairs(cones):
                key = frozenset((*a.outputs, *b.outputs))
                if key in tried or a in gone or b in gone:
                    continue
                if whole := self._join(a, b):
                    made.append(whole)
                    gone |= {a, b}
                tried.add(key)
            if not made:
                return cones
            cones = [cone for cone in cones if cone not in gone] + made

    def _pairs(self, cones: Sequence[Cone]) -> list[tuple[Cone, Cone]]:
        """Of which one reads, not through memory alone, what the other reads or writes; those that save most first."""
        moved = {cone: _moved(cone) for cone in cones}
        touching: dict[Node, list[Cone]] = {}  # memory that is read or written, by the node that made it
        for cone in cones:
            for node in dict.fromkeys(map(_base, (*cone.outputs, *cone.inputs))):
                touching.setdefault(node, []).append(cone)
        saved: dict[tuple[Cone, Cone], int] = {}
        for node, near in touching.items():
            nbytes = _nbytes(node)
            for pair in combinations(near, 2):  # of a weight that a thousand cones read, half a million
                saved[pair] = saved.get(pair, 0) + nbytes
        worth = [
            (bytes_saved, a, b)
            for (a, b), bytes_saved in saved.items()
            if bytes_saved >= LEAST_SAVED * (moved[a] + moved[b]) and not (a.has_site and b.has_site)
        ]
        return [(a, b) for _, a, b in sorted(worth, key=lambda w: (-w[0], self.order[w[1].outputs[-1]]))]

    def _join(self, a: Cone, b: Cone) -> Cone | None:
        """Both as one; None where that is none: each input is to be there before the first result."""
        made = sorted({*a.outputs, *b.outputs}, key=self.order.__getitem__)
        taken = [n for n in dict.fromkeys((*a.inputs, *b.inputs)) if _base(n, made) not in made]
        first = self.order[made[0]]
        views = Counter(map(_base, taken))

        def is_there(node: Node) -> bool:
            return self.order[node] < first or (views[_base(node)] == 1 and bool(self._later(node, made[0])))

        inputs = tuple(dict.fromkeys(n if is_there(n) else _base(n) for n in taken))
        if any(self.order[_base(n)] >= first for n in inputs if self.order[n] >= first):
            return None
        own, nodes = a.nodes | b.nodes, set(between(inputs, *made))
        if not own <= nodes or not all(map(_passes_on, nodes - own)):
            return None

        def is_used_outside(node: Node) -> bool:
            return any(user not in nodes or (user not in own and is_used_outside(user)) for user in node.users)

        outputs = tuple(n for n in made if is_used_outside(n))
        between_them = {n for n in nodes - own if is_used_outside(n)}  # views that others take as well
        if not 0 < len(outputs) <= MOST_RESULTS or not 0 < len(inputs) <= MOST_INPUTS:
            return None
        piece, whole = piece_of(self.graph, outputs, inputs), Cone(outputs, frozenset(nodes - between_them), inputs, (a, b))
        try:
            self.lowered[whole] = piece, _lowered(piece)
        except Unsupported:
            return None
        return whole

    def _later(self, view: Node, first: Node) -> list[Node]:
        """What `view` is made of from `first` on, and it, where views are all of that and may as well be made before; else
        none. Equal steps of a loop, of which each reads at a place of its own, are regions of one type by that."""
        chain, node = [], view
        while self.order[node] >= self.order[first]:
            if not _passes_on(node) or len(node.all_input_nodes) > 1 or self.stretch[node] != self.stretch[first]:
                return []
            chain.append(node)
            node = node.args[0]
        return chain[::-1]

    def _make_before(self, view: Node, first: Node) -> None:
        for node in self._later(view, first):
            first.prepend(node)
            self.order[node] = self.order[first] - 0.5

    def with_convolutions(self, cone: Cone) -> Cone:
        """The cone with those convolutions in it that only it uses, and that a library computes."""
        taken = {node for site in self.sites for node in site.nodes}
        found = {} if cone.site else convolutions.convolutions_for(cone.nodes, cone.inputs, taken)
        made = {c.node: c for c in found.values()}
        read = tuple(dict.fromkeys(found[n].node if n in found else n for n in cone.inputs))
        inputs = tuple(dict.fromkeys((*(n for c in made.values() for n in c.inputs), *(n for n in read if n not in made))))
        if not made or len(inputs) > MOST_INPUTS:
            return cone
        inner = piece_of(self.graph, cone.outputs, read)
        convolutions.channels_last(inner, read, made)
        whole = Cone(cone.outputs, cone.nodes.union(between(inputs, *cone.outputs)), inputs, (cone,))
        try:
            self.lowered[whole] = piece_of(self.graph, whole.outputs, inputs), _lowered(inner)
        except Unsupported:
            return cone
        ends = inner.graph.find_nodes(op="placeholder")
        self.convolved[whole] = Convolved(read, [_tensor_spec(value(end)) for end in ends], [*made.values()])
        return whole

    def sites_of(self, cone: Cone) -> Iterator[Site | Refusal]:
        """The region; where it cannot be one, why, and what its parts are."""
        work = [n for n in cone.nodes if _computes(n)]
        fewest = 1 if any(n.target in windows.CONVOLVED or _is_pooling(n) for n in work) else self.fewest
        elements = sum(value(n).numel() for n in (*cone.outputs, *cone.inputs))
        if cone.site:
            return  # of a named type, which it stays
        made: Site | RejectReason | None = RejectReason.ALONE if len(work) < fewest else RejectReason.SMALL
        if len(work) >= fewest and elements * len(work) >= self.min_elements:
            made = _site(cone, *self.lowered[cone], self.backend, self.only, self.convolved.get(cone))
        if isinstance(made, Site):
            for view in cone.inputs:
                self._make_before(view, cone.outputs[0])
            yield made
            return
        if made and self.only is None:
            yield Refusal(REGION, cone.outputs[-1], cone.nodes, made)
        for part in cone.parts:
            yield from self.sites_of(part)


def _stretches(graph: GraphModule) -> dict[Node, int]:
    """Of each node how many stand before it that write to memory, or change what PyTorch is set to."""
    passed, found = 0, {}
    for node in graph.graph.nodes:
        found[node] = passed
        is_operator = isinstance(node.target, OpOverload) or node.target is operator.getitem
        passed += node.op == "call_function" and (not is_operator or has_effects(node))
    return found


def _live(graph: GraphModule, sites: Collection[Site]) -> set[Node]:
    """The nodes that something comes of once kernels compute the sites."""
    live: set[Node] = set()
    taken = {output: site.inputs for site in sites for output in site.outputs}
    for node in reversed(graph.graph.nodes):
        if node in live or node.op == "output" or has_effects(node) or isinstance(node.target, HigherOrderOperator):
            live |= {node, *taken.get(node, node.all_input_nodes)}
    return live


def _computes(node: Node) -> bool:
    """Whether it does more than to pass elements on."""
    if node.target in CASTS:
        made, source = value(node), value(node.args[0])
        return (source.dtype, source.shape) != (made.dtype, made.shape)
    return not (_is_view(node) or node.target in NOTHING)


def _is_pooling(node: Node) -> bool:
    return bool(POOLING.match(node.target.overloadpacket.__name__)) and value(node).device.type == "cpu"


def _is_view(node: Node) -> bool:
    """Whether it moves elements, and computes nothing; or takes one of several results."""
    return node.target in VIEWS or node.target is operator.getitem


def _fits(node: Node) -> bool:
    """Whether there is a rule for it, and it is of tensors that have elements."""
    if node.op != "call_function" or not (node.target in RULES or node.target in PARTED):
        return False
    if node.target is operator.getitem and not _fits(node.args[0]):  # an input, as one of the results of a sort is
        return False
    tensors = [t for n in (node, *node.all_input_nodes) for t in several(value(n))]
    is_known = all(isinstance(t, Tensor) and t.numel() > 0 for t in tensors)
    return is_known and not (node.target in windows.CONVOLVED and tensors[0].device.type == convolutions.DEVICE)


def _is_one(node: Node) -> bool:
    """Whether its result is one tensor."""
    return isinstance(value(node), Tensor)


def _passes_on(node: Node) -> bool:
    """Whether its result is its input, or a view of it."""
    return _fits(node) and (is_idle(node) or node.target in VIEWS or _is_of_views(node))


def _is_of_views(node: Node) -> bool:
    """Whether it takes one of several views."""
    return node.target is operator.getitem and node.args[0].target in VIEWS


def _base(node: Node, ends: Collection[Node] = ()) -> Node:
    """What a view is of; one of `ends`, where it is of that."""
    while node not in ends and _passes_on(node):
        node = node.args[0]
    return node


def _nbytes(node: Node) -> int:
    return value(node).numel() * value(node).dtype.itemsize


def _moved(cone: Cone) -> int:
    return sum(map(_nbytes, (*cone.inputs, *cone.outputs)))


def _grown(output: Node, taken: Collection[Node], order: dict[Node, float]) -> Cone | None:
    """The largest cone of `output`; None if it computes nothing, or takes too much or nothing."""
    if output in taken:
        return None
    nodes, pending = {output}, [output]
    while pending:
        node = max(pending, key=order.__getitem__)
        pending.remove(node)
        for source in node.all_input_nodes:
            is_free = source not in nodes and source not in taken and _fits(source)
            if is_free and nodes.issuperset(source.users):
                nodes.add(source)
                pending.append(source)
    in_order = sorted(nodes, key=order.__getitem__)
    for node in in_order:  # a view of an input costs nothing, and is one
        if (
            (node.target in VIEWS or _is_of_views(node))
            and not _broadcasts(node)
            and nodes.isdisjoint(node.all_input_nodes)
        ):
            nodes.discard(node)
    taken_by = (_before_broadcast(s) for n in in_order if n in nodes for s in n.all_input_nodes if s not in nodes)
    inputs = tuple(dict.fromkeys(taken_by))
    is_whole = all(isinstance(value(n), Tensor) for n in inputs)
    if not any(map(_computes, nodes)) or not is_whole or not 0 < len(inputs) <= MOST_INPUTS:
        return None
    return Cone((output,), frozenset(nodes), inputs)


def _broadcasts(node: Node) -> bool:
    return node.target in VIEWS and _is_one(node) and value(node).numel() > value(node.args[0]).numel()


def _before_broadcast(node: Node) -> Node:
    """Kernels read what is broadcast as it is before: a stride of 0 says something of contents, not just where they are."""
    while _fits(node) and _broadcasts(node):
        node = node.args[0]
    return node


def piece_of(graph: GraphModule, outputs: Sequence[Node], inputs: Sequence[Node]) -> GraphModule:
    """What computes `outputs` of `inputs` as a graph of its own."""
    piece = extract_subgraph(graph, list(outputs), list(inputs), wide=False)
    for placeholder, node in zip(piece.graph.find_nodes(op="placeholder"), inputs):
        placeholder.meta["val"] = value(node)
    return piece


def _lowered(piece: GraphModule) -> Lowered:
    """See lower(). Nor is it a region what rounds on the way: its oracle does not, being in float64."""
    computed = [node for node in piece.graph.nodes if node.op == "call_function"]
    ends = piece.graph.find_nodes(op="placeholder")
    for node in computed:
        places = {t.device for n in (node, *(e for e in ends if e in node.all_input_nodes)) for t in several(value(n))}
        if len(places) > 1:
            raise Unsupported("a number in the host's memory", node)
    if node := rounding(computed, [*ends, *piece.graph.output_node().all_input_nodes]):
        raise Unsupported("a cast that rounds what follows", node)
    return lower(piece)


def _originals(cone: Cone, piece: GraphModule, order: dict[Node, float]) -> dict[Node, Node]:
    """Nodes of the cone's own graph -> those of the model's."""
    copies = [n for n in piece.graph.nodes if n.op == "call_function"]
    return dict(zip(copies, sorted(between(cone.inputs, *cone.outputs), key=order.__getitem__)))


def _site(
    cone: Cone,
    piece: GraphModule,
    lowered: Lowered,
    backend: str,
    only: Collection[str] | None,
    convolved: Convolved | None,
) -> Site | RejectReason | None:
    """The region as a kernel type, and this as a site of it, or why not; None where a kernel would be called in another
    way, or it is not among those that are wanted."""
    arguments = {f"input_{i}": _tensor_spec(value(node)) for i, node in enumerate(cone.inputs)}
    results = tuple(result_spec(value(node)) for node in cone.outputs)
    if any(map(_repeats, arguments.values())):
        return RejectReason.REPEATS
    is_float = any(t.dtype.is_floating_point for t in arguments.values())
    if not is_float or not all(map(_can_be_made, lowered.results)):
        return RejectReason.KINDS
    work = [n for n in piece.graph.nodes if n.op == "call_function" and _computes(n)]
    operators = [_word(n) for n in work]
    title = ", ".join(operators)
    source = source_of(piece, title)
    strides = [t.strides for t in results if t.stride]
    digest = hashlib.sha256(repr((source, arguments, *strides)).encode()).hexdigest()[:10]
    name = "_".join(["region", *dict.fromkeys(operators[-NAMED:]), digest])
    flops = sum(map(_flops, work))
    named = dict(zip(cone.inputs, arguments))
    names, limits = [named.get(node, "") for node in (convolved.read if convolved else cone.inputs)], {}
    for limit in lowered.limits:
        lowest, end = limits.get(names[limit.index], (limit.lowest, limit.end))
        limits[names[limit.index]] = max(lowest, limit.lowest), min(end, limit.end)
    loaded, gathered = ({names[e.data[0]] for e in lowered.expressions if e.op == op} for op in ("load", "gather"))
    made = convolved.made if convolved else ()
    region = Region(
        name,
        title,
        source,
        arguments,
        flops,
        results,
        first=named[made[0].source] if made else "",
        limits=limits,
        gathered=tuple(sorted(gathered - loaded - {named[n] for c in made for n in c.inputs})),
        static=tuple(dict.fromkeys(named[c.weight] for c in made)),
        library=CONVOLUTION if made else "",
    )
    if name not in _KNOWN and only is None:
        read = None
        if convolved:
            calls = {c.node: f"convolved_{i}" for i, c in enumerate(made)}
            lines = [c.call(calls[c.node], named) for c in made]
            read = cpp_file.Read([named.get(n) or calls[n] for n in convolved.read], convolved.specs, lines)
        padded = {named[c.weight] for c in made if c.adds_zeros}
        _KNOWN[name] = _set_up(region, lowered, backend, read, padded)
    if only is not None and name not in only:
        return None
    if only is None and (why := _KNOWN[name]):
        return why
    parameters = dict(zip(arguments, cone.inputs))
    pattern = Pattern(region.function, {})
    *others, output = cone.outputs
    case = site_case(load_spec(name), pattern, {k: value(v) for k, v in parameters.items()}, value(output))
    return Site(name, pattern, parameters, cone.nodes, output, case, others=tuple(others)) if case else None


def _flops(node: Node) -> int:
    """An operation for each element of its largest tensor; two for each place of a convolution's windows."""
    if node.target in convolutions.CONVOLUTIONS | convolutions.TRANSPOSED:
        windows_of = node.args[0] if convolutions.is_transposed(node) else node
        return value(windows_of).numel() * 2 * value(node.args[1])[0].numel()
    return max(value(n).numel() for n in (node, *node.all_input_nodes) if isinstance(value(n), Tensor))


def _can_be_made(result: Result) -> bool:
    """Whether it is of floating-point numbers, or of places, which no rounding decides."""
    return result.spec.dtype in DTYPES or result.expression.op == "reduce_min_int"


def _set_up(
    region: Region, lowered: Lowered, backend: str, read: cpp_file.Read | None, padded: Collection[str]
) -> RejectReason | None:
    """Why the region is no kernel type now, with starters as this version of the code writes them; None if it is. padded:
    weights that meet zeros which only some implementations multiply, so that their NaN are not everywhere."""
    written = Region.read(folder_of(region.name)).written if region.is_set_up() else {}
    if written.get(backend) == _writers() and load_spec(region.name).starters(backend):
        return None
    known = examined(region)
    if known is None:
        return RejectReason.DOMAIN
    known = replace(known, planted_in=tuple(name for name in known.planted_in if name not in padded))
    title = f"{region.title}: a region of a model's graph."
    try:
        given = region.name, title, lowered, list(region.arguments.values())
        starters = cpp_file.write(*given, read) if read else WRITERS[backend](*given)
    except Unsupported:
        return RejectReason.UNWRITTEN
    if backend == "triton":
        known = _with_inductors(known, starters)
    replace(known, written=written | {backend: _writers()}).write(starters)
    return None


@cache
def _writers() -> str:
    """A digest of the code that writes starters."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _with_inductors(region: Region, starters: dict[str, str]) -> Region:
    """Adds to `starters` what Inductor writes; the region as it is, or with the reason why there is no such file."""
    from autokernel.model.regions import inductor  # imports much of Inductor, for GPUs alone

    try:
        starters["triton_inductor"] = inductor.write(region)
    except Exception as error:  # whatever Inductor raises on a graph
        return replace(region, without_inductor=reason(error))
    return region


def _repeats(t: TensorSpec) -> bool:
    """Whether elements are in one place."""
    return t.overlaps or any(stride == 0 and n > 1 for stride, n in zip(t.strides, t.shape))


def _word(node: Node) -> str:
    return re.sub(r"\W", "_", node.target.overloadpacket.__name__)


def _tensor_spec(fake: Tensor) -> TensorSpec:
    return TensorSpec(tuple(fake.shape), fake.dtype, None if fake.is_contiguous() else tuple(fake.stride()))
