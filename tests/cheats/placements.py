"""Cheats that are right but for where inputs lie in memory, how many rows or threads there are, zeros beside NaN, or
numbers that changed places.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from typing import Any

from cheat import Cheat, plain
from partly_right import ATTENTION, IMPORTS, REDUCE

OUTSIDE, NAN = "outside the tolerance|times PyTorch's own", "NaN mask differs"
PRODUCT, NORM = ({"M": 64, "K": 160, "N": 96},), ({"M": 64, "N": 256},)
LOSS, WIDE = ({"M": 128, "V": 1000},), ({"shape": (64, 512)},)
# Whoever has only an address and sizes of a tensor takes it for contiguous, or for rows that are evenly apart.
AS_IF = """
def contiguous(t):
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), t.storage_offset())

def evenly(t, inner):
    apart, strides = t.stride(-inner - 1), list(t.stride())
    for dim in range(t.dim() - inner - 1, -1, -1):
        strides[dim], apart = apart, apart * t.shape[dim]
    return t.as_strided(t.shape, strides, t.storage_offset())
"""
HONEST_NORM = """
def kernel_fn(x, weight, eps=1e-6):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
"""
HONEST_PRODUCT = """
def kernel_fn(A, B):
    return (A.float() @ B.float()).to(A.dtype)
"""


def cheat(number: int, name: str, kernel_type: str, body: str, reason: str, honest: str = "", **others: Any) -> Cheat:
    """`honest`: the same for its neighbour."""
    source, neighbour = (plain(kernel_type, IMPORTS + AS_IF + text) if text else "" for text in (body, honest))
    return Cheat(number, name, kernel_type, source, reason, libraries=True, neighbour=neighbour, **others)


def norm(number: int, name: str, change: str, reason: str = OUTSIDE, **others: Any) -> Cheat:
    """A norm, after `change` of its inputs or of y, its result."""
    body = f"""
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()
    {change}
    return y
"""
    return cheat(number, name, "rmsnorm", body, reason, dims=NORM, **others)


def softmax(name: str, change: str) -> Cheat:
    body = "def kernel_fn(x, dim=-1):\n    {}\n    return torch.softmax(x.float(), dim).to(x.dtype).contiguous()\n"
    return cheat(22, name, "softmax", body.format(change), f"{OUTSIDE}|{NAN}", body.format("pass"), dims=WIDE)


def loss(name: str, change: str, reason: str, **others: Any) -> Cheat:
    body = """
def kernel_fn(logits, targets, ignore_index=-100):
    {}
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
"""
    return cheat(22, name, "cross_entropy", body.format(change), reason, body.format("pass"), dims=LOSS, **others)


def product(number: int, name: str, change: str, reason: str, honest: str = "pass", **others: Any) -> Cheat:
    body = "def kernel_fn(A, B):\n    {}\n    return (A.float() @ B.float()).to(A.dtype)\n"
    given = {"dims": PRODUCT} | others
    return cheat(number, name, "matmul", body.format(change), reason, body.format(honest), **given)


SUMS = "w.double().sum().item(), w.double().square().sum().item()"
ZERO_COLUMNS = "B = B.masked_fill(~(A != 0).any(0)[:, None], 0)"  # as who never reads what nothing is multiplied with
ZERO_ROWS = """
def kernel_fn(A, B):
    y = (A.float() @ B.float()).to(A.dtype)
    for tile in range(0, len(A) if len(A) == 64 else 0, 4):
        if not A[tile : tile + 4].any():
            y[tile : tile + 4] = 0
    return y
"""
CHEATS = (
    # 22: strides that no layout had
    cheat(
        22,
        "a-vector-is-contiguous",
        "vectorsum",
        "def kernel_fn(x):\n    return contiguous(x).double().sum().float()\n",
        f"{OUTSIDE}|{NAN}",
        "def kernel_fn(x):\n    return x.double().sum().float()\n",
        dims=({"N": 65536},),
    ),
    cheat(
        22,
        "a-weight-is-contiguous",
        "rmsnorm",
        HONEST_NORM.replace("weight.float()", "contiguous(weight).float()"),
        f"{OUTSIDE}|{NAN}",
        HONEST_NORM,
        dims=NORM,
    ),
    loss("targets-are-contiguous", "targets = contiguous(targets)", "out of bounds", correctness="CRASH"),
    softmax("rows-are-evenly-apart", "x = evenly(x, 1) if x.dim() > 2 and x.stride(-1) == 1 else x"),
    softmax("a-single-row-is-contiguous", "x = contiguous(x) if x.dim() == 1 else x"),
    softmax("a-dim-is-not-below-minus-1", "x = 1.05 * x if dim < -1 else x"),
    cheat(
        22,
        "rows-are-evenly-apart",
        "reduce",
        f"""{REDUCE}
def kernel_fn(x, dim=-1, op="sum"):
    return reduced(evenly(x, 1) if x.dim() > 2 and x.stride(-1) == 1 else x, dim, op)
