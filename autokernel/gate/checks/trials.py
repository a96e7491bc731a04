"""The five stages: which calls are made, and on which inputs."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autokernel.gate.checks.cases import REORDERED, CheckCase, lines_of
from autokernel.gate.checks.expectations import most_bytes, of_type
from autokernel.gate.checks.inputs import (
    COMPOUND,
    DISTRIBUTIONS,
    SLABS,
    fill_inputs,
    finite_kinds,
    off_alignment,
    row_kinds,
    scales_in,
    shared_by_rows,
    with_layout,
)
from autokernel.gate.checks.options import outlier, with_other_options
from autokernel.gate.checks.planted import groups_that_show
from autokernel.gate.checks.sizes import (
    combinations,
    drawn_sizes,
    four_dims,
    many_rows,
    option_dims,
    other_ranks,
    small_sizes,
    ways_of_smoke,
)
from autokernel.gate.checks.structure import squares
from autokernel.spec import Args, Case, KernelSpec, TensorSpec
from autokernel.target import Target

DISTANCES = 16, 32  # bytes from what a line of the cache is aligned to: vectors of some widths are, others are not
TWICE_BYTES = 1 << 30  # of an output at most, where a target's case is called twice


def trials(spec: KernelSpec, target: Target, seed: int, quick: bool) -> Iterator[CheckCase]:
    """Every trial of the five stages, in order, each with a seed of its own derived from `seed`."""
    count = 0

    def trial(stage: str, case: Case, **options: Any) -> CheckCase:
        nonlocal count
        count += 1
        digest = hashlib.sha256(f"{seed}:{count}".encode()).digest()
        return CheckCase(stage, case, int.from_bytes(digest[:6], "big"), **options)

    for dtype in dict.fromkeys((target.dtype, spec.dtypes[0])):
        yield trial("smoke_test", spec.case(spec.smoke, dtype))
    shapes = tuple(DISTRIBUTIONS)
    is_of_one_size = spec.edges == spec.sweep == (spec.smoke,)  # which has had the first distribution by now
    for i, dims in enumerate(spec.sweep, int(is_of_one_size)):
        for j, dtype in enumerate(spec.dtypes if not quick else (target.dtype,)):
            yield trial("shape_sweep", spec.case(dims, dtype), distribution=shapes[(i + 2 * j) % len(shapes)])
    for weighted in target.cases:
        for case in weighted.proven:
            yield trial("shape_sweep", case, twice=most_bytes(spec, case) <= TWICE_BYTES)
    perturbed: set[tuple[str, Any]] = set()
    different = (spec.smoke, *(d for d in spec.sweep if d != spec.smoke))
    for dims in different:  # the first two, and those that have an input or option of a dtype that was in none before
        case = spec.case(dims, target.dtype)
        kinds = {(name, getattr(value, "dtype", type(value))) for name, value in case.args.items()}
        if dims in (spec.smoke, spec.sweep[0]) or not perturbed.issuperset(kinds):
            yield trial("shape_sweep", case, perturbed=True)
            perturbed |= kinds
    if quick:
        return
    for weighted in target.cases:
        for case in weighted.proven:
            for options in hard(spec, case):
                yield trial("numerical_stability", case, **options)
    proven = [case for weighted in target.cases for case in weighted.proven]
    smoke_tests = [
        case for dtype in spec.dtypes if (case := spec.case(spec.smoke, dtype)).args not in [c.args for c in proven]
    ]
    combined = [spec.case(dims, target.dtype) for options, dims in combinations(spec).items() if len(options) > 1]
    for case in (*proven, *smoke_tests, *combined) if spec.independent_rows or spec.results else ():
        yield trial("numerical_stability", case, peaks=True)
    for case in (*proven, *smoke_tests) if spec.planted_in else ():
        for group in groups_that_show(spec, case.dtype):
            if planted := tuple(one for one in group if one[0] in case.tensors):
                yield trial("numerical_stability", case, planted=planted)
    smoke = spec.case(spec.smoke, target.dtype)
    if target.dtype == torch.float16 and (names := free_numbers(spec, smoke)):
        each, others = [(name,) for name in names], tuple(name for name in names if name != spec.first_of(smoke.args))
        for faint in dict.fromkeys((*each, others or each[0])):
            yield trial("numerical_stability", smoke, faint=faint)
    yield trial("numerical_stability", smoke, series="whole")
    yield trial("numerical_stability", squares(spec, target.dtype) or spec.case(spec.smoke, target.dtype), series="formed")
    for dims in ways_of_smoke(spec, seed):
        yield trial("numerical_stability", spec.case(dims, target.dtype), series="usual")
    optional = [spec.case(dims, target.dtype) for dims in option_dims(spec)] if spec.filled and not spec.opaque else []
    for case in [*proven, *optional] if spec.filled else []:
        yield trial("numerical_stability", case, series="filled")
    for name in spec.decisive:
        for case in (*proven, *smoke_tests):
            yield trial("numerical_stability", case, decisive=name)
    for dims in option_dims(spec):
        for dtype in spec.dtypes:
            for options in hard(spec, spec.case(dims, dtype), in_slabs=is_of_one_size):
                yield trial("numerical_stability", spec.case(dims, dtype), **options)
    for dtype in spec.dtypes:
        for name in spec.adversarial:
            smoke = spec.case(spec.smoke, dtype)
            yield trial("numerical_stability", smoke, adversarial=name)
            numbers = {name: 3 * value for name, value in smoke.args.items() if isinstance(value, float)}
            if numbers:  # an eps shows beside what is small alone, if it is not itself large
                other = Case(f"{smoke.name} {' and '.join(numbers)} changed", {**smoke.args, **numbers})
                yield trial("numerical_stability", other, adversarial=name)
            yield trial("numerical_stability", spec.case(spec.sweep[0], dtype), adversarial=name)
        for value in spec.nonfinite:
            yield trial("numerical_stability", spec.case(spec.smoke, dtype), nonfinite=value)
    for dims in (spec.sweep[len(spec.sweep) // 2], spec.smoke):
        yield trial("determinism", spec.case(dims, target.dtype), held=True)
    for i, dims in enumerate(spec.edges, 2 * int(is_of_one_size)):
        for dtype in spec.dtypes:
            yield trial("edge_cases", spec.case(dims, dtype), distribution=shapes[i % len(shapes)])
    for i, dims in enumerate(drawn_sizes(spec, seed)):
        yield trial("edge_cases", spec.case(dims, target.dtype), distribution=shapes[i % len(shapes)])
    for dims in (*small_sizes(spec, seed), *many_rows(spec, seed)):  # of N(0, 1): of one gelu far below 0 nothing is left
        yield trial("edge_cases", spec.case(dims, target.dtype))
    for args in spec.forms(target.dtype) if spec.forms else ():
        yield trial("edge_cases", Case(_words_of(args), args))
    for dims in other_ranks(spec, seed) if "sliced" in spec.layouts else ():
        yield trial("edge_cases", with_layout(spec.case(dims, target.dtype), "sliced"))
    for apart, dims in enumerate((spec.edges[0], spec.smoke)):
        for layout in spec.layouts:
            for dtype in spec.dtypes:
                yield trial("edge_cases", with_layout(spec.case(dims, dtype), layout, apart=bool(apart)))
    for dims in four_dims(spec, seed) if "transposed" in spec.layouts else ():
        plain = spec.case(dims, target.dtype)
        if (other := with_layout(plain, "channels_last")).args != plain.args:
            yield trial("edge_cases", other)
    if "sliced" in spec.layouts:
        yield trial("edge_cases", with_layout(smoke, "parted"))
    for name, layout in itertools.product(smoke.tensors, ("expanded", "repeated")) if "transposed" in spec.layouts else ():
        if (alone := with_layout(smoke, layout, name)).args != smoke.args:
            yield trial("edge_cases", alone, repeats=True)
    for layout in spec.layouts:
        for name in smoke.tensors if len(smoke.tensors) > 1 else ():
            if (alone := with_layout(smoke, layout, name)).args != smoke.args:
                yield trial("edge_cases", alone)
    for weighted in target.cases if "shifted" in spec.layouts else ():
        for case in weighted.proven:
            yield trial("edge_cases", off_alignment(case), **({"ordinary": True} if spec.opaque else {"soft": True}))
            if sum(t.numel for t in case.tensors.values()) <= REORDERED:
                for other, options in elsewhere(spec, case, seed):
                    yield trial("edge_cases", other, **options)


def free_numbers(spec: KernelSpec, case: Case) -> list[str]:
    """The inputs that may be numbers of any size; none where a norm, or a quotient, may make anything of small ones."""
    tensors = [name for name, t in case.tensors.items() if t.dtype == case.dtype and name not in spec.fill]
    return [] if spec.opaque or spec.results else tensors


def _words_of(args: Args) -> str:
    """Shapes and strides, for people."""
    tensors = {name: value for name, value in args.items() if isinstance(value, TensorSpec)}
    return " ".join(f"{name} {list(t.shape)} by {list(t.strides)}" for name, t in tensors.items())


def elsewhere(spec: KernelSpec, case: Case, seed: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """A target's case with all tensors, or one, off alignment in another way, each time with other options. Where rows have
    results of their own, a number in one of them is not finite, or large: its others are to be right beside it. Where its
    options are its own and there are several tensors, each of these is of one kind as a whole."""
    moved: list[dict[str, Any]] = [{"distance": distance} for distance in DISTANCES]
    moved += [{"only": name} for name in case.tensors if len(case.tensors) > 1]
    others = with_other_options(spec, case, len(moved), seed)
    for number, (where, other) in enumerate(zip(itertools.cycle(moved), others)):
        odd = outlier(spec, case, seed + number) if number or not spec.nonfinite else spec.nonfinite[0]
        if name := where.get("only"):  # which an optional tensor must be there for
            other = replace(other, args={**other.args, name: case.args[name]})
        is_whole = number > 0 and len(case.tensors) > 1 and other.args == case.args and not spec.opaque
        options = {"wholly": True} if is_whole else {"ordinary": True, "nonfinite": odd if spec.independent_rows else None}
        yield off_alignment(other, **where), options


def hard(spec: KernelSpec, case: Case, in_slabs: bool = False) -> Iterator[dict[str, Any]]:
    """Options of the trials in which a case meets each distribution, adversarial transform and non-finite value.

    Where every row has results of its own, one trial has rows of all kinds that are finite, and one the others (few rows:
    as many as it takes): a kernel that is careful wherever something is not finite is to be careful everywhere. Where all
    rows make one result, kinds that would hide each other have trials of their own. `in_slabs`: where nothing is known of
    which elements belong together, they may be those of a batch's element or of a channel.
    """
    sample = fill_inputs(spec, spec.case(spec.smoke, case.dtype), 0)
    with of_type(spec, "the smoke test's inputs"):
        shared, finite = shared_by_rows(spec, sample), finite_kinds(spec, sample)
    kinds = tuple(name for name in row_kinds(spec, sample) if name not in shared)
    if spec.independent_rows:
        lines = lines_of(spec, case)
        for group in (tuple(k for k in kinds if k in finite), tuple(k for k in kinds if k not in finite)):
            for start in range(0, len(group), lines):
                yield {"rows": group, "first_row": start, "zeros": not finite.issuperset(group)}
    else:
        planted = {f"one {value}": value for value in spec.nonfinite}
        mixed = tuple(k for k in kinds if k not in DISTRIBUTIONS and k not in planted and k not in ("all -inf", *COMPOUND))
        if in_slabs and sample[spec.first_of(sample)].dim() > 1 and not is_one_number(spec, case):
            slabs = dict.fromkeys((*SLABS, *DISTRIBUTIONS, *(k for k in mixed if k not in spec.adversarial)))
            yield from ({"rows": tuple(k for k in slabs if k in kinds), "across": dim} for dim in (0, 1))
        else:
            yield {"rows": tuple(DISTRIBUTIONS)}
            for group in by_size(spec, case, mixed) if is_one_number(spec, case) else (mixed,):
                yield from ({"rows": group, "first_row": start} for start in range(0, len(group), lines_of(spec, case)))
        yield from ({"nonfinite": value, "zeros": True} for value in planted.values())
        if f"one {math.nan}" in planted:  # where loops start, and what does not fill a vector
            yield from ({"nonfinite": math.nan, "place": place} for place in (0, -1))
        yield from ({"rows": (kind,)} for kind in COMPOUND if kind in kinds)
    yield from ({"adversarial": name} for name in shared)


def is_one_number(spec: KernelSpec, case: Case) -> bool:
    """Whether a result has no more bytes than a number."""
    return spec.bytes_moved(case.args) - sum(t.nbytes for t in case.tensors.values()) <= torch.float64.itemsize


def by_size(spec: KernelSpec, case: Case, kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """`kinds` of rows in groups, so that none hides errors of another where they add up to one number."""
    large = [f"times {scale:g}" for scale in scales_in(spec, case.dtype) if scale > 1]
    largest = {*large[-1:], "far below zero"}  # which are alike in size
    alone = [(kind,) for kind in large if kind not in largest]
    small = tuple(k for k in kinds if k not in large and k not in largest)
    return [group for group in (small, *alone, tuple(k for k in kinds if k in largest)) if group]
