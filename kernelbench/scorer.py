"""Score ModelNews, problem by problem: correct, faster than eager, faster than torch.compile, undecided, refused and why.

Usage:
    python kernelbench/scorer.py --level 1 --repo-path ~/KernelBench          ModelNew by our own capture and kernels
    python kernelbench/scorer.py --level 2 --problems 1,5,9 --correctness-only
    python kernelbench/scorer.py --level 1 --answers DIR                      DIR/level1_23.py has a ModelNew of yours
    python kernelbench/scorer.py --level 1 --experiments 10                   the tuner on top, so many experiments each
    python kernelbench/scorer.py --report [--json]                            the table and fast_p of what is recorded

Reads:  the problems; the record. Writes: the record (--record), after every problem, and workspace/kernelbench/
A killed run goes on where it was with --resume. fast_p is the share of all scored problems whose ModelNew is correct and
more than p times as fast as eager. A problem without a ModelNew counts as not solved. Weak problems are flagged, and
fast_p is given without them as well.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from autokernel.cli.arguments import Parser, count, count_or_none, script
from autokernel.common import console
from autokernel.common.backends import default_backend
from autokernel.common.records import write_json
from autokernel.common.verdict import Verdict
from autokernel.gate import Judge
from autokernel.kernelbench.bridge import Setup
from autokernel.kernelbench.degenerate import weaknesses
from autokernel.kernelbench.problems import NotJudged
from autokernel.kernelbench.rewriting import complete
from autokernel.spec import ROOT
from autokernel.target import encode
from kernelbench import bridge, evaluate

RECORDS = ROOT / "benchmarks"
COLUMNS = ("problems", "judged", "correct", "faster than eager", "than torch.compile", "undecided", "refused")
COLUMNS += ("no kernel", "not judged", "weak")
DETAILS = ("problem", "outcome", "kernels (left to PyTorch)", "vs eager", "vs torch.compile", "sizes", "weak")
ABOUT = """"Correct" is the gate's word, stricter than the benchmark's. "Faster": the whole 95 % interval is above 1.
"No kernel": nothing of ours fits the problem, which counts as not solved. Weak problems were found by experiment, at the
sizes that their row names; where it names none, as published."""
AGAIN_S = 15  # after which a time limit is raised again: in a callback or a destructor Python drops exceptions
P = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Score:
    """What became of one problem."""

    problem: str  # level1_23
    title: str  # 23_Softmax
    outcome: str  # "correct", "refused", "undecided", "no kernel", "not judged"
    why: str = ""
    sizes: str = "as published"
    kernels: tuple[str, ...] = ()
    left: int = 0  # operators that stay with PyTorch
    weak: tuple[str, ...] = ()
    eager: tuple[float, ...] = ()  # speedup: low, value, high (95 %)
    compiled: tuple[float, ...] = ()
    latency_us: float | None = None
    seconds: float = 0.0  # that scoring it took
    machine: str = ""
    versions: str = ""
    day: str = field(default_factory=lambda: f"{date.today()}")

    @property
    def level(self) -> str:
        return self.problem.partition("_")[0]

    def faster(self, than: str, p: float = 1.0, surely: bool = False) -> bool:
        """Whether it is correct and more than p times as fast; surely: the whole interval says so."""
        interval = getattr(self, than)
        return self.outcome == "correct" and bool(interval) and interval[0 if surely else 1] > p


def score(path: Path, judge: Judge, options: argparse.Namespace) -> Score:
    started, backend = time.perf_counter(), options.backend or default_backend(options.device)
    about = {"machine": judge.device.name, "versions": f"torch {torch.__version__}"}
    names = bridge.name_of(path), path.stem
    try:
        setup = bridge.set_up(path, backend, options.device, bridge.limit_of(options))
        weak = tuple(weaknesses(setup.problem, options.device))
    except (NotJudged, torch.OutOfMemoryError) as reason:
        why = str(reason) if isinstance(reason, NotJudged) else "a pass needs more memory than the device has"
        return Score(*names, "not judged", why, seconds=time.perf_counter() - started, **about)
    about |= {"sizes": setup.problem.reduced or "as published", "weak": weak}
    if setup.rewriting:
        about |= {"kernels": tuple(s.kernel_type for s in setup.rewriting.sites), "left": setup.rewriting.left()}
    answer = options.answers and options.answers / f"{setup.problem.name}.py"
    if any(reason.startswith("draws random") for reason in weak):
        result = {"outcome": "not judged", "why": "its reference draws random numbers"}
    elif answer and answer.is_file():
        source = complete(answer.read_text(), setup.problem.name, backend)
        result = _result(evaluate.judged(judge, source, setup.target, options))
    elif answer or not setup.rewriting:
        result = {"outcome": "no kernel", "why": f"there is no {answer.name}" if answer else setup.why}
    else:
        source = _tuned(setup, judge, options) if options.experiments else setup.source
        result = _result(evaluate.judged(judge, source, setup.target, options))
    return Score(*names, **about, **result, seconds=time.perf_counter() - started)


def within(limit_s: int, path: Path, judge: Judge, options: argparse.Namespace) -> Score:
    """The score, or that it was not to be had in time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        return score(path, judge, options)
    except TimeoutError:
        why = f"not scored within {limit_s} s"
        return Score(bridge.name_of(path), path.stem, "not judged", why, seconds=limit_s)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if torch.cuda.is_initialized():  # the next problem's processes need it
            torch.cuda.empty_cache()


def _tuned(setup: Setup, judge: Judge, options: argparse.Namespace) -> str:
    from autokernel.kernelbench.loop import best

    return best(setup, judge, "tuner", options.experiments, say=lambda line: print(f"    {line}", file=sys.stderr))


