"""From a profile to work: the operations worth a kernel, each with the shapes that the model runs and a file to start from.

In the order of what perfect kernels would save of the time "to beat": that of eager mode or torch.compile, see profile.py.

Usage:   python extract.py                                (the five costliest of workspace/default/profile.json)
         python extract.py --top 3 --backend triton
         python extract.py --report --kernel-type matmul  (show the targets, write nothing)
Reads:   workspace/<tag>/profile.json, written by profile.py
Writes:  workspace/<tag>/plan.json, and for each target workspace/<tag>/kernels/<target>.py
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autokernel.cli.arguments import Parser, count, named_path, tag
from autokernel.common.backends import BACKENDS, backends_for, default_backend
from autokernel.common.console import fail
from autokernel.common.preflight import HOME, kernel_types
from autokernel.common.records import json_text
from autokernel.common.table import print_table
from autokernel.history.progress import amdahl
from autokernel.history.runs import has_experiments, run_folder

if TYPE_CHECKING:
    from autokernel.target import Plan


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("--report", action="store_true", help="show the targets, write nothing")
    parser.add_argument("--top", type=count, default=5, metavar="N", help="how many targets (default: %(default)s)")
    parser.add_argument("--kernel-type", choices=kernel_types(), help="of this type only")
    default = f"default: {default_backend('cpu')} on a CPU, {default_backend('cuda')} on a GPU"
    parser.add_argument("--backend", choices=BACKENDS, help=default)
    parser.add_argument("--tag", type=tag, default="default", help="name of the run (default: %(default)s)")
    parser.add_argument("--profile", type=named_path, metavar="FILE", help="instead of workspace/<tag>/profile.json")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    folder = run_folder(HOME, arguments.tag)
    if not arguments.report and has_experiments(HOME, arguments.tag):
        advice = "--report shows targets, another --tag begins anew"
        fail(f"run {arguments.tag!r} has experiments, which belong to its plan: {advice}")
    source = arguments.profile or folder / "profile.json"
    if source.is_dir():
        fail(f"{source} is a folder: name the file that python profile.py --output wrote")
    if arguments.profile and not source.is_file():
        fail(f"{source} is no file: python profile.py --output {shlex.quote(str(source))} writes one")
    if not source.is_file():
        fail(f"there is no {os.path.relpath(source)}: run python profile.py --tag {arguments.tag} first")
    from autokernel.model.extraction import make_plan, without_starter, write_starters  # with PyTorch
    from autokernel.model.hotspots import ModelProfile
    from autokernel.target import encode

    profile = ModelProfile.read(source)
    plan = make_plan(profile, arguments.top, arguments.kernel_type, arguments.backend)
    backend = arguments.backend or default_backend(profile.device)
    if backend not in backends_for(profile.device):
        elsewhere = f"{BACKENDS[backend].title} kernels do not run on {profile.device}, where this was profiled"
        print(f"note: {elsewhere}: {' or '.join(backends_for(profile.device))} would", file=sys.stderr)
    for kernel_type, share in without_starter(profile, backend).items():
        missing = f"no target of {kernel_type} ({share:.1%} of the time), which has no starter in {backend}"
        print(f"note: {missing}: kernels/{kernel_type}/{backend}_kernel.py would be one", file=sys.stderr)
    if not plan.targets:
        planned = make_plan(profile, len(profile.hotspots) or 1, backend=arguments.backend).targets
        others = sorted({t.kernel_type for t in planned if t.kernel_type in kernel_types()} - {arguments.kernel_type})
        if arguments.kernel_type and others:
            fail(f"nothing in this model is a target of type {arguments.kernel_type}; what is, is {', '.join(others)}")
        fail(f"a kernel here can replace no operation of it: python profile.py --tag {arguments.tag} says why of each")
    if not arguments.report:
        plan.write(folder / "plan.json")
        write_starters(plan, folder / "kernels")
    if arguments.json:
        print(json_text(encode(plan), indent=1))
    else:
        show(plan)


def show(plan: "Plan") -> None:
    columns = ("target", "shapes", "calls", "ms", "to beat", "share", "2x gives", "starts from")
    rows = [
        (
            target.name,
            str(len(target.cases)),
            f"{sum(c.calls for c in target.cases):.0f}",
            f"{target.model_time_us / 1e3:.2f}",
            f"{target.baseline_us / 1e3:.2f}",
            f"{target.share:.1%}",
            f"{amdahl(target.share, 2):.2f}x",
            target.starter,
        )
        for target in plan.targets
    ]
    print_table(f"{plan.model} on {plan.device}: {plan.model_latency_us / 1e3:.2f} ms a pass", columns, rows)
