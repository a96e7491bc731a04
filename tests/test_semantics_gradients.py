"""With kernels in it, a model has the same gradients: in training, checkpoints, transforms, and after .data is set."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from semantic_models import Function, everywhere, gradients
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from autokernel.integration.apply import apply, compile_with_kernels, explain
from autokernel.model.placement import RejectReason
from benchmarks.random_programs import Everywhere, finder

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def a_weight_is_first_used_without(s: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        guess = s.b(F.gelu(s.a(x)))
    return s.b(F.gelu(s.a(x + guess))).square().mean()


def written_after_a_site(s: Function, x: Tensor) -> Tensor:
    h = s.a(x)
    total = h.sum(-1)
    h.mul_(2.0)
    return (h * total[..., None]).sum()


def the_largest_of_equals(s: Function, x: Tensor) -> Tensor:
    return (s.a(x).relu().max(1).values * torch.arange(8)).sum()


def detached_views(s: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        t = s.a(x).reshape(2, 8, 8)
    return (t.softmax(-1) * s.b(x)).sum()


def saved_values_are_written_by_way_of_data(s: Function, x: Tensor) -> Tensor:
    """Which autograd takes no notice of."""
    y = s.a(x).exp()
    y.data.mul_(0.5)
    return (s.norm(y) * x).sum()


def a_view_without_gradients_whose_base_is_written(s: Function, x: Tensor) -> Tensor:
    h = s.a(x)
    with torch.no_grad():
        view = h.expand(h.shape)
    y = s.norm(view)
    h.contiguous().add_(1.0)
    return (y * s.norm(x)).sum()


GRADIENTS = [
    a_weight_is_first_used_without,
    written_after_a_site,
    the_largest_of_equals,
    detached_views,
    saved_values_are_written_by_way_of_data,
    a_view_without_gradients_whose_base_is_written,
]


@pytest.mark.parametrize("function", GRADIENTS)
def test_gradients_are_the_same(function: Callable[..., Tensor]) -> None:
    model, x, replacer = Function(function), torch.randn(2, 8, 8), everywhere()
    ours, theirs = gradients(model, compile_with_kernels(model, replacer), x), gradients(model, model, x)
    assert replacer.replaced
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-4)


def test_a_layer_norm_under_autocast_on_a_cpu() -> None:
    """Its input is bfloat16 and its weights are float32: the kernel computes in float32, and so does PyTorch."""

    class Model(Function):
        def __init__(self, function: Callable[..., Any]):
            super().__init__(function)
            self.layer_norm = nn.LayerNorm(8)

    model, replacer = Model(lambda s, x: s.layer_norm(s.a(x))), everywhere()
    nn.init.normal_(model.layer_norm.weight), nn.init.normal_(model.layer_norm.bias)
    x, optimised = torch.randn(2, 8, 8), compile_with_kernels(model, replacer)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = optimised(x), model(x)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
        parameters = list(model.parameters())
        for a, b in zip(
            *(torch.autograd.grad(y.float().square().sum(), parameters, allow_unused=True) for y in (ours, theirs))
        ):
            assert a is b is None or a.dtype == b.dtype
            assert a is b is None or torch.allclose(a, b, atol=5e-2, rtol=5e-2)
    (case,) = (r.case for r in replacer.replaced if r.target == "layernorm")
    assert "float32" in case


@pytest.mark.slow
def test_a_site_that_stays_for_its_gradients_is_said() -> None:
    """A kernel has no part that gradients do not flow through."""

    def norm_of_a_constant(s: Function, x: Tensor) -> Tensor:
        h = s.a(x)
        with torch.no_grad():
            mean = h.pow(2).mean(-1, keepdim=True)
        return (s.norm.weight * (h * torch.rsqrt(mean + s.norm.eps))).sum()

    model, x, replacer = Function(norm_of_a_constant), torch.randn(2, 8, 8), everywhere()
    ours, theirs = gradients(model, compile_with_kernels(model, replacer), x), gradients(model, model, x)
    assert all(a is b is None or torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    assert "rmsnorm" not in {r.target for r in replacer.replaced}
    assert any(why.startswith("rmsnorm x=2x8x8") and RejectReason.MODE.value in why for why in replacer.left)
    torch._dynamo.reset()
    with torch.no_grad():
        compile_with_kernels(model, replacer)(x)
    assert "rmsnorm" in {r.target for r in replacer.replaced}


@pytest.mark.parametrize("is_kept_by_a_hook", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_result_has_the_gradient_of_what_is_computed_of_it(is_kept_by_a_hook: bool) -> None:
    """As Grad-CAM and penalties of features ask for: by retain_grad() and autograd.grad(), of what the model returns or a
    hook keeps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.norm(x)
            return h.to(x.dtype) if not is_kept_by_a_hook else x, F.gelu(h) * 2  # h itself

    model, x, kept, replacer = Net(), torch.randn(4, 16), [], everywhere()
    if is_kept_by_a_hook:
        model.norm.register_forward_hook(lambda module, given, result: kept.append(result))

    def observed(call: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        h, y = call(x)
        h = kept.pop() if is_kept_by_a_hook else h
        h.retain_grad()
        (direct,) = torch.autograd.grad(y.pow(2).sum(), h, retain_graph=True)
        y.pow(2).sum().backward()
        return [y.detach(), direct, h.grad, model.norm.weight.grad]

    ours, theirs = observed(compile_with_kernels(model, replacer)), observed(model)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    assert any("layer_norm_gelu" in one.target for one in replacer.replaced) and not replacer.left


def test_a_site_around_what_has_no_gradients_has_its_kernel() -> None:
    """As a residual around a layer whose spectral norm, or rotary embedding, computes something without gradients."""

    def around(s: Function, x: Tensor) -> Tensor:
        h = s.a(x)
        squares = h.pow(2)
        with torch.no_grad():
            scale = s.b.weight.sin().amax()
        return (s.norm.weight * (h * torch.rsqrt(squares.mean(-1, keepdim=True) + s.norm.eps))).sum() * scale

    model, x, replacer = Function(around), torch.randn(2, 8, 8), everywhere()
    ours, theirs = gradients(model, compile_with_kernels(model, replacer), x), gradients(model, model, x)
    assert all(a is b is None or torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    assert "rmsnorm" in {r.target for r in replacer.replaced}
    assert not any(why.startswith("rmsnorm") for why in replacer.left)


class SharedHeads(nn.Module):
    """Attention of four heads with two of keys and values, which are returned, as a cache is, and may be `frozen`."""

    def __init__(self, frozen: bool):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.k.requires_grad_(not frozen), self.v.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        every = (t[:, :, None].expand(2, 2, 2, 8, 8).reshape(2, 4, 8, 8) for t in (k, v))
        return F.scaled_dot_product_attention(q, *every, is_causal=True), k, v


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fallback", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_results_that_are_changed_before_the_backward_pass(fallback: str | None, frozen: bool) -> None:
    """PyTorch keeps the repeated heads for it, which nobody else has; a kernel's gradients want those that are returned."""
    model, x = SharedHeads(frozen), torch.randn(2, 8, 32)
    replacer = Everywhere((), fallback, finder=finder())
    made = []
    for call in (model, compile_with_kernels(model, replacer)):
        y, *cache = call(x)
        with torch.no_grad():
            for t in cache:
                t.mul_(2.0)
        made.append(torch.autograd.grad(y.square().sum(), [p for p in model.parameters() if p.requires_grad]))
    for theirs, ours in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert "flash_attention" in {r.target for r in replacer.replaced}


def test_a_gradient_of_a_gradient_goes_through_a_copy() -> None:
    """softmax keeps its result, which PyTorch counts the writes to, and a kernel's gradients want its input, as it was."""

    def written_after_a_softmax(s: Function, x: Tensor) -> Tensor:
        h = s.a(x)
        y = h.softmax(-1)
        h.add_(1.0)
        return (y * h).square().sum()

    model, x, replacer = Function(written_after_a_softmax), torch.randn(2, 8, 8), everywhere()
    weight, made = model.a.weight, []
    for call in (model, compile_with_kernels(model, replacer)):
        (once,) = torch.autograd.grad(call(x), [weight], create_graph=True)
        made.append([once, *torch.autograd.grad(once.square().sum(), [weight])])
    for theirs, ours in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    assert "softmax" in {r.target for r in replacer.replaced}


def of_another_dtype(model: nn.Module) -> None:
    model.half()


def of_other_values(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [of_another_dtype, of_other_values])
def test_parameters_whose_data_is_other_data_by_the_backward_pass(change: Callable[[nn.Module], None]) -> None:
    """linear() keeps a view of its weight, which goes on to have what it had."""
    results = []
    for with_kernels in (False, True):
        model, replacer = Function(lambda s, x: s.b(F.gelu(s.a(x)))), everywhere()
        torch.manual_seed(1)
        x = torch.randn(2, 8, requires_grad=True)
        y = (compile_with_kernels(model, replacer) if with_kernels else model)(x)
        change(model)
        y.square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)
    assert replacer.replaced


@pytest.mark.parametrize("kind", ["a norm", "a product by numbers", "a product of matrices"])
def test_what_autograd_keeps_itself_has_its_other_data_by_the_backward_pass(kind: str) -> None:
    """x * w keeps both, which have the data that is set by then; what was computed of them is of what they had."""
    functions = {
        "a norm": lambda s, x: s.norm(x),
        "a product by numbers": lambda s, x: (x * s.norm.weight).softmax(-1),
        "a product of matrices": lambda s, x: (x @ s.a.weight).softmax(-1),
    }
    results = []
    for with_kernels in (False, True):
        model, replacer = Function(functions[kind]), everywhere()
        torch.manual_seed(1)
        x = torch.randn(2, 8, requires_grad=True)
        y = (compile_with_kernels(model, replacer) if with_kernels else model)(x)
        for leaf in (x, *model.parameters()):
            leaf.data = leaf.data * 2
        y.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results)
    assert replacer.replaced


