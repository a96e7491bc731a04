"""Contents for a case's tensors: fresh random numbers in several distributions and layouts."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.workers.views import POOL, copy_from_pool, distinct, write
from autokernel.spec import Case, KernelSpec, TensorSpec, alike


def _rows(x: Tensor, generator: torch.Generator) -> Tensor:
    """One random number in [0, 1) per row (all dims but the last)."""
    return torch.rand((*x.shape[:-1], 1), generator=generator)


def _dominant_tail(x: Tensor, generator: torch.Generator) -> Tensor:
    """The last eighth of every row carries nearly all of it: work skipped there shows."""
    tail = max(x.shape[-1] // 8, 1)
    return torch.cat((x[..., :-tail] * 0.05, x[..., -tail:] * 3), -1)


def _one_peak(x: Tensor, generator: torch.Generator) -> Tensor:
    """One element of each row, at some place, is far larger than the others: what is left out of a row is it in some. In
    some rows that is the first one, the last or one in the middle, from which a kernel may measure the others."""
    place, width = torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=generator), x.shape[-1]
    for number, special in enumerate((0, width // 2, width - 1)):
        place.view(-1)[number::16] = special
    return x.scatter(-1, place, 8 * (1 + x.gather(-1, place).abs()))


def _steps(x: Tensor, generator: torch.Generator) -> Tensor:
    """Few values, in order: each is there many times, the largest among them. Some rows fall, and have no value twice: what
    is far smaller than a sum so far, and added to it many times, is rounded the same way each time."""
    falls = _rows(x, generator) < 0.3
    values = torch.where(falls, -x, (2 * x).round().div_(2)).float()
    if values.device.type == "cpu":
        values.numpy().sort(-1)  # in a fifth of the time: NumPy has vector code for it
    else:
        values = values.sort(-1).values
    return torch.where(falls, -values, values).to(x.dtype)


def _halves_alike(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every number is there twice, half a row apart."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], x[..., :half], x[..., 2 * half :]), -1)


def _close_together(x: Tensor, most: float, more: int, generator: torch.Generator) -> Tensor:
    """One number all along a row, but for the next larger one at one place (one in a thousand) and so many `more`: the
    variance is less than a rounding of their squares in fp32, which E[x²] - E[x]² has lost, unless these sums are exact
    there, as of 256 numbers of bfloat16, or another power of two below. Between half of `most` and that."""
    step = most * torch.finfo(x.dtype).eps / 2
    low = most - step * (2 + 100 * _rows(x, generator)).floor()
    places = torch.randint(x.shape[-1], (*x.shape[:-1], -(-x.shape[-1] // 1024) + more), generator=generator)
    return low.expand_as(x).scatter(-1, places, (low + step).expand_as(places)).to(x.dtype)


# name -> (values drawn from N(0, 1), generator) -> values. Magnitudes stay where fp16 sums of thousands do not overflow.
DISTRIBUTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda x, g: x,
    "shifted": lambda x, g: 0.5 * x + 2,
    "small": lambda x, g: 0.02 * x,
    "ragged": lambda x, g: x * 10 ** (2 * _rows(x, g) - 1.5),  # rows from 0.03 to 3
    "dominant_tail": _dominant_tail,
    "uniform": lambda x, g: torch.rand(x.shape, generator=g) * 4 - 2,
    "shifted below zero": lambda x, g: 0.1 * x - 3.5,  # where activations are nearly 0, but not quite
    "one peak": _one_peak,
    "steps": _steps,
}


def _kept(x: Tensor, place: Tensor, generator: torch.Generator) -> Tensor:
    """Of some rows one place, of the others each with a chance of a half."""
    one = torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=generator)
    return torch.where(_rows(x, generator) < 0.5, place == one, torch.rand(x.shape, generator=generator) < 0.5)


# Rows for which a kernel might have a short cut.
PATTERNS: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "of two numbers": lambda x, place, g: torch.where(x < 0, -1.0, 1.0),
    "of either sign in turn": lambda x, place, g: torch.where(place % 2 == 0, 1, -1) * (x.abs() + 0.1),
    "of eight numbers over and over": lambda x, place, g: x[..., place % 8],
    "the same from both ends": lambda x, place, g: x[..., torch.minimum(place, place.flip(0))],
    "of powers of two": lambda x, place, g: torch.where(x < 0, -1.0, 1.0) * (x.abs() + 0.1).log2().round().exp2(),
    "half of them zeros, or all but one": lambda x, place, g: torch.where(_kept(x, place, g), x, 0.0),
    "cut off at zero": lambda x, place, g: x.clamp(min=0),  # as a ReLU leaves them
    "rising evenly": lambda x, place, g: (place - x.shape[-1] // 2) * 2.0 ** (3 - x.shape[-1].bit_length()) + 0 * x,
    "a few too small for normal numbers": lambda x, place, g: torch.where(x.abs() < 0.1, torch.finfo(x.dtype).tiny / 4, x),
    "one zero": lambda x, place, g: x.scatter(-1, torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=g), 0.0),
}

# None of them with a large number: a kernel that is careful wherever there is one is to be right without, too.
ORDINARY = ("normal", "small", "shifted", "shifted below zero", "uniform", "steps")

# Of slabs, of which there may be few, the first kinds: what a norm over a slab makes without its eps, or in one pass.
SLABS = ("offset", "small", "zeros", "offset below zero", "shifted")

Transform = Callable[[dict[str, Any]], dict[str, Any]]  # of filled inputs
OPPOSITE, BESIDE = "opposite infinities", "NaN beside infinity"  # kinds of rows
SEVERAL = {value: f"several {value}" for value in (math.nan, math.inf, -math.inf)}
# Kinds with more than one value in a row that is not finite. Where all rows make one result, each has a trial of its own.
COMPOUND = (OPPOSITE, BESIDE, *SEVERAL.values())
# Of a row's mean, in its standard deviations: E[x²] - E[x]² has lost the variance, two passes have not. In fp32, whose
# tolerance is a hundredth, a mean of 512 that is off by one rounding would be beyond it (layernorm, of several chains).
OFFSET = {torch.float32: 128.0}
OFFSET_16_BITS = 512.0
# Where errors are held against what roundings come to (KernelSpec.magnitude, .opaque): these grow with the mean, those of
# one pass with its square, until nothing is left of the variance.
FAR_OFFSET = 4096.0
DRAWN_AT_ONCE = 1 << 22  # elements
TRIED, TRIED_ROWS = 1 << 20, 8  # elements of a tensor, and rows at least, to see what becomes of rows


def _planted(x: Tensor, values: Sequence[float], generator: torch.Generator) -> Tensor:
    """Rows, changed in place, with these values at places that are as far from each other as can be, the first of them
    somewhere: in one row at the end, as loops over what does not fill a vector have it, and in another, of three or more,
    at the start."""
    rows, width = x.shape
    place = torch.randint(width, (rows, 1), generator=generator)
    if rows > 1 or torch.rand((), generator=generator) < 0.5:
        place[:1] = width - 1
    if rows > 2:
        place[1] = 0
    for i, value in enumerate(values):
        x = x.scatter_(-1, (place + max(i, i * width // len(values))) % width, value)
    return x


RowKind = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # (all rows, which of them, generator) -> rows of this kind


def row_kinds(spec: KernelSpec, inputs: Mapping[str, Any]) -> dict[str, RowKind]:
    """The kinds of rows that the first tensor of a case may have, by name; all rows are drawn from N(0, 1).

    Of the spec's adversarial transforms all are here; `shared_by_rows` names those that change other inputs as well.
    """
    first = spec.first_of(inputs)

    def transformed(transform: Transform) -> RowKind:
        return lambda rows, chosen, g: as_rows(transform(dict(inputs))[first], inputs)[chosen]

    def planted(*values: float) -> RowKind:
        return lambda rows, chosen, g: _planted(rows[chosen], values, g)

    def shaped(change: Callable[[Tensor, torch.Generator], Tensor]) -> RowKind:
        return lambda rows, chosen, g: change(rows[chosen], g)

    kinds = {name: shaped(change) for name, change in DISTRIBUTIONS.items()}
    scales = scales_in(spec, inputs[first].dtype)
    kinds |= {f"times {scale:g}": shaped(lambda x, g, scale=scale: x * scale) for scale in scales}
    is_far = (spec.magnitude or spec.opaque) and inputs[first].dtype == torch.float32
    offset = min(FAR_OFFSET if is_far else OFFSET.get(inputs[first].dtype, OFFSET_16_BITS), scales[-1])
    kinds |= {
        "zeros": shaped(lambda x, g: torch.zeros_like(x)),
        "one value": shaped(lambda x, g: alike(x)),
        "offset": shaped(lambda x, g: x + offset),
        "halves alike": shaped(_halves_alike),
    }
    if spec.independent_rows:
        for name, change in PATTERNS.items():
            kinds[name] = shaped(lambda x, g, change=change: change(x, torch.arange(x.shape[-1]), g))
    if inputs[first].dtype == torch.bfloat16:
        kinds["close together"] = shaped(lambda x, g: _close_together(x, offset, 0, g))
        kinds["close together, three larger"] = shaped(lambda x, g: _close_together(x, offset, 2, g))
    if first not in spec.fill:  # which may say that there is nothing below zero
        kinds |= {
            "offset below zero": shaped(lambda x, g: x - offset),
            "far below zero": shaped(lambda x, g: -(1 + x.abs()) / 2 * scales[-1]),
        }
    kinds |= {name: transformed(transform) for name, transform in spec.adversarial.items()}
    kinds |= {f"one {value}": planted(value) for value in spec.nonfinite}
    if -math.inf in spec.nonfinite:
        kinds["all -inf"] = shaped(lambda x, g: torch.full_like(x, -math.inf))
    if {math.inf, -math.inf} <= set(spec.nonfinite):
        kinds[OPPOSITE] = planted(math.inf, -math.inf)
    if {math.nan, math.inf} <= set(spec.nonfinite):
        kinds[BESIDE] = planted(math.nan, math.inf)
    kinds |= {name: planted(value, value, value) for value, name in SEVERAL.items() if value in spec.nonfinite}
    return kinds


def scales_in(spec: KernelSpec, dtype: torch.dtype) -> list[float]:
    """The sizes of rows that are in the range of a dtype, six standard deviations and more; the largest is the last."""
    return sorted(scale for scale in spec.row_scales if scale**spec.degree < torch.finfo(dtype).max / 16)


def timed_kinds(spec: KernelSpec, case: Case) -> dict[str, RowKind]:
    """Those that one row of an input can be made of by itself, beside rows of random numbers; none where the first tensor
    is no such input, or has rows that are not apart."""
    name = spec.first_of(case.tensors)
    first = case.tensors[name]
    if name not in changing(spec, case) or not first.numel or first.overlaps:
        return {}
    if not first.shape or any(s == 0 and n > 1 for s, n in zip(first.strides, first.shape)):
        return {}
    others = {*DISTRIBUTIONS, *PATTERNS, *spec.adversarial}
    others |= {"all -inf", *COMPOUND} if not spec.independent_rows else set()
    kinds = row_kinds(spec, {name: torch.empty(0, dtype=first.dtype)})
    return {kind: make for kind, make in kinds.items() if kind not in others}


def finite_kinds(spec: KernelSpec, inputs: Mapping[str, Any]) -> set[str]:
    """The kinds whose rows have neither NaN nor infinities."""
    rows, generator = as_rows(inputs[spec.first_of(inputs)], inputs), generator_of(0)
    rows = rows[: max(TRIED_ROWS, TRIED // max(1, rows.shape[1]))]
    every = torch.arange(len(rows))
    return {name for name, kind in row_kinds(spec, inputs).items() if kind(rows, every, generator).isfinite().all()}


def shared_by_rows(spec: KernelSpec, inputs: Mapping[str, Any]) -> list[str]:
    """The adversarial transforms that change more than the first tensor: they cannot be of some rows alone."""
    others = [name for name in tensors_of(inputs) if name != spec.first_of(inputs)]
    return [
        name
        for name, transform in spec.adversarial.items()
        if any(transform(dict(inputs))[other] is not inputs[other] for other in others)
    ]


def mix_rows(
    spec: KernelSpec,
    inputs: Mapping[str, Any],
    names: Sequence[str],
    start: int,
    generator: torch.Generator,
    across: int | None = None,
) -> dict[str, Any]:
    """`inputs`, drawn from N(0, 1), with a first tensor whose rows are of the kinds in `names`, in random order.

    `start`: which kind comes first, where there are fewer rows than kinds. `across`: slabs instead of rows, each all that
    has one index of this dim.
    """
    first, dim = spec.first_of(inputs), line_dim(inputs)
    if across is not None:
        x = inputs[first].movedim(across, 0)
        slabs = mix_rows(spec, {first: x.reshape(len(x), -1)}, names, start, generator)[first]
        return dict(inputs) | {first: slabs.reshape(x.shape).movedim(0, across).contiguous()}
    kinds, rows = row_kinds(spec, inputs), as_rows(inputs[first], inputs)
    kind_of = (torch.arange(len(rows)) + start) % len(names)
    kind_of = kind_of[torch.randperm(len(rows), generator=generator)]
    mixed = torch.empty_like(rows)
    for number, name in enumerate(names):
        chosen = (kind_of == number).nonzero().flatten()
        if len(chosen):
            mixed[chosen] = kinds[name](rows, chosen, generator).to(rows.dtype)
    shape = inputs[first].movedim(dim, -1).shape
    return dict(inputs) | {first: mixed.reshape(shape).movedim(-1, dim).contiguous()}


def with_ordinary_rows(
    spec: KernelSpec, case: Case, inputs: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Any]:
    """`inputs`, drawn from N(0, 1), those that change from call to call with rows of the ORDINARY distributions."""
    changed = {}
    for name in tensors_of(inputs):
        x = inputs[name]
        if name not in changing(spec, case) or not x.is_floating_point() or not x.dim():
            continue
        dim = line_dim(inputs) if name == spec.first_of(inputs) else -1
        x = x.movedim(dim, -1)
        rows = x.reshape(-1, x.shape[-1])
        kinds, mixed = torch.randperm(len(rows), generator=generator) % len(ORDINARY), torch.empty_like(rows)
        for kind, distribution in enumerate(ORDINARY):
            mixed[kinds == kind] = DISTRIBUTIONS[distribution](rows[kinds == kind].float(), generator).to(x.dtype)
        changed[name] = mixed.reshape(x.shape).movedim(-1, dim).contiguous()
    return dict(inputs) | changed


def with_peaks(
    spec: KernelSpec, inputs: Mapping[str, Any], factor: float, generator: torch.Generator, share: int | None = None
) -> dict[str, Any]:
    """`inputs` with a first tensor whose rows have their peaks at different places, all places among them where there are
    rows enough: what a kernel leaves out of a row is all that counts in some row. `share`: one peak a row, and which."""
    first, dim = spec.first_of(inputs), line_dim(inputs)
    rows = as_rows(inputs[first], inputs)
    count, width = rows.shape
    places = torch.arange(-(-width // count) * count).view(-1, count).T % width  # of each row
    chosen = torch.randperm(width, generator=generator)[places]
    chosen = chosen if share is None else chosen[:, share : share + 1]
    large = rows.gather(-1, chosen).abs().add(1).mul(factor)
    peaked = rows.scatter(-1, chosen, large)
    shape = inputs[first].movedim(dim, -1).shape
    return dict(inputs) | {first: peaked.reshape(shape).movedim(-1, dim).contiguous()}


def tensors_of(inputs: Mapping[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor)]


def line_dim(inputs: Mapping[str, Any]) -> int:
    """The dim along which the elements of the first tensor belong together."""
    return inputs.get("dim", -1)


def as_rows(x: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """[lines, elements of a line]"""
    x = x.movedim(line_dim(inputs), -1)
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def fill_inputs(spec: KernelSpec, case: Case, seed: int, distribution: str = "normal") -> dict[str, Any]:
    """Contiguous tensors (and plain values) for every argument of `case`, from `seed` alone, on the default device.

    Inputs that the spec declares static (weights) are drawn as 1 + N(0, 1)/2 for vectors: neither ones nor zeros, so that
    a kernel that ignores them fails. `distribution` shapes the other floating-point inputs.
    """
    generator = generator_of(seed)
    inputs: dict[str, Any] = {}
    for name, value in case.args.items():
        if not isinstance(value, TensorSpec):
            inputs[name] = value
        elif name in spec.fill:
            inputs[name] = spec.fill[name](value, case.args, generator).to(value.dtype)
        else:
            x = normal(value.shape, generator)
            if name in spec.static:
                x = x.div_(2).add_(1) if x.dim() == 1 else x.div_(math.sqrt(x.shape[-1]))
            elif x.dim() > 0 and x.numel() > 0:
                dim = line_dim(case.args) if name == spec.first_of(case.args) else -1
                x = DISTRIBUTIONS[distribution](x.movedim(dim, -1), generator).movedim(-1, dim).contiguous()
            inputs[name] = x.to(value.dtype)
    return repeated(case, inputs)


def generator_of(seed: int) -> torch.Generator:
    """Of numbers on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """N(0, 1) in fp32, the same for any number of threads: those of a large tensor are drawn in parts, side by side."""
    numel = math.prod(shape)
    if numel <= DRAWN_AT_ONCE or generator.device.type != "cpu":
        return torch.randn(shape, generator=generator)
    made = torch.empty(numel)
    parts = made.split(DRAWN_AT_ONCE)
    seeds = torch.randint(2**62, (len(parts),), generator=generator).tolist()

    @torch.inference_mode()  # `made` may be an inference tensor, and a mode is its thread's own
    def draw(part: Tensor, seed: int) -> None:
        torch.randn(len(part), generator=torch.Generator().manual_seed(seed), out=part)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(draw, parts, seeds))
    return made.view(shape)


