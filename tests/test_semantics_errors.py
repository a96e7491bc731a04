"""With kernels in it, a model raises and catches what it did, and keeps its kernels."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from semantic_models import Function, everywhere
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autokernel.integration.apply import compile_with_kernels
from autokernel.model.match import SiteFinder
from benchmarks.random_programs import Everywhere, finder

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def kernels_that_ran(model: nn.Module, x: Tensor) -> int:
    with torch.profiler.profile() as profile:
        model(x)
    return sum(event.name.startswith("autokernel::") for event in profile.events())


def by_torch_compile(model: nn.Module, replacer: Everywhere, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("autokernel.integration.apply.MADE", [replacer])
    monkeypatch.setattr("autokernel.integration.apply._backend", lambda: replacer)
    return torch.compile(model, backend="autokernel")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("is_ours", [False, True])
def test_a_call_that_raises_costs_no_kernels(is_ours: bool, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo fails at it, too, and would leave out the functions that it met there from then on."""
    model, replacer, x = Function(lambda s, x: s.norm(s.a(x))), everywhere(), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer) if is_ours else by_torch_compile(model, replacer, monkeypatch)
    expected = 0 if is_first else kernels_that_ran(compiled, x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            compiled(torch.randn(2, 7))
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
        assert kernels_that_ran(compiled, x) == (expected or 2)
    assert not replacer.left


def caught(s: Function, x: Tensor, i: Tensor) -> Tensor:
    y = s.norm(s.a(x))
    try:
        row = y[i]
    except IndexError:
        row = y[:1]
    return s.b(row)


def suppressed(s: Function, x: Tensor, i: Tensor) -> Tensor:
    y = s.norm(s.a(x))
    row = y[:1]
    with contextlib.suppress(IndexError):
        row = y[i]
    return s.b(row)


class Swallowing(nullcontext):
    def __exit__(self, kind: Any, *_: object) -> bool:
        return kind is IndexError


class Swallower(Swallowing):
    pass


@contextmanager
def swallowing() -> Iterator[None]:
    try:
        with contextlib.ExitStack():
            yield
    except IndexError:
        return


def suppressed_by_a_class(s: Function, x: Tensor, i: Tensor) -> Tensor:
    y = s.norm(s.a(x))
    with torch.no_grad(), Swallower():
        y = y[i]
    return s.b(y)


def suppressed_by_a_generator(s: Function, x: Tensor, i: Tensor) -> Tensor:
    y = s.norm(s.a(x))
    with swallowing():
        y = y[i]
    return s.b(y)


def suppressed_by_what_is_entered(s: Function, x: Tensor, i: Tensor) -> Tensor:
    y = s.norm(s.a(x))
    with contextlib.ExitStack() as stack:
        stack.enter_context(Swallower())
        y = y[i]
    return s.b(y)


def inside_of_what_suppresses_nothing(s: Function, x: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False), sdpa_kernel(SDPBackend.MATH), torch.device("cpu"):
        y = s.norm(s.a(x))
        with nullcontext(), torch.profiler.record_function("rows"):
            return y[i]


def raised_as_another(s: Function, x: Tensor, i: Tensor) -> Tensor:
    y = s.norm(s.a(x))
    try:
        return y[i]
    except IndexError as error:
        raise ValueError("no such row") from error


def raised_again(s: Function, x: Tensor, i: Tensor) -> Tensor:
    try:
        return s.norm(s.a(x))[i]
    except LookupError:
        raise
    except IndexError as error:
        raise IndexError("no such row") from error


def beside_what_catches(s: Function, x: Tensor, i: Tensor) -> Tensor:
    try:
        y = s.norm(s.a(x))
    except (KeyError, RuntimeError):
        y = x
    try:  # as transformers does around its index_copy_() for a static cache
        return y[i]
    except NotImplementedError:
        return y


CATCHING = [
    caught,
    suppressed,
    suppressed_by_a_class,
    suppressed_by_a_generator,
    suppressed_by_what_is_entered,
    raised_as_another,
]


def test_an_error_behind_a_break_in_an_expression_is_the_models_own() -> None:
    """The code that Dynamo makes for the rest of it has constants that Python could not have, a dict among them."""

    def forward(s: Function, x: Tensor) -> Any:
        return (lambda o: (torch.mul(x, 2, out=o), torch.add(s.norm(x), 1, out=o.new_empty(x.shape))))(torch.empty(0))

    model, x = Function(forward), torch.randn(2, 8)
    for call in (model, compile_with_kernels(model, everywhere())):
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            call(x)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("function", [*CATCHING, raised_again, beside_what_catches, inside_of_what_suppresses_nothing])
def test_functions_that_catch_what_an_operator_raises(function: Callable[..., Any]) -> None:
    """In a graph nothing catches an error that an operator raises when it runs."""
    model, replacer, x = Function(function).requires_grad_(False), everywhere(), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer)

    def outcome(call: Callable[..., Any], i: Tensor) -> Any:
        try:
            return call(x, i)
        except (IndexError, ValueError) as error:
            return type(error)

    for row in (0, 1, 5, 1):
        ours, theirs = (outcome(call, torch.tensor([row])) for call in (compiled, model))
        assert ours is theirs if isinstance(theirs, type) else torch.allclose(ours, theirs, atol=1e-4)
    assert "rmsnorm" in {r.target for r in replacer.replaced}
    assert any("catches errors of getitem" in why for why in replacer.left) == (function in CATCHING)


