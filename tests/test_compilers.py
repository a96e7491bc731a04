"""What PyTorch's compilers do not keep of eager mode, and a model with a fallback does."""

import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autokernel.integration import compilers
from autokernel.integration.apply import apply, compile_with_kernels, explain
from benchmarks.random_programs import Everywhere, finder

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")

COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.function = nn.Linear(8, 8), nn.LayerNorm(8), function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def applied(model: nn.Module, fallback: str) -> nn.Module:
    return apply(copy.deepcopy(model), [], fallback)


def smooth(s: Function, x: Tensor) -> Tensor:
    return s.norm(s.a(x)).tanh()


def penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
    """As of a discriminator: the gradient of a gradient's norm."""
    x = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    twice = torch.autograd.grad((once.norm(2, -1) - 1).square().sum(), [x, model.a.weight])
    return [once.detach(), *twice]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("kernels", [False, True])
def test_gradients_of_gradients(kernels: bool, fallback: str) -> None:
    model = Function(smooth)
    ours = Function(smooth)
    call = compile_with_kernels(ours, Everywhere((), fallback, finder=finder())) if kernels else apply(ours, [], fallback)
    call.a = ours.a
    for rows in (2, 2, 3):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(penalty(call, x), penalty(model, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fallback", COMPILERS)
def test_gradients_of_gradients_inside_of_a_model(fallback: str) -> None:
    """Forces are gradients of an energy, and training wants gradients of them."""

    def force(s: Function, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(smooth(s, x).square().sum(), x, create_graph=True)[0]

    model, x = Function(force), torch.randn(2, 8)
    ours = applied(model, fallback)
    for _ in range(2):
        made = [torch.autograd.grad(one(x).square().sum(), one.a.weight) for one in (ours, model)]
        torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)


def test_gradients_of_gradients_where_random_numbers_are_taken() -> None:
    """They would be others."""
    model = apply(Function(lambda s, x: nn.functional.dropout(smooth(s, x))), [], "aot_eager")
    with pytest.raises(RuntimeError, match="takes random numbers"):
        penalty(model, torch.randn(2, 8))


@pytest.mark.parametrize("fallback", COMPILERS)
def test_a_backward_pass_that_is_repeated(fallback: str) -> None:
    """The first one is not, and PyTorch would take it that none is."""
    model, x, seen = Function(smooth), torch.randn(2, 8), []

    def twice(one: nn.Module) -> None:
        loss = one(x).square().sum()
        loss.backward(retain_graph=True), loss.backward()
        seen.append(one.a.weight.grad)

    for one in (applied(model, fallback), model):
        one(x).square().sum().backward()
        twice(one)
        thread = threading.Thread(target=twice, args=(one,))  # whose settings are its own
        thread.start(), thread.join()
    torch.testing.assert_close(seen[:2], seen[2:])


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("function", [torch.relu, lambda t: t.softmax(-1), lambda t: t.sigmoid().exp()])
def test_writes_before_the_backward_pass_are_noticed_over_a_compiler(
    function: Callable[[Tensor], Tensor], fallback: str, kernels: bool
) -> None:
    """A compiler computes again what it was to keep, and of a kernel's results the backward pass needs none."""
    model = Function(lambda s, x: function(s.a(x)))
    call = compile_with_kernels(model, Everywhere((), fallback, finder=finder())) if kernels else apply(model, [], fallback)
    for write in (False, True):
        y = call(torch.randn(2, 8))
        with torch.no_grad():
            y.detach().mul_(1 + write) if write else y.mul(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") if write else nullcontext():
            y.sum().backward()


def squared(s: Function, x: Tensor) -> Any:
    h = s.a(x)
    return h.sigmoid(), s.norm(h).sum(-1), h.detach()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("written", range(3))
@pytest.mark.parametrize("wanted", [0, 1])
def test_writes_that_one_of_several_gradients_does_not_depend_on(written: int, wanted: int, fallback: str | None) -> None:
    raised = []
    for kernels in (False, True):
        model = Function(squared)
        results = (compile_with_kernels(model, Everywhere((), fallback, finder=finder())) if kernels else model)(
            torch.ones(2, 8)
        )
        with torch.no_grad():
            results[written].mul_(2)
        try:
            results[wanted].sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised.append(True)
        else:
            raised.append(False)
    assert raised[0] == raised[1]


def test_what_is_noticed_of_writes_holds_no_memory() -> None:
    t = torch.ones(8)
    storage, count = weakref.ref(t.untyped_storage()), compilers._Count(t)
    t.add_(1)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        count.check()
    del t
    assert count.now.untyped_storage().nbytes() == 0 and storage() is None


@pytest.mark.parametrize("fallback", COMPILERS)
def test_what_pytorch_refuses_a_compiler_does_not_take(fallback: str) -> None:
    """Dynamo's form of the operator has no such check."""
    model = Function(lambda s, i: nn.functional.one_hot(i, 4))
    ours = applied(model, fallback)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="only applicable to index tensor of type LongTensor"):
            ours(torch.tensor([1, 2], dtype=torch.int32))
    i = torch.tensor([1, 2])
    assert torch.equal(ours(i), model(i))


@pytest.mark.parametrize("fallback", COMPILERS)
def test_gradients_of_conjugates(fallback: str) -> None:
    """A compiler takes it that they are conjugates as well."""
    model = Function(lambda s, x: torch.view_as_complex(smooth(s, x).view(-1, 4, 2)).conj())
    ours, x, made = applied(model, fallback), torch.randn(2, 8), []
    for one in (ours, model):
        y = one(x)
        made.append([y.is_conj(), *torch.autograd.grad(y.real.sum() + y.imag.square().sum(), [*one.a.parameters()])])
    torch.testing.assert_close(made[0], made[1])


@pytest.mark.parametrize("function", [torch.relu, lambda t: t.softmax(-1), lambda t: t.sigmoid()])
def test_writes_to_what_eager_mode_keeps_of_a_site_are_noticed(function: Callable[[Tensor], Tensor]) -> None:
    """A kernel's gradients do not need its results, but those of the model do: it is told of its mistake."""
    model, replacer = Function(lambda s, x: function(s.a(x))), Everywhere((), finder=finder())
    for call in (model, compile_with_kernels(model, replacer)):
        y = call(torch.randn(2, 8))
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert replacer.replaced


def shared(kind: str) -> tuple[Tensor, Tensor]:
    x = torch.arange(32.0).view(4, 8)
    return {"apart": (x, x + 1), "whole": (x, x[:]), "detached": (x, x.detach()), "shifted": (x[:2], x[1:3])}[kind]


@pytest.mark.parametrize("kinds", [("whole", "apart"), ("apart", "whole"), ("detached", "whole", "apart", "shifted")])
@pytest.mark.parametrize("fallback", ["eager", *COMPILERS])
def test_inputs_that_share_memory_at_times(fallback: str, kinds: tuple[str, ...]) -> None:
    """One is written by way of another, or not: what is compiled is so for one of these."""
    model = Function(lambda s, x, y: (x.mul_(2), s.a(y)))
    replacer = Everywhere((), fallback, finder=finder())
    call = compile_with_kernels(Function(model.function), replacer)
    for kind in kinds:
        made = [one(*shared(kind)) for one in (call, model)]
        torch.testing.assert_close(*made)
        assert [t.shape for t in made[0]] == [t.shape for t in made[1]]


class Image(Tensor):
    """As torchvision has one."""


@pytest.mark.parametrize("fallback", [None, *COMPILERS])
def test_classes_of_tensors_in_a_model_that_keeps_statistics(fallback: str | None) -> None:
    """A graph that writes is not repeated where a compiler's form fails: such a tensor is not given to one."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Softmax(-1)), torch.randn(4, 8)
    ours = compile_with_kernels(copy.deepcopy(model), Everywhere((), fallback, finder=finder()))(x.as_subclass(Image))
    theirs = model(x.as_subclass(Image))
    assert type(ours) is type(theirs) is Image
    torch.testing.assert_close(ours.as_subclass(Tensor), theirs.as_subclass(Tensor), atol=1e-4, rtol=1e-4)


def test_what_may_not_be_repeated_is_not() -> None:
    """What failed had written to what it was given."""

    def breaking(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            graph(*values)
            raise NotImplementedError("not on this machine")

        return run

    torch._dynamo.register_backend(breaking, "breaking")
    written, pure = (apply(Function(f), [], "breaking") for f in (lambda s, x: s.a(x.add_(1)), smooth))
    x = torch.zeros(2, 8)
    with pytest.raises(NotImplementedError, match="not on this machine"):
        written(x)
    torch.testing.assert_close(x, torch.ones(2, 8))
    torch.testing.assert_close(pure(x), pure.forward(x))
    assert [why for why in explain(pure).left if "runs without breaking from now on" in why]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pure(torch.randn(2, 7))


class Counting(nn.Module):
    """What it does to itself, before it fails and because of that, stands behind its graph in what Dynamo makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.calls, self.seen, self.state = nn.Embedding(4, 8), 0, [], "new"

    def forward(self, i: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(i.shape[0])
        try:
            return self.rows(i).sum(-1)
        finally:
            self.state = f"done {self.calls}"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("fallback", ["eager", "aot_eager"])
def test_what_a_model_does_beside_before_it_fails(fallback: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        replacer = Everywhere((), fallback, finder=finder())
        monkeypatch.setattr("autokernel.integration.apply.Replacer", lambda *_: replacer)
    seen = []
    for model in (apply(Counting(), [], fallback), Counting()):
        states = []
        for i in ([1, 2], [7, 1], [3, 1], [9, 2, 3], [1]):
            try:
                model(torch.tensor(i))
            except IndexError:
                states.append("failed")
            states.append((model.calls, model.seen[:], model.state))
        seen.append(states)
    assert seen[0] == seen[1]


def test_a_call_that_wrote_before_it_failed_is_not_made_again() -> None:
    class Writing(Counting):
        def forward(self, i: Tensor) -> Tensor:
            self.rows.weight.data.add_(1)
            return super().forward(i)

    model = apply(Writing(), [], "eager")
    with torch.no_grad():
        model.rows.weight.zero_()
    with pytest.raises(IndexError):
        model(torch.tensor([7]))
    assert model.rows.weight.max() == 1


def test_what_enters_inference_mode_is_as_it_is_over_a_compiler() -> None:
    def forward(s: Function, x: Tensor) -> Any:
        with torch.inference_mode():
            y = s.a(x)
        return y, y.view(-1), s.norm(x)

    model = Function(forward)
    ours = applied(model, "aot_eager")
    for rows in (2, 3, 4):
        x = torch.randn(rows, 8)
        made = [one(x) for one in (ours, model)]
        torch.testing.assert_close(*made)
        ours_are, theirs_are = ([(t.is_inference(), t.requires_grad) for t in results] for results in made)
        assert ours_are == theirs_are


def a_dtype_for_the_rest(s: Function, x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    y = s.a(x), torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return y


def a_precision_for_good(s: Function, x: Tensor) -> Any:
    torch.set_float32_matmul_precision("high")
    return s.norm(s.a(x)), torch.ones(1)


@pytest.mark.parametrize("fallback", [None, *COMPILERS])
@pytest.mark.parametrize("function", [a_dtype_for_the_rest, a_precision_for_good])
def test_settings_are_made_at_each_call(function: Callable[..., Any], fallback: str | None) -> None:
    """A compiler makes them while it traces, and no more."""
    ours = compile_with_kernels(Function(function), Everywhere((), fallback, finder=finder()))
    before = torch.get_float32_matmul_precision()
    try:
        for call in (ours, ours, Function(function)):
            torch.set_float32_matmul_precision("highest")
            _, made = call(torch.randn(2, 8))
            wanted = torch.float64 if function is a_dtype_for_the_rest else torch.float32
            assert made.dtype == wanted and torch.get_default_dtype() == torch.float32
            assert torch.get_float32_matmul_precision() == ("highest" if wanted == torch.float64 else "high")
    finally:
        torch.set_float32_matmul_precision(before), torch.set_default_dtype(torch.float32)


def test_what_is_made_and_not_used_is_no_setting() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        torch.arange(3)
        torch._C._log_api_usage_once("a model")
        return s.norm(s.a(x))

    replacer = Everywhere((), "aot_eager", finder=finder())
    compile_with_kernels(Function(forward), replacer)(torch.randn(2, 8))
    assert replacer.replaced and not replacer.left


def two_heads(s: Function, x: Tensor) -> Any:
    h = x.tanh()
    return s.a(h), s.norm(h)[:, 0], h.detach()


def two_heads_and_a_break(s: Function, x: Tensor) -> Any:
    first, second, _ = two_heads(s, x)
    torch._dynamo.graph_break()
    return first.relu(), second * 2


def two_heads_and_writes(s: Function, x: Tensor) -> Any:
    memory = torch.zeros(2, 2, 8)
    memory[0] = s.a(x.tanh())
    memory[1] = s.norm(x)
    own = torch.zeros(2, 8)
    own.view(-1).copy_(s.norm(x).view(-1))
    return memory[0], own


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("function", [two_heads, two_heads_and_a_break, two_heads_and_writes])
def test_weights_of_other_results_have_no_gradient(function: Callable[..., Any], kernels: bool, fallback: str) -> None:
    """With one of zeros an optimizer moves them: it has momentum, or decay."""
    moved = []
    for compiled in (False, True):
        model = Function(function)
        call = model
        if compiled:
            replacer = Everywhere((), fallback, finder=finder())
            call = compile_with_kernels(model, replacer) if kernels else apply(model, [], fallback)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for wanted in (0, 1, 1, 0):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
            call(x)[wanted].square().sum().backward()
            moved.append([x.grad, *(p.grad is None for p in model.parameters())])
            optimizer.step()
        moved.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(moved[5:], moved[:5], atol=1e-4, rtol=1e-4)


def one_that_is_written(s: Function, x: Tensor, memory: Tensor) -> Tensor:
    memory[0] = s.a(x)
    return s.norm(x)


def one_that_is_computed_on(s: Function, x: Tensor, h: Tensor) -> Tensor:
    h.add_(s.a(h.detach().tanh()))
    return s.norm(x)


@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("function", [one_that_is_written, one_that_is_computed_on])
@pytest.mark.parametrize("is_view", [False, True])
def test_weights_of_inputs_that_are_written_to_have_no_gradient_of_results(
    is_view: bool, function: Callable[..., Any], fallback: str
) -> None:
    seen = []
    for model in (applied(Function(function), fallback), Function(function)):
        x, start = torch.linspace(-1, 1, 8, requires_grad=True), torch.ones(3, 8, requires_grad=True)
        h = torch.zeros(3, 8) if function is one_that_is_written else start * 2
        result = model(x, h[1:] if is_view else h)
        given = [x, start, *model.parameters()]
        made = [torch.autograd.grad(t.sum(), given, retain_graph=True, allow_unused=True) for t in (result, h)]
        seen.append([t for gradients in made for t in gradients])
    assert [t is None for t in seen[0]] == [t is None for t in seen[1]]
    torch.testing.assert_close([t for t in seen[0] if t is not None], [t for t in seen[1] if t is not None])


def of_no_use(s: Function, x: Tensor, y: Tensor) -> Any:
    unused = s.a(x)
    torch._dynamo.graph_break()
    return y + (x + unused).argmax(-1, keepdim=True)


def of_use_to_another(s: Function, x: Tensor, y: Tensor) -> Any:
    h = s.a(x)
    torch._dynamo.graph_break()
    return y.sin(), h.cos()


@pytest.mark.parametrize("fallback", ["eager", *COMPILERS])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("function", [of_no_use, of_use_to_another])
def test_a_graph_of_which_nothing_comes_gives_no_gradients(
    function: Callable[..., Any], kernels: bool, fallback: str
) -> None:
    """To AOTAutograd a gradient that is None is one of zeros, and so then are those of the graph before."""
    model, replacer = Function(function), Everywhere((), fallback, finder=finder())
    x, y = (torch.randn(2, 8, requires_grad=True) for _ in "xy")
    results = (compile_with_kernels(model, replacer) if kernels else apply(model, [], fallback))(x, y)
    result = results if isinstance(results, Tensor) else results[0]
    given = [x, y, *model.a.parameters()]
    assert [t is None for t in torch.autograd.grad(result.sum(), given, allow_unused=True)] == [True, False, True, True]


@pytest.mark.parametrize("fallback", COMPILERS)
def test_what_a_graph_does_not_depend_on_has_no_hook_called(fallback: str) -> None:
    model, called = applied(Function(lambda s, x, h: s.a(x) + h.argmax(-1, keepdim=True)), fallback), []
    x, h = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True) * 2
    h.register_hook(called.append)
    model(x, h).sum().backward()
    assert not called


@pytest.mark.parametrize("fallback", ["eager", *COMPILERS])
def test_a_write_to_what_is_detached_ends_its_own_gradient(fallback: str) -> None:
    """What wants a gradient once something was written there is no part of what had been computed there before."""

    def forward(s: Function, x: Tensor, y: Tensor) -> Any:
        h = x.flip(-1) * 2
        kept = torch.softmax(h, 0).detach()
        kept.copy_(y)
        return kept, h.bfloat16()

    model, replacer, made = Function(forward), Everywhere((), fallback, finder=finder()), []
    for call in (model, compile_with_kernels(model, replacer)):
        x, y = (torch.linspace(-1, 1, 16).view(2, 8).requires_grad_() for _ in "xy")
        kept, _ = call(x, y)
        with torch.no_grad():
            kept.mul_(2)
        made.append(torch.autograd.grad(kept.sum(), [x, y], allow_unused=True))
    assert replacer.replaced and made[0][0] is made[1][0] is None
    torch.testing.assert_close(made[0][1], made[1][1])


@pytest.mark.parametrize("fallback", COMPILERS)
def test_what_one_input_was_computed_by_from_another_is_no_part_of_the_graph(fallback: str) -> None:
    """A view of it is returned, whose gradient goes on by way of what the caller did."""
    model = applied(Function(lambda s, x, h: (h.view(-1), s.a(x), s.norm(x))), fallback)
    x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
    made, expected = (torch.autograd.grad(call(x, x.tanh())[0].sum(), x)[0] for call in (model, model.forward))
    torch.testing.assert_close(made, expected)


def test_gradients_of_one_image_in_channels_last() -> None:
    """By view_as() it would have other strides than a compiler takes it to have."""

    def forward(s: Function, x: Tensor) -> Tensor:
        y = nn.functional.conv2d(x, torch.ones(8, 4, 3, 3), padding=1)
        return nn.functional.silu(nn.functional.group_norm(y, 2, s.norm.weight, s.norm.bias))

    replacer, made = Everywhere((), "aot_eager", finder=finder()), []
    for model in (compile_with_kernels(Function(forward), replacer), Function(forward)):
        x = torch.linspace(-1, 1, 144).view(1, 4, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = model(x)
        made.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert replacer.replaced and made[0][0].stride() == made[1][0].stride()
    torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_modules_with_dropout_at_other_lengths(kind: type, fallback: str) -> None:
    """They are what they are without a compiler, and take the random numbers that they take there."""
    torch.manual_seed(0)
    model, made = kind(8, 8, 2, dropout=0.5), []
    for one in (apply(copy.deepcopy(model), [], fallback), model):
        torch.manual_seed(0)
        results = [one(torch.ones(length, 2, 8))[0] for length in (2, 3, 4)]
        made.append([*results, torch.rand(3), *torch.autograd.grad(results[2].sum(), [*one.parameters()])])
    torch.testing.assert_close(made[0], made[1])


@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("preserved", [True, False])
def test_a_checkpoint_that_takes_other_random_numbers_again(preserved: bool, fallback: str) -> None:
    """Eager mode then has gradients of what it computes once more; a compiler has those of what it computed."""

    def forward(s: Function, x: Tensor) -> Tensor:
        def inner(t: Tensor) -> Tensor:
            return nn.functional.dropout(s.a(t), 0.5).tanh()

        return checkpoint(inner, x, use_reentrant=False, preserve_rng_state=preserved)

    made = []
    for model in (applied(Function(forward), fallback), Function(forward)):
        with torch._inductor.config.patch(fallback_random=True):
            torch.manual_seed(0)
            x = torch.ones(2, 8, requires_grad=True)
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
            made.append((gradient, torch.rand(3)))
    torch.testing.assert_close(made[0], made[1])


def a_scale_that_follows(s: Function, x: Tensor, scale: Tensor) -> Tensor:
    with torch.no_grad():
        scale.mul_(0.5).add_(x.abs().amax(0))
    return s.a(x) / scale


def a_scale_before_it_is_written(s: Function, x: Tensor, scale: Tensor) -> Tensor:
    wide = scale * 2 + 1
    scale.add_(1)
    return s.norm(s.a(x) * wide)


def a_scale_that_is_returned(s: Function, x: Tensor, scale: Tensor) -> Any:
    return s.a(x) * (scale + 1), scale.mul_(0.5)


SCALES = [a_scale_that_follows, a_scale_before_it_is_written, a_scale_that_is_returned]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("function", SCALES)
def test_gradients_of_what_depends_on_an_input_that_is_written_to(
    function: Callable[..., Any], kernels: bool, fallback: str
) -> None:
    """A compiler's backward pass computes the scale again, from what was written, by a second call as well."""
    made = []
    for compiled in (True, False):
        model, scale = Function(function), torch.ones(8)
        call = model
        if compiled:
            replacer = Everywhere((), fallback, finder=finder())
            call = compile_with_kernels(model, replacer) if kernels else apply(model, [], fallback)
        for rows in (2, 2, 3, 4):
            x = torch.linspace(-1, 1, 8 * rows).view(rows, 8).requires_grad_()
            calls = 1 if function is a_scale_that_follows else 2  # eager mode keeps it, and raises
            results = [call(x * i, scale) for i in range(1, calls + 1)]
            losses = [(r[0] if isinstance(r, tuple) else r).square().sum() for r in results]
            made.append([*losses, scale.clone(), *torch.autograd.grad(sum(losses), [x, *model.a.parameters()])])
            if function is a_scale_that_is_returned:
                assert all(r[1] is scale for r in results)
    torch.testing.assert_close(made[:4], made[4:], atol=1e-3, rtol=1e-4)


def writes_to_a_parameter(s: Function, x: Tensor) -> Tensor:
    s.a.weight.mul_(0.5)
    return s.norm(s.a(x))


def writes_to_what_it_is_given(s: Function, x: Tensor) -> Tensor:
    torch.mv(s.a.weight, x[0], out=s.a.bias)
    return s.norm(s.a(x))


@pytest.mark.parametrize("fallback", [None, *COMPILERS])
@pytest.mark.parametrize("function", [writes_to_a_parameter, writes_to_what_it_is_given])
def test_what_pytorch_refuses_with_gradients_alone(function: Callable[..., Any], fallback: str | None) -> None:
    """As spectral_norm() writes, in training: without them it is done, with kernels as well."""
    made = []
    for compiled in (True, False):
        model, replacer = Function(function), Everywhere((), fallback, finder=finder())
        call = compile_with_kernels(model, replacer) if compiled else model
        with torch.no_grad():
            made += [[call(torch.ones(2, 8)) for _ in range(2)], [*map(Tensor.clone, model.parameters())]]
        assert not compiled or replacer.replaced and not replacer.left
    torch.testing.assert_close(made[:2], made[2:])


def spectrum_and_back(s: Function, x: Tensor) -> Tensor:
    window = torch.hann_window(8)
    spectrum = torch.stft(s.norm(s.a(x)).flatten(1), 8, 4, window=window, return_complex=True)
    return torch.istft(spectrum * 2, 8, 4, window=window)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("fallback", [None, *COMPILERS])
def test_an_operator_that_asks_what_is_in_a_tensor(fallback: str | None, gradients: bool) -> None:
    """istft() does of its window: to a tracer it is another, which does not."""
    model, replacer, x = Function(spectrum_and_back), Everywhere((), fallback, finder=finder()), torch.randn(2, 4, 8)
    compiled = compile_with_kernels(model, replacer)
    with torch.set_grad_enabled(gradients):
        made = [
            (y, torch.autograd.grad(y.square().sum(), model.a.weight) if gradients else ()) for y in (compiled(x), model(x))
        ]
    torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)
    assert replacer.replaced and not replacer.left


@pytest.mark.parametrize("fallback", COMPILERS)
@pytest.mark.parametrize(
    "window", [lambda y: y.unfold(0, 3, 1), lambda y: y.as_strided((3, 4), (4, 2)), lambda y: y[:1].expand(3, 8)]
)
def test_gradients_of_windows_that_overlap(window: Callable[[Tensor], Tensor], fallback: str) -> None:
    """What they come of has the gradients of all of them, and not of one each."""
    model, x = Function(lambda s, x: window(s.norm(s.a(x)))), torch.randn(6, 8)
    ours = applied(model, fallback)
    for rows in (6, 5, 4):
        for call in (ours, model):
            y = call(x[:rows])
            (y * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.slow
def test_a_clone_of_an_input_that_is_written_to_behind_the_graph() -> None:
    """As a queue of keys is: Inductor kept the queue itself for the backward pass, which then refused to run."""

    def forward(s: Function, x: Tensor) -> Tensor:
        loss = (s.a(x) @ s.queue.clone()).square().mean()
        torch._dynamo.graph_break()
        s.queue[:, :2] = x.detach().T
        return loss

    model = Function(forward)
    model.register_buffer("queue", torch.randn(8, 4))
    ours, x = applied(model, "inductor"), torch.randn(2, 8)
    made = [[*torch.autograd.grad(one(x), [*one.a.parameters()]), one.queue] for one in (ours, model)]
    torch.testing.assert_close(made[0], made[1])
