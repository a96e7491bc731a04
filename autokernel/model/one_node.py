"""Calls that stay one node of a graph, whatever they are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Proxy
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves, tree_map

from autokernel.model.nodes import memory, name_of

data_of = torch._C._autograd._get_data_attr  # x.data: no operator, and detach() would count writes to it as writes to x


class Number(int):
    """An input of a graph that is traced, at hand; `place`: among its inputs."""

    place: int

    def __new__(cls, place: int, number: int) -> "Number":
        made = super().__new__(cls, number)
        made.place = place
        return made


def as_one_node(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its result for fake tensors. The node has the bodies as they are, and in `meta["written"]` what they change."""
    tracer, leaves = get_proxy_mode().tracer, tree_leaves((args, kwargs))
    bodies = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    versions = [None if t.is_inference() else t._version for t in tensors]  # where it is not known, all may be changed
    with disable_proxy_modes_tracing():
        result = target(*args, **kwargs)
    _forget_symbols(result)
    for body in bodies:
        tracer.root.register_module(tracer.get_fresh_qualname("body_"), body)
    inputs = tracer.graph.find_nodes(op="placeholder")

    def proxy_of(v: Any) -> Any:
        return Proxy(inputs[v.place], tracer) if isinstance(v, Number) else tracer.unwrap_proxy(v)

    proxy = tracer.create_proxy("call_function", target, *tree_map(proxy_of, (args, kwargs)))
    # Without a body, such as a Triton kernel of the model's own, it may change all that it is given.
    is_closed = not (bodies or target is data_of or isinstance(target, OpOverload))
    changed = [t for t, version in zip(tensors, versions) if is_closed or version is None or t._version != version]
    if any(map(_keeps_statistics, bodies)):  # which fake tensors do not tell
        changed += [t for t in tensors if t.dim() == 1 and t.is_floating_point() and not t.requires_grad]
    proxy.node.meta["written"] = memory(changed)
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def _forget_symbols(result: Any) -> None:
    """A number that a body reads and does not return, new at each reading in inference mode, is nobody's to bind."""
    fakes = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
    for shape_env in {id(fake.fake_mode): fake.fake_mode.shape_env for fake in fakes}.values():
        if shape_env and shape_env.pending_fresh_unbacked_symbols:
            returned = set().union(*map(free_unbacked_symbols, fakes))
            shape_env.pending_fresh_unbacked_symbols[:] = [
                symbol for symbol in shape_env.pending_fresh_unbacked_symbols if symbol in returned
            ]


def _keeps_statistics(body: nn.Module) -> bool:
    """Whether a norm of batches is in it, as Dynamo writes it, in training."""
    graphs = (module.graph for module in body.modules() if isinstance(module, GraphModule))
    norms = (n for graph in graphs for n in graph.nodes if name_of(n) in ("batch_norm", "instance_norm"))
    return any(n.args[5] if len(n.args) > 5 else True for n in norms)
