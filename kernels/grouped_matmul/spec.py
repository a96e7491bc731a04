"""Products of groups of rows with a matrix each, as in mixtures of experts: inputs, shapes and costs."""

from functools import partial

import torch

import reference
from autokernel.spec import KernelSpec, TensorSpec, of_many_sizes

UNASSIGNED = 16  # of so many rows at most one is in no group


def arguments(dtype, rows, groups, K, N, w_transposed=True, offs_dtype=torch.int32):
    """`w_transposed`: weight is the view of a [groups, N, K] one, as linear layers keep theirs."""
    strides = (K * N, 1, K) if w_transposed else None
    return {
        "x": TensorSpec((rows, K), dtype),
        "weight": TensorSpec((groups, K, N), dtype, strides),
        "offs": TensorSpec((groups,), offs_dtype),
    }


def takes(a):
    x, weight, offs = a["x"], a["weight"], a["offs"]
    shapes = len(x.shape) == 2 and len(weight.shape) == 3 and offs.shape == weight.shape[:1]
    return shapes and x.shape[1] == weight.shape[1] and offs.dtype in (torch.int32, torch.int64)


def random_offs(spec, args, generator):
    """In some draws each row is as likely to be in one group as in another, in some a few groups have most rows, and in
    some half of the groups have none and the last rows are in no group."""
    (groups,), rows, device = spec.shape, args["x"].shape[0], generator.device
    draw, tail = torch.rand(2, generator=generator, device=device).tolist()
    logits = torch.zeros(groups, device=device)
    if draw > 1 / 3:
        logits = 1.5 * torch.randn(groups, generator=generator, device=device)
    if draw > 2 / 3:
        logits[torch.rand(groups, generator=generator, device=device) < 0.5] = -100.0
        rows -= int(tail * (rows // UNASSIGNED + 1))
    if not rows:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    chosen = torch.multinomial(logits.softmax(0), rows, replacement=True, generator=generator)
    return torch.bincount(chosen, minlength=groups).cumsum(0).to(spec.dtype)


def of_all_rows(x, weight, offs):
    """Each group's product of all rows, of which those are taken that are in it."""
    rows, start, y = torch.arange(len(x), device=x.device)[:, None], 0, x.new_zeros(x.shape[0], weight.shape[2])
    for matrix, end in zip(weight, offs.sort().values):
        y, start = torch.where((start <= rows) & (rows < end), x @ matrix, y), end
    return y


def eager(x, weight, offs):
    """A product for each group, as transformers writes it where PyTorch's grouped_mm does not take the dtype."""
    if type(offs) is not torch.Tensor:  # while it is traced, nothing is known of what is in it
        return of_all_rows(x, weight, offs)
    y, start = x.new_zeros(x.shape[0], weight.shape[2]), 0
    for matrix, end in zip(weight, sorted(offs.tolist())):
        y[start:end] = x[start:end] @ matrix
        start = end
    return y


def in_a_group(x, weight, offs):
    """Which rows of x there are results of."""
    return (torch.arange(len(x), device=x.device) < offs.max())[:, None]


def small_calls(dtype):
    yield arguments(dtype, rows=5, groups=1, K=3, N=4, w_transposed=False)
    yield arguments(dtype, rows=7, groups=3, K=5, N=2, offs_dtype=torch.int64)
    yield arguments(dtype, rows=2, groups=9, K=17, N=33)
    yield arguments(dtype, rows=70, groups=40, K=8, N=16, w_transposed=False)


def all_in(group):
    """All rows in the first group, or the last."""

    def made(inputs):
        offs = torch.full_like(inputs["offs"], len(inputs["x"]))
        offs[: group % len(offs)] = 0
        return inputs | {"offs": offs}

    return made


def sized(of_groups):
    """A function that gives groups as many rows as `of_groups` says of their numbers, of all rows and of all groups, as
    far as there are rows."""

    def made(inputs, generator):
        offs, rows = inputs["offs"], len(inputs["x"])
        numbers = torch.arange(len(offs), device=offs.device)
        sizes = torch.zeros_like(numbers) + of_groups(numbers, rows, len(offs))
        return {"offs": sizes.cumsum(0).clamp(max=rows).to(offs.dtype)}

    return made


SPEC = KernelSpec(
    name="grouped_matmul",
    oracle=reference.grouped_matmul,
    eager=eager,
    eager_form="for each group: y[start:end] = x[start:end] @ weight[group]",
    arguments=arguments,
    smoke={"rows": 20, "groups": 3, "K": 32, "N": 16},
    any_size=("rows", "K", "N"),
    sweep=(
        {"rows": 512, "groups": 8, "K": 256, "N": 512},
        {"rows": 100, "groups": 4, "K": 300, "N": 80, "w_transposed": False},
        {"rows": 2, "groups": 8, "K": 512, "N": 300},  # a token: decode
        {"rows": 16, "groups": 64, "K": 128, "N": 96},  # fewer rows than groups
        {"rows": 300, "groups": 2, "K": 2048, "N": 40},  # long sums
        {"rows": 1000, "groups": 60, "K": 64, "N": 64, "w_transposed": False},
    ),
    edges=(
        {"rows": 1, "groups": 1, "K": 1, "N": 1},
        {"rows": 33, "groups": 5, "K": 65, "N": 513},
        {"rows": 255, "groups": 3, "K": 1025, "N": 19, "w_transposed": False},
        {"rows": 65, "groups": 17, "K": 7, "N": 1},
    ),
    timing={
        "cpu": (
            {"rows": 256, "groups": 8, "K": 512, "N": 1024},
            {"rows": 256, "groups": 8, "K": 1024, "N": 512},
        ),
        "cuda": (  # Mixtral 8x7B's and Qwen3-30B-A3B's experts
            {"rows": 4096, "groups": 8, "K": 4096, "N": 28672},
            {"rows": 4096, "groups": 8, "K": 14336, "N": 4096},
            {"rows": 16384, "groups": 128, "K": 2048, "N": 1536},
            {"rows": 64, "groups": 8, "K": 4096, "N": 28672},
        ),
    },
    # A product and a sum for each row, of which one in UNASSIGNED may be in no group; and those of one group at least.
    flops=lambda a: 2 * (a["x"].shape[0] - a["x"].shape[0] // UNASSIGNED - 1) * a["x"].shape[1] * a["weight"].shape[2],
    bytes_moved=lambda a: (
        a["x"].nbytes
        + a["weight"].nbytes // a["weight"].shape[0]
        + a["x"].shape[0] * a["weight"].shape[2] * a["x"].dtype.itemsize
    ),
    headline="throughput_tflops",
    takes=takes,
    static=frozenset({"weight"}),
    fill={"offs": random_offs},
    filled={
        "groups of one size": sized(lambda numbers, rows, groups: max(1, rows // groups)),
        "groups of one row": sized(lambda numbers, rows, groups: 1),
        "groups of a quarter of the rows in all": sized(lambda numbers, rows, groups: rows // (4 * groups)),
        "groups of multiples of eight": sized(
            lambda numbers, rows, groups: 8 * (1 + numbers % 2) * max(1, rows // (16 * groups))
        ),
        "groups of nothing": sized(lambda numbers, rows, groups: 0),
        "every other group of nothing": sized(lambda numbers, rows, groups: numbers % 2 * max(1, 2 * rows // groups)),
        "all in the second group": sized(lambda numbers, rows, groups: (numbers == min(1, groups - 1)) * rows),
        "all in the middle group": sized(lambda numbers, rows, groups: (numbers == groups // 2) * rows),
        "groups of rising sizes": sized(lambda numbers, rows, groups: numbers * max(1, 2 * rows // groups**2)),
    },
    counted=in_a_group,
    finite_below=1e15,  # with sums of up to a million products
    independent_rows=True,
    forms=small_calls,
    terms=lambda y, **inputs: y.abs().amax(-1, keepdim=True),
    row_scales=(1e-3, 30.0, 1e3, 1e8),
    adversarial={
        "dynamic_range": partial(of_many_sizes, left="x", right="weight"),
        "all_in_the_first": all_in(0),
        "all_in_the_last": all_in(-1),
    },
)
