"""Who proposes edits: one file an agent, all behind the Agent protocol."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from typing import Protocol, runtime_checkable

from autokernel.common.preflight import Refused, backends, known_agents
from autokernel.common.verdict import Verdict
from autokernel.gate.timing.autotune import Looked
from autokernel.gate.workers.sandbox import SandboxIncomplete
from autokernel.hardware.machine import MachineFault
from autokernel.history.experiments import Experiment
from autokernel.spec import KernelSpec
from autokernel.target import Target

LONGEST = 300  # characters of an error's words


@dataclass(frozen=True)
class PastExperiment:
    """An experiment that was made: its row, the source that was judged, and what the gate said at length."""

    row: Experiment
    source: str
    notes: str


@runtime_checkable
class Bench(Protocol):
    """What an agent may ask of the gate before it spends an experiment: autokernel.gate.Judge has all."""

    def examine(self, source: str, target: Target, incumbent: str | None = None, quick: bool = True) -> Verdict: ...

    def profile(self, source: str, target: Target) -> str: ...

    def autotune(self, sources: Iterable[str], target: Target, seconds: float) -> list[Looked]: ...


@dataclass(frozen=True)
class Context:
    """What an agent may know when it proposes: the target, the kernel to beat, and everything tried on it so far."""

    target: Target
    spec: KernelSpec
    incumbent: str
    trials: tuple[PastExperiment, ...]
    tree: Path | None  # the run's working tree, where kernel.py holds the incumbent
    elsewhere: tuple[PastExperiment, ...] = ()  # on the run's other targets of this kernel type and backend
    bench: Bench | None = None
    until_s: float = inf  # time.monotonic() from which no search is begun: no time would be left to judge what it finds

    @property
    def other_backends(self) -> list[str]:
        """Beside the target's, those whose kernels run on its device and can be compiled."""
        return [backend for backend in backends(self.target.device) if backend != self.target.backend]

    @property
    def starters(self) -> dict[str, Path]:
        """Files to start from, by name, those of the target's backend first."""
        all_backends = (self.target.backend, *self.other_backends)
        return {name: path for backend in all_backends for name, path in self.spec.starters(backend).items()}


@dataclass(frozen=True)
class Proposal:
    """An edit. Raises TypeError or ValueError for what no file, commit or row can hold: once it is noted that it is being
    judged, every resume would meet it again."""

    source: str
    hypothesis: str  # one line: what changes, and what is expected of it; it may turn out wrong
    agent: str
    tokens: int = 0
    cost_usd: float = 0.0

    def __post_init__(self) -> None:
        for name in ("source", "hypothesis", "agent"):
            if not isinstance(text := getattr(self, name), str):
                raise TypeError(f"a Proposal's {name} is text, not {text!r:.80}")
            text.encode()  # halves of a surrogate pair are no UTF-8
        for name in ("tokens", "cost_usd"):
            if not (isinstance(spent := getattr(self, name), Real) and isfinite(spent)):
                raise TypeError(f"a Proposal's {name} is a number, not {spent!r:.80}")


@runtime_checkable
class Agent(Protocol):
    def propose(self, context: Context) -> Proposal | None:
        """The next edit of the incumbent; None when there is nothing left to try on this target."""


class AgentStopped(Exception):
    """The agent cannot go on, and with it the run; the message says why."""


class OutOfBudget(AgentStopped):
    """The next call could pass the agent's spending cap: the run ends before it, not after."""


@dataclass(frozen=True)
class AgentOptions:
    """What a command line may say of agents; each takes what concerns it."""

    model: str = ""  # the language model; of Claude "": the newest Opus that the SDK knows
    url: str = ""  # of an OpenAI-compatible API; "": $OPENAI_BASE_URL, else OpenAI's own
    price_in: float | None = None  # of such a model, USD per million tokens; None: nothing if its server is local
    price_out: float | None = None
    budget_usd: float = 10.0  # of what is paid for: never without a cap
    budget_tokens: int | None = None  # in and out, cached ones too
    max_tokens: int = 32_000  # of one answer
    minutes: float = 15.0  # of one run of a command


TAKEN_BY = {  # what would be without an effect, were the agent another one
    "model": {"claude", "openai"},
    **dict.fromkeys(("url", "price_in", "price_out"), {"openai"}),
}


@dataclass
class FirstOf:
    """Several agents: the first that has an idea. "tuner,claude" lets the tuner clean up after each change of structure.

    One that has to stop (its cap, its key) is left out; when none is left, the run ends.
    """

    agents: list[Agent]
    say: Callable[[str], None]

    def propose(self, context: Context) -> Proposal | None:
        for agent in list(self.agents):
            try:
                proposal = agent.propose(context)
            except AgentStopped as reason:
                self.agents.remove(agent)
                if not self.agents:
                    raise
                self.say(f"{reason}; the run goes on without it")
                continue
            if proposal:
                return proposal
        return None


@dataclass(frozen=True)
class Answering:
    """An agent, whose own mistake ends its part of a run and nothing else: what was judged is still proven and reported."""

    name: str
    agent: Agent

    def propose(self, context: Context) -> Proposal | None:
        try:
            proposal = self.agent.propose(context)
        except (AgentStopped, MachineFault, Refused, SandboxIncomplete):
            raise
        except Exception as error:
            raise AgentStopped(_of_agent(self.name, error)) from error
        if not isinstance(proposal, Proposal | None):
            raise AgentStopped(f"agent {self.name} answered with {proposal!r:.80}, which is neither a Proposal nor None")
        return proposal


def _of_agent(name: str, error: Exception) -> str:
    """Where in the agent's own file an error was, or what it called was."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == Path(__file__).with_name(f"{name}.py")]
    at = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    said = " ".join(str(error).split())[:LONGEST]
    return f"agent {name} has failed{at}: {type(error).__name__}{said and f': {said}'}"


def agent_names(text: str) -> list[str]:
    """ "tuner,claude" -> the two; a "command: …" comes last and may have commas of its own. Raises ValueError."""
    plain, marker, command = text.partition("command:")
    names = [name.strip() for name in plain.split(",") if name.strip()]
    known = known_agents()
    if not set(names) <= set(known) or (marker and not command.strip()) or not (names or marker):
        raise ValueError(f"no agent {text!r}; there are: {', '.join(known)}, 'command: …', or several: tuner,claude")
    return names + ([marker + command] if marker else [])


def make_agent(text: str, say: Callable[[str], None], spent_usd: float = 0.0, **options: object) -> Agent:
    """`text` is as agent_names() has it; `options` are those of AgentOptions. An agent is imported when it is asked for.

    Raises Refused where one lacks what it needs, or an option concerns none of them.
    """
    given, agents = AgentOptions(**options), []
    kinds = {one.partition(":")[0] for one in agent_names(text)}
    for option, takers in TAKEN_BY.items():
        if getattr(given, option) not in ("", None) and not kinds & takers:
            named = "--" + option.replace("_", "-") if option.startswith("price") else f"--agent-{option}"
            raise Refused(f"{named} is for --agent {' or '.join(sorted(takers))}, and the agent is {text}")
    for one in agent_names(text):
        name, _, argument = one.partition(":")
        try:
            agent = import_module(f"autokernel.agents.{name}").make(say, given, spent_usd, argument.strip())
        except Refused:
            raise
        except Exception as error:
            raise Refused(_of_agent(name, error)) from error
        if not isinstance(agent, Agent):
            raise Refused(f"agent {name}: make() gives {agent!r:.80}, which has no propose()")
        agents.append(Answering(name, agent))
    return agents[0] if len(agents) == 1 else FirstOf(agents, say)
