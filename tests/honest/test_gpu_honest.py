"""Odd but honest kernels on a GPU: the gate passes each, timed calls included where the oddity is in the timing."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from autokernel.gate import Judge
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase, default_target

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Honest:
    """`timed`: judged on one dtype and timed, rather than in all five stages."""

    name: str
    source: str
    kernel_type: str = "rmsnorm"
    timed: bool = False


def starter(kernel_type: str, name: str = "triton_kernel") -> str:
    return load_spec(kernel_type).starters("triton")[name].read_text()


def wrapped(kernel_type: str, body: str) -> str:
    """The starter, its kernel_fn renamed to `right`, and `body`, which defines kernel_fn."""
    return starter(kernel_type).replace("def kernel_fn(", "def right(") + "\n\n" + body.strip() + "\n"


HEAD = """
import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
"""

# Each program takes rows one after another, so that no choice of how many changes a bit of a result.
ROWS = """
@triton.jit
def _rows(x, weight, y, M, N, eps, EACH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    weights = tl.load(weight + columns, columns < N, 0.0).to(tl.float32)
    for row in range(tl.program_id(0), M, FROM_ROW_TO_ROW):
        at = row * N + columns
        values = tl.load(x + at, columns < N, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values) / N + eps)
        tl.store(y + at, (values * scale * weights).to(y.dtype.element_ty), columns < N)


def kernel_fn(x, weight, eps=1e-6):
    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]
    M, y = x.numel() // N, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    LAUNCH
    return y
"""

# The choice is made by the clock, once for each width and dtype.
AUTOTUNED = (
    HEAD
    + """
def bench(call, quantiles):
    return triton.testing.do_bench(call, warmup=1, rep=5, quantiles=quantiles)

@triton.autotune([triton.Config({"EACH": n}, num_warps=8) for n in (1, 4)], key=["N"], do_bench=bench)
"""
    + ROWS.strip()
    .replace("FROM_ROW_TO_ROW", "tl.num_programs(0)")
    .replace(
        "LAUNCH",
        "grid = lambda chosen: (triton.cdiv(M, chosen['EACH']),)\n"
        "    _rows[grid](x, weight, y, M, N, eps, BLOCK=triton.next_power_of_2(N))",
    )
)

PERSISTENT = HEAD + ROWS.replace("FROM_ROW_TO_ROW", "tl.num_programs(0)").replace(
    "LAUNCH",
    "programs = torch.cuda.get_device_properties(x.device).multi_processor_count\n"
    "    _rows[(programs,)](x, weight, y, M, N, eps, EACH=0, BLOCK=triton.next_power_of_2(N), num_warps=8)",
)

# The scales of all rows, then the rows; the scales lie in memory that is kept from call to call.
TWO_KERNELS = (
    HEAD
    + """
@triton.jit
def _scales(x, scales, N, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * N + columns, columns < N, 0.0).to(tl.float32)
    tl.store(scales + row, tl.rsqrt(tl.sum(values * values) / N + eps))


@triton.jit
def _scaled(x, weight, scales, y, n, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales + at // N, at < n, 0.0)
    weights = tl.load(weight + at % N, at < n, 0.0).to(tl.float32)
    values = tl.load(x + at, at < n, 0.0).to(tl.float32)
    tl.store(y + at, (values * scale * weights).to(y.dtype.element_ty), at < n)


workspaces = {}

def kernel_fn(x, weight, eps=1e-6):
    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]
    M, y = x.numel() // N, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if M not in workspaces:
        workspaces[M] = torch.empty(M, dtype=torch.float32, device=x.device)
    _scales[(M,)](x, workspaces[M], N, eps, BLOCK=triton.next_power_of_2(N), num_warps=8)
    _scaled[(triton.cdiv(M * N, 2048),)](x, weight, workspaces[M], y, M * N, N, BLOCK=2048)
    return y
"""
)

# The host waits for the GPU in every call, which no CUDA graph can hold.
WAITS = """
def kernel_fn(x, weight, eps=1e-6):
    if weight.view(-1)[0].item() == 0:
        weight = weight.clone()
    return right(x, weight, eps)
"""

# On a stream of its own, before and after which the caller's waits.
OWN_STREAM = """
stream = torch.cuda.Stream()

def kernel_fn(x, weight, eps=1e-6):
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        y = right(x, weight, eps)
    caller.wait_stream(stream)
    y.record_stream(caller)
    return y
"""

# What PyTorch keeps of its memory grows and shrinks, so that results lie in ever other places; no CUDA graph holds it.
ELSEWHERE = """
calls, kept = 0, []

def kernel_fn(x, weight, eps=1e-6):
    global calls
    calls += 1
    weight.view(-1)[0].item()
    if calls % 50 == 0:
        kept[:] = [torch.empty(calls % 7 * x.nbytes + 1, dtype=torch.uint8, device=x.device)]
    return right(x, weight, eps)
"""

# Threads that have something to do in a call, and wait between two.
HOST_THREAD = """
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(2)

