"""With kernels in it, a model is the same to whoever uses it: values, dtypes, strides, aliasing, gradients, autocast."""

import contextlib
import copy
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autokernel.integration.apply import apply, compile_with_kernels, explain
from autokernel.model.capture import as_applied
from autokernel.model.match import RejectReason, SiteFinder
from autokernel.model.settings import Settings
from benchmarks.random_programs import Everywhere, finder
from models.llama import RMSNorm


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def everywhere() -> Everywhere:
    return Everywhere((), finder=finder())


class Function(nn.Module):
    """`function` of the module, which has two linear layers and a norm, and of inputs."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), RMSNorm(8)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def contiguous_is_a_copy(s: Function, x: Tensor) -> Any:
    y = s.norm(x.transpose(1, 2))
    z = y.contiguous()
    z += 1.0
    return y, z


def reshape_is_a_copy(s: Function, x: Tensor) -> Any:
    y = s.norm(x.transpose(1, 2))
    z = y.reshape(2, -1)
    z.mul_(0.5)
    return y, z


def rotated(x: Tensor) -> Tensor:
    """Of [batch, seq, heads, dim]."""
    angles = torch.arange(x.shape[1] * 4.0).view(-1, 1, 4)
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def reshape_is_a_view(s: Function, x: Tensor) -> Any:
    q = rotated(x.unflatten(1, (4, 2)))
    q.reshape(2, 4, -1).mul_(0.125)
    return q * 1.0


def as_strided_reads_memory(s: Function, x: Tensor) -> Any:
    q = rotated(x.unflatten(1, (4, 2)))
    return q.as_strided((2, 3, 2, 2, 8), (q.stride(0), q.stride(1), *q.stride()[1:])) * 1.0


def a_copy_is_asked_for(s: Function, x: Tensor) -> Any:
    h = s.a(x)
    r = h.to(torch.float32, copy=True)
    torch._dynamo.graph_break()
    r += 1.0
    return s.b(h) + r


def a_mask_is_written_between_layers(s: Function, x: Tensor) -> Any:
    mask = torch.zeros(8, 8, dtype=torch.bool).triu(1)
    for layer in (s.a, s.b):
        q = layer(x)
        x = x + (q @ q.transpose(-2, -1)).masked_fill(mask, -torch.inf).softmax(-1) @ q
        mask[:, 1:4].fill_(True)
    return x


def autocast_inside(s: Function, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = s.b(F.gelu(s.a(x)))
        with torch.autocast("cpu", enabled=False):
            return y, s.a(y.float())


def vmapped(s: Function, x: Tensor) -> Any:
    return torch.vmap(lambda row: F.softmax(row, -1).sum(0))(s.a(x))


def norm_after_a_write(s: Function, x: Tensor) -> Any:
    h = x * 1.0
    h += F.rms_norm(h, (8,), s.norm.weight)
    return h


def written_by_way_of_data(s: Function, x: Tensor) -> Any:
    y = s.norm(s.a(x))
    z = s.norm(y)
    y.data.mul_(0.5)
    return z.data, s.b(y), y.data.softmax(-1)


def rounded_on_the_way(s: Function, x: Tensor) -> Any:
    """To fewer digits than what follows has; the second result is what was rounded off."""
    high = (x * 2).bfloat16().float()
    scores = torch.softmax(s.a(x), -1).half().float()
    return F.gelu(high + 1), (x * 2 - high) * 1e3, torch.softmax(x.bfloat16().float(), -1), scores, s.norm(x)


PROGRAMS = [
    rounded_on_the_way,
    contiguous_is_a_copy,
    reshape_is_a_copy,
    reshape_is_a_view,
    as_strided_reads_memory,
    a_copy_is_asked_for,
    a_mask_is_written_between_layers,
    autocast_inside,
    vmapped,
    norm_after_a_write,
    written_by_way_of_data,
]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("function", PROGRAMS)
def test_what_a_model_returns_is_the_same(function: Callable[..., Any]) -> None:
    model, x, replacer = Function(function).requires_grad_(False), torch.randn(2, 8, 8), everywhere()
    ours, theirs = compile_with_kernels(model, replacer)(x.clone()), model(x.clone())
    assert replacer.replaced
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (ours, theirs)), strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        torch.testing.assert_close(a, b, atol=2e-2 if function is autocast_inside else 1e-4, rtol=1e-4)


def an_idle_slice_and_a_cast_of_it(s: Function, x: Tensor) -> Any:
    y = s.norm(x)
    return y[:, :8].float(), y


def an_idle_view_that_is_written_to(s: Function, x: Tensor) -> Any:
    y = x.expand(x.shape)
    y.add_(s.norm(x))
    return y, s.norm(y)


def a_cast_that_returns_what_it_is_given(s: Function, x: Tensor) -> Any:
    y = s.norm(x)
    return y, y.type_as(x), y.view(y.shape), x.float()


OBJECTS = [an_idle_slice_and_a_cast_of_it, an_idle_view_that_is_written_to, a_cast_that_returns_what_it_is_given]


@pytest.mark.parametrize("fallback", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", OBJECTS)
def test_results_are_the_same_objects(function: Callable[..., Any], fallback: str | None) -> None:
    """Two names of one tensor, or two tensors in one memory: what is resized or detached in place tells them apart."""

    def told_apart(call: Callable[..., Any]) -> list[tuple[bool, bool]]:
        given = torch.randn(2, 8, 8)
        tensors = [given, *call(given)]
        pairs = [(a, b) for i, a in enumerate(tensors) for b in tensors[:i]]
        return [(a is b, a.untyped_storage()._cdata == b.untyped_storage()._cdata) for a, b in pairs]

    model, replacer = Function(function).requires_grad_(False), Everywhere((), fallback, finder=finder())
    assert told_apart(compile_with_kernels(model, replacer)) == told_apart(model) and replacer.replaced


def gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(call(x), list(model.parameters()), allow_unused=True))


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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "aot_eager", "inductor"])
def test_a_result_is_no_view_of_what_its_kernel_made(fallback: str | None) -> None:
    """A maximum that keeps its dim is the kernel's, unsqueezed: replayed as a view, it was unsqueezed twice."""

    def forward(s: Function, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        k[..., 1:].zero_()
        most = x.amax(-1, keepdim=True)
        return most.movedim(1, -1), most

    model, replacer = Function(forward), Everywhere((), fallback, finder=finder())
    optimised = compile_with_kernels(model, replacer)
    for length in (6, 4, 5):
        x = torch.randn(2, 2, length, 8, requires_grad=True)
        for ours, theirs in zip(optimised(x, torch.randn(2, 2, length, 8)), model(x, torch.randn(2, 2, length, 8))):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            (a,), (b,) = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (ours, theirs))
            torch.testing.assert_close(a, b)
    assert {r.target for r in replacer.replaced} == {"reduce"}
    most = optimised(x, torch.randn(2, 2, length, 8))[1]
    most.mul_(2)  # as a view made while gradients are off, it could not be written to


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


