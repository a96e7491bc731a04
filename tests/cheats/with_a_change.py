"""Kernels in PyTorch that are right but for a change in a place of theirs, and the sizes at which they are judged."""

import inspect
from typing import Any

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
    return (log_sum - x.gather(1, targets.clamp(0, x.shape[1] - 1)[:, None])[:, 0])[counted].mean().to(logits.dtype)
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
    target = x.gather(1, targets.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
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
    y = e.sum(-1).log() + peak[:, 0] - x.gather(1, targets.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
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
