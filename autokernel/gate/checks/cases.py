"""One trial: a case with one kind of contents, and the calls that it takes."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autokernel.gate.checks.conditioning import tells
from autokernel.gate.checks.expectations import of_type
from autokernel.gate.checks.inputs import (
    DISTRIBUTIONS,
    as_rows,
    fill_inputs,
    generator_of,
    mix_rows,
    repeated,
    scales_in,
    with_ordinary_rows,
    with_peaks,
)
from autokernel.gate.checks.planted import Planted, planted_in, with_planted
from autokernel.gate.checks.structure import SIGNS, formed, free, soft, wholly
from autokernel.gate.checks.whole import filled, usual, wholes
from autokernel.gate.workers.model_tensors import MODELS
from autokernel.spec import Case, KernelSpec, TensorSpec, several

PEAK = 30.0  # times the others, or the most that a type's rows are scaled by: so large are a row's peaks
EXCHANGES = 2  # of two numbers each, which who looks at every sixteenth meets once in eight times
MOST_SHARES = 8  # trials with one peak a row, where that is all that shows

# Determinism: which input set each call takes; every output is held. At each distance, 1 to 5, two calls take different
# sets: a kernel that returns so few buffers in turn writes over an output that is still in use. So at each from 1 to 63 in
# the sequence of Thue and Morse, for the calls of the smoke test, which are short (a region's are as large as the target's:
# as many as fit).
HELD_ORDER = (0, 0, 1, 0, 1, 1)
LONG_ORDER = tuple(bin(i).count("1") % 2 for i in range(64))
LONG_BYTES = 1 << 31  # that the calls of such a sequence move
HELD_SETS = len(set(HELD_ORDER))
# As large as a number, and the least of the quiet NaN above zero, as most programs make them.
WHOLE = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
NAN_KINDS = 6  # two signs, and three of the other bits
QUIET = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
MADE_ON_DEVICE = 1 << 24  # elements of all inputs, from which they are made there
REORDERED = 1 << 24  # elements of a target's inputs, up to which their order alone changes, and one of them lies elsewhere
REDRAWN = 10  # other values of an option, of as many kinds as its type has
NEW_ADDRESS = 1 << 20  # bytes by which inputs are moved when they are to be found elsewhere
FAINT = 2.0**-17  # of numbers about one: fp16 has a few bits less of them, and a processor may take them for zeros
UNEVEN_THREADS = 3, 5, 6, 7  # between which work is seldom shared evenly, or of which some have none
MANY_THREADS = 4, 8, 16  # as other machines have
# Kinds of inputs as a whole, all of a name one after another.
SERIES = {
    "whole": wholes,  # the first and then each other tensor is of one size, one sign, one number
    "usual": usual,  # the first tensor is what models make
    "formed": formed,  # the matrices are of one form each
    "filled": filled,  # so is what the type's `fill` makes
}


@dataclass(frozen=True)
class Step:
    """Calls made without a word of the judge between them: on each set of inputs, in `order`, at byte `shift` on."""

    sets: tuple[dict[str, Any], ...]
    order: tuple[int, ...] = (0,)
    shift: int = 0
    what: str = ""  # for people: what is special about it
    in_steps: bool = False  # inputs are of few numbers: in fp32 a sum one after another rounds many times the same way
    as_in_a_model: bool = False  # calls after the first are made as models make them
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
    faint: tuple[str, ...] = ()  # inputs all of whose numbers are below float16's normal ones
    series: str = ""  # of SERIES: many inputs of one kind each
    repeats: bool = False  # one of these inputs has the same numbers many times: so many results may have the same error
    twice: bool = False  # two calls, which must agree bitwise, and some on inputs of which a part has changed
    held: bool = False  # several sets, several calls on each, all outputs held to the end
    perturbed: bool = False  # each input changed in turn, then all moved

    @property
    def label(self) -> str:
        extra = [self.distribution if self.distribution != "normal" else "", self.adversarial, self.decisive]
        where = {None: "", 0: " at the start", -1: " at the end"}[self.place]
        extra.append("" if self.nonfinite is None else f"one {self.nonfinite:.6g}{where}")
        extra.append("peaks" * self.peaks)
        extra.append(f"{' and '.join(self.faint)} of denormal numbers" * bool(self.faint))
        extra += [f"{value:g} in {name}" for name, value in self.planted]
        extra.append(f"{'rows' if self.across is None else 'slabs'} of every kind" if self.rows else "")
        extra.append("ordinary rows" * self.ordinary)
        extra.append("soft" * self.soft)
        extra.append("of one kind" * (self.wholly or bool(self.series)))
        return " ".join([self.case.name, *filter(None, extra)])

    @property
    def ill_conditioned(self) -> bool:
        """Whether PyTorch's own error on these inputs is luck. (In fp32 the outer bound alone is a fine one.)"""
        odd = self.adversarial, self.planted, self.wholly, self.series
        return any(odd) or bool(self.decisive and self.case.dtype.itemsize > 2) or not set(self.rows) <= set(DISTRIBUTIONS)

    def steps(self, spec: KernelSpec, device: str = "cpu") -> Iterator[Step]:
        """With large inputs on the device, where they are made in less time than on its host. Raises TypeFault."""
        is_large = sum(t.numel for t in self.case.tensors.values()) >= MADE_ON_DEVICE
        steps, bits = self._steps(spec, device), random.Random(f"NaN:{self.seed}")
        is_compared = self.twice or self.held or self.perturbed  # bitwise, with other calls
        while True:
            with torch.device(device) if is_large and device != "cpu" else contextlib.nullcontext():
                step = next(steps, None)
                if step is None:
                    return
                sets = (self._as_all_are(spec, inputs, bits, is_compared) for inputs in step.sets)
                step = replace(step, sets=tuple(sets))
            yield step

    def _as_all_are(
        self, spec: KernelSpec, inputs: dict[str, Any], bits: random.Random, is_compared: bool
    ) -> dict[str, Any]:
        with of_type(spec, "what all inputs have in common"):
            inputs = spec.kept(inputs)
        return repeated(self.case, with_other_nan(inputs, bits, is_compared))

    def _steps(self, spec: KernelSpec, device: str) -> Iterator[Step]:
        first = self.inputs(spec)
        if self.held:
            is_smoke = self.case.args == spec.case(spec.smoke, self.case.dtype).args
            fit = LONG_BYTES // max(1, spec.bytes_moved(self.case.args))
            order = LONG_ORDER[:fit] if is_smoke and fit > len(HELD_ORDER) else HELD_ORDER
            yield Step((first, replace(self, seed=self.seed + 1).inputs(spec)), order, many=is_smoke)
            return
        if self.peaks and is_all_picked(spec, first):  # of several peaks in a row only one would show
            plain = replace(self, peaks=False).inputs(spec)
            shares = range(min(MOST_SHARES, -(-line_width(spec, plain) // lines_of(spec, self.case))))
            yield from (Step((self._with_peaks(spec, plain, share),)) for share in shares)
            return
        if self.series:
            made = SERIES[self.series](spec, self.case, first, self.seed)
            yield from (Step((inputs,), what=what) for what, inputs in made if _tells(spec, inputs))
            return
        if spec.opaque and self.rows and _is_a_number(spec, first) and not tells(spec, first):
            return
        models = len(MODELS) if device == "cpu" and len(MODELS) * spec.bytes_moved(self.case.args) <= LONG_BYTES else 1
        yield Step((first,), (0,) * (1 + models) if self.twice else (0,), as_in_a_model=self.twice)
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
            yield from self._one_for_several(spec, first)
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
                for seed in range(self.seed, self.seed + REDRAWN):
                    yield Step((spec.redrawn[name](first, seed),), what=f"{name} changed")
        free = {n: v for n, v in first.items() if isinstance(v, Tensor) and n not in spec.fill}
        turned = {name: _turned(value, slice(None)) for name, value in free.items()}
        yield Step((first | turned,), what="only the order of its inputs changed")
        if _tells(spec, first):  # a condition may be on numbers that are exactly alike
            yield from _nearly_alike(spec, first, self.seed)
        if one_for_several(spec, self.case):
            yield from self._one_for_several(spec, first)
            yield from self._alike_for_several(spec, first)
        what = "the same contents elsewhere, another number of threads"
        for threads in (UNEVEN_THREADS[self.seed % len(UNEVEN_THREADS)], *MANY_THREADS):
            yield Step((first,), shift=NEW_ADDRESS, what=what, other_threads=threads)

    def _one_for_several(self, spec: KernelSpec, inputs: dict[str, Any]) -> Iterator[Step]:
        """All that may be another one at once; of three or more each two, too."""
        shared = one_for_several(spec, self.case)
        alike = [group for one in dict.fromkeys(shared.values()) if len(group := _group_of(one, shared)) > 2]
        pairs = itertools.chain.from_iterable(itertools.combinations(group, 2) for group in alike)
        for names in (shared, *({other: one} for one, other in pairs)):
            step = self._sharing(inputs, names)
            if _tells(spec, step.sets[0]):
                yield step

    def _alike_for_several(self, spec: KernelSpec, inputs: dict[str, Any]) -> Iterator[Step]:
        """All that may be another one have the same numbers in memory of their own, or the same of the other sign."""
        same = self._from_others(inputs, one_for_several(spec, self.case))
        if _tells(spec, inputs | same):
            yield Step((inputs | same,), what=f"{' and '.join(same)} like another input")
        opposite = inputs | {n: -x for n, x in same.items()}
        if not same.keys() & spec.fill.keys() and _tells(spec, opposite):
            yield Step((opposite,), what=f"{' and '.join(same)} another input's opposite")

    def _from_others(self, inputs: dict[str, Any], shared: Mapping[str, str]) -> dict[str, Any]:
        """Those that are another one, or that one the other way round."""
        shapes = {name: tensor.shape for name, tensor in self.case.tensors.items()}
        turned = {name for name, other in shared.items() if shapes[name] != shapes[other]}
        return {n: inputs[other].mT.contiguous() if n in turned else inputs[other] for n, other in shared.items()}

    def _sharing(self, inputs: dict[str, Any], shared: Mapping[str, str]) -> Step:
        one = self._from_others(inputs, shared)
        words = [f"{name} is {other}" for name, other in shared.items()] + ["another number of threads"]
        return Step((inputs | one,), what=", ".join(words), shared=shared, other_threads=1)

    def _of_one_sign(self, spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, Any]:
        """Those that are no weights: all numbers of each of one sign, or of either, and larger or smaller."""
        drawn, most = random.Random(f"signs:{self.seed}"), min(8.0, scales_in(spec, self.case.dtype)[-1] / 4)
        scales = [scale for scale in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0) if scale <= most] or [most]
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
        for name in self.faint:
            inputs[name] = (inputs[name].float() * FAINT).to(inputs[name].dtype)
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


def with_other_nan(inputs: dict[str, Any], drawn: random.Random, alike: bool) -> dict[str, Any]:
    """`inputs`, whose NaN have either sign, and none, all or some of the bits that say nothing, in turn. `alike`:
    all the same ones, for which of two NaN a sum passes on hangs on its order."""
    changed, start, payload = {}, drawn.randrange(NAN_KINDS), drawn.random()
    for name, x in inputs.items():
        whole = WHOLE.get(x.dtype) if isinstance(x, Tensor) else None
        if not whole or not x.sum().isnan():
            continue
        most = int(0.5 / torch.finfo(x.dtype).eps) - 1
        above = [QUIET[x.dtype] + part for part in (0, most, int(payload * most))]
        below = [bits + torch.iinfo(whole).min for bits in above]
        kinds = [one for pair in zip(above, below[1:] + below[:1]) for one in pair]
        is_nan = x.isnan()
        number = start + (0 if alike else is_nan.flatten().cumsum(0).view(x.shape))
        bits = torch.tensor(kinds, dtype=whole, device=x.device)[torch.as_tensor(number, device=x.device) % NAN_KINDS]
        changed[name] = torch.where(is_nan, bits, x.contiguous().view(whole)).view(x.dtype)
    return inputs | changed


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
    if spec.results:
        return {}
    found: dict[str, str] = {}
    tensors = {name: t for name, t in case.tensors.items() if not spec.opaque or name not in spec.fill}
    for name, tensor in tensors.items():
        alike = (o for o in tensors if o not in found and (o == name or _may_be(case.tensors[o], tensor)))
        if (other := next(alike)) != name:
            found[name] = other
    return found


def _is_a_number(spec: KernelSpec, inputs: Mapping[str, Any]) -> bool:
    """Whether a result is one, such as a loss, in which rows of large numbers may cancel."""
    with torch.inference_mode():
        return not all(y.dim() for y in several((spec.native or spec.eager)(**inputs)))


def _tells(spec: KernelSpec, inputs: Mapping[str, Any]) -> bool:
    """Whether a kernel's results may be held against the oracle's: of an opaque type experiments say so."""
    return not spec.opaque or tells(spec, inputs)


def _group_of(one: str, shared: Mapping[str, str]) -> list[str]:
    return [one, *(name for name, other in shared.items() if other == one)]


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
    yield Step((inputs | exact,), in_steps=True)
    for dims in (slice(None), slice(-1, None)):
        turned = {name: _turned(x, dims) for name, x in exact.items() if name not in spec.fill}
        yield Step((inputs | exact | turned,), what="only the order of its inputs changed", in_steps=True)
    for name, x in exact.items():
        last, first = slice(-1, None), slice(0, 1)
        for dims in (last, first)[: x.dim()] if alone else (last,) if name in spec.fill else ():
            yield Step(
                (inputs | exact | {name: _turned(x, dims)},), what=f"only the order of {name} changed", in_steps=True
            )
        for number in range(EXCHANGES) if alone and name not in spec.fill and x.numel() > 1 else ():
            changed = {name: _exchanged(x, seed + number)}
            yield Step((inputs | exact | changed,), what=f"only the order of {name} changed", in_steps=True)


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


def is_all_picked(spec: KernelSpec, inputs: dict[str, Any]) -> bool:
    """Whether each result is some number of the inputs."""
    first = inputs[spec.first_of(inputs)]
    return spec.picked is not None and bool(spec.picked(first, **inputs).all())


def line_width(spec: KernelSpec, inputs: dict[str, Any]) -> int:
    """How many elements a line of the first tensor has."""
    return as_rows(inputs[spec.first_of(inputs)], inputs).shape[1]


def lines_of(spec: KernelSpec, case: Case) -> int:
    """Of the first tensor."""
    first = case.tensors[spec.first_of(case.tensors)]
    return max(1, first.numel // max(1, first.shape[case.args.get("dim", -1)])) if first.shape else 1
