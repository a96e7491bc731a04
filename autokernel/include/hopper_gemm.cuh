// C = A Bᵀ for 16-bit matrices on Hopper: one warpgroup feeds shared memory, two keep the tensor cores busy.
//
// A block computes BM x BN of C in steps of 64 along K, with STAGES steps in flight, and goes on to further tiles. TURNS: the
// two warpgroups take turns, a tile each, so that one multiplies while the other writes; else they share each tile's rows, and
// a tile, rounded, is written during the first steps of the next.
// CLUSTER (1 or 2) blocks are neighbours along M: each loads a half of the tile of B that both need, for both (multicast).
// SPLITS > 1: as many times CLUSTER blocks share a tile's K; each writes its sums into the shared memory of those that add
// them up, a share of the columns each.
//
// PERIOD > 1: for an N of which that many rows, not fewer, are a multiple of 16 bytes. The accelerator writes multiples of 16 bytes
// from such on, so a tile is of every PERIOD-th row, which all start as far from one, and its columns begin so far ahead; threads
// write the first columns of rows and the last. Where PERIOD is 1, they write all of C for such an N.
#pragma once
#include <hopper.cuh>

namespace hopper {

// Gate: void for a plain product; a type with `static float of(float)` for C = of(A Bᵀ) · (A B2ᵀ), where a tile of B is
// BN / 2 rows of each. After: void, or a type with the same function for C = of(A Bᵀ + bias), with the bias of the Problem.
template <class Element, int BM_, int BN_, int STAGES_, bool TURNS_, int CLUSTER_, bool A_ALONG_K_, bool B_ALONG_K_,
          class Gate_ = void, int SPLITS_ = 1, class After_ = void, int PERIOD_ = 1>
struct Gemm {
    using T = Element;
    using Gate = Gate_;
    using After = After_;
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CLUSTER = CLUSTER_, SPLITS = SPLITS_, PERIOD = PERIOD_;
    static constexpr bool TURNS = TURNS_, A_ALONG_K = A_ALONG_K_, B_ALONG_K = B_ALONG_K_, GATED = !std::is_void_v<Gate_>;
    static constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * 128;
    static constexpr int SHARERS = TURNS ? 1 : CONSUMERS, STRIPES = BM / 64 / SHARERS;  // of a tile; of 64 rows each
    static constexpr int COLUMNS = GATED ? BN / 2 : BN;                                 // of C
    static constexpr int STAGE_BYTES = (BM + BN) * PANEL * 2;
    static constexpr bool LATE = !TURNS && !GATED && SPLITS == 1 && STRIPES == 1;  // writes during the next tile
    static constexpr int OUT = STRIPES * COLUMNS / SPLITS / 64;  // panels of C that a warpgroup writes for a tile
    static constexpr int SUMS = SPLITS > 1 ? BM * BN / SPLITS / 4 : 1;  // of a share, in float4
    static constexpr int SUM_BYTES = (SPLITS - 1) * SUMS * 16;          // that a block is sent
    static constexpr int ROOM = (232448 - 1024 - 512 - STAGES * STAGE_BYTES - SUM_BYTES) / (CONSUMERS * 8192);
    static constexpr int PANELS = OUT <= ROOM ? OUT : OUT % 2 == 0 && ROOM >= 2 ? 2 : 1;  // on their way at a time
    // of a stripe, that are staged together where the accelerator does not write them
    static constexpr int BESIDE = OUT / STRIPES % PANELS == 0 ? PANELS : OUT / STRIPES <= PANELS ? OUT / STRIPES : 1;
    static constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + CONSUMERS * PANELS * 8192 + SUM_BYTES + 512;
    static_assert(ROOM >= 1 && STRIPES >= 1 && COLUMNS % (64 * SPLITS) == 0);
    static_assert(PERIOD == 1 || (A_ALONG_K && B_ALONG_K && !GATED));
    static_assert(SPLITS == 1 || (!TURNS && !GATED && STRIPES == 1));
};

struct Problem {
    int M, N, K;
    int group;       // rows of clusters of tiles that are walked together, for their operands to meet in L2
    const void* bias = nullptr;  // [N] in C's dtype from a multiple of 4 bytes on, of an even N unless PERIOD > 1; nullptr: none
};

// A and C as the accelerator takes them: the matrices of their rows i, i + PERIOD, i + 2 PERIOD, …
template <class G>
struct Rows {
    typename G::T* C;
    int first;       // elements from a multiple of 16 bytes to C
    bool store_tma;  // else threads write C
    CUtensorMap a[G::PERIOD], c[G::PERIOD];

