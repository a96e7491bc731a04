// A matrix product whose results go on in registers: to a bias, an activation, another product's factor.
//
// A kernel defines BLOCK_K (terms summed before a result is touched again), BLOCK_N and BLOCK_M (columns and rows that a
// thread takes at a time).
#pragma once
#include <panels.hpp>

// x [M, K] times weights that pack_weights(p, k, kc, panel) packs: NR columns, panel number p, terms k to k + kc.
// finish(m, p, tile) gets each finished tile: MR rows from m on, the columns of panel p.
template <class T, class Pack, class Finish>
void product(const T* x, int64_t stride_m, int64_t stride_k, int64_t M, int64_t K, int64_t panels_n, Pack pack_weights,
             Finish finish) {
    const int64_t threads = thread_count(), panels_m = blocks(M, MR);
    // as many column blocks as threads can share evenly; rows are divided further only if those are too few
    const int64_t blocks_n = std::min(panels_n, blocks(blocks(panels_n * NR, BLOCK_N), threads) * threads);
    const int64_t blocks_m = std::min(panels_m, std::max(blocks(M, BLOCK_M), threads / blocks_n));
    const int64_t nc = blocks(panels_n, blocks_n), mc = blocks(panels_m, blocks_m);
    const Buffer packed_x = buffer(panels_m * MR * K);
#pragma omp parallel
    {
#pragma omp for collapse(2)
        for (int64_t k = 0; k < K; k += BLOCK_K)
            for (int64_t m = 0; m < panels_m; ++m) {
                const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
                float* panel = packed_x.get() + (k * panels_m + m * kc) * MR;
                pack<MR>(x + m * MR * stride_m + k * stride_k, stride_m, stride_k, std::min(MR, M - m * MR), kc, panel);
            }
        alignas(64) float weights[BLOCK_K * NR];
        const Buffer unfinished = buffer(K > BLOCK_K ? mc * nc * MR * NR : 0);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t n0 = 0; n0 < panels_n; n0 += nc)
            for (int64_t m0 = 0; m0 < panels_m; m0 += mc)
                for (int64_t k = 0; k < K; k += BLOCK_K) {
                    const int64_t kc = std::min<int64_t>(BLOCK_K, K - k);
                    for (int64_t n = n0; n < std::min(n0 + nc, panels_n); ++n) {
                        pack_weights(n, k, kc, weights);
                        for (int64_t m = m0; m < std::min(m0 + mc, panels_m); ++m) {
                            float* kept = unfinished.get() + ((n - n0) * mc + m - m0) * MR * NR;
                            Tile sum = {};
                            if (k > 0) std::memcpy(sum, kept, sizeof sum);
                            multiply<1, MR>(packed_x.get() + (k * panels_m + m * kc) * MR, weights, kc, sum);
                            if (k + kc < K)
                                std::memcpy(kept, sum, sizeof sum);
                            else
                                finish(m * MR, n, sum);
                        }
                    }
                }
    }
}
