"""Settings by sizes: the table in a kernel file is written, read, found by autotuning, judged, and used in models."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from autokernel.agents import Context, PastExperiment
from autokernel.agents.knobs import by_sizes, changes, in_words, read_knobs, set_knob, some_settings, structure
from autokernel.agents.sizes import read_table, sizes_of, with_sizes_of, with_table
from autokernel.agents.tuner import Tuner
from autokernel.cli import bench
from autokernel.export.package import save
from autokernel.gate import Judge
from autokernel.gate.timing.autotune import Looked
from autokernel.history.experiments import STARTER
from autokernel.integration.ops import at_sizes, register_visible, traced, visible
from autokernel.integration.winner import Winner
from autokernel.spec import KERNELS, import_file, kernel_types, load_spec
from autokernel.target import Target, WeightedCase
from tests.busy import skip_if_undecided
from tests.test_experiments import ROW
from tests.test_winners import EAGER, found

SPEC = load_spec("rmsnorm")
SOURCE = (KERNELS / "rmsnorm" / "cpp_kernel.py").read_text()
NARROW, WIDE = ((512, 768), (768,)), ((128, 3072), (3072,))
CASES = tuple(SPEC.case({"M": sizes[0][0], "N": sizes[0][1]}, torch.float32) for sizes in (NARROW, WIDE))
TARGET = Target("rmsnorm_two", "rmsnorm", "cpp", "cpu", tuple(WeightedCase(case) for case in CASES))

# On one thread, does its work once where rows are as wide as it was set for, else eight times.
EITHER = (
    SOURCE.replace("TUNABLES = ", "KNOBS = ").replace("PARALLEL_FROM = 16384", f"PARALLEL_FROM = {1 << 40}")
    + """
TUNABLES = {"FOR": ["narrow", "wide"]}
FOR = "narrow"
_once = kernel_fn


def kernel_fn(x, weight, eps=1e-6):
    for _ in range(1 if (x.shape[-1] > 1000) == (FOR == "wide") else 8):
        y = _once(x, weight, eps)
    return y