def _result(verdict: Verdict) -> dict[str, object]:
    outcome = (
        "undecided"
        if verdict.correctness == "PASS" and verdict.undecided
        else "correct"
        if verdict.correctness == "PASS"
        else "refused"
    )

    def bounds(interval):
        return (interval.low, interval.value, interval.high) if interval else ()

    speeds = {"eager": bounds(verdict.speedup_vs_pytorch), "compiled": bounds(verdict.speedup_vs_compile)}
    return {"outcome": outcome, "why": verdict.why, "latency_us": verdict.latency_us, **speeds}


def read(path: Path) -> list[Score]:
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    return [Score(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]


def report(scores: Sequence[Score]) -> str:
    """fast_p and the honest columns by level, then a row for every problem."""
    levels = sorted({s.level for s in scores})
    groups = [(level, [s for s in scores if s.level == level]) for level in levels]
    groups += [("all", scores)] if len(levels) > 1 else []
    places = ", ".join(sorted({f"{s.machine} ({s.versions}, {s.day})" for s in scores if s.machine}))
    lines = [f"KernelBench on {places}. {ABOUT}", ""]
    lines += [f"| | {' | '.join(COLUMNS)} |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for name, group in groups:
        count = Counter(s.outcome for s in group)
        judged = len(group) - count["not judged"] - count["no kernel"]
        faster = [sum(s.faster(than, surely=True) for s in group) for than in ("eager", "compiled")]
        cells = [len(group), judged, count["correct"], *faster, count["undecided"], count["refused"], count["no kernel"]]
        cells.append(count["not judged"])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {sum(bool(s.weak) for s in group)} |")
    if any(s.eager for s in scores):
        lines += ["", "| fast_p | " + " | ".join(f"{p:g}" for p in P) + " |", "|---" + "|--:" * len(P) + "|"]
        for name, group in groups:
            strong = [s for s in group if not s.weak]
            lines.append(_fast_row(name, group, lambda s, p: s.faster("eager", p)))
            lines.append(_fast_row(f"{name}, interval above p", group, lambda s, p: s.faster("eager", p, surely=True)))
            lines.append(_fast_row(f"{name}, without the weak", strong, lambda s, p: s.faster("eager", p)))
    else:
        lines += ["", "Speed has not been measured: fast_p needs a run without --correctness-only on a quiet machine."]
    lines += ["", f"| {' | '.join(DETAILS)} |", "|---" * len(DETAILS) + "|"]
    for s in scores:
        kernels = f"{' '.join(s.kernels)} ({s.left})" if s.kernels else ""
        why = "" if s.outcome == "correct" else f": {s.why}"
        speeds = [_text(s.eager), _text(s.compiled)]
        cells = [f"{s.level} {s.title}", s.outcome + why, kernels, *speeds, s.sizes, "; ".join(s.weak)]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def _fast_row(name: str, group: Sequence[Score], faster: Callable[[Score, float], bool]) -> str:
    shares = [f"{sum(faster(s, p) for s in group) / max(len(group), 1):.3f}" for p in P]
    return f"| {name} ({len(group)}) | {' | '.join(shares)} |"


def _text(interval: Sequence[float]) -> str:
    return f"{interval[1]:.2f}x [{interval[0]:.2f}, {interval[2]:.2f}]" if interval else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--level", type=count, help="1 to 4 in KernelBench itself")
    parser.add_argument("--problems", help="numbers in the level, such as 1,5,9 (default: all)")
    parser.add_argument("--answers", type=Path, metavar="DIR", help="of ModelNews, as level1_23.py (default: our own)")
    parser.add_argument(
        "--experiments", type=count_or_none, default=0, help="of the tuner, on top of our own (default: none)"
    )
    parser.add_argument(
        "--limit", type=count, default=900, metavar="SECONDS", help="for one problem (default: %(default)s)"
    )
    parser.add_argument("--record", type=Path, help="default: benchmarks/kernelbench-<kind of device>.json")
    parser.add_argument("--resume", action="store_true", help="leave what is in the record as it is, score the rest")
    parser.add_argument("--report", action="store_true", help="score nothing: print what is recorded")
    parser.add_argument("--json", action="store_true", help="the record instead of tables")
    bridge.add_source_arguments(parser)
    evaluate.add_gate_arguments(parser)
    options = parser.parse_args(argv)
    console.settle_device(options, parser)
    record = options.record or RECORDS / f"kernelbench-{options.device.partition(':')[0]}.json"
    scores = {s.problem: s for s in read(record)}
    if not options.report:
        if options.level is None:
            parser.error("which --level?")
        files = bridge.level_files(bridge.repository(options.repo_path), options.level)
        wanted = {int(n) for n in options.problems.split(",")} if options.problems else None
        files = [f for f in files if wanted is None or bridge.number_of(f) in wanted]
        files = [f for f in files if not (options.resume and bridge.name_of(f) in scores)]
        with Judge(options.device) as judge, console.progress(f"level {options.level}", len(files)) as step:
            for path in files:
                result = within(options.limit, path, judge, options)
                scores[result.problem] = result
                order = sorted(scores.values(), key=lambda s: (s.level, int(s.problem.rpartition("_")[2] or 0)))
                write_json(record, [encode(s) for s in order])
                step(f"{result.problem} {result.title}: {result.outcome} {result.why} ({result.seconds:.0f} s)")
    ordered = sorted(scores.values(), key=lambda s: (s.level, int(s.problem.rpartition("_")[2] or 0)))
    print(json.dumps([encode(s) for s in ordered], indent=1) if options.json else report(ordered))


if __name__ == "__main__":
    raise SystemExit(script(main))
