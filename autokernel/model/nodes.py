"""What the nodes of a graph in ATen make: their memory and layout, what writes to it, and what can be left out."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from autokernel.model import catching

aten = torch.ops.aten


RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}


CASTS = {aten.to.dtype_layout, aten.to.other, aten.type_as.default}  # where the device stays the same


# Nothing happens if the result has the input's dtype, shape and strides.
CONVERSIONS = {
    aten.to.dtype,
    aten.to.device,
    aten.contiguous.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.alias.default,
    aten.reshape.default,
}


ITSELF = {
    aten.to.dtype,
    aten.to.device,
    aten.contiguous.default,
    aten.dropout.default,
}  # what nothing happens to they return
HAND_ON = ITSELF | {  # as these do, which are no casts; a view of it would be another object
    *(aten.to.dtype_layout, aten.to.other, aten.to.prim_Device, aten.type_as.default),
    *(aten.resolve_conj.default, aten.resolve_neg.default, aten.positive.default, aten.real.default),
    *(aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default),
    *(aten.flatten.using_ints, aten.sum_to_size.default, aten.to_dense.default),
    *(aten.alpha_dropout.default, aten.feature_dropout.default, aten.feature_alpha_dropout.default),
}


# Norms that keep statistics, and what their argument is called that says whether they do.
KEEP_STATISTICS = {
    aten.batch_norm.default: "training",
    aten.native_batch_norm.default: "training",
    aten.cudnn_batch_norm.default: "training",
    aten.miopen_batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
}


CHECKS = "autokernel_checks"  # in a node's meta: it may raise, and nothing else comes of it


set_gradients = torch._C._set_grad_enabled


def has_effects(node: Node) -> bool:
    """Whether it does more than compute its results: changes memory, takes random numbers.

    To PyTorch, attention and recurrent operators always take some; where their dropout is zero they do not.
    """
    if _statistics(node):
        return True
    if not node.is_impure():
        return False
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not is_random or node.target._schema.is_mutable:
        return True
    given = {
        argument.name: node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(node.target._schema.arguments)
    }
    rates = ("dropout_p", "dropout", *(["p"] if node.target is aten.dropout.default else ()))
    return not any(given.get(name) == 0 for name in rates)


def prune(graph: GraphModule, as_written: bool = False) -> None:
    """Takes out nodes without a use: not in the bodies of operators of higher order, which are the model's, nor those.

    as_written: it is the model's own program. What has no use there, and may raise, stays for that.
    """
    for node in reversed(graph.graph.nodes):
        if node.users or has_effects(node) or isinstance(node.target, HigherOrderOperator):
            continue
        if as_written and catching.may_fail(node):
            node.meta[CHECKS] = True
        elif CHECKS not in node.meta:
            graph.graph.erase_node(node)
    graph.recompile()


def simplified(graph: GraphModule) -> tuple[Graph, dict[Node, Node]]:
    """A copy in which what means the same is written in the same way, for matching, and its nodes -> those of `graph`.

    Values are the same, but not what shares memory with what, and not what gradients flow through.
    """
    copies: dict[Node, Node] = {}
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, copies))
    modes = any(node.target is set_gradients for node in copy.nodes)
    changed = set().union(*(written(node) for node in copy.nodes))
    for node in copy.nodes:
        if not storages([node, *node.all_input_nodes]) & changed:  # there, views and copies cannot be told apart
            simplify(node, modes)
    copy.eliminate_dead_code()
    return copy, {copied: original for original, copied in copies.items()}


def strides_of(t: Tensor) -> list[int]:
    """Those that say where an element lies."""
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]


def value(node: Node) -> Any:
    """The fake tensor (or tuple, or number) that stands for the node's result; None if it has none."""
    return node.meta.get("val")


def another(t: Tensor) -> Tensor:
    """`t` as a tensor of its own, in its memory: view_as() has other strides where there is but one of something."""
    return t.view_as(t) if t.is_nested else aten.alias.default(t)


def storages(nodes: Iterable[Node]) -> set[int]:
    """The memory behind the results of `nodes`: views share it."""
    return memory([value(node) for node in nodes])


