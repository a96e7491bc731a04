"""Whether a part of a graph computes what an oracle does: tried on numbers, in float64."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autokernel.model.nodes import value
from autokernel.model.patterns import Site
from autokernel.model.pieces import pieces
from autokernel.model.placement import tensor_spec
from autokernel.spec import is_region, load_spec

aten = torch.ops.aten
PROOF_TOLERANCE = 1e-8  # of the largest result, in float64; tanh-gelu for gelu is wrong by 1e-4


def between(inputs: Iterable[Any], *outputs: Node) -> list[Node]:
    """The nodes of which `outputs` are computed from `inputs`, in no order."""
    found: dict[Node, None] = {}
    stop, pending = {v for v in inputs if isinstance(v, Node)}, list(outputs)
    while pending:
        node = pending.pop()
        if node not in stop and node not in found:
            found[node] = None
            pending += node.all_input_nodes
    return list(found)


def extract_subgraph(graph: GraphModule, outputs: list[Node], inputs: list[Node], wide: bool = True) -> GraphModule:
    """The nodes between `inputs` and `outputs` as a module of their own; `wide`: in which every number is a float64."""
    inputs = list(dict.fromkeys(inputs))
    piece = fx.Graph()
    copies = {node: piece.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    needed = set(between(inputs, *outputs))
    for i, node in enumerate(n for n in graph.graph.nodes if n in needed):
        copies[node] = copy = piece.node_copy(node, copies.__getitem__)
        copy.name = f"node_{i}"
        if wide:
            copy.target = WIDE_FORMS.get(copy.target, copy.target)
            copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), _wide)
    piece.output(tuple(copies[node] for node in outputs))
    module = GraphModule(graph, piece)
    module.inputs = inputs
    return module


def _wide(v: Any) -> Any:
    return torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v


def _groups(x: Tensor, weight: Tensor, offs: Tensor | None = None, *others: Any, **named: Any) -> Tensor:
    """aten._grouped_mm of x [rows, K] and weight [groups, K, N]; rows in no group are 0."""
    if offs is None or x.dim() != 2 or weight.dim() != 3 or any(v is not None for v in (*others, *named.values())):
        return aten._grouped_mm.default(x, weight, offs, *others, **named)
    *parts, rest = x.tensor_split(offs.tolist())
    products = [rows @ matrix for rows, matrix in zip(parts, weight)]
    return torch.cat([*products, x.new_zeros(len(rest), weight.shape[-1])])


# Operators that take no float64 -> the same in those that do.
WIDE_FORMS = {aten._grouped_mm.default: _groups} if hasattr(aten, "_grouped_mm") else {}


class InWideForms(TorchDispatchMode):
    """What runs inside takes float64, as far as WIDE_FORMS has it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return WIDE_FORMS.get(func, func)(*args, **(kwargs or {}))


