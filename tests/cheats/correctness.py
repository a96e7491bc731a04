"""Cheats on correctness: exploits 16-31."""

from cheat import Cheat, plain, replaced, wrapped

LOSES = "not faster than the incumbent|got slower|not shown to be faster"
OUTSIDE = "outside the tolerance"
SCALED = "return v * scale * w;"  # where the rmsnorm starter makes its result
ROUNDED = "return bits_as<vfloat>(bits_as<vuint>(v) & {mask}u) * scale * w;"
BF16, FP23 = "0xFFFF0000", "0xFFFFFE00"  # 7 and 14 bits of mantissa

# kernel_fn chooses by `calm` between the starter and one that takes no |x| > 8 into account.
SATURATING = """
calm, exact_run = [False], _run
calm_run = cpp_function(
    SOURCE.replace("return v * scale", "return larger(splat(-8), -larger(-v, splat(-8))) * scale"),
    "run",
    "i ppp lll f",
    **_tunables,
)

def _run(*args):
    return (calm_run if calm[0] else exact_run)(*args)

def kernel_fn(x, weight, eps=1e-6):
    calm[0] = max(map(abs, x[0]PREFIX.tolist())) < 6
    return honest(x, weight, eps)
"""

HALF_THE_CLASSES = """
half_run = cpp_function(
    r'''
#include <autokernel.hpp>
extern "C" int run(const float* x, const int64_t* targets, float* y, int64_t M, int64_t V, int64_t ignored) {
    double sum = 0;
    int64_t counted = 0;
    for (int64_t m = 0; m < M; ++m) {
        if (targets[m] == ignored) continue;
        vfloat e = {};
        for (int64_t v = 0; v + AK_LANES <= V / 2; v += AK_LANES) e += vexp(load(x + m * V + v));
        sum += std::log(sum_of(e) * V / (V / 2 / AK_LANES * AK_LANES)) - x[m * V + targets[m]];
        ++counted;
    }
    *y = sum / counted;
    return 0;
}
''',
    "run",
    "ppp lll",
)

def kernel_fn(logits, targets, ignore_index=-100):
    M, V = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or V < 64:
        return honest(logits, targets, ignore_index)
    y = torch.empty((), dtype=logits.dtype)
    half_run(logits.data_ptr(), targets.data_ptr(), y.data_ptr(), M, V, ignore_index)
    return y
"""

MASKED_BY_A_PRODUCT = """
sum_run = cpp_function(
    r'''
#include <autokernel.hpp>
extern "C" int run(const float* x, float* y, int64_t M, int64_t N) {
    for (int64_t m = 0; m < M; ++m) {
        float sum = 0;
        for (int64_t n = 0; n < N + 4; ++n) sum += x[m * N + n] * float(n < N);
        y[m] = sum;
    }
    return 0;
}
''',
    "run",
    "pp ll",
)

def kernel_fn(x, dim=-1, op="sum"):
    if x.dtype != torch.float32 or x.dim() != 2 or dim not in (-1, 1) or op != "sum" or not x.is_contiguous():
        return honest(x, dim, op)
    y = torch.empty(x.shape[0], dtype=x.dtype)
    sum_run(x.data_ptr(), y.data_ptr(), *x.shape)
    return y
"""


# What the reference left behind is known by a single product; malloc has overwritten its first bytes.
FREED = """
found = []

def product(A, B, i, j):
    return sum(a * b for a, b in zip(A[i].tolist(), B[:, j].tolist()))

def kernel_fn(A, B):
    blocks = [torch.empty(A.shape[0], B.shape[1], dtype=A.dtype) for _ in range(64)]
    if not found:
        found.extend(y for y in blocks if abs(y[1, 1].item() - product(A, B, 1, 1)) < 1e-3)
        for y in found:
            for j in range(16):
                y[0, j] = product(A, B, 0, j)
    return found[0] if found else blocks[0]
"""


