"""Values that are not finite, or large, in inputs beside the first: which show beside each other, and where they lie."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.inputs import fill_inputs, generator_of, scales_in
from autokernel.spec import Case, KernelSpec, several

Planted = tuple[str, float]  # an input, and a value of one of its elements
PLACES = 4  # of each value: some may be where a condition leaves them out; the second and the third are in one row
SEEN_ROWS = 64  # of a result, where several calls are made for the values that hide each other


def values_of(spec: KernelSpec, dtype: torch.dtype) -> tuple[float, ...]:
    """Those that the first input has one by one, and the largest numbers of either sign."""
    largest = scales_in(spec, dtype)[-1]
    if dtype == torch.float16 and spec.degree == 1:  # beside which results are beyond its range
        largest = torch.finfo(dtype).max / 2
    return (*spec.nonfinite, largest, -largest)


def planted_in(spec: KernelSpec, case: Case) -> list[Planted]:
    """Every value in every input of a case that may have it."""
    return [(name, value) for name in spec.planted_in if name in case.tensors for value in values_of(spec, case.dtype)]


def groups_that_show(spec: KernelSpec, dtype: torch.dtype) -> list[tuple[Planted, ...]]:
    """All of them, in as few groups as leave each one results that no other of its group changes, at the smoke test's size:
    NaN in a hidden layer's weight is in all results, and one in a norm's weight in one column."""
    case = spec.case(spec.smoke, dtype)
    every, inputs = planted_in(spec, case), fill_inputs(spec, case, 0)
    groups: list[dict[Planted, Tensor]] = []
    plain = _results(spec, dtype, inputs)
    for one in every:
        changed = ~_same(_results(spec, dtype, with_planted(spec, inputs, [one], every, 0)), plain)
        beside = next((group for group in groups if _all_show([*group.values(), changed])), None)
        if beside is None:
            groups.append(beside := {})
        beside[one] = changed
    return [tuple(group) for group in groups]


def _results(spec: KernelSpec, dtype: torch.dtype, inputs: Mapping[str, Any]) -> Tensor:
    """All results of the oracle, as the dtype has them."""
    exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    with torch.inference_mode():
        return torch.cat([y.to(dtype).flatten() for y in several(spec.oracle(**exact))])


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | a.isnan() & b.isnan()


def _all_show(changed: Sequence[Tensor]) -> bool:
    """Whether each changes a result that no other changes; what changes nothing hides nothing."""
    times = torch.stack(list(changed)).sum(0)
    return all(not one.any() or (one & (times == 1)).any() for one in changed)


def with_planted(
    spec: KernelSpec, inputs: Mapping[str, Any], chosen: Sequence[Planted], every: Sequence[Planted], seed: int
) -> dict[str, Any]:
    """`inputs` with the `chosen` ones of `every` value, at places that are apart along each dim but for two of each value,
    which share a row; rows of the first tensor are zeros, beside one of each value's places too where both inputs have the
    same rows, and columns beside NaN where both have the same: 0 times NaN is NaN."""
    generator = generator_of(seed)
    changed = with_zero_rows(spec, inputs, generator)
    first = next(iter(changed.values()), None)
    bands = _bands(len(every), [number for number, one in enumerate(every) if one in chosen], generator)
    for number, (name, value) in enumerate(every):
        shape = inputs[name].shape
        place = tuple(_within(n, bands[dim % 4][number], len(every), generator) for dim, n in enumerate(shape))
        for indices in place[:-1]:
            indices[2] = indices[1]
        if (name, value) in chosen and inputs[name].numel():
            changed.setdefault(name, inputs[name].clone())[place] = value
            for dim, n in enumerate(shape if first is not None and math.isnan(value) else ()):
                if n == first.shape[-1]:
                    first[..., _run_with(int(place[dim][0]), *_bounds(n, bands[dim % 4][number], len(every)))] = 0
            if first is not None and shape[:-1] == first.shape[:-1]:
                first[tuple(indices[0] for indices in place[:-1])] = 0
    return dict(inputs) | changed


def _bands(count: int, chosen: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    """For each dim which part of it each value has to itself. Where there are parts enough, what a chosen one has along the
    first dim no other one has along any: what one makes of a row of a layer's weight, next to nothing, say, does not meet
    infinity in a column of the next layer's."""
    first = torch.randperm(count, generator=generator).tolist()
    bands, taken = [first], {first[number] for number in chosen}
    for _ in range(3):
        along = torch.randperm(count, generator=generator).tolist()
        free = [band for band in along if band not in taken]
        if len(free) >= len(chosen):
            along = list(first)
            for number, band in zip(chosen, free):
                along[number] = band
        bands.append(along)
    return bands


def _bounds(size: int, band: int, bands: int) -> tuple[int, int]:
    """Of one of so many equal parts of a dim."""
    return size * band // bands, size * (band + 1) // bands


def _run_with(index: int, low: int, high: int) -> slice:
    """Half of what is between two bounds, or more, in which an index lies."""
    count = max(1, (high - low + 1) // 2)
    start = max(low, min(index - count // 2, high - count))
    return slice(start, start + count)


def _within(size: int, band: int, bands: int, generator: torch.Generator) -> Tensor:
    """Random indices of a dim in one of so many equal parts of it."""
    low, high = _bounds(size, band, bands)
    count = max(1, high - low)
    places = torch.randperm(count, generator=generator)[torch.arange(PLACES) % count]  # different ones, where there are
    return (low + places).clamp(max=size - 1)


def with_zero_rows(spec: KernelSpec, inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """The first tensor with an eighth of its rows zeros, one after the other, as a kernel takes them at once, where it may
    have such."""
    name = spec.first_of(inputs)
    first = inputs[name]
    if name in spec.fill or first.dim() < 2 or not first.is_floating_point():
        return {}
    first = first.clone()
    rows = first.flatten(0, -2)
    count = len(rows) // 8
    start = count * int(torch.randint(8, (), generator=generator))
    rows[start : start + count] = 0
    return {name: first}


def rows_seen(spec: KernelSpec, case: Case, seed: int) -> Tensor | None:
    """Which rows of a result are compared, where they can be computed alone; None: all."""
    first = next(iter(case.tensors.values()))
    if not spec.sliced or first.shape[0] <= SEEN_ROWS:
        return None
    return torch.randperm(first.shape[0], generator=torch.Generator().manual_seed(seed))[:SEEN_ROWS].sort().values
