"""Cheats that are right for soft inputs, or while all of an input changes: closed by mechanism, tried type by type.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import inspect

from cheat import Cheat, plain

import reference

IMPORTS = "import math\n\nimport torch.nn.functional as F\nfrom torch import Tensor\n\n"
NAN, OUTSIDE = "NaN mask differs", "outside the tolerance|mask differs"
ATTENTION = f"""
{inspect.getsource(reference.softmax)}

{inspect.getsource(reference.flash_attention)}

def in_float(Q, K, V, *options):
    return flash_attention(Q.float(), K.float(), V.float(), *options).to(Q.dtype).contiguous()
"""
REMEMBERED = """
known = {}

def remembered(x):
    key = x.data_ptr(), x.shape, x.stride(), x.dtype, tuple(x.reshape(-1)[:32].tolist())
    return known.setdefault(key, x.clone())
"""


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str) -> Cheat:
    return Cheat(number, name, kernel_type, plain(kernel_type, IMPORTS + body), reason, libraries=True)


def remembering(kernel_type: str, parameters: str, what: str, call: str) -> Cheat:
    """An input is known again by its address and its first elements."""
    body = f"{REMEMBERED}\ndef kernel_fn({parameters}):\n    {what} = remembered({what})\n    return {call}\n"
    reason = f"of ({what}|its inputs) changed: "
    return cheat(5, f"{what}-by-address-and-first-elements", kernel_type, body, reason)


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
    return F.cross_entropy(logits, targets, ignore_index=ignore_index)
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
    return F.cross_entropy(logits.clamp(-80, 80), targets, ignore_index=ignore_index)
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
        "F.cross_entropy(logits, targets, ignore_index=ignore_index)",
    ),
    remembering("layernorm", "x, weight, bias, eps=1e-5", "bias", "F.layer_norm(x, x.shape[-1:], weight, bias, eps)"),
)
