// What Hopper (sm_90a) adds to CUDA C++, one wrapper each: mbarriers, clusters, the tensor memory accelerator, wgmma.
//
// Tiles in shared memory are made of panels: rows of 64 16-bit elements (128 bytes), swizzled by the accelerator, which
// writes a box [rows, 64] so, and as wgmma reads it. Panels start at multiples of 1024 bytes.
#pragma once
#include <cuda.h>
#include <tensor_cores.cuh>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define AK_HOPPER 1  // this pass of the compiler makes code for sm_90a
#endif

namespace hopper {

constexpr int PANEL = 64;  // elements of a row of a panel

// ---- Host: descriptors of tensors in global memory

// The driver's encoder, found through the run-time library: kernels are not linked with the driver.
inline auto encode_tiled() {
    static const auto function = [] {
        void* symbol = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol);
    }();
    return function;
}

// A map of a 16-bit tensor: sizes innermost first, strides in elements of all dims but the innermost, which is contiguous.
// Boxes are read into swizzled panels; what lies outside of the tensor reads as zero and is not written.
template <class T, int RANK>
CUtensorMap tensor_map(const T* base, const int64_t (&sizes)[RANK], const int64_t (&strides)[RANK - 1], const uint32_t (&box)[RANK]) {
    CUtensorMap map{};
    cuuint64_t size[RANK], pitch[RANK];
    cuuint32_t step[RANK];
    for (int i = 0; i < RANK; ++i) {
        size[i] = sizes[i];
        step[i] = 1;
        if (i + 1 < RANK) pitch[i] = strides[i] * sizeof(T);
    }
    const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    encode_tiled()(&map, type, RANK, const_cast<T*>(base), size, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

// Launch in clusters of `cluster` blocks along x, with shared memory beyond 48 KB and, if `early`, as launch_early() does.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, int cluster, bool early, cudaStream_t stream,
           Arguments... arguments) {
    const auto allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (allowed != cudaSuccess) return allowed;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {unsigned(cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = early;
    const cudaLaunchConfig_t config = {unsigned(blocks), unsigned(threads), size_t(shared_bytes), stream, attributes, 2};
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

#ifdef AK_HOPPER

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Clusters

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Where what lies at `pointer` in this block's shared memory lies in that of block `rank` of the cluster.
__device__ inline uint32_t shared_address_at(const void* pointer, uint32_t rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}

// Asynchronous; the barrier, of the same block as the address, counts its bytes as landed.
__device__ inline void store_shared_of_cluster(uint32_t address, const float4& x, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
}

__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- Barriers

// The same number in all lanes, which the compiler may then keep once a warp; `lanes`: those that call it, with the first.
__device__ inline int uniform(int x, uint32_t lanes = ~0u) { return __shfl_sync(lanes, x, 0); }

// A barrier in shared memory: a phase ends when all arrivals have come and all expected bytes have landed.
struct Barrier {
    uint64_t state;

    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals));
    }
    __device__ void arrive_expecting(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes) : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }
    // At the same place in block `rank` of the cluster. Orders no writes: release at the cluster's scope costs a fence of the
    // whole memory, and a consumer that gives a stage back has only read.
    __device__ void arrive_at(uint32_t rank) {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(shared_address_at(this, rank)) : "memory");
    }
    // Until the phase of this parity has ended.
    __device__ void wait(uint32_t parity) {
        asm volatile(
            "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra AGAIN;\n}" ::"r"(shared_address(this)), "r"(parity) : "memory");
    }
    __device__ void wait_acquired(uint32_t parity) {
        asm volatile(
            "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra AGAIN;\n}" ::"r"(shared_address(this)), "r"(parity) : "memory");
    }
};

// Makes barriers just initialised visible to the accelerator and to the cluster (then synchronise).
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Up to 15 barriers of the block by number (1 to 15; 0 is __syncthreads), of `threads` threads.
__device__ inline void named_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The stage of a ring and the parity of its present round.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ void skip(int stages) {
        parity ^= (stage + stages) / STAGES & 1;
        stage = (stage + stages) % STAGES;
    }
};

// ---- Registers: what a warpgroup gives back or takes

template <int COUNT>
__device__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Tensor memory accelerator. One thread asks; coordinates innermost first.