def overwritten(node: Node) -> list[Node]:
    """The nodes whose memory a node changes in place."""
    if "written" in node.meta:
        return [given for given in node.all_input_nodes if storages([given]) & node.meta["written"]]
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return _statistics(node)
    if node.target is aten.detach_.default:  # of every torch.tensor() in forward: its memory stays as it is
        return []
    changed = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs
    return [v for v in tree_leaves([given[name] for name in changed if name in given]) if isinstance(v, Node)]


def _statistics(node: Node) -> list[Node]:
    """What a norm of batches writes to in training, of which its schema does not tell."""
    if node.target not in KEEP_STATISTICS:
        return []
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs
    kept = [given.get(name) for name in ("running_mean", "running_var") if given.get(KEEP_STATISTICS[node.target])]
    return [v for v in kept if isinstance(v, Node)]


def written(node: Node) -> set[int]:
    """The memory that a node changes in place."""
    return storages(overwritten(node))


def simplify(node: Node, modes: bool = False) -> None:
    """Write in one way what can be written in many. `modes`: gradients are switched, which a view takes notice of."""
    if node.target in RESHAPES and all(isinstance(n, int) for n in value(node).shape):
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(value(node).shape)), {}
    if node.target is aten.mT.default:
        node.target, node.args = aten.transpose.int, (node.args[0], -2, -1)
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        node.target, node.args = aten.pow.Tensor_Scalar, (node.args[0], 2)
    if node.target in CASTS and value(node).device == value(node.args[0]).device and not node.kwargs.get("copy"):
        node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], value(node).dtype), {}
    if is_idle(node) and (node.target in ITSELF or not modes) or _moves_nothing(node):
        node.replace_all_uses_with(node.args[0])


def _moves_nothing(node: Node) -> bool:
    """Whether it only has other strides for what there is but one of, as _einsum writes it."""
    if node.target is not aten.as_strided.default:
        return False
    ours, given = ((t.shape, strides_of(t), t.storage_offset()) for t in (value(node), value(node.args[0])))
    return ours == given


def is_idle(node: Node, result: Callable[[Node], Any] = lambda node: value(node)) -> bool:
    """Whether a node's result is its input, in its memory and in its layout."""
    if node.target is not aten.dropout.default and node.target not in CONVERSIONS:
        return False
    return _is_alike(node, result)


def _is_alike(node: Node, result: Callable[[Node], Any]) -> bool:
    ours, given = result(node), result(node.args[0])
    return layout(ours) == layout(given) is not None and memory(ours) == memory(given)


def object_of(node: Node, result: Callable[[Node], Any] = lambda node: value(node)) -> Node:
    """The node that made the object that `node` returns: itself, unless it hands on what it was given."""
    while True:
        if node.target in HAND_ON and _is_alike(node, result) or _changes_its_input(node):
            node = node.args[0]
        elif (given := _broadcast(node)) and layout(result(node)) == layout(result(given)):
            node = given
        else:
            return node


def _broadcast(node: Node) -> Node | None:
    """What is handed on in this part of the result, where it has the shape of all."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and source.target is aten.broadcast_tensors.default:
        return source.args[0][node.args[1]]
    return None


def _changes_its_input(node: Node) -> bool:
    """Whether it is like add_(), which returns its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], Node):
        return False
    returns = node.target._schema.returns
    changed = [part.alias_info for part in (*returns, node.target._schema.arguments[0])]
    return len(returns) == 1 and all(info is not None and info.is_write for info in changed)


def memory(fake: Any) -> set[int]:
    """The storages of the tensors in a result."""
    return {t.untyped_storage()._cdata for t in tree_leaves(fake) if isinstance(t, Tensor)}


def layout(fake: Any) -> Any:
    """What a tensor is but for its contents; None of anything else."""
    if not isinstance(fake, Tensor):
        return None
    return fake.dtype, fake.device, fake.shape, fake.stride(), fake.storage_offset(), fake.is_conj(), fake.is_neg()


def name_of(node: Node) -> str:
    return getattr(node.target, "__name__", None) or str(node.target).rpartition(".")[2]
