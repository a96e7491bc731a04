"""Whether inputs tell right results from wrong ones, where nothing is known of a type (KernelSpec.opaque): by experiment.

A norm makes anything of what is all but constant, and a loss of numbers that cancel. There an honest kernel is as far from
the oracle as a wrong one, and such inputs are not tried.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autokernel.gate.checks.correctness import ELEMENT_TOLERANCE, ERROR_MULTIPLE
from autokernel.spec import KernelSpec, several

ROUNDED_EPS = 4.0  # by which each number on the way is larger or smaller
SHARE = 0.25  # of what is allowed, that this may come to
DRAWS = 2
OF_ONE_NUMBER = 4  # other inputs, on which PyTorch's own form says how far it may be off
IN_PLACE = 8.0, 8.0, -8.0, -8.0  # of the size of numbers in place of NaN and infinities


class _Rounded(TorchDispatchMode):
    """As if every result of an operator that is no view were rounded."""

    def __init__(self, eps: float, seed: int):
        super().__init__()
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(returned.alias_info for returned in func._schema.returns)
        return result if is_view else tree_map_only(Tensor, self.rounded, result)

    def rounded(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.generator, dtype=torch.int8).to(x.device, x.dtype) * 2 - 1
        return x * (1 + self.eps * signs)


def tells(spec: KernelSpec, inputs: Mapping[str, Any]) -> bool:
    """Whether roundings on the way change the oracle's results by far less than a kernel's may be off, and PyTorch's own
    form has NaN and infinities where it has them; False where the type's code takes no such inputs."""
    doubled = _exactly(inputs)
    eps = next(torch.finfo(v.dtype).eps for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point())
    with torch.inference_mode():
        try:
            exact, own = several(spec.oracle(**doubled)), several((spec.native or spec.eager)(**inputs))
            of_inputs, on_the_way = [], []
            for seed in range(DRAWS):
                mode = _Rounded(ROUNDED_EPS * eps, seed)
                moved = {name: mode.rounded(v) if isinstance(v, Tensor) else v for name, v in doubled.items()}
                of_inputs.append(several(spec.oracle(**moved)))
                with mode:
                    on_the_way.append(several(spec.oracle(**moved)))
        except (RuntimeError, ValueError, IndexError, AssertionError):  # as of an index out of range
            return False
        if any(not y.dim() for y in exact) and not _is_near_on_others(spec, inputs, eps):
            return False
        if not all(map(torch.Tensor.all, _hang_on_what_is_not_finite(spec, doubled, exact))):
            return False
    each = zip(exact, own, zip(*of_inputs), zip(*on_the_way))
    return all(_is_steady(*known) for known in each)


def _is_near_on_others(spec: KernelSpec, inputs: Mapping[str, Any], eps: float) -> bool:
    """Whether PyTorch's own form makes a loss of these inputs and of ones beside them that is right to a part of what is
    allowed: what is rounded inside of one of its operators is not seen from outside."""
    for seed in range(OF_ONE_NUMBER):
        mode = _Rounded(ROUNDED_EPS * eps, seed)
        other = {name: mode.rounded(v) if isinstance(v, Tensor) else v for name, v in inputs.items()}
        each = zip(several((spec.native or spec.eager)(**other)), several(spec.oracle(**_exactly(other))))
        if any(own.is_floating_point() and not own.dim() and not _is_near(own, exact) for own, exact in each):
            return False
    return True


def _is_near(own: Tensor, exact: Tensor) -> bool:
    error = (own.double() - exact).abs()
    return not error.isfinite() or bool(error <= SHARE * ELEMENT_TOLERANCE[own.dtype] * (1 + exact.abs()))


def _exactly(inputs: Mapping[str, Any]) -> dict[str, Any]:
    is_float = {name for name, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {name: v.double() if name in is_float else v for name, v in inputs.items()}


def _hang_on_what_is_not_finite(spec: KernelSpec, inputs: Mapping[str, Any], exact: Sequence[Tensor]) -> Iterator[Tensor]:
    """Of each result which elements are finite, or would be others if other numbers were where NaN and infinities are. The
    rest met these in a product with zero, which a kernel that knows of a triangle or of a mask leaves out."""
    numbers = {name: v for name, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    odd = {name: ~v.isfinite() for name, v in numbers.items() if not v.isfinite().all()}
    if not odd:
        return
    generator, made = torch.Generator().manual_seed(0), []
    for sign in IN_PLACE:
        drawn = {
            name: sign * (1 + torch.randn(v.shape, generator=generator).abs()) for name, v in inputs.items() if name in odd
        }
        other = {name: torch.where(odd[name], x.to(numbers[name]), numbers[name]) for name, x in drawn.items()}
        made.append(several(spec.oracle(**{**inputs, **other})))
    for y, others in zip(exact, zip(*made)):
        differs = torch.stack([one != other for one, other in itertools.combinations(others, 2)]).any(0)
        yield y.isfinite() | differs


def _is_steady(exact: Tensor, own: Tensor, of_inputs: Sequence[Tensor], on_the_way: Sequence[Tensor]) -> bool:
    """Whether what roundings `on_the_way` come to is within SHARE of what correctness.py allows: the tolerance, or, but of
    one number, a multiple of PyTorch's own error and of what roundings of the inputs alone come to."""
    if not own.is_floating_point():
        return all(torch.equal(y, exact) for y in (own, *of_inputs, *on_the_way))
    rounded = exact.to(own.dtype)
    for y in (own, *of_inputs, *on_the_way):
        tests = (torch.isnan, torch.isposinf, torch.isneginf)
        if any(not torch.equal(test(y.to(own.dtype)), test(rounded)) for test in tests):
            return False
    finite = rounded.isfinite()

    def most(several: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.where(finite, y.double() - exact, 0.0).abs() for y in several]).amax(0)

    known = most((own, *of_inputs))
    bound = ELEMENT_TOLERANCE[own.dtype] * (1 + exact.abs())
    if known.dim():
        largest = known.amax(-1, keepdim=True) if known.numel() else known
        bound = torch.maximum(bound, ERROR_MULTIPLE[own.dtype] * largest)
    return bool((most(on_the_way) <= SHARE * bound)[finite].all())
