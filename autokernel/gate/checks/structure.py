"""What matrices may be as a whole, for which a kernel might have a short cut: triangular, a permutation, half zeros, …

Several inputs have such a form at once, each another one: what is wrong with one of them shows beside any other.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.inputs import changing, generator_of, scales_in
from autokernel.spec import Case, KernelSpec, alike

SQUARE = 24  # of all sizes that may be any number, where a matrix is to have as many rows as columns
LEAST = 2  # elements of a dim
Form = Callable[[Tensor, torch.Generator], Tensor]  # of a tensor of two dims or more, drawn from N(0, 1)


def _eye(x: Tensor) -> Tensor:
    return torch.eye(*x.shape[-2:]).expand(x.shape)


def above(x: Tensor) -> Tensor:
    """Where x is above its diagonal."""
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)


def _checkerboard(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every other element is zero, in turn."""
    places = (torch.arange(n) for n in x.shape[-2:])
    return torch.where((next(places)[:, None] + next(places)) % 2 == 0, 0.0, x)


def _symmetric(x: Tensor, generator: torch.Generator) -> Tensor:
    """As far as it goes, where the last two dims differ in size."""
    n = min(x.shape[-2:])
    x = x.clone()
    x[..., :n, :n] = x[..., :n, :n].tril() + x[..., :n, :n].tril(-1).mT
    return x


def _skew(x: Tensor, generator: torch.Generator) -> Tensor:
    """As far as it goes: what is above the diagonal is what is below it, of the other sign."""
    n = min(x.shape[-2:])
    x, below = x.clone(), x[..., :n, :n].tril(-1)
    x[..., :n, :n] = below - below.mT
    return x


def _in_two_blocks(x: Tensor, generator: torch.Generator) -> Tensor:
    """Along the diagonal, zeros beside them."""
    half, x = min(x.shape[-2:]) // 2, x.clone()
    x[..., :half, half:], x[..., half:, :half] = 0, 0
    return x


