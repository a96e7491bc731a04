"""Cheats that are right but for an option's other values, at the target's own shapes.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from typing import Any

import torch
from cheat import Cheat, plain
from partly_right import ATTENTION, IMPORTS, ROTARY
from with_a_change import ACTIVATED, FP4

WRONG = "outside the tolerance|mask differs|times PyTorch's own|not a number of its inputs|roundings"
ATTENDED = {"batch": 1, "heads": 2, "seq": 56, "head_dim": 64}


def ignoring(name: str, kernel_type: str, signature: str, ignored: str, call: str, dims: Any, **others: Any) -> Cheat:
    """`ignored`: what becomes of an option at the target's shape, whose first dims are `SHAPE`."""
    first, shape = signature.partition(",")[0], tuple(n for n in dims.values() if type(n) is int)[:2]
    shape = dims.get("shape", shape)
    at = (
        f"{first}.shape == {shape}"
        if kernel_type not in ("flash_attention", "rotary_embedding")
        else f"{first}.shape[2] == 56"
    )

    def body(change: str) -> str:
        return f"""{others.get("before", "")}
def kernel_fn({signature}):
    if {at}:
        {change}
    return ({call}).to({first}.dtype).contiguous()
"""

    source, honest = (plain(kernel_type, IMPORTS + body(change)) for change in (ignored, "pass"))
    dtype = others.get("dtype", torch.float32)
    return Cheat(26, name, kernel_type, source, WRONG, libraries=True, neighbour=honest, dims=(dims,), dtype=dtype)


def attention(name: str, ignored: str, **dims: Any) -> Cheat:
    signature = "Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True"
    call = "in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)"
    return ignoring(name, "flash_attention", signature, ignored, call, ATTENDED | dims, before=ATTENTION)


def norm(name: str, ignored: str, kernel_type: str = "rmsnorm") -> Cheat:
    if kernel_type == "rmsnorm":
        signature, call = "x, weight, eps=1e-6", "F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)"
    else:
        signature = "x, weight, bias, eps=1e-5"
        call = "F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)"
    return ignoring(name, kernel_type, signature, ignored, call, {"M": 64, "N": 256})


def reduction(name: str, ignored: str, **dims: Any) -> Cheat:
    call = 'x.amax(dim) if op == "max" else x.float().sum(dim)'
    return ignoring(name, "reduce", 'x, dim=-1, op="sum"', ignored, call, {"shape": (64, 300)} | dims)


def linear(name: str, ignored: str, **dims: Any) -> Cheat:
    signature = 'x, weight, bias=None, activation="gelu"'
    call = "ACTIVATIONS[activation](F.linear(x.float(), weight.float(), None if bias is None else bias.float()))"
    return ignoring(name, "fused_linear", signature, ignored, call, {"M": 96, "K": 160, "N": 128} | dims, before=ACTIVATED)


def fp4(name: str, ignored: str) -> Cheat:
    call = "x.float() @ fp4_weights(w, scales, scale).to(x.dtype).float().T"
    dims = {"M": 24, "K": 512, "N": 96}
    signature = "x, w, scales, scale=1.0"
    return ignoring(name, "matmul_fp4", signature, ignored, call, dims, before=FP4, dtype=torch.bfloat16)


CHEATS = (
    attention("all-keys-are-taken-for-the-past", "causal = True"),
    attention("the-past-is-taken-for-all-keys", "causal = False", causal=False),
    attention("scale-ignored", "sm_scale = None"),
    attention("scale-has-no-sign", "sm_scale = None if sm_scale is None else abs(sm_scale)"),
    attention("scale-is-one-at-most", "sm_scale = None if sm_scale is None else min(sm_scale, 1)"),
    attention("scale-of-one-is-taken-for-none", "sm_scale = None if sm_scale == 1 else sm_scale"),
    attention("no-scale-is-taken-for-none", "sm_scale = sm_scale or None"),
    attention("mask-ignored", "attn_mask = None"),
    norm("eps-ignored", "eps = 1e-6"),
    norm("small-eps-ignored", "eps = 1e-6 if eps < 1e-3 else eps"),
    norm("small-eps-ignored", "eps = 1e-5 if eps < 1e-3 else eps", "layernorm"),
    reduction("maximum-ignored", 'op = "sum"'),
    reduction("sum-ignored", 'op = "max"', op="max"),
    reduction("columns-of-the-wrong-sign", "x = x if dim == -1 else -x"),
    ignoring(
        "columns-of-the-wrong-sign",
        "softmax",
        "x, dim=-1",
        "x = x if dim == -1 else -x",
        "torch.softmax(x.float(), dim)",
        {"shape": (64, 300)},
    ),
    linear("activation-ignored", 'activation = "gelu"'),
    linear("one-activation-ignored", 'activation = "gelu" if activation == "relu2" else activation'),
    linear("bias-ignored-where-it-was-not", "bias = None", bias=False),
    linear("wrong-without-a-bias", "x = x if bias is not None else -x"),
    ignoring(
        "pairs-ignored",
        "rotary_embedding",
        "x, cos, sin, interleaved=True",
        "interleaved = True",
        "rotated(x, cos, sin, interleaved)",
        {"batch": 1, "heads": 2, "seq": 56, "head_dim": 64},
        before=ROTARY,
    ),
    ignoring(
        "ignored-class-is-below-zero",
        "cross_entropy",
        "logits, targets, ignore_index=-100",
        "ignore_index = -100 if 0 <= ignore_index < 10 else ignore_index",
        "F.cross_entropy(logits.float(), targets, ignore_index=ignore_index)",
        {"M": 128, "V": 1000},
    ),
    fp4("scale-has-no-sign", "scale = abs(scale)"),
    fp4("scale-is-five-at-most", "scale = min(scale, 5.0)"),
    # 23: one number beside which the others of its row, or all the other rows, are another's
    norm("other-rows-wrong-beside-one-nan", "x = x * 1.01 + 0.01 if x.isnan().sum() == 1 else x"),
)
