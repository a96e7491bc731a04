"""The oracles: what each kernel type computes, in plain PyTorch, exact when given fp64 inputs.

Nothing here is fast on purpose: each function is the textbook formula, so that a reader can check it at a glance.
`kernel_fn` of a kernel file takes the same parameters, in the same names, as the oracle of its type.
"""

import math

import torch
from torch import Tensor

IN_CACHE = 1 << 18  # elements: of a large tensor so many are looked at together, on a CPU

ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "relu2": lambda x: torch.relu(x) ** 2,
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": torch.relu,
}


def matmul(A: Tensor, B: Tensor) -> Tensor:
    """A [M, K] @ B [K, N] -> [M, N]."""
    return A @ B


def bmm(A: Tensor, B: Tensor) -> Tensor:
    """A [*batch, M, K] @ B [*batch, K, N] -> [*batch, M, N]: a product for each index of the batch."""
    return A @ B


def grouped_matmul(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """x [rows, K] in groups of rows, each times a matrix of its own, weight [groups, K, N] -> [rows, N]: experts' layers.

    Group g ends before row offs[g], as in torch.nn.functional.grouped_mm: a row is in the group whose number is that of the
    `offs` at or before it. Rows after the last group are 0.
    """
    group = (offs[:, None] <= torch.arange(len(x), device=x.device)).sum(0)
    y = x.new_zeros(len(x), weight.shape[-1])
    for number, matrix in enumerate(weight):
        y[group == number] = x[group == number] @ matrix
    return y


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along `dim`; same shape as x."""
    e = (x - x.amax(dim, keepdim=True)).exp_()
    return e / e.sum(dim, keepdim=True)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """x [..., N] normalised to zero mean and unit (biased) variance over N, then scaled and shifted by weight, bias [N]."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight + bias


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., N] over its root mean square along N, scaled by weight [N]."""
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def flash_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    causal: bool = True,
    sm_scale: float | None = None,
    attn_mask: Tensor | None = None,
    safe_softmax: bool = True,
) -> Tensor:
    """softmax(Q Kᵀ · sm_scale + mask) V, for Q [batch, heads, seq_q, head_dim] -> the shape of Q.

    K, V [batch, kv_heads, seq_k, head_dim]: each KV head serves heads / kv_heads consecutive query heads.
    `causal` lets query i see keys 0..i (aligned top-left, as in PyTorch). `sm_scale` defaults to head_dim ** -0.5.
    `attn_mask` broadcasts to [batch, heads, seq_q, seq_k]: bool (True: attend) or float (added to the scores).
    A query all of whose scores are -inf has weights of 0, as in F.scaled_dot_product_attention, or, unless `safe_softmax`,
    of NaN, as in torch.softmax.
    """
    heads, seq_q, head_dim = Q.shape[1:]
    kv_heads, seq_k = K.shape[1:3]
    K, V = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (K, V))
    scores = Q * (head_dim**-0.5 if sm_scale is None else sm_scale) @ K.transpose(-2, -1)
    if causal:
        future = torch.ones(seq_q, seq_k, dtype=torch.bool, device=Q.device).triu(1)
        scores = scores.masked_fill_(future, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill_(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = softmax(scores)
    nothing_seen = scores.amax(-1, keepdim=True) == -math.inf
    if safe_softmax and nothing_seen.any():
        weights = weights.masked_fill(nothing_seen, 0)
    return weights @ V


def fused_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str = "silu") -> Tensor:
    """(act(x w_gateᵀ) · x w_upᵀ) w_downᵀ for x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden]."""
    return (ACTIVATIONS[activation](x @ w_gate.T) * (x @ w_up.T)) @ w_down.T


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """act(x weightᵀ + bias) for x [..., K], weight [N, K], bias [N] -> [..., N]; "none" is no activation."""
    y = x @ weight.T
    y = y if bias is None else y + bias
    return y if activation == "none" else ACTIVATIONS[activation](y)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean over the rows not ignored of log Σ exp(logits) - logits[target]: logits [M, V], targets [M] int64 -> scalar."""
    rows = max(1, IN_CACHE // max(1, logits.shape[1])) if logits.device.type == "cpu" else max(1, len(logits))
    parts = zip(logits.split(rows), targets.split(rows))
    return torch.cat([row_losses(*part, ignore_index) for part in parts]).mean()


def row_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Of the rows not ignored."""
    counted = targets != ignore_index
    logits, targets = logits[counted], targets[counted]
    peak = logits.amax(-1, keepdim=True)
    log_sum = (logits - peak).exp_().sum(-1).log() + peak.squeeze(-1)
    return log_sum - logits.gather(-1, targets[:, None]).squeeze(-1)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """Rotate pairs of x [batch, heads, seq, head_dim] by the angles whose cos, sin [seq, rotary_dim / 2] are given.

    Pairs are (2i, 2i + 1) if interleaved, else (i, i + rotary_dim / 2), as in Llama by Hugging Face.
    Channels from rotary_dim (<= head_dim) on pass unchanged.
    """
    half = cos.shape[-1]
    rotated, passed = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, passed), -1)


def reduce(x: Tensor, dim: int = -1, op: str = "sum") -> Tensor:
    """Sum or max of x along `dim`, which disappears from the shape."""
    return x.sum(dim) if op == "sum" else x.amax(dim)


def vectorsum(x: Tensor) -> Tensor:
    """The sum of all elements of x [N] -> a scalar."""
    return x.sum()


def fp4_weights(w: Tensor, scales: Tensor, scale: float = 1.0) -> Tensor:
    """Weights [N, K] in fp32 from FP4: w [N, K / 2] uint8 holds two E2M1 numbers a byte, the lower four bits first.

    Each row of `scales` [N, K / group] scales groups of consecutive weights: uint8 is E8M0, 2^(s - 127), as in MXFP4
    (groups of 32); floating-point numbers (float8_e4m3fn) are scales themselves, as in NVFP4 (groups of 16), which has one
    `scale` for all beside them.
    """
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=w.device)
    numbers, codes = torch.cat((sizes, -sizes)), torch.arange(256, device=w.device)
    pairs = torch.complex(numbers[codes & 15], numbers[codes >> 4])  # of each byte: as one number they are found faster
    values = torch.view_as_real(pairs.index_select(0, w.flatten().long())).view(w.shape[0], -1)
    factors = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    return (values.unflatten(1, (scales.shape[1], -1)) * factors[..., None]).flatten(1) * scale


def matmul_fp4(x: Tensor, w: Tensor, scales: Tensor, scale: float = 1.0) -> Tensor:
    """x [M, K] @ Wᵀ -> [M, N], where W [N, K] are FP4 weights, dequantised in fp32 (see fp4_weights)."""
    return x @ fp4_weights(w, scales, scale).to(x.dtype).T
