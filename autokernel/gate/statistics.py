"""Paired comparison: intervals over process pairs, and when enough has been seen."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from scipy.special import stdtrit

from autokernel.gate.verdict import Interval


def ratio_interval(log_ratios: Sequence[float], confidence: float) -> Interval:
    """Two-sided t interval of the geometric mean of ratios, one log-ratio per process pair.

    The pair is the unit: a process carries a bias of its own that more calls inside it cannot remove. One pair says
    nothing of its own spread: its interval is unbounded.
    """
    centre = mean(log_ratios)
    if len(log_ratios) < 2:
        return Interval(0.0, math.exp(centre), math.inf)
    quantile = stdtrit(len(log_ratios) - 1, 0.5 + confidence / 2)
    half_width = float(quantile) * stdev(log_ratios) / math.sqrt(len(log_ratios))
    # exp() of a huge half-width would overflow; such an interval says nothing anyway
    return Interval(math.exp(max(centre - half_width, -50)), math.exp(centre), math.exp(min(centre + half_width, 50)))
