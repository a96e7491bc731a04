"""Regions: what is found in a graph, that its arithmetic is the nodes' own, and that kernels written from it are right."""

import math
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import which

import pytest
import torch
import torch.nn.functional as F
from region_models import (
    CHAINS,
    EDGES,
    SEVERAL,
    N,
    Of,
    assert_same_at_edges,
    drawn,
    edges,
    found,
    special,
    why_wrong,
    winners_of,
)
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel import spec as specs
from autokernel.build import INCLUDE, cpp_function
from autokernel.common.backends import cpp_flags
from autokernel.integration.apply import apply, explain, unapply
from autokernel.model.agreement import extract_subgraph, inputs_of
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.nodes import aten, value
from autokernel.model.patterns import Site
from autokernel.model.regions import growing
from autokernel.model.regions.expressions import evaluate
from autokernel.model.regions.growing import piece_of, region_finder, regions_of
from autokernel.model.regions.lowering import lower
from autokernel.model.regions.spec import Region, examined, several
from autokernel.spec import import_file, is_region, load_spec

pytestmark = pytest.mark.usefixtures("region_folder")


def in_double(x: Tensor) -> Tensor:
    """In the strides of x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.float64).copy_(x)


def kernel_of(site: Site):
    (path,) = load_spec(site.kernel_type).starters("cpp").values()
    return import_file(path, f"test_{site.kernel_type}").kernel_fn


ALIKE = {
    "group norm": (CHAINS["grouped"], ("input_2",)),
    "batch norm": (lambda m, x, y: F.silu(F.batch_norm(x, m.bias, m.bias.square() + 1, m.weight, m.bias)), ("input_0",)),
    "layer norm": (lambda m, x, y: F.silu(F.layer_norm(x, (N,), m.weight, m.bias)), ("input_1", "input_2")),
}


@pytest.mark.parametrize("name", EDGES)
def test_functions_of_special_numbers_are_pytorchs(name: str) -> None:
    x, y = special()
    model = edges(name)
    graph, (site,) = found(model, x, y)
    inputs = (x, y)[: len(site.inputs)]
    exact = load_spec(site.kernel_type).oracle(*(v.double() for v in inputs))
    (lowered,) = evaluate(lower(piece_of(graph, site.outputs, site.inputs)), [v.double() for v in inputs])
    torch.testing.assert_close(lowered, exact, rtol=1e-9, atol=0, equal_nan=True)
    assert_same_at_edges(lowered.float(), exact)
    assert_same_at_edges(kernel_of(site)(*inputs), exact)


@pytest.mark.parametrize("name", ALIKE)
def test_a_value_is_planted_where_all_formulas_answer_it_alike(name: str):
    """x * a + b and (x - mean) * rstd * weight + bias have other NaN and other signs beside an infinite weight."""
    function, planted = ALIKE[name]  # the biases, and of the last the weight, too
    _, (site,) = found(Of(function).eval(), torch.randn(64, N), torch.randn(64, N))
    assert load_spec(site.kernel_type).planted_in == planted


def test_what_becomes_of_integers_is_in_float64_too():
    """PyTorch's cosine of int64 is in float32: the oracle of what is rotated by positions was no more exact than that."""
    x, positions = torch.randn(64, N), torch.arange(64 * N).view(64, N)
    _, (site,) = found(Of(lambda m, x, positions: x * positions.cos() + positions / 7), x, positions)
    result = load_spec(site.kernel_type).oracle(
        *(x.double() if value(n).is_floating_point() else positions for n in site.inputs)
    )
    exact = x.double() * positions.double().cos() + positions.double() / 7
    torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CHAINS)