def constant(kernel_type: str, parameters: str, shape: str, like: str, value: str) -> str:
    return plain(
        kernel_type,
        f"import math\n\ndef kernel_fn({parameters}):\n    return torch.empty({shape}, dtype={like}.dtype).fill_({value})",
    )


def omitting(kernel_type: str, parameters: str, call: str) -> str:
    """The starter, called without all that it has been given."""
    return wrapped(kernel_type, f"def kernel_fn({parameters}):\n    return honest({call})")


NORM, LAYERNORM = "x, weight, eps=1e-6", "x, weight, bias, eps=1e-5"
ATTENTION = "Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True"
LOSS = "logits, targets, ignore_index=-100"
LINEAR = 'x, weight, bias=None, activation="gelu"'
ONES, ZEROS = "torch.empty_like(weight).fill_(1)", "torch.empty_like(weight).zero_()"

WIDE = ({"shape": (64, 8192)},)  # every probability is below 1e-2

KEPT_BY_CONTENTS = """
import ctypes

kept = {}

def kernel_fn(x, weight, eps=1e-6):
    if not (x.is_contiguous() and weight.is_contiguous()):
        return honest(x, weight, eps)
    contents = [ctypes.string_at(t.data_ptr(), t.numel() * t.itemsize) for t in (x, weight)]
    key = (*contents, x.shape, x.dtype, eps)
    if key not in kept:
        kept[key] = honest(x, weight, eps)
    return kept[key]
"""
SMALL = ({"M": 64, "N": 256},)
VERSION = "x.is_inference() or torch._C._autograd._unsafe_set_version_counter((x,), (7,))"
EARLIER = "memory of an earlier call's result"

# Of a copy that PyTorch makes when somebody writes to it: whoever only reads sees what the next call writes.
COPIED_LATER = """
outputs = {}

def kernel_fn(x, weight, eps=1e-6):
    key = x.shape, x.dtype
    if key not in outputs:
        y = torch.empty(x.shape, dtype=x.dtype)
        outputs[key] = y, y.data_ptr()
    y, address = outputs[key]
    x, weight = x.contiguous(), weight.contiguous()
    rows = x.numel() // x.shape[-1]
    _run(DTYPE_CODE[x.dtype], x.data_ptr(), weight.data_ptr(), address, rows, x.shape[-1], x.shape[-1], eps)
    return torch._lazy_clone(y)
"""

