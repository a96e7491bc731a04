"""The five stages: which calls are made, and on which inputs."""

import contextlib
import hashlib
import inspect
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.expectations import most_bytes, of_type
from autokernel.gate.checks.inputs import (
    COMPOUND,
    DISTRIBUTIONS,
    SLABS,
    as_rows,
    fill_inputs,
    finite_kinds,
    generator_of,
    mix_rows,
    off_alignment,
    repeated,
    row_kinds,
    scales_in,
    shared_by_rows,
    with_layout,
    with_ordinary_rows,
    with_peaks,
)
from autokernel.gate.checks.options import outlier, with_other_options
from autokernel.gate.checks.planted import Planted, groups_that_show, planted_in, with_planted
from autokernel.gate.checks.structure import SIGNS, formed, free, soft, squares, wholly
from autokernel.gate.checks.whole import wholes
from autokernel.spec import Args, Case, Dims, KernelSpec, TensorSpec
from autokernel.target import Target

PEAK = 30.0  # times the others, or the most that a type's rows are scaled by: so large are a row's peaks
MOST_SHARES = 8  # trials with one peak a row, where that is all that shows

# Determinism: which input set each call takes; every output is held. At each distance, 1 to 5, two calls take different
# sets: a kernel that returns so few buffers in turn writes over an output that is still in use. So at each from 1 to 63 in
# the sequence of Thue and Morse, for the calls of the smoke test, which are short (a region's are as large as the target's:
# as many as fit).
HELD_ORDER = (0, 0, 1, 0, 1, 1)
LONG_ORDER = tuple(bin(i).count("1") % 2 for i in range(64))
LONG_BYTES = 1 << 31  # that the calls of such a sequence move
DISTANCES = 16, 32  # bytes from what a line of the cache is aligned to: vectors of some widths are, others are not
HELD_SETS = len(set(HELD_ORDER))
MADE_ON_DEVICE = 1 << 24  # elements of all inputs, from which they are made there
TWICE_BYTES = 1 << 30  # of an output at most, where a target's case is called twice
REORDERED = 1 << 24  # elements of a target's inputs, up to which their order alone changes, and one of them lies elsewhere
# Elements of a vector, how many of these a size that is drawn has at most, and how large other dims of a shape are.
SHORT_VECTOR, MOST_VECTORS, FEW = 8, 16, 4
MOST_BLOCKS, MANY = 65_535, 1 << 20  # of a CUDA grid, along any dim but the first; elements of so many rows at most
NEW_ADDRESS = 1 << 20  # bytes by which inputs are moved when they are to be found elsewhere
UNEVEN_THREADS = 3, 5, 6, 7  # between which work is seldom shared evenly, or of which some have none


@dataclass(frozen=True)
class Step:
    """Calls made without a word of the judge between them: on each set of inputs, in `order`, at byte `shift` on."""

    sets: tuple[dict[str, Any], ...]
    order: tuple[int, ...] = (0,)
    shift: int = 0
    what: str = ""  # for people: what is special about it
    as_in_a_model: bool = False  # the second of two calls is made as a model in training makes it
    many: bool = False  # of them many more are made, to see what is kept of each
    shared: Mapping[str, str] = field(default_factory=dict)  # inputs that are another one: the same memory
    other_threads: int = 0  # they are made with another number of threads than all others: so many, or one more


