"""The whole job: profile a model, optimise its costly operations experiment by experiment, verify them in it, report.

Usage:
    python orchestrate.py                                     compact LLaMA, the default agent, a few minutes
    python orchestrate.py --hours 8 --model models/gpt2.py --class-name GPT2 --input-shape 1,1024
    python orchestrate.py status | next | plan | report | log [--all] | record [FILE] | clean TAG
    python orchestrate.py merge [--to DIR]                    the verified winners as a package, committed on your branch

Reads:  the model; program.md (for agents); workspace/<tag>/ and git, to go on where a run stopped
Writes: workspace/<tag>/ (profile.json, plan.json, tree/, report.html, report.md, progress.png), branch autokernel/<tag>,
        refs/autokernel/<tag>/<n>, results.tsv. Only `merge` touches your checkout and branch: it adds DIR to them.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from autokernel import status
from autokernel.preflight import check_installed
from autokernel.supervisor import AGAIN, NOTES, Supervisor

COMMANDS = ("run", "status", "next", "record", "plan", "report", "log", "merge", "clean")


def make_parser() -> argparse.ArgumentParser:
    from autokernel.cli import add_device_argument, add_sandbox_argument
    from autokernel.workload import add_workload_arguments

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="|".join(COMMANDS))
    run = commands.add_parser("run", help="the whole job (the default)")
    run.add_argument(
        "--minutes", type=float, help="time for the loop (default: 3, and at least 10 experiments after the starters)"
    )
    run.add_argument("--hours", type=float, help="the same in hours")
    run.add_argument("--experiments", type=int, help="stop after so many")
    run.add_argument("--agent", help="tuner, claude, 'command: …', tuner,claude (default: claude with a key, else tuner)")
    run.add_argument("--agent-model", default="", help="of the claude agent (default: the newest Opus that its SDK knows)")
    run.add_argument("--budget-usd", type=float, default=10.0, help="spending cap of claude (default: %(default)s)")
    run.add_argument("--budget-tokens", type=int, metavar="N", help="cap on its tokens, in and out (default: none)")
    run.add_argument("--max-tokens", type=int, default=32_000, metavar="N", help="of one answer (default: %(default)s)")
    run.add_argument("--agent-minutes", type=float, default=15, metavar="M", help="for one edit of a command (%(default)s)")
    run.add_argument("--top", type=int, default=5, help="how many targets (default: %(default)s)")
    run.add_argument("--max-reverts", type=int, default=5, help="move on after so many in a row (default: %(default)s)")
    run.add_argument("--max-pct-peak", type=float, default=90.0, help="move on at this part of the limit (%(default)s)")
    run.add_argument("--max-hours", type=float, default=2.0, help="move on after so long on one (default: %(default)s)")
    run.add_argument("--max-speedup", type=float, default=2.0, help="move on at this gain over the starter (%(default)s)")
    run.add_argument("--kernelbench", metavar="LEVEL[:PROBLEM]", help="work on KernelBench instead of a model")
    run.add_argument("--repo-path", type=Path, help="the clone of KernelBench (default: $KERNELBENCH, or what was fetched)")
    record = commands.add_parser("record", help="judge an edited kernel file and log the experiment")
    record.add_argument("file", nargs="?", type=Path, help="default: the kernel.py of the run's tree")
    record.add_argument("--target", help="of the plan (default: the one whose kernel type the file has)")
    record.add_argument("-m", "--hypothesis", default="edited by hand", help="what changed and what you expect of it")
    log = commands.add_parser("log", help="the experiments that were kept")
    log.add_argument("--all", action="store_true", help="everything that was tried")
    merge = commands.add_parser("merge", help="the verified winners as a package, committed on your branch")
    merge.add_argument(
        "--to", type=Path, metavar="DIR", help="of the package (default: kernels_<tag>); its name is imported"
    )
    for name, what in {
        "status": "where the run stands",
        "next": "the next target, and why",
        "plan": "the targets and their shares",
        "report": "write report.html, report.md and progress.png again, print the summary",
    }.items():
        commands.add_parser(name, help=what)
    clean = commands.add_parser("clean", help="remove a run: branch, refs, worktree and folder")
    clean.add_argument("tag", metavar="TAG")
    for name, command in commands.choices.items():
        if name != "clean":
            command.add_argument("--tag", help="the run's name (default: the latest, for `run` the latest unfinished)")
        if name in ("status", "next", "plan", "log"):
            command.add_argument("--json", action="store_true", help="for programs")
    add_workload_arguments(run)
    for command in (run, record):
        add_device_argument(command)
        add_sandbox_argument(command)
    return parser


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] not in (*COMMANDS, "-h", "--help"):
        words = ["run", *words]
    if words[0] == "status":
        status.main(words[1:])
    elif words[0] == "run" and NOTES not in os.environ:
        check_installed()  # not in the child, whose Python has all that is installed
        root = Path(__file__).resolve().parent
        raise SystemExit(Supervisor([sys.executable, __file__, *words], root / "results.tsv").run())
    else:
        act(words)


def act(words: list[str]) -> None:
    from autokernel import cli, commands  # cli first: it says what is missing
    from autokernel.gate.sandbox import SandboxIncomplete
    from autokernel.machine import MachineFault
    from autokernel.workload import WorkloadError
    from autokernel.workspace import NoRun, RunInProgress

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the loop knows better while it runs
    arguments = make_parser().parse_args(words)
    try:
        print(getattr(commands, arguments.command)(arguments))
    except (NoRun, RunInProgress, SandboxIncomplete, WorkloadError) as error:
        cli.fail(error)
    except MachineFault as fault:
        print(fault, file=sys.stderr)
        raise SystemExit(AGAIN) from None
    except KeyboardInterrupt:
        print("stopped at once; what was judged is kept, and the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
