"""Claude as the agent, through the Anthropic SDK: reads what it asks for, looks at an edit, proposes an experiment.

Each experiment is a conversation of its own: rules, problem and playbook tier first, which the API caches from one
experiment to the next; then the incumbent; then the history, summarised. Nothing is carried over but what the rows say.
"""

import importlib
import random
import re
import time
import typing
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import anthropic
from anthropic.types import Message

from autokernel.agents import AgentOptions, AgentStopped, Context, Proposal
from autokernel.agents.playbook import tier_that_fits
from autokernel.agents.prompt import history_text, incumbent_text, problem_text, rules_text
from autokernel.agents.purse import Purse, Spent, cost
from autokernel.agents.toolbox import TOOLS, Toolbox, Unusable

TURNS = 8  # requests in one experiment; in the last one it is told to propose
LEAST_ANSWER = 4_000  # tokens: a kernel and some thought fit; with less than this left in the budget the run ends
BYTES_PER_TOKEN = 2  # of code, about 3: a bound on the size of a prompt that is not sent yet
ADDED_TOKENS = 1_000  # to a prompt, at most, by the API: its own words on tools
READ_TIMEOUT_S = 120  # the API sends pings while the model thinks: such a silence is a dead connection
PATIENCE_S, LONGEST_WAIT_S = 1800, 60  # of retries: an outage of half an hour ends the run, whose next call goes on
PASSING_TYPES = ("overloaded_error", "rate_limit_error", "api_error", "timeout_error")
HTTP = importlib.import_module(anthropic.DefaultHttpxClient.__mro__[1].__module__)  # httpx, or what the SDK uses instead

SYSTEM = """You make GPU and CPU kernels faster, one experiment at a time. What follows is the program of the project that
you work in; its steps 1, 5 and 6 are done for you. Read what you need, look at an edit if you are unsure, then call
`propose` once: one idea, with what you expect of it. You do not see earlier conversations, only the history.

"""
REPAIR = "That is no proposal. Call `propose` with a one-line `hypothesis`, `predicted_gain`, and `source` or `edits`."
LAST = "This is the last turn: call `propose` now."


DEFAULTS = AgentOptions()


class Cut(Exception):
    """A stream that ended before its message did."""


class Unreadable(Exception):
    """A message that came whole and cannot be read or given back: a tool's input that is no JSON object."""


@dataclass
class Talk:
    """The conversation of one experiment, and what it has cost."""

    messages: list[dict[str, Any]]
    spent: Spent = field(default=Spent())
    repaired: bool = False


def newest_opus() -> str:
    """The newest Opus-class name that the installed SDK knows: claude-opus-5-5 before claude-opus-5."""
    names = [n for option in typing.get_args(anthropic.types.Model) for n in typing.get_args(option)]
    versions = {n: [int(v) for v in n.split("-")[2:]] for n in names if re.fullmatch(r"claude-opus(-\d{1,2}){1,2}", n)}
    return max(versions, key=versions.__getitem__)


