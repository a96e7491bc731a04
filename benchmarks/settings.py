"""Which settings of a kernel are fastest on which case, and how exact: every combination of some values, beside eager mode.

Usage:   python benchmarks/settings.py kernels/layernorm/triton_kernel.py NUM_WARPS=0,4,8 PROGRAM_ELEMENTS=2048,8192
         python benchmarks/settings.py kernels/matmul/triton_kernel.py FP32=tf32x3,ieee --dtype float32 --case M=4096,K=4096
Prints:  a line a case: eager's time, then every combination's speed over eager, best first, and its RMS error over eager's
         (both against the oracle in float64); * marks the file's own settings

For the choice of a starter's constants. All are timed in one process, as benchmarks/kernels.py does it; what a run keeps is
the gate's to decide.
"""

import ast
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel import build
from autokernel.agents.knobs import read_knobs, with_setting
from autokernel.cli.arguments import Parser, script
from autokernel.common.console import add_device_argument, fail, settle_device
from autokernel.gate.source import constants
from autokernel.spec import import_file, load_spec
from benchmarks.contestants import Call, Row, input_sets, sizes
from benchmarks.rounds import Batch, interleaved, sets_needed

ROUNDS = 6
EAGER = "eager"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("file", type=Path, help="a kernel file with TUNABLES")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE,VALUE", help="default: TUNABLES, one at a time")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")
    parser.add_argument("--case", action="append", default=[], metavar="TEXT", help="cases whose name has this text")
    add_device_argument(parser)
    arguments = parser.parse_args(argv)
    settle_device(arguments, parser)
    source, kind = arguments.file.read_text(), torch.device(arguments.device).type
    spec = load_spec(str(constants(source)["KERNEL_TYPE"]))
    dtype = getattr(torch, arguments.dtype or ("float32" if kind == "cpu" else "float16"))
    cases = [spec.case(dims, dtype) for dims in sizes(spec.name, kind)]
    rows = [Row(spec.name, c) for c in cases if not arguments.case or any(text in c.name for text in arguments.case)]
    if not rows:
        fail(f"no case of {spec.name} has {' or '.join(arguments.case)} in its name")
    try:
        sources = dict(combinations(source, arguments.settings))
    except ValueError as error:
        fail(error)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        calls = loaded(sources, Path(folder))
        for row in rows:
            measure(row, calls, arguments.device)


def combinations(source: str, settings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, source) of the file as it is and of every combination. Raises ValueError for what it has no line for."""
    yield "*", source
    knobs = read_knobs(source)
    if not settings:
        every = [{name: value} for name, values in knobs.choices.items() for value in values]
    else:
        asked = [(name, [_value(v) for v in values.split(",")]) for name, _, values in (s.partition("=") for s in settings)]
        every = [dict(zip(dict(asked), values)) for values in itertools.product(*(values for _, values in asked))]
    for chosen in every:
        edited = with_setting(source, chosen)
        if edited != source:
            yield " ".join(f"{name}={value}" for name, value in chosen.items()), edited


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word without its quotes
        return text


def loaded(sources: Mapping[str, str], folder: Path) -> dict[str, Call]:
    """Each source's kernel; C++ and CUDA are compiled side by side."""
    modules = {}
    for number, (name, source) in enumerate(sources.items()):
        path = folder / f"settings_{number}.py"
        path.write_text(source)
        modules[name] = import_file(path, path.stem)
    functions = [f for m in modules.values() for f in vars(m).values() if isinstance(f, build.Function)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(compiled, functions))
    return {name: module.kernel_fn for name, module in modules.items()}


def compiled(function: build.Function) -> None:
    with contextlib.suppress(build.CompileError):  # which is raised again, and said, where it is called
        build.compile_library(function.library)


def measure(row: Row, calls: Mapping[str, Call], device: str) -> None:
    kind = torch.device(device).type
    sets = list(input_sets(row, device, sets_needed(row.spec.bytes_moved(row.case.args), kind)))
    exact = row.spec.oracle(
        **{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in sets[0].items()}
    )
    eager_error = error(row.spec.eager(**sets[0]), exact)
    batches, errors = {EAGER: Batch(row.spec.eager, sets, kind)}, {}
    for name, call in calls.items():
        try:
            errors[name] = error(call(**sets[0]), exact) / max(eager_error, torch.finfo(torch.float64).tiny)
            batches[name] = Batch(call, sets, kind)
        except Exception as failure:  # settings that do not fit are an outcome
            print(f"{row.name}: {name}: {str(failure).splitlines()[0][:120]}", flush=True)
    times = {name: median(us) for name, us in interleaved(batches, ROUNDS).items()}
    eager_us = times.pop(EAGER)
    ranked = sorted(times, key=lambda name: times[name])
    cells = [f"{name} {eager_us / times[name]:.3f}x (error {errors[name]:.2g}x)" for name in ranked]
    print(f"{row.name}: eager {eager_us:.1f} us; {'; '.join(cells)}", flush=True)


def error(y: Tensor, exact: Tensor) -> float:
    return (y.double() - exact).square().mean().sqrt().item()


if __name__ == "__main__":
    raise SystemExit(script(main))
