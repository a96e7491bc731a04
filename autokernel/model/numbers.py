"""Numbers among the inputs and results of a graph: which change from call to call, and which are read from tensors."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from autokernel.spec import TensorSpec

NUMBER = "autokernel_number"  # in an input's meta: see mark_numbers()


def tensors_in(module: GraphModule) -> Iterator[Tensor]:
    """What stands for the tensors in a graph from Dynamo."""
    leaves = (leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("example_value")))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def reads_a_number(node: Node) -> bool:
    """Whether it is how Dynamo hands a float of Python to a graph: in a tensor that nothing else takes notice of."""
    if (node.op, node.target) != ("call_method", "item") or not _is_float(node):
        return False
    return node.args[0].op == "placeholder" and len(node.args[0].users) == 1


def _is_float(node: Node) -> bool:
    """Whether a node of Dynamo's stands for a float that changes."""
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


def is_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def numbers_in(module: GraphModule) -> list[Node]:
    """The inputs of a graph from Dynamo that are integers and change, and on which the layout of no tensor depends.

    Such as the step of a schedule: a graph for each of its values would have the same sites as one for all of them.
    """
    of_layouts = free_symbols([*tensors_in(module)])
    inputs = module.graph.find_nodes(op="placeholder")
    numbers = [n for n in inputs if isinstance(n.meta.get("example_value"), torch.SymInt)]
    return [n for n in numbers if not free_symbols(n.meta["example_value"]) & of_layouts]


def mark_numbers(numbers: Iterable[Node]) -> None:
    """From now on to_aten() keeps these inputs as they are, whatever they are at hand."""
    for node in numbers:
        node.meta[NUMBER] = True


def at_hand(fake: Any) -> Any:
    """A size, or a fake tensor, with the sizes of the call at hand."""
    if isinstance(fake, torch.SymInt):
        return fake.node.hint
    if not isinstance(fake, Tensor) or not fake._has_symbolic_sizes_strides:
        return fake
    shape, strides = ([at_hand(n) for n in sizes] for sizes in (fake.shape, fake.stride()))
    spec = TensorSpec(tuple(shape), fake.dtype, tuple(strides), at_hand(fake.storage_offset()))
    storage = torch.empty(spec.storage_numel, dtype=fake.dtype, device=fake.device)
    return storage.as_strided(spec.shape, spec.strides, spec.offset)
