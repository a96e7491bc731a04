"""Problems of KernelBench for this project: where they are, what they ask for, and how one is set up for the loop.

Usage:
    python kernelbench/bridge.py list --level 1 --repo-path ~/KernelBench
    python kernelbench/bridge.py info --level 1 --problem 23 --repo-path ~/KernelBench
    python kernelbench/bridge.py fetch --level 1                  the dataset, into workspace/kernelbench/source/
    python kernelbench/bridge.py setup --level 1 --problem 23     kernel.py with a ModelNew, and a run named level1_23
    python kernelbench/bridge.py setup --file-path mine.py --backend triton

Reads:  a clone of KernelBench (--repo-path or $KERNELBENCH), one file, or what `fetch` has brought
Writes: setup: kernel.py (--output), workspace/kernelbench/<name>/, workspace/<name>/plan.json; fetch: the folder above

On a CPU problems are set up at sizes that fit it (--gflop, --mb), elsewhere as published; --published insists on that.
Then: python kernelbench/evaluate.py kernel.py, or python orchestrate.py --kernelbench LEVEL:PROBLEM.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, count, positive, script
from autokernel.common import console
from autokernel.common.backends import BACKENDS, default_backend
from autokernel.common.preflight import HOME
from autokernel.kernelbench.bridge import (
    LIMIT,
    SOURCE,
    level_files,
    name_of,
    number_of,
    plan_of,
    repository,
    set_up,
)
from autokernel.kernelbench.problems import Cost, NotJudged, cost_of, fitting, in_one_line, load

DATASET = "ScalingIntelligence/KernelBench"
HELP = {
    "list": "a level's problems",
    "info": "what a problem asks for",
    "fetch": "problems from Hugging Face",
    "setup": "kernel.py and a run for a problem",
}


def _list(options: argparse.Namespace) -> None:
    for path in level_files(repository(options.repo_path), options.level):
        print(path.stem)


def _info(options: argparse.Namespace) -> None:
    path = chosen(options)
    try:
        with in_one_line():
            cost = cost_of(load(path, {}))
            print(f"problem: {name_of(path)} ({path.stem})\npublished: {cost}")
            if limit := limit_of(options):
                sizes = fitting(path, limit)
                print(f"here: {cost_of(load(path, sizes))}\nsizes: {sizes or 'as published'}")
    except NotJudged as reason:
        console.fail(reason)
    print(path.read_text())


def _fetch(options: argparse.Namespace) -> None:
    try:
        from datasets import load_dataset
    except ImportError:
        console.fail(
            "fetch needs the package datasets: pip install -e '.[kernelbench]', or clone KernelBench and use --repo-path"
        )
    try:
        rows = load_dataset(DATASET, split=f"level_{options.level}")
    except Exception as error:  # of whatever kind: no network, no such level
        console.fail(
            f"the dataset {DATASET} could not be had ({type(error).__name__}): clone KernelBench and use --repo-path"
        )
    folder = SOURCE / f"level{options.level}"
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if options.problem in (None, row["problem_id"]):
            name = row["name"].removesuffix(".py")
            stem = name if number_of(Path(name)) else f"{row['problem_id']}_{name}"
            (folder / f"{stem}.py").write_text(row["code"])
            print(folder / f"{stem}.py")


def _setup(options: argparse.Namespace) -> None:
    try:
        setup = set_up(
            chosen(options), options.backend or default_backend(options.device), options.device, limit_of(options)
        )
    except NotJudged as reason:
        console.fail(reason)
    options.output.write_text(setup.source)
    plan_of(setup).write(HOME / "workspace" / setup.problem.name / "plan.json")
    kernels = ", ".join(setup.rewriting.kernel_types) if setup.rewriting else f"none of ours ({setup.why})"
    print(f"sizes: {setup.problem.reduced or 'as published'}\nkernels: {kernels}\nwritten: {options.output}")
    print(f"judge it: python bench.py {options.output} --tag {setup.problem.name} --target {setup.target.name}")


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repo-path", type=Path, help="a clone of KernelBench (default: $KERNELBENCH, or what was fetched)"
    )
    parser.add_argument(
        "--gflop", type=positive, default=LIMIT.flops / 1e9, help="of a pass on a CPU, to aim at (%(default)s)"
    )
    parser.add_argument(
        "--mb", type=positive, default=LIMIT.nbytes / 1e6, help="moved by a pass there, to aim at (%(default)s)"
    )
    parser.add_argument("--published", action="store_true", help="take sizes as published, on a CPU as well")
    parser.add_argument("--backend", choices=BACKENDS, help="of the kernels (default: the device's)")
    console.add_device_argument(parser)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", type=count, help="1 to 4 in KernelBench itself")
    parser.add_argument("--problem", type=count, help="its number in the level")
    parser.add_argument("--file-path", type=Path, help="a file with Model, get_inputs() and get_init_inputs()")


def chosen(options: argparse.Namespace) -> Path:
    """The one problem file that the arguments name."""
    if options.file_path:
        if not options.file_path.is_file():
            console.fail(f"there is no file {options.file_path}")
        return options.file_path
    if options.level is None or options.problem is None:
        console.fail("name a problem: --level 1 --problem 23, or --file-path FILE")
    files = {number_of(path): path for path in level_files(repository(options.repo_path), options.level)}
    if options.problem not in files:
        console.fail(f"level {options.level} has no problem {options.problem}")
    return files[options.problem]


def limit_of(options: argparse.Namespace) -> Cost | None:
    if options.published or options.device != "cpu":
        return None
    return Cost(int(options.gflop * 1e9), int(options.mb * 1e6))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in HELP.items():
        command = commands.add_parser(name, help=what)
        add_source_arguments(command)
        add_problem_arguments(command)
        if name == "setup":
            command.add_argument("--output", type=Path, default=Path("kernel.py"), help="default: %(default)s")
    options = parser.parse_args(argv)
    console.settle_device(options, parser)
    if options.command in ("list", "fetch") and options.level is None:
        parser.error("which --level?")
    globals()[f"_{options.command}"](options)


if __name__ == "__main__":
    raise SystemExit(script(main))