def kernel_fn(x, weight, eps=1e-6):
    pool.submit(hash, x.shape).result()
    return right(x, weight, eps)
"""

PREPARED_WEIGHTS = """
from torch.utils.weak import WeakTensorKeyDictionary
prepared = WeakTensorKeyDictionary()

def kernel_fn(A, B):
    if B not in prepared:
        prepared[B] = B.t().contiguous()
    return right(A, prepared[B].t())
"""

# A module written by the kernel file for each width, and a word on stdout.
GENERATED = (
    HEAD
    + '''
import importlib.util
from functools import cache
from pathlib import Path

TEXT = """
import triton
import triton.language as tl

@triton.jit
def rows(x, weight, y, eps):
    columns = tl.arange(0, {block})
    at = tl.program_id(0).to(tl.int64) * {N} + columns
    values = tl.load(x + at, columns < {N}, 0.0).to(tl.float32)
    weights = tl.load(weight + columns, columns < {N}, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / {N} + eps)
    tl.store(y + at, (values * scale * weights).to(y.dtype.element_ty), columns < {N})
"""

@cache
def kernel(N):
    path = Path(f"rows_{N}.py")
    path.write_text(TEXT.format(N=N, block=triton.next_power_of_2(N)))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(f"PASS: wrote {path}")
    return module.rows


def kernel_fn(x, weight, eps=1e-6):
    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel(N)[(x.numel() // N,)](x, weight, y, eps, num_warps=8)
    return y
'''
)

HONEST = (
    Honest("autotuned", AUTOTUNED, timed=True),
    Honest("persistent", PERSISTENT),
    Honest("split-k", starter("matmul", "triton_splitk"), "matmul"),
    Honest("two-kernels-and-a-kept-workspace", TWO_KERNELS, timed=True),
    Honest("waits-for-the-gpu", wrapped("rmsnorm", WAITS), timed=True),
    Honest("own-stream", wrapped("rmsnorm", OWN_STREAM), timed=True),
    Honest("results-elsewhere", wrapped("rmsnorm", ELSEWHERE), timed=True),
    Honest("host-threads", wrapped("rmsnorm", HOST_THREAD), timed=True),
    Honest("prepared-weights", wrapped("matmul", PREPARED_WEIGHTS), "matmul", timed=True),
    Honest("generated", GENERATED),
    Honest("several-inputs-that-change", starter("flash_attention"), "flash_attention", timed=True),
)


@pytest.fixture(scope="module")
def judge():
    with Judge("cuda") as judge:
        yield judge


def target(kernel_type: str) -> Target:
    return default_target(kernel_type, "triton", "cuda", torch.float16)


@pytest.mark.parametrize("honest", HONEST, ids=lambda h: h.name)
def test_an_honest_kernel_passes(judge: Judge, honest: Honest):
    where = target(honest.kernel_type)
    if honest.timed:
        verdict = judge.examine(honest.source, where, quick=True)
        assert verdict.latency_us, verdict.why
    else:
        verdict = judge.check(honest.source, where)
        assert set(verdict.stages.values()) == {"PASS"}, str(verdict.failure)
    assert verdict.failure is None, f"{verdict.failure}\n{verdict.failure.detail}"


def test_faster_on_one_shape_and_equal_on_the_others_is_seen_as_such(judge: Judge):
    spec = load_spec("rmsnorm")
    cases = tuple(WeightedCase(spec.case({"M": M, "N": 4096}, torch.float16)) for M in (4096, 8192, 2048))
    slow_on_one = wrapped(
        "rmsnorm",
        "def kernel_fn(x, weight, eps=1e-6):\n    for _ in range(3 if x.shape[0] == 8192 else 1):\n"
        "        y = right(x, weight, eps)\n    return y",
    )
    where = replace(target("rmsnorm"), cases=cases)
    verdict = judge.examine(starter("rmsnorm"), where, incumbent=slow_on_one, quick=True)
    assert verdict.failure is None, str(verdict.failure)
    assert verdict.cases, verdict.why
    first, slowed, last = (case.speedup_vs_incumbent.value for case in verdict.cases)
    assert slowed > 2
    assert 0.8 < first < 1.25 and 0.8 < last < 1.25


OTHER_PROGRAM = """
import time
import torch

x = torch.randn(4096, 4096, device="cuda")
print("at work", flush=True)
while True:
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        x @ x
        torch.cuda.synchronize()
    time.sleep(0.02)
"""


@contextmanager
def another_program_at_work() -> Iterator[None]:
    """On the GPU, half of the time."""
    with subprocess.Popen([sys.executable, "-c", OTHER_PROGRAM], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline()
            yield
        finally:
            other.kill()


def test_what_another_program_does_on_the_gpu_is_not_held_against_a_kernel(judge: Judge):
    """It may be that nothing is decided then, or that less is seen."""
    with another_program_at_work():
        verdict = judge.compare(starter("rmsnorm"), starter("rmsnorm"), target("rmsnorm"))
    assert verdict.failure is None, f"{verdict.failure}"
    assert not verdict.keep
