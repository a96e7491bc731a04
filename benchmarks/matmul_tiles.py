"""Which tile of the CUDA matmul is fastest for which shape on this Hopper GPU, beside cuBLAS: what TILES was chosen by.

Usage:   python benchmarks/matmul_tiles.py                       (every shape; two minutes)
         python benchmarks/matmul_tiles.py 1024,1024,8192 256,4096,4096
Reads:   kernels/matmul/cuda_kernel.py: TILES, and how it would choose (*)
Prints:  a line a shape (M,N,K, fp16, B as nn.Linear has it): speed of every tile over cuBLAS, best first

128x256 s4 L c2 k4: rows and columns, stages, turns (T) or shared tiles (L), blocks that share B, blocks that share K.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel import build
from autokernel.cli.arguments import Parser, script
from autokernel.spec import KERNELS, import_file
from benchmarks.kernels import wrong
from benchmarks.rounds import Batch, interleaved, sets_needed

MATMUL = import_file(KERNELS / "matmul" / "cuda_kernel.py", "matmul_tiles")
SHAPES = ("1024,1024,8192", "1024,1024,4096", "1024,1024,1024", "2048,1024,4096", "512,1024,4096", "128,4096,4096")
SHAPES += ("256,4096,4096", "512,4096,4096", "1024,4096,4096", "2048,2048,2048", "512,2048,768", "1024,1024,16384")
SHAPES += ("8192,50257,768", "4096,30522,1024", "4096,4097,4096", "8192,1022,1024")  # rows that start anywhere
SPLIT = ((256, 3, 1, 2), (128, 5, 2, 2), (128, 4, 1, 2))  # columns, stages, shared B, K
CUBLAS = "cuBLAS"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="M,N,K")
    processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
    tiles = [*MATMUL.TILES, *(MATMUL.Tile(128, n, stages, False, b, k, 1.0) for n, stages, b, k in SPLIT)]
    shapes = parser.parse_args(argv).shapes
    sizes = {shape: [int(size) for size in shape.split(",")] for shape in shapes}
    runs = {
        shape: {tile: MATMUL._hopper(torch.float16, True, True, tile, processors, tile.period(M, N)) for tile in tiles}
        for shape, (M, N, _) in sizes.items()
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(build.compile_library, {run.library for of_shape in runs.values() for run in of_shape.values()}))
    for shape, (M, N, K) in sizes.items():
        times = {who: median(us) for who, us in measure(M, N, K, runs[shape]).items()}
        chosen, cublas = name(MATMUL._tile(M, N, K, processors)), times.pop(CUBLAS)
        ranked = sorted(times.items(), key=lambda item: item[1])
        row = "; ".join(f"{'*' if who == chosen else ''}{who} {cublas / us:.3f}" for who, us in ranked)
        print(f"{shape}: cuBLAS {cublas:.1f} us; {row}", flush=True)


def name(tile: Any) -> str:
    return f"{tile.m}x{tile.n} s{tile.stages} {'T' if tile.turns else 'L'} c{tile.cluster} k{tile.splits}"


def measure(M: int, N: int, K: int, runs: dict[Any, build.CudaFunction]) -> dict[str, list[float]]:
    """Microseconds of cuBLAS and of every tile whose product is right, a number a round."""
    count = sets_needed(2 * (M * K + N * K), "cuda")
    half = {"dtype": torch.float16, "device": "cuda"}
    sets = [{"A": torch.randn(M, K, **half), "B": torch.randn(N, K, **half).t()} for _ in range(count)]
    calls = {CUBLAS: torch.mm} | {name(tile): product(run) for tile, run in runs.items()}
    expected = torch.mm(*sets[0].values())
    batches = {}
    for who, call in calls.items():
        if reason := wrong(call(*sets[0].values()), expected):
            print(f"{who}: {reason}", flush=True)
        else:
            batches[who] = Batch(lambda A, B, call=call: call(A, B), sets, "cuda")
    return interleaved(batches)


def product(run: build.CudaFunction) -> Callable[[Tensor, Tensor], Tensor]:
    def call(A: Tensor, B: Tensor) -> Tensor:
        C = A.new_empty(A.shape[0], B.shape[1])
        numbers = (ctypes.c_int64 * 7)(*C.shape, A.shape[1], *A.stride(), *B.stride())
        run(A.data_ptr(), B.data_ptr(), C.data_ptr(), numbers)
        return C

    return call


if __name__ == "__main__":
    raise SystemExit(script(main))
