"""AutoKernel as an MCP server over stdio: a coding agent in any client lists targets, reads, proposes edits, gets verdicts.

Usage:
    autokernel mcp                             started by a client: its configuration stands in docs/agents.md

Reads:  the runs, program.md and playbook/
Writes: what `autokernel record` does, for each proposal: a commit, a ref, a row of results.tsv; start_run a profile and
        a plan. stdout is the protocol's (the mcp package diverts what else is printed to stderr).
"""

import argparse
from collections.abc import Sequence

from autokernel.cli.arguments import Parser
from autokernel.preflight import IN_CLONE, check_installed, make_home


def make_parser() -> argparse.ArgumentParser:
    return Parser(__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    make_parser().parse_args(argv)
    check_installed()
    from autokernel.cli.mcp_tools import server  # here: it says what is missing

    if not IN_CLONE:
        make_home()
    server.run("stdio")
