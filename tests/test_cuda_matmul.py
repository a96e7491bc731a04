"""The CUDA kernels of matrix products: compiled, with the instructions meant; run on a GPU.

What holds for every CUDA starter is in test_cuda_starters.py; here are the tiles, layouts and widths for which these
compile a library each.
"""

import ctypes
import itertools
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
from test_cuda_starters import for_chip, load, needs_nvcc

import reference
from autokernel import build

TYPES = ("matmul", "flash_attention", "fused_mlp", "matmul_fp4", "fused_linear")
MATMUL, ATTENTION, MLP, FP4, LINEAR = (load(f"{name}/cuda_kernel.py") for name in TYPES)
UNUSUAL = MATMUL.Tile(64, 192, 5, True, 2, 1, 1.0)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def everywhere() -> Iterator[build.CudaFunction]:
    """What any chip runs."""
    yield MATMUL._general(HALF, True, False, 64)
    yield MATMUL._general(SINGLE, True, True, 128)
    yield ATTENTION._compiled(BRAIN, 128, False, 0)
    yield ATTENTION._compiled(SINGLE, 64, True, 0)
    yield MLP._gated(HALF, "gelu")
    yield MLP._gated(BRAIN, "gelu_tanh")
    yield LINEAR._activate(HALF, "relu")
    yield FP4._few(DTYPE=build.DTYPE_CODE[BRAIN], GROUP=16, E8M0=0)


def on_hopper() -> Iterator[build.CudaFunction]:
    for tile in MATMUL.TILES[:2]:
        yield MATMUL._hopper(HALF, True, False, tile, 132)
    for tile in MATMUL.TILES[2:4]:
        yield MATMUL._hopper(BRAIN, False, True, tile, 132)
    for tile in MATMUL.TILES[4:6]:
        yield MATMUL._hopper(HALF, False, False, tile, 132)
    yield MATMUL._hopper(HALF, True, True, UNUSUAL, 132)
    yield MATMUL._hopper(HALF, True, True, MATMUL.TILES[0], 132, 8)
    yield LINEAR._gemm(BRAIN, "none", LINEAR.TILES[3], 132, 4)
    yield ATTENTION._compiled(HALF, 64, False, 0)
    yield ATTENTION._compiled(BRAIN, 128, False, 0)
    yield from (ATTENTION._compiled(HALF, 64, True, masked) for masked in (1, 2, ATTENTION.ANY_MASK))
    yield MLP._gemm(HALF, "silu", MLP.GATE_TILES[0], 132)
    yield MLP._gemm(HALF, "silu", MLP.GATE_TILES[2], 132)
    yield MLP._gemm(HALF, "", MLP.DOWN_TILES[3], 132)
    yield LINEAR._gemm(HALF, "gelu_tanh", LINEAR.TILES[0], 132)
    yield LINEAR._gemm(BRAIN, "gelu", LINEAR.TILES[1], 132)
    yield FP4._many(FP4.GEMM_TILES[0], DTYPE=build.DTYPE_CODE[HALF], GROUP=32, E8M0=1)


def compiled(functions: list[build.CudaFunction]) -> dict[build.CudaFunction, Path]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(functions, pool.map(build.compile_library, [f.library for f in functions])))


