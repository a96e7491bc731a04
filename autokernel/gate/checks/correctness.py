"""Whether a result is right: how an output is held against what is expected of it, the fp64 oracle before all."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from autokernel.gate.checks.expectations import MINIMUM_ROW, Expectation

# |y - y64| <= tol · (1 + |y64|): the published outer bound of this tool's family. On ill-conditioned inputs, where
# PyTorch's own op does not keep to it, the bound is the multiple below of that op's largest error in the row.
ELEMENT_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 1e-4}
# The tighter bound: a row's RMS error is at most this multiple of what PyTorch's own op makes on the same inputs in the
# same dtype, or of one rounding of the result, whichever is larger. In fp32 the order of a long sum alone costs up to 12
# times (measured: K = 4097 in sequence against cuBLAS's split K); TF32 or fp16 inputs cost over 1,000 times (K = 64..4096).
# In 16 bit a result that was rounded through bf16 on its way to fp16 is beyond it.
ERROR_MULTIPLE = {torch.float16: 4.0, torch.bfloat16: 4.0, torch.float32: 32.0}
# One rounding, in eps: the RMS of what rounding to the nearest makes is 0.29 where a mantissa is small, 0.14 where large.
ROUNDING = {torch.float16: 0.25, torch.bfloat16: 0.25, torch.float32: 1.0}
SCALAR_ULPS = 2.0  # in 16 bit: a result that is one number is rounded once
SYSTEMATIC_MULTIPLE = 8.0
ALIKE, SAMPLED = 16, 1 << 18  # groups of results of like size, of so many at most
# In 16 bit a single element may be off by this many times what the RMS of its row may be.
ELEMENT_MULTIPLE = 4.0
RELATIVE = 0.125  # of a result, by which it may be off where no terms of it cancel (KernelSpec.relative)


# An error that passes whatever PyTorch makes of the same inputs, in eps of the exact number: half of what the RMS of a row
# may be, and in 16 bit what any rounding of it makes.
OF_ROUNDING = {torch.float16: 0.5, torch.bfloat16: 0.5, torch.float32: 16.0}
SUMMED = 4.0  # errors of one sum in fp32, relative to the norm of its terms
# PyTorch's own error in a sum in fp32, in eps of the norm of its terms, is less than that by luck alone, which few results
# do not even out. Measured for 113 to 1e6 numbers of N(0, 1): 0.4 to 1.0 in the median, 3 to 6 at most, whoever adds them.
OF_A_SUM = 0.25


def wrong(y: Tensor, expectation: Expectation, adversarial: bool = False, repeats: bool = False) -> str | None:
    """Why y is not an acceptable result, naming the worst element; None if it is one.

    Adversarial inputs are ill-conditioned: there PyTorch's own error is luck, and only the outer bound and the NaN and
    Inf masks apply. `repeats`: an input repeats its numbers, so that the errors of a whole row may be one error.
    """
    exact = expectation.exact
    if y.shape != exact.shape:
        return f"shape {tuple(y.shape)} instead of {tuple(exact.shape)}"
    if y.dtype != expectation.dtype:
        return f"dtype {y.dtype} instead of {expectation.dtype}"
    if y.numel() == 0:
        return None
    y = y.to(exact.device)
    if not y.dtype.is_floating_point:  # indices, counts: exact, or as PyTorch has them where two are equally right
        differs = (y != exact) & (y != expectation.native)
        return f"differs: {_worst(differs.double(), y.double(), exact)}" if differs.any() else None
    y = _where_pytorch_overflows(y, expectation) if expectation.own_range else y
    if _right_in_parts(y, expectation, adversarial):
        return None
    expectation = expectation.with_grown() if expectation.grown else expectation
    reason = _wrong(y, expectation, adversarial)
    if reason and expectation.perturbation:  # PyTorch may be all but exact where a ReLU, or terms that cancel, leave little
        reason = _wrong(y, expectation, adversarial, least=expectation.perturbation(), repeats=repeats)
    return reason


def _where_pytorch_overflows(y: Tensor, expectation: Expectation) -> Tensor:
    """`y` as it should be wherever it is the NaN or the infinity that PyTorch's own form has, too, and float64 a number or
    infinity: such as of a model's exponentials, which fp32 does not hold."""
    native, rounded = expectation.native, expectation.exact.to(y.dtype)
    alike = ((y == native) | (y.isnan() & native.isnan())) & ~y.isfinite() & ~rounded.isnan()
    return torch.where(alike, rounded, y)


