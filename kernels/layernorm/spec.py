"""LayerNorm: inputs, shapes and costs."""

import torch
import torch.nn.functional as F

import reference
from autokernel.spec import ROW_SCALES, KernelSpec, TensorSpec, alike


def arguments(dtype, M, N, eps=1e-5):
    return {"x": TensorSpec((M, N), dtype), "weight": TensorSpec((N,), dtype), "bias": TensorSpec((N,), dtype), "eps": eps}


def eager(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def near_zero(inputs):
    """A variance so small that eps decides the result."""
    return inputs | {"x": inputs["x"] * 1e-3}


def large_mean(inputs):
    """A mean of 256 standard deviations, of 128 in fp32: E[x²] - E[x]² would cancel."""
    return inputs | {"x": inputs["x"] + (128.0 if inputs["x"].dtype == torch.float32 else 256.0)}


def constant_rows(inputs):
    """No variance at all: the bias is the answer."""
    return inputs | {"x": alike(inputs["x"]).clone()}


SPEC = KernelSpec(
    name="layernorm",
    oracle=reference.layernorm,
    eager=eager,
    eager_form="F.layer_norm",
    arguments=arguments,
    smoke={"M": 8, "N": 256},
    any_size=("M", "N"),
    sweep=(
        {"M": 1, "N": 768},  # one token: decode
        {"M": 64, "N": 128},
        {"M": 512, "N": 768},  # GPT-2, BERT
        {"M": 256, "N": 1024},
        {"M": 128, "N": 2048},
        {"M": 100, "N": 2560},  # rows not a power of two
        {"M": 64, "N": 4096},
        {"M": 50, "N": 5120},
        {"M": 32, "N": 8192},
    ),
    edges=(
        {"M": 7, "N": 1023},
        {"M": 5, "N": 4097},
        {"M": 3, "N": 1537},
        {"M": 1, "N": 1},
        {"M": 65, "N": 17},
    ),
    timing={
        "cpu": ({"M": 512, "N": 768}, {"M": 1, "N": 768}, {"M": 2048, "N": 4096}),
        "cuda": (
            {"M": 4096, "N": 2048},
            {"M": 8192, "N": 4096},
            {"M": 4096, "N": 5120},
            {"M": 8192, "N": 8192},
        ),
    },
    takes=lambda a: a["weight"].shape == a["bias"].shape == a["x"].shape[-1:],
    flops=lambda a: 7 * a["x"].numel,  # sum; subtract, square, add; scale, weight, bias
    bytes_moved=lambda a: 2 * a["x"].nbytes + 2 * a["weight"].nbytes,  # read x, weight and bias, write y
    headline="bandwidth_gb_s",
    static=frozenset({"weight", "bias"}),
    planted_in=("weight", "bias"),
    independent_rows=True,
    sliced=("x",),
    row_scales=(*ROW_SCALES, 1e8),
    adversarial={"near_zero": near_zero, "large_mean": large_mean, "constant_rows": constant_rows},
)
