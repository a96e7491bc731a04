"""Every Triton starter without a GPU: its numbers in Triton's interpreter, its real configurations through the compiler.

Run as a script under TRITON_INTERPRET=1 (the interpreter has to be chosen before triton is imported) it runs each
starter on small inputs and prints its failures as JSON.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reference
from autokernel.gate.checks.inputs import fill_inputs
from autokernel.kernelbench.rewriting import inlined
from autokernel.spec import KERNELS, ROOT, TensorSpec, import_file, load_spec

sys.path.insert(0, str(Path(__file__).resolve().parent))
from special_values import SPECIAL

pytest.importorskip("triton")

STARTERS = {str(p.relative_to(KERNELS)): p for p in sorted(KERNELS.glob("*/triton_*.py"))}


def kernel_type(starter: str) -> str:
    return starter.split("/")[0]


# ---- inputs: type -> name -> maker of the arguments in a dtype ----


def randn(*shape, dtype):
    return torch.randn(shape).to(dtype)


def as_is(t):
    return t


def every_second(t):
    """The same values with gaps of one element between them, one element into their storage."""
    wide = t.new_zeros(2 * t.numel() + 1)
    view = wide[1:].view(-1, 2)[:, 0].view(t.shape)
    view.copy_(t)
    return view


def shifted(t):
    """The same values one element into their storage: not aligned to 16 bytes."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)


def transposed(t, a=-1, b=-2):
    """The same values in the memory layout of the transposed tensor."""
    return t.transpose(a, b).contiguous().transpose(a, b)


def rms_case(*shape, layout=as_is):
    return lambda dt: {"x": layout(randn(*shape, dtype=dt)), "weight": randn(shape[-1], dtype=dt)}


