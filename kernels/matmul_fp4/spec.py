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
    """The weights' codes one by one, as PyTorch programs write it."""
    codes = torch.stack((w & 15, w >> 4), -1).flatten(-2).int()
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=w.device)
    values = torch.where(codes > 7, -1.0, 1.0) * sizes[codes & 7]
    factors = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    weights = values * factors.repeat_interleave(values.shape[1] // scales.shape[1], 1) * scale
    return x @ weights.to(x.dtype).T


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


def overflowing(inputs):
    """Activations at the end of fp16's range, and results beyond it."""
    return inputs | {"x": inputs["x"].sign() * 6e4}


def scales_of_all_sizes(inputs):
    """Output channels from 2^-8 to 2^8 times as large as they were, as far as their scales go; in bf16 up to 2^104."""
    channel = torch.arange(len(inputs["scales"]), device=inputs["scales"].device)[:, None] % 17 - 8
    return inputs | {"scales": times_power(inputs, channel if inputs["x"].dtype == torch.float16 else 13 * channel)}


def groups_of_nothing(inputs):
    """Every third group, and all groups of every fifth channel, with the smallest scale that there is: zero in E4M3."""
    scales = inputs["scales"].clone().view(torch.uint8)
    least = 0 if inputs["scales"].dtype != torch.uint8 else 113 if inputs["x"].dtype == torch.float16 else 8
    scales[:, 1::3], scales[4::5] = least, least
    return inputs | {"scales": scales.view(inputs["scales"].dtype)}


def dynamic_range(inputs):
    """Groups from 2^-7 to 2^7 times as large as they were, activations the inverse: no group is next to nothing."""
    scales, most = inputs["scales"], 7 if inputs["scales"].dtype == torch.uint8 else 4
    shift = torch.arange(scales.shape[1], device=scales.device) % (2 * most + 1) - most
    activations = inputs["x"].unflatten(-1, (scales.shape[1], -1)) * torch.exp2(-shift[:, None].float())
    return inputs | {"x": activations.flatten(-2).to(inputs["x"].dtype), "scales": times_power(inputs, shift)}


def times_power(inputs, shift):
    """The scales times 2^shift, as far as they go, and the dtype of the activations does."""
    scales, is_half = inputs["scales"], inputs["x"].dtype == torch.float16
    if scales.dtype == torch.uint8:
        return (scales.int() + shift).clamp(*((113, 134) if is_half else (8, 240))).to(scales.dtype)
    return (scales.float() * shift.clamp(-8, 8).exp2()).clamp(2.0**-9, 448).to(scales.dtype)


def alike_along(name, *dims):
    """A function that makes the bytes of an input alike along these dims: those of each first index."""

    def made(inputs, generator):
        known = inputs[name].view(torch.uint8)
        for dim in dims:
            known = known.narrow(dim, 0, 1).expand_as(known)
        return {name: known.contiguous().view(inputs[name].dtype)}

    return made


def first_rows_alike(inputs, generator):
    """Scales that are one number in the first channels; in others not."""
    scales = inputs["scales"].view(torch.uint8).clone()
    scales[: -(-len(scales) // 4)] = scales[0, 0].clone()
    return {"scales": scales.view(inputs["scales"].dtype)}


def codes_of(low, high):
    """A function that gives all weights bytes between two."""

    def made(inputs, generator):
        w = inputs["w"]
        codes = torch.randint(low, high, w.shape, generator=generator, device=generator.device)
        return {"w": codes.to(w)}

    return made


def terms(y, scales, **inputs):
    """Of a row's largest result, what goes into a channel whose scales are smaller than others."""
    sizes = scales.double().exp2() if scales.dtype == torch.uint8 else scales.double()
    channel = sizes.abs().amax(1)
    return y.abs().amax(-1, keepdim=True) * channel / channel.max()


SPEC = KernelSpec(
    name="matmul_fp4",
    oracle=reference.matmul_fp4,
    eager=eager,
    native=reference.matmul_fp4,
    eager_form="x @ dequantised(w, scales).T",
    arguments=arguments,
    smoke={"M": 4, "K": 128, "N": 64},
    any_size=("M", "N"),
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
    filled={
        "codes that are alike": alike_along("w", 0, 1),
        "codes that are alike in each row": alike_along("w", 1),
        "rows of codes that are alike": alike_along("w", 0),
        "codes of zero": codes_of(0, 1),
        "codes of minus zero": codes_of(0x88, 0x89),
        "first codes of zero": lambda inputs, g: {"w": codes_of(0, 16)(inputs, g)["w"] << 4},
        "second codes of zero": codes_of(0, 16),
        "scales that are alike": alike_along("scales", 0, 1),
        "scales that are alike in each row": alike_along("scales", 1),
        "rows of scales that are alike": alike_along("scales", 0),
        "scales that are alike in the first rows": first_rows_alike,
    },
    other_values={"scale": (-0.5, 0.0, 8.0)},
    independent_rows=True,
    sliced=("x",),
    terms=terms,
    row_scales=(1e-3, 30.0, 1e3, 1e8),
    adversarial={
        "one_large": one_large,
        "overflowing": overflowing,
        "scales_of_all_sizes": scales_of_all_sizes,
        "groups_of_nothing": groups_of_nothing,
        "dynamic_range": dynamic_range,
    },
    dtypes=(torch.float16, torch.bfloat16),
)
