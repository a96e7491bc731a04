"""A tenth kernel type is its oracle and its folder, and nothing else: a `gelu` type added to a clone, judged, and gone."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from autokernel.spec import ROOT

ORACLE = '''

def gelu(x: Tensor) -> Tensor:
    """x Φ(x), elementwise."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
'''

SPEC = '''
"""GELU: inputs, shapes and costs."""

import torch

import reference
from autokernel.spec import KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="gelu",
    oracle=reference.gelu,
    eager=torch.nn.functional.gelu,
    eager_form="F.gelu",
    arguments=lambda dtype, M, N: {"x": TensorSpec((M, N), dtype)},
    smoke={"M": 8, "N": 64},
    sweep=({"M": 1, "N": 768}, {"M": 64, "N": 3072}, {"M": 33, "N": 100}),
    edges=({"M": 7, "N": 1023}, {"M": 1, "N": 1}),
    timing={"cpu": ({"M": 512, "N": 3072},), "cuda": ({"M": 4096, "N": 4096},)},
    flops=lambda a: 8 * a["x"].numel,
    bytes_moved=lambda a: 2 * a["x"].nbytes,  # read x, write y
    headline="bandwidth_gb_s",
)
'''

KERNEL = '''
"""GELU in C++, one pass."""

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "gelu"
BACKEND = "cpp"
SOURCE = r"""
#include <autokernel.hpp>
template <class T> void gelu(const T* x, T* y, int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; ++i) { const float v = float(x[i]); y[i] = T(0.5f * v * (1 + std::erf(v * 0.70710678f))); }
}
extern "C" int run(int dtype, const void* x, void* y, int64_t n) {
    AK_DISPATCH(dtype, gelu((const T*)x, (T*)y, n));
    return 0;
}
"""
_run = cpp_function(SOURCE, "run", "i pp l")


def kernel_fn(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _run(DTYPE_CODE[x.dtype], x.data_ptr(), y.data_ptr(), x.numel())
    return y
'''


@pytest.mark.parametrize("right", [True, False])
def test_a_gelu_type_is_an_oracle_and_a_folder(tmp_path, right: bool):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "workspace", "__pycache__"))
    with open(clone / "reference.py", "a") as file:
        file.write(ORACLE)
    folder = clone / "kernels" / "gelu"
    folder.mkdir()
    (folder / "spec.py").write_text(SPEC)
    (folder / "cpp_kernel.py").write_text(KERNEL if right else KERNEL.replace("0.5f * v * (1 +", "0.5f * v * (0.99f +"))
    command = [sys.executable, "bench.py", "kernels/gelu/cpp_kernel.py", "--json", "--quick", "--device", "cpu"]
    run = subprocess.run(command, cwd=clone, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(clone)})
    assert run.returncode == (0 if right else 1), run.stderr
    verdict = json.loads(run.stdout)
    assert (verdict["kernel_type"], verdict["correctness"]) == ("gelu", "PASS" if right else "FAIL")
