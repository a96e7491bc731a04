"""What is deployed is the fastest of all that was measured, the model untouched included: verdicts, advice and apply()."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from autokernel.common.records import write_json
from autokernel.gate import Interval
from autokernel.integration.apply import apply, unapply
from autokernel.integration.verification import trial
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, GRAPHS, INDUCTOR, Form, baseline, ours
from autokernel.integration.verification.notes import Notes
from autokernel.integration.verification.record import KernelInModel, Verification
from autokernel.integration.verification.trial import Settings, Verifier
from autokernel.integration.winner import Winner
from autokernel.model.extraction import make_plan
from autokernel.model.profiler import profile_workload
from autokernel.model.workload import Workload
from autokernel.run.workspace import PLAN, VERIFY, Workspace
from autokernel.spec import load_spec
from autokernel.target import default_target, encode
from tests.test_experiments import ROW
from tests.test_ledger import clone  # noqa: F401  a fixture
from tests.test_winners import run_that_kept

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
SOURCE = "def kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n"  # shows where it runs
MODEL = "models/m.py:M 1,512 float32"


def within(value: float, error: float = 0.02) -> Interval:
    return Interval(value / (1 + error), value, value * (1 + error))


def measured(error: float = 0.02, passed: bool = True, **ms: float) -> Verification:
    """A verification of one kernel that stays over all; a pass takes so many ms as it is ("eager"), through torch.compile
    ("inductor", …), and with the kernel ("kernels_eager", …)."""
    plain = {over: ms[name] for over in (EAGER, INDUCTOR, GRAPHS, AUTOTUNED) if (name := over.replace("-", "_")) in ms}
    with_it = {o: ms[name] for o in (EAGER, INDUCTOR, GRAPHS) if (name := f"kernels_{o}".replace("-", "_")) in ms}
    name = Winner(TARGET, SOURCE).name
    kernel = KernelInModel(TARGET.name, "rmsnorm", name, 0.5, 2.0, 4, {o: within(1.1) for o in with_it}, tuple(with_it))
    speedups = {o: {baseline(b): within(t / mine, error) for b, t in plain.items()} for o, mine in with_it.items()}
    without = {o: within(plain[EAGER] / t, error) for o, t in plain.items() if o != EAGER}
    return Verification(MODEL, "cuda", passed, (kernel,), speedups=speedups, without=without)


BERT = dict(eager=7.2, inductor=14.9, reduce_overhead=9.0, kernels_eager=9.2, kernels_reduce_overhead=8.5)
LLAMA = dict(eager=216, inductor=210, max_autotune=211, kernels_eager=101, kernels_inductor=100)
QWEN = dict(eager=54, inductor=20, reduce_overhead=10, kernels_eager=21, kernels_inductor=18, kernels_reduce_overhead=10.2)
CASES = {
    "captured graphs are slower than the model, and kernels with them": (
        measured(**BERT),
        Form(),
        f"leave it as it is: the fastest other way to run {MODEL}, kernels over reduce-overhead, "
        "is 0.85x as fast as eager [0.83, 0.86]",
        [],
    ),
    "kernels beat everything": (
        measured(**LLAMA),
        Form(INDUCTOR, kernels=True),
        f"{MODEL} is 2.16x as fast as eager [2.12, 2.20], 2.10x torch.compile, 2.11x torch.compile max-autotune, "
        "with 1 of 1 kernels over inductor",
        [
            'autokernel.apply(model, "night", fallback="inductor")',
            'fast_model.apply(model, fallback="inductor"))',
            "merge --tag night",
        ],
    ),
    "over nothing but eager": (
        measured(eager=3, inductor=4, kernels_eager=2),
        Form(EAGER, kernels=True),
        f"{MODEL} is 1.50x as fast as eager [1.47, 1.53], 2.00x torch.compile, with 1 of 1 kernels over eager",
        ['autokernel.apply(model, "night")', "--save", "merge"],
    ),
    "torch.compile alone beats kernels": (
        measured(**QWEN),
        Form(GRAPHS),
        f'use torch.compile(mode="reduce-overhead"), without kernels: {MODEL} is 5.40x as fast as eager [5.29, 5.51] '
        "with it; kernels over reduce-overhead would be 0.980x [0.961, 1.000] of that",
        ['model = torch.compile(model, mode="reduce-overhead")'],
    ),
    "no kernel stayed anywhere": (
        measured(eager=3, inductor=2),
        Form(INDUCTOR),
        f"use torch.compile(), without kernels: {MODEL} is 1.50x as fast as eager [1.47, 1.53] with it",
        ["model = torch.compile(model)"],
    ),
    "faster, but not beyond doubt": (
        measured(0.3, eager=10, inductor=9.9, kernels_eager=8.5),
        Form(),
        f"leave it as it is: the fastest other way to run {MODEL}, kernels over eager, "
        "is 1.18x as fast as eager [0.90, 1.53], which is not beyond doubt",
        [],
    ),
    "hardly measured": (
        measured(30, eager=10, inductor=9.9, kernels_eager=8.5),
        Form(),
        f"leave it as it is: the fastest other way to run {MODEL}, kernels over eager, "
        "is about 1.18x as fast as eager, which is not beyond doubt",
        [],
    ),
    "wrong outputs": (
        measured(passed=False, **LLAMA),
        Form(INDUCTOR),
        "the outputs with kernels are not the original's, and none is to be used; "
        f"use torch.compile(), without kernels: {MODEL} is 1.03x as fast as eager [1.01, 1.05] with it",
        ["model = torch.compile(model)"],
    ),
    "nothing was measured": (
        Verification(MODEL, "cpu", True),
        Form(),
        f"leave it as it is: no kernel makes {MODEL} faster beyond doubt",
        [],
    ),
}


@pytest.mark.parametrize("found, best, verdict, pasted", CASES.values(), ids=CASES)
def test_the_verdict_is_the_fastest_of_all(found, best, verdict, pasted):
    assert found.best == best
    first, *lines = found.advice("night")
    assert first == verdict
    assert len(lines) == len(pasted) and all(part in line for part, line in zip(pasted, lines))


def test_kernels_are_used_over_nothing_that_makes_the_model_slower():
    bert, qwen = measured(**BERT), measured(**QWEN)
    assert not any(bert.used_over(fallback) for fallback in (None, "inductor", "reduce-overhead", "max-autotune"))
    assert any("not used there" in line for line in bert.lines)
    assert qwen.used_over(None) == qwen.used_over("inductor") == (TARGET.name,), "faster than that without"
    assert qwen.used_over("reduce-overhead") == ()
    llama = measured(**LLAMA)
    assert llama.used_over("reduce-overhead") == (), "on a GPU, where it was not measured"
    assert replace(llama, device="cpu").used_over("reduce-overhead") == llama.used_over("inductor") != ()


def test_a_record_of_before_is_read(tmp_path):
    """What torch.compile gives by itself was not in it, and follows from what kernels give over both."""
    write_json(tmp_path / VERIFY, {k: v for k, v in encode(measured(**QWEN)).items() if k != "without"})
    read = Verification.read(tmp_path / VERIFY)
    assert set(read.without) == {INDUCTOR, GRAPHS}
    assert read.without[GRAPHS].value == pytest.approx(5.4)
    assert read.without[GRAPHS].low == pytest.approx(5.4 / 1.02 ** math.sqrt(2))
    assert read.best == Form(GRAPHS)
    write_json(tmp_path / VERIFY, encode(measured(**QWEN)))
    assert Verification.read(tmp_path / VERIFY) == measured(**QWEN)


@pytest.fixture
def run(clone) -> Workspace:  # noqa: F811
    """One that kept one kernel."""
    return run_that_kept(SOURCE, clone)


UNTOUCHED, COMPILED, WITH_KERNELS = "untouched", "compiled", "with kernels"
APPLIED = {  # what was measured, the fallback that is asked for -> what the model becomes, what the warning says
    "slower, over eager": (BERT, None, UNTOUCHED, "leave it as it is"),
    "slower, and torch.compile too": (BERT, "inductor", UNTOUCHED, "nor inductor"),
    "slower, in a mode that was not measured": (BERT, "max-autotune", UNTOUCHED, "nor max-autotune"),
    "torch.compile is faster": (
        dict(eager=3, inductor=2, kernels_inductor=2.5),
        "inductor",
        COMPILED,
        "torch.compile()",
    ),
    "it was not asked for": (dict(eager=3, inductor=2, kernels_eager=3.5), None, UNTOUCHED, "model = torch.compile(model)"),
    "faster, but torch.compile is even more so": (QWEN, None, WITH_KERNELS, 'mode="reduce-overhead"'),
    "faster over another fallback": (dict(eager=3, inductor=3, kernels_inductor=2), None, UNTOUCHED, 'fallback="inductor"'),
    "faster": (LLAMA, None, WITH_KERNELS, None),
    "faster, over torch.compile": (LLAMA, "inductor", WITH_KERNELS, None),
}


@pytest.mark.parametrize("ms, fallback, becomes, warning", APPLIED.values(), ids=APPLIED)
def test_apply_follows_what_was_measured(run, ms, fallback, becomes, warning):
    write_json(run / VERIFY, encode(measured(**ms)))
    torch._dynamo.reset()
    norm, x = nn.RMSNorm(768, eps=1e-6).requires_grad_(False), torch.randn(512, 768)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert apply(norm, run.folder, fallback) is norm
    said = [str(w.message) for w in warned if "verify.py says" in str(w.message)]
    assert (warning in said[0] and warned[0].filename == __file__) if warning else not said
    assert (norm._compiled_call_impl is None) == (becomes == UNTOUCHED)
    if becomes != COMPILED:  # which takes long
        assert bool(norm(x).abs().max() == 0) == (becomes == WITH_KERNELS)
    unapply(norm)


NORMS = '''
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1024) + 0.5)

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return torch.softmax(x, -1)


class Norms(nn.Sequential):
    """In graphs it computes what it skips elsewhere, as models do that make their masks so."""

    def __init__(self):
        super().__init__(Norm(), Norm())

    def forward(self, x):
        if torch.compiler.is_compiling():
            x = x + 1e-9 * (x @ x.T).mean()
        return super().forward(x)
'''


@pytest.mark.slow
@pytest.mark.timed
def test_a_model_that_is_slower_as_a_graph_is_left_alone_whatever_stays_there(run, tmp_path, monkeypatch):
    """Leave-one-out compares graphs with graphs, and may let a kernel stay; untouched, the model is faster by far."""
    monkeypatch.setattr(trial, "PROCESSES", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "norms.py"
    path.write_text(NORMS)
    plan = make_plan(profile_workload(Workload(str(path), "Norms", input_shape=(2048, 1024)), 1, 2), kernel_type="rmsnorm")
    (target,) = plan.targets
    winner = Winner(target, load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text())
    workload = Workload.from_json(json.loads(json.dumps(plan.workload)))
    sides = Verifier(workload.parts, (winner,), Settings(timed=6), lambda line: None, Notes(None))
    stays = KernelInModel(target.name, "rmsnorm", winner.name, target.share, used=(EAGER, INDUCTOR))
    timed = sides.final({EAGER: (winner,), INDUCTOR: (winner,)})
    found = Verification(plan.model, "cpu", True, (stays,), **timed)
    (figures,) = found.figures.values()
    assert figures[ours(EAGER)].milliseconds > figures[EAGER].milliseconds, "which is what this model was made for"
    assert found.best == Form() and found.verdict.startswith("leave it as it is"), found.verdict
    plan.write(run / PLAN)
    write_json(run / VERIFY, encode(found))
    run.ledger.record(replace(ROW, experiment=2, tag="night", target=target.name), winner.source)
    for fallback in (None, "inductor"):
        model, _, _ = workload.load()
        with pytest.warns(UserWarning, match="leave it as it is"):
            apply(model, run.folder, fallback)
        assert model._compiled_call_impl is None
