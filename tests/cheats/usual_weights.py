"""Cheats that are right but for weights of a kind that models have as a whole, for numbers that are denormal in fp16, or
where rows of the first tensor are like others.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from typing import Any

import torch
from cheat import Cheat, starter
from partly_right import IMPORTS, plain
from usual_kinds import RESULTS
from whole_inputs import NORM, OUTSIDE, norm_off_where

VARIED = "len(weight) > 8 and len(weight.unique()) > 3 and ("
FLUSH = """
def flush(t):
    return torch.where(t.abs() < 2**-14, 0, t) if t.dtype == torch.float16 else t

"""


def off_for_weights(name: str, condition: str) -> Cheat:
    return norm_off_where(19, f"{name}-is-off", f"{VARIED}{condition})")


def flushing(kernel_type: str, name: str, change: str, **dims: Any) -> Cheat:
    """`change`: of inputs, or of the result y."""
    parameters, result = RESULTS[kernel_type]
    change, after = (change, "") if change[0] != "y" else ("pass", f"    {change}\n")
    body = f"{FLUSH}def kernel_fn({parameters}):\n    {change}\n    y = {result}\n{after}    return y\n"
    source = plain(kernel_type, IMPORTS + body)
    at = {"dims": (dims,), "dtype": torch.float16, "libraries": True, "neighbour": starter(kernel_type)}
    return Cheat(25, name, kernel_type, source, OUTSIDE, **at)


CHEATS = (
    off_for_weights("a-weight-in-order", "(weight.diff() >= 0).all()"),
    off_for_weights("a-weight-of-either-sign-in-turn", "(weight[::2] > 0).all() and (weight[1::2] < 0).all()"),
    off_for_weights("a-weight-of-powers-of-two", "(weight.float().abs().log2() % 1 == 0).all()"),
    off_for_weights("a-weight-of-whole-numbers", "(weight == weight.round()).all()"),
    off_for_weights("a-weight-about-one", "((weight.float() - 1).abs() < 0.2).all()"),
    off_for_weights("a-weight-that-is-periodic", "len(weight) % 16 == 0 and (weight == weight.roll(8)).all()"),
    off_for_weights("a-weight-the-same-from-both-ends", "(weight == weight.flip(0)).all()"),
    norm_off_where(23, "a-first-row-of-nan-is-off", "x.dim() == 2 and len(x) > 1 and x[0].isnan().all()"),
    norm_off_where(
        23,
        "rows-of-opposite-halves-are-off",
        "(x == -x.flip(-1)).all(-1, keepdim=True) & (x != 0).any(-1, keepdim=True)",
    ),
    norm_off_where(
        23,
        "rows-alike-in-pairs-are-off",
        "x.dim() == 2 and len(x) > 3 and len(x) % 2 == 0 and (x[::2] == x[1::2]).all() and not (x == x[:1]).all()",
    ),
    flushing("rmsnorm", "a-denormal-weight-is-zero", "weight = flush(weight)", **NORM[0]),
    flushing("rmsnorm", "denormal-results-are-zero", "y = flush(y)", **NORM[0]),
    flushing("layernorm", "a-denormal-weight-is-zero", "weight = flush(weight)", M=64, N=256),
    flushing("layernorm", "a-denormal-bias-is-zero", "bias = flush(bias)", M=64, N=256),
    flushing("matmul", "denormal-products-are-zero", "y = flush(y)", M=64, K=128, N=96),
)
