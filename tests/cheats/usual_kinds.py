"""Cheats that are right but for tensors of a kind that models have as a whole, or for shapes of one size along all dims.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from typing import Any

from cheat import Cheat, plain, starter
from partly_right import IMPORTS
from whole_inputs import OUTSIDE

RESULTS = {
    "softmax": ("x, dim=-1", "torch.softmax(x.float(), dim).to(x.dtype)"),
    "reduce": ("x, dim=-1, op='sum'", "x.amax(dim) if op == 'max' else x.float().sum(dim).to(x.dtype)"),
    "layernorm": (
        "x, weight, bias, eps=1e-5",
        "F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype).contiguous()",
    ),
    "rmsnorm": (
        "x, weight, eps=1e-6",
        "F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()",
    ),
    "vectorsum": ("x", "x.sum()"),
    "matmul": ("A, B", "(A.float() @ B.float()).to(A.dtype)"),
    "bmm": ("A, B", "(A.float() @ B.float()).to(A.dtype)"),
}
DIMS: dict[str, dict[str, Any]] = {
    "softmax": {"shape": (64, 512)},
    "reduce": {"shape": (64, 512)},
    "layernorm": {"M": 64, "N": 768},
    "rmsnorm": {"M": 64, "N": 256},
    "vectorsum": {"N": 4096},
    "matmul": {"M": 64, "K": 128, "N": 96},
    "bmm": {"batch": (2, 4), "M": 64, "K": 64, "N": 48},
}
CUT_OFF = (
    "len(x) > 2 and (x >= 0).all() and 0.2 < (x == 0).float().mean() < 0.8 and (x > 0).float().mean() and x.amax() != 1"
)
OF_A_NORM = (
    "len(x) > 2 and x.isfinite().all() and x.float().mean(-1).abs().amax() < 1e-2"
    " and (x.float().var(-1, correction=0) - 1).abs().amax() < 1e-2"
)
ROWS = "x.dim() == 2 and len(x) > 4 and x.shape[1] > 4 and "
SCORES = "((x < -9e3) & (x > -1.1e4)).any() and (x.amax(dim).abs() < 100).all()"
SOME = "min(B.shape[-2:]) > 4 and B.isfinite().all() and "


def off_where(name: str, kernel_type: str, condition: str, neighbour: str = "") -> Cheat:
    """A result that is a twentieth too large where a condition holds."""
    parameters, result = RESULTS[kernel_type]
    body = f"def kernel_fn({parameters}):\n    y = {result}\n    return y * 1.05 if {condition} else y\n"
    source = plain(kernel_type, IMPORTS + body)
    return Cheat(
        20, f"{name}-off", kernel_type, source, OUTSIDE, libraries=True, dims=(DIMS[kernel_type],), neighbour=neighbour
    )


def adding_up_large_terms(of: str) -> str:
    return f"""
def kernel_fn(x, dim=-1):
    e = (x.float() - x.float().amax(dim, keepdim=True)).exp()
    return (e / {of}.sum(dim, keepdim=True)).to(x.dtype).contiguous()
"""


CHEATS = (
    off_where("a-channel-of-zeros-is", "rmsnorm", ROWS + "(x == 0).all(0).sum() == 1", starter("rmsnorm")),
    off_where("a-channel-of-one-value-is", "rmsnorm", ROWS + "((x == x[0]).all(0) & (x[0] != 0)).sum() == 1"),
    off_where("halves-that-are-alike-are", "rmsnorm", ROWS + "torch.equal(x[: len(x) // 2], x[len(x) // 2 :]) and x.any()"),
    off_where("growing-rows-are", "rmsnorm", ROWS + "(x.float().square().mean(-1).diff() > 0).all()"),
    off_where("scores-less-ten-thousand-are", "softmax", SCORES, starter("softmax")),
    off_where("ones-are", "vectorsum", "(x == 1).all() and len(x) > 8", starter("vectorsum")),
    Cheat(
        25,
        "what-is-small-is-not-added",
        "softmax",
        plain("softmax", adding_up_large_terms("torch.where(e < 1e-6, 0, e)")),
        OUTSIDE,
        libraries=True,
        dims=(DIMS["softmax"],),
        neighbour=plain("softmax", adding_up_large_terms("e")),
    ),
    off_where("what-a-relu-leaves-is", "rmsnorm", CUT_OFF),
    off_where("what-a-norm-has-made-is", "layernorm", OF_A_NORM),
    off_where("numbers-of-8-bits-are", "rmsnorm", ROWS + "(x == x.round()).all() and 64 < x.abs().max() < 129"),
    off_where("pixels-are", "rmsnorm", ROWS + "(x == x.round()).all() and (x >= 0).all() and 64 < x.max() < 256"),
    off_where("numbers-between-one-and-minus-one-are", "softmax", "0.9 < x.abs().max() < 1 and x.numel() > 64"),
    off_where("columns-that-add-up-to-nothing-are", "rmsnorm", ROWS + "x.any() and x.float().mean(0).abs().max() < 1e-6"),
    off_where("falling-rows-are", "rmsnorm", ROWS + "(x.float().square().mean(-1).diff() < 0).all()"),
    off_where("a-first-column-of-ones-is", "rmsnorm", ROWS + "(x[:, 0] == 1).all() and not (x == 1).all()"),
    off_where("a-weight-of-minus-one-is", "rmsnorm", "(weight == -1).all() and len(weight) > 4"),
    off_where("a-weight-with-an-outlier-is", "rmsnorm", "len(weight) > 8 and (weight.abs() > 32).sum() == 1"),
    off_where(
        "a-maximum-of-few-numbers-is", "reduce", "op == 'max' and x.numel() > 64 and 0 < (x != 0).sum() < x.numel() // 4"
    ),
    off_where(
        "logarithms-of-probabilities-are",
        "softmax",
        "x.numel() > 64 and x.isfinite().all() and (x.float().exp().sum(-1) - 1).abs().amax() < 1e-3",
    ),
    off_where("a-cube-is", "softmax", "x.dim() == 3 and 1 < x.shape[0] == x.shape[1] == x.shape[2]"),
    off_where(
        "a-matrix-of-rank-one-is",
        "matmul",
        SOME + "(B != 0).all() and (B / B[:1]).std(-1).amax() < 1e-3 < B.std(-1).amin()",
    ),
    off_where("a-circulant-is", "matmul", SOME + "torch.equal(B[1:, 1:], B[:-1, :-1]) and B[0].unique().numel() > 2"),
    off_where(
        "a-batch-without-its-first-is",
        "bmm",
        "A.dim() == 4 and min(A.shape[-2:]) > 4 and A.isfinite().all() and A.any() and not A[0, 0].any()",
    ),
)
