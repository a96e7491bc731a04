"""The MCP server, as a client over stdio meets it: its tools on a run in a clone, and a proposal through the whole gate."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from autokernel.agents.toolbox import READ
from autokernel.history.experiments import ExperimentLog
from autokernel.spec import ROOT
from autokernel.target import starter_source
from tests.small_clone import TARGET, clone_this, make_night

STARTER = starter_source(TARGET)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A clone with the run `night`: its starter, one experiment that was kept, one that failed."""
    root = tmp_path_factory.mktemp("mcp") / "clone"
    clone_this(root)
    make_night(root)
    return root


def session(root: Path, script: Callable[[Client], Awaitable[None]], errors: Path) -> None:
    """Run a client's script against a server of its own, as a client starts one."""
    environment = {"PYTHONPATH": str(root), "HOME": os.environ["HOME"], "PATH": os.environ["PATH"]}
    environment["TMPDIR"] = str(errors.parent)  # whose experiments wait for no other run's on this machine
    server = StdioServerParameters(command=sys.executable, args=["-m", "autokernel", "mcp"], cwd=root, env=environment)

    async def run() -> None:
        with open(errors, "w") as errlog:
            async with Client(stdio_client(server, errlog)) as client:
                await script(client)

    anyio.run(run)


async def answer(client: Client, tool: str, **given: Any) -> Any:
    result = await client.call_tool(tool, given)
    assert not result.is_error, result.content
    structured = result.structured_content
    return structured["result"] if set(structured) == {"result"} else structured


async def refusal(client: Client, tool: str, **given: Any) -> str:
    result = await client.call_tool(tool, given)
    assert result.is_error
    return result.content[0].text


MISUSE = (
    ("list_targets", {"run": 5}, "list_targets: `run` should be a valid string, not 5"),
    ("read_history", {}, "read_history: `target` is missing"),
    ("read_history", {"target": "x", "last": "x"}, "`last` should be a valid integer, not 'x'"),
    (
        "read",
        {"topic": 1, "target": []},
        "`topic` should be a valid string, not 1; `target` should be a valid string, not []",
    ),
    ("start_run", {"run": "new", "options": ["--model", "x.py"]}, "autokernel profile: there is no file x.py"),
    ("start_run", {"run": "new", "options": "--model x"}, "`options` should be a valid list"),
    ("bench", {"source": STARTER, "targt": "x"}, "bench has no argument 'targt'; it takes source, "),
    ("bench", {"source": STARTER, "target": "x", "run": "hand"}, "there is no target 'x' where there is no run"),
    ("bench", {"source": "a\nb("}, "the source is not Python: '(' was never closed, line 2"),
    ("nothing", {}, "there is no tool 'nothing'; there are: list_runs"),
)


def test_a_source_that_is_no_unicode_is_answered(root, tmp_path):
    """As JSON has it: half of a surrogate pair, with which the mcp package reads no message at all."""
    environment = os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-m", "autokernel", "mcp"], cwd=root, env=environment, **pipes, text=True)
    who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    asked = [{"id": 0, "method": "initialize", "params": who}, {"method": "notifications/initialized"}]
    for number, source in enumerate(("x = '\ud800\0'", "\udc00", "a\u20ac\U0001f600("), 1):
        call = {"name": "bench", "arguments": {"source": source}}
        asked.append({"id": number, "method": "tools/call", "params": call})
    server.stdin.writelines(json.dumps({"jsonrpc": "2.0"} | message) + "\n" for message in asked)
    server.stdin.flush()
    watch = threading.Timer(60, server.kill)
    watch.start()
    answers = [json.loads(server.stdout.readline() or "null") for _ in range(4)]
    watch.cancel()
    server.communicate()
    texts = {a["id"]: a["result"]["content"][0]["text"] for a in answers if a and a["id"]}
    assert sorted(texts) == [1, 2, 3] and all("the source is not Python: " in text for text in texts.values()), answers
    assert all(word in texts[i] for i, word in ((1, "null bytes"), (2, "U+FFFD"), (3, "U+20AC"))), texts


