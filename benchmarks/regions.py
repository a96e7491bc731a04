"""The regions of models on a GPU: our own starters, what Inductor writes as a starter, and torch.compile of the same nodes.

Usage:   python benchmarks/regions.py [MODEL ...]
Reads:   the models of benchmarks/models.py; sets their regions up under workspace/regions
Writes:  the table on stdout, which benchmarks/transcripts keeps

Microseconds of one call: medians of replays of a CUDA graph that goes through several input sets, larger together than the
L2. Each side twice, in turn, and the smaller of both; in parentheses torch.compile's time over it. Every starter is held
against the oracle first.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from new_types import graph_us, on_gpu

from autokernel.cli.arguments import Parser, script
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expectations
from autokernel.gate.checks.inputs import fill_inputs
from autokernel.model.profiler import profile_workload
from autokernel.model.regions.growing import region_finder
from autokernel.model.regions.spec import Region
from autokernel.spec import Case, import_file, is_region, load_spec, several
from models import MODELS

SETS_BYTES = 200 << 20  # of all input sets; an H100's L2 has 50 MB


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    some = ["unet", "gpt2", "bert", "compact-llama"]
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=MODELS, default=some, help="(default: %(default)s)")
    names = parser.parse_args(argv).models
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Triton {triton.__version__}; us a call")
    with torch.no_grad():
        for name in names:
            start = time.perf_counter()
            workload = replace(MODELS[name], device="cuda", dtype="float16")
            profile = profile_workload(workload, 2, 5, baseline="eager", regions=region_finder("cuda"))
            print(f"\n{name}: {workload}; profiled, its regions' starters written, in {time.perf_counter() - start:.0f} s")
            regions = [site for site in profile.sites if is_region(site.kernel_type)]
            for site in regions:
                print(f"{site.calls:3g}x {', '.join(compared(site.kernel_type, site.case))}", flush=True)
            if not regions:
                print("  no region", flush=True)


def compared(kernel_type: str, case: Case) -> list[str]:
    spec = load_spec(kernel_type)
    shape = "x".join(map(str, max(case.tensors.values(), key=lambda t: t.numel).shape))
    words = [f"{kernel_type} {shape}"]
    sides: dict[str, Callable[..., Any]] = {"eager": spec.eager, "torch.compile": torch.compile(spec.eager, dynamic=False)}
    inputs = fill_inputs(spec, case, 1)
    expected = expectations(spec, inputs, "cpu")
    for stem, path in spec.starters("triton").items():
        kernel = import_file(path, f"{kernel_type}_{stem}").kernel_fn
        made = zip(several(kernel(**on_gpu(inputs))), expected)
        reason = next(filter(None, (wrong(y.cpu(), e) for y, e in made)), None)
        if reason:
            words.append(f"{stem} WRONG: {reason}")
        else:
            sides[stem] = kernel
    if why := Region.read(spec.folder).without_inductor:
        words.append(f"no triton_inductor: {why}")
    given = on_gpu(inputs)
    count = 2 + SETS_BYTES // spec.bytes_moved(case.args)
    sets = [given, *({k: v.clone() for k, v in given.items()} for _ in range(1, count))]
    rounds = [{side: graph_us([lambda s=s, f=f: f(**s) for s in sets]) for side, f in sides.items()} for _ in range(2)]
    times = {side: min(one[side] for one in rounds) for side in sides}
    return words + [f"{side} {us:.2f} ({times['torch.compile'] / us:.2f}x)" for side, us in times.items()]


if __name__ == "__main__":
    raise SystemExit(script(main))
