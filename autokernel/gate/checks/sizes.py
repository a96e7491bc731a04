"""Sizes and options of a kernel type for the trials, beside those that it lists."""

import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any

from autokernel.gate.checks.cases import lines_of
from autokernel.spec import Dims, KernelSpec

# Elements of a vector, how many of these a size that is drawn has at most, and how large other dims of a shape are.
SHORT_VECTOR, MOST_VECTORS, FEW = 8, 16, 4
MOST_WAYS = 12
SCORES = (4, 24, 24), (2, 3, 24, 24)  # shapes of attention's scores
MOST_BLOCKS, MANY = 65_535, 1 << 20  # of a CUDA grid, along any dim but the first; elements of so many rows at most


def option_dims(spec: KernelSpec) -> list[Dims]:
    """Of the spec's sizes, for each value of each option the smallest that has it (no smaller than the smoke test's), of as
    many rows as that has where there is one: of few rows each kind takes a trial of its own."""

    def size(dims: Dims) -> int:
        return sum(t.numel for t in spec.case(dims, spec.dtypes[0]).tensors.values())

    def rows(dims: Dims) -> int:
        return lines_of(spec, spec.case(dims, spec.dtypes[0]))

    found: dict[tuple[str, str], Dims] = {}
    for dims in sorted((*spec.sweep, *spec.edges), key=lambda dims: (rows(dims) < rows(spec.smoke), size(dims))):
        if size(dims) >= size(spec.smoke):
            for key in _options_of(spec, dims).items():
                found.setdefault(key, dims)
    return [spec.smoke, *{id(dims): dims for dims in found.values()}.values()]


def drawn_sizes(spec: KernelSpec, seed: int) -> Iterator[Dims]:
    """The smoke test's, with other numbers where any will do: each rest that vectors of eight elements leave, in random
    order, and of wider ones some. Of shapes, with each combination of options."""
    drawn, shapes = random.Random(f"sizes:{seed}"), [dims for dims in combinations(spec).values() if "shape" in dims]

    def sizes() -> Iterator[int]:
        rests = drawn.sample(range(SHORT_VECTOR), SHORT_VECTOR)
        return (SHORT_VECTOR * drawn.randint(1, MOST_VECTORS) + rest for rest in rests)

    if shapes and spec.any_size:
        for dims in shapes:
            rank, dim = len(dims["shape"]), dims.get("dim", -1)
            for lines, elements in zip(sizes(), sizes()):
                shape = [drawn.randint(1, FEW) for _ in range(rank)]
                shape[-1], shape[dim] = lines, elements
                yield {**dims, "shape": tuple(shape)}
        return
    for made in zip(*(sizes() for _ in spec.any_size)):
        yield {**spec.smoke, **dict(zip(spec.any_size, made))}


def small_sizes(spec: KernelSpec, seed: int) -> Iterator[Dims]:
    """The smoke test's sizes, one of them 1 or a few, the others drawn at random; of three, each beside others of 1. Of
    shapes, each dim of two to four, counted from either end, with lines of one element, of a few and of more. Options are
    combined in all ways in turn."""
    drawn = random.Random(f"small:{seed}")
    options, least = every_way(spec), {name: 1 + (name in spec.summed) for name in spec.any_size}
    drawn.shuffle(options)

    def some() -> int:
        return drawn.randint(SHORT_VECTOR + 1, SHORT_VECTOR * FEW)

    def few() -> list[int]:
        return [1, *drawn.sample(range(2, SHORT_VECTOR + 1), 2)]

    def sizes() -> Iterator[Dims]:
        if "shape" in spec.any_size:
            lengths = itertools.cycle((*few(), some()))
            for rank, dim, _ in itertools.product((2, 3, 4), range(4), options):
                if dim < rank:
                    shape = [drawn.randint(2, FEW) for _ in range(rank)]
                    shape[-1], shape[dim] = some(), next(lengths)
                    yield {"shape": tuple(shape), "dim": dim - drawn.choice((0, rank))}
            for rank in (2, 3, 4):  # of one size along all dims
                for dim in range(rank):
                    yield {"shape": (drawn.randint(2, FEW),) * rank, "dim": dim - drawn.choice((0, rank))}
            return
        for name in spec.any_size:
            for size in few():
                yield {**spec.smoke, **{other: some() for other in spec.any_size}, name: max(size, least[name])}
            if len(spec.any_size) > 2:
                yield {**spec.smoke, **least, name: some()}

    for made, combined in zip(sizes(), itertools.cycle(options)):
        dims = {**made, **combined}
        yield dims if spec.takes(spec.arguments(spec.dtypes[0], **dims)) else made


