"""Gated MLP: inputs, shapes and costs."""

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
}


def arguments(dtype, M, dim, hidden, activation="silu"):
    gate, down = TensorSpec((hidden, dim), dtype), TensorSpec((dim, hidden), dtype)
    return {"x": TensorSpec((M, dim), dtype), "w_gate": gate, "w_up": gate, "w_down": down, "activation": activation}


def eager(x, w_gate, w_up, w_down, activation="silu"):
    return F.linear(ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def roundings(eps, x, w_gate, w_up, w_down, activation="silu", onto=None):
    """Of both projections, which are sums in fp32, the activation and the hidden layer, each a number in the inputs' dtype
    in PyTorch. Where few of the hidden layer count in a result, or all of it is made of one sum whose terms cancel,
    PyTorch's error in it is luck."""
    gate, up, fp32 = F.linear(x, w_gate), F.linear(x, w_up), torch.finfo(torch.float32).eps
    by_sum = [fp32 * F.linear(x.square(), weight.square()).sqrt() for weight in (w_gate, w_up)]
    in_gate, in_up = (torch.hypot(step(sums, eps), each) for sums, each in zip((gate, up), by_sum))
    made = ACTIVATIONS[activation](gate)
    by_gate = (ACTIVATIONS[activation](gate + gate.sign() * in_gate) - made) * up
    by_others = made * in_up, step(made, eps) * up, step(made * up, eps)
    changes = sum((change.square() for change in by_others), by_gate.square())
    if onto is not None:
        return (changes * (onto @ w_down).square()).sum(-1).sqrt().nan_to_num(0, 0, 0)
    return F.linear(changes, w_down.square()).sqrt().nan_to_num(0, 0, 0)


def step(numbers, eps):
    """How far it is from each number to the next in the dtype of that eps: in fp16 2^-24 at least, for what is larger than
    that; what is smaller may become 0."""
    half = torch.finfo(torch.float16)
    size = numbers.abs()
    return (eps * size).maximum(size.clamp(max=half.tiny * half.eps)) if eps == half.eps else eps * size


def large_gates(inputs):
    """Gates to +-30, where sigmoids saturate, and one result that is beyond the range of fp16: of the first row, which
    alone has anything in the first channel, and by that in the first of the hidden ones."""
    x, w_gate, w_up, w_down = (inputs[name].clone() for name in ("x", "w_gate", "w_up", "w_down"))
    w_gate, w_up, first = w_gate * 8, w_up / 8, x.flatten(0, -2)[:, 0]
    first.zero_()
    for weight in (w_gate, w_up):
        weight[:, 0], weight[0] = 0, 0
    first[0], w_gate[0, 0], w_up[0, 0], w_down[0, 0] = 4, 1, 1, 3e4
    return inputs | {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}


def dead_gates(inputs):
    """Gates all negative, of the first row zero: every activation is zero or nearly so. NaN in one weight beyond them."""
    x, w_down = inputs["x"].abs() / 4, inputs["w_down"].clone()
    x.flatten(0, -2)[0], w_down[0, 0] = 0, torch.nan
    return inputs | {"x": x, "w_gate": -inputs["w_gate"].abs(), "w_down": w_down}


def tails(inputs):
    """Gates of a row all alike, where an activation is nearly 0, or nearly its argument, but not quite: approximations that
    are as good as its largest results go are not, there."""
    x, w_gate, w_up = inputs["x"].clone(), inputs["w_gate"] / 64, inputs["w_up"].clone()
    rows = x.flatten(0, -2)[:, 0]
    low, high = (-12, -4) if inputs["activation"] == "silu" else (-4, -2.5)
    rows.copy_(low + (high - low) * torch.linspace(0, 1, len(rows)))
    w_gate[:, 0], w_up[:, 0] = 1, 0
    return inputs | {"x": x, "w_gate": w_gate, "w_up": w_up}


SPEC = KernelSpec(
    name="fused_mlp",
    oracle=reference.fused_mlp,
    eager=eager,
    eager_form="F.linear(act(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)",
    arguments=arguments,
    smoke={"M": 16, "dim": 64, "hidden": 96},
    any_size=("M", "dim", "hidden"),
    summed=("hidden",),
    sweep=(
        {"M": 32, "dim": 768, "hidden": 1024},  # the shipped LLaMA, cut
        {"M": 1, "dim": 512, "hidden": 1376},  # one token: decode
        {"M": 100, "dim": 256, "hidden": 688},  # nothing a power of two
        {"M": 128, "dim": 256, "hidden": 512, "activation": "gelu"},
        {"M": 64, "dim": 384, "hidden": 1000, "activation": "gelu"},
        {"M": 128, "dim": 256, "hidden": 512, "activation": "relu2"},
        {"M": 33, "dim": 300, "hidden": 700, "activation": "relu2"},
        {"M": 40, "dim": 320, "hidden": 600, "activation": "gelu_tanh"},
        {"M": 500, "dim": 64, "hidden": 176},  # tall and narrow
        {"M": 16, "dim": 1024, "hidden": 512},  # hidden narrower than dim
        {"M": 8, "dim": 96, "hidden": 4096},  # long sums on the way down
    ),
    edges=(
        {"M": 1023, "dim": 17, "hidden": 33},
        {"M": 5, "dim": 33, "hidden": 4097, "activation": "gelu"},
        {"M": 3, "dim": 1537, "hidden": 19, "activation": "relu2"},
        {"M": 7, "dim": 65, "hidden": 1025, "activation": "gelu_tanh"},
        {"M": 1, "dim": 1, "hidden": 1},
        {"M": 15, "dim": 257, "hidden": 129},
    ),
    timing={
        "cpu": (
            {"M": 512, "dim": 768, "hidden": 2048},
            {"M": 1, "dim": 768, "hidden": 2048},
            {"M": 512, "dim": 768, "hidden": 2048, "activation": "gelu"},
        ),
        "cuda": (
            {"M": 2048, "dim": 4096, "hidden": 11008},
            {"M": 2048, "dim": 2048, "hidden": 5504},
            {"M": 4096, "dim": 4096, "hidden": 11008},
        ),
    },
    # three products, each a multiplication and an addition per M x dim x hidden
    flops=lambda a: 6 * a["x"].numel * a["w_gate"].shape[0],
    # read x and the three weights, write a result of x's size; the hidden layer need not be stored
    bytes_moved=lambda a: 2 * a["x"].nbytes + 3 * a["w_gate"].nbytes,
    headline="throughput_tflops",
    finite_below=256.0,  # with sums of up to 100,000 products: squared, times another, and summed again
    static=frozenset({"w_gate", "w_up", "w_down"}),
    planted_in=("w_gate", "w_up", "w_down"),
    independent_rows=True,
    sliced=("x",),
    row_scales=(1e-2, 8.0, 1e4),
    roundings=roundings,
    degree=3,  # of relu2, times the other projection
    adversarial={"large_gates": large_gates, "dead_gates": dead_gates},
    decisive={"tails": tails},
    library_calls="the three matrix products",
)
