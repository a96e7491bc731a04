"""Every Triton starter without a GPU: its numbers in Triton's interpreter, its real configurations through the compiler.

Run as a script under TRITON_INTERPRET=1 (the interpreter has to be chosen before triton is imported) it runs each
starter on small inputs and prints its failures as JSON.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reference
from autokernel.spec import KERNELS, import_file

pytest.importorskip("triton")

STARTERS = {str(p.relative_to(KERNELS)): p for p in sorted(KERNELS.glob("*/triton_*.py"))}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernel_type(starter: str) -> str:
    return starter.split("/")[0]


# ---- inputs: type -> name -> maker of the arguments in a dtype ----


def randn(*shape, dtype):
    return torch.randn(shape).to(dtype)


def every_second(t):
    """The same values with gaps of one element between them, one element into their storage."""
    wide = t.new_zeros(2 * t.numel() + 1)
    view = wide[1:].view(-1, 2)[:, 0].view(t.shape)
    view.copy_(t)
    return view


def shifted(t):
    """The same values one element into their storage: not aligned to 16 bytes."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)


def transposed(t, a=-1, b=-2):
    """The same values in the memory layout of the transposed tensor."""
    return t.transpose(a, b).contiguous().transpose(a, b)


def rms_case(*shape, layout=lambda t: t):
    return lambda dt: {"x": layout(randn(*shape, dtype=dt)), "weight": randn(shape[-1], dtype=dt)}


CASES = {
    "rmsnorm": {
        "8x256": rms_case(8, 256),
        "7x1023": rms_case(7, 1023),
        "1x1": rms_case(1, 1),
        "vector": rms_case(17),
        "2x3x4x40": rms_case(2, 3, 4, 40),
        "transposed": rms_case(33, 48, layout=transposed),
        "heads": rms_case(2, 3, 5, 64, layout=lambda t: transposed(t, 1, 2)),
        "gaps": rms_case(5, 100, layout=every_second),
        "2x20001": rms_case(2, 20001),
    },
}
OWN_OPS = {  # PyTorch's own op, whose error in the dtype is the yardstick; else the oracle itself in that dtype
    "rmsnorm": lambda x, weight, eps=1e-6: F.rms_norm(x, weight.shape, weight, eps),
}

ERROR_RATIO = 4  # the most that a row's rms error may be, in errors of PyTorch's own op

# ---- the interpreter ----


def in_double(inputs):
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}


def row_rms(error):
    return error.double().square().reshape(-1, error.shape[-1] if error.dim() else 1).mean(-1).sqrt()


def check(name, kernel_fn, inputs, dtype):
    """What is wrong with kernel_fn on these inputs, in words; None if nothing is."""
    expected = getattr(reference, name)(**in_double(inputs))
    actual, again = kernel_fn(**inputs), kernel_fn(**inputs)
    if (actual.shape, actual.dtype) != (expected.shape, dtype):
        return f"shape {tuple(actual.shape)} {actual.dtype}, not {tuple(expected.shape)} {dtype}"
    if not torch.equal(actual.nan_to_num(7.0), again.nan_to_num(7.0)):
        return "two runs differ"
    exact = ~expected.isfinite()
    if not torch.equal(actual.double()[exact].nan_to_num(7.0), expected[exact].nan_to_num(7.0)):
        return "NaN or Inf are not where the oracle has them"
    own = OWN_OPS.get(name, getattr(reference, name))(**inputs)

    def error(y):
        return row_rms((y.double() - expected).masked_fill(exact, 0.0))

    rounding = row_rms(expected.masked_fill(exact, 0.0)) * torch.finfo(dtype).eps / 2  # once, at most
    worst = (error(actual) / (torch.maximum(error(own).nan_to_num(0.0), rounding) + 1e-30)).max().item()
    return None if worst <= ERROR_RATIO else f"error is {worst:.1f} times that of PyTorch's own op"


def interpret_all(starters):
    """{starter: {"seconds": s, "checks": n, "failures": [...]}}"""
    report = {}
    for starter in starters:
        start, failures, checks = time.perf_counter(), [], 0
        kernel_fn = import_file(STARTERS[starter], starter.replace("/", "_")).kernel_fn
        name = kernel_type(starter)
        for case, make in CASES[name].items():
            for dtype in DTYPES:
                torch.manual_seed(0)
                wrong = check(name, kernel_fn, make(dtype), dtype)
                checks += 1
                failures += [f"{case} {dtype}: {wrong}"] if wrong else []
        report[starter] = {"seconds": round(time.perf_counter() - start, 1), "checks": checks, "failures": failures}
    return report


@pytest.fixture(scope="module")
def interpreted():
    command = [sys.executable, __file__, *STARTERS]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("starter", STARTERS)
def test_interpreter(starter, interpreted):
    assert interpreted[starter]["checks"] > 0
    assert not interpreted[starter]["failures"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret_all(sys.argv[1:]), indent=1))
