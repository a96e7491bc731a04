"""AutoKernel as an MCP server over stdio: a coding agent in any client lists targets, reads, proposes edits, gets verdicts.

Usage:
    autokernel mcp                             started by a client: its configuration stands in docs/agents.md

Reads:  the runs, program.md and playbook/
Writes: what `autokernel record` does, for each proposal: a commit, a ref, a row of results.tsv; start_run a profile and
        a plan. stdout is the protocol's (the mcp package diverts what else is printed to stderr).
"""

import argparse
import json
import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress

from autokernel.cli.arguments import Parser
from autokernel.common.preflight import IN_CLONE, check_installed, make_home


def make_parser() -> argparse.ArgumentParser:
    return Parser(__doc__)


def main(argv: Sequence[str] | None = None) -> None:
    make_parser().parse_args(argv)
    check_installed()
    from autokernel.cli.mcp_tools import server  # here: it says what is missing

    if not IN_CLONE:
        make_home()
    answers = os.dup(1)  # number 1 becomes stderr's while the server runs
    threading.Thread(target=end_without_reader, args=(answers,), daemon=True).start()
    requests, passed_on = os.dup(0), os.pipe()
    os.dup2(passed_on[0], 0)
    os.close(passed_on[0])
    threading.Thread(target=pass_on, args=(requests, passed_on[1]), daemon=True).start()
    server.run("stdio")


def pass_on(requests: int, to: int) -> None:
    """What a client writes, line by line, to the mcp package, which leaves a message unanswered that is no Unicode."""
    with suppress(BrokenPipeError), open(requests, "rb") as lines, open(to, "wb", buffering=0) as pipe:
        for line in lines:
            pipe.write(in_unicode(line))


def in_unicode(line: bytes) -> bytes:
    """A message with U+FFFD for each half of a surrogate pair, as the mcp package has it for what is no UTF-8."""
    if b"\\ud" not in line.lower():
        return line
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False)
    except (ValueError, RecursionError):  # no JSON, which that package passes over
        return line
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode() + b"\n"


def end_without_reader(answers: int) -> None:
    """End this process when nobody can read its answers: a client that is killed leaves its experiment waiting, or at work,
    in a thread that nothing else ends. What was being judged is judged again, as after any kill."""
    watched = select.poll()
    watched.register(answers, 0)  # that the other end is closed is always told
    watched.poll()
    os._exit(1)
