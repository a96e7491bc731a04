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
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel import cli
from autokernel.extraction import default_backend
from autokernel.problems import Cost, NotJudged, Problem, cost_of, examine, fitting, load, target_of
from autokernel.rewriting import NotRewritten, Rewriting, rewrite, unchanged, variants
from autokernel.spec import PROBLEMS, ROOT, load_spec
from autokernel.target import Plan, Target

SOURCE = PROBLEMS / "source"  # what `fetch` has brought
DATASET = "ScalingIntelligence/KernelBench"
HELP = {
    "list": "a level's problems",
    "info": "what a problem asks for",
    "fetch": "problems from Hugging Face",
    "setup": "kernel.py and a run for a problem",
}
LIMIT = Cost(flops=300_000_000, nbytes=24_000_000)  # of one pass on a CPU: about thirty of them, in float64, make a verdict


@dataclass(frozen=True)
class Setup:
    """A problem that is ready for the gate, and the ModelNew that our kernels make of it, if any does."""

    problem: Problem
    target: Target
    sources: Mapping[str, str]  # stem of a starter -> ModelNew
    rewriting: Rewriting | None
    why: str  # there is no rewriting

    @property
    def source(self) -> str:
        return self.sources[self.target.starter]


def repository(path: Path | None) -> Path:
    """The folder that has level1/, level2/, …; ends the program where there is none."""
    given = path or Path(os.environ.get("KERNELBENCH", SOURCE))
    folders = [folder for folder in (given, given / "KernelBench") if any(folder.glob("level*/*.py"))]
    return folders[0] if folders else cli.fail(f"no problems in {given}: see --repo-path, or `fetch` them")


def number_of(path: Path) -> int:
    """Of a problem, by its file's name: 23 for level1/23_Softmax.py."""
    found = re.match(r"\d+", path.stem)
    return int(found[0]) if found else 0


def level_files(folder: Path, level: int) -> list[Path]:
    return sorted((folder / f"level{level}").glob("*.py"), key=number_of)


def name_of(path: Path) -> str:
    """As a kernel type: level1_23, or the file's own name."""
    level = path.parent.name if re.fullmatch(r"level\d+", path.parent.name) and number_of(path) else ""
    return f"{level}_{number_of(path)}" if level else re.sub(r"\W", "_", path.stem).lower()


def set_up(path: Path, backend: str, device: str, limit: Cost | None) -> Setup:
    """Everything that the loop and the gate need, written to workspace/kernelbench/<name>/.

    limit: of one pass; None takes the problem as published. Raises NotJudged.
    """
    sizes = fitting(path, limit) if limit else {}
    try:
        problem = examine(name_of(path), path, sizes, device)
    except NotJudged:
        raise
    except Exception as error:  # whatever a model does
        raise NotJudged(f"does not run here: {type(error).__name__}: {str(error).splitlines()[0][:100]}") from error
    folder, why, rewriting = problem.write(path.read_text()), "", None
    for old in folder.glob(f"{backend}_*.py"):
        old.unlink()
    try:
        rewriting = rewrite(problem, backend, device)
        sources = variants(rewriting, backend)
    except NotRewritten as reason:
        why, sources = str(reason), {f"{backend}_kernel": unchanged(problem, backend)}
    for stem, source in sources.items():
        (folder / f"{stem}.py").write_text(source)
    load_spec.cache_clear()  # the same name may have had other sizes before
    return Setup(problem, target_of(load_spec(problem.name), backend, device), sources, rewriting, why)


def plan_of(setup: Setup) -> Plan:
    """A plan whose only target is the problem."""
    return Plan(f"KernelBench {setup.problem.name}", {}, setup.target.device, 0.0, (setup.target,))


def _list(options: argparse.Namespace) -> None:
    for path in level_files(repository(options.repo_path), options.level):
        print(path.stem)


def _info(options: argparse.Namespace) -> None:
    path = chosen(options)
    cost = cost_of(load(path, {}))
    print(f"problem: {name_of(path)} ({path.stem})\npublished: {cost}")
    if limit := limit_of(options):
        sizes = fitting(path, limit)
        print(f"here: {cost_of(load(path, sizes))}\nsizes: {sizes or 'as published'}")
    print(path.read_text())


def _fetch(options: argparse.Namespace) -> None:
    try:
        from datasets import load_dataset
    except ImportError:
        cli.fail("fetch needs the package datasets: pip install 'autokernel[kernelbench]', or clone it and use --repo-path")
    try:
        rows = load_dataset(DATASET, split=f"level_{options.level}")
    except Exception as error:  # of whatever kind: no network, no such level
        cli.fail(f"the dataset {DATASET} could not be had ({type(error).__name__}): clone KernelBench and use --repo-path")
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
        cli.fail(reason)
    options.output.write_text(setup.source)
    plan_of(setup).write(ROOT / "workspace" / setup.problem.name / "plan.json")
    kernels = ", ".join(setup.rewriting.kernel_types) if setup.rewriting else f"none of ours ({setup.why})"
    print(f"sizes: {setup.problem.reduced or 'as published'}\nkernels: {kernels}\nwritten: {options.output}")
    print(f"judge it: python bench.py {options.output} --tag {setup.problem.name} --target {setup.target.name}")


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repo-path", type=Path, help="a clone of KernelBench (default: $KERNELBENCH, or what was fetched)"
    )
    parser.add_argument(
        "--gflop", type=float, default=LIMIT.flops / 1e9, help="of a pass on a CPU, to aim at (%(default)s)"
    )
    parser.add_argument(
        "--mb", type=float, default=LIMIT.nbytes / 1e6, help="moved by a pass there, to aim at (%(default)s)"
    )
    parser.add_argument("--published", action="store_true", help="take sizes as published, on a CPU as well")
    parser.add_argument("--backend", choices=("triton", "cuda", "cpp"), help="of the kernels (default: the device's)")
    cli.add_device_argument(parser)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", type=int, help="1 to 4")
    parser.add_argument("--problem", type=int, help="its number in the level")
    parser.add_argument("--file-path", type=Path, help="a file with Model, get_inputs() and get_init_inputs()")


def chosen(options: argparse.Namespace) -> Path:
    """The one problem file that the arguments name."""
    if options.file_path:
        if not options.file_path.is_file():
            cli.fail(f"there is no file {options.file_path}")
        return options.file_path
    if options.level is None or options.problem is None:
        cli.fail("name a problem: --level 1 --problem 23, or --file-path FILE")
    files = {number_of(path): path for path in level_files(repository(options.repo_path), options.level)}
    if options.problem not in files:
        cli.fail(f"level {options.level} has no problem {options.problem}")
    return files[options.problem]


def limit_of(options: argparse.Namespace) -> Cost | None:
    if options.published or options.device != "cpu":
        return None
    return Cost(int(options.gflop * 1e9), int(options.mb * 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in HELP.items():
        command = commands.add_parser(name, help=what)
        add_source_arguments(command)
        add_problem_arguments(command)
        if name == "setup":
            command.add_argument("--output", type=Path, default=Path("kernel.py"), help="default: %(default)s")
    options = parser.parse_args()
    if options.command in ("list", "fetch") and options.level is None:
        parser.error("which --level?")
    globals()[f"_{options.command}"](options)


if __name__ == "__main__":
    main()
