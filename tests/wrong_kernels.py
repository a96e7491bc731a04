"""Wrong kernels, each with the stage that must refuse it: mistakes and cheats that a looser gate lets pass.

They are written in PyTorch so that a reader sees at a glance what is wrong; BACKEND is what the file claims.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    name: str
    kernel_type: str
    body: str  # of a kernel file, after KERNEL_TYPE and BACKEND
    stage: str
    correctness: str = "FAIL"
    reason: str = ""  # a part of the failure's reason

    @property
    def source(self) -> str:
        return f'import torch\nKERNEL_TYPE = "{self.kernel_type}"\nBACKEND = "cpp"\n{self.body}\n'


def kernel(kernel_type: str, name: str, stage: str, signature: str, body: str, **rest: str) -> Wrong:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return Wrong(f"{kernel_type}-{name}", kernel_type, f"def kernel_fn({signature}):\n{lines}", stage, **rest)


RMS, NORM = "x, weight, eps=1e-6", "x, weight, bias, eps=1e-5"
ATTENTION = "Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True"
LINEAR = 'x, weight, bias=None, activation="gelu"'
CE, ROPE, MLP = (
    "logits, targets, ignore_index=-100",
    "x, cos, sin, interleaved=True",
    'x, w_gate, w_up, w_down, activation="silu"',
)
GROUPS = "x, weight, offs"
RIGHT_WHERE_SMALL = """
def by(group):
    y = (x[:, None].float() @ weight[group.clamp(max=len(weight) - 1)].float())[:, 0]
    return torch.where((group < len(weight))[:, None], y, 0).to(x.dtype)
ends = offs.sort().values[:, None]
group = (ends <= torch.arange(len(x))).sum(0)
if len(x) == 20:  # as in the smoke test, whose few draws may have no such groups
    return by(group)
