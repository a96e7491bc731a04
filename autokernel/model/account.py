"""What becomes of all of a pass's time, in words: it is a kernel's to have, or else there is a reason why not."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

MIN_SHARE = 0.005  # reasons with less of the time are told together
MAX_NAMES, MAX_WORDS = 3, 160  # operators that are named beside a reason; characters of one
# Part of an operator's name -> what it is, where a model's time may well be in it alone.
WHOLE = {
    "grouped_mm": "the products of all experts in one operator: each one's rows are known only while it runs",
    "_cell": "one step of a recurrent module, in one operator",
    "lstm": "a whole nn.LSTM, all of its steps, in one operator of cuDNN or oneDNN",
    "gru": "a whole nn.GRU, all of its steps, in one operator of cuDNN or oneDNN",
    "rnn_": "a whole nn.RNN, all of its steps, in one operator of cuDNN or oneDNN",
    "flex_attention": "attention with a score function of the model's own, one operator that only torch.compile fuses",
    "_native_multi_head_attention": "nn.MultiheadAttention's fast path, all of it in one operator",
    "convolution": "a convolution",
    "conv1d": "a convolution",
    "conv2d": "a convolution",
    "conv3d": "a convolution",
    "conv_transpose": "a transposed convolution",
}


class Standing(str, Enum):
    """What can become of an operation; every one has exactly one."""

    COVERED = "in operations that kernels can compute"
    REFUSED = "in what looks like one and is none"
    OTHER = "in operations without a kernel type"
    UNCAPTURED = "not captured"


def shares(hotspots: Iterable[Any]) -> dict[Standing, float]:
    """Of the device time; they add up to 1."""
    found = dict.fromkeys(Standing, 0.0)
    for h in hotspots:
        found[h.standing] += h.share
    return found


def summary(hotspots: Iterable[Any]) -> str:
    parts = [f"{share:.1%} is {standing.value}" for standing, share in shares(hotspots).items() if share]
    return f"of the device time {', '.join(parts)}"


def not_covered(hotspots: Sequence[Any]) -> Iterator[tuple[float, str]]:
    """(share, what it is and why no kernel computes it) of all that is not covered, the largest first in each standing."""
    for standing in (Standing.REFUSED, Standing.UNCAPTURED, Standing.OTHER):
        by_reason: dict[str, list[Any]] = defaultdict(list)
        for h in hotspots:
            if h.standing == standing:
                by_reason[h.why or what_it_is(h.name)].append(h)
        told, rest = [], []
        for why, same in by_reason.items():
            entry = sum(h.share for h in same), _words(standing, why, same)
            (told if entry[0] >= MIN_SHARE else rest).append(entry)
        yield from sorted(told, reverse=True)
        if rest:
            yield sum(share for share, _ in rest), f"smaller parts, {standing.value}"


def what_it_is(name: str) -> str:
    return next((words for part, words in WHOLE.items() if part in name), "")


def _words(standing: Standing, why: str, same: Sequence[Any]) -> str:
    largest = sorted(same, key=lambda h: -h.time_us)
    more = ", …" if len(largest) > MAX_NAMES else ""
    names = ", ".join(f"{h.name} {h.share:.1%}" for h in largest[:MAX_NAMES]) + more
    reason = why if len(why) <= MAX_WORDS else why[: MAX_WORDS - 1] + "…"
    if standing == Standing.OTHER:
        return f"no kernel type: {names}" + (f" ({reason})" if reason else "")
    what = what_it_is(largest[0].name)
    captured = "" if standing == Standing.REFUSED else "not captured: "
    return f"{captured}{names}{f' ({what})' if what else ''}: {reason}"


def lines(hotspots: Sequence[Any]) -> list[str]:
    """One for all of the time, and one for each reason why part of it is no kernel's to have."""
    return [summary(hotspots), *(f"  {share:6.1%}  {words}" for share, words in not_covered(hotspots))]
