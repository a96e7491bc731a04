"""Attention in CUDA C++: on Hopper wgmma and TMA, with warpgroups that take turns at the tensor cores; else mma.sync.

The Hopper kernel takes 16-bit tensors with head_dim a multiple of 8 up to 128, aligned to 16 bytes. Its blocks go on from
tile to tile, and load the next one's queries and keys while they end one. Of a mask that is the same for all queries, as
padding is, a warp reads the row into shared memory, and keys before the first and after the last that it shows are passed
over; any other mask is read element by element. fp32 is multiplied in fp32. head_dim is at most 256.
"""

import ctypes
from functools import cache, lru_cache

import torch

from autokernel.build import DTYPE_CODE, CudaFunction, cuda_function

KERNEL_TYPE = "flash_attention"
BACKEND = "cuda"
TUNABLES = {"TURNS": [0, 1], "EARLY": [0, 1], "STAGES_64": [2, 3, 4], "WARPGROUPS_64": [0, 2, 3]}

TURNS = 1  # whether warpgroups take turns: one multiplies while another does its softmax
EARLY = 1  # whether a launch may begin while the kernel ahead ends
STAGES_64 = 2  # blocks of K and V in flight, for head_dim up to 64
WARPGROUPS_64 = 0  # of 64 queries each, for head_dim up to 64; 0: 3, for few queries 2
LOG2_E = 1.4426950408889634
THREE = 1.15  # times as many queries in a time as two warpgroups have three in full blocks (197 to 2,048 keys, H100)
ANY_MASK = 3  # of MASKED in the source; the others are the mask's kind, where it has a row for all queries

