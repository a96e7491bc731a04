// C = A Bᵀ for 16-bit matrices on Hopper: one warpgroup feeds shared memory, the others keep the tensor cores busy.
//
// A block computes BM x BN of C, 64 rows per consumer warpgroup, in steps of 64 along K, with STAGES steps in flight.
// CLUSTER (1 or 2) blocks are neighbours along M: each loads a half of the tile of B that both need, for both (multicast),
// which keeps the traffic from L2 under its limit. Blocks are persistent: while consumers write one tile, the producer
// loads the next. SPLITS > 1: as many groups of blocks in the cluster share one tile's K, and add their sums through each
// other's shared memory, always in the same order.
#pragma once
#include <hopper.cuh>

namespace hopper {

// Gate: void for a plain product; a type with `static float of(float)` for C = of(A Bᵀ) · (A B2ᵀ), where a tile of B is BN / 2 rows of each.
template <class Element, int BM_, int BN_, int STAGES_, int CLUSTER_, bool A_ALONG_K_, bool B_ALONG_K_, class Gate_ = void, int SPLITS_ = 1>
struct Gemm {
    using T = Element;
    using Gate = Gate_;
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CLUSTER = CLUSTER_, SPLITS = SPLITS_;
    static constexpr bool A_ALONG_K = A_ALONG_K_, B_ALONG_K = B_ALONG_K_, GATED = !std::is_void_v<Gate_>;
    static constexpr int CONSUMERS = BM / 64, THREADS = (CONSUMERS + 1) * 128, BLOCKS = CLUSTER * SPLITS;
    static constexpr int PARTS = GATED || CLUSTER > 1 ? 2 : 1, PART = BN / PARTS;  // rows of B loaded at a time
    static constexpr int COLUMNS = GATED ? BN / 2 : BN;                            // of C
    static constexpr int STAGE_BYTES = (BM + BN) * PANEL * 2;
    static constexpr int ROOM = 232448 - 1024 - 256 - STAGES * STAGE_BYTES;  // for panels of C on their way out
    static constexpr int PANELS = COLUMNS / 64 * CONSUMERS * 8192 <= ROOM ? COLUMNS / 64 : 2;
    static constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + CONSUMERS * PANELS * 8192 + 256;
    static_assert(PANELS * CONSUMERS * 8192 <= ROOM && COLUMNS / 64 % PANELS == 0 && (B_ALONG_K || PART % 64 == 0));
};

struct Problem {
    int M, N, K;
    int group;       // rows of clusters of tiles that are walked together, for their operands to meet in L2
    bool store_tma;  // C's rows start at multiples of 16 bytes
};

#ifdef AK_HOPPER

template <class G>
struct GemmShared {
    typename G::T a[G::STAGES][G::BM * PANEL];
    typename G::T b[G::STAGES][G::BN * PANEL];
    typename G::T c[G::CONSUMERS][G::PANELS][64 * PANEL];
    Barrier full[G::STAGES], empty[G::STAGES];
};

// Where a block works: its tile of C and its part of K.
template <class G>
struct Place {
    int m_rank, split, first_step, steps;
    Problem p;
    int rows, columns;

