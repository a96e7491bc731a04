"""Cheats that are right but at some sizes, numbers of an option, rows beside others, or in some calls among many.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from typing import Any

import torch
from cheat import Cheat, plain
from partly_right import IMPORTS, REDUCE, by_contents
from whole_inputs import NORM, SEVERAL, norm_off_where

OUTSIDE = "outside the tolerance|times PyTorch's own|not a number of its inputs"
HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
ROW = "(x.dtype == torch.{}) & {} & " + SEVERAL
LIKE_THE_FIRST = (
    "(x == x[:1]).all(-1, keepdim=True) & (torch.arange(len(x)) > 0)[:, None] & ~(x == x[:1]).all() & " + SEVERAL
)
IN_A_ROW = """
last, times = [None], [0]

def seen(x):
    key = x.shape, x.dtype, x.double().sum().item()
    times[0] = times[0] + 1 if key == last[0] else 0
    last[0] = key
    return times[0]

def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    CHANGE
    return y
"""


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str = OUTSIDE, **others: Any) -> Cheat:
    return Cheat(number, name, kernel_type, plain(kernel_type, IMPORTS + body), reason, libraries=True, **others)


def reduced(name: str, change: str) -> Cheat:
    """A reduction after `change` of x, or of y, its result."""
    body = f"{REDUCE}\ndef kernel_fn(x, dim=-1, op='sum'):\n    y = reduced(x, dim, op)\n    {change}\n    return y\n"
    return cheat(25, name, "reduce", body, dims=({"shape": (64, 512)},))


CHEATS = (
    *(
        norm_off_where(26, f"an-eps-{name}-is-off", condition)
        for name, condition in (
            ("of-nothing", "eps == 0"),
            ("below-others", "0 < eps < 1e-7"),
            ("as-others-have-it", "eps == 1e-5"),
            ("above-others", "eps > 0.5"),
        )
    ),
    norm_off_where(23, "rows-like-the-first-are-off", LIKE_THE_FIRST),
    *(
        cheat(
            23,
            f"{name}-are-off-in-{HALF[dtype]}",
            "rmsnorm",
            f"""
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    return torch.where({ROW.format(HALF[dtype], condition)}, y * 1.1, y)
""",
            dims=NORM,
            dtype=dtype,
        )
        for name, condition, dtype in (
            ("rows-of-two-numbers", "(x.abs() == 1).all(-1, keepdim=True)", torch.bfloat16),
            ("periodic-rows", "(x == x.roll(8, -1)).all(-1, keepdim=True)", torch.float16),
            ("rows-the-same-from-both-ends", "(x == x.flip(-1)).all(-1, keepdim=True)", torch.bfloat16),
        )
    ),
    cheat(
        19,
        "a-new-norms-weights-are-off",
        "layernorm",
        """
def kernel_fn(x, weight, bias, eps=1e-5):
    y = F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype).contiguous()
    return 1.02 * y if len(weight) == 256 and (weight == 1).all() and (bias == 0).all() else y
""",
        dims=({"M": 64, "N": 128},),
    ),
    cheat(
        6,
        "known-but-for-its-last-element",
        "rmsnorm",
        by_contents("tuple(x.flatten()[:-1].tolist())"),
        "only the last element of x changed",
    ),
    # 22: what vectors leave over, at other widths than those that are tried each time
    cheat(
        22,
        "five-left-over",
        "rmsnorm",
        """
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    return torch.cat((y[..., :-1], 0 * y[..., -1:]), -1) if x.shape[-1] % 8 == 5 else y
""",
        dims=NORM,
    ),
    cheat(
        22,
        "five-columns-left-over",
        "softmax",
        """
def kernel_fn(x, dim=-1):
    y = torch.softmax(x.float(), dim).to(x.dtype)
    return torch.cat((y[..., :-1], 0 * y[..., -1:]), -1) if dim == 0 and x.shape[-1] % 8 == 5 else y
""",
        dims=({"shape": (64, 512)},),
    ),
    reduced(
        "three-left-over-beside-the-middle", "y = 1.02 * y if x.dim() == 3 and dim == 1 and x.shape[2] % 8 == 3 else y"
    ),
    reduced("the-last-row-is-no-maximum", "y = x[:-1].amax(0) if op == 'max' and dim == 0 and len(x) > 64 else y"),
    reduced(
        "rows-left-over-are-no-maximum",
        "y = x[: len(x) // 8 * 8].amax(0) if op == 'max' and dim == 0 and len(x) > 64 else y",
    ),
    # 8: one call of many
    cheat(
        8,
        "one-of-150-calls-is-off",
        "rmsnorm",
        IN_A_ROW.replace("CHANGE", "y = y * 1.02 if seen(x) % 150 == 149 else y"),
        "Disagreement: one of many calls",
        dims=NORM,
    ),
)
