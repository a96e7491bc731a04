"""A site's nodes become a call of its kernel, whose results have the strides and the gradients that theirs had."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from autokernel.build import Function
from autokernel.integration.ops import (
    Kernel,
    at_sizes,
    by_position,
    differentiable,
    one_at_a_time,
    register,
    register_visible,
    visible,
)
from autokernel.integration.weights import NO_VIEWS
from autokernel.integration.winner import Winner
from autokernel.model.agreement import extract_subgraph
from autokernel.model.capture import forward_of
from autokernel.model.contract import Backward
from autokernel.model.nodes import aten, set_gradients, value
from autokernel.model.patterns import Parameter, Site
from autokernel.model.placement import Placement, RejectReason
from autokernel.spec import Case, load_spec


@dataclass(frozen=True)
class Installed:
    """A winner that is ready to be called, with the oracle's parameters by position."""

    target: str
    ops: OpOverloadPacket
    run: Kernel  # the same without the dispatcher, for graphs that are not traced again
    visible: Callable[[Case], Kernel] | None = None  # what a case calls, for tracing, if its launches are Triton's
    launches: OpOverload | None = None  # then also this, which AOTAutograd takes for them


def install(winner: Winner) -> Installed:
    """Load and compile; what Triton compiles, it compiles at the first call."""
    spec, kernel = load_spec(winner.target.kernel_type), winner.load()
    for one in getattr(kernel, "all", [kernel]):
        for function in getattr(one, "__globals__", {}).values():
            if isinstance(function, Function):
                function.compile()
    ops = register(winner.name, spec, kernel, winner.device_type)
    is_triton = getattr(kernel, "__globals__", {}).get("BACKEND") == "triton"  # whatever its target began with
    run = by_position(spec, one_at_a_time(spec, kernel), f"autokernel::{winner.target.name}")
    if not is_triton:
        return Installed(winner.target.name, ops, run)
    launches = register_visible(winner.name, spec, kernel, winner.device_type)
    return Installed(winner.target.name, ops, run, lambda case: visible(spec, at_sizes(kernel, case.args)), launches)


@dataclass(frozen=True)
class Part:
    """What one result of a site is computed of: the site's inputs, and others of its results, `given` by their places."""

    output: Node
    nodes: Collection[Node]
    inputs: Sequence[Node]
    given: Sequence[int]
    original: GraphModule


@dataclass(frozen=True)
class Place:
    """A site, the kernel that it gets, and how that is called there."""

    site: Site
    placement: Placement
    kernel: Installed
    backward: Backward | None  # of its graph, where gradients are wanted
    original: GraphModule  # its nodes, as they were before any were replaced
    parts: tuple[Part, ...] = ()  # the same by result, where these have gradients of each other

    @property
    def wants_gradient(self) -> bool:
        return bool(self.backward and self.backward.wants_gradient(self.site.output))


def why_not_with_gradients(graph: GraphModule, site: Site, backward: Backward) -> RejectReason | None:
    """Why gradients would not be the same with a kernel at a site; None if they are."""
    if _changes_mode(graph, site):
        return RejectReason.MODE
    if len({backward.wants_gradient(output) for output in site.outputs}) > 1:
        return RejectReason.PARTLY
    parts = [
        (site.nodes, site.inputs, site.outputs),
        *((p.nodes, p.inputs, [p.output]) for p in parts_of(graph, site, backward)),
    ]
    return RejectReason.SAVED if any(backward.keeping(*part) is None for part in parts) else None


def parts_of(graph: GraphModule, site: Site, backward: Backward) -> tuple[Part, ...]:
    """A site's results one by one, where the gradient of one goes through another that the graph returns; else none."""
    handed = backward.handed_on(site.nodes, site.outputs)
    return tuple(_part(graph, site, output, handed) for output in site.outputs) if handed else ()


def _part(graph: GraphModule, site: Site, output: Node, handed: Sequence[Node]) -> Part:
    nodes, pending = set(), [output]
    while pending:
        node = pending.pop()
        if node not in nodes and node not in site.inputs and (node is output or node not in handed):
            nodes.add(node)
            pending += node.all_input_nodes
    given = [one for one in handed if one is not output and any(one in node.all_input_nodes for node in nodes)]
    inputs = [*site.inputs, *given]
    places = [site.outputs.index(one) for one in given]
    return Part(output, nodes, inputs, places, extract_subgraph(graph, [output], inputs, wide=False))


def _changes_mode(graph: GraphModule, site: Site) -> bool:
    """Whether gradients are on for some nodes of a site and off for others."""
    mode, modes = torch.is_grad_enabled(), set()
    for node in graph.graph.nodes:
        if node.target is set_gradients:
            mode = node.args[0]
        elif node in site.nodes:
            modes.add(mode)
    return len(modes) > 1