def test_a_proof_is_of_the_constants_too() -> None:
    """Halves of cos that are equal in one model, and not in another with the same code."""

    def model(ratio: float) -> nn.Module:
        def forward(s: Function, x: Tensor, a: Tensor) -> Tensor:
            c = (a[..., None, :] * torch.tensor([1.0, ratio])[:, None]).flatten(-2)
            return x * c.cos() + torch.cat((-x[..., 4:], x[..., :4]), -1) * c.sin()

        return Function(forward)

    x, a = torch.randn(2, 2, 6, 8), torch.randn(1, 1, 6, 4)
    replacer = Everywhere((), finder=SiteFinder(min_elements=0))  # without regions, which take the angles along
    for ratio, expected in ((1.0, 1), (3.0, 1)):
        torch._dynamo.reset()
        torch.testing.assert_close(compile_with_kernels(model(ratio), replacer)(x, a), model(ratio)(x, a))
        assert len(replacer.replaced) == expected


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


def test_threads_that_call_a_model_at_once() -> None:
    """Each has sizes of its own, for which it is the first to ask."""
    model = Function(lambda s, x: s.b(s.norm(s.a(x)).relu()))
    replacer, barrier = everywhere(), threading.Barrier(3)
    compiled = compile_with_kernels(model, replacer)
    inputs = [torch.randn(rows, 8) for rows in range(2, 7)]

    def one(x: Tensor) -> Tensor:
        barrier.wait()
        with torch.no_grad():
            return compiled(x)

    with torch.no_grad():
        for x in inputs[3:]:  # from the second size on, there is code for all
            compiled(x)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(one, inputs[:3]))
    for x, result in zip(inputs, results):
        torch.testing.assert_close(result, model(x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), result)  # what is called while another thread traces runs as it is
    assert not replacer.left and len({r.graph for r in replacer.replaced}) == len(inputs)