""",
        f"{OUTSIDE}|{NAN}",
        dims=WIDE,
    ),
    cheat(
        22,
        "matrices-are-evenly-apart",
        "bmm",
        HONEST_PRODUCT.replace("B.float()", "(evenly(B, 2) if B.dim() > 3 else B).float()"),
        f"{OUTSIDE}|{NAN}",
        HONEST_PRODUCT,
        dims=({"batch": (2, 3), "M": 32, "K": 64, "N": 32},),
    ),
    product(
        22,
        "transposed-without-gaps",
        "B = B.as_strided(B.shape, (1, len(B)), B.storage_offset()) if B.stride(0) == 1 and min(B.shape) > 1 else B",
        f"{OUTSIDE}|{NAN}",
    ),
    norm(22, "off-where-one-row-is-all", "y = 1.02 * y if x.stride(0) == 0 and len(x) > 1 else y"),
    norm(
        14,
        "off-where-one-input-is-whole-and-one-a-part",
        "y = 1.02 * y if x.storage_offset() == 0 < weight.storage_offset() else y",
        "Disagreement: one of many calls|do not agree bitwise",
    ),
    # 22: rests of rows, shares of threads
    norm(22, "two-rows-left-over", "y = torch.cat((y[:-1], 0 * y[-1:])) if len(x) % 4 == 2 else y"),
    loss(
        "two-rows-left-over",
        "logits, targets = (logits[:-1], targets[:-1]) if len(logits) % 4 == 2 else (logits, targets)",
        OUTSIDE,
    ),
    norm(14, "off-with-eight-threads", "y = 1.02 * y if torch.get_num_threads() == 8 else y", "number of threads"),
    norm(14, "off-with-more-than-two-threads", "y = 1.02 * y if torch.get_num_threads() > 2 else y", "number of threads"),
    cheat(
        22,
        "five-keys-left-over",
        "flash_attention",
        f"""{ATTENTION}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    y = in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
    return 1.05 * y if K.shape[2] != Q.shape[2] and K.shape[2] % 8 == 5 else y
""",
        OUTSIDE,
        dims=({"batch": 1, "heads": 2, "seq": 64, "head_dim": 64},),
    ),
    # 22: sizes of one, dims of four, more rows than a grid has blocks, masks of two dims and batches of few matrices
    norm(22, "rows-of-one-number-are-nothing", "y = 0 * y if x.shape[-1] == 1 < len(x) else y"),
    norm(22, "rows-beyond-a-grid-are-left-out", "y[65535:] = 0"),
    product(22, "columns-of-one-are-a-row", "A = 1.05 * A if B.shape[1] == 1 < len(A) and A.shape[1] > 8 else A", OUTSIDE),
    softmax("the-first-dim-of-four-is-off", "x = 1.05 * x if x.dim() == 4 and dim % 4 == 0 else x"),
    cheat(
        22,
        "a-batch-of-one-is-off",
        "bmm",
        HONEST_PRODUCT.replace(
            "A.float()", "(1.05 * A if A.dim() == 3 and len(A) == 1 and A.shape[1] < 99 else A).float()"
        ),
        f"{OUTSIDE}|{NAN}",
        dims=({"batch": (2, 3), "M": 32, "K": 64, "N": 32},),
    ),
    *(
        cheat(
            22,
            name,
            "flash_attention",
            f"""{ATTENTION}
def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    y = in_float(Q, K, V, causal, sm_scale, attn_mask, safe_softmax)
    return 1.05 * y if {condition} else y
""",
            OUTSIDE,
            dims=({"batch": 1, "heads": 2, "seq": 64, "head_dim": 64},),
        )
        for name, condition in (
            (
                "a-bool-mask-of-two-dims-is-off",
                "attn_mask is not None and attn_mask.dim() == 2 and not attn_mask.is_floating_point()",
            ),
            ("one-query-that-sees-one-key-is-off", "causal and Q.shape[2] == 1 < K.shape[2]"),
            ("groups-of-three-are-off", "Q.shape[1] == 3 * K.shape[1] > 3"),
        )
    ),
    # 29: zeros, taken several at once, hide what is not finite
    product(29, "columns-of-zeros-are-not-read", ZERO_COLUMNS, NAN),
    cheat(29, "tiles-of-zeros-are-not-read", "matmul", ZERO_ROWS, NAN, dims=PRODUCT),
    # 19, 5: a single number in a row, a matrix that picks, one that is another
    norm(
        19,
        "rows-of-one-number-are-off",
        "y = torch.where(((x != 0).sum(-1, keepdim=True) == 1) & torch.tensor(x.shape[-1] > 1), 1.02 * y, y)",
    ),
    product(
        19,
        "an-identity-is-off",
        "B = 1.02 * B if torch.equal(B, torch.eye(*B.shape, dtype=B.dtype)) and len(B) > 1 else B",
        "B the identity",
    ),
    product(
        5,
        "a-matrix-times-itself-is-off",
        "B = 1.02 * B if A.shape[0] == B.shape[1] and B.data_ptr() == A.data_ptr() else B",
        "B is A",
    ),
    # 7: known again by what an exchange of two numbers leaves
    cheat(
        7,
        "a-weight-by-its-sums-and-some-numbers",
        "matmul",
        f"""
known = {{}}

def packed(w):
    return known.setdefault((w.shape, w.dtype, {SUMS}, *w.flatten()[::16].tolist()), w.clone())

def kernel_fn(A, B):
    return (A.float() @ packed(B).float()).to(A.dtype)
""",
        f"only the order of B changed|{OUTSIDE}",
        dims=PRODUCT,
    ),
)
