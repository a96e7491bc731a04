"""What cannot be traced, read, proven, compiled or run is left as the model has it, and listed, once, with its reason."""

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autokernel import spec
from autokernel.integration.apply import apply, compile_with_kernels, explain, unapply
from autokernel.integration.backend import Replacer
from autokernel.integration.winner import Winner
from autokernel.model import capture, match, profiler
from autokernel.model.account import Standing
from autokernel.model.match import SiteFinder
from autokernel.model.placement import RejectReason
from autokernel.model.workload import Workload
from autokernel.target import Target, WeightedCase
from models.llama import RMSNorm

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")

X = torch.randn(256, 64)
ZERO = "def kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n"


def sites_of(model: nn.Module, *inputs: torch.Tensor, finder: SiteFinder | None = None) -> list[match.Site]:
    finder = finder or SiteFinder(min_elements=0)
    return [site for graph in capture.capture(model, inputs, {}).graphs for site in finder.find(graph.module)]


def winner(source: str, x: torch.Tensor = X) -> Winner:
    (site,) = sites_of(RMSNorm(x.shape[-1]), x)
    return Winner(Target("norm", "rmsnorm", "cpp", "cpu", (WeightedCase(site.case),)), source)


# --- patterns and proofs ----------------------------------------------------------------------------------------------

PATTERNS = """
import torch
from autokernel.model.patterns import Pattern

INPUTS = {"x": (2, 3, 8), "eps": 0.0123, "weight": (8,)}


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def unknown(x, weight, eps):
    return torch.ops.aten.no_such_operator(x)


def odd_call(kernel, x, weight, eps):
    raise KeyError("an odd call")


PATTERNS = [Pattern(unknown, INPUTS), Pattern(unknown, INPUTS), Pattern(norm, INPUTS, {call})]
"""


def with_type(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, patterns: str) -> None:
    """The kernel type `name`, an rmsnorm with these patterns, is all that there is."""
    (folder / name).mkdir()
    theirs = (spec.folder_of("rmsnorm") / "spec.py").read_text()
    (folder / name / "spec.py").write_text(theirs.replace('name="rmsnorm"', f'name="{name}"'))
    (folder / name / "patterns.py").write_text(patterns)
    monkeypatch.setattr(spec, "KERNELS", folder)


def test_a_pattern_that_cannot_be_traced_is_left_out_alone(tmp_path, monkeypatch) -> None:
    with_type(
        tmp_path,
        monkeypatch,
        "norm_untraced",
        PATTERNS.replace("{call}", "patterns.plain_call").replace(
            "import Pattern", "import Pattern\nfrom autokernel.model import patterns"
        ),
    )
    finder = SiteFinder(min_elements=0)
    for _ in range(2):
        assert [s.kernel_type for s in sites_of(RMSNorm(64), X, finder=finder)] == ["norm_untraced"]
    (failure,) = finder.failures
    assert "pattern of norm_untraced" in failure and "no_such_operator" in failure


def test_a_file_of_patterns_that_cannot_be_imported_is_listed(tmp_path, monkeypatch) -> None:
    with_type(tmp_path, monkeypatch, "norm_unread", "import no_such_module_of_patterns\n")
    finder = SiteFinder(min_elements=0)
    assert sites_of(RMSNorm(64), X, finder=finder) == []
    (failure,) = finder.failures
    assert "norm_unread" in failure and "no_such_module_of_patterns" in failure


