// Tensor cores as every NVIDIA GPU from sm_80 on has them: cp.async, ldmatrix and mma.sync, one wrapper each.
#pragma once
#include <autokernel.cuh>

__device__ inline uint32_t shared_at(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// 16 bytes from global to shared memory, asynchronously; those from `bytes` on become zero and are not read.
__device__ inline void copy_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the newest PENDING groups of this thread's copies have landed.
template <int PENDING>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices; lane 8i + j gives the address of row j of matrix i.
template <bool TRANSPOSED>
__device__ void load_matrices(uint32_t (&r)[4], const void* row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_at(row)));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_at(row)));
}

// d [16, 8] += a [16, 16] b [16, 8]. Lane l holds d[l / 4 + {0, 8}][2 (l % 4) + {0, 1}], the upper row's pair first.
template <class T>
__device__ void multiply_16x8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define AK_MMA(TYPE)                                                                                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
                 "{%0, %1, %2, %3};"                                                                                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (__is_same(T, f16)) AK_MMA("f16");
    else AK_MMA("bf16");
#undef AK_MMA
}
