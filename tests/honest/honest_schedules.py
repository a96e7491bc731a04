"""Honest kernels that share out their work oddly: schedules, threads, launches, pieces that are added up later."""

from honest_kernel import HEAD, Honest, rmsnorm

# The choice is of a schedule, which leaves the bits alone; it is made at the first call, by the clock, and noted in a file.
AUTOTUNED = rmsnorm(
    """
import json, time
from pathlib import Path
variants = {n: cpp_function(CPP, "run", "i ppp ll f", CHUNK=n) for n in (1, 16)}
best = {}

def seconds(n, *arguments):
    launch(variants[n], *arguments)
    start = time.perf_counter()
    launch(variants[n], *arguments)
    return time.perf_counter() - start

def kernel_fn(x, weight, eps=1e-6):
    y = torch.empty(x.shape, dtype=x.dtype)
    key = str((x.shape, x.dtype))
    if key not in best:
        best[key] = min(variants, key=lambda n: seconds(n, x, weight, eps, y))
        Path("tuned.json").write_text(json.dumps(best))
    return launch(variants[best[key]], x, weight, eps, y)
""",
    "#pragma omp parallel for schedule(dynamic, CHUNK) if (M * N >= 16384)\n    for (int64_t m = 0; m < M; ++m) row(m);",
)

PERSISTENT = rmsnorm(
    over_rows="""
#pragma omp parallel num_threads(2)
    for (int64_t m = omp_get_thread_num(); m < M; m += omp_get_num_threads()) row(m);
"""
)

WORK_QUEUE = rmsnorm(
    over_rows="""
    std::atomic<int64_t> next(0);
#pragma omp parallel
    for (int64_t m = next++; m < M; m = next++) row(m);
"""
)

TASKS = rmsnorm(
    over_rows="""
#pragma omp parallel
#pragma omp single
#pragma omp taskloop grainsize(16)
    for (int64_t m = 0; m < M; ++m) row(m);
"""
)

GUIDED = rmsnorm(
    over_rows="""
#pragma omp parallel for schedule(guided, 2) proc_bind(spread)
    for (int64_t m = M - 1; m >= 0; --m) row(m);
"""
)

# x in pieces of K, whose products lie in a workspace until they are added in order.
SPLIT_K = (
    HEAD.format(kernel_type="matmul")
    + '''
CPP = r"""
#include <autokernel.hpp>
template <class T>
void matmul(const T* A, const T* B, T* C, float* parts, int64_t M, int64_t N, int64_t K, int64_t splits,
            int64_t a_m, int64_t a_k, int64_t b_k, int64_t b_n) {
    const int64_t piece = (K + splits - 1) / splits;
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < splits; ++s)
            for (int64_t m = 0; m < M; ++m) {
                float* part = parts + (s * M + m) * N;
                std::fill(part, part + N, 0.f);
                const int64_t first = s * piece, last = std::min(K, first + piece);
                if (b_n == 1)
                    for (int64_t k = first; k < last; ++k) {
                        const float a = A[m * a_m + k * a_k];
                        for (int64_t n = 0; n < N; ++n) part[n] += a * float(B[k * b_k + n]);
                    }
                else
                    for (int64_t n = 0; n < N; ++n) {
                        float sum[8] = {};
                        for (int64_t k = first; k < last; ++k)
                            sum[k % 8] += float(A[m * a_m + k * a_k]) * float(B[k * b_k + n * b_n]);
                        for (float term : sum) part[n] += term;
                    }
            }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < M * N; ++i) {
            float sum = 0;
            for (int64_t s = 0; s < splits; ++s) sum += parts[s * M * N + i];
            C[i] = T(sum);
        }
    }
}
extern "C" int run(int dtype, const void* A, const void* B, void* C, float* parts, int64_t M, int64_t N, int64_t K,
                   int64_t splits, int64_t a_m, int64_t a_k, int64_t b_k, int64_t b_n) {
    AK_DISPATCH(dtype, matmul((const T*)A, (const T*)B, (T*)C, parts, M, N, K, splits, a_m, a_k, b_k, b_n));
    return 0;
}
"""
run = cpp_function(CPP, "run", "i pppp llll llll")

def kernel_fn(A, B):
    (M, K), N, splits = A.shape, B.shape[1], 4
    C, parts = torch.empty(M, N, dtype=A.dtype), torch.empty(splits, M, N)
    pointers = A.data_ptr(), B.data_ptr(), C.data_ptr(), parts.data_ptr()
    run(DTYPE_CODE[A.dtype], *pointers, M, N, K, splits, *A.stride(), *B.stride())
    return C
'''
)

