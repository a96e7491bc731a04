"""Any model behind an OpenAI-compatible endpoint as the agent: OpenAI's own, a gateway, or vLLM, llama.cpp, Ollama.

Chat Completions with tool calls, not streamed: the form that all of these servers speak.
"""

import ipaddress
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from autokernel.agents import AgentOptions, AgentStopped, Context
from autokernel.agents.conversation import (
    ASKED,
    Cut,
    ModelAgent,
    Reply,
    ToolCall,
    ToolResult,
    Unreadable,
    http_library,
    system_text,
)
from autokernel.agents.playbook import tier_that_fits
from autokernel.agents.prompt import history_text, incumbent_text, problem_text
from autokernel.agents.purse import Price, Spent, cost
from autokernel.agents.toolbox import TOOLS
from autokernel.common.preflight import Refused

try:
    import openai
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
except ModuleNotFoundError as missing:
    raise Refused("--agent openai needs the openai package: pip install -e '.[openai]'") from missing

ANSWER_TIMEOUT_S = 1800  # nothing is heard of an answer before it is whole, and a model on a CPU writes 10 tokens a second
LONGEST_ANSWER = 4 << 20  # bytes: 32000 tokens and as many of thought are a quarter of a million
NO_KEY = "none"  # what local servers are given: most ask for no key, but the SDK wants one
FUNCTIONS = [
    {"type": "function", "function": {"parameters" if k == "input_schema" else k: v for k, v in tool.items()}}
    for tool in TOOLS
]


def make(say: Callable[[str], None], options: AgentOptions, spent_usd: float, argument: str) -> ModelAgent:
    """Raises Refused where what the endpoint needs is not said."""
    if not options.model:
        raise Refused("--agent openai needs --agent-model: the model's name, as its server has it")
    url = options.url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    if not is_address(url):
        raise Refused(f"{url!r} is no address of an API, such as http://localhost:8000/v1: --agent-url, OPENAI_BASE_URL")
    local, prices = is_local(url), (options.price_in, options.price_out)
    if None in prices and not local:
        raise Refused(
            f"the spending cap needs the prices of {options.model} at {url}: --price-in and --price-out, USD per million "
            "tokens (0 where it is free)"
        )
    key = os.environ.get("OPENAI_API_KEY") or (NO_KEY if local else "")
    if not key:
        raise Refused(f"--agent openai needs a key for {url}: set OPENAI_API_KEY")
    client = client_for(url, key)
    return ModelAgent(say, ChatModel(options.model, client, *(price or 0.0 for price in prices)), options, spent_usd)


def client_for(url: str, key: str, seconds: float = ANSWER_TIMEOUT_S) -> openai.OpenAI:
    """It waits so long for a whole answer, or what a request says; the timeouts of HTTP libraries are of each piece,
    and pieces may never end."""

    def bound(response: Any) -> None:
        response.stream = Bounded(response.stream, time.monotonic() + response.request.extensions["timeout"]["read"])

    timeout = openai.Timeout(seconds, connect=10)
    http = openai.DefaultHttpxClient(base_url=url, timeout=timeout, event_hooks={"response": [bound]})
    return openai.OpenAI(api_key=key, base_url=url, max_retries=0, timeout=timeout, http_client=http)


def sooner(timeout: Any, seconds: float) -> openai.Timeout:
    """A client's timeout, or less where a request has less time."""
    return openai.Timeout(min(timeout.read, seconds), connect=timeout.connect)


class Bounded(http_library(openai).SyncByteStream):
    """The body of an answer, in pieces. Raises Unreadable where it goes on for too long, or is too much."""

    def __init__(self, stream: Any, until_s: float) -> None:
        self.stream, self.until_s = stream, until_s

    def __iter__(self) -> Iterator[bytes]:
        came = 0
        for piece in self.stream:
            came += len(piece)
            if came > LONGEST_ANSWER:
                raise Unreadable(f"the answer is longer than {LONGEST_ANSWER >> 20} MiB")
            if time.monotonic() > self.until_s:
                raise Unreadable("the answer does not end")
            yield piece

    def close(self) -> None:
        self.stream.close()


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:  # of the port, or of an address of IPv6
        return False


