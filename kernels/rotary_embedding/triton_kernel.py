"""Rotary embedding in Triton: a program takes some heads at some positions, so that it reads their cos and sin once.

Loads and stores run along head_dim; interleaved pairs are parted in registers (`tl.split`), not by strided access.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"
TUNABLES = {"HEADS": [1, 2, 4, 8, 16], "PROGRAM_ELEMENTS": [1024, 2048, 4096, 8192], "NUM_WARPS": [1, 2, 4, 8]}

HEADS = 4  # of a program, at most
PROGRAM_ELEMENTS = 4096  # of x, that a program takes
NUM_WARPS = 4


@triton.jit
def _rotary(
    x,
    cos,
    sin,
    y,
    H,
    S,
    stride_b,
    stride_h,
    stride_s,
    stride_a,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    blocks_s, blocks_h = tl.cdiv(S, BLOCK_S), tl.cdiv(H, HEADS)
    tile = tl.program_id(0)
    s = (tile % blocks_s * BLOCK_S + tl.arange(0, BLOCK_S))[None, :, None]
    h = (tile // blocks_s % blocks_h * HEADS + tl.arange(0, HEADS))[:, None, None]
    b = (tile // blocks_s // blocks_h).to(tl.int64)
    inside = (h < H) & (s < S)
    x += b * stride_b + h.to(tl.int64) * stride_h + s.to(tl.int64) * stride_s
    y += ((b * H + h) * S + s) * D

    pairs = tl.arange(0, BLOCK_HALF)[None, None, :]
    angle_mask = (s < S) & (pairs < HALF)
    c = tl.load(cos + s * stride_a + pairs, angle_mask, 0.0).to(tl.float32)
    d = tl.load(sin + s * stride_a + pairs, angle_mask, 0.0).to(tl.float32)
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        mask = inside & (columns < 2 * HALF)
        values = tl.load(x + columns, mask, 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(values, (HEADS, BLOCK_S, BLOCK_HALF, 2)))
        rotated = tl.join(first * c - second * d, second * c + first * d)
        rotated = tl.reshape(rotated, (HEADS, BLOCK_S, 2 * BLOCK_HALF))
        tl.store(y + columns, rotated.to(y.dtype.element_ty), mask)
    else:
        mask = inside & (pairs < HALF)
        first = tl.load(x + pairs, mask, 0.0).to(tl.float32)
        second = tl.load(x + HALF + pairs, mask, 0.0).to(tl.float32)
        tl.store(y + pairs, (first * c - second * d).to(y.dtype.element_ty), mask)
        tl.store(y + HALF + pairs, (second * c + first * d).to(y.dtype.element_ty), mask)
    if BLOCK_REST > 0:  # channels past rotary_dim
        columns = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        mask = inside & (columns < D)
        tl.store(y + columns, tl.load(x + columns, mask), mask)


def kernel_fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
    """x [batch, heads, seq, head_dim], cos and sin [seq, rotary_dim / 2] -> a contiguous tensor of x's shape and dtype."""
    B, H, S, D = x.shape
    half = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(3) != 1:
        x = x.contiguous()
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    heads = min(HEADS, 1 << (H - 1).bit_length())
    block_s = min(max(PROGRAM_ELEMENTS // (heads << (D - 1).bit_length()), 1), 1 << (S - 1).bit_length())
    _rotary[(-(-S // block_s) * -(-H // heads) * B,)](
        x,
        cos,
        sin,
        y,
        H,
        S,
        *x.stride()[:3],
        cos.stride(0),
        D=D,
        HALF=half,
        INTERLEAVED=interleaved,
        HEADS=heads,
        BLOCK_S=block_s,
        BLOCK_HALF=1 << (half - 1).bit_length(),
        BLOCK_REST=1 << (D - 2 * half - 1).bit_length() if 2 * half < D else 0,
        num_warps=NUM_WARPS,
    )
    return y
