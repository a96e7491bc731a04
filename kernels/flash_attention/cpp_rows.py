"""Attention in C++, a query row at a time against keys where they lie: nothing is packed. Pays for few queries."""

import ctypes

import torch

from autokernel.build import DTYPE_CODE, cpp_function

KERNEL_TYPE = "flash_attention"
BACKEND = "cpp"
TUNABLES = {"KEYS_AT_ONCE": [1, 2, 4, 8], "CHUNK_ROWS": [1, 4, 16]}

KEYS_AT_ONCE = 4  # keys whose scores are summed side by side
CHUNK_ROWS = 4  # query rows that a thread takes at a time

SOURCE = r"""
#include <autokernel.hpp>
#include <vector>

struct Mask {
    enum Kind { NONE, BOOL, FLOAT } kind;
    const char* data;
    int64_t batch, head, query;  // strides in elements; keys are next to each other
};

// s[0 .. Keys) = q . k, for keys `stride` apart.
template <int Keys, class T>
inline void dot(const float* q, const T* k, int64_t stride, int64_t D, float* s) {
    vfloat sum[Keys] = {};
    int64_t d = 0;
    for (; d + AK_LANES <= D; d += AK_LANES)
        for (int i = 0; i < Keys; ++i) sum[i] += load(q + d) * load(k + i * stride + d);
    for (int i = 0; i < Keys; ++i) {
        s[i] = sum_of(sum[i]);
        for (int64_t e = d; e < D; ++e) s[i] += q[e] * float(k[i * stride + e]);
    }
}

// out = softmax(s + mask) V, for the scores s of one row. At most `keys` of them are seen.
template <class T>
inline void weigh(float* s, int64_t keys, bool safe, float scale, Mask::Kind kind, const char* bias, const T* v,
                  int64_t stride, float* out, T* y, int64_t D) {
    float top = std::numeric_limits<float>::lowest();  // not -inf: a score of -inf weighs exp(-inf - top) = 0
    for (int64_t j = 0; j < keys; ++j) {
        const float score = s[j] * scale + (kind == Mask::FLOAT ? ((const float*)bias)[j] : 0.f);
        s[j] = kind == Mask::BOOL && !bias[j] ? -INFINITY : score;
        top = s[j] > top ? s[j] : top;
    }
    vfloat weight = splat(0);
    auto add_exp = [&](int, vfloat v) {
        const vfloat p = vexp(v - top);
        weight += p;
        return p;
    };
    map_row<1>(s, keys, -INFINITY, add_exp, (const float*)s);
    std::fill_n(out, D, 0.f);
    for (int64_t j = 0; j < keys; ++j, v += stride)
        map_row<1>(out, D, 0, [&](int, vfloat o, vfloat x) { return o + x * s[j]; }, (const float*)out, v);
    const float total = sum_of(weight), share = safe && total == 0 ? 1 : 1 / total;
    map_row<1>(y, D, 0, [&](int, vfloat o) { return o * share; }, (const float*)out);
}

template <class T>
void attention(const T* Q, const T* K, const T* V, T* y, const int64_t* stride_q, const int64_t* stride_k,
               const int64_t* stride_v, int64_t B, int64_t H, int64_t H_kv, int64_t S_q, int64_t S_k, int64_t D,
               bool causal, bool safe, float scale, const Mask& mask) {
#pragma omp parallel
    {
        std::vector<float> scores(S_k), q(D), out(D);
#pragma omp for schedule(dynamic, CHUNK_ROWS)
        for (int64_t m = 0; m < B * H * S_q; ++m) {
            const int64_t i = S_q - 1 - m % S_q, h = m / S_q % H, b = m / S_q / H, h_kv = h / (H / H_kv);
            const int64_t keys = causal ? std::min(S_k, i + 1) : S_k;
            const T* row = Q + b * stride_q[0] + h * stride_q[1] + i * stride_q[2];
            const T* k = K + b * stride_k[0] + h_kv * stride_k[1];
            map_row<1>(q.data(), D, 0, [](int, vfloat v) { return v; }, row);
            int64_t j = 0;
            for (; j + KEYS_AT_ONCE <= keys; j += KEYS_AT_ONCE)
                dot<KEYS_AT_ONCE>(q.data(), k + j * stride_k[2], stride_k[2], D, &scores[j]);
            for (; j < keys; ++j) dot<1>(q.data(), k + j * stride_k[2], stride_k[2], D, &scores[j]);
            const int64_t first = b * mask.batch + h * mask.head + i * mask.query;
            const char* bias = mask.data + first * (mask.kind == Mask::FLOAT ? 4 : 1);
            const T* v = V + b * stride_v[0] + h_kv * stride_v[1];
            T* out_row = y + ((b * S_q + i) * H + h) * D;
            weigh(scores.data(), keys, safe, scale, mask.kind, bias, v, stride_v[2], out.data(), out_row, D);
        }
    }
}

extern "C" int run(int dtype, const void* Q, const void* K, const void* V, void* y, const int64_t* strides, int64_t B,
                   int64_t H, int64_t H_kv, int64_t S_q, int64_t S_k, int64_t D, int causal, int safe, float scale,
                   int mask_kind, const char* mask_data, int64_t mask_batch, int64_t mask_head, int64_t mask_query) {
    const Mask mask{Mask::Kind(mask_kind), mask_data, mask_batch, mask_head, mask_query};
    AK_DISPATCH(dtype, attention((const T*)Q, (const T*)K, (const T*)V, (T*)y, strides, strides + 4, strides + 8, B, H,
                                 H_kv, S_q, S_k, D, causal, safe, scale, mask));
    return 0;
}
"""

_run = cpp_function(SOURCE, "run", "i pppp p llllll ii f i p lll", KEYS_AT_ONCE=KEYS_AT_ONCE, CHUNK_ROWS=CHUNK_ROWS)


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
    Q, K, V = (x if x.stride(3) == 1 else x.contiguous() for x in (Q, K, V))
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
