"""Claude as the agent, through the Anthropic SDK: reads target and history, answers with a whole kernel.py."""

import re
import typing
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic.types import Message

from autokernel.agents import AgentStopped, Context, OutOfBudget, Proposal
from autokernel.agents.prompt import problem_text, state_text
from autokernel.spec import ROOT

MAX_TOKENS = 32_000
PRICES = {  # USD per million tokens in, out (platform.claude.com, 2026-11)
    "claude-opus-5-5": (4.0, 20.0),
    "claude-opus-5": (5.0, 25.0),
    "claude-sonnet-5-5": (2.0, 10.0),
    "claude-haiku-5-5": (0.1, 0.5),
}
DEAREST = (10.0, 50.0)  # a model not in the table is charged as the dearest one, so that the cap holds
CACHE_WRITE, CACHE_READ = 1.25, 0.1  # of the input price; an upper bound where a model reads its cache for less
BYTES_PER_TOKEN = 2  # code is about 3.5: a bound on the size of a prompt not sent yet

TOOL = {
    "name": "propose_kernel",
    "description": "Submit the next experiment: the whole new kernel.py and the idea behind it. The gate judges it.",
    "input_schema": {
        "type": "object",
        "properties": {
            "hypothesis": {"type": "string", "description": "One line: what changes, and what you expect of it, and why."},
            "source": {"type": "string", "description": "The complete new text of kernel.py."},
        },
        "required": ["hypothesis", "source"],
    },
}
REPAIR = "Answer by calling propose_kernel with a non-empty `source` and a one-line `hypothesis`."


def newest_opus() -> str:
    """The newest Opus-class name that the installed SDK knows: claude-opus-5-5 before claude-opus-5."""
    names = [n for option in typing.get_args(anthropic.types.Model) for n in typing.get_args(option)]
    versions = {n: [int(v) for v in n.split("-")[2:]] for n in names if re.fullmatch(r"claude-opus(-\d{1,2}){1,2}", n)}
    return max(versions, key=versions.__getitem__)


class ClaudeAgent:
    """One request an experiment: playbook and problem in the cached prefix, history and incumbent after it."""

    def __init__(
        self,
        say: Callable[[str], None],
        model: str = "",
        budget_usd: float = 10.0,
        spent_usd: float = 0.0,
        client: anthropic.Anthropic | None = None,
    ) -> None:
        self.say = say
        self.model = model or newest_opus()
        self.budget_usd = budget_usd
        self.spent_usd = spent_usd
        # The SDK retries connection errors, timeouts, 408, 409, 429 and 5xx (529 too) with exponential backoff.
        self.client = client or anthropic.Anthropic(max_retries=5, timeout=600)
        self.announced = False

    def propose(self, context: Context) -> Proposal | None:
        if not self.announced:
            self.say(
                f"Claude ({self.model}) is the agent: the kernel's source, its shapes and the history of this run are sent "
                f"to {self.client.base_url}. Spending cap: ${self.budget_usd:.2f}, of which ${self.spent_usd:.2f} is spent "
                "(--budget-usd). `--agent tuner` never connects."
            )
            self.announced = True
        before_usd, tokens = self.spent_usd, 0
        messages: list[dict[str, Any]] = [{"role": "user", "content": self._content(context)}]
        for _ in range(2):  # an answer without a usable proposal is repaired once
            reply = self._ask(messages)
            tokens += _total_tokens(reply)
            call = next((block for block in reply.content if block.type == "tool_use"), None)
            given = call.input if call and isinstance(call.input, dict) else {}
            if isinstance(given.get("source"), str) and given["source"].strip():
                words = str(given.get("hypothesis") or "(no hypothesis stated)")
                return Proposal(given["source"], words, self.model, tokens, self.spent_usd - before_usd)
            answer = {"type": "text", "text": REPAIR}
            if call:
                answer = {"type": "tool_result", "tool_use_id": call.id, "is_error": True, "content": REPAIR}
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [answer]}]
        self.say(f"Claude made no usable proposal for {context.target.name}")
        return None

    def _content(self, context: Context) -> list[dict[str, Any]]:
        cached = {"cache_control": {"type": "ephemeral"}}
        return [
            {"type": "text", "text": problem_text(context)} | cached,
            {"type": "text", "text": state_text(context) + "\nPropose the next experiment: one idea."},
        ]

    def _ask(self, messages: list[dict[str, Any]]) -> Message:
        """One request, made only if even its largest answer stays under the cap."""
        playbook = (ROOT / "program.md").read_text()
        size = len(playbook.encode()) + len(str(messages).encode())
        price_in, price_out = PRICES.get(self.model, DEAREST)
        most = (size / BYTES_PER_TOKEN * price_in * CACHE_WRITE + MAX_TOKENS * price_out) / 1e6
        if self.spent_usd + most > self.budget_usd:
            raise OutOfBudget(
                f"${self.spent_usd:.2f} of ${self.budget_usd:.2f} is spent and the next call could cost up to ${most:.2f}"
            )
        system = [{"type": "text", "text": playbook, "cache_control": {"type": "ephemeral"}}]
        try:
            with self.client.messages.stream(
                model=self.model, max_tokens=MAX_TOKENS, system=system, tools=[TOOL], messages=messages
            ) as stream:
                reply = stream.get_final_message()
        except anthropic.APIError as error:  # a wrong key, no network, or an outage that outlasted the SDK's retries
            raise AgentStopped(f"Claude is not available: {type(error).__name__}: {error.message}") from error
        usage = reply.usage
        written, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
        tokens_in = usage.input_tokens + written * CACHE_WRITE + read * CACHE_READ
        self.spent_usd += (tokens_in * price_in + usage.output_tokens * price_out) / 1e6
        return reply


def _total_tokens(reply: Message) -> int:
    usage = reply.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    return usage.input_tokens + cached + usage.output_tokens
