"""Attention masks that hide nothing, what comes later, or the same keys from all queries, put as shortly as they can be.

Traced models write masks out that they leave to is_causal when they run untraced (Hugging Face's do), and with a mask
PyTorch has slower kernels: 162 µs instead of 58 for 4x32x1024x64 in float16 on an H100. torch.compile computes such a mask
anew in each pass, and reads it. A mask for padding has one row a text, and is written out for every query.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
QKV, MASK, DROPOUT, CAUSAL = slice(0, 3), 3, 4, 5  # places of its arguments
LARGEST = 1 << 28  # elements of a mask that is looked at
SAME_ROWS = {  # of equal rows they make equal rows, though they do not have the tag of what is pointwise
    *("__and__", "__or__", "__xor__", "where", "masked_fill"),
    *("to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias", "slice"),
}
HIDDEN = -1e30  # a score with so much added has the weight 0; float16 has no such numbers but -inf


def replace_known_masks(graph: GraphModule, changed: set[int]) -> None:
    """In attention: a mask of constants by is_causal where that says the same, one that treats all queries alike by its
    first row, expanded. `changed`: the memory that the graph writes to, of which nothing is known."""
    known: dict[Node, bool | None] = {}
    for node in graph.graph.find_nodes(op="call_function", target=ATTENTION):
        mask = node.args[MASK] if len(node.args) > MASK else node.kwargs.get("attn_mask")
        if not isinstance(mask, Node) or (node.args[CAUSAL:] or [False])[0] or node.kwargs.get("is_causal"):
            continue
        if mask not in known:
            known[mask] = _is_causal(mask, changed)
        causal, (queries, keys) = known[mask], (n.meta["val"].shape[-2] for n in node.args[:2])
        if causal is False or causal and mask.meta["val"].shape[-2:] == (queries, keys):  # one row is of all queries
            _replace(node, causal)
        elif _is_written_out(mask) and _has_one_row(mask, changed):
            node.replace_input_with(mask, _expanded_row(node, mask))


def _is_causal(node: Node, changed: set[int]) -> bool | None:
    """Whether a mask is that of is_causal (True), or hides nothing (False); None where it is another, or no constant."""
    fake = node.meta.get("val")
    if not isinstance(fake, FakeTensor) or fake.dim() < 2:
        return None
    parts = _parts(node)
    if {p.meta["val"].untyped_storage()._cdata for p in parts if isinstance(p.meta.get("val"), Tensor)} & changed:
        return None
    mask = _of_constants(node)
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        shown = mask
    else:  # it is added to the scores
        shown = mask == 0
        if not (shown | (mask < HIDDEN)).all():
            return None
    causal = torch.ones(shown.shape[-2:], dtype=torch.bool, device=shown.device).tril()
    return False if shown.all() else True if (shown == causal).all() else None


def _is_written_out(mask: Node) -> bool:
    """Whether it has several rows in memory."""
    fake = mask.meta["val"]
    sizes = isinstance(fake, FakeTensor) and fake.dim() > 1 and (fake.shape[-2], fake.stride(-2))
    return bool(sizes) and all(isinstance(number, int) for number in sizes) and sizes[0] > 1 and sizes[1] != 0


def _has_one_row(mask: Node, changed: set[int]) -> bool:
    """Whether all rows are the same, whatever the graph's inputs are: as the graph shows, not by looking at them."""
    known: dict[Node, bool] = {}
    for node in _parts(mask):
        fake, inputs, target = node.meta.get("val"), node.all_input_nodes, node.target
        if not isinstance(fake, Tensor) or fake.untyped_storage()._cdata in changed:
            known[node] = False
        elif fake.dim() < 2 or isinstance(fake.shape[-2], int) and fake.shape[-2] == 1:
            known[node] = True
        elif target is aten.expand.default:
            given = inputs[0].meta["val"]
            known[node] = given.dim() < 2 or given.shape[-2] == 1 or known[inputs[0]]
        elif _is_constant(node) and (_name(target) in SAME_ROWS or torch.Tag.pointwise in target.tags) and inputs:
            known[node] = all(known[i] for i in inputs) or _rows_are_equal(node)
        else:
            known[node] = _is_constant(node) and _rows_are_equal(node)
    return known[mask]


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.removeprefix("aten::")


def _rows_are_equal(node: Node) -> bool:
    """Of a node that is made of constants: by looking at it."""
    made = _of_constants(node)
    return made is not None and bool((made == made[..., :1, :]).all())


def _expanded_row(attention: Node, mask: Node) -> Node:
    """The mask's first row, in its place for every query."""
    fake, graph = mask.meta["val"], attention.graph
    with graph.inserting_before(attention):
        row = graph.call_function(aten.slice.Tensor, (mask, -2, 0, 1))
        row.meta = {"val": _result(row.target, (fake, -2, 0, 1), {})}
        whole = graph.call_function(aten.expand.default, (row, list(fake.shape)))
        whole.meta = {"val": _result(whole.target, (row.meta["val"], list(fake.shape)), {})}
    return whole


def _parts(mask: Node) -> list[Node]:
    """The nodes that a mask is computed by, in the order of the graph."""
    found, pending = {mask}, [mask]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return [node for node in mask.graph.nodes if node in found]


def _of_constants(node: Node) -> Tensor | None:
    """Its result, where it is made of constants alone; None where it is not, or cannot be computed here."""
    parts = _parts(node)
    if not all(map(_is_constant, parts)) or node.meta["val"].numel() > LARGEST:
        return None
    try:
        return _computed(parts)
    except RuntimeError:  # no memory, no data on the device meta
        return None


def _is_constant(node: Node) -> bool:
    """Whether it has the same result whenever its inputs have the same."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    name, random = node.target._schema.name, torch.Tag.nondeterministic_seeded in node.target.tags
    return not (random or "empty" in name or node.target._schema.is_mutable)


def _computed(nodes: Iterable[Node]) -> Tensor:
    """The result of the last one."""
    results: dict[Node, Tensor] = {}
    with torch.no_grad(), _disable_current_modes():
        for node in nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = node.target(*args, **kwargs)
    return results[node]


def _replace(node: Node, causal: bool) -> None:
    """Leave the mask out, unless the result would have strides that no contiguous() makes the original's.

    PyTorch's attention on a GPU has other strides with a mask that no fused kernel takes: one of 197 keys, say.
    """
    args = (*node.args[QKV], None, node.args[DROPOUT] if len(node.args) > DROPOUT else 0.0, causal)
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
    if "dropout_p" in kwargs:
        args = (*args[:DROPOUT], kwargs.pop("dropout_p"), causal)
    original, made = node.meta["val"], _result(node.target, *_values((args, kwargs)))
    if made.stride() != original.stride():
        if not original.is_contiguous():
            return
        with node.graph.inserting_after(node):
            in_order = node.graph.call_function(aten.contiguous.default, (node,))
        node.replace_all_uses_with(in_order, delete_user_cb=lambda user: user is not in_order)
        in_order.meta, node.meta = node.meta, node.meta | {"val": made}
    node.args, node.kwargs = args, kwargs


def _values(arguments: object) -> object:
    return torch.fx.map_arg(arguments, lambda node: node.meta["val"])


def _result(target: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Tensor:
    with args[0].fake_mode, torch.no_grad():
        return target(*args, **kwargs)
