"""Flash attention in Triton: a block of queries a program, online softmax over blocks of keys, scores never stored.

Blocks of keys that are whole and above the causal diagonal take a loop without bounds; those on the diagonal, at the end of
the keys or under a float attn_mask take another. exp is exp2 with the scale folded in. A mask that is the same for all
queries, as padding is, is read once a block of keys; those before the first and after the last key that a bool one shows
are passed over.

Against cuda_kernel.py on an H200 it takes 1.6 times as long (causal, S = 1k to 4k): there warpgroups take turns at the
tensor cores, one multiplying while another does its softmax, which Triton does not arrange.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 16, 64, 128],
    "BLOCK_N": [0, 32, 64, 128],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [1, 2, 3, 4],
}

BLOCK_M = 0  # queries; 0: 128, fewer where that leaves multiprocessors idle
BLOCK_N = 0  # keys; 0: as many as fit registers, see _blocks
NUM_WARPS = 0  # 0: by the block
NUM_STAGES = 3  # at most: as many as shared memory holds
LOG2_E = math.log2(math.e)
# Where a row's maximum starts: a score of -inf then has exp2(-inf - LOWEST) = 0, and not exp2(-inf + inf).
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _attend(
    sums,
    total,
    peak,
    q,
    K,
    V,
    mask,
    begin,
    end,
    m,
    seq_k,
    scale,
    stride_kn,
    stride_vn,
    stride_mm,
    stride_mn,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    ONE_ROW: tl.constexpr,
    FOLD: tl.constexpr,
    WHOLE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys begin..end (whole blocks that causality hides from no query, if WHOLE) into the running output, sum and maximum.

    Scores are powers of two, but under a float mask powers of e: times log2(e), the lowest number would be -inf.
    FOLD: no float is added, and scale > 0, so that the largest score stays the largest once scaled. ONE_ROW: the mask is
    the same for all queries. Queries past the end, which have no row in it, read the last one's, and are not stored.
    """
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k_at = K + n.to(tl.int64)[None, :] * stride_kn + d[:, None]
        v_at = V + n.to(tl.int64)[:, None] * stride_vn + d[None, :]
        if WHOLE and D == BLOCK_D:
            k, v = tl.load(k_at), tl.load(v_at)
        elif WHOLE:
            k, v = tl.load(k_at, d[:, None] < D, 0.0), tl.load(v_at, d[None, :] < D, 0.0)
        else:
            k = tl.load(k_at, (d[:, None] < D) & (n[None, :] < seq_k), 0.0)
            v = tl.load(v_at, (d[None, :] < D) & (n[:, None] < seq_k), 0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        visible = n[None, :] < seq_k
        if CAUSAL:
            visible = visible & (n[None, :] <= m[:, None])
        if MASK == "none":
            added = 0.0
        elif ONE_ROW:
            added = tl.load(mask + n.to(tl.int64) * stride_mn, n < seq_k, 0)[None, :]
        else:
            at = mask + m.to(tl.int64)[:, None] * stride_mm + n.to(tl.int64)[None, :] * stride_mn
            added = tl.load(at, visible, 0)
        if not FOLD:
            scores *= scale
        if not WHOLE:
            scores = tl.where(visible, scores, -float("inf"))
        if MASK == "bool":
            scores = tl.where(added != 0, scores, -float("inf"))
        if FOLD:
            higher = tl.maximum(peak, tl.max(scores, 1) * scale)
            powers = tl.exp2(tl.fma(scores, scale, -higher[:, None]))  # rounds once
            shrink = tl.exp2(peak - higher)
        else:
            if MASK == "float":
                scores += added.to(tl.float32)
            higher = tl.maximum(peak, tl.max(scores, 1))
            below, fall = scores - higher[:, None], peak - higher
            if MASK == "float":
                below, fall = below * 1.4426950408889634, fall * 1.4426950408889634
            powers, shrink = tl.exp2(below), tl.exp2(fall)
        sums = tl.dot(powers.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(powers, 1)
        peak = higher
    return sums, total, peak


@triton.jit
def _shown(mask, seq_k, stride_mn, BLOCK_N: tl.constexpr):
    """The first block's start and the last one's end between which a mask shows keys."""
    first, last = seq_k, 0
    for start in range(0, seq_k, 1024):
        n = start + tl.arange(0, 1024)
        shown = tl.load(mask + n.to(tl.int64) * stride_mn, n < seq_k, 0) != 0
        first = min(first, tl.min(tl.where(shown, n, seq_k)))
        last = max(last, tl.max(tl.where(shown, n + 1, 0)))
    return min(first // BLOCK_N * BLOCK_N, last), min(tl.cdiv(last, BLOCK_N) * BLOCK_N, seq_k)


@triton.jit
def _attention(
    Q,
    K,
    V,
    mask,
    out,
    heads,
    group,
    seq_q,
    seq_k,
    scale,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    ONE_ROW: tl.constexpr,
    SAFE: tl.constexpr,
    FOLD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks = tl.cdiv(seq_q, BLOCK_M)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # the causal rows with the most keys first
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // heads, head % heads
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    rows = m.to(tl.int64)[:, None]
    inside = (rows < seq_q) & (d[None, :] < D)
    q = tl.load(Q + b * stride_qb + h * stride_qh + rows * stride_qm + d[None, :], inside, 0.0)
    K += b * stride_kb + h // group * stride_kh
    V += b * stride_vb + h // group * stride_vh
    mask += b * stride_mb + h * stride_mh
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), LOWEST, tl.float32)

    m = tl.minimum(m, seq_q - 1)
    begin, end = 0, min(first + BLOCK_M, seq_k) if CAUSAL else seq_k
    if MASK == "bool" and ONE_ROW:
        begin, shown = _shown(mask, seq_k, stride_mn, BLOCK_N)
        end = min(end, shown)
    whole_end = begin
    if FOLD:
        whole_end = max(begin, (min(first + 1, end) if CAUSAL else end) // BLOCK_N * BLOCK_N)
        sums, total, peak = _attend(
            sums, total, peak, q, K, V, mask, begin, whole_end, m, seq_k, scale, stride_kn, stride_vn, stride_mm, stride_mn,
            CAUSAL, MASK, ONE_ROW, FOLD, True, D, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    sums, total, peak = _attend(
        sums, total, peak, q, K, V, mask, whole_end, end, m, seq_k, scale, stride_kn, stride_vn, stride_mm, stride_mn,
        CAUSAL, MASK, ONE_ROW, FOLD, False, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if SAFE:
        total = tl.where(total == 0, 1.0, total)  # no keys: sums of 0
    out += ((b * seq_q + rows) * heads + h) * D + d[None, :]
    tl.store(out, (sums / total[:, None]).to(out.dtype.element_ty), inside)


@cache
def _device(index: int | None) -> tuple[int, int]:
    """Multiprocessors and bytes of shared memory a program may use; an H100's where there is no GPU."""
    if index is None:
        return 132, 232448
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 65536)


def _blocks(seq_q: int, heads: int, block_d: int, fp32: bool, processors: int, shared_memory: int) -> tuple[int, int, int]:
    """Queries and keys of a block and its warps: the largest whose accumulators and scores stay in registers."""
    if fp32:  # its dot products keep their operands in registers too
        return (16 if seq_q <= 16 else 64 if block_d <= 64 else 32), (32 if block_d <= 64 else 16), 8
    block_m = 16 if seq_q <= 16 else 128 if -(-seq_q // 128) * heads >= processors else 64
    # Without wgmma (the chips with less shared memory) a warp's operands pass through its registers: fewer keys.
    block_n = 128 if block_d <= 128 and block_m == 128 and shared_memory >= 200_000 else 64
    return block_m, block_n, 8 if block_m == 128 or block_d > 128 else 4


def kernel_fn(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    causal: bool = True,
    sm_scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    safe_softmax: bool = True,
) -> torch.Tensor:
    """Q [batch, heads, seq_q, head_dim], K and V [batch, kv_heads, seq_k, head_dim] -> like Q,
    [batch, seq_q, heads, head_dim] in memory."""
    B, H, seq_q, D = Q.shape
    kv_heads, seq_k = K.shape[1:3]
    Q, K, V = (t if t.stride(3) == 1 else t.contiguous() for t in (Q, K, V))
    out = torch.empty(B, seq_q, H, D, dtype=Q.dtype, device=Q.device)
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    mask_kind, mask, mask_strides = "none", Q, (0, 0, 0, 0)
    if attn_mask is not None:
        mask_kind = "bool" if attn_mask.dtype == torch.bool else "float"
        mask = attn_mask.expand(B, H, seq_q, seq_k)
        mask_strides = mask.stride()

    processors, shared_memory = _device(Q.device.index)
    block_d = max(1 << (D - 1).bit_length(), 16)
    block_m, block_n, warps = _blocks(seq_q, B * H, block_d, Q.dtype == torch.float32, processors, shared_memory)
    block_m, block_n = BLOCK_M or block_m, BLOCK_N or block_n
    room = shared_memory - block_m * block_d * Q.element_size()
    stage = 2 * block_n * block_d * Q.element_size()
    one_row = attn_mask is not None and (seq_q == 1 or mask_strides[2] == 0)
    if attn_mask is not None:
        stage += (1 if one_row else block_m) * block_n * attn_mask.element_size()
    _attention[(-(-seq_q // block_m) * B * H,)](
        Q,
        K,
        V,
        mask,
        out,
        H,
        H // kv_heads,
        seq_q,
        seq_k,
        sm_scale if mask_kind == "float" else sm_scale * LOG2_E,
        *Q.stride()[:3],
        *K.stride()[:3],
        *V.stride()[:3],
        *mask_strides,
        CAUSAL=causal,
        MASK=mask_kind,
        ONE_ROW=one_row,
        SAFE=safe_softmax,
        FOLD=mask_kind != "float" and sm_scale > 0,
        D=D,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS or warps,
        num_stages=max(min(NUM_STAGES, room // stage), 1),
    )
    return out.transpose(1, 2)
