"""How kernels are called at sites, what their results must look like there, and why a place is no site."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from autokernel.model.autocast import without_autocast
from autokernel.model.contract import Contract
from autokernel.model.nodes import layout, value
from autokernel.model.patterns import Pattern, Site
from autokernel.spec import Case, KernelSpec, TensorSpec, load_spec


class RejectReason(str, Enum):
    """Why a place that reads like a pattern is no site; of several readings, what the furthest failed at."""

    SHAPES = "the operation is not defined for its shapes or options"
    DTYPES = "it mixes dtypes"
    ROUNDED = "it rounds to fewer digits on the way than its inputs have"
    NEGATED = "an input is the negative of what its memory has"
    SMALL = "too small to be worth a call"
    ESCAPES = "an intermediate result is used elsewhere"
    LAYOUT = "its result shares memory, or has strides, that a kernel's result cannot have"
    WRITTEN = "what it reads is changed in place in between"
    SAVED = "its backward pass would read what may be changed before it runs"
    MODE = "gradients are on for some of its parts and off for others"
    PARTLY = "gradients are wanted of one of its results and not of another"
    NUMBERS = "it computes something else"
    ALONE = "it is one operation by itself, which leaves nothing to be fused"
    KINDS = "its inputs are no floating-point numbers, or its results are of dtypes that no kernel has"
    REPEATS = "an input has several of its elements in one place, as what is expanded and windows that overlap have"
    DOMAIN = "no inputs that are made at random give it numbers enough to tell kernels by"
    UNWRITTEN = "no kernel can be written for it yet"
    FAILED = "it could not be examined"

    @property
    def rank(self) -> int:
        return list(RejectReason).index(self)


class Unread:
    """A result that takes any method call and stays itself: but for its dtype, what becomes of it does not matter here."""

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype  # that the pattern's `call` gives it; None: the kernel's own

    def to(self, dtype: torch.dtype) -> "Unread":
        return Unread(dtype)

    def __getattr__(self, name: str) -> Callable[..., "Unread"]:
        return lambda *_, **__: self


@dataclass(frozen=True)
class Placement:
    """How a kernel is called at a site, among others; `strides`: those that its results must be given before they go on."""

    case: Case
    strides: tuple[tuple[int, ...] | None, ...] = (None,)  # by result


def cases_after_replacement(graph: GraphModule, sites: Sequence[Site]) -> "_AfterReplacement":
    """How each site's kernel is called beside the others', which return contiguous tensors.

    Where something would take notice that a result is contiguous that was not, it gets the original's strides.
    """
    replaced = _AfterReplacement(graph, sites)
    while noticed := replaced.noticed() - replaced.restored:
        replaced.restored |= noticed
    return replaced


class _AfterReplacement:
    """Kernels at all of these sites; `restored`: the sites' outputs that get the original's strides."""

    def __init__(self, graph: GraphModule, sites: Sequence[Site]):
        self.sites = {output: site for site in sites for output in site.outputs}
        self.contract = Contract(graph.graph, {output: site.inputs for output, site in self.sites.items()})
        self.mode = next((value(node).fake_mode for node in self.sites if isinstance(value(node), FakeTensor)), None)
        self.placements: dict[Node, Placement | RejectReason] = {}
        self.restored: set[Node] = set()
        self.errors: list[Exception] = []

    def placement(self, site: Site) -> Placement | RejectReason:
        """Of all its results together."""
        found = [self.placements[output] for output in site.outputs if output in self.placements]
        refused = next((one for one in found if isinstance(one, RejectReason)), None)
        return refused or Placement(found[-1].case, tuple(strides for one in found for strides in one.strides))

    def result(self, node: Node) -> Any:
        """What a node's result is then, as a fake tensor."""
        return self.contract.changed.get(node, value(node))

    def noticed(self) -> set[Node]:
        with self.mode or nullcontext(), torch.no_grad(), without_autocast():
            return self.contract.noticed(self._result, self.mode)

    def _result(self, output: Node, current: Callable[[Any], Any]) -> Any:
        """What a site's kernel returns, or the original, where no kernel can be."""
        try:
            return self._placed(output, current)
        except Exception as error:  # of any kind: a kernel type's own functions, met by tensors in other strides
            self.errors.append(error)
            self.placements[output] = RejectReason.FAILED
            return value(output)

    def _placed(self, output: Node, current: Callable[[Any], Any]) -> Any:
        site, own = self.sites[output], value(output)
        spec, fakes = load_spec(site.kernel_type), {name: current(v) for name, v in site.parameters.items()}
        case = described_case(spec, site.pattern, fakes, own)
        if isinstance(case, RejectReason):
            self.placements[output] = case
            return own
        result = site.pattern.call(partial(_kernel_result, spec), **fakes)
        if len(site.outputs) > 1:
            result = result[site.outputs.index(output)]
        strides = own.stride() if output in self.restored and layout(result) != layout(own) else None
        is_possible = (result.shape, result.dtype) == (own.shape, own.dtype) and output not in self.contract.aliases
        if not is_possible or (strides is not None and not _can_be_given(own)):
            self.placements[output] = RejectReason.LAYOUT
            return own
        self.placements[output] = Placement(case, (strides,))
        return own if strides is not None or layout(result) == layout(own) else result


