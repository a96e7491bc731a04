"""Matmul with FP4 weights in CUDA C++, for few rows of x: weights go from memory into the tensor cores' registers directly.

A warp takes 16 · TILES rows of weights and a share of K. Which k a tensor core's lane holds is free, as long as both
operands agree: so a lane reads 16 bytes in a row, 32 weights, and makes fragments of them with shifts and masks alone.
Many rows of x go through in passes of at most 32, which is right but slow: the Triton kernel is for them.
"""

import torch

from autokernel.build import DTYPE_CODE, cuda_function

KERNEL_TYPE = "matmul_fp4"
BACKEND = "cuda"
TUNABLES = {"TILES": [1, 2], "WARPS_N": [1, 2, 4], "WARPS_K": [2, 4, 8]}

TILES = 1  # of 16 rows of weights, that a warp takes
WARPS_N = 2  # of a block, side by side
WARPS_K = 4  # of a block, that share K

SOURCE = r"""
#include <autokernel.cuh>

constexpr int BLOCK_K = 128, LANE_K = 32;  // weights of a row that a warp, and a lane, take at a time
constexpr int THREADS = 32 * WARPS_N * WARPS_K;

// An E2M1 number whose bits are put where T has sign, exponent and mantissa is too small by PART squared, which is given
// back in two parts, with the scale and with the result: so neither the scale nor the product leaves T's range.
template <class T> struct Format;
template <> struct Format<f16> {
    static constexpr int SHIFT = 3;
    static constexpr uint32_t MASK = 0x0e000e00;
    static constexpr float PART = 128.f;  // 2^14 in all
};
template <> struct Format<bf16> {
    static constexpr int SHIFT = 6;
    static constexpr uint32_t MASK = 0x01c001c0;
    static constexpr float PART = 9.223372036854775808e18f;  // 2^63; 2^126 in all
};

template <class T>
__device__ uint32_t twice(float v) {
    const T t = from_float<T>(v);
    uint16_t bits;
    memcpy(&bits, &t, 2);
    return bits * 0x10001u;
}

template <class T>
__device__ uint32_t product(uint32_t a, uint32_t b) {
    uint32_t c;
    if constexpr (std::is_same_v<T, f16>) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));  // sm_80 has no mul: + -0
    return c;
}

// The numbers whose codes are the upper four bits of each half of `word`, scaled.
template <class T>
__device__ uint32_t numbers(uint32_t word, uint32_t scale) {
    return product<T>((word & 0x80008000u) | ((word >> Format<T>::SHIFT) & Format<T>::MASK), scale);
}

template <class T>
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, f16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// `count` bytes at p, the rest of 16 zero; whole and aligned ones in one load.
template <bool ALIGNED>
__device__ uint4 load_bytes(const void* p, int64_t count) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (ALIGNED && count >= 16) return __ldg(reinterpret_cast<const uint4*>(p));
    uint8_t bytes[16] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) bytes[i] = static_cast<const uint8_t*>(p)[i];
    memcpy(&v, bytes, 16);
    return v;
}

__device__ float scale_of(uint8_t code, bool e8m0) {
    if (e8m0) return __uint_as_float(uint32_t(code) << 23);
    const float size = __uint_as_float(uint32_t(code & 127) << 20) * 1.329227995784915873e36f;  // E4M3: 2^120
    return code & 128 ? -size : size;
}

struct Weights {
    uint4 codes;
    float first, second;  // scales of the first and the second 16
};

template <bool ALIGNED>
__device__ Weights
weights_of(const uint8_t* w, const uint8_t* scales, int64_t row, int64_t k, int64_t K, int group, bool e8m0) {
    Weights v;
    v.codes = load_bytes<ALIGNED>(w + row * (K / 2) + k / 2, (K - k) / 2);
    const uint8_t* s = scales + row * (K / group);
    v.first = k < K ? scale_of(__ldg(s + k / group), e8m0) : 0.f;
    v.second = group == LANE_K ? v.first : k + 16 < K ? scale_of(__ldg(s + (k + 16) / group), e8m0) : 0.f;
    return v;
}

template <class T, int COLUMNS, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    tiles(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int M, int N, int64_t K, int64_t stride, int group,
          bool e8m0, float scale) {
    __shared__ float sums[WARPS_K][WARPS_N * TILES * COLUMNS * 4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int n0 = (blockIdx.x * WARPS_N + warp_n) * 16 * TILES, m0 = blockIdx.y * 8 * COLUMNS;
    float c[TILES][COLUMNS][4] = {};
    Weights now[TILES][2];
    const auto fetch = [&](int64_t k) {
#pragma unroll
        for (int r = 0; r < TILES; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int64_t row = min(n0 + 16 * r + 8 * h + g, N - 1);  // those beyond are computed in vain
                now[r][h] = weights_of<ALIGNED>(w, scales, row, k, K, group, e8m0);
            }
    };
    const int64_t step = WARPS_K * BLOCK_K;
    int64_t k = warp_k * BLOCK_K + t * LANE_K;
    if (k - t * LANE_K < K) fetch(k);
    for (; k - t * LANE_K < K; k += step) {
        Weights had[TILES][2];
#pragma unroll
        for (int r = 0; r < TILES; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) had[r][h] = now[r][h];
        if (k - t * LANE_K + step < K) fetch(k + step);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // eight weights of each row: a word of codes
            uint32_t b[COLUMNS][4];
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                const int m = m0 + 8 * i + g;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (m < M) v = load_bytes<ALIGNED>(x + m * stride + k + 8 * j, (K - k - 8 * j) * 2);
                b[i][0] = __byte_perm(v.x, v.z, 0x5410);  // elements 0 and 4
                b[i][1] = __byte_perm(v.x, v.z, 0x7632);
                b[i][2] = __byte_perm(v.y, v.w, 0x5410);
                b[i][3] = __byte_perm(v.y, v.w, 0x7632);
            }
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
                uint32_t a[2][4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint4& codes = had[r][h].codes;
                    const uint32_t word = j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w;
                    const uint32_t s = twice<T>((j < 2 ? had[r][h].first : had[r][h].second) * Format<T>::PART);
                    a[0][h] = numbers<T>(word << 12, s);  // codes 0 and 4
                    a[0][2 + h] = numbers<T>(word << 8, s);
                    a[1][h] = numbers<T>(word << 4, s);
                    a[1][2 + h] = numbers<T>(word, s);
                }
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
                    multiply<T>(c[r][i], a[0], b[i][0], b[i][1]);
                    multiply<T>(c[r][i], a[1], b[i][2], b[i][3]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < TILES; ++r)
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[warp_k][((warp_n * TILES + r) * COLUMNS + i) * 4 + e][lane] = c[r][i][e];
    __syncthreads();
    for (int at = warp; at < WARPS_N * TILES * COLUMNS * 4; at += WARPS_N * WARPS_K) {
        float sum = 0;
        for (int part = 0; part < WARPS_K; ++part) sum += sums[part][at][lane];
        const int e = at % 4, i = at / 4 % COLUMNS, r = at / 4 / COLUMNS;
        const int n = blockIdx.x * WARPS_N * 16 * TILES + 16 * r + g + 8 * (e / 2), m = m0 + 8 * i + 2 * t + e % 2;
        if (n < N && m < M) y[int64_t(m) * N + n] = from_float<T>(sum * scale * Format<T>::PART);
    }
}

template <class T, int COLUMNS>
void launch(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int M, int N, int64_t K, int64_t stride, int group,
            bool e8m0, float scale, cudaStream_t stream) {
    const dim3 grid(divide_up(N, WARPS_N * 16 * TILES), divide_up(M, 8 * COLUMNS));
    const bool whole = K % LANE_K == 0 && stride % 8 == 0 && aligned(x) && aligned(w);
    const auto kernel = whole ? tiles<T, COLUMNS, true> : tiles<T, COLUMNS, false>;
    kernel<<<grid, THREADS, 0, stream>>>(x, w, scales, y, M, N, K, stride, group, e8m0, scale);
}

template <class T>
void matmul(const T* x, const uint8_t* w, const uint8_t* scales, T* y, int M, int N, int64_t K, int64_t stride, int group,
            bool e8m0, float scale, cudaStream_t stream) {
    const auto chosen = M <= 8 ? launch<T, 1> : M <= 16 ? launch<T, 2> : launch<T, 4>;
    chosen(x, w, scales, y, M, N, K, stride, group, e8m0, scale, stream);
}

extern "C" int run(int dtype, const void* x, const void* w, const void* scales, void* y, int M, int N, int64_t K,
                   int64_t stride, int group, int e8m0, float scale, cudaStream_t stream) {
    const auto codes = (const uint8_t*)w, factors = (const uint8_t*)scales;
    if (dtype == 1) matmul((const f16*)x, codes, factors, (f16*)y, M, N, K, stride, group, e8m0, scale, stream);
    else matmul((const bf16*)x, codes, factors, (bf16*)y, M, N, K, stride, group, e8m0, scale, stream);
    return cudaGetLastError();
}
"""

_run = cuda_function(SOURCE, "run", "i pppp ii l l ii f", TILES=TILES, WARPS_N=WARPS_N, WARPS_K=WARPS_K)


def kernel_fn(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [M, K], w [N, K / 2] uint8, scales [N, K / group] -> [M, N] in x's dtype."""
    x = x if x.stride(1) == 1 else x.contiguous()
    w, scales = w.contiguous(), scales.contiguous()
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    pointers = (x.data_ptr(), w.data_ptr(), scales.data_ptr(), y.data_ptr())
    e8m0 = scales.dtype == torch.uint8
    _run(DTYPE_CODE[x.dtype], *pointers, M, N, K, x.stride(0), K // scales.shape[1], e8m0, scale)
    return y
