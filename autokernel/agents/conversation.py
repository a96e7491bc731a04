"""A language model as the agent, whatever its API: it reads what it asks for, looks at an edit, proposes an experiment.

Each experiment is a conversation of its own: rules, problem and playbook tier, the incumbent, the history, summarised.
Nothing is carried over but what the rows say. What an API is like (its messages, its stream, its prices) is a file of its
own, an `Api`; what stands here is the same for all: tools, repair of what cannot be used, retries, and the caps.
"""

import importlib
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from autokernel.agents import LONGEST, AgentOptions, AgentStopped, Context, Proposal
from autokernel.agents.prompt import rules_text
from autokernel.agents.purse import Price, Purse, Spent, cost
from autokernel.agents.toolbox import Toolbox, Unusable

USELESS = 3  # experiments in a row without a proposal, after which no more are paid for
TURNS = 8  # requests in one experiment; in the last one it is told to propose
LEAST_ANSWER = 4_000  # tokens: a kernel and some thought fit; with less than this left in the budget the run ends
BYTES_PER_TOKEN = 2  # of code, about 3: a bound on the size of a prompt that is not sent yet
ADDED_TOKENS = 1_000  # to a prompt, at most, by the API: its own words on tools
LEAST_WAIT_S = 600  # for an answer, whenever the run ends: a short run's one experiment may be a model's on a CPU
PATIENCE_S, LONGEST_WAIT_S = 1800, 60  # of retries: an outage of half an hour ends the run, whose next call goes on
PASSING_TYPES = ("overloaded_error", "rate_limit_error", "api_error", "timeout_error")
LASTING_TYPES = ("insufficient_quota",)  # told with status 429, but it does not go away

SYSTEM = """You make GPU and CPU kernels faster, one experiment at a time. What follows is the program of the project that
you work in; its steps 1, 5 and 6 are done for you. Read what you need, look at an edit if you are unsure, then call
`propose` once: one idea, with what you expect of it. You do not see earlier conversations, only the history.

"""
ASKED = "\nPropose the next experiment: one idea."
REPAIR = "That is no proposal. Call `propose` with a one-line `hypothesis`, `predicted_gain`, and `source` or `edits`."
LAST = "This is the last turn: call `propose` now."
DEFAULTS = AgentOptions()
LONGEST_HYPOTHESIS = 1000  # characters: it is a line of the log


class Cut(Exception):
    """An answer that ended before it was whole."""


class Unreadable(Exception):
    """A message that came whole and cannot be read or given back: a tool's input that is no JSON object."""

    def __init__(self, words: str, spent: Spent | None = None) -> None:
        super().__init__(words)
        self.spent = spent  # None: not known, the most that it can be


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model calls."""

    id: str
    name: str
    given: dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What a call is answered."""

    call: ToolCall
    text: str
    failed: bool = False


@dataclass(frozen=True)
class Reply:
    """One message of the model's."""

    message: Any  # as its API wants it back
    calls: tuple[ToolCall, ...]
    ended: str  # why the model stopped, in the API's word
    cut: bool  # at the limit of its length
    spent: Spent | None  # None: not known, the most that it can be
    repairable: bool = True  # whether the API takes it back, with words on what is wrong


class Api(Protocol):
    """A way to reach a model: autokernel/agents/claude.py, openai.py."""

    name: str  # as the run's lines have it
    model: str
    price: Price
    terms: str  # what is to be said of the prices beside the cap; "": nothing
    sdk: ModuleType  # whose APIError, APIStatusError and APIConnectionError are raised
    any_error: type[Exception]  # of the SDK: a key that is missing or cannot be read is one

    def address(self) -> str:
        """Where the kernels are sent to. Raises any_error."""

    def opening(self, context: Context) -> list[dict[str, Any]]: ...

    def size(self, messages: list[dict[str, Any]]) -> int:
        """Bytes of the whole request."""

    def ask(self, messages: list[dict[str, Any]], longest: int, seconds: float, began: Callable[[], None]) -> Reply:
        """One request for an answer of at most `longest` tokens; began() is called when the model begins to answer.

        seconds: how long it is waited for at most.

        Raises the SDK's errors, those of the HTTP library, Cut, Unreadable, AgentStopped.
        """

    def following(self, reply: Reply, results: Sequence[ToolResult], words: Sequence[str]) -> list[dict[str, Any]]:
        """The messages that come next: the reply as it was, then what its calls are answered, and words beside."""


