"""The Claude agent against a stand-in for its API on loopback: a transcript through the real gate, and what a night costs.

Usage:   python benchmarks/claude_night.py                      (about five minutes on a quiet machine)
         python benchmarks/claude_night.py --experiments 300 --real 0      (the bill alone)
Reads:   benchmarks/transcripts/cpu-compact-llama-fp32.tsv: a recorded run, whose experiments the night repeats
Writes:  benchmarks/claude_night.json, benchmarks/transcripts/claude-night.txt

The agent, the SDK, HTTP, the tools, the cap and (in the transcript) loop and gate are real. What the model says is a
script: it reads, has an edit of a knob looked at, and proposes it, now as a patch and now as a whole file. The server
counts tokens as bytes / 2.7 and caches prefixes for five minutes, as the API does. How long the model thinks is an
assumption (THOUGHT_TOKENS): the bill is given for it, for half of it, and for twice as much.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import cycle, islice
from pathlib import Path

import anthropic
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.agents import AgentOptions, Context, PastExperiment
from autokernel.agents.claude import PRICES, Claude
from autokernel.agents.conversation import ModelAgent
from autokernel.agents.knobs import read_knobs, set_knob
from autokernel.agents.purse import cost
from autokernel.cli.arguments import Parser, count, count_or_none, script
from autokernel.common.records import write_json
from autokernel.common.verdict import CaseTiming, Correctness, Interval, Verdict
from autokernel.gate import Judge
from autokernel.history.experiments import Experiment, ExperimentLog
from autokernel.history.progress import Rules
from autokernel.run.loop import Budget, Loop
from autokernel.run.workspace import PLAN, Workspace
from autokernel.spec import ROOT, load_spec
from autokernel.target import Plan, Target, default_target
from tests.messages_api import BYTES_PER_TOKEN, Call, MessagesApi, Refusal, said, serving

RECORDED = ROOT / "benchmarks/transcripts/cpu-compact-llama-fp32.tsv"
PRICES_FROM = "platform.claude.com/docs/en/about-claude/pricing and the models' own pages, November 2026"
MODELS = ("claude-opus-5-5", "claude-sonnet-5-5", "claude-haiku-5-5")
THOUGHT_TOKENS = (800, 2_000, 4_000)  # of the turn that reads, the one that looks, the one that proposes
ANSWER_TOKENS_S = 60  # the clock of the night: how fast an answer comes, and what the gate takes for an experiment
GATE_S = 60.0


class Script:
    """What the model says: by how many turns of an experiment have been, and how many experiments."""

    def __init__(self, faults: bool = False) -> None:
        self.faults = faults
        self.experiments = self.clock_s = 0
        self.turns: list[int] = []

    def answer(self, request: dict):
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        if self.faults and self.experiments == 1 and not turn:
            self.faults = False
            return Refusal(529, headers={"retry-after": "1"})
        thought = THOUGHT_TOKENS[min(turn, 2)]
        self.turns.append(turn)
        self.clock_s += thought / ANSWER_TOKENS_S
        if turn == 0:
            return said(Call("read", {"topic": "history"}), Call("read", {"topic": "starters"}), thought_tokens=thought)
        edit = self.edit(request)
        if turn == 1:
            return said(Call("look", edit), thought_tokens=thought)
        self.experiments += 1
        self.clock_s += GATE_S
        words = {
            "hypothesis": f"{edit['edits'][0]['new']}: another balance of reuse and parallelism",
            "predicted_gain": 1.03,
        }
        whole = {"source": self.incumbent(request).replace(edit["edits"][0]["old"], edit["edits"][0]["new"])}
        return said(Call("propose", words | (whole if self.experiments % 3 == 0 else edit)), thought_tokens=thought)

    def incumbent(self, request: dict) -> str:
        return request["messages"][0]["content"][1]["text"].partition("```python\n")[2].rpartition("```")[0]

    def edit(self, request: dict) -> dict:
        """One knob of the kernel to beat at another value: the next of its list, by turns."""
        source = self.incumbent(request)
        knobs = read_knobs(source)
        name = list(knobs.choices)[self.experiments % len(knobs.choices)]
        values = [value for value in knobs.choices[name] if value != knobs.current[name]]
        edited = set_knob(source, name, values[self.experiments // len(knobs.choices) % len(values)])
        lines = zip(source.splitlines(), edited.splitlines())
        old, new = next((old, new) for old, new in lines if old != new)
        return {"edits": [{"old": old, "new": new}]}


class Remembered:
    """A quick look whose answer is that of no edit in particular, for the night in which nothing is measured."""

    def examine(self, source: str, target: Target, incumbent: str | None = None, quick: bool = True) -> Verdict:
        speedup = Interval(0.9, 0.98, 1.07)
        cases = tuple(CaseTiming(c.case.name, c.calls, 100.0, 1, 1, speedup_vs_incumbent=speedup) for c in target.cases)
        why = f"not shown to be faster: {speedup}"
        return Verdict(target.kernel_type, target.backend, "cpu", Correctness.PASS, False, why, 1, cases=cases)

    def profile(self, source: str, target: Target) -> str:
        return "not measured"


def agent_for(api: MessagesApi, say, model: str = MODELS[0], budget_usd: float = 10.0) -> ModelAgent:
    client = anthropic.Anthropic(api_key="none", base_url=api.url, max_retries=0)
    return ModelAgent(say, Claude(model, client), AgentOptions(budget_usd=budget_usd))


def night(experiments: int) -> list[dict]:
    """The usage of every request of a night over the recorded run's targets, its rows being what the history grows by."""
    script = Script()
    with serving(script.answer, now=lambda: script.clock_s) as api:
        agent = agent_for(api, say=lambda line: None, budget_usd=1e6)
        for context in islice(contexts(), experiments):
            assert agent.propose(context) is not None
        prompt = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
        counted = sum(cost(PRICES[MODELS[0]], *(usage[name] for name in prompt)).usd for usage in api.usages)
        charged = agent._purse.spent.usd
        assert abs(counted - charged) < 1e-6 * counted, "the agent's bill is the server's"
        return [usage | {"turn": turn} for usage, turn in zip(api.usages, script.turns, strict=True)]