"""
)
# Its results are too large by as much as OFF says.
OFF = SOURCE + "\nOFF = 0.0\n_right = kernel_fn\n\n\ndef kernel_fn(x, weight, eps=1e-6):\n"
OFF += "    return _right(x, weight, eps) if not OFF else _right(x, weight, eps).add_(OFF)\n"


def inputs(sizes) -> dict:
    return {"x": torch.randn(sizes[0]), "weight": torch.randn(sizes[1]), "eps": 1e-6}


def load(source: str, folder: Path):
    path = folder / f"kernel_{abs(hash(source))}.py"
    path.write_text(source)
    return import_file(path, path.stem).kernel_fn


def test_a_table_is_read_as_it_was_written_and_taken_out_without_a_trace():
    table = {NARROW: {"UNROLL": 2, "CHUNK_ROWS": 4}, WIDE: {"UNROLL": 8}}
    tabled = with_table(SOURCE, table)
    assert read_table(tabled) == read_knobs(tabled).table == table and read_table(SOURCE) == {}
    assert read_knobs(tabled).current == read_knobs(SOURCE).current
    assert with_table(tabled, {}) == SOURCE and with_table(tabled, table) == tabled
    assert structure(tabled) == structure(SOURCE)
    assert with_table(SOURCE, {NARROW: {}}) == SOURCE, "an entry that changes nothing is none"
    text = tabled.replace('{"UNROLL": 8}', "{'UNROLL': 1}  # by hand")
    assert read_table(text)[WIDE] == {"UNROLL": 1} and structure(text) == structure(SOURCE)
    assert changes(tabled, text) == "at 128x3072 3072: UNROLL 8 -> 1"
    other = set_knob(SOURCE, "UNROLL", 8)
    assert changes(SOURCE, with_table(other, {WIDE: {"UNROLL": 4}})) == "UNROLL 4 -> 8, at 128x3072 3072: as before"
    assert changes(SOURCE, tabled) == "at 512x768 768: UNROLL 4 -> 2, CHUNK_ROWS 0 -> 4, at 128x3072 3072: UNROLL 4 -> 8"


def test_a_knob_that_is_set_holds_for_all_sizes():
    tabled = with_table(SOURCE, {NARROW: {"UNROLL": 2, "CHUNK_ROWS": 4}, WIDE: {"UNROLL": 8}})
    edited = set_knob(tabled, "UNROLL", 1)
    assert read_knobs(edited).current["UNROLL"] == 1 and read_table(edited) == {NARROW: {"CHUNK_ROWS": 4}}
    assert set_knob(set_knob(tabled, "UNROLL", 4), "CHUNK_ROWS", 0) == SOURCE
    settings = some_settings(tabled, 60)
    assert len(settings) == len(set(settings)) == 60 and SOURCE in settings


def test_what_was_taken_from_another_target_keeps_the_settings_of_sizes_that_are_its_own():
    tabled = with_table(SOURCE, {NARROW: {"UNROLL": 2}, WIDE: {"UNROLL": 8}})
    own = [case for case in TARGET.cases if sizes_of(SOURCE, case.case) == WIDE]
    assert read_table(with_sizes_of(tabled, own)) == {WIDE: {"UNROLL": 8}}
    assert with_sizes_of(tabled, []) == with_sizes_of(SOURCE, own) == SOURCE


def test_the_tuner_steps_from_a_kernel_with_a_table():
    tabled = with_table(SOURCE, {NARROW: {"UNROLL": 2}})
    first = PastExperiment(replace(ROW, agent=STARTER, status="kept", speedup_vs_incumbent=None), SOURCE, "")
    kept = PastExperiment(replace(ROW, status="kept", speedup_vs_incumbent=1.2), tabled, "")
    proposal = Tuner().propose(Context(TARGET, SPEC, tabled, (first, kept), None))
    assert proposal.source == set_knob(tabled, "UNROLL", 2) != tabled and "UNROLL 4 -> 2" in proposal.hypothesis


def test_the_key_of_a_case_has_the_order_of_the_kernels_own_parameters():
    assert sizes_of(SOURCE, CASES[0]) == NARROW
    assert sizes_of("def kernel_fn(weight, *, x, eps=1): ...\n", CASES[0]) == NARROW[::-1]
    assert sizes_of("kernel_fn = print\n", CASES[0]) is None


@pytest.mark.slow
def test_only_the_sizes_of_the_table_take_its_constants(tmp_path):
    tabled = with_table(OFF, {NARROW: {"OFF": 1.0, "UNROLL": 1}})
    kernel, plain = load(tabled, tmp_path), load(OFF, tmp_path)
    narrow, wide = inputs(NARROW), inputs(WIDE)
    for one in (kernel, torch.compile(kernel, backend="eager")):
        torch.testing.assert_close(one(**dict(reversed(narrow.items()))), plain(**narrow) + 1)  # by name, in any order
        torch.testing.assert_close(one(narrow["x"], narrow["weight"]), plain(**narrow) + 1)
        torch.testing.assert_close(one(**wide), plain(**wide))
    assert [one.__globals__["UNROLL"] for one in kernel.all] == [4, 1]
    assert at_sizes(kernel, CASES[0].args) is kernel.all[1] and at_sizes(kernel, CASES[1].args) is kernel.all[0]
    assert at_sizes(plain, CASES[0].args) is plain
    with pytest.raises(NameError, match="SETTINGS has UNROL, which this file does not assign"):
        load(with_table(SOURCE, {NARROW: {"UNROL": 1}}), tmp_path)


STARTERS = [
    path for name in kernel_types() for path in sorted((KERNELS / name).glob("*_*.py")) if "TUNABLES" in path.read_text()
]


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("path", STARTERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_starter_may_have_a_table(path: Path, tmp_path):
    """Whatever stands in it (dataclasses, caches, Triton's functions), each entry is a module of its own."""
    source, spec = path.read_text(), load_spec(path.parent.name)
    if "import triton" in source:
        pytest.importorskip("triton")
    case, knobs = spec.case(spec.smoke, spec.dtypes[0]), read_knobs(source)
    name, value = next((n, v) for n, values in knobs.choices.items() for v in values if v != knobs.current[n])
    kernel = load(with_table(source, {sizes_of(source, case): {name: value}}), tmp_path)
    general, own = at_sizes(kernel, {}), at_sizes(kernel, case.args)
    assert general is not own and general.__globals__ is not own.__globals__
    assert (general.__globals__[name], own.__globals__[name]) == (knobs.current[name], value)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "source, words",
    [
        pytest.param(with_table(OFF, {WIDE: {"OFF": 0.1}}), "tolerance", id="wrong at one of the target's sizes"),
        pytest.param(
            with_table(OFF.replace("OFF = 0.0", "OFF = 0.1"), {size: {"OFF": 0.0} for size in (NARROW, WIDE)}),
            "tolerance",
            id="right at the target's sizes alone",
        ),
        pytest.param(with_table(SOURCE, {NARROW: {"UNROLL": "no number"}}), "not declared", id="does not compile"),
        pytest.param(with_table(SOURCE, {NARROW: {"UNROL": 2}}), "does not assign", id="names no constant"),
    ],
)
def test_a_table_that_is_wrong_is_refused(judge: Judge, source: str, words: str):
    verdict = judge.check(source.replace(".add_(OFF)", ".fill_(OFF)"), TARGET)
    assert verdict.correctness != "PASS" and words in f"{verdict.failure} {verdict.failure.detail}", str(verdict.failure)


