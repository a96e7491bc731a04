"""Casts in a model that round to fewer digits than what follows has: a kernel, which computes in one dtype, has none."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from autokernel.model.nodes import CONVERSIONS, RESHAPES, aten, value

CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default}
TRANSPOSING = {aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default}
PASSING = RESHAPES | CONVERSIONS | TRANSPOSING | {aten.clone.default}


def is_coarser(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether floats in `one` have fewer digits than in `other`, or a smaller range; float16 and bfloat16 each have one."""
    ours, theirs = torch.finfo(one), torch.finfo(other)
    return ours.eps > theirs.eps or ours.max < theirs.max


def floats(nodes: Iterable[Node]) -> set[torch.dtype]:
    """The floating-point dtypes of the results of `nodes`."""
    tensors = (leaf for node in nodes for leaf in tree_leaves(value(node)))
    return {t.dtype for t in tensors if isinstance(t, Tensor) and t.dtype.is_floating_point}


def rounding(nodes: Collection[Node], ends: Iterable[Node]) -> Node | None:
    """A cast among `nodes` to a dtype that is coarser than those of all `ends`, or than that of what takes its result."""
    around = floats(ends)
    for node in nodes:
        for dtype in floats([node]) if node.target in CASTS else ():
            if any(is_coarser(dtype, given) for given in floats(node.all_input_nodes)) and (
                all(is_coarser(dtype, other) for other in around) or _is_widened(node, dtype, nodes)
            ):
                return node
    return None


def _is_widened(node: Node, dtype: torch.dtype, nodes: Collection[Node]) -> bool:
    """Whether among `nodes` something takes its result, or a view of it, and has more digits than `dtype`."""
    users = [user for user in node.users if user in nodes]
    return any(is_coarser(dtype, other) for other in floats(users)) or any(
        _is_widened(user, dtype, nodes) for user in users if user.target in PASSING
    )


def rounds(nodes: Collection[Node], ends: Collection[Node]) -> bool:
    """Whether anything among `nodes` has fewer digits than all of `ends`, or what is computed of it there."""
    around = floats(ends)
    is_coarse = any(all(is_coarser(dtype, other) for other in around) for dtype in floats(nodes))
    return is_coarse or rounding(nodes, ends) is not None
