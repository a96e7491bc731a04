"""Products of a batch of matrices: inputs, shapes and costs."""

from functools import partial

import torch

import reference
from autokernel.spec import KernelSpec, TensorSpec, of_many_sizes


def arguments(dtype, batch, M, K, N, b_transposed=False, heads_inside=False, shared=False):
    """`batch`: one number or several. `b_transposed`: B is the view of a [*batch, N, K] one, as keys are for scores.
    `heads_inside`: A is the view of a [batch, M, heads, K] one, as heads are cut from a projection. `shared`: all of the
    batch have one B."""
    batch = (batch,) if isinstance(batch, int) else tuple(batch)
    matrix = (1, K) if b_transposed else (N, 1)
    outer = tuple(0 if shared else K * N * stride for stride in _strides(batch))
    a_strides = (M * batch[1] * K, K, batch[1] * K, 1) if heads_inside else None
    return {"A": TensorSpec((*batch, M, K), dtype, a_strides), "B": TensorSpec((*batch, K, N), dtype, (*outer, *matrix))}


def small_calls(dtype):
    """Of batches of one to four dims, one of which may be of one matrix, or one in memory for all of another batch; and of
    one size along all dims."""
    yield arguments(dtype, batch=1, M=5, K=3, N=4)
    yield arguments(dtype, batch=3, M=2, K=5, N=1)
    yield arguments(dtype, batch=(2, 3), M=4, K=1, N=6)
    yield arguments(dtype, batch=(2, 1, 3, 2), M=3, K=11, N=10)
    yield arguments(dtype, batch=6, M=6, K=6, N=6)
    yield arguments(dtype, batch=(5, 5), M=5, K=5, N=5, b_transposed=True)
    for shared in (0, 1):  # as where heads share keys
        args = arguments(dtype, batch=(2, 3), M=5, K=9, N=6, b_transposed=True)
        strides = [0 if dim == shared else stride for dim, stride in enumerate(args["B"].strides)]
        yield args | {"B": TensorSpec(args["B"].shape, dtype, tuple(strides))}


def _strides(shape):
    return torch.empty(shape, device="meta").stride()


def one_sign(inputs):
    """Sums that only grow: an accumulator of too few bits stops growing with them. One is beyond the range of fp16."""
    A, B = inputs["A"].abs(), inputs["B"].abs()
    B[..., 0, :], B[..., 0, 0], A.flatten(0, -2)[0, 0] = 0, 4, 3e4
    return {"A": A, "B": B}


SPEC = KernelSpec(
    name="bmm",
    oracle=reference.bmm,
    eager=reference.bmm,
    eager_form="A @ B",
    arguments=arguments,
    smoke={"batch": (2, 2), "M": 16, "K": 32, "N": 16},
    any_size=("M", "K", "N"),
    sweep=(
        {"batch": (2, 4), "M": 64, "K": 64, "N": 64, "b_transposed": True, "heads_inside": True},  # attention scores
        {"batch": (2, 4), "M": 100, "K": 100, "N": 64},  # probabilities times values
        {"batch": (1, 2), "M": 256, "K": 80, "N": 300, "b_transposed": True},
        {"batch": 4, "M": 100, "K": 256, "N": 512},  # experts
        {"batch": 6, "M": 33, "K": 768, "N": 96, "b_transposed": True},
        {"batch": 16, "M": 1, "K": 64, "N": 300},  # one token: decode
        {"batch": 2, "M": 64, "K": 2048, "N": 40},  # long sums
        {"batch": 300, "M": 8, "K": 20, "N": 9},  # many small ones
        {"batch": 5, "M": 50, "K": 128, "N": 65, "shared": True},
    ),
    edges=(
        {"batch": 1, "M": 255, "K": 65, "N": 33},
        {"batch": (3, 1), "M": 17, "K": 1025, "N": 19},
        {"batch": 2, "M": 31, "K": 129, "N": 513, "b_transposed": True},
        {"batch": (1, 1), "M": 1, "K": 1, "N": 1},
        {"batch": 7, "M": 3, "K": 1, "N": 1025},
        {"batch": (2, 3, 2), "M": 65, "K": 7, "N": 1},
    ),
    timing={
        "cpu": (
            {"batch": (1, 12), "M": 512, "K": 64, "N": 512, "b_transposed": True},
            {"batch": (1, 12), "M": 512, "K": 512, "N": 64},
            {"batch": 8, "M": 128, "K": 512, "N": 1024},
        ),
        "cuda": (
            {"batch": (8, 16), "M": 1024, "K": 64, "N": 1024, "b_transposed": True},
            {"batch": (8, 16), "M": 1024, "K": 1024, "N": 64},
            {"batch": 8, "M": 1024, "K": 4096, "N": 4096},
            {"batch": 64, "M": 256, "K": 1024, "N": 1024},
        ),
    },
    flops=lambda a: 2 * a["A"].numel * a["B"].shape[-1],  # a product and a sum for each of the batch's M K N
    # read A and B, write C
    bytes_moved=lambda a: (
        a["A"].nbytes + a["B"].nbytes + a["A"].numel // a["A"].shape[-1] * a["B"].shape[-1] * a["A"].dtype.itemsize
    ),
    headline="throughput_tflops",
    finite_below=1e15,  # with sums of up to a million products
    planted_in=("B",),
    independent_rows=True,
    forms=small_calls,
    sliced=("A", "B"),
    terms=lambda y, **inputs: y.abs().amax(-1, keepdim=True),
    row_scales=(1e-3, 30.0, 1e3, 1e8),
    adversarial={"dynamic_range": partial(of_many_sizes, left="A", right="B"), "one_sign": one_sign},
)
