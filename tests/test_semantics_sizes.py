"""With kernels in it, a model takes sizes and numbers that change as it did, with its kernels at each."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from semantic_models import Function, everywhere
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autokernel.integration.apply import compile_with_kernels
from benchmarks.random_programs import Everywhere, finder

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def test_sizes_that_change_in_a_model_with_rotary_embeddings() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2])[:, None] * torch.arange(4)
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    model = Function(forward)
    optimised = compile_with_kernels(copy.copy(model), everywhere())
    for length in (6, 4, 5, 6):
        x = torch.randn(2, 2, length, 8)
        torch.testing.assert_close(optimised(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_what_follows_a_number_that_is_read_has_its_kernels(fallback: str | None) -> None:
    """A float of Python that changes: Dynamo hands it to the rest of the function in a tensor, from which that reads it."""

    def scaled(s: Function, x: Tensor) -> Tensor:
        y = s.norm(s.a(x))
        largest = y.abs().max().item()
        y = s.norm(y) * largest
        y.add_(1.0 / largest)
        return s.b(y)

    model, replacer = Function(scaled), Everywhere((), fallback, finder=finder())
    compiled = compile_with_kernels(model, replacer)
    for length in (4, 4, 5, 5):
        x, before = torch.randn(2, length, 8), replacer.graphs
        ours, theirs = compiled(x), model(x)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        ours, theirs = (torch.autograd.grad(y.sum(), [*model.parameters()]) for y in (ours, theirs))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
        assert {r.graph for r in replacer.replaced} >= {*range(before, replacer.graphs)}
    assert not any(why.startswith("a graph") for why in replacer.left)


def test_numbers_and_sizes_that_change_in_inference_mode() -> None:
    """There no tensor counts how often it was written to, which is how a node of its own is told to write."""

    def forward(s: Function, x: Tensor, step: int) -> Tensor:
        return s.b(s.norm(s.a(x * step)))

    class Stepping(Function):
        def forward(self, x: Tensor, step: int) -> Tensor:
            return forward(self, x, step)

    model, replacer = Stepping(forward), everywhere()
    compiled = compile_with_kernels(model, replacer)
    with torch.inference_mode():
        for length, step in ((6, 1), (7, 2), (8, 3), (7, 5)):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(compiled(x, step), model(x, step), atol=1e-4, rtol=1e-4)
    assert len({r.graph for r in replacer.replaced}) > 2 and not replacer.left


def test_views_of_weights_ask_for_gradients_in_inference_mode() -> None:
    """A size is compiled for when a call has it: with the mode on, a compiler took views of weights for tensors alone."""
    model, replacer = (
        Function(lambda s, x: (s.a(x), s.b.weight.t(), s.b.weight[0])),
        Everywhere((), "aot_eager", finder=finder()),
    )
    compiled = compile_with_kernels(model, replacer)
    compiled(torch.randn(2, 8))
    with torch.inference_mode():
        x = torch.randn(3, 8)
        results = [[(t.requires_grad, t.is_inference()) for t in call(x)] for call in (compiled, model)]
    assert results[0] == results[1] == [(False, True), (True, False), (True, False)] and len(replacer.replaced) > 1


def test_floats_and_sizes_that_change_in_inference_mode() -> None:
    """There no tensor keeps a number that was read of it: each reading makes a symbol, which a body keeps to itself."""
    model, replacer = Function(lambda s, x, a: s.b(s.norm(s.a(x * a)))), everywhere()
    compiled = compile_with_kernels(model, replacer)
    with torch.inference_mode():
        for length, a in ((6, 0.5), (7, 1.5), (8, 2.5), (7, 0.25)):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(compiled(x, a), model(x, a), atol=1e-4, rtol=1e-4)
    assert len({r.graph for r in replacer.replaced}) > 2 and not replacer.left


def test_what_is_computed_of_a_float_alone_is_returned() -> None:
    """Whether it is above a threshold, say, which was None from the second float on."""
    model = Function(lambda s, x, a: (s.norm(s.a(x)) * a, a > 1.0, 2 * a))
    replacer = everywhere()
    compiled, x = compile_with_kernels(model, replacer), torch.randn(2, 8)
    for a in (0.5, 1.5, 2.5, 0.25):
        torch.testing.assert_close(compiled(x, a), model(x, a), atol=1e-4, rtol=1e-4)
    assert replacer.replaced


def test_a_float_that_has_to_be_a_constant() -> None:
    """What PyTorch compiles finds that out, and has Dynamo trace once more."""
    model = Function(lambda s, x, eps: s.b(F.layer_norm(s.a(x), (8,), eps=eps))).requires_grad_(False)
    replacer, x = Everywhere((), "aot_eager", finder=finder()), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer)
    for eps in (1e-5, 1.0, 2.0):
        torch.testing.assert_close(compiled(x, eps), model(x, eps))
    assert {r.graph for r in replacer.replaced} == {0, 1, 2} and not replacer.left


@pytest.mark.parametrize("fallback", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_integer_that_is_no_size_needs_no_graph_of_its_own(fallback: str | None) -> None:
    """Such as the step of a schedule."""

    def stepped(s: Function, x: Tensor, step: int) -> Any:
        return s.b(s.norm(s.a(x)) * step) + torch.tensor([step]), 2 * step + 1

    model, replacer = Function(stepped), Everywhere((), fallback, finder=finder())
    compiled = compile_with_kernels(model, replacer)
    for i, step in enumerate((999, 950, 900, 7, 1, 0, -3)):
        x = torch.randn(2, 5 if i > 4 and not fallback else 4, 8)
        (ours, number), (theirs, expected) = compiled(x, step), model(x, step)
        assert number == expected
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        ours, theirs = (torch.autograd.grad(y.sum(), [*model.parameters()]) for y in (ours, theirs))
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)
    assert replacer.graphs == (2 if fallback else 3) and not replacer.left
    assert {r.graph for r in replacer.replaced} == {*range(replacer.graphs)}


def test_a_loop_over_a_length_has_its_kernels_at_each() -> None:
    """Dynamo takes the length for one that changes, and then for one that does not: no input says which it is."""
    model = Function(lambda s, x: torch.stack([s.norm(s.a(row)) for row in x.unbind(1)], 1)).requires_grad_(False)
    replacer = everywhere()
    compiled = compile_with_kernels(model, replacer)
    for length in (2, 3, 4):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(compiled(x), model(x))
    assert {r.graph for r in replacer.replaced} == {0, 1, 2} and not replacer.left


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_convolution_of_no_elements_has_gradients_with_inductor(checkpointed: bool) -> None:
    """As of a mask head that no box is given: its backward pass ended with an assertion about strides."""
    model, replacer = nn.Conv2d(3, 4, 2, 2), Everywhere((), "inductor", finder=finder())
    whole = Function(lambda s, x: checkpoint(model, x, use_reentrant=False) if checkpointed else model(x))
    x = torch.randn(0, 3, 4, 4, requires_grad=True)
    y = compile_with_kernels(whole, replacer)(x)
    made = torch.autograd.grad(y.sum(), [x, *model.parameters()])
    torch.testing.assert_close(made, torch.autograd.grad(model(x).sum(), [x, *model.parameters()]))
    assert replacer.left == ["a graph with a convolution of no elements, as of a batch of 0, is left as it is"]
