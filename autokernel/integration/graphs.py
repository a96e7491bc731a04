"""Graphs as a compiler or a kernel is to have them: copies, of given sizes, with examples, without what does nothing."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from autokernel.integration.ops import (
    DIRECT,
    Kernel,
)
from autokernel.model.nodes import ITSELF, is_idle, object_of, overwritten, set_gradients, value
from autokernel.model.numbers import reads_a_number
from autokernel.model.patterns import Site
from autokernel.model.tracing import OF_DYNAMO


def records_gradients(module: GraphModule) -> bool:
    """Whether autograd is on in a graph from Dynamo, from its beginning or for a part of it."""
    switches = module.graph.find_nodes(op="call_function", target=set_gradients)
    return torch.is_grad_enabled() or any(node.args[0] for node in switches)


def drop_idle(graph: GraphModule, result: Callable[[Node], Any], wanted: bool) -> None:
    """Take out calls in which nothing happens, unless the graph returns what they make: that is an object of its own."""
    returned = {object_of(node, result) for node in graph.graph.output_node().all_input_nodes}
    for node in graph.graph.nodes:
        if object_of(node, result) not in returned and (node.target in ITSELF or not wanted) and is_idle(node, result):
            node.replace_all_uses_with(node.args[0])


def give_examples(graph: GraphModule) -> None:
    """Fake tensors for what methods are called on, as in Dynamo's graphs: AOTAutograd caches no graph without them."""
    known: dict[Node, Any] = {}

    def example(node: Node) -> Any:
        if node not in known:
            known[node] = value(node)
        if known[node] is None:
            if not (isinstance(node.target, (str, OpOverload)) or node.target in (getattr, operator.getitem)):
                raise LookupError(f"{node.target} is not for fake tensors: a Triton kernel would be launched")
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), example)
            target = getattr(args[0], node.target) if node.op == "call_method" else partial(node.target, *args[:1])
            known[node] = target(*args[1:], **kwargs)
        return known[node]

    receivers = [node.args[0] for node in graph.graph.nodes if node.op == "call_method"]
    modes = (value(node).fake_mode for node in graph.graph.nodes if isinstance(value(node), FakeTensor))
    with next(modes, nullcontext()), torch.no_grad(), suppress(Exception):  # a graph with others is not cached
        for node in receivers:
            if "example_value" not in node.meta:
                node.meta["example_value"] = example(node)


def constants_as_inputs(graph: GraphModule) -> list[Tensor]:
    """Tensors in the graph become its last inputs: Inductor takes attributes for parameters that Dynamo knows."""
    constants = []
    last = next(iter(graph.graph.find_nodes(op="placeholder")[::-1]), None)  # None: at its beginning
    for node in graph.graph.find_nodes(op="get_attr"):
        if not isinstance(getattr(graph, node.target), Tensor):  # the body of an operator of higher order
            continue
        constants.append(getattr(graph, node.target))
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(node.target)
        last.meta = node.meta
        last._dynamo_source = None
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
        delattr(graph, node.target) if hasattr(graph, node.target) else None
    graph.recompile()
    return constants


def share_views(graph: GraphModule) -> None:
    """Sites of all layers take the same views of the same cos and sin: make each once, while nothing is changed there."""
    first: dict[str, Node] = {}
    for node in graph.graph.nodes:
        if node.target is set_gradients or overwritten(node):
            first.clear()
        is_view = node.op == "call_method" and not node.target.endswith("_") or node.target in (getattr, operator.getitem)
        earlier = first.setdefault(repr((node.target, node.args, node.kwargs)), node) if is_view else node
        if earlier is not node:
            node.replace_all_uses_with(earlier)


def shorten_calls(graph: GraphModule, kernels: dict[OpOverload, Kernel]) -> None:
    direct = DIRECT | kernels
    for node in graph.graph.nodes:
        node.target = direct.get(node.target, node.target)


def with_sites(module: GraphModule, sites: Sequence[Site]) -> tuple[GraphModule, list[Site]]:
    """A copy of a graph, and the sites in the copy."""
    nodes: dict[Node, Node] = {}
    copied = copy_of(module, nodes)
    return copied, [
        replace(
            site,
            parameters={name: nodes[v] if isinstance(v, Node) else v for name, v in site.parameters.items()},
            nodes=frozenset(nodes[node] for node in site.nodes),
            output=nodes[site.output],
            others=tuple(nodes[node] for node in site.others),
        )
        for site in sites
    ]


def copy_of(module: GraphModule, nodes: dict[Node, Node] | None = None) -> GraphModule:
    """A copy of a graph; `nodes` gets its nodes, by the original's."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {} if nodes is None else nodes))
    copied = GraphModule(module, graph)
    _keep_origins(copied, module)
    return copied


@contextmanager
def let_go(context: TracingContext) -> Iterator[None]:
    """What it knows of real tensors is forgotten in the end, as Dynamo does it: module.to() may have to swap them."""
    yield
    describer = context.fake_mode.fake_tensor_converter.meta_converter.describer
    for known in (context.tensor_to_context, describer.lookup_tensor, describer.lookup_storage):
        known.clear()


def of_sizes(module: GraphModule, values: Sequence[Any], context: TracingContext) -> GraphModule:
    """A graph that Dynamo made for all sizes, for those of `values`."""
    copied, mode = copy_of(module), context.fake_mode
    for node, v in zip(copied.graph.find_nodes(op="placeholder"), values):
        node.meta["example_value"] = mode.from_tensor(v) if isinstance(v, Tensor) else v
        if any(reads_a_number(user) for user in node.users):
            node.meta["example_value"].item_memo = v.item()  # any would do
    return copied


def _keep_origins(graph: GraphModule, module: GraphModule) -> None:
    """What Dynamo noted about the inputs: Inductor asks which are parameters and stay where they are."""
    graph.meta |= module.meta
    if hasattr(module, "_param_name_to_source"):  # without it, none of the rest is looked at
        graph._param_name_to_source = module._param_name_to_source
    for ours, theirs in zip(graph.graph.find_nodes(op="placeholder"), module.graph.find_nodes(op="placeholder")):
        ours.meta = theirs.meta | ours.meta
        ours.meta.pop(OF_DYNAMO, None)
        if hasattr(theirs, "_dynamo_source"):
            ours._dynamo_source = theirs._dynamo_source