def test_a_client_lists_tools_and_reads_a_run(root, tmp_path):
    async def script(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"list_runs", "list_targets", "read_history", "read_kernel", "read", "bench", "propose", "start_run"} == set(
            tools
        )
        assert all(topic in tools["read"].description for topic in ("rules", *READ))
        assert "context" not in tools["propose"].input_schema["properties"]
        (run,) = await answer(client, "list_runs")
        assert (run["tag"], run["experiments"], run["kept"]) == ("night", 2, 1)
        listed = await answer(client, "list_targets")
        (target,) = listed["targets"]
        assert (listed["run"], target["target"], listed["next"]) == ("night", TARGET.name, TARGET.name)
        assert (target["incumbent"], target["experiments"], target["kept"]) == (2, 2, 1) and "512" in target["shapes"][0]
        kernel = await answer(client, "read_kernel", target=TARGET.name)
        assert kernel == {"run": "night", "target": TARGET.name, "experiment": 2, "source": f"{STARTER}# 2\n"}
        start, kept, failed = await answer(client, "read_history", target=TARGET.name)
        assert (start["agent"], kept["status"], failed["description"]) == ("starter", "kept", "too bold")
        assert not start["diff"] and "\n-# 2\n+# 3" in failed["diff"] and "\n-# 1\n+# 2" in kept["diff"]
        assert "## The rules" in await answer(client, "read", topic="rules", target=TARGET.name)
        assert "def rmsnorm(" in await answer(client, "read", topic="oracle", target=TARGET.name)
        assert "# Tier 2" in await answer(client, "read", topic="playbook", name="2", target=TARGET.name)
        program = (await client.read_resource("autokernel://program")).contents[0].text
        assert program == (ROOT / "program.md").read_text()
        assert "# Tier 3" in (await client.read_resource("autokernel://playbook/3")).contents[0].text
        with pytest.raises(MCPError, match="no tier 99; there are 1 to 6"):
            await client.read_resource("autokernel://playbook/99")
        assert "there are: rmsnorm" in await refusal(client, "read_kernel", target="gelu")
        assert "no run named 'day'" in await refusal(client, "list_targets", run="day")
        assert "is no name of a run" in await refusal(client, "list_targets", run="../day")
        assert "nothing to read" in await refusal(client, "read", topic="weather", target=TARGET.name)
        assert "not Python" in await refusal(client, "propose", source="def (", description="less syntax")
        assert "sets no KERNEL_TYPE: add the line" in await refusal(client, "bench", source="x = 1\n")
        assert "there is a run 'night'" in await refusal(client, "start_run", run="night", options=[])
        for words in (["--tag", "other"], ["--output=/tmp/x"], ["--export-trace", "x"]):
            assert "is not for start_run" in await refusal(client, "start_run", run="new", options=words)
        for tool, given, says in MISUSE:
            said = await refusal(client, tool, **given)
            assert says in said and "\n" not in said and "pydantic" not in said, said
        assert "`description` is empty" in await refusal(client, "propose", source=STARTER, description=" ")

    session(root, script, tmp_path / "stderr")
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_a_proposal_is_judged_logged_and_told(root, tmp_path):
    """A wrong edit and one that changes nothing; what the kernel prints does not reach the protocol."""
    wrong = STARTER.replace("return v * scale * w", "return v * scale")
    prints = STARTER.replace("    return y\n", "    print('{', flush=True)\n    return y\n")
    assert wrong != STARTER != prints
    steps: list[str] = []

    async def told(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message or "")

    async def script(client: Client) -> None:
        looked = await answer(client, "bench", source=wrong)
        assert looked["correctness"] == "FAIL" and looked["failure"]["stage"] == "smoke_test" and not looked["keep"]
        given = {"source": wrong, "description": "one factor less\nis faster"}
        result = await client.call_tool("propose", given, progress_callback=told)
        verdict = result.structured_content
        assert (verdict["experiment"], verdict["status"], verdict["kept"], verdict["incumbent"]) == (4, "failed", False, 2)
        assert "smoke_test" in verdict["gate"] and any("smoke_test" in step for step in steps)
        same = await answer(client, "propose", source=prints, description="the same, and it prints")
        assert same["experiment"] == 5 and same["status"] in ("reset", "undecided") and same["correctness"] in ("PASS", "")
        profile = await answer(client, "read", topic="profile", target=TARGET.name)
        assert "CPU" in profile
        history = await answer(client, "read_history", target=TARGET.name, last=2)
        assert [past["experiment"] for past in history] == [4, 5] and "-" in history[0]["diff"]

    session(root, script, tmp_path / "stderr")
    rows = ExperimentLog(root / "results.tsv").read()
    assert [(row.experiment, row.agent) for row in rows[-2:]] == [(4, "mcp"), (5, "mcp")]
    assert rows[-2].description == "one factor less is faster"


WAITING = """
import os, sys
import anyio
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

async def told(progress, total, message):
    print(message, flush=True)

async def propose():
    server = StdioServerParameters(command=sys.executable, args=["-m", "autokernel", "mcp"], env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        print(*open(f"/proc/self/task/{os.getpid()}/children").read().split(), flush=True)
        given = {"source": sys.stdin.read(), "description": "it waits"}
        await client.call_tool("propose", given, progress_callback=told)

anyio.run(propose)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the server's process is found in /proc")
def test_a_server_whose_client_was_killed_does_not_wait_for_the_device(root, tmp_path):
    """Another run has the device; the experiment that waits for it would go on when it is free."""
    environment = os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    with open(tmp_path / "autokernel-turn-cpu", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        client = subprocess.Popen(
            [sys.executable, "-c", WAITING],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        client.stdin.write(f"{STARTER}# waits\n")
        client.stdin.close()
        server = int(client.stdout.readline())
        assert any("waiting for cpu" in line for line in client.stdout)
        assert alive(server)
        client.send_signal(signal.SIGKILL)
        client.wait()
        deadline = time.monotonic() + 30
        while alive(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = alive(server)
        if left:
            os.kill(server, signal.SIGKILL)
        assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_its_package_the_server_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mcp'] = None\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-m", "autokernel", "mcp"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pip install -e '.[mcp]'" in done.stderr
