"""A gate for continuous integration: is a changed kernel still right, and not slower than it was?

Usage:
    python -m autokernel check old.py new.py --kernel rmsnorm
    python -m autokernel check main/softmax.py:softmax softmax.py:softmax --kernel softmax --sizes --junit check.xml

The new kernel goes through the five stages of correctness; if it is right, both are timed in turns, in eight pairs of fresh
processes. Slower beyond doubt: the whole 99.8 % interval of the speedup lies below 1, over all sizes or at one of them.
Reads the two files. Writes what --junit and --markdown name, and the summary of the job where $GITHUB_STEP_SUMMARY is set.
Exit status: 0 right, and not slower beyond doubt; 1 wrong, or slower beyond doubt; 2 bad use, or a machine that allows no
verdict.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from autokernel.cli.arguments import Parser, named_path, seed
from autokernel.cli.bench import DTYPES
from autokernel.common import console
from autokernel.common.preflight import check_writable, kernel_types
from autokernel.common.records import json_text
from autokernel.common.verdict import STAGES
from autokernel.gate.source import check_named, constants
from autokernel.gate.workers.launch import Launched
from autokernel.gate.workers.sandbox import SandboxIncomplete

if TYPE_CHECKING:
    from autokernel.gate.comparison import Comparison

TITLE = "autokernel check"
JUNIT = f"<?xml version='1.0' encoding='utf-8'?>\n<testsuite name=\"{TITLE} ".encode()  # how the files begin
PASSED, UNDECIDED, FAILED = (f"### {mark}" for mark in ("✅", "⚠️", "❌"))
MARKDOWN = tuple(begin.encode() for begin in (PASSED, UNDECIDED, FAILED))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("old", type=named_path, help="the kernel as it was, a file or file.py:function")
    parser.add_argument("new", type=named_path, help="the kernel as it is to be")
    parser.add_argument("--kernel", metavar="TYPE", choices=kernel_types(), required=True, help="what both compute")
    parser.add_argument("--sizes", action="store_true", help="time every size of the type, not the first alone")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype that is timed (float32 on a CPU, else float16)")
    parser.add_argument("--seed", type=seed, help="repeat the inputs of an earlier verdict")
    parser.add_argument("--allow-libraries", action="store_true", help="judge kernels that call PyTorch or a library, too")
    parser.add_argument("--junit", type=named_path, metavar="FILE", help="write the outcome as JUnit's XML")
    parser.add_argument("--markdown", type=named_path, metavar="FILE", help="write it as Markdown")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    console.add_sandbox_argument(parser)
    console.add_device_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    make_folders(*filter(None, (options.junit, options.markdown)))
    check_writable(*filter(None, (options.junit, options.markdown, summary_file())))
    check_ours(options)
    check_named(options.old, options.new)
    with Launched() as launched:
        console.settle_device(options, parser)  # imports PyTorch
        outcome = judged(options, launched)
    write(outcome, options)
    if options.json:
        print(json_text(as_json(outcome), indent=1))
    else:
        print("\n".join([*(f"{stage}: {result}" for stage, result in outcome.correctness.stages.items()), *lines(outcome)]))
    if outcome.right and outcome.undecided:
        print("error: no verdict: judge it again on a quieter machine", file=sys.stderr)
        return 2
    return 0 if outcome.passed else 1


def make_folders(*paths: Path) -> None:
    """For files that are written when all has been judged, as test runners do."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)


def check_ours(options: argparse.Namespace) -> None:
    """An earlier outcome is written anew; any other file is the user's, and the other of the two is no place either."""
    for path, begin in ((options.junit, JUNIT), (options.markdown, MARKDOWN)):
        if path and path.is_file() and (found := path.read_bytes()) and not found.startswith(begin):
            console.fail(f"{path} exists, and is no outcome of autokernel check: name another file, or remove it")
    if options.junit and options.markdown and options.junit.absolute() == options.markdown.absolute():
        console.fail(f"--junit and --markdown both name {options.junit}: one would replace the other")


