"""The kept kernels back in their model: is it still itself, and how much faster is it from end to end?

Usage:   python verify.py                          (the latest run)
         python verify.py --tag NAME --diagnose    (and each kernel alone)
         python verify.py --kernels DIR --json     (files named after targets of the plan, instead of the run's winners)
         python verify.py --save fast_llama        (what pays as a package: import fast_llama; fast_llama.apply(model))
Reads:   workspace/<tag>/plan.json; the kept kernels from git, refs/autokernel/<tag>/*
Writes:  workspace/<tag>/verify.json; traces/, a pass before and after, where kernels pay; DIR of --save; where the run has
         ended, the last commit of its branch once more

The model untouched, torch.compile in each mode, kernels over either: in turns, with intervals, for every workload.
A kernel stays in only if the model is faster with it than without, its whole 95 % interval at or above 1; what is left is
used only if the model is then faster than untouched, and than by any torch.compile. The first line says what to do.
Exit status: 0 right (even if there is nothing to gain), 1 the outputs are not the original's, 2 bad use.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autokernel.cli.arguments import Parser, count, count_or_none, named_path, nonnegative, tag
from autokernel.common import console
from autokernel.common.preflight import as_called
from autokernel.common.records import json_text, write_json
from autokernel.common.table import print_table
from autokernel.common.words import counted
from autokernel.history.runs import PLAN

if TYPE_CHECKING:
    from autokernel.integration.verification.winners import Kept
    from autokernel.target import Plan


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    run = parser.add_mutually_exclusive_group()
    run.add_argument("--tag", type=tag, help="name of the run (default: the latest)")
    run.add_argument("--workspace", type=named_path, metavar="DIR", help="the run's folder, instead of --tag")
    parser.add_argument(
        "--kernels", type=named_path, metavar="DIR", help="files <target>.py instead of the run's kept kernels"
    )
    parser.add_argument("--warmup", type=count_or_none, default=0, metavar="N", help="untimed rounds (%(default)s)")
    parser.add_argument("--timed", type=count, metavar="N", help="rounds a process (default: 8 s of them, at least 3)")
    parser.add_argument("--atol", type=nonnegative, help="of outputs; default by dtype")
    parser.add_argument("--rtol", type=nonnegative, help="of outputs; default by dtype")
    parser.add_argument("--diagnose", action="store_true", help="compare outputs with each kernel alone as well")
    parser.add_argument("--json", action="store_true", help="print the record instead of lines")
    parser.add_argument(
        "--save", type=named_path, metavar="DIR", help="write the kernels that pay as a package of this name"
    )
    console.add_device_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.workspace and not (arguments.workspace / PLAN).is_file():
        parser.error(f"there is no {arguments.workspace / PLAN}: --workspace is a run's folder, such as workspace/NAME")
    if arguments.device:  # else the plan's
        console.settle_device(arguments, parser)
    from autokernel.export.package import save, why_not  # with PyTorch
    from autokernel.integration.verification.record import COLUMNS, Settings
    from autokernel.integration.verification.winners import kept, open_run
    from autokernel.report.branch import close_again
    from autokernel.run.workspace import LOG, TRACES, VERIFY, VERIFY_NOTES, NoRun
    from autokernel.target import encode

    if arguments.save and why_not(arguments.save.resolve()):
        parser.error(why_not(arguments.save.resolve()))
    try:
        workspace = open_run(arguments.workspace or arguments.tag)
    except NoRun as error:
        console.fail(error)
    plan = workspace.plan
    if arguments.device:
        plan = replace(plan, device=arguments.device, workload=plan.workload | {"device": arguments.device})
    console.preflight(plan.targets[0].backend if plan.targets else "cpp")
    from autokernel.integration.verification.proven import remember  # with PyTorch's compiler
    from autokernel.integration.verification.trial import verify

    settings = Settings(arguments.warmup, arguments.timed, arguments.atol, arguments.rtol, arguments.diagnose)
    with workspace.locked():  # a run at work verifies its kernels itself, and writes the same files
        winners, speedups = from_folder(plan, arguments.kernels) if arguments.kernels else kept(workspace, plan)
        with console.progress(f"verifying {counted(winners, 'kernel')} in {plan.model} on {plan.device}") as say:
            files = {"notes": workspace / VERIFY_NOTES, "log": workspace / LOG, "traces": workspace / TRACES}
            verification = verify(plan, winners, speedups, settings, say, **files)
            write_json(workspace / VERIFY, encode(verification))
        if not arguments.kernels:
            close_again(workspace)
    remember(verification, winners, speedups, plan.model)
    if arguments.json:
        print(json_text(encode(verification), indent=1))
    else:
        verdict, *to_paste = map(as_called, verification.advice(workspace.tag))
        print("\n".join([verdict, *(f"  {line}" for line in to_paste), *map(as_called, verification.lines)]))
        if verification.figures:
            print_table(verification.model, COLUMNS, verification.rows)
    if arguments.save:
        saved = save(arguments.save.resolve(), verification, winners)
        print(f"{counted(saved, 'kernel')} written to {arguments.save}" if saved else "nothing to save", file=sys.stderr)
    raise SystemExit(0 if verification.passed else 1)


def from_folder(plan: "Plan", folder: Path) -> "Kept":
    from autokernel.gate.source import read_source
    from autokernel.integration.winner import Winner

    files = {target.name: folder / f"{target.name}.py" for target in plan.targets}
    winners = [Winner(target, read_source(files[target.name])) for target in plan.targets if files[target.name].exists()]
    if not winners:
        console.fail(f"{folder} has no file named after a target of {plan.model}: {', '.join(sorted(files))} (.py)")
    return winners, {}
