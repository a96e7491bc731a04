"""`orchestrate.py status` and `runs`: without PyTorch, whose import takes long; with it where runs are compared."""

from collections.abc import Sequence

from autokernel.cli.arguments import Parser, tag
from autokernel.history.status import runs, status
from autokernel.preflight import HOME
from autokernel.records import json_text


def main(words: Sequence[str]) -> None:
    """Print what `status` or `runs` is asked for."""
    parser = Parser(prog="orchestrate.py")
    commands = parser.add_subparsers(dest="command")
    for name in ("status", "runs"):
        commands.add_parser(name).add_argument("--json", action="store_true", help="for programs")
    commands.choices["status"].add_argument("--tag", type=tag, help="the run's name (default: the latest)")
    commands.choices["runs"].add_argument("tags", type=tag, nargs="*", metavar="TAG", help="compare these")
    given = parser.parse_args(words)
    if given.command == "runs" and given.tags:
        from autokernel.report.tables import compare, compared

        print(json_text(compare(HOME, given.tags)) if given.json else compared(HOME, given.tags))
        return
    print(status(HOME, given.tag, given.json) if given.command == "status" else runs(HOME, given.json))
