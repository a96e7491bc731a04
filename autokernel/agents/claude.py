"""Claude as the agent, through the Anthropic SDK: streams, and what stays the same between experiments from the cache.

Rules, problem and playbook tier come first in a conversation, then the incumbent, then the history: the API caches what one
experiment has in common with the next.
"""

import os
import re
import time
import typing
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import anthropic
from anthropic.types import Message

from autokernel.agents import AgentOptions, AgentStopped, Context
from autokernel.agents.conversation import ASKED, Cut, ModelAgent, Reply, ToolCall, ToolResult, Unreadable, system_text
from autokernel.agents.playbook import tier_that_fits
from autokernel.agents.prompt import history_text, incumbent_text, problem_text
from autokernel.agents.purse import Price, Spent, cost
from autokernel.agents.toolbox import TOOLS
from autokernel.common.preflight import Refused

READ_TIMEOUT_S = 120  # the API sends pings while the model thinks: such a silence is a dead connection
CACHED = {"cache_control": {"type": "ephemeral"}}
CACHE_WRITE = 1.25  # of the input price, for the five minutes that we ask for
NO_KEY = "set ANTHROPIC_API_KEY, or use --agent tuner"
LONG = 100_000
PRICES = {  # platform.claude.com/docs/en/about-claude/pricing and the models' own pages, as of November 2026
    "claude-fable-5-1": Price(10, 50, 0.25, CACHE_WRITE),
    "claude-opus-5-5": Price(4, 20, 0.20, CACHE_WRITE),
    "claude-opus-5": Price(5, 25, 0.50, CACHE_WRITE),
    "claude-sonnet-5-5": Price(2, 10, 0.20, CACHE_WRITE),
    "claude-haiku-5-5": Price(0.10, 0.50, 0.01, CACHE_WRITE, long=LONG, long_factor=5),
}
DEAREST = Price(10, 50, 1, CACHE_WRITE)  # of the public list: what is not in the table is charged as this: the cap holds


def make(say: Callable[[str], None], options: AgentOptions, spent_usd: float, argument: str) -> ModelAgent:
    """Raises Refused where there is no key, nor anything else that the SDK knows."""
    claude = Claude(options.model)
    known = (getattr(claude.client, name, None) for name in ("api_key", "auth_token", "credentials"))
    if not any(known) and not os.environ.get("ANTHROPIC_CUSTOM_HEADERS"):
        raise Refused(f"--agent claude needs a key: {NO_KEY}")
    return ModelAgent(say, claude, options, spent_usd)


def newest_opus() -> str:
    """The newest Opus-class name that the installed SDK knows: claude-opus-5-5 before claude-opus-5."""
    names = [n for option in typing.get_args(anthropic.types.Model) for n in typing.get_args(option)]
    versions = {n: [int(v) for v in n.split("-")[2:]] for n in names if re.fullmatch(r"claude-opus(-\d{1,2}){1,2}", n)}
    return max(versions, key=versions.__getitem__)


class Claude:
    """The Messages API, as autokernel.agents.conversation.Api has it."""

    name, terms = "Claude", ""
    sdk, any_error = anthropic, anthropic.AnthropicError

    def __init__(self, model: str = "", client: anthropic.Anthropic | None = None) -> None:
        self.model = model or newest_opus()
        self.price = PRICES.get(self.model, DEAREST)
        self._client = client

    @cached_property
    def client(self) -> anthropic.Anthropic:
        """Without retries of its own: ours also cover a stream that is cut, and say what they wait for."""
        timeout = anthropic.Timeout(READ_TIMEOUT_S, connect=10)
        return self._client or anthropic.Anthropic(max_retries=0, timeout=timeout)

    @cached_property
    def system(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": system_text()} | CACHED]

    def address(self) -> str:
        return str(self.client.base_url)

    def opening(self, context: Context) -> list[dict[str, Any]]:
        content = [
            {"type": "text", "text": f"{problem_text(context)}\n{tier_that_fits(context)}"} | CACHED,
            {"type": "text", "text": incumbent_text(context)} | CACHED,
            {"type": "text", "text": history_text(context.trials) + ASKED},
        ]
        return [{"role": "user", "content": content}]

    def size(self, messages: list[dict[str, Any]]) -> int:
        return sum(len(str(part).encode()) for part in (self.system, TOOLS, marked(messages)))

    def ask(self, messages: list[dict[str, Any]], longest: int, seconds: float, began: Callable[[], None]) -> Reply:
        try:
            message = self._streamed(messages, longest, time.monotonic() + seconds, began)
        except ValueError as error:
            raise Unreadable(str(error).split(" JSON: ")[0]) from error
        except TypeError as error:
            if "authentication" not in str(error):
                raise
            raise AgentStopped(f"{self.name} is not available: {NO_KEY}") from error
        calls = [block for block in message.content if block.type == "tool_use"]
        spent = paid(self.price, message)
        if not all(isinstance(block.input, dict) for block in calls):
            raise Unreadable("the input of a tool was no object", spent)
        return Reply(
            said(message),
            tuple(ToolCall(block.id, block.name, block.input) for block in calls),
            message.stop_reason,
            message.stop_reason == "max_tokens",
            spent,
            repairable=bool(message.content),  # an empty message is not taken back
        )

    def _streamed(self, messages: list[dict[str, Any]], longest: int, until_s: float, began: Callable[[], None]) -> Message:
        heard = False
        with self.client.messages.stream(
            model=self.model, max_tokens=longest, system=self.system, tools=TOOLS, messages=marked(messages)
        ) as stream:
            for event in stream:
                if time.monotonic() > until_s:  # its pings alone may go on for ever
                    raise Unreadable("the answer does not end")
                if event.type == "message_start":
                    heard = True
                    began()
            message = stream.get_final_message() if heard else None
        if message is None or message.stop_reason is None:
            raise Cut("the stream ended before its message did")
        return message

    def following(self, reply: Reply, results: Sequence[ToolResult], words: Sequence[str]) -> list[dict[str, Any]]:
        answers = [
            {"type": "tool_result", "tool_use_id": result.call.id, "content": result.text}
            | ({"is_error": True} if result.failed else {})
            for result in results
        ]
        answers += [{"type": "text", "text": text} for text in words]
        return [{"role": "assistant", "content": reply.message}, {"role": "user", "content": answers}]


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the last block marked for the cache: the next turn reads all of this one from there."""
    last = deepcopy(messages[-1])
    last["content"][-1] |= CACHED
    return [*messages[:-1], last]


def said(reply: Message) -> list[dict[str, Any]]:
    """The blocks of a reply as they came: thoughts must be given back unchanged, and some SDKs fill in empty fields."""
    return [{name: value for name, value in block.to_dict().items() if value is not None} for block in reply.content]


def paid(price: Price, reply: Message) -> Spent:
    usage = reply.usage
    written, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    return cost(price, usage.input_tokens, written, read, usage.output_tokens)
