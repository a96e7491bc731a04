"""Gated MLP: the library's three GEMMs around one Triton kernel for act(gate) * up, where eager takes two or more.

The GEMMs are nearly all of the time and the library's are the faster ones on most chips; what is to be gained is the
traffic between them. `triton_gateup.py` takes the other road, gate and up in one Triton GEMM.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"
TUNABLES = {"BLOCK": [1024, 2048, 4096, 8192], "NUM_WARPS": [2, 4, 8]}

BLOCK = 2048  # elements of a program
NUM_WARPS = 4


@triton.jit
def _gate(gate, up, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """gate = act(gate) * up, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    u = tl.load(up + at, at < count, 0.0).to(tl.float32)
    if ACTIVATION == "silu":
        g = g / (1 + tl.exp(-g))
    elif ACTIVATION == "gelu":
        g = 0.5 * g * (1 + tl.erf(g * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        g = tl.where(g <= 0, 0.0, g * g)
    else:  # gelu_tanh: 0.5 (1 + tanh(y)) is sigmoid(2 y)
        g = g / (1 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    tl.store(gate + at, (g * u).to(gate.dtype.element_ty), at < count)


def kernel_fn(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden] -> contiguous, of x's shape and dtype."""
    rows = x.reshape(-1, x.shape[-1])
    gate, up = torch.mm(rows, w_gate.t()), torch.mm(rows, w_up.t())
    _gate[(-(-gate.numel() // BLOCK),)](gate, up, gate.numel(), activation, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return torch.mm(gate, w_down.t()).view(x.shape)
