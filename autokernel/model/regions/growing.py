"""Finds regions in a graph: operations on elements and rows that are in no site, and that one result alone is made of."""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from autokernel.backends import default_backend
from autokernel.model.capture import aten, reason, value
from autokernel.model.match import MIN_ELEMENTS, Pattern, RegionFinder, Site, between, extract_subgraph, site_case
from autokernel.model.regions import cpp, triton
from autokernel.model.regions.lowering import RULES, VIEWS, Lowered, Unsupported, lower
from autokernel.model.regions.spec import Region, examined, source_of
from autokernel.spec import TensorSpec, load_spec

NOTHING = {aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default, aten.dropout.default}
CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default}
MOST_INPUTS = 16
NAMED = 3  # operators in a region's name
WRITERS = {"cpp": cpp.write, "triton": triton.write}
# sites that one region has are found once: a model repeats its layers
_KNOWN: dict[str, bool] = {}


def region_finder(device: str) -> RegionFinder:
    """Makes kernel types for a device ("cpu", "cuda:1") of what is in no site."""
    return partial(regions_of, backend=default_backend(device))


@dataclass(frozen=True)
class Cone:
    """Nodes whose results are used for `output` alone, and what they take."""

    output: Node
    nodes: frozenset[Node]
    inputs: tuple[Node, ...]


def regions_of(
    graph: GraphModule,
    sites: Collection[Site],
    backend: str = "",
    only: Collection[str] | None = None,
    min_elements: int = MIN_ELEMENTS,
) -> Iterator[Site]:
    """A site for each region outside of `sites`.

    Sets up kernel types that are new, with a starter for `backend`; with `only`, the names of those that are wanted, none.
    min_elements: of inputs and result, once for each operation.
    """
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    taken, live = {node for site in sites for node in site.nodes}, _live(graph, sites)
    for node in reversed(graph.graph.nodes):
        if node in taken or node not in live or not _fits(node) or node.target in VIEWS:
            continue
        barred: set[Node] = set()
        while cone := _grown(node, taken | barred, order, min_elements):
            piece = piece_of(graph, cone.output, cone.inputs)
            try:
                lowered = lower(piece)
            except Unsupported as why:
                culprits = _originals(cone, piece, order)
                barred.add(culprits.get(why.node, cone.output))
                if cone.output in barred:
                    break
                continue
            taken |= cone.nodes  # whatever comes of it: the same graph has the same regions everywhere
            site = _site(cone, piece, lowered, backend, only)
            if site:
                yield site
            break


def _live(graph: GraphModule, sites: Collection[Site]) -> set[Node]:
    """The nodes that something comes of once kernels compute the sites."""
    live: set[Node] = set()
    taken = {site.output: site.inputs for site in sites}
    for node in reversed(graph.graph.nodes):
        if node in live or node.op == "output" or node.is_impure() or isinstance(node.target, HigherOrderOperator):
            live |= {node, *taken.get(node, node.all_input_nodes)}
    return live