class _Wide(TorchFunctionMode):
    """Casts in a pattern's `call` to another floating-point dtype stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs or {}), _wide)
        return func(*args, **kwargs)


def filled(fake: Tensor) -> Tensor:
    """Random contents in the dtype, on the device and with the strides of `fake`."""
    spec, generator = tensor_spec(fake), torch.Generator(fake.device).manual_seed(0)
    size, place = (spec.storage_numel,), {"generator": generator, "device": fake.device}
    if fake.is_floating_point() or fake.is_complex():
        contents = torch.randn(size, **place, dtype=torch.promote_types(fake.dtype, torch.float32))
    else:
        contents = torch.randint(2, size, **place)
    return contents.to(fake.device, fake.dtype).as_strided(spec.shape, spec.strides, spec.offset)


def inputs_of(site: Site, nodes: Sequence[Node]) -> list[Tensor]:
    """filled() for each of `nodes`, which a site takes; integers by which a region takes rows are within the table."""
    inputs = {node: filled(value(node)) for node in nodes}
    if is_region(site.kernel_type):
        fill, generator = load_spec(site.kernel_type).fill, torch.Generator().manual_seed(0)
        for name, node in site.parameters.items():
            if name in fill and node in inputs and not inputs[node].is_floating_point():
                inputs[node].copy_(fill[name](site.case.args[name], site.case.args, generator))
    return list(inputs.values())


def _draw(fake: Tensor, generator: torch.Generator, integers: int = 8) -> Tensor:
    """Random contents, on the generator's device: a host takes seconds for the weight of a large vocabulary.

    Rows of floating-point numbers have sizes from 1e-4 to 10, so that an eps shows. Few integers all differ, and of few
    booleans one is False: the positions of two sequences, if they were the same, would pass for those of two heads.
    """
    place = {"generator": generator, "device": generator.device}
    if not (fake.is_floating_point() or fake.is_complex()):
        order = torch.randperm(fake.numel(), **place).view(fake.shape)
        return order % integers if fake.dtype != torch.bool else order >= -(-fake.numel() // 5) * (fake.numel() > 1)
    dtype = torch.complex128 if fake.is_complex() else torch.float64
    scale = 10 ** (5 * torch.rand((*fake.shape[:-1], 1)[: fake.dim()], **place, dtype=torch.float64) - 4)
    return torch.randn(fake.shape, **place, dtype=dtype).mul_(scale)


def _hide_rows(mask: Tensor, dtype: torch.dtype, first: int) -> Tensor:
    """A mask of `dtype` with every second row from `first` on False or -inf, and every other True or the lowest number."""
    hidden, other = (False, True) if dtype == torch.bool else (-torch.inf, torch.finfo(dtype).min)
    rows = mask.clone().reshape(-1, mask.shape[-1] if mask.dim() else 1)
    rows[first::2], rows[1 - first :: 2] = hidden, other
    return rows.reshape(mask.shape)


def agree(site: Site, original: GraphModule, given: GraphModule | None) -> bool:
    """Whether the site's own nodes and the oracle give the same numbers, whatever the site's masks hide."""
    hiding = (None, 0, 1) if site.pattern.masks else (None,)
    return all(_agree_where(site, original, given, first) for first in hiding)


def _agree_where(site: Site, original: GraphModule, given: GraphModule | None, first_hidden: int | None) -> bool:
    device = value(site.output).device
    generator = torch.Generator(device).manual_seed(0)
    masks = [] if first_hidden is None else [site.parameters[name] for name in site.pattern.masks]
    # An integer may be the index of a class: what is out of bounds is an error, on a GPU one that ends the process.
    widths = [fake.shape[-1] for fake in map(value, original.inputs) if fake.is_floating_point() and fake.dim()]

    drawn = {site.parameters[name]: draw for name, draw in site.pattern.draws.items()}
    fakes = {name: value(v) if isinstance(v, Node) else v for name, v in site.parameters.items()}

    def draw(node: Node) -> Tensor:
        if node in drawn:
            return drawn[node](**fakes).to(device)
        contents = _draw(value(node), generator, min([8, *widths]))
        return _hide_rows(contents, value(node).dtype, first_hidden) if node in masks else contents

    values = {node: draw(node) for node in original.inputs}
    if given is not None:
        random = [_draw(value(node), generator) for node in given.inputs]
        values |= zip((site.parameters[n] for n in site.pattern.given), given(*random))
    parameters = {k: values[v] if isinstance(v, Node) else v for k, v in site.parameters.items()}
    expected = original(*(values[node] for node in original.inputs))[0]
    try:
        with _Wide():
            got = site.pattern.call(load_spec(site.kernel_type).oracle, **parameters)
    except (RuntimeError, IndexError, ValueError):
        return False
    if got.shape != expected.shape:
        return False
    largest = max((y.nan_to_num(0, 0, 0).abs().max().item() for (y,) in pieces(expected)), default=0.0)
    near = partial(torch.allclose, rtol=0, atol=PROOF_TOLERANCE * largest, equal_nan=True)
    return all(near(y.to(expected.dtype), truth) for y, truth in pieces(got, expected))
