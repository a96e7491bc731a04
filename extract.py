"""From a profile to work: the operations worth a kernel, each with the shapes that the model runs and a file to start from.

In the order of what perfect kernels would save of the time "to beat": that of eager mode or torch.compile, see profile.py.

Usage:   python extract.py                                (the five costliest of workspace/default/profile.json)
         python extract.py --top 3 --backend triton
         python extract.py --report --kernel-type matmul  (show the targets, write nothing)
Reads:   workspace/<tag>/profile.json, written by profile.py
Writes:  workspace/<tag>/plan.json, and for each target workspace/<tag>/kernels/<target>.py
"""

import argparse
import json
import os
from pathlib import Path

from autokernel.cli import fail
from autokernel.extraction import make_plan, write_starters
from autokernel.profiler import ModelProfile
from autokernel.scheduler import amdahl
from autokernel.spec import BACKENDS, ROOT, kernel_types
from autokernel.table import print_table
from autokernel.target import Plan, encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="show the targets, write nothing")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many targets (default: %(default)s)")
    parser.add_argument("--kernel-type", choices=kernel_types(), help="of this type only")
    parser.add_argument("--backend", choices=BACKENDS, help="default: cpp on a CPU, triton on a GPU")
    parser.add_argument("--tag", default="default", help="name of the run (default: %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="instead of workspace/<tag>/profile.json")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    arguments = parser.parse_args()
    folder = ROOT / "workspace" / arguments.tag
    source = arguments.profile or folder / "profile.json"
    if not source.exists():
        fail(f"there is no {os.path.relpath(source)}: run python profile.py --tag {arguments.tag} first")
    profile = ModelProfile.read(source)
    plan = make_plan(profile, arguments.top, arguments.kernel_type, arguments.backend)
    if not plan.targets:
        fail("no operation of this model is one that a kernel here can replace")
    if not arguments.report:
        plan.write(folder / "plan.json")
        write_starters(plan, folder / "kernels")
    if arguments.json:
        print(json.dumps(encode(plan), indent=1))
    else:
        show(plan)


def show(plan: Plan) -> None:
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


if __name__ == "__main__":
    main()
