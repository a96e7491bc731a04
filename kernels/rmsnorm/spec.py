"""RMSNorm: inputs, shapes and costs."""

import torch
import torch.nn.functional as F

import reference
from autokernel.spec import ROW_SCALES, KernelSpec, TensorSpec


def arguments(dtype, M, N, eps=1e-6):
    return {"x": TensorSpec((M, N), dtype), "weight": TensorSpec((N,), dtype), "eps": eps}


def eager(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def native(x, weight, eps=1e-6):
    """As PyTorch's own operator has it, whose squares are not in 16 bits: in fp16 those of 256 are infinite."""
    return F.rms_norm(x, weight.shape, weight, eps)


def near_zero(inputs):
    """Rows so small that eps decides the result."""
    return inputs | {"x": inputs["x"] * 1e-3}


def one_large(inputs):
    """One element a row carries nearly all of its norm."""
    x = inputs["x"].clone()
    x[..., -1] = 200.0
    return inputs | {"x": x}


def zero_rows(inputs):
    """Every other row is zeros: so is the answer."""
    x = inputs["x"].clone()
    x[::2] = 0
    return inputs | {"x": x}


SPEC = KernelSpec(
    name="rmsnorm",
    oracle=reference.rmsnorm,
    eager=eager,
    native=native,
    eager_form="x * rsqrt(mean(x²) + eps) * weight",
    arguments=arguments,
    smoke={"M": 8, "N": 256},
    any_size=("M", "N"),
    sweep=(
        {"M": 1, "N": 768},  # one token: decode
        {"M": 64, "N": 128},  # q/k norms over a head
        {"M": 512, "N": 768},  # the shipped models
        {"M": 256, "N": 1024},
        {"M": 128, "N": 2048},
        {"M": 100, "N": 2560},  # rows not a power of two
        {"M": 64, "N": 4096},  # LLaMA-7B
        {"M": 32, "N": 8192},
        {"M": 33, "N": 11008},
    ),
    edges=({"M": 7, "N": 1023}, {"M": 5, "N": 4097}, {"M": 3, "N": 1537}, {"M": 1, "N": 1}, {"M": 65, "N": 17}),
    timing={
        "cpu": ({"M": 512, "N": 768}, {"M": 1, "N": 768}, {"M": 2048, "N": 4096}),
        "cuda": ({"M": 4096, "N": 4096}, {"M": 2048, "N": 4096}, {"M": 8192, "N": 8192}, {"M": 1024, "N": 1024}),
    },
    takes=lambda a: a["weight"].shape == a["x"].shape[-1:],  # PyTorch would take one weight for all, or some for each row
    flops=lambda a: 4 * a["x"].numel,  # square, add, scale, weight
    bytes_moved=lambda a: 2 * a["x"].nbytes + a["weight"].nbytes,  # read x and weight, write y
    headline="bandwidth_gb_s",
    static=frozenset({"weight"}),
    planted_in=("weight",),
    independent_rows=True,
    sliced=("x",),
    row_scales=(*ROW_SCALES, 1e8),
    terms=lambda y, **inputs: y.abs().amax(-1, keepdim=True),
    adversarial={"near_zero": near_zero, "one_large": one_large, "zero_rows": zero_rows},
)