    // How far ahead of row i its map begins, and the columns of its tiles.
    __host__ __device__ int ahead(int i, int N) const { return G::PERIOD > 1 ? (first + i * N) % 8 : 0; }
};

// Where a tile begins: which of those matrices, which of its rows, and which column, which may lie ahead of C's.
struct Origin {
    int matrix, m, n;
};

// Of clusters.
template <class G>
__host__ __device__ int tiles_along_m(int M) {
    constexpr int ROWS = G::CLUSTER * G::BM;
    return G::PERIOD * (((M + G::PERIOD - 1) / G::PERIOD + ROWS - 1) / ROWS);
}
template <class G>
__host__ __device__ int tiles_along_n(int N) {
    return (N + (G::PERIOD > 1 ? 7 : 0) + G::COLUMNS - 1) / G::COLUMNS;
}

#ifdef AK_HOPPER

template <class G>
struct GemmShared {
    typename G::T a[G::STAGES][G::BM * PANEL];
    typename G::T b[G::STAGES][G::BN * PANEL];
    typename G::T c[G::CONSUMERS][G::PANELS][64 * PANEL];
    float4 sums[G::SPLITS > 1 ? G::SPLITS - 1 : 1][G::SUMS];
    Barrier full[G::STAGES], empty[G::STAGES], summed;
};

// Where a block works.
template <class G>
struct Place {
    Problem p;
    int rank, split, first_step, steps;  // among the neighbours along M; of K
    int cluster, clusters, rows, columns;

