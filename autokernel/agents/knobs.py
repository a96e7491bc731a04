"""A kernel's knobs, its TUNABLES: read and set in its text without running it; what autotuning saw, in words."""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autokernel.gate.source import constants
from autokernel.gate.timing.autotune import Looked


@dataclass(frozen=True)
class Knobs:
    """The tunables of a source: their candidate values, and the values that stand in it."""

    choices: dict[str, list]
    current: dict[str, object]


def read_knobs(source: str) -> Knobs:
    """TUNABLES and the constants it names. Raises SyntaxError."""
    literals = constants(source)
    choices = {name: list(values) for name, values in literals.get("TUNABLES", {}).items() if name in literals}
    return Knobs(choices, {name: literals[name] for name in choices})


def set_knob(source: str, name: str, value: object) -> str:
    """The source with its line `NAME = value` rewritten, comment kept. Raises ValueError if there is no such line."""
    edited, count = re.subn(
        rf"(?m)^({re.escape(name)}\s*=\s*)([^#\n]*?)(\s*(?:#.*)?)$", rf"\g<1>{value!r}\g<3>", source, count=1
    )
    if not count:
        raise ValueError(f"no line `{name} = …` in the source")
    return edited


def with_setting(source: str, setting: Mapping[str, object]) -> str:
    """The source with several knobs set. Raises ValueError."""
    for name, value in setting.items():
        source = set_knob(source, name, value)
    return source


def structure(source: str) -> str:
    """What is left of a source when its knobs are taken out: equal for two settings of one kernel."""
    return with_setting(source, dict.fromkeys(read_knobs(source).choices))


def changes(old: str, new: str) -> str:
    """The knobs that differ, "A 1 -> 2, B 4 -> 8"."""
    before, after = read_knobs(old).current, read_knobs(new).current
    return ", ".join(f"{n} {before.get(n)} -> {v}" for n, v in after.items() if v != before.get(n))


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


def in_words(looked: Sequence[Looked], first: str, most: int = 10) -> str:
    """The fastest settings against the `first` source, a line each; then, how many failed, and why one did."""
    own = next((one for one in looked if one.source == first), None)
    if own is None or own.seconds == math.inf:
        return f"nothing to compare with, the kernel itself fails: {own.reason if own else 'there was no time for it'}"
    timed = [one for one in looked if one.seconds < math.inf]
    failed = [one for one in looked if one.seconds == math.inf]
    lines = [f"{len(timed)} of {len(looked)} could be timed; this is no verdict, the fastest of many are partly lucky"]
    for one in timed[:most]:
        what = "as it is" if one is own else changes(first, one.source) or "another source"
        lines.append(f"{own.seconds / one.seconds:.3f}x  {1e6 * one.seconds:.4g} us  {what}")
    if failed:
        lines.append(f"{len(failed)} failed; {changes(first, failed[0].source) or 'the first'}: {failed[0].reason}")
    return "\n".join(lines)