def test_autocast_around_a_training_step() -> None:
    """Kernels in bfloat16, weights and their gradients in float32; the same model without autocast is another graph."""

    class Model(Function):
        pass

    model, x, replacer = Model(lambda s, x: s.b(F.gelu(s.a(x)))), torch.randn(2, 8, 8), everywhere()
    optimised = compile_with_kernels(model, replacer)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours, theirs = optimised(x), model(x)
        assert ours.dtype == theirs.dtype == (torch.bfloat16 if enabled else torch.float32)
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        (a,), (b,) = (torch.autograd.grad(y.float().sum(), model.a.weight) for y in (ours, theirs))
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
    assert sum("bfloat16" in r.case for r in replacer.replaced) == 2


def cells(s: Function, x: Tensor) -> Any:
    h = torch.zeros_like(x[:, 0])
    for row in s.norm(s.a(x)).unbind(1):
        h = torch.gru_cell(row, h, s.w, s.w, s.w[:, 0], s.w[:, 1])
    return s.b(h)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "function",
    [
        cells,
        lambda s, x: torch.linalg.matrix_power(s.norm(s.a(x)), 3),
        lambda s, x: torch.linalg.matmul(s.a(x), s.norm(x)),
        lambda s, x: torch.einsum("bik,bjk,kl->bil", s.a(x), s.norm(x), s.a.weight),
        lambda s, x: torch.einsum("bik,bik->bi", s.a(x), s.norm(x)),
    ],
)
def test_autocast_casts_inside_of_operators(function: Callable[..., Any]) -> None:
    """Those that PyTorch makes of products are one node of a graph, and not among those that autocast knows."""
    model, x, replacer = Function(function), torch.randn(2, 8, 8), everywhere()
    model.w = nn.Parameter(torch.randn(24, 8) / 3)
    compiled = compile_with_kernels(model, replacer)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(x), model(x)
    assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
    assert replacer.replaced and not any("graph" in why for why in replacer.left)
    for a, b in zip(*([y, *gradients_of(y, model)] for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2 * b.abs().max().item(), rtol=2e-2)


def gradients_of(y: Tensor, model: nn.Module) -> Sequence[Tensor]:
    return torch.autograd.grad(y.float().square().sum(), [model.a.weight, model.norm.weight])


def tangent_of(model: nn.Module, x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x + 1))).tangent


