"""A stranger's first judged experiment through the MCP server: a scripted client over stdio, in a clone that has no run.

Usage:   python benchmarks/mcp_session.py            (some minutes; --out FILE: elsewhere than benchmarks/transcripts/)
         python benchmarks/mcp_session.py --profile  the largest target of the compact LLaMA, profiled first
Reads:   this clone (committed files), the Python that it runs in, in which autokernel's dependencies are installed
Writes:  benchmarks/transcripts/mcp-session.txt

The client reads what the instructions say, looks at an edit, and proposes it, without a model: for the default sizes of
RMSNorm. The edit is scripted: one knob of the incumbent at another value. The clock starts where the installation ends.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autokernel.agents.knobs import read_knobs, set_knob  # noqa: E402
from autokernel.cli.arguments import version  # noqa: E402

LONGEST = 400  # characters of an answer in the transcript
OUT = ROOT / "benchmarks/transcripts/mcp-session.txt"


class Session:
    """A client that writes down what it asks, what it is answered, and when."""

    def __init__(self, client: Client, started_s: float, lines: list[str]) -> None:
        self.client, self.started_s, self.lines = client, started_s, lines

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self.started_s:6.1f} s  {text}"
        self.lines.append(line)
        print(line, flush=True)

    async def ask(self, tool: str, **given: Any) -> Any:
        shown = {k: f"({len(v.splitlines())} lines)" if k == "source" else v for k, v in given.items()}
        self.note(f"-> {tool} {shown}")
        result = await self.client.call_tool(tool, given, progress_callback=self.progress)
        assert not result.is_error, result.content
        return result.structured_content

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.note(f"   … {message}")

    def answered(self, text: object) -> None:
        words = " ".join(str(text).split())
        self.note(f"<- {words[:LONGEST]}{' …' if len(words) > LONGEST else ''}")


async def work(session: Session, profile: bool) -> None:
    """What the server's instructions tell an agent to do."""
    tools = (await session.client.list_tools()).tools
    session.answered(f"{len(tools)} tools: {', '.join(tool.name for tool in tools)}")
    listed = await (session.ask("start_run", run="first", options=[]) if profile else session.ask("list_targets"))
    run = listed["run"]
    for target in listed["targets"]:
        session.answered(f"{target['share']:.1%} {target['target']}, {len(target['shapes'])} shapes")
    name = listed["next"] if profile else "rmsnorm_default"
    session.answered(f"chosen: {name}{': ' + listed['why'] if profile else ''}")
    for topic in ("rules", "target", "oracle", "playbook"):
        session.answered((await session.ask("read", topic=topic, target=name, run=run))["result"])
    kernel = await session.ask("read_kernel", target=name, run=run)
    session.answered(kernel["source"].splitlines()[0])
    source, words = edited(kernel["source"])
    looked = await session.ask("bench", source=source, run=run, target=name)
    session.answered(f"{looked['correctness']}: {looked['why']}")
    verdict = await session.ask("propose", source=source, description=words, run=run, target=name)
    session.answered({key: value for key, value in verdict.items() if key != "gate"})
    session.answered(verdict["gate"])
    session.note("the first experiment is judged")
    history = (await session.ask("read_history", target=name, run=run))["result"]
    for past in history:
        session.answered(f"#{past['experiment']} {past['status']} {past['gain']}: {past['description']} | {past['diff']}")


def edited(source: str) -> tuple[str, str]:
    """The first knob that has another value, at that value."""
    knobs = read_knobs(source)
    name, value = next((n, v) for n, values in knobs.choices.items() for v in values if v != knobs.current[n])
    words = f"{name} {knobs.current[name]} -> {value}: another block size may fit this machine's caches better"
    return set_knob(source, name, value), words


async def main(out: Path, profile: bool) -> None:
    lines = [f"# {version()}, {os.cpu_count()} cores", f"# python {' '.join(sys.argv)}", ""]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "autokernel")
        started_s = time.monotonic()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
        words = ["-m", "autokernel", "mcp"]
        environment = dict(os.environ) | {"PYTHONPATH": str(root)}
        server = StdioServerParameters(command=sys.executable, args=words, cwd=root, env=environment)
        async with Client(stdio_client(server)) as client:
            session = Session(client, started_s, lines)
            session.note(f"connected to {client.server_info.name} {client.server_info.version}")
            await work(session, profile)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--profile", action="store_true", help="of a model first, whose largest target is worked on")
    given = parser.parse_args()
    anyio.run(main, given.out, given.profile)