    __device__ Place(const Problem& problem) : p(problem) {
        const int rank = G::BLOCKS > 1 ? cluster_rank() : 0, all = (p.K + PANEL - 1) / PANEL;
        m_rank = rank % G::CLUSTER;
        split = rank / G::CLUSTER;
        const int share = (all + G::SPLITS - 1) / G::SPLITS;
        first_step = split * share;
        steps = max(min(share, all - first_step), 0);
        rows = (p.M + G::CLUSTER * G::BM - 1) / (G::CLUSTER * G::BM);
        columns = (p.N + G::COLUMNS - 1) / G::COLUMNS;
    }
    __device__ int tiles() const { return rows * columns; }
    __device__ int2 origin(int tile) const {
        const int first = tile / (p.group * columns) * p.group, within = tile % (p.group * columns);
        const int group = min(rows - first, p.group);
        return {((first + within % group) * G::CLUSTER + m_rank) * G::BM, within / group * G::COLUMNS};
    }
};

template <class G>
__device__ void load_tiles(GemmShared<G>& shared, const Place<G>& place, const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& b2) {
    Ring<G::STAGES> ring;
    for (int tile = blockIdx.x / G::BLOCKS; tile < place.tiles(); tile += gridDim.x / G::BLOCKS) {
        const int2 at = place.origin(tile);
        for (int step = 0; step < place.steps; ++step, ring.advance()) {
            const int k = (place.first_step + step) * PANEL;
            Barrier& full = shared.full[ring.stage];
            shared.empty[ring.stage].wait(ring.parity ^ 1);
            full.arrive_expecting(G::STAGE_BYTES);
            auto* to = shared.a[ring.stage];
            if constexpr (G::A_ALONG_K)
                load_box(to, a, full, k, at.x);
            else
                for (int m = 0; m < G::BM; m += PANEL) load_box(to + m * PANEL, a, full, at.x + m, k);
#pragma unroll
            for (int part = 0; part < G::PARTS; ++part) {
                if (G::CLUSTER > 1 && part != place.m_rank) continue;
                const CUtensorMap& map = G::GATED && part ? b2 : b;
                const int n = at.y + (G::GATED ? 0 : part * G::PART);
                auto* to = shared.b[ring.stage] + part * G::PART * PANEL;
                for (int i = 0; i < G::PART; i += G::B_ALONG_K ? G::PART : PANEL) {
                    const int x = G::B_ALONG_K ? k : n + i, y = G::B_ALONG_K ? n : k;
                    if constexpr (G::CLUSTER > 1)
                        load_box_to_all(to + i * PANEL, map, full, x, y, 3 << (place.split * G::CLUSTER));
                    else
                        load_box(to + i * PANEL, map, full, x, y);
                }
            }
        }
    }
}

// The products of one tile, from the stages as they come; each is given back to the producers that fill it.
template <class G>
__device__ void multiply_tile(GemmShared<G>& shared, const Place<G>& place, Ring<G::STAGES>& ring, int warpgroup, float (&d)[G::BN / 2]) {
    using T = typename G::T;
    const auto give_back = [&](int stage) {
        if constexpr (G::CLUSTER > 1) {
            if (threadIdx.x % 128 < G::CLUSTER) shared.empty[stage].arrive_at(place.split * G::CLUSTER + threadIdx.x % 128);
        } else if (threadIdx.x % 128 == 0) {
            shared.empty[stage].arrive();
        }
    };
    int previous = 0;
    for (int step = 0; step < place.steps; ++step, ring.advance()) {
        shared.full[ring.stage].wait(ring.parity);
        const uint64_t a = descriptor(shared.a[ring.stage] + warpgroup * 64 * PANEL), b = descriptor(shared.b[ring.stage], 8192);
        pin(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL; k += 16)
            multiply<T, !G::A_ALONG_K, !G::B_ALONG_K>(d, a + k * (G::A_ALONG_K ? 2 : 128) / 16, b + k * (G::B_ALONG_K ? 2 : 128) / 16,
                                                      step + k > 0);
        wgmma_commit();
        pin(d);
        if (step > 0) {
            wgmma_wait<1>();
            give_back(previous);
        }
        previous = ring.stage;
    }
    wgmma_wait<0>();
    pin(d);
    if (place.steps > 0) give_back(previous);
}

// 64 columns of C from 32 accumulators: through a panel and the accelerator, or element by element.
template <class G>
__device__ void store_columns(GemmShared<G>& shared, const Problem& p, const CUtensorMap& map, typename G::T* C, int warpgroup, int panel, const float* d, int m, int n) {
    using T = typename G::T;
    if (p.store_tma) {
        T* staging = shared.c[warpgroup][panel % G::PANELS];
        if (threadIdx.x % 128 == 0) wait_stores_read<G::PANELS - 1>();
        named_sync(1 + warpgroup, 128);
        write_panel(staging, d);
        fence_async();
        named_sync(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) store_box(map, staging, n, m);
        return;
    }
    const int row = m + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = n + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;
        if (r < p.M && c < p.N) C[int64_t(r) * p.N + c] = T(d[i]);
    }
}

// Adds the sums of all splits, of which each block gets a share of the columns, and stores them.
template <class G>
__device__ void combine_and_store(GemmShared<G>& shared, const Place<G>& place, const CUtensorMap& map, typename G::T* C, int warpgroup, float (&d)[G::BN / 2], int m, int n) {
    constexpr int SHARE = G::BN / 2 / G::SPLITS;
    static_assert(SHARE % 32 == 0 && G::CONSUMERS * 128 * G::BN / 2 * 4 <= G::STAGES * G::STAGE_BYTES);
    float4* sums = reinterpret_cast<float4*>(&shared) + threadIdx.x;  // in place of the stages
    named_sync(G::CONSUMERS + 1, G::CONSUMERS * 128);                 // which all consumers have read
#pragma unroll
    for (int i = 0; i < G::BN / 8; ++i) sums[i * G::CONSUMERS * 128] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
    cluster_sync();
    float total[SHARE] = {};
#pragma unroll
    for (int split = 0; split < G::SPLITS; ++split)
#pragma unroll
        for (int i = 0; i < SHARE / 4; ++i) {
            uint32_t at = shared_address(sums + (place.split * SHARE / 4 + i) * G::CONSUMERS * 128);
            float4 part;
            asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(split * G::CLUSTER + place.m_rank));
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                         : "r"(at)
                         : "memory");
            total[4 * i] += part.x, total[4 * i + 1] += part.y, total[4 * i + 2] += part.z, total[4 * i + 3] += part.w;
        }