def rotary_case(batch, heads, seq, dim, rotary_dim, interleaved, layout=as_is):
    def make(dtype):
        angles = torch.rand(seq, rotary_dim // 2) * 6
        x = layout(randn(batch, heads, seq, dim, dtype=dtype))
        return {"x": x, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "interleaved": interleaved}

    return make


def halves_of_angles(seq, dim, dtype):
    """cos and sin as models cut them out of tables that have each angle twice."""
    angles = torch.rand(seq, dim) * 6
    return {"cos": angles.cos().to(dtype).chunk(2, -1)[0], "sin": angles.sin().to(dtype).chunk(2, -1)[0]}


def matmul_case(M, N, K, layout_a=as_is, layout_b=as_is):
    return lambda dt: {"A": layout_a(randn(M, K, dtype=dt)), "B": layout_b(randn(K, N, dtype=dt))}


def bmm_case(batch, M, N, K, layout_a=lambda t: t, layout_b=lambda t: t):
    return lambda dt: {"A": layout_a(randn(*batch, M, K, dtype=dt)), "B": layout_b(randn(*batch, K, N, dtype=dt))}


def grouped_case(rows, offs, K, N, layout=lambda t: t):
    return lambda dt: {
        "x": randn(rows, K, dtype=dt),
        "weight": layout(randn(len(offs), K, N, dtype=dt)),
        "offs": torch.tensor(offs, dtype=torch.int32),
    }


def between_heads(t):
    """[batch, heads, seq, head_dim] in the memory layout of [batch, seq, heads, head_dim], as projections leave it."""
    return transposed(t, 1, 2)


def with_specials(t):
    """NaN and Inf in rows 0 to 3; row 4 starts with -Inf as a masked row does."""
    t[0], t[1, t.shape[1] // 2], t[2, 1], t[3, -1] = -math.inf, math.nan, math.inf, -math.inf
    t[4, : t.shape[1] - 1] = -math.inf
    return t


def softmax_case(*shape, dim=-1, layout=as_is, scale=1.0):
    return lambda dt: {"x": layout(randn(*shape, dtype=dt) * scale), "dim": dim}


def layernorm_case(*shape, layout=as_is):
    N = shape[-1]
    return lambda dt: {
        "x": layout(randn(*shape, dtype=dt)),
        "weight": randn(N, dtype=dt),
        "bias": randn(N, dtype=dt),
    }


def entropy_case(M, V, ignored=0, layout=as_is, below=None):
    def make(dtype):
        targets = torch.randint(below or V, (M,))
        targets[:ignored] = -100
        return {"logits": layout(randn(M, V, dtype=dtype)), "targets": targets}

    return make


def attention_case(B, H, kv_heads, seq_q, seq_k, D, causal=True, sm_scale=None, mask=None, layout=as_is):
    def make(dtype):
        q = layout(randn(B, H, seq_q, D, dtype=dtype))
        k, v = (layout(randn(B, kv_heads, seq_k, D, dtype=dtype)) for _ in "kv")
        attn_mask = mask and mask()
        if mask and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
        return {"Q": q, "K": k, "V": v, "causal": causal, "sm_scale": sm_scale, "attn_mask": attn_mask}

    return make


def padded(length, lengths, ahead=False):
    """A mask [batch, 1, 1, length] of so many keys at the start, or, `ahead`, at the end."""
    places = torch.arange(length).flip(0) if ahead else torch.arange(length)
    return lambda: (places < torch.tensor(lengths)[:, None])[:, None, None]


def mlp_case(*rows, dim, hidden, activation="silu", layout=as_is):
    return lambda dt: {
        "x": layout(randn(*rows, dim, dtype=dt)),
        "w_gate": layout(randn(hidden, dim, dtype=dt)),
        "w_up": randn(hidden, dim, dtype=dt),
        "w_down": randn(dim, hidden, dtype=dt),
        "activation": activation,
    }


def linear_case(*rows, K, N, activation="gelu", layout=as_is, bias=True):
    return lambda dt: {
        "x": layout(randn(*rows, K, dtype=dt)),
        "weight": layout(randn(N, K, dtype=dt)),
        "bias": layout(randn(2, N, dtype=dt))[1] if bias else None,
        "activation": activation,
    }


def reduce_case(*shape, dim, op, layout):
    return lambda dt: {"x": layout(randn(*shape, dtype=dt)), "dim": dim, "op": op}


CASES = {
    "rmsnorm": {
        "8x256": rms_case(8, 256),
        "7x1023": rms_case(7, 1023),
        "1x1": rms_case(1, 1),
        "vector": rms_case(17),
        "2x3x4x40": rms_case(2, 3, 4, 40),
        "transposed": rms_case(33, 48, layout=transposed),
        "heads": rms_case(2, 3, 5, 64, layout=between_heads),
        "gaps": rms_case(5, 100, layout=every_second),
        "2x20001": rms_case(2, 20001),
    },
    "rotary_embedding": {
        "interleaved": rotary_case(2, 3, 7, 64, 64, True),
        "rotate half": rotary_case(2, 5, 9, 64, 64, False),
        "decode": rotary_case(2, 5, 1, 40, 40, True),
        "partial": rotary_case(1, 3, 5, 80, 32, True, between_heads),
        "partial half": rotary_case(1, 3, 5, 33, 22, False, shifted),
        "smallest": rotary_case(1, 1, 1, 2, 2, True),
        "transposed": rotary_case(2, 4, 6, 96, 96, False, between_heads),
        "gaps": rotary_case(1, 2, 3, 18, 18, True, every_second),
        "halves of angles": lambda dt: rotary_case(2, 3, 7, 64, 64, False)(dt) | halves_of_angles(7, 64, dt),
    },
    "bmm": {
        "1x1x1x1": bmm_case((1,), 1, 1, 1),
        "scores of heads": bmm_case((2, 3), 20, 17, 40, between_heads, lambda t: transposed(t)),
        "one for all": lambda dt: {"A": randn(3, 4, 8, dtype=dt), "B": randn(8, 5, dtype=dt).expand(3, 8, 5)},
        "deep": bmm_case((2,), 5, 16, 1024),
    },
    "grouped_matmul": {
        "experts": grouped_case(70, [20, 20, 61, 70], 40, 33),
        "rows in no group": grouped_case(40, [3, 9], 16, 20, transposed),
        "more groups than rows": grouped_case(3, [0] * 9 + [1, 1, 3], 17, 5, transposed),
        "in another order": grouped_case(30, [30, 8, 19], 64, 64),
        "1x1x1": grouped_case(1, [1], 1, 1),
        "one large group": grouped_case(150, [0, 150, 150], 48, 130),
    },
    "matmul": {
        "64x64x128": matmul_case(64, 64, 128),
        "1x1x1": matmul_case(1, 1, 1),
        "1x100x300": matmul_case(1, 100, 300, shifted),
        "linear": matmul_case(33, 70, 65, layout_b=transposed),
        "both transposed": matmul_case(129, 130, 17, transposed, transposed),
        "gaps": matmul_case(20, 31, 63, every_second, every_second),
        "deep": matmul_case(16, 32, 2048),
        "aligned": matmul_case(136, 264, 72, layout_b=transposed),
        "aligned, transposed": matmul_case(136, 264, 72, layout_a=transposed),
    },
    "softmax": {
        "7x1023": softmax_case(7, 1023),
        "1x1": softmax_case(1, 1),
        "vector": softmax_case(300, scale=8),
        "2x3x5x16": softmax_case(2, 3, 5, 16),
        "dim 0": softmax_case(130, 33, dim=0),
        "dim 1": softmax_case(3, 70, 5, dim=1, layout=shifted),
        "transposed": softmax_case(40, 100, layout=transposed),
        "gaps": softmax_case(5, 100, layout=every_second),
        "specials": softmax_case(6, 50, layout=with_specials),
        "specials dim 0": softmax_case(6, 50, dim=0, layout=with_specials),
        "2x50257": softmax_case(2, 50257, scale=3),
        "5x40001 specials": softmax_case(5, 40001, layout=with_specials),
        "2x40000": softmax_case(2, 40000),
        "2x40001 shifted": softmax_case(2, 40001, layout=shifted),
        "padded rows": lambda dt: {"x": randn(2, 40016, dtype=dt)[:, :40001]},
    },
    "layernorm": {
        "8x256": layernorm_case(8, 256),
        "7x1023": layernorm_case(7, 1023),
        "1x1": layernorm_case(1, 1),
        "constant": layernorm_case(5, 300, layout=lambda t: t[:, :1].expand(5, 300)),
        "constant 2x20001": layernorm_case(2, 20001, layout=lambda t: t[:, :1].expand(2, 20001)),
        "far from zero": layernorm_case(5, 768, layout=lambda t: t + 100),
        "2x3x4x40": layernorm_case(2, 3, 4, 40),
        "transposed": layernorm_case(33, 48, layout=transposed),
        "gaps": layernorm_case(5, 100, layout=every_second),
        "2x20001": layernorm_case(2, 20001, layout=lambda t: t + 10),
    },
    "cross_entropy": {
        "8x1000": entropy_case(8, 1000),
        "1x1": entropy_case(1, 1),
        "33x50257": entropy_case(3, 50257),
        "ignored": entropy_case(40, 77, ignored=7),
        "all ignored": entropy_case(4, 77, ignored=4),
        "confident": entropy_case(16, 513, layout=lambda t: t * 30),
        "padded rows": lambda dt: {"logits": randn(5, 520, dtype=dt)[:, :513], "targets": torch.arange(5)},
        "masked": entropy_case(9, 9000, layout=lambda t: t.index_fill(1, torch.arange(5, 8500), -math.inf), below=5),
        "transposed": entropy_case(9, 300, layout=transposed),
        "shifted": entropy_case(9, 300, layout=shifted),
    },
    "flash_attention": {
        "causal": attention_case(1, 2, 2, 150, 150, 64),
        "full": attention_case(1, 2, 2, 65, 130, 64, causal=False),
        "grouped": attention_case(2, 6, 2, 40, 40, 40, layout=between_heads),
        "grouped full": attention_case(1, 4, 1, 33, 70, 80, causal=False, layout=between_heads),
        "decode": attention_case(2, 4, 2, 1, 77, 128, causal=False),
        "1x1": attention_case(1, 1, 1, 1, 1, 16),
        "more keys": attention_case(1, 2, 2, 20, 200, 32),
        "more queries": attention_case(1, 2, 2, 200, 20, 32),
        "sharp": attention_case(1, 1, 1, 70, 70, 64, sm_scale=1.0),
        "negative scale": attention_case(1, 1, 1, 70, 70, 32, sm_scale=-0.5),
        "key mask": attention_case(2, 2, 2, 40, 130, 32, causal=False, mask=lambda: torch.rand(2, 1, 1, 130) < 0.7),
        "rows without keys": attention_case(
            1, 2, 2, 40, 70, 32, causal=False, mask=lambda: torch.ones(40, 70).tril(-3) > 0
        ),
        "late keys": attention_case(1, 1, 1, 8, 150, 32, causal=False, mask=lambda: torch.arange(150)[None] > 140),
        "float mask": attention_case(2, 2, 1, 70, 70, 32, mask=lambda: torch.randn(2, 70, 70)),
        "float key mask": attention_case(2, 2, 1, 70, 90, 32, causal=False, mask=lambda: torch.randn(2, 1, 1, 90)),
        "padded": attention_case(3, 2, 2, 70, 200, 32, causal=False, mask=padded(200, (200, 61, 1))),
        "padded ahead": attention_case(2, 2, 2, 70, 200, 32, causal=False, mask=padded(200, (150, 9), ahead=True)),
        "padded, causal": attention_case(2, 1, 1, 150, 150, 64, mask=padded(150, (100, 150))),
        "padded far": attention_case(2, 1, 1, 8, 2100, 16, causal=False, mask=padded(2100, (1500, 2090))),
        "padded, negative scale": attention_case(2, 1, 1, 9, 90, 32, causal=False, mask=padded(90, (3, 70)), sm_scale=-0.5),
        "nothing but padding": attention_case(2, 2, 2, 9, 70, 32, causal=False, mask=padded(70, (0, 5))),
        "wide": attention_case(1, 1, 1, 20, 20, 256),
    },
    "fused_mlp": {
        "silu": mlp_case(40, dim=64, hidden=96),
        "gelu": mlp_case(2, 9, dim=40, hidden=70, activation="gelu"),
        "relu2": mlp_case(2, 9, dim=33, hidden=17, activation="relu2", layout=every_second),
        "gelu_tanh": mlp_case(5, dim=40, hidden=33, activation="gelu_tanh"),
        "1": mlp_case(1, dim=1, hidden=1),
        "token": mlp_case(dim=65, hidden=129),
        "transposed": mlp_case(3, 20, dim=32, hidden=50, layout=transposed),
    },
    "fused_linear": {
        "gelu": linear_case(40, K=64, N=96),
        "gelu_tanh": linear_case(2, 9, K=40, N=70, activation="gelu_tanh", bias=False),
        "relu2": linear_case(2, 9, K=33, N=17, activation="relu2", layout=every_second),
        "relu": linear_case(70, K=72, N=130, activation="relu"),
        "silu": linear_case(80, K=64, N=64, activation="silu"),
        "1": linear_case(1, K=1, N=1),
        "token": linear_case(K=65, N=129),
        "transposed": linear_case(3, 20, K=32, N=50, layout=transposed),
    },
    "reduce": {
        f"{op} {name}": reduce_case(*shape, dim=dim, op=op, layout=layout)
        for op in ("sum", "max")
        for name, shape, dim, layout in (
            ("7x1023", (7, 1023), -1, as_is),
            ("1x1", (1, 1), 0, as_is),
            ("vector", (70001,), 0, as_is),
            ("dim 1", (3, 70, 5), 1, shifted),
            ("dim 0 long", (9000, 33), 0, as_is),
            ("transposed", (40, 100), -1, transposed),
            ("gaps", (5, 100), 1, every_second),
            ("specials", (6, 50), -1, with_specials),
            ("specials dim 0", (6, 50), 0, with_specials),
            ("4x12288", (4, 12288), -1, as_is),
        )
    },
}
for name, cases in SPECIAL.items():
    CASES[name] |= cases
OWN_OPS = {  # PyTorch's own op, whose error in the dtype is the yardstick; else the oracle itself in that dtype
    "rmsnorm": lambda x, weight, eps=1e-6: F.rms_norm(x, weight.shape, weight, eps),
    "softmax": lambda x, dim=-1: F.softmax(x, dim),
    "layernorm": lambda x, weight, bias, eps=1e-5: F.layer_norm(x, weight.shape, weight, bias, eps),
    "cross_entropy": lambda logits, targets, ignore_index=-100: F.cross_entropy(logits, targets),
}

# Settings under which a starter takes another way than with its own, for inputs as small as these.
OTHER_WAYS = {"matmul/triton_kernel.py": {"TMA": 2}, "fused_linear/triton_kernel.py": {"TMA": 2}}

ERROR_RATIO = 4  # the most that a row's rms error may be, in errors of PyTorch's own op

# ---- the interpreter ----


def in_double(inputs):
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}


def row_rms(error):
    return error.double().square().reshape(-1, error.shape[-1] if error.dim() else 1).mean(-1).sqrt()


def check(name, kernel_fn, inputs, dtype, ratio=ERROR_RATIO):
    """What is wrong with kernel_fn on these inputs, in words; None if nothing is."""
    expected = getattr(reference, name)(**in_double(inputs))
    actual = kernel_fn(**inputs)
    if (actual.shape, actual.dtype) != (expected.shape, dtype):
        return f"shape {tuple(actual.shape)} {actual.dtype}, not {tuple(expected.shape)} {dtype}"
    exact = ~expected.isfinite()
    if not torch.equal(actual.double()[exact].nan_to_num(7.0), expected[exact].nan_to_num(7.0)):
        return "NaN or Inf are not where the oracle has them"
    own = OWN_OPS.get(name, getattr(reference, name))(**inputs)

    def error(y):
        return row_rms((y.double() - expected).masked_fill(exact, 0.0))

    size = row_rms(expected.masked_fill(exact, 0.0))
    rounding = size * torch.finfo(dtype).eps / 2  # once, at most
    own_error = error(own).nan_to_num(0.0)
    relative = (own_error / size)[size > 0]  # where PyTorch is lucky in a row, its usual error counts, as in the gate
    usual = size * relative.quantile(0.75) if relative.numel() else 0 * size
    worst = (error(actual) / (torch.maximum(torch.maximum(own_error, usual), rounding) + 1e-30)).max().item()
    return None if worst <= ratio else f"error is {worst:.1f} times that of PyTorch's own op"


def multiply_bfloat16_as_float32():
    """The interpreter keeps bfloat16 as uint16 and multiplies those integers in `tl.dot` (Triton 3.9)."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def in_float32(self, a, b, *rest):
        a, b = (self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
        return create_dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = in_float32


def cases_of_spec(name):
    """What a type has by itself, where nothing is said of it above."""
    spec = load_spec(name)
    all_dims = (spec.smoke, *spec.edges)
    return {str(dims): lambda dt, dims=dims: fill_inputs(spec, spec.case(dims, dt), 0) for dims in all_dims}


def check_inside_another(starter):
    """What is wrong, on its first case, with a starter written out in another file, as for a problem of KernelBench."""
    kernel, name = inlined(STARTERS[starter].read_text(), "its"), kernel_type(starter)
    make, dtype = next(iter((CASES.get(name) or cases_of_spec(name)).values())), load_spec(name).dtypes[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "another.py")
        path.write_text("\n".join([*kernel.imports, kernel.body]))
        module = import_file(path, starter.replace("/", "_") + "_inside")
        return check(name, module.its_kernel_fn, make(dtype), dtype)


def interpret_all(starters):
    """{starter: {"seconds": s, "checks": n, "failures": [...]}}"""
    report = {}
    for starter in starters:
        start, failures, checks = time.perf_counter(), [], 0
        module, name = import_file(STARTERS[starter], starter.replace("/", "_")), kernel_type(starter)
        for settings in ({}, OTHER_WAYS[starter]) if starter in OTHER_WAYS else ({},):
            vars(module).update(settings)
            for case, make in (CASES.get(name) or cases_of_spec(name)).items():
                for dtype in load_spec(name).dtypes:
                    torch.manual_seed(0)
                    wrong = check(name, module.kernel_fn, make(dtype), dtype)
                    checks += 1
                    failures += [f"{case} {dtype} {settings or ''}: {wrong}"] if wrong else []
        wrong = check_inside_another(starter)
        failures += [f"inside another file: {wrong}"] if wrong else []
        report[starter] = {"seconds": round(time.perf_counter() - start, 1), "checks": checks, "failures": failures}
    return report


@pytest.fixture(scope="module")
def interpreted():
    command = [sys.executable, __file__, *STARTERS]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_interpreter(starter, interpreted):
    assert interpreted[starter]["checks"] > 0
    assert not interpreted[starter]["failures"]


# ---- the compiler ----

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
WITHOUT_TMA = ("sm_80", "gfx942")
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
H100_SHARED_MEMORY = 232448


def compile_launch(launch, target):
    """Compile what a launch would have compiled, with the specialisations that it would have got."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, values, options = launch
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None or type(value) is int and value == 1:
            signature[name], constants[name] = "constexpr", value
        elif hasattr(value, "block_shape"):
            signature[name] = f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif torch.is_tensor(value):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        aligned = torch.is_tensor(value) or type(value) is int and value % 16 == 0
        if aligned and signature[name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), GPUTarget(*target), options)


