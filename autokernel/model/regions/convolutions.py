"""Convolutions that are part of a region on a CPU: oneDNN computes them, of weights that it packs once.

PyTorch gives oneDNN weights as they are, which it lays out anew at each call. Measured on two cores of a Zen 5, in
channels_last: 0.59 ms instead of 0.90 for 512 channels of 7 x 7, 0.45 instead of 0.52 for 256 of 14 x 14.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.lowering import arguments

DEVICE, DTYPE = "cpu", torch.float32
PACKET = "_convolution_pointwise"  # of mkldnn::, which is there where PyTorch was built with oneDNN
FUNCTION = '''

_packed = WeakTensorKeyDictionary()  # by weight: a weight that is written to comes as another tensor


def _convolved(x, weight, bias, *options):
    """By oneDNN; with packed weights its results have their channels last. Of x.data, since it counts x as written to."""
    packed = _packed.setdefault(weight, {})  # by what it is packed for: groups above all are laid out in another way
    if (key := (x.shape, options)) not in packed:
        packed[key] = torch._C._nn.mkldnn_reorder_conv2d_weight(weight.contiguous().to_mkldnn(), *options, x.shape)
    bias = None if bias is None else bias.contiguous()  # it reads one as if it were
    return torch.ops.mkldnn._convolution_pointwise(x.data, packed[key], bias, *options, "none", [], "")
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


def convolution_of(node: Node) -> Convolution | None:
    """What a node is as a convolution of images; None where it is none, or one that oneDNN is not given here."""
    if node.target not in (aten.conv2d.default, aten.convolution.default) or not hasattr(torch.ops.mkldnn, PACKET):
        return None
    given, made = arguments(node), value(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    tensors = [made, *(value(n) for n in (source, weight, bias) if n is not None)]
    if given.get("transposed") or made.dim() != 4 or value(source).dim() != 4 or not made.numel():
        return None
    if any(t.device.type != DEVICE or t.dtype != DTYPE for t in tensors):
        return None
    twice = lambda v: tuple(v) * (2 // len(v))  # noqa: E731
    options = *(twice(given[name]) for name in ("padding", "stride", "dilation")), given["groups"]
    is_known = all(isinstance(v, int) for values in options[:3] for v in values)
    return Convolution(node, source, weight, bias, options) if is_known else None


def convolutions_for(nodes: Collection[Node], inputs: Sequence[Node], taken: Collection[Node]) -> list[Convolution]:
    """Those among a region's inputs that nothing but it takes."""
    found = [convolution_of(n) for n in inputs if n not in taken and n.users and set(n.users) <= set(nodes)]
    return [c for c in found if c]


def channels_last(piece: GraphModule, inputs: Sequence[Node], made: Sequence[Convolution]) -> None:
    """Lays out inputs of a region's graph as oneDNN makes them."""
    nodes = {c.node for c in made}
    for placeholder, node in zip(piece.graph.find_nodes(op="placeholder"), inputs):
        if node in nodes:
            placeholder.meta["val"] = value(node).contiguous(memory_format=torch.channels_last)