class ClaudeAgent:
    """An experiment is a conversation: tools are answered until a proposal comes; an answer without is repaired once."""

    def __init__(
        self,
        say: Callable[[str], None],
        options: AgentOptions = DEFAULTS,
        spent_usd: float = 0.0,
        client: anthropic.Anthropic | None = None,
        patience_s: float = PATIENCE_S,
        first_wait_s: float = 1.0,
    ) -> None:
        self.say = say
        self.options = options
        self.known = Spent(spent_usd)
        self.model = options.model or newest_opus()
        self.patience_s, self.first_wait_s = patience_s, first_wait_s
        self._client = client
        self._purse: Purse | None = None

    @property
    def client(self) -> anthropic.Anthropic:
        """Without retries of its own: ours also cover a stream that is cut, and say what they wait for."""
        if self._client is None:
            self._client = anthropic.Anthropic(max_retries=0, timeout=anthropic.Timeout(READ_TIMEOUT_S, connect=10))
        return self._client

    def purse(self, context: Context) -> Purse:
        """The run's; made at the first call, of which it warns."""
        if self._purse is None:
            path = context.tree.parent / "spent.jsonl" if context.tree else None
            self._purse = Purse(path, self.options.budget_usd, self.options.budget_tokens, self.known)
            tokens = f" and {self.options.budget_tokens:,} tokens" if self.options.budget_tokens is not None else ""
            self.say(
                f"Claude ({self.model}) is the agent: the kernel's source, its shapes and this run's history are sent to "
                f"{self._address()}. Spending cap: ${self.options.budget_usd:.2f}{tokens} (--budget-usd, --budget-tokens); "
                f"${self._purse.spent.usd:.2f} of it is spent. `--agent tuner` never connects."
            )
        return self._purse

    def _address(self) -> str:
        try:
            return str(self.client.base_url)
        except anthropic.AnthropicError as error:
            raise AgentStopped(f"Claude is not available: {error}") from error

    def propose(self, context: Context) -> Proposal | None:
        purse, toolbox = self.purse(context), Toolbox(context)
        talk = Talk([{"role": "user", "content": opening(context)}])
        why = f"no proposal in {TURNS} turns"
        for turn in range(1, TURNS + 1):
            try:
                reply = self._ask(talk, purse)
            except Unreadable as error:
                if talk.repaired:
                    why = f"no usable answer, nor when asked again ({error})"
                    break
                talk.repaired = True
                continue
            proposal, answers = self._act(reply, toolbox, talk)
            if proposal:
                return proposal
            if answers is None:
                why = f"no usable answer, nor when asked again (it ended with {reply.stop_reason})"
                break
            if turn == TURNS - 1:
                answers.append({"type": "text", "text": LAST})
            talk.messages += [{"role": "assistant", "content": said(reply)}, {"role": "user", "content": answers}]
        self.say(f"{self.model}: {why}")
        return self._proposal(f"# {self.model}: {why}\n", f"({why})", talk)

    def _proposal(self, source: str, hypothesis: str, talk: Talk) -> Proposal:
        return Proposal(source, hypothesis, self.model, talk.spent.tokens, talk.spent.usd)

    def _act(self, reply: Message, toolbox: Toolbox, talk: Talk) -> tuple[Proposal | None, list[dict[str, Any]] | None]:
        """The proposal in a reply, or else what its calls are answered; (None, None) if it cannot be repaired again."""
        answers: list[dict[str, Any]] = []
        malformed = reply.stop_reason == "max_tokens" or not any(block.type == "tool_use" for block in reply.content)
        for call in (block for block in reply.content if block.type == "tool_use"):
            answer, failed = "", False
            try:
                if reply.stop_reason == "max_tokens":
                    raise Unusable(f"the answer was cut off at its limit; {REPAIR}")
                if call.name == "propose":
                    source = toolbox.edited(call.input)
                    return self._proposal(source, stated(call.input), talk), None
                answer = toolbox.answer(call.name, call.input)
            except Unusable as error:
                answer, failed = str(error), True
                malformed = malformed or call.name == "propose"
            result = {"type": "tool_result", "tool_use_id": call.id, "content": answer}
            answers.append(result | ({"is_error": True} if failed else {}))
        if malformed:
            if talk.repaired or not reply.content:
                return None, None
            talk.repaired = True
            answers.append({"type": "text", "text": REPAIR})
        return None, answers

    def _ask(self, talk: Talk, purse: Purse) -> Message:
        """One request, made only if even its longest answer stays under the cap; repeated while the API is away."""
        deadline, wait = time.monotonic() + self.patience_s, self.first_wait_s
        while True:
            try:
                return self._request(talk, purse)
            except (anthropic.APIError, HTTP.TransportError, Cut) as error:
                pause = max(asked_pause(error), wait * random.uniform(0.75, 1.25))
                if not passing(error) or time.monotonic() + pause > deadline:
                    raise AgentStopped(f"Claude is not available: {in_words(error)}") from error
                self.say(f"Claude did not answer ({in_words(error)}); asking again in {pause:.0f} s")
                time.sleep(pause)
                wait = min(2 * wait, LONGEST_WAIT_S)
            except anthropic.AnthropicError as error:  # no key, or one that cannot be read
                raise AgentStopped(f"Claude is not available: {error}") from error
            except TypeError as error:
                if "authentication" not in str(error):
                    raise
                raise AgentStopped("Claude is not available: set ANTHROPIC_API_KEY, or use --agent tuner") from error

    def _request(self, talk: Talk, purse: Purse) -> Message:
        messages = marked(talk.messages)
        system = [{"type": "text", "text": SYSTEM + rules_text()} | CACHED]
        size = sum(len(str(part).encode()) for part in (system, TOOLS, messages))
        prompt = size // BYTES_PER_TOKEN + ADDED_TOKENS
        allowed = min(self.options.max_tokens, purse.affordable(self.model, prompt))
        if allowed < min(LEAST_ANSWER, self.options.max_tokens):
            raise purse.out(cost(self.model, 0, prompt, 0, LEAST_ANSWER))
        charged = cost(self.model, 0, prompt, 0, allowed)  # the most that it can be, until we know better
        call, began = purse.reserve(charged), False
        try:
            with self.client.messages.stream(
                model=self.model, max_tokens=allowed, system=system, tools=TOOLS, messages=messages
            ) as stream:
                for event in stream:
                    began = began or event.type == "message_start"
                reply = stream.get_final_message() if began else None
            if reply is None or reply.stop_reason is None:
                raise Cut("the stream ended before its message did")
            charged = paid(self.model, reply)
            if not all(isinstance(block.input, dict) for block in reply.content if block.type == "tool_use"):
                raise Unreadable("the input of a tool was no object")
            return reply
        except anthropic.APIError as error:
            if not began and refused(error):
                charged = Spent()
            raise
        except ValueError as error:
            raise Unreadable(str(error).split(" JSON: ")[0]) from error
        finally:
            purse.settle(call, charged)
            talk.spent += charged


