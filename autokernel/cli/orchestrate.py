"""The whole job: profile a model, optimise its costly operations experiment by experiment, verify them in it, report.

Usage:
    python orchestrate.py                                     compact LLaMA, the default agent, a few minutes
    python orchestrate.py --hours 8 --model models/gpt2.py --class-name GPT2 --input-shape 1,1024
    python orchestrate.py --agent claude --budget-usd 5       another agent; the same command goes on where a run stopped
    python orchestrate.py --hours 8 --workers auto            a timing worker on each GPU (pip install -e '.[ray]')
    python orchestrate.py runs                                which runs there are
    python orchestrate.py status | next | plan | report | log [--all] | record [FILE] | clean TAG
    python orchestrate.py merge [--to DIR]                    the verified winners as a package, committed on your branch

Reads:  the model; program.md (for agents); workspace/<tag>/ and git, to go on where a run stopped
Writes: workspace/<tag>/ (profile.json, plan.json, tree/, report.html, report.md, progress.png, traces/), results.tsv,
        branch autokernel/<tag>, refs/autokernel/<tag>/<n>. Only `merge` touches your checkout and branch: it adds DIR.
"""

import argparse
import difflib
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autokernel.cli.arguments import (
    INTERRUPTED,
    YEAR_H,
    Parser,
    count,
    count_or_none,
    named_path,
    nonnegative,
    number,
    positive,
    tag,
    workers,
)
from autokernel.cli.signals import RunStopped
from autokernel.common.preflight import HOME, Refused, as_called, called_as_we_are, known_agents, named
from autokernel.hardware.processes import STATE
from autokernel.run.supervisor import AGAIN, Supervisor

COMMANDS = {
    "run": "the whole job (the default: its options are those below)",
    "status": "where a run stands",
    "runs": "which runs there are",
    "next": "the next target, and why",
    "plan": "the targets and their shares",
    "record": "judge an edited kernel file and log the experiment",
    "report": "write report.html, report.md and progress.png again, print the summary",
    "log": "the experiments that were kept",
    "merge": "the verified winners as a package, committed on your branch",
    "clean": "remove a run: branch, refs, worktree and folder",
}
EXAMPLES = {
    "run": "python orchestrate.py --hours 8 --model models/gpt2.py --class-name GPT2 --input-shape 1,1024",
    "status": "python orchestrate.py status --json",
    "runs": "python orchestrate.py runs\n          python orchestrate.py runs TAG OTHER_TAG",
    "next": "python orchestrate.py next --tag TAG",
    "plan": "python orchestrate.py plan --json",
    "record": "python orchestrate.py record kernel.py -m 'UNROLL 4 -> 8: more loads in flight, 3 %'",
    "report": "python orchestrate.py report --tag TAG",
    "log": "python orchestrate.py log --all",
    "merge": "python orchestrate.py merge --to fast_llama",
    "clean": "python orchestrate.py clean TAG",
}
QUICK = ("next", "plan", "clean")  # in plan.py; of the others most are in commands.py

DEFAULT_MINUTES, DEFAULT_EXPERIMENTS = 3, 1  # the latter at least, and beside those that judge the starters


def make_parser() -> Parser:
    from autokernel.common.console import add_device_argument, add_sandbox_argument

    parser = Parser(__doc__, usage="python orchestrate.py [COMMAND] [OPTIONS], COMMAND --help for those of a command")
    add_run_arguments(parser)  # to be shown: what is parsed always begins with a command
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", prog="orchestrate.py")
    made = {name: commands.add_parser(name, help=what, description=taught(name)) for name, what in COMMANDS.items()}
    add_run_arguments(made["run"])
    record, log, merge = made["record"], made["log"], made["merge"]
    record.add_argument("file", nargs="?", type=named_path, help="default: the kernel.py of the run's tree")
    record.add_argument("--target", type=named, help="of the plan (default: the one whose kernel type the file has)")
    record.add_argument("-m", "--hypothesis", default="edited by hand", help="what changed and what you expect of it")
    add_device_argument(record)
    add_sandbox_argument(record)
    log.add_argument("--all", action="store_true", help="everything that was tried")
    merge.add_argument(
        "--to",
        type=named_path,
        metavar="DIR",
        help="of the package (default: kernels_<tag>); its name is imported",
    )
    which = made["clean"].add_mutually_exclusive_group()
    which.add_argument("tag", nargs="?", type=tag, metavar="TAG", action=IfGiven)
    which.add_argument("--tag", type=tag, help="the same, as other commands have it")
    made["clean"].add_argument("--json", action="store_true", help="for programs")
    for name in ("next", "plan", "record", "report", "log", "merge"):
        made[name].add_argument("--tag", type=tag, help="the run's name (default: the latest)")
    for name in ("next", "plan", "log", "record", "report", "merge"):
        made[name].add_argument("--json", action="store_true", help="for programs")
    return parser


