"""Matmul with FP4 weights in CUDA C++: few rows of x are multiplied as the weights come, many after these are dequantised.

Few rows: a warp takes 16 · TILES rows of weights and a share of K. Which k a tensor core's lane holds is free, as long as
both operands agree: so a lane copies 16 bytes in a row, 32 weights, into a ring of its own in shared memory, and makes
fragments of them with shifts and masks alone; x lies in shared memory in that order. Over 32 go in passes.
Many rows, on Hopper: the weights are written out in 16 bits once, and hopper_gemm.cuh multiplies.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "matmul_fp4"
BACKEND = "cuda"
TUNABLES = {
    "TILES": [1, 2],
    "STAGES": [2, 3, 4, 6],
    "BLOCKS": [1, 2, 3, 6],
    "FEW": [32, 64, 128, 256],
    "GROUP_M": [2, 4, 8, 16],
    "EARLY": [0, 1],
}

TILES = 2  # of 16 rows of weights, that a warp takes
STAGES = 3  # steps of 128 along K of a warp's ring
BLOCKS = 1  # per processor, that are to be had by sharing K among the warps of a block
FEW = 32  # rows of x that are multiplied without dequantised weights in memory
GROUP_M = 8  # rows of (clusters of) the GEMM's tiles that are walked together, so that their operands meet in L2
EARLY = 1  # whether launches may begin while the kernel ahead ends, for which they wait before they read


@dataclass(frozen=True)
class Tile:
    """Of the GEMM: see kernels/matmul/cuda_kernel.py."""

    m: int
    n: int
    stages: int
    turns: bool
    cluster: int
    efficiency: float

    def clocks(self, M: int, N: int, K: int, processors: int) -> float:
        clusters = -(-M // (self.m * self.cluster)) * -(-N // self.n)
        wave = self.m * self.n * K / 2048 / self.efficiency
        return -(-clusters // (processors // self.cluster)) * wave + 1000 * (self.cluster > 1)


GEMM_TILES = (
    Tile(128, 256, 4, False, 2, 1.0),
    Tile(128, 128, 6, True, 2, 0.99),
    Tile(128, 128, 6, True, 1, 0.98),
    Tile(128, 64, 8, True, 1, 0.7),
)

CODES_SOURCE = r"""
#include <tensor_cores.cuh>

using T = std::conditional_t<DTYPE == 1, f16, bf16>;

__device__ float scale_of(uint32_t code) {
    if (E8M0) return __uint_as_float(code << 23);
    const float size = __uint_as_float((code & 127) << 20) * 1.329227995784915873e36f;  // E4M3: 2^120
    return code & 128 ? -size : size;
}

// Bits of a where `mask` has ones, else of b: one instruction, which the compiler does not find behind shifts.
__device__ uint32_t select(uint32_t a, uint32_t b, uint32_t mask) {
    uint32_t c;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(c) : "r"(a), "r"(b), "r"(mask));
    return c;
}

// Four pairs of numbers, {0, 4}, {1, 5}, {2, 6} and {3, 7}, of a word's eight E2M1 codes, whose bits are put where the
// format has sign, exponent and mantissa. So they are too small by PART squared, which is given back in two parts, with the
// group's scale and with the result: neither that scale nor the product leaves the format's range.
template <class Number> struct Format;
template <> struct Format<f16> {
    static constexpr float PART = 128.f;  // 2^14 in all
    __device__ static void unpack(uint32_t word, uint32_t (&pairs)[4]) {
        // In each byte's upper half of codes, then in its lower, the sign stays and the rest moves down by three.
        constexpr uint32_t SIGNS = 0x80808080, MASK = 0x8e008e00;
        const uint32_t even = select(word << 4, word << 1, SIGNS), odd = select(word, word >> 3, SIGNS);
        pairs[0] = even << 8 & MASK;
        pairs[1] = odd << 8 & MASK;
        pairs[2] = even & MASK;
        pairs[3] = odd & MASK;
    }
};
template <> struct Format<bf16> {
    static constexpr float PART = 9.223372036854775808e18f;  // 2^63; 2^126 in all
    __device__ static void unpack(uint32_t word, uint32_t (&pairs)[4]) {
        constexpr uint32_t SIGN = 0x80008000, SIZE = 0x01c001c0;
        pairs[0] = (word << 12 & SIGN) | (word << 6 & SIZE);
        pairs[1] = (word << 8 & SIGN) | (word << 2 & SIZE);
        pairs[2] = (word << 4 & SIGN) | (word >> 2 & SIZE);
        pairs[3] = (word & SIGN) | (word >> 6 & SIZE);
    }
};
"""

FEW_SOURCE = r"""
constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16 * TILES;
constexpr int BLOCK_K = 128, LANE_K = 32;  // weights of a row that a warp, and a lane, take at a time

