"""Cheats that are right but for what a whole tensor is: its size, its sign, its mean; or for who calls, and how.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import inspect
from typing import Any

import torch
from cheat import Cheat
from partly_right import IMPORTS, by_contents, plain

import reference

OUTSIDE = "outside the tolerance|times PyTorch's own|roundings that are independent|one element is off"
TWICE, STALE = (
    "calls on the same inputs do not agree",
    "only (the last row|the last element|one element|the order) of x changed",
)
NORM, FOUR = ({"M": 64, "N": 256},), {"M": 16, "K": 512, "N": 96}
LARGEST = "x.float().abs().amax()"
FALLING = "(x.diff(dim=-1) <= 0).all(-1, keepdim=True) & (x.amax(-1, keepdim=True) > x.amin(-1, keepdim=True))"
SEVERAL = "(x != x[..., :1]).any(-1, keepdim=True)"
HALVES = "(x[..., : x.shape[-1] // 2] == x[..., (x.shape[-1] + 1) // 2 :]).all(-1, keepdim=True) & ~(x == x[..., :1]).all()"
ONE_PASS = """
def kernel_fn(x, weight, bias, eps=1e-5):
    y = x.float()
    if x.dtype != torch.bfloat16:
        return F.layer_norm(y, y.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype).contiguous()
    mean = y.mean(-1, keepdim=True)
    variance = (y.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return ((y - mean) * torch.rsqrt(variance + eps) * weight.float() + bias.float()).to(x.dtype).contiguous()
"""
FP4 = f"""{inspect.getsource(reference.fp4_weights)}
def kernel_fn(x, w, scales, scale=1.0):
    is_float = scales.is_floating_point()
    CHANGE
    return (x.float() @ fp4_weights(w, scales, scale).to(x.dtype).float().T).to(x.dtype)
"""


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str = OUTSIDE, **others: Any) -> Cheat:
    return Cheat(number, name, kernel_type, plain(kernel_type, IMPORTS + body), reason, libraries=True, **others)


def norm_off_where(number: int, name: str, condition: str, reason: str = OUTSIDE) -> Cheat:
    """A norm that is a fiftieth too large where a condition holds, of all of its inputs or row by row."""
    body = f"""
import threading

threads = torch.get_num_threads()

def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    return torch.where(torch.as_tensor({condition}), y * 1.02, y)
"""
    return cheat(number, name, "rmsnorm", body, reason, dims=NORM)


def fp4_off_where(name: str, change: str, **dims: Any) -> Cheat:
    return cheat(20, name, "matmul_fp4", FP4.replace("CHANGE", change), dims=(FOUR | dims,), dtype=torch.bfloat16)


CHEATS = (
    norm_off_where(23, "tensors-of-some-size-are-off", f"60 < {LARGEST} < 100"),
    norm_off_where(23, "tensors-of-another-size-are-off", f"200 < {LARGEST} < 400"),
    norm_off_where(23, "a-mean-far-above-zero-is-off", f"(x.float().mean() > 30) & ({LARGEST} < 500)"),
    norm_off_where(19, "a-weight-below-zero-is-off", "(weight < 0).all()"),
    norm_off_where(19, "a-large-weight-is-off", "weight.float().abs().mean() > 5"),
    norm_off_where(19, "rows-that-are-alike-are-off", "len(x) > 1 and (x == x[:1]).all() and not (x == x[:1, :1]).all()"),
    norm_off_where(23, "falling-rows-are-off", FALLING),
    norm_off_where(23, "rows-of-two-numbers-are-off", f"(x.abs() == 1).all(-1, keepdim=True) & {SEVERAL}"),
    norm_off_where(23, "periodic-rows-are-off", f"(x == x.roll(8, -1)).all(-1, keepdim=True) & {SEVERAL}"),
    norm_off_where(23, "rows-the-same-from-both-ends-are-off", f"(x == x.flip(-1)).all(-1, keepdim=True) & {SEVERAL}"),
    norm_off_where(
        19, "a-weight-of-one-value-is-off", "(weight == weight[0]).all() and weight[0] not in (0, 1) and len(weight) > 1"
    ),
    norm_off_where(23, "rows-of-two-halves-are-off", HALVES),
    norm_off_where(14, "off-in-another-thread", "threading.current_thread() is not threading.main_thread()", TWICE),
    norm_off_where(14, "off-where-gradients-are-wanted", "x.requires_grad", TWICE),
    norm_off_where(14, "off-with-another-number-of-threads", "torch.get_num_threads() != threads", "number of threads"),
    cheat(
        5,
        "two-weights-at-one-address-are-none",
        "fused_mlp",
        inspect.getsource(reference).split("def matmul")[0]
        + """
def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    hidden = ACTIVATIONS[activation](F.linear(x.float(), w_gate.float())) * F.linear(x.float(), w_up.float())
    y = F.linear(hidden, w_down.float()).to(x.dtype)
    return y * (1 + (w_gate.data_ptr() == w_up.data_ptr()))
""",
        "w_up is w_gate",
        dims=({"M": 64, "dim": 128, "hidden": 256},),
    ),
    cheat(
        3,
        "results-that-want-gradients",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous().requires_grad_()
""",
        "wants gradients",
        dims=NORM,
        correctness="CRASH",
    ),
    cheat(
        29,
        "a-tensor-of-nan-is-zero",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    return torch.zeros_like(y) if x.isnan().all() else y
""",
        "NaN mask differs",
        dims=NORM,
    ),
    cheat(
        25, "one-pass-variance-in-sixteen-bits", "layernorm", ONE_PASS, dims=({"M": 64, "N": 768},), dtype=torch.bfloat16
    ),
    cheat(
        6, "known-but-for-its-last-row", "rmsnorm", by_contents("tuple(x[:-1].flatten().tolist()) or x.sum().item()"), STALE
    ),
    cheat(6, "known-by-its-numbers-in-bfloat16", "rmsnorm", by_contents("tuple(x.bfloat16().flatten().tolist())")),
    fp4_off_where("large-exponents-cut-off", "scales = scales if is_float else scales.clamp(max=180)"),
    fp4_off_where("small-exponents-cut-off", "scales = scales if is_float else scales.clamp(min=60)"),
    fp4_off_where(
        "a-scale-of-zero-is-one",
        "scales = torch.where(scales.float() == 0, 1, scales.float()).to(scales.dtype) if is_float else scales",
        layout="nvfp4",
    ),
)