def test_fake_tensors_leave_nothing_behind() -> None:
    """A call that asks for shapes alone, in sizes that are new: what is proven of them is proven of numbers."""
    model = Function(lambda s, x: s.b(s.norm(s.a(x)).relu())).requires_grad_(False)
    replacer = Everywhere((), finder=SiteFinder(min_elements=0))
    compiled = compile_with_kernels(model, replacer)
    compiled(torch.randn(2, 8)), compiled(torch.randn(3, 8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert compiled(torch.empty(4, 8)).shape == (4, 8)
    before, x = len(replacer.replaced), torch.randn(5, 8)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(replacer.replaced) > before
    assert not any("examined" in why for why in replacer.left)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [True, False])
def test_padded_positions_of_a_transformer_encoder(nested: bool) -> None:
    """By default PyTorch leaves them out and returns zeros, but not where its code is compiled: it is not, alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested))
    model.forward = lambda x, mask: model[1](model[0](x), src_key_padding_mask=mask)
    model.eval().requires_grad_(False)
    replacer, x = everywhere(), torch.randn(2, 5, 8)
    compiled = compile_with_kernels(model, replacer)
    torch.testing.assert_close(compiled(x, None), model(x, None))
    unpadded = len(replacer.replaced)
    hidden = torch.tensor([[False, False, False, True, True], [False] * 5])
    result = compiled(x, hidden)
    torch.testing.assert_close(result, model(x, hidden))
    assert bool((result[hidden] == 0).all()) == nested
    around = len(replacer.replaced) - unpadded
    assert (around == 1 < unpadded) if nested else (around > 1)
    assert any("padding mask" in why for why in replacer.left) == nested
    torch.testing.assert_close(compiled(x, None), model(x, None))
    assert not any("forward" in module.__dict__ for module in model)
    model.train()
    torch.testing.assert_close(compiled(x, hidden), model(x, hidden))
    model.eval()
    encoder = copy.deepcopy(model[1])
    expected = encoder(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(apply(encoder, [], "eager")(x, src_key_padding_mask=hidden), expected)


def test_a_copy_made_in_a_pass_has_an_encoder_of_its_own() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    x, hidden = torch.randn(2, 5, 8), torch.tensor([[False, False, False, True, True], [False] * 5])
    copies: list[nn.Module] = []
    encoder.layers[0].register_forward_hook(lambda *_: copies.append(copy.deepcopy(encoder)))
    apply(encoder, [], "eager")(x, src_key_padding_mask=hidden)
    copies[0].layers[0].norm2.bias.fill_(3.0)
    assert not torch.allclose(copies[0](x, src_key_padding_mask=hidden), encoder(x, src_key_padding_mask=hidden))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("sizes", [(1, 4, 8, 8), (2, 1, 8, 6), (2, 4, 1, 8), (1, 1, 8, 1), (2, 4, 8, 6)])
def test_einsums_have_their_own_strides(sizes: tuple[int, ...]) -> None:
    """Of what there is but one of, an einsum has other strides than the product that it is taken for."""
    batch, heads, rows, columns = sizes
    equations = ["bhqd,bhkd->bhqk", "bhqd,bhkd->bqkh", "bhqd,bhkd->hbqk", "bhqd,bhkd->bhkq", "bhqd,bhkd->kqbh"]

    def products(s: Function, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        return (torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), k), *(torch.einsum(e, q, k) for e in equations))

    model, replacer = Function(products), everywhere()
    q, k = torch.randn(batch, heads, rows, 16), torch.randn(batch, heads, columns, 16)
    with torch.no_grad():
        results, expected = compile_with_kernels(model, replacer)(q, k), model(q, k)
    torch.testing.assert_close(results, expected)
    assert [t.stride() for t in results] == [t.stride() for t in expected]
    assert any(r.target == "flash_attention" for r in replacer.replaced)


def test_a_model_is_called_while_another_is_traced() -> None:
    """What PyTorch notes of a trace is of all threads."""
    model = Function(lambda s, x: s.b(s.norm(s.a(x)).relu())).requires_grad_(False)
    compiled, x = compile_with_kernels(model, everywhere()), torch.randn(2, 8)
    traces, ends = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        traces.set()
        ends.wait(60)
        return x + 1

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):  # before it is compiled, and after
            traces.clear(), ends.clear()
            traced = pool.submit(make_fx(slow), x)
            traces.wait(60)
            try:
                torch.testing.assert_close(compiled(x), model(x))
            finally:
                ends.set()
            traced.result()
            torch.testing.assert_close(compiled(x), model(x))


def test_versions_of_a_model_in_another_thread() -> None:
    """Dynamo's settings are one thread's, and by default it would compile eight."""
    model = Function(lambda s, x, kind: s.norm(x) * len(kind)).requires_grad_(False)
    replacer, x, kinds = everywhere(), torch.randn(2, 8), ["k" * i for i in range(1, 12)]
    compiled = compile_with_kernels(model, replacer)
    with ThreadPoolExecutor(1) as pool:
        results = list(pool.map(lambda kind: compiled(x, kind), kinds))
    torch.testing.assert_close(results, [model(x, kind) for kind in kinds])
    assert replacer.graphs == len(kinds)


@pytest.mark.slow
def test_a_model_that_is_called_while_another_one_is_compiled() -> None:
    """It is called as ever: what Dynamo fails at runs as it is, though PyTorch says to all threads that it compiles."""
    compiling, called = threading.Event(), threading.Event()

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiling.set()
        called.wait(60)
        time.sleep(0.2)  # until the other call waits for Dynamo
        return module.forward

    def tried(x: Tensor) -> Tensor:
        try:
            return x.view(-1, 3)
        except RuntimeError:
            return x.view(-1, 4)

    model, x = Function(lambda s, x: s.norm(tried(x))), torch.randn(2, 8)
    model.norm = RMSNorm(4)
    compiled = compile_with_kernels(model, everywhere())
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(torch.compile(lambda x: x + 1, backend=backend), x)
        compiling.wait(60), called.set()
        torch.testing.assert_close(compiled(x), model(x))
        other.result()


def test_transforms_around_an_applied_model() -> None:
    """Dynamo does not go along, and would leave the model out from then on."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)
    applied, parameters = apply(copy.deepcopy(model), [], "eager"), dict(model.named_parameters())

    def transformed(m: nn.Module) -> list[Any]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(m, parameters, (x,)).square().sum()

        return [torch.vmap(m)(x), torch.func.jvp(m, (x,), (x + 1,)), torch.func.grad(loss)(parameters)]

    torch.testing.assert_close(transformed(applied), transformed(model))
    assert any("under vmap(), grad() or jvp()" in why for why in explain(applied).left)
    torch.testing.assert_close(applied(x), model(x))
    assert explain(applied).graphs == 1 and len(explain(applied).left) == 1


@pytest.mark.slow
def test_what_dynamo_fails_at_inside_of_a_transform_leaves_autograd_on() -> None:
    """What it leaves behind has dispatch keys of that place, and sets them whenever it is freed."""

    def forward(s: Function, x: Tensor) -> Any:
        return torch.vmap(lambda row: s.layer(row))(x), torch.func.jvp(s.layer, (x,), (x + 1,))

    model = Function(forward)
    model.layer = nn.LayerNorm(8)
    applied, keys = apply(copy.deepcopy(model), [], "eager"), torch._C._dispatch_tls_local_exclude_set()
    gc.disable()
    logging.disable()  # pytest keeps each record, with what it is about
    try:
        inputs = [torch.randn(rows, 8) for rows in (2, 2, 3)]
        results = [applied(x) for x in inputs]
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):  # whatever is found
            gc.collect()
            assert str(torch._C._dispatch_tls_local_exclude_set()) == str(keys)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    torch.testing.assert_close(results, [model(x) for x in inputs])
    assert any("is not captured" in why for why in explain(applied).left)


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


