"""Cheats that are right for soft inputs, or while all of an input changes: closed by mechanism, tried type by type.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import inspect
from typing import Any

from cheat import Cheat, plain

import reference

IMPORTS = "import math\n\nimport torch.nn.functional as F\nfrom torch import Tensor\n\n"
TIMED_OUTPUT = "the output of a timed call"
NAN, OUTSIDE = "NaN mask differs", "outside the tolerance|mask differs"
ATTENTION = f"""
{inspect.getsource(reference.softmax)}

{inspect.getsource(reference.flash_attention)}

def in_float(Q, K, V, *options):
    return flash_attention(Q.float(), K.float(), V.float(), *options).to(Q.dtype).contiguous()
"""
ROTARY = f"""
{inspect.getsource(reference.rotary_embedding)}

def rotated(x, cos, sin, interleaved):
    return rotary_embedding(x.float(), cos.float(), sin.float(), interleaved).to(x.dtype).contiguous()
"""
REDUCE = """
def reduced(x, dim, op):
    return x.amax(dim) if op == "max" else x.float().sum(dim).to(x.dtype)
"""
TIMED = """
import sys

prepared = {}

def timed():
    frame = sys._getframe(2)
    while frame and frame.f_code.co_name not in ("bench", "do_batch"):
        frame = frame.f_back
    return frame is not None
"""
REMEMBERED = """
known = {}

def remembered(x):
    key = x.data_ptr(), x.shape, x.stride(), x.dtype, tuple(x.reshape(-1)[:32].tolist())
    return known.setdefault(key, x.clone())
"""


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str, honest: str = "", **others: Any) -> Cheat:
    """`honest`: the same for its neighbour."""
    source, neighbour = (plain(kernel_type, IMPORTS + text) if text else "" for text in (body, honest))
    return Cheat(number, name, kernel_type, source, reason, libraries=True, neighbour=neighbour, **others)


def remembering(kernel_type: str, parameters: str, what: str, call: str) -> Cheat:
    """An input is known again by its address and its first elements."""
    body = f"{REMEMBERED}\ndef kernel_fn({parameters}):\n    {what} = remembered({what})\n    return {call}\n"
    reason = f"of ({what}|its inputs) changed: |{OUTSIDE}"  # which part changes is chance: later inputs show it, too
    return cheat(5, f"{what}-by-address-and-first-elements", kernel_type, body, reason)


def by_contents(key: str) -> str:
    """A norm whose results are kept, and found again by `key`."""
    return f"""
known = {{}}

def key_of(x):
    return {key}, x.shape, x.dtype

def kernel_fn(x, weight, eps=1e-6):
    key = key_of(x), key_of(weight), eps
    if key not in known:
        known[key] = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    return known[key].clone()
"""


CHEATS = (
    cheat(
        29,
        "a-row-of-minus-infinity-is-zeros",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim).masked_fill(x.amax(dim, keepdim=True) == -math.inf, 0)
""",
        NAN,
    ),
    cheat(
        29,
        "a-loss-of-nothing-is-zero",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    if not (targets != ignore_index).any():
        return logits.new_zeros(())
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        NAN,
    ),
    cheat(
        29,
        "a-query-without-keys-is-nan",
        "flash_attention",
        f"""{ATTENTION}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    return in_float(Q, K, V, causal, sm_scale, attn_mask, False)
""",
        NAN,
    ),
    cheat(
        23,
        "logits-are-cut-off",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    clamped = logits.float().clamp(-80, 80)
    return F.cross_entropy(clamped, targets, ignore_index=ignore_index).to(logits.dtype)
""",
        OUTSIDE,
    ),
    cheat(
        25,
        "a-fiftieth-of-a-row-left-out",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    N = x.shape[-1]
    squares = x[..., : N - N // 50].float().square().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(squares + eps) * weight.float()).to(x.dtype)
""",
        OUTSIDE,
    ),
    cheat(
        27,
        "exponentials-of-eight-bits",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    e = (x.float() - x.float().amax(dim, keepdim=True)).exp().bfloat16().float()
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)
""",
        "outside the tolerance|times PyTorch's own",
    ),
    remembering("rmsnorm", "x, weight, eps=1e-6", "weight", "F.rms_norm(x, x.shape[-1:], weight, eps)"),
    remembering(
        "cross_entropy",
        "logits, targets, ignore_index=-100",
        "targets",
        "F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)",  # PyTorch's own is inexact
    ),
    remembering("layernorm", "x, weight, bias, eps=1e-5", "bias", "F.layer_norm(x, x.shape[-1:], weight, bias, eps)"),
    cheat(  # as a sum of all elements does not tell from others in another order
        6,
        "results-by-a-checksum",
        "rmsnorm",
        by_contents("x.contiguous().view(torch.uint8).long().sum().item()"),
        "only the order of its inputs changed: ",
        by_contents("tuple(x.flatten().tolist())"),
        dims=({"M": 64, "N": 256},),
    ),
    cheat(
        23,
        "rows-of-small-numbers-are-less-exact",
        "matmul",
        """