def contexts() -> Iterator[Context]:
    """What the agent is told before each experiment: the recorded ones again and again, as long as the night is."""
    trials: dict[str, list[PastExperiment]] = {}
    for number, row in enumerate(cycle(recorded()), start=1):
        target = default_target(row.kernel_type, "cpp", "cpu", torch.float32)
        spec = load_spec(row.kernel_type)
        source = spec.starters("cpp")["cpp_kernel"].read_text()
        made = trials.setdefault(row.target, [])
        yield Context(target, spec, source, tuple(made), None, bench=Remembered())
        made.append(
            PastExperiment(row.__class__(**{**row.__dict__, "experiment": number}), source, f"{row.status} {row.gain}")
        )


def recorded() -> list[Experiment]:
    return ExperimentLog(RECORDED).read()


def bill(usages: list[dict], model: str, thought: float, cached: bool = True) -> float:
    """USD for the same words at a model's listed prices, `thought` times as much thought."""
    total = 0.0
    for usage in usages:
        fresh, written, read = (usage[f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_"))
        out = usage["output_tokens"] + (thought - 1) * THOUGHT_TOKENS[min(usage["turn"], 2)]
        prompt = (fresh, written, read) if cached else (fresh + written + read, 0, 0)
        total += cost(PRICES[model], *prompt, out).usd
    return total


def transcript(experiments: int) -> list[str]:
    """A few experiments on RMSNorm through loop and gate, told as they happen."""
    lines, script = [], Script(faults=True)

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    def answer(request: dict):
        given = script.answer(request)
        say(f"  POST /v1/messages: {len(request['messages'])} messages, max_tokens {request['max_tokens']}")
        for block in request["messages"][-1]["content"] if len(request["messages"]) > 1 else []:
            say(f"    tool_result: {' '.join(str(block.get('content', block.get('text'))).split())[:160]}")
        blocks = [given] if isinstance(given, Refusal) else given.blocks
        for block in blocks:
            say(f"    <- {str(block)[:200]}")
        return given

    with tempfile.TemporaryDirectory() as folder, serving(answer) as api, Judge("cpu") as judge:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        target = default_target("rmsnorm", "cpp", "cpu", torch.float32)
        plan = Plan("RMSNorm alone", {}, "cpu", 0.0, (target,))
        workspace = Workspace(clone, "night")
        plan.write(workspace / PLAN)
        with workspace.locked():
            loop = Loop(workspace, plan, judge, say, pauses_s=())
            say(loop.run(agent_for(api, say), Rules(None, None, None, None), Budget(experiments=experiments)))
        for row in loop.rows:
            say(f"row {row.experiment}: {row.status}, {row.agent}, {row.tokens} tokens, ${row.cost_usd:.4f}")
        say(f"the server counted: {dict(sum(map(Counter, api.usages), Counter()))}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--experiments", type=count, default=300, help="of the night (default: %(default)s)")
    parser.add_argument(
        "--real", type=count_or_none, default=3, help="experiments in the transcript; 0: none (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    usages = night(arguments.experiments)
    sums = Counter()
    for usage in usages:
        sums.update({name: count for name, count in usage.items() if name != "turn"})
    bills = {
        model: {
            "usd": round(bill(usages, model, 1), 2),
            "usd_half_the_thought": round(bill(usages, model, 0.5), 2),
            "usd_twice_the_thought": round(bill(usages, model, 2), 2),
            "usd_without_cache": round(bill(usages, model, 1, cached=False), 2),
            "usd_per_million": {"input": PRICES[model].input, "output": PRICES[model].output}
            | {"cache_write": PRICES[model].input * PRICES[model].cache_write, "cache_read": PRICES[model].cache_read},
        }
        for model in MODELS
    }
    record = {
        "experiments": arguments.experiments,
        "requests": len(usages),
        "tokens": dict(sums),
        "bills": bills,
        "prices_from": PRICES_FROM,
        "bytes_per_token": BYTES_PER_TOKEN,
        "thought_tokens_assumed": dict(zip(("read", "look", "propose"), THOUGHT_TOKENS)),
        "seconds_here": round(time.monotonic() - started, 1),
        "date": str(date.today()),
        "sdk": anthropic.__version__,
    }
    assert set(MODELS) <= set(PRICES)
    write_json(ROOT / "benchmarks/claude_night.json", record)
    lines = [f"{arguments.experiments} experiments, {len(usages)} requests: {dict(sums)}"]
    lines += [
        "{}: ${usd:.2f} (${usd_half_the_thought:.2f} to ${usd_twice_the_thought:.2f} with half and twice the thought; "
        "${usd_without_cache:.2f} without the cache)".format(model, **given)
        for model, given in bills.items()
    ]
    print("\n".join(lines), flush=True)
    if arguments.real:
        told = transcript(arguments.real)
        (ROOT / "benchmarks/transcripts/claude-night.txt").write_text("\n".join([*told, "", *lines, PRICES_FROM]) + "\n")


if __name__ == "__main__":
    raise SystemExit(script(main))