def _right_in_parts(y: Tensor, expectation: Expectation, adversarial: bool) -> bool:
    """Whether y is right by less than is allowed: by what the results of a part allow, not those of all rows nor their
    terms, and if that will do as if PyTorch's own result were exact. Whatever passes that passes the rest."""
    strict, rounded = adversarial or None, True  # None: not known yet whether PyTorch's own need not be asked for
    for part, expected in expectation.parts(y):
        if _is_rounding(part, expected, y.numel()):
            continue
        rounded = False
        strict = expectation.is_steady() if strict is None else strict
        alone = partial(_wrong, part, adversarial=adversarial, alone=True)
        strict = strict and not alone(expectation=expected.as_if_pytorch_were_exact())
        if not strict and alone(expectation=expected):
            return False
    if rounded or adversarial or y.dtype.itemsize != 2:
        return True
    every = expectation.as_if_pytorch_were_exact(), expectation
    return any(not _by_value(*_sampled(y, each)) for each in (every if strict else every[1:]))


def _is_rounding(y: Tensor, expectation: Expectation, count: int) -> bool:
    """Whether no number is further from the exact one than its own rounding may be, which passes all that follows,
    whatever PyTorch makes of the others and whichever of them are not looked at. `count`: numbers of the whole result.

    In 16 bit sums of errors that are all of half an eps are allowed, and a part of those of independent ones beside them.
    """
    exact, eps = expectation.exact, torch.finfo(y.dtype).eps
    if expectation.untold.any():
        return False
    share = OF_ROUNDING[y.dtype] + (min(0.01, SYSTEMATIC_MULTIPLE / 2 / count**0.5) if y.dtype.itemsize == 2 else 0)
    bound = exact.abs().mul_(share * eps)
    if y.dtype == torch.float32:  # below its smallest numbers there are no roundings
        bound += (ELEMENT_TOLERANCE[y.dtype] * expectation.scale).clamp(max=_smallest(y.dtype))
    error = y.double().sub_(exact).abs_()
    if expectation.picked.any() and (expectation.picked & (error != 0)).any():
        return False
    return bool(error.sub_(bound).amax() <= 0)


def _wrong(
    y: Tensor,
    expectation: Expectation,
    adversarial: bool,
    least: Tensor | None = None,
    alone: bool = False,
    repeats: bool = False,
) -> str | None:
    """`least`: what counts as PyTorch's own error where that is smaller. `alone`: by these rows, some of all, alone."""
    exact, native = expectation.exact, expectation.native
    rounded = exact.to(y.dtype)  # what overflows in this dtype is inf there too
    y = torch.where(expectation.untold, rounded, y) if expectation.untold.any() else y
    size, error, is_exact = expectation.size, y.double().sub_(exact), native is exact
    signed = torch.zeros_like(exact) if is_exact else native.double() - exact
    native_error = signed if least is None else torch.maximum(least, signed.abs())
    projection = expectation.projection if least is not None else None
    least = torch.zeros_like(exact) if least is None else least
    finite = usable = None  # masks, where something is not finite
    if not all(map(_all_finite, (rounded, y, native))):
        if reason := _not_finite_elsewhere(y, rounded, exact):
            return reason
        finite = torch.isfinite(rounded) & torch.isfinite(y)
        if not finite.any():
            return None
        usable = finite & torch.isfinite(native)
    size, error, native_error = _only(finite, size), _only(finite, error), _only(usable, native_error)
    outer = ELEMENT_TOLERANCE[y.dtype] * (expectation.scale + size)
    if y.numel() == 1:  # fp32 leaves so much of a sum of 100,000 numbers, in PyTorch's order, too, where it is small
        outer = torch.maximum(outer, SUMMED * torch.finfo(torch.float32).eps * expectation.terms)
    if y.dim() and not is_exact:
        outer = torch.maximum(outer, _own_bound(native_error, size, expectation.terms, ERROR_MULTIPLE[y.dtype]))
    excess = error.abs() - outer
    if (excess > 0).any():
        return f"outside the tolerance {ELEMENT_TOLERANCE[y.dtype]:g}: {_worst(excess, y, exact)}"
    if expectation.picked.any() and (changed := expectation.picked & (error != 0)).any():
        return f"not a number of its inputs: {_worst(torch.where(changed, error.abs(), 0.0), y, exact)}"
    if expectation.relative and (reason := _lost(y, exact, error)):
        return reason
    if adversarial:
        return None
    size, error = _only(usable, size), _only(usable, error)
    if y.dtype.itemsize == 2:
        known = y, _only(usable, exact), size, error, _only(usable, signed), _only(usable, least)
        if reason := _systematic(*known, repeats, projection) or (None if alone else _by_value(*known)):
            return reason
    if y.dtype == torch.float32 and y.numel() <= MINIMUM_ROW:
        native_error = torch.maximum(
            native_error.abs(), OF_A_SUM * torch.finfo(y.dtype).eps * expectation.terms.nan_to_num(0, 0, 0)
        )
    return _larger_than_pytorch(y, exact, size, error, native_error, usual=not alone)