def _can_be_given(fake: Tensor) -> bool:
    """Whether a new tensor can have this layout: it begins where its storage does, no element is in two places."""
    reach = 0
    for stride, size in sorted(zip(fake.stride(), fake.shape)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return fake.storage_offset() == 0


def _kernel_result(spec: KernelSpec, **arguments: Any) -> Any:
    if not spec.results:
        return torch.empty_like(spec.laid_out(spec.eager(**arguments), arguments))
    return spec.made(next(v.device for v in arguments.values() if isinstance(v, Tensor)))


def described_case(spec: KernelSpec, pattern: Pattern, fakes: Mapping[str, Any], output: Tensor) -> Case | RejectReason:
    """The arguments with which the kernel would be called here, if the pattern's `call` fits the shapes.

    Kernels know one floating-point dtype, in which they also answer; `call` may cast to it and back.
    """
    recorded: dict[str, Any] = {}

    def record(**arguments: Any) -> Any:
        bound = inspect.signature(spec.oracle).bind(**arguments)
        bound.apply_defaults()
        recorded.update(bound.arguments)
        return Unread()

    try:
        if not pattern.where(**fakes):
            return RejectReason.SHAPES
        answer = pattern.call(record, **fakes)
    except (RuntimeError, IndexError, ValueError):  # shapes that this way of writing does not have
        return RejectReason.SHAPES
    arguments = {k: tensor_spec(v) if isinstance(v, Tensor) else v for k, v in recorded.items()}
    defaults = {k: p.default for k, p in inspect.signature(spec.oracle).parameters.items()}
    if any(v is None and defaults[k] is not None for k, v in arguments.items()) or not spec.takes(arguments):
        return RejectReason.SHAPES
    if any(isinstance(v, TensorSpec) and v.overlaps for v in arguments.values()):
        return RejectReason.SHAPES
    if any(isinstance(v, TensorSpec) and v.numel == 0 for v in arguments.values()):
        return RejectReason.SMALL
    if any(isinstance(v, Tensor) and v.is_neg() for v in recorded.values()):
        return RejectReason.NEGATED
    if spec.results:  # which says what they are
        return Case(_case_name(arguments), arguments)
    dtypes = {v.dtype for v in recorded.values() if isinstance(v, Tensor) and v.is_floating_point()}
    cast = answer.dtype if isinstance(answer, Unread) else None
    if len(dtypes) != 1 or output.dtype != (cast or next(iter(dtypes))):
        return RejectReason.DTYPES
    return Case(_case_name(arguments), arguments)


def site_case(spec: KernelSpec, pattern: Pattern, fakes: Mapping[str, Any], output: Tensor) -> Case | None:
    """The arguments with which a kernel of this type would be called here; None where it cannot be."""
    case = described_case(spec, pattern, fakes, output)
    return None if isinstance(case, RejectReason) else case


def tensor_spec(fake: Tensor) -> TensorSpec:
    stride = None if fake.is_contiguous() else tuple(fake.stride())
    alignment = fake.storage_offset() % 16  # elements; where a tensor starts beyond its alignment is all the same
    return TensorSpec(tuple(fake.shape), fake.dtype, stride, alignment)


def _case_name(arguments: Mapping[str, Any]) -> str:
    def word(v: Any) -> str:
        if not isinstance(v, TensorSpec):
            return f"{v:g}" if isinstance(v, float) else str(v)
        layout = "" if v.stride is None else "/" + "x".join(map(str, v.stride))
        return "x".join(map(str, v.shape)) + layout

    dtype = next(v.dtype for v in arguments.values() if isinstance(v, TensorSpec) and v.dtype.is_floating_point)
    return (
        ",".join(f"{k}={word(v)}" for k, v in arguments.items() if v is not None) + f" {str(dtype).removeprefix('torch.')}"
    )
