"""vectorsum and matmul_fp4 on a GPU: against the read limit of its memory, and against cuBLAS with 16-bit weights.

Usage:   python benchmarks/new_types.py [--quick]
Reads:   kernels/vectorsum, kernels/matmul_fp4
Writes:  benchmarks/new_types-<device>.json and the table on stdout

Times are medians of replays of a CUDA graph that goes through several input sets, larger together than the L2. The read
limit is the best of several plain kernels that read everything and keep an exclusive or. Every kernel is held against the
oracle first.
"""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expect
from autokernel.gate.checks.inputs import fill_inputs
from autokernel.spec import import_file, load_spec

READERS = (
    (1024, 4, 1024, 4),
    (2048, 8, 1024, 4),
    (4096, 16, 512, 4),
    (1024, 4, 4096, 8),
    (2048, 8, 4096, 4),
    (1024, 8, 8192, 4),
)
CASES = (  # a decode step's rows, a prompt's rows; widths of Llama 70B and 7B
    {"M": 1, "K": 8192, "N": 28672},
    {"M": 1, "K": 8192, "N": 28672, "layout": "nvfp4"},
    {"M": 16, "K": 8192, "N": 28672},
    {"M": 16, "K": 4096, "N": 11008},
    {"M": 1024, "K": 4096, "N": 11008},
    {"M": 4096, "K": 4096, "N": 4096},
)
SETS_BYTES = 400 << 20


@triton.jit
def reader(x, y, rounds, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * rounds * BLOCK * UNROLL
    offsets = tl.arange(0, BLOCK)
    seen = tl.zeros((BLOCK,), tl.int32)
    for _ in range(rounds):
        for u in tl.static_range(UNROLL):
            seen ^= tl.load(x + start + u * BLOCK + offsets)
        start += BLOCK * UNROLL
    tl.store(y + tl.program_id(0) * BLOCK + offsets, seen)


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds of one call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return median(times)


def kernels(name: str, quick: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """The GPU starters of a type that are right at its small sizes."""
    spec, found = load_spec(name), {}
    for backend in ("triton", "cuda"):
        for stem, path in spec.starters(backend).items():
            kernel = import_file(path, f"bench_{name}_{stem}").kernel_fn
            for dims in (spec.smoke,) if quick else (spec.smoke, *spec.sweep, *spec.edges):
                for dtype in spec.dtypes:
                    inputs = fill_inputs(spec, spec.case(dims, dtype), 1)
                    reason = wrong(kernel(**on_gpu(inputs)).cpu(), expect(spec, inputs, "cpu"))
                    assert reason is None, f"{name}/{stem} {dims} {dtype}: {reason}"
            found[stem] = kernel
    return found


def on_gpu(inputs: dict[str, object]) -> dict[str, object]:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def vectorsum(quick: bool) -> dict[str, object]:
    sets = [torch.randn(1 << 28, device="cuda") for _ in range(2)]
    out = torch.empty(1 << 26, dtype=torch.int32, device="cuda")

    def read(block: int, warps: int, programs: int, unroll: int) -> float:
        rounds = (1 << 28) // (block * unroll * programs)
        options = {"BLOCK": block, "UNROLL": unroll, "num_warps": warps}
        return graph_us([lambda x=x: reader[(programs,)](x.view(torch.int32), out, rounds, **options) for x in sets])

    limit = min(read(*choice) for choice in READERS)
    row = {"case": "N=2^28", "read limit": limit, "torch.sum": graph_us([lambda x=x: x.sum() for x in sets])}
    return row | {stem: graph_us([lambda x=x, k=k: k(x) for x in sets]) for stem, k in kernels("vectorsum", quick).items()}


def matmul_fp4(dims: dict, found: dict[str, Callable[..., torch.Tensor]]) -> dict[str, object]:
    spec = load_spec("matmul_fp4")
    first = on_gpu(fill_inputs(spec, spec.case(dims, torch.float16), 0))
    count = max(2, SETS_BYTES // first["w"].nbytes)
    sets = [first] + [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.items()} for _ in range(count - 1)
    ]
    wide = [torch.randn(dims["N"], dims["K"], dtype=torch.float16, device="cuda") for _ in range(max(2, count // 4))]
    cublas = graph_us([lambda w=w: torch.nn.functional.linear(first["x"], w) for w in wide])
    times = {stem: graph_us([lambda s=s, k=k: k(**s) for s in sets]) for stem, k in found.items()}
    return {"case": ",".join(f"{k}={v}" for k, v in dims.items()), "cuBLAS fp16": cublas, **times}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="hold kernels against the oracle at one size only")
    quick = parser.parse_args(argv).quick
    rows = [vectorsum(quick)]
    found = kernels("matmul_fp4", quick)
    rows += [matmul_fp4(dims, found) for dims in CASES]
    device = torch.cuda.get_device_name()
    record = {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": f"{date.today()}",
        "rows": rows,
    }
    path = Path(__file__).with_name(f"new_types-{device.split()[-1].lower()}.json")
    path.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        case, peer = row.pop("case"), next(iter(row.values()))
        print(f"{case}: " + ", ".join(f"{name} {us:.1f} us ({peer / us:.2f}x)" for name, us in row.items()))


if __name__ == "__main__":
    raise SystemExit(script(main))