def _sampled(y: Tensor, expectation: Expectation) -> tuple[Tensor, ...]:
    """Of some results of all sizes, what _by_value() looks at: themselves, exact ones, sizes, errors, PyTorch's own; and
    nothing of numbers in between."""
    whole, step = expectation.exact, -(-y.numel() // SAMPLED)

    def some(t: Tensor) -> Tensor:
        return t.expand_as(whole).reshape(-1)[::step]

    y, exact, native, untold = map(some, (y, whole, expectation.native, expectation.untold))
    size = exact.abs() if expectation.known_size is None else some(expectation.known_size)
    rounded = exact.to(y.dtype)
    y = torch.where(untold, rounded, y) if untold.any() else y
    usable = torch.isfinite(rounded) & torch.isfinite(y) & torch.isfinite(native)
    known = (_only(usable, t) for t in (exact, size, y.double() - exact, native.double() - exact))
    return y, *known, torch.zeros_like(exact)


def _own_bound(native_error: Tensor, size: Tensor, terms: Tensor, multiple: float) -> Tensor:
    """The multiple of PyTorch's largest error in each row; where its elements are made of terms of very different sizes, as
    sums of rows are, relative to those. Where that error is all of the result, some multiple of it is nothing."""
    terms = terms.expand_as(size).nan_to_num(0, 0, 0)
    unit = torch.where(terms > 0, torch.maximum(terms, size), 0.0)
    unit = torch.where(unit.amax(-1, keepdim=True) > 0, unit, 1.0)  # of rows of which nothing is said
    largest = (native_error.abs() / unit).nan_to_num(0, 0, 0).amax(-1, keepdim=True) * unit
    return torch.minimum(multiple * largest, torch.maximum(largest, size.amax(-1, keepdim=True)))


def _smallest(dtype: torch.dtype) -> float:
    """Below this, results of a dtype may be zero: fp16's numbers, made of fp32's, are not flushed."""
    information = torch.finfo(dtype)
    return information.tiny * (information.eps if dtype == torch.float16 else 1)


def _all_finite(t: Tensor) -> bool:
    return all(bound.isfinite() for bound in t.aminmax())


def _only(mask: Tensor | None, t: Tensor) -> Tensor:
    """t with 0 outside of the mask."""
    return t if mask is None else torch.where(mask, t, 0.0)


def _not_finite_elsewhere(y: Tensor, rounded: Tensor, exact: Tensor) -> str | None:
    """Why y's NaN and infinities are not where they should be; one rounding away from overflow both are right."""
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(y) != test(rounded)
        if differs.any() and (name == "NaN" or not _near_overflow(exact, y.dtype)[differs].all()):
            index = _index(differs.int().argmax(), y)
            return f"{name} mask differs: got {y[index].item()} instead of {rounded[index].item()} at {list(index)}"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def _lost(y: Tensor, exact: Tensor, error: Tensor) -> str | None:
    """Why results are wrong that are small beside others, but made of no terms that cancel: such as have become zero."""
    excess = error.abs() - RELATIVE * exact.abs() - 16 * _smallest(y.dtype)
    return f"off by a good part of itself: {_worst(excess, y, exact)}" if (excess > 0).any() else None


def _larger_than_pytorch(
    y: Tensor, exact: Tensor, size: Tensor, error: Tensor, native_error: Tensor, usual: bool
) -> str | None:
    """The tighter bound, row by row, so that large rows cannot hide small ones. `usual`: what PyTorch makes of other rows,
    relative to their size, counts too."""
    eps, tiny, sizes = torch.finfo(y.dtype).eps, _smallest(y.dtype), size
    size = _row_rms(sizes)
    rounding = ROUNDING[y.dtype] * eps * size + tiny
    # PyTorch may be lucky in one row (attention with one query: 40 times better than in the next head): what it makes of
    # the rows at its upper quartile, relative to their size, is allowed in every row. Of zeros that says nothing.
    native = _row_rms(native_error)
    relative = (native / size)[size > tiny]
    of_most = relative.quantile(0.75) * size if usual and relative.numel() else 0 * size
    bound = torch.maximum(torch.maximum(native, rounding), of_most)
    made = _row_rms(error)
    multiple = ERROR_MULTIPLE[y.dtype]
    excess = made - multiple * bound
    if not (excess > 0).any():
        return _one_element(y, exact, sizes, error, native_error, bound) if y.dtype.itemsize == 2 else None
    row = excess.argmax()
    return (
        f"RMS error {made[row].item():.3g} in row {row.item()} is {(made / bound)[row].item():.1f} times PyTorch's own "
        f"(at most {multiple:g} times is allowed): {_worst(error.abs(), y, exact)}"
    )


def _one_element(y: Tensor, exact: Tensor, size: Tensor, error: Tensor, own: Tensor, bound: Tensor) -> str | None:
    """Why single elements of a 16-bit result are wrong: one in a long row is nothing in the RMS of its errors, and in a row
    of small results nothing beside an absolute tolerance. `bound`: of the RMS of each row."""
    eps, multiple = torch.finfo(y.dtype).eps, ERROR_MULTIPLE[y.dtype]
    sizes, errors = as_rows_of_results(size), as_rows_of_results(error).abs()
    largest = torch.maximum(ELEMENT_MULTIPLE * bound, as_rows_of_results(own).abs().amax(-1))
    excess = errors - multiple * (largest[:, None] + eps * sizes)
    if not (excess > 0).any():
        return None
    return f"one element is off by far more than others of its row: {_worst(excess.reshape(y.shape), y, exact)}"


def _systematic(
    y: Tensor,
    exact: Tensor,
    size: Tensor,
    error: Tensor,
    own: Tensor,
    least: Tensor,
    repeats: bool,
    projection: Callable[[], Tensor] | None = None,
) -> str | None:
    """Why the errors of a 16-bit result are not those of rounding, which are independent of each other.

    A single number is within SCALAR_ULPS of the truth. In a row, the mean of the signed errors and their projection on the
    row (by how much it is scaled) are small multiples of what independent roundings of its elements come to, or of
    PyTorch's own: a sum over a part of the row, or an average in place of its end, moves all elements together. So may
    what `least` says of numbers in between, which has no sign: beside PyTorch's, whose signs must not cancel it; and where
    few of them count, all results of a row are made of these (`projection`, a row's on itself). Half a rounding more is
    allowed, by which results are smaller where they are cut off (Triton's interpreter, bfloat16).
    """
    eps, tiny = torch.finfo(y.dtype).eps, _smallest(y.dtype)
    if not y.dim():
        if error.abs() > SCALAR_ULPS * eps * size + tiny + 2 * torch.maximum(own.abs(), least):
            return f"got {y.item():.6g} instead of {exact.item():.6g}: more than {SCALAR_ULPS:g} roundings off"
        return None
    exact, size, error, own, least = map(as_rows_of_results, (exact, size, error, own, least))
    norm = (exact**2).sum(-1) + tiny
    together = (least * (exact.abs() if repeats else exact)).sum(-1).abs()
    if projection:
        of_rows = torch.linalg.vector_norm(projection().reshape(len(exact), -1), dim=-1)  # of narrow ones that are one row
        together = torch.maximum(together, of_rows)
    count = max(exact.shape[-1], 1)
    unit = (eps * size).clamp(min=tiny)  # of a rounding: below fp16's normal numbers it is no smaller
    figures = {  # of each row: of the result, of PyTorch's, of independent roundings (one s.d. or more), of cutting off
        "scaled by {:.2e}": (
            (error * exact).sum(-1) / norm,
            torch.maximum((own * exact).sum(-1).abs(), together) / norm,
            torch.linalg.vector_norm(unit * exact, dim=-1) / norm,
            eps / 2 * (size * exact.abs()).sum(-1) / norm,
        ),
        "moved by {:.2e} in the mean": (
            error.mean(-1),
            torch.maximum(own.mean(-1).abs(), least.mean(-1)),
            eps * (size**2).mean(-1).sqrt() / count**0.5,
            eps / 2 * size.mean(-1),
        ),
    }
    for words, (made, native_made, rounding, cut_off) in figures.items():
        bound = SYSTEMATIC_MULTIPLE * (native_made + rounding) + cut_off + tiny
        excess = made.abs() / bound
        if (excess > 1).any():
            row = excess.argmax()
            return (
                f"row {row.item()} is {words.format(made[row].item())}, {excess[row].item():.1f} times what roundings that "
                f"are independent may come to: an error of the computation, not of the dtype"
            )
    return None


def _by_value(y: Tensor, exact: Tensor, size: Tensor, error: Tensor, own: Tensor, least: Tensor) -> str | None:
    """Why results of some size are off together, where those of others are not: an approximation of an activation, say.

    Those that are alike, over all rows, are looked at together: the mean of their errors, as in _systematic().
    """
    step = -(-y.numel() // SAMPLED)
    exact, size, error, own, least = (t.reshape(-1)[::step] for t in (exact, size, error, own, least))
    if len(exact) < ALIKE * MINIMUM_ROW or _is_next_to_nothing(y.dtype, size, error):
        return None
    order = _in_order(exact)[: len(exact) // ALIKE * ALIKE]
    groups = (t.index_select(0, order).reshape(ALIKE, -1) for t in (exact, size, error, own, least))
    exact, size, error, own, least = groups
    eps, independent = torch.finfo(y.dtype).eps, error.shape[-1] ** 0.5
    rounding = torch.maximum(eps * (size**2).mean().sqrt(), _row_rms(torch.maximum(own.abs(), least))) / independent
    made = torch.maximum(own.mean(-1).abs(), least.mean(-1))
    bound = SYSTEMATIC_MULTIPLE * (made + rounding) + eps / 2 * size.mean(-1) + _smallest(y.dtype)
    excess = error.mean(-1).abs() / bound
    if not (excess > 1).any():
        return None
    group = excess.argmax()
    return (
        f"results near {exact[group].median().item():.3g} are moved by {error[group].mean().item():.2e} in the mean, "
        f"{excess[group].item():.1f} times what roundings that are independent may come to"
    )


def _is_next_to_nothing(dtype: torch.dtype, size: Tensor, error: Tensor) -> bool:
    """Whether what errors are beyond half an eps, for which no group is refused, is too little, were all in one group."""
    eps, count = torch.finfo(dtype).eps, len(size) // ALIKE
    beyond = error.abs().sub_(size, alpha=eps / 2).clamp_(min=0).sum() / count
    squares = size.square()
    least = (squares.sum() - squares.topk(ALIKE - 1).values.sum()).clamp(min=0) / (count * ALIKE)  # so many are in no group
    return bool(beyond <= SYSTEMATIC_MULTIPLE * eps * least.sqrt() / count**0.5)


def _in_order(values: Tensor) -> Tensor:
    """Indices that sort `values`, to the precision of fp32; on a CPU by NumPy, which has vector code for it."""
    values = values.float()
    return torch.from_numpy(values.numpy().argsort()) if values.device.type == "cpu" else values.argsort()


def as_rows_of_results(t: Tensor) -> Tensor:
    """Rows of the last dim; a tensor of narrow rows is one row, for of few elements nothing can be said."""
    return t.reshape(-1, t.shape[-1] if t.dim() and t.shape[-1] >= MINIMUM_ROW else max(t.numel(), 1))


def _row_rms(t: Tensor) -> Tensor:
    """RMS of each row, flat."""
    rows = as_rows_of_results(t)
    return torch.linalg.vector_norm(rows, dim=-1) / max(rows.shape[-1], 1) ** 0.5


def _near_overflow(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Where a rounding decides whether the result is finite in this dtype."""
    largest = torch.finfo(dtype).max
    return exact.abs().sub(largest).abs() < largest * 1e-2


def _index(flat: Tensor, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, like.shape))


def _worst(excess: Tensor, y: Tensor, exact: Tensor) -> str:
    index = _index(excess.argmax(), y)
    return f"got {y[index].item():.6g} instead of {exact[index].item():.6g} at {list(index)}"