@dataclass(frozen=True)
class CheckCase:
    """One case with one kind of contents: a step, or several at the same addresses, whose outputs are all checked."""

    stage: str
    case: Case
    seed: int
    distribution: str = "normal"
    adversarial: str = ""  # name of one of the spec's adversarial transforms
    decisive: str = ""  # name of one of the spec's transforms after which a few parts decide the results
    nonfinite: float | None = None  # a value planted into the first input
    place: int | None = None  # of that value among the elements that count; None: somewhere
    planted: tuple[Planted, ...] = ()  # values, large ones among them, in other inputs than the first
    zeros: bool = False  # in a part of these inputs: what is not finite in the first is not hidden by them
    peaks: bool = False  # each row of the first input has its share of places, at which it is far larger than elsewhere
    rows: tuple[str, ...] = ()  # kinds of rows that the first input is mixed of (inputs.row_kinds)
    first_row: int = 0  # which of these kinds comes first
    across: int | None = None  # the dim across which the kinds vary, in slabs instead of rows
    ordinary: bool = False  # rows of several distributions in each input, none with a large number in it
    soft: bool = False  # none of its numbers, but for weights', is large
    wholly: bool = False  # each input is of some size, sign and form as a whole
    formed: bool = False  # the matrices among its inputs are of one form each, of all in turn
    whole: bool = False  # the first and then each other tensor is of one kind as a whole: of one size, one sign, one number
    twice: bool = False  # two calls, which must agree bitwise, and some on inputs of which a part has changed
    held: bool = False  # several sets, several calls on each, all outputs held to the end
    perturbed: bool = False  # each input changed in turn, then all moved

    @property
    def label(self) -> str:
        extra = [self.distribution if self.distribution != "normal" else "", self.adversarial, self.decisive]
        where = {None: "", 0: " at the start", -1: " at the end"}[self.place]
        extra.append("" if self.nonfinite is None else f"one {self.nonfinite:.6g}{where}")
        extra.append("peaks" * self.peaks)
        extra += [f"{value:g} in {name}" for name, value in self.planted]
        extra.append(f"{'rows' if self.across is None else 'slabs'} of every kind" if self.rows else "")
        extra.append("ordinary rows" * self.ordinary)
        extra.append("soft" * self.soft)
        extra.append("of one kind" * (self.whole or self.wholly or self.formed))
        return " ".join([self.case.name, *filter(None, extra)])

    @property
    def ill_conditioned(self) -> bool:
        """Whether PyTorch's own error on these inputs is luck. (In fp32 the outer bound alone is a fine one.)"""
        odd = self.adversarial, self.planted, self.whole, self.wholly, self.formed
        return any(odd) or bool(self.decisive and self.case.dtype.itemsize > 2) or not set(self.rows) <= set(DISTRIBUTIONS)

    def steps(self, spec: KernelSpec, device: str = "cpu") -> Iterator[Step]:
        """With large inputs on the device, where they are made in less time than on its host. Raises TypeFault."""
        is_large = sum(t.numel for t in self.case.tensors.values()) >= MADE_ON_DEVICE
        steps = self._steps(spec)
        while True:
            with torch.device(device) if is_large and device != "cpu" else contextlib.nullcontext():
                step = next(steps, None)
                if step is None:
                    return
                step = replace(step, sets=tuple(repeated(self.case, inputs) for inputs in step.sets))
            yield step

    def _steps(self, spec: KernelSpec) -> Iterator[Step]:
        first = self.inputs(spec)
        if self.held:
            is_smoke = self.case.args == spec.case(spec.smoke, self.case.dtype).args
            fit = LONG_BYTES // max(1, spec.bytes_moved(self.case.args))
            order = LONG_ORDER[:fit] if is_smoke and fit > len(HELD_ORDER) else HELD_ORDER
            yield Step((first, replace(self, seed=self.seed + 1).inputs(spec)), order, many=is_smoke)
            return
        if self.peaks and is_all_picked(spec, first):  # of several peaks in a row only one would show
            plain = replace(self, peaks=False).inputs(spec)
            shares = range(min(MOST_SHARES, -(-line_width(spec, plain) // _lines(spec, self.case))))
            yield from (Step((self._with_peaks(spec, plain, share),)) for share in shares)
            return
        if self.whole or self.formed:
            made = wholes(spec, self.case, first, self.seed) if self.whole else formed(spec, first, self.seed)
            yield from (Step((inputs,), what=what) for what, inputs in made)
            return
        yield Step((first,), (0, 0) if self.twice else (0,), as_in_a_model=self.twice)
        if not (self.twice or self.perturbed):
            return
        other = replace(self, seed=self.seed + 1, ordinary=self.twice).inputs(spec)
        if self.perturbed or sum(v.numel() for v in first.values() if isinstance(v, Tensor)) <= REORDERED:
            known = first if self.perturbed else self._of_one_sign(spec, first)
            yield from _in_other_orders(known, spec, self.perturbed, self.seed)
        if self.twice:  # of the target's own size, which what a kernel looks at of an input may not reach
            for where in (("the end", "the middle")[self.seed % 2], "one element"):
                tensors = {n: v for n, v in first.items() if isinstance(v, Tensor)}
                parts = {n: partly(v, other[n], _parts(v.numel(), self.seed)[where]) for n, v in tensors.items()}
                yield Step((first | parts,), what=f"only {where} of its inputs changed")
            if numbers := [name for name, v in first.items() if isinstance(v, float) or name in spec.redrawn]:
                yield Step((self._with_other_numbers(spec, first),), what=f"only {' and '.join(numbers)} changed")
            yield self._one_for_several(spec, first)
            return
        for name, value in first.items():
            if isinstance(value, Tensor):
                yield Step((first | {name: other[name]},), what=f"only {name} changed")
                parts = _parts(value.numel(), self.seed)
                if value.dim() > 1:
                    parts["the last row"] = slice(max(0, value.numel() - value.shape[-1]), value.numel())
                for where, part in parts.items():
                    changed = first | {name: partly(value, other[name], part)}
                    yield Step((changed,), what=f"only {where} of {name} changed")
                if value.dtype == torch.bool:
                    yield Step((first | {name: torch.zeros_like(value)},), what=f"nothing of {name} true")
            elif isinstance(value, float):
                yield Step((first | {name: other_number(value)},), what=f"only {name} changed")
            elif name in spec.redrawn:
                for seed in (self.seed, self.seed + 1):
                    yield Step((spec.redrawn[name](first, seed),), what=f"{name} changed")
        free = {n: v for n, v in first.items() if isinstance(v, Tensor) and n not in spec.fill}
        turned = {name: _turned(value, slice(None)) for name, value in free.items()}
        yield Step((first | turned,), what="only the order of its inputs changed")
        if not spec.opaque:  # whose conditions may be on numbers that are exactly alike
            yield from _nearly_alike(spec, first, self.seed)
        if one_for_several(spec, self.case):
            yield self._one_for_several(spec, first)
        threads = UNEVEN_THREADS[self.seed % len(UNEVEN_THREADS)]
        what = "the same contents elsewhere, another number of threads"
        yield Step((first,), shift=NEW_ADDRESS, what=what, other_threads=threads)

    def _one_for_several(self, spec: KernelSpec, inputs: dict[str, Any]) -> Step:
        shared, one = one_for_several(spec, self.case), {}
        for name, other in shared.items():
            is_turned = self.case.tensors[name].shape != self.case.tensors[other].shape
            one[name] = inputs[other].mT.contiguous() if is_turned else inputs[other]
        words = [f"{name} is {other}" for name, other in shared.items()] + ["another number of threads"]
        return Step((inputs | one,), what=", ".join(words), shared=shared, other_threads=1)

    def _of_one_sign(self, spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, Any]:
        """Those that are no weights: all numbers of each of one sign, or of either, and larger or smaller."""
        drawn, most = random.Random(f"signs:{self.seed}"), min(8.0, scales_in(spec, self.case.dtype)[-1] / 4)
        scales = [scale for scale in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0) if scale <= most]
        return inputs | {n: drawn.choice(SIGNS)(x) * drawn.choice(scales) for n, x in free(spec, self.case, inputs)}

    def _with_other_numbers(self, spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, Any]:
        """What is no tensor has another value, too."""
        numbers = {name: other_number(value) for name, value in inputs.items() if isinstance(value, float)}
        inputs = inputs | numbers
        with of_type(spec, "another value of an option"):
            for redraw in spec.redrawn.values():
                inputs = redraw(inputs, self.seed)
        return inputs

    def _with_peaks(self, spec: KernelSpec, inputs: dict[str, Any], share: int | None = None) -> dict[str, Any]:
        factor = min(PEAK, scales_in(spec, self.case.dtype)[-1])
        return with_peaks(spec, inputs, factor, generator_of(self.seed), share)

    def inputs(self, spec: KernelSpec) -> dict[str, Any]:
        with of_type(spec, f"the inputs {self.label}"):
            return self._inputs(spec)

    def _inputs(self, spec: KernelSpec) -> dict[str, Any]:
        inputs = fill_inputs(spec, self.case, self.seed, self.distribution)
        if self.rows:
            inputs = mix_rows(spec, inputs, self.rows, self.first_row, generator_of(self.seed), self.across)
        if self.ordinary:
            inputs = with_ordinary_rows(spec, self.case, inputs, generator_of(self.seed))
        if self.soft or self.wholly:
            inputs = (soft if self.soft else wholly)(spec, self.case, inputs, self.seed)
        if self.adversarial:
            inputs = spec.adversarial[self.adversarial](inputs)
        if self.decisive:
            inputs = spec.decisive[self.decisive](inputs)
        if self.peaks:
            inputs = self._with_peaks(spec, inputs)
        if self.planted:
            inputs = with_planted(spec, inputs, self.planted, planted_in(spec, self.case), self.seed)
        if self.nonfinite is not None:
            inputs = with_one(spec, inputs, self.nonfinite, self.seed if self.place is None else self.place)
        if self.zeros:
            inputs = with_zeros(spec, inputs, self.seed)
        return repeated(self.case, inputs)


def with_one(spec: KernelSpec, inputs: dict[str, Any], value: float, chosen: int) -> dict[str, Any]:
    """`inputs` with one element of the first of that value, among those that count."""
    name = spec.first_of(inputs)
    first, places, alike = inputs[name].clone(), (), 1
    if spec.counted:
        counted = spec.counted(**inputs)  # of elements, or so many that are alike
        alike = first.shape[-1] // counted.shape[-1]
        places = counted.expand(*first.shape[:-1], -1).flatten().nonzero().flatten()
    each, within = divmod(chosen % max(1, len(places) * alike), alike)
    place = int(places[each]) * alike + within if len(places) else chosen % first.numel()
    first.view(-1)[place] = value
    return inputs | {name: first}


def with_zeros(spec: KernelSpec, inputs: dict[str, Any], place: int) -> dict[str, Any]:
    """`inputs` with zeros along an eighth of the first dim, and of the last, of those that values are planted into, one
    after the other: among them what is as far along these as element `place` is along the first tensor's."""
    first, changed = inputs[spec.first_of(inputs)], {}
    numel, columns = max(1, first.numel()), first.shape[-1] if first.dim() else 1
    down, along = place % numel / numel, place % numel % columns / columns
    for name in spec.planted_in:
        if isinstance(inputs[name], Tensor) and inputs[name].dim():
            changed[name] = inputs[name].clone()
            for dim, part in ((0, down), (-1, along)):
                size = changed[name].shape[dim]
                count = max(1, size // 8)
                start = int(part * size) // count * count
                changed[name].movedim(dim, 0)[start : start + count] = 0
    return inputs | changed


def one_for_several(spec: KernelSpec, case: Case) -> dict[str, str]:
    """Inputs that may be another one, as where attention's queries are its keys, or that one the other way round, as in a
    matrix times itself, and which. A graph's region reads an input once, and of what has a condition in it none of its own
    may be alike."""
    if spec.opaque or spec.results:
        return {}
    found: dict[str, str] = {}
    for name, tensor in case.tensors.items():
        alike = (o for o in case.tensors if o not in found and (o == name or _may_be(case.tensors[o], tensor)))
        if (other := next(alike)) != name:
            found[name] = other
    return found


def _may_be(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether a tensor, or else its last two dims the other way round, may be another."""
    turned = (*one.shape[:-2], *one.shape[-2:][::-1])
    return one == other or one.dtype == other.dtype and turned == other.shape != one.shape


def other_number(value: float) -> float:
    """Of an option, such as eps."""
    return 2 * value + 0.25


def _in_other_orders(inputs: dict[str, Any], spec: KernelSpec, alone: bool, seed: int) -> Iterator[Step]:
    """`inputs`, the free numbers among them small whole multiples of a power of two, whose sums and those of their squares
    are the same in any order, and then in another: no such sum tells which they are, all over, row by row or column by
    column. `alone`: each tensor's order in turn, too, not only that of what is no free number, such as a mask, and in it
    two numbers exchanged alone, which few samples meet."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.dim()}
    exact = {name: _one_sided(x) if name in spec.fill else _in_whole_steps(x) for name, x in tensors.items()}
    yield Step((inputs | exact,))
    for dims in (slice(None), slice(-1, None)):
        turned = {name: _turned(x, dims) for name, x in exact.items() if name not in spec.fill}
        yield Step((inputs | exact | turned,), what="only the order of its inputs changed")
    for name, x in exact.items():
        last, first = slice(-1, None), slice(0, 1)
        for dims in (last, first)[: x.dim()] if alone else (last,) if name in spec.fill else ():
            yield Step((inputs | exact | {name: _turned(x, dims)},), what=f"only the order of {name} changed")
        if alone and name not in spec.fill and x.numel() > 1:
            yield Step((inputs | exact | {name: _exchanged(x, seed)},), what=f"only the order of {name} changed")


def _nearly_alike(spec: KernelSpec, inputs: Mapping[str, Any], seed: int) -> Iterator[Step]:
    """Numbers of bf16 in fp32, then others that are rounded to the same: who keeps or knows inputs by these is wrong."""
    generator = generator_of(seed)
    tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and v.dtype == torch.float32 and n not in spec.fill}
    known = {name: x.bfloat16().float() for name, x in tensors.items()}
    if known:
        yield Step((dict(inputs) | known,))
    for name, x in known.items():
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        moved = {name: x * (1 + 2.0**-10 * signs)}
        yield Step((dict(inputs) | known | moved,), what=f"less than a rounding of bfloat16 of {name} changed")


def _turned(x: Tensor, dims: slice) -> Tensor:
    """x the other way round along these of its dims."""
    known = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # numbers of 8 bits have no flip of their own
    return known.flip(tuple(range(x.dim()))[dims]).view(x.dtype)


def _exchanged(x: Tensor, seed: int) -> Tensor:
    """x, one of its numbers exchanged with the largest or the smallest, whichever is further from it."""
    flat = x.reshape(-1).clone()
    numbers, one = flat.float(), seed % len(flat)
    bounds = numbers.argmin(), numbers.argmax()
    other = max(bounds, key=lambda place: (numbers[place] - numbers[one]).abs().item())
    flat[one], flat[other] = flat[other].clone(), flat[one].clone()
    return flat.reshape(x.shape)


def _one_sided(x: Tensor) -> Tensor:
    """x, or a mask that is the same the other way round without the last half of its rows: its order is to matter."""
    if x.dtype != torch.bool or not torch.equal(x.flip(-1), x):
        return x
    return x & (torch.arange(x.shape[-1], device=x.device) < (x.shape[-1] + 1) // 2)


def _in_whole_steps(x: Tensor) -> Tensor:
    """x in eighths of the power of two above its largest number, one at least."""
    if not x.is_floating_point() or not x.numel():
        return x
    step = x.abs().amax().double().clamp(min=torch.finfo(torch.float32).tiny).log2().ceil().exp2() / 8
    steps = (x / step).round()
    return (torch.where(steps == 0, x.sign(), steps) * step).to(x.dtype)


def _parts(numel: int, seed: int) -> dict[str, slice]:
    """Places of a tensor that a kernel must not take for unchanged because others are."""
    one = seed % numel if numel else 0
    return {
        "the end": slice(numel - numel // 4, numel),
        "the last element": slice(max(0, numel - 1), numel),
        "the middle": slice(numel // 2 - numel // 8, numel // 2 + numel // 8),
        "one element": slice(one, one + 1),
    }


def partly(x: Tensor, other: Tensor, part: slice) -> Tensor:
    """x with the contents of `other` in one part, in the order of the elements; what cannot be told apart is moved on."""
    changed, values = x.clone().reshape(-1), other.reshape(-1)[part]
    if x.dtype == torch.bool:
        values = ~changed[part]
    elif torch.equal(values, changed[part]):  # padding in both
        values = _turned(other.reshape(-1), slice(None))[part]
    elif x.is_floating_point() and part.stop - part.start == 1:
        values = (values.float() + 4 * (1 + changed[part].float().abs().nan_to_num(0, 0, 0))).to(x.dtype)
    changed[part] = values
    return changed.reshape(x.shape)


def option_dims(spec: KernelSpec) -> list[Dims]:
    """Of the spec's sizes, for each value of each option the smallest that has it (no smaller than the smoke test's), of as
    many rows as that has where there is one: of few rows each kind takes a trial of its own."""

    def size(dims: Dims) -> int:
        return sum(t.numel for t in spec.case(dims, spec.dtypes[0]).tensors.values())

    def rows(dims: Dims) -> int:
        return _lines(spec, spec.case(dims, spec.dtypes[0]))

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
    yield trial("numerical_stability", spec.case(spec.smoke, target.dtype), whole=True)
    yield trial("numerical_stability", squares(spec, target.dtype) or spec.case(spec.smoke, target.dtype), formed=True)
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
    smoke = spec.case(spec.smoke, target.dtype)
    if "transposed" in spec.layouts:
        yield trial("edge_cases", with_layout(smoke, "expanded", spec.first_of(smoke.tensors)))
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
    for number, (where, other) in enumerate(zip(moved, with_other_options(spec, case, len(moved), seed))):
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
        lines = _lines(spec, case)
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
                yield from ({"rows": group, "first_row": start} for start in range(0, len(group), _lines(spec, case)))
        yield from ({"nonfinite": value, "zeros": True} for value in planted.values())
        if f"one {math.nan}" in planted:  # where loops start, and what does not fill a vector
            yield from ({"nonfinite": math.nan, "place": place} for place in (0, -1))
        yield from ({"rows": (kind,)} for kind in COMPOUND if kind in kinds)
    yield from ({"adversarial": name} for name in shared)


def is_all_picked(spec: KernelSpec, inputs: dict[str, Any]) -> bool:
    """Whether each result is some number of the inputs."""
    first = inputs[spec.first_of(inputs)]
    return spec.picked is not None and bool(spec.picked(first, **inputs).all())


def line_width(spec: KernelSpec, inputs: dict[str, Any]) -> int:
    """How many elements a line of the first tensor has."""
    return as_rows(inputs[spec.first_of(inputs)], inputs).shape[1]


def _lines(spec: KernelSpec, case: Case) -> int:
    """Of the first tensor."""
    first = case.tensors[spec.first_of(case.tensors)]
    return max(1, first.numel // max(1, first.shape[case.args.get("dim", -1)])) if first.shape else 1


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
