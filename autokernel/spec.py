"""What a kernel type is: its oracle, inputs, shapes and costs; found by looking into `kernels/*/spec.py`."""

import hashlib
import importlib.util
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel.common.preflight import HOME, KERNELS, ROOT, Refused, proven_folder
from autokernel.common.preflight import kernel_types as kernel_types_in

PROBLEMS = HOME / "workspace" / "kernelbench"  # set up there, each a kernel type of its own: see problems.py
REGIONS = HOME / "workspace" / "regions"  # parts of models' graphs that were made kernel types: see model/regions/
KEPT_REGIONS = proven_folder() / "regions"  # those for which there are proven kernels, whatever becomes of the clone
ANY_LIBRARY, CONVOLUTION = "anything", "the convolution"  # values of KernelSpec.library_calls; all others are of products
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

ROW_SCALES = 1e-5, 1e-3, 30.0, 1e3, 1e4
TYPE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)

Dims = Mapping[str, Any]


def overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements share memory otherwise than by a dim of stride 0, as sliding windows do."""
    reach = 0  # of the dims so far: the distance of their last element
    for stride, size in sorted((s, n) for s, n in zip(strides, shape) if s and n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and layout of one tensor; `stride` and `offset` count elements, None means contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    offset: int = 0

    @cached_property
    def strides(self) -> tuple[int, ...]:
        if self.stride is not None:
            return self.stride
        return tuple(torch.empty(self.shape, device="meta").stride())

    @cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, each counted once (gaps between them are not read)."""
        return self.numel * self.dtype.itemsize

    @property
    def overlaps(self) -> bool:
        return overlap(self.shape, self.strides)

    @cached_property
    def storage_numel(self) -> int:
        """Elements that a storage needs in order to hold this tensor, its offset and its gaps."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))


Args = Mapping[str, TensorSpec | float | int | bool | str | None]  # by the names of the oracle's parameters


@dataclass(frozen=True)
class Case:
    """One call of a kernel: every argument as a TensorSpec or a plain value."""

    name: str
    args: Args

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {k: v for k, v in self.args.items() if isinstance(v, TensorSpec)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point tensor: the one that the tolerance is chosen by."""
        return next(t.dtype for t in self.tensors.values() if t.dtype.is_floating_point)