def _permutation(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of rows, none of which stays where it is."""
    return _eye(x).roll(1 + int(torch.randint(max(1, x.shape[-2] - 1), (), generator=generator)), -2)


def _one_each(x: Tensor, generator: torch.Generator) -> Tensor:
    """A one in each row, at some place, and zeros."""
    place = torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=generator)
    return torch.zeros_like(x).scatter(-1, place, 1.0)


def _half(dim: int, which: int) -> Form:
    def zeros(x: Tensor, generator: torch.Generator) -> Tensor:
        x, half = x.clone(), x.shape[dim] // 2
        x.narrow(dim, 0 if which == 0 else x.shape[dim] - half, half).zero_()
        return x

    return zeros


def _hankel(x: Tensor, generator: torch.Generator) -> Tensor:
    """The same along the diagonals from the right to the left."""
    rows, columns = x.shape[-2:]
    numbers = x.flatten(-2)[..., : rows + columns - 1]
    return numbers[..., torch.arange(rows)[:, None] + torch.arange(columns)]


def _arrow(x: Tensor, generator: torch.Generator) -> Tensor:
    """A row, a column and the diagonal."""
    inner = _eye(x).clone()
    inner[..., 0, :], inner[..., 0] = 1, 1
    return x * inner


def _alone(*places: tuple[int, int]) -> Form:
    """Zeros but for what has this index along each of these dims."""

    def changed(x: Tensor, generator: torch.Generator) -> Tensor:
        kept = torch.zeros_like(x)
        part = tuple(dict(places).get(dim, slice(None)) for dim in (-2, -1))
        kept[(..., *part)] = x[(..., *part)]
        return kept

    return changed


def _reflection(x: Tensor, generator: torch.Generator) -> Tensor:
    """Orthogonal, and none of it zero; as far as it goes, where the last two dims differ in size."""
    v = torch.randn(max(x.shape[-2:]), generator=generator)
    v /= torch.linalg.vector_norm(v)
    return _eye(x) - 2 * torch.outer(v[: x.shape[-2]], v[: x.shape[-1]])


def _circulant(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each row is the one before, one further on."""
    rows, columns = x.shape[-2:]
    return x[..., 0, :][..., (torch.arange(columns) - torch.arange(rows)[:, None]) % columns]


def _matrices(which: slice | None) -> Form:
    """Of several matrices all like the first, or some of them zeros."""

    def changed(x: Tensor, generator: torch.Generator) -> Tensor:
        several = x.reshape(-1, *x.shape[-2:])
        if which is None:
            return several[:1].expand(several.shape).reshape(x.shape)
        several = several.clone()
        several[which] *= len(several) == 1
        return several.reshape(x.shape)

    return changed


def _first_half(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of several matrices: of two elements of a batch the first."""
    several = x.reshape(-1, *x.shape[-2:]).clone()
    several[: len(several) // 2] = 0
    return several.reshape(x.shape)


def _in_turn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of several matrices two in turn, the second of which is there with either sign."""
    several = x.reshape(-1, *x.shape[-2:])
    numbers = torch.arange(len(several))
    signs = torch.where(numbers % 4 == 3, -1.0, 1.0)[:, None, None]
    return (several[numbers % 2 * (len(several) > 1)] * signs).reshape(x.shape)


FORMS: dict[str, Form] = {
    "triangular": lambda x, g: x.triu(),
    "triangular below": lambda x, g: x.tril(),
    "symmetric": _symmetric,
    "the identity": lambda x, g: _eye(x),
    "a diagonal": lambda x, g: x * _eye(x),
    "a band": lambda x, g: x.triu(-2).tril(2),
    "two blocks": _in_two_blocks,
    "of the other sign beyond its diagonal": _skew,
    "a permutation": _permutation,
    "of rows with a one each": _one_each,
    "of columns that are alike": lambda x, g: alike(x),
    "of rows that are alike": lambda x, g: alike(x.mT).mT,  # whose sums, times whole numbers, may be 0 as a whole
    "of whole numbers": lambda x, g: (8 * x / x.abs().amax()).round(),
    "of one value": lambda x, g: alike(x.flatten()[:1]).reshape(()).expand(x.shape),
    "of ones": lambda x, g: torch.ones_like(x),
    "of zeros and ones": lambda x, g: (x > 0).to(x.dtype),
    "cut off at zero": lambda x, g: x.clamp(min=0),  # as a ReLU leaves it
    "mostly zeros": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.15, x, 0.0),
    "of rank one": lambda x, g: x[..., :1] * x[..., :1, :],
    "the same along its diagonals": _circulant,
    "the same along its other diagonals": _hankel,
    "orthogonal": _reflection,
    "a diagonal from the right to the left": lambda x, g: x * _eye(x).flip(-1),
    "a multiple of the identity": lambda x, g: 0.75 * _eye(x),
    "a diagonal of either sign": lambda x, g: torch.where(x < 0, -1.0, 1.0) * _eye(x),
    "two diagonals": lambda x, g: x.triu().tril(1),
    "triangular but for one diagonal": lambda x, g: x.triu(-1),
    "an arrow": _arrow,
    "zeros but for its first row": _alone((-2, 0)),
    "zeros but for its last row": _alone((-2, -1)),
    "zeros but for its first column": _alone((-1, 0)),
    "zeros but for its last column": _alone((-1, -1)),
    "zeros but for one corner": _alone((-2, 0), (-1, 0)),
    "zeros but for the other corner": _alone((-2, -1), (-1, -1)),
    "a checkerboard": _checkerboard,
    "of powers of two": lambda x, g: torch.where(x < 0, -1.0, 1.0) * (x.abs() + 0.1).log2().round().exp2(),
    "of columns alike in pairs": lambda x, g: x[..., torch.arange(x.shape[-1]) // 2],
    "of matrices that are alike": _matrices(None),
    "of matrices that are alike in turn": _in_turn,
    "zeros in its first matrix": _matrices(slice(1)),
    "zeros in its last matrix": _matrices(slice(-1, None)),
    "zeros in the first half of its matrices": _first_half,
    "of rows that add up to one": lambda x, g: x.softmax(-1),  # as attention has them
    "of rows that add up to one, and triangular": lambda x, g: x.masked_fill(above(x), -torch.inf).softmax(-1),
    "zeros in its first columns": _half(-1, 0),
    "zeros in its last columns": _half(-1, 1),
    "zeros in its first rows": _half(-2, 0),
    "zeros in its last rows": _half(-2, 1),
}

ALONE = "zeros but for"  # not in regions: its other rows are constant, of which a norm without an eps makes anything


def squares(spec: KernelSpec, dtype: torch.dtype) -> Case | None:
    """A small case whose matrices have as many rows as columns, where a type's sizes may be any numbers."""
    return spec.case({**spec.smoke, **dict.fromkeys(spec.any_size, SQUARE)}, dtype) if len(spec.any_size) > 1 else None


def formed(spec: KernelSpec, case: Case, inputs: Mapping[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """`inputs`, drawn from N(0, 1), whose matrices are each of one form, and what is said of them: once all forms."""
    matrices = [name for name, x in inputs.items() if _may_have_form(spec, name, x)]
    drawn, generator = random.Random(f"forms:{seed}"), generator_of(seed)
    forms = [form for form in FORMS if not (spec.results and form.startswith(ALONE))]
    orders = [drawn.sample(forms, len(forms)) for _ in matrices]
    for forms in zip(*orders):
        made = {name: _made(inputs[name], form, generator) for name, form in zip(matrices, forms)}
        yield ", ".join(f"{name} {form}" for name, form in zip(matrices, forms)), dict(inputs) | made


def _may_have_form(spec: KernelSpec, name: str, x: Any) -> bool:
    is_free = isinstance(x, Tensor) and x.is_floating_point() and name not in spec.fill
    return is_free and x.dim() > 1 and min(x.shape[-2:]) >= LEAST


def _made(x: Tensor, form: str, generator: torch.Generator) -> Tensor:
    return FORMS[form](x.float(), generator).to(x.dtype).contiguous()


NEW = 1.0, 0.0  # a norm's weight and its bias
# Of a weight, by which it is multiplied.
SIZES_OF_WEIGHTS = 1.0, 1.0, 1 / 16
SIGNS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, torch.abs, lambda x: -x.abs())
SOFT, FARTHEST = 0.4, 6.0  # standard deviations: with none of 2^30 numbers a three; and means, in these


def soft(spec: KernelSpec, case: Case, inputs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`inputs` none of whose numbers, but for weights', is large; those that are vectors as in a new module."""
    vectors = [
        n for n, x in inputs.items() if n in spec.static - spec.fill.keys() and isinstance(x, Tensor) and x.dim() == 1
    ]
    new = {name: torch.full_like(inputs[name], value) for name, value in zip(vectors, NEW)}
    return dict(inputs) | new | {name: (SOFT * x.float()).to(x.dtype) for name, x in free(spec, case, inputs)}


def wholly(spec: KernelSpec, case: Case, inputs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`inputs` each of which is of some size, about some mean, of some sign and of some form as a whole; weights of some
    size, sign and form, or of one value."""
    drawn, generator, made = random.Random(f"wholly:{seed}"), generator_of(seed), dict(inputs)
    largest = min(100.0, scales_in(spec, case.dtype)[-1])
    for name, x in free(spec, case, inputs):
        x, size = x.float(), drawn.choice((SOFT, 1.0, SOFT * (largest / SOFT) ** drawn.random()))
        x = drawn.choice(SIGNS)(x)
        if drawn.random() < 0.25 and name == spec.first_of(inputs):
            x = (x + drawn.choice((1, -1)) * drawn.uniform(1, FARTHEST)) / FARTHEST
        if drawn.random() < 0.75 and _may_have_form(spec, name, x):
            x = FORMS[drawn.choice(list(FORMS))](x, generator)
        made[name] = (size * x).to(inputs[name].dtype).contiguous()
    for name in sorted((spec.static - spec.fill.keys()) & inputs.keys()):
        x = inputs[name]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        x = drawn.choice(SIGNS)(x.float()) if case.dtype != torch.float16 or spec.degree == 1 else x.float()
        if x.dim() == 1 and drawn.random() < 0.5:
            x = torch.full_like(x, drawn.choice((1.0, 0.75)))  # of a norm whose weight is zero nothing shows
        elif drawn.random() < 0.5 and _may_have_form(spec, name, x):
            x = FORMS[drawn.choice(list(FORMS))](x, generator)
        made[name] = (x * drawn.choice(SIZES_OF_WEIGHTS)).to(inputs[name].dtype).contiguous()
    return made


def free(spec: KernelSpec, case: Case, inputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The inputs that are new random numbers in every call, where each may be of any kind."""
    names = changing(spec, case) if not spec.opaque else []
    every = ((name, inputs[name]) for name in names)
    return [(name, x) for name, x in every if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
