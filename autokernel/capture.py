"""A model as graphs: captured by Dynamo (graph breaks are fine), normalised to ATen before any decomposition.

Linear, scaled_dot_product_attention, layer_norm, softmax and their like stay single nodes. What a program may write in
many ways without meaning anything else is written in one way: every view is a `reshape`, every cast a `to(dtype)`, one to
the same dtype is nothing, a square is `pow(x, 2)`, an einsum that is a product of matrices is a `matmul`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from autokernel.spec import TensorSpec

aten = torch.ops.aten
IN_GRAPH = "autokernel:graph"

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


@dataclass
class CapturedGraph:
    """One graph of a model with the inputs of its first call; `calls` counts its calls in one pass."""

    module: GraphModule
    inputs: tuple[Any, ...]
    calls: int = 0


@dataclass(frozen=True)
class Capture:
    graphs: tuple[CapturedGraph, ...]
    breaks: tuple[str, ...]  # why parts of the model are in no graph, or a graph is left alone, in Dynamo's words or ours


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    again: Callable[[Callable[[], Any]], None] = lambda run: None,
) -> Capture:
    """Run the model once, without gradients, and keep every graph that Dynamo makes of it.

    What cannot be captured runs as it is. `again` gets the captured model, to be run again: each of its graphs runs
    inside a range of the profiler of the name IN_GRAPH.
    """
    graphs: list[CapturedGraph] = []
    left_alone: list[str] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if why := why_left_alone(module):
            left_alone.append(why)
            return module.forward
        try:
            graph = CapturedGraph(normalise(module), tuple(inputs))
        except Exception as error:  # of any kind: this is whatever the model does, met by a tracer
            left_alone.append(f"{type(error).__name__}: {error}")
            return module.forward
        graphs.append(graph)

        def call(*values: Any) -> Any:
            graph.calls += counting
            graph.inputs = values if graph.calls == 1 else graph.inputs
            with record_function(IN_GRAPH):
                return module.forward(*values)

        return call

    torch._dynamo.reset()  # compiled code of an earlier capture would be found and run instead
    counting = True
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=True):
        compiled(*args, **kwargs)
        breaks = tuple(torch._dynamo.utils.counters["graph_break"])
        counting = False
        again(lambda: compiled(*args, **kwargs))
    torch._dynamo.reset()
    return Capture(tuple(graphs), (*breaks, *left_alone))


def why_left_alone(module: GraphModule) -> str | None:
    """Traced once more, a graph would lose an autograd.Function, a checkpoint, a hook, a number that changes."""
    methods = {"register_hook", "requires_grad_", "retain_grad", "item"}
    held = (n for n in module.graph.nodes if isinstance(n.target, HigherOrderOperator) or n.target in methods)
    first = next(held, None)
    return first and f"a graph with {first.target} in it is left as it is"


def normalise(module: GraphModule) -> GraphModule:
    """A graph from Dynamo, in ATen, each meaning written in one way; nodes carry a fake tensor in `meta["val"]`.

    Of symbolic sizes it takes those of the call at hand.
    """
    fakes = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), nullcontext())
    with mode:  # also what the graph makes from nothing, such as positions, must be fake
        return trace(module, [_at_hand(fake) for fake in fakes])


def _at_hand(fake: Any) -> Any:
    if isinstance(fake, torch.SymInt):
        return fake.node.hint
    if not isinstance(fake, Tensor) or not fake._has_symbolic_sizes_strides:
        return fake
    shape, strides = ([_at_hand(n) for n in sizes] for sizes in (fake.shape, fake.stride()))
    spec = TensorSpec(tuple(shape), fake.dtype, tuple(strides), _at_hand(fake.storage_offset()))
    storage = torch.empty(spec.storage_numel, dtype=fake.dtype, device=fake.device)
    return storage.as_strided(spec.shape, spec.strides, spec.offset)


def trace(function: Callable[..., Any], inputs: list[Any], tracing_mode: str = "real") -> GraphModule:
    options = {"tracing_mode": tracing_mode, "pre_dispatch": True, "_allow_non_fake_inputs": True}
    with torch.no_grad():
        traced = make_fx(function, {aten.einsum.default: _as_product}, **options)(*inputs)
    changed = set().union(*(written(node) for node in traced.graph.nodes))
    for node in traced.graph.nodes:
        if not storages([node, *node.all_input_nodes]) & changed:  # there, views and copies cannot be told apart
            _simplify(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _as_product(equation: str, operands: Sequence[Tensor], path: Any = None) -> Tensor:
    """An einsum that is a product of matrices, or of batches of them, written as one; NotImplemented of any other."""
    names, _, result = equation.replace(" ", "").partition("->")
    letters = [list(name) for name in names.split(",")]
    if len(letters) != 2 or "." in equation or any(len(set(name)) < len(name) for name in letters):
        return NotImplemented
    (left, right), (a, b) = letters, operands
    shared, rows, columns = [c for c in left if c in right], [c for c in left if c not in right], set(right) - set(left)
    batch, summed = [c for c in shared if c in result], [c for c in shared if c not in result]
    sizes_agree = all(a.shape[left.index(c)] == b.shape[right.index(c)] for c in shared)
    is_product = len(summed) == len(columns) == 1 and rows and (len(rows) == 1 or not batch)
    if not (sizes_agree and is_product and sorted(result) == sorted([*batch, *rows, *columns])):
        return NotImplemented
    inner = [c for c in right if c not in batch]  # summed and free, in either order
    a, b = _in_order(a, left, batch + rows + summed), _in_order(b, right, batch + inner)
    product = torch.matmul(a, b if inner[0] in summed else b.transpose(-2, -1))
    return _in_order(product, [*batch, *rows, *columns], list(result))


def _in_order(t: Tensor, names: list[str], wanted: list[str]) -> Tensor:
    """t's dims, called `names`, in the order `wanted`."""
    moved = [i for i, (name, other) in enumerate(zip(names, wanted)) if name != other]
    if len(moved) == 2:
        return t.transpose(*moved)
    return t.permute([names.index(name) for name in wanted]) if moved else t


