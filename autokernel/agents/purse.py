"""What an agent has spent, in a file that survives a kill: a stop before the cap, never after it."""

import json
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
    long_prompt: float = 1.0  # factor on all three for prompts of more than LONG tokens


LONG = 100_000
CACHE_WRITE = 1.25  # of the input price, for the five minutes that we ask for
PRICES = {  # platform.claude.com/docs/en/about-claude/pricing and the models' own pages, as of November 2026
    "claude-fable-5-1": Price(10, 50, 0.25),
    "claude-opus-5-5": Price(4, 20, 0.20),
    "claude-opus-5": Price(5, 25, 0.50),
    "claude-sonnet-5-5": Price(2, 10, 0.20),
    "claude-haiku-5-5": Price(0.10, 0.50, 0.01, long_prompt=5),
}
DEAREST = Price(10, 50, 1)  # of the public list: a model that is not in the table is charged as this, so that the cap holds


@dataclass(frozen=True)
class Spent:
    usd: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.usd + other.usd, self.tokens + other.tokens)


def price_of(model: str) -> Price:
    return PRICES.get(model, DEAREST)


def cost(model: str, fresh: int, written: int, read: int, out: int) -> Spent:
    """Of one call: tokens read fresh, written to the cache and read from it, and the answer's."""
    price, prompt = price_of(model), fresh + written + read
    usd = (fresh + written * CACHE_WRITE) * price.input + read * price.cache_read + out * price.output
    return Spent(usd * (price.long_prompt if prompt > LONG else 1) / 1e6, prompt + out)


class Purse:
    """One run's spending. A call's line is written before it, with the most that it may cost, and again after it.

    A call that a kill interrupts has been paid for, but nobody knows how much: its first line stands.
    """

    def __init__(self, path: Path | None, budget_usd: float, budget_tokens: int | None, known: Spent = Spent()) -> None:
        """`known` is what the run's rows say; the file may know of more: of calls that came to no row."""
        self.path, self.budget_usd, self.budget_tokens = path, budget_usd, budget_tokens
        self.calls: dict[int, Spent] = {}
        self.before = Spent()
        self._read()
        self.before = Spent(max(0.0, known.usd - self.spent.usd), max(0, known.tokens - self.spent.tokens))

    def _read(self) -> None:
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

    def affordable(self, model: str, prompt_tokens: int) -> int:
        """How long the answer to such a prompt may be, in tokens, without passing a cap; may be negative."""
        prompt = cost(model, 0, prompt_tokens, 0, 0)
        price = price_of(model).output * (price_of(model).long_prompt if prompt_tokens > LONG else 1)
        allowed = (self.budget_usd - self.spent.usd - prompt.usd) / price * 1e6
        if self.budget_tokens is not None:
            allowed = min(allowed, self.budget_tokens - self.spent.tokens - prompt_tokens)
        return int(allowed)

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