#pragma unroll
    for (int i = 0; i < SHARE / 32; ++i)
        store_columns<G>(shared, place.p, map, C, warpgroup, i, total + 32 * i, m, n + place.split * SHARE * 2 + 64 * i);
}

template <class G>
__device__ void consume_tiles(GemmShared<G>& shared, const Place<G>& place, const CUtensorMap& map, typename G::T* C, int warpgroup) {
    Ring<G::STAGES> ring;
    for (int tile = blockIdx.x / G::BLOCKS; tile < place.tiles(); tile += gridDim.x / G::BLOCKS) {
        const int2 at = place.origin(tile);
        const int m = at.x + warpgroup * 64;
        float d[G::BN / 2];
        if (place.steps == 0)
            for (float& sum : d) sum = 0;
        multiply_tile(shared, place, ring, warpgroup, d);
        if constexpr (G::SPLITS > 1) {
            combine_and_store(shared, place, map, C, warpgroup, d, m, at.y);
        } else {
            if constexpr (G::GATED)
#pragma unroll
                for (int i = 0; i < G::BN / 4; ++i) d[i] = G::Gate::of(d[i]) * d[G::BN / 4 + i];
#pragma unroll
            for (int panel = 0; panel < G::COLUMNS / 64; ++panel)
                store_columns<G>(shared, place.p, map, C, warpgroup, panel, d + 32 * panel, m, at.y + 64 * panel);
        }
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
}
#endif

template <class G>
__global__ void __launch_bounds__(G::THREADS, 1) __cluster_dims__(G::BLOCKS, 1, 1)
    gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap b2,
         const __grid_constant__ CUtensorMap c, typename G::T* C, const Problem problem) {
#ifdef AK_HOPPER
    extern __shared__ uint8_t raw[];
    auto& shared = *reinterpret_cast<GemmShared<G>*>(raw + (-shared_address(raw) & 1023));
    const int warpgroup = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < G::STAGES; ++i) {
            shared.full[i].init(1);
            shared.empty[i].init(G::CONSUMERS * G::CLUSTER);
        }
        publish_barriers();
    }
    if constexpr (G::BLOCKS > 1)
        cluster_sync();
    else
        __syncthreads();
    const Place<G> place(problem);
    if (warpgroup == G::CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x == G::CONSUMERS * 128) load_tiles<G>(shared, place, a, b, b2);
        if constexpr (G::SPLITS > 1) {
            __syncwarp();
            cluster_sync();  // the consumers' in combine_and_store
        }
    } else {
        claim_registers<(G::CONSUMERS == 1 ? 240 : G::CONSUMERS == 2 ? 232 : 152)>();
        consume_tiles<G>(shared, place, c, C, warpgroup);
    }
    __syncwarp();
    if constexpr (G::BLOCKS > 1) cluster_sync();  // no block ends while another may still signal it
#endif
}

// One launch. A [M, K] and B [N, K] by the strides of both dims, of which one is 1 as A_ALONG_K and B_ALONG_K say; B2 as B.
template <class G>
int launch_gemm(const void* A, const void* B, const void* B2, void* C, Problem p, int64_t lda, int64_t ldb, int processors, cudaStream_t stream) {
    using T = typename G::T;
    const auto operand = [&](const void* base, bool along_k, int64_t rows, int64_t stride, uint32_t box_rows) {
        const int64_t K = p.K;
        if (along_k) return tensor_map<T, 2>(static_cast<const T*>(base), {K, rows}, {stride}, {PANEL, box_rows});
        return tensor_map<T, 2>(static_cast<const T*>(base), {rows, K}, {stride}, {PANEL, PANEL});
    };
    const CUtensorMap a = operand(A, G::A_ALONG_K, p.M, lda, G::BM), b = operand(B, G::B_ALONG_K, p.N, ldb, G::PART);
    const CUtensorMap b2 = G::GATED ? operand(B2, G::B_ALONG_K, p.N, ldb, G::PART) : b;
    p.store_tma = p.N % 8 == 0;
    CUtensorMap c{};
    if (p.store_tma) c = tensor_map<T, 2>(static_cast<T*>(C), {p.N, p.M}, {p.N}, {PANEL, 64});
    const int rows = (p.M + G::CLUSTER * G::BM - 1) / (G::CLUSTER * G::BM), columns = (p.N + G::COLUMNS - 1) / G::COLUMNS;
    const int resident = G::SPLITS > 1 ? rows * columns : min(rows * columns, processors / G::CLUSTER);
    const auto allowed = cudaFuncSetAttribute(gemm<G>, cudaFuncAttributeMaxDynamicSharedMemorySize, G::SHARED_BYTES);
    if (allowed != cudaSuccess) return allowed;
    gemm<G><<<resident * G::BLOCKS, G::THREADS, G::SHARED_BYTES, stream>>>(a, b, b2, c, static_cast<T*>(C), p);
    return cudaGetLastError();
}

}  // namespace hopper