__device__ uint32_t product(uint32_t a, uint32_t b) {
    uint32_t c;
    if constexpr (DTYPE == 1) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));  // sm_80 has no mul: + -0
    return c;
}

// 16 bytes at p, of which `count` are inside and the rest zero; aligned ones are all inside or all outside.
template <bool ALIGNED>
__device__ uint4 load_bytes(const void* p, int count) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (ALIGNED) {
        if (count > 0) v = __ldg(static_cast<const uint4*>(p));
        return v;
    }
    uint8_t bytes[16] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) bytes[i] = static_cast<const uint8_t*>(p)[i];
    memcpy(&v, bytes, 16);
    return v;
}

// The codes of the scales of a lane's first and second 16 weights, from k on, in the lower bytes.
template <bool ALIGNED>
__device__ uint32_t load_scales(const uint8_t* row, int k, int K) {
    if (k >= K) return 0;
    if (GROUP % LANE_K == 0) return __ldg(row + k / GROUP);
    if (ALIGNED && GROUP == 16) return __ldg(reinterpret_cast<const uint16_t*>(row + k / GROUP));
    return __ldg(row + k / GROUP) | (k + 16 < K ? __ldg(row + (k + 16) / GROUP) << 8 : 0);
}

struct Shared {
    uint4 x[2][8 * BLOCK_K];  // two chunks, in the order of fragments; in the end partial sums
    uint4 codes[STAGES][WARPS][2 * TILES][32];
};

// 8 · COLUMNS rows of x by a block's rows of weights, K shared by `warps_k` warps each.
template <int COLUMNS, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, COLUMNS < 4 ? 2 : 1)
    few(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int M, int N, int K, int64_t stride, int warps_k,
        float scale) {
    constexpr int CHUNK_STEPS = 8 / COLUMNS, CHUNK = CHUNK_STEPS * BLOCK_K;  // of x along K
    constexpr int X_VECTORS = 8 * BLOCK_K / THREADS;                        // of a chunk, that a thread brings
    take_over();
    extern __shared__ uint4 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_k = warp % warps_k, warps_n = WARPS / warps_k;
    const int n0 = blockIdx.y * warps_n * ROWS, m0 = blockIdx.x * 8 * COLUMNS;
    int row[2 * TILES];
#pragma unroll
    for (int r = 0; r < 2 * TILES; ++r) row[r] = min(n0 + warp / warps_k * ROWS + 8 * r + g, N - 1);  // some in vain

    uint4 x_next[X_VECTORS];
    const auto load_x = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < X_VECTORS; ++i) {
            const int at = threadIdx.x + i * THREADS, m = m0 + at / (CHUNK / 8), k = chunk * CHUNK + at % (CHUNK / 8) * 8;
            if (m < M) x_next[i] = load_bytes<ALIGNED>(x + m * stride + k, (K - k) * 2);
        }
    };
    const auto place = [](int step, int j, int column, int lane) {  // swizzled for those who write
        return ((step * 4 + j) * COLUMNS + column) * 32 + (lane ^ 2 * j);
    };
    const auto store_x = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < X_VECTORS; ++i) {
            const int at = threadIdx.x + i * THREADS, m = at / (CHUNK / 8), k = at % (CHUNK / 8);
            if (m0 + m >= M) continue;  // columns of garbage, which stay among themselves
            const uint4& v = x_next[i];
            shared.x[chunk % 2][place(k / 16, k % 4, m / 8, m % 8 * 4 + k / 4 % 4)] =
                make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                           __byte_perm(v.y, v.w, 0x7632));
        }
    };
    const auto fetch = [&](int step, int stage) {
        const int k = step * BLOCK_K + t * LANE_K;
        if (step * BLOCK_K < K)
#pragma unroll
            for (int r = 0; r < 2 * TILES; ++r) {
                uint4* to = &shared.codes[stage][warp][r][lane];
                const uint8_t* from = w + int64_t(row[r]) * (K / 2) + k / 2;
                if (ALIGNED) copy_async(to, from, k < K ? 16 : 0);
                else *to = load_bytes<false>(from, (K - k) / 2);
            }
        commit_copies();
    };
    uint32_t scales_next[2 * TILES];
    const auto fetch_scales = [&](int step) {
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r)
            scales_next[r] = load_scales<ALIGNED>(scales + int64_t(row[r]) * (K / GROUP), step * BLOCK_K + t * LANE_K, K);
    };

    float c[TILES][COLUMNS][4] = {};
    int stage = 0;
    for (int i = 0; i < STAGES - 1; ++i) fetch(warp_k + i * warps_k, i);
    fetch_scales(warp_k);
    load_x(0);
    store_x(0);
    __syncthreads();
    for (int chunk = 0; chunk * CHUNK < K; ++chunk) {
        const bool more = (chunk + 1) * CHUNK < K;
        if (more) load_x(chunk + 1);
        for (int at = warp_k; at < CHUNK_STEPS; at += warps_k) {
            const int step = chunk * CHUNK_STEPS + at;
            if (step * BLOCK_K >= K) break;
            wait_copies<STAGES - 2>();
            uint4 codes[2 * TILES];
            uint32_t scales_now[2 * TILES];
#pragma unroll
            for (int r = 0; r < 2 * TILES; ++r) {
                codes[r] = shared.codes[stage][warp][r][lane];
                scales_now[r] = scales_next[r];
            }
            fetch(step + (STAGES - 1) * warps_k, stage > 0 ? stage - 1 : STAGES - 1);
            fetch_scales(step + warps_k);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
            uint32_t factors[2 * TILES];
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // eight weights of each row: a word of codes
                uint4 b[COLUMNS];
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) b[i] = shared.x[chunk % 2][place(at, j, i, lane)];
#pragma unroll
                for (int r = 0; r < TILES; ++r) {
                    uint32_t a[2][4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const uint4& v = codes[2 * r + h];
                        if (j == 0 || (j == 2 && GROUP % LANE_K)) {
                            const float f = scale_of(scales_now[2 * r + h] >> 4 * j & 255) * Format<T>::PART;
                            factors[2 * r + h] = pack_pair<T>(f, f);
                        }
                        uint32_t pairs[4];
                        Format<T>::unpack(j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w, pairs);
#pragma unroll
                        for (int p = 0; p < 4; ++p) a[p / 2][p % 2 * 2 + h] = product(pairs[p], factors[2 * r + h]);
                    }
#pragma unroll
                    for (int i = 0; i < COLUMNS; ++i) {
                        multiply_16x8<T>(c[r][i], a[0], b[i].x, b[i].y);
                        multiply_16x8<T>(c[r][i], a[1], b[i].z, b[i].w);
                    }
                }
            }
        }
        if (more) store_x(chunk + 1);
        __syncthreads();
    }
    constexpr int COUNT = TILES * COLUMNS * 4;
    const auto sums = reinterpret_cast<float(*)[COUNT][32]>(shared.x);
    static_assert(sizeof(float[WARPS][COUNT][32]) <= sizeof(shared.x));
