"""Reduce, sum or max: inputs, shapes and costs."""

import torch

import reference
from autokernel.spec import ROW_SCALES, KernelSpec, TensorSpec


def arguments(dtype, shape, dim=-1, op="sum"):
    return {"x": TensorSpec(tuple(shape), dtype), "dim": dim, "op": op}


def eager(x, dim=-1, op="sum"):
    return x.sum(dim) if op == "sum" else x.amax(dim)


def cancelling(inputs):
    """The second half takes the first away: sums in a careless order keep what rounding left.

    The terms have a norm of about 1: at 100,000 terms of size 1, fp32 rounding alone leaves 1e-4 in any order but a
    lucky one (0 in PyTorch's, measured 1.1e-4 in another), which says nothing of a kernel.
    """
    dim = inputs["dim"]
    x = inputs["x"] / inputs["x"].shape[dim] ** 0.5
    half = x.shape[dim] // 2
    x.narrow(dim, half, half).copy_(-x.narrow(dim, 0, half))
    return inputs | {"x": x}


def negative(inputs):
    """Nothing above zero: a maximum that starts from 0 is wrong."""
    return inputs | {"x": -inputs["x"].abs() - 1}


def lowest(inputs):
    """Nothing above half of the lowest number: a maximum that starts from any other is wrong. Sums would overflow."""
    if inputs["op"] == "sum":
        return inputs
    x = inputs["x"]
    return inputs | {"x": (x.abs().clamp(max=4) / 8 + 0.5) * torch.finfo(x.dtype).min}


def minus_infinity(inputs):
    """-inf in the first half, as a mask leaves it."""
    x, dim = inputs["x"].clone(), inputs["dim"]
    x.narrow(dim, 0, x.shape[dim] // 2).fill_(-torch.inf)
    return inputs | {"x": x}


def opposite_halves(inputs):
    """Halves whose sums are each beyond the range of fp16, and take each other away: what was kept in it is lost. All are
    powers of two, added without rounding in any order, but for one element."""
    x, dim = torch.empty_like(inputs["x"]), inputs["dim"]
    half = x.shape[dim] // 2
    size = 2.0 ** min(15, max(0, 17 - half.bit_length()))
    x.fill_(size).narrow(dim, half, x.shape[dim] - half).fill_(-size)
    x.narrow(dim, 2 * half, x.shape[dim] - 2 * half).fill_(0)
    x.narrow(dim, 0, 1).add_(size)
    return inputs | {"x": x}


SPEC = KernelSpec(
    name="reduce",
    oracle=reference.reduce,
    eager=eager,
    eager_form="x.sum(dim) or x.amax(dim)",
    arguments=arguments,
    smoke={"shape": (8, 256)},
    any_size=("shape",),
    sweep=(
        {"shape": (100000,)},  # all of a vector
        {"shape": (512, 768)},
        {"shape": (512, 768), "op": "max"},
        {"shape": (2, 65536)},  # few long rows
        {"shape": (1024, 256), "dim": 0},  # a bias gradient
        {"shape": (1024, 256), "dim": 0, "op": "max"},
        {"shape": (8, 197, 96), "dim": 1},  # mean over tokens
        {"shape": (4, 8, 64, 64), "dim": 2, "op": "max"},
        {"shape": (4, 8, 64, 64)},
    ),
    edges=(
        {"shape": (7, 1023)},
        {"shape": (5, 4097), "op": "max"},
        {"shape": (3, 1537)},
        {"shape": (1, 1)},
        {"shape": (65, 17), "op": "max"},
        {"shape": (4097, 3), "dim": 0},
        {"shape": (3, 1, 5), "dim": 1, "op": "max"},
        {"shape": (1,)},
        {"shape": (131, 33), "dim": 0, "op": "max"},
    ),
    timing={
        "cpu": (
            {"shape": (6144, 512)},
            {"shape": (6144, 512), "op": "max"},
            {"shape": (6144, 512), "dim": 0},
            {"shape": (6144, 512), "dim": 0, "op": "max"},
        ),
        "cuda": (
            {"shape": (4096, 4096)},
            {"shape": (8192, 8192)},
            {"shape": (1024, 32768)},
            {"shape": (16384, 16384)},
        ),
    },
    flops=lambda a: a["x"].numel,  # one addition or comparison an element
    # read x, write one element for each line along dim
    bytes_moved=lambda a: a["x"].nbytes + a["x"].nbytes // a["x"].shape[a["dim"]],
    headline="bandwidth_gb_s",
    finite_below=1e30,
    independent_rows=True,
    sliced=("x",),
    row_scales=(*ROW_SCALES, 1e8),
    terms=lambda y, x, dim=-1, **inputs: torch.linalg.vector_norm(x, dim=dim),
    picked=lambda y, op="sum", **inputs: torch.tensor(op == "max", device=y.device),
    adversarial={
        "cancelling": cancelling,
        "opposite_halves": opposite_halves,
        "negative": negative,
        "lowest": lowest,
        "minus_infinity": minus_infinity,
    },
)
