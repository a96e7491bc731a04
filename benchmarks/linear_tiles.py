"""fused_linear's tiles on this Hopper GPU, each beside F.linear in one process.

Usage:   python benchmarks/linear_tiles.py [ACTIVATION ...]          ("none" by default; a minute)
Prints:  a line a shape (M, K, N, fp16): F.linear's microseconds, without an activation; its time over that of every tile
         whose result is right; * is the one that the kernel would choose

A time is the median of triton.testing.do_bench over a CUDA graph of CALLS calls.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel import build
from autokernel.cli.arguments import Parser, script
from autokernel.spec import KERNELS, import_file
from benchmarks.kernels import wrong

LINEAR = import_file(KERNELS / "fused_linear" / "cuda_kernel.py", "linear_tiles")
CALLS = 10
SHAPES = (
    (16384, 768, 768),
    (16384, 3072, 768),
    (8192, 768, 2304),
    (8192, 3072, 768),
    (4096, 4096, 4096),
    (8192, 768, 3072),
)
SHAPES += ((2048, 4096, 4096), (16384, 1024, 1024), (16384, 4096, 1024), (4096, 2048, 2048), (1024, 768, 768))
SHAPES += ((8192, 1536, 1536), (6304, 1024, 1024), (6304, 1024, 4096), (6304, 4096, 1024), (8192, 1152, 1152))
SHAPES += ((8192, 1152, 3456), (8192, 4608, 1152), (2048, 9728, 2560), (2048, 9216, 2304), (2048, 4096, 2560))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("activations", nargs="*", default=["none"], metavar="ACTIVATION")
    activations = parser.parse_args(argv).activations
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    runs = [LINEAR._gemm(torch.float16, name, tile, processors) for name in activations for tile in LINEAR.TILES]
    with ThreadPoolExecutor() as pool:
        list(pool.map(build.compile_library, [run.library for run in runs]))
    for activation in activations:
        for M, K, N in SHAPES:
            print(measured(activation, M, K, N, processors), flush=True)
    return 0


def measured(activation: str, M: int, K: int, N: int, processors: int) -> str:
    x, weight, bias = (torch.randn(*size, device="cuda", dtype=torch.float16) for size in ((M, K), (N, K), (N,)))
    weight /= K**0.5
    reference = import_file(KERNELS / "fused_linear" / "spec.py", "linear_reference")
    pytorch, ratios = microseconds(lambda: F.linear(x, weight, bias)), []
    expected, chosen = reference.eager(x, weight, bias, activation), LINEAR._fastest(M, N, K, activation, processors)
    for number, tile in enumerate(LINEAR.TILES):
        LINEAR.TILE = number
        LINEAR._product.cache_clear()
        reason = wrong(LINEAR.kernel_fn(x, weight, bias, activation), expected)
        us = microseconds(lambda: LINEAR.kernel_fn(x, weight, bias, activation))
        name = f"{tile.m}x{tile.n} {'T' if tile.turns else 'L'} c{tile.cluster}"
        ratios.append(f"{'*' * (tile == chosen)}{name} {reason or round(pytorch / us, 3)}")
    LINEAR.TILE = -1
    return f"{activation} {(M, K, N)}: F.linear {pytorch:.1f} us; {', '.join(ratios)}"


def microseconds(call: Callable[[], torch.Tensor]) -> float:
    from triton.testing import do_bench  # here: --help needs no Triton

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return 1e3 * do_bench(graph.replay, warmup=10, rep=40, quantiles=[0.5]) / CALLS


if __name__ == "__main__":
    raise SystemExit(script(main))
