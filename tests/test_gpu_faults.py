"""Kernels that hang or break a GPU: the right verdict in time, nothing left behind, the next kernel unharmed."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from autokernel.gate import Correctness, Judge
from autokernel.hardware import nvml
from autokernel.spec import load_spec
from autokernel.target import default_target

pytestmark = pytest.mark.gpu

LIMIT_S, SPARE_S = 5.0, 5.0  # for one call; for all the rest: processes, the import, a context's end
LEFT_BYTES = 1 << 30
RIGHT = (load_spec("rmsnorm").folder / "triton_kernel.py").read_text()


@dataclass(frozen=True)
class Fault:
    """`call` runs before a kernel that is right otherwise; `device` is a Triton kernel that it may launch. `reason`: a
    pattern."""

    name: str
    call: str
    correctness: Correctness
    reason: str
    device: str = ""

    @property
    def source(self) -> str:
        kernel_fn = f"def kernel_fn(x, weight, eps=1e-6):\n    {self.call}\n    return honest(x, weight, eps)\n"
        return RIGHT.replace("def kernel_fn(", "def honest(") + f"\n\n{self.device}\n\n{kernel_fn}"


def test_the_driver_is_asked_about_the_gpu_that_is_used():
    """Also where CUDA_VISIBLE_DEVICES makes the machine's second GPU the first one: its memory tells them apart."""
    held = torch.ones(1 << 30, device="cuda", dtype=torch.uint8)
    assert nvml.ask("cuda", "nvmlDeviceGetName", "") == torch.cuda.get_device_name()
    memory = nvml.ask("cuda", "nvmlDeviceGetMemoryInfo", None)
    assert abs(memory.free - torch.cuda.mem_get_info()[0]) < held.nbytes / 2
    assert nvml.utilization_percent("cuda") <= 100 and nvml.clock_event_reasons("cuda") >= 0


SPIN = """
@triton.jit
def _spin(flag):
    value = tl.atomic_add(flag, 0)
    while value == 0:
        value = tl.atomic_add(flag, 0)
"""
STRAY = """
@triton.jit
def _stray(y, offset):
    tl.store(y + offset, 1.0)
"""
ASSERT = """
@triton.jit(debug=True)
def _assert(y):
    tl.device_assert(tl.load(y) != tl.load(y), "never")
"""
ZERO = "torch.zeros(1, dtype=torch.{}, device=x.device)"

FAULTS = (
    Fault("hang", f"_spin[(1,)]({ZERO.format('int32')})", Correctness.TIMEOUT, "no answer within 5 s", SPIN),
    Fault(
        "illegal-access",
        f"_stray[(1,)]({ZERO.format('float32')}, 1 << 44)",
        Correctness.CRASH,
        "illegal memory access|misaligned address",
        STRAY,
    ),
    Fault(
        "out-of-memory",
        "hold = []\n    while True: hold.append(torch.empty(1 << 32, dtype=torch.uint8, device=x.device))",
        Correctness.CRASH,
        "out of memory",
    ),
    Fault("host-segfault", "import ctypes; ctypes.string_at(8)", Correctness.CRASH, "SIGSEGV"),
    Fault("device-assert", f"_assert[(1,)]({ZERO.format('float32')})", Correctness.CRASH, "device-side assert", ASSERT),
)


@pytest.fixture(scope="module")
def judge():
    with Judge("cuda") as judge:
        judge.check(RIGHT, default_target("rmsnorm", "triton", "cuda", torch.float16))  # the judge's own first kernels
        yield judge


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_is_named_in_time_and_leaves_nothing(judge: Judge, fault: Fault):
    target = default_target("rmsnorm", "triton", "cuda", torch.float16)
    free_bytes, checks = torch.cuda.mem_get_info()[0], judge.checks
    before = checks.timeout_s, checks.workers, checks.most_workers
    checks.timeout_s, checks.workers, checks.most_workers = LIMIT_S, 1, 1
    started = time.monotonic()
    verdict = judge.check(fault.source, target)
    elapsed_s = time.monotonic() - started
    checks.timeout_s, checks.workers, checks.most_workers = before
    assert verdict.correctness == fault.correctness, str(verdict.failure)
    assert re.search(fault.reason, verdict.failure.reason), f"{verdict.failure}\n{verdict.failure.detail}"
    assert elapsed_s < LIMIT_S + SPARE_S
    assert not children(judge.parent.process.pid)
    assert torch.cuda.mem_get_info()[0] > free_bytes - LEFT_BYTES
    honest = judge.check(RIGHT, target)
    assert honest.correctness == Correctness.PASS, honest.failure