def every_way(spec: KernelSpec) -> list[Dims]:
    """The options' values that some size has, or none, combined in all ways."""
    defaults = {name: one.default for name, one in inspect.signature(spec.arguments).parameters.items()}
    values: dict[str, dict[Any, None]] = {}
    for dims in (spec.smoke, *spec.sweep, *spec.edges):
        for name, value in _options_of(spec, dims).items():
            if name != "dim":
                values.setdefault(name, dict.fromkeys([spec.smoke.get(name, defaults[name])]))[value] = None
    return [dict(zip(values, way)) for way in itertools.product(*values.values())]


def ways_of_smoke(spec: KernelSpec, seed: int) -> list[Dims]:
    """The smoke test's sizes with other options, of a shape along its first dim and of more dims, too: some of all ways."""
    along: tuple[Dims, ...] = ({},)
    if "dim" in spec.arguments(spec.dtypes[0], **spec.smoke) and "shape" in spec.any_size:
        along = {}, {"dim": 0}, *({"shape": shape, "dim": -1} for shape in SCORES)
    every = [{**spec.smoke, **way, **other} for way in every_way(spec) for other in along]
    known = [dims for dims in every if spec.takes(spec.arguments(spec.dtypes[0], **dims))]
    return random.Random(f"ways:{seed}").sample(known, min(MOST_WAYS, len(known)))


def many_rows(spec: KernelSpec, seed: int) -> Iterator[Dims]:
    """More rows than a GPU's grid has blocks along its second dim, or the third, each with a result of its own."""
    rows, drawn = MOST_BLOCKS + 1 + seed % 1000, random.Random(f"rows:{seed}")
    few = {name: drawn.randint(2, FEW) for name in spec.any_size}
    first = (rows, few["shape"]) if "shape" in few else rows
    dims = {**spec.smoke, **few, **{name: first for name in spec.any_size[:1]}}
    if spec.sliced and sum(t.numel for t in spec.case(dims, spec.dtypes[0]).tensors.values()) <= MANY:
        yield dims


def other_ranks(spec: KernelSpec, seed: int) -> Iterator[Dims]:
    """Shapes of other ranks than the smoke test's, with each combination of options: of three dims, whose rows need not be
    evenly apart in memory, and of one. A dim that is neither the first nor the last is counted from the end."""
    drawn, rank = random.Random(f"ranks:{seed}"), len(spec.smoke.get("shape", ()))
    for dims in combinations(spec).values() if rank else ():
        dim = dims.get("dim", -1)
        for other in {1, 3} - {rank} if dim == -1 else {3}:
            shape = tuple(drawn.randint(2, FEW) for _ in range(other - 1)) + (drawn.randint(FEW, SHORT_VECTOR * FEW),)
            yield {**dims, "shape": shape} | ({"dim": dim - other} if dim == 1 else {})


def four_dims(spec: KernelSpec, seed: int) -> list[Dims]:
    """The smoke test's sizes, or, of operations on shapes, four dims along each of which they work in turn."""
    if "shape" not in spec.any_size:
        return [spec.smoke]
    drawn = random.Random(f"four:{seed}")
    shape = tuple(drawn.randint(2, FEW) for _ in range(4))
    return [{**dims, "shape": shape, "dim": dim} for dims in every_way(spec) for dim in range(4)]


def combinations(spec: KernelSpec) -> dict[tuple[Any, ...], Dims]:
    """Of the sweep's sizes the first with each combination of options, by these."""
    found: dict[tuple[Any, ...], Dims] = {}
    for dims in spec.sweep:
        found.setdefault(tuple(sorted(_options_of(spec, dims).items())), dims)
    return found


def _options_of(spec: KernelSpec, dims: Dims) -> dict[str, Any]:
    """What is no size: an MLP has a size by the name of the option dim."""
    arguments = spec.arguments(spec.dtypes[0], **dims)
    return {k: v for k, v in dims.items() if isinstance(v, (bool, str)) or k == "dim" and k in arguments}