@dataclass
class Talk:
    """The conversation of one experiment, and what it has cost."""

    messages: list[dict[str, Any]]
    until_s: float = math.inf  # of Context: what is answered later could not be judged any more
    spent: Spent = field(default=Spent())
    repaired: bool = False


class ModelAgent:
    """An experiment is a conversation: tools are answered until a proposal comes; an answer without is repaired once."""

    def __init__(
        self,
        say: Callable[[str], None],
        api: Api,
        options: AgentOptions = DEFAULTS,
        spent_usd: float = 0.0,
        patience_s: float = PATIENCE_S,
        first_wait_s: float = 1.0,
    ) -> None:
        self.say = say
        self.api = api
        self.options = options
        self.known = Spent(spent_usd)
        self.patience_s, self.first_wait_s = patience_s, first_wait_s
        self._purse: Purse | None = None
        self._useless = 0  # experiments in a row

    def purse(self, context: Context) -> Purse:
        """The run's; made at the first call, of which it warns."""
        if self._purse is None:
            path = context.tree.parent / "spent.jsonl" if context.tree else None
            self._purse = Purse(path, self.options.budget_usd, self.options.budget_tokens, self.known)
            api = self.api
            who = api.name if api.name == api.model else f"{api.name} ({api.model})"
            tokens = f" and {self.options.budget_tokens:,} tokens" if self.options.budget_tokens is not None else ""
            self.say(
                f"{who} is the agent: the kernel's source, its shapes and this run's history "
                f"are sent to {self._address()}. Spending cap: ${self.options.budget_usd:.2f}{tokens} (--budget-usd, "
                f"--budget-tokens){self.api.terms}; ${self._purse.spent.usd:.2f} of it is spent. `--agent tuner` never "
                "connects."
            )
        self._purse.refresh()
        return self._purse

    def _address(self) -> str:
        try:
            return self.api.address()
        except self.api.any_error as error:
            raise self._gone(str(error)) from error

    def _gone(self, why: str) -> AgentStopped:
        return AgentStopped(f"{self.api.name} is not available: {why}")

    def propose(self, context: Context) -> Proposal | None:
        purse, toolbox = self.purse(context), Toolbox(context)
        talk = Talk(self.api.opening(context), context.until_s)
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
            proposal, results, words = self._act(reply, toolbox, talk)
            if proposal:
                self._useless = 0
                return proposal
            if results is None:
                why = f"no usable answer, nor when asked again (it ended with {reply.ended})"
                break
            if turn == TURNS - 1:
                words.append(LAST)
            talk.messages += self.api.following(reply, results, words)
        self.say(f"{self.api.model}: {why}")
        self._useless += 1
        if self._useless == USELESS:
            raise AgentStopped(f"{self.api.model} has proposed nothing in {USELESS} experiments in a row: {why}")
        return self._proposal(f"# {self.api.model}: {why}\n", f"({why})", talk)

    def _proposal(self, source: str, hypothesis: str, talk: Talk) -> Proposal:
        return Proposal(source, hypothesis, self.api.model, talk.spent.tokens, talk.spent.usd)

    def _act(
        self, reply: Reply, toolbox: Toolbox, talk: Talk
    ) -> tuple[Proposal | None, list[ToolResult] | None, list[str]]:
        """The proposal in a reply, or else what its calls are answered, and words beside; no results: it is of no use."""
        results: list[ToolResult] = []
        malformed = reply.cut or not reply.calls
        for call in reply.calls:
            try:
                if reply.cut:
                    raise Unusable(f"the answer was cut off at its limit; {REPAIR}")
                if call.name == "propose":
                    source = toolbox.edited(call.given)
                    return self._proposal(source, stated(call.given), talk), None, []
                results.append(ToolResult(call, toolbox.answer(call.name, call.given)))
            except Unusable as error:
                results.append(ToolResult(call, str(error), failed=True))
                malformed = malformed or call.name == "propose"
        if not malformed:
            return None, results, []
        if talk.repaired or not reply.repairable:
            return None, None, []
        talk.repaired = True
        return None, results, [REPAIR]

    def _ask(self, talk: Talk, purse: Purse) -> Reply:
        """One request, made only if even its longest answer stays under the cap; repeated while the API is away."""
        sdk = self.api.sdk
        deadline, wait = min(time.monotonic() + self.patience_s, talk.until_s), self.first_wait_s
        while True:
            try:
                return self._request(talk, purse)
            except (sdk.APIError, transport_error(sdk), Cut) as error:
                asked = asked_pause(error)
                pause = max(asked, wait * random.uniform(0.75, 1.25))
                if not passing(error, sdk) or time.monotonic() + pause > deadline:
                    told = f"; it asks for a pause of {asked:.0f} s" * bool(asked)
                    raise self._gone(in_words(error) + told) from error
                self.say(f"{self.api.name} did not answer ({in_words(error)}); asking again in {pause:.0f} s")
                time.sleep(pause)
                wait = min(2 * wait, LONGEST_WAIT_S)
            except self.api.any_error as error:  # no key, or one that cannot be read
                raise self._gone(str(error)) from error

    def _request(self, talk: Talk, purse: Purse) -> Reply:
        price = self.api.price
        prompt = self.api.size(talk.messages) // BYTES_PER_TOKEN + ADDED_TOKENS
        allowed = int(min(self.options.max_tokens, max(0, purse.affordable(price, prompt))))
        if allowed < min(LEAST_ANSWER, self.options.max_tokens):
            raise purse.out(cost(price, 0, prompt, 0, LEAST_ANSWER))
        charged = cost(price, 0, prompt, 0, allowed)  # the most that it can be, until we know better
        call, began = purse.reserve(charged), []
        try:
            seconds = max(LEAST_WAIT_S, talk.until_s - time.monotonic())
            reply = self.api.ask(talk.messages, allowed, seconds, lambda: began.append(True))
            charged = reply.spent or charged
            return reply
        except Unreadable as error:
            charged = error.spent or charged
            raise
        except AgentStopped:  # before it was sent
            charged = Spent()
            raise
        except self.api.sdk.APIError as error:
            if not began and refused(error, self.api.sdk):
                charged = Spent()
            raise
        finally:
            purse.settle(call, charged)
            talk.spent += charged