    __device__ Place(const Problem& problem) : p(problem) {
        const int block = G::CLUSTER * G::SPLITS > 1 ? cluster_rank() : 0;
        rank = block % G::CLUSTER;
        split = block / G::CLUSTER;
        cluster = blockIdx.x / (G::CLUSTER * G::SPLITS);
        clusters = gridDim.x / (G::CLUSTER * G::SPLITS);
        const int all = divide_up(p.K, PANEL), share = divide_up(all, G::SPLITS);
        first_step = split * share;
        steps = max(min(share, all - first_step), 0);
        rows = tiles_along_m<G>(p.M);
        columns = tiles_along_n<G>(p.N);
    }
    __device__ int tiles() const { return rows * columns; }
    __device__ Origin origin(int tile, const Rows<G>& of) const {
        const int first = tile / (p.group * columns) * p.group, within = tile % (p.group * columns);
        const int group = min(rows - first, p.group), row = first + within % group, matrix = row % G::PERIOD;
        return {matrix, (row / G::PERIOD * G::CLUSTER + rank) * G::BM, within / group * G::COLUMNS - of.ahead(matrix, p.N)};
    }
};

template <class G>
__device__ void load_tiles(GemmShared<G>& shared, const Place<G>& place, const Rows<G>& rows, const CUtensorMap& b,
                           const CUtensorMap& b2) {
    constexpr int PARTS = G::GATED ? 2 : 1, PART = G::BN / PARTS;
    constexpr int OWN = G::B_ALONG_K ? PART / G::CLUSTER : PANEL / G::CLUSTER;  // rows of a box, one of CLUSTER that make a part
    const uint16_t neighbours = ((1 << G::CLUSTER) - 1) << place.split * G::CLUSTER;
    Ring<G::STAGES> ring;
    for (int tile = place.cluster; tile < place.tiles(); tile += place.clusters) {
        const Origin at = place.origin(tile, rows);
        const CUtensorMap& a = rows.a[G::PERIOD > 1 ? uniform(at.matrix, 1) : 0];
        for (int step = 0; step < place.steps; ++step, ring.advance()) {
            const int k = (place.first_step + step) * PANEL;
            Barrier& full = shared.full[ring.stage];
            shared.empty[ring.stage].wait(ring.parity ^ 1);
            full.arrive_expecting(G::STAGE_BYTES);
            auto* to = shared.a[ring.stage];
            if constexpr (G::A_ALONG_K)
                load_box(to, a, full, k, at.m);
            else
                for (int m = 0; m < G::BM; m += PANEL) load_box(to + m * PANEL, a, full, at.m + m, k);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                for (int i = 0; i < (G::B_ALONG_K ? 1 : PART / PANEL); ++i) {
                    const int own = place.rank * OWN, n = at.n + (G::GATED ? 0 : part * PART) + i * PANEL;
                    auto* to = shared.b[ring.stage] + (part * PART + i * PANEL + own) * PANEL;
                    const int x = G::B_ALONG_K ? k : n, y = G::B_ALONG_K ? n + own : k + own;
                    if constexpr (G::CLUSTER > 1) load_box_to_all(to, part ? b2 : b, full, x, y, neighbours);
                    else load_box(to, part ? b2 : b, full, x, y);
                }
        }
    }
}

// The products of one tile, from the stages as they come; each is given back to the producers that fill it. `issued` is called
// when all are on their way, `meanwhile` in each step while it is computed.
template <class G, class Meanwhile, class Issued>
__device__ void multiply_tile(GemmShared<G>& shared, const Place<G>& place, Ring<G::STAGES>& ring, int warpgroup,
                              float (&d)[G::STRIPES][G::BN / 2], Meanwhile meanwhile, Issued issued) {
    constexpr int A_STEP = (G::A_ALONG_K ? 32 : 16 * 128) / 16, B_STEP = (G::B_ALONG_K ? 32 : 16 * 128) / 16;
    const auto give_back = [&](int stage) {
        if constexpr (G::CLUSTER > 1) {
            if (threadIdx.x % 128 < G::CLUSTER) shared.empty[stage].arrive_at(place.split * G::CLUSTER + threadIdx.x % 128);
        } else if (threadIdx.x % 128 == 0) {
            shared.empty[stage].arrive();
        }
    };
    const auto pin_all = [&] {
#pragma unroll
        for (auto& stripe : d) pin(stripe);
    };
    const int first = G::TURNS ? 0 : warpgroup * G::STRIPES * 64;
    int previous = 0;
    for (int step = 0; step < place.steps; ++step, ring.advance()) {
        shared.full[ring.stage].wait(ring.parity);
        const uint64_t a = descriptor(shared.a[ring.stage] + first * PANEL), b = descriptor(shared.b[ring.stage], 8192);
        pin_all();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL / 16; ++k)
#pragma unroll
            for (int i = 0; i < G::STRIPES; ++i)
                multiply<typename G::T, !G::A_ALONG_K, !G::B_ALONG_K>(d[i], a + k * A_STEP + i * 8192 / 16, b + k * B_STEP,
                                                                      step + k > 0);
        wgmma_commit();
        pin_all();
        meanwhile(step);
        if (step > 0) {
            wgmma_wait<1>();
            give_back(previous);
        }
        previous = ring.stage;
    }
    issued();
    wgmma_wait<0>();
    pin_all();
    if (G::SPLITS == 1 || place.steps > 0) give_back(previous);
}

