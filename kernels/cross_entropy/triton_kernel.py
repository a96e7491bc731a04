"""Cross entropy in Triton: a program a row in one pass (online log-sum-exp), then one program for the mean.

The second launch keeps the sum in a fixed order, so that runs agree bitwise, which atomics would not.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"
TUNABLES = {"NUM_WARPS": [1, 2, 4, 8, 16], "UNROLL": [8, 16, 32, 64]}

NUM_WARPS = 4
UNROLL = 16  # logits that a thread takes at a time
MEAN_BLOCK = 4096


@triton.jit
def _losses(
    logits,
    targets,
    losses,
    stride,
    V,
    ignore_index,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Each lane (thread) keeps a maximum and a sum of its own; lanes meet only at the row's end.

    ALIGN: the tensor is aligned to 16 bytes, its rows need not be. The whole vectors within a row are read as such; what
    is before and after them, fewer elements than a vector has, is read by itself.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        return
    begin = row * stride
    first = (begin % VECTOR).to(tl.int32) if ALIGN else 0
    end = first + V
    whole_first = tl.cdiv(first, VECTOR) * VECTOR
    whole_end = end // VECTOR * VECTOR
    aligned = logits + (begin // VECTOR * VECTOR if ALIGN else begin)
    offsets = tl.arange(0, UNROLL)[:, None, None] * (LANES * VECTOR)
    offsets += tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    target_logit = tl.load(logits + begin + target).to(tl.float32)
    peak = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(whole_first, whole_end, UNROLL * LANES * VECTOR):
        at = start + offsets
        values = tl.load(aligned + at, at < whole_end, -float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(tl.max(values, 2), 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # not yet anything but -Inf
        powers = tl.exp(values - base[None, :, None])
        total = total * tl.exp(peak - base) + tl.sum(tl.sum(powers, 2), 0)
        peak = higher
    highest = tl.max(peak, 0)
    if ALIGN:
        at = tl.arange(0, VECTOR)
        before = tl.load(aligned + at, (at >= first) & (at < tl.minimum(whole_first, end)), -float("inf")).to(tl.float32)
        at += whole_end
        after = tl.load(aligned + at, (at >= whole_first) & (at < end), -float("inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(tl.maximum(before, after), 0))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    mass = tl.sum(total * tl.exp(peak - base), 0)
    if ALIGN:
        mass += tl.sum(tl.exp(before - base) + tl.exp(after - base), 0)
    tl.store(losses + row, tl.log(mass) + (highest - target_logit))


@triton.jit
def _mean(losses, targets, mean, M, ignore_index, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + rows, rows < M, 0.0)
        counts += (tl.load(targets + rows, rows < M, ignore_index) != ignore_index).to(tl.int32)
    tl.store(mean, (tl.sum(sums) / tl.sum(counts)).to(mean.dtype.element_ty))


def kernel_fn(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """logits [M, V], targets [M] int64 -> a scalar in the logits' dtype; NaN if every row is ignored."""
    M, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    targets = targets.contiguous()
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    mean = torch.empty((), dtype=logits.dtype, device=logits.device)
    vector = 16 // logits.element_size()
    stride = logits.stride(0)
    aligned = logits.data_ptr() % 16 == 0
    _losses[(M,)](
        logits,
        targets,
        losses,
        stride,
        V,
        ignore_index,
        ALIGN=aligned and (stride % vector != 0 or V % vector != 0),
        LANES=32 * NUM_WARPS,
        UNROLL=max(UNROLL // vector, 1) if aligned else UNROLL,
        VECTOR=vector if aligned else 1,
        num_warps=NUM_WARPS,
    )
    _mean[(1,)](losses, targets, mean, M, ignore_index, BLOCK=MEAN_BLOCK, num_warps=8)
    return mean