def test_kernels_are_right(name: str) -> None:
    """What is written from the graph against the graph, by the gate's own bounds, in each dtype that it holds there."""
    torch.manual_seed(0)
    for dtype in (
        (torch.float32, torch.bfloat16)
        if name in ("gelu", "normed", "scores", "read_across", "normed_across")
        else (torch.float32,)
    ):
        model = Of(CHAINS[name]).to(dtype).eval()
        graph, sites = found(model, torch.randn(64, N, dtype=dtype), torch.randn(64, N, dtype=dtype))
        assert sites, "no region"
        for site in sites:
            spec = load_spec(site.kernel_type)
            inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
            lowered = lower(piece_of(graph, site.outputs, site.inputs))
            exact = {k: in_double(v) if v.is_floating_point() else v for k, v in inputs.items()}
            for y, expected, output in zip(
                evaluate(lowered, list(exact.values())), several(spec.oracle(**exact)), site.outputs
            ):
                assert torch.allclose(y, expected, 1e-9, 1e-9, equal_nan=True)
                assert y.stride() == value(output).stride()
            for scale in (1, 20, 1e-2):
                contents = {k: v * scale if v.is_floating_point() else v for k, v in inputs.items()}
                assert why_wrong(kernel_of(site)(**contents), spec, contents, adversarial=scale != 1) is None


def test_an_index_that_is_out_of_range_is_an_error_as_it_is_in_the_model() -> None:
    """Below zero some operators count from the end, others have nothing."""
    _, (site,) = found(Of(CHAINS["taken"]).eval(), torch.randn(64, N), torch.randn(64, N))
    spec = load_spec(site.kernel_type)
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    of_index, of_select = (n for n in inputs if not inputs[n].is_floating_point())
    assert why_wrong(kernel_of(site)(**inputs | {of_index: inputs[of_index] - 64}), spec, inputs) is None
    for off in ({of_index: inputs[of_index] - 200}, {of_index: inputs[of_index] + 64}, {of_select: inputs[of_select] - 64}):
        with pytest.raises(IndexError, match="out of range"):
            kernel_of(site)(**inputs | off)


def test_indices_that_are_broadcast_or_computed_leave_the_rest_a_region() -> None:
    """Looked for again and again, before the first of them was taken as what it is broadcast from."""
    chains = (
        lambda m, x, y: x.gather(1, m.places[:, :1].expand(-1, N)) * y + 1,
        lambda m, x, y: x.gather(1, (m.places[:, :1] * 2 % 64).expand(-1, N)) * y + 1,
        lambda m, x, y: (x * 2).relu()[m.places[:, 0]] * y + 1,
    )
    for chain in chains:
        _, sites = found(Of(chain).eval(), torch.randn(64, N), torch.randn(64, N))
        inputs = {k: drawn(t) for k, t in sites[-1].case.tensors.items()}
        assert why_wrong(kernel_of(sites[-1])(**inputs), load_spec(sites[-1].kernel_type), inputs) is None
    assert "index, mul, add" in load_spec(sites[-1].kernel_type).eager_form


@pytest.mark.parametrize("name", ("read_across", "padded_across"))
def test_what_is_read_across_is_copied_tile_by_tile(name: str) -> None:
    _, (site,) = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    text = load_spec(site.kernel_type).starters("cpp")["cpp_kernel"].read_text()
    assert "float tile0[TILE * TILE]" in text and ("pack<TILE>" in text) == (name == "read_across")


# Whether rows of padding are read from zeros; None: what runs backwards along a row has a condition at each place.
ZEROS = {"largest_in_planes": True, "planes_with_edges": True, "means_without_padding": False, "mirrored_planes": None}


@pytest.mark.parametrize("name", ZEROS)
def test_between_its_edges_a_plane_has_no_conditions(name: str) -> None:
    _, (site,) = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    text = load_spec(site.kernel_type).starters("cpp")["cpp_kernel"].read_text()
    assert ("zeros" in text) == bool(ZEROS[name]) and ("right; ++i" in text) == (ZEROS[name] is not None)


COSTLY = {"grouped_after_gelu": {"erf": 1}, "normed_twice": {"exp": 1, "tanh": 1}, "scores": {"exp": 1}}


@pytest.mark.parametrize("name", COSTLY)
def test_what_is_costly_is_computed_once_for_all_passes_along_a_row(name: str) -> None:
    _, (site,) = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    text = load_spec(site.kernel_type).starters("cpp")["cpp_kernel"].read_text()
    assert {what: text.count(f"ak_{what}(") for what in COSTLY[name]} == COSTLY[name]


