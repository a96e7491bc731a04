"""Every CUDA starter: without a GPU through the compiler for four generations of chips, with one (-m gpu) through the gate.

The builder's own promises are here too: errors name the line of the source, builds at the same time and builds that are
killed leave nothing that is not whole.
"""

import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_triton_starters import CASES, cases_of_spec, check, kernel_type
from test_triton_starters import ERROR_RATIO as INTERPRETED_RATIO

from autokernel import build
from autokernel.common.preflight import backends, find_compiler
from autokernel.gate import Judge
from autokernel.spec import KERNELS, import_file, load_spec
from autokernel.target import default_target

STARTERS = {str(p.relative_to(KERNELS)): p for p in sorted(KERNELS.glob("*/cuda_*.py"))}
CAPABILITIES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_100a": (10, 0)}


# cuBLAS adds up few rows of fp32 in parts, whose sums have smaller errors: 7.5 times smaller for 16 x 2048 x 32.
ERROR_RATIO = 8


def has_nvcc() -> bool:
    try:
        return bool(find_compiler("cuda"))
    except build.MissingCompiler:
        return False


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="there is no nvcc")
SOURCE = r"""
#include <autokernel.cuh>
__global__ void one(float* x) { x[0] = 1; }
extern "C" int run(float* x, cudaStream_t stream) {
    one<<<1, 1, 0, stream>>>(x);
    return cudaGetLastError();
}
"""


def load(starter: str):
    return import_file(STARTERS[starter], starter.replace("/", "_").removesuffix(".py"))


def functions(starter: str) -> list[build.CudaFunction]:
    return [f for f in vars(load(starter)).values() if isinstance(f, build.CudaFunction)]


def for_chip(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: CAPABILITIES[chip])


def test_every_type_has_a_cuda_starter():
    types = {p.parent.name for p in KERNELS.glob("*/spec.py")} - {"bmm", "grouped_matmul"}  # which have one in Triton alone
    assert {kernel_type(starter) for starter in STARTERS} == types


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("chip", [pytest.param(c, marks=() if c == "sm_90a" else pytest.mark.slow) for c in CAPABILITIES])
def test_compiles(chip: str, monkeypatch: pytest.MonkeyPatch):
    for_chip(monkeypatch, chip)
    libraries = {f.library for starter in STARTERS for f in functions(starter)}
    with ThreadPoolExecutor(2) as pool:
        assert all(path.exists() for path in pool.map(build.compile_library, libraries))


@needs_nvcc
def test_an_error_names_the_line_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for_chip(monkeypatch, "sm_90a")
    broken = SOURCE.replace("x[0] = 1", "x[0] = undeclared")
    with pytest.raises(build.CompileError) as refused:
        build.compile_library(build.Library("cuda", broken), tmp_path)
    line = 1 + broken[: broken.index("undeclared")].count("\n")
    assert re.search(rf'^kernel\.cu\({line}\): error: identifier "undeclared"', str(refused.value), re.M)
    assert "x[0] = undeclared" in str(refused.value)


@pytest.mark.slow
@needs_nvcc
def test_a_binary_is_found_again_unless_something_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for_chip(monkeypatch, "sm_90a")
    library = build.Library("cuda", SOURCE, (("WIDTH", "1"),))
    path = build.compile_library(library, tmp_path)
    built = path.stat().st_mtime_ns
    assert build.compile_library(library, tmp_path) == path and path.stat().st_mtime_ns == built
    others = {build.compile_library(build.Library("cuda", SOURCE, (("WIDTH", "2"),)), tmp_path)}
    for_chip(monkeypatch, "sm_80")
    others.add(build.compile_library(library, tmp_path))
    assert len(others - {path}) == 2


def compile_forever(folder: Path) -> None:
    torch.cuda.get_device_capability = lambda *device: CAPABILITIES["sm_90a"]
    build.compile_library(build.Library("cuda", SOURCE), folder)


