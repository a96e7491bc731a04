"""A kernel's knobs, its TUNABLES: read and set in its text without running it; what autotuning saw, in words."""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autokernel.agents.sizes import Sizes, in_short, literal, read_table, sizes_of, with_table
from autokernel.common.words import four_figures
from autokernel.gate.source import constants
from autokernel.gate.timing.autotune import Looked
from autokernel.target import Target


@dataclass(frozen=True)
class Knobs:
    """The tunables of a source: their candidate values, the values that stand in it, and those of its table by sizes."""

    choices: dict[str, list]
    current: dict[str, object]
    table: dict[Sizes, dict[str, object]] = field(default_factory=dict)


def read_knobs(source: str) -> Knobs:
    """TUNABLES and the constants it names. Raises SyntaxError."""
    literals = constants(source)
    choices = {name: list(values) for name, values in literals.get("TUNABLES", {}).items() if name in literals}
    return Knobs(choices, {name: literals[name] for name in choices}, read_table(source))


def set_knob(source: str, name: str, value: object) -> str:
    """The source with its line `NAME = value` rewritten, comment kept, and the knob taken out of its table: the value holds
    for all sizes. Raises ValueError if there is no such line."""
    if table := read_table(source):
        left = {sizes: {k: v for k, v in given.items() if k != name} for sizes, given in table.items()}
        source = with_table(source, left)
    line = rf"(?m)^({re.escape(name)}\s*(?::[^=\n]*)?=\s*)([^#\n]*?)(\s*(?:#.*)?)$"
    edited, count = re.subn(line, lambda found: f"{found[1]}{literal(value)}{found[3]}", source, count=1)
    if not count:
        raise ValueError(f"no line `{name} = …` in the source")
    return edited


def with_setting(source: str, setting: Mapping[str, object]) -> str:
    """The source with several knobs set. Raises ValueError."""
    for name, value in setting.items():
        source = set_knob(source, name, value)
    return source


def structure(source: str) -> str:
    """What is left of a source when its knobs are taken out: equal for two settings of one kernel, by sizes or not."""
    plain = with_table(source, {}).rstrip()
    return with_setting(plain, dict.fromkeys(read_knobs(plain).choices))


def changes(old: str, new: str) -> str:
    """The knobs that differ, "A 1 -> 2, B 4 -> 8"; then those that differ at some sizes, "at 8x64 64: A 2 -> 4"."""
    before, after = read_knobs(old), read_knobs(new)
    words = _differing(before.current, after.current)
    for sizes in before.table | after.table:
        given = before.table.get(sizes, {}), after.table.get(sizes, {})
        if given[0] != given[1]:
            there = _differing(before.current | given[0], after.current | given[1])
            words += [f"at {in_short(sizes)}: {', '.join(there) or 'as before'}"]
    return ", ".join(words)


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [f"{n} {before.get(n)} -> {v}" for n, v in after.items() if v != before.get(n)]


def by_sizes(looked: Sequence[Looked], target: Target, least: float) -> str | None:
    """The settings of one structure that looked fastest at each of the target's sizes, as one source; None where none is
    faster there by the log gain `least` than the one that is fastest over all."""
    best: tuple[float, str] | None = None
    structures: dict[str, list[Looked]] = {}
    for one in looked:
        if one.seconds < math.inf and one.by_case and not read_knobs(one.source).table:
            structures.setdefault(structure(one.source), []).append(one)
    for same in structures.values():
        seconds, source = _composed(same, target, least)
        if read_table(source) and (best is None or seconds < best[0]):
            best = seconds, source
    return best and best[1]


def _composed(looked: Sequence[Looked], target: Target, least: float) -> tuple[float, str]:
    """One structure's settings by sizes, and the seconds that they would take."""
    general = min(looked, key=lambda one: one.seconds)
    knobs, seconds, table = read_knobs(general.source), general.seconds, {}
    places: dict[Sizes | None, list[int]] = {}
    for number, weighted in enumerate(target.cases):
        places.setdefault(sizes_of(general.source, weighted.case), []).append(number)
    for sizes, numbers in places.items() if len(places) > 1 and None not in places else ():

        def there(one: Looked, numbers: Sequence[int] = numbers) -> float:
            return sum(target.cases[n].calls * one.by_case[n] for n in numbers)

        best = min(looked, key=there)
        if there(general) < math.inf and math.log(there(general) / there(best)) > least:
            given = read_knobs(best.source).current
            table[sizes] = {name: value for name, value in given.items() if value != knobs.current[name]}
            seconds -= there(general) - there(best)
    return seconds, with_table(general.source, table)


def some_settings(source: str, count: int, seed: int = 0) -> list[str]:
    """Other settings of a source: all if they are few, else those one knob away, then a sample."""
    knobs = read_knobs(source)
    names = list(knobs.choices)
    made: dict[str, None] = {}
    if math.prod(len(values) for values in knobs.choices.values()) <= 4 * count:
        settings = list(itertools.product(*knobs.choices.values()))
        random.Random(seed).shuffle(settings)
        made = dict.fromkeys(with_setting(source, dict(zip(names, setting))) for setting in settings)
    else:
        for name, values in knobs.choices.items():
            made |= dict.fromkeys(set_knob(source, name, value) for value in values)
        drawn = random.Random(seed)
        while len(made) <= count:
            made[with_setting(source, {name: drawn.choice(values) for name, values in knobs.choices.items()})] = None
    made.pop(source, None)
    return list(made)[:count]


def in_words(looked: Sequence[Looked], first: str, target: Target | None = None, most: int = 10) -> str:
    """The fastest settings against the `first` source, a line each; of several cases, the fastest of each; then, how many
    failed, and why one did."""
    own = next((one for one in looked if one.source == first), None)
    if own is None or own.seconds == math.inf:
        return f"nothing to compare with, the kernel itself fails: {own.reason if own else 'there was no time for it'}"
    timed = [one for one in looked if one.seconds < math.inf]
    failed = [one for one in looked if one.seconds == math.inf]
    lines = [f"{len(timed)} of {len(looked)} could be timed; this is no verdict, the fastest of many are partly lucky"]
    lines += [_line(one, own.seconds, one.seconds, first) for one in timed[:most]]
    for number, weighted in enumerate(target.cases if target and len(target.cases) > 1 and own.by_case else ()):
        best = min((one for one in timed if one.by_case), key=lambda one: one.by_case[number])
        there = _line(best, own.by_case[number], best.by_case[number], first)
        lines.append(f"{weighted.case.name}, the fastest there: {there}")
    if failed:
        lines.append(f"{len(failed)} failed; {changes(first, failed[0].source) or 'the first'}: {failed[0].reason}")
    return "\n".join(lines)


def _line(one: Looked, own: float, seconds: float, first: str) -> str:
    what = "as it is" if one.source == first else changes(first, one.source) or "another source"
    return f"{own / seconds:.3f}x  {four_figures(1e6 * seconds)} us  {what}"