// A warp's 16 rows of the panels from `staging` on, 16 bytes a thread: of rows that start anywhere only both ends are written
// by halves, for each of which memory must be read.
template <class G>
__device__ void store_rows(const typename G::T* staging, const Problem& p, typename G::T* C, int m, int n) {
    constexpr int COLUMNS = 64 * G::BESIDE, OCTETS = COLUMNS / 8;
    const int own = threadIdx.x % 128 / 32 * 16, lane = threadIdx.x % 32, octet = lane % OCTETS;
    const int columns = min(p.N - n, COLUMNS);
#pragma unroll 1
    for (int row = own + lane / OCTETS; row < own + 16 && m + row < p.M; row += 32 / OCTETS) {
        const auto* line = reinterpret_cast<const uint32_t*>(staging) + row * 32;
        const auto word = [&](int at) { return line[at / 32 * 2048 + (at % 32 / 4 ^ row % 8) * 4 + at % 4]; };
        const auto half = [&](int column) { return uint16_t(word(column / 2) >> column % 2 * 16); };
        auto* to = reinterpret_cast<uint16_t*>(C) + int64_t(m + row) * p.N + n;
        if (columns < COLUMNS) {
            for (int column = octet * 8; column < min(octet * 8 + 8, columns); ++column) to[column] = half(column);
            continue;
        }
        const int before = (-reinterpret_cast<intptr_t>(to) & 15) / 2;  // columns ahead of the first multiple of 16 bytes
        if (before == 0 || octet < OCTETS - 1) {
            uint32_t pairs[5];
#pragma unroll
            for (int i = 0; i < 5; ++i) pairs[i] = word(min(before / 2 + octet * 4 + i, COLUMNS / 2 - 1));
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = __funnelshift_r(pairs[i], pairs[i + 1], before % 2 * 16);
            *reinterpret_cast<uint4*>(to + before + octet * 8) = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
        if (before > 0 && octet < 8) {  // of the 8 columns at both ends a thread writes one
            const int column = octet < before ? octet : COLUMNS - 8 + octet;
            to[column] = half(column);
        }
    }
}

// C's columns from `begin` to `end` that are in a panel.
template <class G>
__device__ void store_some(const typename G::T* panel, const Problem& p, const Rows<G>& rows, Origin at, int begin, int end) {
    const int column = at.n + threadIdx.x % 64, x = threadIdx.x % 64;
    if (column < begin || column >= end) return;
#pragma unroll 1
    for (int row = threadIdx.x % 128 / 64; row < 64; row += 2) {
        const int m = (at.m + row) * G::PERIOD + at.matrix;
        if (m < p.M) rows.C[int64_t(m) * p.N + column] = panel[row * PANEL + (x / 8 ^ row % 8) * 8 + x % 8];
    }
}

// 64 rounded columns of C through a panel: by the accelerator, or where it cannot reach C's rows, with the panels beside it.
template <class G>
__device__ void store_columns(GemmShared<G>& shared, const Problem& p, const Rows<G>& rows, int warpgroup, int panel,
                              const uint32_t* words, Origin at) {
    if (G::PERIOD > 1 || rows.store_tma) {
        auto* staging = shared.c[warpgroup][panel % G::PANELS];
        if (threadIdx.x % 128 == 0) wait_stores_read<G::PANELS - 1>();
        named_sync(1 + warpgroup, 128);
        write_panel(staging, words);
        fence_async();
        named_sync(1 + warpgroup, 128);
        if constexpr (G::PERIOD > 1) {
            const int matrix = uniform(at.matrix), ahead = rows.ahead(matrix, p.N), whole = (p.N + ahead) / 8 * 8 - ahead;
            if (at.n < 0) store_some<G>(staging, p, rows, at, 0, p.N);
            else if (at.n + 64 > whole) store_some<G>(staging, p, rows, at, whole, p.N);
            if (threadIdx.x % 128 > 0) return;
            if (at.n < 0) store_nothing();
            else store_box(rows.c[matrix], staging, at.n + ahead, at.m);
        } else if (threadIdx.x % 128 == 0) {
            store_box(rows.c[0], staging, at.n, at.m);
        }
        return;
    }
    const int last = panel % G::BESIDE;
    __syncwarp();  // a warp writes and reads 16 rows of its own
    write_panel(shared.c[warpgroup][last], words);
    if (last < G::BESIDE - 1) return;
    __syncwarp();
    store_rows<G>(shared.c[warpgroup][0], p, rows.C, at.m, at.n - 64 * last);
}

// Adds the sums of all splits, always in the same order. Each sends away those of the others' shares of the columns, and adds
// up those of its own, which are in its first registers then.
template <class G>
__device__ void combine(GemmShared<G>& shared, const Place<G>& place, float (&d)[G::BN / 2]) {
    constexpr int SHARE = G::BN / 8 / G::SPLITS, THREADS = G::CONSUMERS * 128;  // in float4
    if (place.steps == 0)
        for (float& sum : d) sum = 0;
    float4 own[SHARE];
#pragma unroll
    for (int split = 0; split < G::SPLITS; ++split) {
        const int to = split * G::CLUSTER + place.rank, from = place.split - (place.split > split);
        const uint32_t sums = shared_address_at(&shared.sums[from][threadIdx.x], to), barrier = shared_address_at(&shared.summed, to);
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const float* part = d + 4 * (split * SHARE + i);
            const float4 sum = {part[0], part[1], part[2], part[3]};
            if (split == place.split) own[i] = sum;
            else store_shared_of_cluster(sums + i * THREADS * sizeof(float4), sum, barrier);
        }
    }
    shared.summed.wait_acquired(0);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) d[4 * i] = d[4 * i + 1] = d[4 * i + 2] = d[4 * i + 3] = 0;
