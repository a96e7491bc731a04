"""Where a model's time goes: its operations ranked, and what a faster kernel for each would give end to end.

Usage:   python profile.py                                                    (compact LLaMA, 1 x 512 tokens, float32)
         python profile.py --model models/gpt2.py --class-name GPT2 --input-shape 1,512
         python profile.py --module transformers --class-name LlamaForCausalLM --model-args '{"num_hidden_layers": 2}'
         python profile.py --workload prefill:1,512 --workload 'decode:8,1*64'   (64 passes of 8 x 1 for each of 1 x 512)
Reads:   the model's file, or an installed module
Writes:  workspace/<tag>/profile.json, which extract.py reads

Imported rather than run (cProfile does, and so torch.compile), this module is the standard library's `profile`.
"""

import argparse
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if __name__ != "__main__":
    _elsewhere = [folder for folder in sys.path if Path(folder).resolve() != ROOT]
    _spec = PathFinder.find_spec("profile", _elsewhere)
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])


def main() -> None:
    from autokernel.cli import add_device_argument, fail, progress
    from autokernel.profiler import BASELINES, log_compilation, profile_workload, snapshot_memory
    from autokernel.workload import WorkloadError, add_workload_arguments, workload_from

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    add_device_argument(parser)
    parser.add_argument("--warmup-iters", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--profile-iters", type=int, default=10, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--baseline",
        choices=BASELINES,
        default="best",
        help="what kernels are held against, operation by operation: eager mode, torch.compile, or the faster of both "
        "(default: %(default)s; eager where torch.compile does not work)",
    )
    parser.add_argument("--tag", default="default", help="name of the run (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of workspace/<tag>/profile.json")
    parser.add_argument("--export-trace", type=Path, metavar="FILE", help="write the profiler's trace, for Perfetto")
    parser.add_argument(
        "--memory-snapshot", type=Path, metavar="FILE", help="of one pass on a GPU, for pytorch.org/memory_viz"
    )
    parser.add_argument("--torch-compile-log", type=Path, metavar="FILE", help="graph breaks and code of torch.compile")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    arguments = parser.parse_args()
    if min(arguments.warmup_iters, arguments.profile_iters - 1) < 0:
        parser.error("--warmup-iters must be at least 0, --profile-iters at least 1")
    if arguments.memory_snapshot and not arguments.device.startswith("cuda"):
        parser.error("--memory-snapshot needs --device cuda")
    output = arguments.output or ROOT / "workspace" / arguments.tag / "profile.json"
    repeats = arguments.warmup_iters, arguments.profile_iters
    try:
        workload = workload_from(arguments)
        with progress(f"profiling {workload}", 2 + 4 * len(workload.parts)) as say:
            profile = profile_workload(workload, *repeats, say, arguments.export_trace, arguments.baseline)
    except WorkloadError as error:
        fail(error)
    profile.write(output)
    if arguments.memory_snapshot:
        snapshot_memory(workload, arguments.memory_snapshot)
    if arguments.torch_compile_log:
        log_compilation(workload, arguments.torch_compile_log)
    if arguments.json:
        print(output.read_text())
    else:
        show(profile)
        source = f"--profile {output}" if arguments.output else f"--tag {arguments.tag}"
        print(f"written to {os.path.relpath(output)}; next: python extract.py {source}")


def show(profile) -> None:
    from autokernel.scheduler import amdahl
    from autokernel.table import print_table

    def row(h) -> list[str]:
        gains = [f"{amdahl(h.share, s):.2f}x" for s in (1.5, 2, max(h.headroom, 1))] if h.kernel_type else [""] * 3
        compiled = f"{h.time_us / h.compiled_us:.2f}x" if h.compiled_us else ""
        headroom = f"{h.headroom:.1f}x" if h.headroom else ""
        calls, ms, share = f"{h.calls:g}", f"{h.time_us / 1e3:.2f}", f"{h.share:.1%}"
        return [h.kernel_type or "-", calls, ms, share, compiled, h.bound or "", headroom, *gains, h.name]

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
    if busy < 0.7:
        print(f"the device works {busy:.0%} of a pass; the rest is the host launching, which fewer, larger kernels reduce")
    print(f"{covered:.0%} of the device time is in operations that kernels can replace; 1.5x, 2x, limit: the whole model's")
    all_at_limit = 1 / (1 - covered + at_limit)
    print(f"speedup if that operation alone were so much faster (all of them at the limit: {all_at_limit:.2f}x)")
    against = {"best": "the faster of eager mode and torch.compile", "compile": "torch.compile", "eager": "eager mode"}
    print(f"compiled: how much faster torch.compile makes it; headroom: over {against[profile.baseline]}")
    for refused in profile.refused:
        print(f"not taken for {refused.kernel_type}, {refused.calls:g} calls: {refused.why}")
    if profile.uncaptured:
        print(f"{profile.uncaptured:.1%} of the device time cannot be captured")
    for reason in profile.graph_breaks:
        print(f"graph break: {reason.splitlines()[0]}")


if __name__ == "__main__":
    main()
