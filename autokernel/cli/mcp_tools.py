"""The tools of the MCP server: thin over autokernel.cli.by_hand, the records of runs, and the toolbox of the agents.

PyTorch is imported by the tools that need it: clients wait a few seconds only for a server to start.
"""

import difflib
import functools
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from autokernel import __version__
from autokernel.common.preflight import HOME, ROOT, Refused, installed
from autokernel.gate.source import checked_source
from autokernel.hardware.processes import die_with_parent, why_ended
from autokernel.history import status
from autokernel.history.runs import PLAN, checked_tag, no_run, run_tags

try:
    import anyio
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError
    from pydantic import ValidationError  # which comes with mcp
except ModuleNotFoundError as missing:
    raise Refused("the MCP server needs the mcp package: pip install -e '.[mcp]'") from missing

AGENT = "mcp"  # in the rows of experiments
LONGEST_PROFILE_S = 1800
LAST_LINES = 10  # of a command that failed
INSTRUCTIONS = """AutoKernel makes the costly operations of a PyTorch model faster, one experiment at a time. A strict gate
judges each edit of a kernel file: correct in five stages, and faster beyond doubt than the kernel to beat (the incumbent).

1. `list_targets`: which kernels the model's time goes to. Where there is no run: the default sizes of every kernel type;
   `start_run` profiles a model.
2. `read` "rules" once, then what you need: "target", "oracle", "playbook", "headers", "starters". `read_kernel` gives the
   incumbent, `read_history` what was tried: do not try it again.
3. Change one thing. `bench` looks at it in seconds and keeps nothing.
4. `propose` it with one line: what changes, what you expect, and why. The verdict comes back, and is logged. Kept: it is
   the new incumbent. Not kept: the incumbent stands. Then the next idea.

Experiments run one after the other and take half a minute to some minutes each: let the client wait that long.
"""
RULES = "rules"


@dataclass(frozen=True)
class ListedRun:
    """A run, as `orchestrate.py runs` lists it."""

    tag: str
    experiments: int
    kept: int
    verified: str
    changed: str
    model: str


@dataclass(frozen=True)
class TargetState:
    """A target, what its kernel gives so far, and what was tried."""

    target: str
    kernel_type: str
    backend: str
    device: str
    shapes: list[str]
    share: float  # of the model's time, 0..1
    model_time_us: float  # that a pass spends there
    baseline_us: float  # of it, what a kernel has to beat
    incumbent: int | None  # the experiment's number; None: nothing was judged yet, the starter is the kernel to beat
    latency_us: float | None
    pct_peak: float | None  # of the limit that bounds it
    speedup_vs_pytorch: float | None
    speedup_vs_starter: float | None
    experiments: int
    kept: int
    done: str  # why the loop would leave it; "": there is more to try


@dataclass(frozen=True)
class Targets:
    """The targets of a run, and which is worth most now."""

    run: str
    model: str
    model_latency_us: float
    targets: list[TargetState]
    next: str
    why: str


@dataclass(frozen=True)
class HistoryRow:
    """One experiment: what was tried, what the gate said, what was changed."""

    experiment: int
    agent: str
    description: str
    status: str
    gain: str
    latency_us: float | None
    gate: str
    diff: str
    commit: str


@dataclass(frozen=True)
class KernelFile:
    """A kernel file."""

    run: str
    target: str
    experiment: int | None  # None: the starter, which was not judged yet
    source: str


@dataclass(frozen=True)
class LoggedVerdict:
    """The verdict on a proposal, as it was logged."""

    run: str
    target: str
    experiment: int
    status: str  # kept, reset, failed, crash, timeout, undecided
    kept: bool
    correctness: str
    speedup: float | None  # over the incumbent, with its 99.8 % interval
    speedup_low: float | None
    speedup_high: float | None
    latency_us: float | None
    pct_peak: float | None
    gate: str  # the gate's words
    commit: str
    incumbent: int | None  # now
    seconds: float


# options of `autokernel profile` that name its run, or files to be written
NOT_OF_A_MODEL = ("--tag", "--output", "--export-trace", "--memory-snapshot", "--torch-compile-log", "--json")
Arguments, Answer = ParamSpec("Arguments"), TypeVar("Answer")
one_at_a_time = threading.Lock()  # what works the device