@pytest.mark.slow_after(1)
@needs_nvcc
@pytest.mark.parametrize("after_s", [0.1, 0.5, 1.0])
def test_a_killed_build_leaves_nothing_that_is_not_whole(after_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    victim = multiprocessing.get_context("fork").Process(target=compile_forever, args=(tmp_path,))
    victim.start()
    time.sleep(after_s)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    for_chip(monkeypatch, "sm_90a")
    path = build.compile_library(build.Library("cuda", SOURCE), tmp_path)
    assert list(tmp_path.glob("*.so")) == [path]
    assert path.read_bytes()[:4] == b"\x7fELF"


@needs_nvcc
def test_builds_at_the_same_time_do_not_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for_chip(monkeypatch, "sm_90a")
    library = build.Library("cuda", SOURCE)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.compile_library(library, tmp_path), range(4)))
    assert len(paths) == 1 and set(tmp_path.iterdir()) == paths


def test_a_machine_without_a_toolkit_uses_what_pip_installed_or_is_told_what_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(build.MissingCompiler, match=r"^cuda kernels need nvcc, .* \(pip install -e '.\[cuda\]'\)"):
        find_compiler("cuda")
    assert backends("cuda") == ("triton",)
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text('#!/bin/sh\nfor output; do :; done\ntouch "$output"\n')
    nvcc.chmod(0o755)
    assert find_compiler("cuda") == str(nvcc) and backends("cuda") == ("triton", "cuda")


# ---- on a GPU ----


def on_gpu(value):
    """The same tensor on the GPU, with its strides and at its place within its storage."""
    if not torch.is_tensor(value):
        return value
    empty = torch.empty(0, dtype=value.dtype, device="cuda")
    return empty.set_(value.untyped_storage().cuda(), value.storage_offset(), value.shape, value.stride())


def failures(starter: str) -> list[str]:
    """What is wrong with a starter on the inputs on which Triton's interpreter is tried, and on wider rows than those."""
    kernel_fn, name, found = load(starter).kernel_fn, kernel_type(starter), []
    for case, make in (CASES.get(name) or cases_of_spec(name)).items():
        for dtype in load_spec(name).dtypes:
            torch.manual_seed(0)
            inputs = {k: on_gpu(v) for k, v in make(dtype).items()}
            wrong = check(name, kernel_fn, inputs, dtype, ERROR_RATIO if dtype == torch.float32 else INTERPRETED_RATIO)
            found += [f"{case} {dtype}: {wrong}"] if wrong else []
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("starter", STARTERS)
def test_layouts_and_special_values(starter: str):
    assert not failures(starter)


@pytest.fixture(scope="module")
def judge():
    with Judge("cuda") as judge:
        yield judge


FOR_GPU = [f"{p.parent.name}/{p.name}" for p in sorted(KERNELS.glob("*/*.py")) if p.name.startswith(("cuda_", "triton_"))]
IN_EVERY_DTYPE = [(starter, dtype) for starter in FOR_GPU for dtype in load_spec(kernel_type(starter)).dtypes]


@pytest.mark.gpu
@pytest.mark.parametrize("starter, dtype", IN_EVERY_DTYPE)
def test_passes_the_gate(starter: str, dtype: torch.dtype, judge: Judge):
    name, backend = kernel_type(starter), Path(starter).name.partition("_")[0]
    verdict = judge.check((KERNELS / starter).read_text(), default_target(name, backend, "cuda", dtype))
    assert verdict.correctness == "PASS", str(verdict.failure)


@pytest.mark.gpu
def test_a_launch_that_fails_is_raised():
    many = SOURCE.replace("<<<1, 1,", "<<<1, 4096,")  # more threads than a block can have
    with pytest.raises(RuntimeError, match="invalid (configuration )?argument"):
        build.cuda_function(many, "run", "p")(torch.zeros(1, device="cuda").data_ptr())


@pytest.mark.gpu
def test_launches_on_the_current_stream():
    x, stream = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    run = build.cuda_function(SOURCE, "run", "p")
    run(x.data_ptr())
    x.zero_()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        run(x.data_ptr())
    assert x.item() == 0  # read on the default stream, while the other one sleeps
    stream.synchronize()
    assert x.item() == 1


if __name__ == "__main__":
    for starter in sys.argv[1:]:
        print(starter, failures(starter) or "right")
