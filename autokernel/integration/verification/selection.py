"""Which kernels stay over one fallback: those that each make the model faster, or another set that is faster beyond doubt.

Leave-one-out tells what each kernel gains beside all others. It does not tell what any kernel gains, such as a mask that is
recognised in the traced model and need not be read, nor what one loses once others are gone. So sets of kernels that the
gains suggest are timed, too.
"""

import math
from collections.abc import Mapping

from autokernel.common.verdict import Interval

Gains = Mapping[str, Interval]  # kernel -> the model with all kernels over the model with all but this one
Names = tuple[str, ...]


def paying(gains: Gains) -> Names:
    """The kernels with which the model is faster than without them, their whole intervals at or above 1."""
    return tuple(name for name, gain in gains.items() if gain.low >= 1)


def rivals(gains: Gains) -> list[Names]:
    """The sets to compare with that of the paying kernels: the kernel that gains most, those that seem to gain, those that
    do not lose beyond doubt, and all."""
    best = max(gains, key=lambda name: gains[name].value, default=None)
    sets = [
        tuple(name for name in gains if name == best),
        tuple(name for name, gain in gains.items() if gain.value > 1),
        tuple(name for name, gain in gains.items() if gain.high >= 1),
        tuple(gains),
    ]
    return [names for names in dict.fromkeys(sets) if names and names != paying(gains)]


def hope(gains: Gains, all_of_them: float | None = None) -> float:
    """How much faster than with the paying kernels the model may be with the best rival, if gains multiply.

    all_of_them: what the model gains by all kernels together, over none; if it is not known, the product of their gains.
    """
    if not (others := rivals(gains)):
        return 1.0
    gained = all_of_them or math.prod(gain.value for gain in gains.values())

    def foreseen(names: Names) -> float:
        return gained / math.prod(gain.value for name, gain in gains.items() if name not in names) if names else 1.0

    return max(map(foreseen, others)) / foreseen(paying(gains))


def chosen(known: Names, speedups: Mapping[Names, Interval]) -> Names:
    """`known`, or the fastest of the sets that are faster than it beyond doubt. speedups: of each over `known`."""
    faster = {names: speedup for names, speedup in speedups.items() if speedup.low > 1}
    return max(faster, key=lambda names: faster[names].value, default=known)
