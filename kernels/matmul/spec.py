"""Matrix product: inputs, shapes and costs."""

from functools import partial

import reference
from autokernel.spec import KernelSpec, TensorSpec, of_many_sizes


def arguments(dtype, M, K, N, b_transposed=False):
    """`b_transposed`: B is the [K, N] view of a [N, K] weight, as F.linear has it."""
    return {"A": TensorSpec((M, K), dtype), "B": TensorSpec((K, N), dtype, (1, K) if b_transposed else None)}


def one_sign(inputs):
    """Sums that only grow: an accumulator of too few bits stops growing with them. One is beyond the range of fp16."""
    A, B = inputs["A"].abs(), inputs["B"].abs()
    B[0], B[0, 0], A.flatten(0, -2)[0, 0] = 0, 4, 3e4
    return {"A": A, "B": B}


SPEC = KernelSpec(
    name="matmul",
    oracle=reference.matmul,
    eager=reference.matmul,
    eager_form="A @ B",
    arguments=arguments,
    smoke={"M": 32, "K": 64, "N": 32},
    any_size=("M", "K", "N"),
    sweep=(
        {"M": 128, "K": 768, "N": 768, "b_transposed": True},  # attention projections
        {"M": 100, "K": 768, "N": 1024, "b_transposed": True},  # MLP up
        {"M": 100, "K": 2048, "N": 384, "b_transposed": True},  # MLP down
        {"M": 8, "K": 768, "N": 4000, "b_transposed": True},  # language-model head
        {"M": 1, "K": 1024, "N": 1024, "b_transposed": True},  # one token: decode
        {"M": 256, "K": 256, "N": 256},
        {"M": 101, "K": 300, "N": 500},  # nothing a power of two
        {"M": 64, "K": 4096, "N": 64},  # long sums
        {"M": 512, "K": 64, "N": 512},  # attention scores
        {"M": 1000, "K": 80, "N": 40},  # tall and narrow
    ),
    edges=(
        {"M": 1023, "K": 65, "N": 33},
        {"M": 17, "K": 4097, "N": 19},
        {"M": 31, "K": 129, "N": 1537, "b_transposed": True},
        {"M": 1, "K": 1, "N": 1},
        {"M": 3, "K": 1, "N": 4097},
        {"M": 1537, "K": 7, "N": 1},
    ),
    timing={
        "cpu": (
            {"M": 512, "K": 768, "N": 768, "b_transposed": True},
            {"M": 512, "K": 768, "N": 2048, "b_transposed": True},
            {"M": 512, "K": 2048, "N": 768, "b_transposed": True},
            {"M": 512, "K": 768, "N": 32000, "b_transposed": True},
        ),
        "cuda": (
            {"M": 4096, "K": 4096, "N": 4096},
            {"M": 1024, "K": 1024, "N": 1024},
            {"M": 2048, "K": 2048, "N": 2048},
            {"M": 8192, "K": 8192, "N": 8192},
            {"M": 4096, "K": 4096, "N": 11008},
            {"M": 1024, "K": 8192, "N": 1024},
        ),
    },
    flops=lambda a: 2 * a["A"].numel * a["B"].shape[1],  # a product and a sum for each of M K N
    # read A and B, write C
    bytes_moved=lambda a: a["A"].nbytes + a["B"].nbytes + a["A"].shape[0] * a["B"].shape[1] * a["A"].dtype.itemsize,
    headline="throughput_tflops",
    finite_below=1e15,  # with sums of up to a million products
    static=frozenset({"B"}),
    planted_in=("B",),
    independent_rows=True,
    sliced=("A",),
    terms=lambda y, **inputs: y.abs().amax(-1, keepdim=True),
    row_scales=(1e-3, 30.0, 1e3, 1e8),
    adversarial={"dynamic_range": partial(of_many_sizes, left="A", right="B"), "one_sign": one_sign},
)
