"""Attention in C++: K and V packed once per KV head; then a few query rows at a time against blocks of keys.

The softmax is online (Dao et al., "FlashAttention", 2022): a block's scores stay in L1, and the sums so far are scaled down
when a row's maximum rises.
"""

import ctypes

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "flash_attention"
BACKEND = "cpp"
TUNABLES = {"TILE_ROWS": [0, 4, 6, 8, 10, 12, 14], "BLOCK_KEYS": [64, 128, 256, 512, 1024]}

TILE_ROWS = 0  # query rows held in registers; 0: as many as this machine's registers hold
BLOCK_KEYS = 512  # keys between two looks at a row's maximum

SOURCE = r"""
#include <panels.hpp>

struct Mask {
    enum Kind { NONE, BOOL, FLOAT } kind;
    const char* data;
    int64_t batch, head, query;  // strides in elements; keys are next to each other
};

// A row's maximum so far is never -inf, so that a score of -inf weighs exp(-inf - LOWEST) = 0, and not exp(-inf + inf).
constexpr float LOWEST = std::numeric_limits<float>::lowest();

struct Shape {
    int64_t B, H, H_kv, S_q, S_k, D;
    bool causal, safe;
    float scale;
};

// Scores of one row, to which the scale and the mask are still due -> their maximum. Keys from `seen` on become -inf.
inline float finish_scores(float* s, int64_t keys, int64_t seen, float scale, const Mask& mask, const char* bias) {
    if (mask.kind == Mask::BOOL)
        for (int64_t j = 0; j < seen; ++j) s[j] = bias[j] ? s[j] * scale : -INFINITY;
    if (mask.kind == Mask::FLOAT)
        for (int64_t j = 0; j < seen; ++j) s[j] = s[j] * scale + ((const float*)bias)[j];
    const float factor = mask.kind == Mask::NONE ? scale : 1.f;
    vfloat best = splat(-INFINITY);
    int64_t j = 0;
    for (; j + LANES <= seen; j += LANES) {
        const vfloat v = load(s + j) * factor;
        store(s + j, v);
        best = larger(v, best);
    }
    float top = max_of(best);
    for (; j < seen; ++j) {
        s[j] *= factor;
        top = s[j] > top ? s[j] : top;
    }
    for (; j < keys; ++j) s[j] = -INFINITY;
    return top;
}

// What a panel of query rows has summed up so far.
struct Sums {
    float top[MR], weight[MR];
    float* out;  // [columns, MR, NR]
};

// One block of `keys` (a multiple of NR) from key k0 on, for query rows from q0 on.
void add_block(const Shape& z, const Mask& mask, const char* bias, const float* q, const float* packed_k,
               const float* packed_v, int64_t q0, int64_t rows, int64_t k0, int64_t keys, Sums& sums) {
    alignas(64) float s[MR][BLOCK_KEYS];
    for (int64_t j = 0; j < keys; j += NR) {
        Tile scores = {};
        multiply<1, MR>(q, packed_k + (k0 + j) * z.D, z.D, scores);
#pragma GCC unroll 16
        for (int64_t r = 0; r < MR; ++r) {
            store(&s[r][j], scores[r][0]);
            store(&s[r][j + LANES], scores[r][1]);
        }
    }
    float fade[MR] = {};
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t limit = z.causal ? std::min(z.S_k, q0 + r + 1) : z.S_k;
        const int64_t seen = std::max<int64_t>(0, std::min(keys, limit - k0));
        const char* row_bias = bias + (r * mask.query + k0) * (mask.kind == Mask::FLOAT ? 4 : 1);
        const float top = std::max(sums.top[r], finish_scores(s[r], keys, seen, z.scale, mask, row_bias));
        vfloat weight = splat(0);
        for (int64_t j = 0; j < keys; j += LANES) {
            const vfloat p = vexp(load(&s[r][j]) - top);
            weight += p;
            store(&s[r][j], p);
        }
        fade[r] = vexp(splat(sums.top[r] - top))[0];
        sums.weight[r] = sums.weight[r] * fade[r] + sum_of(weight);
        sums.top[r] = top;
    }
    const int64_t present = std::min(keys, z.S_k - k0), padded = blocks(z.S_k, NR) * NR;
    for (int64_t n = 0; n < z.D; n += NR) {
        Tile out;
        float* kept = sums.out + n * MR;
#pragma GCC unroll 16
        for (int64_t r = 0; r < MR; ++r) {
            out[r][0] = load(kept + r * NR) * fade[r];
            out[r][1] = load(kept + r * NR + LANES) * fade[r];
        }
        multiply<BLOCK_KEYS, 1>(s[0], packed_v + n * padded + k0 * NR, present, out);
        std::memcpy(kept, out, sizeof out);
    }
}

template <class T>
void attention(const T* Q, const T* K, const T* V, T* y, const Shape& z, const Mask& mask, const int64_t* stride_q,
               const int64_t* stride_k, const int64_t* stride_v) {
    const int64_t padded = blocks(z.S_k, NR) * NR, width = blocks(z.D, NR) * NR, heads = z.B * z.H_kv;
    const Buffer packed_k = buffer(heads * padded * z.D), packed_v = buffer(heads * padded * width);
    const int64_t panels = blocks(z.S_q, MR);
#pragma omp parallel
    {
#pragma omp for collapse(2)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t j = 0; j < padded; j += NR) {
                const T* k = K + h / z.H_kv * stride_k[0] + h % z.H_kv * stride_k[1] + j * stride_k[2];
                const T* v = V + h / z.H_kv * stride_v[0] + h % z.H_kv * stride_v[1] + j * stride_v[2];
                const int64_t keys = std::min(NR, z.S_k - j);
                pack<NR>(k, stride_k[2], stride_k[3], keys, z.D, packed_k.get() + (h * padded + j) * z.D);
                for (int64_t n = 0; n < z.D; n += NR)
                    pack<NR>(v + n * stride_v[3], stride_v[3], stride_v[2], std::min(NR, z.D - n), keys,
                             packed_v.get() + h * padded * width + n * padded + j * NR);
            }
        const Buffer scratch = buffer(MR * (z.D + width));
        float* q = scratch.get();
        Sums sums;
        sums.out = q + MR * z.D;
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t bh = 0; bh < z.B * z.H; ++bh)
            for (int64_t panel = 0; panel < panels; ++panel) {
                const int64_t b = bh / z.H, h = bh % z.H, kv = b * z.H_kv + h / (z.H / z.H_kv);
                const int64_t q0 = (panels - 1 - panel) * MR, rows = std::min(MR, z.S_q - q0);  // the longest rows first
                pack<MR>(Q + b * stride_q[0] + h * stride_q[1] + q0 * stride_q[2], stride_q[2], stride_q[3], rows, z.D, q);
                const int64_t first = b * mask.batch + h * mask.head + q0 * mask.query;
                const char* bias = mask.data + first * (mask.kind == Mask::FLOAT ? 4 : 1);
                std::fill_n(sums.top, MR, LOWEST);
                std::fill_n(sums.weight, MR, 0.f);
                std::fill_n(sums.out, MR * width, 0.f);
                const float *k = packed_k.get() + kv * padded * z.D, *v = packed_v.get() + kv * padded * width;
                const int64_t keys = z.causal ? std::min(z.S_k, q0 + rows) : z.S_k;
                for (int64_t k0 = 0; k0 < keys; k0 += BLOCK_KEYS) {
                    const int64_t count = std::min<int64_t>(BLOCK_KEYS, blocks(keys - k0, NR) * NR);
                    add_block(z, mask, bias, q, k, v, q0, rows, k0, count, sums);
                }
                for (int64_t r = 0; r < rows; ++r) {
                    const bool no_keys = z.safe && sums.weight[r] == 0;
                    const vfloat scale = splat(no_keys ? 1.f : 1 / sums.weight[r]);
                    T* row = y + ((b * z.S_q + q0 + r) * z.H + h) * z.D;
                    for (int64_t n = 0; n < z.D; n += NR)
                        map_row<2>(row + n, std::min(NR, z.D - n), 0, [&](int, vfloat v) { return v * scale; },
                                   (const float*)sums.out + n * MR + r * NR);
                }
            }
    }
}

extern "C" int run(int dtype, const void* Q, const void* K, const void* V, void* y, const int64_t* strides, int64_t B,
                   int64_t H, int64_t H_kv, int64_t S_q, int64_t S_k, int64_t D, int causal, int safe, float scale,
                   int mask_kind, const char* mask_data, int64_t mask_batch, int64_t mask_head, int64_t mask_query) {
    const Shape shape{B, H, H_kv, S_q, S_k, D, bool(causal), bool(safe), scale};
    const Mask mask{Mask::Kind(mask_kind), mask_data, mask_batch, mask_head, mask_query};
    AK_DISPATCH(dtype, attention((const T*)Q, (const T*)K, (const T*)V, (T*)y, shape, mask, strides, strides + 4,
                                 strides + 8));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pppp p llllll ii f i p lll", TILE_ROWS=TILE_ROWS, BLOCK_KEYS=BLOCK_KEYS)


def kernel_fn(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    causal: bool = True,
    sm_scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    safe_softmax: bool = True,
) -> torch.Tensor:
    """Q [batch, heads, seq_q, head_dim], K and V [batch, kv_heads, seq_k, head_dim] -> [batch, seq_q, heads, head_dim] in
    memory, shape and dtype of Q."""
    (B, H, S_q, D), (H_kv, S_k) = Q.shape, K.shape[1:3]
    y = Q.new_empty(B, S_q, H, D)
    scale = D**-0.5 if sm_scale is None else sm_scale
    mask = 0, 0, 0, 0, 0
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        attn_mask = (attn_mask if is_bool else attn_mask.float()).expand(B, H, S_q, S_k)
        attn_mask = attn_mask if attn_mask.stride(3) == 1 else attn_mask.contiguous()
        mask = 1 if is_bool else 2, attn_mask.data_ptr(), *attn_mask.stride()[:3]
    strides = (ctypes.c_int64 * 12)(*Q.stride(), *K.stride(), *V.stride())
    pointers = Q.data_ptr(), K.data_ptr(), V.data_ptr(), y.data_ptr(), ctypes.addressof(strides)
    _run(DTYPE_CODE[Q.dtype], *pointers, B, H, H_kv, S_q, S_k, D, causal, safe_softmax, scale, *mask)
    return y.transpose(1, 2)