def test_a_table_that_is_right_passes(judge: Judge):
    verdict = judge.check(with_table(SOURCE, {NARROW: {"UNROLL": 2}, WIDE: {"UNROLL": 1, "CHUNK_ROWS": 4}}), TARGET)
    assert verdict.correctness == "PASS", str(verdict.failure)


def looked(source: str, *by_case: float) -> Looked:
    return Looked(source, sum(by_case), by_case=by_case)


def test_a_table_is_composed_of_what_is_clearly_faster_at_a_size():
    a, b, c = (set_knob(SOURCE, "UNROLL", n) for n in (1, 2, 8))
    seen = [looked(a, 1.0, 2.0), looked(b, 2.0, 1.5), looked(c, 1.5, 5.0), looked(EITHER, 2.0, 9.0), Looked("broken")]
    assert by_sizes(seen, TARGET, 0.01) == with_table(a, {WIDE: {"UNROLL": 2}})
    assert by_sizes(seen, TARGET, 0.5) is None, "1.33x is less than asked for"
    assert by_sizes(seen[:1], TARGET, 0.01) is None
    one_size = replace(TARGET, cases=(TARGET.cases[0], TARGET.cases[0]))
    assert by_sizes(seen, one_size, 0.01) is None, "cases of the same sizes have one setting"
    untimed = [looked(a, 1.0, 2.0), Looked(b, 3.0, by_case=(2.0, math.inf))]
    assert by_sizes(untimed, TARGET, 0.01) is None
    assert "N=3072 float32, the fastest there: 1.333x  1500000 us  UNROLL 1 -> 2" in in_words(seen, a, TARGET)


KNOBBED = 'TUNABLES = {"A": [1, 2, 3, 4, 5, 6], "B": [1, 2, 3, 4, 5, 6]}\nA = 1\nB = 1\n'
KNOBBED += "\n\ndef kernel_fn(x, weight, eps=1e-6):\n    return x\n"


def test_the_search_ends_with_a_setting_for_each_size():
    """Times are known: a case asks for large A and B, the other one for small ones. Nothing else gains more than 10 %."""

    def seconds(source: str) -> tuple[float, ...]:
        knobs = read_knobs(source)
        if "A" not in knobs.choices:  # a starter
            return 20.0, 20.0
        given = [knobs.current | knobs.table.get(sizes, {}) for sizes in (NARROW, WIDE)]
        return 10.0 - given[0]["A"] - 0.2 * given[0]["B"], 4.0 + given[1]["A"] + 0.2 * given[1]["B"]

    def autotune(sources, target, limit_s):
        return sorted((looked(source, *seconds(source)) for source in sources), key=lambda one: one.seconds)

    known = SimpleNamespace(examine=None, profile=None, autotune=autotune)
    first = PastExperiment(replace(ROW, agent=STARTER, status="kept", speedup_vs_incumbent=None), KNOBBED, "")
    trials, incumbent, tuner = [first], KNOBBED, Tuner()
    while proposal := tuner.propose(Context(TARGET, SPEC, incumbent, tuple(trials), None, bench=known)):
        speedup = sum(seconds(incumbent)) / sum(seconds(proposal.source))
        row = replace(ROW, status="kept" if speedup > 1 else "reset", speedup_vs_incumbent=speedup, speedup_high=speedup)
        trials.append(PastExperiment(replace(row, description=proposal.hypothesis), proposal.source, ""))
        incumbent = proposal.source if speedup > 1 else incumbent
        assert len(trials) < 20
    assert read_table(incumbent) and ": the fastest of " in trials[-1].row.description
    narrow, wide = seconds(incumbent)
    assert narrow <= 4.0 and wide <= 5.6, "of 2.8 to 8.8, and of 5.2 to 11.2"


