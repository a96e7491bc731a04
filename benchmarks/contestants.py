"""Who takes part in benchmarks/kernels.py, and on which inputs: PyTorch and its compiler, Liger, the SDPA backends, our
kernels, and the machine's own limit."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autokernel.spec import Case, Dims, KernelSpec, TensorSpec, import_file, kernel_types, load_spec

Call = Callable[..., Tensor]
DTYPES = {"cuda": (torch.float16, torch.bfloat16), "cpu": (torch.float32,)}
OURS = {"cuda": ("triton", "cuda"), "cpu": ("cpp",)}
LIMITS = {name: "copy" for name in ("softmax", "layernorm", "rmsnorm", "rotary_embedding")} | {
    name: "read" for name in ("cross_entropy", "reduce", "vectorsum")
}

# Cases on GPUs beyond the spec's own sizes: long sequences, a layout or a pairing that models have, more rows.
MORE = {
    "matmul": (
        {"M": 4096, "K": 4096, "N": 4096, "b_transposed": True},  # nn.Linear
        {"M": 4096, "K": 4096, "N": 11008, "b_transposed": True},
    ),
    "layernorm": ({"M": 32768, "N": 4096},),
    "rmsnorm": ({"M": 32768, "N": 4096},),
    "rotary_embedding": (
        {"batch": 2, "heads": 32, "seq": 2048, "head_dim": 128, "interleaved": False},
        {"batch": 4, "heads": 32, "seq": 4096, "head_dim": 128, "interleaved": False},
    ),
    "flash_attention": (
        {"batch": 2, "heads": 32, "seq": 1024, "head_dim": 128},
        {"batch": 1, "heads": 32, "seq": 4096, "head_dim": 128},
        {"batch": 1, "heads": 32, "seq": 8192, "head_dim": 64},
        {"batch": 2, "heads": 32, "seq": 8192, "head_dim": 128},
        {"batch": 1, "heads": 32, "seq": 4096, "head_dim": 128, "kv_heads": 8},  # grouped queries
    ),
}


@dataclass(frozen=True)
class Row:
    """One case of one type: everyone who can run it is timed on it, in one go."""

    kernel_type: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.kernel_type} {self.case.name}"

    @property
    def spec(self) -> KernelSpec:
        return load_spec(self.kernel_type)


def sizes(kernel_type: str, kind: str) -> tuple[Dims, ...]:
    """What is timed of a type on "cpu" or "cuda"."""
    return (*load_spec(kernel_type).timing[kind], *(MORE.get(kernel_type, ()) if kind == "cuda" else ()))


def rows(device: str) -> list[Row]:
    """Every case, the first of each type's first, so that a run that is cut short has something of each."""
    kind = torch.device(device).type
    timed = {name: sizes(name, kind) for name in kernel_types()}
    return [
        Row(name, load_spec(name).case(dims[i], dtype))
        for i in range(max(map(len, timed.values())))
        for name, dims in timed.items()
        for dtype in [d for d in DTYPES[kind] if d in load_spec(name).dtypes] or load_spec(name).dtypes
        if i < len(dims)
    ]


def contestants(row: Row, device: str, alternatives: bool = False) -> dict[str, Callable[[], Call]]:
    """Everyone who can run `row`, by name, as functions that load them: what is not installed has no entry."""
    kind, spec = torch.device(device).type, row.spec
    everyone: dict[str, Callable[[], Call]] = {"eager": lambda: spec.eager}
    if row.kernel_type == "rmsnorm":  # the one type whose eager form is not already PyTorch's own single call
        everyone["torch"] = lambda: lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps)
    if row.kernel_type != "flash_attention":  # of which torch.compile makes the very call that eager makes
        everyone["compile"] = lambda: compiled(spec)
    if row.kernel_type == "flash_attention" and kind == "cuda":
        everyone["cudnn"] = lambda: attention_by(spec, SDPBackend.CUDNN_ATTENTION)
        everyone["flash"] = lambda: attention_by(spec, SDPBackend.FLASH_ATTENTION)
    if row.kernel_type in LIGER and kind == "cuda" and importlib.util.find_spec("liger_kernel"):
        everyone["liger"] = LIGER[row.kernel_type]
    activation = row.case.args.get("activation")
    if row.kernel_type == "fused_linear" and kind == "cuda" and activation in LT_EPILOGUES and row.case.args["bias"]:
        everyone["cublaslt"] = lambda: epilogue_of_cublaslt
    for backend in OURS[kind]:
        starters = list(spec.starters(backend).items())
        for stem, path in starters if alternatives else starters[:1]:
            name = backend if stem == f"{backend}_kernel" else stem
            everyone[name] = lambda stem=stem, path=path: import_file(path, f"measured_{spec.name}_{stem}").kernel_fn
    if row.kernel_type in LIMITS and kind == "cuda":
        from benchmarks import limits

        everyone[LIMITS[row.kernel_type]] = getattr(limits, LIMITS[row.kernel_type])
    return everyone


