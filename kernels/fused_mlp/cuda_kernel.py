"""Gated MLP in CUDA C++: on Hopper gate and up in one wgmma GEMM whose epilogue is act(gate) * up, then another for down.

What TMA cannot read, few rows, fp32 and other GPUs take the library's three GEMMs around one kernel for act(gate) * up.
"""

from dataclasses import asdict, dataclass
from functools import cache, lru_cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "fused_mlp"
BACKEND = "cuda"
TUNABLES = {
    "GATE_TILE": [-1, 0, 1, 2, 3],
    "DOWN_TILE": [-1, 0, 1, 2, 3, 4],
    "GATE_GROUP": [2, 4, 8, 16],
    "DOWN_GROUP": [2, 4, 8, 16],
    "EARLY": [0, 1],
}

GATE_TILE = -1  # of GATE_TILES; -1: the one that should take least time
DOWN_TILE = -1  # of DOWN_TILES
GATE_GROUP = 4  # rows of (clusters of) tiles that are walked together, so that their operands meet in L2
DOWN_GROUP = 4
EARLY = 1  # whether a launch may begin while the kernel ahead ends
ACTIVATIONS = ("silu", "gelu", "relu2", "gelu_tanh")


@dataclass(frozen=True)
class Tile:
    m: int  # rows of x of a thread block
    n: int  # rows of weights, for gate and up together
    stages: int  # steps along K in flight
    turns: bool  # whether two warpgroups take turns, a tile each; else they share each
    cluster: int  # blocks that share a tile of weights
    efficiency: float  # of the tensor cores, next to the first's


GATE_TILES = (
    Tile(128, 128, 6, True, 2, 1.0),
    Tile(128, 128, 6, True, 1, 0.98),
    Tile(192, 128, 5, True, 1, 0.97),
    Tile(64, 128, 6, True, 1, 0.6),
)
DOWN_TILES = (
    Tile(128, 128, 6, True, 2, 1.0),
    Tile(128, 128, 6, True, 1, 0.98),
    Tile(192, 128, 5, True, 1, 0.97),
    Tile(128, 192, 5, True, 1, 0.97),
    Tile(64, 64, 8, True, 1, 0.4),
)
FEW_ROWS = 64  # up to which the weights' way from memory is all that counts, for which the library has better tiles

ACTIVATION_SOURCE = r"""
#include <autokernel.cuh>

struct Activation {
    __device__ static float of(float x) {
        if (ACTIVATION == 0) return __fdividef(x, 1 + fast_exp(-x));         // silu
        if (ACTIVATION == 1) return 0.5f * x * (1 + erff(x * 0.70710678f));  // gelu
        if (ACTIVATION == 2) return x <= 0 ? 0 : x * x;                      // relu2; NaN stays NaN
        return __fdividef(x, 1 + fast_exp(-1.5957691f * (x + 0.044715f * x * x * x)));  // gelu_tanh: x sigmoid(2 y)
    }
};
"""

GEMM_SOURCE = r"""
#include <hopper_gemm.cuh>

// y [M, N] = x [M, K] wᵀ; of gate and up: act(x gateᵀ) * (x upᵀ). Weights are [N, K].
extern "C" int run(const void* x, const void* w, const void* w_up, void* y, int M, int N, int K, int64_t x_row,
                   int64_t w_row, cudaStream_t stream) {
    using T = std::conditional_t<DTYPE == 1, f16, bf16>;
    using G = hopper::Gemm<T, TILE_M, TILE_N, TILE_STAGES, TILE_TURNS, TILE_CLUSTER, true, true, GATE>;
    const hopper::Problem problem = {M, N, K, GROUP};
    return hopper::launch_gemm<G>(x, w, w_up, y, problem, x_row, w_row, PROCESSORS, EARLY, stream);
}
"""

GATED_SOURCE = (
    ACTIVATION_SOURCE
    + r"""
using T = std::conditional_t<DTYPE == 0, float, std::conditional_t<DTYPE == 1, f16, bf16>>;

// gate = act(gate) * up, in place.
__global__ void __launch_bounds__(256) gated(T* gate, const T* up, int64_t vectors, int64_t count) {
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

extern "C" int run(void* gate, const void* up, int64_t count, cudaStream_t stream) {
    const int64_t vectors = count / LANES<T>;
    gated<<<divide_up(vectors, 256) + 1, 256, 0, stream>>>((T*)gate, (const T*)up, vectors, count);
    return cudaGetLastError();
}
"""
)