def judged(options: argparse.Namespace, launched: Launched) -> "Comparison":
    from autokernel.gate import Judge
    from autokernel.gate.comparison import compare
    from autokernel.gate.kernel_files import declared, source_of, usual_target

    old, new = (source_of(name, options.kernel, options.device) for name in (options.old, options.new))
    for name, source in ((options.old, old), (options.new, new)):
        if (found := constants(source).get("KERNEL_TYPE")) != options.kernel:
            console.fail(declared(name, "KERNEL_TYPE", found, f", not {options.kernel!r}", options.kernel))
    target = usual_target(new, options.new, options.kernel, options.device, options.dtype, options.sizes)
    console.preflight(target.backend, experiments=False)
    try:
        judge = Judge(options.device, options.allow_libraries, options.require_sandbox, launched)
    except SandboxIncomplete as error:
        console.fail(error)
    with console.progress(f"{options.new} against {options.old}", total=2) as step, judge:
        return compare(judge, old, new, target, options.seed, step)


def write(outcome: "Comparison", options: argparse.Namespace) -> None:
    if options.junit:
        options.junit.write_bytes(ElementTree.tostring(junit(outcome, options), encoding="utf-8", xml_declaration=True))
    text = markdown(outcome, options)
    if options.markdown:
        options.markdown.write_text(text)
    if summary := summary_file():
        with open(summary, "a") as file:
            file.write(text)


def summary_file() -> Path | None:
    """Of a job in GitHub's workflows."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(name) if name else None


def lines(outcome: "Comparison") -> list[str]:
    said = [f"speedup_vs_old: {name}: {speedup}" for name, speedup in outcome.speedups.items()]
    return [*said, f"seed: {outcome.correctness.seed}", f"passed: {outcome.passed}", f"why: {outcome.why}"]


def as_json(outcome: "Comparison") -> dict[str, object]:
    from autokernel.gate import report

    told = {name: getattr(outcome, name) for name in ("passed", "right", "undecided", "why", "speedups", "slower")}
    return {name: report.as_json(value) for name, value in (told | vars(outcome)).items()}


def junit(outcome: "Comparison", options: argparse.Namespace) -> ElementTree.Element:
    """A test case for each stage of correctness, and one for the speed."""
    suite = ElementTree.Element("testsuite", name=f"{TITLE} {options.kernel}")
    failure, stages = outcome.correctness.failure, outcome.correctness.stages
    seconds = outcome.timing.bench_time_seconds if outcome.timing else 0.0
    for name in (*STAGES, "speed"):
        case = ElementTree.SubElement(suite, "testcase", classname=str(options.new), name=name)
        case.set("time", f"{seconds if name == 'speed' else 0:.3f}")
        if failure and failure.stage == name or name == "speed" and outcome.timing and not outcome.passed and not failure:
            kind = "failure" if not outcome.right or outcome.slower else "error"
            ElementTree.SubElement(case, kind, message=outcome.why).text = failure.detail if failure else outcome.why
        elif name == "speed" and not outcome.timing or name != "speed" and stages.get(name) != "PASS":
            ElementTree.SubElement(case, "skipped", message="not reached")
        elif name == "speed":
            ElementTree.SubElement(case, "system-out").text = "\n".join(lines(outcome))
    for what in ("failure", "error", "skipped"):
        suite.set({"failure": "failures", "error": "errors"}.get(what, what), str(len(suite.findall(f"testcase/{what}"))))
    suite.set("tests", str(len(suite)))
    return suite


def markdown(outcome: "Comparison", options: argparse.Namespace) -> str:
    begin = PASSED if outcome.passed else UNDECIDED if outcome.right and outcome.undecided else FAILED
    rows = [f"| {name} | {speedup} |" for name, speedup in outcome.speedups.items()]
    table = ["", f"| `{options.new}` against `{options.old}` | speedup, 99.8 % interval |", "|---|---|", *rows]
    stages = ", ".join(f"{stage.replace('_', ' ')} {result}" for stage, result in outcome.correctness.stages.items())
    ended = ["", f"{stages}. On {outcome.correctness.device}, seed {outcome.correctness.seed}.", ""]
    return "\n".join([f"{begin} {options.kernel}: {outcome.why}", *(table if rows else []), *ended])
