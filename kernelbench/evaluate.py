"""A ModelNew against its problem's Model, through the gate: correctness, then timing against eager and torch.compile.

Usage:
    python kernelbench/evaluate.py kernel.py --level 1 --problem 23 --repo-path ~/KernelBench
    python kernelbench/evaluate.py new.py --file-path problem.py --correctness-only --n-trials 3
    python kernelbench/evaluate.py kernel.py --level 2 --problem 14 --json

Reads:  the file with ModelNew; the problem. Writes: workspace/kernelbench/<name>/
ModelNew gets the problem's init inputs and Model's state dict (the same names or, in order, the same shapes). It may leave
work to PyTorch, as the benchmark allows. Ends in `key: value` lines, or one JSON object. Exit status: 0 only on PASS.
"""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, count, script
from autokernel.common import console
from autokernel.common.backends import default_backend
from autokernel.common.verdict import Verdict
from autokernel.gate import Judge, report
from autokernel.gate.source import constants, read_source
from autokernel.kernelbench.problems import NotJudged
from autokernel.kernelbench.rewriting import complete
from autokernel.target import Target
from kernelbench import bridge


def judged(judge: Judge, source: str, target: Target, options: argparse.Namespace) -> Verdict:
    """The verdict of the last of n trials, or of the first that fails; only the last is timed."""
    for _ in range(options.n_trials - 1 + options.correctness_only):
        verdict = judge.check(source, target, secrets.randbits(32))
        if verdict.correctness != "PASS" or options.correctness_only and options.n_trials == 1:
            return verdict
    if options.correctness_only:
        return verdict
    return judge.examine(source, target, quick=options.quick, compile_baseline=not options.no_compile)


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer trials and three pairs of timings: no proof")
    parser.add_argument("--correctness-only", action="store_true", help="time nothing")
    parser.add_argument("--no-compile", action="store_true", help="do not time torch.compile (its compilation takes long)")
    parser.add_argument("--n-trials", type=count, default=1, help="times all stages, each with a new seed (%(default)s)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("kernel.py"), help="has ModelNew (default: kernel.py)")
    bridge.add_source_arguments(parser)
    bridge.add_problem_arguments(parser)
    add_gate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(argv)
    console.settle_device(options, parser)
    source = read_source(options.file)
    try:
        backend = options.backend or str(constants(source).get("BACKEND", default_backend(options.device)))
        setup = bridge.set_up(bridge.chosen(options), backend, options.device, bridge.limit_of(options))
    except (NotJudged, SyntaxError) as reason:
        console.fail(reason)
    source = complete(source, setup.problem.name, backend)
    with Judge(options.device) as judge:
        verdict = judged(judge, source, setup.target, options)
    if options.json:
        print(json.dumps(report.as_json(verdict) | {"sizes": setup.problem.reduced or "as published"}, indent=1))
    else:
        print(f"sizes: {setup.problem.reduced or 'as published'}")
        print(report.as_text(verdict, f"python kernelbench/evaluate.py {options.file}", judge.sandbox))
    return 0 if verdict.correctness == "PASS" else 1


if __name__ == "__main__":
    raise SystemExit(script(main))
