"""The sum of one long fp32 vector: inputs, sizes and costs."""

import torch

import reference
from autokernel.spec import KernelSpec, TensorSpec


def cancelling(inputs):
    """The second half takes the first away; terms have a norm of about 1."""
    x = inputs["x"] / inputs["x"].numel() ** 0.5
    half = x.numel() // 2
    x[half : 2 * half] = -x[:half]
    return inputs | {"x": x}


def one_large(inputs):
    """One element beside which the others are small, but not together."""
    x = inputs["x"].clone()
    x[-1] = 1e4
    return inputs | {"x": x}


SPEC = KernelSpec(
    name="vectorsum",
    oracle=reference.vectorsum,
    eager=torch.sum,
    eager_form="x.sum()",
    arguments=lambda dtype, N: {"x": TensorSpec((N,), dtype)},
    smoke={"N": 1024},
    any_size=("N",),
    sweep=({"N": 1}, {"N": 1000}, {"N": 65536}, {"N": 1 << 20}, {"N": 3_000_001}),
    edges=({"N": 17}, {"N": 1023}, {"N": 4097}, {"N": 100_003}),
    timing={"cpu": ({"N": 1 << 22}, {"N": 1 << 16}), "cuda": ({"N": 1 << 28}, {"N": 1 << 24})},
    flops=lambda a: a["x"].numel,
    bytes_moved=lambda a: a["x"].nbytes,  # read x
    headline="bandwidth_gb_s",
    finite_below=1e30,
    adversarial={"cancelling": cancelling, "one_large": one_large},
    magnitude=lambda x: x.square().sum().sqrt(),  # of a sum whose terms have random signs
    dtypes=(torch.float32,),
)
