"""Who proposes edits: one file an agent, all behind the Agent protocol."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autokernel.experiments import Experiment
from autokernel.spec import KernelSpec
from autokernel.target import Target


@dataclass(frozen=True)
class Trial:
    """An experiment that was made: its row, the source that was judged, and what the gate said at length."""

    row: Experiment
    source: str
    notes: str


@dataclass(frozen=True)
class Context:
    """What an agent may know when it proposes: the target, the kernel to beat, and everything tried on it so far."""

    target: Target
    spec: KernelSpec
    incumbent: str
    trials: tuple[Trial, ...]
    tree: Path  # the run's working tree, where kernel.py holds the incumbent


@dataclass(frozen=True)
class Proposal:
    source: str
    hypothesis: str  # one line: what changes, and what is expected of it; it may turn out wrong
    agent: str
    tokens: int = 0
    cost_usd: float = 0.0


class Agent(Protocol):
    def propose(self, context: Context) -> Proposal | None:
        """The next edit of the incumbent; None when there is nothing left to try on this target."""


class AgentStopped(Exception):
    """The agent cannot go on, and with it the run; the message says why."""


class OutOfBudget(AgentStopped):
    """The next call could pass the agent's spending cap: the run ends before it, not after."""


def make_agent(name: str, say: Callable[[str], None], spent_usd: float = 0.0, **options: object) -> Agent:
    """`name` is "tuner", "claude" or "command: …". Each agent is imported only when it is asked for."""
    if command := re.fullmatch(r"command:\s*(.+)", name, re.S):
        from autokernel.agents.command import CommandAgent

        return CommandAgent(command[1], say)
    if name == "claude":
        from autokernel.agents.anthropic_api import ClaudeAgent

        return ClaudeAgent(say, spent_usd=spent_usd, **options)
    if name == "tuner":
        from autokernel.agents.tuner import Tuner

        return Tuner()
    raise ValueError(f"no agent {name!r}; there are: tuner, claude, 'command: …'")
