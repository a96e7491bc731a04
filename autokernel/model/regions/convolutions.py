"""Convolutions that are part of a region on a CPU: oneDNN computes them, of weights that it packs once.

PyTorch gives oneDNN weights as they are, which it lays out anew at each call: the smaller the image, the larger a part.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.lowering import VIEWS, arguments

DEVICE, DTYPE = "cpu", torch.float32  # there oneDNN is as fast as the cores allow, and loops of ours half as fast or less
PACKETS = "_convolution_pointwise", "_convolution_transpose_pointwise"  # of mkldnn::, where PyTorch was built with oneDNN
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dims: as oneDNN lays out results, of packed weights
FUNCTION = '''
_packed = WeakTensorKeyDictionary()  # by weight: a weight that is written to comes as another tensor


def _convolved(pack, convolve, x, weight, bias, *options):
    """By oneDNN; of packed weights its results have their channels last."""
    packed = _packed.setdefault(weight, {})  # by what it is packed for: groups above all are laid out in another way
    if is_row := x.dim() == 3:  # an image of one row
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    if (key := (x.shape, options)) not in packed:
        packed[key] = pack(weight.contiguous(), *options, x.shape)
    bias = None if bias is None else bias.contiguous()  # it reads one as if it were
    y = convolve(x, packed[key], bias, *options, "none", [], "")
    return y.squeeze(2) if is_row else y
'''


@dataclass(frozen=True)
class Convolution:
    """A node of the graph that oneDNN computes.

    options: padding, stride, dilation, groups; transposed, the padding of the result after the first.
    surplus: places at the start of each dim that are no part of the result; there are some where "same" padding has one
    place more at the end than at the start.
    """

    node: Node
    source: Node
    weight: Node
    bias: Node | None
    options: tuple[Any, ...]
    transposed: bool
    surplus: tuple[int, ...]

    @property
    def inputs(self) -> list[Node]:
        return [self.source, self.weight, *([self.bias] if self.bias else [])]

    @property
    def adds_zeros(self) -> bool:
        """Whether weights may meet zeros that are no elements, and that only some implementations multiply."""
        return self.transposed or any(self.options[0])

    def call(self, name: str, names: Mapping[Node, str]) -> str:
        """The statement of a kernel file that makes it."""
        kind = "convolution_transpose" if self.transposed else "convolution"
        operators = (f"torch.ops.mkldnn.{operator}" for operator in (f"_reorder_{kind}_weight", f"_{kind}_pointwise"))
        bias = names[self.bias] if self.bias else None
        given = ", ".join(map(str, (*operators, names[self.source], names[self.weight], bias, *self.options)))
        kept = "".join(f", {n}:" for n in self.surplus) if any(self.surplus) else ""
        return f"{name} = _convolved({given}){kept and f'[:, :{kept}]'}"

    def laid_out(self) -> Tensor:
        """The result's shape and strides, as `call` makes it."""
        shape = [*value(self.node).shape[:2], *(n + s for n, s in zip(value(self.node).shape[2:], self.surplus))]
        images = shape if len(shape) > 3 else [*shape[:2], 1, shape[2]]
        made = torch.empty(images, dtype=DTYPE, device="meta", memory_format=LAST[len(images)])
        made = (made if len(shape) > 3 else made.squeeze(2))[(..., *(slice(s, None) for s in self.surplus))]
        return value(self.node).new_empty_strided(made.shape, made.stride())


CONVOLUTIONS = {aten.convolution.default}
CONVOLUTIONS |= {o for f in (aten.conv1d, aten.conv2d, aten.conv3d) for o in (f.default, f.padding)}
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}


def is_transposed(node: Node) -> bool:
    return node.target in TRANSPOSED or bool(arguments(node).get("transposed"))


def convolution_of(node: Node) -> Convolution | None:
    """What a node is as a convolution of rows, images or volumes; None where it is none, or none that oneDNN is given."""
    if node.target not in CONVOLUTIONS | TRANSPOSED or not all(hasattr(torch.ops.mkldnn, name) for name in PACKETS):
        return None
    given, made, transposed = arguments(node), value(node), is_transposed(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    tensors = [made, *(value(n) for n in (source, weight, bias) if n is not None)]
    dims = value(weight).dim() - 2
    if dims not in (1, 2, 3) or not value(source).dim() == made.dim() == dims + 2 or not made.numel():
        return None
    if any(t.device.type != DEVICE or t.dtype != DTYPE for t in tensors):
        return None

    def for_each_dim(name: str) -> tuple[int, ...]:
        values = given[name]
        return tuple(values) * (dims // len(values))

    stride, dilation = for_each_dim("stride"), for_each_dim("dilation")
    surplus = (0,) * dims
    if isinstance(given["padding"], str):
        same = [d * (n - 1) * (given["padding"] == "same") for d, n in zip(dilation, value(weight).shape[2:])]
        padding, surplus = tuple((n + 1) // 2 for n in same), tuple(n % 2 for n in same)
    else:
        padding = for_each_dim("padding")
    added = for_each_dim("output_padding") if transposed else ()
    if not all(isinstance(v, int) for v in (*padding, *added, *stride, *dilation)):
        return None
    if any(n >= s for n, s in zip(added, stride)):  # which oneDNN cannot
        return None
    if dims == 1:  # an image of one row
        padding, added, stride, dilation = (0, *padding), (0, *added) if added else (), (1, *stride), (1, *dilation)
    options = padding, *([added] if transposed else []), stride, dilation, given["groups"]
    return Convolution(node, source, weight, bias, options, transposed, surplus)


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


def channels_last(piece: GraphModule, inputs: Sequence[Node], made: Mapping[Node, Convolution]) -> None:
    """Lays out inputs of a region's graph as oneDNN makes them."""
    for placeholder, node in zip(piece.graph.find_nodes(op="placeholder"), inputs):
        if node in made:
            placeholder.meta["val"] = made[node].laid_out()
