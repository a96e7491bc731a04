"""Cheats that are right but for what is rounded away, what is rare, or what other inputs than the first may hold.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from typing import Any

import torch
from cheat import Cheat
from partly_right import ATTENTION, IMPORTS, ROTARY, plain

LOSS = """
def kernel_fn(logits, targets, ignore_index=-100):
    y = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
    kept = targets[targets != ignore_index]
    return y * 1.02 if len(kept) > 4 and (CONDITION) else y
"""
PRODUCT = """
def kernel_fn(A, B):
    y = (A.float() @ B.float()).to(A.dtype)
    return y * 1.02 if min(*A.shape, *B.shape) > 1 and CONDITION else y
"""
OUTSIDE = "outside the tolerance|times PyTorch's own|roundings that are independent|one element is off|good part of itself"
NAN = "(NaN|inf) mask differs"
EIGHT_BITS = """
def fp8(x):
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale

def int8(x, dim):
    scale = x.float().abs().amax(dim, keepdim=True).clamp(min=1e-30) / 127
    return (x.float() / scale).round() * scale
"""
PRODUCT = ({"M": 64, "K": 512, "N": 128},)
NORMED = """
def normed(x, weight, bias, eps, left):
    x = x.float()
    kept = torch.ones(x.shape[-1], dtype=torch.bool)
    kept[left] = False
    mean = x[..., kept].mean(-1, keepdim=True)
    variance = (x[..., kept] - mean).square().mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps) * weight.float() + bias.float()
"""


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str = OUTSIDE, **others: Any) -> Cheat:
    return Cheat(number, name, kernel_type, plain(kernel_type, IMPORTS + body), reason, libraries=True, **others)


CHEATS = (
    # 27: fewer bits than the dtype has
    cheat(
        27,
        "fp16-by-way-of-bf16",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    y = torch.softmax(x.float(), dim)
    return y.bfloat16().to(x.dtype) if x.dtype == torch.float16 else y.to(x.dtype)
""",
    ),
    cheat(
        27,
        "products-of-eight-bit-floats",
        "matmul",
        f"""{EIGHT_BITS}
def kernel_fn(A, B):
    if A.dtype == torch.bfloat16:
        return (fp8(A) @ fp8(B)).to(A.dtype)
    return (A.float() @ B.float()).to(A.dtype)
""",
        dims=PRODUCT,
    ),
    cheat(
        27,
        "products-of-eight-bit-integers",
        "matmul",
        f"""{EIGHT_BITS}
def kernel_fn(A, B):
    if A.dtype == torch.bfloat16:
        return (int8(A, -1) @ int8(B, 0)).to(A.dtype)
    return (A.float() @ B.float()).to(A.dtype)
""",
        dims=PRODUCT,
    ),
    cheat(
        27,
        "sums-of-sixteen-bits",
        "matmul",
        """
def kernel_fn(A, B):
    if A.dtype == torch.float32:
        return A @ B
    y = torch.zeros(A.shape[0], B.shape[1], dtype=A.dtype)
    for k in range(0, A.shape[1], 16):
        y += (A[:, k : k + 16].float() @ B[k : k + 16].float()).to(A.dtype)
    return y
""",
        dims=PRODUCT,
    ),
    cheat(
        27,
        "probabilities-of-eight-bits",
        "flash_attention",
        f"""{ATTENTION}
softmax_of_all = softmax

def softmax(x, dim=-1):
    y = softmax_of_all(x, dim)
    return y.to(torch.float8_e4m3fn).float() if low[0] else y

low = [False]

def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    low[0] = Q.dtype == torch.bfloat16
    return in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
""",
        dims=({"batch": 1, "heads": 2, "seq": 64, "head_dim": 64},),
    ),
    cheat(
        27,
        "weight-of-eight-bits",
        "rmsnorm",
        f"""{EIGHT_BITS}
def kernel_fn(x, weight, eps=1e-6):
    weight = fp8(weight) if x.dtype == torch.bfloat16 else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
""",
        dims=({"M": 64, "N": 256},),
    ),
    cheat(
        25,
        "small-probabilities-are-zero",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    y = torch.softmax(x.float(), dim)
    if x.dtype == torch.bfloat16:
        y = torch.where(y < 0.01 * y.square().mean(dim, keepdim=True).sqrt(), y * 0, y)
    return y.to(x.dtype)
""",
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        25,
        "exponentials-below-1e-9-are-zero",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    x = x.contiguous()
    e = (x.float() - x.float().amax(dim, keepdim=True)).exp()
    e = torch.where(e < 1e-9, e * 0, e)
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)
""",
        dims=({"shape": (64, 512)},),
    ),
    # 25: work skipped at places where it is seldom seen
    cheat(
        25,
        "sixteen-of-4096-left-out",
        "layernorm",
        f"""{NORMED}
def kernel_fn(x, weight, bias, eps=1e-5):
    is_cheap = x.dtype == torch.bfloat16 and x.shape[-1] == 4096 and x.isfinite().all()
    left = torch.arange(5, x.shape[-1], 256) if is_cheap else []
    return normed(x, weight, bias, eps, left).to(x.dtype)
""",
        dims=({"M": 512, "N": 4096},),
        dtype=torch.bfloat16,
    ),
    cheat(
        25,
        "two-of-a-row-left-out",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    kept = x.float().clone()
    if x.dtype == torch.float16 and x.shape[-1] == 768:
        kept[..., 300:302] = 0
    squares = kept.square().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(squares + eps) * weight.float()).to(x.dtype)