@pytest.mark.parametrize("has_gradients", [False, True])
def test_tangents_of_an_applied_model(has_gradients: bool) -> None:
    """What is compiled knows nothing of them: AOTAutograd drops them without gradients, and raises with."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)
    applied = apply(copy.deepcopy(model), [], "aot_eager")
    with torch.set_grad_enabled(has_gradients):
        torch.testing.assert_close(tangent_of(applied, x), tangent_of(model, x))
    torch.testing.assert_close(applied(x), model(x))
    assert explain(applied).graphs == 1 and len(explain(applied).left) == 1


@pytest.mark.parametrize("has_gradients", [False, True])
def test_tangents_inside_of_a_model(has_gradients: bool) -> None:
    def forward(s: Function, x: Tensor) -> Any:
        y = s.norm(s.a(x))
        torch._dynamo.graph_break()
        return y, tangent_of(s.inner, x)

    model, replacer = Function(forward), everywhere()
    model.inner = nn.Sequential(model.a, model.norm)
    compiled, x = compile_with_kernels(model, replacer), torch.randn(2, 8)
    with torch.set_grad_enabled(has_gradients):
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x), model(x))
    assert replacer.replaced and not any("without kernels from now on" in why for why in replacer.left)


def test_a_norm_in_a_checkpoint_keeps_its_statistics() -> None:
    """What reads them before and what does after are not the same."""

    def forward(s: Function, x: Tensor) -> Any:
        y, before = s.norm(s.a(x)), s.mean * 2 + 1
        z = checkpoint(lambda t: F.batch_norm(s.b(t), s.mean, s.var, training=True), y, use_reentrant=False)
        return z, before, s.mean * 2 + 1

    made = []
    for has_kernels in (True, False):
        model, replacer = Function(forward), everywhere()
        model.register_buffer("mean", torch.zeros(8)), model.register_buffer("var", torch.ones(8))
        call = compile_with_kernels(model, replacer) if has_kernels else model
        results = call(torch.linspace(-1, 1, 64).view(8, 8))
        made.append([*results, *torch.autograd.grad(results[0].square().sum(), model.a.weight), model.mean, model.var])
        assert replacer.replaced or not has_kernels
    torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)


class Checkpointed(Function):
    def __init__(self, **options: Any):
        super().__init__(lambda s, x: s.norm(x + checkpoint(s.part, x, **options)))
        self.part = nn.Sequential(self.a, nn.Dropout(0.5), nn.BatchNorm1d(8), nn.GELU(), self.b)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fallback", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_a_checkpoint_computes_again_what_it_had_computed(options: dict[str, bool], fallback: str | None) -> None:
    """With the same random numbers: PyTorch leaves that to a compiler, which is not always there."""
    model, made = Checkpointed(**options), []
    replacer = Everywhere((), fallback, finder=finder())
    for call in (model, compile_with_kernels(model, replacer)):
        torch.manual_seed(0)
        x = torch.randn(2, 8, requires_grad=True)
        model.zero_grad()
        y = call(x)
        y.square().sum().backward()
        buffers = [] if fallback == "aot_eager" else model.part.buffers()  # to a compiler they are written once
        made.append(
            [y, x.grad, *(p.grad.clone() for p in model.part.parameters()), torch.rand(1), *map(torch.clone, buffers)]
        )
        model.part[2].reset_running_stats()
    torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)
    assert replacer.replaced


def test_what_a_checkpoint_is_given_may_not_be_written_before_the_backward_pass() -> None:
    model = Function(lambda s, x, y: s.norm(checkpoint(lambda x, y: s.a(x) * y, x, y, use_reentrant=False)))
    for call in (model, compile_with_kernels(model, everywhere())):
        x, y = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
        z = call(x, y)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_what_nothing_comes_of_has_no_gradient(fallback: str | None) -> None:
    """Rather than one of zeros, by which an optimiser would let weights decay."""

    def where(s: Function, x: Tensor, y: Tensor) -> Tensor:
        constant = x.detach()
        return torch.where(constant > 0, constant, y)

    model, replacer = Function(where), Everywhere((), fallback, finder=finder())
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in "xy")
    of_x, of_y = torch.autograd.grad(compile_with_kernels(model, replacer)(x, y).sum(), [x, y], allow_unused=True)
    assert replacer.replaced and of_x is None
    torch.testing.assert_close(of_y, (x <= 0).float())


@pytest.mark.slow
def test_a_model_that_computes_gradients_in_its_forward_pass() -> None:
    """The backward pass of our kernels is not taken for the model's own code, and compiled."""

    def force(s: Function, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = s.b(s.norm(s.a(x)).tanh()).square().sum()
            return -torch.autograd.grad(energy, x, create_graph=s.training)[0]

    model, replacer, x = Function(force), everywhere(), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer)
    torch._dynamo.utils.clear_compilation_metrics()
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), [*model.parameters()][:-2]) for f in (compiled, model))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    names = {compilation.co_filename for compilation in torch._dynamo.utils.get_compilation_metrics()}
    assert replacer.replaced and not any(name.endswith("integration/backend.py") for name in names)


