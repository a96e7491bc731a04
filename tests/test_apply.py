"""Kernels back in a model: they run where they were proven and nowhere else, and the model stays itself."""

import copy
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import FrameType

import pytest
import torch
from torch import nn
from torch._dynamo.exc import SkipFrame
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import autokernel
from autokernel.integration.apply import apply, compile_with_kernels, unapply
from autokernel.integration.backend import OneTrace, Replacer
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.extraction import make_plan
from autokernel.model.match import SiteFinder
from autokernel.model.profiler import profile_workload
from autokernel.model.workload import Workload
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase
from models.llama import CompactLlama, RMSNorm

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")

SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden": 128, "vocab_size": 100}
TYPES = ("rmsnorm", "rotary_embedding", "matmul")
WRONG = "def kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n"


@pytest.fixture(scope="module")
def model() -> CompactLlama:
    torch.manual_seed(0)
    return CompactLlama(**SMALL).eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(100, (1, 256), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def winners(model: CompactLlama, tokens: torch.Tensor) -> list[Winner]:
    """The C++ starters, as if they had been kept for what the model runs."""
    cases: dict[str, list[WeightedCase]] = {}
    for graph in capture(model, (tokens,), {}).graphs:
        for site in SiteFinder().find(graph.module):
            cases.setdefault(site.kernel_type, []).append(WeightedCase(site.case))
    sources = {name: load_spec(name).starters("cpp")["cpp_kernel"].read_text() for name in TYPES}
    return [Winner(Target(name, name, "cpp", "cpu", tuple(cases[name])), sources[name]) for name in TYPES]


@pytest.mark.slow
def test_an_exported_model_is_the_one_that_was_written(model, tokens, winners) -> None:
    applied = apply(copy.deepcopy(model), winners)
    with torch.no_grad():
        applied(tokens)
        exported = torch.export.export(applied, (tokens,))
        torch.testing.assert_close(exported.module()(tokens), model(tokens))
        assert not any("autokernel" in str(node.target) for node in exported.graph.nodes)
        assert "autokernel::" not in str(torch.jit.trace(applied, tokens).inlined_graph)  # a path may have the name


def test_what_dynamo_decides_of_one_model_it_decides_of_no_other() -> None:
    """One function of ours calls them all; the first model is left out, and each of the others has another size."""
    dynamic: list[bool] = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        if any(node.target == "sin" for node in module.graph.nodes):
            raise SkipFrame("this one is left out")
        dynamic.append(any(isinstance(v, torch.SymInt) for v in inputs))
        return module.forward

    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    torch._dynamo.register_backend(backend, "decided")
    for model, rows in ((Sine(), 8), (nn.Linear(8, 8), 16), (nn.Linear(8, 8), 32)):
        apply(model, [], "decided")(torch.randn(rows, 8))
    assert dynamic == [False, False]


def wrong_norm(winners: list[Winner]) -> Winner:
    """A kernel that shows where it runs: the last norm feeds the output, which is then zero."""
    return Winner(winners[0].target, WRONG)


FALLBACKS = [None, "inductor"]
COMPILED_LATER = [None, pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("fallback", COMPILED_LATER)
def test_kernels_are_named_in_profiles(model, tokens, winners, fallback) -> None:
    optimised = compile_with_kernels(model, Replacer(winners, fallback))
    with torch.no_grad():
        optimised(tokens)
        with torch.profiler.profile() as profile:
            optimised(tokens)
    named = {event.key for event in profile.key_averages() if event.key.startswith("autokernel::")}
    assert len(named) >= len(winners) and any("rmsnorm" in name for name in named)


def test_a_call_that_is_compiled_already_sets_nothing_of_dynamos(model, tokens, winners) -> None:
    """Settings of what Dynamo compiles cost 40 µs, which by CUDA graphs is as much as the kernels of a small model gain."""
    optimised = compile_with_kernels(model, Replacer(winners[:1], None))
    found = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__setattr__" and "_config_module" in frame.f_code.co_filename:
            found.append(frame.f_back)

    with torch.no_grad():
        for _ in range(2):
            optimised(tokens)
        sys.setprofile(note)
        try:
            optimised(tokens)
        finally:
            sys.setprofile(None)
    assert not found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_kernels_replace_their_sites_and_the_result_is_the_same(model, tokens, winners, fallback) -> None:
    replacer = Replacer(winners, fallback)
    with torch.no_grad():
        torch.testing.assert_close(compile_with_kernels(model, replacer)(tokens), model(tokens))
    counts = {name: sum(r.target == name for r in replacer.replaced) for name in TYPES}
    assert counts == {"rmsnorm": 5, "rotary_embedding": 4, "matmul": 9}


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.slow
def test_forms_of_one_trace_have_each_their_kernels(model, tokens, winners, fallback) -> None:
    """The same ones at the same places as in traces of their own, one of which shows where it runs."""
    finder, kernels = SiteFinder(), {"all": winners, "wrong": [wrong_norm(winners), *winners[1:]], "one": winners[1:2]}
    forms = OneTrace({name: Replacer(chosen, fallback, finder=finder) for name, chosen in kernels.items()})
    compiled = compile_with_kernels(model, forms)
    with torch.no_grad():
        made = {name: forms.run(name, compiled, tokens) for name in kernels}
        expected = model(tokens)
        for name, chosen in kernels.items():
            torch._dynamo.reset()
            apart = Replacer(chosen, fallback)
            compile_with_kernels(model, apart)(tokens)
            assert forms.replacers[name].replaced == apart.replaced
    assert made["wrong"].abs().max() == 0
    torch.testing.assert_close((made["all"], made["one"]), (expected, expected))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_the_kernel_is_what_runs(model, tokens, winners, fallback) -> None:
    with torch.no_grad():
        assert compile_with_kernels(model, Replacer([wrong_norm(winners)], fallback))(tokens).abs().max() == 0


def test_no_kernel_is_called_with_fake_tensors(model, tokens, winners) -> None:
    source = WRONG.replace("\n", "\n    assert type(x).__name__ == 'Tensor'\n", 1)
    replacer = Replacer([Winner(winners[0].target, source)])
    compiled, mode = compile_with_kernels(copy.deepcopy(model), replacer), FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        compiled(tokens)
        with mode:
            assert compiled(mode.from_tensor(tokens)).shape == (1, 256, 100)
        assert compiled(tokens).abs().max() == 0
    assert not replacer.left


def test_a_site_that_feeds_another_is_computed_by_the_kernel_alone(model, tokens, winners, monkeypatch) -> None:
    """Norms feed projections: no original norm is left in the graph, and no projection but the 3 of each MLP."""
    kept: list[str] = []

    def recording(graph, inputs):
        kept.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: recording)
    with torch.no_grad():
        compile_with_kernels(model, Replacer(winners, "recording"))(tokens)
    assert sum(name.startswith("autokernel.") for name in kept) == 18
    assert kept.count("aten.linear.default") == 6 and "aten.rsqrt.default" not in kept


class Attention(nn.Module):
    """Of one thing to itself, after a dropout of nothing whose result nobody uses: in training it takes random numbers."""

    def forward(self, x):
        nn.functional.dropout(x, 0.5, self.training)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_attention_is_computed_by_the_kernel_alone() -> None:
    """PyTorch says of its own that it takes random numbers, whatever its dropout, so that nothing may leave it out."""
    attention, x = Attention(), torch.randn(1, 4, 256, 64)
    (graph,) = capture(attention.eval(), (x,), {}).graphs
    (site,) = SiteFinder().find(graph.module)
    source = load_spec(site.kernel_type).starters("cpp")["cpp_kernel"].read_text()
    winner = Winner(Target("attention", site.kernel_type, "cpp", "cpu", (WeightedCase(site.case),)), source)
    optimised = compile_with_kernels(attention, Replacer([winner]))
    with torch.no_grad():
        torch.testing.assert_close(optimised(x), attention(x), atol=1e-4, rtol=1e-4)
        with torch.profiler.profile() as profile:
            optimised(x)
        ran = {event.key for event in profile.key_averages()}
        assert "autokernel::attention" in ran and not any("scaled_dot_product" in name for name in ran)
        attention.train()  # and what does take random numbers takes them with kernels, too
        torch.manual_seed(0)
        attention(x)
        expected = torch.rand(())
        torch.manual_seed(0)
        optimised(x)
        assert torch.rand(()) == expected


@pytest.mark.slow
def test_many_sets_of_winners_for_one_model() -> None:
    """Leaving winners out one at a time compiles the same function anew each time."""
    norm = RMSNorm(64).requires_grad_(False)
    x = torch.randn(256, 64)
    replacers = [Replacer([winner_for(norm, x, WRONG)]) for _ in range(12)]
    results = [compile_with_kernels(norm, replacer)(x) for replacer in replacers]
    assert all(result.abs().max() == 0 for result in results)


def winner_for(module: nn.Module, x: torch.Tensor, source: str, device: str = "cpu") -> Winner:
    (graph,) = capture(module, (x,), {}).graphs
    (site,) = SiteFinder().find(graph.module)
    return Winner(Target("norm", site.kernel_type, "cpp", device, (WeightedCase(site.case),)), source)


def is_replaced(module: nn.Module, winner: Winner, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool(compile_with_kernels(module, Replacer([winner]))(x).abs().max() == 0)


def test_a_kernel_runs_only_where_it_was_proven() -> None:
    """Other shapes, dtypes, strides, alignments, options or devices run the original."""
    norm, x = RMSNorm(64).requires_grad_(False), torch.randn(256, 64)
    winner = winner_for(norm, x, WRONG)
    assert is_replaced(norm, winner, x)
    assert not is_replaced(norm, winner, x[:200])
    assert not is_replaced(norm, winner, torch.randn(64, 256).T)
    assert not is_replaced(norm, winner, torch.randn(256 * 64 + 1)[1:].view(256, 64))
    assert not is_replaced(copy.deepcopy(norm).half(), winner, x.half())
    other = RMSNorm(64).requires_grad_(False)
    other.eps = norm.eps * 2
    assert not is_replaced(other, winner, x)
    elsewhere = Winner(replace(winner.target, device="cuda"), WRONG)
    assert not is_replaced(norm, elsewhere, x)


def test_one_compiled_model_takes_inputs_that_start_elsewhere() -> None:
    norm, x = RMSNorm(64).requires_grad_(False), torch.randn(256, 64)
    optimised = compile_with_kernels(norm, Replacer([winner_for(norm, x, WRONG)]))
    shifted = torch.randn(256 * 64 + 1)[1:].view(256, 64)
    assert optimised(x).abs().max() == 0
    torch.testing.assert_close(optimised(shifted), norm(shifted))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_sizes_that_change_run_the_kernel_where_it_was_proven_and_compile_once(fallback, grad) -> None:
    """From the second size on, Dynamo has code for any size, which finds the sizes that are proven."""
    norm, x = RMSNorm(64), torch.randn(256, 64)
    replacer, compiled = Replacer([winner_for(norm, x, WRONG)], fallback), []

    def backend(module, inputs):
        compiled.append(any(isinstance(v, torch.SymInt) for v in inputs))
        return replacer(module, inputs)

    optimised = torch.compile(norm, backend=backend)
    with torch.set_grad_enabled(grad):
        for rows in (100, 300, 256, 100, 64, 256, 200, *range(301, 321)):
            y = torch.randn(rows, 64)
            torch.testing.assert_close(optimised(y), torch.zeros_like(y) if rows == 256 else norm(y))
    assert compiled == [False, True] and len(replacer.replaced) == 1


@pytest.mark.slow
def test_a_model_of_changing_sizes_is_the_original(model, tokens, winners) -> None:
    """Right kernels for one length, in a model that is called with many."""
    replacer = Replacer(winners)
    optimised = compile_with_kernels(model, replacer)
    with torch.no_grad():
        for length in (40, 256, 72, 41, 256, 128):
            some = tokens[:, :length].reshape(-1)[None]
            torch.testing.assert_close(optimised(some), model(some), atol=1e-4, rtol=1e-4)
    assert len(replacer.replaced) == 18


TRACED = """
import torch

BACKEND = "triton"

def kernel_fn(x, weight, eps=1e-6):
    traced = torch._subclasses.FakeTensor, torch._subclasses.functional_tensor.FunctionalTensor
    assert isinstance(x, traced), "called, not traced"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y.copy_(helper(x) * weight)
    return y

def helper(x):
    return x * 0 + 3 + x.data_ptr() % 16
"""


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("fallback", "gradient"), [(None, False), (None, True), *((f, False) for f in FALLBACKS if f)])
def test_triton_kernels_are_traced_once_and_not_called(fallback, gradient) -> None:
    """No Triton here; but what surrounds its launches in a kernel file is treated as on a GPU."""
    norm, x = RMSNorm(64).requires_grad_(gradient), torch.randn(256, 64)
    replacer = Replacer([winner_for(norm, x, TRACED)], fallback)
    optimised = compile_with_kernels(norm, replacer)
    for _ in range(2):
        y = optimised(x)
        torch.testing.assert_close(y, 3 * norm.weight.expand(256, 64))
        assert y.requires_grad == gradient
        if gradient:
            torch.testing.assert_close(
                torch.autograd.grad(y.sum(), norm.weight), torch.autograd.grad(norm(x).sum(), norm.weight)
            )
    assert len(replacer.seen) == 1 and all(replacer.seen.values())


def test_where_inductor_fails_with_launches_kernels_are_operators(monkeypatch) -> None:
    """A launch that it cannot compile costs no other kernel its place."""
    norm, x, asked = RMSNorm(64), torch.randn(256, 64), []
    compile_inductor = torch._inductor.compile

    def failing(graph, inputs, options):
        asked.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        if any(name.endswith("_visible.default") for name in asked[-1]):
            raise RuntimeError("An exception occurred in a subprocess:\n\nTraceback\nNameError('math is not defined')\n")
        return compile_inductor(graph, inputs, options)

    monkeypatch.setattr(torch._inductor, "compile", failing)
    source = TRACED.replace('assert isinstance(x, traced), "called, not traced"', "pass")
    replacer = Replacer([winner_for(norm, x, source)], "inductor")
    with torch.no_grad():
        compile_with_kernels(norm, replacer)(x)
    assert len(asked) == 2 and len(replacer.replaced) == 1
    (why,) = replacer.left
    told = "RuntimeError: An exception occurred in a subprocess: NameError('math is not defined')"
    assert "operators" in why and why.endswith(told)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rows", [(256,), (100, 300, 256)], ids=["one size", "changing sizes"])
def test_inductor_is_told_which_inputs_are_parameters(rows, monkeypatch) -> None:
    """Else CUDA graphs would copy all weights at every call."""
    model, x, told = Projected(), torch.randn(256, 64), []
    compile_inner = compile_fx._compile_fx_inner

    def recording(graph, inputs, **options):
        told.append(len(options["static_input_idxs"]))
        return compile_inner(graph, inputs, **options)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", recording)
    winner = winner_for(model.norm, x, load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text())
    replacer = Replacer([winner], "reduce-overhead")
    optimised = compile_with_kernels(model, replacer)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        for n in rows:
            y = torch.randn(n, 64)
            torch.testing.assert_close(optimised(y), model(y), atol=1e-5, rtol=1e-5)
    assert len(replacer.replaced) == 1 and told == [3] * len(rows)


def test_inductors_form_of_a_graph_with_kernels_is_cached(model, tokens, winners) -> None:
    """Patterns call methods of tensors, on which AOTAutograd's cache has a rule."""
    counters["aot_autograd"].clear()
    with torch.no_grad():
        compile_with_kernels(model, Replacer(winners, "inductor"))(tokens)
    assert counters["aot_autograd"]["total"] == 1 and not counters["aot_autograd"]["autograd_cache_bypass"]


# --- gradients and modes ----------------------------------------------------------------------------------------------


def gradients(call: Callable[..., torch.Tensor], model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    call(tokens).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_gradients_are_the_originals(model, tokens, winners, fallback) -> None:
    replacer = Replacer(winners, fallback)
    expected = gradients(model, model, tokens)
    torch.testing.assert_close(
        gradients(compile_with_kernels(model, replacer), model, tokens), expected, atol=1e-5, rtol=1e-3
    )
    assert len(replacer.replaced) == 18


def test_gradients_can_be_left_to_the_original(model, tokens, winners) -> None:
    optimised = compile_with_kernels(model, Replacer([wrong_norm(winners)], gradients=False))
    with torch.no_grad():
        assert optimised(tokens).abs().max() == 0  # compiled for inference first
    torch.testing.assert_close(gradients(optimised, model, tokens), gradients(model, model, tokens))


def test_a_model_without_kernels_for_its_gradients_is_not_said_to_have_other_shapes(model, tokens, winners, caplog) -> None:
    optimised = apply(copy.deepcopy(model), [wrong_norm(winners)], gradients=False)
    optimised(tokens)
    assert "nothing is replaced" not in caplog.text and "gradients=False" in str(autokernel.explain(optimised))
    with torch.no_grad():
        assert optimised(tokens).abs().max() == 0


class Stopped(nn.Module):
    """Norms whose gradients are stopped, in three ways, and one whose gradient is the model's own invention."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.norms, self.own = nn.ModuleList(RMSNorm(64) for _ in range(4)), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x + self.norms[0](x)
        x = x + self.norms[1](x).detach()
        squares = x.pow(2)
        with torch.no_grad():
            mean = squares.mean(-1, keepdim=True)
        x = x + x * torch.rsqrt(mean + 1e-3) * self.norms[3].weight
        return Invented.apply(self.norms[2](x)) if self.own else self.norms[2](x)


class Invented(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("own, fallback", [*product([False, True], FALLBACKS)])
def test_gradients_that_the_model_stops_or_makes_itself_stay_so(own: bool, fallback: str | None) -> None:
    model, x = Stopped(own), torch.randn(256, 64, requires_grad=True)
    sources = load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text()
    replacer = Replacer([winner_for(model.norms[0], x.detach(), sources)], fallback)

    def everything(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        inputs = [x, *model.parameters()]
        return torch.autograd.grad(call(x).square().mean(), inputs, allow_unused=True)

    expected, got = everything(model), everything(compile_with_kernels(model, replacer))
    assert [g is None for g in got] == [g is None for g in expected]
    torch.testing.assert_close([g for g in got if g is not None], [g for g in expected if g is not None])
    assert len(replacer.replaced) == 3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_a_checkpoint_is_left_alone_where_there_are_gradients(fallback) -> None:
    """Without them it is its body, whose kernel returns zeros here."""
    norm, x = RMSNorm(64), torch.randn(256, 64, requires_grad=True)
    replacer = Replacer([winner_for(norm, x.detach(), WRONG)], fallback)
    optimised = torch.compile(lambda x: checkpoint(norm, x, use_reentrant=False), backend=replacer)
    with torch.no_grad():
        assert optimised(x).abs().max() == 0
    assert not replacer.left
    torch.testing.assert_close(optimised(x), norm(x))
    assert replacer.left == ["what a checkpoint computes, where gradients are wanted, is left as it is"]
    assert torch.autograd.grad(optimised(x).square().sum(), x)[0].abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("fallback", COMPILED_LATER)
def test_modes_change_under_one_applied_model(model, tokens, winners, fallback) -> None:
    """train and eval, autocast, no_grad, inference_mode: each gets its own code, and the original's result."""
    applied = apply(copy.deepcopy(model), winners, fallback)
    bfloat16 = torch.autocast("cpu", torch.bfloat16)
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode(), bfloat16, torch.no_grad()):
        for training in (True, False):
            model.train(training), applied.train(training)
            with mode:
                got, expected = applied(tokens), model(tokens)
            tolerance = 3e-2 if mode is bfloat16 else 1e-4
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
            assert (got.requires_grad, got.is_inference()) == (expected.requires_grad, expected.is_inference())
    with torch.enable_grad():
        for module in (model, applied):
            assert all(g is not None for g in gradients(module, module, tokens))


def test_training_steps_are_the_originals(model, tokens, winners) -> None:
    def losses(trained: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(trained.train().parameters(), lr=0.1)
        made = []
        for _ in range(3):
            loss = trained(tokens).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            made.append(loss.item())
        return made

    expected = losses(copy.deepcopy(model))
    assert losses(apply(copy.deepcopy(model), winners)) == pytest.approx(expected, rel=1e-4)
    assert expected[0] > expected[-1]


# --- the model stays itself -------------------------------------------------------------------------------------------


def test_parameters_are_shared(model, tokens, winners) -> None:
    changing = copy.deepcopy(model)
    optimised = compile_with_kernels(changing, Replacer(winners))
    with torch.no_grad():
        before = optimised(tokens)
        changing.norm.weight.mul_(2)
        torch.testing.assert_close(optimised(tokens), changing(tokens))
    assert not torch.allclose(before, changing(tokens))


def test_an_applied_model_is_the_same_object_and_its_copies_have_no_kernels(model, tokens, winners) -> None:
    applied = copy.deepcopy(model)
    state = applied.state_dict()
    assert apply(applied, [wrong_norm(winners)]) is applied and type(applied) is type(model)
    assert list(applied.state_dict()) == list(model.state_dict())
    assert all(applied.state_dict()[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())
    with torch.no_grad():
        expected = model(tokens)
        assert applied(tokens).abs().max() == 0
        for copied in (copy.deepcopy(applied), pickle.loads(pickle.dumps(applied))):
            torch.testing.assert_close(copied(tokens), expected)
        torch.testing.assert_close(unapply(applied)(tokens), expected)
        assert autokernel.apply(applied, [wrong_norm(winners)])(tokens).abs().max() == 0


def test_what_was_compiled_before_apply_is_there_again_after_unapply() -> None:
    model, graphs = RMSNorm(4), []

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(module)
        return module.forward

    model.compile(backend=backend)
    own = model._compiled_call_impl
    for winners, fallback in (("starters", None), ([], "eager"), ([], "aot_eager")):
        assert apply(model, winners, fallback)._compiled_call_impl is not own
    model(torch.ones(2, 4))
    assert not graphs and unapply(model)._compiled_call_impl is own
    model(torch.ones(2, 4))
    assert len(graphs) == 1 and unapply(model)._compiled_call_impl is own
    apply(model, [], "eager").compile(backend=backend)  # which puts its own in the place of ours
    own = model._compiled_call_impl
    assert unapply(model)._compiled_call_impl is own


def test_half_keeps_the_rotation_complex() -> None:
    model = CompactLlama(**SMALL).half()
    assert model.freqs.dtype == torch.complex64 and model.output.weight.dtype == torch.float16


@pytest.mark.slow
def test_a_kernel_behind_another_gets_only_strides_that_it_was_proven_for(
    model: CompactLlama, tokens: torch.Tensor
) -> None:
    """The original rotates between heads; a kernel's result is contiguous, and that is what attention gets then."""
    (graph,) = capture(model, (tokens,), {}).graphs
    sites = [s for s in SiteFinder().find(graph.module) if s.kernel_type in ("rotary_embedding", "flash_attention")]
    attention = next(s for s in sites if s.kernel_type == "flash_attention")
    (behind,) = attention.variants
    assert attention.case.args["Q"].stride is not None and behind.args["Q"].stride is None
    assert behind.args["V"] == attention.case.args["V"], "V is not rotated"

    def winners(*, variants: bool) -> list[Winner]:
        def target(kernel_type: str) -> Target:
            mine = [s for s in sites if s.kernel_type == kernel_type]
            cases = tuple(WeightedCase(s.case, 1, s.variants if variants else ()) for s in mine)
            return Target(kernel_type, kernel_type, "cpp", "cpu", cases)

        starters = {t: load_spec(t).starters("cpp")["cpp_kernel"].read_text() for t in {s.kernel_type for s in sites}}
        return [Winner(target(kernel_type), source) for kernel_type, source in starters.items()]

    for variants, replaced in ((False, {"rotary_embedding"}), (True, {"rotary_embedding", "flash_attention"})):
        torch._dynamo.reset()
        replacer = Replacer(winners(variants=variants))
        with torch.no_grad():
            torch.testing.assert_close(compile_with_kernels(model, replacer)(tokens), model(tokens))
        assert {r.target for r in replacer.replaced} == replaced
    alone = Replacer([w for w in winners(variants=False) if w.target.name == "flash_attention"])
    torch._dynamo.reset()
    with torch.no_grad():
        compile_with_kernels(model, alone)(tokens)
    assert len(alone.replaced) == 2, "where nothing comes before it, it is proven"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fallback", [None, "inductor", "reduce-overhead"])
def test_triton_starters_in_a_model_on_the_gpu(dtype: str, fallback: str | None) -> None:
    workload = Workload(model_args=SMALL, input_shape=(1, 256), dtype=dtype, device="cuda")
    profile = profile_workload(workload, warmup=1, iterations=3)
    assert all(site.time_us > 0 for site in profile.sites)
    plan = make_plan(profile, top=99)
    starters = [load_spec(t.kernel_type).starters(t.backend)[t.starter].read_text() for t in plan.targets]
    winners = [Winner(target, source) for target, source in zip(plan.targets, starters)]
    assert {w.target.kernel_type for w in winners} >= {"rmsnorm", "rotary_embedding", "matmul", "flash_attention"}
    model, args, _ = workload.load()
    replacer = Replacer(winners, fallback)
    optimised = compile_with_kernels(model, replacer)
    counters["aot_autograd"].clear()
    with torch.no_grad():
        got, expected = [optimised(*args) for _ in range(3)][-1], model(*args)  # graphs: recorded, then replayed
    assert not counters["aot_autograd"]["autograd_cache_bypass"], "the next process compiles it all again"
    assert len(replacer.replaced) == sum(site.calls for site in profile.sites)
    assert all(replacer.seen.values()), "a starter was not launched directly, or not seen by Inductor"
    tolerance = 1e-2 if dtype == "float16" else 1e-3  # fp32: Triton's dots and cuBLAS sum in another order
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_a_nested_tensor_behind_a_plain_one() -> None:
    """Where it was compiled for that, Dynamo's guards would end the process."""
    model = apply(nn.Linear(8, 8), [], "eager")
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    model(rows[0])
    nested = torch.nested.nested_tensor(rows)
    for made, expected in zip(model(nested).unbind(), map(model.forward, rows)):
        torch.testing.assert_close(made, expected)
    assert "nested tensor" in str(autokernel.explain(model).left)
