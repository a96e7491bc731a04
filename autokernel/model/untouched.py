"""Whose time the time of a pass is: measured on the model untouched, operator by operator, and given to its graphs' nodes.

A captured graph may do other work than the model. Dynamo's makes a mask, say, where the model itself finds that it would
hide nothing and leaves it out, and with a mask attention takes PyTorch longer. What a kernel can save is no more than what
the untouched pass spends.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Call = tuple[str, str]  # an operator's name; the shapes of its tensors and its other arguments
MIN_DIFFERENCE = 0.05  # of the untouched pass: less is not worth a line
MAX_NAMES = 3


@dataclass(frozen=True)
class SharedOut(Generic[Key]):
    """The time of an untouched pass, by what runs in the captured model; all in µs."""

    times: dict[Key, float]
    as_captured: dict[Key, float]  # where the captured model makes other calls: what these take; else as in `times`
    rest: dict[str, float]  # operator -> time of the untouched pass for which the captured model has nothing
    other_work: dict[str, tuple[float, float]]  # operator -> time of calls that only the captured model makes, the other


def share_out(captured: Mapping[Key, Mapping[Call, float]], untouched: Mapping[Call, float]) -> SharedOut[Key]:
    """Gives the time of each operator in the untouched pass to what runs the same calls in the captured model.

    Calls of equal arguments first: these are the same work, whatever they took where. Then what is left of each operator,
    then what is left of all: where the captured model spends more than that, it is cut down, and never blown up.
    """
    spent: dict[Call, float] = defaultdict(float)
    for calls in captured.values():
        for call, us in calls.items():
            spent[call] += us
    same = {call for call, us in spent.items() if us and untouched.get(call)}
    ours, theirs = _by_operator(spent, same), _by_operator(untouched, same)
    of_both = {name for name, us in ours.items() if us and theirs.get(name)}
    without = sum(us for name, us in ours.items() if name not in of_both)
    missing = {name: us for name, us in theirs.items() if name not in of_both and us}
    rest_us = max(sum(missing.values()) - without, 0)
    kept = min(sum(missing.values()) / without, 1) if without else 0

    def ratio(call: Call) -> float:
        if call in same:
            return untouched[call] / spent[call]
        return theirs[call[0]] / ours[call[0]] if call[0] in of_both else kept

    return SharedOut(
        {key: sum(us * ratio(call) for call, us in calls.items()) for key, calls in captured.items()},
        {
            key: sum(us * (ratio(call) if call in same else 1) for call, us in calls.items())
            for key, calls in captured.items()
        },
        {name: us * rest_us / sum(missing.values()) for name, us in missing.items() if rest_us},
        {name: (ours.get(name, 0.0), theirs.get(name, 0.0)) for name in (*ours, *theirs)},
    )


def _by_operator(times: Mapping[Call, float], without: Iterable[Call]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for call, us in times.items():
        if call not in without:
            found[call[0]] += us
    return found


def in_words(shared: SharedOut[Key], pass_us: float, of_part: str = "") -> str:
    """Which other work the captured model does, if it is worth a line: `pass_us` is what the untouched pass takes.

    The same work by operators of other names, as an einsum by products of matrices, takes as long and is worth none.
    """
    more_us = sum(ours - theirs for ours, theirs in shared.other_work.values())
    if abs(more_us) <= MIN_DIFFERENCE * pass_us:
        return ""
    differ = {n: t for n, t in shared.other_work.items() if abs(t[0] - t[1]) > MIN_DIFFERENCE * pass_us}
    if not differ:
        return ""
    largest = sorted(differ.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:MAX_NAMES]
    names = ", ".join(f"{name} {ours / 1e3:.3g} ms instead of {theirs / 1e3:.3g}" for name, (ours, theirs) in largest)
    whole = sum(shared.as_captured.values()) / 1e3
    return (
        f"the captured graph{of_part} does other work than the model untouched ({names}): its operations take "
        f"{whole:.3g} ms, the model's {pass_us / 1e3:.3g} ms; times and shares are the model's"
    )
