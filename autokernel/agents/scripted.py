"""Proposes a given list of sources, one after the other: the deterministic agent of tests and replays."""

from collections.abc import Iterable

from autokernel.agents import Context, Proposal


class ScriptedAgent:
    """`script` has (source, hypothesis) pairs; a source may be a function of the incumbent's."""

    def __init__(self, script: Iterable[tuple[object, str]]) -> None:
        self.script = iter(script)

    def propose(self, context: Context) -> Proposal | None:
        step = next(self.script, None)
        if step is None:
            return None
        source, hypothesis = step
        return Proposal(source(context.incumbent) if callable(source) else source, hypothesis, "scripted")
