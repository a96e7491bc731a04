"""Kernels as operators: they trace, export, have the original's gradients, and run only where they were registered for."""

import copy
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied_by_inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel.gate.checks.inputs import fill_inputs
from autokernel.integration import ops
from autokernel.integration.apply import apply
from autokernel.integration.ops import direct, original, register, register_visible, traced, visible
from autokernel.integration.weights import with_known_weights
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.spec import import_file, kernel_types, load_spec
from autokernel.target import Target, WeightedCase

PREPARES = """
import torch, weakref
KERNEL_TYPE, BACKEND, PREPARED = "rmsnorm", "cpp", {}
def kernel_fn(x, weight, eps):
    kept, double = PREPARED.get(id(weight), (lambda: None, None))
    if kept() is not weight:
        double = weight.detach().double()
        PREPARED[id(weight)] = weakref.ref(weight), double
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], double, eps).to(x.dtype)
"""


def op_of(kernel_type: str, overload: str = "default") -> torch._ops.OpOverload:
    path = load_spec(kernel_type).starters("cpp")["cpp_kernel"]
    kernel = import_file(path, f"starter_{kernel_type}").kernel_fn
    return getattr(register(f"test_{kernel_type}", load_spec(kernel_type), kernel, "cpu"), overload)


def arguments_of(kernel_type: str, requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> list:
    spec = load_spec(kernel_type)
    filled = fill_inputs(spec, spec.case(spec.smoke, dtype), seed=0)
    op = op_of(kernel_type)
    values = [filled.get(a.name, a.default_value if a.has_default_value() else None) for a in op._schema.arguments]
    return [v.requires_grad_() if requires_grad and is_number(v) else v for v in values]


def is_number(v: object) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()


def gradients(call, arguments: list) -> tuple[Tensor, ...]:
    result = call(*arguments)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(result, [a for a in arguments if is_number(a)], direction)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kernel_type", kernel_types())
def test_opcheck(kernel_type: str) -> None:
    torch.library.opcheck(op_of(kernel_type), arguments_of(kernel_type))
    torch.library.opcheck(op_of(kernel_type, "no_grad"), arguments_of(kernel_type))
    torch.library.opcheck(op_of(kernel_type), arguments_of(kernel_type, requires_grad=True), atol=1e-3, rtol=1e-3)


def test_a_kernel_that_keeps_a_workspace_is_called_by_one_thread_at_a_time() -> None:
    """A server calls a model from several; the gate calls a kernel from one."""
    workspace = torch.empty(8, 16)

    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        workspace.copy_(x)
        time.sleep(0.005)  # where others have the interpreter
        return workspace * weight

    op = register("test_workspace", load_spec("rmsnorm"), kernel, "cpu")
    weight = torch.ones(16)
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda number: op(torch.full((8, 16), float(number)), weight), range(20))
        assert [result.unique().tolist() for result in results] == [[float(number)] for number in range(20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_kernel_makes_what_it_was_proven_to_make(device: str | None, dtype: torch.dtype) -> None:
    """It hands on addresses: of half as much memory it would write behind that, and on another device to nothing."""
    made: list[Tensor] = []

    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        made.append(torch.empty(*x.shape))
        return torch.zeros(x.shape, dtype=x.dtype)

    op = register(f"test_defaults_{device}_{dtype.itemsize}", load_spec("rmsnorm"), kernel, "cpu")
    x, weight = torch.ones(8, 16, dtype=torch.float16), torch.ones(16, dtype=torch.float16)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if device else nullcontext():
            result = op(x, weight)
            assert torch.empty(1).is_meta == bool(device) and torch.empty(1).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert (made[0].dtype, made[0].device.type, result.device.type) == (torch.float32, "cpu", "cpu")


@pytest.mark.parametrize("fallback", [None, "inductor"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_kernel_that_has_prepared_a_weight_sees_it_written_to(fallback: str | None, with_gradients: bool) -> None:
    """As by an optimizer's step, load_state_dict(), or other memory."""
    model, x = nn.RMSNorm(64), torch.randn(256, 64)
    original = copy.deepcopy(model)
    (graph,) = capture(model.requires_grad_(False), (x,), {}).graphs
    (site,) = SiteFinder().find(graph.module)
    winner = Winner(Target("norm", "rmsnorm", "cpp", "cpu", (WeightedCase(site.case),)), PREPARES)
    apply(model.requires_grad_(True), [winner], fallback)
    with torch.set_grad_enabled(with_gradients):
        for change in (lambda w: None, lambda w: w.mul_(2), lambda w: setattr(w, "data", torch.randn(64)), torch.relu_):
            for of in (model, original):
                torch.manual_seed(0)
                with torch.no_grad():
                    change(of.weight)
            torch.testing.assert_close(model(x), original(x))


@pytest.mark.gpu
@pytest.mark.parametrize("fallback", [None, "inductor", "reduce-overhead"])
def test_a_kernel_on_a_gpu_that_has_prepared_a_weight_sees_it_written_to(fallback: str | None) -> None:
    """A CUDA graph is replayed without the kernel's Python."""
    model, x = nn.RMSNorm(64).cuda().requires_grad_(False), torch.randn(256, 64, device="cuda")
    original = copy.deepcopy(model)
    (graph,) = capture(model, (x,), {}).graphs
    (site,) = SiteFinder().find(graph.module)
    target = Target("norm", "rmsnorm", "triton", "cuda", (WeightedCase(site.case),))
    apply(model, [Winner(target, PREPARES.replace("cpp", "triton"))], fallback)
    for _ in range(3):
        for _ in range(4):
            torch.testing.assert_close(model(x).clone(), original(x))
        for of in (model, original):
            of.weight.mul_(1.5)


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
def test_what_stands_for_a_weight_goes_with_it(kind: type[Tensor]) -> None:
    handed = []
    kernel = with_known_weights({"weight"}, lambda weight: handed.append(ref(weight)))
    weight = torch.zeros(8) if kind is Tensor else nn.Parameter(torch.zeros(8), requires_grad=False)
    for _ in range(2):
        kernel(weight=weight)
        kernel(weight=weight)
        weight.add_(1)
    which = [handed[0]() is weight, handed[1]() is weight, handed[2]() is weight, handed[3]() is handed[2]()]
    assert which == [True, True, False, True]
    del weight
    assert [of() is None for of in handed] == [True] * 4


@pytest.mark.parametrize("is_inference", [True, False])
def test_of_a_weight_that_nobody_tells_of_nothing_is_kept(is_inference: bool) -> None:
    """One of inference mode has no version; one that PyTorch may swap must not be referred to weakly."""
    handed = []
    kernel = with_known_weights({"weight"}, lambda weight: handed.append(weight))
    with torch.inference_mode(is_inference):
        weight = nn.Parameter(torch.zeros(8), requires_grad=False)
    torch.__future__.set_swap_module_params_on_conversion(not is_inference)
    try:
        for _ in range(2):
            kernel(weight=weight)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    first, second = handed
    assert first is not second and weight is not first and weight is not second
    assert first.data_ptr() == second.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("kernel_type", kernel_types())
def test_forward_and_gradients_are_the_originals(kernel_type: str) -> None:
    arguments, spec = arguments_of(kernel_type, requires_grad=True), load_spec(kernel_type)
    torch.testing.assert_close(op_of(kernel_type)(*arguments), original(spec, *arguments), atol=1e-4, rtol=1e-4)
    expected = gradients(lambda *a: original(spec, *a), arguments)
    torch.testing.assert_close(gradients(op_of(kernel_type), arguments), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel_type", kernel_types())
def test_gradients_in_half_precision_are_the_originals_own(kernel_type: str, dtype: torch.dtype) -> None:
    """The backward pass computes the original's again: what the kernel rounds differently does not reach it."""
    arguments, spec = arguments_of(kernel_type, requires_grad=True, dtype=dtype), load_spec(kernel_type)
    expected = gradients(lambda *a: original(spec, *a), arguments)
    torch.testing.assert_close(gradients(op_of(kernel_type), arguments), expected, atol=0, rtol=0)


@pytest.mark.parametrize("kernel_type", kernel_types())
def test_gradients_are_those_of_the_function(kernel_type: str) -> None:
    """By finite differences in float64, which the starters do not take: the oracle stands in for a kernel."""
    spec = load_spec(kernel_type)
    op = register(f"test_float64_{kernel_type}", spec, spec.oracle, "cpu")
    drawn = arguments_of(kernel_type)
    inputs = [a.double().detach().requires_grad_() if is_number(a) else a for a in drawn]
    assert torch.autograd.gradcheck(op, inputs, fast_mode=True)


def test_defaults_are_the_oracles_whatever_the_kernels_are() -> None:
    def kernel(weight: Tensor, x: Tensor, eps: float = 100.0) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    x, weight = torch.randn(3, 8), torch.randn(8)
    op = register("test_defaults", load_spec("rmsnorm"), kernel, "cpu")
    torch.testing.assert_close(op(x, weight), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))


def test_one_argument_computed_from_another_counts_once() -> None:
    spec, op = load_spec("matmul"), op_of("matmul")
    A = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(original(spec, A, A.sin()).sum(), A)
    (got,) = torch.autograd.grad(op(A, A.sin()).sum(), A)
    torch.testing.assert_close(got, expected)


def test_gradients_have_gradients() -> None:
    def second(call) -> Tensor:
        x, weight = (a.detach().double().float().requires_grad_() for a in arguments_of("rmsnorm")[:2])
        (first,) = torch.autograd.grad(call(x, weight, 1e-6).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    spec = load_spec("rmsnorm")
    torch.testing.assert_close(second(op_of("rmsnorm")), second(lambda *a: original(spec, *a)), atol=1e-3, rtol=1e-3)


def test_autocast_changes_neither_the_kernel_nor_its_gradient() -> None:
    A, B = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        result = op_of("matmul")(A, B)
        assert result.dtype == torch.float32
        result.sum().backward()
    torch.testing.assert_close(A.grad, torch.ones(8, 8) @ B.T)


def test_autocast_changes_no_product_that_a_kernel_leaves_to_pytorch() -> None:
    A, B = torch.randn(8, 8), torch.randn(8, 8)
    op = register("test_products", load_spec("matmul"), lambda A, B: torch.mm(A, B), "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        result = op(A, B)
    assert result.dtype == torch.float32 and torch.equal(result, A @ B)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.op = op_of("rmsnorm")

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x + 1, self.weight, 1e-5) * 2


def test_a_model_with_kernels_exports(tmp_path) -> None:
    model, x = Norm(), torch.randn(3, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("grad", [True, False])
def test_inductor_compiles_around_a_kernel_without_a_break(grad: bool) -> None:
    model, x = Norm(), torch.randn(3, 8)
    with torch.set_grad_enabled(grad):
        got, expected = torch.compile(model, fullgraph=True)(x), model(x)
    torch.testing.assert_close(got, expected)
    if grad:
        gradients = [torch.autograd.grad(y.square().sum(), model.weight) for y in (got, expected)]
        torch.testing.assert_close(*gradients)


def test_other_devices_have_no_such_kernel() -> None:
    op = register("test_elsewhere", load_spec("matmul"), lambda A, B: A @ B, "cuda")
    with pytest.raises(NotImplementedError, match="test_elsewhere"):
        op(torch.randn(2, 2), torch.randn(2, 2))


# --- Triton kernels as Inductor sees them -----------------------------------------------------------------------------

TRITON = [
    (kernel_type, path) for kernel_type in kernel_types() for path in load_spec(kernel_type).starters("triton").values()
]


@pytest.mark.parametrize("kernel_type, path", TRITON, ids=lambda v: v if isinstance(v, str) else v.stem)
def test_a_triton_kernel_is_seen_as_its_launches_unless_only_real_tensors_will_do(kernel_type: str, path: Path) -> None:
    spec = load_spec(kernel_type)
    described = spec.case(spec.smoke, torch.float16)
    defaults = {name: p.default for name, p in inspect.signature(spec.oracle).parameters.items()}
    case = replace(described, args=defaults | described.args)
    kernel = visible(spec, import_file(path, f"seen_{kernel_type}_{path.stem}").kernel_fn)
    graph = traced(spec, kernel, case, torch.device("cpu"))
    assert (graph is not None) == (path.stem != "triton_tma")
    if graph:
        launches = direct(graph)
        assert all(node.target is not triton_kernel_wrapper_mutation for node in graph.graph.nodes)
        assert launches.kernels and launches.not_copied == ()


OF_MODULES = """
import torch
import triton
import triton.language as tl
from triton.language import math{alias}

ROWS = tl.constexpr(1)

@triton.jit
def helper(x):
    return {name}.exp(x) * float(ROWS)

@triton.jit
def kernel(x_ptr, y_ptr, N: tl.constexpr):
    columns = tl.arange(0, N)
    tl.store(y_ptr + columns, helper(tl.load(x_ptr + columns)))

def kernel_fn(x, dim=-1):
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, y, N=64)
    return y
"""


@pytest.mark.parametrize("name, missing", (("math", ("math",)), ("tl_math", ())))
def test_a_launch_whose_text_inductor_would_copy_without_a_module_is_known(name: str, missing: Any, tmp_path: Path) -> None:
    spec, path = load_spec("softmax"), tmp_path / "kernel.py"
    path.write_text(OF_MODULES.format(name=name, alias=f" as {name}" if name != "math" else ""))
    described = spec.case(spec.smoke, torch.float32)
    case = replace(described, args={"dim": -1} | described.args)
    graph = traced(spec, visible(spec, import_file(path, f"of_{name}").kernel_fn), case, torch.device("cpu"))
    assert graph is not None
    launches = direct(graph)
    is_imported = f"import triton.language.math as {name}" in copied_by_inductor(launches.kernels[0])
    assert launches.not_copied == (() if is_imported else missing), "PyTorch 2.15 imports Triton's modules there"


@pytest.mark.parametrize("size, seen", ((1024, True), (2048, False)))
def test_products_are_seen_up_to_the_size_from_which_tma_fetches_them(size: int, seen: bool) -> None:
    spec = load_spec("matmul")
    kernel = visible(spec, import_file(spec.starters("triton")["triton_kernel"], "seen_matmul").kernel_fn)
    case = spec.case({"M": size, "K": size, "N": size}, torch.float16)
    assert (traced(spec, kernel, case, torch.device("cpu")) is not None) == seen


def test_what_launches_write_is_found_once_for_all_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, find = [], getattr(triton_kernel_wrap, ops.ANALYSIS)

    def counted(*given: Any) -> Any:
        asked.append(find(*given))
        return asked[-1]

    monkeypatch.setattr(triton_kernel_wrap, ops.ANALYSIS, counted)
    monkeypatch.setattr(ops, "_analysed", {})
    spec = load_spec("layernorm")
    kernel = import_file(spec.starters("triton")["triton_kernel"], "launched_layernorm").kernel_fn
    operator = register_visible("layernorm_of_test_ops", spec, kernel, "cpu")

    graph, found = torch.fx.Graph(), []
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    for eps in (1e-5, 1e-5, 1e-5, 1e-6):
        x = graph.call_function(operator, (x, weight, bias, eps))
    graph.output((x,))

    def keep(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found.append(traced)
        return make_boxed_func(traced.forward)

    with torch.no_grad(), ops.launches_known():
        for dtype in (torch.float32, torch.float16):
            given = [torch.ones(size, dtype=dtype) for size in ((4, 256), (256,), (256,))]
            aot_module_simplified(torch.fx.GraphModule({}, graph), given, keep)
    launches = [node for graph in found for node in graph.graph.nodes if "tensors_to_clone" in node.kwargs]
    assert len(launches) == 8 and len(asked) == 4  # of two eps and two dtypes
    assert all(sorted(node.kwargs["tensors_to_clone"]) == ["bias", "weight", "x", "y"] for node in launches)
    assert getattr(triton_kernel_wrap, ops.ANALYSIS) is counted


def test_what_needs_an_address_of_a_tensor_gets_it_from_the_start_of_its_storage() -> None:
    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return x * (x.data_ptr() % 16) + weight * (weight.data_ptr() % 16)

    storage = torch.ones(9)
    with FakeTensorMode() as mode:
        x, weight = mode.from_tensor(storage)[1:], mode.from_tensor(storage)[:8]
        graph = make_fx(visible(load_spec("rmsnorm"), kernel))(x, weight, 1e-6)
    torch.testing.assert_close(graph(torch.ones(8), torch.ones(8), None), torch.full((8,), 4.0))
