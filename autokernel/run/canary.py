"""Canaries: a kernel whose verdict and time are known tells which worker answers wrongly or slowly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from autokernel.common.backends import backends_for
from autokernel.common.verdict import Correctness, Verdict
from autokernel.common.words import four_figures
from autokernel.target import Plan, Target, default_target, starter_source

KERNEL_TYPE = "matmul"  # what keeps a device busiest: clocks that are held down show
EVERY_S = 1800.0  # from one canary of a worker to the next
SOON_S = 300.0  # and at least, however odd its answers are
REFUSED_IN_A_ROW = 5  # kernels by one worker: the agent's fault, or the device's
SLOW = 1.5  # times as long as the kernel took there at first, or takes on others of the kind
ODD_IN_A_ROW = 2  # canaries that were slow, or ended by crash or time limit: memory may have run out once
ALTERED = """


_right = kernel_fn


def kernel_fn(*inputs, **options):
    result = _right(*inputs, **options)
    result.view(-1)[:1].fill_(777.0)
    return result
"""


def altered(source: str) -> str:
    """The same kernel with a wrong answer: a worker that lets it pass can no more be believed than one that refuses it
    right."""
    return source + ALTERED


@dataclass
class Seen:
    """What a worker's answers were like."""

    device: str
    asked_s: float = -math.inf  # for its last canary
    suspect: bool = False
    refused: int = 0  # kernels in a row
    odd: int = 0  # canaries in a row
    known_us: float | None = None  # the time of its first canary


class Canaries:
    """Who is due for one, and what an answer to one says of the worker."""

    def __init__(self, target: Target, source: str) -> None:
        self.target, self.source = target, source
        self.seen: dict[str, Seen] = {}

    @staticmethod
    def of(plan: Plan) -> "Canaries":
        dtype = torch.float32 if plan.device == "cpu" else torch.float16
        target = default_target(KERNEL_TYPE, backends_for(plan.device)[0], plan.device, dtype)
        return Canaries(target, starter_source(target))

    def joined(self, worker: str, device: str) -> None:
        self.seen[worker] = Seen(device)

    def due(self, worker: str, now_s: float) -> bool:
        seen = self.seen[worker]
        return now_s >= seen.asked_s + (SOON_S if seen.suspect else EVERY_S)

    def asked(self, worker: str, now_s: float) -> None:
        self.seen[worker].asked_s, self.seen[worker].suspect = now_s, False

    def judged(self, worker: str, verdict: Verdict) -> None:
        """Of an experiment, which may be the worker's fault."""
        seen = self.seen[worker]
        seen.refused = 0 if verdict.correctness == Correctness.PASS else seen.refused + 1
        timeout = verdict.correctness == Correctness.TIMEOUT
        seen.suspect |= bool(verdict.undecided) or timeout or seen.refused >= REFUSED_IN_A_ROW

    def doubted(self, worker: str) -> None:
        self.seen[worker].suspect = True

    def fault(self, worker: str, verdict: Verdict, others: Sequence[str]) -> str:
        """Why the worker is to judge nothing more; empty where the canary was as it should be, or says nothing.

        `others` could judge in its place: without any, slowness is no reason, for what is compared is timed together.
        """
        seen = self.seen[worker]
        if verdict.undecided:
            return ""
        if verdict.correctness == Correctness.FAIL:
            return f"it judged a known kernel wrongly ({verdict.why})"
        odd = self._odd(seen, verdict, [self.seen[other] for other in others])
        seen.odd = seen.odd + 1 if odd else 0
        seen.refused = 0
        if not odd:
            seen.known_us = seen.known_us or verdict.latency_us
        elif seen.odd < ODD_IN_A_ROW:
            seen.asked_s = -math.inf  # at once, once more
        elif others:
            return f"a known kernel {odd}, {seen.odd} times in a row"
        return ""

    def _odd(self, seen: Seen, verdict: Verdict, others: Sequence[Seen]) -> str:
        """What is not as known, in words."""
        if verdict.correctness != Correctness.PASS:
            return f"did not end ({verdict.why})"
        alike = [other.known_us for other in others if other.device == seen.device and other.known_us]
        known = [*([seen.known_us] if seen.known_us else []), *([median(alike)] if alike else [])]
        if known and verdict.latency_us and verdict.latency_us > SLOW * min(known):
            return f"took {four_figures(verdict.latency_us)} us instead of {four_figures(min(known))}"
        return ""
