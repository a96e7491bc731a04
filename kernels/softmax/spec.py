"""Softmax: inputs, shapes and costs."""

import math
from functools import partial

import torch

import reference
from autokernel.spec import ROW_SCALES, KernelSpec, TensorSpec, steep


def arguments(dtype, shape, dim=-1):
    return {"x": TensorSpec(tuple(shape), dtype), "dim": dim}


def large_equal(inputs):
    """Rows of one large value: exp overflows unless the maximum is subtracted first."""
    return inputs | {"x": torch.full_like(inputs["x"], 2.0**14)}


def one_dominates(inputs):
    """One element far above the others, which underflow."""
    x = inputs["x"].clone()
    x.select(inputs["dim"], x.shape[inputs["dim"]] // 2).fill_(1000.0)
    return inputs | {"x": x}


def many_small(lead, inputs):
    """One element far above the others, each of which is next to nothing, but all of them together e^-lead beside it."""
    x, dim = inputs["x"] / 8, inputs["dim"]
    x.select(dim, x.shape[dim] // 2).fill_(math.log(x.shape[dim]) + lead)
    return inputs | {"x": x}


def masked(inputs):
    """-inf in the first half, as padding on the left leaves it, and steep lines."""
    x, dim = steep(inputs["x"].movedim(inputs["dim"], -1)).movedim(-1, inputs["dim"]).contiguous(), inputs["dim"]
    x.narrow(dim, 0, x.shape[dim] // 2).fill_(-torch.inf)
    return inputs | {"x": x}


def nothing_left(inputs):
    """-inf all along every other line: NaN, as in torch.softmax."""
    x = inputs["x"]
    lines = x.select(inputs["dim"], 0).unsqueeze(inputs["dim"])
    every_other = torch.arange(lines.numel(), device=x.device).view(lines.shape) % 2 == 0
    return inputs | {"x": x.masked_fill(every_other, -torch.inf)}


def lowest_alone(inputs):
    """-inf everywhere but at the end, where the lowest number is, as two masks that are added leave it."""
    x = torch.full_like(inputs["x"], -torch.inf)
    x.select(inputs["dim"], -1).fill_(torch.finfo(x.dtype).min)
    return inputs | {"x": x}


SPEC = KernelSpec(
    name="softmax",
    oracle=reference.softmax,
    eager=torch.softmax,
    eager_form="torch.softmax",
    arguments=arguments,
    smoke={"shape": (8, 256)},
    any_size=("shape",),
    sweep=(
        {"shape": (64, 64)},
        {"shape": (512, 128)},
        {"shape": (1, 32000)},  # one token's distribution over the vocabulary
        {"shape": (16, 4096)},
        {"shape": (2, 12, 64, 64)},  # attention scores
        {"shape": (4, 50257)},  # GPT-2's vocabulary: odd rows
        {"shape": (128, 512), "dim": 0},  # along columns
        {"shape": (8, 96, 80), "dim": 1},  # along the middle
        {"shape": (333,)},
    ),
    edges=(
        {"shape": (7, 1023)},
        {"shape": (5, 4097)},
        {"shape": (3, 1537)},
        {"shape": (1, 1)},
        {"shape": (65, 17)},
        {"shape": (4097, 3), "dim": 0},
        {"shape": (3, 1, 5), "dim": 1},
    ),
    timing={
        "cpu": ({"shape": (6144, 512)}, {"shape": (512, 4096)}, {"shape": (512, 32000)}),
        "cuda": (
            {"shape": (4096, 4096)},
            {"shape": (8192, 8192)},
            {"shape": (1024, 32768)},
            {"shape": (4096, 50257)},
            {"shape": (32768, 128)},
        ),
    },
    flops=lambda a: 5 * a["x"].numel,  # max, subtract, exp (counted as one), add, scale
    bytes_moved=lambda a: 2 * a["x"].nbytes,  # read x, write y
    headline="bandwidth_gb_s",
    finite_below=1e30,
    independent_rows=True,
    sliced=("x",),
    relative=True,
    row_scales=(*ROW_SCALES, 1e8),
    terms=lambda y, dim=-1, **inputs: y.amax(dim, keepdim=True),
    adversarial={
        "large_equal": large_equal,
        "one_dominates": one_dominates,
        **{f"many_small_{lead}": partial(many_small, lead) for lead in (4, 8, 11)},  # rounding leaves e^-13 in fp32
        "masked": masked,
        "nothing_left": nothing_left,
        "lowest_alone": lowest_alone,
    },
)
