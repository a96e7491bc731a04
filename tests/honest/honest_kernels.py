"""Odd but honest kernels, which the gate must pass: each does something that a cheat also does, and does its own work."""

from dataclasses import dataclass

from autokernel.spec import load_spec

SLOWED = 8  # times: so much slower is the starter that an odd kernel has to beat


@dataclass(frozen=True)
class Honest:
    """`kept`: it is fast enough to be kept beside a starter that computes its answer SLOWED times. `refused`: why the
    gate does not pass it yet; such an entry is a debt. `threads`: what is odd needs several of OpenMP's."""

    name: str
    source: str
    kernel_type: str = "rmsnorm"
    kept: bool = True
    refused: str = ""
    threads: bool = False


HEAD = """
import torch
from autokernel.build import DTYPE_CODE, cpp_function
KERNEL_TYPE = "{kernel_type}"
BACKEND = "cpp"
"""

# RMSNorm, one row after another; OVER_ROWS says in which order, by whom.
ROWS = r"""
#include <autokernel.hpp>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>
PREAMBLE
template <class T>
void one_row(const T* x, const T* weight, T* y, int64_t N, float eps) {
    vfloat squares[2] = {};
    fold_row<2>(N, 0, [&](int u, vfloat v) { squares[u] += v * v; }, x);
    const vfloat scale = splat(1 / std::sqrt(sum_of(squares[0] + squares[1]) / N + eps));
    map_row<2>(y, N, 0, [&](int, vfloat v, vfloat w) { return v * scale * w; }, x, weight);
}
template <class T>
void rows(const T* x, const T* weight, T* y, int64_t M, int64_t N, float eps) {
    auto row = [&](int64_t m) { one_row(x + m * N, weight, y + m * N, N, eps); };
    OVER_ROWS
}
extern "C" int run(int dtype, const void* x, const void* weight, void* y, int64_t M, int64_t N, float eps) {
    AK_DISPATCH(dtype, rows((const T*)x, (const T*)weight, (T*)y, M, N, eps));
    return 0;
}
"""
SIMPLE_LOOP = """
#pragma omp parallel for schedule(static) if (M * N >= 16384)
    for (int64_t m = 0; m < M; ++m) row(m);
"""
KERNEL_FN = """
def kernel_fn(x, weight, eps=1e-6):
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""


def rmsnorm(kernel_fn: str = KERNEL_FN, over_rows: str = SIMPLE_LOOP, preamble: str = "") -> str:
    """A kernel file whose kernel_fn may use run and launch(run, x, weight, eps, y), and the text of the C++ as CPP."""
    cpp = ROWS.replace("OVER_ROWS", over_rows).replace("PREAMBLE", preamble)
    return (
        HEAD.format(kernel_type="rmsnorm")
        + f"CPP = {cpp!r}\n"
        + 'run = cpp_function(CPP, "run", "i ppp ll f", ROWS_AT_ONCE=1)\n\n'
        + "def launch(run, x, weight, eps, y):\n"
        + "    x, weight, N = x.contiguous(), weight.contiguous(), x.shape[-1]\n"
        + "    code, M = DTYPE_CODE[x.dtype], x.numel() // N\n"
        + "    run(code, x.data_ptr(), weight.data_ptr(), y.data_ptr(), M, N, eps)\n"
        + "    return y\n"
        + kernel_fn
    )


def starter(kernel_type: str) -> str:
    return (load_spec(kernel_type).folder / "cpp_kernel.py").read_text()


def wrapped(before: str, kernel_type: str = "rmsnorm") -> str:
    """The type's starter; `before` runs at each call."""
    return starter(kernel_type).replace("def kernel_fn(", "def _right(") + (
        f"\ndef kernel_fn(*args, **kwargs):\n    {before}\n    return _right(*args, **kwargs)\n"
    )


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