@cache
def _gemm(dtype: torch.dtype, activation: str, tile: Tile, processors: int) -> CudaFunction:
    """One library a tile: each takes seconds to compile. activation: "" for the product that goes down."""
    gate, group = ("Activation", GATE_GROUP) if activation else ("void", DOWN_GROUP)
    choice = {"DTYPE": DTYPE_CODE[dtype], "GATE": gate, "ACTIVATION": ACTIVATIONS.index(activation or "silu")}
    names = {f"TILE_{name.upper()}": int(value) for name, value in asdict(tile).items() if name != "efficiency"}
    launch = {"GROUP": group, "EARLY": EARLY, "PROCESSORS": processors}
    return cuda_function(ACTIVATION_SOURCE + GEMM_SOURCE, "run", "pppp iii ll", **choice, **names, **launch)


@cache
def _gated(dtype: torch.dtype, activation: str) -> CudaFunction:
    return cuda_function(GATED_SOURCE, "run", "ppl", DTYPE=DTYPE_CODE[dtype], ACTIVATION=ACTIVATIONS.index(activation))


def _fastest(tiles: tuple[Tile, ...], M: int, N: int, processors: int) -> Tile:
    """By waves of clusters, times the work of one."""

    def time(tile: Tile) -> float:
        clusters = -(-M // (tile.m * tile.cluster)) * -(-N // tile.n)
        return -(-clusters // (processors // tile.cluster)) * tile.m * tile.n / tile.efficiency

    return min(tiles, key=time)


@lru_cache(4096)
def _products(
    dtype: torch.dtype, M: int, strides: tuple, weight: tuple, activation: str, aligned: bool, device: int
) -> tuple[CudaFunction, CudaFunction] | None:
    """Up and down on Hopper, for rows that start at multiples of 16 bytes (strides of x, gate, up and down); else None."""
    hidden, dim = weight
    fits = all(inner == 1 and line > 0 and line % 8 == 0 for line, inner in (*strides, (hidden, 1)))
    properties = torch.cuda.get_device_properties(device)
    suits = fits and aligned and strides[1] == strides[2] and dtype != torch.float32 and M > FEW_ROWS
    if properties.major != 9 or not suits:
        return None
    count = properties.multi_processor_count
    up = _fastest(GATE_TILES, M, 2 * hidden, count) if GATE_TILE < 0 else GATE_TILES[GATE_TILE]
    down = _fastest(DOWN_TILES, M, dim, count) if DOWN_TILE < 0 else DOWN_TILES[DOWN_TILE]
    return _gemm(dtype, activation, up, count), _gemm(dtype, "", down, count)


def kernel_fn(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """x [..., dim], w_gate and w_up [hidden, dim], w_down [dim, hidden] -> contiguous, of x's shape and dtype."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    M, dim = rows.shape
    hidden = w_gate.shape[0]
    at_x, at_gate, at_up, at_down = rows.data_ptr(), w_gate.data_ptr(), w_up.data_ptr(), w_down.data_ptr()
    aligned = (at_x | at_gate | at_up | at_down) % 16 == 0
    strides = (rows.stride(), w_gate.stride(), w_up.stride(), w_down.stride())
    products = _products(x.dtype, M, strides, w_gate.shape, activation, aligned, x.get_device())
    if products is None:
        gate, up = torch.mm(rows, w_gate.t()), torch.mm(rows, w_up.t())
        _gated(x.dtype, activation)(gate.data_ptr(), up.data_ptr(), gate.numel())
        return torch.mm(gate, w_down.t()).view(x.shape)
    middle, y = x.new_empty(M, hidden), x.new_empty(x.shape)
    up, down = products
    up(at_x, at_gate, at_up, middle.data_ptr(), M, hidden, dim, strides[0][0], strides[1][0])
    down(middle.data_ptr(), at_down, None, y.data_ptr(), M, dim, hidden, hidden, strides[3][0])
    return y