def test_a_place_that_cannot_be_examined_is_no_site_and_the_profile_says_why(tmp_path, monkeypatch, capsys) -> None:
    with_type(tmp_path, monkeypatch, "norm_odd", PATTERNS.replace("{call}", "odd_call"))
    file = tmp_path / "twice.py"
    file.write_text(
        "import torch\nfrom models.llama import RMSNorm\n\n\nclass Twice(torch.nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(RMSNorm(64), RMSNorm(64))\n\n\n"
        "def example_inputs():\n    return (torch.randn(256, 64),)\n"
    )
    profile = profiler.profile_workload(Workload(str(file), "Twice"), 0, 1)
    refused = [h for h in profile.hotspots if h.standing is Standing.REFUSED]
    assert {h.why for h in refused} == {f"not taken for norm_odd: {RejectReason.FAILED.value}"}
    assert [("an odd call" in line, "no_such_operator" in line) for line in profile.left] == [(False, True), (True, False)]
    profile.write(tmp_path / "profile.json")
    assert profiler.ModelProfile.read(tmp_path / "profile.json") == profile


class Angles(nn.Module):
    """Rotary embeddings whose angles come from an operator that knows one dtype: in float64 it cannot be followed."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = torch.ops.boundary.angles(positions).unbind(0)
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@torch.library.custom_op("boundary::angles", mutates_args=())
def angles(positions: torch.Tensor) -> torch.Tensor:
    if positions.dtype != torch.float32:
        raise TypeError(f"these angles are made of float32, not of {positions.dtype}")
    half = torch.cat((positions, positions), -1)
    return torch.stack((half.cos(), half.sin()))


@angles.register_fake
def _(positions: torch.Tensor) -> torch.Tensor:
    return positions.new_empty(2, *positions.shape[:-1], 2 * positions.shape[-1])


def test_a_site_that_cannot_be_proven_is_none_and_the_rest_is_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.rotary = RMSNorm(64), Angles()

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.rotary(self.rotary(self.norm(x), positions), positions)

    finder = SiteFinder(min_elements=0)
    found = sites_of(Model(), torch.randn(1, 2, 16, 64), torch.randn(1, 1, 16, 32), finder=finder)
    assert [site.kernel_type for site in found] == ["rmsnorm"]
    (failure,) = finder.failures
    assert "rotary_embedding" in failure and "made of float32" in failure


@torch.library.custom_op("boundary::contiguous", mutates_args=())
def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@contiguous.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous():
        raise ValueError("this operator knows transposed tensors alone")
    return torch.empty_like(x)


def test_an_operator_that_knows_some_strides_alone_gets_them_behind_a_kernel() -> None:
    """A kernel's result is contiguous, where the original's was transposed as its input is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = RMSNorm(64), RMSNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.ops.boundary.contiguous(self.first(x)))

    x = torch.randn(64, 256).T
    model, finder = Model().requires_grad_(False), SiteFinder(min_elements=0)
    first, second = sites_of(model, x, finder=finder)
    target = Target("norm", "rmsnorm", "cpp", "cpu", (WeightedCase(first.case), WeightedCase(second.case)))
    replacer = Replacer([Winner(target, ZERO)], finder=finder)
    torch.testing.assert_close(compile_with_kernels(model, replacer)(x), torch.zeros(256, 64))
    assert len(replacer.replaced) == 2 and not replacer.left


# --- kernels in a model -----------------------------------------------------------------------------------------------