#pragma unroll
    for (int at = 0; at < COUNT; ++at) sums[warp][at][lane] = c[at / 4 / COLUMNS][at / 4 % COLUMNS][at % 4];
    __syncthreads();
    for (int at = warp; at < warps_n * COUNT; at += WARPS) {
        const int first = at / COUNT * warps_k, e = at % 4, i = at / 4 % COLUMNS, r = at / 4 / COLUMNS;
        float sum = 0;
        for (int part = 0; part < warps_k; ++part) sum += sums[first + part][at % COUNT][lane];
        const int n = n0 + 16 * r + g + 8 * (e / 2), m = m0 + 8 * i + 2 * t + e % 2;
        if (n < N && m < M) y[int64_t(m) * N + n] = from_float<T>(sum * scale * Format<T>::PART);
    }
}

template <int COLUMNS>
int launch(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int M, int N, int K, int64_t stride, float scale,
           cudaStream_t stream) {
    const int passes = divide_up(M, 8 * COLUMNS), wanted = BLOCKS * attribute(cudaDevAttrMultiProcessorCount);
    int warps_k = 1;
    const auto tiles = [&] { return divide_up(N, WARPS / warps_k * ROWS); };
    while (warps_k < 8 / COLUMNS && passes * tiles() < wanted) warps_k *= 2;
    const bool whole = K % LANE_K == 0 && stride % 8 == 0 && aligned(x) && aligned(w) && aligned(scales);
    const auto kernel = whole ? few<COLUMNS, true> : few<COLUMNS, false>;
    const auto allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (allowed != cudaSuccess) return allowed;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const dim3 grid(passes, tiles());
    const cudaLaunchConfig_t config = {grid, THREADS, sizeof(Shared), stream, &early, EARLY && AK_ARCH >= 900};
    return cudaLaunchKernelEx(&config, kernel, x, w, scales, y, M, N, K, stride, warps_k, scale);
}

