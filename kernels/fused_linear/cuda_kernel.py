"""A linear layer and its activation in CUDA C++: on Hopper one wgmma GEMM whose epilogue is act(sum + bias).

What TMA cannot read, few rows, fp32 and other GPUs take the library's GEMM and one kernel for the activation.
"""

import math
from dataclasses import asdict, dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "fused_linear"
BACKEND = "cuda"
TUNABLES = {
    "TILE": [-1, 0, 1, 2, 3, 4, 5],
    "GROUP": [2, 4, 8, 16],
    "EARLY": [0, 1],
}

TILE = -1  # of TILES; -1: the one that should take least time
GROUP = 8  # rows of (clusters of) tiles that are walked together, so that their operands meet in L2
EARLY = 1  # whether a launch may begin while the kernel ahead ends
ACTIVATIONS = ("silu", "gelu", "relu2", "gelu_tanh", "relu", "none")


@dataclass(frozen=True)
class Tile:
    m: int  # rows of x of a thread block
    n: int  # rows of the weight
    stages: int  # steps along K in flight
    turns: bool  # whether two warpgroups take turns, a tile each; else they share each
    cluster: int  # blocks that share a tile of the weight
    efficiency: float  # of the tensor cores, next to the best

    def period(self, M: int, N: int) -> int:
        """Of how many rows of y, [M, N], a tile has one, for all to start as far from a multiple of 16 bytes (see
        hopper_gemm.cuh); 0 where such tiles would be too large for M or N."""
        period, rows = 8 // math.gcd(N, 8), self.m * self.cluster
        fits = period == 1 or (self.n <= N and 8 * period * rows * -(-M // (period * rows)) <= 9 * M)
        return period if fits else 0


# Where warpgroups share a tile, the tensor cores wait while it is finished: on an H100 1.02 to 1.24 times as long as where
# they take turns, over ten shapes and four activations. The others are fitted to h100-linear-tiles.txt.
TILES = (
    Tile(128, 256, 4, False, 2, 0.88),
    Tile(128, 192, 5, True, 1, 0.98),
    Tile(192, 128, 5, True, 1, 0.97),
    Tile(128, 128, 6, True, 1, 0.97),
    Tile(128, 128, 6, True, 2, 0.96),
    Tile(64, 64, 8, True, 1, 0.55),
)
LONG = 1024  # terms of a sum from which on they gain by sharing a tile where there is no activation
SHARED = 0.99
FEW_ROWS = 64  # up to which the weight's way from memory is all that counts, for which the library has better tiles

ACTIVATION_SOURCE = r"""
#include <autokernel.cuh>

// x erfc(-x / sqrt 2) / 2 by Abramowitz and Stegun 7.1.26: off by 1.5e-7 |x|, which 16 bit does not show; erff costs more
// than the product where K is small.
__device__ inline float gelu_16_bit(float x) {
    const float z = fabsf(x) * 0.70710678f, t = __fdividef(1, 1 + 0.3275911f * z);
    float p = 1.061405429f * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float half = 0.5f * p * t * fast_exp(-z * z);
    return x * (x < 0 ? half : 1 - half);
}

struct Activation {
    __device__ static float of(float x) {
        if (ACTIVATION == 0) return __fdividef(x, 1 + fast_exp(-x));         // silu
        if (ACTIVATION == 1) return DTYPE ? gelu_16_bit(x) : 0.5f * x * (1 + erff(x * 0.70710678f));
        if (ACTIVATION == 2) return x <= 0 ? 0 : x * x;                      // relu2; NaN stays NaN
        if (ACTIVATION == 4) return x <= 0 ? 0 : x;                           // relu
        if (ACTIVATION == 5) return x;
        return __fdividef(x, 1 + fast_exp(-1.5957691f * (x + 0.044715f * x * x * x)));  // gelu_tanh: x sigmoid(2 y)
    }
};
"""

GEMM_SOURCE = r"""
#include <hopper_gemm.cuh>

// y [M, N] = act(x [M, K] weightᵀ + bias), weight [N, K].
extern "C" int run(const void* x, const void* weight, const void* bias, void* y, int M, int N, int K, int64_t x_row,
                   int64_t weight_row, cudaStream_t stream) {
    using T = std::conditional_t<DTYPE == 1, f16, bf16>;
    using G = hopper::Gemm<T, TILE_M, TILE_N, TILE_STAGES, TILE_TURNS, TILE_CLUSTER, true, true, void, 1, Activation,
                           TILE_PERIOD>;
    const hopper::Problem problem = {M, N, K, GROUP, bias};
    return hopper::launch_gemm<G>(x, weight, nullptr, y, problem, x_row, weight_row, PROCESSORS, EARLY, stream);
}
"""

ACTIVATE_SOURCE = (
    ACTIVATION_SOURCE
    + r"""
using T = std::conditional_t<DTYPE == 0, float, std::conditional_t<DTYPE == 1, f16, bf16>>;

// y = act(y)
__global__ void __launch_bounds__(256) activate(T* y, int64_t vectors, int64_t count) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < vectors) {
        auto* at = reinterpret_cast<Vector<T>*>(y) + i;
        float v[LANES<T>];
        unpack(*at, v);
        for (int e = 0; e < LANES<T>; ++e) v[e] = Activation::of(v[e]);
        *at = pack<T>(v);
    }
    const int64_t tail = vectors * LANES<T> + i;
    if (tail < count && i < LANES<T>) y[tail] = from_float<T>(Activation::of(to_float(y[tail])));
}

extern "C" int run(void* y, int64_t count, cudaStream_t stream) {
    const int64_t vectors = count / LANES<T>;
    activate<<<divide_up(vectors, 256) + 1, 256, 0, stream>>>((T*)y, vectors, count);
    return cudaGetLastError();
}
"""
)


@cache
def _gemm(dtype: torch.dtype, activation: str, tile: Tile, processors: int, period: int = 1) -> CudaFunction:
    """One library a tile: each takes seconds to compile."""
    choice = {"DTYPE": DTYPE_CODE[dtype], "ACTIVATION": ACTIVATIONS.index(activation)}
    names = {f"TILE_{name.upper()}": int(value) for name, value in asdict(tile).items() if name != "efficiency"}
    launch = {"GROUP": GROUP, "EARLY": EARLY, "PROCESSORS": processors, "TILE_PERIOD": period}
    return cuda_function(ACTIVATION_SOURCE + GEMM_SOURCE, "run", "pppp iii ll", **choice, **names, **launch)


@cache
def _activate(dtype: torch.dtype, activation: str) -> CudaFunction:
    return cuda_function(ACTIVATE_SOURCE, "run", "pl", DTYPE=DTYPE_CODE[dtype], ACTIVATION=ACTIVATIONS.index(activation))


def _fastest(M: int, N: int, K: int, activation: str, processors: int) -> Tile | None:
    """By waves of clusters, times the work of one; None where no tile's rows of y can be written."""

    def time(tile: Tile) -> float:
        period, rows = tile.period(M, N), tile.m * tile.cluster
        clusters = period * -(-M // (period * rows)) * -(-N // tile.n)
        efficiency = SHARED if activation == "none" and K >= LONG and not tile.turns else tile.efficiency
        return -(-clusters // (processors // tile.cluster)) * tile.m * tile.n / efficiency

    tiles = [tile for tile in (TILES if TILE < 0 else TILES[TILE : TILE + 1]) if tile.period(M, N)]
    return min(tiles, key=time, default=None)


@lru_cache(4096)
def _product(
    dtype: torch.dtype, M: int, N: int, K: int, strides: tuple, vector: tuple, activation: str, aligned: bool, device: int
) -> CudaFunction | None:
    """On Hopper, for rows of x and the weight that start at multiples of 16 bytes and a bias without gaps; else None."""
    lines = all(inner == 1 and line > 0 and line % 8 == 0 for line, inner in strides)
    fits = lines and vector in ((), (1,)) and aligned
    properties = torch.cuda.get_device_properties(device)
    if properties.major != 9 or not fits or dtype == torch.float32 or M <= FEW_ROWS:
        return None
    processors = properties.multi_processor_count
    tile = _fastest(M, N, K, activation, processors)
    return tile and _gemm(dtype, activation, tile, processors, tile.period(M, N))


def kernel_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "gelu"
) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] -> contiguous [..., N] in x's dtype."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    (M, K), N = rows.shape, weight.shape[0]
    at_x, at_weight, at_bias = rows.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    strides, vector = (rows.stride(), weight.stride()), () if bias is None else bias.stride()
    aligned = (at_x | at_weight) % 16 == 0 and at_bias % 4 == 0
    product = _product(x.dtype, M, N, K, strides, vector, activation, aligned, x.get_device())
    if product is None:
        y = F.linear(rows, weight, bias)
        if activation != "none":
            _activate(x.dtype, activation)(y.data_ptr(), y.numel())
    else:
        y = x.new_empty(M, N)
        product(at_x, at_weight, at_bias or None, y.data_ptr(), M, N, K, strides[0][0], strides[1][0])
    return y.view(*x.shape[:-1], N)
