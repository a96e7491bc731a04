"""What a whole tensor may be: of one size, one sign, one number. A kernel that looks at all of an input meets each. So are
options numbers of each size.

Rows of many kinds side by side show what a kernel makes of each row, and hide what it makes of a tensor: beside them its
largest number is always the largest that there is, and its mean next to nothing.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.expectations import of_type
from autokernel.gate.checks.inputs import PATTERNS, changing, generator_of, scales_in
from autokernel.gate.checks.options import other_numbers
from autokernel.gate.checks.structure import above
from autokernel.spec import Case, KernelSpec, alike

# Sizes of the first tensor: so many between these, as models have them, each a factor of 1.5 above the one before, about
# zero, half as many about other means, and so many between the smallest and the largest of its type's rows.
NEAR_ONE, NEAR, FAR = (0.1, 1000.0), 24, 8
FARTHEST = 6.0  # of a mean from zero, in standard deviations
ONE_VALUE = (1.0, 0.0) * 4, (0.75, 0.5) * 4  # of all vectors among the weights: as in a new norm, and otherwise
MOST_BYTES, FEWEST = 1 << 27, 4  # that all these calls move, and how many are made of large inputs all the same

# What the first tensor may be as a whole, for which a kernel might have a short cut: of one long row each, too.
USUAL: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    **{what: lambda x, g, change=change: _as_one_row(change, x, g) for what, change in PATTERNS.items()},
    "in order": lambda x, g: x.flatten().sort().values.view(x.shape),
    "in order, the largest first": lambda x, g: x.flatten().sort(descending=True).values.view(x.shape),
    "of rows in order": lambda x, g: x.sort(-1).values,
    "of rows in order, the largest first": lambda x, g: x.sort(-1, descending=True).values,
    "of zeros below zero": lambda x, g: -torch.zeros_like(x),
    "mostly zeros": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.1, x, 0.0),
    "of whole numbers": lambda x, g: (2 * x).round(),
    "of zeros and ones": lambda x, g: (x > 0).to(x.dtype),
    "of numbers of float16": lambda x, g: x.half().float(),
    "of numbers of float8": lambda x, g: x.to(torch.float8_e4m3fn).float(),
    "of whole numbers of 8 bits": lambda x, g: (40 * x).round().clamp(-128, 127),
    "of whole numbers from 0 to 255": lambda x, g: (80 * x.abs()).round().clamp(max=255),
    "between -1 and 1": lambda x, g: x.tanh(),
    "of waves": lambda x, g: (torch.arange(x.shape[-1]) / 7 + x[..., :1]).sin().expand(x.shape),
    "of rows about zero, of one size": lambda x, g: (x - x.mean(-1, keepdim=True)) * _inverse_size(x),  # from a norm
    "of rows that add up to one": lambda x, g: x.softmax(-1),
    "of logarithms of such rows": lambda x, g: x.log_softmax(-1),
    "zero in its last row": lambda x, g: x.index_fill(0, torch.tensor([len(x) - 1]), 0),
    "zero in its first row": lambda x, g: x.index_fill(0, torch.tensor([0]), 0),
    "zero in one column": lambda x, g: x.index_fill(-1, torch.randint(x.shape[-1], (1,), generator=g), 0),
    "of one value in one column": lambda x, g: x.index_fill(-1, torch.randint(x.shape[-1], (1,), generator=g), 1.5),
    "of two halves that are alike": lambda x, g: x[torch.arange(len(x)) % max(1, len(x) // 2)],
    "one in its first column": lambda x, g: x.index_fill(-1, torch.tensor([0]), 1.0),
    "of columns that add up to nothing": lambda x, g: x - x.mean(0, keepdim=True),
    "of rows each larger than the one before": lambda x, g: _growing(x),
    "of rows each smaller than the one before": lambda x, g: _growing(x).flip(0),
    "of rows the same from the first and the last on": lambda x, g: x + x.flip(0),
    "of rows alike in pairs": lambda x, g: x[torch.arange(len(x)) // 2],
    "the same from both ends, but for signs": lambda x, g: ((y := x.flatten()) - y.flip(0)).view(x.shape),
    "of rows the same from both ends, but for signs": lambda x, g: x - x.flip(-1),
}
NAN_IN = {"NaN in its first row": 0, "NaN in its last row": -1}
# What vectors may be beside the first tensor, such as a norm's weight. None leaves a result little to be seen by.
HIDING = ("half of them zeros, or all but one", "mostly zeros", "of zeros below zero", "of rows that add up to one")
VECTORS = {what: change for what, change in USUAL.items() if what not in HIDING and "zero in" not in what} | {
    "about one": lambda x, g: 1 + x / 32,
    "very near one": lambda x, g: 1 + x / 1024,
    "minus one": lambda x, g: -torch.ones_like(x),
    "with one far larger than others": lambda x, g: x.index_fill(-1, torch.tensor([len(x) // 3]), 64.0),
    "small": lambda x, g: x / 4096,
    "large": lambda x, g: x * 64,
    "of one sign in turn": lambda x, g: x.abs() * (1 - 2 * (torch.arange(len(x)) % 2)),
}
TOO_SMALL = ("a few too small for normal numbers",)  # in regions, which may divide by them
OF_OTHER_SIZES = ("small", "large", "with one far larger than others")  # in what is opaque, which may take exponentials
UNTOLD = ("of zeros below zero",)  # in regions, where the sign of a zero may tell

Changed = Iterator[tuple[str, dict[str, Any]]]
Change = Callable[[Any], Any]  # of a tensor or a number


def wholes(spec: KernelSpec, case: Case, inputs: Mapping[str, Any], seed: int) -> Changed:
    """`inputs`, drawn from N(0, 1), with one tensor that is of one kind as a whole, and what is said of it: in random
    order, as many as are made in little time."""
    drawn = random.Random(f"whole:{seed}")
    changes = [(name, *change) for name in inputs for change in _changes(spec, case, inputs, name, drawn)]
    weights = [
        n for n, x in inputs.items() if isinstance(x, Tensor) and n in spec.static - spec.fill.keys() and x.dim() == 1
    ]
    if weights and not spec.opaque:
        for values in ONE_VALUE:
            made = {name: torch.full_like(inputs[name], value) for name, value in zip(weights, values)}
            yield f"{' and '.join(weights)} of one value", dict(inputs) | made
    for name in (name for name, x in inputs.items() if isinstance(x, float)):
        first = spec.first_of(inputs)
        if spec.independent_rows and not spec.opaque and name not in spec.other_values and first not in spec.fill:
            x = inputs[first].clone()
            x.flatten(0, -2)[::2] = 0  # of which a norm without its eps makes NaN
            yield f"{name} is 0, every other row of {first} zeros", dict(inputs) | {name: 0.0, first: x}
    extremes = [(names, size) for names, sizes in spec.extremes.items() for size in sizes]
    for names, size in drawn.sample(extremes, min(_most(spec, case), len(extremes))):
        made = {name: (inputs[name].float() * size).to(inputs[name].dtype) for name in names}
        yield f"{' and '.join(names)} times {size:g}", dict(inputs) | made
    for name, what, change in drawn.sample(changes, min(_most(spec, case), len(changes))):
        x, made = inputs[name], change(inputs[name])
        yield f"{name} {what}", dict(inputs) | {name: made.to(x.dtype).contiguous() if isinstance(made, Tensor) else made}


def filled(spec: KernelSpec, case: Case, inputs: Mapping[str, Any], seed: int) -> Changed:
    """`inputs` whose tensors of `fill` are of one kind as a whole, in random order, as many as are made in little time."""
    drawn, generator = random.Random(f"filled:{seed}"), generator_of(seed)
    for what in drawn.sample(list(spec.filled), min(_most(spec, case), len(spec.filled))):
        with of_type(spec, f"inputs that are {what}"):
            changed = spec.filled[what](dict(inputs), generator)
        if changed:
            yield what, dict(inputs) | changed


def usual(spec: KernelSpec, case: Case, inputs: Mapping[str, Any], seed: int) -> Changed:
    """`inputs`, drawn from N(0, 1), whose first tensor is of each of USUAL as a whole, in random order, as many as are made
    in little time; other vectors, of an opaque type all others, are of some kind each, all of which come by."""
    drawn, generator, name = random.Random(f"usual:{seed}"), generator_of(seed), spec.first_of(inputs)
    x = inputs[name]
    if name in spec.fill or not x.is_floating_point() or not x.dim() or not x.numel():
        return
    is_plain = x.dim() <= 2 or "shape" not in spec.any_size  # of more dims there are scores before their softmax
    kinds = {what: change for what, change in USUAL.items() if is_plain and (what not in UNTOLD or not spec.results)}
    if -math.inf in spec.nonfinite and x.dim() > 1:
        kinds["of -inf above its diagonal"] = _causal
        if spec.relative:  # scores, to which models add finite numbers, too
            kinds["less 1e4 above its diagonal"] = lambda x, g: x.where(~above(x), x - 1e4)
        kinds["of -inf from some place of each row on"] = _of_some_lengths
    others = [n for n in inputs if n != name and n not in spec.fill and isinstance(inputs[n], Tensor)]
    for first, other in ((torch.abs, torch.abs), (torch.abs, _below), (_below, _below)) if others else ():
        made = {n: other(inputs[n]) for n in others if inputs[n].is_floating_point()}
        yield "of one sign each", dict(inputs) | {name: first(x)} | made
    if math.nan in spec.nonfinite and x.dim() > 1:
        kinds |= {what: partial(_with_nan, row) for what, row in NAN_IN.items()}
    vectors = [n for n in others if inputs[n].dim() == 1 and inputs[n].is_floating_point()]
    left_out = (*(TOO_SMALL if spec.results else ()), *(OF_OTHER_SIZES if spec.opaque else ()))
    of_vectors = [what for what in VECTORS if what not in left_out]
    orders = {n: drawn.sample(of_vectors, len(of_vectors)) for n in vectors}
    if spec.opaque:  # whose inputs that tell nothing are left out afterwards
        matrices = [n for n in others if inputs[n].dim() > 1 and inputs[n].is_floating_point()]
        orders |= {n: drawn.sample(list(kinds), len(kinds)) for n in matrices}
    changes = VECTORS | kinds
    for number, what in enumerate(drawn.sample(list(kinds), min(_most(spec, case), len(kinds)))):
        chosen = {name: (what, kinds[what])}
        chosen |= {n: (order[number % len(order)], changes[order[number % len(order)]]) for n, order in orders.items()}
        made = {n: change(inputs[n].float(), generator).to(x.dtype).contiguous() for n, (_, change) in chosen.items()}
        yield ", ".join(f"{n} {what}" for n, (what, _) in chosen.items()), dict(inputs) | made


def _most(spec: KernelSpec, case: Case) -> int:
    return max(FEWEST, MOST_BYTES // max(1, spec.bytes_moved(case.args)))


def _changes(
    spec: KernelSpec, case: Case, inputs: Mapping[str, Any], name: str, drawn: random.Random
) -> Iterator[tuple[str, Change]]:
    x = inputs[name]
    if isinstance(x, float):
        for number in other_numbers(spec, case, name, drawn):
            yield f"is {number:.3g}", lambda x, number=number: number
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return
    is_first, has_form = name == spec.first_of(inputs), name in spec.fill
    if not has_form:
        yield "above zero", torch.abs
        yield "below zero", _below
    if not has_form:
        yield "zero", torch.zeros_like
        yield "one", torch.ones_like
        if is_first:
            yield "of one value", _of_one_value
        if x.dim() > 1:
            yield "the identity", _identity
        if not is_first and x.dim() == 1:
            yield "of one value", lambda x: torch.full_like(x, 0.75)
            yield "of zeros and ones", lambda x: (x > 0).to(x.dtype)
    if is_first and not has_form:
        if x.dim() > 1:
            yield "of rows that are alike", lambda x: x.narrow(0, 0, 1).expand_as(x)
            yield "of rows some of which are alike", lambda x: _some_alike(x, drawn)
        for value in spec.nonfinite:
            yield f"{value}", partial(torch.full_like, fill_value=value)
    if is_first and (has_form or name in changing(spec, case)):
        yield from _sizes(spec, case.dtype, drawn, centred=has_form)
    elif not is_first and not has_form:
        yield "a sixteenth", lambda x: x / 16
        if spec.degree == 1 or case.dtype != torch.float16:
            yield "times 16", lambda x: x * 16


def _below(x: Tensor) -> Tensor:
    return -x.abs()


def _of_one_value(x: Tensor) -> Tensor:
    return alike(x.flatten()[:1]).reshape(()).expand(x.shape)


def _identity(x: Tensor) -> Tensor:
    """As far as it goes, where the last two dims differ in size."""
    return torch.eye(*x.shape[-2:], device=x.device).expand(x.shape)


def _some_alike(x: Tensor, drawn: random.Random) -> Tensor:
    """Rows of the first half, most of them several times: of neighbours, and of others."""
    count = len(x)
    chosen = [drawn.randrange((count + 1) // 2) for _ in range(count)]
    chosen[-1], chosen[count // 2] = chosen[0], chosen[count // 2 - 1]
    return x[torch.tensor(chosen, device=x.device)]


def _sizes(
    spec: KernelSpec, dtype: torch.dtype, drawn: random.Random, centred: bool = False
) -> Iterator[tuple[str, Change]]:
    """One in each of as many equal parts, by their logarithms, of each range, somewhere: the same in all parts, so that
    between two there is never more than one part. `centred`: about no mean."""
    scales = scales_in(spec, dtype)
    least = max(NEAR_ONE[0], scales[0]) if spec.opaque else scales[0]  # beside a bias what is smaller is all but constant
    near = max(NEAR_ONE[0], scales[0]), min(NEAR_ONE[1], scales[-1])
    ranges = (near, NEAR, (0,)), (near, NEAR // 2, (1, -1)), ((least, scales[-1]), FAR, (0, 1, 0, -1))
    for (low, high), parts, signs in ranges[::2] if centred else ranges:
        within = drawn.random()
        for part in range(parts):
            size = low * (high / low) ** ((part + within) / parts)
            mean = 0 if centred else signs[part % len(signs)] * drawn.uniform(1, FARTHEST)
            yield f"times {size:.3g} about {mean * size / math.hypot(1, mean):.3g}", partial(_about, mean=mean, size=size)


def _about(x: Tensor, mean: float, size: float) -> Tensor:
    """x, drawn from N(0, 1), about another mean, in its standard deviations; it is so large with its mean."""
    unit = size / math.hypot(1, mean)
    return (x.float() + mean) * unit


def _as_one_row(
    change: Callable[[Tensor, Tensor, torch.Generator], Tensor], x: Tensor, generator: torch.Generator
) -> Tensor:
    return change(x.reshape(1, -1), torch.arange(x.numel()), generator).view(x.shape)


def _growing(x: Tensor) -> Tensor:
    """By so much at each index of the first dim, from an eighth of its size to eight times that."""
    sizes = torch.linspace(-3, 3, len(x)).exp2().view(-1, *(1,) * (x.dim() - 1))
    return x * sizes if x.dim() < 2 else x * _inverse_size(x) * sizes


def _inverse_size(x: Tensor) -> Tensor:
    return torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


def _with_nan(row: int, x: Tensor, generator: torch.Generator) -> Tensor:
    return x.index_fill(0, torch.tensor([row % len(x)]), math.nan)


def _causal(x: Tensor, generator: torch.Generator) -> Tensor:
    """As scores have it before their softmax."""
    return x.masked_fill(above(x), -math.inf)


def _of_some_lengths(x: Tensor, generator: torch.Generator) -> Tensor:
    """As scores have it that are padded, each row at least with one number."""
    length = 1 + (torch.rand((*x.shape[:-1], 1), generator=generator) * (x.shape[-1] - 1)).long()
    return x.masked_fill(torch.arange(x.shape[-1]) >= length, -math.inf)
