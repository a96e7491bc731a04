"""Where a model's time goes: its operations ranked, and what a faster kernel for each would give end to end.

Usage:   python profile.py                                                    (four layers of compact LLaMA, 1 x 128 tokens)
         python profile.py --model models/gpt2.py --class-name GPT2 --input-shape 1,512
         python profile.py --module transformers --class-name LlamaForCausalLM --model-args '{"num_hidden_layers": 2}'
         python profile.py --workload prefill:1,512 --workload 'decode:8,1*64'   (64 passes of 8 x 1 for each of 1 x 512)
Reads:   the model's file, or an installed module
Writes:  workspace/<tag>/profile.json, which extract.py reads
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from autokernel.cli.arguments import Parser, count, count_or_none, named_path, new_file, tag
from autokernel.cli.watched import noting
from autokernel.common import console
from autokernel.common.preflight import HOME, as_called, check_writable, default_cache, why_not_writable, why_nothing_loads
from autokernel.common.records import json_text
from autokernel.common.table import print_table
from autokernel.history.at_work import profiling
from autokernel.history.progress import amdahl
from autokernel.history.runs import PROFILE, run_folder
from autokernel.model import account
from autokernel.model.options import BASELINES, ITERATIONS, WARMUP, add_workload_arguments

if TYPE_CHECKING:
    from autokernel.model.hotspots import Hotspot, ModelProfile


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    add_workload_arguments(parser)
    console.add_device_argument(parser)
    fewer = "of a pass that takes long, fewer"
    parser.add_argument("--warmup-iters", type=count_or_none, metavar="N", help=f"(default: {WARMUP}; {fewer})")
    parser.add_argument("--profile-iters", type=count, metavar="N", help=f"(default: {ITERATIONS}; {fewer})")
    parser.add_argument(
        "--baseline",
        choices=BASELINES,
        default="best",
        help="what kernels are held against, operation by operation: eager mode, torch.compile, or the faster of both "
        "(default: %(default)s; eager where torch.compile does not work)",
    )
    parser.add_argument(
        "--no-regions",
        action="store_true",
        help="look for the named kernel types alone: what they do not cover is no target, be it chains of operations on "
        "elements and rows that one kernel could compute",
    )
    parser.add_argument("--tag", type=tag, default="default", help="name of the run (default: %(default)s)")
    parser.add_argument("--output", type=named_path, metavar="FILE", help="instead of workspace/<tag>/profile.json")
    parser.add_argument("--export-trace", type=new_file, metavar="FILE", help="write the profiler's trace, for Perfetto")
    parser.add_argument(
        "--memory-snapshot", type=new_file, metavar="FILE", help="of one pass on a GPU, for pytorch.org/memory_viz"
    )
    parser.add_argument("--torch-compile-log", type=new_file, metavar="FILE", help="graph breaks and code of torch.compile")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    console.settle_device(arguments, parser)
    from autokernel.model.hotspots import ModelProfile  # with PyTorch
    from autokernel.model.workload import workload_from
    from autokernel.run.workspace import LOG

    if arguments.memory_snapshot and not arguments.device.startswith("cuda"):
        parser.error("--memory-snapshot needs --device cuda")
    output = arguments.output or run_folder(HOME, arguments.tag) / PROFILE
    written = (output, arguments.export_trace, arguments.memory_snapshot, arguments.torch_compile_log)
    places = [os.path.realpath(path) for path in written if path]
    if twice := next((place for place in places if places.count(place) > 1), None):
        parser.error(f"{os.path.relpath(twice)} is named for two files: each has one of its own")
    check_writable(*(path for path in written if path))
    if reason := why_not_writable(default_cache()) or why_nothing_loads():  # of the machine's peaks
        console.fail(reason)
    if output.is_file() and output.stat().st_size:
        ModelProfile.read(output)  # an earlier profile is replaced; BadRecord, where it is anything else
    repeats = arguments.warmup_iters, arguments.profile_iters
    workload, log = workload_from(arguments), None if arguments.output else output.parent / LOG
    title = f"profiling {workload}"
    from autokernel.model.profiler import log_compilation, profile_workload, snapshot_memory  # with PyTorch's compiler
    from autokernel.model.regions.growing import region_finder

    seen = nullcontext() if arguments.output else profiling(output.parent, str(workload))
    with seen, console.progress(title, 2 + 4 * len(workload.parts)) as show_step:
        say = noting(title, show_step)
        trace, regions = arguments.export_trace, None if arguments.no_regions else region_finder(workload.device)
        profile = profile_workload(workload, *repeats, say, trace, arguments.baseline, log, regions)
    profile.write(output)
    if arguments.memory_snapshot:
        snapshot_memory(workload, arguments.memory_snapshot)
    if arguments.torch_compile_log:
        log_compilation(workload, arguments.torch_compile_log)
    if arguments.json:
        print(json_text(profile.to_json(), indent=1))
    else:
        show(profile)
        source = f"--profile {shlex.quote(str(output))}" if arguments.output else f"--tag {arguments.tag}"
        print(as_called(f"written to {os.path.relpath(output)}; next: python extract.py {source}"))


def show(profile: "ModelProfile") -> None:
    from autokernel.hardware.roofline import above_limit

    def row(h: "Hotspot") -> list[str]:
        gains = [f"{amdahl(h.share, s):.2f}x" for s in (1.5, 2, max(h.headroom, 1))] if h.kernel_type else [""] * 3
        compiled = f"{h.time_us / h.compiled_us:.2f}x" if h.compiled_us else ""
        headroom = f"{h.headroom:.1f}x" if h.headroom else ""
        calls, ms, share = f"{h.calls:g}", f"{h.time_us / 1e3:.2f}", f"{h.share:.1%}"
        return [h.kernel_type or marks[h.standing], calls, ms, share, compiled, h.bound or "", headroom, *gains, h.name]

    marks = {account.Standing.REFUSED: "refused", account.Standing.UNCAPTURED: "not captured", account.Standing.OTHER: "-"}
    columns = ("operation", "calls", "ms", "share", "compiled", "bound by", "headroom", "1.5x", "2x", "limit", "shapes")
    passes = "these passes" if profile.workload.mix else "a pass"
    title = f"{profile.workload} on {profile.device_name}: {profile.latency_us / 1e3:.2f} ms {passes} in eager mode"
    print_table(title, columns, [row(h) for h in profile.hotspots])
    if profile.workload.mix:
        for p in profile.passes:
            share = p.weight * p.latency_us / profile.latency_us
            print(f"{p.name}: {p.latency_us / 1e3:.2f} ms a pass, {p.weight:g} of them: {share:.0%} of the time")
    covered = sum(site.share for site in profile.sites)
    at_limit = sum(site.share * min(site.limit_us / site.time_us, 1) for site in profile.sites if site.time_us)
    busy = profile.device_time_us / profile.latency_us
    if busy < 0.7 and profile.device == "cpu":
        print(f"operations take {busy:.0%} of a pass; the rest is Python between them, or other work on this machine")
    elif busy < 0.7:
        print(f"the device works {busy:.0%} of a pass; the rest is the host launching, which fewer, larger kernels reduce")
    if profile.disturbed:
        print(profile.disturbed)
    all_at_limit = 1 / (1 - covered + at_limit)
    print("1.5x, 2x, limit: the whole model's speedup if that operation alone were so much faster", end=" ")
    print(f"(all of them at the limit: {all_at_limit:.2f}x)")
    against = {"best": "the faster of eager mode and torch.compile", "compile": "torch.compile", "eager": "eager mode"}
    print(f"compiled: how much faster torch.compile makes it; headroom: over {against[profile.baseline]}")
    print(*account.lines(profile.hotspots), sep="\n")
    attained = above_limit(100 * site.limit_us / site.time_us for site in profile.sites if site.limit_us and site.time_us)
    for words in filter(None, (attained, *profile.differs, profile.without)):
        print(words)
    for reason in profile.left:
        print(f"left out: {reason}")
    for reason in profile.graph_breaks:
        print(f"graph break: {reason.splitlines()[0]}")