#pragma unroll
    for (int split = 0; split < G::SPLITS; ++split)
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int from = split - (split > place.split);
            const float4 x = split == place.split ? own[i] : shared.sums[from][threadIdx.x + i * THREADS];
            d[4 * i] += x.x, d[4 * i + 1] += x.y, d[4 * i + 2] += x.z, d[4 * i + 3] += x.w;
        }
}

// Bias and activation of the columns from n on, of one stripe: in each octet of columns a thread holds two neighbours, twice.
template <class G>
__device__ void finish_columns(float* d, const Problem& p, int n) {
    using Pair = std::conditional_t<std::is_same_v<typename G::T, f16>, __half2, __nv_bfloat162>;
    const int column = n + threadIdx.x % 4 * 2;
#pragma unroll
    for (int octet = 0; octet < G::COLUMNS / G::SPLITS / 8; ++octet) {
        const int at = column + 8 * octet;
        const auto* of = static_cast<const typename G::T*>(p.bias) + at;
        float2 bias = {0, 0};
        if (G::PERIOD > 1 && p.bias) {
            if (at >= 0 && at < p.N) bias.x = to_float(of[0]);
            if (at >= -1 && at + 1 < p.N) bias.y = to_float(of[1]);
        } else if (p.bias && at < p.N) {
            const Pair pair = *reinterpret_cast<const Pair*>(of);
            bias = {to_float(pair.x), to_float(pair.y)};
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) d[4 * octet + e] = G::After::of(d[4 * octet + e] + (e % 2 ? bias.y : bias.x));
    }
}

