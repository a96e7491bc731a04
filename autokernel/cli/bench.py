"""The gate on one kernel file: five stages of correctness, then paired timing against PyTorch.

Usage:
    python bench.py                                   # kernel.py, at the sizes of its type's spec
    python bench.py kernels/rmsnorm/cpp_kernel.py --quick
    python bench.py third_party.py:function --kernel rmsnorm     # called with the oracle's parameters, by position
    python bench.py kernel.py --tag default --target rmsnorm_float32 --incumbent old.py
    python bench.py kernel.py --autotune 60           # many settings of its TUNABLES side by side: which looks fastest?
    python bench.py kernel.py --autotune 60 --sizes --out sized.py    # and a file with the fastest at each size
    python bench.py --calibrate --trials 20           # the gate itself: false keeps, power, the least gain that it sees

Reads the kernel file, `kernels/<type>/spec.py` and, with --target, `workspace/<tag>/plan.json`. Writes what
--out names, and nothing else.
Ends in greppable `key: value` lines (or one JSON object with --json). Exit status: 0 only on PASS, 1 on a verdict against
the kernel and where there is none, 2 on bad use.
"""

import argparse
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autokernel.cli.arguments import Parser, count, named_path, positive, seed, tag
from autokernel.common import console
from autokernel.common.preflight import as_called, named
from autokernel.common.records import json_text
from autokernel.gate.source import check_named, constants, read_kernel
from autokernel.gate.workers.launch import Launched

if TYPE_CHECKING:
    from autokernel.gate import Judge
    from autokernel.target import Target