def compiled(spec: KernelSpec) -> Call:
    """Of the eager form; of the plain one for rotary_embedding, whose complex numbers Inductor leaves to eager."""
    form = spec.oracle if spec.name == "rotary_embedding" else spec.eager
    return torch.compile(form, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)


LT_EPILOGUES = {"relu": False, "gelu_tanh": True}  # that PyTorch has cuBLASLt run -> use_gelu


def epilogue_of_cublaslt(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=LT_EPILOGUES[activation])


def attention_by(spec: KernelSpec, backend: SDPBackend) -> Call:
    def call(**inputs: Any) -> Tensor:
        with sdpa_kernel(backend):
            return spec.eager(**inputs)

    return call


def liger_softmax() -> Call:
    from liger_kernel.ops import LigerSoftmaxFunction

    return lambda x, dim: LigerSoftmaxFunction.apply(x)  # along the last dim, the only one that is timed


def liger_layernorm() -> Call:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias, eps: LigerLayerNormFunction.apply(x, weight, bias, eps)


def liger_rmsnorm() -> Call:
    from liger_kernel.ops import LigerRMSNormFunction

    return lambda x, weight, eps: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def liger_cross_entropy() -> Call:
    from liger_kernel.ops import LigerCrossEntropyFunction

    return lambda logits, targets, ignore_index: LigerCrossEntropyFunction.apply(logits, targets, None, ignore_index)[0]


def liger_mlp() -> Call:
    from liger_kernel.ops import LigerSiLUMulFunction

    def call(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str) -> Tensor:
        return F.linear(LigerSiLUMulFunction.apply(F.linear(x, w_gate), F.linear(x, w_up)), w_down)

    return call


# Liger's rotary embedding turns a pair of tensors in place and has no function for one: it is not compared.
LIGER = {
    "softmax": liger_softmax,
    "layernorm": liger_layernorm,
    "rmsnorm": liger_rmsnorm,
    "cross_entropy": liger_cross_entropy,
    "fused_mlp": liger_mlp,
}


def input_sets(row: Row, device: str, count: int) -> Iterator[dict[str, Any]]:
    """`count` sets of fresh inputs, each in memory of its own."""
    generator = torch.Generator(device).manual_seed(0)
    for seed in range(count):
        contents = torch.Generator().manual_seed(seed)
        yield {name: value(row, name, given, generator, contents) for name, given in row.case.args.items()}


def value(row: Row, name: str, given: Any, generator: torch.Generator, contents: torch.Generator) -> Any:
    """One argument: as the spec fills it, else N(0, 1), weights scaled as networks have them."""
    if not isinstance(given, TensorSpec):
        return given
    memory = torch.empty(given.storage_numel, dtype=given.dtype, device=generator.device)
    x = memory.as_strided(given.shape, given.strides, given.offset)
    if name == "targets":  # none ignored: the limit is a pass over all rows, and a kernel may skip those that are
        return x.random_(row.case.args["logits"].shape[-1], generator=generator)
    if name in row.spec.fill:
        return x.copy_(row.spec.fill[name](given, row.case.args, contents))
    x.normal_(generator=generator)
    if name in row.spec.static:
        x.mul_(0.5).add_(1) if x.dim() == 1 else x.mul_(x.shape[-1] ** -0.5)
    return x
