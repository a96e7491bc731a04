"""What is expected of a kernel: the results in float64, and the errors of PyTorch's own on the same inputs beside them."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autokernel.hardware.threads import threads_outside
from autokernel.spec import Case, KernelSpec, several

RMS_ROUNDING = 0.29  # in eps, of a number with a small mantissa
MINIMUM_ROW = 16  # elements
TERMS_SLACK = 8.0  # times the size of its terms (KernelSpec.terms), to which an absolute tolerance is relative
LEAST_SCALE = 1e-3  # of that of a type that says how large results are, but not their terms: less may be lost on the way
DRAWS, DRAWN_EPS = 16, 2.0  # how often, and by how many eps, inputs of an opaque type are changed to see what that does
# Elements of a result that are compared at once: what is made of them stays in a CPU's cache, and takes a gigabyte or two
# of a GPU's memory, in which the whole result would keep others from being compared beside it.
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
WIDE = (torch.float32, torch.bfloat16)  # dtypes for whose range KernelSpec.finite_below is meant


@dataclass(frozen=True)
class Expectation:
    """What an output must be: the fp64 result, and the error that PyTorch's own op makes on the same inputs."""

    exact: Tensor  # fp64
    by_pytorch: Tensor | Callable[[], Tensor]  # `native`, or what makes it where it is asked for
    known_size: Tensor | None = None  # see `size`
    known_scale: Tensor | None = None  # see `scale`
    relative: bool = False  # no terms cancel
    terms: Tensor = field(default_factory=lambda: torch.zeros(()))  # of each element, KernelSpec.terms; 0: nothing is said
    picked: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))  # KernelSpec.picked
    untold: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))  # KernelSpec.untold
    perturbation: Callable[[], Tensor] | None = None  # fp64, KernelSpec.opaque or .roundings: made where it is asked for
    # fp64, of each row: by how much the sum of products of its results and exact ones changes with those numbers in between
    projection: Callable[[], Tensor] | None = None
    grown: Callable[[], tuple[Tensor, Tensor | None]] | None = None  # size and scale, which take long
    known_dtype: torch.dtype | None = None  # of the result, where it is known before PyTorch's own
    own_range: bool = False  # what overflows on the way in PyTorch's own form, and not in float64, may do so
    is_steady: Callable[[], bool] = lambda: False  # whether that is known to be finite (KernelSpec.finite_below)

    @property
    def size(self) -> Tensor:
        """fp64, of each element, to which errors are relative: its own, or what its terms amount to where they cancel."""
        return self.exact.abs() if self.known_size is None else self.known_size

    @property
    def scale(self) -> Tensor:
        """Of each element, at most 1: what the absolute tolerance is a part of. Unless it is known, by the terms."""
        return (TERMS_SLACK * self.terms).clamp(max=1).nan_to_num(1) if self.known_scale is None else self.known_scale

    @property
    def native(self) -> Tensor:
        """PyTorch's own result, in the dtype of the case."""
        return self.by_pytorch() if callable(self.by_pytorch) else self.by_pytorch

    @property
    def dtype(self) -> torch.dtype:
        return self.known_dtype or self.native.dtype

    def as_if_pytorch_were_exact(self) -> "Expectation":
        """What allows the least."""
        return replace(self, by_pytorch=self.exact)

    def parts(self, y: Tensor) -> Iterator[tuple[Tensor, "Expectation"]]:
        """A result and what it must be, AT_ONCE or fewer elements of whole rows, where it has rows of its own."""
        width, most = y.shape[-1] if y.dim() else 1, AT_ONCE[y.device.type]
        if y.numel() <= most or width < MINIMUM_ROW:
            yield y, self
            return
        made, size = cache(lambda: self.native.contiguous()), self.known_size
        size = size if size is None else size.contiguous()
        whole = replace(self, exact=self.exact.contiguous(), known_size=size, by_pytorch=made)
        rows, count = y.reshape(-1, width), max(1, most // width)
        for start in range(0, len(rows), count):
            yield rows[start : start + count], whole.rows(start, count)

    def rows(self, start: int, count: int) -> "Expectation":
        """Of `count` rows from `start` on, of all rows along the last dim."""

        def part(t: Tensor) -> Tensor:
            return t.expand_as(self.exact).reshape(-1, self.exact.shape[-1])[start : start + count]

        def perturbation() -> Tensor:
            return part(self.perturbation())

        def projection() -> Tensor:
            return self.projection().reshape(-1)[start : start + count]

        def grown() -> tuple[Tensor, Tensor | None]:
            size, scale = self.grown()
            return part(size), scale if scale is None else part(scale)

        size, scale = (t if t is None else part(t) for t in (self.known_size, self.known_scale))
        others = (part(t) if t.dim() else t for t in (self.terms, self.picked, self.untold))
        made = self.perturbation and perturbation, self.projection and projection, self.grown and grown
        made += self.known_dtype, self.own_range, self.is_steady
        return Expectation(part(self.exact), lambda: part(self.native), size, scale, self.relative, *others, *made)

    def with_grown(self) -> "Expectation":
        size, scale = self.grown()
        return replace(self, known_size=size, known_scale=scale, grown=None)


class TypeFault(RuntimeError):
    """A kernel type's own code has failed: nothing can be said of its kernels. The message says on what."""


@contextlib.contextmanager
def of_type(spec: KernelSpec, what: str) -> Iterator[None]:
    """What is called inside is the kernel type's; what it raises is no kernel's fault, and must not end a run."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TypeFault(f"kernel type {spec.name} fails on {what}: {type(error).__name__}: {error}") from error


def expect(spec: KernelSpec, inputs: dict[str, Any], device: str) -> Expectation:
    """Of a kernel type with one result. Raises TypeFault."""
    (expectation,) = expectations(spec, inputs, device)
    return expectation


def expectations(spec: KernelSpec, inputs: dict[str, Any], device: str) -> list[Expectation]:
    """By result: run the oracle in fp64 and the eager form in the inputs' own dtype, in this process. Raises TypeFault."""

    def moved(value: Any, exact: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(device)
        return value.double() if exact and value.is_floating_point() else value

    @cache
    def natives() -> Sequence[Tensor]:
        tensors = [v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
        is_short = any(v.dtype.itemsize <= 2 for v in tensors)
        threads = threads_outside() if is_short else contextlib.nullcontext()
        with threads, torch.inference_mode(), of_type(spec, "what its results should be"):
            return several((spec.native or spec.eager)(**{k: moved(v, False) for k, v in inputs.items()}))

    @cache
    def is_steady() -> bool:
        numbers = [v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
        if any(v.dtype not in WIDE for v in numbers):
            return False
        return all(-least < low and high < least for low, high in (v.aminmax() for v in numbers))

    least, dtype = spec.finite_below, None
    if least:
        dtype = next(v.dtype for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point())
    else:
        natives()
    with torch.inference_mode(), of_type(spec, "what its results should be"):
        doubled = {k: moved(v, True) for k, v in inputs.items()}
        try:
            exacts = several(spec.oracle(**doubled))
        except torch.OutOfMemoryError:  # attention's fp64 scores at long sequences: fp32 is exact enough for 16 bit
            torch.cuda.empty_cache()
            exacts = several(
                spec.eager(
                    **{
                        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
                        for k, v in ((k, moved(v, False)) for k, v in inputs.items())
                    }
                )
            )
            exacts = tuple(exact.double() for exact in exacts)
        scale, terms = (make((), dtype=torch.float64, device=exacts[0].device) for make in (torch.ones, torch.zeros))
        picked, untold = (
            rule(exacts[0], **{k: moved(v, False) for k, v in inputs.items()})
            if rule
            else torch.zeros((), dtype=torch.bool, device=exacts[0].device)
            for rule in (spec.picked, spec.untold)
        )
        scales: list[Tensor | None] = [scale] * len(exacts)
        if spec.terms:
            terms, scales = spec.terms(exacts[0], **doubled), [None]
        elif spec.magnitude:
            scales = [_scale_of(exact.abs()) for exact in exacts]
        del doubled

    @cache
    def perturbations() -> Sequence[Tensor]:
        with torch.inference_mode(), of_type(spec, "what its results should be"):
            if spec.opaque:
                return _perturbations(spec.native or spec.eager, {k: moved(v, False) for k, v in inputs.items()}, natives())
            changes = spec.roundings(torch.finfo(natives()[0].dtype).eps, **{k: moved(v, True) for k, v in inputs.items()})
            return [RMS_ROUNDING * each for each in several(changes)]

    def projection() -> Tensor:
        eps, onto = torch.finfo(natives()[0].dtype).eps, exacts[0].nan_to_num(0, 0, 0)
        with torch.inference_mode(), of_type(spec, "what its results should be"):
            return RMS_ROUNDING * spec.roundings(eps, onto=onto, **{k: moved(v, True) for k, v in inputs.items()})

    @cache
    def magnitudes() -> Sequence[Tensor]:
        with torch.inference_mode(), of_type(spec, "what its results should be"):
            return several(spec.magnitude(**{k: moved(v, True) for k, v in inputs.items()}))

    def grown(result: int) -> tuple[Tensor, Tensor | None]:
        size = torch.maximum(exacts[result].abs(), magnitudes()[result])
        return size, None if spec.terms else _scale_of(size)

    projected = projection if spec.roundings and "onto" in inspect.signature(spec.roundings).parameters else None
    expected = []
    for result, (exact, scale) in enumerate(zip(exacts, scales)):
        native = (lambda result=result: natives()[result]) if least else natives()[result]
        perturbation = (lambda result=result: perturbations()[result]) if spec.opaque or spec.roundings else None
        made = perturbation, projected, partial(grown, result) if spec.magnitude else None, dtype
        made += bool(spec.results or spec.opaque), is_steady
        expected.append(Expectation(exact, native, None, scale, spec.relative, terms, picked, untold, *made))
    return expected


def _perturbations(function: Callable[..., Any], inputs: Mapping[str, Any], results: Sequence[Tensor]) -> list[Tensor]:
    """By how much each element of each result changes, in the RMS, where each number of the inputs is larger or smaller by
    roundings, at random. Without the largest change: a condition may be decided otherwise now and then."""
    generator, changes = torch.Generator().manual_seed(0), []
    for _ in range(DRAWS):
        changed = dict(inputs)
        for name, x in inputs.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                signs = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).to(x.device) * 2 - 1
                changed[name] = x + x * (DRAWN_EPS * torch.finfo(x.dtype).eps * signs).to(x.dtype)
        changes.append([(a - b).abs() for a, b in zip(several(function(**changed)), results)])
    kept = (torch.stack(each).nan_to_num(0, 0, 0).double().sort(0).values[:-1] for each in zip(*changes))
    return [(each**2).mean(0).sqrt() for each in kept]


def _scale_of(size: Tensor) -> Tensor:
    """What the absolute tolerance of a row is a part of, by the sizes of its results (KernelSpec.magnitude)."""
    largest = size.amax(-1, keepdim=True) if size.dim() and size.numel() else size
    return (TERMS_SLACK * largest).clamp(LEAST_SCALE, 1).nan_to_num(1)


def most_bytes(spec: KernelSpec, case: Case) -> int:
    """What an output may take, be it wrong: all that is moved, were it in fp64. A larger one is not even copied."""
    return 4 * spec.bytes_moved(case.args) + (1 << 20)