# Scratch memory that is kept from call to call and grows; the output is fresh.
WORKSPACE = rmsnorm(
    """
scratch = {}

def kernel_fn(x, weight, eps=1e-6):
    kept = scratch.get(x.dtype)
    if kept is None or kept.numel() < x.numel():
        kept = scratch[x.dtype] = torch.empty(x.numel(), dtype=x.dtype)
    copy = kept[: x.numel()].view(x.shape)
    copy.copy_(x)
    return launch(run, copy, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

WORKSPACE_IN_CPP = rmsnorm(
    preamble="static thread_local std::vector<float> scratch;",
    over_rows="""
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) {
        scratch.resize(N);
        for (int64_t n = 0; n < N; ++n) scratch[n] = x[m * N + n];
        vfloat squares[2] = {};
        fold_row<2>(N, 0, [&](int u, vfloat v) { squares[u] += v * v; }, scratch.data());
        const vfloat scale = splat(1 / std::sqrt(sum_of(squares[0] + squares[1]) / N + eps));
        map_row<2>(y + m * N, N, 0, [&](int, vfloat v, vfloat w) { return v * scale * w; }, scratch.data(), weight);
    }
""",
)

# B is static: laid out anew once for each tensor that holds it, and kept as long as that tensor lives.
PREPARED_WEIGHTS = (
    starter("matmul").replace("def kernel_fn(", "def _right(")
    + """
from torch.utils.weak import WeakTensorKeyDictionary
prepared = WeakTensorKeyDictionary()

def kernel_fn(A, B):
    if B not in prepared:
        prepared[B] = B.t().contiguous()
    return _right(A, prepared[B].t())
"""
)

PREPARED_ATTRIBUTE = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    if not hasattr(weight, "prepared"):
        weight.prepared = weight.clone()
    return launch(run, x, weight.prepared, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

VIEW_OF_LARGER = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    padded = torch.empty(x.numel() + 128, dtype=x.dtype)
    y = padded[64 : 64 + x.numel()].view(x.shape)
    return launch(run, x, weight, eps, y)
"""
)

FREE_RESULTS = rmsnorm(
    """
results = {}

def users(y):
    return torch._C._storage_Use_Count(y.untyped_storage()._cdata)

nobody = users(torch.empty(1))

def kernel_fn(x, weight, eps=1e-6):
    made = results.setdefault((x.shape, x.dtype), [])
    y = next((y for y in made if users(y) == nobody), None)
    if y is None:
        made.append(y := torch.empty(x.shape, dtype=x.dtype))
    return launch(run, x, weight, eps, y.view(y.shape))
"""
)

CONTEXT_DEPENDENT = (
    HEAD.format(kernel_type="softmax")
    + '''
CPP = r"""
#include <autokernel.hpp>
template <class T>
void softmax(const T* x, T* y, int64_t outer, int64_t N, int64_t inner) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < outer * inner; ++row) {
        const int64_t at = row / inner * N * inner + row % inner;
        float peak = -INFINITY, total = 0;
        for (int64_t n = 0; n < N; ++n) {
            const float v = x[at + n * inner];
            peak = (v > peak || v != v) ? v : peak;
        }
        for (int64_t n = 0; n < N; ++n) total += ak_exp(float(x[at + n * inner]) - peak);
        for (int64_t n = 0; n < N; ++n) y[at + n * inner] = T(ak_exp(float(x[at + n * inner]) - peak) / total);
    }
}
template <class T>
void softmax_fast(const T* x, T* y, int64_t M, int64_t N) {
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) {
        vfloat best[2] = {splat(-INFINITY), splat(-INFINITY)}, total[2] = {};
        fold_row<2>(N, -INFINITY, [&](int u, vfloat v) { best[u] = larger(v, best[u]); }, x + m * N);
        const vfloat peak = splat(max_of(larger(best[0], best[1])));
        fold_row<2>(N, -INFINITY, [&](int u, vfloat v) { total[u] += vexp(v - peak); }, x + m * N);
        const vfloat scale = splat(1 / sum_of(total[0] + total[1]));
        map_row<2>(y + m * N, N, 0, [&](int, vfloat v) { return vexp(v - peak) * scale; }, x + m * N);
    }
}
extern "C" int slow(int dtype, const void* x, void* y, int64_t outer, int64_t N, int64_t inner) {
    AK_DISPATCH(dtype, softmax((const T*)x, (T*)y, outer, N, inner));
    return 0;
}
extern "C" int fast(int dtype, const void* x, void* y, int64_t M, int64_t N) {
    AK_DISPATCH(dtype, softmax_fast((const T*)x, (T*)y, M, N));
    return 0;
}
"""
slow, fast = cpp_function(CPP, "slow", "i pp lll"), cpp_function(CPP, "fast", "i pp ll")

def kernel_fn(x, dim=-1):
    dim %= x.dim()
    y, N = torch.empty(x.shape, dtype=x.dtype), x.shape[dim]
    if x.is_contiguous() and dim == x.dim() - 1 and x.data_ptr() % 16 == 0:
        fast(DTYPE_CODE[x.dtype], x.data_ptr(), y.data_ptr(), x.numel() // N, N)
        return y
    x = x.contiguous()
    inner = x.stride(dim)
    slow(DTYPE_CODE[x.dtype], x.data_ptr(), y.data_ptr(), x.numel() // (N * inner), N, inner)
    return y
'''
)

