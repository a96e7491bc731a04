"""Gated MLP in CUDA C++: on Hopper gate and up in one wgmma GEMM whose epilogue is act(gate) * up, then another for down.

What TMA cannot read, fp32 and other GPUs take the library's three GEMMs around one kernel for act(gate) * up.
"""

from functools import cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "fused_mlp"
BACKEND = "cuda"
TUNABLES = {"GATE_TILE": [-1, 0, 1, 2], "DOWN_TILE": [-1, 0, 1, 2, 3], "GATE_GROUP": [2, 4, 8, 16], "DOWN_GROUP": [2, 4, 8]}

GATE_TILE = -1  # of those in `gate_up`; -1: the one that should take least time
DOWN_TILE = -1  # of those in `down`
GATE_GROUP = 8  # rows of (clusters of) tiles that are walked together, so that their operands meet in L2
DOWN_GROUP = 4

SOURCE = r"""
#include <autokernel.cuh>
#if AK_ARCH == 900 && DTYPE != 0
#include <hopper_gemm.cuh>
#endif

struct Activation {
    __device__ static float of(float x) {
        if (ACTIVATION == 0) return x / (1 + __expf(-x));                  // silu
        if (ACTIVATION == 1) return 0.5f * x * (1 + erff(x * 0.70710678f));  // gelu
        return x <= 0 ? 0 : x * x;                                         // relu2; NaN stays NaN
    }
};

using T = std::conditional_t<DTYPE == 0, float, std::conditional_t<DTYPE == 1, f16, bf16>>;

int multiprocessors() {
    int device, count;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

#if AK_ARCH == 900 && DTYPE != 0
template <int BM, int BN, int STAGES, int CLUSTER, class Gate = void, int SPLITS = 1>
using Product = hopper::Gemm<T, BM, BN, STAGES, CLUSTER, true, true, Gate, SPLITS>;

// hidden [M, N] = act(x [M, K] gateᵀ) * (x upᵀ), for gate and up [N, K].
extern "C" int gate_up(const void* x, const void* gate, const void* up, void* hidden, int M, int N, int K, int64_t x_row,
                       int64_t gate_row, cudaStream_t stream) {
    const int processors = multiprocessors();
    const auto with = [&](auto gemm) {
        const hopper::Problem problem = {M, N, K, GATE_GROUP, true};
        return hopper::launch_gemm<decltype(gemm)>(x, gate, up, hidden, problem, x_row, gate_row, processors, stream);
    };
    const hopper::Tiling tilings[] = {{256, 128, 2, 1.0}, {128, 64, 1, 0.8}, {64, 64, 1, 0.5}};
    switch (GATE_TILE >= 0 ? GATE_TILE : hopper::fastest(tilings, 3, M, N, processors)) {
        case 0: return with(Product<128, 256, 4, 2, Activation>{});
        case 1: return with(Product<128, 128, 5, 1, Activation>{});
        default: return with(Product<64, 128, 6, 1, Activation>{});
    }
}

// y [M, N] = hidden [M, K] weightᵀ, for weight [N, K].
extern "C" int down(const void* hidden, const void* weight, void* y, int M, int N, int K, int64_t weight_row,
                    cudaStream_t stream) {
    const int processors = multiprocessors();
    const auto with = [&](auto gemm) {
        const hopper::Problem problem = {M, N, K, DOWN_GROUP, true};
        return hopper::launch_gemm<decltype(gemm)>(hidden, weight, nullptr, y, problem, K, weight_row, processors, stream);
    };
    const hopper::Tiling tilings[] = {{256, 256, 2, 1.0}, {128, 128, 1, 0.8}, {64, 64, 1, 0.4}, {256, 256, 8, 0.85}};
    switch (DOWN_TILE >= 0 ? DOWN_TILE : hopper::fastest(tilings, K >= 2048 ? 4 : 3, M, N, processors)) {
        case 0: return with(Product<128, 256, 4, 2>{});
        case 1: return with(Product<128, 128, 5, 1>{});
        case 2: return with(Product<64, 64, 8, 1>{});
        default: return with(Product<128, 256, 4, 2, void, 4>{});
    }
}
#endif

// gate = act(gate) * up, in place.
__global__ void __launch_bounds__(256) activate(T* gate, const T* up, int64_t vectors, int64_t count) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < vectors) {
        auto* at = reinterpret_cast<Vector<T>*>(gate) + i;
        float g[LANES<T>], u[LANES<T>];
        unpack(*at, g);
        unpack(reinterpret_cast<const Vector<T>*>(up)[i], u);
        for (int e = 0; e < LANES<T>; ++e) g[e] = Activation::of(g[e]) * u[e];
        *at = pack<T>(g);
    }
    const int64_t tail = vectors * LANES<T> + i;
    if (tail < count && i < LANES<T>) gate[tail] = from_float<T>(Activation::of(to_float(gate[tail])) * to_float(up[tail]));
}

extern "C" int gated(void* gate, const void* up, int64_t count, cudaStream_t stream) {
    const int64_t vectors = count / LANES<T>;
    activate<<<divide_up(vectors, 256) + 1, 256, 0, stream>>>((T*)gate, (const T*)up, vectors, count);
    return cudaGetLastError();
}
"""

_tunables = {"GATE_TILE": GATE_TILE, "DOWN_TILE": DOWN_TILE, "GATE_GROUP": GATE_GROUP, "DOWN_GROUP": DOWN_GROUP}
_SIGNATURES = {"gate_up": "pppp iii ll", "down": "ppp iii l", "gated": "ppl"}


@cache
def _compiled(function: str, dtype: torch.dtype, activation: str) -> CudaFunction:
    choice = {"DTYPE": DTYPE_CODE[dtype], "ACTIVATION": ("silu", "gelu", "relu2").index(activation)}
    return cuda_function(SOURCE, function, _SIGNATURES[function], **choice, **_tunables)


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _fits_tma(t: torch.Tensor) -> bool:
    """Rows of 16-bit elements, each starting at a multiple of 16 bytes."""
    return (
        t.element_size() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) > 0 and t.data_ptr() % 16 == 0
    )


def kernel_fn(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden] -> contiguous, of x's shape and dtype."""
    rows = x.reshape(-1, x.shape[-1])
    M, dim = rows.shape
    hidden = w_gate.shape[0]
    by_tma = all(map(_fits_tma, (rows, w_gate, w_up, w_down))) and hidden % 8 == 0 and w_gate.stride() == w_up.stride()
    if not (by_tma and _is_hopper(x.device.index)):
        gate, up = torch.mm(rows, w_gate.t()), torch.mm(rows, w_up.t())
        _compiled("gated", x.dtype, activation)(gate.data_ptr(), up.data_ptr(), gate.numel())
        return torch.mm(gate, w_down.t()).view(x.shape)
    middle = torch.empty((M, hidden), dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weights = (w_gate.data_ptr(), w_up.data_ptr())
    gate_up, down = _compiled("gate_up", x.dtype, activation), _compiled("down", x.dtype, activation)
    gate_up(rows.data_ptr(), *weights, middle.data_ptr(), M, hidden, dim, rows.stride(0), w_gate.stride(0))
    down(middle.data_ptr(), w_down.data_ptr(), y.data_ptr(), M, dim, hidden, w_down.stride(0))
    return y
