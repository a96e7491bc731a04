"""Kernels back in a model: they run where they were proven and nowhere else, and the model stays itself."""

import copy

import pytest
import torch

from autokernel.apply import Replacer, Winner, apply
from autokernel.capture import capture
from autokernel.extraction import make_plan
from autokernel.match import SiteFinder
from autokernel.profiler import profile_workload
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase
from autokernel.workload import Workload
from models.llama import CompactLlama, RMSNorm

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


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def test_kernels_replace_their_sites_and_the_result_is_the_same(model, tokens, winners) -> None:
    replacer = Replacer(winners)
    with torch.no_grad():
        torch.testing.assert_close(apply(model, winners, replacer)(tokens), model(tokens))
    counts = {name: sum(r.target == name for r in replacer.replaced) for name in TYPES}
    assert counts == {"rmsnorm": 5, "rotary_embedding": 4, "matmul": 9}


def test_the_kernel_is_what_runs(model, tokens, winners) -> None:
    wrong = Winner(winners[0].target, WRONG)
    with torch.no_grad():
        assert apply(model, [wrong])(tokens).abs().max() == 0  # the last norm feeds the output


def test_many_sets_of_winners_for_one_model() -> None:
    """Leaving winners out one at a time compiles the same function anew each time."""
    norm = RMSNorm(64).requires_grad_(False)
    x = torch.randn(256, 64)
    (graph,) = capture(norm, (x,), {}).graphs
    (site,) = SiteFinder().find(graph.module)
    target = Target("norm", "rmsnorm", "cpp", "cpu", (WeightedCase(site.case),))
    replacers = [Replacer([Winner(target, WRONG)]) for _ in range(12)]
    results = [apply(norm, [], replacer)(x) for replacer in replacers]
    assert all(result.abs().max() == 0 for result in results)


def test_other_shapes_run_the_original(model, tokens, winners) -> None:
    replacer = Replacer([Winner(winners[0].target, WRONG)])
    with torch.no_grad():
        torch.testing.assert_close(apply(model, [], replacer)(tokens[:, :200]), model(tokens[:, :200]))
    assert replacer.replaced == []


def test_with_gradients_the_original_runs_and_they_are_the_same(model, tokens, winners) -> None:
    def gradients(call, copied):
        call(tokens).square().mean().backward()
        return [parameter.grad for parameter in copied.parameters()]

    original, replaced = copy.deepcopy(model), copy.deepcopy(model)
    optimised = apply(replaced, [Winner(winners[0].target, WRONG)])
    with torch.no_grad():
        assert optimised(tokens).abs().max() == 0  # compiled for inference first
    torch.testing.assert_close(gradients(optimised, replaced), gradients(original, original))


def test_parameters_are_shared(model, tokens, winners) -> None:
    changing = copy.deepcopy(model)
    optimised = apply(changing, winners)
    with torch.no_grad():
        before = optimised(tokens)
        changing.norm.weight.mul_(2)
        torch.testing.assert_close(optimised(tokens), changing(tokens))
    assert not torch.allclose(before, changing(tokens))
    assert list(changing.state_dict()) == list(model.state_dict())


def test_half_keeps_the_rotation_complex() -> None:
    model = CompactLlama(**SMALL).half()
    assert model.freqs.dtype == torch.complex64 and model.output.weight.dtype == torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_triton_starters_in_a_model_on_the_gpu(dtype: str) -> None:
    workload = Workload(model_args=SMALL, input_shape=(1, 256), dtype=dtype, device="cuda")
    profile = profile_workload(workload, warmup=1, iterations=3)
    assert all(site.time_us > 0 for site in profile.sites)
    plan = make_plan(profile, top=99)
    starters = [load_spec(t.kernel_type).starters(t.backend)[t.starter].read_text() for t in plan.targets]
    winners = [Winner(target, source) for target, source in zip(plan.targets, starters)]
    assert {w.target.kernel_type for w in winners} >= {"rmsnorm", "rotary_embedding", "matmul", "flash_attention"}
    model, args, _ = workload.load()
    replacer = Replacer(winners)
    with torch.no_grad():
        got, expected = apply(model, winners, replacer)(*args), model(*args)
    assert len(replacer.replaced) == sum(site.calls for site in profile.sites)
    tolerance = 1e-2 if dtype == "float16" else 1e-3  # fp32: Triton's dots and cuBLAS sum in another order
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
