"""Graphs with operators of higher order: what is around them gets its kernels, and they stay what they are."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autokernel.integration.apply import apply, compile_with_kernels
from autokernel.integration.backend import IN_CHECKPOINTS, Replacer
from autokernel.model.capture import capture
from autokernel.model.forwards import WHY_RECURRENT
from autokernel.model.match import SiteFinder
from benchmarks.architectures import starters
from benchmarks.random_programs import Everywhere, finder


class Sine(torch.autograd.Function):
    """Its gradient is not the sine's: a graph that traces through it shows."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0].cos()


class Around(nn.Module):
    """A product, something that cannot be traced through, another product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(128, 128) for _ in range(3))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Branch(Around):
    def middle(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.inner(t) + 1, lambda t: t.sin(), (x,))


class Checkpointed(Around):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: self.inner(t).sin(), x, use_reentrant=False)


class CheckpointedThatWrites(Around):
    """What a checkpoint is given is changed in it, after a product has read it and before another does."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            checkpoint(lambda t: self.passes.add_(1), x, use_reentrant=False)
        return x * self.passes


class OwnGradient(Around):
    def middle(self, x: Tensor) -> Tensor:
        return Sine.apply(x)


class Mapped(Around):
    def middle(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.view(2, 64).softmax(-1).flatten() + self.inner.bias)(x)


class Derivative(Around):
    def middle(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: self.inner(t).square().sum())(x)


class Hooked(Around):
    """A hook is lost where a graph is traced once more: with gradients, this one is left as it is."""

    def middle(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: 2 * grad)
        return x.sin()


class Recurrent(Around):
    """A GRU, in an expression between the products: one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(128, 64, num_layers=2, bidirectional=True)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0].sin()


MODELS = [Branch, Checkpointed, CheckpointedThatWrites, OwnGradient, Mapped, Derivative, Hooked, Recurrent]
WITH_GRADIENTS = dict.fromkeys(MODELS, 2) | {Hooked: 0}  # products that kernels compute in training
INLINED = {Checkpointed: 3}  # without gradients a checkpoint is its body


def outcome(call, model: nn.Module, x: Tensor, gradients: bool) -> list[Tensor]:
    x = x.clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        result = call(x)
    if not gradients:
        return [result]
    model.zero_grad()
    result.square().sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "training"])
@pytest.mark.parametrize("model_class", MODELS, ids=lambda c: c.__name__)
def test_products_around_it_are_replaced_and_the_model_stays_itself(model_class: type, gradients: bool) -> None:
    torch.manual_seed(0)
    model, x, finder = model_class(), torch.randn(128, 128), SiteFinder()
    captured = capture(copy.deepcopy(model), (x,), {})
    products = [s for graph in captured.graphs for s in finder.find(graph.module) if s.kernel_type == "fused_linear"]
    assert len(captured.graphs) == 1 and not captured.breaks
    assert len(products) == INLINED.get(model_class, 2)
    torch._dynamo.reset()
    ours = copy.deepcopy(model)
    replacer = Replacer(starters(products), finder=finder)
    got = [outcome(compile_with_kernels(ours, replacer), ours, x, gradients) for _ in range(2)]
    assert len(replacer.replaced) == (WITH_GRADIENTS[model_class] if gradients else len(products))
    expected = [outcome(model, model, x, gradients) for _ in range(2)]  # twice: what is counted goes on
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


class PartlyCast(Around):
    """Autocast in the middle of a graph: a checkpoint in it, and one behind it."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(lambda t: self.inner(t).sin(), x, use_reentrant=False)
        return checkpoint(lambda t: self.inner(t).sin(), y.float(), use_reentrant=False)


