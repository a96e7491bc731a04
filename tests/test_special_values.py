"""Rows of -inf, NaN, zeros, ignored classes, queries without keys: oracles do as PyTorch's operators, kernels as oracles.

On a CPU the C++ starters; the Triton starters in test_triton_starters.py; with -m gpu Triton and CUDA.
"""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import reference
from autokernel.common.preflight import backends
from autokernel.gate.checks.correctness import ELEMENT_TOLERANCE
from autokernel.spec import import_file, load_spec

sys.path.insert(0, str(Path(__file__).resolve().parent))
from special_values import SPECIAL

CASES = [(kernel_type, name) for kernel_type, cases in SPECIAL.items() for name in cases]


def in_double(inputs):
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}


def made(kernel_type, name, dtype, device="cpu"):
    torch.manual_seed(0)
    inputs = SPECIAL[kernel_type][name](dtype)
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}


def holds(kernel_type, kernel_fn, device):
    """Every special case in every dtype, with NaN and Inf where the oracle has them."""
    for name in SPECIAL[kernel_type]:
        for dtype in ELEMENT_TOLERANCE:
            inputs = made(kernel_type, name, dtype, device)
            expected = getattr(reference, kernel_type)(**in_double(inputs)).to(dtype)
            close = partial(
                torch.testing.assert_close, rtol=ELEMENT_TOLERANCE[dtype], atol=ELEMENT_TOLERANCE[dtype], equal_nan=True
            )
            close(kernel_fn(**inputs), expected, msg=partial("{}, {}: {}".format, name, dtype))


@pytest.mark.parametrize(("kernel_type", "name"), CASES)
def test_the_oracle_has_what_pytorch_has(kernel_type, name):
    inputs = in_double(made(kernel_type, name, torch.float32))
    expected = load_spec(kernel_type).eager(**inputs)
    torch.testing.assert_close(getattr(reference, kernel_type)(**inputs), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def starters(backend):
    return [(t, name) for t in SPECIAL for name in load_spec(t).starters(backend)]


def kernel_of(kernel_type, backend, name):
    return import_file(load_spec(kernel_type).starters(backend)[name], f"special_{kernel_type}_{name}").kernel_fn


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("kernel_type", "name"), starters("cpp"))
def test_cpp_starters(kernel_type, name):
    holds(kernel_type, kernel_of(kernel_type, "cpp", name), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel_type", "backend", "name"), [(t, b, n) for b in ("triton", "cuda") for t, n in starters(b)]
)
def test_gpu_starters(kernel_type, backend, name):
    if backend not in backends("cuda"):
        pytest.skip(f"{backend} does not run here")
    holds(kernel_type, kernel_of(kernel_type, backend, name), "cuda")


def attention_by(backend, device, dtype, mask):
    """PyTorch's and the oracle's attention under `mask`."""
    torch.manual_seed(0)
    Q, K, V = (torch.randn(2, 4, 64, 32, device=device, dtype=dtype) for _ in "QKV")
    mask = mask.to(device, mask.dtype if mask.dtype == torch.bool else dtype)
    with sdpa_kernel(backend):
        actual = F.scaled_dot_product_attention(Q, K, V, mask)
    exact = in_double({"Q": Q, "K": K, "V": V, "attn_mask": mask})
    return actual, reference.flash_attention(**exact, causal=False)


def masks(dtype):
    seen = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 2 / 3
    seen[3] = False
    infinite = torch.zeros(64, 64).masked_fill(~seen, -math.inf)
    lowest = infinite.clone()
    lowest[5] = torch.finfo(dtype).min
    return {"bool": seen, "-inf": infinite, "lowest": lowest}


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
def test_attention_has_what_every_backend_of_pytorch_has(backend, kind):
    actual, expected = attention_by(backend, "cpu", torch.float32, masks(torch.float32)[kind])
    assert (expected[:, :, 3] == 0).all()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


# PyTorch 2.11 on an H100: these take the lowest number for -inf (0 instead of the average), and cuDNN a bool mask's row
# without keys for one with some. The math backend, and every backend of a CPU, do as the oracle.
DIFFERENT = {
    (SDPBackend.EFFICIENT_ATTENTION, "lowest"),
    (SDPBackend.CUDNN_ATTENTION, "lowest"),
    (SDPBackend.CUDNN_ATTENTION, "bool"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_what_the_backends_of_pytorch_have_on_a_gpu(backend, kind, dtype):
    if backend is SDPBackend.CUDNN_ATTENTION and dtype == torch.float32:
        pytest.skip("cuDNN's attention takes 16 bits")
    if (backend, kind) in DIFFERENT:
        pytest.skip("PyTorch's backends do not agree on this row")
    actual, expected = attention_by(backend, "cuda", dtype, masks(dtype)[kind])
    assert (expected[:, :, 3] == 0).all()
    torch.testing.assert_close(actual.double(), expected, rtol=ELEMENT_TOLERANCE[dtype], atol=ELEMENT_TOLERANCE[dtype])
