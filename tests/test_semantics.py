"""With kernels in it, a model is the same to whoever uses it: values, dtypes, strides, aliasing, objects."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from semantic_models import Function, everywhere
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from autokernel.integration.apply import apply, compile_with_kernels
from autokernel.model.agreement import _draw
from autokernel.model.match import SiteFinder
from autokernel.model.nodes import aten, strides_of
from autokernel.model.tracing import trace
from benchmarks.random_programs import Everywhere, finder

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


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


def what_hands_on_what_it_is_given(s: Function, x: Tensor) -> Any:
    return s.norm(x), x.cpu(), +x, x.flatten(2), torch.atleast_2d(x), x.resolve_conj(), x.sum_to_size(x.shape), x.real


OBJECTS = [
    an_idle_slice_and_a_cast_of_it,
    an_idle_view_that_is_written_to,
    a_cast_that_returns_what_it_is_given,
    what_hands_on_what_it_is_given,
]


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
    equations += ["bhqd,bgkd->bhgqk", "bhqd,bgkd->bqhkg", "bhqd,ahkd->bqak", "bhqd,ahkd->akqb", "...hqd,...hkd->...qkh"]

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


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhk,bhv->bhkv", [(2, 3, 4), (2, 3, 5)]),
        ("bhk,bhv->vkbh", [(2, 3, 4), (2, 3, 5)]),
        ("bhkv,bhk->vbh", [(2, 3, 4, 5), (2, 3, 4)]),
        ("bnd,bnd->nb", [(2, 3, 4), (2, 3, 4)]),
        ("i,i->", [(4,), (4,)]),
        ("bij,kj->kb", [(2, 3, 4), (5, 4)]),
        ("bii,ij->jb", [(2, 3, 3), (3, 5)]),
        ("bij,bjk->kib", [(2, 3, 4), (1, 4, 5)]),
        ("...ij,...j->...i", [(2, 3, 4, 5), (3, 5)]),
        ("tk,tke,tkc->tec", [(6, 2), (6, 2, 3), (6, 2, 4)]),
        ("bij->ji", [(2, 3, 4)]),
        ("bij->jbi", [(2, 3, 4)]),
        ("cab,bc", [(2, 3, 4), (4, 2)]),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_einsum_is_written_out_as_pytorch_computes_it(
    equation: str, shapes: list[tuple[int, ...]], autocast: bool
) -> None:
    """No einsum is left in the graph, and its result has the elements, the strides, the dtype and the gradients of one."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph, expected = trace(lambda *given: torch.einsum(equation, *given), inputs), torch.einsum(equation, *inputs)
    assert aten.einsum.default not in {node.target for node in graph.graph.nodes}
    result = graph(*inputs)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    mine, eagers = (
        [t.untyped_storage().data_ptr() == r.untyped_storage().data_ptr() for t in inputs] for r in (result, expected)
    )
    assert mine == eagers
    for ours, eagers in zip(*(torch.autograd.grad(t.float().square().sum(), inputs) for t in (result, expected))):
        torch.testing.assert_close(ours, eagers)


NORMED = torch.ones(8)
IN_DOUBT = {
    "batch norm": lambda t: F.batch_norm(t, NORMED.clone(), NORMED.clone(), NORMED, NORMED),
    "batch norm, training": lambda t: F.batch_norm(t, NORMED.clone(), NORMED.clone(), NORMED, NORMED, training=True),
    "log sigmoid": F.logsigmoid,
    "roll": lambda t: t.roll(1, 1),
    "channel shuffle": lambda t: F.channel_shuffle(t, 2),
    "random leaks": F.rrelu,
    "random leaks, training": lambda t: F.rrelu(t, training=True),
    "max unpool": lambda t: F.max_unpool2d(*F.max_pool2d(t, 1, return_indices=True), 1),
    "normal, one deviation": lambda t: torch.normal(t, 0.5),
    "normal, deviations": lambda t: torch.normal(t, t.exp()),
}


def seeded(call: Callable[..., Any], *inputs: Tensor) -> Any:
    torch.manual_seed(0)
    return call(*inputs)