class Server(MCPServer):
    """Says in one sentence what is wrong with the arguments of a call; what it would pass over is refused, too."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context | None = None) -> Any:
        takes = {tool.name: tool.input_schema["properties"] for tool in await self.list_tools()}
        if name not in takes:
            raise ToolError(f"there is no tool {name!r}; there are: {', '.join(takes)}")
        if unknown := sorted(set(arguments) - set(takes[name])):
            raise ToolError(f"{name} has no argument {unknown[0]!r}; it takes {', '.join(takes[name]) or 'none'}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError(f"{name}: {_wrong(error.__cause__)}") from None
            raise


def _wrong(arguments: ValidationError) -> str:
    """`target` is missing; `last` should be a valid integer, not 'x'."""
    told = []
    for error in arguments.errors():
        name, what = ".".join(map(str, error["loc"])), error["msg"].partition(", unable")[0].removeprefix("Input ")
        told.append(
            f"`{name}` is missing" if error["type"] == "missing" else f"`{name}` {what}, not {error['input']!r:.60}"
        )
    return "; ".join(told)


server = Server("autokernel", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")


def tool(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Make a function a tool, in a thread of its own. What a user can mend of its errors is told to the model in a line."""

    @functools.wraps(function)
    def told(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        from autokernel.agents.toolbox import Unusable
        from autokernel.gate.workers.sandbox import SandboxIncomplete
        from autokernel.hardware.machine import MachineFault

        try:
            return function(*args, **kwargs)
        except (Refused, Unusable, SandboxIncomplete, MachineFault) as error:
            raise ToolError(" ".join(str(error).split())) from error

    return server.tool()(told)


def progress_of(context: Context) -> Callable[[str], None]:
    """A function that tells the client, from a tool's thread, what is being done."""
    told = 0

    def step(text: str) -> None:
        nonlocal told
        told += 1
        anyio.from_thread.run(context.report_progress, told, None, text)

    return step


@dataclass(frozen=True)
class View:
    """A run as it stands, or the default sizes of all kernel types where there is none; nothing is written."""

    tag: str
    plan: Any  # Plan; PyTorch is imported when a tool needs it: a client waits for the first answer
    entries: Sequence[Any]
    source_of: Callable[[str], str]

    @staticmethod
    def of(run: str | None) -> "View":
        from autokernel.cli.by_hand import usual_plan
        from autokernel.common.console import default_device

        workspace = workspace_of(run)
        plan = workspace.plan if (workspace / PLAN).is_file() else usual_plan(default_device())
        ledger = workspace.ledger
        return View(workspace.tag, plan, ledger.entries(), functools.cache(ledger.source))

    @property
    def rows(self) -> list[Any]:
        return [entry.row for entry in self.entries]

    def target(self, name: str) -> Any:
        found = next((target for target in self.plan.targets if target.name == name), None)
        if found is None:
            names = ", ".join(target.name for target in self.plan.targets)
            raise Refused(f"run {self.tag!r} has no target {name!r}; there are: {names}")
        return found

    def incumbent(self, target: Any) -> tuple[int | None, str]:
        """Its experiment's number and source, or the starter's."""
        from autokernel.history.progress import incumbent, rows_of
        from autokernel.target import starter_source

        best = incumbent(rows_of(target, self.rows))
        return (best.experiment, self.source_of(best.commit)) if best else (None, starter_source(target))

    def context(self, target: Any) -> Any:
        from autokernel.run.loop import context_of

        return context_of(target, self.entries, self.source_of, self.incumbent(target)[1])


def workspace_of(run: str | None) -> Any:
    """The Workspace of the run named, or of the latest; where there is none, of edits without a run. Raises NoRun."""
    from autokernel.cli.by_hand import HAND, run_of

    workspace = run_of(HOME, run and checked_tag(run))
    if run not in (None, HAND) and not (workspace / PLAN).is_file():
        raise no_run(HOME, run)
    return workspace


@tool
def list_runs() -> list[ListedRun]:
    """The runs of this clone, the latest first: how many experiments each has, and on which model it works."""
    return [ListedRun(**run) for run in status.listed(HOME)]


@tool
def list_targets(run: str | None = None) -> Targets:
    """The targets of a run (default: the latest): share of the model's time, baseline, incumbent, experiments; the next.

    Without any run, the default sizes of every kernel type: they can be worked on as well.
    """
    from autokernel.history.progress import Rules
    from autokernel.run.scheduler import next_target

    view = View.of(run)
    choice = next_target(view.plan, view.rows, Rules())
    states = [state_of(target, view.rows) for target in view.plan.targets]
    chosen = (choice.target.name, choice.reason) if choice else ("", "nothing is left to try on any target")
    return Targets(view.tag, view.plan.model, view.plan.model_latency_us, states, *chosen)


def state_of(target: Any, all_rows: Sequence[Any]) -> TargetState:
    from autokernel.agents.prompt import describe
    from autokernel.history.experiments import Status
    from autokernel.history.progress import Rules, incumbent, loop_gain, move_on, rows_of, tried

    rows = rows_of(target, all_rows)
    best = incumbent(rows)
    return TargetState(
        target.name,
        target.kernel_type,
        target.backend,
        target.device,
        [f"{case.case.name}: {describe(case.case.args)}; {case.calls:g} calls per pass" for case in target.cases],
        target.share,
        target.model_time_us,
        target.baseline_us,
        best and best.experiment,
        best and best.latency_us,
        best and best.pct_peak,
        best and best.speedup_vs_pytorch,
        loop_gain(rows) if best else None,
        len(tried(rows)),
        sum(row.status == Status.KEPT for row in tried(rows)),
        move_on(rows, Rules()) or "",
    )


@tool
def read_history(target: str, run: str | None = None, last: int = 20) -> list[HistoryRow]:
    """The last experiments on a target, the newest last: hypothesis, status, gain, the gate's words, and the diff."""
    view = View.of(run)
    name = view.target(target).name
    entries = [entry for entry in view.entries if entry.row.target == name]
    return [past(entry.row, entry.notes, view.source_of) for entry in entries[-max(last, 1) :]]


def past(row: Any, notes: str, source_of: Callable[[str], str]) -> HistoryRow:
    from autokernel.history.experiments import STARTER

    # Before a run's first starter the branch has the clone's kernel.py, which is of another operation.
    commits = (row.commit if row.agent == STARTER else f"{row.commit}^", row.commit)
    before, after = (source_of(commit).splitlines() for commit in commits)
    diff = "\n".join(difflib.unified_diff(before, after, "the kernel to beat", f"#{row.experiment}", lineterm="", n=2))
    known = (row.experiment, row.agent, row.description, row.status, row.gain, row.latency_us)
    return HistoryRow(*known, notes, diff, row.commit)


@tool
def read_kernel(target: str, run: str | None = None) -> KernelFile:
    """The kernel to beat on a target, the whole file: edit this."""
    view = View.of(run)
    return KernelFile(view.tag, target, *view.incumbent(view.target(target)))


@tool
def read(topic: str, target: str, context: Context, name: str = "", run: str | None = None) -> str:
    """Read what an agent is told. Topics: rules (the loop, the rules, how to read a verdict), target (shapes, strides,
    sizes of the tests), oracle (what is right, in PyTorch), spec, incumbent, history, experiment (`name`: its number),
    compiler (the last refusal), profile (of the incumbent), playbook (`name`: a tier, 1 to 6; without: the one that
    fits), starters and headers (without `name`: which there are).
    """
    from autokernel.agents.prompt import rules_text
    from autokernel.agents.toolbox import Toolbox
    from autokernel.gate import Judge
    from autokernel.run.loop import InTurn

    if topic == RULES:
        return rules_text()
    view = View.of(run)
    known, asked = view.context(view.target(target)), {"topic": topic, "name": name}
    if topic != "profile":
        return Toolbox(known).answer("read", asked)
    with one_at_a_time, Judge(known.target.device) as judge:
        return Toolbox(replace(known, bench=InTurn(judge, progress_of(context)))).answer("read", asked)


@tool
def bench(
    source: str, context: Context, target: str | None = None, run: str | None = None, full: bool = False
) -> dict[str, Any]:
    """Have a kernel file looked at, recording nothing: compiled, checked in one dtype, roughly timed against the incumbent.

    full: all five stages and the whole timing, as for a proposal. `target` may be left out if the run has one of this type.
    """
    from autokernel.cli.by_hand import edit_for
    from autokernel.common.console import check_machine, default_device
    from autokernel.gate import Judge
    from autokernel.gate.report import as_json
    from autokernel.hardware.machine import turn

    step = progress_of(context)
    edit = edit_for(workspace_of(run), checked_source(source, "the source"), target, default_device())
    incumbent = View.of(run).incumbent(edit.target)[1]
    check_machine(edit.target.backend, experiments=False)
    with one_at_a_time, Judge(edit.target.device) as judge, turn(edit.target.device, step):
        verdict = judge.examine(edit.source, edit.target, incumbent, quick=not full, progress=step)
    return as_json(replace(verdict, phase_seconds={})) | {"target": edit.target.name}


@tool
def propose(
    source: str, description: str, context: Context, target: str | None = None, run: str | None = None
) -> LoggedVerdict:
    """Submit the whole new kernel.py as the next experiment: judged in full, committed, logged; kept if right and faster.

    description: one line: what changes, what you expect of it, and why ("UNROLL 4 -> 8: more loads in flight, 3 %").
    target: may be left out if the run has one of the kernel's type.
    The first proposal on a target has its starter judged before it.
    """
    from autokernel.cli.by_hand import edit_for, judge
    from autokernel.common.console import default_device

    if not description.strip():
        raise Refused("`description` is empty: say in one line what changes, what you expect of it, and why")
    step = progress_of(context)
    edit = edit_for(workspace_of(run), checked_source(source, "the source"), target, default_device())
    with one_at_a_time:
        row = judge(edit, " ".join(description.split()), AGENT, step, step)
    view = View.of(edit.workspace.tag)
    notes = next(entry.notes for entry in view.entries if entry.row.experiment == row.experiment)
    return LoggedVerdict(
        edit.workspace.tag,
        row.target,
        row.experiment,
        row.status,
        row.status == "kept",
        row.correctness,
        row.speedup_vs_incumbent,
        row.speedup_low,
        row.speedup_high,
        row.latency_us,
        row.pct_peak,
        notes,
        row.commit,
        view.incumbent(edit.target)[0],
        row.seconds,
    )


@tool
def start_run(run: str, options: list[str], context: Context) -> Targets:
    """Profile a model and make the plan of a new run, in one to some minutes; no experiment is made yet.

    options: words of `autokernel profile`: ["--model", "net.py", "--class-name", "Net", "--input-shape", "1,1024"],
    or ["--module", "transformers", "--class-name", …]; without any, AutoKernel's compact LLaMA.
    """
    tag, step = checked_tag(run), progress_of(context)
    if tag in run_tags(HOME):
        raise Refused(f"there is a run {tag!r}: give the new one another name")
    if unfit := [word for word in options if word.partition("=")[0] in NOT_OF_A_MODEL]:
        raise Refused(f"{unfit[0]} is not for start_run: options say which model, and on what")
    with one_at_a_time:
        for words in (["profile", *options, "--tag", tag], ["extract", "--tag", tag]):
            step(" ".join(words))
            done = subprocess.run(
                installed(*words),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LONGEST_PROFILE_S,
                preexec_fn=die_with_parent,
            )
            if done.returncode:
                raise Refused(
                    f"autokernel {words[0]}: {why_ended(done.stderr.splitlines()[-LAST_LINES:], done.returncode)}"
                )
    return list_targets(tag)


@server.resource("autokernel://program", mime_type="text/markdown")
def program() -> str:
    """What an agent is told: the loop, the commands, the rules, how to read a verdict."""
    return (ROOT / "program.md").read_text()


@server.resource("autokernel://playbook/{tier}", mime_type="text/markdown")
def playbook(tier: int) -> str:
    """A tier of the playbook, 1 to 6: ideas, when each applies, what it should gain."""
    from autokernel.agents.playbook import tier_text

    try:
        return tier_text(tier)
    except FileNotFoundError as error:
        raise ResourceNotFoundError(f"there is {error}") from error