@pytest.mark.slow
def test_a_model_that_raises_at_each_call_is_not_compiled_for_ever() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        s.norm(s.a(x))
        raise RuntimeError("always")

    replacer = everywhere()
    compiled, before = compile_with_kernels(Function(forward), replacer), len(torch._dynamo.utils.get_compilation_metrics())
    for _ in range(10):
        with pytest.raises(RuntimeError, match="always"):
            compiled(torch.randn(2, 8))
    assert any("forward() is not captured" in why for why in replacer.left)
    assert len(torch._dynamo.utils.get_compilation_metrics()) - before < 20


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_an_assertion_about_numbers_is_the_models_own(fallback: str | None) -> None:
    def checked(s: Function, x: Tensor) -> Tensor:
        y = s.norm(s.a(x))
        assert y.isfinite().all(), f"{x.shape[0]} rows"
        return s.b(F.gelu(s.a(y)))

    model, replacer, x = (
        Function(checked).requires_grad_(False),
        Everywhere((), fallback, finder=finder()),
        torch.randn(2, 8),
    )
    compiled = compile_with_kernels(model, replacer)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        with pytest.raises(AssertionError, match="2 rows"):
            compiled(x * torch.nan)
    assert {"rmsnorm", "fused_linear"} <= {r.target for r in replacer.replaced}


def test_integers_given_to_a_linear_layer_are_the_models_own_error() -> None:
    """PyTorch's fake tensors take them: nothing is said of a site that could not be examined."""
    model = Function(lambda s, x: F.gelu(s.a(x))).requires_grad_(False)
    replacer = Everywhere((), finder=SiteFinder(min_elements=0))
    compiled = compile_with_kernels(model, replacer)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        compiled(torch.ones(2, 8, dtype=torch.int64))
    assert not replacer.left and not replacer.finder.failures


@pytest.mark.filterwarnings("error")
def test_what_dynamo_cannot_trace_is_no_warning_of_the_models() -> None:
    """A method that is on the stack at a break: PyTorch's users are asked for an issue, and here it would be raised."""

    def forward(s: Function, x: Tensor) -> Tensor:
        h = s.norm(s.a(x))
        return s.b(x.new_zeros(int((x > 9).sum()) + 2, 8) + h)

    model, replacer, x = Function(forward).requires_grad_(False), everywhere(), torch.randn(2, 8)
    torch._dynamo.utils.warn_once_cache.clear()
    torch.testing.assert_close(compile_with_kernels(model, replacer)(x), model(x), atol=1e-4, rtol=1e-4)
    assert replacer.replaced and not torch._dynamo.utils.warn_once_cache
