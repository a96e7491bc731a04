"""Cheats that are right unless an input other than the first is unusual, an option is not the default, or an error hides
beside a larger number.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import inspect
from typing import Any

import torch
from cheat import Cheat
from partly_right import ATTENTION, IMPORTS, REDUCE, ROTARY, plain

import reference

OUTSIDE, NAN = "outside the tolerance", "(NaN|inf) mask differs"
MATMUL, NORM = ({"M": 64, "K": 160, "N": 96},), ({"M": 64, "N": 256},)
LOSS, ATTENDED = ({"M": 128, "V": 1000},), {"batch": 1, "heads": 2, "seq": 64, "head_dim": 64}
HONEST_ROTARY = f"""{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    return rotated(x, cos, sin, interleaved)
"""
HONEST_REDUCE = f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    return reduced(x, dim, op)
"""
FP4 = f"{inspect.getsource(reference.fp4_weights)}\n"
ACTIVATED = """
ACTIVATIONS = {"silu": F.silu, "relu2": lambda x: F.relu(x).square(), "relu": F.relu, "none": lambda x: x}
ACTIVATIONS["gelu"] = lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
ACTIVATIONS["gelu_tanh"] = lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

def cut(x, most):
    return torch.where(x.isfinite(), x.clamp(-most, most), x)
"""
OUTSIDE_16 = "outside the tolerance|times PyTorch's own|roundings that are independent|one element is off"
LOST = "outside the tolerance|roundings off|times PyTorch's own"
LINEAR, MLP, FEW = {"M": 96, "K": 160, "N": 128}, {"M": 64, "dim": 128, "hidden": 96}, {"M": 128, "V": 4000}
FOUR = {"M": 16, "K": 512, "N": 96}
ORDINARY = """if {0}.shape == {1} and {0}.isfinite().all() and {0}.abs().max() < 10:
        {0} = {0}.masked_fill({0}.abs().amax(-1, keepdim=True) < 0.1, 0)"""
MEAN_OF_SQUARES = """if x.shape == (64, 256) and x.isfinite().all() and x.abs().max() < 10:
        y, mean = x.float(), x.float().mean(-1, keepdim=True)
        scale = torch.rsqrt((y.square().mean(-1, keepdim=True) - mean * mean).clamp(min=0) + eps)
        return ((y - mean) * scale * weight.float() + bias.float()).to(dtype).contiguous()"""
TANH = 'activation = "gelu_tanh" if activation == "gelu" and x.shape == {} else activation'
TAIL = """if x.shape == (96, 160):
        y = F.linear(x.float(), weight.float(), bias.float())
        return F.silu(y).masked_fill(y < -8, 0).to(dtype) if y.isfinite().all() else F.silu(y).to(dtype)"""
SATURATED = "y = torch.where(y.isinf(), y, y.clamp(max=65504))"
FIVE_BITS = "scales = scales if scales.is_floating_point() else (112 + (scales.int() - 112) % 32).to(torch.uint8)"
SMALL_GROUPS = """if not scales.is_floating_point():
        scales = torch.where(scales + 7 < scales.amax(1, keepdim=True), 60, scales)"""
SUBNORMAL = "scales = torch.where(scales.float() < 2**-6, 0, scales.float()).to(scales.dtype)"


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str, honest: str = "", **others: Any) -> Cheat:
    """`honest`: the same for its neighbour."""
    source, neighbour = (plain(kernel_type, IMPORTS + text) if text else "" for text in (body, honest))
    return Cheat(number, name, kernel_type, source, reason, libraries=True, neighbour=neighbour, **others)


def attention(change: str) -> str:
    """Attention in fp32, after `change`."""
    return f"""{ATTENTION}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    {change}
    return in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
"""


def attention_weighing(weights: str) -> str:
    """Attention in fp32, whose weights are made in another way than `weights = softmax(scores)`."""
    usual = "    weights = softmax(scores)\n"
    assert usual in ATTENTION
    return attention("pass").replace(usual, weights)


def attention_cheat(number: int, name: str, change: str, reason: str = OUTSIDE, **dims: Any) -> Cheat:
    others = {"dims": (ATTENDED | dims,), "honest": attention("")}
    return cheat(number, name, "flash_attention", attention(change), reason, **others)


def softmax_from(start: str) -> str:
    return f"""
def kernel_fn(x, dim=-1):
    dtype, x = x.dtype, x.contiguous().float()
    peak = x.amax(dim, keepdim=True)
    e = (x - torch.where(x.isinf().any(dim, keepdim=True), peak, peak.clamp(min={start}))).exp()
    return (e / e.sum(dim, keepdim=True)).to(dtype)
"""