@pytest.mark.parametrize("name", ("softmax_over_channels", "extremes_of_channels", "columns"))
def test_rows_that_lie_side_by_side_are_computed_side_by_side(name: str) -> None:
    _, (site,) = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    spec = load_spec(site.kernel_type)
    assert "lane < lanes" in spec.starters("cpp")["cpp_kernel"].read_text()
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    assert why_wrong(kernel_of(site)(**inputs), spec, inputs) is None
    for x in inputs.values():
        x.view(-1)[7] = math.nan
    assert why_wrong(kernel_of(site)(**inputs), spec, inputs, adversarial=True) is None


def test_the_innermost_loop_of_each_pass_is_the_one_that_is_contiguous() -> None:
    """Of a group of 4 channels over 97 places, in memory that has channels last in part and places last in part."""
    x, h = torch.randn(3, 12, 97), torch.randn(3, 97, 12).transpose(1, 2)
    _, (site,) = found(Of(lambda m, x, h: h + torch.sin(F.group_norm(x, 3)) * h).eval(), x, h)
    spec = load_spec(site.kernel_type)
    loops = re.findall(
        r"pragma omp simd.*\n +for \(int64_t \w+ = 0; \w+ < (\d+)", spec.starters("cpp")["cpp_kernel"].read_text()
    )
    assert set(loops) == {"97"}
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    assert why_wrong(kernel_of(site)(**inputs), spec, inputs) is None