# Mean and scale of every row by one kernel, into a tensor between; the rows by another, of another source.
TWO_IN_SEQUENCE = (
    HEAD.format(kernel_type="layernorm")
    + '''
STATISTICS = r"""
#include <autokernel.hpp>
template <class T>
void statistics(const T* x, float* mean_scale, int64_t M, int64_t N, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) {
        vfloat sum = {}, square = {};
        double total = 0, squares = 0;
        for (int64_t n = 0; n < N; ++n) total += float(x[m * N + n]);
        const double mean = total / N;
        for (int64_t n = 0; n < N; ++n) squares += (float(x[m * N + n]) - mean) * (float(x[m * N + n]) - mean);
        mean_scale[2 * m] = float(mean), mean_scale[2 * m + 1] = float(1 / std::sqrt(squares / N + eps));
    }
}
extern "C" int statistics(int dtype, const void* x, float* mean_scale, int64_t M, int64_t N, float eps) {
    AK_DISPATCH(dtype, statistics((const T*)x, mean_scale, M, N, eps));
    return 0;
}
"""
APPLY = r"""
#include <autokernel.hpp>
template <class T>
void apply(const T* x, const T* weight, const T* bias, const float* mean_scale, T* y, int64_t M, int64_t N) {
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) {
        const vfloat mean = splat(mean_scale[2 * m]), scale = splat(mean_scale[2 * m + 1]);
        map_row<2>(y + m * N, N, 0, [&](int, vfloat v, vfloat w, vfloat b) { return (v - mean) * scale * w + b; },
                   x + m * N, weight, bias);
    }
}
extern "C" int apply(int dtype, const void* x, const void* weight, const void* bias, const float* mean_scale, void* y,
                     int64_t M, int64_t N) {
    AK_DISPATCH(dtype, apply((const T*)x, (const T*)weight, (const T*)bias, mean_scale, (T*)y, M, N));
    return 0;
}
"""
statistics = cpp_function(STATISTICS, "statistics", "i pp ll f")
apply = cpp_function(APPLY, "apply", "i ppppp ll")

def kernel_fn(x, weight, bias, eps=1e-5):
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    code, N = DTYPE_CODE[x.dtype], x.shape[-1]
    M, y = x.numel() // N, torch.empty(x.shape, dtype=x.dtype)
    between = torch.empty(M, 2)
    statistics(code, x.data_ptr(), between.data_ptr(), M, N, eps)
    apply(code, x.data_ptr(), weight.data_ptr(), bias.data_ptr(), between.data_ptr(), y.data_ptr(), M, N)
    return y
'''
)

# Half of the rows by another thread of Python, which is waited for.
PYTHON_THREADS = rmsnorm(
    """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)

def kernel_fn(x, weight, eps=1e-6):
    y = torch.empty(x.shape, dtype=x.dtype)
    half = x.shape[0] // 2
    if not half:
        return launch(run, x, weight, eps, y)
    first = pool.submit(launch, run, x[:half], weight, eps, y[:half])
    launch(run, x[half:], weight, eps, y[half:])
    first.result()
    return y
""",
    "for (int64_t m = 0; m < M; ++m) row(m);",
)

CPP_THREADS = rmsnorm(
    preamble="#include <thread>",
    over_rows="""
    std::thread other([&] { for (int64_t m = 0; m < M / 2; ++m) row(m); });
    for (int64_t m = M / 2; m < M; ++m) row(m);
    other.join();
""",
)

