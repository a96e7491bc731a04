"""What counts a kernel's calls is put ahead to where many calls would leave it."""

from types import ModuleType

from autokernel.gate.workers.counters import CALL_COUNTS, CallCounters
from autokernel.gate.workers.kept_numbers import Elsewhere


def put_ahead(name: str, *noted: tuple[int, int]) -> list[int]:
    """What a number of a kernel's is in calls ahead, which was this after so many calls."""
    module = ModuleType("kernel")
    setattr(module, name, 0)
    counters, seen = CallCounters(module, set(), Elsewhere([])), []
    for calls, value in noted:
        setattr(module, name, value)
        counters.note(calls)
    counters.put_ahead(lambda _: seen.append(getattr(module, name)))
    assert getattr(module, name) == noted[-1][1]
    return seen


def test_a_number_of_calls_is_that_number():
    assert put_ahead("calls", (10, 10), (20, 20), (31, 31)) == list(CALL_COUNTS)


def test_a_place_in_a_pool_stays_aligned():
    """Results of several sizes lie 64 bytes apart, or a multiple of that."""
    seen = put_ahead("used", (10, 1920), (20, 3264), (31, 5760))
    assert len(seen) == len(CALL_COUNTS)
    assert not any(place % 64 for place in seen)


def test_what_varies_counts_by_its_average():
    seen = put_ahead("elements", (10, 1013), (20, 2005), (30, 3001))
    assert seen[0] > 900_000
