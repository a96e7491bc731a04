"""A graph from Dynamo becomes one in ATen, for the sizes and settings of the call at hand."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import (
    _disable_current_modes,
)

from autokernel.model.autocast import autocast_as_nodes, autocast_operators, set_autocast
from autokernel.model.in_place import give_results_of_their_own
from autokernel.model.layouts import operators_in_doubt
from autokernel.model.masks import replace_known_masks
from autokernel.model.nodes import aten, prune, set_gradients, value, written
from autokernel.model.numbers import NUMBER, at_hand, is_number, reads_a_number
from autokernel.model.one_node import Number, as_one_node, data_of
from autokernel.model.settings import is_setting, nesting, setting_of, settings_restored
from autokernel.model.written_out import WRITTEN_OUT

checkpoint = torch.ops.higher_order.tag_activation_checkpoint


OF_DYNAMO = "grapharg"  # in a node's meta: holds on to a real input, which Dynamo itself lets go once it has compiled


def to_aten(module: GraphModule, gradients: bool = False) -> GraphModule:
    """A graph from Dynamo, in ATen; nodes carry a fake tensor in `meta["val"]`.

    Of symbolic sizes it takes those of the call at hand. Autocast, inside of the graph or around it, is in it as the casts
    that it makes: to be run where no autocast is (see without_autocast). `gradients`: whether it will have a backward pass.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    fakes = [node.meta["example_value"] for node in inputs]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    switches = any(node.target is torch._C._set_grad_enabled for node in module.graph.nodes)
    apart = _transforms_apart(_numbers_apart(module))
    with _making_fakes(mode) if mode else nullcontext():
        values = map(at_hand, fakes)
        given = [Number(i, v) if NUMBER in n.meta else v for i, (n, v) in enumerate(zip(inputs, values))]
        traced = trace(_Traced(apart, gradients or switches).run, given)
    replace_known_masks(traced, set().union(*map(written, traced.graph.nodes)))
    prune(traced)
    if not gradients and not switches:
        give_results_of_their_own(traced)
    _return_numbers(traced, module)
    return traced


@contextmanager
def _making_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Also what a graph makes from nothing, such as positions, is fake in here."""
    # When Dynamo calls a backend its context has another mode, beside which torch.tensor() of PyTorch 2.9 raises.
    with mode, mock.patch.object(TracingContext.try_get() or TracingContext(mode), "fake_mode", mode):
        yield


class Stretch(nn.Module):
    """Part of a graph, as it is: of modules that are no GraphModule, nobody takes out nodes without a use."""

    def __init__(self, body: GraphModule):
        super().__init__()
        self.body = body

    def forward(self, *values: Any) -> Any:
        return self.body(*values)


def _transforms_apart(module: GraphModule) -> GraphModule:
    """The graph with each stretch under vmap (grad, jvp, dual_level) as the body of one operator of higher order."""
    graph, copies, stretch, depth = Graph(), {}, [], 0
    for node in module.graph.nodes:
        step = nesting(node)
        depth += step
        if depth or step:
            stretch.append(node)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop(OF_DYNAMO, None)
        if stretch and not depth:
            results = [node for node in stretch if any(user not in stretch for user in node.users)]
            _wrap(graph, module, stretch, results, copies)
            stretch = []
    return GraphModule(module, graph)


def _numbers_apart(module: GraphModule) -> GraphModule:
    """The graph with each operator on a number that changes as the body of one of higher order.

    That is given the integers that are marked as numbers, and reads a float itself.
    """
    if not any(reads_a_number(node) or NUMBER in node.meta for node in module.graph.nodes):
        return module
    graph, copies = Graph(), {}
    numbers: dict[Node, list[Node]] = {}  # -> the nodes that they are computed by
    for node in module.graph.nodes:
        given = [number for number in node.all_input_nodes if number in numbers]
        made_by = [*dict.fromkeys(n for number in given for n in numbers[number])]
        if NUMBER in node.meta:
            numbers[node] = []
            copies[node] = graph.node_copy(node)
        elif reads_a_number(node) or given and is_number(node):
            numbers[node] = [*made_by, node]
        elif given and node.op == "output":
            if any(reads_a_number(n) for number in given for n in numbers[number]):
                raise NotImplementedError("a graph that returns a float that changes, or what is computed of one")
            graph.node_copy(node, lambda n: copies.get(n))  # see _return_numbers()
        elif given:
            _wrap(graph, module, [*made_by, node], [node], copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop(OF_DYNAMO, None)
    return GraphModule(module, graph)


def _return_numbers(traced: GraphModule, module: GraphModule) -> None:
    """Has `traced`, made of a graph from Dynamo, return what this computes of its numbers, and not what that is at hand."""
    output, (results,) = traced.graph.output_node(), module.graph.output_node().args
    copies = dict(zip(module.graph.find_nodes(op="placeholder"), traced.graph.find_nodes(op="placeholder")))

    def of_numbers(node: Any) -> bool:
        if not isinstance(node, Node):
            return False
        return NUMBER in node.meta or is_number(node) and any(map(of_numbers, node.all_input_nodes))

    def copied(node: Node) -> Node:
        if node not in copies:
            if not is_number(node):
                raise NotImplementedError("a graph that returns an integer that it computes of a tensor")
            copies[node] = traced.graph.node_copy(node, copied)
        return copies[node]

    if isinstance(results, (list, tuple)) and any(map(of_numbers, results)):
        with traced.graph.inserting_before(output):
            made = [copied(ours) if of_numbers(ours) else own for ours, own in zip(results, output.args[0], strict=True)]
        output.args = (type(output.args[0])(made),)
        traced.recompile()


def _wrap(graph: Graph, module: GraphModule, stretch: list[Node], results: list[Node], copies: dict[Node, Node]) -> None:
    """Appends a call of `stretch` to `graph`; `copies` gets its `results`."""
    given = [n for n in dict.fromkeys(n for node in stretch for n in node.all_input_nodes) if n not in stretch]
    piece = Graph()
    inside = {node: piece.placeholder(f"given_{i}") for i, node in enumerate(given)}
    for node in stretch:
        inside[node] = piece.node_copy(node, inside.__getitem__)
    piece.output(tuple(inside[node] for node in results))
    name = f"stretch_{stretch[-1].name}"
    module.add_module(name, Stretch(GraphModule(module, piece)))
    call = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr(name), *(copies[node] for node in given)))
    for i, node in enumerate(results):
        copies[node] = graph.call_function(operator.getitem, (call, i))


class _Traced(Interpreter):
    """Runs a graph from Dynamo under a tracer, to which an operator of higher order is one node.

    Its autocast is PyTorch's state, where trace() finds it: make_fx would only note it down. Another setting of PyTorch's
    is both, for make_fx would not note it down.
    """

    def __init__(self, module: GraphModule, gradients: bool):
        super().__init__(module)
        self.gradients = gradients
        self.is_recording = torch.is_grad_enabled()  # where the graph is; trace() is without gradients

    def run_node(self, n: Node) -> Any:
        if is_setting(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            get_proxy_mode().tracer.create_proxy("call_function", setting_of(n.target, args, kwargs), (), {})
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.amp.autocast_mode._exit_autocast:
            return set_autocast(*args[0])
        if target is torch.amp.autocast_mode._enter_autocast:
            device_type, dtype, is_enabled, *_ = *args, None, True
            before = (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            set_autocast(device_type, is_enabled, dtype or before[2])
            return before
        if target is set_gradients:
            self.is_recording = args[0]
        if target is data_of:
            return as_one_node(target, args, kwargs)
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        if target is checkpoint and not self.gradients:  # then it is its body, and no more
            body = _Traced(args[0], False)
            body.is_recording = self.is_recording
            return body.run(*args[1:])
        with autocast_as_nodes(), self._recording() if args and isinstance(args[0], Stretch) else nullcontext():
            return as_one_node(target, args, kwargs)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Around transforms: Dynamo writes no enable_grad() where gradients are on, and nested ones need it."""
        # make_fx, which learns of it as a mode of functions, would note down that gradients are set.
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self.is_recording):
            yield