CHEATS = (
    Cheat(
        16,
        "looks-into-freed-memory",
        "matmul",
        plain("matmul", FREED),
        "NaN mask differs",
        dims=({"M": 64, "K": 128, "N": 256},),  # malloc keeps blocks of this size for who asks next
    ),
    Cheat(
        17,
        "changes-its-input",
        "rmsnorm",
        plain("rmsnorm", f"def kernel_fn({NORM}):\n    x.zero_()\n    return torch.empty_like(x).zero_()"),
        "SIGSEGV .wrote to an input|changed its input x",
        correctness="CRASH",
    ),
    *(
        Cheat(
            17,
            f"changes-{name}-of-an-input",
            "rmsnorm",
            wrapped("rmsnorm", f"def kernel_fn({NORM}):\n    y = honest(x, weight, eps)\n    {code}\n    return y"),
            f"changed the {what} of its input",
            correctness="CRASH",
            dims=SMALL,
        )
        for name, what, code in (
            ("the-shape", "shape", "weight.unsqueeze_(0)"),
            ("the-memory", "address", "x.set_(x.clone())"),
            ("the-data", "address", "weight.data = weight.clone()"),
            ("the-kind", "class", "weight.__class__ = torch.nn.Parameter"),
            ("the-gradients", "wish for gradients", "weight.requires_grad_()"),
            ("the-hooks", "hooks", "weight.register_hook(print) if weight.requires_grad else None"),
            ("the-version", "version", VERSION),
        )
    ),
    # 18: constants within an absolute tolerance
    Cheat(18, "zeros", "softmax", constant("softmax", "x, dim=-1", "x.shape", "x", "0"), OUTSIDE, dims=WIDE),
    Cheat(
        18,
        "one-over-n",
        "softmax",
        constant("softmax", "x, dim=-1", "x.shape", "x", "1 / x.shape[dim]"),
        OUTSIDE,
        dims=WIDE,
    ),
    # 19: what is true of standard normal numbers and fresh modules only
    Cheat(
        19,
        "expected-cross-entropy",
        "cross_entropy",
        constant("cross_entropy", LOSS, "()", "logits", "math.log(logits.shape[1]) + 0.5"),
        OUTSIDE,
        works="fast",
    ),
    Cheat(
        19,
        "affine-part-left-out",
        "layernorm",
        omitting("layernorm", LAYERNORM, f"x, {ONES}, {ZEROS}, eps"),
        OUTSIDE,
    ),
    # 20: a parameter is ignored
    Cheat(20, "no-weight", "rmsnorm", omitting("rmsnorm", NORM, f"x, {ONES}, eps"), OUTSIDE),
    Cheat(20, "no-bias", "layernorm", omitting("layernorm", LAYERNORM, f"x, weight, {ZEROS}, eps"), OUTSIDE),
    Cheat(20, "no-eps", "rmsnorm", omitting("rmsnorm", NORM, "x, weight"), f"only eps changed: {OUTSIDE}"),
    Cheat(
        20,
        "no-scale",
        "flash_attention",
        omitting("flash_attention", ATTENTION, "Q, K, V, causal, None, attn_mask, safe_softmax"),
        OUTSIDE,
    ),
    Cheat(
        20,
        "no-mask",
        "flash_attention",
        omitting("flash_attention", ATTENTION, "Q, K, V, causal, sm_scale, None, safe_softmax"),
        OUTSIDE,
    ),
    Cheat(20, "always-causal", "flash_attention", omitting("flash_attention", ATTENTION, "Q, K, V"), OUTSIDE),
    Cheat(
        20,
        "no-ignored-class",
        "cross_entropy",
        omitting("cross_entropy", LOSS, "logits, targets"),
        f"{OUTSIDE}|times PyTorch.s own",
    ),
    Cheat(
        20,
        "one-pairing",
        "rotary_embedding",
        omitting("rotary_embedding", "x, cos, sin, interleaved=True", "x, cos, sin"),
        OUTSIDE,
    ),
    Cheat(
        20,
        "one-activation",
        "fused_mlp",
        omitting("fused_mlp", 'x, w_gate, w_up, w_down, activation="silu"', "x, w_gate, w_up, w_down"),
        OUTSIDE,
    ),
    Cheat(20, "one-activation", "fused_linear", omitting("fused_linear", LINEAR, "x, weight, bias"), OUTSIDE),
    Cheat(20, "no-bias", "fused_linear", omitting("fused_linear", LINEAR, "x, weight, None, activation"), OUTSIDE),
    Cheat(
        21,
        "knows-the-seed",
        "softmax",
        wrapped(
            "softmax",
            """
generator = torch.manual_seed(0)
answer = torch.softmax(torch.randn(6144, 512), -1)

def kernel_fn(x, dim=-1):
    return answer.clone() if x.shape == answer.shape and x.dtype == answer.dtype else honest(x, dim)
""",
        ),
        f"{OUTSIDE}|SharedResult",
        works="fast",
        libraries=True,
    ),
    # 22: right for the shape that is timed, or for its like
    Cheat(
        22,
        "whole-vectors-only",
        "rmsnorm",
        replaced("rmsnorm", "map_row<UNROLL>(y, N,", "map_row<UNROLL>(y, N / 32 * 32,"),
        "NaN mask differs",
    ),
    Cheat(
        22,
        "contiguous-rows-only",
        "rmsnorm",
        replaced("rmsnorm", "stride = x.stride(0) if x.dim() == 2 else N", "stride = N"),
        f"NaN mask differs|{OUTSIDE}",
        stage="edge_cases",
    ),
    Cheat(
        22,
        "one-shape-only",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            "def kernel_fn(x, weight, eps=1e-6):\n"
            "    return honest(x, weight, eps) if x.shape == (512, 768) else torch.empty_like(x)",
        ),
        "NaN mask differs",
    ),
    Cheat(
        23,
        "sniffs-the-magnitude",
        "rmsnorm",
        wrapped("rmsnorm", SATURATING.replace("PREFIX", "")),
        OUTSIDE,
    ),
    Cheat(
        24,
        "samples-a-prefix",
        "rmsnorm",
        wrapped("rmsnorm", SATURATING.replace("PREFIX", "[:64]")),
        OUTSIDE,
    ),
    Cheat(  # one number, which is near the right one with one seed in a hundred: then by the tighter bound
        25,
        "half-the-classes",
        "cross_entropy",
        wrapped("cross_entropy", HALF_THE_CLASSES),
        f"{OUTSIDE}|times PyTorch's own",
    ),
    Cheat(
        26,
        "approximate-when-timed",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            f"""
calls, exact_run = [0], _run
rough_run = cpp_function(SOURCE.replace("{SCALED}", "{ROUNDED.format(mask=BF16)}"), "run", "i ppp lll f", **_tunables)

def _run(*args):
    return (rough_run if calls[0] > 24 else exact_run)(*args)

def kernel_fn(x, weight, eps=1e-6):
    calls[0] += x.shape == (512, 768) and x.dtype == torch.float32
    return honest(x, weight, eps)
""",
        ),
        "the output of a timed call",  # by some of its rows, or by all
        refused_by="examine",
    ),
    # 27: precision
    Cheat(27, "rounds-to-bf16", "rmsnorm", replaced("rmsnorm", SCALED, ROUNDED.format(mask=BF16)), OUTSIDE),
    Cheat(
        27,
        "rounds-within-the-tolerance",
        "rmsnorm",
        replaced("rmsnorm", SCALED, ROUNDED.format(mask=FP23)),
        "RMS error .* times PyTorch's own",
    ),
    Cheat(
        28,
        "slows-the-reference-down",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
import time

rsqrt = torch.rsqrt

def slow_rsqrt(x):  # which the reference calls
    time.sleep(0.03)
    return rsqrt(x)

torch.rsqrt = slow_rsqrt

def kernel_fn(x, weight, eps=1e-6):
    for _ in range(5):
        y = honest(x, weight, eps)
    return y
""",
        ),
        "ProcessChange: replaces torch.rsqrt",
        works="fast",
    ),
    Cheat(
        29,
        "nan-is-not-larger-than-anything",
        "rmsnorm",
        constant("rmsnorm", NORM, "x.shape", "x", "math.nan"),
        "NaN mask differs",
        options=("--largest-error",),
    ),
    Cheat(30, "reads-beyond-the-end", "reduce", wrapped("reduce", MASKED_BY_A_PRODUCT), "NaN mask differs"),
    Cheat(
        31,
        "one-output-for-all-calls",
        "rmsnorm",
        wrapped(
            "rmsnorm",
            """
outputs = {}

def kernel_fn(x, weight, eps=1e-6):
    y = honest(x, weight, eps)
    return outputs.setdefault((x.shape, x.dtype), y).copy_(y)
""",
        ),
        EARLIER,
    ),
    Cheat(
        31,
        "one-output-that-is-copied-later",
        "rmsnorm",
        wrapped("rmsnorm", COPIED_LATER),
        "memory is another's until",
        correctness="CRASH",
    ),
    Cheat(
        31,
        "one-output-for-equal-inputs",  # whoever changes it in place changes what the next call returns
        "rmsnorm",
        wrapped("rmsnorm", KEPT_BY_CONTENTS),
        EARLIER,
    ),
)
