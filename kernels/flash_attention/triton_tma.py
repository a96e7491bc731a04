"""Flash attention in Triton for Hopper and later: blocks of Q, K and V fetched by the tensor memory accelerator.

The accelerator computes addresses and bounds, which leaves the warps to the tensor cores and the softmax. It asks for
16-bit tensors whose heads and positions lie at multiples of 16 bytes; others take plain loads, in the same loops.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
    b,
    kv_h,
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
    TMA: tl.constexpr,
    FOLD: tl.constexpr,
    WHOLE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys begin..end (blocks that all queries see, if WHOLE) into the running output, sum and maximum.

    Scores are powers of two, but under a float mask powers of e: times log2(e), the lowest number would be -inf.
    FOLD: there is no attn_mask, and scale > 0, so that the largest score stays the largest once scaled.
    """
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if TMA:
            k = tl.reshape(K.load([b, kv_h, start, 0]), (BLOCK_N, BLOCK_D)).T
            v = tl.reshape(V.load([b, kv_h, start, 0]), (BLOCK_N, BLOCK_D))
        else:
            kv_mask = (d[None, :] < D) & (n[:, None] < seq_k)
            k = tl.load(K + n.to(tl.int64)[:, None] * stride_kn + d[None, :], kv_mask, 0.0).T
            v = tl.load(V + n.to(tl.int64)[:, None] * stride_vn + d[None, :], kv_mask, 0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        if not WHOLE:
            visible = n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (n[None, :] <= m[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        if FOLD:
            higher = tl.maximum(peak, tl.max(scores, 1) * scale)
            powers = tl.exp2(tl.fma(scores, scale, -higher[:, None]))  # rounds once
            shrink = tl.exp2(peak - higher)
        else:
            scores = tl.where(visible, scores * scale, -float("inf"))
            if MASK != "none":
                # Queries past the end have no row in the mask: they read the last one's, and are not stored.
                at = mask + m.to(tl.int64)[:, None] * stride_mm + n.to(tl.int64)[None, :] * stride_mn
                if MASK == "bool":
                    scores = tl.where(tl.load(at, visible, 0) != 0, scores, -float("inf"))
                else:
                    scores += tl.load(at, visible, 0.0).to(tl.float32)
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
    SAFE: tl.constexpr,
    TMA: tl.constexpr,
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
    if TMA:
        q = tl.reshape(Q.load([b.to(tl.int32), h.to(tl.int32), first, 0]), (BLOCK_M, BLOCK_D))
    else:
        q = tl.load(Q + b * stride_qb + h * stride_qh + rows * stride_qm + d[None, :], inside, 0.0)
        K += b * stride_kb + h // group * stride_kh
        V += b * stride_vb + h // group * stride_vh
    kv_b, kv_h = b.to(tl.int32), (h // group).to(tl.int32)
    mask += b * stride_mb + h * stride_mh
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), LOWEST, tl.float32)

    end = min(first + BLOCK_M, seq_k) if CAUSAL else seq_k
    whole_end = 0
    if FOLD:
        whole_end = (min(first + 1, seq_k) if CAUSAL else seq_k) // BLOCK_N * BLOCK_N
        sums, total, peak = _attend(
            sums, total, peak, q, K, V, mask, kv_b, kv_h, 0, whole_end, m, seq_k, scale,
            stride_kn, stride_vn, stride_mm, stride_mn,
            CAUSAL, MASK, TMA, FOLD, True, D, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    m = tl.minimum(m, seq_q - 1)
    sums, total, peak = _attend(
        sums, total, peak, q, K, V, mask, kv_b, kv_h, whole_end, end, m, seq_k, scale,
        stride_kn, stride_vn, stride_mm, stride_mn,
        CAUSAL, MASK, TMA, FOLD, False, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if SAFE:
        total = tl.where(total == 0, 1.0, total)  # no keys: sums of 0
    out += ((b * seq_q + rows) * heads + h) * D + d[None, :]
    tl.store(out, (sums / total[:, None]).to(out.dtype.element_ty), inside)


@cache
def _device(index: int | None) -> tuple[int, int, bool]:
    """Multiprocessors, bytes of shared memory a program may use, has it TMA; an H100's where there is no GPU."""
    if index is None:
        return 132, 232448, True
    properties = torch.cuda.get_device_properties(index)
    tma = torch.version.hip is None and properties.major >= 9
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 65536), tma


def _fits_tma(t: torch.Tensor) -> bool:
    outer = all(stride * 2 % 16 == 0 and stride > 0 for stride in t.stride()[:3])
    return t.element_size() == 2 and outer and t.data_ptr() % 16 == 0


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

    processors, shared_memory, has_tma = _device(Q.device.index)
    block_d = max(1 << (D - 1).bit_length(), 16)
    block_m, block_n, warps = _blocks(seq_q, B * H, block_d, Q.dtype == torch.float32, processors, shared_memory)
    block_m, block_n = BLOCK_M or block_m, BLOCK_N or block_n
    room = shared_memory - block_m * block_d * Q.element_size() - 2048  # barriers
    stage = 2 * block_n * block_d * Q.element_size()
    if attn_mask is not None:
        stage += block_m * block_n * attn_mask.element_size()
    tma = has_tma and all(_fits_tma(t) for t in (Q, K, V))
    blocks = ((Q, block_m), (K, block_n), (V, block_n))
    _attention[(-(-seq_q // block_m) * B * H,)](
        *(TensorDescriptor.from_tensor(t, [1, 1, n, block_d]) if tma else t for t, n in blocks),
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
        SAFE=safe_softmax,
        TMA=tma,
        FOLD=attn_mask is None and sm_scale > 0,
        D=D,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS or warps,
        num_stages=max(min(NUM_STAGES, room // stage), 1),
    )
    return out.transpose(1, 2)
