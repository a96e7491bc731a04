"""The benchmarks' records, the tables made from them, and the benchmark of kernels itself, shortened, on the CPU."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from autokernel.spec import ROOT, kernel_types
from benchmarks import tables
from benchmarks.contestants import LIMITS, OURS, contestants, rows
from benchmarks.counters import described
from benchmarks.standings import Ratio, goals, ratio, standing


def test_what_is_published_is_what_the_records_say():
    """`python benchmarks/tables.py` writes those of docs/measurements.md and the tables beside the records."""
    assert tables.stale() == []


@pytest.mark.slow
def test_settings_of_a_kernel_are_timed_beside_eager_mode():
    command = ["benchmarks/settings.py", "kernels/rmsnorm/cpp_kernel.py", "UNROLL=1,4", "--case", "M=1,", "--device", "cpu"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    case, speeds = done.stdout.split(": eager ")
    assert case == "rmsnorm M=1,N=768 float32"
    assert "UNROLL=1 " in speeds and "* " in speeds and "UNROLL=4" not in speeds  # that is the file's own
    wrong = subprocess.run([sys.executable, *command[:2], "FOO=1"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "FOO" in wrong.stderr


def test_a_change_of_a_record_is_noticed(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (tmp_path / "measurements.md").write_text(f"before\n{tables.BEGIN}{tables.END}after\n")
    monkeypatch.setattr(tables, "FOLDER", folder)
    monkeypatch.setattr(tables, "PAGE", tmp_path / "measurements.md")
    record = {"rmsnorm a": entry("rmsnorm", eager=40.0, triton=10.0, copy=9.5)}
    (folder / "kernels-h200.json").write_text(json.dumps(record))
    assert {path.name for path in tables.stale()} == {"measurements.md", "kernels-h200.md"}
    tables.write()
    assert tables.stale() == []
    assert "| rmsnorm | 1 | 1.053 [" in (tmp_path / "measurements.md").read_text()
    assert "| 9.6 | 40.5 | 10.1 | 1.053 [" in (folder / "kernels-h200.md").read_text()
    record["rmsnorm a"]["us"]["triton"] = [20.0] * 24
    (folder / "kernels-h200.json").write_text(json.dumps(record))
    assert {path.name for path in tables.stale()} == {"measurements.md", "kernels-h200.md"}


def entry(kernel_type: str, **us: float) -> dict:
    """A row of a record, in whose 24 rounds the times vary together."""
    rounds = [1 + 0.001 * i for i in range(24)]
    return {
        "kernel_type": kernel_type,
        "case": "M=1 float16",
        "flops": 10**6,
        "bytes_moved": 10**6,
        "peak": {"tflops": 989.0, "gb_s": 4800.0},
        "us": {name: [value * r for r in rounds] for name, value in us.items()},
        "not_captured": [],
        "failed": {},
        "machine": {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-21"},
    }


@dataclass(frozen=True)
class Stands:
    us: dict[str, float]
    expected: tuple | None  # ours, the best peer, over the limit, over the peer


STANDINGS = {
    "the better of two": Stands(
        {"eager": 30, "compile": 20, "triton": 12, "cuda": 10, "copy": 8}, ("cuda", "compile", 1.25, 2)
    ),
    "no limit, behind": Stands({"eager": 10, "triton": 20}, ("triton", "eager", None, 0.5)),
    "an alternative": Stands({"eager": 10, "triton": 20, "triton_tma": 5}, ("triton_tma", "eager", None, 2)),
    "nothing of ours": Stands({"eager": 10, "copy": 8}, None),
    "no peer": Stands({"cuda": 10, "read": 10}, ("cuda", "", 1, None)),
}


@pytest.mark.parametrize("case", STANDINGS.values(), ids=STANDINGS)
def test_where_ours_stand(case):
    found = standing(entry("softmax", **case.us))
    if case.expected is None:
        assert found is None
        return
    ours, peer, limit, gain = case.expected
    assert (found.ours, found.peer) == (ours, peer)
    for given, value in ((found.vs_limit, limit), (found.vs_peer, gain)):
        assert (given is None) == (value is None)
        assert given is None or math.isclose(given.value, value)


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    """Skewed noise, many times over: 24 rounds give at least 95 %, and not much more."""
    draw, covered = random.Random(0), 0
    trials = 2000
    for _ in range(trials):
        found = ratio([math.exp(draw.expovariate(1)) for _ in range(24)], [1.0] * 24)
        covered += found.low <= math.exp(math.log(2)) <= found.high  # the median of Exp(1) is log 2
    assert 0.95 <= covered / trials <= 0.99


def test_few_rounds_give_their_range():
    assert ratio([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]) == Ratio(1.0, 2.0, 3.0)


def test_every_type_has_cases_and_contestants_on_a_gpu():
    chosen = rows("cuda")
    assert len({row.name for row in chosen}) == len(chosen)
    assert {row.kernel_type for row in chosen} == set(kernel_types())
    for row in chosen:
        everyone = contestants(row, "cuda")
        assert {"eager", "triton"} <= set(everyone)
        assert LIMITS.get(row.kernel_type, "eager") in everyone
        assert all(name.startswith(("triton", "cuda")) for name in set(contestants(row, "cuda", True)) - set(everyone))
    assert set(OURS["cuda"]) == {"triton", "cuda"}


@pytest.mark.slow
def test_the_benchmark_of_kernels_on_the_cpu(tmp_path):
    record = tmp_path / "kernels-cpu.json"
    options = ["--device", "cpu", "--case", "M=1,N=768", "--only", "eager", "torch", "cpp", "--rounds", "2", "--jobs", "1"]
    command = [sys.executable, "benchmarks/kernels.py", "rmsnorm", *options, "--record", record]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(record.read_text()).values()
    assert set(row["us"]) == {"eager", "torch", "cpp"} and not row["failed"]
    assert all(len(times) == 2 and min(times) > 0 for times in row["us"].values())
    assert row["machine"]["command"].startswith("python benchmarks/kernels.py rmsnorm") and row["source"]["cpp"]
    assert "| M=1,N=768 float32 |" in record.with_suffix(".md").read_text()
    assert record.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    missing = subprocess.run([*command, "--missing"], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 0 and "rmsnorm M=1" not in missing.stdout


GOALS_MET = {  # times of one case -> how many of the goals that apply to it are met, of how many
    "at the limit and far ahead": ("softmax", {"eager": 30, "triton": 10, "copy": 10}, 4, 4),
    "at the limit, before a peer that is near it": ("softmax", {"eager": 15, "triton": 10, "copy": 10}, 2, 3),
    "slow": ("softmax", {"eager": 30, "triton": 20, "copy": 10}, 1, 4),
    "a tie": ("matmul", {"eager": 10, "cuda": 10.1}, 1, 1),
    "behind": ("flash_attention", {"cudnn": 10, "cuda": 10.1}, 0, 1),
}


@pytest.mark.parametrize(("kernel_type", "us", "met", "applying"), GOALS_MET.values(), ids=GOALS_MET)
def test_goals_are_met_or_not(kernel_type, us, met, applying):
    of_case = entry(kernel_type, **us)
    found = [(goal, goal.value(standing(of_case), of_case)) for goal in goals(h100=False) if kernel_type in goal.types]
    counted = [(goal, value) for goal, value in found if value is not None]
    assert (sum(goal.met(value) for goal, value in counted), len(counted)) == (met, applying)


COUNTED = """\
"ID","Kernel Name","gpu__time_duration.sum","launch__grid_size","lts__t_sector_hit_rate.pct",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
"","","ns","","%","inst","inst"
"0","void held<__half, 1>(const T1 *, int)","12,160","2,048","52.4","1.1","6.2"
"""


def test_counters_are_read_in_our_units():
    assert list(described(COUNTED)) == ["held<__half, 1>: us 12.16, blocks 2048; l2_hits 52%; waits: barrier 6.2, wait 1.1"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ncu") is not None, reason="there is ncu")
def test_without_ncu_there_are_no_counters():
    command = [sys.executable, "benchmarks/counters.py", "softmax", "4096", "eager"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "ncu is not on the PATH" in done.stderr


READS_ALL = """
import torch
from benchmarks.limits import _read
words = torch.randint(-(2**31), 2**31 - 1, (100_003,), dtype=torch.int32)
out = torch.zeros(7, dtype=torch.int32)
_read[(7,)](words, out, words.numel(), BLOCK=2048)
folded = lambda x: __import__("functools").reduce(__import__("operator").xor, x.tolist())
assert folded(out) == folded(words) != 0
"""


@pytest.mark.slow
def test_the_read_limit_reads_every_word():
    """In Triton's interpreter, which has to be chosen before triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", READS_ALL], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
