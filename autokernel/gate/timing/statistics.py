"""Paired comparison: intervals over process pairs, and the keep rule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy.special import stdtrit

from autokernel.common.verdict import Interval

LOOKS = (3, 8, 16, 32)  # process pairs: from the first look on, the rule gives up after any pair; the others can keep
CONFIDENCE = 0.998  # two-sided: a look keeps an identical kernel in 0.1 % of trials, all three in at most 0.3 %
REPORTED_CONFIDENCE = 0.95  # of the speedups over baselines, on which nothing depends
MINIMUM_GAIN = 0.005  # smaller gains are not worth a commit, whatever their interval


@dataclass(frozen=True)
class Decision:
    """What the rule says after a look: keep, or else whether more pairs are worth their time."""

    keep: bool
    more: bool
    why: str


def noise_floor(log_ratios: Sequence[float]) -> float:
    """The gain below which nothing is kept: two standard errors of a kernel against itself, at the last look."""
    return max(MINIMUM_GAIN, 2 * stdev(log_ratios) / math.sqrt(LOOKS[-1]))


def keep_rule(
    log_ratios: Sequence[float], by_case: Mapping[str, Sequence[float]], floor: float, look: int | None = None
) -> Decision:
    """Whether to keep a candidate, from log(incumbent's time / candidate's) in each pair: over the target, and by case.

    Keep: the interval lies above 1, the gain above the floor, and no case is slower beyond its own interval. Giving up
    early (the estimate and one standard error on top miss the floor) can only reset what would not have been kept yet.
    It is asked after every pair from the first look on: of identical kernels a third fewer pairs than at looks alone, for
    none or 2 % of the power (simulated, spreads of 0.3 to 9 %).
    `look`: after how many pairs this is, where some more were counted against the candidate (an audit refused them).
    """
    pairs = len(log_ratios)
    look = look or pairs
    speedup = ratio_interval(log_ratios, CONFIDENCE)
    measured = f"{speedup} after {pairs} pairs"
    slower = {name: i for name, i in ((n, ratio_interval(r, CONFIDENCE)) for n, r in by_case.items()) if i.high < 1}
    unpromising = mean(log_ratios) + stdev(log_ratios) / math.sqrt(pairs) < math.log(1 + floor)
    more = look < LOOKS[-1] and not slower and not unpromising
    if slower:
        name, interval = next(iter(slower.items()))
        return Decision(False, more, f"{name} got slower: {interval} after {pairs} pairs")
    if speedup.low > 1 and speedup.value > 1 + floor:
        early = look not in LOOKS[1:]
        why = f"faster than the incumbent: {measured}" + (" (too few to keep)" if early else "")
        return Decision(not early, more and early, why)
    if speedup.low > 1:
        return Decision(False, more, f"the gain {measured} is within the noise floor of {floor:.1%}")
    if speedup.high < 1 + floor:
        return Decision(False, more, f"not faster than the incumbent: {measured}")
    return Decision(False, more, f"not shown to be faster: {measured}")


def ratio_interval(log_ratios: Sequence[float], confidence: float) -> Interval:
    """Two-sided t interval of the geometric mean of ratios, one log-ratio per process pair.

    The pair is the unit: a process carries a bias of its own that more calls inside it cannot remove. One pair says
    nothing of its own spread: its interval is unbounded.
    """
    centre = mean(log_ratios)
    if len(log_ratios) < 2:
        return Interval(0.0, math.exp(centre), math.inf)
    return _interval(centre, stdev(log_ratios) / math.sqrt(len(log_ratios)), len(log_ratios) - 1, confidence)


def ratio_intervals(log_ratios: Mapping[str, Mapping[int, float]], confidence: float) -> dict[str, Interval]:
    """ratio_interval() of several sides over the one that they are all compared with: side -> process -> log-ratio.

    What a process adds to a side's time is taken to be of one size for all sides, the common one included, and is told
    from all of them (two-way analysis of variance of log-times, by sides and processes): two processes with six sides say
    as much of it as six with two. Not every side needs to be in every process. Of a single side it is ratio_interval().
    """
    sides, processes = list(log_ratios), sorted({i for of_side in log_ratios.values() for i in of_side})
    seen = [
        (row, column, log_ratios[side][i])
        for row, side in enumerate(sides)
        for column, i in enumerate(processes)
        if i in log_ratios[side]
    ]
    seen += [(len(sides), column, 0.0) for column in range(len(processes))]
    effects = np.zeros((len(seen), len(sides) + 1 + len(processes)))
    for number, (row, column, _) in enumerate(seen):
        effects[number, row] = effects[number, len(sides) + 1 + column] = 1
    values = np.array([value for *_, value in seen])
    fitted, _, rank, _ = np.linalg.lstsq(effects, values, rcond=None)
    degrees = len(seen) - int(rank)
    variance = float(((values - effects @ fitted) ** 2).sum()) / degrees if degrees else math.inf
    return {
        side: _interval(mean(ratios.values()), math.sqrt(2 * variance / len(ratios)), degrees, confidence)
        for side, ratios in log_ratios.items()
    }


def foreseen(interval: Interval, sides: int, processes: int, later: int, confidence: float) -> Interval:
    """What ratio_intervals() of so many sides and processes would be after `later` that say the same on the whole."""
    if interval.low <= 0:
        return interval
    quantile, later_quantile = (float(stdtrit(sides * (n - 1), 0.5 + confidence / 2)) for n in (processes, later))
    half_width = math.log(interval.value / interval.low) * later_quantile / quantile * math.sqrt(processes / later)
    return Interval(interval.value / math.exp(half_width), interval.value, interval.value * math.exp(half_width))


def _interval(centre: float, error: float, degrees: int, confidence: float) -> Interval:
    """Of exp(centre), whose standard error was told with so many degrees of freedom."""
    if not degrees:
        return Interval(0.0, math.exp(centre), math.inf)
    half_width = float(stdtrit(degrees, 0.5 + confidence / 2)) * error
    # exp() of a huge half-width would overflow; such an interval says nothing anyway
    return Interval(math.exp(max(centre - half_width, -50)), math.exp(centre), math.exp(min(centre + half_width, 50)))


def product(a: Interval, b: Interval) -> Interval:
    """The product of two independent ratios: relative errors add in quadrature."""
    value = a.value * b.value
    low = math.hypot(*(math.log(i.value / i.low) if i.low > 0 else 50 for i in (a, b)))
    high = math.hypot(*(math.log(i.high / i.value) if i.high < math.inf else 50 for i in (a, b)))
    return Interval(value * math.exp(-min(low, 50)), value, value * math.exp(min(high, 50)))
