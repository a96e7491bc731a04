"""Cheats on a GPU: each fools the naive gate, and ours refuses each for its reason."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cheat import starter, wrapped
from gpu_cheat import GpuCheat, rmsnorm
from gpu_cheats import CHEATS
from gpu_taking_over import DISTURBS_OTHERS, HONEST, taking_over
from gpu_timing import PERSISTING

from autokernel.common.verdict import Verdict
from autokernel.gate import Judge
from autokernel.hardware.device import Device
from autokernel.spec import ROOT, load_spec
from autokernel.target import Target, WeightedCase

pytestmark = pytest.mark.gpu

FAST = 1.3  # times the honest starter
IN_L2 = {"shape": (2048, 4096)}  # 16.8 MB of fp16, of which a sum writes 4 KB back


def dims_of(cheat: GpuCheat) -> dict:
    return dict(cheat.dims[0] if cheat.dims else load_spec(cheat.kernel_type).timing["cuda"][0])


def target(kernel_type: str, dims: dict, dtype: str = "float16", backend: str = "triton") -> Target:
    case = load_spec(kernel_type).case(dims, getattr(torch, dtype))
    return Target(f"{kernel_type}_cheated", kernel_type, backend, "cuda", (WeightedCase(case),))


@pytest.fixture(scope="module")
def judge():
    with Judge("cuda") as judge:
        yield judge


@pytest.fixture(scope="module")
def naive(tmp_path_factory) -> dict[str, dict]:
    """What the naive gate says of every cheat, and of the sum on data that stays in L2: honest, and set aside there."""
    folder, jobs = tmp_path_factory.mktemp("naive"), []
    for cheat in CHEATS:
        kernel = folder / f"{cheat.id}.py"
        kernel.write_text(cheat.source)
        job = {"type": cheat.kernel_type, "dims": dims_of(cheat), "checked": cheat.checked, "dtype": cheat.dtype}
        jobs.append({"id": cheat.id, "kernel": str(kernel), "warm": False, **job})
    kernel = folder / "sum.py"
    kernel.write_text(starter("reduce", "triton"))
    job = {"type": "reduce", "dims": IN_L2, "checked": None, "dtype": "float16"}
    jobs.append({"id": "warm", "kernel": str(kernel), "warm": True, **job})
    kernel = folder / "persisting.py"
    kernel.write_text(wrapped("reduce", PERSISTING, "triton"))
    jobs.append({"id": "persisting", "kernel": str(kernel), "warm": False, **job})
    gate = subprocess.run(
        [sys.executable, Path(__file__).with_name("gpu_naive.py")],
        input="\n".join(map(json.dumps, jobs)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        timeout=200,
    )
    return {answer.pop("id"): answer for answer in map(json.loads, gate.stdout.splitlines())}


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.id)
def test_a_cheat_fools_the_naive_gate(naive: dict[str, dict], cheat: GpuCheat):
    answer = naive[cheat.id]
    assert answer.get("correct"), answer
    assert cheat.works != "fast" or answer["speedup"] > FAST, answer


@pytest.mark.parametrize("cheat", [c for c in CHEATS if c.refused_by != "nobody"], ids=lambda c: c.id)
def test_a_cheat_is_refused_for_its_reason(judge: Judge, cheat: GpuCheat):
    where = target(cheat.kernel_type, dims_of(cheat), cheat.dtype)
    if cheat.refused_by == "check":
        verdict = judge.check(cheat.source, where)
    else:
        verdict = judge.examine(cheat.source, where, quick=True)
    assert verdict.failure is not None, f"accepted: {verdict.why}"
    assert re.search(cheat.reason, verdict.failure.reason), f"{verdict.failure}\n{verdict.failure.detail}"
    assert verdict.correctness in cheat.correctness.split("|")
    assert not verdict.keep


def test_a_patched_clock_gains_nothing(judge: Judge):
    (cheat,) = (c for c in CHEATS if c.refused_by == "nobody")
    verdict = judge.compare(cheat.source, starter("reduce", "triton"), target("reduce", dims_of(cheat)))
    gains_nothing(verdict, cheat.reason)


def gains_nothing(verdict: Verdict, reason: str):
    """Refused for the reason, or as fast as the honest kernel."""
    if verdict.failure:
        assert re.search(reason, verdict.failure.reason), str(verdict.failure)
    else:
        assert 0.9 < verdict.speedup_vs_incumbent.value < 1.1, verdict.speedup_vs_incumbent


def test_data_that_fits_l2_is_timed_from_memory(judge: Judge, naive: dict[str, dict]):
    """The naive gate times the sum on one input, again and again; ours rotates inputs that no cache holds."""
    where = target("reduce", IN_L2)
    verdict = judge.examine(starter("reduce", "triton"), where, quick=True)
    assert verdict.failure is None, str(verdict.failure)
    bytes_moved = load_spec("reduce").bytes_moved(where.cases[0].case.args)
    assert verdict.latency_us > bytes_moved / Device.detect("cuda").peak_bandwidth_gb_s / 1e3
    assert naive["warm"]["microseconds"] < 0.85 * verdict.latency_us


def test_a_part_of_l2_that_is_set_aside_gains_little(judge: Judge, naive: dict[str, dict]):
    """It outlives what a naive gate clears the cache with, but not the other inputs through which our calls rotate."""
    assert naive["persisting"]["speedup"] > 1.1  # 1.4 and more on H100s, 1.19 on an H200
    verdict = judge.compare(wrapped("reduce", PERSISTING, "triton"), starter("reduce", "triton"), target("reduce", IN_L2))
    assert verdict.failure is None, str(verdict.failure)
    assert verdict.speedup_vs_incumbent.value < 1.1, verdict.speedup_vs_incumbent


def test_work_in_the_turn_of_others_does_not_slow_them(judge: Judge):
    """A thread of its process would be at work then: all are suspended, and what it had enqueued before is noticed."""
    where = target("rmsnorm", dims_of(CHEATS[0]))
    verdict = judge.compare(taking_over(DISTURBS_OTHERS), rmsnorm(HONEST), where)
    gains_nothing(verdict, "after the clock had stopped|after its batches, in the turn of others")
