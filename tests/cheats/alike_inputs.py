"""Cheats that are right unless inputs are alike or each other's opposite, matrices have a form that a border, a corner or
another diagonal fills, or what is no free number is as models, but not random numbers, have it.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

import inspect
from typing import Any

from partly_right import ROTARY
from unusual_inputs import MATMUL, cheat
from whole_inputs import OUTSIDE
from with_a_change import LINEAR, LOSS, MLP, Cheat, linear, loss, mlp, product

import reference

DIAGONAL = "torch.equal(A, A.tril().triu()) and min(A.shape) > 2"
BATCH, GROUPS = {"batch": 4, "M": 32, "K": 64, "N": 48}, {"rows": 64, "groups": 4, "K": 64, "N": 48}
TURNS = {"batch": 1, "heads": 2, "seq": 32, "head_dim": 64}
SEES = "seen = ~x.isneginf(); lengths = seen.sum(-1)"
CAUSAL = "x.isneginf().any() and torch.equal(seen, seen.tril())"


def batched(change: str) -> str:
    return f"""
def kernel_fn(A, B):
    y, several = (A.float() @ B.float()).to(A.dtype), A.reshape(-1, *A.shape[-2:])
    {change}
    return y
"""


def grouped(change: str) -> str:
    return f"""
{inspect.getsource(reference.grouped_matmul)}
def kernel_fn(x, weight, offs):
    y, sizes = grouped_matmul(x.float(), weight.float(), offs).to(x.dtype), offs.diff(prepend=0 * offs[:1])
    {change}
    return y
"""


def turned(change: str) -> str:
    return f"""
{ROTARY}
def kernel_fn(x, cos, sin, interleaved=True):
    y = rotated(x, cos, sin, interleaved)
    {change}
    return y
"""


def weighed(change: str) -> str:
    return f"""
def kernel_fn(x, dim=-1):
    y = torch.softmax(x.float(), dim).to(x.dtype).contiguous()
    {change}
    return y
"""


def off_where(name: str, kernel_type: str, source: Any, condition: str, what: str, *dims: dict[str, Any]) -> Cheat:
    """`what` is a fiftieth too large where a condition holds."""
    change = f"{what} = 1.02 * {what} if {condition} else {what}"
    return cheat(23, name, kernel_type, source(change), OUTSIDE, source("pass"), dims=dims)


CHEATS = (
    *(
        off_where(name, "fused_mlp", mlp, condition, "w_up", MLP)
        for name, condition in (
            ("a-gate-that-is-the-opposite-is-off", "torch.equal(w_gate, -w_up)"),
            ("a-gate-that-is-a-copy-is-off", "torch.equal(w_gate, w_up) and w_gate.data_ptr() != w_up.data_ptr()"),
        )
    ),
    *(
        off_where(name, "matmul", product, condition, "A", *MATMUL)
        for name, condition in (
            ("the-other-diagonal-is-off", "torch.equal(A.flip(1), A.flip(1).tril().triu()) and min(A.shape) > 2"),
            (
                "a-multiple-of-the-identity-is-off",
                f"{DIAGONAL} and len(A.diagonal().unique()) == 1 and A[0, 0] not in (0, 1)",
            ),
            ("a-diagonal-of-signs-is-off", f"{DIAGONAL} and (A.diagonal().abs() == 1).all() and (A.diagonal() < 0).any()"),
            ("two-diagonals-are-off", "min(A.shape) > 2 and torch.equal(A, A.triu().tril(1)) and A.diagonal(1).all()"),
            ("a-triangle-and-a-diagonal-are-off", "min(A.shape) > 2 and not A.tril(-2).any() and A.diagonal(-1).all()"),
            (
                "an-arrow-is-off",
                "min(A.shape) > 3 and A[0].all() and torch.equal(A[1:, 1:], A[1:, 1:].tril().triu()) and A[1, 1] != 0",
            ),
            (
                "the-same-along-other-diagonals-is-off",
                "min(A.shape) > 2 and torch.equal(A[1:, :-1], A[:-1, 1:]) and A.unique().numel() > 9",
            ),
            ("one-row-alone-is-off", "len(A) > 2 and A[-1:].all() and not A[:-1].any()"),
            ("one-column-alone-is-off", "A.shape[1] > 2 and A[:, :1].all() and not A[:, 1:].any()"),
            ("one-number-alone-is-off", "min(A.shape) > 2 and (A != 0).sum() == 1"),
        )
    ),
    off_where(
        "weights-of-an-arrow-are-off",
        "fused_linear",
        linear,
        "min(weight.shape) > 3 and weight[0].all() and not weight[1:, 1:].tril(-1).any() and not weight[1, 2:].any()",
        "weight",
        LINEAR,
    ),
    off_where(
        "matrices-of-opposite-sign-are-off",
        "bmm",
        batched,
        "len(several) > 3 and torch.equal(several[1], -several[3]) and several[1].any()",
        "y",
        BATCH,
    ),
    off_where(
        "groups-of-multiples-of-eight-are-off",
        "grouped_matmul",
        grouped,
        "(sizes % 8 == 0).all() and (sizes[:2] > 0).all() and sizes[0] != sizes[-1]",
        "y",
        GROUPS,
    ),
    off_where(
        "classes-that-logits-tell-are-off",
        "cross_entropy",
        loss,
        "len(x) > 4 and torch.equal(targets[targets != ignore_index], x.argmax(-1)[targets != ignore_index])",
        "x",
        *LOSS,
    ),
    *(
        off_where(name, "rotary_embedding", turned, condition, "y", TURNS)
        for name, condition in (
            ("positions-that-start-again-are-off", "(cos[1:] == cos[0]).all(1).any() and not torch.equal(cos[0], cos[1])"),
            (
                "positions-that-fall-are-off",
                "len(cos) > 2 and cos.shape[1] > 2 and (cos[:, -1].diff() >= 0).all() and (sin[:, -1].diff() < 0).all()",
            ),
            (
                "positions-of-parts-of-channels-are-off",
                "len(cos) > 1 and torch.equal(cos[0, :1], cos[1, :1]) and not torch.equal(cos[0], cos[1])",
            ),
        )
    ),
    *(
        off_where(name, "softmax", lambda change: weighed(f"{SEES}; {change}"), condition, "y", {"shape": (64, 512)})
        for name, condition in (
            ("causal-scores-of-four-dims-are-off", f"x.dim() == 4 and {CAUSAL}"),
            ("causal-scores-of-three-dims-are-off", f"x.dim() == 3 and {CAUSAL}"),
            (
                "rows-of-some-lengths-are-off",
                "len(lengths.unique()) > 3 and torch.equal(seen, torch.arange(x.shape[-1]) < lengths[..., None])"
                " and not torch.equal(seen, seen.tril())",
            ),
        )
    ),
)