OF_A_FILE = {  # what --calibrate makes nothing of; the file itself has no word of its own
    "file": "",
    "kernel": "--kernel",
    "quick": "--quick",
    "sizes": "--sizes",
    "compile": "--compile",
    "profile": "--profile",
    "incumbent": "--incumbent",
    "target": "--target",
    "autotune": "--autotune",
}
DTYPES = ("float16", "bfloat16", "float32")
TRIALS = 20


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("file", nargs="?", type=named_path, help="default: kernel.py")
    parser.add_argument(
        "--kernel", type=named, metavar="TYPE", help="the kernel type that the file must be of (default: its own)"
    )
    parser.add_argument("--quick", action="store_true", help="smoke test, shape sweep in one dtype, three pairs: no proof")
    parser.add_argument("--sizes", action="store_true", help="time every size of the spec, not the first alone")
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the eager form as well")
    parser.add_argument("--profile", action="store_true", help="print what ran in one call, by torch.profiler")
    parser.add_argument(
        "--incumbent", type=named_path, help="a kernel file to be compared with, under the loop's keep rule"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype that is timed (float32 on a CPU, else float16)")
    parser.add_argument("--target", type=named, help="time a target of the plan: the shapes and strides of a model")
    parser.add_argument(
        "--tag", type=tag, default="default", help="the run whose plan has the target (default: %(default)s)"
    )
    parser.add_argument("--seed", type=seed, help="repeat the inputs of an earlier verdict")
    parser.add_argument("--timing", action="store_true", help="print where the gate's own time went")
    parser.add_argument("--allow-libraries", action="store_true", help="judge kernels that call PyTorch or a library, too")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--autotune", type=count, metavar="N", help="time N settings of the file's TUNABLES; no verdict")
    parser.add_argument("--sweep", dest="autotune", type=count, help=argparse.SUPPRESS)  # its name before
    parser.add_argument(
        "--calibrate",
        nargs="*",
        metavar="TYPE",
        help="judge the gate and no file: how often it keeps what is not faster, and which gain it sees; with the starters "
        "of these types, and with kernels of a known speedup as the type planted (default: four types, and planted)",
    )
    parser.add_argument("--trials", type=count, help=f"--calibrate: contests of each kind ({TRIALS})")
    parser.add_argument(
        "--budget", type=positive, default=600, metavar="S", help="--calibrate, --autotune: seconds (default: %(default)s)"
    )
    out = "--calibrate: a record to be written, or to go on with; --autotune: the file with a table of settings by size"
    parser.add_argument("--out", type=named_path, help=out)
    console.add_sandbox_argument(parser)
    console.add_device_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.out and options.calibrate is None and not options.autotune:
        parser.error("--out is what --autotune or --calibrate writes: a verdict is printed (--json > FILE)")
    if options.calibrate is None and options.trials:
        parser.error("--trials is of --calibrate: a verdict needs as many pairs as it needs")
    if options.calibrate is not None and (given := [word for name, word in OF_A_FILE.items() if getattr(options, name)]):
        words = " and ".join(word or str(options.file) for word in given)
        parser.error(f"--calibrate judges the gate, and no file: leave {words} out")
    options.file, options.trials = options.file or Path("kernel.py"), options.trials or TRIALS
    if options.calibrate is None:
        check_named(options.file, *filter(None, [options.incumbent]))
    with Launched() as launched:
        console.settle_device(options, parser)  # imports PyTorch
        if options.calibrate is None:
            return judge_file(options, launched)
        from autokernel.gate.calibration import calibration

        return calibration.main(options, launched)


def judge_file(options: argparse.Namespace, launched: Launched) -> int:
    """bench.py FILE: the exit status."""
    from autokernel.common.preflight import HOME
    from autokernel.gate import Judge, report
    from autokernel.gate.kernel_files import source_of, usual_target
    from autokernel.gate.workers.sandbox import SandboxIncomplete
    from autokernel.history.runs import PLAN, run_folder
    from autokernel.target import Plan

    source = source_of(options.file, options.kernel, options.device)
    if options.autotune and options.incumbent:
        console.fail("--autotune times settings of one file against that file as it is: leave --incumbent out")
    incumbent = read_kernel(options.incumbent) if options.incumbent else None
    if incumbent and constants(incumbent).get("KERNEL_TYPE") != constants(source).get("KERNEL_TYPE"):
        console.fail(f"{options.incumbent} is of another kernel type than {options.file}: nothing to compare")
    target = usual_target(source, options.file, options.kernel, options.device, options.dtype, options.sizes)
    console.preflight(str(constants(source)["BACKEND"]), experiments=False)
    if options.target:
        try:
            target = Plan.read(run_folder(HOME, options.tag) / PLAN).target(options.target)
        except (OSError, StopIteration):
            advice = f"see python extract.py --report --tag {options.tag}"
            console.fail(f"no target {options.target!r} in workspace/{options.tag}/plan.json: {advice}")
    try:
        judge = Judge(options.device, options.allow_libraries, options.require_sandbox, launched)
    except SandboxIncomplete as error:
        console.fail(error)
    if options.autotune:
        return autotune(judge, source, target, options)
    with console.progress(f"{options.file}", total=6) as step, judge:
        verdict = judge.examine(
            source,
            target,
            incumbent=incumbent,
            quick=options.quick,
            seed=options.seed,
            compile_baseline=options.compile,
            progress=step,
        )
        profile = judge.profile(source, target) if options.profile and verdict.correctness == "PASS" else ""
    if options.json:
        print(json_text(report.as_json(verdict), indent=1))
    else:
        repeat = as_called(f"python bench.py {shlex.quote(str(options.file))} --seed {verdict.seed}")
        print(profile + report.as_text(verdict, repeat, judge.sandbox, options.timing))
    return 0 if verdict.correctness == "PASS" else 1


def autotune(judge: "Judge", source: str, target: "Target", options: argparse.Namespace) -> int:
    """bench.py --autotune N: the file as it is against other settings of its TUNABLES."""
    from autokernel.agents.knobs import by_sizes, in_words, read_knobs, some_settings
    from autokernel.agents.tuner import PROMISING

    if options.out and len(target.cases) == 1:
        console.fail("--out is for settings by size, and there is one size: add --sizes, or --target with several")
    sources = some_settings(source, options.autotune)
    if not sources:
        console.fail(f"{options.file} has no TUNABLES with other values: nothing to autotune")
    with console.progress(f"{options.file}", total=len(sources) + 1) as step, judge:
        looked = judge.autotune(
            [source, *sources], target, options.budget, lambda done, of: step(f"{done} of {of} settings compiled")
        )
    if options.json:
        rows = [
            {
                "setting": read_knobs(one.source).current,
                "latency_us": _us(one.seconds),
                "by_case_us": [_us(s) for s in one.by_case],
                "reason": one.reason,
            }
            for one in looked
        ]
        print(json_text({"target": target.name, "settings": rows}, indent=1))
    else:
        print(in_words(looked, source, target))
    if options.out:
        sized = by_sizes(looked, target, PROMISING[target.device.partition(":")[0]])
        if not sized:
            console.fail(f"no size has a setting of its own that looks faster: {options.out} is not written")
        options.out.write_text(sized)
    return 0 if any(one.source == source and one.seconds < math.inf for one in looked) else 1


def _us(seconds: float) -> float | None:
    return round(1e6 * seconds, 3) if seconds < math.inf else None
