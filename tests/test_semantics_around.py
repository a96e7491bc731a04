"""With kernels in it, a model is the same beside what is around it: threads, transforms, hooks, modes, settings."""

import copy
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from semantic_models import Function, everywhere
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autokernel.integration.apply import apply, compile_with_kernels, explain
from autokernel.model.capture import as_applied
from autokernel.model.settings import Settings
from benchmarks.random_programs import Everywhere, finder
from models.llama import RMSNorm

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


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


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("cold", [True, False])
def test_fake_tensors_have_no_addresses_for_a_kernel(cold: bool, inside: bool) -> None:
    model, x = Function(lambda s, x: s.norm(s.a(x))).requires_grad_(False), torch.randn(2, 8)
    applied, mode = apply(copy.deepcopy(model), [], "eager"), FakeTensorMode(allow_non_fake_inputs=True)
    if not cold:
        applied(x)
    given = mode.from_tensor(x)
    with mode if inside else nullcontext():
        assert isinstance(applied(given), FakeTensor)
    assert explain(applied).graphs == (not cold) and explain(applied).left
    torch.testing.assert_close(applied(x), model(x))
    assert explain(applied).graphs == 1


def test_weights_that_are_fake_tensors() -> None:
    with FakeTensorMode():
        applied = apply(Function(lambda s, x: s.norm(s.a(x))), [], "eager")
        assert applied(torch.randn(2, 8)).shape == (2, 8)
    assert explain(applied).graphs == 0


def test_a_mode_of_functions_sees_those_of_the_model() -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model, x = Function(lambda s, x: F.gelu(s.a(x))).requires_grad_(False), torch.randn(2, 8)
    applied = apply(copy.deepcopy(model), [], "eager")
    for _ in range(2):
        with Seeing() as theirs:
            expected = model(x)
        with Seeing() as ours:
            result = applied(x)
        torch.testing.assert_close(result, expected)
        assert ours.seen == theirs.seen
    assert explain(applied).graphs == 0 and [("TorchFunctionMode" in why) for why in explain(applied).left] == [True]
    with torch.device("cpu"):  # a mode as well, which sees to a default
        torch.testing.assert_close(applied(x), model(x))
    assert explain(applied).graphs == 1


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


@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_inside_of_a_model(frozen: bool) -> None:
    """A tangent of a gradient: traced without gradients, there was none, and the graph was left as it is."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        return s.norm(s.a(x)), torch.vmap(torch.func.hessian(lambda t: s.b(t).tanh().sum()))(x)

    model, replacer, x = Function(forward).requires_grad_(not frozen), everywhere(), torch.randn(2, 8)
    ours, theirs = compile_with_kernels(model, replacer)(x), model(x)
    torch.testing.assert_close(ours, theirs)
    assert replacer.replaced and not replacer.left
    if not frozen:
        made = [torch.autograd.grad(y[1].square().sum(), list(model.b.parameters())) for y in (ours, theirs)]
        torch.testing.assert_close(*made)


@pytest.mark.parametrize("fallback", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_jacobian_inside_of_a_model_in_inference_mode(fallback: str | None) -> None:
    """PyTorch switches that mode off for its gradients, but not where Dynamo traces it; one graph serves both modes."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        return s.norm(s.a(x)), torch.vmap(torch.func.jacrev(lambda t: s.b(t).tanh()))(x)

    model, x = Function(forward), torch.randn(2, 8)
    compiled = compile_with_kernels(model, replacer := everywhere(fallback))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(x), model(x))
    assert replacer.replaced and not replacer.left


def second_derivatives(s: Function, x: Tensor, i: Tensor) -> Tensor:
    return s.norm(torch.func.hessian(lambda t: F.gelu(s.a(t))[i].sum())(x[0]))


def a_tangent(s: Function, x: Tensor, i: Tensor) -> Tensor:
    return s.norm(torch.func.jvp(lambda t: F.gelu(s.a(t))[i], (x,), (x * 2,))[1])


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
@pytest.mark.parametrize("function", [second_derivatives, a_tangent])
def test_an_error_inside_of_a_transform_leaves_no_level_of_it(function: Callable[..., Any], fallback: str | None) -> None:
    """There is one level of tangents at most: were it not left, no other could be entered in this process."""
    model, replacer = Function(function), Everywhere((), fallback, finder=finder())
    compiled, x = compile_with_kernels(model, replacer), torch.randn(2, 8)
    for i in (torch.tensor([0]), torch.tensor([9]), torch.tensor([1])):
        if i < 8:
            torch.testing.assert_close(compiled(x, i), model(x, i), atol=1e-4, rtol=1e-4)
            continue
        with pytest.raises(IndexError):
            compiled(x, i)


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


def test_an_applied_model_is_traced_as_it_was_written() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).requires_grad_(False), torch.randn(2, 8)
    expected = model(x)
    apply(model, [], "eager")
    for traced in (torch.jit.trace(model, x), torch.fx.symbolic_trace(model), make_fx(model)(x)):
        torch.testing.assert_close(traced(x), expected)


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