# A library for each width that matters, in which a row's length is a constant; another for the rest.
SPECIALISED = rmsnorm(
    """
def specialised(N):
    constant = f"rows(const T* x, const T* weight, T* y, int64_t M, int64_t, float eps) {{ constexpr int64_t N = {N};"
    cpp = CPP.replace("rows(const T* x, const T* weight, T* y, int64_t M, int64_t N, float eps) {", constant)
    assert cpp != CPP
    return cpp_function(cpp, "run", "i ppp ll f")

known = {N: specialised(N) for N in (768, 1024)}

def kernel_fn(x, weight, eps=1e-6):
    return launch(known.get(x.shape[-1], run), x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

# The file is a generator of kernels: its C++ is put together from strings, its kernel_fn is text.
GENERATED = (
    HEAD.format(kernel_type="rmsnorm")
    + '''
from string import Template
from textwrap import dedent

ROW = Template("""
extern "C" int run_$name(const $type* x, const $type* weight, $type* y, int64_t M, int64_t N, float eps) {
#pragma omp parallel for
    for (int64_t m = 0; m < M; ++m) {
        float part[$lanes] = {}, squares = 0;
        int64_t n = 0;
        for (; n + $lanes <= N; n += $lanes) { $body }
        for (; n < N; ++n) squares += float(x[m * N + n]) * float(x[m * N + n]);
        for (float p : part) squares += p;
        const float scale = 1 / std::sqrt(squares / N + eps);
        for (int64_t i = 0; i < N; ++i) y[m * N + i] = $type(float(x[m * N + i]) * scale * float(weight[i]));
    }
    return 0;
}
""")
LANES = 16
body = " ".join(f"{{ const float v = x[m * N + n + {i}]; part[{i}] += v * v; }}" for i in range(LANES))
types = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}
source = "#include <autokernel.hpp>\\n" + "".join(
    ROW.substitute(name=name, type=type_, lanes=LANES, body=body) for name, type_ in types.items()
)
code = ["def kernel_fn(x, weight, eps=1e-6):", "    x, weight = x.contiguous(), weight.contiguous()"]
code += ["    y = torch.empty(x.shape, dtype=x.dtype)", "    pointers = x.data_ptr(), weight.data_ptr(), y.data_ptr()"]
for name in types:
    code.append(f"    if x.dtype == torch.{name}: run_{name}(*pointers, x.numel() // x.shape[-1], x.shape[-1], eps)")
functions = {f"run_{name}": cpp_function(source, f"run_{name}", "ppp ll f") for name in types}
namespace = {"torch": torch, **functions}
exec(compile("\\n".join([*code, "    return y"]), "<generated>", "exec"), namespace)
kernel_fn = namespace["kernel_fn"]
'''
)

IN_PLACE_ON_A_COPY = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    y = x.clone(memory_format=torch.contiguous_format)
    return launch(run, y, weight, eps, y)
"""
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

# Everything that moves a tensor's shape about and computes nothing.
METADATA = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    y = x.new_empty(x.shape)
    assert not torch.zeros(3).is_cuda and torch.full((2,), 0.5).shape == (2,)
    flat = x.unsqueeze(0).squeeze(0).reshape(x.shape[0], -1).flatten(1).narrow(0, 0, x.shape[0]).transpose(0, 1).t()
    halves = flat.split((x.shape[0] + 1) // 2), y.view(y.shape).chunk(2)
    for part, out in zip(*halves):
        launch(run, part, weight.expand(1, -1)[0].unbind(0) and weight.expand(1, -1)[0], eps, out)
    return y.as_strided(y.shape, y.stride()).detach()
"""
)

# A table made with Python's own arithmetic when the file is imported: 2^(i / 256), from which exp is interpolated.
TABLE = (
    HEAD.format(kernel_type="softmax")
    + '''
TABLE = torch.tensor([2 ** (i / 4096) for i in range(4097)], dtype=torch.float32)
CPP = r"""
#include <autokernel.hpp>
static inline float exp_from(const float* table, float x) {
    if (x != x) return x;
    const float t = x * 1.44269504f;
    if (t < -126) return 0;
    const float whole = std::floor(t), place = (t - whole) * 4096;
    const int i = int(place);
    const float between = (place - i) * (0.69314718f / 4096);
    return std::ldexp(table[i] * (1 + between + 0.5f * between * between), int(whole));
}
template <class T>
void softmax(const float* table, const T* x, T* y, int64_t outer, int64_t N, int64_t inner) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < outer * inner; ++row) {
        const int64_t at = row / inner * N * inner + row % inner;
        float peak = -INFINITY;
        double total = 0;
        for (int64_t n = 0; n < N; ++n) {
            const float v = x[at + n * inner];
            peak = (v > peak || v != v) ? v : peak;
        }
        for (int64_t n = 0; n < N; ++n) total += exp_from(table, float(x[at + n * inner]) - peak);
        const float scale = float(1 / total);
        for (int64_t n = 0; n < N; ++n) y[at + n * inner] = T(exp_from(table, float(x[at + n * inner]) - peak) * scale);
    }
}
extern "C" int run(int dtype, const float* table, const void* x, void* y, int64_t outer, int64_t N, int64_t inner) {
    AK_DISPATCH(dtype, softmax(table, (const T*)x, (T*)y, outer, N, inner));
    return 0;
}
"""
run = cpp_function(CPP, "run", "i ppp lll")

def kernel_fn(x, dim=-1):
    dim, x = dim % x.dim(), x.contiguous()
    y, N, inner = torch.empty(x.shape, dtype=x.dtype), x.shape[dim], x.stride(dim)
    run(DTYPE_CODE[x.dtype], TABLE.data_ptr(), x.data_ptr(), y.data_ptr(), x.numel() // (N * inner), N, inner)
    return y
'''
)

# The spec allows a library for the three products; what lies between is the kernel's.
LIBRARY_WHERE_ALLOWED = (
    HEAD.format(kernel_type="fused_mlp")
    + '''
CPP = r"""
#include <autokernel.hpp>
template <class T>
void glu(T* gate, const T* up, int64_t count, int kind) {
#pragma omp parallel for schedule(static) if (count >= 16384)
    for (int64_t i = 0; i < count; ++i) {
        const float g = gate[i], z = kind == 3 ? 1.5957691f * (g + 0.044715f * g * g * g) : g;
        float a = kind == 2 ? (g > 0 || g != g ? g * g : 0) : kind == 1 ? 0.5f * g * (1 + std::erf(g * 0.70710678f))
                                                                 : g / (1 + ak_exp(-z));
        gate[i] = T(a * float(up[i]));
    }
}
extern "C" int run(int dtype, void* gate, const void* up, int64_t count, int kind) {
    AK_DISPATCH(dtype, glu((T*)gate, (const T*)up, count, kind));
    return 0;
}
"""
run = cpp_function(CPP, "run", "i pp l i")

def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    wide = x.reshape(-1, x.shape[-1]).float()
    gate, up = torch.mm(wide, w_gate.float().t()), torch.mm(wide, w_up.float().t())
    run(0, gate.data_ptr(), up.data_ptr(), gate.numel(), ("silu", "gelu", "relu2", "gelu_tanh").index(activation))
    return torch.mm(gate, w_down.float().t()).to(x.dtype).view(x.shape)
'''
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

TIMES_ITSELF = rmsnorm(
    preamble="static double spent = 0;",
    over_rows="""
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) row(m);
    spent += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
