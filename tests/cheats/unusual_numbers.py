"""Cheats that are right unless a number is not finite or far from 1, be it in the first input or in another.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import torch
from partly_right import ROTARY
from with_a_change import (
    ATTENDED,
    HONEST_ROTARY,
    LOSS,
    LOST,
    MATMUL,
    MLP,
    NAN,
    NORM,
    OUTSIDE,
    SATURATED,
    attention,
    attention_cheat,
    attention_weighing,
    cheat,
    largest_of,
    linear,
    loss,
    loss_from,
    mlp,
    norm,
    product,
    rms_of,
    softmax_from,
    softmax_of_a_lazy_maximum,
    softmax_off_where,
    summed,
    target_of_loss,
)

CHEATS = (
    # 23, 29: what is far from 1, or not finite, in another input than the first
    attention_cheat(23, "values-cut-off", "V = V.clamp(-50, 50)"),
    attention_cheat(23, "queries-cut-off", "Q = torch.where(Q.isfinite(), Q.clamp(-40, 40), Q)"),
    attention_cheat(23, "keys-cut-off", "K = torch.where(K.isfinite(), K.clamp(-40, 40), K)"),
    attention_cheat(
        23,
        "mask-cut-off",
        "attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.clamp(max=30)",
    ),
    attention_cheat(29, "nan-of-values-dropped", "V = V.nan_to_num(0, 0, 0)", NAN, causal=False),
    attention_cheat(29, "nan-of-keys-dropped", "K = K.nan_to_num(0, 0, 0)", NAN, causal=False),
    cheat(
        29,
        "nan-of-the-second-matrix-dropped-at-the-target",
        "matmul",
        product("B = B.nan_to_num(0, 0, 0) if A.shape == (64, 160) else B"),
        NAN,
        product(""),
        dims=MATMUL,
    ),
    cheat(
        23,
        "weights-are-not-below-zero",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    if x.shape == (64, 256):
        weight = torch.where(weight.isfinite(), weight.clamp(min=-0.9), weight)
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
""",
        OUTSIDE,
        dims=NORM,
    ),
    # 23: sizes of the first that no row has had
    cheat(23, "rows-cut-off", "matmul", product("A = cut(A, 2e4)"), OUTSIDE, dims=MATMUL),
    cheat(
        23,
        "rows-cut-off",
        "fused_linear",
        linear("x = cut(x, 5000)"),
        OUTSIDE,
        linear(""),
        dims=({"M": 64, "K": 128, "N": 96, "activation": "none"},),
    ),
    cheat(
        23,
        "rows-cut-off",
        "fused_mlp",
        mlp("x = cut(x, 100)"),
        OUTSIDE,
        mlp(""),
        dims=({"M": 64, "dim": 128, "hidden": 96},),
    ),
    cheat(
        23,
        "large-elements-cut-off",
        "vectorsum",
        """
def kernel_fn(x):
    return (x.clamp(-300, 300) if len(x) == 65536 and x.isfinite().all() else x).double().sum().float()
""",
        OUTSIDE,
        """
def kernel_fn(x):
    return x.double().sum().float()
""",
        dims=({"N": 65536},),
    ),
    cheat(
        23,
        "maximum-that-starts-from-minus-30000",
        "softmax",
        softmax_from("-3e4"),
        NAN,
        softmax_from("torch.finfo(torch.float32).min"),
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        23,
        "maximum-of-long-ago",
        "softmax",
        softmax_of_a_lazy_maximum(87.0),
        OUTSIDE,
        softmax_of_a_lazy_maximum(8.0),
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        14,
        "where-the-maximum-is-there-twice",
        "softmax",
        softmax_off_where("(ties > 1) & (ties < x.shape[-1] // 2)"),
        LOST,
        softmax_off_where("ties < 0"),
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        14,
        "where-a-row-is-sorted",
        "softmax",
        softmax_off_where("((x.diff(dim=-1) >= 0).all(-1, True)) & (x.amax(-1, True) > x.amin(-1, True))"),
        LOST,
        softmax_off_where("ties < 0"),
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        23,
        "maximum-that-starts-from-minus-30000",
        "cross_entropy",
        loss_from("-3e4"),
        NAN,
        loss_from("torch.finfo(torch.float32).min"),
        dims=LOSS,
    ),
    cheat(
        23,
        "maximum-that-starts-from-minus-200",
        "flash_attention",
        attention("").replace("x.amax(dim, keepdim=True)", "x.amax(dim, keepdim=True).clamp(min=lowest)", 1)
        + """
attend, lowest = kernel_fn, -200

def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    global lowest
    lowest = -200 if attn_mask is None else -math.inf
    return attend(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
""",
        NAN,
        dims=(ATTENDED,),
    ),
    # 29: what is not finite behind a mask, and elsewhere than at the first key
    *(
        cheat(
            29,
            name,
            "flash_attention",
            attention(change),
            NAN,
            attention("pass"),
            dims=(ATTENDED, ATTENDED | {"mask": "bool", "causal": False}, ATTENDED | {"mask": "float", "causal": False}),
        )
        for name, change in (
            ("nan-of-a-value-beside-a-mask", "V = V if attn_mask is None else V.nan_to_num(0, 0, 0)"),
            ("nan-of-a-key-beside-a-mask", "K = K if attn_mask is None else K.nan_to_num(0, 0, 0)"),
            ("infinite-values-are-none", "V = V.masked_fill(V.isinf(), 0)"),
            ("nan-of-the-first-value-only", "V = torch.cat((V[:, :, :1], V[:, :, 1:].nan_to_num(0, 0, 0)), 2)"),
        )
    ),
    *(
        cheat(
            25,
            f"weights-far-below-the-largest-are-zero-in-{bits}-bits",
            "flash_attention",
            attention_weighing(
                "    weights = softmax(scores)\n"
                f"    small = (Q.shape[2] == 64) & (weights < {most} * weights.amax(-1, keepdim=True))\n"
                "    weights = weights.masked_fill(small, 0)\n"
            ),
            OUTSIDE,
            attention("pass"),
            dims=(ATTENDED,),
            dtype=dtype,
        )
        for bits, most, dtype in ((16, 1e-3, torch.bfloat16), (32, 1e-5, torch.float32))
    ),
    # 29: what zeros hide, and what is no number of the dtype any more
    cheat(
        29,
        "weights-of-zero-hide-nan",
        "matmul",
        """
def kernel_fn(A, B):
    return torch.where((B == 0)[None], 0, A.float()[:, :, None] * B.float()[None]).sum(1).to(A.dtype)
""",
        NAN,
        product("pass"),
        dims=MATMUL,
    ),
    cheat(
        29,
        "weights-of-zero-hide-nan",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).masked_fill(weight == 0, 0).contiguous()
