"""Gated MLP around the library's matrix products: activation and multiplication in one pass, in place, in C++."""

import torch
import torch.nn.functional as F

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "fused_mlp"
BACKEND = "cpp"
TUNABLES = {"CHUNK": [4096, 16384, 65536], "UNROLL": [1, 2, 4]}

CHUNK = 16384  # elements that a thread takes at a time
UNROLL = 2  # vectors in flight

SOURCE = r"""
#include <activations.hpp>

template <class T>
void activate(T* gate, const T* up, int64_t n, int code) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i += CHUNK)
        map_row<UNROLL>(gate + i, std::min<int64_t>(CHUNK, n - i), 0,
                        [=](int, vfloat g, vfloat u) { return activation(code, g) * u; }, (const T*)gate + i, up + i);
}

extern "C" int run(int dtype, void* gate, const void* up, int64_t n, int code) {
    AK_DISPATCH(dtype, activate((T*)gate, (const T*)up, n, code));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pp l i", CHUNK=CHUNK, UNROLL=UNROLL)


def kernel_fn(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, activation: str = "silu"
) -> torch.Tensor:
    """x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden] -> contiguous, shape and dtype of x."""
    # With AMX, PyTorch's bf16 product takes what lies between a row's end and the next one's start times zero: NaN, maybe.
    x, w_gate, w_up, w_down = (t.contiguous() for t in (x, w_gate, w_up, w_down))
    gate, up = F.linear(x, w_gate).contiguous(), F.linear(x, w_up).contiguous()
    code = ("silu", "gelu", "relu2", "gelu_tanh").index(activation)
    _run(DTYPE_CODE[x.dtype], gate.data_ptr(), up.data_ptr(), gate.numel(), code)
    return F.linear(gate, w_down).contiguous()
