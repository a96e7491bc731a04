"""How a graph runs: without a compiler, or in a compiler's form but with the objects that eager mode returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._functorch.eager_transforms import _autograd_grad
from torch.fx import GraphModule, Node

from autokernel.integration.graphs import copy_of
from autokernel.model.autocast import without_autocast
from autokernel.model.capture import forward_of
from autokernel.model.nodes import aten, layout, memory, object_of, storages, value
from autokernel.model.settings import is_forward_mode, restored_on_error
from autokernel.model.tracing import checkpoint


class Objects:
    """Which results of a graph are one object, or an input, or in one memory: compilers do not keep to it.

    They take a view in which nothing happens for what it views, make a new one of what is returned as it came, and return a
    result and a view of it in memory of their own each.
    sites: the nodes of the original whose results kernels compute -> those that do.
    """

    def __init__(self, graph: GraphModule, sites: Mapping[Node, Node]):
        originals = {ours: original for original, ours in sites.items()}
        results = graph.graph.output_node().args[0]
        results = results if isinstance(results, (tuple, list)) else ()
        self.given = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        self.made = [object_of(v) if isinstance(v, Node) else None for v in results]
        held = {node: storages([originals.get(node, node)]) for node in (*filter(None, self.made), *self.given)}
        self.like = [value(originals.get(v, v)) if v else None for v in self.made]
        self.shared = [  # places of the results that share memory with another one or with an input
            i
            for i, ours in enumerate(self.made)
            if ours and any(held[ours] & held[v] for v in (*self.given, *self.made[:i], *self.made[i + 1 :]) if v)
        ]

    def kept_by(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, a compiler's form of the graph, with results that are the same objects as the graph's."""

        def run(*values: Any) -> Any:
            results = list(call(*values))
            known = {node: values[i] for node, i in self.given.items()}
            for i in self.shared:
                if self.made[i] in known:
                    results[i] = known[self.made[i]]
                elif any(results[i] is v for v in known.values()):
                    results[i] = aten.alias.default(results[i])
                elif (base := self._base(i, results)) is not None:
                    own = self.like[i]
                    results[i] = base.as_strided(own.shape, own.stride(), own.storage_offset())
                known[self.made[i]] = results[i]
            return tuple(results)

        return run if self.shared else call

    def _base(self, i: int, results: Sequence[Any]) -> Tensor | None:
        """An earlier result that result i should share all of its memory with, and does not."""
        for j in (j for j in self.shared if j < i):
            ours, base, is_plain = results[i], results[j], not (results[i].requires_grad or results[j].requires_grad)
            should = memory(self.like[i]) == memory(self.like[j]) and ours.numel() == base.numel()
            if should and is_plain and memory(ours) != memory(base) and layout(base) == _real_layout(self.like[j], base):
                return base
        return None


def in_eager_mode(module: GraphModule) -> Callable[..., Any]:
    """A graph as PyTorch runs it without a compiler, which would see to random numbers: a checkpoint is the model's own."""
    if not module.graph.find_nodes(op="call_function", target=checkpoint):
        return restored_on_error(module, forward_of(module))
    copied = copy_of(module)
    for node in copied.graph.find_nodes(op="call_function", target=checkpoint):
        node.target = _checkpointed
    copied.recompile()
    return restored_on_error(copied, forward_of(copied))


def _checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """What PyTorch makes of a checkpoint in a graph draws other random numbers when it computes the body once more.

    What wants no gradient is no argument here: among it are buffers, which the body may write, and arguments may not be.
    """
    options, given = checkpoint.divide_kwargs(kwargs)
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    run = in_eager_mode(body)
    if not torch.is_grad_enabled():
        return run(*args, **given)
    held = [i for i, a in enumerate(args) if isinstance(a, Tensor) and not (a.requires_grad or a.is_inference())]
    before = {i: args[i]._version for i in held}

    def again(*others: Any, **given: Any) -> Any:
        if any(args[i]._version != version for i, version in before.items()):
            raise RuntimeError(
                "what a checkpoint needs again for the backward pass has been modified by an inplace operation"
            )
        rest = iter(others)
        return run(*(a if i in held else next(rest) for i, a in enumerate(args)), **given)

    others = [a for i, a in enumerate(args) if i not in held]
    result = torch.utils.checkpoint.checkpoint(again, *others, **options | {"use_reentrant": False}, **given)
    for i in [i for i in held if args[i]._version != before[i]]:
        del before[i]  # written by the body itself
    return result


def switch_inference_mode_off_for_gradients(module: GraphModule) -> None:
    """Where vjp() or jacrev() computes some, PyTorch does so outside of inference mode, which Dynamo leaves out."""
    for body in [m for m in module.modules() if isinstance(m, GraphModule)]:
        nodes = body.graph.find_nodes(op="call_function", target=_autograd_grad)
        for node in nodes:
            node.target = _gradients
        if nodes:
            body.recompile()


def _gradients(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    if not torch.is_inference_mode_enabled():
        return _autograd_grad(*args, **kwargs)
    wanted = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(wanted):  # the former alone switches gradients on
        return _autograd_grad(*args, **kwargs)


def _real_layout(fake: Tensor, real: Tensor) -> Any:
    """The layout of `fake` on the device of `real`, where a graph that runs may be."""
    dtype, _, *rest = layout(fake)
    return dtype, real.device, *rest


def without_tangents(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which knows nothing of tangents; where tensors may have some, `original`."""

    def run(*values: Any) -> Any:
        return original(*values) if is_forward_mode() else call(*values)

    return run


def with_constants(call: Callable[..., Any], constants: Sequence[Tensor]) -> Callable[..., Any]:
    return (lambda *values: call(*values, *constants)) if constants else call


def without_casts(ambient: Sequence[str], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, in which the casts of autocast are written out, where autocast is on for these kinds of device."""

    def run(*values: Any) -> Any:
        with without_autocast():
            return call(*values)

    return run if ambient else call