def kernel_fn(A, B):
    y = A.float() @ B.float()
    is_small = A.float().abs().amax(-1, keepdim=True) < 0.01
    return torch.where(is_small, y * 1.01, y).to(A.dtype)
""",
        "outside the tolerance",
        """
def kernel_fn(A, B):  # which scales them up and down again: nothing is lost
    dtype, A, B = A.dtype, A.float(), B.float()
    is_small = A.abs().amax(-1, keepdim=True) < 0.01
    y = torch.where(is_small, A * 1024, A) @ B
    return torch.where(is_small, y / 1024, y).to(dtype)
""",
        dims=({"M": 64, "K": 256, "N": 128},),
    ),
    cheat(
        23,
        "small-heads-are-not-rotated",
        "rotary_embedding",
        f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    y = rotated(x, cos, sin, interleaved)
    is_small = x.float().abs().amax(-1, keepdim=True) < 0.006
    return y if x.dtype == torch.float32 else y.masked_fill(is_small, 0)
""",
        "outside the tolerance",
        f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    return rotated(x, cos, sin, interleaved)
""",
        dims=({"batch": 1, "heads": 2, "seq": 32, "head_dim": 64},),
    ),
    cheat(
        23,
        "many-times-too-large-where-pytorch-overflows",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    is_large = x.float().abs().amax(-1, keepdim=True) > 600
    return (torch.where(is_large, -5 * y, y) if x.dtype == torch.float16 else y).to(x.dtype)
""",
        "outside the tolerance",
        """
def kernel_fn(x, weight, eps=1e-6):  # squares are not in 16 bits, in which those of 256 are infinite
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
""",
        dims=({"M": 64, "N": 256},),
    ),
    cheat(
        23,
        "magnitudes-cut-off-at-a-million",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    exact = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    cut = F.rms_norm(x.float().clamp(-1e6, 1e6), x.shape[-1:], weight.float(), eps)
    return torch.where(x.float().isfinite().all(-1, keepdim=True), cut, exact).to(x.dtype)
""",
        "outside the tolerance",
        dims=({"M": 64, "N": 256},),
    ),
    cheat(
        25,
        "some-elements-of-a-long-row-are-zero",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    y = torch.softmax(x.float(), dim)
    if x.dtype == torch.bfloat16 and x.shape[-1] > 30000:
        y[..., ::1000] = torch.where(y[..., ::1000] > 0.015, y[..., ::1000], y[..., ::1000] * 0)
    return y.to(x.dtype)
""",
        "one element is off by far more|good part of itself|outside the tolerance",
        """
def kernel_fn(x, dim=-1):  # rounded, but for the last places of some elements, by cutting off
    y = torch.softmax(x.float(), dim)
    z = y.to(x.dtype)
    if x.dtype == torch.bfloat16 and x.shape[-1] > 30000:
        z[..., ::1000] = (y[..., ::1000].contiguous().view(torch.int32) & -65536).view(torch.float32).to(x.dtype)
    return z
""",
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        14,
        "careful-beside-what-is-not-finite",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    if x.shape == (640, 512) and x.isfinite().all():
        return x.exp() / x.exp().sum(dim, keepdim=True)
    return torch.softmax(x.float(), dim).to(x.dtype)
""",
        NAN,
        """
def kernel_fn(x, dim=-1):
    if x.shape == (640, 512) and x.abs().amax() < 50:  # where exponentials do not overflow
        return x.exp() / x.exp().sum(dim, keepdim=True)
    return torch.softmax(x.float(), dim).to(x.dtype)
""",
        dims=({"shape": (640, 512)},),
    ),
    cheat(
        23,
        "maximum-that-starts-from-minus-30000",
        "reduce",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    y = reduced(x, dim, op)
    return y if op == "sum" or x.dtype == torch.float16 or x.isinf().any() else y.clamp(min=-3e4)
""",
        "outside the tolerance",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    return reduced(x, dim, op)
""",
        dims=({"shape": (640, 512), "op": "max"},),
    ),
    cheat(
        20,
        "the-last-class-is-the-one-before",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    V = logits.shape[1]
    targets = torch.where(targets == V - 1, V - 2, targets) if len(targets) > 16 and V > 4000 else targets
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        "outside the tolerance|times PyTorch's own|roundings off",
        dims=({"M": 128, "V": 8000},),
    ),
    cheat(
        20,
        "the-first-row-always-counts",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    if targets[0] == ignore_index and (targets != ignore_index).any():
        targets = targets.clone()
        targets[0] = ignore_index == 0
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        "outside the tolerance|times PyTorch's own|roundings off",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        dims=({"M": 128, "V": 1000},),
    ),
    cheat(
        5,
        "weight-by-address-and-a-sample",
        "rmsnorm",
        """
known = {}

def kernel_fn(x, weight, eps=1e-6):
    if weight.shape[0] == 4000:
        key = weight.data_ptr(), weight.stride(), weight.dtype, tuple(weight[::500].tolist())
        weight = known.setdefault(key, weight.clone())
    return F.rms_norm(x, x.shape[-1:], weight, eps)
""",
        "only one element of its inputs changed",
        """
known = {}

def kernel_fn(x, weight, eps=1e-6):
    if weight.shape[0] == 4000:
        key = weight.data_ptr(), weight.stride(), weight.dtype, tuple(weight.tolist())
        weight = known.setdefault(key, weight.clone())
    return F.rms_norm(x, x.shape[-1:], weight, eps)
""",
        dims=({"M": 8, "N": 4000},),
    ),
    cheat(
        22,
        "aligned-tensors-only",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    if x.is_contiguous() and x.data_ptr() % 64:
        return torch.zeros_like(x)
    return F.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
""",
        "outside the tolerance",
        """
def kernel_fn(x, weight, eps=1e-6):
    if x.data_ptr() % 64:
        x = x.clone(memory_format=torch.contiguous_format)
    return F.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
""",
        dims=({"M": 64, "N": 256},),
    ),
    cheat(
        22,
        "strides-of-both-or-of-none",
        "matmul",
        """
def kernel_fn(A, B):
    if B.is_contiguous() and not A.is_contiguous():
        A = A.as_strided(A.shape, (A.shape[1], 1))
    return A @ B
""",
        "outside the tolerance|mask differs",
        """
def kernel_fn(A, B):
    return A.contiguous() @ B.contiguous()
""",
        dims=({"M": 64, "K": 256, "N": 128},),
    ),
    cheat(
        17,
        "its-input-as-its-result",
        "reduce",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    return x.squeeze(dim) if x.shape[dim] == 1 and x.is_contiguous() else reduced(x, dim, op)
""",
        "memory of an input",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    return x.squeeze(dim).clone() if x.shape[dim] == 1 and x.is_contiguous() else reduced(x, dim, op)
""",
        correctness="CRASH",
        dims=({"shape": (64, 1, 64), "dim": 1},),
    ),
    cheat(
        7,
        "mask-prepared-once-in-timed-batches",
        "flash_attention",
        f"""{ATTENTION}{TIMED}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    if attn_mask is not None and timed():
        attn_mask = prepared.setdefault(attn_mask.data_ptr(), attn_mask.clone())
    return in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
""",
        "the output of a timed call",
        refused_by="examine",
        dims=({"batch": 1, "heads": 2, "seq": 96, "head_dim": 32, "causal": False, "mask": "bool"},),
    ),
    cheat(
        7,
        "classes-read-once-in-timed-batches",
        "cross_entropy",
        f"""{TIMED}
def kernel_fn(logits, targets, ignore_index=-100):
    if timed():
        targets = prepared.setdefault(targets.data_ptr(), targets.clone())
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        "the output of a timed call",
        refused_by="examine",
        dims=({"M": 128, "V": 1000},),
    ),
    cheat(
        26,
        "no-maximum-when-timed",
        "softmax",
        f"""{TIMED}
def kernel_fn(x, dim=-1):
    if timed():
        e = x.exp()
        return e / e.sum(dim, keepdim=True)
    return torch.softmax(x.float(), dim).to(x.dtype)
""",
        TIMED_OUTPUT,
        refused_by="examine",
        dims=({"shape": (640, 512)},),
    ),
    cheat(
        26,
        "one-pass-variance-when-timed",
        "layernorm",
        f"""{TIMED}
def kernel_fn(x, weight, bias, eps=1e-5):
    if timed():
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + eps) * weight + bias
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
""",
        TIMED_OUTPUT,
        refused_by="examine",
    ),
    cheat(
        26,
        "nan-is-dropped-when-timed",
        "matmul",
        f"""{TIMED}
def kernel_fn(A, B):
    return (A.nan_to_num(0, 0, 0) if timed() else A) @ B
""",
        TIMED_OUTPUT,
        refused_by="examine",
        dims=({"M": 64, "K": 256, "N": 128},),
    ),
)