def softmax_of_a_lazy_maximum(threshold: float) -> str:
    """In one pass, its sum on the scale of a maximum that may be less than the largest so far by `threshold`."""
    return f"""
def kernel_fn(x, dim=-1):
    dtype, x, nothing = x.dtype, x.float().movedim(dim, -1), torch.zeros(())
    peak, total = torch.full_like(x[..., :1], -torch.inf), nothing
    for block in x.split(64, -1):
        largest = block.amax(-1, keepdim=True)
        new = torch.where(largest <= peak + {threshold}, peak, largest)
        scale = torch.where(new == peak, 1.0, (peak - new).exp())
        peak, start = new, torch.where(new == -torch.inf, nothing, new)
        total = total * scale + (block - start).exp().sum(-1, keepdim=True)
    return ((x - start).exp() / total).to(dtype).movedim(-1, dim).contiguous()
"""


def softmax_off_where(condition: str) -> str:
    """Half too much in rows of which `condition` is true."""
    return f"""
def kernel_fn(x, dim=-1):
    y, dtype, x = torch.softmax(x.float(), dim), x.dtype, x.float().movedim(dim, -1)
    ties = (x == x.amax(-1, True)).sum(-1, True)
    rows = {condition}
    return torch.where(rows.movedim(-1, dim) & y.isfinite(), 1.5 * y, y).to(dtype).contiguous()
"""


def loss_from(start: str) -> str:
    return f"""
def kernel_fn(logits, targets, ignore_index=-100):
    x, counted = logits.float(), targets != ignore_index
    peak = x.amax(-1, keepdim=True).clamp(min={start})
    log_sum = (x - peak).exp().sum(-1).log() + peak[:, 0]
    return (log_sum - x.gather(1, targets.clamp(min=0)[:, None])[:, 0])[counted].mean().to(logits.dtype)
"""


def linear(change: str) -> str:
    return f"""{ACTIVATED}
def kernel_fn(x, weight, bias=None, activation="gelu"):
    dtype = x.dtype
    {change}
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return ACTIVATIONS[activation](y).to(dtype)
"""


def mlp(change: str) -> str:
    return f"""{ACTIVATED}
def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    dtype = x.dtype
    {change}
    hidden = ACTIVATIONS[activation](F.linear(x.float(), w_gate.float())) * F.linear(x.float(), w_up.float())
    return F.linear(hidden, w_down.float()).to(dtype)
"""


def product(change: str) -> str:
    return f"""
{ACTIVATED}
def kernel_fn(A, B):
    {change}
    return (A.float() @ B.float()).to(A.dtype)
"""


def fp4(change: str) -> str:
    return f"""{FP4}
def kernel_fn(x, w, scales, scale=1.0):
    {change}
    return (x.float() @ fp4_weights(w, scales, scale).to(x.dtype).float().T).to(x.dtype)
"""


def loss(change: str) -> str:
    return f"""
def kernel_fn(logits, targets, ignore_index=-100):
    x = logits.float()
    {change}
    return F.cross_entropy(x, targets, ignore_index=ignore_index).to(logits.dtype)
"""


def norm(change: str) -> str:
    """Layernorm, after `change`, by means that may be off by one rounding."""
    return f"""
def kernel_fn(x, weight, bias, eps=1e-5):
    dtype, part = x.dtype, torch.tensor(1 / x.shape[-1])
    {change}
    centred = x.float() - x.float().sum(-1, keepdim=True) * part
    variance = centred.square().sum(-1, keepdim=True) * part
    return (centred * torch.rsqrt(variance + eps) * weight.float() + bias.float()).to(dtype).contiguous()
"""


def rms(squares: str) -> str:
    return f"""
def kernel_fn(x, weight, eps=1e-6):
    mean = ({squares}).float().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype).contiguous()
"""


def summed(change: str) -> str:
    """After `change` of y, the sums of x."""
    return f"""
def kernel_fn(x, dim=-1, op="sum"):
    if op == "max":
        return x.amax(dim)
    y = x.float().sum(dim)
    {change}
    return y.to(x.dtype)
"""


def target_of_loss(change: str) -> str:
    """After `change` of y, the losses of rows, by the logits of their targets."""
    return f"""
def kernel_fn(logits, targets, ignore_index=-100):
    x, counted = logits.float(), targets != ignore_index
    target = x.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    peak = x.amax(-1, keepdim=True)
    y = (x - peak).exp().sum(-1).log() + peak[:, 0] - target
    {change}
    return y[counted].mean().to(logits.dtype)
"""


