"""How our kernels stand in a record of kernels.py: against the memory's limit, the best peer, and the goals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LIMITS = ("copy", "read")
OURS = ("triton", "cuda", "cpp")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two contestants' times: the median over the rounds, with its 95 % interval."""

    low: float
    value: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(times: Sequence[float], over: Sequence[float]) -> Ratio:
    """times / over, paired by round. The interval is of the median, by order statistics: it assumes no distribution."""
    ratios = sorted(a / b for a, b in zip(times, over))
    n, k = len(ratios), 0
    while sum(math.comb(n, i) for i in range(k + 2)) <= 0.025 * 2**n:  # so seldom are at most k + 1 of n below the median
        k += 1
    return Ratio(ratios[k], median(ratios), ratios[n - 1 - k])


@dataclass(frozen=True)
class Standing:
    """One row of a GPU record, summed up: the best of our kernels against the limit and against the best peer."""

    kernel_type: str
    case: str
    ours: str
    peer: str
    vs_limit: Ratio | None  # our time over the limit's
    vs_peer: Ratio | None  # the best peer's time over ours: above 1 we are faster


def standing(entry: Mapping[str, Any]) -> Standing | None:
    """None where none of ours was timed."""
    us = entry["us"]
    ours = [name for name in us if name.startswith(OURS)]
    if not ours:
        return None
    best = min(ours, key=lambda name: median(us[name]))
    peers = [name for name in us if name not in (*ours, *LIMITS)]
    peer = min(peers, key=lambda name: median(us[name]), default="")
    limit = next((name for name in LIMITS if name in us), None)
    return Standing(
        entry["kernel_type"],
        entry["case"],
        best,
        peer,
        limit and ratio(us[best], us[limit]),
        ratio(us[peer], us[best]) if peer else None,
    )


ROWS = ("softmax", "layernorm", "rmsnorm", "cross_entropy", "rotary_embedding", "reduce")
LARGE_BYTES = 32 << 20


@dataclass(frozen=True)
class Goal:
    """What our kernels are to reach in every case of some types: `value` of a case, None where the goal does not apply."""

    words: str
    types: tuple[str, ...]
    value: Callable[[Standing, Mapping[str, Any]], float | None]
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return value >= self.least if self.least is not None else value <= self.most

    @property
    def worst(self) -> Callable[..., tuple[float, str]]:
        return min if self.least is not None else max


def over_limit(s: Standing, entry: Mapping[str, Any]) -> float | None:
    return s.vs_limit and s.vs_limit.value


def over_limit_large(s: Standing, entry: Mapping[str, Any]) -> float | None:
    return over_limit(s, entry) if entry["bytes_moved"] >= LARGE_BYTES else None


def over_peer(s: Standing, entry: Mapping[str, Any]) -> float | None:
    return s.vs_peer and s.vs_peer.value


def over_peer_surely(s: Standing, entry: Mapping[str, Any]) -> float | None:
    return s.vs_peer and s.vs_peer.low


def over_peer_above(times: float) -> Callable[[Standing, Mapping[str, Any]], float | None]:
    """Where the best peer takes more than so many times the limit."""

    def value(s: Standing, entry: Mapping[str, Any]) -> float | None:
        slow = s.vs_peer and s.vs_limit and s.vs_peer.value * s.vs_limit.value > times
        return s.vs_peer.value if slow else None

    return value


def goals(h100: bool) -> tuple[Goal, ...]:
    far = 1.35 if h100 else 1.6
    return (
        Goal("at most 1.08 times the limit", ROWS[:3], over_limit, most=1.08),
        Goal("at most 1.10 times the limit", ROWS[3:4], over_limit, most=1.10),
        Goal("at most 1.10 times the limit, from 32 MiB on", ROWS[4:], over_limit_large, most=1.10),
        Goal("never behind the best peer: lower end at least 0.98", ROWS, over_peer_surely, least=0.98),
        Goal(
            f"at least {far} times the best peer where that is above 1.25 times the limit",
            ROWS,
            over_peer_above(1.25),
            least=far,
        ),
        Goal(
            f"the same where that is above {far} times the limit: elsewhere even a kernel at its limit falls short",
            ROWS,
            over_peer_above(far),
            least=far,
        ),
        Goal("at least as fast as the best peer, ties down to 0.98", ("matmul",), over_peer, least=0.98),
        Goal("at least as fast as the best peer", ("fused_mlp", "flash_attention"), over_peer, least=1.0),
    )