def instructions(binary: Path) -> set[str]:
    """Names of the machine instructions, without their modifiers."""
    listing = subprocess.run([CUOBJDUMP, "-sass", binary], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", listing, re.M))


def test_every_setting_of_the_knobs_gives_a_tile_that_fits(monkeypatch: pytest.MonkeyPatch):
    knobs = {"m": "BLOCK_M", "n": "BLOCK_N", "stages": "STAGES", "cluster": "CLUSTER", "splits": "SPLITS"}
    alone, settings = 0, itertools.product(*(MATMUL.TUNABLES[knob] for knob in knobs.values()))
    for setting in settings:
        for knob, value in zip(knobs.values(), setting):
            monkeypatch.setattr(MATMUL, knob, value)
        tile = MATMUL._tile(2048, 4096, 4096, 132)
        assert tile.fits
        if sum(map(bool, setting)) == 1:
            alone += 1
            assert all(getattr(tile, field) == value for field, value in zip(knobs, setting) if value)
    assert alone == 15


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_80", "sm_100a"])
def test_compiles_to_tensor_cores_in_16_bits_only(chip: str, monkeypatch: pytest.MonkeyPatch):
    for_chip(monkeypatch, chip)
    for function, binary in compiled(list(everywhere())).items():
        defines = dict(function.library.defines)
        multiplies = function.signature not in (
            MLP._gated(HALF, "gelu").signature,
            LINEAR._activate(HALF, "relu").signature,
        )
        single = defines.get("DTYPE", "0") == "0"
        assert ("HMMA" in instructions(binary)) == (multiplies and not single), defines


@pytest.mark.slow
@needs_nvcc
def test_hopper_multiplies_by_wgmma_on_what_tma_loads(monkeypatch: pytest.MonkeyPatch):
    for_chip(monkeypatch, "sm_90a")
    for function, binary in compiled(list(on_hopper())).items():
        assert {"HGMMA", "UTMALDG", "UTMASTG"} <= instructions(binary), function.library.defines


# ---- on a GPU ----


@dataclass(frozen=True)
class Product:
    M: int
    K: int
    N: int
    why: str


PRODUCTS = (
    Product(128, 64, 256, "one tile"),
    Product(256, 4096, 256, "a long ring of stages"),
    Product(1024, 8192, 1024, "few tiles"),
    Product(1000, 2056, 1000, "tiles that do not fill"),
    Product(4096, 512, 2304, "more tiles than multiprocessors"),
    Product(1, 1024, 1024, "one row"),
    Product(300, 72, 5003, "C's rows are not aligned"),
    Product(65, 33, 129, "no operand is aligned"),
    Product(2040, 4104, 2304, "tiles left after whole waves"),
    Product(2048, 4096, 2305, "such tiles, rows of C not aligned"),
    Product(4096, 192, 1001, "tiles of every eighth row"),
    Product(1900, 72, 1004, "of every second, which do not fill"),
    Product(2040, 520, 50258, "of every fourth"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (HALF, BRAIN, SINGLE), ids=str)
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda c: c.why)
def test_products_in_all_layouts(case: Product, dtype: torch.dtype):
    for a_transposed, b_transposed in itertools.product((False, True), repeat=2):
        torch.manual_seed(0)
        A = torch.randn(case.K, case.M).t() if a_transposed else torch.randn(case.M, case.K)
        B = torch.randn(case.N, case.K).t() if b_transposed else torch.randn(case.K, case.N)
        A, B = A.cuda().to(dtype), B.cuda().to(dtype)
        exact = A.double() @ B.double()
        error = (MATMUL.kernel_fn(A, B).double() - exact).norm() / exact.norm()
        assert error < {HALF: 5e-4, BRAIN: 4e-3, SINGLE: 2e-6}[dtype], (a_transposed, b_transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", MATMUL.TILES, ids=str)
def test_every_tile_on_a_shape_that_it_does_not_divide(tile):
    torch.manual_seed(0)
    A, B = torch.randn(520, 2120).cuda().half(), torch.randn(2120, 1048).cuda().half()
    C = torch.full((520, 1048), torch.nan, dtype=HALF, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    run = MATMUL._hopper(HALF, True, False, tile, processors)
    numbers = (ctypes.c_int64 * 7)(520, 1048, 2120, *A.stride(), *B.stride())
    run(*(x.data_ptr() for x in (A, B, C)), numbers)
    exact = A.double() @ B.double()
    assert (C.double() - exact).norm() / exact.norm() < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize("tile", MATMUL.TILES, ids=str)
@pytest.mark.parametrize("N", [1001, 1002, 1004])
def test_nothing_is_written_beside_rows_that_start_anywhere(tile, N: int):
    torch.manual_seed(0)
    M, K = 4000, 136
    A, B = torch.randn(M, K).cuda().half(), torch.randn(N, K).cuda().half().t()
    processors, period = torch.cuda.get_device_properties(0).multi_processor_count, tile.period(M, N)
    exact = A.double() @ B.double()
    run, numbers = MATMUL._hopper(HALF, True, True, tile, processors, period), (ctypes.c_int64 * 7)(M, N, K, K, 1, 1, K)
    for ahead in range(8):
        memory = torch.full((M * N + 64,), 7.0, dtype=HALF, device="cuda")
        C = memory[24 + ahead : 24 + ahead + M * N].view(M, N)
        run(A.data_ptr(), B.data_ptr(), C.data_ptr(), numbers)
        assert (C.double() - exact).norm() / exact.norm() < 5e-4
        assert (C.double() - exact).abs().max() < 0.1
        assert (memory[: 24 + ahead] == 7).all() and (memory[24 + ahead + M * N :] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", range(len(LINEAR.TILES)))
@pytest.mark.parametrize("case", [*PRODUCTS, Product(520, 2120, 1048, "no tile divides it")], ids=lambda c: c.why)
def test_linear_layers(case: Product, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LINEAR, "TILE", tile)
    LINEAR._product.cache_clear()
    torch.manual_seed(0)
    for dtype, activation, biased in (
        (HALF, "gelu", True),
        (BRAIN, "relu", True),
        (HALF, "none", True),
        (HALF, "gelu_tanh", False),
    ):
        x, weight, bias = torch.randn(case.M, case.K), torch.randn(case.N, case.K) / case.K**0.5, torch.randn(case.N)
        x, weight, bias = (t.cuda().to(dtype) for t in (x, weight, bias))
        given = bias if biased else None
        exact = reference.fused_linear(x.double(), weight.double(), given if given is None else given.double(), activation)
        error = (LINEAR.kernel_fn(x, weight, given, activation).double() - exact).norm() / exact.norm()
        assert error < {HALF: 5e-4, BRAIN: 4e-3}[dtype], (dtype, activation, biased)
    LINEAR._product.cache_clear()


@dataclass(frozen=True)
class Heads:
    seq_q: int
    seq_k: int
    head_dim: int
    causal: bool
    kv_heads: int = 4


HEADS = (
    Heads(1024, 1024, 64, True),
    Heads(1024, 1024, 128, True, kv_heads=1),
    Heads(1000, 1000, 128, False),
    Heads(700, 300, 64, True),
    Heads(300, 2000, 128, True),
    Heads(193, 129, 40, False),
    Heads(130, 130, 96, True),
    Heads(130, 130, 256, True),
    Heads(70, 90, 33, False),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (HALF, BRAIN, SINGLE), ids=str)
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_attention(case: Heads, dtype: torch.dtype):
    torch.manual_seed(0)
    Q = torch.randn(2, 4, case.seq_q, case.head_dim).cuda().to(dtype)
    K, V = (torch.randn(2, case.seq_k, case.kv_heads, case.head_dim).cuda().to(dtype).transpose(1, 2) for _ in range(2))
    exact = reference.flash_attention(*(x.double() for x in (Q, K, V)), causal=case.causal)
    error = (ATTENTION.kernel_fn(Q, K, V, case.causal).double() - exact).norm() / exact.norm()
    assert error < {HALF: 1e-3, BRAIN: 8e-3, SINGLE: 2e-6}[dtype]


MASKS = {  # their shapes, for 3 texts of 4 heads, and whether they are added to scores
    "bool row": ((3, 1, 1), False),
    "float row": ((3, 4, 1), True),
    "bool": ((3, 1, None), False),
    "float": ((1, 1, None), True),
}


def padding(shape: tuple[int | None, ...], added: bool, case: Heads, dtype: torch.dtype) -> torch.Tensor:
    """A mask: the end of the keys hidden, or their beginning, or all of them, text by text, and some in between."""
    keys, sizes = torch.arange(case.seq_k), [n or case.seq_q for n in shape]
    parts = (keys < case.seq_k * 2 // 3, keys > case.seq_k // 2, keys < 0)
    shown = torch.stack(parts[: sizes[0]])[:, None, None] & (torch.rand(*sizes, case.seq_k) < 0.9)
    if not added:
        return shown.cuda()
    numbers = torch.randn(shown.shape).masked_fill(~shown, -torch.inf)
    numbers[..., -1] = torch.finfo(dtype).min
    return numbers.to(dtype).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", (*HEADS[2:7], Heads(1, 777, 64, False), Heads(400, 5000, 64, False)), ids=str)
def test_attention_with_a_mask(case: Heads, mask: str):
    torch.manual_seed(0)
    for dtype, most in ((HALF, 1e-3), (BRAIN, 8e-3)):
        Q = torch.randn(3, 4, case.seq_q, case.head_dim).cuda().to(dtype)
        K, V = (torch.randn(3, case.seq_k, case.kv_heads, case.head_dim).cuda().to(dtype).transpose(1, 2) for _ in range(2))
        attn_mask = padding(*MASKS[mask], case, dtype)
        exact = [x if x.dtype == torch.bool else x.double() for x in (Q, K, V, attn_mask)]
        for safe in (True, False):
            expected = reference.flash_attention(*exact[:3], case.causal, attn_mask=exact[3], safe_softmax=safe)
            made = ATTENTION.kernel_fn(Q, K, V, case.causal, attn_mask=attn_mask, safe_softmax=safe).double()
            assert torch.equal(made.isnan(), expected.isnan())
            assert (made - expected).nan_to_num().norm() < most * expected.nan_to_num().norm()
