"""A linear layer with a bias, an activation, or both: inputs, shapes and costs."""

from functools import partial

import torch
import torch.nn.functional as F

import reference
from autokernel.spec import KernelSpec, TensorSpec

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "none": lambda x: x,
}


def arguments(dtype, M, K, N, activation="gelu", bias=True):
    weight, vector = TensorSpec((N, K), dtype), TensorSpec((N,), dtype)
    return {"x": TensorSpec((M, K), dtype), "weight": weight, "bias": vector if bias else None, "activation": activation}


def eager(x, weight, bias=None, activation="gelu"):
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def saturated(inputs):
    """Sums to +-30, where activations are 0 or their argument, and one that is beyond the range of fp16."""
    x, weight = inputs["x"].clone(), inputs["weight"] * 8
    weight[:, 0], weight[0, 0], x.flatten(0, -2)[0, 0] = 0, 4, 3e4
    return inputs | {"x": x, "weight": weight}


def dead(inputs):
    """All sums negative: every activation is zero or nearly so."""
    changed = {"x": inputs["x"].abs() / 4, "weight": -inputs["weight"].abs()}
    return inputs | changed | ({} if inputs["bias"] is None else {"bias": -inputs["bias"].abs()})


def tails(inputs):
    """Sums of a row all alike, where an activation is nearly 0, or nearly its argument, but not quite: approximations that
    are as good as its largest results go are not, there."""
    x, weight = inputs["x"].clone(), inputs["weight"] / 64
    rows = x.flatten(0, -2)[:, 0]
    low, high = (-12, -4) if inputs["activation"] == "silu" else (-4, -2.5)
    rows.copy_(low + (high - low) * torch.linspace(0, 1, len(rows)))
    rows[3::4] *= -1
    weight[:, 0] = 1
    return inputs | {"x": x, "weight": weight} | ({} if inputs["bias"] is None else {"bias": inputs["bias"] / 64})


def dynamic_range(inputs):
    """Columns of x between 2^-9 and 2^9, those of the weight the inverse: every product matters."""
    row = inputs["x"].flatten(0, -2)[0]
    exponents = (18 * (row.float().argsort() / len(row)) - 9).round()
    scale = exponents.exp2().to(inputs["x"].dtype)
    return inputs | {"x": inputs["x"] * scale, "weight": inputs["weight"] / scale}


SPEC = KernelSpec(
    name="fused_linear",
    oracle=reference.fused_linear,
    eager=eager,
    eager_form="act(F.linear(x, weight, bias))",
    takes=lambda a: a["x"].dtype == a["weight"].dtype,  # of an integer x, which PyTorch refuses, fake tensors have a result
    arguments=arguments,
    smoke={"M": 16, "K": 64, "N": 96},
    any_size=("M", "K", "N"),
    sweep=(
        {"M": 100, "K": 768, "N": 1024, "activation": "gelu_tanh"},  # GPT-2's MLP up, cut
        {"M": 128, "K": 768, "N": 1024},  # BERT's
        {"M": 1, "K": 768, "N": 3072, "activation": "relu"},  # OPT's, one token
        {"M": 33, "K": 300, "N": 700, "activation": "relu"},  # nothing a power of two
        {"M": 128, "K": 256, "N": 512, "activation": "silu", "bias": False},
        {"M": 64, "K": 320, "N": 640, "activation": "relu2", "bias": False},
        {"M": 50, "K": 200, "N": 333, "activation": "gelu_tanh", "bias": False},
        {"M": 500, "K": 64, "N": 40},  # tall and narrow
        {"M": 128, "K": 768, "N": 768, "activation": "none"},  # a projection of BERT's
        {"M": 16, "K": 4096, "N": 64, "activation": "silu"},  # long sums
    ),
    edges=(
        {"M": 1023, "K": 17, "N": 33},
        {"M": 5, "K": 33, "N": 4097, "activation": "gelu_tanh"},
        {"M": 3, "K": 1537, "N": 19, "activation": "relu2", "bias": False},
        {"M": 7, "K": 65, "N": 1025, "activation": "relu"},
        {"M": 1, "K": 1, "N": 1, "activation": "silu"},
        {"M": 15, "K": 257, "N": 129, "bias": False},
        {"M": 9, "K": 129, "N": 77, "activation": "none"},
    ),
    timing={
        "cpu": (
            {"M": 512, "K": 768, "N": 3072, "activation": "gelu_tanh"},
            {"M": 1024, "K": 768, "N": 3072},
            {"M": 512, "K": 768, "N": 3072, "activation": "relu"},
        ),
        "cuda": (
            {"M": 8192, "K": 768, "N": 3072, "activation": "gelu_tanh"},  # GPT-2, 8 x 1024
            {"M": 16384, "K": 1024, "N": 4096},  # BERT-large, 32 x 512
            {"M": 4096, "K": 2048, "N": 8192, "activation": "relu"},  # OPT-1.3B, 4 x 1024
        ),
    },
    flops=lambda a: 2 * a["x"].numel * a["weight"].shape[0],
    # read x, the weight and the bias, write the result
    bytes_moved=lambda a: (
        a["x"].nbytes
        + a["weight"].nbytes
        + (a["bias"].nbytes if a["bias"] else 0)
        + a["x"].nbytes // a["weight"].shape[1] * a["weight"].shape[0]
    ),
    headline="throughput_tflops",
    finite_below=1e6,  # with sums of up to a million products, squared
    static=frozenset({"weight", "bias"}),
    planted_in=("weight", "bias"),
    independent_rows=True,
    sliced=("x",),
    row_scales=(1e-2, 30.0, 1e4),
    degree=2,  # of relu2
    adversarial={"saturated": saturated, "dead": dead, "dynamic_range": dynamic_range},
    decisive={"tails": tails},
    library_calls="the matrix product",
    is_library_work=lambda a: a["activation"] == "none",  # torch.addmm adds the bias
)
