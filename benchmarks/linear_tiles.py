"""fused_linear's tiles on this Hopper GPU, each beside F.linear in one process.

Usage:   python benchmarks/linear_tiles.py [ACTIVATION ...]          ("none" by default; a minute)
Prints:  a line a shape (M, K, N, fp16): F.linear's microseconds, without an activation; its time over that of every tile

A time is the median of triton.testing.do_bench over a CUDA graph of CALLS calls.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.spec import KERNELS, import_file

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
SHAPES += ((8192, 1536, 1536),)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("activations", nargs="*", default=["none"], metavar="ACTIVATION")
    for activation in parser.parse_args(argv).activations:
        for M, K, N in SHAPES:
            print(measured(activation, M, K, N), flush=True)
    return 0


def measured(activation: str, M: int, K: int, N: int) -> str:
    ours = import_file(KERNELS / "fused_linear" / "cuda_kernel.py", "linear_tiles")
    x, weight, bias = (torch.randn(*size, device="cuda", dtype=torch.float16) for size in ((M, K), (N, K), (N,)))
    weight /= K**0.5
    pytorch, ratios = microseconds(lambda: F.linear(x, weight, bias)), {}
    chosen = ours._fastest(M, N, K, activation, torch.cuda.get_device_properties(0).multi_processor_count)
    for tile in range(len(ours.TILES)):
        ours.TILE = tile
        ours._product.cache_clear()
        ratios[tile] = round(pytorch / microseconds(lambda: ours.kernel_fn(x, weight, bias, activation)), 3)
    return f"{activation} {(M, K, N)}: F.linear {pytorch:.1f} us, tiles {ratios}, chosen {ours.TILES.index(chosen)}"


def microseconds(call: Callable[[], torch.Tensor]) -> float:
    from triton.testing import do_bench  # here: --help needs no Triton

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return 1e3 * do_bench(graph.replay, quantiles=[0.5]) / CALLS


if __name__ == "__main__":
    raise SystemExit(script(main))
