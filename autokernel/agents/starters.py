"""Proposes nothing: a run's targets get the kernels that they begin with, and those that pay go into the model."""

from collections.abc import Callable

from autokernel.agents import AgentOptions, Context, Proposal


class Starters:
    def propose(self, context: Context) -> Proposal | None:
        return None


def make(say: Callable[[str], None], options: AgentOptions, spent_usd: float, argument: str) -> Starters:
    return Starters()