SOURCE = r"""
#include <tensor_cores.cuh>

#include <cfloat>

#if AK_ARCH == 900
#include <hopper.cuh>
#endif

struct Tensor {  // [batch, heads, seq, head_dim]
    void* base;
    int64_t batch_stride, head_stride, seq_stride, stride;
};
struct Shape {
    int batch, heads, kv_heads, seq_q, seq_k, D;
    bool causal, safe;
    float scale;  // of scores, times log2(e): exponentials are powers of two
};

// What a query's sum is divided by: a row without any key has sums of 0, and so a result of 0 or, unless safe, of NaN.
__device__ float divisor(float sum, const Shape& s) { return s.safe && sum == 0 ? 1 : sum; }

// The mask: kind 0 none, 1 bool, 2 float of the tensors' type.
template <class T>
struct Mask {
    int kind;
    bool in_pairs;  // whether two keys that lie together can be read together, from an even one on
    const void* base;
    int64_t batch_stride, head_stride, query_stride, key_stride;

    __device__ int64_t at(int batch, int head, int query, int key) const {
        return batch * batch_stride + head * head_stride + query * query_stride + key * key_stride;
    }
    // What an element adds to a score, in powers of two, like the score; -inf for what the query may not see.
    __device__ float added(int64_t at) const {
        if (kind == 1) return static_cast<const bool*>(base)[at] ? 0 : -INFINITY;
        return power(to_float(static_cast<const T*>(base)[at]));
    }
    __device__ float2 pair(int64_t at) const {
        if (kind == 1) {
            const uchar2 shown = *reinterpret_cast<const uchar2*>(static_cast<const bool*>(base) + at);
            return {shown.x ? 0 : -INFINITY, shown.y ? 0 : -INFINITY};
        }
        struct alignas(2 * sizeof(T)) Two {
            T x, y;
        };
        const Two numbers = *reinterpret_cast<const Two*>(static_cast<const T*>(base) + at);
        return {power(to_float(numbers.x)), power(to_float(numbers.y))};
    }
    __device__ static float power(float number) {
        const float power = number * LOG2_E;
        return power == -INFINITY && number >= -FLT_MAX ? -FLT_MAX : power;  // the lowest number is not -inf
    }
    // What a bool mask hides is -inf whatever its score, which may be NaN or infinite.
    __device__ float masked(float score, float added) const {
        return kind == 1 && added < 0 ? -INFINITY : score + added;
    }
    __device__ float apply(float score, const Shape& s, int batch, int head, int query, int key) const {
        if (query >= s.seq_q || key >= s.seq_k || (s.causal && key > query)) return -INFINITY;
        return kind == 0 ? score : masked(score, added(at(batch, head, query, key)));
    }
};

#if AK_ARCH == 900
constexpr int KEYS = 128;  // of a block
// MASKED: what of a mask the Hopper kernel is compiled for, 0 for none
constexpr int ROW_OF_BITS = 1, ROW_OF_NUMBERS = 2, ANY_MASK = 3;
constexpr int MOST_SHARED_BYTES = 227 << 10;  // of a block
constexpr bool HAS_ROW = MASKED == ROW_OF_BITS || MASKED == ROW_OF_NUMBERS;
constexpr int AHEAD = 8;  // pairs of any other mask that a thread has on their way
constexpr int ROWS = 2;  // of masks in shared memory: a tile's, and the next one's
__host__ __device__ constexpr int row_bytes(int seq_k) {
    const int keys = (seq_k + KEYS - 1) / KEYS * KEYS;
    return MASKED == ROW_OF_BITS ? keys / 8 : MASKED == ROW_OF_NUMBERS ? keys * 4 : 0;
}

template <class Element, int D_, int WARPGROUPS_, int STAGES_>
struct Config {
    using T = Element;
    static constexpr int D = D_, WARPGROUPS = WARPGROUPS_, STAGES = STAGES_, QUERIES = 64 * WARPGROUPS;
    static constexpr int THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int BLOCK_BYTES = KEYS * D * 2, QUERY_BYTES = QUERIES * D * 2;
    static constexpr int SHARED_BYTES = 1024 + 2 * QUERY_BYTES + 2 * STAGES * BLOCK_BYTES + 256;
};

#ifdef AK_HOPPER
using namespace hopper;

template <class C>
struct Shared {
    typename C::T q[C::QUERIES * C::D], out[C::QUERIES * C::D];
    typename C::T k[C::STAGES][KEYS * C::D], v[C::STAGES][KEYS * C::D];
    Barrier q_full, q_empty, k_full[C::STAGES], k_empty[C::STAGES], v_full[C::STAGES], v_empty[C::STAGES];
    Barrier row_full[ROWS], row_empty[ROWS];
    int shown[ROWS][2];  // where the keys that a row shows begin and end
};

// The tiles of queries that a block takes, one of each round, from its start and from its end in turns: the longest come
// first, and all blocks have about as much to do.
struct Tiles {
    int count, round = 0;

    __device__ int now() const {
        return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    __device__ bool left() const { return now() < count; }
    __device__ void advance() { ++round; }
};

// The queries of a tile and the blocks of keys that they see, from `begin` to `end`. The longest come first; heads are
// taken in groups whose keys and values fit into L2.
template <class C>
struct Work {
    int first, head, kv_head, batch, begin, end;

    __device__ Work(const Shape& s, int group, int tile) {
        const int all = s.batch * s.heads, tiles = (s.seq_q + C::QUERIES - 1) / C::QUERIES;
        const int start = tile / (group * tiles) * group, within = tile % (group * tiles);
        const int size = min(group, all - start), flat = start + within % size;
        first = (tiles - 1 - within / size) * C::QUERIES;
        head = flat % s.heads;
        batch = flat / s.heads;
        kv_head = head / (s.heads / s.kv_heads);
        const int seen = s.causal ? min(s.seq_k, first + C::QUERIES) : s.seq_k;
        begin = 0;
        end = (seen + KEYS - 1) / KEYS;
    }
    // Leave out blocks before the first and after the last key that a mask shows; of none at all one stays.
    __device__ void narrow(const int (&shown)[2]) {
        begin = shown[0] / KEYS;
        end = min(end, (shown[1] + KEYS - 1) / KEYS);
        if (begin >= end) begin = 0, end = 1;
    }
};

// Of each tile's mask, by one warp: the row, a bit a key or what it adds to scores, and where the keys that it shows begin
// and end.
template <class C>
__device__ void read_rows(Shared<C>& shared, uint8_t* rows, const Shape& s, const Mask<typename C::T>& mask, Tiles tiles,
                          int group) {
    const int lane = threadIdx.x % 32, bytes = row_bytes(s.seq_k);
    Ring<ROWS> ring;
    for (; tiles.left(); tiles.advance(), ring.advance()) {
        const Work<C> work(s, group, tiles.now());
        const int64_t start = mask.at(work.batch, work.head, 0, 0);
        auto* bits = reinterpret_cast<uint32_t*>(rows + ring.stage * bytes);
        auto* numbers = reinterpret_cast<float*>(bits);
        int first = s.seq_k, end = 0;
        shared.row_empty[ring.stage].wait(ring.parity ^ 1);
        for (int block = 0; block < s.seq_k; block += KEYS) {
            float added[KEYS / 32];
#pragma unroll
            for (int i = 0; i < KEYS / 32; ++i) {
                const int key = block + i * 32 + lane;
                added[i] = key < s.seq_k ? mask.added(start + key * mask.key_stride) : -INFINITY;
            }
#pragma unroll
            for (int i = 0; i < KEYS / 32; ++i) {
                const int key = block + i * 32;
                const uint32_t sees = __ballot_sync(~0u, !(added[i] == -INFINITY));
                if constexpr (MASKED == ROW_OF_NUMBERS) numbers[key + lane] = added[i];
                if constexpr (MASKED == ROW_OF_BITS)
                    if (lane == 0) bits[key / 32] = sees;
                if (sees) first = min(first, key), end = key + 32;
            }
        }
        if (lane == 0) shared.shown[ring.stage][0] = first, shared.shown[ring.stage][1] = end;
        __syncwarp();
        if (lane == 0) shared.row_full[ring.stage].arrive();
    }
}

template <class C>
__device__ void load(Shared<C>& shared, const Shape& s, Tiles tiles, int group, const CUtensorMap& q, const CUtensorMap& k,
                     const CUtensorMap& v) {
    Ring<1> q_ring;
    Ring<C::STAGES> k_ring, v_ring;
    Ring<ROWS> rows;
    for (; tiles.left(); tiles.advance(), q_ring.advance(), rows.advance()) {
        Work<C> work(s, group, tiles.now());
        if constexpr (HAS_ROW) {
            shared.row_full[rows.stage].wait(rows.parity);
            work.narrow(shared.shown[rows.stage]);
            shared.row_empty[rows.stage].arrive();
        }
        shared.q_empty.wait(q_ring.parity ^ 1);
        shared.q_full.arrive_expecting(C::QUERY_BYTES);
        for (int d = 0; d < C::D; d += PANEL)
            for (int i = 0; i < C::QUERIES; i += 64)
                load_box(shared.q + d * C::QUERIES + i * PANEL, q, shared.q_full, d, work.first + i, work.head, work.batch);
        const auto block = [&](auto& to, const CUtensorMap& map, Barrier* full, Barrier* empty, auto& ring, int j) {
            empty[ring.stage].wait(ring.parity ^ 1);
            full[ring.stage].arrive_expecting(C::BLOCK_BYTES);
            for (int d = 0; d < C::D; d += PANEL)
                load_box(to[ring.stage] + d * KEYS, map, full[ring.stage], d, j * KEYS, work.kv_head, work.batch);
            ring.advance();
        };
        for (int j = work.end - 1; j >= work.begin - 1; --j) {  // values are needed one step after their keys
            if (j >= work.begin) block(shared.k, k, shared.k_full, shared.k_empty, k_ring, j);
            if (j + 1 < work.end) block(shared.v, v, shared.v_full, shared.v_empty, v_ring, j + 1);
        }
    }
}

// The running maximum and sum of this thread's two rows, 8 apart, of which its lane's quarter of the columns.
struct Softmax {
    float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, decay[2];

    // scores -> exp(score - peak); decay is what older sums are to be multiplied by.
    __device__ void update(float (&s)[KEYS / 2], float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = peak[r];
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) most = fmaxf(most, s[i / 2 * 4 + r * 2 + i % 2]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float base = most == -INFINITY ? 0 : most * scale;  // a row that sees no key yet
            decay[r] = fast_exp2(peak[r] * scale - base);
            peak[r] = most;
            float total = 0;
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                float& x = s[i / 2 * 4 + r * 2 + i % 2];
                x = fast_exp2(x * scale - base);
                total += x;
            }
            sum[r] = sum[r] * decay[r] + total;
        }
    }
};

// The rings of a consumer, which go on from tile to tile.
template <class C>
struct Rings {
    Ring<1> q;
    Ring<C::STAGES> k, v;
    Ring<ROWS> row;
};

template <class C>
__device__ void attend(Shared<C>& shared, const uint8_t* rows, Rings<C>& rings, const Work<C>& work, const Shape& shape,
                       const Mask<typename C::T>& mask, const CUtensorMap& out, int warpgroup, bool is_last) {
    using T = typename C::T;
    // What scores are still to be multiplied by, once a mask has been added to them.
    const float scale = MASKED == ROW_OF_NUMBERS || MASKED == ANY_MASK ? 1 : shape.scale;
    const int row = work.first + warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const uint8_t* seen = rows + rings.row.stage * row_bytes(shape.seq_k);
    Ring<C::STAGES>&k_ring = rings.k, &v_ring = rings.v;
    Softmax softmax;
    float s[KEYS / 2], o[C::D / 2];
    uint32_t p[KEYS / 16][4];
    const auto scores = [&] {
        const uint64_t q = descriptor(shared.q + warpgroup * 64 * PANEL), k = descriptor(shared.k[k_ring.stage]);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < C::D; d += 16)
            multiply<T, 0, 0>(s, q + (d / PANEL * C::QUERIES * 128 + d % PANEL * 2) / 16,
                              k + (d / PANEL * KEYS * 128 + d % PANEL * 2) / 16, d > 0);
        wgmma_commit();
        pin(s);
    };
    const auto accumulate = [&](bool add) {
        const uint64_t v = descriptor(shared.v[v_ring.stage], KEYS * 128);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) multiply<T, 1>(o, p[i], v + i * 16 * 128 / 16, add || i > 0);
        wgmma_commit();
        pin(o);
    };
    const auto finished = [&](Barrier& empty) {
        if (threadIdx.x % 128 == 0) empty.arrive();
    };
    const auto add_mask = [&](int j) {
        const int own = threadIdx.x % 4 * 2;  // of 8 keys a thread has two
        if constexpr (MASKED == ROW_OF_BITS) {
#pragma unroll
            for (int w = 0; w < KEYS / 32; ++w) {
                uint32_t word = reinterpret_cast<const uint32_t*>(seen)[j * (KEYS / 32) + w];
                if (word == ~0u) continue;
                word >>= own;
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (!(word >> (i / 4 * 8 + i % 2) & 1)) s[w * 16 + i] = -INFINITY;
            }
        } else if constexpr (MASKED == ROW_OF_NUMBERS) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) {
                const float2 added = reinterpret_cast<const float2*>(seen)[(j * KEYS + i * 2 + own) / 2];
#pragma unroll
                for (int e = 0; e < 4; ++e) s[i + e] = s[i + e] * shape.scale + (e % 2 ? added.y : added.x);
            }
        } else if constexpr (MASKED == ANY_MASK) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {  // what lies outside is hidden, and read from the last query and key
                const int64_t at = mask.at(work.batch, work.head, min(row + r * 8, shape.seq_q - 1), 0);
                if (mask.in_pairs && (j + 1) * KEYS <= shape.seq_k) {
#pragma unroll
                    for (int start = 0; start < KEYS / 8; start += AHEAD) {
                        float2 added[AHEAD];
#pragma unroll
                        for (int i = 0; i < AHEAD; ++i) added[i] = mask.pair(at + j * KEYS + own + (start + i) * 8);
#pragma unroll
                        for (int i = 0; i < AHEAD; ++i) {
                            float* x = s + (start + i) * 4 + r * 2;
                            x[0] = mask.masked(x[0] * shape.scale, added[i].x);
                            x[1] = mask.masked(x[1] * shape.scale, added[i].y);
                        }
                    }
                    continue;
                }
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    const int key = min(j * KEYS + i / 2 * 8 + own + i % 2, shape.seq_k - 1);
                    float& x = s[i / 2 * 4 + r * 2 + i % 2];
                    x = mask.masked(x * shape.scale, mask.added(at + key * mask.key_stride));
                }
            }
        }
    };
    const auto hide = [&](int j) {  // by the mask; keys past the end and, if causal, after the query
        add_mask(j);
        const int first_row = work.first + warpgroup * 64;
        if ((j + 1) * KEYS <= (shape.causal ? min(shape.seq_k, first_row + 1) : shape.seq_k)) return;
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int key = j * KEYS + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, query = row + i / 2 % 2 * 8;
            if (key >= shape.seq_k || (shape.causal && key > query)) s[i] = -INFINITY;
        }
    };
    const auto round = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[i][e] = pack_pair<T>(s[8 * i + 2 * e], s[8 * i + 2 * e + 1]);
    };
    const auto wait_turn = [&] {
        if (TURNS) named_sync(1 + warpgroup, 256);
    };
    const auto pass_turn = [&](bool last) {
        if (TURNS && !(last && warpgroup == C::WARPGROUPS - 1)) named_arrive(1 + (warpgroup + 1) % C::WARPGROUPS, 256);
    };
    const auto have_scores = [&](int j) {
        pin(s);
        finished(shared.k_empty[k_ring.stage]);
        k_ring.advance();
        if (j == work.begin) finished(shared.q_empty);
        hide(j);
    };

    shared.q_full.wait(rings.q.parity);
    rings.q.advance();
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    wait_turn();
    scores();
    pass_turn(false);
    wgmma_wait<0>();
    have_scores(work.end - 1);
    softmax.update(s, scale);
    round();
    for (int j = work.end - 2; j >= work.begin; --j) {
        shared.k_full[k_ring.stage].wait(k_ring.parity);
        wait_turn();
        scores();
        shared.v_full[v_ring.stage].wait(v_ring.parity);
        accumulate(j < work.end - 2);
        pass_turn(false);
        wgmma_wait<1>();
        have_scores(j);
        softmax.update(s, scale);
        wgmma_wait<0>();
        pin(o);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(p[i][e]));
        finished(shared.v_empty[v_ring.stage]);
        v_ring.advance();
#pragma unroll
        for (int i = 0; i < C::D / 2; ++i) o[i] *= softmax.decay[i / 2 % 2];
        round();
    }
    if constexpr (HAS_ROW) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) shared.row_empty[rings.row.stage].arrive();
        rings.row.advance();
    }
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    wait_turn();
    accumulate(work.end - work.begin > 1);
    pass_turn(is_last);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        softmax.sum[r] += __shfl_xor_sync(~0u, softmax.sum[r], 1);
        softmax.sum[r] += __shfl_xor_sync(~0u, softmax.sum[r], 2);
        softmax.sum[r] = 1 / divisor(softmax.sum[r], shape);
    }
    wgmma_wait<0>();
    pin(o);
    finished(shared.v_empty[v_ring.stage]);
    v_ring.advance();
#pragma unroll
    for (int i = 0; i < C::D / 2; ++i) o[i] *= softmax.sum[i / 2 % 2];
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();  // of the tile before
    named_sync(8 + warpgroup, 128);
#pragma unroll
    for (int d = 0; d < C::D; d += PANEL) {
        uint32_t words[16];
        round_columns<T>(o + d / 2, words);
        write_panel(shared.out + d * C::QUERIES + warpgroup * 64 * PANEL, words);
    }
    fence_async();
    named_sync(8 + warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
        const T* from = shared.out + warpgroup * 64 * PANEL;
        for (int d = 0; d < C::D; d += PANEL)
            store_box(out, from + d * C::QUERIES, d, work.first + warpgroup * 64, work.head, work.batch);
        if (is_last) wait_stores_read<0>();
    }
}
#endif

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
    hopper_attention(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                     const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap out, const Shape shape,
                     const Mask<typename C::T> mask, int group) {
#ifdef AK_HOPPER
    extern __shared__ uint8_t raw[];
    auto& shared = *reinterpret_cast<Shared<C>*>(raw + (-shared_address(raw) & 1023));
    const int warpgroup = uniform(threadIdx.x / 128);
    let_next_start();
    if (threadIdx.x == 0) {
        shared.q_full.init(1);
        shared.q_empty.init(C::WARPGROUPS);
        for (int i = 0; i < C::STAGES; ++i) {
            shared.k_full[i].init(1);
            shared.v_full[i].init(1);
            shared.k_empty[i].init(C::WARPGROUPS);
            shared.v_empty[i].init(C::WARPGROUPS);
        }
        for (int i = 0; i < ROWS; ++i) {
            shared.row_full[i].init(1);
            shared.row_empty[i].init(4 * C::WARPGROUPS + 1);  // the consumers' warps, and who loads
        }
        publish_barriers();
    }
    __syncthreads();
    after_previous();
    uint8_t* rows = reinterpret_cast<uint8_t*>(&shared) + C::SHARED_BYTES - 1024;
    Tiles tiles{shape.batch * shape.heads * ((shape.seq_q + C::QUERIES - 1) / C::QUERIES)};
    if (warpgroup == C::WARPGROUPS) {
        release_registers<C::WARPGROUPS == 2 ? 40 : 32>();  // a block has 504 or 512 for a thread of each warpgroup
        if (threadIdx.x == C::WARPGROUPS * 128) load<C>(shared, shape, tiles, group, q, k, v);
        if constexpr (HAS_ROW)
            if (threadIdx.x / 32 == C::WARPGROUPS * 4 + 1) read_rows<C>(shared, rows, shape, mask, tiles, group);
    } else {
        claim_registers<C::WARPGROUPS == 2 ? 232 : 160>();
        if (TURNS && warpgroup == C::WARPGROUPS - 1 && tiles.left()) named_arrive(1, 256);
        Rings<C> rings;
        while (tiles.left()) {
            Work<C> work(shape, group, tiles.now());
            if constexpr (HAS_ROW) {
                shared.row_full[rings.row.stage].wait(rings.row.parity);
                work.narrow(shared.shown[rings.row.stage]);
            }
            tiles.advance();
            attend<C>(shared, rows, rings, work, shape, mask, out, warpgroup, !tiles.left());
        }
    }
#endif
}

template <class C>
int shared_bytes(const Shape& s) {
    return C::SHARED_BYTES + ROWS * row_bytes(s.seq_k);
}

template <class C>
int launch_hopper(const Tensor& Q, const Tensor& K, const Tensor& V, const Tensor& out, const Shape& s,
                  const Mask<typename C::T>& mask, cudaStream_t stream) {
    using T = typename C::T;
    const auto map = [&](const Tensor& t, int heads, int seq, uint32_t rows) {
        const int64_t sizes[] = {s.D, seq, heads, s.batch}, strides[] = {t.seq_stride, t.head_stride, t.batch_stride};
        return hopper::tensor_map<T, 4>((const T*)t.base, sizes, strides, {hopper::PANEL, rows, 1, 1});
    };
    const int64_t head_bytes = int64_t(s.seq_k) * s.D * 4 * s.kv_heads / s.heads, l2_bytes = 24 << 20;
    const int all = s.batch * s.heads, group = max(1, int(min(int64_t(all), l2_bytes / max(head_bytes, int64_t(1)))));
    int device = 0, processors = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    // Where tiles differ and come in groups, turns would not share them out evenly: there each has a block of its own.
    const int tiles = all * divide_up(s.seq_q, C::QUERIES);
    const int blocks = s.causal && group < all ? tiles : min(processors, tiles);
    return hopper::launch(hopper_attention<C>, blocks, C::THREADS, shared_bytes<C>(s), 1, EARLY, stream,
                          map(Q, s.heads, s.seq_q, 64), map(K, s.kv_heads, s.seq_k, KEYS),
                          map(V, s.kv_heads, s.seq_k, KEYS), map(out, s.heads, s.seq_q, 64), s, mask, group);
}

bool fits_hopper(const Tensor& t) {
    const auto whole = [](int64_t stride) { return stride > 0 && stride % 8 == 0; };
    return t.stride == 1 && aligned(t.base) && whole(t.seq_stride) && whole(t.head_stride) && whole(t.batch_stride);
}
#endif

// 16-bit tensors of any strides: 4 warps of 16 queries each; a block of values comes in while scores are computed, and the
// next block of keys meanwhile.
template <class T, int D>
struct MmaShared {
    static constexpr int QUERIES = 64, KEYS = 64;
    Tile<T, QUERIES, D, true> q;
    Tile<T, KEYS, D, true> k;
    Tile<T, D, KEYS, false> v;
};

template <class T, int D>
__global__ void __launch_bounds__(128) mma_attention(Tensor Q, Tensor K, Tensor V, T* out, Shape s, Mask<T> mask) {
    using Memory = MmaShared<T, D>;
    constexpr int QUERIES = Memory::QUERIES, KEYS = Memory::KEYS;
    extern __shared__ uint8_t raw[];
    Memory& memory = *reinterpret_cast<Memory*>(raw);
    const int tiles = divide_up(s.seq_q, QUERIES), flat = blockIdx.x / tiles;
    const int first = (tiles - 1 - blockIdx.x % tiles) * QUERIES;
    const int head = flat % s.heads, batch = flat / s.heads, kv_head = head / (s.heads / s.kv_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = first + warp * 16 + lane / 4;
    const auto at = [&](const Tensor& x, int h) { return (const T*)x.base + batch * x.batch_stride + h * x.head_stride; };
    const Matrix q = {at(Q, head), Q.seq_stride, Q.stride}, k = {at(K, kv_head), K.seq_stride, K.stride};
    const Matrix v = {at(V, kv_head), V.stride, V.seq_stride};
    const bool k_vectors = k.in_vectors(true), v_vectors = v.in_vectors(false);
    const int end = s.causal ? min(s.seq_k, first + QUERIES) : s.seq_k;
    float o[D / 8][4] = {}, peak[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    memory.q.fill(q, first, 0, s.seq_q, s.D, q.in_vectors(true));
    memory.k.fill(k, 0, 0, s.seq_k, s.D, k_vectors);
    commit_copies();
    for (int start = 0; start < end; start += KEYS) {
        wait_copies<0>();
        __syncthreads();
        memory.v.fill(v, 0, start, s.D, s.seq_k, v_vectors);
        commit_copies();
        float p[KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            uint32_t a[4], b[4];
            memory.q.template fragment<false>(a, warp * 16, d);
#pragma unroll
            for (int j = 0; j < KEYS; j += 16) {
                memory.k.template fragment<true>(b, j, d);
                multiply_16x8<T>(p[j / 8], a, b[0], b[1]);
                multiply_16x8<T>(p[j / 8 + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = peak[r], total = 0;
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                float& x = p[i / 2][2 * r + i % 2];
                x = mask.apply(x * s.scale, s, batch, head, query + 8 * r, start + i / 2 * 8 + lane % 4 * 2 + i % 2);
                most = fmaxf(most, x);
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float base = most == -INFINITY ? 0 : most, decay = fast_exp2(peak[r] - base);
            peak[r] = most;
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) total += p[i / 2][2 * r + i % 2] = fast_exp2(p[i / 2][2 * r + i % 2] - base);
            sum[r] = sum[r] * decay + total;
#pragma unroll
            for (int i = 0; i < D / 4; ++i) o[i / 2][2 * r + i % 2] *= decay;
        }
        wait_copies<0>();
        __syncthreads();
        if (start + KEYS < end) memory.k.fill(k, start + KEYS, 0, s.seq_k, s.D, k_vectors);
        commit_copies();
#pragma unroll
        for (int j = 0; j < KEYS; j += 16) {
            uint32_t a[4], b[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = pack_pair<T>(p[j / 8 + e / 2][e % 2 * 2], p[j / 8 + e / 2][e % 2 * 2 + 1]);
#pragma unroll
            for (int d = 0; d < D; d += 16) {
                memory.v.template fragment<true>(b, d, j);
                multiply_16x8<T>(o[d / 8], a, b[0], b[1]);
                multiply_16x8<T>(o[d / 8 + 1], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] = divisor(sum[r] + __shfl_xor_sync(~0u, sum[r], 2), s);
        if (query + 8 * r >= s.seq_q) continue;
        T* row = out + ((int64_t(batch) * s.seq_q + query + 8 * r) * s.heads + head) * s.D;
#pragma unroll
        for (int i = 0; i < D / 4; ++i) {
            const int d = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (d < s.D) row[d] = from_float<T>(o[i / 2][2 * r + i % 2] / sum[r]);
        }
    }
}

constexpr int PLAIN_QUERIES = 32, PLAIN_KEYS = 32, SHARE = 8;  // SHARE threads a query

// fp32: a query by SHARE threads, keys and values through shared memory.
template <class T, int D_PADDED>
__global__ void __launch_bounds__(PLAIN_QUERIES* SHARE)
    plain(Tensor Q, Tensor K, Tensor V, T* out, Shape s, Mask<T> mask) {
    constexpr int OWN = PLAIN_KEYS / SHARE, RUNS = D_PADDED / SHARE / 4;  // a thread's keys; its channels, in runs of 4
    extern __shared__ float4 memory[];
    auto* q = reinterpret_cast<float(*)[D_PADDED + 4]>(memory);
    auto* kv = q + PLAIN_QUERIES;
    const auto four = [](const float* at) { return *reinterpret_cast<const float4*>(at); };
    const int tiles = divide_up(s.seq_q, PLAIN_QUERIES), flat = blockIdx.x / tiles;
    const int first = (tiles - 1 - blockIdx.x % tiles) * PLAIN_QUERIES;
    const int head = flat % s.heads, batch = flat / s.heads, kv_head = head / (s.heads / s.kv_heads);
    const auto fill = [&](const Tensor& x, int h, int start, int end, auto& to) {
        const T* from = (const T*)x.base + batch * x.batch_stride + h * x.head_stride;
        for (int i = threadIdx.x; i < PLAIN_KEYS * D_PADDED; i += blockDim.x) {
            const int at = i / D_PADDED, d = i % D_PADDED;
            to[at][d] = start + at < end && d < s.D ? to_float(from[(start + at) * x.seq_stride + d * x.stride]) : 0;
        }
    };
    const int row = threadIdx.x / SHARE, part = threadIdx.x % SHARE, query = first + row;
    fill(Q, head, first, s.seq_q, q);
    float4 o[RUNS] = {};
    float peak = -INFINITY, sum = 0;
    const int end = s.causal ? min(s.seq_k, first + PLAIN_QUERIES) : s.seq_k;
    for (int start = 0; start < end; start += PLAIN_KEYS) {
        __syncthreads();
        fill(K, kv_head, start, s.seq_k, kv);
        __syncthreads();
        float p[OWN] = {}, most = peak;
        for (int d = 0; d < s.D; d += 4) {
            const float4 a = four(q[row] + d);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float4 b = four(kv[part + SHARE * i] + d);
                p[i] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            p[i] = mask.apply(p[i] * s.scale, s, batch, head, query, start + part + SHARE * i);
            most = fmaxf(most, p[i]);
        }
        for (int lanes = 1; lanes < SHARE; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        const float base = most == -INFINITY ? 0 : most, decay = fast_exp2(peak - base);
        peak = most;
        sum *= decay;
#pragma unroll
        for (int i = 0; i < OWN; ++i) sum += p[i] = fast_exp2(p[i] - base);
#pragma unroll
        for (float4& x : o) x = {x.x * decay, x.y * decay, x.z * decay, x.w * decay};
        __syncthreads();
        fill(V, kv_head, start, s.seq_k, kv);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            for (int j = 0; j < SHARE; ++j) {
                const float weight = __shfl_sync(~0u, p[i], j, SHARE);
#pragma unroll
                for (int run = 0; run < RUNS; ++run) {
                    const float4 v = four(kv[j + SHARE * i] + 4 * (part + SHARE * run));
                    o[run].x += weight * v.x, o[run].y += weight * v.y, o[run].z += weight * v.z, o[run].w += weight * v.w;
                }
            }
    }
    for (int lanes = 1; lanes < SHARE; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    sum = divisor(sum, s);
    if (query >= s.seq_q) return;
    T* result = out + ((int64_t(batch) * s.seq_q + query) * s.heads + head) * s.D;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const float channels[] = {o[run].x, o[run].y, o[run].z, o[run].w};
        for (int e = 0; e < 4; ++e) {
            const int d = 4 * (part + SHARE * run) + e;
            if (d < s.D) result[d] = from_float<T>(channels[e] / sum);
        }
    }
}

template <class T, int D>
int launch_general(const Tensor& Q, const Tensor& K, const Tensor& V, T* out, const Shape& s, const Mask<T>& mask,
                   cudaStream_t stream) {
    const auto with = [&](auto kernel, int queries, int threads, int bytes) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        kernel<<<s.batch * s.heads * divide_up(s.seq_q, queries), threads, bytes, stream>>>(Q, K, V, out, s, mask);
        return cudaGetLastError();
    };
    if constexpr (sizeof(T) == 2)
        return with(mma_attention<T, D>, MmaShared<T, D>::QUERIES, 128, sizeof(MmaShared<T, D>));
    else
        return with(plain<T, D>, PLAIN_QUERIES, PLAIN_QUERIES * SHARE, (PLAIN_QUERIES + PLAIN_KEYS) * (D + 4) * sizeof(T));
}

struct Call {
    int64_t batch, heads, kv_heads, seq_q, seq_k, D, causal, safe, mask_kind, q[4], k[4], v[4], mask[4];
};

extern "C" int run(void* q, void* k, void* v, void* o, void* mask_base, const Call* c, float scale, cudaStream_t stream) {
    using T = std::conditional_t<DTYPE == 0, float, std::conditional_t<DTYPE == 1, f16, bf16>>;
    const auto tensor = [](void* base, const int64_t (&s)[4]) { return Tensor{base, s[0], s[1], s[2], s[3]}; };
    const Tensor Q = tensor(q, c->q), K = tensor(k, c->k), V = tensor(v, c->v);
    const Shape s = {int(c->batch), int(c->heads),   int(c->kv_heads), int(c->seq_q), int(c->seq_k),
                     int(c->D),     bool(c->causal), bool(c->safe),    scale};
    const int64_t(&m)[4] = c->mask, first = uintptr_t(mask_base) / (c->mask_kind == 1 ? 1 : sizeof(T));
    const bool in_pairs = m[3] == 1 && (m[0] | m[1] | m[2] | first) % 2 == 0;
    const Mask<T> mask = {int(c->mask_kind), in_pairs, mask_base, m[0], m[1], m[2], m[3]};
#if AK_ARCH == 900 && DTYPE != 0
    using C = std::conditional_t<WIDTH == 64, Config<T, 64, WARPGROUPS_64, STAGES_64>, Config<T, 128, 2, 2>>;
    const bool fits = WIDTH <= 128 && s.D % 8 == 0 && fits_hopper(Q) && fits_hopper(K) && fits_hopper(V);
    if (fits && scale > 0 && shared_bytes<C>(s) <= MOST_SHARED_BYTES) {
        const int64_t head = s.D, row = head * s.heads;
        const Tensor out = {o, row * s.seq_q, head, row, 1};
        return launch_hopper<C>(Q, K, V, out, s, mask, stream);
    }
#endif
    return launch_general<T, WIDTH>(Q, K, V, (T*)o, s, mask, stream);
}
"""