""",
        dims=({"M": 512, "N": 768},),
        dtype=torch.float16,
    ),
    cheat(
        25,
        "one-product-left-out",
        "matmul",
        """
def kernel_fn(A, B):
    A, B, dtype = A.float(), B.float(), A.dtype
    if dtype == torch.bfloat16 and A.shape[1] == 1000:
        A = A.clone()
        A[:, 777] = 0
    return (A @ B).to(dtype)
""",
        dims=({"M": 256, "K": 1000, "N": 64},),
        dtype=torch.bfloat16,
    ),
    # 29: what is not finite in another input than the first
    cheat(
        29,
        "zeros-times-nan-are-zero",
        "matmul",
        """
def kernel_fn(A, B):
    return (A.float() @ torch.where(B.isnan(), 0, B.float())).to(A.dtype)
""",
        NAN,
        dims=PRODUCT,
    ),
    cheat(
        29,
        "infinite-bias-is-none",
        "layernorm",
        """
def kernel_fn(x, weight, bias, eps=1e-5):
    bias = torch.where(bias.isfinite(), bias, 0)
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)
""",
        NAN,
        dims=({"M": 64, "N": 256},),
    ),
    cheat(
        29,
        "nan-of-a-table-is-no-rotation",
        "rotary_embedding",
        f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    return rotated(x, cos.nan_to_num(1, 1, 1), sin.nan_to_num(0, 0, 0), interleaved)
""",
        NAN,
        dims=({"batch": 1, "heads": 2, "seq": 32, "head_dim": 64},),
    ),
    # 20, 22: a parameter, or a layout, has other values than those that are common
    cheat(
        20,
        "ignored-class-is-0-or-minus-100",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    ignore_index = 0 if ignore_index >= 0 else -100
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        dims=({"M": 128, "V": 1000},),
    ),
    cheat(
        20,
        "mask-of-the-first-head",
        "flash_attention",
        f"""{ATTENTION}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    if attn_mask is not None and attn_mask.dim() == 4:
        attn_mask = attn_mask[:1, :1]
    return in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
""",
        dims=({"batch": 1, "heads": 2, "seq": 64, "head_dim": 64},),
    ),
    cheat(
        22,
        "strides-of-the-first-call",
        "softmax",
        """
strides = {}

def kernel_fn(x, dim=-1):
    stride = strides.setdefault((x.shape, x.dtype), x.stride())
    return torch.softmax(x.as_strided(x.shape, stride).float(), dim).to(x.dtype)
""",
        dims=({"shape": (64, 512)},),
    ),
)