@dataclass(frozen=True)
class KernelSpec:
    """A kernel type. A new one is an oracle and a `kernels/<name>/spec.py` that defines `SPEC`; nothing else changes.

    arguments(dtype, **dims) describes one call. `sweep` (of the stage shape_sweep), `edges` and `timing` list dims for
    it; `timing` has the sizes measured by default on "cpu" and "cuda" (the first is the headline). `flops` and
    `bytes_moved` take the arguments of a case and count the least that the operation must compute and move (each input
    read once, each output written once).
    `fill` makes the contents of arguments that are not free floating-point numbers: (tensor spec, args, generator) ->
    tensor. `adversarial` maps a name to a function that makes filled inputs hard: inputs -> inputs.
    `decisive` does, too, to inputs of which a few parts decide the results, which are judged as strictly as on random
    numbers: for results that many rows are added up in, and hide what is wrong with some.
    `roundings` says by how much results change, in the RMS, where each of the numbers in between is moved by one eps of the
    dtype in which kernels keep it: (eps of the inputs' dtype, **inputs) -> tensors like the results. PyTorch's own error in
    a row is luck where its terms cancel or few of them count; what these numbers' roundings come to is allowed there. With
    an argument `onto` like the result, if it has one: by how much the sum of each row's products with it changes.
    `other_values` maps an option to values beside those that the sizes have, in which a kernel must be right, too.
    `filled` says what the tensors of `fill` may be as a whole, for which a kernel might have a short cut: what is said of
    them -> (inputs, generator) -> those that differ; nothing where there are none.
    `kept` gives inputs back what all have in common, whatever else was changed, such as the zeros of a triangle.
    `forms` makes small calls whose inputs are of forms that no size has, such as a mask that is broadcast: dtype -> Args.
    `redrawn` maps an option that is a whole number to a function that gives it another value: (inputs, seed) -> inputs.
    """

    name: str
    oracle: Callable[..., Tensor]
    eager: Callable[..., Tensor]  # the form in which PyTorch programs write it: the baseline of every speedup
    eager_form: str  # that form in words, printed beside the speedup
    arguments: Callable[..., Args]
    smoke: Dims
    sweep: tuple[Dims, ...]
    edges: tuple[Dims, ...]
    timing: Mapping[str, tuple[Dims, ...]]
    flops: Callable[[Args], int]
    bytes_moved: Callable[[Args], int]
    headline: str  # "throughput_tflops" or "bandwidth_gb_s"
    any_size: tuple[str, ...] = ()  # of the smoke test's sizes, those that may be any number; of a shape, the last
    summed: tuple[str, ...] = ()  # of those, what is never 1: of a single term PyTorch's own error is luck
    native: Callable[..., Tensor] | None = None  # whose error in a dtype bounds a kernel's, where that form loses more
    roundings: Callable[..., Tensor] | None = None
    opaque: bool = False  # nothing is known of how errors grow: a row may be as inexact as roundings of its inputs make it
    static: frozenset[str] = frozenset()  # inputs that stay the same from call to call (weights)
    first: str = ""  # the input that is called the first: whose rows are of all kinds; if it is not the first by place
    fill: Mapping[str, Callable[[TensorSpec, Args, torch.Generator], Tensor]] = field(default_factory=dict)
    adversarial: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    decisive: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    filled: Mapping[str, Callable[[dict[str, Any], torch.Generator], dict[str, Tensor]]] = field(default_factory=dict)
    kept: Callable[[dict[str, Any]], dict[str, Any]] = lambda inputs: inputs
    other_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    redrawn: Mapping[str, Callable[[dict[str, Any], int], dict[str, Any]]] = field(default_factory=dict)
    independent_rows: bool = False  # each line of the first tensor (along `dim`, else the last) has results of its own
    # Inputs whose first dim is that of the result, each index of which depends on the same index of these alone (but where
    # rows lie along that dim).
    sliced: tuple[str, ...] = ()
    row_scales: tuple[float, ...] = ROW_SCALES  # sizes of the first tensor's rows where they are mixed
    # Names of inputs -> sizes that all of these have at once in some calls, beside others of usual sizes.
    extremes: Mapping[tuple[str, ...], tuple[float, ...]] = field(default_factory=dict)
    # PyTorch's form has the dtype of the first tensor of floating-point numbers; and in a dtype of fp32's range, where all
    # numbers of the inputs are less than this, it is finite wherever the oracle is. 0: nothing is known.
    finite_below: float = 0.0
    degree: int = 1  # the power of such a size that a result may reach, which must be in the range of a dtype
    magnitude: Callable[..., Tensor] | None = None  # how large a result is whose terms do not cancel; its own size if None
    # (result, **inputs) -> how large the terms are of which each result is made, if an error is to be small beside them
    # wherever they are less than 1; it broadcasts to the result.
    terms: Callable[..., Tensor] | None = None
    # (result, **inputs) -> which results are one of the inputs' numbers as it is, or which no rule tells: PyTorch's forms
    # differ, as where weights of 0 meet NaN. They broadcast to the result.
    picked: Callable[..., Tensor] | None = None
    untold: Callable[..., Tensor] | None = None
    relative: bool = False  # no result is made of terms that cancel: however small, it is right to a part of itself
    dtypes: tuple[torch.dtype, ...] = DTYPES  # in which it must be right
    layouts: tuple[str, ...] = ("transposed", "sliced", "shifted")  # beside contiguous, where inputs may lie in memory
    nonfinite: tuple[float, ...] = (math.nan, math.inf, -math.inf)  # values after whose planting it must still be right
    # (**inputs) -> of which elements of the first tensor the result is made, if not of all; it broadcasts to that.
    counted: Callable[..., Tensor] | None = None
    planted_in: tuple[str, ...] = ()  # inputs beside the first that they, and a large number, are planted into
    forms: Callable[[torch.dtype], Iterator[Args]] | None = None
    takes: Callable[[Args], bool] = lambda args: True  # whether the oracle means something for these shapes and dtypes
    results: tuple[TensorSpec, ...] = ()  # of a region: what it returns, a tuple if several; (): one
    # (arguments) -> the strides in which models go on with that one, if it is not contiguous: kernels return it either way,
    # and what is contiguous costs a model a copy.
    result_strides: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    library_calls: str = ""  # the part, in words, for which a kernel may call a library (fused_mlp's GEMMs), or ANY_LIBRARY
    is_library_work: Callable[[Args], bool] = lambda args: False  # whether that part is all: it is timed without libraries

    def case(self, dims: Dims, dtype: torch.dtype) -> Case:
        label = ",".join(f"{k}={v}" for k, v in dims.items())
        return Case(f"{label} {str(dtype).removeprefix('torch.')}", self.arguments(dtype, **dims))

    def first_of(self, tensors: Mapping[str, Any]) -> str:
        """The name of the first tensor of a case, or of the inputs of a call."""
        return self.first or next(name for name, value in tensors.items() if isinstance(value, (Tensor, TensorSpec)))

    @property
    def result_count(self) -> int:
        return len(self.results) or 1

    def made(self, device: torch.device) -> Any:
        """Memory for `results`, as a kernel returns them."""
        made = tuple(torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device=device) for t in self.results)
        return made if len(made) > 1 else made[0]

    def laid_out(self, result: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """A type's one result as a model gets it: in `result_strides`, or contiguous."""
        if self.result_strides is None:
            return result.contiguous()
        strides = self.result_strides(arguments)
        if result.stride() == strides:
            return result
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)

    @property
    def folder(self) -> Path:
        return folder_of(self.name)

    def starters(self, backend: str) -> dict[str, Path]:
        """Structural variants by name, the main starter first: {'cpp_kernel': …, 'cpp_twopass': …}."""
        files = sorted(self.folder.glob(f"{backend}_*.py"), key=lambda p: (p.stem != f"{backend}_kernel", p.stem))
        return {p.stem: p for p in files}


