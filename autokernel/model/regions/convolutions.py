"""Convolutions that are part of a region on a CPU: oneDNN computes them, of weights that it packs once.

PyTorch gives oneDNN weights as they are, which it lays out anew at each call: the smaller the image, the larger a part.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.lowering import VIEWS, arguments

DEVICE, DTYPE = "cpu", torch.float32  # there oneDNN is as fast as the cores allow, and loops of ours half as fast or less
PACKET = "_convolution_pointwise"  # of mkldnn::, which is there where PyTorch was built with oneDNN
FUNCTION = '''

_packed = WeakTensorKeyDictionary()  # by weight: a weight that is written to comes as another tensor


def _convolved(x, weight, bias, *options):
    """By oneDNN; of packed weights its results have their channels last."""
    packed = _packed.setdefault(weight, {})  # by what it is packed for: groups above all are laid out in another way
    if is_row := x.dim() == 3:  # an image of one row
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    if (key := (x.shape, options)) not in packed:
        packed[key] = torch._C._nn.mkldnn_reorder_conv2d_weight(weight.contiguous().to_mkldnn(), *options, x.shape)
    bias = None if bias is None else bias.contiguous()  # it reads one as if it were
    y = torch.ops.mkldnn._convolution_pointwise(x, packed[key], bias, *options, "none", [], "")
    return y.squeeze(2) if is_row else y
'''


@dataclass(frozen=True)
class Convolution:
    """A node of the graph that oneDNN computes."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None
    options: tuple[Any, ...]  # padding, stride, dilation, groups

    @property
    def inputs(self) -> list[Node]:
        return [self.source, self.weight, *([self.bias] if self.bias else [])]

    def call(self, name: str, names: Mapping[Node, str]) -> str:
        """The statement of a kernel file that makes it."""
        bias = names[self.bias] if self.bias else None
        given = ", ".join(map(str, (names[self.source], names[self.weight], bias, *self.options)))
        return f"{name} = _convolved({given})"


CONVOLUTIONS = aten.conv1d.default, aten.conv2d.default, aten.convolution.default


def convolution_of(node: Node) -> Convolution | None:
    """What a node is as a convolution of images or rows; None where it is none, or one that oneDNN is not given here."""
    if node.target not in CONVOLUTIONS or not hasattr(torch.ops.mkldnn, PACKET):
        return None
    given, made = arguments(node), value(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    tensors = [made, *(value(n) for n in (source, weight, bias) if n is not None)]
    dims = made.dim() - 2
    if given.get("transposed") or dims not in (1, 2) or value(source).dim() != made.dim() or not made.numel():
        return None
    if any(t.device.type != DEVICE or t.dtype != DTYPE for t in tensors):
        return None

    def twice(values: Sequence[int], of_one_row: int) -> tuple[int, ...]:
        each = tuple(values) * (dims // len(values))
        return each if dims == 2 else (of_one_row, *each)

    nothing = {"padding": 0, "stride": 1, "dilation": 1}
    options = *(twice(given[name], default) for name, default in nothing.items()), given["groups"]
    is_known = all(isinstance(v, int) for values in options[:3] for v in values)
    return Convolution(node, source, weight, bias, options) if is_known else None


def convolutions_for(nodes: Collection[Node], inputs: Sequence[Node], taken: Collection[Node]) -> dict[Node, Convolution]:
    """Those that a region's inputs are, or are views of, and that nothing but it takes; by input."""
    found: dict[Node, Convolution] = {}
    paths: dict[Node, list[Node]] = {}
    for node in inputs:
        path = [node]
        while path[-1].target in VIEWS:
            path.append(path[-1].args[0])
        if taken.isdisjoint(path) and (convolution := convolution_of(path[-1])):
            found[node], paths[node] = convolution, path
    while True:
        inside = {*nodes, *(n for node in found for n in paths[node])}
        outside = [node for node in found if any(not inside.issuperset(n.users) for n in paths[node])]
        if not outside:
            return found
        for node in outside:
            del found[node]


def channels_last(piece: GraphModule, inputs: Sequence[Node], made: Collection[Node]) -> None:
    """Lays out inputs of a region's graph as oneDNN makes them."""
    for placeholder, node in zip(piece.graph.find_nodes(op="placeholder"), inputs):
        if node in made:
            fake, is_row = value(node), value(node).dim() == 3
            images = (fake.unsqueeze(2) if is_row else fake).contiguous(memory_format=torch.channels_last)
            placeholder.meta["val"] = images.squeeze(2) if is_row else images