class Pool:
    """Random numbers for large timed inputs, drawn once per seed and cut at random places: as fast as a copy."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.normal = torch.randn(POOL, generator=self.generator)
        self._cast = {torch.float32: self.normal}

    def values(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._cast:
            self._cast[dtype] = self.normal.to(dtype)
        return self._cast[dtype]

    def place(self) -> int:
        """Where in the pool the next tensor is cut."""
        return int(torch.randint(POOL, (), generator=self.generator))


def repeated(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` with the contents that tensors of the case's strides can have: the same along dims of stride 0."""
    for name, tensor in case.tensors.items():
        first = distinct(torch.empty_strided(tensor.shape, tensor.strides, device="meta")).shape
        if first != inputs[name].shape:
            inputs[name] = inputs[name][tuple(slice(n) for n in first)].expand(tensor.shape).contiguous()
    return inputs


def changing(spec: KernelSpec, case: Case) -> list[str]:
    """The inputs that are new random numbers in every timed batch: no weights, and nothing of a special kind."""
    return [name for name in case.tensors if name not in spec.static and name not in spec.fill]


def special(spec: KernelSpec, case: Case) -> list[str]:
    """The inputs that have contents of a special kind, and are no weights."""
    return [name for name in case.tensors if name in spec.fill and name not in spec.static]