def nonfinite_of(words: Sequence[str]) -> tuple[float, ...]:
    """KernelSpec.nonfinite as a file has it. NaN is math.nan itself: no other NaN is `in` what has that."""
    values = map(float, words)
    return tuple(math.nan if math.isnan(value) else value for value in values)


def alike(x: Tensor) -> Tensor:
    """Rows of one power of two each, 1/4 at most, of either sign: sums of it are exact, and where a mean is off by one
    rounding all the same, what is left of the row, 316 times as large in layernorm (1 / sqrt(eps)), is next to nothing."""
    first = x[..., :1]
    return (first.sign() * first.abs().double().clamp(2.0**-8, 1).log2().floor().exp2() / 4).to(x.dtype).expand_as(x)


def steps(count: int) -> Tensor:
    """By how much numbers may be above others so that exp() of the difference does not overflow in fp32, and a sum of a few
    such does."""
    return 83 + 5.5 / 7 * (5 * torch.arange(count) % 8)


def steep(x: Tensor) -> Tensor:
    """x with every other row as steep as that: all of its last quarter is so far above what comes before."""
    rows = x.reshape(-1, x.shape[-1]).clone()
    before, raised = rows[1::2].split([x.shape[-1] - x.shape[-1] // 4, x.shape[-1] // 4], -1)
    raised[:] = before.amax(-1, keepdim=True) + steps(len(raised)).to(x)[:, None]
    return rows.view(x.shape)


def of_many_sizes(inputs: Mapping[str, Any], left: str, right: str) -> dict[str, Any]:
    """Factors of a product, the columns of `left` between 2^-9 and 2^9, the rows of `right` the inverse: every product
    matters, few operands are of one size."""
    scale = torch.exp2(torch.linspace(-9, 9, inputs[left].shape[-1]).round()).to(inputs[left].dtype)
    return {**inputs, left: inputs[left] * scale, right: inputs[right] / scale[:, None]}


def several(returned: Any) -> tuple[Any, ...]:
    """What a function returned, as its results."""
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def is_region(kernel_type: str) -> bool:
    """Whether a kernel type is a part of some model's graph."""
    return kernel_type.startswith("region_")


def folder_of(name: str) -> Path:
    """Where the kernel type `name` is, or would be."""
    places = (folder / name for folder in (PROBLEMS, REGIONS, KERNELS, KEPT_REGIONS))
    return next((folder for folder in places if (folder / "spec.py").is_file()), KERNELS / name)


def is_kernel_type(name: Any) -> bool:
    """Whether there is this kernel type. A kernel file names its own, and a path must not lead to code of its choice."""
    return isinstance(name, str) and bool(TYPE_NAME.fullmatch(name)) and (folder_of(name) / "spec.py").is_file()


LOADING = threading.RLock()  # of specs: `reference` is another module meanwhile


@cache
def load_spec(name: str) -> KernelSpec:
    """The spec of kernel type `name`. Raises KeyError, naming those that exist, if there is none; Refused for a region."""
    path, exists = folder_of(name) / "spec.py", is_kernel_type(name)
    if not exists and is_region(name):
        remedy = "profile the model again (python profile.py, with the run's --tag), which makes it anew"
        raise Refused(f"{REGIONS / name} is gone, which says what this part of a model computes: {remedy}")
    if not exists:
        raise KeyError(f"no kernel type {name!r}; there are: {', '.join(kernel_types())}")
    if not path.is_relative_to(KERNELS):  # written by us
        with LOADING, _our_reference():
            return import_file(path, f"autokernel_spec_{name}").SPEC
    shown = os.path.relpath(path, ROOT)
    try:
        with LOADING, _our_reference():
            spec = getattr(import_file(path, f"autokernel_spec_{name}"), "SPEC", None)
    except Exception as error:  # of whatever kind: a person's file, as of a new kernel type
        raise Refused(f"{shown} cannot be imported: {_said(error)}") from error
    if not isinstance(spec, KernelSpec):
        raise Refused(f"{shown} has no SPEC = KernelSpec(…): docs/extending.md shows one")
    if spec.name != name:
        raise Refused(f"{shown} has name={spec.name!r}: it is that of its folder, {name!r}")
    return spec


def _said(error: Exception) -> str:
    """What it says, and the line where."""
    if isinstance(error, SyntaxError):
        file, line, said = error.filename, error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [f for f in frames if Path(f.filename).is_relative_to(ROOT)] or frames
        file, line, said = frames[-1].filename, frames[-1].lineno, " ".join(str(error).split())
    return f"{type(error).__name__}: {said} ({os.path.relpath(file or '', ROOT)}:{line})"


@contextmanager
def _our_reference() -> Iterator[None]:
    """`import reference` finds the oracles, wherever this program looks for modules, and whatever it calls by that name."""
    path, found = ROOT / "reference.py", sys.modules.get("reference")
    if found and getattr(found, "__file__", None) == str(path):
        yield
        return
    ours = f"{__package__}.reference"
    sys.modules["reference"] = sys.modules.get(ours) or import_file(path, ours)
    try:
        yield
    finally:
        del sys.modules["reference"]
        if found:
            sys.modules["reference"] = found


def kernel_types() -> list[str]:
    return kernel_types_in(KERNELS)


def kernel_module(source: str) -> str:
    """The name by which a kernel's file is imported, in the gate as in a model: none can tell by it where it is."""
    return f"autokernel_winner_{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def import_file(path: Path, name: str) -> Any:
    """Import a Python file that is not in a package (`kernels/` has no `__init__.py`) under a name of its own."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)  # Dynamo and pickle look it up by name
    module_spec.loader.exec_module(module)
    return module
