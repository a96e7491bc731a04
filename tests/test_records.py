"""Files of runs that were made before are read as they were meant, and what is not such a file is one line that says so.

What lies in records/ was written by the version before records had schemas: by its own code, not by hand.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel.agents import Proposal
from autokernel.common.records import BadRecord
from autokernel.common.verdict import Interval
from autokernel.export import folders
from autokernel.history import status
from autokernel.history.experiments import ExperimentLog
from autokernel.integration.verification.record import Verification
from autokernel.model.hotspots import ModelProfile
from autokernel.model.workload import Part, Workload
from autokernel.run import workspace
from autokernel.spec import TensorSpec
from autokernel.target import Plan, encode

BEFORE = Path(__file__).parent / "records"
READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": Plan.read,
    "profile.json": ModelProfile.read,
    "proof.json": status._read_proofs,
    "verify.json": Verification.read,
    "intent.json": workspace._read_intent,
    "autokernel.json": folders._read,
    "results.tsv": lambda path: ExperimentLog(path).read(),
}


@pytest.fixture
def read() -> Callable[[str], Any]:
    return lambda name: READERS[name](BEFORE / name)


def has_all_of(value: Any, before: Any) -> bool:
    """Whether a record has what it had before; it may have more fields by now."""
    if isinstance(before, dict):
        return all(name in value and has_all_of(value[name], part) for name, part in before.items())
    if isinstance(before, list):
        return len(value) == len(before) and all(map(has_all_of, value, before))
    return value == before


@pytest.mark.parametrize("name", ["plan.json", "profile.json", "verify.json"])
def test_what_is_read_is_written_as_it_was(name: str, read):
    """All but the profile's words for people, which are made anew."""
    before, again = json.loads((BEFORE / name).read_text()), json.loads(json.dumps(encode(read(name))))
    for told in ("shares", "account"):
        before.pop(told, None)
    assert has_all_of(again, before)


def test_a_plan(read):
    plan = read("plan.json")
    (target,) = plan.targets
    weighted, other = target.cases
    assert weighted.calls == 9 and target.starter == "cpp_kernel" and target.dtype == torch.float32
    assert weighted.case.args["x"] == TensorSpec((1, 512, 768), torch.float32, (393216, 768, 1), 64)
    assert [weighted.case.args[name] for name in ("eps", "dim", "causal", "mode", "mask")] == [1e-6, -1, True, "gelu", None]
    assert weighted.variants == (other.case,) and other.case.dtype == torch.bfloat16
    assert Workload.from_json(plan.workload).mix == (Part("prefill", (1, 512), 1.0), Part("decode", None, 64.0))
    outline = status.read_outline(BEFORE / "plan.json")
    assert (outline.model, outline.targets[0].name, outline.targets[0].share) == (plan.model, target.name, 0.125)


def test_a_plan_of_a_later_version(tmp_path):
    """As with other records, what is not known is left out."""
    path, data = tmp_path / "plan.json", json.loads((BEFORE / "plan.json").read_text())
    path.write_text(json.dumps(data | {"later": 1, "targets": [target | {"later": 2} for target in data["targets"]]}))
    assert Plan.read(path) == Plan.read(BEFORE / "plan.json")
    path.write_text(json.dumps(data | {"targets": [target | {"share": "most"} for target in data["targets"]]}))
    with pytest.raises(BadRecord, match="cannot be read"):
        Plan.read(path)


def test_a_profile(read):
    profile, plan = read("profile.json"), read("plan.json")
    site, rest = profile.hotspots
    assert profile.workload == Workload.from_json(plan.workload) and profile.sites == (site,)
    assert (site.case, *site.variants) == tuple(weighted.case for weighted in plan.targets[0].cases)
    assert (rest.why, rest.captured, rest.case) == ("Dynamo leaves it out", False, None)
    assert profile.passes[1].weight == 64 and profile.left == ("an error",)


def test_proofs_and_an_intent(read):
    kept, none = read("proof.json").values()
    assert kept.gain == Interval(1.01, 1.05, math.inf) and kept.confirmed and none.gain is None
    intent = read("intent.json")
    assert intent.proposal == Proposal("KERNEL_TYPE = 'rmsnorm'\n", "CHUNK_ROWS 16 -> 4: smaller", "claude", 1200, 0.25)
    assert (intent.experiment, intent.attempts) == (7, 2)


def test_a_verification(read):
    found = read("verify.json")
    assert found.speedups["eager"]["torch.compile"].high == math.inf
    assert found.used("eager") == found.kernels[:1] and found.parity["eager"][0].passed
    assert found.figures[""]["eager"].peak_mb is None and found.figures[""]["kernels over eager"].peak_mb == 12.5


def test_rows_and_a_list_of_files(read):
    first, second, third = read("results.tsv")
    assert (first.seed, first.peak_vram_mb, first.speedup_low) == (2**47, 0.0, None)
    assert (second.latency_us, second.speedup_high, second.description) == (1.23457e6, math.inf, "")
    assert math.isnan(third.speedup_vs_incumbent) and third.correctness == "" and third.gain
    assert ["\t".join(BEFORE.joinpath("results.tsv").read_text().splitlines()[1:])] == [
        "\t".join(row.row() for row in (first, second, third))
    ]
    assert set(read("autokernel.json")) == {"__init__.py", "a/b.py"}


WRONG = {
    "plan.json": [
        {"targets": 5},
        {"targets": [5]},
        {"targets": [{"name": 1}]},
        {"model": None},
        {"model_latency_us": "fast"},
    ],
    "profile.json": [{"hotspots": [{"name": "x"}]}, {"workload": 5}, {"latency_us": "fast"}, {"graphs": 1.5}],
    "verify.json": [{"passed": "yes"}, {"speedups": {"eager": {"eager": {"low": 1}}}}, {"kernels": [[]]}],
    "intent.json": [{"experiment": "7"}, {"proposal": None}, {"attempts": [1]}],
    "autokernel.json": [{"a.py": 5}, {"../../x": ""}],
}


@pytest.mark.parametrize("name, fields", [(name, fields) for name, cases in WRONG.items() for fields in cases])
def test_a_field_of_another_type_is_a_bad_record(name: str, fields: dict[str, object], tmp_path: Path):
    path = tmp_path / name
    path.write_text(json.dumps(json.loads((BEFORE / name).read_text()) | fields))
    with pytest.raises(BadRecord, match="cannot be read") as refused:
        READERS[name](path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["", "nan", "[1, 2]", "[[", "[" * 100_000, '{"model": "te', "\0", '[{"target": 5}]'])
@pytest.mark.parametrize("name", READERS)
def test_another_file_is_a_bad_record(name: str, text: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(text)
    if name == "results.tsv" and text == "":
        return  # a table that a crash has cut off
    with pytest.raises(BadRecord, match="cannot be read"):
        READERS[name](path)


def test_records_need_no_pytorch():
    program = "import sys; import autokernel.common.records, autokernel.history.status; print({'torch'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BEFORE.parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