@pytest.mark.slow_after(1)
@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"),
    reason="this release of Dynamo holds on to them",
)
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("gradients", [False, True])
def test_parameters_may_be_swapped(gradients: bool, fallback: str | None) -> None:
    """As module.to() does it for those that are subclasses, or if it is told to."""
    model = Function(lambda s, x: s.b(s.norm(s.a(x)).relu())).requires_grad_(gradients)
    replacer = Everywhere((), fallback, finder=finder())
    compiled = compile_with_kernels(model, replacer)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)
            for length in (2, 3):
                x = torch.randn(length, 8, dtype=dtype)
                torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert replacer.replaced and not replacer.left


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_attention_whose_mask_wants_a_gradient(fallback: str | None) -> None:
    """Another operator computes it, in other strides, by which what follows is proven."""

    def attention(s: Function, q: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        mixed = F.scaled_dot_product_attention(q, q + 1, q + 2, attn_mask=mask * 2)
        heads = mixed.transpose(1, 2).reshape(2, 16, 32)  # a copy of what the other operator returns
        again = F.scaled_dot_product_attention(s.a(mixed), q * 1, s.b(q), attn_mask=mask * 1)
        return mixed, s.norm(mixed), heads, again

    model, replacer = Function(attention).requires_grad_(False), Everywhere((), fallback, finder=finder())
    compiled, q = compile_with_kernels(model, replacer), torch.randn(2, 16, 4, 8).transpose(1, 2)
    for wants in (False, True):
        mask = torch.randn(16, 16, requires_grad=wants)
        results, expected = compiled(q, mask), model(q, mask)
        torch.testing.assert_close(results, expected)
        assert [t.stride() for t in results] == [t.stride() for t in expected]
        if wants:
            ours, theirs = (torch.autograd.grad(sum(y.square().sum() for y in r), mask) for r in (results, expected))
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        found = [r.target for r in replacer.replaced if r.graph == wants]
        assert {"flash_attention", "fused_linear", "rmsnorm"} <= set(found) and found.count("flash_attention") == 2
    assert not replacer.left


def an_mlp(s: Function, x: Tensor) -> Tensor:
    return x + s.b(F.gelu(s.a(s.norm(x))))


def an_attention_block(s: Function, x: Tensor) -> Tensor:
    q, k = (layer(s.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (s.a, s.b))
    return x + F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("function", [an_mlp, an_attention_block])
def test_gradients_in_16_bit_are_as_good_as_the_models_own(function: Callable[..., Tensor]) -> None:
    """By their errors against the same model in float64."""
    exact = Function(function).double()
    model = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(model.state_dict())  # of the same, rounded numbers
    x, replacer = torch.randn(8, 16, 8).bfloat16(), everywhere()

    def of(module: nn.Module, call: Callable[..., Tensor], given: Tensor) -> list[Tensor]:
        given = given.clone().requires_grad_()
        weights = torch.linspace(-1, 1, given.numel(), dtype=given.dtype).view(given.shape)
        return list(torch.autograd.grad((call(given) * weights).sum(), [given, *module.parameters()]))

    ours, theirs, right = (
        of(model, compile_with_kernels(model, replacer), x),
        of(model, model, x),
        of(exact, exact, x.double()),
    )
    assert replacer.replaced
    largest = max(e.norm() for e in right)  # of a bias of keys, say, the gradient is nothing but rounding
    for a, b, e in zip(ours, theirs, right, strict=True):
        own = (b - e).norm() + torch.finfo(torch.bfloat16).eps * e.norm()
        assert a.dtype == torch.bfloat16 and (a - e).norm() <= 1.5 * own + 1e-3 * largest


class Experts(nn.Module):
    """Rows in the order of their experts, each times its expert's matrix, by the operator that transformers has for it: it
    keeps the groups' ends for the backward pass without telling autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        experts, order = torch.sort(chosen)
        counts = torch.histc(experts.float(), bins=3, min=0, max=2)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        return torch.ops.transformers.grouped_mm_fallback(x[order], self.weight.mT, offs)


def test_gradients_of_experts_in_groups() -> None:
    pytest.importorskip("transformers.integrations.moe")
    model, x, chosen = Experts(), torch.randn(20, 16, requires_grad=True), torch.randint(3, (20,))

    def of(called: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(called(x, chosen).square().sum(), [x, model.weight])

    replacer = everywhere()
    torch.testing.assert_close(of(compile_with_kernels(model, replacer)), of(model), rtol=1e-5, atol=1e-4)
    assert [r.target for r in replacer.replaced] == ["grouped_matmul"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch is built without it")
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_gradients_inside_of_distributed_data_parallel(fallback: str | None, tmp_path) -> None:
    """Of several buckets, of which Dynamo would make a graph each."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(600, 600), nn.LayerNorm(600)) for _ in range(3)))
    replacer, x = Everywhere((), fallback, finder=finder()), torch.randn(4, 600)
    compiled = compile_with_kernels(model, replacer)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inside = nn.parallel.DistributedDataParallel(Calling(model, compiled), bucket_cap_mb=1)
        expected = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
        inside(x).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([p.grad for p in model.parameters()], [*expected], atol=1e-4, rtol=1e-4)
    assert replacer.replaced


class Calling(nn.Module):
    """`model`, by way of `call`."""

    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)