def value(node: Node) -> Any:
    """The fake tensor (or tuple, or number) that stands for the node's result; None if it has none."""
    return node.meta.get("val")


def storages(nodes: Iterable[Node]) -> set[int]:
    """The memory behind the results of `nodes`: views share it."""
    tensors = tree_leaves([value(node) for node in nodes])
    return {t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor)}


def written(node: Node) -> set[int]:
    """The memory that a node changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return set()
    changed = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs
    return storages(v for v in tree_leaves([given[name] for name in changed if name in given]) if isinstance(v, Node))


def _simplify(node: Node) -> None:
    if node.target in RESHAPES and all(isinstance(n, int) for n in value(node).shape):
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(value(node).shape)), {}
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        node.target, node.args = aten.pow.Tensor_Scalar, (node.args[0], 2)
    if node.target in CASTS and value(node).device == value(node.args[0]).device and not node.kwargs.get("copy"):
        node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], value(node).dtype), {}
    if node.target is aten.rms_norm.default and len(node.args) < 4:  # PyTorch then takes that of what it computes in
        weight = node.args[2] if len(node.args) == 3 else None
        node.args = (*node.args[:2], weight, torch.finfo(torch.promote_types(value(node).dtype, torch.float32)).eps)
    idle_dropout = node.target is aten.dropout.default and not node.args[2]
    if idle_dropout or (node.target in CONVERSIONS and _layout(node) == _layout(node.args[0])):
        node.replace_all_uses_with(node.args[0])


def _layout(node: Node) -> Any:
    fake = value(node)
    return (fake.dtype, fake.device, fake.shape, fake.stride()) if isinstance(fake, Tensor) else None