def hook_of_all_modules(model: nn.Module, seen: list[Any]) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda m, given, y: y + 1 if m is model[1] else None)


HOOKS = {  # what is added, to the model or to a part of it
    "of the model": lambda model, seen: model.register_forward_hook(lambda m, given, y: y * 2),
    "before a part": lambda model, seen: model[1].register_forward_pre_hook(lambda m, given: (given[0] + 1,)),
    "that looks": lambda model, seen: model[1].register_forward_hook(lambda m, given, y: seen.append(y.detach())),
    "of all modules": hook_of_all_modules,
    "of the backward pass": lambda model, seen: model[1].register_full_backward_hook(lambda m, to, of: (to[0] * 3,)),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("of_first_call", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_and_go(name: str, of_first_call: bool) -> None:
    """Dynamo takes no notice of them once it has compiled what they are about: here each call has those of its time."""

    def use(model: nn.Module) -> list[Any]:
        results, seen = [], []
        for there in (of_first_call, True, False, True, False):
            hook = HOOKS[name](model, seen) if there else None
            for x in (torch.ones(2, 8), torch.ones(3, 8)):
                model.zero_grad()
                y = model(x)
                y.square().sum().backward()
                results += [y.detach(), model[0].weight.grad.clone(), *seen]
                seen.clear()
            if hook:
                hook.remove()
        return results

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    applied = apply(copy.deepcopy(model), [], "eager")
    torch.testing.assert_close(use(applied), use(model))
    assert any("other hooks" in why for why in explain(applied).left)


@pytest.mark.parametrize("is_first", [False, True])
def test_hooks_of_all_modules_see_the_models_own_alone(is_first: bool) -> None:
    """Graphs, and what computes gradients at a site, are modules as well."""
    model, replacer, seen = Function(lambda s, x: s.b(F.gelu(s.norm(s.a(x))))), everywhere(), []
    compiled, x = compile_with_kernels(model, replacer), torch.randn(2, 8)
    if not is_first:
        compiled(x)
    hook = nn.modules.module.register_module_forward_hook(lambda m, given, y: seen.append(type(m).__name__))
    try:
        compiled(x).sum().backward()
    finally:
        hook.remove()
    assert not {"GraphModule", "_LazyGraphModule"} & {*seen} and (replacer.replaced or is_first), seen


class Norm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.times(super().forward(x), self.factor)

    @staticmethod
    def times(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @property
    def factor(self) -> float:
        return 2.0


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("forward", lambda s, x: RMSNorm.forward(s, x) * 5),
        ("times", staticmethod(lambda x, factor: x * factor * 5)),
        ("factor", property(lambda s: 5.0)),
    ],
)
def test_a_class_of_which_a_function_is_set_to_another(monkeypatch: pytest.MonkeyPatch, name: str, other: Any) -> None:
    """As programs do that put their own functions into the models of a library."""
    model, x = Function(lambda s, x: s.norm(s.a(x))), torch.randn(2, 8)
    model.norm = Norm(8)
    applied, why = apply(copy.deepcopy(model), [], "eager"), f"another Norm.{name}()"
    torch.testing.assert_close(applied(x), model(x))
    with monkeypatch.context() as patch:
        patch.setattr(Norm, name, other)
        torch.testing.assert_close(applied(x), model(x))
        assert any(why in left for left in explain(applied).left)
        again = apply(applied, [], "eager")
        torch.testing.assert_close(again(x), model(x))
        assert explain(again).graphs and not explain(again).left
    torch.testing.assert_close(again(x), model(x))


def test_functions_of_all_modules_are_no_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo puts some of its own there, at the first call of a process."""
    applied, x, before = (
        apply(Function(lambda s, x: s.norm(s.a(x))), [], "eager"),
        torch.randn(2, 8),
        nn.Module.__setstate__,
    )
    applied(x)
    monkeypatch.setattr(nn.Module, "__setstate__", lambda s, state: before(s, state))
    applied(x)
    assert explain(applied).graphs == 1 and not explain(applied).left


def test_a_class_that_keeps_what_a_call_makes() -> None:
    """What is new to it, and what is no function, is of no concern to what was compiled."""

    class Keeping(Function):
        calls = torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    applied, x = apply(Keeping(lambda s, x: s.norm(s.a(x))), [], "eager"), torch.randn(2, 8)
    for _ in range(3):
        applied(x)
        Keeping.calls, Keeping.made = torch.ones(2), lambda s: None
    assert explain(applied).graphs == 1 and not explain(applied).left


class Scaled(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {})) * (2 if function is torch.ops.aten.rsqrt.default else 1)


@pytest.mark.parametrize("mode", [Scaled, lambda: FlopCounterMode(display=False)])
def test_a_mode_that_sees_all_operators(mode: Callable[[], Any]) -> None:
    """Dynamo does not go along, and would leave the model out from then on."""
    model, x = Function(lambda s, x: s.norm(s.a(x))), torch.randn(2, 8)
    applied = apply(copy.deepcopy(model), [], "eager")
    for inside in (True, False, True):
        results = []
        for one in (applied, model):
            with mode() if inside else nullcontext() as seen:
                results.append([one(x), seen.get_total_flops() if isinstance(seen, FlopCounterMode) else 0])
        torch.testing.assert_close(*results)
    assert explain(applied).graphs == 1 and [("TorchDispatchMode" in why) for why in explain(applied).left] == [True]


def test_a_model_that_is_called_while_dynamo_is_disabled() -> None:
    model, x = Function(lambda s, x: s.norm(s.a(x))), torch.randn(2, 8)
    applied = apply(copy.deepcopy(model), [], "eager")
    with torch._dynamo.config.patch(disable=True):
        torch.testing.assert_close(applied(x), model(x))
    torch.testing.assert_close(applied(x), model(x))
    assert explain(applied).graphs == 1 and ["Dynamo disabled" in why for why in explain(applied).left] == [True]


def test_a_model_that_is_compiled_once_more_says_that_it_has_no_kernels() -> None:
    model, x = Function(lambda s, x: s.norm(s.a(x))), torch.randn(2, 8)
    applied = apply(copy.deepcopy(model), [], "eager")
    outer = torch.compile(applied, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(outer(x), model(x))
    assert ["another torch.compile()" in why for why in explain(applied).left] == [True]
    torch.testing.assert_close(applied(x), model(x))
    assert explain(applied).graphs == 1


def attention_as_it_is_told_to(s: Function, x: Tensor) -> Any:
    """Each way to compute it has results in strides of its own."""
    q = s.a(x).unflatten(-1, (2, 4)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, q, q)
    return y, s.norm(x), F.scaled_dot_product_attention(q, q, q, dropout_p=1e-9)


def memory_that_is_filled(s: Function, x: Tensor) -> Any:
    """With NaN, while all is to be the same each time."""
    torch.use_deterministic_algorithms(True)
    blank = torch.empty(8)
    torch.use_deterministic_algorithms(False)
    return s.norm(s.a(x)), blank


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("function", [attention_as_it_is_told_to, memory_that_is_filled])
def test_settings_of_pytorch_inside_of_a_model(function: Callable[..., Any], gradients: bool) -> None:
    """No operators: a trace of them does not show them."""
    model, replacer, x = Function(function).requires_grad_(gradients), everywhere(), torch.randn(2, 8, 8)
    for ours, theirs in zip(compile_with_kernels(model, replacer)(x), model(x), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert ours.stride() == theirs.stride()
    assert not torch.are_deterministic_algorithms_enabled()
    assert replacer.replaced or torch.__version__ < "2.10" and replacer.left  # whose graph does not end with its output


def norms_that_nobody_uses(s: Function, x: Tensor) -> Any:
    y = s.norm(s.a(x))
    before = s.mean * 2 + 1
    F.batch_norm(y, s.mean, s.var, training=True)
    F.instance_norm(y, s.mean, s.var)
    return y, before, s.mean * 2 + 1


def an_image_after_a_norm(s: Function, x: Tensor) -> Any:
    """In whose layout fake tensors may be wrong: the first call is made twice, were it not for what that writes."""
    image = F.batch_norm(x.transpose(1, 2)[..., None], s.mean, s.var, training=True)
    return s.norm(s.a(x)), F.silu(F.group_norm(image / 1.5, 2)).transpose(2, 3)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("function", [norms_that_nobody_uses, an_image_after_a_norm])
def test_norms_keep_their_statistics(function: Callable[..., Any], fallback: str | None) -> None:
    """To PyTorch's schemas they write nothing."""
    made = []
    for has_kernels in (True, False):
        model, replacer = Function(function), Everywhere((), fallback, finder=finder())
        model.register_buffer("mean", torch.zeros(8)), model.register_buffer("var", torch.ones(8))
        call = compile_with_kernels(model, replacer) if has_kernels else model
        torch.manual_seed(0)
        made += [[*(call(torch.randn(1, 8, 8)) for _ in range(2)), model.mean, model.var]]
        assert replacer.replaced or not has_kernels
    torch.testing.assert_close(*made)


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


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("count", [1, 2])
def test_images_are_in_the_layout_that_the_model_has_them_in(count: int, rate: float) -> None:
    """Of one image fake tensors have other strides, by which a group norm makes it channels_last, and not as it was."""

    def forward(s: Function, x: Tensor) -> Tensor:
        image = s.norm(s.a(x)).transpose(1, 2).reshape(-1, 8, 4, 4)
        y = F.silu(F.group_norm(image / 1.5, 2))
        return F.dropout(y, rate) if rate else y

    model, replacer, x = Function(forward).requires_grad_(False), everywhere(), torch.randn(count, 16, 8)
    compiled = compile_with_kernels(model, replacer)
    for _ in range(2):
        made = []
        for call in (compiled, model):
            torch.manual_seed(0)
            made.append((call(x), torch.rand(1)))
        (ours, ours_next), (theirs, theirs_next) = made
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert ours.stride() == theirs.stride() and torch.equal(ours_next, theirs_next)
    assert any("other strides" in why for why in replacer.left) == (count == 1)


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_an_error_leaves_the_settings_of_pytorch_as_they_were(fallback: str | None) -> None:
    """With-statements are nodes of a graph, of which an error leaves out the last ones."""

    def forward(s: Function, x: Tensor, i: Tensor) -> Tensor:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
            y = s.norm(x[i])
        return s.norm(s.a(x)) + y

    model, replacer = Function(forward), Everywhere((), fallback, finder=finder())
    compiled, x, i = compile_with_kernels(model, replacer), torch.randn(2, 8), torch.tensor([0, 1])
    torch.testing.assert_close(compiled(x, i), model(x, i), atol=1e-4, rtol=1e-4)
    before = vars(Settings())
    with pytest.raises(IndexError):
        compiled(x, i + 1)
    assert vars(Settings()) == before and replacer.replaced


def test_a_transform_leaves_the_settings_of_pytorch_as_they_were() -> None:
    """While it runs, nobody else may save tensors in a way of their own, as a look at the backward pass does."""

    def forward(s: Function, x: Tensor) -> Any:
        rows = torch.func.jacrev(lambda t: t.softmax(-1))(x[0])
        return s.norm(s.a(x)), rows

    model, replacer, before = Function(forward), everywhere(), vars(Settings())
    ours, theirs = compile_with_kernels(model, replacer)(torch.ones(2, 8)), model(torch.ones(2, 8))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert vars(Settings()) == before and not any("saved tensor hooks" in why for why in replacer.left)


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
def test_a_model_that_computes_something_else_while_it_is_traced() -> None:
    """As transformers does, which leaves out a mask by what is in it: compiled alone, its maker would make one."""

    def mask_of(s: Function, x: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling() or s.norm(x).isnan().any():
            return torch.zeros(3, 5)
        return None

    def forward(s: Function, x: Tensor) -> Tensor:
        mask, y = mask_of(s, x), s.norm(s.a(x))
        return s.b(y if mask is None else y + mask)

    model, replacer, x = Function(forward), everywhere(), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    assert [why for why in replacer.left if "forward() is not captured" in why or "Function() is not captured" in why]


def test_a_hook_that_the_model_adds_in_a_call_is_its_own() -> None:
    class Hooking(Function):
        def forward(self, x: Tensor) -> Tensor:
            if not self.a._forward_hooks:
                torch._dynamo.graph_break()
                self.a.register_forward_hook(lambda m, given, y: None)
            return super().forward(x)

    applied, x = apply(Hooking(lambda s, x: s.norm(s.a(x))), [], "eager"), torch.randn(2, 8)
    for _ in range(3):
        torch.testing.assert_close(applied(x), applied.norm(applied.a(x)))
    assert explain(applied).graphs and not any("other hooks" in why for why in explain(applied).left)


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


def test_a_tensor_that_is_quantised_stays_so() -> None:
    model = Function(lambda s, x: (q := torch.quantize_per_tensor(s.a(x), 0.1, 0, torch.qint8), s.b(q.dequantize())))
    model, replacer, x = model.requires_grad_(False), everywhere(), torch.randn(2, 8)
    (ours, result), (theirs, expected) = compile_with_kernels(model, replacer)(x), model(x)
    assert ours.dtype == theirs.dtype == torch.qint8 and torch.equal(ours.int_repr(), theirs.int_repr())
    torch.testing.assert_close(result, expected)
    assert any("quantize_per_tensor" in why for why in replacer.left)


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


def test_an_applied_model_is_traced_as_it_was_written() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).requires_grad_(False), torch.randn(2, 8)
    expected = model(x)
    apply(model, [], "eager")
    for traced in (torch.jit.trace(model, x), torch.fx.symbolic_trace(model), make_fx(model)(x)):
        torch.testing.assert_close(traced(x), expected)


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


def test_what_shares_memory_with_what_may_be_unknown_with_gradients() -> None:
    """Two inputs in one memory are not, in a pass with gradients that is looked at: then the graph stays as it is."""

    def attention(s: Function, q: Tensor, mask: Tensor, same: Tensor) -> Tensor:
        return s.norm(F.scaled_dot_product_attention(q, q + 1, q + 2, attn_mask=mask * 2)) + same.sum()

    model, replacer = Function(attention).requires_grad_(False), everywhere()
    compiled, q = compile_with_kernels(model, replacer), torch.randn(2, 16, 4, 8).transpose(1, 2)
    mask = torch.randn(16, 16, requires_grad=True) * 2
    torch.testing.assert_close(compiled(q, mask, mask[0]), model(q, mask, mask[0]))
    assert any("other strides with gradients" in why for why in replacer.left) and not replacer.replaced


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


def test_what_others_compile_meanwhile_has_pytorchs_own_rules() -> None:
    """Two threads, whose compilations overlap, and what is compiled without us when both have ended."""
    both, first_is_out, seen = threading.Barrier(2), threading.Event(), []

    def compiling(is_first: bool) -> None:
        with as_applied():
            both.wait()
            if not is_first:
                first_is_out.wait()
            seen.append(TorchRuntimeError("").frame_exec_strategy)
        first_is_out.set()

    threads = [threading.Thread(target=compiling, args=(is_first,)) for is_first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    error = TorchRuntimeError("")
    assert None not in seen and len(seen) == 2 and error.frame_exec_strategy is None
    error.frame_exec_strategy = seen[0]
    assert error.frame_exec_strategy is seen[0]


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


@pytest.mark.parametrize("inside", [False, True])
def test_jagged_tensors_are_said_once(inside: bool) -> None:
    def jagged(*rows: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    def forward(s: Function, *rows: Tensor) -> Tensor:
        return s.norm(s.a(jagged(*rows) if inside else rows[0])).values()

    model, replacer = Function(forward).requires_grad_(False), everywhere()
    compiled = compile_with_kernels(model, replacer)
    for length in (2, 4, 5):
        rows = torch.randn(length, 8), torch.randn(3, 8)
        given = rows if inside else [jagged(*rows)]
        torch.testing.assert_close(compiled(*given), model(*given))
    assert replacer.left == ["a graph with jagged tensors in it is left as it is"]


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("wrapped", ["input", "weight"])
def test_tensors_that_wrap_others_have_no_memory_for_a_kernel(wrapped: str, fallback: str | None) -> None:
    """Such as quantised weights and distributed tensors."""
    model, x = Function(lambda s, x: s.b(F.gelu(s.a(s.norm(x))))).requires_grad_(False), torch.randn(2, 8)
    replacer = Everywhere((), fallback, finder=finder())
    compiled = compile_with_kernels(model, replacer)
    torch.testing.assert_close(compiled(x), model(x))
    before = len(replacer.replaced)
    if wrapped == "weight":
        model.a.weight = nn.Parameter(TwoTensor(model.a.weight, model.a.weight * 2), requires_grad=False)
    given = TwoTensor(x, x * 2) if wrapped == "input" else x
    ours, theirs = compiled(given), model(given)
    assert type(ours) is type(theirs) is TwoTensor
    torch.testing.assert_close((ours.a, ours.b), (theirs.a, theirs.b))
    assert len(replacer.replaced) == before > 0 and any("TwoTensor" in why for why in replacer.left)


def test_no_kernel_reads_memory_that_has_the_negatives() -> None:
    """The imaginary part of a conjugate is such a view, and so may be an input."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        return s.norm(x), s.norm(torch.complex(x, x).conj().imag)

    model, x = Function(forward).requires_grad_(False), torch.randn(2, 8)
    replacer = everywhere()
    compiled = compile_with_kernels(model, replacer)
    for given, kernels in ((x, 1), (torch._neg_view(x), 1)):
        torch.testing.assert_close(compiled(given), model(given))
        assert len(replacer.replaced) == kernels


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


def test_what_nobody_uses_is_made_once_and_keeps_no_graph_out_of_the_caches() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        torch.rand(3), torch.arange(5), torch.randperm(4)
        return s.norm(s.a(x)) + torch.rand(8)

    model, x, replacer = Function(forward), torch.randn(2, 8), everywhere()
    torch.manual_seed(7)
    expected, after = model(x), torch.rand(1)
    torch.manual_seed(7)
    torch.testing.assert_close(compile_with_kernels(model, replacer)(x), expected)
    torch.testing.assert_close(torch.rand(1), after, rtol=0, atol=0)


def yields(s: Function, x: Tensor) -> Iterator[Tensor]:
    for layer in (s.a, s.b):
        x = layer(x)
        yield s.norm(x)


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("function", [yields, lambda s, x: (s.norm(layer(x)) for layer in (s.a, s.b))])
def test_a_generator_computes_when_it_is_asked_to(function: Callable[..., Any], fallback: str | None) -> None:
    made, x = [], torch.randn(2, 8)
    for kernels in (False, True):
        model = Function(function)
        replacer = Everywhere((), fallback, finder=finder())
        call = compile_with_kernels(model, replacer) if kernels else model
        for _ in range(2):
            results = call(x)
            first = next(results)
            with torch.no_grad():
                model.b.weight.mul_(2)
            made.append([first, *results])
    torch.testing.assert_close(made[2:], made[:2])
    assert any("hands on a generator" in why for why in replacer.left)