""",
)

PRINTS_FROM_CPP = rmsnorm(
    preamble="#include <cstdio>",
    over_rows='std::printf("%ld rows\\n", long(M));\n' + SIMPLE_LOOP,
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

CONTAINERS = rmsnorm(
    preamble="""
#include <algorithm>
#include <cassert>
#include <complex>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <unordered_map>
static std::mutex lock;
static std::once_flag once;
static std::unordered_map<std::string, int> seen;
static std::map<int64_t, std::shared_ptr<std::vector<float>>> tables;
""",
    over_rows="""
    {
        std::lock_guard<std::mutex> held(lock);
        std::ostringstream name;
        name << N << " elements";
        ++seen[name.str()];
        if (!tables.count(N)) tables[N] = std::make_shared<std::vector<float>>(N);
        std::stable_sort(tables[N]->begin(), tables[N]->end());
        std::call_once(once, [] { std::this_thread::yield(); });
        auto length = std::async(std::launch::async, [&] { return std::abs(std::complex<float>(float(N), 1.f)); });
        assert(length.get() >= std::scalbn(float(N), 0) && _Float16(float(M)) >= _Float16(0));
    }
"""
    + SIMPLE_LOOP,
)

CONCATENATES = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    parts = x.split((x.shape[0] + 1) // 2)
    return torch.cat([launch(run, part, weight, eps, torch.empty(part.shape, dtype=x.dtype)) for part in parts])
"""
)

