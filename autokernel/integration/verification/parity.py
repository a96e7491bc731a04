"""Is the model with kernels still itself: its outputs against the original's and a more exact model's, on fresh inputs."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.integration.verification.processes import note_memory
from autokernel.integration.verification.record import ERROR_GROWTH, Parity
from autokernel.integration.verification.sides import Variant, built
from autokernel.model.agreement import InWideForms
from autokernel.model.match import SiteFinder
from autokernel.model.pieces import pieces
from autokernel.model.user_code import flat
from autokernel.model.workload import Workload, in_dtype

PARITY_INPUTS = 3
# Of outputs after many layers. Where the original itself is further from the exact model, its largest error counts instead,
# times ERROR_GROWTH: of 65 million logits in bfloat16 some are.
OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
EXACT_BYTES = 8 << 30  # of a model's weights that are held once more for an exact model
Compared = list[tuple[tuple[Parity, ...], dict[str, int]]]  # of each form: its outputs; sites replaced, by target


def compare_outputs(
    workload: Workload, sides: Sequence[Variant], atol: float | None, rtol: float | None, seed: int
) -> Compared:
    """For each side, the optimised model against the original and an exact one, on fresh inputs.

    For a child process: it loads the model. Each side has another fallback, and so a trace of its own.
    """
    model, args, kwargs = workload.load()
    workload.try_pass(model, args, kwargs)
    finder = SiteFinder()
    replacers = [side.replacer(finder) for side in sides]
    forms = [compile_with_kernels(model, replacer) for replacer in replacers]
    with torch.no_grad():
        for form in forms:
            form(*args, **kwargs)
    note_memory(workload.device)  # the exact model comes on top
    by_form = _compared(model, forms, workload, (atol, rtol), seed)
    return [(parity, _sites(side, replacer)) for parity, side, replacer in zip(by_form, sides, replacers)]


def compare_built(seed: int, sides: Mapping[str, Variant], atol: float | None, rtol: float | None) -> Compared | None:
    """The same in a process that has built these sides; None where a GPU has no room for an exact model beside them."""
    here = built[seed]
    try:
        by_form = _compared(here.model, [here.models[name] for name in sides], here.workload, (atol, rtol), seed)
    except torch.OutOfMemoryError:
        return None
    return [(parity, _sites(side, here.replacers[name])) for parity, (name, side) in zip(by_form, sides.items())]


def _compared(
    model: nn.Module,
    forms: Sequence[Callable[..., Any]],
    workload: Workload,
    tolerances: tuple[float | None, float | None],
    seed: int,
) -> list[tuple[Parity, ...]]:
    """Of each form, on PARITY_INPUTS fresh inputs."""
    with torch.no_grad():
        exact = exact_model(model)
        return list(zip(*(compare(model, forms, exact, workload, tolerances, seed + i) for i in range(PARITY_INPUTS))))


def _sites(side: Variant, replacer: Replacer) -> dict[str, int]:
    count = Counter(replacement.target for replacement in replacer.replaced)
    return {w.target.name: count[w.target.name] for w in side.winners}


def decode_parity(data: Any) -> Compared:
    return [(tuple(Parity(**p) for p in parity), sites) for parity, sites in data]


def exact_model(model: nn.Module) -> nn.Module | None:
    """The same weights in float64, or in float32 if that does not fit; None if there is none more exact."""
    weights = [p for p in model.parameters() if p.is_floating_point()]
    numel = sum(p.numel() for p in weights)
    fitting = (d for d in (torch.float64, torch.float32) if numel * d.itemsize <= EXACT_BYTES)
    dtype = next((d for d in fitting if all(d.itemsize > p.itemsize for p in weights)), None)
    return in_dtype(copy.deepcopy(model), dtype) if dtype else None


def compare(
    model: nn.Module,
    optimised: Sequence[Callable[..., Any]],
    exact: nn.Module | None,
    workload: Workload,
    tolerances: tuple[float | None, float | None],
    seed: int,
) -> list[Parity]:
    """Each of `optimised` on one fresh input; `tolerances` are atol and rtol, by default those of the model's dtype."""
    args, kwargs = workload.inputs(model, seed)
    default = OUTPUT_TOLERANCE.get(getattr(torch, workload.dtype), OUTPUT_TOLERANCE[torch.float32])
    atol, rtol = (default if given is None else given for given in tolerances)
    theirs, truth, told = outputs(model(*args, **kwargs)), None, {}
    allowed = [atol] * len(theirs)
    if exact is not None and (truths := _exact_outputs(exact, args, kwargs)):
        dtype = next(p.dtype for p in exact.parameters() if p.is_floating_point())
        truth = truths[0]
        if tolerances[0] is None and [t.shape for t in truths] == [y.shape for y in theirs]:
            allowed = [max(atol, ERROR_GROWTH * _largest_error(y, t)) for y, t in zip(theirs, truths)]
        told = {"exact": str(dtype).removeprefix("torch."), "error_original": _relative_rms(theirs[0], truth)}
        told["agreement_original"] = _agreement(theirs[0], truth)

    def parity(ours: list[Tensor]) -> Parity:
        assert [y.shape for y in ours] == [y.shape for y in theirs], "the optimised model returns other shapes"
        pairs = [(*piece, bound) for a, b, bound in zip(ours, theirs, allowed) for piece in pieces(a, b)]
        difference = max(((a.double() - b.double()).abs().nan_to_num().max().item() for a, b, _ in pairs), default=0.0)
        within = all(torch.allclose(a, b, rtol, bound, equal_nan=True) for a, b, bound in pairs)
        found = Parity(str(workload), seed, difference, within, **told)
        if truth is None:
            return found
        error, agreement = _relative_rms(ours[0], truth), _agreement(ours[0], truth)
        return replace(found, error_optimised=error, agreement_optimised=agreement)

    return [parity(outputs(form(*args, **kwargs))) for form in optimised]


def _exact_outputs(exact: nn.Module, args: Any, kwargs: Any) -> list[Tensor] | None:
    """None of a model that does not run in this dtype: one of its operators takes no such numbers, or it writes its own."""
    dtype = next(p.dtype for p in exact.parameters() if p.is_floating_point())
    wide = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
    for mode in (nullcontext(), InWideForms()):
        try:
            with mode:
                return outputs(exact(*wide[0], **wide[1]))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of any kind: it is the model's own code
            continue
    return None


def outputs(result: Any) -> list[Tensor]:
    """The floating-point tensors of whatever a model returns; the first are its logits. Complex numbers are two each."""
    numbers = [y for y in flat(result) if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())]
    return [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in numbers]


def _largest_error(y: Tensor, truth: Tensor) -> float:
    """Of the numbers whose error is one."""
    errors = ((a.double() - b.double()).abs() for a, b in pieces(y, truth))
    return max((e[e.isfinite()].max().item() for e in errors if e.isfinite().any()), default=0.0)


def _relative_rms(y: Tensor, truth: Tensor) -> float:
    error = sum((a.double() - b).pow(2).sum() for a, b in pieces(y, truth))
    return (error / sum(b.double().pow(2).sum() for (b,) in pieces(truth))).sqrt().item()


def _agreement(y: Tensor, truth: Tensor) -> float:
    """Share of equal top-1: argmax over the last dimension, a language model's next tokens."""
    equal = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pieces(y, truth)])
    return equal.double().mean().item()
