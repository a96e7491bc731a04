"""Asks another agent after what paid in other models: those kernels are proposed first, and the gate judges each anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autokernel.agents import Agent, Context, Proposal

NAME = "proven"


@dataclass(frozen=True)
class ProvenFirst:
    kernels: Mapping[str, Sequence[Proposal]]  # by target
    agent: Agent

    def propose(self, context: Context) -> Proposal | None:
        seen = {context.incumbent, *(trial.source for trial in context.trials)}
        fresh = (kernel for kernel in self.kernels.get(context.target.name, ()) if kernel.source not in seen)
        return next(fresh, None) or self.agent.propose(context)