BROKEN = {
    "no Python": ("def kernel_fn(:\n", "SyntaxError"),
    "no import": ("import no_such_library_of_kernels\n", "no_such_library_of_kernels"),
    "no C++": (
        "from autokernel.build import cpp_function\n_run = cpp_function('this is no C++;', 'run', 'pp')\n\n\n"
        "def kernel_fn(x, weight, eps=1e-6):\n    _run(0, 0)\n",
        "CompileError",
    ),
    "raises": ("def kernel_fn(x, weight, eps=1e-6):\n    raise RuntimeError('no more shared memory')\n", "shared memory"),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fallback", [None, "inductor"])
@pytest.mark.parametrize("why", BROKEN)
def test_a_kernel_that_does_not_work_here_leaves_the_model_as_it_is(why, fallback, caplog) -> None:
    source, reason = BROKEN[why]
    norm = RMSNorm(64).requires_grad_(False)
    applied = apply(nn.Sequential(norm, norm), [winner(source)], fallback)
    with caplog.at_level(logging.WARNING, "autokernel"):
        for _ in range(3):
            torch.testing.assert_close(applied(X), norm(norm(X)), atol=1e-5, rtol=1e-5)
    (record,) = (r for r in caplog.records if r.name == "autokernel")
    assert reason in record.getMessage()


def test_one_kernel_that_does_not_work_leaves_the_others_in() -> None:
    model = nn.Sequential(RMSNorm(64), nn.LayerNorm(64)).requires_grad_(False)
    norm, layernorm = sites_of(model, X)
    broken, zero = BROKEN["no C++"][0], ZERO.replace("weight, ", "weight, bias=None, ")
    winners = [
        Winner(Target(site.kernel_type, site.kernel_type, "cpp", "cpu", (WeightedCase(site.case),)), source)
        for site, source in ((norm, broken), (layernorm, zero))
    ]
    replacer = Replacer(winners)
    assert compile_with_kernels(model, replacer)(X).abs().max() == 0
    assert [r.target for r in replacer.replaced] == ["layernorm"] and len(replacer.left) == 1


def test_a_call_that_failed_in_a_kernel_is_not_repeated_where_something_was_written() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(64).requires_grad_(False)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.norm(x)

    model = Counting()
    with pytest.raises(RuntimeError, match="shared memory"):
        compile_with_kernels(model, Replacer([winner(BROKEN["raises"][0])]))(X)
    assert model.calls == 1


def test_the_models_own_error_is_its_own() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(64).requires_grad_(False)

        def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return self.norm(x)[indices]

    replacer = Replacer([winner(ZERO)])
    optimised = compile_with_kernels(Picky(), replacer)
    assert optimised(X, torch.tensor([3])).abs().max() == 0
    with pytest.raises(IndexError, match="999"):
        optimised(X, torch.tensor([999]))
    assert optimised(X, torch.tensor([4])).abs().max() == 0 and replacer.left == []


def refusing(only_kernels: bool):
    def compiler(graph, inputs):
        if not only_kernels or any("autokernel" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("this compiler knows no such graph")
        return graph.forward

    return compiler


@pytest.mark.parametrize("only_kernels", [True, False])
def test_a_graph_that_the_fallback_cannot_compile_runs_as_it_is(only_kernels: bool) -> None:
    name = f"refusing_{only_kernels}".lower()
    torch._dynamo.register_backend(refusing(only_kernels), name)
    norm = RMSNorm(64).requires_grad_(False)
    replacer = Replacer([winner(ZERO)], name)
    torch.testing.assert_close(compile_with_kernels(norm, replacer)(X), norm(X))
    assert replacer.replaced == []
    assert len(replacer.left) == (1 if only_kernels else 2) and all("no such graph" in why for why in replacer.left)


@torch._dynamo.allow_in_graph
def untraced(x: torch.Tensor) -> torch.Tensor:
    if get_proxy_mode():
        raise NotImplementedError("only Dynamo can trace this function")
    return x + 1


def test_a_graph_that_cannot_be_normalised_runs_as_it_is(caplog) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(64).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(untraced(x))

    model = Model()
    captured = capture.capture(model, (X,), {})
    (why,) = captured.breaks
    assert captured.graphs == () and "only Dynamo can trace" in why
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "autokernel"):
        torch.testing.assert_close(apply(model, [winner(ZERO)])(X), model.forward(X))
    assert sum("only Dynamo can trace" in record.getMessage() for record in caplog.records) == 1


def test_what_dynamo_fails_at_runs_as_it_is() -> None:
    """A model that tries whether a view is possible: PyTorch 2.13's Dynamo takes that error for the program's end."""

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = RMSNorm(64).requires_grad_(False), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y = self.norm(x)
            try:
                return y.view(-1, 3)
            except RuntimeError:
                return y.view(-1, 4)

    model, x = Trying(), torch.randn(256, 64)
    failing = torch._dynamo.exc.TorchRuntimeError
    with pytest.raises(failing) if torch.__version__.startswith("2.13") else contextlib.suppress(failing):
        torch.compile(model, backend="eager")(x)
    expected, torchs = model(x), torch._dynamo.config.suppress_errors
    model.calls = 0
    applied = apply(model, [], "eager")
    torch.testing.assert_close(applied(x), expected)
    said = [why for why in explain(applied).left if "not captured" in why and "return y.view(-1, 3)" in why]
    assert said or not torch.__version__.startswith("2.13")
    torch.testing.assert_close(applied(x[:100]), expected[:1600])
    assert model.calls == 2 and torch._dynamo.config.suppress_errors == torchs


class Untraced(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_what_breaks_a_pass_that_has_no_graph_is_said() -> None:
    """Nothing fails, so Dynamo reports no failure, and nothing is captured: it does not look into what is PyTorch's own."""
    layers, x = nn.Sequential(Untraced(64, 64), nn.ReLU()).requires_grad_(False), torch.randn(2, 64)
    applied = apply(layers, [winner(ZERO)])
    torch.testing.assert_close(applied(x), layers[1](layers[0](x)))
    assert explain(applied).graphs == 0
    (why,) = (why for why in explain(applied).left if "not captured" in why)
    assert "disable" in why and why in str(explain(applied))


class Remembering(nn.Module):
    """Has a longer list after each call; a second part of it is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Listing(), Normed(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.sum())
        return x + sum(self.seen)


class Normed(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.slow
def test_what_changes_at_each_call_is_compiled_a_few_times() -> None:
    model = Remembering().requires_grad_(False)
    applied, compiled = apply(copy.deepcopy(model), [winner(ZERO)]), []
    for _ in range(20):
        before = len(explain(applied).sites["norm"])
        assert applied(X).abs().max() == 0  # the kernel runs wherever the list is
        torch.testing.assert_close(applied.inner.seen, [X.sum()] * len(applied.inner.seen))
        compiled.append(len(explain(applied).sites["norm"]) > before)
    assert len(applied.inner.seen) == 20
    assert sum(compiled) < 15 and not any(compiled[-5:])
    whys = [why for why in explain(applied).left if "compiled no more" in why]
    assert len(whys) == 3 and all("seen) ==" in why for why in whys)
    assert f"left as it was: {whys[0]}" in str(explain(applied))


def test_what_changes_now_and_then_is_compiled_whenever_it_does() -> None:
    """As the number of an epoch does."""

    class Counted(Normed):
        epoch = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.epoch

    model = apply(Counted(64).requires_grad_(False), [winner(ZERO)])
    for model.epoch in range(8):
        for _ in range(10):
            assert torch.equal(model(X), torch.full_like(X, model.epoch))
    assert not explain(model).left


def test_counters_on_a_module_become_inputs() -> None:
    class Counting(Normed):
        def __init__(self) -> None:
            super().__init__(64)
            self.calls, self.seen = 0, {"rows": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen["rows"] += x.shape[0]
            return super().forward(x) + self.calls

    model = apply(Counting().requires_grad_(False), [winner(ZERO)])
    for call in range(1, 11):
        assert torch.equal(model(X), torch.full_like(X, call))  # the kernel runs, whatever the count is
    assert (model.calls, model.seen["rows"]) == (10, 10 * X.shape[0]) and not explain(model).left
    assert len(explain(model).sites["norm"]) < 10  # else one for each call


def test_a_call_that_makes_the_parameters_of_lazy_modules() -> None:
    model = apply(nn.Sequential(nn.LazyLinear(X.shape[-1]), Normed(64)), [winner(ZERO)])
    with torch.no_grad():
        assert model(X).abs().max() > 0  # as it is: there are hooks that make them, and go
        assert model(X).abs().max() == 0
    assert not any("other hooks" in why for why in explain(model).left)


def test_nothing_is_idle_before_a_call_is_compiled() -> None:
    model = apply(Normed(64).requires_grad_(False), [winner(ZERO)])
    torch.vmap(model)(X[None])
    assert not any("nothing is replaced" in why for why in explain(model).left)
    assert model(X).abs().max() == 0


def test_a_model_is_idle_until_a_call_has_a_kernel() -> None:
    model = apply(Normed(64).requires_grad_(False), [winner(ZERO)])
    assert model(X[:100]).abs().max() > 0 and any("nothing is replaced" in why for why in explain(model).left)
    assert model(X).abs().max() == 0 and not explain(model).left


@pytest.mark.slow
def test_states_that_come_and_go_are_all_compiled() -> None:
    """Dynamo names what differs from the version before, be that one of another state."""

    class Scaled(Normed):
        def forward(self, x: torch.Tensor, word: str) -> torch.Tensor:
            return super().forward(x) * len(word)

    model = apply(Scaled(64), [winner(ZERO)])
    for word in ("a", "bc", "def", "g", "hi", "jkl", "mn", "o"):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                assert model(X, word).abs().max() == 0
    assert len(explain(model).sites["norm"]) == 16 and not explain(model).left


@pytest.mark.slow
def test_layers_that_differ_in_a_number_are_all_compiled() -> None:
    class Layer(Normed):
        def __init__(self, index: int) -> None:
            super().__init__(64)
            self.index = index

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x) * self.index

    model = apply(nn.Sequential(*map(Layer, range(12))).requires_grad_(False), [winner(ZERO)])
    for _ in range(6):
        assert model(X).abs().max() == 0
    assert len(explain(model).sites["norm"]) >= 12 and not explain(model).left


class Reads(nn.Module):
    """Reads a number, at which Dynamo breaks off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 1e9 else x + 1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("first", [Reads, nn.Identity], ids=["at the start", "amid"])
def test_a_break_within_a_sequence_costs_its_neighbours_no_kernels(first: type[nn.Module]) -> None:
    layers = nn.Sequential(first(), nn.RMSNorm(64, 1e-6), nn.Sequential(Reads(), nn.RMSNorm(64, 1e-6)), Reads())
    model = nn.Sequential(layers, nn.Flatten(0)).requires_grad_(False)
    kernel, weighted = winner(ZERO), [site.case for site in sites_of(model, X) if site.kernel_type == "rmsnorm"]
    assert len(weighted) == 2
    kernel = replace(kernel, target=replace(kernel.target, cases=tuple(map(WeightedCase, weighted))))
    expected, applied = model(X), apply(copy.deepcopy(model), [kernel])
    torch.testing.assert_close(applied(X), expected)  # the breaks are not known before the first call
    for _ in range(2):
        assert torch.equal(applied(X), torch.full_like(expected, 1))  # of kernels that give zeros
    assert not any("nothing is replaced" in why for why in explain(applied).left)
    applied[0][1] = nn.Identity()
    applied[0].append(Reads())
    assert torch.equal(applied(X), torch.full_like(expected, 2))
    assert not any("forward" in vars(module) for module in applied.modules())
    with pytest.raises(TypeError, match=r"Sequential\.forward\(\) takes 2 positional arguments but 3 were given"):
        applied(X, X)


def test_torchscript_within_a_function_costs_the_rest_no_kernels() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.script = RMSNorm(64), torch.jit.trace(nn.Tanh(), X)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(2 * self.script(self.norm(x)) + self.script(x))

    model = Half().requires_grad_(False)
    assert len(sites_of(model, X)) == 2
    assert any("TorchScript runs as it is" in why for why in capture.capture(model, (X,), {}).breaks)
    applied = apply(model, [winner(ZERO)])
    assert applied(X).abs().max() == 0 and len(explain(applied).sites["norm"]) == 2


def test_a_model_that_refuses_to_be_given_attributes() -> None:
    class Frozen(RMSNorm):
        def __setattr__(self, name: str, v: object) -> None:
            if "weight" in self._parameters:
                raise AttributeError(f"frozen: {name}")
            super().__setattr__(name, v)

    model = Frozen(64).requires_grad_(False)
    assert len(sites_of(model, X)) == 1
    assert apply(model, [winner(ZERO)])(X).abs().max() == 0
    assert unapply(model)(X).abs().max() > 0


def test_a_model_that_returns_what_it_was_given_is_captured() -> None:
    """Dynamo looks at it when it is returned, as at a generator that is asked for all that it has."""

    class Keeping(Normed):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return y

    model, y = apply(Keeping(64).requires_grad_(False), [winner(ZERO)]), torch.randn(3)
    assert model(X, y) is y and model.kept.abs().max() == 0


def looked_up(x: torch.Tensor, i: torch.Tensor) -> None:
    torch.nn.functional.embedding(i, x).relu()


def decomposed(x: torch.Tensor, i: torch.Tensor) -> None:
    torch.linalg.cholesky(torch.eye(2) * (5 - i))


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("function", [looked_up, decomposed])
def test_what_nobody_uses_raises_as_it_does(function: Callable[..., None], fallback: str | None) -> None:
    class Checking(Normed):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            function(x, i)
            return super().forward(x)

    applied = apply(Checking(64).requires_grad_(False), [winner(ZERO)], fallback)
    has_kernel = applied(X, torch.tensor([1, 2])).abs().max() == 0
    assert has_kernel or any("nobody uses" in why for why in explain(applied).left)
    with pytest.raises((IndexError, torch.linalg.LinAlgError)):
        applied(X, torch.tensor([1, 1000]))


def test_an_operator_that_writes_is_no_check() -> None:
    """Nobody uses its result, for it has none."""

    @torch.library.custom_op("boundary::note", mutates_args={"kept"})
    def note(kept: torch.Tensor, x: torch.Tensor) -> None:
        kept.copy_(x)

    class Noting(Normed):
        def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            note(kept, x)
            return super().forward(x)

    applied, kept = apply(Noting(64).requires_grad_(False), [winner(ZERO)], "aot_eager"), torch.zeros_like(X)
    assert applied(X, kept).abs().max() == 0 and torch.equal(kept, X) and not explain(applied).left


@pytest.mark.parametrize("number, dtype", [(numpy.array(2.5), torch.float64), (numpy.float64(2.5), torch.float32)])
def test_an_array_without_dimensions_decides_of_the_dtype(number: object, dtype: torch.dtype) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = Normed(64), number

        def forward(self, x: torch.Tensor, scale: object) -> torch.Tensor:
            return self.norm(x) * scale + torch.ones(64) / self.scale

    model = Scaling().requires_grad_(False)
    assert model(X, number).dtype is dtype
    result = apply(model, [winner(ZERO)])(X, number)
    torch.testing.assert_close(result, torch.full(X.shape, 0.4, dtype=dtype))  # the norm is a kernel's zeros


def test_gradients_that_are_computed_in_a_pass_without_gradients() -> None:
    """In a graph that Dynamo begins where autograd is off, and which switches it on."""

    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.norm(at).sum(), at)
            return x - force

    model = Guided()
    with torch.no_grad():
        expected = model(X)
        applied = apply(model, [winner(ZERO)])
        torch.testing.assert_close(applied(X), expected)
    assert explain(applied).sites["norm"]


@pytest.mark.parametrize("function", [lambda x: x.numpy().max(), lambda x: numpy.maximum(x, 0.5), numpy.asarray])
def test_what_numpy_computes_stays_what_it_is(function: Callable[[torch.Tensor], object]) -> None:
    """Of an array it makes a number where no dimension is left, and of a tensor a tensor."""

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Normed(64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, object]:
            return self.norm(x), function(x)

    kernel, made = winner(ZERO), Measured()(X)[1]
    result, ours = apply(Measured().requires_grad_(False), [kernel])(X)
    assert result.abs().max() == 0 and type(ours) is type(made) and (numpy.asarray(ours) == numpy.asarray(made)).all()