def fill_fixed(spec: KernelSpec, case: Case, views: dict[str, Tensor], pool: Pool) -> None:
    """Contents for the other inputs of one timed set, written through `views`."""
    for name, view in views.items():
        if name in spec.fill:
            write(view, spec.fill[name](case.args[name], case.args, pool.generator).to(view.dtype))
            continue
        copy_from_pool(pool.values(view.dtype), pool.place(), view)
        if view.dim() > 1:
            distinct(view).mul_(view.shape[-1] ** -0.5)  # weights as networks have them: sums stay in fp16's range


def transposed(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """The same shape with the last two dims stored the other way round. `apart`: as a slice of a larger tensor."""
    *lead, rows, columns = tensor.shape
    strides = _strides_in((*lead, columns, rows), (0,) * len(lead) + (apart, 3 * apart), tensor.dtype)
    return replace(tensor, stride=(*strides[:-2], strides[-1], strides[-2]))


def sliced(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """A slice of a tensor that is larger along each dim, starting at an odd element: gaps between rows, and others between
    matrices, unaligned base. A vector, and a row unless `apart`, is every other element of it."""
    *lead, columns = tensor.shape
    every_other = not lead or not apart
    strides = _strides_in(tensor.shape, (1,) * len(lead) + (columns if every_other else 3,), tensor.dtype)
    return replace(tensor, stride=(*strides[:-1], 1 + every_other), offset=1)


def parted(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """The second of three parts into which a larger tensor was split along its last dim, as a layer's that makes queries,
    keys and values at once: gaps wider than rows."""
    *lead, columns = tensor.shape
    strides = _strides_in(tensor.shape, (0,) * len(lead) + (2 * columns,), tensor.dtype)
    return replace(tensor, stride=strides, offset=columns)


def shifted(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """Contiguous, but from the second element of its memory on: unaligned, as a part of a larger tensor is."""
    return replace(tensor, stride=TensorSpec(tensor.shape, tensor.dtype).strides, offset=1)


def expanded(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """One slice for all along the first dim that has several, as Tensor.expand() leaves it."""
    several = next((dim for dim, n in enumerate(tensor.shape) if n > 1), None)
    strides = _strides_in(tensor.shape, (0,) * len(tensor.shape), tensor.dtype)
    return replace(tensor, stride=tuple(0 if dim == several else stride for dim, stride in enumerate(strides)))


def repeated_along(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """One element for all along the last dim that has several."""
    several = max((dim for dim, n in enumerate(tensor.shape) if n > 1), default=None)
    shape = tuple(1 if dim == several else n for dim, n in enumerate(tensor.shape))
    strides = TensorSpec(shape, tensor.dtype).strides
    return replace(tensor, stride=tuple(0 if dim == several else stride for dim, stride in enumerate(strides)))


def channels_last(tensor: TensorSpec, apart: bool) -> TensorSpec:
    """The same shape with the second dim innermost, as images are kept; of fewer than four dims none is."""
    if len(tensor.shape) < 4:
        return tensor
    first, channels, *rest = tensor.shape
    strides = _strides_in((first, *rest, channels), (0,) * len(tensor.shape), tensor.dtype)
    return replace(tensor, stride=(strides[0], strides[-1], *strides[1:-1]))


def _strides_in(shape: Sequence[int], more: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Of a contiguous tensor that is so much larger along each dim."""
    return TensorSpec(tuple(n + m for n, m in zip(shape, more)), dtype).strides


LAYOUTS = {
    "transposed": transposed,
    "sliced": sliced,
    "parted": parted,
    "shifted": shifted,
    "expanded": expanded,
    "repeated": repeated_along,
    "channels_last": channels_last,
}


def with_layout(case: Case, layout: str, only: str = "", apart: bool = True) -> Case:
    """`case` with every tensor of two or more dims (and vectors, where they can be) in the given layout, or `only` one.
    `apart`: with gaps where there need be none."""
    least = 1 if layout in ("sliced", "shifted", "repeated") else 2
    names = [name for name, spec in case.tensors.items() if len(spec.shape) >= least and only in ("", name)]
    changed = {name: LAYOUTS[layout](case.tensors[name], apart) for name in names}
    return Case(" ".join(filter(None, (case.name, only, layout))), {**case.args, **changed})


def off_alignment(case: Case, only: str = "", distance: int = 0) -> Case:
    """`case`, each tensor, or `only` one, in its own strides, but one element further on, or `distance` bytes."""
    moved = {
        name: replace(spec, offset=spec.offset + max(1, distance // spec.dtype.itemsize))
        for name, spec in case.tensors.items()
        if only in ("", name)
    }
    what = f"by {distance} bytes" if distance else ""
    return Case(" ".join(filter(None, (case.name, only, "shifted", what))), {**case.args, **moved})
