"""What an agent has spent, in a file that survives a kill: a stop before the cap, never after it."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from autokernel.agents import OutOfBudget


@dataclass(frozen=True)
class Price:
    """USD per million tokens."""

    input: float
    output: float
    cache_read: float
    cache_write: float = 1.0  # of the input price
    long: float = math.inf  # tokens: prompts of more cost `long_factor` as much, the answer included
    long_factor: float = 1.0

    def factor(self, prompt_tokens: int) -> float:
        return self.long_factor if prompt_tokens > self.long else 1.0


@dataclass(frozen=True)
class Spent:
    usd: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.usd + other.usd, self.tokens + other.tokens)


def cost(price: Price, fresh: int, written: int, read: int, out: int) -> Spent:
    """Of one call: tokens read fresh, written to the cache and read from it, and the answer's."""
    prompt = fresh + written + read
    usd = (fresh + written * price.cache_write) * price.input + read * price.cache_read + out * price.output
    return Spent(usd * price.factor(prompt) / 1e6, prompt + out)


class Purse:
    """One run's spending. A call's line is written before it, with the most that it may cost, and again after it.

    A call that a kill interrupts has been paid for, but nobody knows how much: its first line stands.
    """

    def __init__(self, path: Path | None, budget_usd: float, budget_tokens: int | None, known: Spent = Spent()) -> None:
        """`known` is what the run's rows say; the file may know of more: of calls that came to no row."""
        self.path, self.budget_usd, self.budget_tokens = path, budget_usd, budget_tokens
        self.calls: dict[int, Spent] = {}
        self.before = Spent()
        self.refresh()
        self.before = Spent(max(0.0, known.usd - self.spent.usd), max(0, known.tokens - self.spent.tokens))

    def refresh(self) -> None:
        """Read what others have written since: a run may have several agents that are paid, and the cap is one for all."""
        if not self.path or not self.path.exists():
            return
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # torn off by a kill: the call was not made yet, or its first line stands
            self.path.write_text(whole)
        for entry in map(json.loads, whole.splitlines()):
            self.calls[entry["call"]] = Spent(entry["usd"], entry["tokens"])

    @property
    def spent(self) -> Spent:
        return sum(self.calls.values(), self.before)

    def affordable(self, price: Price, prompt_tokens: int) -> float:
        """How long the answer to such a prompt may be, in tokens, without passing a cap; negative: not even the prompt.

        Whole, or infinite: what is free passes no cap of dollars.
        """
        left = self.budget_usd - self.spent.usd - cost(price, 0, prompt_tokens, 0, 0).usd
        each = price.output * price.factor(prompt_tokens) / 1e6
        allowed = left // each if each else math.copysign(math.inf, left)
        if self.budget_tokens is not None:
            allowed = min(allowed, self.budget_tokens - self.spent.tokens - prompt_tokens)
        return allowed

    def reserve(self, most: Spent) -> int:
        """Note a call that may cost `most`; returns its number."""
        call = max(self.calls, default=0) + 1
        self.settle(call, most)
        return call

    def settle(self, call: int, spent: Spent) -> None:
        self.calls[call] = spent
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps({"call": call, "usd": spent.usd, "tokens": spent.tokens}) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def out(self, most: Spent) -> OutOfBudget:
        spent = self.spent
        tokens = f" and {spent.tokens:,} of {self.budget_tokens:,} tokens" if self.budget_tokens is not None else ""
        return OutOfBudget(
            f"the agent's cap: ${spent.usd:.2f} of ${self.budget_usd:.2f}{tokens} spent, "
            f"and the next call could cost ${most.usd:.2f} and {most.tokens:,} tokens"
        )
