"""Matmul with FP4 weights: inputs, shapes and costs.

Scaled weights must be numbers of the activations' dtype: in fp16, scales between 2^-14 and 2^8.
"""

import math

import torch

import reference
from autokernel.spec import KernelSpec, TensorSpec

GROUP = {"mxfp4": 32, "nvfp4": 16}


def arguments(dtype, M, K, N, layout="mxfp4"):
    """As MXFP4 (E8M0 scales, groups of 32) or NVFP4 (E4M3 scales, groups of 16, one fp32 scale for all)."""
    scale_dtype = torch.uint8 if layout == "mxfp4" else torch.float8_e4m3fn
    return {
        "x": TensorSpec((M, K), dtype),
        "w": TensorSpec((N, K // 2), torch.uint8),
        "scales": TensorSpec((N, K // GROUP[layout]), scale_dtype),
        "scale": 1.0 if layout == "mxfp4" else 0.25 * K**-0.5,
    }


def eager(x, w, scales, scale=1.0):
    return x @ reference.fp4_weights(w, scales, scale).to(x.dtype).T


def codes(spec, args, generator):
    """Every byte is two numbers."""
    return torch.randint(256, spec.shape, generator=generator)


def scales(spec, args, generator):
    """Around K^-0.5 / 2 as powers of two, or between 0.5 and 4."""
    if spec.dtype == torch.uint8:
        middle = 126 - round(math.log2(args["x"].shape[1]) / 2)
        return torch.randint(middle - 2, middle + 2, spec.shape, generator=generator)
    return 0.5 + 3.5 * torch.rand(spec.shape, generator=generator)


def one_large(inputs):
    """One activation a row beside which the others are small."""
    x = inputs["x"].clone()
    x[:, -1] = 100.0
    return inputs | {"x": x}


def scales_of_all_sizes(inputs):
    """Output channels from 2^-8 to 2^8 times as large as they were, as far as their scales go."""
    scales = inputs["scales"]
    shift = torch.arange(len(scales), device=scales.device)[:, None] % 17 - 8
    if scales.dtype == torch.uint8:
        return inputs | {"scales": (scales.int() + shift).clamp(113, 134).to(scales.dtype)}
    return inputs | {"scales": (scales.float() * shift.exp2()).clamp(2.0**-9, 448).to(scales.dtype)}


SPEC = KernelSpec(
    name="matmul_fp4",
    oracle=reference.matmul_fp4,
    eager=eager,
    eager_form="x @ dequantised(w, scales).T",
    arguments=arguments,
    smoke={"M": 4, "K": 128, "N": 64},
    sweep=(
        {"M": 1, "K": 768, "N": 768},  # decode
        {"M": 16, "K": 1024, "N": 512},
        {"M": 16, "K": 1024, "N": 512, "layout": "nvfp4"},
        {"M": 128, "K": 512, "N": 256, "layout": "nvfp4"},
        {"M": 512, "K": 256, "N": 384},
    ),
    edges=(
        {"M": 3, "K": 96, "N": 17},
        {"M": 17, "K": 48, "N": 65, "layout": "nvfp4"},
        {"M": 1, "K": 32, "N": 1},
        {"M": 65, "K": 4064, "N": 7},
    ),
    timing={
        "cpu": ({"M": 1, "K": 4096, "N": 4096}, {"M": 64, "K": 1024, "N": 1024}),
        "cuda": (
            {"M": 16, "K": 8192, "N": 28672},
            {"M": 1, "K": 8192, "N": 28672, "layout": "nvfp4"},
            {"M": 1024, "K": 4096, "N": 11008},
            {"M": 4096, "K": 4096, "N": 4096},
        ),
    },
    flops=lambda a: 2 * a["x"].numel * a["w"].shape[0],
    bytes_moved=lambda a: (
        a["x"].nbytes + a["w"].nbytes + a["scales"].nbytes + a["x"].shape[0] * a["w"].shape[0] * a["x"].dtype.itemsize
    ),  # read x, w and scales, write y
    headline="throughput_tflops",
    static=frozenset({"w", "scales"}),
    fill={"w": codes, "scales": scales},
    independent_rows=True,
    sliced=("x",),
    terms=lambda y, **inputs: y.abs().amax(-1, keepdim=True),
    row_scales=(1e-3, 30.0, 1e3, 1e8),
    adversarial={"one_large": one_large, "scales_of_all_sizes": scales_of_all_sizes},
    dtypes=(torch.float16, torch.bfloat16),
)