extern "C" int run(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int M, int N, int K, int64_t stride,
                   float scale, cudaStream_t stream) {
    const auto chosen = M <= 8 ? launch<1> : M <= 16 ? launch<2> : launch<4>;
    return chosen(x, w, scales, y, M, N, K, stride, scale, stream);
}
"""

MANY_SOURCE = r"""
#include <hopper_gemm.cuh>

constexpr int THREADS = 256, WORDS = 4;  // of codes, that a thread takes

__global__ void __launch_bounds__(THREADS)
    dequantise(const uint32_t* w, const uint8_t* scales, Vector<T>* out, int64_t words, float scale) {
    let_next_start();
    const int64_t first = int64_t(blockIdx.x) * THREADS * WORDS + threadIdx.x;
    uint32_t codes[WORDS], factors[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int64_t at = first + i * THREADS;
        if (at < words) codes[i] = __ldg(w + at), factors[i] = __ldg(scales + at / (GROUP / 8));
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        using Exact = Format<f16>;
        const float factor = scale_of(factors[i]) * (Exact::PART * Exact::PART);
        uint32_t pairs[4];
        Exact::unpack(codes[i], pairs);
        float values[8];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[p]));
            values[p] = pair.x * factor * scale, values[p + 4] = pair.y * factor * scale;
        }
        if (first + i * THREADS < words) out[first + i * THREADS] = pack<T>(values);
    }
}

extern "C" int run(const T* x, const uint32_t* w, const uint8_t* scales, Vector<T>* wide, T* y, int M, int N, int K,
                   int64_t stride, float scale, cudaStream_t stream) {
    const int64_t words = int64_t(N) * (K / 8);
    dequantise<<<divide_up(words, THREADS * WORDS), THREADS, 0, stream>>>(w, scales, wide, words, scale);
    using G = hopper::Gemm<T, TILE_M, TILE_N, TILE_STAGES, TILE_TURNS, TILE_CLUSTER, true, true>;
    const int processors = attribute(cudaDevAttrMultiProcessorCount);
    return hopper::launch_gemm<G>(x, wide, nullptr, y, {M, N, K, GROUP_M}, stride, K, processors, EARLY, stream);
}
"""


@cache
def _few(**codes: int) -> CudaFunction:
    launch = {"TILES": TILES, "STAGES": STAGES, "BLOCKS": BLOCKS, "EARLY": EARLY}
    return cuda_function(CODES_SOURCE + FEW_SOURCE, "run", "pppp iii l f", **codes, **launch)


@cache
def _many(tile: Tile, **codes: int) -> CudaFunction:
    names = {f"TILE_{name.upper()}": int(value) for name, value in vars(tile).items() if name != "efficiency"}
    source = CODES_SOURCE + MANY_SOURCE
    return cuda_function(source, "run", "ppppp iii l f", **codes, **names, GROUP_M=GROUP_M, EARLY=EARLY)


@lru_cache(1024)
def _tile(M: int, N: int, K: int, stride: int, aligned: bool, device: int) -> Tile | None:
    """Of the GEMM for many rows; None where rows are few, or the GPU or the layout not such as TMA asks."""
    properties = torch.cuda.get_device_properties(device)
    if M <= FEW or properties.major != 9 or K % 8 or stride % 8 or stride < K or not aligned:
        return None
    return min(GEMM_TILES, key=lambda tile: tile.clocks(M, N, K, properties.multi_processor_count))


def kernel_fn(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [M, K], w [N, K / 2] uint8, scales [N, K / group] -> [M, N] in x's dtype."""
    x = x if x.stride(1) == 1 else x.contiguous()
    w, scales = w.contiguous(), scales.contiguous()
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    codes = {"DTYPE": DTYPE_CODE[x.dtype], "GROUP": K // scales.shape[1], "E8M0": int(scales.dtype == torch.uint8)}
    inputs = x.data_ptr(), w.data_ptr(), scales.data_ptr()
    tile = _tile(M, N, K, x.stride(0), (inputs[0] | inputs[1]) % 16 == 0, x.get_device())
    if tile is None:
        _few(**codes)(*inputs, y.data_ptr(), M, N, K, x.stride(0), scale)
    else:
        wide = torch.empty((N, K), dtype=x.dtype, device=x.device)
        _many(tile, **codes)(*inputs, wide.data_ptr(), y.data_ptr(), M, N, K, x.stride(0), scale)
    return y