@pytest.mark.parametrize("name", IN_DOUBT)
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 5, 8), (2, 5, 3, 8)])
def test_operators_of_which_fake_tensors_have_other_strides(name: str, shape: tuple[int, ...]) -> None:
    """What a kernel makes of their results has the strides that it has in eager mode, or a view of it has."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        images = s.a(x).permute(0, 3, 1, 2)  # channels_last
        made = [IN_DOUBT[name](t) for t in (images, images.mT, images.transpose(0, 1)[:8].transpose(0, 1))]
        return tuple(f for y in made for f in (F.silu(y) * 2 + 1, s.norm(y.permute(0, 2, 3, 1)).relu() + 1))

    model, x, replacer = Function(forward), torch.randn(shape), everywhere()
    for wanted in (False, True):
        with torch.set_grad_enabled(wanted):
            results, expected = (seeded(call, x) for call in (compile_with_kernels(model, replacer), model))
        torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)
        assert [strides_of(t) for t in results] == [strides_of(t) for t in expected]
    assert replacer.replaced and not replacer.left


OF_TWO_IN_DOUBT = {
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
    "div, rounded down": lambda t, u: torch.div(t, u, rounding_mode="floor"),
    "heaviside": torch.heaviside,
    "ldexp": torch.ldexp,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "logical_and": lambda t, u: torch.logical_and(t, u).float() + t,
    "logical_or": lambda t, u: torch.logical_or(t, u).float() + t,
    "logical_xor": lambda t, u: torch.logical_xor(t, u).float() + t,
    "xlogy": lambda t, u: torch.xlogy(t, u.abs()),
}


@pytest.mark.parametrize("name", OF_TWO_IN_DOUBT)
def test_operators_of_two_layouts_of_which_fake_tensors_have_other_strides(name: str) -> None:
    """PyTorch's fake tensors go by the first of several layouts, where real ones go by another, or lie in rows."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        turned, wide = x.mT.contiguous().mT, x[:, :, :1].expand(x.shape)
        pairs = (turned, x), (x, turned), (wide, turned), (turned, wide)
        return tuple(F.gelu(OF_TWO_IN_DOUBT[name](t, u) * 2) + 1 for t, u in pairs)

    model, replacer = Function(forward).requires_grad_(False), everywhere()
    compiled = compile_with_kernels(model, replacer)
    for shape in ((2, 3, 8), (3, 1, 8)):
        x = torch.randn(shape)
        results, expected = compiled(x), model(x)
        torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)
        assert [strides_of(t) for t in results] == [strides_of(t) for t in expected]
    assert not replacer.left