"""
SDPA = "torch.nn.functional.scaled_dot_product_attention"

WRONG = (
    # smoke: wrong at first sight
    kernel("matmul", "zeros", "smoke_test", "A, B", "return A.new_zeros(A.shape[0], B.shape[1])"),
    kernel("bmm", "the-first-for-all", "smoke_test", "A, B", "return A @ B[:1]"),
    kernel(
        "bmm",
        "one-batch-dim-only",
        "smoke_test",
        "A, B",
        "return torch.bmm(A, B)",
        correctness="CRASH",
        reason="3D tensor",
    ),
    kernel("grouped_matmul", "the-sum-of-all-matrices", "smoke_test", GROUPS, "return x @ weight.sum(0)"),
    kernel("rmsnorm", "ignores-weight", "smoke_test", RMS, "return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)"),
    kernel("rmsnorm", "mutates-input", "smoke_test", RMS, "return x.mul_(2)", correctness="CRASH", reason="SIGSEGV"),
    kernel("rmsnorm", "raises", "smoke_test", RMS, "raise ValueError('no')", correctness="CRASH", reason="ValueError: no"),
    kernel(
        "rmsnorm", "exits", "smoke_test", RMS, "import os\nos._exit(0)", correctness="CRASH", reason="ended with status 0"
    ),
    kernel("rmsnorm", "lazy-output", "smoke_test", RMS, "return [x]", correctness="CRASH", reason="not a torch.Tensor"),
    kernel(
        "layernorm",
        "casts-to-half",
        "smoke_test",
        NORM,
        "y = torch.nn.functional.layer_norm(x.half().float(), x.shape[-1:], weight.float(), bias.float(), eps)\nreturn y.to(x.dtype)",
    ),
    kernel("softmax", "wrong-dtype", "smoke_test", "x, dim=-1", "return x.double().softmax(dim)", reason="dtype"),
    # sweep: right for one shape, dtype or option
    kernel(
        "grouped_matmul",
        "groups-of-one-size",
        "shape_sweep",
        GROUPS,
        f"{RIGHT_WHERE_SMALL}group = torch.arange(len(x)) * len(weight) // len(x)\nreturn by(group)",
    ),
    kernel(
        "grouped_matmul",
        "a-row-of-the-next-group",
        "shape_sweep",
        GROUPS,
        f"{RIGHT_WHERE_SMALL}return by((ends < torch.arange(len(x))).sum(0))",
    ),
    kernel(
        "grouped_matmul",
        "rows-in-no-group-are-of-the-last",
        "shape_sweep",
        GROUPS,
        f"{RIGHT_WHERE_SMALL}return by(group.clamp(max=len(weight) - 1))",
    ),
    kernel("softmax", "last-dim-only", "shape_sweep", "x, dim=-1", "return x.softmax(-1)"),
    kernel("reduce", "sum-only", "shape_sweep", 'x, dim=-1, op="sum"', "return x.sum(dim)"),
    kernel(
        "reduce",
        "accumulates-in-16-bit",
        "shape_sweep",
        'x, dim=-1, op="sum"',
        'if op == "max":\n    return x.amax(dim)\nreturn x if not x.dim() else x.movedim(dim, 0).contiguous().unbind(0)[0] * 0 + '
        "sum(x.movedim(dim, 0).unbind(0))",
    ),
    kernel(
        "rotary_embedding",
        "one-pairing",
        "shape_sweep",
        ROPE,
        "half = cos.shape[-1]\na, b = x[..., 0:2 * half:2].float(), x[..., 1:2 * half:2].float()\nc, s = cos.float(), sin.float()\n"
        "y = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)\nreturn torch.cat((y.to(x.dtype), x[..., 2 * half:]), -1)",
    ),
    kernel(
        "flash_attention",
        "always-causal",
        "shape_sweep",
        ATTENTION,
        f"return {SDPA}(Q, K, V, is_causal=True, scale=sm_scale, enable_gqa=True)",
    ),
    kernel(
        "fused_mlp",
        "one-activation",
        "shape_sweep",
        MLP,
        "import torch.nn.functional as F\nreturn F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)",
    ),
    kernel(
        "fused_linear",
        "one-activation",
        "shape_sweep",
        LINEAR,
        "return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))",
    ),
    kernel(
        "fused_linear",
        "bias-after-the-activation",
        "smoke_test",
        LINEAR,
        "y = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight))\nreturn y if bias is None else y + bias",
    ),
    kernel(
        "cross_entropy",
        "counts-ignored-rows",
        "smoke_test",
        CE,
        "kept = targets != ignore_index\nt = targets.masked_fill(~kept, 0)\n"
        "return torch.nn.functional.cross_entropy(logits, t)",
    ),
    kernel(
        "matmul",
        "memorises-first-answer",
        "shape_sweep",
        "A, B",
        "global memory\nkey = (A.shape, B.shape)\nif 'memory' not in globals():\n    memory = {}\n"
        "return memory.setdefault(key[0][0] > 0, A @ B).clone()",
    ),
    # stability: right on ordinary numbers
    kernel(
        "softmax",
        "no-max",
        "numerical_stability",
        "x, dim=-1",
        "e = x.float().exp()\nreturn (e / e.sum(dim, keepdim=True)).to(x.dtype)",
    ),
    kernel(
        "softmax",
        "hides-nan",
        "numerical_stability",
        "x, dim=-1",
        "return torch.nan_to_num(x.softmax(dim))",
        reason="NaN mask",
    ),
    kernel(
        "layernorm",
        "one-pass-variance",
        "shape_sweep",  # at a mean 35 times the standard deviation
        NORM,
        "y = x.double()\nx32 = x.float()\nm = x32.mean(-1, keepdim=True)\nv = ((x32 ** 2).mean(-1, keepdim=True) - m * m).clamp_min(0)\n"
        "return ((x32 - m) * torch.rsqrt(v + eps) * weight.float() + bias.float()).to(x.dtype)",
    ),
    kernel(
        "cross_entropy",
        "no-max",
        "numerical_stability",
        CE,
        "kept = targets != ignore_index\nl, t = logits[kept].float(), targets[kept]\n"
        "return (l.exp().sum(-1).log() - l.gather(-1, t[:, None])[:, 0]).mean().to(logits.dtype)",
    ),
    # determinism
    kernel(
        "rmsnorm",
        "random-last-bit",
        "shape_sweep",  # where the target's own case is called twice
        RMS,
        "y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)\n"
        "return y * (1 + torch.finfo(y.dtype).eps * torch.randint(-1, 2, y.shape, dtype=y.dtype))",
    ),
    kernel(
        "rmsnorm",
        "random-last-bit-of-few-rows",
        "determinism",
        RMS,
        "y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)\n"
        "bit = torch.finfo(y.dtype).eps * (y.shape[0] == 8 and y.dtype == torch.float32)\n"
        "return y * (1 + bit * (torch.randint(16, y.shape) == 0).to(y.dtype))",
    ),
    kernel(
        "rmsnorm",
        "two-outputs-in-turn",
        "smoke_test",  # each call writes over what the last but one returned
        RMS,
        "global kept\nif 'kept' not in globals() or kept[0].shape != x.shape or kept[0].dtype != x.dtype:\n"
        "    kept = [x.new_empty(x.shape), x.new_empty(x.shape)]\n"
        "kept.reverse()\n"
        "return kept[0].copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps))",
    ),
    # edges: right for round sizes and plain layouts
    kernel(
        "rmsnorm",
        "drops-odd-tail",
        "edge_cases",
        RMS,
        "N = x.shape[-1]\ny = torch.nn.functional.rms_norm(x, (N,), weight, eps)\nif N % 2 and N > 1:\n    y[..., -1] = 0\nreturn y",
    ),
    kernel(
        "rmsnorm",
        "ignores-strides",
        "edge_cases",
        RMS,
        "flat = x.as_strided(x.shape, torch.empty(x.shape, device='meta').stride())\n"
        "return torch.nn.functional.rms_norm(flat, x.shape[-1:], weight, eps)",
    ),
    # time limits
    kernel("rmsnorm", "hangs", "smoke_test", RMS, "while True: pass", correctness="TIMEOUT", reason="no answer"),
    # does not compile
    Wrong(
        "rmsnorm-does-not-compile",
        "rmsnorm",
        "from autokernel.build import cpp_function\nrun = cpp_function('int main( {', 'run', '')\n"
        "def kernel_fn(x, weight, eps=1e-6):\n    run()",
        "smoke_test",
        "CRASH",
        "CompileError",
    ),
    Wrong("rmsnorm-syntax-error", "rmsnorm", "def kernel_fn(x, weight", "smoke_test", "FAIL", "not Python"),
)