def system_text() -> str:
    return SYSTEM + rules_text()


def stated(given: dict[str, Any]) -> str:
    """The hypothesis as it is logged, with the gain that was predicted: the verdict stands beside it."""
    words = " ".join(str(given.get("hypothesis") or "(no hypothesis stated)")[:LONGEST_HYPOTHESIS].split())
    words = words.encode(errors="replace").decode()
    gain = given.get("predicted_gain")
    return f"{words} (predicts {gain:.2f}x)" if isinstance(gain, (int, float)) and math.isfinite(gain) else words


def http_library(sdk: ModuleType) -> ModuleType:
    """httpx, or what the SDK uses instead."""
    return importlib.import_module(sdk.DefaultHttpxClient.__mro__[1].__module__)


def transport_error(sdk: ModuleType) -> type[Exception]:
    return http_library(sdk).TransportError


def passing(error: Exception, sdk: ModuleType) -> bool:
    """Whether an error is of the kind that goes away: 408, 409, 429, 5xx, no connection, a cut or silent stream."""
    if isinstance(error, sdk.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        inner = body.get("error")  # an error within a stream comes under status 200
        kind = (inner if isinstance(inner, dict) else body).get("type")
        if kind in LASTING_TYPES:
            return False
        return error.status_code in (408, 409, 429) or error.status_code >= 500 or kind in PASSING_TYPES
    return isinstance(error, (sdk.APIConnectionError, transport_error(sdk), Cut))


def refused(error: Exception, sdk: ModuleType) -> bool:
    """Whether the API did no work for this request: it said no, or was not reached."""
    http = http_library(sdk)
    return isinstance(error, sdk.APIStatusError) or isinstance(error.__cause__, (http.ConnectError, http.ConnectTimeout))


def asked_pause(error: Exception) -> float:
    """Seconds that the API asks us to wait, 0 if it does not."""
    response = getattr(error, "response", None)
    text = response.headers.get("retry-after", "") if response is not None else ""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def in_words(error: Exception) -> str:
    words = getattr(error, "api_message", None) or getattr(error, "message", None) or str(error)
    if type(error).__name__ == "APIConnectionError" and error.__cause__:  # both SDKs' own words are "Connection error."
        return f"{type(error).__name__}: {in_words(error.__cause__)}"
    said = " ".join(str(words).split())[:LONGEST]  # of a proxy's error, its whole page
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