@cache
def _compiled(dtype: torch.dtype, width: int, few: bool, masked: int) -> CudaFunction:
    """width: that of rows, at least head_dim. few: queries, which fill blocks of 192 badly. masked: see MASKED."""
    knobs = {"TURNS": TURNS, "EARLY": EARLY, "STAGES_64": STAGES_64, "WARPGROUPS_64": WARPGROUPS_64 or (2 if few else 3)}
    return cuda_function(SOURCE, "run", "ppppp p f", DTYPE=DTYPE_CODE[dtype], WIDTH=width, MASKED=masked, **knobs)


@lru_cache(4096)
def _plan(
    dtype: torch.dtype, q: tuple, k: tuple, causal: bool, safe: bool, mask_kind: int, strides: tuple
) -> tuple[CudaFunction, ctypes.Array]:
    """The library for a call and its numbers, by the shapes of Q and K and the strides of Q, K, V and the mask."""
    B, H, seq_q, D = q
    assert D <= 256, f"head_dim {D} is more than 256"
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    sizes = (B, H, k[1], seq_q, k[2], D, causal, safe, mask_kind)
    numbers = (ctypes.c_int64 * 25)(*sizes, *(stride for tensor in strides for stride in tensor))
    masked = mask_kind if seq_q == 1 or strides[3][2] == 0 else ANY_MASK
    if dtype == torch.float32 or width == 256:  # no kernel of Hopper's, and the others are told of any mask
        masked = 0
    few = width == 64 and (seq_q <= 1536 if causal else _blocks_of_128(B * H, seq_q))
    return _compiled(dtype, width, few, masked), numbers


