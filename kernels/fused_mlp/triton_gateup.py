"""Gated MLP: gate and up in one Triton GEMM, whose two accumulators meet in its epilogue; the library's GEMM for down.

x is read once for both products, and neither leaves registers before act(gate) * up is rounded and stored.
"""

from functools import cache

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [0, 64, 128, 256],
    "BLOCK_N": [0, 32, 64, 128],
    "BLOCK_K": [0, 32, 64, 128],
    "GROUP_M": [4, 8, 16],
    "NUM_WARPS": [0, 4, 8],
    "NUM_STAGES": [2, 3, 4, 5],
}

BLOCK_M = 0  # rows of x; 0: by shape, see _tile
BLOCK_N = 0  # hidden units, of gate and up each
BLOCK_K = 0  # 0: 64, in fp32 16
GROUP_M = 8  # rows of tiles that are walked together
NUM_WARPS = 0  # 0: 8 from tiles of 128 x 128 (in fp32 64 x 64) on, else 4
NUM_STAGES = 4  # at most: as many as shared memory holds


@triton.jit
def _gate_up(
    x,
    w_gate,
    w_up,
    out,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_gn,
    stride_gk,
    stride_un,
    stride_uk,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group = min(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap round: loads need no mask for them, and they are not stored.
    x += (m % M).to(tl.int64)[:, None] * stride_xm + k[None, :] * stride_xk
    w_gate += (n % N).to(tl.int64)[None, :] * stride_gn + k[:, None] * stride_gk
    w_up += (n % N).to(tl.int64)[None, :] * stride_un + k[:, None] * stride_uk
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            rows, gate_block, up_block = tl.load(x), tl.load(w_gate), tl.load(w_up)
        else:
            rows = tl.load(x, k[None, :] < K - start, 0.0)
            gate_block = tl.load(w_gate, k[:, None] < K - start, 0.0)
            up_block = tl.load(w_up, k[:, None] < K - start, 0.0)
        gate = tl.dot(rows, gate_block, gate, input_precision="ieee")
        up = tl.dot(rows, up_block, up, input_precision="ieee")
        x += BLOCK_K * stride_xk
        w_gate += BLOCK_K * stride_gk
        w_up += BLOCK_K * stride_uk
    if ACTIVATION == "silu":
        gate = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        gate = tl.where(gate <= 0, 0.0, gate * gate)
    else:  # gelu_tanh: 0.5 (1 + tanh(y)) is sigmoid(2 y)
        gate = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    out += m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, (gate * up).to(out.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@cache
def _device(index: int | None) -> tuple[int, int]:
    """Multiprocessors and bytes of shared memory a program may use; an H100's where there is no GPU."""
    if index is None:
        return 132, 232448
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 65536)


def _tile(M: int, N: int, fp32: bool, processors: int) -> tuple[int, int]:
    """The largest tile of which there are enough to keep the multiprocessors busy."""
    tiles = [(128, 128), (128, 64), (64, 64), (32, 64), (16, 64), (16, 32)][2 * fp32 :]
    for block_m, block_n in tiles:
        fits = block_m <= max(1 << (M - 1).bit_length(), 16) and block_n <= max(1 << (N - 1).bit_length(), 32)
        if fits and -(-M // block_m) * -(-N // block_n) >= 0.9 * processors:
            return block_m, block_n
    return tiles[-1]


def kernel_fn(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden] -> contiguous, of x's shape and dtype."""
    rows = x.reshape(-1, x.shape[-1])
    M, K = rows.shape
    N = w_gate.shape[0]
    hidden = torch.empty((M, N), dtype=x.dtype, device=x.device)
    processors, shared_memory = _device(x.device.index)
    fp32 = x.dtype == torch.float32
    block_m, block_n = _tile(M, N, fp32, processors)
    block_m, block_n, block_k = BLOCK_M or block_m, BLOCK_N or block_n, BLOCK_K or (16 if fp32 else 64)
    stage = (block_m + 2 * block_n) * block_k * x.element_size()
    _gate_up[(-(-M // block_m) * -(-N // block_n),)](
        rows,
        w_gate,
        w_up,
        hidden,
        M,
        N,
        K,
        *rows.stride(),
        *w_gate.stride(),
        *w_up.stride(),
        ACTIVATION=activation,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        EVEN_K=K % block_k == 0,
        num_warps=NUM_WARPS or (8 if block_m * block_n >= (64 * 64 if fp32 else 128 * 128) else 4),
        num_stages=max(min(NUM_STAGES, shared_memory // stage), 1),
    )
    return torch.mm(hidden, w_down.t()).view(x.shape)