def test_settings_that_were_timed_at_some_sizes_alone():
    """A slow machine has no time for all: those are known to be as far behind as where they were timed."""

    def autotune(sources, target, limit_s):
        return [
            looked(source, 1.0, 2.0) if source == KNOBBED else Looked(source, 2.4, "", (0.8, math.inf))
            for source in sources
        ]

    known = SimpleNamespace(examine=None, profile=None, autotune=autotune)
    first = PastExperiment(replace(ROW, agent=STARTER, status="kept", speedup_vs_incumbent=None), KNOBBED, "")
    proposal = Tuner().propose(Context(TARGET, SPEC, KNOBBED, (first,), None, bench=known))
    assert ": the fastest of " in proposal.hypothesis and " 1.250x there" in proposal.hypothesis


@pytest.mark.slow
@pytest.mark.timed
def test_the_tuner_finds_what_is_best_at_each_size_and_the_gate_keeps_it(judge: Judge):
    """No setting of this kernel is fast at both sizes; the first that is looked at is the slowest at the first of them."""
    incumbent = set_knob(EITHER, "FOR", "wide")
    rows = [replace(ROW, agent=STARTER, status="kept", speedup_vs_incumbent=None), replace(ROW, status="reset")]
    others = [path.read_text() for path in SPEC.starters("cpp").values()]  # as fast as a table can be: tried before
    trials = [PastExperiment(rows[0], incumbent, ""), *(PastExperiment(rows[1], source, "") for source in others)]
    proposal = Tuner().propose(Context(TARGET, SPEC, incumbent, tuple(trials), None, bench=judge))
    assert proposal, "nothing looked faster"
    (general,), (entry,) = read_knobs(proposal.source).current.values(), read_table(proposal.source).values()
    assert {general, entry["FOR"]} == {"narrow", "wide"}
    assert "FOR" in proposal.hypothesis and " looked at, " in proposal.hypothesis
    verdict = judge.examine(proposal.source, TARGET, incumbent=incumbent)
    assert verdict.correctness == "PASS", str(verdict.failure)
    skip_if_undecided(verdict)
    assert verdict.keep, verdict.why


@pytest.mark.slow
@pytest.mark.timed
def test_bench_writes_a_file_with_the_fastest_at_each_size(tmp_path, capsys):
    path, out = tmp_path / "kernel.py", tmp_path / "sized.py"
    path.write_text(EITHER)
    command = [str(path), "--device", "cpu", "--autotune", "1", "--out", str(out)]
    with pytest.raises(SystemExit):
        bench.main(command)
    assert "add --sizes" in capsys.readouterr().err
    assert bench.main([*command, "--sizes"]) == 0
    assert "the fastest there" in capsys.readouterr().out
    table = read_table(out.read_text())
    assert table and with_table(out.read_text(), {}) in {EITHER, set_knob(EITHER, "FOR", "wide")}


USER = """
import sys, torch, two_norms
assert not {"autokernel", "reference"} & set(sys.modules), "the repository is in use"
class TwoNorms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = torch.nn.RMSNorm(768, eps=1e-6), torch.nn.RMSNorm(3072, eps=1e-6)
    def forward(self, x, y):
        return self.narrow(x), self.wide(y)
model, x, y = TwoNorms(), torch.randn(512, 768), torch.randn(128, 3072)
with torch.no_grad():
    narrow, wide = model(x, y)
    for fallback in (None, "inductor"):
        results = two_norms.apply(model, fallback=fallback)(x, y)
        torch.testing.assert_close(results[0], narrow + 1)  # the constants of the table show where they are used
        torch.testing.assert_close(results[1], wide)
"""


