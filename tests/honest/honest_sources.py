"""Honest kernels whose source is odd: chosen by form or width, generated, from tables, with what PyTorch and C++ offer."""

from honest_kernel import HEAD, KERNEL_FN, SIMPLE_LOOP, Honest, rmsnorm

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

INDEX_TABLE = rmsnorm("\norder = torch.arange(4096)\n" + KERNEL_FN)

IN_FLOAT = rmsnorm(
    """
def kernel_fn(x, weight, eps=1e-6):
    return launch(run, x.float(), weight.float(), eps, torch.empty(x.shape)).to(x.dtype)
"""
)

SOURCES = (
    Honest("contiguous-or-strided", CONTEXT_DEPENDENT, "softmax"),
    Honest("specialised-by-width", SPECIALISED),
    Honest("generated", GENERATED),
    Honest("metadata-operators", METADATA, kept=False),
    Honest("table", TABLE, "softmax", kept=False),
    Honest("library-where-allowed", LIBRARY_WHERE_ALLOWED, "fused_mlp", kept=False),
    Honest("in-float", IN_FLOAT),
    Honest("cpp-containers", CONTAINERS),
    Honest("index-table", INDEX_TABLE),
)