@pytest.mark.parametrize("fallback", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_class", [Branch, Checkpointed, OwnGradient, Mapped, Derivative, PartlyCast, Recurrent])
@pytest.mark.slow_after(2)
def test_autocast_around_it(model_class: type, fallback: str | None) -> None:
    """What is inside casts as it does without kernels, and the products around it are replaced."""
    torch.manual_seed(0)
    model, x, replacer = model_class(), torch.randn(32, 128), Everywhere((), fallback, finder=finder())
    ours = copy.deepcopy(model)
    for gradients in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=model_class is not PartlyCast):
            got = outcome(compile_with_kernels(ours, replacer), ours, x, gradients)
            expected = outcome(model, model, x, gradients)
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2 * float(theirs.abs().max()))
    is_broken = model_class is Recurrent and fallback is not None  # over a compiler a recurrent module stays as it is
    assert {r.graph for r in replacer.replaced} == set(range(6 if is_broken else 2))
    has_checkpoint = issubclass(model_class, (Checkpointed, PartlyCast))
    assert (IN_CHECKPOINTS in replacer.left) == has_checkpoint
    assert bool(set(replacer.left) - {IN_CHECKPOINTS}) == is_broken and not torch.is_autocast_enabled("cpu")


COMPILED = [Checkpointed, *(pytest.param(c, marks=pytest.mark.slow) for c in (Branch, Mapped))]


@pytest.mark.slow
def test_other_lengths_of_a_recurrent_model() -> None:
    torch.manual_seed(0)
    model, finder = Recurrent(), SiteFinder()
    sizes = [torch.randn(n, 128) for n in (128, 64, 32, 128)]
    products = [s for graph in capture(model, (sizes[0],), {}).graphs for s in finder.find(graph.module)]
    torch._dynamo.reset()
    replacer = Replacer(starters(products), finder=finder)
    ours = apply(copy.deepcopy(model), replacer.winners)
    for x in sizes:
        torch.testing.assert_close(outcome(ours, ours, x, True), outcome(model, model, x, True), rtol=1e-4, atol=1e-4)
    assert len(ours._compiled_call_impl.replacer.replaced) == 2
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_what_follows_a_recurrent_module_is_compiled(kind: type) -> None:
    """Dynamo takes it in where a compiler may not have it, and would else leave out all that follows in its caller."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.rnn, self.after = nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.rnn(self.before(x).relu())
            return self.after(hidden)

    torch.manual_seed(0)
    model, replacer = Tagger(), Everywhere((), "aot_eager", finder=finder())
    ours, x = copy.deepcopy(model), torch.randn(4, 8)
    compiled = compile_with_kernels(ours, replacer)
    for gradients in (True, False):
        torch.testing.assert_close(outcome(compiled, ours, x, gradients), outcome(model, model, x, gradients))
    assert {r.graph for r in replacer.replaced} == {0, 1, 2, 3} and replacer.left == [WHY_RECURRENT]
    assert not any("forward" in vars(module) for module in ours.modules())
    model.rnn = kind(8, 8)  # apply() has not seen it
    ours.rnn = copy.deepcopy(model.rnn)
    torch.testing.assert_close(outcome(compiled, ours, x, True), outcome(model, model, x, True))


@pytest.mark.parametrize("model_class", COMPILED, ids=lambda c: c.__name__)
def test_inductor_compiles_what_is_around_the_kernels(model_class: type) -> None:
    torch.manual_seed(0)
    model, x, finder = model_class(), torch.randn(128, 128), SiteFinder()
    products = [s for graph in capture(model, (x,), {}).graphs for s in finder.find(graph.module)]
    torch._dynamo.reset()
    replacer = Replacer(starters(products), "inductor", finder=finder)
    got = outcome(compile_with_kernels(model, replacer), model, x, True)
    assert replacer.replaced
    torch.testing.assert_close(got, outcome(model, model, x, True), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_around_the_model_stops_when_it_has_what_it_needs() -> None:
    """PyTorch ends the second forward pass by an exception, which is not a kernel's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x, replacer = torch.randn(4, 8, requires_grad=True), Everywhere((), finder=finder())

    def gradients(call) -> list[Tensor]:
        result = checkpoint(call, x, use_reentrant=False)
        return list(torch.autograd.grad(result.square().sum(), [x, *model.parameters()]))

    torch.testing.assert_close(gradients(compile_with_kernels(model, replacer)), gradients(model))
    assert len(replacer.replaced) == 2 and not replacer.left