class IfGiven(argparse.Action):
    """Of an argument that is an option as well: argparse would put the default of the one in the place of the other."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None) -> None:
        if values is not None:
            setattr(namespace, self.dest, values)


def taught(command: str) -> str:
    """What the help of a command begins with: what it is for, and an example."""
    return f"{COMMANDS[command]}\n\nExample:  {EXAMPLES[command]}"


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    from autokernel.common.console import add_device_argument, add_sandbox_argument
    from autokernel.model.options import add_workload_arguments

    add_workload_arguments(run)
    add_device_argument(run)
    time = run.add_argument_group("budget").add_mutually_exclusive_group()
    time.add_argument(
        "--minutes",
        type=number(most=60 * YEAR_H),
        help=f"time for the loop (default: {DEFAULT_MINUTES}, and {DEFAULT_EXPERIMENTS} experiment after the starters)",
    )
    time.add_argument("--hours", type=number(most=YEAR_H), help="the same in hours")
    run.add_argument("--experiments", type=count_or_none, metavar="N", help="stop after so many")
    run.add_argument("--tag", type=tag, help="the run's name (default: the latest unfinished one of this model)")
    run.add_argument("--top", type=count, default=5, metavar="N", help="how many targets (default: %(default)s)")
    run.add_argument("--json", action="store_true", help="for programs: what came of it as one JSON object on stdout")
    add_sandbox_argument(run, workers=True)
    many = run.add_argument_group("many workers, on Ray")
    many.add_argument(
        "--workers",
        type=workers,
        metavar="N",
        help="judge on so many GPUs, or parts of the CPU, at once; auto: every GPU, or every node's CPU (default: no Ray)",
    )
    many.add_argument(
        "--ray-address",
        type=named,
        metavar="ADDRESS",
        help="of a running cluster: auto, for one that this machine belongs to, or that of its head, HOST:6379 (default: "
        "start Ray on this machine alone, and end it with the run)",
    )
    agent = run.add_argument_group("agent")
    agent.add_argument(
        "--agent",
        type=named,
        help=f"{', '.join(known_agents())}, 'command: …', or several: tuner,claude. starters: no experiments (default: "
        "claude with a key, else tuner)",
    )
    agent.add_argument("--agent-model", default="", help="of claude (default: the newest Opus its SDK knows) or openai")
    agent.add_argument(
        "--agent-url", default="", metavar="URL", help="of openai: http://localhost:8000/v1 (default: OpenAI's own)"
    )
    agent.add_argument(
        "--price-in", type=nonnegative, metavar="USD", help="of openai's model, a million tokens that it reads"
    )
    agent.add_argument("--price-out", type=nonnegative, metavar="USD", help="or writes (default: 0 of a local server's)")
    agent.add_argument(
        "--budget-usd", type=nonnegative, default=10.0, help="spending cap of claude or openai (default: %(default)s)"
    )
    agent.add_argument("--budget-tokens", type=count, metavar="N", help="cap on their tokens, in and out (default: none)")
    agent.add_argument("--max-tokens", type=count, default=32_000, metavar="N", help="of one answer (default: %(default)s)")
    agent.add_argument(
        "--agent-minutes",
        type=number(above=0.0, most=60 * YEAR_H),
        default=15,
        metavar="M",
        help="for one edit of a command (default: %(default)s)",
    )
    rules = run.add_argument_group("a target is left")
    rules.add_argument("--max-reverts", type=count, default=5, help="after so many in a row (default: %(default)s)")
    rules.add_argument(
        "--max-pct-peak", type=positive, default=90.0, help="at so many %% of its limit (default: %(default)s)"
    )
    rules.add_argument("--max-hours", type=positive, default=2.0, help="after so many hours on it (default: %(default)s)")
    rules.add_argument(
        "--max-speedup", type=positive, default=2.0, help="at so many times its starter's speed (default: %(default)s)"
    )
    bench = run.add_argument_group("KernelBench")
    bench.add_argument(
        "--kernelbench", type=named, metavar="LEVEL[:PROBLEM]", help="work on KernelBench instead of a model"
    )
    bench.add_argument("--repo-path", type=named_path, help="its clone (default: $KERNELBENCH, or what was fetched)")


def main(argv: Sequence[str] | None = None) -> int | None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        if Path(words[0]).suffix == ".py":
            raise Refused(f"a model's file is given with --model {words[0]} --class-name NAME")
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        raise Refused(
            f"there is no command {words[0]!r}{f', did you mean {near[0]}?' if near else ''}: "
            f"the commands are {', '.join(COMMANDS)}"
        )
    if not words or words[0] not in (*COMMANDS, "-h", "--help", "--version"):
        words = ["run", *words]
    if words[0] in ("status", "runs", "log"):
        from autokernel.cli import status

        return status.main(words, {name: taught(name) for name in COMMANDS})
    if words[0] == "run" and STATE not in os.environ:
        from autokernel.build import default_cache

        folders = [Path(tempfile.gettempdir()), default_cache()]
        command = [*called_as_we_are("orchestrate", "optimize"), *words]
        return Supervisor(command, HOME / "results.tsv", folders=folders).run()
    return act(words)


def act(words: list[str]) -> int | None:
    from autokernel.common import console

    parser = make_parser()
    arguments = parser.parse_args(words)  # before what takes seconds to import
    commands = importlib.import_module(f"autokernel.cli.{'plan' if arguments.command in QUICK else 'commands'}")
    from autokernel.gate.workers.sandbox import SandboxIncomplete
    from autokernel.hardware.machine import MachineFault

    if "device" in arguments:
        console.settle_device(arguments, parser)
    try:
        print(as_called(getattr(commands, arguments.command)(arguments)))
    except SandboxIncomplete as error:
        console.fail(error)
    except MachineFault as fault:
        print(fault, file=sys.stderr)
        return AGAIN
    except RunStopped as stopped:
        print(as_called(str(stopped)))
        return stopped.status
    except KeyboardInterrupt as stopped:
        print("stopped at once; what was judged is kept, and the same command goes on from here", file=sys.stderr)
        return getattr(stopped, "status", INTERRUPTED)
    return None