@pytest.mark.parametrize("dim", [32])
def test_positions_that_differ_by_sequence_are_not_those_of_heads(dim: int) -> None:
    """Of two sequences one token each, and two heads: cos is [2, 1, 1, dim], of the positions that padding leaves."""

    def rotating(s: Function, q: Tensor, positions: Tensor, speeds: Tensor) -> Tensor:
        angles = torch.cat([positions[:, None, :, None] * speeds] * 2, -1)
        half = torch.cat((-q[..., dim // 2 :], q[..., : dim // 2]), -1)
        return q * angles.cos() + half * angles.sin()

    model, compiled = (m := Function(rotating)), compile_with_kernels(m, everywhere())
    inputs = torch.randn(2, 1, 2, dim).transpose(1, 2), torch.tensor([[3], [5]]), torch.rand(dim // 2)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_few_integers_all_differ_and_few_booleans_are_not_all_true() -> None:
    for count in range(2, 9):
        assert len(_draw(torch.zeros(count, 1, dtype=torch.int64), torch.Generator().manual_seed(count)).unique()) == count
        assert len(_draw(torch.zeros(count, 1, dtype=torch.bool), torch.Generator().manual_seed(count)).unique()) == 2


@pytest.mark.parametrize("length", [6, 1])
def test_batches_have_any_number_of_dims(length: int) -> None:
    """Attention of one head, or of a batch's heads in one dim; products of one matrix with many, and with what is added."""

    def attending(s: Function, x: Tensor, mask: Tensor, few: Tensor) -> tuple[Tensor, ...]:
        added = torch.baddbmm(mask, x * 0.3, x.transpose(1, 2))
        return (
            torch.bmm(added.softmax(-1), s.a(x)),
            torch.softmax(x @ s.b(x).mT / 2 + mask, -1) @ x,
            F.scaled_dot_product_attention(s.a(x), x, x, mask),
            torch.softmax((x @ x.mT / 3).masked_fill(mask > 3, -torch.inf), -1) @ s.b(x),
            few @ s.a(x).transpose(1, 2),
            torch.baddbmm(mask, x, s.b(x).mT),
        )

    model, replacer = Function(attending), everywhere()
    inputs = torch.randn(3, length, 8), torch.randn(3, 1, length), torch.randn(5, 8)
    compiled = compile_with_kernels(model, replacer)
    for _ in range(2):
        results, expected = compiled(*inputs), model(*inputs)
        torch.testing.assert_close(results, expected)
        assert [t.stride() for t in results] == [t.stride() for t in expected]
        gradients, wanted = (torch.autograd.grad(sum(t.sum() for t in y), model.a.weight)[0] for y in (results, expected))
        torch.testing.assert_close(gradients, wanted)
    found = Counter(r.target for r in replacer.replaced)
    assert found["flash_attention"] == 4 and found["bmm"] == 2


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


def test_a_tensor_that_is_quantised_stays_so() -> None:
    model = Function(lambda s, x: (q := torch.quantize_per_tensor(s.a(x), 0.1, 0, torch.qint8), s.b(q.dequantize())))
    model, replacer, x = model.requires_grad_(False), everywhere(), torch.randn(2, 8)
    (ours, result), (theirs, expected) = compile_with_kernels(model, replacer)(x), model(x)
    assert ours.dtype == theirs.dtype == torch.qint8 and torch.equal(ours.int_repr(), theirs.int_repr())
    torch.testing.assert_close(result, expected)
    assert any("quantize_per_tensor" in why for why in replacer.left)


def test_what_shares_memory_with_what_may_be_unknown_with_gradients() -> None:
    """Two inputs in one memory are not, in a pass with gradients that is looked at: then the graph stays as it is."""

    def attention(s: Function, q: Tensor, mask: Tensor, same: Tensor) -> Tensor:
        return s.norm(F.scaled_dot_product_attention(q, q + 1, q + 2, attn_mask=mask * 2)) + same.sum()

    model, replacer = Function(attention).requires_grad_(False), everywhere()
    compiled, q = compile_with_kernels(model, replacer), torch.randn(2, 16, 4, 8).transpose(1, 2)
    mask = torch.randn(16, 16, requires_grad=True) * 2
    torch.testing.assert_close(compiled(q, mask, mask[0]), model(q, mask, mask[0]))
    assert any("other strides with gradients" in why for why in replacer.left) and not replacer.replaced


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


def test_a_class_that_decides_what_its_tensors_become_is_asked() -> None:
    """Dynamo traces its __torch_function__(), and what that computes on the way is a plain tensor."""

    class Doubled(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs or {})
            return result * 2 if function is F.softmax else result

    model, replacer, x = Function(lambda s, x: F.softmax(s.a(x), -1)), everywhere(), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer)
    ours, theirs = compiled(x.as_subclass(Doubled)), model(x.as_subclass(Doubled))
    assert type(ours) is type(theirs) is Doubled and torch.equal(ours, theirs)
    assert not replacer.replaced and any("__torch_function__" in why for why in replacer.left)


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


def test_what_nobody_uses_and_may_raise_keeps_what_it_reads() -> None:
    """Also where a kernel computes that anew."""

    def forward(s: Function, x: Tensor, places: Tensor) -> Tensor:
        y = s.a(x)
        total = torch.logsumexp(y, -1, keepdim=True)
        total.flatten().gather(0, places)
        return torch.exp(y - total)

    model, x, replacer = Function(forward), torch.randn(2, 8), everywhere()
    compiled = compile_with_kernels(model, replacer)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, torch.tensor([1])), model(x, torch.tensor([1])))
        assert len(replacer.replaced) == 2 and not replacer.left
        with pytest.raises(RuntimeError, match="out of bounds"):
            compiled(x, torch.tensor([2]))


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


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_a_graph_of_constants_alone(fallback: str | None) -> None:
    def function(s: Function, x: Tensor) -> Tensor:
        table = torch.arange(16.0).view(2, 8).softmax(-1)
        torch._dynamo.graph_break()
        return s.norm(x) * table

    model, x, replacer = (
        Function(function).requires_grad_(False),
        torch.randn(2, 8),
        Everywhere((), fallback, finder=finder()),
    )
    torch.testing.assert_close(compile_with_kernels(model, replacer)(x), model(x))
    assert len({r.graph for r in replacer.replaced}) == 2 and not replacer.left