def trace(function: Callable[..., Any], inputs: list[Any], tracing_mode: str = "real") -> GraphModule:
    options = {"tracing_mode": tracing_mode, "pre_dispatch": True, "_allow_non_fake_inputs": True}
    with settings_restored(), torch.no_grad():
        traced = make_fx(function, autocast_operators() | WRITTEN_OUT | operators_in_doubt(), **options)(*inputs)
    for node in traced.graph.nodes:
        _fill_in(node)
    for node in traced.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(traced, node.target), FakeTensor):
            raise RuntimeError("the trace lost sight of a tensor, which would be a fake one in the graph")
        node.meta.setdefault("val", getattr(traced, node.target))
    _write_numbers(traced)
    prune(traced, as_written=True)
    return traced


def _write_numbers(traced: GraphModule) -> None:
    """A torch.tensor(0.5) in forward is a constant of the trace, which is copied at each call: it becomes the number."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        constant = getattr(traced, node.args[0].target, None) if node.args[0].op == "get_attr" else None
        if not isinstance(constant, Tensor) or constant.dim() or constant.is_complex():
            continue
        with _disable_current_modes():
            node.target, node.args = aten.scalar_tensor.default, (constant.item(),)
        node.kwargs = {"dtype": constant.dtype, "device": constant.device}
        for detached in [user for user in node.users if user.target is aten.detach_.default]:
            detached.replace_all_uses_with(node)
            traced.graph.erase_node(detached)
    for node in traced.graph.find_nodes(op="get_attr"):
        if not node.users:
            traced.graph.erase_node(node)
            known = {other.target for other in traced.graph.find_nodes(op="get_attr")}
            if node.target not in known:  # torch.compile asks where each tensor of a module comes from
                delattr(traced, node.target)


def _fill_in(node: Node) -> None:
    """An eps that is not given is that of the dtype in which PyTorch computes, and a cast to another's dtype is to that."""
    if node.target is aten.type_as.default and value(node).device == value(node.args[0]).device:
        node.target, node.args = aten.to.dtype, (node.args[0], value(node).dtype)
    if node.target is aten.rms_norm.default and (len(node.args) < 4 or node.args[3] is None):
        weight = node.args[2] if len(node.args) > 2 else None
        node.args = (*node.args[:2], weight, torch.finfo(torch.promote_types(value(node).dtype, torch.float32)).eps)