def each_result(graph: Graph, call: Node, site: Site) -> list[Node]:
    """The results of a call, one by one."""
    if len(site.outputs) == 1:
        return [call]
    return [graph.call_function(operator.getitem, (call, i)) for i in range(len(site.outputs))]


def insert(graph: Graph, place: Place, callee: Kernel, nodes: Mapping[Node, Node]) -> list[Node]:
    """A call of `callee`, which has the parameters of the operator, on `nodes`, which stand for the site's inputs; its
    results."""
    tracer, site = GraphAppendingTracer(graph), place.site
    names = [argument.name for argument in place.kernel.ops.default._schema.arguments]

    def call(**arguments: Any) -> Proxy:
        given = site.case.args | arguments  # the case has the oracle's defaults, too
        values = tuple(v.node if isinstance(v, Proxy) else v for v in (given[name] for name in names))
        return Proxy(graph.call_function(callee, values), tracer)

    parameters = {
        k: Parameter(nodes[v], tracer, value(v).dim()) if isinstance(v, Node) else v for k, v in site.parameters.items()
    }
    made = each_result(graph, site.pattern.call(call, **parameters).node, site)
    is_own = len(made) > 1 or made[0].target is callee
    placed = zip(made, site.outputs, place.placement.strides)
    return [_in_strides(graph, y, value(output), strides, is_own) for y, output, strides in placed]


def _in_strides(graph: Graph, result: Node, like: Tensor, strides: Sequence[int] | None, is_own: bool) -> Node:
    """A `result` of a kernel's call as what it stands for has to be; `is_own`: it is what the kernel returned."""
    if strides is None:
        if is_own:
            return result
        # The original's result is no view: one of the kernel's, made where gradients are off, is replayed wrongly later.
        return graph.call_function(aten._unsafe_view.default, (result, list(like.shape)))
    options = {"dtype": like.dtype, "device": like.device}
    empty = graph.call_function(aten.empty_strided.default, (list(like.shape), list(strides)), options)
    return graph.call_function(aten.copy_.default, (empty, result))


def trained(place: Place, callee: Kernel) -> Kernel:
    """What computes a site by its kernel, and its gradients as the original does."""
    inner, site = Graph(), place.site
    nodes = {node: inner.placeholder(f"input_{i}") for i, node in enumerate(place.site.inputs)}
    made = insert(inner, place, callee, nodes)
    is_one = len(made) == 1
    inner.output(made[0] if is_one else tuple(made))
    if place.parts:
        return _by_part(place, GraphModule({}, inner).forward)
    kept = place.backward.keeping(site.nodes, place.site.inputs, site.outputs)
    plain = forward_of(place.original)
    original = (lambda *values: plain(*values)[0]) if is_one else plain
    return differentiable(original, GraphModule({}, inner).forward, *kept)


def _by_part(place: Place, kernel: Kernel) -> Kernel:
    """`kernel`, of several results, each of which has the gradients of its part: of others of them, too."""
    parts = [(_of_part(part, place.backward), part.given) for part in place.parts]
    by_order = sorted(range(len(parts)), key=lambda i: place.backward.order[place.site.outputs[i]])

    def run(*values: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(NO_VIEWS):
            made = list(kernel(*values))
        for i in by_order if torch.is_grad_enabled() else ():
            call, given = parts[i]
            made[i] = call(*values, *(made[j] for j in given), [made[i]])
        return tuple(made)

    return run


def _of_part(part: Part, backward: Backward) -> Kernel:
    """Of a part's inputs and its result, in a list: that is no tensor, which a result would be a view of."""
    plain = forward_of(part.original)
    kept = backward.keeping(part.nodes, part.inputs, [part.output])
    return differentiable(lambda *values: plain(*values[:-1])[0], lambda *values: values[-1].pop(), *kept)


def strides_are_in_doubt(graph: GraphModule) -> bool:
    """Whether fake tensors may have other strides than real ones, by which PyTorch would choose another layout of images.

    They have where there is but one of something, and of max_pool1d, which writes rows on a CPU without gradients.
    """
    if graph.graph.find_nodes(op="call_function", target=aten.max_pool1d.default):
        return True
    results = map(value, graph.graph.output_node().all_input_nodes)
    if not any(isinstance(t, Tensor) and t.dim() > 3 for t in results):
        return False
    made = (value(node) for node in graph.graph.nodes)
    return any(isinstance(t, Tensor) and t.dim() > 3 and 1 in t.shape and not t.is_contiguous() for t in made)
