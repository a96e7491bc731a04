"""What a target may begin with: its starter, and where there are several, which of them looks fastest."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from autokernel.agents import Proposal
from autokernel.gate.timing.autotune import Looked
from autokernel.history.experiments import START, STARTER
from autokernel.preflight import backends
from autokernel.spec import is_region, load_spec
from autokernel.target import Target, starter_name, starter_source

LOOK_S = 60.0  # for a look at the starters of all backends


class Bench(Protocol):
    """What can time many kernels quickly."""

    def autotune(self, sources: Iterable[str], target: Target, seconds: float) -> list[Looked]: ...


def own_starter(target: Target) -> Proposal:
    return _proposal(starter_name(target), starter_source(target))


def fastest_first(target: Target, bench: Bench | None) -> list[Proposal]:
    """The kernels that a target may begin with: its own, or where its device has several backends, those of each that look
    fastest on its shapes; a region's are all that were written for it. Without a `bench`, and where none could be timed,
    its own alone."""
    own = own_starter(target)
    proposals = {proposal.source: proposal for proposal in (own, *_others(target))}
    if len(proposals) == 1 or bench is None:
        return [own]
    looked = [one for one in bench.autotune(proposals, target, LOOK_S) if one.seconds < math.inf]
    ranked = [proposals[one.source] for one in looked]
    if len(ranked) > 1:
        ratio, second = looked[1].seconds / looked[0].seconds, ranked[1].hypothesis.removeprefix(START)
        ranked[0] = replace(
            ranked[0], hypothesis=f"{ranked[0].hypothesis}, at a look {ratio:.2f} times as fast as {second}"
        )
    return ranked or [own]


def _others(target: Target) -> Sequence[Proposal]:
    spec, own = load_spec(target.kernel_type), starter_name(target)
    files = dict(spec.starters(target.backend)) if is_region(target.kernel_type) else {}
    for backend in backends(target.device):
        name = f"{backend}_kernel"
        if backend != target.backend and name in (others := spec.starters(backend)):
            files[name] = others[name]
    return [_proposal(name, path.read_text()) for name, path in files.items() if name != own]


def _proposal(name: str, source: str) -> Proposal:
    return Proposal(source, f"{START}{name}", STARTER)