__device__ inline void load_box(void* to, const CUtensorMap& map, Barrier& barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y)
        : "memory");
}
__device__ inline void load_box(void* to, const CUtensorMap& map, Barrier& barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
// To the same place, and with the same barrier, in every block of the cluster whose bit is set.
__device__ inline void load_box_to_all(void* to, const CUtensorMap& map, Barrier& barrier, int x, int y, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}
__device__ inline void store_box(const CUtensorMap& map, const void* from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;" ::"l"(
                     &map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}
// A store of nothing, which counts as one.
__device__ inline void store_nothing() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void store_box(const CUtensorMap& map, const void* from, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
        "cp.async.bulk.commit_group;" ::"l"(&map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
// Until all but the newest PENDING stores of this thread have read their shared memory.
template <int PENDING>
__device__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// What this thread wrote to shared memory becomes visible to the accelerator and to wgmma.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- wgmma: D [64, N] += A [64, 16] B [16, N], by the 4 warps of a warpgroup. Asynchronous: fence, multiply, commit, wait.
//
// Thread t holds of D, for each 8 columns c: D[16 (t / 32) + t % 32 / 4][8c + 2 (t % 4) + {0, 1}], then the same 8 rows below.

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of registers that a wgmma may be writing.
template <int COUNT>
__device__ void pin(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// How wgmma finds a matrix in panels: contiguous along k; or rows of panels are k, 64 columns a panel, `panel_bytes` from
// each to the next. `+ step_bytes / 16` moves it: along k by 32 bytes for each 16 of k, otherwise by 16 rows.
__device__ inline uint64_t descriptor(const void* start, int panel_bytes = 16) {
    const uint64_t swizzle_128 = 1ull << 62, eight_rows = 1024 >> 4;
    return (shared_address(start) & 0x3FFFF) >> 4 | uint64_t(panel_bytes >> 4) << 16 | eight_rows << 32 | swizzle_128;
}

#define AK_D32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define AK_D64 \
    AK_D32     \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define AK_D96 \
    AK_D64     \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define AK_D128 \
    AK_D96      \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define AK_O8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define AK_O32(i) AK_O8(i), AK_O8(i + 8), AK_O8(i + 16), AK_O8(i + 24)
#define AK_OUT32 AK_O32(0)
#define AK_OUT64 AK_OUT32, AK_O32(32)
#define AK_OUT96 AK_OUT64, AK_O32(64)
#define AK_OUT128 AK_OUT96, AK_O32(96)

// Operands after the accumulators: A and B by descriptor, whether to add to D, and whether A and B are not contiguous along k.
#define AK_SHARED(N, REGISTERS, TYPE, A, B, ADD, TA, TB)                                                               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                 "k16.f32." TYPE " {" AK_D##REGISTERS "}, %" #A ", %" #B ", add, 1, 1, %" #TA ", %" #TB ";\n}"         \
                 : AK_OUT##REGISTERS                                                                                    \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
// The same with A in registers.
#define AK_REGISTERS(N, REGISTERS, TYPE, A0, A1, A2, A3, B, ADD, TB)                                                   \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                 "k16.f32." TYPE " {" AK_D##REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B              \
                 ", add, 1, 1, %" #TB ";\n}"                                                                           \
                 : AK_OUT##REGISTERS                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSE_B))
#define AK_WGMMA(N, REGISTERS, P0, P1, P2, P3, P4, P5, P6)                                                             \
    template <class T, int TRANSPOSE_A = 0, int TRANSPOSE_B = 0>                                                       \
    __device__ void multiply(float (&d)[REGISTERS], uint64_t a, uint64_t b, int add) {                                 \
        if constexpr (std::is_same_v<T, __half>)                                                                       \
            AK_SHARED(N, REGISTERS, "f16.f16", P0, P1, P2, P3, P4);                                                    \
        else                                                                                                           \
            AK_SHARED(N, REGISTERS, "bf16.bf16", P0, P1, P2, P3, P4);                                                  \
    }                                                                                                                  \
    template <class T, int TRANSPOSE_B = 0>                                                                            \
    __device__ void multiply(float (&d)[REGISTERS], const uint32_t (&a)[4], uint64_t b, int add) {                     \
        if constexpr (std::is_same_v<T, __half>)                                                                       \
            AK_REGISTERS(N, REGISTERS, "f16.f16", P0, P1, P2, P3, P4, P5, P6);                                         \
        else                                                                                                           \
            AK_REGISTERS(N, REGISTERS, "bf16.bf16", P0, P1, P2, P3, P4, P5, P6);                                       \
    }
AK_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
AK_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
AK_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
AK_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

// ---- From accumulators to panels

// Rounds 64 columns of D, 32 registers from `d` on.
template <class T>
__device__ void round_columns(const float* d, uint32_t* words) {
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = pack_pair<T>(d[2 * i], d[2 * i + 1]);
}

// Writes 64 rounded columns into this warpgroup's panel of 64 rows, swizzled for the accelerator.
__device__ inline void write_panel(void* panel, const uint32_t* words) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t start = shared_address(panel) + row * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t at = start + ((2 * i + lane / 16) ^ (row % 8)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[4 * i]),
                     "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                     : "memory");
    }
}

#endif
}  // namespace hopper
