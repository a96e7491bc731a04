"""Print a script by which a shell completes the commands of autokernel and their options.

Usage:   autokernel completion bash > ~/.local/share/bash-completion/completions/autokernel
         autokernel completion zsh > "${fpath[1]}/_autokernel"

Reads and writes nothing; made by shtab from the commands' own parsers.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module

import shtab

from autokernel.cli.arguments import Parser
from autokernel.common.preflight import OF_A_RUN


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    shell = make_parser().parse_args(argv).shell
    print(shtab.complete(whole(), shell))


def whole() -> argparse.ArgumentParser:
    """One parser with every command's options."""
    from autokernel.cli.main import COMMANDS

    parser = argparse.ArgumentParser(prog="autokernel")
    commands = parser.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        made = import_module(f"autokernel.cli.{command.module}").make_parser()
        if name in OF_A_RUN:
            made = next(a for a in made._actions if a.dest == "command").choices[name]
        commands.add_parser(name, parents=[made], add_help=False, help=command.what)
    return parser