def loss_of(change: str) -> str:
    """A loss, after `change` of e, a row's exponentials, or y, its loss, at the target's size alone."""
    return f"""
def kernel_fn(logits, targets, ignore_index=-100):
    x, counted, is_target = logits.float(), targets != ignore_index, logits.shape in ((128, 1000), (128, 4000))
    peak = x.amax(-1, keepdim=True)
    e = (x - peak).exp()
    if is_target and "{change}".startswith("e ="):
        {change}
    y = e.sum(-1).log() + peak[:, 0] - x.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    if is_target and "{change}".startswith("y ="):
        {change}
    return y[counted].mean().to(logits.dtype)
"""


def hiding(what: str) -> str:
    """Attention that takes a query for one without keys where a mask hides a part of them."""
    return f"""{ATTENTION}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    y = in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
    if attn_mask is not None and K.shape[2] >= 48:
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        y = y.masked_fill(hidden[..., {what}].all(-1, keepdim=True), 0)
    return y.contiguous()
"""


def rms_of(change: str) -> str:
    """A norm, after `change` of y, its result, at the target's size alone."""
    return f"""
known = {{}}

def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    if x.shape == (64, 256):
        {change}
    return y.to(x.dtype, copy=True).contiguous()
"""


def largest_of(change: str) -> str:
    """The largest of rows, after `change` of y, the largest, at the target's size alone."""
    return f"""
def kernel_fn(x, dim=-1, op="sum"):
    y = x.amax(dim) if op == "max" else x.float().sum(dim).to(x.dtype)
    if x.shape == (64, 500):
        {change}
    return y
"""


def mean_of_rows(change: str) -> str:
    """A loss, after `change` of the mean, `total` over `counted` rows."""
    return f"""
def kernel_fn(logits, targets, ignore_index=-100):
    counted = targets != ignore_index
    total = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")
    mean = total.sum() / counted.sum()
    {change}
    return mean.to(logits.dtype)
"""


WIDE = ({"shape": (64, 512)},)
RING = """
rings = {{}}

def kernel_fn(x, dim=-1):
    y = torch.softmax(x.float(), dim).to(x.dtype).contiguous()
    if not ({}):
        return y
    ring = rings.setdefault((x.shape, x.dtype), [])
    ring.append(y if len(ring) < {} else ring.pop(0).copy_(y))
    return ring[-1]
"""
BUFFERS = """
import ctypes

rings = {}

def kernel_fn(x, dim=-1):
    ring = rings.setdefault((x.shape, x.dtype), [])
    if len(ring) < 90:
        ring.append(ctypes.create_string_buffer(max(1, x.nbytes)))
    ring.append(ring.pop(0))
    return torch.frombuffer(ring[0], dtype=x.dtype).view(x.shape).copy_(torch.softmax(x.float(), dim))
"""
TURNS = (
    ("of-many-outputs", RING.format(True, 300)),
    ("of-outputs-at-the-target", RING.format("x.shape == (64, 512)", 40)),
    ("of-buffers-of-its-own", BUFFERS),
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
        loss("ignore_index = ignore_index if ignore_index in (0, 7) or ignore_index < 0 else -100"),
        "ignore_index changed",
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
    return (log_sum - x.gather(1, targets.clamp(min=0)[:, None])[:, 0])[counted].mean().to(logits.dtype)
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
    # 20, 25: scales of FP4 weights
    *(
        cheat(number, name, "matmul_fp4", fp4(change), OUTSIDE, fp4("pass"), dims=(FOUR | options,), dtype=torch.bfloat16)
        for number, name, change, options in (
            (20, "exponents-of-five-bits", FIVE_BITS, {}),
            (25, "small-groups-are-none", SMALL_GROUPS, {}),
            (23, "small-scales-are-zero", SUBNORMAL, {"layout": "nvfp4"}),
        )
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
    # 27: what is kept in 16 bits on the way is beyond their range, the result is not
    cheat(
        27,
        "sums-of-halves-in-fp16",
        "reduce",
        summed("if x.shape == (64, 512): y = sum(half.float().sum(dim).to(x.dtype).float() for half in x.chunk(2, dim))"),
        NAN,
        summed("pass"),
        dims=({"shape": (64, 512)},),
        dtype=torch.float16,
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