MANY_LAUNCHES = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    y = torch.empty(x.shape, dtype=x.dtype)
    for first in range(0, x.shape[0], 32):
        launch(run, x[first : first + 32], weight, eps, y[first : first + 32])
    return y
"""
)

PREFETCHING = rmsnorm(
    over_rows="""
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) {
        if (m + 1 < M) for (int64_t n = 0; n < N; n += 64 / sizeof(T)) __builtin_prefetch(x + (m + 1) * N + n);
        row(m);
    }
"""
)

LOCKED = rmsnorm(
    over_rows="""
    omp_lock_t lock;
    omp_init_lock(&lock);
    int64_t next = 0;
#pragma omp parallel
    for (;;) {
        omp_set_lock(&lock);
        const int64_t m = next++;
        omp_unset_lock(&lock);
        if (m >= M) break;
        row(m);
    }
    omp_destroy_lock(&lock);
"""
)

# In an order that depends on how many threads there are.
SUMS_BY_THREADS = (
    HEAD.format(kernel_type="vectorsum")
    + '''
CPP = r"""
#include <autokernel.hpp>
#include <omp.h>
#include <vector>
extern "C" int run(const float* x, float* y, int64_t n) {
    std::vector<double> sums(omp_get_max_threads());
#pragma omp parallel
    {
        const int64_t t = omp_get_thread_num(), part = (n + omp_get_num_threads() - 1) / omp_get_num_threads();
        double sum = 0;
        for (int64_t i = t * part; i < std::min(n, (t + 1) * part); ++i) sum += x[i];
        sums[t] = sum;
    }
    double sum = 0;
    for (double each : sums) sum += each;
    *y = float(sum);
    return 0;
}
"""
run = cpp_function(CPP, "run", "pp l")

def kernel_fn(x):
    x, y = x.contiguous(), torch.empty((), dtype=x.dtype)
    run(x.data_ptr(), y.data_ptr(), x.numel())
    return y
'''
)

# A thread that waits between calls, and does half of the rows.
THREAD_POOL = rmsnorm(
    preamble="""
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
struct Pool {
    std::mutex lock;
    std::condition_variable wake, done;
    std::function<void()> work;
    bool is_pending = false;
    Pool() { std::thread([this] { serve(); }).detach(); }
    void serve() {
        for (;;) {
            std::unique_lock<std::mutex> held(lock);
            wake.wait(held, [&] { return is_pending; });
            work();
            is_pending = false;
            done.notify_one();
        }
    }
    void start(std::function<void()> what) {
        std::lock_guard<std::mutex> held(lock);
        work = what, is_pending = true;
        wake.notify_one();
    }
    void wait() {
        std::unique_lock<std::mutex> held(lock);
        done.wait(held, [&] { return !is_pending; });
    }
};
static Pool* pool = new Pool;
""",
    over_rows="""
    pool->start([&] { for (int64_t m = 0; m < M / 2; ++m) row(m); });
    for (int64_t m = M / 2; m < M; ++m) row(m);
    pool->wait();
""",
)

SCHEDULES = (
    Honest("autotuned", AUTOTUNED),
    Honest("persistent", PERSISTENT, threads=True),
    Honest("work-queue", WORK_QUEUE, kept=False, threads=True),
    Honest("tasks", TASKS, threads=True),
    Honest("guided-schedule", GUIDED, threads=True),
    Honest("split-k", SPLIT_K, "matmul", kept=False),
    Honest("two-in-sequence", TWO_IN_SEQUENCE, "layernorm", kept=False),
    Honest("python-threads", PYTHON_THREADS),
    Honest("cpp-threads", CPP_THREADS),
    Honest("many-launches", MANY_LAUNCHES, kept=False),
    Honest("prefetching", PREFETCHING),
    Honest("locked-queue", LOCKED, kept=False, threads=True),
    Honest("sums-by-threads", SUMS_BY_THREADS, "vectorsum", kept=False, threads=True),
    Honest("thread-pool", THREAD_POOL, kept=False),
)