def _blocks_of_128(heads: int, seq_q: int) -> bool:
    """Whether blocks of 128 queries take less time than those of 192: by their rounds on all multiprocessors."""
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    rounds = {queries: -(-heads * -(-seq_q // queries) // processors) for queries in (128, 192)}
    return 128 * rounds[128] * THREE < 192 * rounds[192]


def kernel_fn(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    causal: bool = True,
    sm_scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    safe_softmax: bool = True,
) -> torch.Tensor:
    """Q [batch, heads, seq_q, head_dim], K and V [batch, kv_heads, seq_k, head_dim] -> like Q,
    [batch, seq_q, heads, head_dim] in memory."""
    B, H, seq_q, D = Q.shape
    out = Q.new_empty(B, seq_q, H, D)
    scale = Q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    mask_kind, mask, mask_strides = 0, None, (0, 0, 0, 0)
    if attn_mask is not None:
        mask_kind = 1 if attn_mask.dtype == torch.bool else 2
        mask = attn_mask if mask_kind == 1 else attn_mask.to(Q.dtype)
        mask_strides = mask.expand(*Q.shape[:3], K.shape[2]).stride()
    strides = (Q.stride(), K.stride(), V.stride(), mask_strides)
    run, numbers = _plan(Q.dtype, Q.shape, K.shape, causal, safe_softmax, mask_kind, strides)
    pointers = (Q.data_ptr(), K.data_ptr(), V.data_ptr(), out.data_ptr(), None if mask is None else mask.data_ptr())
    run(*pointers, numbers, scale * LOG2_E)
    return out.transpose(1, 2)
