"""The gate on one kernel file: five stages of correctness, then paired timing against PyTorch.

Usage:
    python bench.py                                   # kernel.py, at the sizes of its type's spec
    python bench.py kernels/rmsnorm/cpp_kernel.py --quick
    python bench.py third_party.py:function --kernel rmsnorm     # called with the oracle's parameters, by position
    python bench.py kernel.py --tag default --target rmsnorm_float32 --incumbent old.py
    python bench.py --calibrate --trials 20           # the gate itself: false keeps, power, the least gain that it sees

Reads the kernel file, `kernels/<type>/spec.py` and, with --target, `workspace/<tag>/plan.json`. Writes nothing.
Ends in greppable `key: value` lines (or one JSON object with --json). Exit status: 0 only on PASS, 1 on a verdict against
the kernel, 2 on bad use.
"""

import argparse
import json
from pathlib import Path

from autokernel import cli

DTYPES = ("float16", "bfloat16", "float32")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python bench.py kernels/softmax/cpp_kernel.py --sizes --compile",
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("kernel.py"), help="default: kernel.py")
    parser.add_argument("--kernel", metavar="TYPE", help="the kernel type that the file must be of (default: its own)")
    parser.add_argument("--quick", action="store_true", help="smoke and sweep in one dtype, three pairs: no proof")
    parser.add_argument("--sizes", action="store_true", help="time every size of the spec, not the first alone")
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the eager form as well")
    parser.add_argument("--profile", action="store_true", help="print what ran in one call, by torch.profiler")
    parser.add_argument("--incumbent", type=Path, help="a kernel file to be compared with, under the loop's keep rule")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype that is timed (default: float32 on a CPU, else float16)")
    parser.add_argument("--target", help="time a target of the plan: the shapes and strides of a model")
    parser.add_argument("--tag", default="default", help="the run whose plan has the target (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="repeat the inputs of an earlier verdict")
    parser.add_argument("--timing", action="store_true", help="print where the gate's own time went")
    parser.add_argument("--allow-libraries", action="store_true", help="judge kernels that call PyTorch or a library, too")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--calibrate", nargs="*", metavar="TYPE", help='calibrate the gate on these types, or on "planted"')
    parser.add_argument("--trials", type=int, default=20, help="--calibrate: contests of each kind (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=600, metavar="SECONDS", help="--calibrate: (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="--calibrate: a record to be written, or to go on with")
    cli.add_sandbox_argument(parser)
    cli.add_device_argument(parser)
    return parser.parse_args()


def read_source(options: argparse.Namespace) -> str:
    """The kernel file, or file.py:function with what the gate needs around it."""
    from autokernel.foreign import NotFound, as_kernel_file
    from autokernel.spec import kernel_types

    if options.file.is_file():
        return options.file.read_text()
    if ":" not in str(options.file):
        cli.fail(f"there is no file {options.file}: name a kernel file, such as kernels/rmsnorm/cpp_kernel.py")
    if options.kernel not in kernel_types():
        cli.fail(f"what does {options.file} compute? Say --kernel with one of {', '.join(kernel_types())}")
    try:
        return as_kernel_file(str(options.file), options.kernel, "cpp" if options.device == "cpu" else "triton")
    except NotFound as reason:
        cli.fail(reason)


def main() -> int:
    options = arguments()
    if options.calibrate is not None:
        from autokernel.gate import calibration

        return calibration.main(options)
    import torch

    from autokernel.gate import Judge, report
    from autokernel.gate.judge import constants
    from autokernel.gate.sandbox import SandboxIncomplete
    from autokernel.spec import ROOT, folder_of, kernel_types, load_spec
    from autokernel.target import Plan, default_target

    try:
        source = read_source(options)
        declared = constants(source)
    except SyntaxError as error:
        cli.fail(f"{options.file} is not Python: {error}")
    kernel_type, backend = options.kernel or declared.get("KERNEL_TYPE"), declared.get("BACKEND")
    if not (folder_of(str(kernel_type)) / "spec.py").is_file():
        cli.fail(f"{options.file}: KERNEL_TYPE is {kernel_type!r}; the types are {', '.join(kernel_types())}")
    cli.preflight(str(backend), experiments=False)
    if options.target:
        try:
            target = Plan.read(ROOT / "workspace" / options.tag / "plan.json").target(options.target)
        except (OSError, StopIteration):
            cli.fail(f"no target {options.target!r} in workspace/{options.tag}/plan.json: see extract.py --report")
    else:
        usual = getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "float16"))
        dtypes = load_spec(kernel_type).dtypes
        if options.dtype and usual not in dtypes:
            cli.fail(f"{kernel_type} is not for {options.dtype}")
        dtype = usual if usual in dtypes else dtypes[0]
        target = default_target(kernel_type, backend, options.device, dtype, options.sizes)
    try:
        judge = Judge(options.device, options.allow_libraries, options.require_sandbox)
    except SandboxIncomplete as error:
        cli.fail(error)
    with cli.progress(f"{options.file}", total=6) as step, judge:
        verdict = judge.examine(
            source,
            target,
            incumbent=options.incumbent.read_text() if options.incumbent else None,
            quick=options.quick,
            seed=options.seed,
            compile_baseline=options.compile,
            progress=step,
        )
        profile = judge.profile(source, target) if options.profile and verdict.correctness == "PASS" else ""
    if options.json:
        print(json.dumps(report.as_json(verdict), indent=1))
    else:
        repeat = f"python bench.py {options.file} --seed {verdict.seed}"
        print(profile + report.as_text(verdict, repeat, judge.sandbox, options.timing))
    return 0 if verdict.correctness == "PASS" else 1


if __name__ == "__main__":
    raise SystemExit(main())
