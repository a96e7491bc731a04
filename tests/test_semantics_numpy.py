"""With kernels in it, a model that computes with NumPy on the way has what NumPy makes, and NumPy's random numbers."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from semantic_models import Function, everywhere
from torch import Tensor

from autokernel.integration.apply import compile_with_kernels

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def test_numpys_random_numbers_are_its_own() -> None:
    """Dynamo takes them from PyTorch, whatever numpy.random was seeded with: a layer that is left out was another one."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, float]:
        x = s.norm(s.a(x)) if numpy.random.rand() > 0.5 else F.gelu(s.b(x))
        return x + torch.tensor(numpy.random.rand(8)).float(), numpy.random.uniform()

    model, replacer, x = Function(forward).requires_grad_(False), everywhere(), torch.randn(2, 8)
    made = []
    for call in (model, compile_with_kernels(model, replacer)):
        numpy.random.seed(0), torch.manual_seed(0)
        made.append([*call(x), *call(x), torch.rand(1)])
    torch.testing.assert_close(*made)
    assert replacer.replaced


@pytest.mark.parametrize(
    "of", [lambda a, t: a * t, lambda a, t: a[t.argmax(-1)], lambda a, t: a > t, lambda a, t: a @ t.t()]
)
def test_an_array_and_a_tensor_make_what_numpy_makes_of_them(of: Callable[..., Any]) -> None:
    """To Dynamo the array is a tensor as well, and so is what becomes of both, where NumPy may refuse to compute it."""
    array = numpy.ones(8, numpy.float32)
    model, x = Function(lambda s, x: (s.norm(x), of(array, x))).requires_grad_(False), torch.randn(2, 8)

    def made(call: Callable[..., Any]) -> Any:
        try:
            return call(x)[1]
        except TypeError:
            return TypeError

    ours, theirs = made(compile_with_kernels(model, everywhere())), made(model)
    assert type(ours) is type(theirs)
    numpy.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings("error:To copy construct")
@pytest.mark.parametrize(
    "of",
    [
        F.linear,
        F.layer_norm,
        lambda a, _: torch.exp(a),
        lambda a, t: torch.cat([t[0], a[0]]),
        lambda a, t: t.matmul(a),
        lambda a, t: t.new_tensor(a) + torch.from_numpy(a) + torch.as_tensor(a) + torch.tensor(a),
    ],
)
def test_a_function_of_pytorchs_takes_no_array_that_it_does_not_take(of: Callable[..., Any]) -> None:
    """To Dynamo it is a tensor, which all of them take."""
    array = numpy.ones((8, 8), numpy.float32)
    model, x = Function(lambda s, x: (s.norm(x), of(array, x if of is not F.layer_norm else [8]))), torch.randn(8, 8)

    def made(call: Callable[..., Any]) -> Any:
        try:
            return call(x)[1]
        except TypeError as error:
            return str(error)

    replacer = everywhere()
    ours, theirs = made(compile_with_kernels(model.requires_grad_(False), replacer)), made(model)
    assert type(ours) is type(theirs)
    assert isinstance(ours, str) and ours == theirs or torch.equal(ours, theirs) and replacer.replaced


def test_numbers_of_numpys_keep_no_kernels_out() -> None:
    model, x = Function(lambda s, x: F.softmax(s.a(x) / numpy.sqrt(8), -1) * numpy.float32(2)), torch.randn(2, 8)
    replacer = everywhere()
    torch.testing.assert_close(compile_with_kernels(model, replacer)(x), model(x))
    assert replacer.replaced and not replacer.left