template <class G>
__device__ void consume_tiles(GemmShared<G>& shared, const Place<G>& place, const Rows<G>& rows, int warpgroup) {
    const int stride = (G::TURNS ? G::CONSUMERS : 1) * place.clusters, first = G::TURNS ? 0 : warpgroup * G::STRIPES * 64;
    constexpr int NOWHERE = -1;
    const int turn = 3, own_turn = turn + warpgroup, other_turn = turn + 1 - warpgroup;  // numbers of named barriers
    Ring<G::STAGES> ring;
    if (G::TURNS && warpgroup == 1) {
        named_arrive(turn, 256);
        ring.skip(place.steps);
    }
    constexpr int PANELS = G::COLUMNS / G::SPLITS / 64;
    uint32_t words[16 * (G::LATE ? PANELS : 1)];  // of a stripe, rounded
    Origin to = {NOWHERE, 0, 0};                  // where they belong
    const auto store = [&](int stripe, int panel) {
        const Origin at = {to.matrix, to.m, to.n + 64 * panel};
        store_columns(shared, place.p, rows, warpgroup, stripe * PANELS + panel, words + (G::LATE ? 16 * panel : 0), at);
    };
    for (int tile = place.cluster + (G::TURNS ? warpgroup * place.clusters : 0); tile < place.tiles(); tile += stride) {
        const Origin at = place.origin(tile, rows);
        float d[G::STRIPES][G::BN / 2];
        if (G::TURNS) named_sync(own_turn, 256);
        const bool holds = G::LATE && to.matrix != NOWHERE;
        multiply_tile(
            shared, place, ring, warpgroup, d,
            [&](int step) {
                if (holds)
#pragma unroll
                    for (int panel = 0; panel < PANELS; ++panel)
                        if (panel == step) store(0, panel);
            },
            [&] {
                if (G::TURNS && tile + place.clusters < place.tiles()) named_arrive(other_turn, 256);
            });
        if (holds)
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                if (panel >= place.steps) store(0, panel);
        if (G::TURNS) ring.skip(place.steps);
        if constexpr (G::SPLITS > 1) combine(shared, place, d[0]);
#pragma unroll
        for (int i = 0; i < G::STRIPES; ++i) {
            if constexpr (G::GATED)
#pragma unroll
                for (int e = 0; e < G::BN / 4; ++e) d[i][e] = G::Gate::of(d[i][e]) * d[i][G::BN / 4 + e];
            to = {at.matrix, at.m + first + 64 * i, at.n + place.split * (G::COLUMNS / G::SPLITS)};
            if constexpr (!std::is_void_v<typename G::After>) finish_columns<G>(d[i], place.p, to.n);
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                round_columns<typename G::T>(d[i] + 32 * panel, words + (G::LATE ? 16 * panel : 0));
                if (!G::LATE) store(i, panel);
            }
        }
    }
    if (G::LATE && to.matrix != NOWHERE)
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) store(0, panel);
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
}
#endif

template <class G>
__global__ void __launch_bounds__(G::THREADS, 1)
    gemm(const __grid_constant__ Rows<G> rows, const __grid_constant__ CUtensorMap b,
         const __grid_constant__ CUtensorMap b2, const Problem problem) {
#ifdef AK_HOPPER
    extern __shared__ uint8_t raw[];
    auto& shared = *reinterpret_cast<GemmShared<G>*>(raw + (-shared_address(raw) & 1023));
    const int warpgroup = uniform(threadIdx.x / 128);
    let_next_start();
    if (threadIdx.x == 0) {
        prefetch_map(rows.a[0]);
        prefetch_map(b);
        for (int i = 0; i < G::STAGES; ++i) {
            shared.full[i].init(1);
            shared.empty[i].init(G::SHARERS * G::CLUSTER);
        }
        shared.summed.init(1);
        publish_barriers();
        if (G::SPLITS > 1) shared.summed.arrive_expecting(G::SUM_BYTES);
    }
    if constexpr (G::CLUSTER * G::SPLITS > 1) cluster_sync();
    else __syncthreads();
    after_previous();
    const Place<G> place(problem);
    if (warpgroup == G::CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x == G::CONSUMERS * 128) load_tiles<G>(shared, place, rows, b, b2);
    } else {
        claim_registers<232>();
        consume_tiles<G>(shared, place, rows, warpgroup);
    }
    __syncwarp();
    if constexpr (G::CLUSTER > 1) cluster_sync();  // no block ends while another may still signal it; sums have been waited for
#endif
}

