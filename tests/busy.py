"""What tests of timing do where too much else goes on: they skip, with the gate's own figures as the reason."""

import pytest

from autokernel.gate import Interval, Verdict


def skip_if_wide(*speedups: Interval) -> None:
    """Skips where an interval has room for a slower kernel and for one twice as fast."""
    for speedup in speedups:
        if speedup.low < 1 < speedup.high and speedup.wide:
            pytest.skip(f"{speedup} says nothing: too much else goes on here")


def skip_if_undecided(verdict: Verdict) -> None:
    """Skips where the gate says that it cannot tell, or has measured an interval that tells nothing."""
    if not verdict.decided:
        pytest.skip(verdict.why)
    if verdict.speedup_vs_incumbent is not None:
        skip_if_wide(verdict.speedup_vs_incumbent)