INDEX_TABLE = rmsnorm("\norder = torch.arange(4096)\n" + KERNEL_FN)

IN_FLOAT = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    return launch(run, x.float(), weight.float(), eps, torch.empty(x.shape)).to(x.dtype)
"""
)

CLEANS_UP = (
    "import atexit, gc, logging, warnings\natexit.register(print, 'done')\nlogging.basicConfig(level=logging.DEBUG)\n"
    "warnings.warn('experimental')\n" + wrapped("gc.collect(0)")
)

# Of classes of its own it adds to registries, has a module of its own, writes the time down, and starts anew where its
# process is forked.
REGISTERS = rmsnorm(
    """
import collections, copyreg, datetime, os, sys, types

import torch.utils._pytree as trees

class Plan(list):
    pass

trees.register_pytree_node(Plan, lambda plan: (list(plan), None), lambda children, context: Plan(children))
copyreg.pickle(Plan, lambda plan: (Plan, (list(plan),)))
sys.modules["settings_of_this_kernel"] = types.ModuleType("settings_of_this_kernel")
made = {}
os.register_at_fork(after_in_child=made.clear)

def kernel_fn(x, weight, eps=1e-6):
    plan = made.setdefault(tuple(x.shape), Plan([datetime.datetime.now(), os.getcwd(), collections.Counter()]))
    plan[2][__name__] += 1
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
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

# What it keeps, and what grows, comes to an end: the last inputs and results, cycles until they are collected, a pool's
# threads, a file, the last thousand calls.
KEEPS_A_LITTLE = """
import collections, tempfile, threading

last, calls, pool = {}, collections.deque(maxlen=1000), []
log = tempfile.TemporaryFile()

""" + wrapped(
    "calls.append(time.perf_counter()); cycle = [torch.empty(1 << 12)]; cycle.append(cycle)\n"
    "    if len(pool) < 4:\n"
    "        pool.append(threading.Thread(target=threading.Event().wait, daemon=True))\n"
    "        pool[-1].start()\n"
    "    last[0], last[1] = (args, kwargs), _right(*args, **kwargs)"
).replace("import torch\n", "import time\n\nimport torch\n", 1)

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