// One launch, `early` as in autokernel.cuh. A [M, K] and B [N, K] by the stride of the dim
// that is not contiguous, which A_ALONG_K and B_ALONG_K say; B2 as B.
template <class G>
int launch_one(const void* A, const void* B, const void* B2, void* C, Problem p, int64_t lda, int64_t ldb, int processors,
                bool early, cudaStream_t stream) {
    using T = typename G::T;
    const auto operand = [&](const T* base, bool along_k, int64_t rows, int64_t stride, uint32_t box_rows, uint32_t box_k) {
        const int64_t K = p.K;
        if (along_k) return tensor_map<T, 2>(base, {K, rows}, {stride}, {PANEL, box_rows});
        return tensor_map<T, 2>(base, {rows, K}, {stride}, {PANEL, box_k});
    };
    const auto weights = [&](const void* base) {
        const int box_rows = G::BN / (G::GATED ? 2 : 1) / G::CLUSTER;
        return operand(static_cast<const T*>(base), G::B_ALONG_K, p.N, ldb, box_rows, PANEL / G::CLUSTER);
    };
    const CUtensorMap b = weights(B), b2 = G::GATED ? weights(B2) : b;
    const uintptr_t at = reinterpret_cast<uintptr_t>(C);
    Rows<G> rows{static_cast<T*>(C), int(at % 16 / sizeof(T)), G::PERIOD > 1 || p.N % 8 == 0};
    for (int i = 0; i < min(G::PERIOD, p.M); ++i) {
        const int64_t count = (p.M - i + G::PERIOD - 1) / G::PERIOD, ahead = rows.ahead(i, p.N);
        rows.a[i] = operand(static_cast<const T*>(A) + i * lda, G::A_ALONG_K, count, G::PERIOD * lda, G::BM, PANEL);
        const int64_t N = p.N, whole = G::PERIOD > 1 ? (N + ahead) / 8 * 8 : N;
        if (rows.store_tma) rows.c[i] = tensor_map<T, 2>(rows.C + i * N - ahead, {whole, count}, {G::PERIOD * N}, {PANEL, 64});
    }
    const int tiles = tiles_along_m<G>(p.M) * tiles_along_n<G>(p.N);
    constexpr int CLUSTER = G::CLUSTER * G::SPLITS;
    const int clusters = G::SPLITS > 1 ? tiles : min(tiles, processors / CLUSTER);
    return launch(gemm<G>, clusters * CLUSTER, G::THREADS, G::SHARED_BYTES, CLUSTER, early, stream, rows, b, b2, p);
}

// What is left when whole waves of G's tiles are done: two blocks share the K of a tile.
template <class G>
using Rest = Gemm<typename G::T, 128, 128, 5, false, 1, G::A_ALONG_K, G::B_ALONG_K, void, 2, typename G::After>;

// Rows of C that fill whole waves, where the others are done sooner by Rest; else all. Rest costs 5,000 clocks, to start anew
// and to add up sums; a processor makes 2,048 products a clock.
template <class G>
int rows_of_whole_waves(const Problem& p, int processors) {
    constexpr int ROWS = G::CLUSTER * G::BM;
    const int columns = divide_up(p.N, G::COLUMNS), tiles = divide_up(p.M, ROWS) * columns, wave = processors / G::CLUSTER;
    const int rows = tiles / wave * wave / columns * ROWS;
    if (rows == 0 || rows >= p.M || tiles % wave == 0) return p.M;
    const int blocks = 2 * divide_up(p.M - rows, Rest<G>::BM) * divide_up(p.N, Rest<G>::BN);
    const int saved = G::BM * G::BN - divide_up(blocks, processors) * Rest<G>::BM * Rest<G>::BN / 2;
    return int64_t(saved) * p.K / 2048 > 5000 ? rows : p.M;
}

// C = A Bᵀ, the operands as in launch_one(): where the last wave of tiles would leave most of the GPU idle, in two launches.
template <class G>
int launch_gemm(const void* A, const void* B, const void* B2, void* C, Problem p, int64_t lda, int64_t ldb, int processors,
                bool early, cudaStream_t stream) {
    if constexpr (!G::GATED && G::SPLITS == 1 && G::PERIOD == 1 && G::BM * G::BN >= Rest<G>::BM * Rest<G>::BN) {
        using T = typename G::T;
        const int rows = rows_of_whole_waves<G>(p, processors), M = p.M;
        if (rows < M) {
            p.M = rows;
            if (const int error = launch_one<G>(A, B, nullptr, C, p, lda, ldb, processors, early, stream)) return error;
            p.M = M - rows;
            const T* rest = static_cast<const T*>(A) + rows * (G::A_ALONG_K ? lda : 1);
            T* to = static_cast<T*>(C) + int64_t(rows) * p.N;
            return launch_one<Rest<G>>(rest, B, nullptr, to, p, lda, ldb, processors, early, stream);
        }
    }
    return launch_one<G>(A, B, B2, C, p, lda, ldb, processors, early, stream);
}

}  // namespace hopper
