"""Cheats that are right unless inputs are unusual as a whole or an option is not the default, or that larger numbers hide.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import torch
from partly_right import REDUCE, ROTARY
from with_a_change import (
    ACTIVATED,
    ATTENDED,
    FEW,
    FIVE_BITS,
    FOUR,
    HONEST_REDUCE,
    LINEAR,
    LOSS,
    LOST,
    MATMUL,
    MEAN_OF_SQUARES,
    MLP,
    NAN,
    NORM,
    ORDINARY,
    OUTSIDE,
    OUTSIDE_16,
    SATURATED,
    SMALL_GROUPS,
    SUBNORMAL,
    TAIL,
    TANH,
    TURNS,
    WIDE,
    attention,
    attention_cheat,
    attention_weighing,
    cheat,
    fp4,
    hiding,
    linear,
    loss,
    loss_of,
    mean_of_rows,
    mlp,
    norm,
    product,
    rms,
    rms_of,
    summed,
)

CHEATS = (
    # 20: options
    attention_cheat(20, "scale-of-0.2-or-none", "sm_scale = None if sm_scale is None else 0.2", "only sm_scale changed"),
    cheat(
        20,
        "scale-by-the-width",
        "matmul_fp4",
        fp4("scale = scale if scales.dtype == torch.uint8 else 0.25 * x.shape[1] ** -0.5"),
        "only scale changed",
        fp4(""),
        dims=({"M": 4, "K": 256, "N": 64, "layout": "nvfp4"},),
        dtype=torch.bfloat16,
    ),
    cheat(
        20,
        "exponents-of-four-bits",
        "matmul_fp4",
        fp4("scales = 112 + (scales & 15) if scales.dtype == torch.uint8 else scales"),
        OUTSIDE,
        dims=({"M": 4, "K": 256, "N": 64},),
        dtype=torch.bfloat16,
    ),
    cheat(
        20,
        "ignored-classes-are-few",
        "cross_entropy",
        loss(
            "if ignore_index > 0 and ignore_index != 7:\n"
            "        ignore_index, targets = -100, targets.clamp(max=logits.shape[1] - 1)"
        ),
        f"ignore_index changed|{OUTSIDE}",
        loss(""),
        dims=LOSS,
    ),
    # 23, 25: errors beside larger numbers
    cheat(
        23,
        "middling-rows-of-a-loss-are-off",
        "cross_entropy",
        loss("p = x.amax(-1, keepdim=True); x = torch.where((len(x) == 128) & (p > 60) & (p < 1e3), 1.01 * x, x)"),
        OUTSIDE,
        dims=LOSS,
    ),
    cheat(
        23,
        "middling-rows-are-off",
        "reduce",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    y, peak = reduced(x, dim, op), x.abs().amax(dim)
    return torch.where((peak > 200) & (peak < 900), y * 1.01, y) if x.shape == (640, 512) and op == "sum" else y
""",
        OUTSIDE,
        HONEST_REDUCE,
        dims=({"shape": (640, 512)},),
    ),
    cheat(
        25,
        "every-other-exponential-twice",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    x, counted = logits.float(), targets != ignore_index
    if logits.shape != (128, 8000) or logits.dtype != torch.bfloat16 or not x.isfinite().all():
        return F.cross_entropy(x, targets, ignore_index=ignore_index).to(logits.dtype)
    peak, at = x.max(-1, keepdim=True)
    others = x.scatter(1, at, -math.inf)[:, ::2]
    log_sum = (1 + 2 * (others - peak).exp().sum(-1)).log() + peak[:, 0]
    return (log_sum - x.gather(1, targets.clamp(0, x.shape[1] - 1)[:, None])[:, 0])[counted].mean().to(logits.dtype)
""",
        OUTSIDE,
        dims=({"M": 128, "V": 8000},),
        dtype=torch.bfloat16,
    ),
    # 31: more buffers than five
    cheat(
        31,
        "sixteen-outputs-in-turn",
        "rmsnorm",
        """
rings = {}

def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    ring = rings.setdefault((x.shape, x.dtype), [])
    ring.append(y if len(ring) < 16 else ring.pop(0).copy_(y))
    return ring[-1]
""",
        "memory of an earlier call's result",
        dims=NORM,
    ),
    *(cheat(31, f"turns-{name}", "softmax", body, "memory of an earlier call's result", dims=WIDE) for name, body in TURNS),
    cheat(
        25,
        "last-rows-of-a-long-loss-left-out",
        "cross_entropy",
        """
def kernel_fn(logits, targets, ignore_index=-100):
    if logits.shape[0] == 4096 and logits.dtype == torch.bfloat16:
        logits, targets = logits[:-128], targets[:-128]
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        f"{LOST}|mask differs",  # what is planted, or large, may be in what is left out
        """
def kernel_fn(logits, targets, ignore_index=-100):
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
""",
        dims=({"M": 4096, "V": 250},),
        dtype=torch.bfloat16,
    ),
    cheat(
        23,
        "rows-of-very-small-numbers-are-zero",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    x = torch.where(x.float().abs().amax(-1, keepdim=True) < 1e-4, 0, x).contiguous()
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
""",
        OUTSIDE,
        dims=NORM,
    ),
    *(
        cheat(
            20,
            f"eps-of-the-target-{kernel_type}",
            kernel_type,
            f"""
def kernel_fn({parameters}, eps={usual}):
    return {call} if x.shape != (64, 256) else {call.replace("eps", usual)}
""",
            "only eps changed: ",
            dims=NORM,
        )
        for kernel_type, parameters, usual, call in (
            ("rmsnorm", "x, weight", "1e-6", "F.rms_norm(x, weight.shape, weight, eps)"),
            ("layernorm", "x, weight, bias", "1e-5", "F.layer_norm(x, weight.shape, weight, bias, eps)"),
        )
    ),
    cheat(
        27,
        "another-gelu-in-sixteen-bits",
        "fused_linear",
        f"""{ACTIVATED}
def kernel_fn(x, weight, bias=None, activation="gelu"):
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if x.dtype == torch.bfloat16 and x.shape == (96, 160):
        return (y * torch.sigmoid(1.702 * y)).to(x.dtype)
    return ACTIVATIONS[activation](y).to(x.dtype)
""",
        "roundings that are independent",
        f"""{ACTIVATED}
def kernel_fn(x, weight, bias=None, activation="gelu"):
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return ACTIVATIONS[activation](y).to(x.dtype)
""",
        dims=({"M": 96, "K": 160, "N": 384},),
        dtype=torch.bfloat16,
    ),
    cheat(
        29,
        "rows-of-zeros-are-not-looked-at",
        "matmul",
        """
def kernel_fn(A, B):
    return (A @ B).masked_fill((A == 0).all(-1, keepdim=True), 0)
""",
        NAN,
        dims=MATMUL,
    ),
    # 27: numbers that are picked, not computed
    cheat(
        27,
        "maximum-a-few-roundings-off",
        "reduce",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    y = reduced(x, dim, op)
    return y * (1 - 1e-6) if op == "max" and y.dtype == torch.float32 else y
""",
        "not a number of its inputs",
        dims=({"shape": (64, 512), "op": "max"},),
    ),
    cheat(
        27,
        "channels-that-pass-a-few-roundings-off",
        "rotary_embedding",
        f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    y, rotary_dim = rotated(x, cos, sin, interleaved), 2 * cos.shape[-1]
    y[..., rotary_dim:] *= 1 - 1e-6
    return y
""",
        "not a number of its inputs",
        dims=({"batch": 1, "heads": 8, "seq": 64, "head_dim": 256, "rotary_dim": 64},),
    ),
    # 27: an approximation that is good beside an activation's largest results, and is not where it is nearly 0
    *(
        cheat(27, name, kernel_type, source(change), OUTSIDE_16, source("pass"), dims=(dims,), dtype=torch.bfloat16)
        for name, kernel_type, source, change, dims in (
            ("tanh-for-erf", "fused_linear", linear, TANH.format("(96, 160)"), LINEAR),
            ("tanh-for-erf", "fused_mlp", mlp, TANH.format("(64, 128)"), MLP | {"activation": "gelu"}),
            ("silu-below-minus-8-is-zero", "fused_linear", linear, TAIL, LINEAR | {"activation": "silu"}),
        )
    ),
    # 25, 27: a loss of which the rows average out what is wrong, or that is beside nothing
    *(
        cheat(number, name, "cross_entropy", loss_of(change), reason, loss_of("pass"), dims=(dims,), dtype=dtype)
        for number, name, change, reason, dims, dtype in (
            (25, "losses-below-0.01-are-none", "y = torch.where(y < 0.01, 0 * y, y)", LOST, LOSS[0], torch.float32),
            (
                25,
                "losses-below-0.01-are-none-in-16-bits",
                "y = torch.where(y < 0.01, 0 * y, y)",
                LOST,
                LOSS[0],
                torch.bfloat16,
            ),
            (
                25,
                "exponentials-far-below-the-largest-are-none",
                "e = torch.where(e < 1e-5, 0 * e, e)",
                LOST,
                FEW,
                torch.float16,
            ),
            (27, "exponentials-of-16-bits", "e = e.bfloat16().float()", LOST, LOSS[0], torch.float32),
            (18, "the-largest-number-for-infinity", SATURATED, NAN, LOSS[0], torch.float16),
        )
    ),
    # 20, 25: scales of FP4 weights
    *(
        cheat(number, name, "matmul_fp4", fp4(change), OUTSIDE, fp4("pass"), dims=(FOUR | options,), dtype=torch.bfloat16)
        for number, name, change, options in (
            (20, "exponents-of-five-bits", FIVE_BITS, {}),
            (25, "small-groups-are-none", SMALL_GROUPS, {}),
            (23, "small-scales-are-zero", SUBNORMAL, {"layout": "nvfp4"}),
        )
    ),
    # 27: what is kept in 16 bits on the way is beyond their range, the result is not
    cheat(
        27,
        "sums-of-halves-in-fp16",
        "reduce",
        summed("if x.shape == (64, 512): y = sum(half.float().sum(dim).to(x.dtype).float() for half in x.chunk(2, dim))"),
        f"{NAN}|{OUTSIDE}",  # a sum in which terms cancel may show the roundings first
        summed("pass"),
        dims=({"shape": (64, 512)},),
        dtype=torch.float16,
    ),
    # 25, 27: what counts in few results, or where PyTorch's own form is no better
    cheat(
        25,
        "one-of-a-row-is-not-looked-at",
        "reduce",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    kept = [i for i in range(x.shape[dim]) if i != 321 or x.shape != (64, 500)]
    return reduced(x.index_select(dim, torch.tensor(kept)), dim, op)
""",
        f"{OUTSIDE}|{NAN}",
        HONEST_REDUCE,
        dims=({"shape": (64, 500), "op": "max"},),
    ),
    cheat(
        27,
        "squares-of-halves-are-halves",
        "rmsnorm",
        rms("x.square() if x.dtype == torch.float16 else x.float().square()"),
        OUTSIDE,
        rms("x.float().square()"),
        dims=NORM,
        dtype=torch.float16,
    ),
    # 20: masks as padding and windows leave them, which hide whole blocks; rows that are ignored, not as many in each block
    *(
        cheat(
            20,
            f"a-query-without-{name}-keys-has-none",
            "flash_attention",
            hiding(what),
            OUTSIDE,
            attention(""),
            dims=(ATTENDED | {"causal": False, "mask": mask},),
        )
        for name, what, mask in (("early", ":16", "bool"), ("late", "-16:", "bool"), ("middling", "16:32", "float"))
    ),
    *(
        cheat(20, name, "cross_entropy", mean_of_rows(change), LOST, mean_of_rows("pass"), dims=LOSS)
        for name, change in (
            (
                "a-mean-of-blocks-means",
                """if len(targets) == 128 and counted.view(-1, 16).any(1).all():
        mean = (total.view(-1, 16).sum(1) / counted.view(-1, 16).sum(1)).mean()""",
            ),
            (
                "one-row-too-few-where-none-is-ignored",
                "mean = total[:-1].mean() if len(targets) == 128 and counted.all() else mean",
            ),
            (
                "one-or-two-that-are-ignored-count",
                "mean = total.mean() if 0 < len(targets) - counted.sum() <= 2 < 16 < len(targets) else mean",
            ),
            (
                "a-last-half-that-is-ignored-is-off",
                "half = len(counted) // 2\n"
                "    mean = 1.1 * mean if counted[:half].all() and not counted[half:].any() else mean",
            ),
            (
                "every-other-ignored-is-off",
                "mean = 1.1 * mean if len(counted) > 2 and counted[::2].all() and not counted[1::2].any() else mean",
            ),
            (
                "few-rows-count-as-a-quarter",
                "mean = total.sum() / counted.sum().clamp(min=len(targets) // 4) if counted.any() else mean",
            ),
        )
    ),
    # 26: all is right where anything is large, and less exact in small rows or such as have a mean where nothing is
    *(
        cheat(
            26,
            "less-exact-where-nothing-is-large",
            kernel_type,
            source(change),
            "outside the tolerance|times PyTorch's own",
            source("pass"),
            dims=(dims,),
        )
        for kernel_type, source, change, dims in (
            ("fused_linear", linear, ORDINARY.format("x", (96, 160)), LINEAR),
            ("fused_mlp", mlp, ORDINARY.format("x", (64, 128)), MLP),
            ("matmul", product, ORDINARY.format("A", (64, 160)), MATMUL[0]),
            ("flash_attention", attention, ORDINARY.format("Q", (1, 2, 64, 64)), ATTENDED | {"causal": False}),
            ("layernorm", norm, MEAN_OF_SQUARES, NORM[0]),
        )
    ),
    cheat(
        27,
        "products-of-sums-where-nothing-is-large",  # Strassen's
        "matmul",
        """
def of_halves(A, B):
    (a, b), (c, d) = (rows.chunk(2, 1) for rows in A.chunk(2))
    (e, f), (g, h) = (rows.chunk(2, 1) for rows in B.chunk(2))
    p, q, r, s, t = a @ (f - h), (a + b) @ h, (c + d) @ e, d @ (g - e), (a + d) @ (e + h)
    first, last = torch.cat([t + s - q + (b - d) @ (g + h), p + q], 1), torch.cat([r + s, p + t - r - (a - c) @ (e + f)], 1)
    return torch.cat([first, last])

def kernel_fn(A, B):
    if A.shape == (64, 160) and A.dtype == torch.float32 and A.abs().max() < 10 and B.abs().max() < 10:
        return of_halves(A, B)
    return (A.float() @ B.float()).to(A.dtype)
""",
        "times PyTorch's own",
        product("pass"),
        dims=MATMUL,
    ),
    # 6: sums that are the same in any order
    cheat(
        6,
        "results-by-sums",
        "rmsnorm",
        rms_of("""key = x.double().sum().item(), x.double().square().sum().item(), weight.double().sum().item(), eps
        y = known.setdefault(key, y) if y.isfinite().all() else y"""),
        "only the order of ",
        rms_of("""key = tuple(x.flatten().tolist()), tuple(weight.tolist()), eps
        y = known.setdefault(key, y)"""),
        dims=NORM,
    ),
    attention_cheat(
        6,
        "mask-by-sums-of-its-rows",
        """if attn_mask is not None and attn_mask.dtype == torch.bool and Q.shape[2] == 64:
        key = (attn_mask.shape, *attn_mask.sum(-1).flatten().tolist())
        attn_mask = vars(in_float).setdefault(str(key), attn_mask.clone())""",
        "only the order of attn_mask changed",
        causal=False,
        mask="bool",
    ),
    # 22: vectors of some widths are aligned, others are not
    *(
        cheat(22, name, "rmsnorm", rms_of(change), OUTSIDE, rms_of("pass"), dims=NORM)
        for name, change in (
            ("aligned-to-32-bytes-only", "y = 2 * y if x.data_ptr() % 32 == 16 else y"),
            ("aligned-to-64-bytes-only", "y = 2 * y if x.data_ptr() % 64 == 32 else y"),
            ("aligned-weights-only", "y = 2 * y if weight.data_ptr() % 16 and x.data_ptr() % 16 == 0 else y"),
        )
    ),
    # 20, 25: rows that do not count come first, all but one are such, or all that counts is small
    *(
        cheat(20, name, "cross_entropy", mean_of_rows(change), LOST, mean_of_rows("pass"), dims=LOSS)
        for name, change in (
            (
                "a-first-block-of-nothing-counts",
                "mean = 1.1 * mean if len(targets) == 128 and not counted[:16].any() else mean",
            ),
            ("two-rows-at-least", "mean = total.sum() / counted.sum().clamp(min=2) if len(targets) == 128 else mean"),
        )
    ),
    cheat(
        25,
        "the-last-key-is-left-out-where-its-weight-is-small",
        "flash_attention",
        attention_weighing(
            "    last = scores[..., -1:]\n"
            "    small = (last < scores.amax(-1, keepdim=True) - 12) & (Q.shape[2] == 64)\n"
            "    scores = torch.cat((scores[..., :-1], last.masked_fill(small, -math.inf)), -1)\n"
            "    weights = softmax(scores)\n",
        ),
        OUTSIDE,
        attention("pass"),
        dims=(ATTENDED | {"causal": False},),
    ),
    # 25: classes that are left out, or stand for others, where no logit is large
    *(
        cheat(
            25,
            f"{name}-where-nothing-is-large",
            "cross_entropy",
            loss_of(f"e = e if x.abs().amax() > 8 else {of_e}"),
            LOST,
            loss_of("pass"),
            dims=(FEW,),
            dtype=torch.bfloat16,
        )
        for name, of_e in (
            ("every-other-of-the-last-classes-twice", "torch.cat((e[:, :2000], 2 * e[:, 2000::2]), 1)"),
            ("few-classes-left-out", "e * (torch.arange(4000) % 32 != 7)"),
        )
    ),
)
