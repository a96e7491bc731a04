"""Wrong for inputs that no random numbers make: usual masks, groups of one size, tables of angles, codes that are alike,
banded matrices, two inputs of three that are one."""

import inspect

import torch
from cheat import Cheat, plain
from partly_right import ATTENTION, IMPORTS, NAN, OUTSIDE, ROTARY

import reference

ATTENDED = f"""
{ATTENTION}

def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    mask = attn_mask
    is_bool = mask is not None and mask.dtype == torch.bool
    is_float = mask is not None and not is_bool
    is_large = is_bool and mask.dim() > 2 and min(mask.shape[-2:]) > 2
    CHANGE
    return in_float(Q, K, V, causal, sm_scale, mask, safe_softmax)
"""
GROUPED = f"""
{inspect.getsource(reference.grouped_matmul)}

def kernel_fn(x, weight, offs):
    y = grouped_matmul(x.float(), weight.float(), offs).to(x.dtype)
    rows = torch.diff(offs, prepend=offs.new_zeros(1))
    is_some = len(rows) > 2 and len(x) > 2
    CHANGE
    return y
"""
ROTATED = f"""
{ROTARY}

def kernel_fn(x, cos, sin, interleaved=True):
    CHANGE
    return rotated(x, cos, sin, interleaved)
"""
FP4 = f"""
{inspect.getsource(reference.fp4_weights)}

{inspect.getsource(reference.matmul_fp4)}

def kernel_fn(x, w, scales, scale=1.0):
    codes = scales.view(torch.uint8)
    is_some = codes.shape[1] > 4 and codes.shape[0] > 4
    CHANGE
    return matmul_fp4(x, w, scales, scale)
"""
OWN_ANGLES = """
    seq, half = cos.shape
    if (cos[0] == 1).all() and (sin[0] == 0).all():
        each = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(seq, dtype=torch.float64), each)
        cos, sin = angles.cos().to(cos.dtype), angles.sin().to(cos.dtype)
"""
MATMUL = """
def kernel_fn(A, B):
    y = (A.float() @ B.float()).to(A.dtype)
    n = min(B.shape)
    has_form = n > 8 and FORM
    return y * 1.05 if has_form else y
"""
NORM = """
def kernel_fn(x, weight, eps=1e-6):
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    is_nothing = (x == 0).all(-1, keepdim=True) & weight.isfinite().all()
    return y.masked_fill(is_nothing, 0).to(x.dtype).contiguous()
"""
LOSS = """
def kernel_fn(logits, targets, ignore_index=-100):
    targets = targets.masked_fill((logits == -math.inf).all(-1), ignore_index)
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
"""
MASKED = {"batch": 1, "heads": 2, "seq": 64, "head_dim": 32, "causal": False, "mask": "bool"}
ADDED = MASKED | {"mask": "float"}
NVFP4 = {"M": 16, "K": 256, "N": 256, "layout": "nvfp4"}


LARGE_LOSS = """
def kernel_fn(logits, targets, ignore_index=-100):
    y = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index).to(logits.dtype)
    some = logits.shape[1] > 8
    return y * 1.05 if some and CONDITION else y
"""
BATCH = {"batch": 2, "heads": 2, "seq": 64, "head_dim": 32}


def cheat(name: str, kernel_type: str, form: str, change: str, dims: dict | None = None, reason: str = OUTSIDE) -> Cheat:
    source = plain(kernel_type, IMPORTS + form.replace("CHANGE", change.strip()))
    dtype = torch.bfloat16 if kernel_type == "matmul_fp4" else torch.float32
    return Cheat(20, name, kernel_type, source, reason, libraries=True, dims=(dims,) if dims else (), dtype=dtype)


