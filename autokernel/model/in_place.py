"""Operations in place on what nothing else holds, as the same operations with a result of their own.

`nn.ReLU(inplace=True)` and `x += residual` are so in most networks of convolutions. What a kernel computes, it computes in
memory of its own; and where one operation is left in place, everything around it has to mind its order.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node, map_arg

from autokernel.model.nodes import aten, layout, storages, value


def give_results_of_their_own(graph: GraphModule) -> None:
    """Rewrites such operations of a graph in ATen that has no backward pass: there autograd may mind what they write to."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    sharing: dict[int, list[Node]] = defaultdict(list)  # by memory
    for node in order:
        for memory in storages([node]):
            sharing[memory].append(node)
    for node in order:
        form = _form(node.target)
        if form is None or not isinstance(node.args[0], Node) or not isinstance(value(node.args[0]), FakeTensor):
            continue
        (memory,) = storages([node.args[0]])
        before = [other for other in sharing[memory] if order[other] < order[node]]
        after = sharing[memory][len(before) + 1 :]
        is_held = any(o.op != "call_function" or any(order[u] > order[node] for u in o.users) for o in before)
        if not is_held and all(isinstance(o.target, OpOverload) for o in after) and _rewrite(node, form, after):
            sharing[memory] = before
            (own,) = storages([node])
            sharing[own] = [node, *after]


def _form(target: object) -> OpOverload | None:
    """The operator that is `target` but for its result: of those that compute elements, and draw no random numbers."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return None
    name = target.overloadpacket.__name__
    form = getattr(getattr(aten, name[:-1], None), target._overloadname, None) if name.endswith("_") else None
    is_same = form is not None and [a.name for a in form._schema.arguments] == [a.name for a in target._schema.arguments]
    return form if is_same and torch.Tag.pointwise in form.tags and not form._schema.is_mutable else None


def _rewrite(node: Node, form: OpOverload, views: Sequence[Node]) -> bool:
    """Whether it could be. `views`: what shares memory with the node's result from then on."""
    known = {other: value(other) for other in (node, *views)}
    target, node.target = node.target, form
    for other in known:
        args, kwargs = map_arg((other.args, other.kwargs), value)
        with known[node].fake_mode:
            other.meta["val"] = other.target(*args, **kwargs)
        if not isinstance(known[other], Tensor) or layout(value(other)) != layout(known[other]):
            node.target = target  # its result would lie in memory in another way
            for each, fake in known.items():
                each.meta["val"] = fake
            return False
    return True