def stack_bytes(compiled):
    """Bytes of local memory a thread needs: registers that were spilled."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr).group(1))


@pytest.fixture
def launches(monkeypatch):
    """What the kernels launch, recorded instead of run: [(kernel, its arguments by name, compile options)]."""
    from triton.runtime.jit import JITFunction

    recorded = []

    def record(kernel, *values, grid, warmup, **named):
        arguments = dict(zip(kernel.arg_names, values)) | {k: v for k, v in named.items() if k in kernel.arg_names}
        recorded.append((kernel, arguments, {k: v for k, v in named.items() if k not in kernel.arg_names}))

    monkeypatch.setattr(JITFunction, "run", record)
    return recorded


def without_data(args):
    """The arguments of a case as tensors that have no memory behind them."""
    return {
        k: torch.empty_strided(v.shape, v.strides, dtype=v.dtype, device="meta") if isinstance(v, TensorSpec) else v
        for k, v in args.items()
    }


# Alternatives are for Hopper; the main starters compile for the other chips too.
COMPILED = [
    pytest.param(s, t, marks=pytest.mark.slow if t in ("sm_100", "gfx942") else ())
    for s in STARTERS
    for t in TARGETS
    if t == "sm_90" or s.endswith("/triton_kernel.py")
]


@pytest.mark.parametrize(("starter", "target"), COMPILED)
def test_compiles(starter, target, launches):
    """The sizes that are timed on a GPU compile, for a Hopper GPU without spilled registers."""
    spec = load_spec(kernel_type(starter))
    module = import_file(STARTERS[starter], starter.replace("/", "_"))
    if target in WITHOUT_TMA:
        vars(module).update(TMA=0)
    dtype = torch.float16 if torch.float16 in spec.dtypes else spec.dtypes[0]
    for dims in spec.timing["cuda"] if target == "sm_90" else spec.timing["cuda"][:1]:
        module.kernel_fn(**without_data(spec.case(dims, dtype).args))
    assert launches
    for launch in launches:
        compiled = compile_launch(launch, TARGETS[target])
        if target == "sm_90":
            assert compiled.metadata.shared <= H100_SHARED_MEMORY
            assert stack_bytes(compiled) == 0


@pytest.mark.parametrize("mask", ["a row for all", "bool", "float"])
def test_attention_with_a_mask_compiles(mask: str, launches):
    """For a Hopper GPU, without spilled registers where all queries have one row."""
    module = import_file(STARTERS["flash_attention/triton_kernel.py"], "masked_attention")
    q, k, v = (torch.empty(32, 16, 512, 64, dtype=torch.float16, device="meta") for _ in range(3))
    dtype = torch.float16 if mask == "float" else torch.bool
    made = torch.empty(32, 1, 1 if mask == "a row for all" else 512, 512, dtype=dtype, device="meta")
    module.kernel_fn(q, k, v, causal=False, attn_mask=made.expand(-1, -1, 512, -1))
    (launch,) = launches
    compiled = compile_launch(launch, TARGETS["sm_90"])
    assert compiled.metadata.shared <= H100_SHARED_MEMORY
    assert mask != "a row for all" or stack_bytes(compiled) == 0


@pytest.mark.parametrize(
    ("size", "tma", "kernel"),
    ((2048, 1, "_resident"), (1024, 1, "_matmul"), (2048, 0, "_matmul"), (64, 2, "_resident"), (65, 2, "_matmul")),
)
def test_tma_fetches_the_tiles_of_large_products_that_it_can_read(size, tma, kernel, launches):
    spec, module = load_spec("matmul"), import_file(STARTERS["matmul/triton_kernel.py"], "matmul_by_tma")
    vars(module).update(TMA=tma)
    module.kernel_fn(**without_data(spec.case({"M": size, "K": size, "N": size}, torch.float16).args))
    assert [launch[0].fn.__name__ for launch in launches] == [kernel]


COMPILING = """
import signal

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autokernel.gate.workers.patches import Patches
from autokernel.gate.workers.process_state import ProcessState

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker does
patches, process = Patches([], "", standard=False), ProcessState.now()


@triton.jit
def double(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) * 2)


source = ASTSource(double, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 256})
assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
process.check()
patches.check()
"""


def test_what_the_compiler_does_to_its_process_is_no_kernels_doing(tmp_path: Path):
    """LLVM catches signals when it first compiles."""
    script = tmp_path / "compiling.py"
    script.write_text(COMPILING)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    multiply_bfloat16_as_float32()
    print(json.dumps(interpret_all(sys.argv[1:]), indent=1))