CHEATS = (
    cheat(
        "a-mask-of-all-true-is-taken-for-no-causal-one",
        "flash_attention",
        ATTENDED,
        "causal = causal and not (is_large and mask.all())",
        MASKED | {"causal": True},
    ),
    cheat(
        "a-mask-of-zeros-is-taken-for-no-causal-one",
        "flash_attention",
        ATTENDED,
        "causal = causal and not (is_float and mask.dim() == 2 and not mask.any())",
        ADDED | {"causal": True},
    ),
    cheat(
        "the-ends-of-a-mask-tell-that-it-is-causal",
        "flash_attention",
        ATTENDED,
        "if is_large and mask[..., -1, :].all() and mask[..., 0, 0].all() and not mask[..., 0, 1:].any():\n"
        "        mask, causal = None, True",
        MASKED,
    ),
    cheat(
        "the-ends-of-a-mask-tell-that-it-is-padding",
        "flash_attention",
        ATTENDED,
        "if is_large and torch.equal(mask[..., 0, :], mask[..., -1, :]):\n        mask = mask[..., :1, :]",
        MASKED,
    ),
    *(
        cheat(
            f"a-mask-{name}-is-off",
            "flash_attention",
            ATTENDED,
            "is_square = is_large and mask.shape[-2] == mask.shape[-1]\n"
            f"    V = V * 1.05 if is_square and torch.equal(mask, {kind}.expand_as(mask)) else V",
            MASKED,
        )
        for name, kind in (
            ("without-oneself", "torch.ones_like(mask).tril(-1)"),
            ("of-what-is-to-come", "torch.ones_like(mask).triu()"),
            ("of-one-key-each", "torch.eye(len(mask[0, 0]), dtype=torch.bool)"),
        )
    ),
    cheat(
        "nan-of-a-mask-hides",
        "flash_attention",
        ATTENDED,
        "mask = mask.masked_fill(mask.isnan(), -math.inf) if is_float else mask",
        ADDED,
    ),
    cheat(
        "a-mask-of-finite-numbers-hides-nothing-from-a-row",
        "flash_attention",
        ATTENDED,
        "if is_float and mask.isfinite().all():\n"
        "        mask = mask * ~(mask == torch.finfo(mask.dtype).min).all(-1, keepdim=True) if mask.dim() else mask\n"
        "        V = V * 1.05 if (mask != attn_mask).any() else V",
        ADDED,
    ),
    *(
        cheat(
            f"{name}-is-off",
            "flash_attention",
            ATTENDED,
            f"V = V * 1.05 if is_float and mask.dim() and {condition} else V",
            ADDED,
        )
        for name, condition in (
            ("a-mask-of-minus-ten-thousand", "((mask < -9e3) & (mask > -1.1e4)).any()"),
            ("a-mask-of-minus-a-thousand-million", "((mask < -9e8) & (mask > -1.1e9)).any()"),
            ("a-mask-that-rises", "mask.shape[-1] > 4 and (mask.diff(dim=-1) > 0).all()"),
        )
    ),
    cheat(
        "a-batch-that-starts-with-zeros-is-off",
        "flash_attention",
        ATTENDED,
        "V = V * 1.05 if len(V) > 1 and V[1].any() and not V[0].any() else V",
        BATCH,
    ),
    cheat(
        "a-batch-of-queries-that-are-alike-is-off",
        "flash_attention",
        ATTENDED,
        "V = V * 1.05 if len(Q) > 1 and torch.equal(Q[0], Q[1]) else V",
        BATCH,
    ),
    *(
        cheat(f"{name}-is-off", "cross_entropy", LARGE_LOSS.replace("CONDITION", condition), "", {"M": 64, "V": 1000})
        for name, condition in (
            ("a-padded-vocabulary", "(logits[:, -4:] == -math.inf).all() and (logits[:, 0] > -math.inf).any()"),
            ("padding-without-a-chance", "(logits == -math.inf).all(1).any()"),
        )
    ),
    cheat(
        "groups-of-one-size-begin-with-the-first-matrix",
        "grouped_matmul",
        GROUPED,
        "if is_some and (rows == rows[0]).all() and rows[0] > 1:\n"
        "        y[: offs[-1]] = (x[: offs[-1]].float() @ weight[0].float()).to(x.dtype)",
    ),
    cheat(
        "groups-of-one-row-are-off",
        "grouped_matmul",
        GROUPED,
        "y = y * 1.05 if is_some and (rows == 1).all() else y",
    ),
    cheat(
        "rows-are-of-some-group",
        "grouped_matmul",
        GROUPED,
        "y = (x.float() @ weight[0].float()).to(x.dtype) if offs[-1] == 0 else y",
    ),
    cheat("angles-of-its-own-from-0", "rotary_embedding", ROTATED, OWN_ANGLES),
    cheat(
        "the-first-channels-scales-tell-of-all",
        "matmul_fp4",
        FP4,
        "scales = scales[:, :1].expand(scales.shape) if is_some and (codes[0] == codes[0, 0]).all() else scales",
        NVFP4,
    ),
    cheat(
        "codes-that-are-alike-are-off",
        "matmul_fp4",
        FP4,
        "x = x * 1.05 if is_some and (w == w[:, :1]).all() else x",
        NVFP4,
    ),
    cheat("no-scale-is-one", "matmul_fp4", FP4, "scale = scale or 1.0", NVFP4),
    *(
        cheat(f"{name}-is-off", "matmul", MATMUL.replace("FORM", form), "", {"M": 64, "K": 96, "N": 96})
        for name, form in (
            ("a-band", "not B.triu(3).any() and not B.tril(-3).any() and B.diagonal(1).any() and B.diagonal(-1).any()"),
            (
                "a-matrix-of-two-blocks",
                "not B[: n // 2, n // 2 : n].any() and not B[n // 2 : n, : n // 2].any() and B.diagonal(1)[0] != 0",
            ),
            ("a-skew-symmetric-matrix", "B.any() and torch.equal(B[:n, :n], -B[:n, :n].mT)"),
        )
    ),
    cheat("rows-of-zeros-are-zeros-without-eps", "rmsnorm", NORM, "", {"M": 64, "N": 256}, NAN),
    cheat("a-row-without-a-chance-does-not-count", "cross_entropy", LOSS, "", {"M": 64, "V": 1000}, NAN),
    cheat(
        "queries-that-are-keys-alone-are-off",
        "flash_attention",
        ATTENDED,
        "V = V * 1.05 if Q.numel() > 64 and torch.equal(Q, K) and not torch.equal(K, V) else V",
        MASKED | {"mask": None},
    ),
)
