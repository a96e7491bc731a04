"""What a target may begin with: its starter, and where there are several, which of them looks fastest."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from autokernel.agents import Proposal
from autokernel.common.preflight import backends
from autokernel.gate.checks.ahead import Ahead
from autokernel.gate.timing.autotune import Looked
from autokernel.history.experiments import START, STARTER
from autokernel.spec import is_region, load_spec
from autokernel.target import Target, starter_name, starter_source

LOOK_S = 60.0  # for a look at the starters of all backends


class Bench(Protocol):
    """What can time many kernels quickly."""

    def autotune(self, sources: Iterable[str], target: Target, seconds: float, finals: bool = True) -> list[Looked]: ...


class Compiling(Bench, Protocol):
    """One that can also compile those of many targets at once."""

    def compile_ahead(self, wanted: Sequence[Ahead]) -> None: ...


def own_starter(target: Target) -> Proposal:
    return _proposal(starter_name(target), starter_source(target))


def ranked(targets: Sequence[Target], bench: Compiling, stopping: Callable[[], object]) -> dict[str, list[Proposal]]:
    """fastest_first() of many targets, by name; of some alone once it is `stopping`. Compilers take most of the time of a
    look: they work for all targets at once."""
    bench.compile_ahead([(proposal.source, target) for target in targets for proposal in candidates(target)])
    return {target.name: fastest_first(target, bench) for target in targets if not stopping()}


def candidates(target: Target) -> list[Proposal]:
    """The kernels that a target may begin with, its own first."""
    proposals = {proposal.source: proposal for proposal in (own_starter(target), *_others(target))}
    return list(proposals.values())


def fastest_first(target: Target, bench: Bench | None) -> list[Proposal]:
    """The kernels that a target may begin with: its own, or where its device has several backends, those of each that look
    fastest on its shapes; a region's are all that were written for it. Without a `bench`, and where none could be timed,
    its own alone."""
    own, *others = candidates(target)
    if not others or bench is None:
        return [own]
    proposals = {proposal.source: proposal for proposal in (own, *others)}
    finals = target.device == "cpu"  # on a GPU one look tells what starters are apart, if it is more than a few per cent
    looked = [one for one in bench.autotune(proposals, target, LOOK_S, finals=finals) if one.seconds < math.inf]
    found = [proposals[one.source] for one in looked]
    if len(found) > 1:
        ratio, second = looked[1].seconds / looked[0].seconds, found[1].hypothesis.removeprefix(START)
        found[0] = replace(found[0], hypothesis=f"{found[0].hypothesis}, at a look {ratio:.2f} times as fast as {second}")
    return found or [own]


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