GROUPED = {  # channels, groups of them, places of a plane's side
    "of ten": (lambda m, x: F.silu(F.group_norm(x, 4)), (40, 9)),
    "of three, the last block of which is shorter": (lambda m, x: F.group_norm(x, 32) * 2, (96, 7)),
    "maxima": (lambda m, x: (h := (x * 3).unflatten(1, (4, 6))) - h.amax((2, 3, 4), keepdim=True), (24, 5)),
    "of one, over more places than are added up in float32": (lambda m, x: F.instance_norm(x).relu(), (16, 65)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_channels_that_are_last_in_memory_are_computed_side_by_side(name: str) -> None:
    forward, (channels, side) = GROUPED[name]
    x = torch.randn(2, channels, side, side).to(memory_format=torch.channels_last)
    _, (site,) = found(Of(forward).eval(), x)
    spec, (argument,) = load_spec(site.kernel_type), site.case.tensors
    assert "lane < lanes" in spec.starters("cpp")["cpp_kernel"].read_text()
    kernel = kernel_of(site)
    assert why_wrong(kernel(x), spec, {argument: x}) is None
    x[1, 2, 3, 4] = math.nan
    assert why_wrong(kernel(x), spec, {argument: x}, adversarial=True) is None


def test_sines_of_numbers_of_every_size() -> None:
    """Of every exponent, and those next to multiples of pi / 2, of which no digit is lost."""
    x = torch.cat(
        [
            torch.rand(254, 64) * 2.0 ** torch.arange(-126, 128)[:, None],
            torch.arange(-4096, 4096).view(-1, 64) * math.pi / 2,
        ]
    )
    for f in torch.sin, torch.cos:
        _, (site,) = found(Of(lambda m, x, f=f: f(x.abs().neg())).eval(), x)
        y, right = kernel_of(site)(x), f(x.double().abs().neg())
        assert ((y - right).abs() <= 2.0**-22 * right.abs() + 2.0**-149).all()
        assert kernel_of(site)(torch.full_like(x, -math.inf)).isnan().all()


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
def test_of_a_row_of_one_number_a_norm_leaves_nothing(layout: torch.memory_format) -> None:
    """The mean of 273 times 1.7, rounded, is not 1.7, and an eps of 1e-5 makes what is left 300 times as large. Beside them
    are rows far from 0, and an infinity."""
    x = torch.full((4, 32, 21, 13), 1.7).to(memory_format=layout)
    _, (site,) = found(Of(lambda m, x: F.silu(F.instance_norm(x * 3))).eval(), torch.randn_like(x))
    spec, (name,) = load_spec(site.kernel_type), site.case.tensors
    x[1] = 1e4 + torch.randn(32, 21, 13)
    x[2, 3, 4, 5] = math.inf
    y = kernel_of(site)(**{name: x})
    assert not y[0].any() and not y[3].any()
    assert why_wrong(y, spec, {name: x}, adversarial=True) is None


WHOLE = {
    "a mean of squares": lambda m, x: (x * 2 - 1).square().mean(),
    "an exponential's share": lambda m, x: (e := torch.exp(x * 3 - (x * 3).amax())) / e.sum(),
    "a standard score": lambda m, x: (x * 3 - (x * 3).mean()) / ((x * 3).std() + 1e-3),
    "a largest and a product": lambda m, x: (x * 1e-3 + 1).prod() + (x * 1e-3 + 1).amax(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_long_row_is_shared_by_threads_and_is_the_same_with_any_number_of_them(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(77, 307)
    _, (site,) = found(Of(WHOLE[name]).eval(), x)
    spec, (argument,) = load_spec(site.kernel_type), site.case.tensors
    assert "pieces" in spec.starters("cpp")["cpp_kernel"].read_text()
    kernel, threads = kernel_of(site), torch.get_num_threads()
    torch.set_num_threads(1)
    alone = kernel(**{argument: x})
    torch.set_num_threads(threads)
    assert torch.equal(alone, kernel(**{argument: x})) and why_wrong(alone, spec, {argument: x}) is None
    x[76, 306] = math.nan
    assert why_wrong(kernel(**{argument: x}), spec, {argument: x}, adversarial=True) is None


def test_starters_of_an_earlier_version_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, N)
    _, (site,) = found(Of(CHAINS["gelu"]).eval(), x, x)
    starter = load_spec(site.kernel_type).starters("cpp")["cpp_kernel"]
    text = starter.read_text()
    starter.write_text("of an earlier version")
    monkeypatch.setattr(growing, "_KNOWN", {})  # as in another process
    found(Of(CHAINS["gelu"]).eval(), x, x)
    assert starter.read_text() == "of an earlier version", "which nothing says"
    monkeypatch.setattr(growing, "_KNOWN", {})
    monkeypatch.setattr(growing, "_writers", lambda: "a later version")
    found(Of(CHAINS["gelu"]).eval(), x, x)
    assert starter.read_text() == text


def test_rows_of_which_each_lies_together_are_not() -> None:
    _, (site,) = found(Of(CHAINS["normed"]).eval(), torch.randn(64, N), torch.randn(64, N))
    assert "lane" not in load_spec(site.kernel_type).starters("cpp")["cpp_kernel"].read_text()


LOOPS = {
    "a clamp after a clamp": """
        const float above = ak_max(x[i], 0.0f);
        y[i] = above * ak_min(ak_max((above + 3.0f) / 6.0f, 0.0f), 1.0f);""",
    "angles": "y[i] = ak_sin(x[i]) + ak_cos(x[i]) + ak_atan2(x[i], 1.0f);",
    "whole parts and erfc": "y[i] = __builtin_rintf(x[i]) + __builtin_truncf(x[i]) * ak_erfc(x[i]);",
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_computes_is_vectorised(name: str, tmp_path: Path) -> None:
    compiler = which("g++") or ""
    if "Free Software Foundation" not in subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("says nothing of vectors in GCC's words")
    (tmp_path / "loop.cpp").write_text(f"""
#include <elements.hpp>
void loop(const float* __restrict x, float* __restrict y) {{
    #pragma omp simd
    for (int i = 0; i < 4096; ++i) {{{LOOPS[name]}}}
}}""")
    command = [compiler, *cpp_flags(compiler), f"-I{INCLUDE}", "-fopt-info-vec-optimized", "-c", "loop.cpp"]
    assert "loop vectorized" in subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stderr


@pytest.mark.slow
def test_other_strides_than_the_models() -> None:
    _, (site,) = found(Of(lambda m, x, y: F.gelu(x) * y), torch.randn(64, N), torch.randn(64, N))
    inputs = [torch.randn(N, 64).t(), torch.randn(64, 2 * N)[:, 1::2]]
    expected = load_spec(site.kernel_type).oracle(*inputs)
    assert torch.allclose(kernel_of(site)(*inputs), expected, atol=1e-5)


ENDS = {
    "one operation": lambda m, x, y: x + y,
    "random numbers": lambda m, x, y: torch.rand_like(x) + 1,
    "a write": lambda m, x, y: x.clone().add_(y),
    "integers": lambda m, x, y: ((x > 0).long() + 1) * 2,
    "a product": lambda m, x, y: torch.fft.fft(x).abs(),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_is_no_region(name: str) -> None:
    assert found(Of(ENDS[name]), torch.randn(64, N), torch.randn(64, N))[1] == []


# beside which there may be a region, but never with this operation
OUTSIDE = {
    "a place that roundings decide": (lambda m, x, y: (x * y + 1).argmax(-1), aten.argmax.default),
    "statistics that are kept": (
        lambda m, x, y: F.batch_norm(x * y + 1, m.bias, m.weight, training=True),
        aten.batch_norm.default,
    ),
    "windows of several sizes": (lambda m, x, y: F.adaptive_avg_pool1d(x * y + 1, 36), aten.adaptive_avg_pool1d.default),
    "an enlargement by another factor than the sizes'": (
        lambda m, x, y: F.interpolate((x * y + 1).view(8, 16, 48), scale_factor=2.01),
        aten.upsample_nearest1d.vec,
    ),
    "places between elements that are computed": (
        lambda m, x, y: F.interpolate(F.gelu(x * y).view(8, 16, 48), scale_factor=2, mode="linear"),
        aten.upsample_linear1d.vec,
    ),
    "remainders of integers": (lambda m, x, y: (x.long() % 3) * y + 1, aten.remainder.Scalar),
    "running sums of integers": (lambda m, x, y: (x > y).cumsum(-1) * y + 1, aten.cumsum.default),
    "padding with elements": (lambda m, x, y: F.pad((x * y + 1)[None], (1, 1), "reflect"), aten.pad.default),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_in_no_region(name: str) -> None:
    function, target = OUTSIDE[name]
    graph, sites = found(Of(function), torch.randn(64, N), torch.randn(64, N))
    assert target in {node.target for node in graph.graph.nodes}
    assert sites and not any(node.target is target for site in sites for node in site.nodes)


def test_running_sums_from_both_ends_are_two_regions() -> None:
    _, sites = found(Of(lambda m, x, y: (x * y).cumsum(0).flip(0).cumsum(0) + y), torch.randn(64, N), torch.randn(64, N))
    assert len(sites) == 2 and all(aten.cumsum.default in {node.target for node in site.nodes} for site in sites)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_running_sum_up_to_one_place_is_right(place: int) -> None:
    x, y, model = torch.randn(64, N), torch.randn(64, N), Of(lambda m, x, y: (x * y).cumsum(-1)[:, place].sin() * y[:, 0])
    expected, (_, sites) = model(x, y), found(model, x, y)
    assert sites
    torch.testing.assert_close(apply(model, winners_of(sites))(x, y), expected)


def gates(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x) * y


# beside which the region of `gates` is found: odd arguments, which none has
ODD = {
    "nothing to sum": lambda m, x, y: x[:, :0].sum(-1) * 2 + y[:, 0],
    "a sum of no dim": lambda m, x, y: (x[0, 0] * 2).sum(-1) + 1,
    "a softmax of no dim": lambda m, x, y: (x[0, 0] * 2).softmax(-1) + 1,
    "an infinite power": lambda m, x, y: x**math.inf,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_are_in_no_region(name: str) -> None:
    x, y = torch.randn(64, N), torch.randn(64, N)
    _, sites = found(Of(lambda m, x, y: (gates(m, x, y), ODD[name](m, x, y))), x, y)
    (site,) = (site for site in sites if "gelu" in site.kernel_type)
    torch.testing.assert_close(kernel_of(site)(x, y), gates(None, x, y))


def test_powers_of_integers_are_exact() -> None:
    """In no region, whose numbers are float32."""
    x, y = torch.randn(64, N), torch.arange(N)
    model = Of(lambda m, x, y: x * (y ** (y % 5) == 89**4) + 1)
    _, sites = found(model, x, y)
    assert sites and not any(aten.pow.Tensor_Tensor in {node.target for node in site.nodes} for site in sites)


def same_as_a_model(model: nn.Module, *inputs: Tensor) -> None:
    """With the kernels of its regions."""
    _, sites = found(model.requires_grad_(False), *inputs)
    expected = model(*inputs)
    torch.testing.assert_close(apply(model, winners_of(sites))(*inputs), expected)
    assert sum(map(len, explain(model).sites.values())) == len(sites) > 0


@pytest.mark.parametrize("other", [0.1, -10000.0, torch.tensor(0.1), torch.full((256, N), 257)])
def test_numbers_are_compared_as_pytorch_compares_them(other: float | Tensor) -> None:
    """In the 16 bits of the tensor that a number stands beside."""
    number = float(other if isinstance(other, float) else other.flatten()[0])
    model = Of(lambda m, x, y, other=other: torch.where(x == other, x * 2 + y, y * 3 - x))
    x = torch.full((256, N), number, dtype=torch.bfloat16)
    same_as_a_model(model, x, torch.randn(256, N), *([other] if isinstance(other, Tensor) else []))


def test_a_part_of_what_cannot_be_a_region_is_itself() -> None:
    """The whole would read an input that repeats its elements, and no kernel has such."""
    model = Of(lambda m, x: F.softmax((x * 3).float(), -1) * 2 + 1)
    same_as_a_model(model, torch.randn(1, N).bfloat16().expand(256, N))


def test_overlapping_windows_compute_nothing_costly_for_each_of_their_places() -> None:
    def inputs(function: Callable[[Tensor], Tensor]) -> list[int]:
        model = Of(lambda m, x, y: F.max_pool1d(function(x * y), 5, 1, 2) * 2)
        _, sites = found(model, torch.randn(2, 32, 100), torch.randn(2, 32, 100))
        return sorted(len(site.inputs) for site in sites)

    assert inputs(F.relu) == [2], "one region of both"
    assert inputs(torch.tanh) == [1, 2], "and another one of what is pooled"


def test_a_pooling_after_what_cannot_be_written_is_a_region() -> None:
    """In none of the spaces the whole fits: what stands in the way is left out, not the end, whose shape is wrong."""

    def forward(m, x):
        return F.avg_pool2d(F.max_pool2d(F.interpolate(x, size=(50, 50)), 2), 2)  # 50 is no multiple of 24, nor of 12

    x = torch.randn(2, 2, 24, 24)
    _, (site,) = found(Of(forward), x)
    assert len(site.nodes) == 2
    torch.testing.assert_close(kernel_of(site)(F.interpolate(x, size=(50, 50))), forward(None, x))


def test_a_result_of_more_dims_than_the_last_one_is_whole() -> None:
    """Batch and heads are of one size: the last result's dims with one of them twice have the shape of the first."""

    def forward(m, x):
        h = F.relu(x + 1)
        return h, x[:, 0] * h[:, -1] + 1

    x = torch.randn(2, 2, 16, N)
    _, sites = found(Of(forward), x)
    assert sites
    same_as_a_model(Of(forward), torch.randn(2, 2, 64, N))


@pytest.mark.parametrize("fallback", [None, "inductor"])
def test_a_number_made_in_forward_is_the_graphs(fallback: str | None) -> None:
    """And nothing of it is left in the module, of which torch.compile asks where it comes from."""

    def forward(m, x, y):
        return F.gelu(torch.minimum(x * 2, torch.tensor(0.3))) @ y.t()

    model, x, y = Of(forward).requires_grad_(False), torch.randn(256, N), torch.randn(64, N)
    _, sites = found(model, x, y)
    expected = model(x, y)
    apply(model, winners_of(sites), fallback)
    torch.testing.assert_close(model(x, y), expected)
    assert sum(map(len, explain(model).sites.values())) == len(sites) == 1 and not explain(model).left
    unapply(model)
    torch._dynamo.reset()


class Filled(nn.Module):
    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        """With a tensor that is made on the device, a cast that names it, and a number in the host's memory."""
        hidden = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return (torch.where(x > 0, hidden, x.sin()) + (x > 1).to(x.device, x.dtype)) * low


def on_a_gpu(model: nn.Module, *shapes: Sequence[int]) -> fx.GraphModule:
    """As it is captured on a GPU, which need not be there; the last tensor is the host's."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, device="cuda:0") for shape in shapes[:-1]]
        return make_fx(model)(*inputs, torch.empty(shapes[-1]))


def sites_of(graph: fx.GraphModule) -> list[Site]:
    return [one for one in regions_of(graph, (), "cpp") if isinstance(one, Site)]


def test_what_was_captured_on_a_gpu_is_judged_wherever_its_inputs_are() -> None:
    (site,) = sites_of(on_a_gpu(Filled(), (64, N), ()))
    assert list(site.parameters) == ["input_0"] and "mul" not in site.kernel_type
    spec = load_spec(site.kernel_type)
    assert "cuda" not in (specs.REGIONS / site.kernel_type / "region.py").read_text()
    x = torch.randn(64, N)
    assert torch.equal(spec.eager(input_0=x), Filled()(x, torch.ones(())))


class NumberOfTheHost(nn.Module):
    """As torch.tensor(0.5).to(x.device) is captured, beside a copy of what the host's memory holds."""

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        half = torch.ops.aten.scalar_tensor(0.5, device=low.device).to(x.device)
        return x.sin() * half + low.to(x.device)


def test_a_number_that_is_copied_to_the_gpu_is_a_number() -> None:
    (site,) = sites_of(on_a_gpu(NumberOfTheHost(), (64, N), ()))
    assert [(value(node).dim(), value(node).device.type) for node in site.inputs] == [(2, "cuda"), (0, "cuda")]
    x, low = torch.randn(64, N), torch.randn(())
    assert torch.equal(load_spec(site.kernel_type).eager(input_0=x, input_1=low), NumberOfTheHost()(x, low))


def test_a_region_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(region: Region) -> Region | None:
        if "exp" in region.name:
            raise RuntimeError("no memory")
        return examined(region)

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (x + 1).exp(), (y + 1).sin()

    monkeypatch.setattr(growing, "examined", failing)
    graph = capture(Two(), (torch.randn(64, N), torch.randn(64, N)), {}).graphs[0].module
    finder = SiteFinder(regions=region_finder("cpu"))
    sites, _ = finder.examine(graph)
    assert ["sin" in site.kernel_type for site in sites] == [True]
    assert finder.failures == ["some regions could not be found: RuntimeError: no memory"]


def test_channels_last() -> None:
    """Read and written as it lies in memory: in the innermost loop by steps of one element."""

    def forward(m, x, y):
        h = x + y
        return h, F.silu(F.group_norm(h, 4, m.weight, m.bias))

    x, y = (torch.randn(2, N, 6, 6).contiguous(memory_format=torch.channels_last) for _ in range(2))
    _, (site,) = found(Of(forward).eval(), x, y)
    assert [value(node).is_contiguous(memory_format=torch.channels_last) for node in site.outputs] == [True, True]
    spec = load_spec(site.kernel_type)
    inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
    results = kernel_of(site)(**inputs)
    assert why_wrong(results, spec, inputs) is None
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in results)
    text = spec.starters("cpp")["cpp_kernel"].read_text()
    assert {*re.findall(r"#pragma omp simd.*\n\s*for \(int64_t (\w+) =", text)} == {"lane"}
    assert "int64_t i1 = start + lane;" in text and "y0[i0 * 3456 + i1 + i2 * 96]" in text


def test_mixed_dtypes() -> None:
    """Weights in fp32 beside bf16, as autocast has them."""

    def forward(m, x, y):
        h = x + y.to(x.dtype)
        return h, (F.layer_norm(h.float(), (N,), m.weight, m.bias) * y).to(x.dtype)

    x, y = torch.randn(64, N, dtype=torch.bfloat16), torch.randn(64, N)
    _, (site,) = found(Of(forward).eval(), x, y)
    assert {t.dtype for t in site.case.tensors.values()} == {torch.bfloat16, torch.float32}
    spec = load_spec(site.kernel_type)
    for scale in (1, 20):
        inputs = {k: drawn(t) * scale for k, t in site.case.tensors.items()}
        assert why_wrong(kernel_of(site)(**inputs), spec, inputs) is None


@pytest.mark.parametrize("name", SEVERAL)
def test_several_results(name: str) -> None:
    """What is used elsewhere, too, is a result beside the region's last: memory is read once less."""
    _, (site,) = found(Of(SEVERAL[name]).eval(), torch.randn(64, N), torch.randn(64, N))
    spec = load_spec(site.kernel_type)
    assert len(site.outputs) == len(spec.results) == (3 if name == "dtypes" else 2)
    tensors = [value(node) for node in site.outputs]
    assert [(t.shape, t.dtype, t.strides) for t in spec.results] == [(t.shape, t.dtype, t.stride()) for t in tensors]
    moved = sum(t.nbytes for t in (*site.case.tensors.values(), *spec.results))
    assert spec.bytes_moved(site.case.args) == moved


def test_an_input_that_is_made_after_the_first_result_is_read_by_a_region_of_its_own() -> None:
    def forward(m, x, y):
        h = F.gelu(x) + y
        scale = h.roll(1, 0)  # no region has it
        return h, torch.tanh(h) * scale + 1

    _, sites = found(Of(forward), torch.randn(64, N), torch.randn(64, N))
    assert [len(site.outputs) for site in sites] == [1, 1]


def test_what_is_no_longer_a_region_leaves_the_named_site() -> None:
    """Where kernels are put in, a norm is its own kernel's unless the region that has it won."""
    model, inputs = Of(SEVERAL["residual"]).eval(), (torch.randn(64, N), torch.randn(64, N))
    with torch.no_grad():
        (graph,) = capture(model, inputs, {}).graphs
    of_none = SiteFinder(min_elements=0, regions=partial(regions_of, only={"region_of_another"}, min_elements=0))
    assert [site.kernel_type for site in of_none.find(graph.module)] == ["layernorm"]
    as_regions = SiteFinder(min_elements=0, regions=partial(regions_of, backend="cpp", min_elements=0))
    assert [is_region(site.kernel_type) for site in as_regions.find(graph.module)] == [True]


def test_what_kernels_have_no_dtype_for_ends_a_region_and_is_not_its_end() -> None:
    _, (site,) = found(Of(lambda m, x, y: F.gelu(x.double().float() * y) + 1), torch.randn(64, N), torch.randn(64, N))
    assert len(site.nodes) == 3


def test_what_is_written_in_between_stays() -> None:
    def forward(m, x, y):
        a = x * 2
        x.add_(1)
        return torch.tanh(a) + y

    model, x, y = Of(forward), torch.randn(64, N), torch.randn(64, N)
    _, sites = found(model, x, y)
    assert [len(site.nodes) for site in sites] in ([], [2])  # tanh and the sum at most


FUNCTIONS = {
    "ak_tanh": torch.tanh,
    "ak_erf": torch.erf,
    "ak_erfc": torch.erfc,
    "ak_log": torch.log,
    "ak_log1p": torch.log1p,
    "ak_expm1": torch.expm1,
    "ak_exp": torch.exp,
    "ak_sin": torch.sin,
    "ak_cos": torch.cos,
}


ULPS = {"ak_exp": 3.0, "ak_expm1": 4.0}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_elements(name: str) -> None:
    source = f"""
    #include <elements.hpp>
    extern "C" int run(const float* x, float* y, int64_t n) {{
        for (int64_t i = 0; i < n; ++i) y[i] = {name}(x[i]);
        return 0;
    }}"""
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -3e38, 1.0, -1.0])
    x = torch.cat([torch.randn(4000) * 10.0**k for k in (*range(-6, 3), 5, 9, 20, 37)] + [special])
    y = torch.empty_like(x)
    cpp_function(source, "run", "ppl")(x.data_ptr(), y.data_ptr(), x.numel())
    exact = FUNCTIONS[name](x.double())
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.float().isinf())
    usable = exact.float().isfinite()
    spacing = torch.finfo(torch.float32).eps * exact.abs() + 2e-38
    assert ((y.double() - exact).abs() / spacing)[usable].max() <= ULPS.get(name, 4.0)


class OneRow(nn.Module):
    """As the types of tokens in RoBERTa: a table of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 64), nn.Embedding(1, 64)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        return torch.tanh(self.words(words) + self.kinds(kinds))


def test_inputs_by_which_a_region_takes_rows_are_within_its_tables():
    words, kinds = torch.randint(50, (4, 16)), torch.zeros(4, 16, dtype=torch.long)
    graph, (site,) = found(OneRow(), words, kinds)
    inputs = inputs_of(site, site.inputs)
    assert sorted(t.max().item() for t in inputs if not t.is_floating_point()) == [0, 49]
    extract_subgraph(graph, [site.output], site.inputs, wide=False)(*inputs)  # within reach of the model's own operators