def _computes(node: Node) -> bool:
    """Whether it does more than to pass elements on."""
    source = value(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    is_same = isinstance(source, Tensor) and (source.dtype, source.shape) == (value(node).dtype, value(node).shape)
    return node.target not in VIEWS and node.target not in NOTHING and not (node.target in CASTS and is_same)


def _fits(node: Node) -> bool:
    result = value(node)
    return node.op == "call_function" and node.target in RULES and isinstance(result, Tensor) and result.numel() > 0


def _grown(output: Node, taken: Collection[Node], order: dict[Node, int], min_elements: int) -> Cone | None:
    """The largest cone of `output`; None if it is no more than one operation, or of little work."""
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
        if node.target in VIEWS and not _broadcasts(node) and nodes.isdisjoint(node.all_input_nodes):
            nodes.discard(node)
    taken_by = (_before_broadcast(s) for n in in_order if n in nodes for s in n.all_input_nodes if s not in nodes)
    inputs = tuple(dict.fromkeys(taken_by))
    work = [n for n in nodes if _computes(n)]
    elements = sum(value(n).numel() for n in (output, *inputs) if isinstance(value(n), Tensor))
    is_whole = all(isinstance(value(n), Tensor) for n in inputs)
    if len(work) < 2 or elements * len(work) < min_elements or not is_whole or not 0 < len(inputs) <= MOST_INPUTS:
        return None
    return Cone(output, frozenset(nodes), inputs)


def _broadcasts(node: Node) -> bool:
    return node.target in VIEWS and value(node).numel() > value(node.args[0]).numel()


def _before_broadcast(node: Node) -> Node:
    """Kernels read what is broadcast as it is before: a stride of 0 says something of contents, not just where they are."""
    while _fits(node) and _broadcasts(node):
        node = node.args[0]
    return node


def piece_of(graph: GraphModule, output: Node, inputs: Sequence[Node]) -> GraphModule:
    """What computes `output` of `inputs` as a graph of its own."""
    piece = extract_subgraph(graph, [output], list(inputs), wide=False)
    for placeholder, node in zip(piece.graph.find_nodes(op="placeholder"), inputs):
        placeholder.meta["val"] = value(node)
    return piece


def _originals(cone: Cone, piece: GraphModule, order: dict[Node, int]) -> dict[Node, Node]:
    """Nodes of the cone's own graph -> those of the model's."""
    copies = [n for n in piece.graph.nodes if n.op == "call_function"]
    return dict(zip(copies, sorted(between(cone.inputs, cone.output), key=order.__getitem__)))


def _site(cone: Cone, piece: GraphModule, lowered: Lowered, backend: str, only: Collection[str] | None) -> Site | None:
    """The region as a kernel type, and this as a site of it; None where a kernel would be called in another way."""
    arguments = {f"input_{i}": _tensor_spec(value(node)) for i, node in enumerate(cone.inputs)}
    dtypes = {t.dtype for t in arguments.values() if t.dtype.is_floating_point}
    output = value(cone.output)
    if len(dtypes) != 1 or output.dtype not in dtypes or any(map(_repeats, arguments.values())):
        return None
    work = [n for n in piece.graph.nodes if n.op == "call_function" and _computes(n)]
    operators = [_word(n) for n in work]
    title = ", ".join(operators)
    source = source_of(piece, title)
    digest = hashlib.sha256(repr((source, arguments)).encode()).hexdigest()[:10]
    name = "_".join(["region", *dict.fromkeys(operators[-NAMED:]), digest])
    result = TensorSpec(tuple(output.shape), output.dtype)
    flops = sum(
        max(value(n).numel() for n in (node, *node.all_input_nodes) if isinstance(value(n), Tensor)) for node in work
    )
    region = Region(name, title, source, arguments, flops, result)
    if name not in _KNOWN and only is None:
        _KNOWN[name] = _set_up(region, lowered, backend)
    if not (name in only if only is not None else _KNOWN[name]):
        return None
    parameters = dict(zip(arguments, cone.inputs))
    pattern = Pattern(region.function, {})
    case = site_case(load_spec(name), pattern, {k: value(v) for k, v in parameters.items()}, output)
    return Site(name, pattern, parameters, cone.nodes, cone.output, case) if case else None


def _set_up(region: Region, lowered: Lowered, backend: str) -> bool:
    if region.is_set_up() and load_spec(region.name).starters(backend):
        return True
    known = examined(region)
    if known is None:
        return False
    title = f"{region.title}: a region of a model's graph."
    try:
        starters = WRITERS[backend](region.name, title, lowered, list(region.arguments.values()), region.output)
    except Unsupported:
        return False
    if backend == "triton":
        known = _with_inductors(known, starters)
    known.write(starters)
    return True


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


def _elements(node: Node) -> int:
    """Of the largest tensor that it takes or makes."""
    return max(value(n).numel() for n in (node, *node.all_input_nodes) if isinstance(value(n), Tensor))


def _word(node: Node) -> str:
    return re.sub(r"\W", "_", node.target.overloadpacket.__name__)


def _tensor_spec(fake: Tensor) -> TensorSpec:
    return TensorSpec(tuple(fake.shape), fake.dtype, None if fake.is_contiguous() else tuple(fake.stride()))
