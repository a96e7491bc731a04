"""Other values of a case's options: those that the sizes of its type have, and numbers drawn at random."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autokernel.gate.checks.inputs import scales_in
from autokernel.spec import Args, Case, KernelSpec, TensorSpec

FACTORS = (3.0, 10.0), (10.0, 100.0)  # between which a number is made larger
# What an option such as an eps may be, of which its type does not say more: nothing, and whatever a model has.
NUMBERS, ABOVE_ONE = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 0.1), (1.0, 10.0)
LARGE = 8.0  # from which on a number lies outside of N(0, 1)


def with_other_options(spec: KernelSpec, case: Case, least: int, seed: int) -> Iterator[Case]:
    """At least so many cases of the same tensors: each other value of each option is in one of them. An optional tensor is
    left out, or there."""
    drawn, tried = random.Random(f"options:{seed}:{case.name}"), _sizes(spec)
    optional = {name: None for args in tried for name, value in args.items() if not isinstance(value, TensorSpec)}
    others = {name: _others(spec, tried, name, case, drawn) for name in optional if name in case.args}
    count = max(least, *map(len, others.values())) if others else least
    in_turn = {name: _spread(values, case.args[name], count, drawn) for name, values in others.items()}
    for number in range(count):
        changed: dict[str, Any] = {}
        for name in drawn.sample(list(in_turn), len(in_turn)):  # what a type takes together
            value = in_turn[name][number]
            if value != case.args[name] and spec.takes({**case.args, **changed, name: value}):
                changed[name] = value
        yield Case(" ".join((case.name, *map(_in_words, changed.items()))), {**case.args, **changed})


def other_numbers(spec: KernelSpec, case: Case, name: str, drawn: random.Random) -> list[float]:
    """What an option that is a number is in turn, from nothing to more than one."""
    known = spec.other_values.get(name) or (*NUMBERS, drawn.uniform(*ABOVE_ONE))
    return [value for value in known if value != case.args[name]]


def outlier(spec: KernelSpec, case: Case, seed: int) -> float:
    """A number of either sign that is larger than others, by as much as the type's rows may be."""
    drawn, most = random.Random(f"outlier:{seed}:{case.name}"), max(LARGE, scales_in(spec, case.dtype)[-1])
    return drawn.choice((-1, 1)) * LARGE * (most / LARGE) ** drawn.random()


def _sizes(spec: KernelSpec) -> list[Args]:
    return [spec.arguments(spec.dtypes[0], **dims) for dims in (spec.smoke, *spec.sweep, *spec.edges)]


def _others(spec: KernelSpec, tried: Sequence[Args], name: str, case: Case, drawn: random.Random) -> list[Any]:
    """What the option may be beside what it is: as in the type's sizes, or as large a number as none of them has."""
    own, known = case.args[name], [args[name] for args in tried if name in args]
    values = [
        *dict.fromkeys(value for value in known if not isinstance(value, TensorSpec)),
        *spec.other_values.get(name, ()),
    ]
    if name == "dim":
        count = len(next(iter(case.tensors.values())).shape)
        return [dim for dim in values if -count <= dim < count and dim != own]
    others = [value for value in values if value != own]
    numbers = [value for value in (own, *values) if isinstance(value, float)]
    if numbers and name not in spec.other_values:
        others += [numbers[0] * low * (high / low) ** drawn.random() for low, high in FACTORS]
    if own is None:
        others += _tensors(tried, name, case, spec)
    return others


def _spread(others: list[Any], own: Any, count: int, drawn: random.Random) -> list[Any]:
    """So many values in any order, all the others among them, and for half of them its own where there are few."""
    often = max(1, count // 2 // len(others)) if others else 0
    values = (drawn.sample(others, len(others)) * often)[:count]
    values += [own] * (count - len(values))
    drawn.shuffle(values)
    return values


def _tensors(tried: Sequence[Args], name: str, case: Case, spec: KernelSpec) -> list[TensorSpec]:
    """What a tensor that this case has not would be: each of its sizes is 1, or that of another tensor, as in all of the
    type's own sizes."""
    found: dict[tuple[int, bool], list[Args]] = {}
    for args in tried:
        if isinstance(tensor := args[name], TensorSpec):
            found.setdefault((len(tensor.shape), tensor.dtype == spec.dtypes[0]), []).append(args)
    made = []
    for (dims, is_like), these in found.items():
        sizes = [_size_of(these, name, dim, case) for dim in range(dims)]
        if None not in sizes:
            first = these[0][name]
            made.append(replace(first, shape=tuple(sizes), dtype=case.dtype if is_like else first.dtype, stride=None))
    return made


def _size_of(these: Sequence[Args], name: str, dim: int, case: Case) -> int | None:
    """Of one dim of a tensor in this case; None where no rule says."""
    if all(args[name].shape[dim] == 1 for args in these):
        return 1
    for other, tensor in case.tensors.items():
        for axis in range(len(tensor.shape)):
            if all(_has(args, other, axis, args[name].shape[dim]) for args in these):
                return tensor.shape[axis]
    return None


def _has(args: Args, name: str, axis: int, size: int) -> bool:
    tensor: Mapping | TensorSpec | Any = args.get(name)
    return isinstance(tensor, TensorSpec) and axis < len(tensor.shape) and tensor.shape[axis] == size


def _in_words(option: tuple[str, Any]) -> str:
    name, value = option
    if isinstance(value, TensorSpec):
        return f"with {name}"
    return f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