CACHED = {"cache_control": {"type": "ephemeral"}}


def opening(context: Context) -> list[dict[str, Any]]:
    """The first message: what stays the same from one experiment to the next comes first, to be read from the cache."""
    return [
        {"type": "text", "text": f"{problem_text(context)}\n{tier_that_fits(context)}"} | CACHED,
        {"type": "text", "text": incumbent_text(context)} | CACHED,
        {"type": "text", "text": history_text(context.trials) + "\nPropose the next experiment: one idea."},
    ]


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the last block marked for the cache: the next turn reads all of this one from there."""
    last = deepcopy(messages[-1])
    last["content"][-1] |= CACHED
    return [*messages[:-1], last]


def said(reply: Message) -> list[dict[str, Any]]:
    """The blocks of a reply as they came: thoughts must be given back unchanged, and some SDKs fill in empty fields."""
    return [{name: value for name, value in block.to_dict().items() if value is not None} for block in reply.content]


def stated(given: dict[str, Any]) -> str:
    """The hypothesis as it is logged, with the gain that was predicted: the verdict stands beside it."""
    words = " ".join(str(given.get("hypothesis") or "(no hypothesis stated)").split())
    gain = given.get("predicted_gain")
    return f"{words} (predicts {gain:.2f}x)" if isinstance(gain, (int, float)) else words


def paid(model: str, reply: Message) -> Spent:
    usage = reply.usage
    written, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    return cost(model, usage.input_tokens, written, read, usage.output_tokens)


def passing(error: Exception) -> bool:
    """Whether an error is of the kind that goes away: 408, 409, 429, 5xx, no connection, a cut or silent stream."""
    if isinstance(error, anthropic.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        kind = (body.get("error") or {}).get("type")  # an error within a stream comes under status 200
        return error.status_code in (408, 409, 429) or error.status_code >= 500 or kind in PASSING_TYPES
    return isinstance(error, (anthropic.APIConnectionError, HTTP.TransportError, Cut))


def refused(error: anthropic.APIError) -> bool:
    """Whether the API did no work for this request: it said no, or was not reached."""
    return isinstance(error, anthropic.APIStatusError) or isinstance(
        error.__cause__, (HTTP.ConnectError, HTTP.ConnectTimeout)
    )


def asked_pause(error: Exception) -> float:
    """Seconds that the API asks us to wait, 0 if it does not."""
    headers = error.response.headers if isinstance(error, anthropic.APIStatusError) else {}
    text = headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def in_words(error: Exception) -> str:
    words = getattr(error, "api_message", None) or getattr(error, "message", None) or str(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
