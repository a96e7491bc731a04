"""Two kernel types that were added as a user would: an oracle in reference.py and a folder, and no list that names them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

import reference
from autokernel.gate.checks.cases import CheckCase
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expect
from autokernel.spec import KERNELS, ROOT, import_file, kernel_types, load_spec
from autokernel.target import default_target

TYPES = ("vectorsum", "matmul_fp4")


def source(name: str) -> str:
    return (KERNELS / name / "cpp_kernel.py").read_text()


@dataclass(frozen=True)
class Wrong:
    """A kernel of the folder with one mistake put in."""

    kernel_type: str
    what: str
    right: str
    wrong: str


WRONG = [
    Wrong("vectorsum", "forgets the tail", "for (; i < n; ++i) sum += x[i];", ""),
    Wrong("vectorsum", "leaves the last chunk out", "(n + CHUNK - 1) / CHUNK", "std::max<int64_t>(1, n / CHUNK)"),
    Wrong("vectorsum", "rounds on its way", "sum += sums[u][lane]", "sum += std::round(sums[u][lane])"),
    Wrong("matmul_fp4", "nibbles the wrong way round", "table[w[k / 2] & 15]", "table[w[k / 2] >> 4]"),
    Wrong("matmul_fp4", "no negative numbers", "(c & 8 ? -s : s)", "s"),
    Wrong("matmul_fp4", "six is five", "3, 4, 6}", "3, 4, 5}"),
    Wrong("matmul_fp4", "no scale for all", ": e4m3(scales[g])) * scale", ": e4m3(scales[g]))"),
    Wrong("matmul_fp4", "E4M3 with the bias of E5M2", "e - 7)", "e - 8)"),
    Wrong("matmul_fp4", "half as many scales", "scales + n * (K / group)", "scales + n * (K / group / 2)"),
]
RIGHT = [
    ("vectorsum", torch.float32),
    *(pytest.param("matmul_fp4", dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.bfloat16)),
]


@pytest.mark.parametrize(("name", "dtype"), RIGHT, ids=str)
def test_right_ones_pass(name, dtype, judge):
    verdict = judge.check(source(name), default_target(name, "cpp", "cpu", dtype))
    assert verdict.correctness == "PASS", verdict.why


def test_a_sum_of_which_nearly_nothing_is_left():
    """With this seed three million terms amount to -3.5, and PyTorch is lucky: an error of 5e-4 is no fault."""
    spec = load_spec("vectorsum")
    case = spec.case({"N": 3_000_001}, torch.float32)
    inputs = CheckCase("shape_sweep", case, 58450492398816, "dominant_tail").inputs(spec)
    expected = expect(spec, inputs, "cpu")
    y = import_file(KERNELS / "vectorsum" / "cpp_kernel.py", "vectorsum_under_test").kernel_fn(**inputs)
    for right in (y, expected.exact.float() + 5e-4):  # on another number of threads the kernel's own error is another
        assert wrong(right, expected) is None
    assert wrong(y + 0.5, expected)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.what)
def test_wrong_ones_fail(wrong: Wrong, judge):
    text = source(wrong.kernel_type)
    assert wrong.right in text
    spec = load_spec(wrong.kernel_type)
    verdict = judge.check(text.replace(wrong.right, wrong.wrong), default_target(spec.name, "cpp", "cpu", spec.dtypes[0]))
    assert verdict.correctness == "FAIL", verdict.why


def test_fp4_by_hand():
    """Codes 0 to 15 in order, scaled by 2 (E8M0 128) and by 1 (E4M3)."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor(numbers + [-v for v in numbers])
    w = torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)]], dtype=torch.uint8)
    assert torch.equal(reference.fp4_weights(w, torch.tensor([[128]], dtype=torch.uint8)), 2 * expected[None])
    ones = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert torch.equal(reference.fp4_weights(w, ones, scale=0.25), 0.25 * expected[None])
    x = torch.eye(16)
    assert torch.equal(reference.matmul_fp4(x, w, ones), expected[:, None])


def test_each_group_has_its_scale():
    w = torch.full((2, 32), 0x22, dtype=torch.uint8)  # ones
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = reference.fp4_weights(w, scales)
    assert values[:, ::32].tolist() == [[1, 2], [4, 8]] and values[:, 31::32].tolist() == [[1, 2], [4, 8]]


@pytest.mark.parametrize("name", TYPES)
def test_nothing_else_names_them(name):
    """But for what is said of them: records and tests."""
    tracked = subprocess.run(["git", "grep", "-lw", name], cwd=ROOT, capture_output=True, text=True).stdout.split()
    code = [f for f in tracked if f.endswith(".py") and not f.startswith(("tests/", "benchmarks/", f"kernels/{name}/"))]
    assert code == ["reference.py"]


def test_types_are_read_by_many_threads_at_once(monkeypatch):
    """Meanwhile `reference` is our module of oracles, whatever it was before."""
    theirs, names = object(), kernel_types()
    monkeypatch.setitem(sys.modules, "reference", theirs)
    with ThreadPoolExecutor(8) as pool:
        specs = list(pool.map(load_spec.__wrapped__, names * 3))
    assert [spec.name for spec in specs] == names * 3 and sys.modules["reference"] is theirs