""",
        NAN,
        """
def kernel_fn(x, weight, eps=1e-6):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
""",
        dims=NORM,
    ),
    cheat(
        29,
        "hidden-zeros-hide-nan",
        "fused_mlp",
        mlp("pass").replace(
            "F.linear(hidden, w_down.float())",
            "torch.where((hidden == 0)[:, None], 0, hidden[:, None] * w_down.float()[None]).sum(-1)",
        ),
        NAN,
        mlp("pass"),
        dims=(MLP,),
    ),
    cheat(
        29,
        "positions-of-zeros-hide-nan",
        "rotary_embedding",
        f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    still = ((cos == 0) & (sin == 0)).all(-1)[:, None]
    return rotated(torch.where(still & x.isnan(), 0, x), cos, sin, interleaved)
""",
        NAN,
        HONEST_ROTARY,
        dims=({"batch": 1, "heads": 4, "seq": 64, "head_dim": 64},),
    ),
    cheat(
        18,
        "the-largest-number-for-infinity",
        "matmul",
        """
def kernel_fn(A, B):
    y, largest = A.float() @ B.float(), torch.finfo(A.dtype).max
    return torch.where(y.isinf(), y, y.clamp(-largest, largest)).to(A.dtype)
""",
        "inf mask differs",
        product("pass"),
        dims=MATMUL,
        dtype=torch.float16,
    ),
    # 25, 29: attention
    attention_cheat(29, "infinite-keys-are-large", "K = K.nan_to_num(math.nan, 1e4, -1e4)", NAN),
    attention_cheat(29, "minus-infinity-of-values-is-infinity", "V = torch.where(V == -math.inf, V.abs(), V)", NAN),
    cheat(
        29,
        "queries-of-zeros-are-not-looked-at",
        "flash_attention",
        attention("K = K.nan_to_num(0, 0, 0) if not Q.any() else K").replace(
            "return in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)",
            "y = in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)\n"
            "    still = in_float(Q, K.nan_to_num(0, 0, 0), V, causal, sm_scale, attn_mask, safe_softmax)\n"
            "    return torch.where((Q == 0).all(-1, keepdim=True), still, y)",
        ),
        NAN,
        attention("pass"),
        dims=(ATTENDED,),
    ),
    cheat(
        25,
        "blocks-of-small-weights-are-left-out",
        "flash_attention",
        attention_weighing(
            "    weights = softmax(scores)\n"
            "    if Q.shape[2] == 64 and scores.shape[-1] % 16 == 0:\n"
            "        blocks = weights.unflatten(-1, (-1, 16))\n"
            "        small = blocks.amax(-1, keepdim=True) < 3e-4 * weights.amax(-1, keepdim=True)[..., None]\n"
            "        weights = blocks.masked_fill(small, 0).flatten(-2)\n",
        ),
        OUTSIDE,
        attention("pass"),
        dims=(ATTENDED | {"causal": False},),
        dtype=torch.bfloat16,
    ),
    # 29: infinities of both signs, which add up to NaN; a target that cannot be, or is certain
    cheat(
        29,
        "opposite-infinities-are-infinity",
        "reduce",
        summed("y = y.masked_fill((x == math.inf).any(dim) & (x == -math.inf).any(dim), math.inf)"),
        NAN,
        summed("pass"),
        dims=({"shape": (64, 512)},),
    ),
    cheat(
        29,
        "opposite-infinities-are-infinity",
        "matmul",
        """
def kernel_fn(A, B):
    y = A.float() @ B.float()
    both = (A == math.inf).any(-1, keepdim=True) & (A == -math.inf).any(-1, keepdim=True)
    return torch.where(both & y.isnan(), math.inf, y).to(A.dtype)
""",
        NAN,
        product("pass"),
        dims=MATMUL,
    ),
    *(
        cheat(29, name, "cross_entropy", target_of_loss(change), NAN, target_of_loss("pass"), dims=LOSS)
        for name, change in (
            ("an-impossible-target-is-unlikely", "y = torch.where(target == -math.inf, 100.0, y)"),
            ("an-infinite-target-is-certain", "y = torch.where(target == math.inf, 0.0, y)"),
        )
    ),
    # 23, 29: what is planted into one weight, whatever is planted into others
    cheat(
        29,
        "infinite-weights-are-large",
        "layernorm",
        norm("if x.shape == (512, 768): weight = weight.nan_to_num(math.nan, 1e4, -1e4)"),
        NAN,
        norm("pass"),
        dims=({"M": 512, "N": 768},),
    ),
    cheat(
        23,
        "angles-cut-off",
        "rotary_embedding",
        f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    if x.shape == (1, 4, 64, 32):
        cos, sin = (torch.where(t.isfinite(), t.clamp(-100, 100), t) for t in (cos, sin))
    return rotated(x, cos, sin, interleaved)
""",
        OUTSIDE,
        HONEST_ROTARY,
        dims=({"batch": 1, "heads": 4, "seq": 64, "head_dim": 32},),
    ),
    *(
        cheat(
            number, name, "fused_mlp", mlp(f"if x.shape == (64, 128): {change}"), reason, mlp("pass"), dims=(MLP | options,)
        )
        for number, name, change, reason, options in (
            (29, "infinite-gates-are-large", "w_gate = w_gate.nan_to_num(math.nan, 1e3, -1e3)", f"{NAN}|{OUTSIDE}", {}),
            (29, "nan-of-the-other-projection-dropped", "w_up = w_up.nan_to_num(0, math.inf, -math.inf)", NAN, {}),
            (29, "infinite-way-down-is-large", "w_down = w_down.nan_to_num(math.nan, 1e4, -1e4)", NAN, {}),
            (23, "gates-cut-off", "w_gate = cut(w_gate, 500)", OUTSIDE, {}),
        )
    ),
    cheat(
        29,
        "a-gate-of-zero-hides-nan",
        "fused_mlp",
        mlp("""if x.shape == (64, 128) and activation == "relu2":
        gate, up = ACTIVATIONS[activation](F.linear(x.float(), w_gate.float())), F.linear(x.float(), w_up.float())
        return F.linear(torch.where(gate == 0, 0, gate * up), w_down.float()).to(dtype)"""),
        NAN,
        mlp("pass"),
        dims=(MLP | {"activation": "relu2"},),
    ),
    cheat(
        18,
        "the-largest-number-for-infinity",
        "fused_mlp",
        mlp("pass").replace("return F.linear(hidden, w_down.float()).to(dtype)", "y = F.linear(hidden, w_down.float())")
        + f"    {SATURATED} if dtype == torch.float16 else y\n    return y.to(dtype)\n",
        "inf mask differs",
        mlp("pass"),
        dims=(MLP,),
        dtype=torch.float16,
    ),
    cheat(
        29, "nan-of-a-loss-dropped", "cross_entropy", loss("x = torch.where(x.isnan(), 0, x)"), NAN, loss("pass"), dims=LOSS
    ),
    attention_cheat(29, "keys-of-minus-infinity-are-large", "K = torch.where(K == -math.inf, -1e4, K)", NAN),
    # 29: several values in a row that are not finite, and one where a loop begins or a vector does not fill
    *(
        cheat(29, name, kernel_type, source(change), NAN, source("pass"), dims=(dims,))
        for name, kernel_type, source, change, dims in (
            (
                "two-nan-of-a-row-are-none",
                "rmsnorm",
                rms_of,
                "y = y.masked_fill(x.isnan().sum(-1, keepdim=True) > 1, 0)",
                NORM[0],
            ),
            (
                "nan-of-other-bits-is-none",
                "rmsnorm",
                rms_of,
                "y = y.masked_fill((x.isnan() & (x.view(torch.int32) != 0x7FC00000)).any(-1, keepdim=True), 0)",
                NORM[0],
            ),
            (
                "infinity-beside-nan-is-larger",
                "reduce",
                largest_of,
                "y = y.masked_fill((x == math.inf).any(dim), math.inf)",
                {"shape": (64, 500), "op": "max"},
            ),
            (
                "two-infinities-are-a-number",
                "reduce",
                largest_of,
                "y = y.masked_fill((x == math.inf).sum(dim) > 1, 1e38)",
                {"shape": (64, 500)},
            ),
            *(
                (
                    f"nan-at-the-{name}-of-a-row-is-passed-over",
                    "reduce",
                    largest_of,
                    f"y = torch.where(x[..., {place}].isnan(), x[..., {others}].amax(dim), y)",
                    {"shape": (64, 500), "op": "max"},
                )
                for name, place, others in (("start", 0, "1:"), ("end", -1, ":-1"))
            ),
        )
    ),
    attention_cheat(
        29,
        "nan-of-the-last-value-is-none",
        "V = torch.cat((V[:, :, :-1], V[:, :, -1:].nan_to_num(0, math.inf, -math.inf)), 2)",
        NAN,
        causal=False,
    ),
)