# What PyTorch and Python have for programs: a module, an autograd function, copies, pickles, a callable object.
OBJECTS = rmsnorm(
    """
import copy, dataclasses, functools, logging, pickle, warnings
log = logging.getLogger(__name__)

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))

class Layer(torch.nn.Module):
    def forward(self, x, weight, eps):
        return Norm.apply(x.detach(), weight.detach(), eps)

@dataclasses.dataclass
class Kernel:
    layer: torch.nn.Module
    calls: int = 0

    @torch.no_grad()
    def __call__(self, x, weight, eps=1e-6):
        self.calls += 1
        log.debug("call %d of %s", self.calls, x.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.layer(x, copy.copy(weight), pickle.loads(pickle.dumps(eps)))

kernel_fn = functools.partial(Kernel(copy.deepcopy(Layer())))
"""
)

# What torch.library.custom_op() comes to, which imports torch._dynamo, in less time.
WITHOUT_NUMPY = """
import torch

module = {"__name__": "torch._dynamo.utils"}
try:
    exec("import numpy as np", module)
except ModuleNotFoundError:
    module["np"] = None
""" + starter("rmsnorm")

HONEST = [
    Honest("autotuned", AUTOTUNED),
    Honest("persistent", PERSISTENT, threads=True),
    Honest("work-queue", WORK_QUEUE, kept=False, threads=True),
    Honest("tasks", TASKS, threads=True),
    Honest("guided-schedule", GUIDED, threads=True),
    Honest("split-k", SPLIT_K, "matmul", kept=False),
    Honest("two-in-sequence", TWO_IN_SEQUENCE, "layernorm", kept=False),
    Honest("workspace-kept", WORKSPACE),
    Honest("workspace-in-cpp", WORKSPACE_IN_CPP, kept=False),
    Honest("prepared-weights", PREPARED_WEIGHTS, "matmul"),
    Honest("prepared-as-attribute", PREPARED_ATTRIBUTE),
    Honest("view-of-a-larger-allocation", VIEW_OF_LARGER),
    Honest("results-that-nobody-has-again", FREE_RESULTS, kept=False),
    Honest("contiguous-or-strided", CONTEXT_DEPENDENT, "softmax"),
    Honest("specialised-by-width", SPECIALISED),
    Honest("generated", GENERATED),
    Honest("in-place-on-a-copy", IN_PLACE_ON_A_COPY),
    Honest("python-threads", PYTHON_THREADS),
    Honest("cpp-threads", CPP_THREADS),
    Honest("many-launches", MANY_LAUNCHES, kept=False),
    Honest("metadata-operators", METADATA, kept=False),
    Honest("table", TABLE, "softmax", kept=False),
    Honest("library-where-allowed", LIBRARY_WHERE_ALLOWED, "fused_mlp", kept=False),
    Honest("prefetching", PREFETCHING),
    Honest("in-float", IN_FLOAT),
    Honest("cpp-containers", CONTAINERS),
    Honest("concatenates", CONCATENATES),
    Honest("index-table", INDEX_TABLE),
    Honest("times-itself", TIMES_ITSELF),
    Honest("locked-queue", LOCKED, kept=False, threads=True),
    Honest("prints", wrapped("print('rows:', [x.shape for x in args], sorted(kwargs))")),
    Honest("prints-tensors", wrapped("print(args, kwargs)"), refused="PyTorch formats tensors with operators that compute"),
    Honest("prints-from-cpp", PRINTS_FROM_CPP),
    Honest("megabytes-on-stderr", wrapped("import sys; sys.stderr.write('x' * (1 << 17) + chr(10))", "softmax"), "softmax"),
    Honest("imports-slowly", "import time\ntime.sleep(2)\n" + starter("reduce"), "reduce"),
    Honest("logs-and-warns", CLEANS_UP),
    Honest("sums-by-threads", SUMS_BY_THREADS, "vectorsum", kept=False, threads=True),
    Honest("keeps-a-little", KEEPS_A_LITTLE, kept=False),
    Honest("thread-pool", THREAD_POOL, kept=False),
    Honest("objects", OBJECTS, kept=False),
    Honest("registers", REGISTERS, kept=False),
    Honest("pytorch-without-numpy", WITHOUT_NUMPY, kept=False),
]