@pytest.mark.slow
def test_a_saved_kernel_takes_its_table_along_into_models(tmp_path):
    """As it is, and through torch.compile, where nothing of this repository is there."""
    winner = Winner(TARGET, with_table(OFF, {NARROW: {"OFF": 1.0}}))
    record = found(winner.source, (EAGER, "inductor"))
    kernels = tuple(replace(kernel, target=TARGET.name, kernel=winner.name) for kernel in record.kernels)
    assert save(tmp_path / "site" / "two_norms", replace(record, kernels=kernels), [winner]) == [winner]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "AUTOKERNEL_CACHE": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, "-c", USER], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


MATMUL = (KERNELS / "matmul" / "triton_kernel.py").read_text()
INTERPRETED = """
import sys, torch
from pathlib import Path
from autokernel.spec import import_file
kernel = import_file(Path(sys.argv[1]), "sized_matmul").kernel_fn
for M in (33, 20):
    A, B = torch.randn(M, 40), torch.randn(40, 50)
    torch.testing.assert_close(kernel(A=A, B=B), A @ B, rtol=1e-4, atol=1e-4)
print([one.__globals__["BLOCK_M"] for one in kernel.all], kernel.all[0].__globals__["_matmul"] is
      kernel.all[1].__globals__["_matmul"])
"""


@pytest.mark.slow
def test_a_triton_kernel_computes_by_its_table(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "matmul.py"
    path.write_text(with_table(MATMUL, {((33, 40), (40, 50)): {"BLOCK_M": 16, "BLOCK_N": 32, "NUM_WARPS": 2}}))
    command, environment = [sys.executable, "-c", INTERPRETED, str(path)], os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.split("\n")[0] == "[0, 16] False", run.stderr


@pytest.mark.parametrize("M, block", ((300, 32), (200, None)))
def test_a_triton_kernel_with_a_table_is_seen_as_the_launches_of_a_size(M: int, block: int | None, tmp_path):
    """So that Inductor launches it itself, and the table costs a call nothing."""
    pytest.importorskip("triton")
    spec = load_spec("matmul")
    kernel = load(with_table(MATMUL, {((300, 512), (512, 256)): {"BLOCK_M": 32, "BLOCK_N": 128}}), tmp_path)
    case = spec.case({"M": M, "K": 512, "N": 256}, torch.float16)
    graph = traced(spec, visible(spec, at_sizes(kernel, case.args)), case, torch.device("cpu"))
    assert graph is not None
    plain = load(MATMUL, tmp_path)
    expected = traced(spec, visible(spec, plain), case, torch.device("cpu"))
    grids = [next(n.kwargs["grid"][0] for n in g.graph.nodes if "grid" in n.kwargs) for g in (graph, expected)]
    assert grids[0] == ((-(-M // 32) * 2, 1, 1) if block else grids[1])
    assert (grids[0] == grids[1]) == (block is None)


def test_aotautograd_takes_an_operator_for_the_launches_of_a_size(tmp_path):
    """An operator, for a graph with another function would not be in its cache."""
    pytest.importorskip("triton")
    spec, table = load_spec("matmul"), {((300, 512), (512, 256)): {"BLOCK_M": 32, "BLOCK_N": 128}}
    operator = register_visible("matmul_of_test_sizes", spec, load(with_table(MATMUL, table), tmp_path), "cpu")
    graph, grids = torch.fx.Graph(), []
    given = [graph.placeholder(name) for name in "AB"]
    graph.output((graph.call_function(operator, tuple(given)),))

    def keep(traced: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        grids.append([node.kwargs["grid"] for node in traced.graph.nodes if "grid" in node.kwargs])
        return make_boxed_func(traced.forward)

    for M in (300, 200):
        inputs = torch.randn(M, 512, dtype=torch.float16), torch.randn(512, 256, dtype=torch.float16)
        with torch.no_grad():
            aot_module_simplified(torch.fx.GraphModule({}, graph), inputs, keep)
    assert len(grids[0]) == len(grids[1]) == 1 and grids[0] == [[(-(-300 // 32) * 2, 1, 1)]] != grids[1]