def is_local(url: str) -> bool:
    """Whether a server is on this machine or in its own network, where nobody sends a bill."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private  # loopback, too
    except ValueError:
        return "." not in host or host.endswith((".local", ".localhost"))


class ChatModel:
    """Chat Completions, as autokernel.agents.conversation.Api has it."""

    sdk, any_error = openai, openai.OpenAIError

    def __init__(self, model: str, client: openai.OpenAI, price_in: float = 0.0, price_out: float = 0.0) -> None:
        self.name = self.model = model
        self.client = client
        self.price = Price(price_in, price_out, price_in)
        self.terms = f", at ${price_in:g} in and ${price_out:g} out per million tokens (--price-in, --price-out)"
        self.limit = "max_tokens"  # its older name, which all servers know but OpenAI's own for newer models

    @cached_property
    def system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": system_text()}]

    def address(self) -> str:
        return str(self.client.base_url)

    def opening(self, context: Context) -> list[dict[str, Any]]:
        """What stays the same from one experiment to the next comes first: servers cache prefixes."""
        parts = (problem_text(context), tier_that_fits(context), incumbent_text(context), history_text(context.trials))
        return [{"role": "user", "content": "\n".join(parts) + ASKED}]

    def size(self, messages: list[dict[str, Any]]) -> int:
        return sum(len(str(part).encode()) for part in (self.system, FUNCTIONS, messages))

    def ask(self, messages: list[dict[str, Any]], longest: int, seconds: float, began: Callable[[], None]) -> Reply:
        completion = self._completed([*self.system, *messages], longest, seconds)
        spent = self._spent(completion.usage)
        try:
            return _reply(completion.choices[0], spent)
        except (AttributeError, LookupError, TypeError) as error:  # the SDK takes what comes, whatever its form
            raise Unreadable(f"the answer is not of the API's form: {error}", spent) from error

    def _spent(self, usage: Any) -> Spent | None:
        """None where a server does not count, or gives what is no count."""
        counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            return None
        return cost(self.price, counts[0], 0, 0, counts[1])

    def _completed(self, messages: list[dict[str, Any]], longest: int, seconds: float) -> ChatCompletion:
        """Raises Cut for what is no answer of a model's, AgentStopped where none can be had."""
        try:
            completion = self._create(messages, longest, seconds)
        except openai.BadRequestError as error:
            if "max_completion_tokens" in str(error) and self.limit == "max_tokens":
                self.limit = "max_completion_tokens"
                return self._completed(messages, longest, seconds)
            if "context" in str(error):
                advice = "give its server a longer context, or ask for shorter answers (--max-tokens)"
                raise AgentStopped(f"{self.name} is not available: {advice}: {error.message}") from error
            raise
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, Unreadable):
                raise error.__cause__ from None
            raise
        except ValueError as error:
            raise Cut(f"the answer is no JSON: {error}") from error
        if not isinstance(completion, ChatCompletion):
            raise AgentStopped(f"{self.address()} is no OpenAI-compatible API: the addresses of most end in /v1")
        if not completion.choices:
            raise Cut(f"an answer without a message: {getattr(completion, 'error', None) or 'no error is named'}")
        return completion

    def _create(self, messages: list[dict[str, Any]], longest: int, seconds: float) -> ChatCompletion:
        limit: Any = {self.limit: longest}
        client = self.client.with_options(timeout=sooner(self.client.timeout, seconds))
        return client.chat.completions.create(model=self.model, messages=messages, tools=FUNCTIONS, **limit)

    def following(self, reply: Reply, results: Sequence[ToolResult], words: Sequence[str]) -> list[dict[str, Any]]:
        """Words beside results stand in the last of these: some servers want no user between a tool and the model."""
        answers = [{"role": "tool", "tool_call_id": result.call.id, "content": result.text} for result in results]
        if answers:
            answers[-1]["content"] = "\n\n".join([answers[-1]["content"], *words])
        else:
            answers = [{"role": "user", "content": "\n\n".join(words)}]
        return [reply.message, *answers]


def _reply(choice: Any, spent: Spent | None) -> Reply:
    calls = tuple(
        ToolCall(call.id, call.function.name, arguments(call.function.arguments, spent))
        for call in choice.message.tool_calls or ()
    )
    return Reply(as_it_was(choice.message), calls, choice.finish_reason, choice.finish_reason == "length", spent)


def arguments(text: str, spent: Spent | None) -> dict[str, Any]:
    """Of a call; none at all is an empty text for some servers. Raises Unreadable."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"the arguments of a tool are no JSON: {error}", spent) from error
    if not isinstance(given, dict):
        raise Unreadable("the arguments of a tool were no object", spent)
    return given


def as_it_was(message: ChatCompletionMessage) -> dict[str, Any]:
    """A reply as it is given back: calls with all that came with them, thoughts left out, which some servers refuse."""
    calls = [call.to_dict() for call in message.tool_calls or ()]
    return {"role": "assistant", "content": message.content or ""} | ({"tool_calls": calls} if calls else {})
