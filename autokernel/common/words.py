"""Words that scripts, reports and records share."""

from collections.abc import Sized


def counted(things: int | Sized, noun: str) -> str:
    """How many there are: "1 kernel", "2 kernels", "0 processes"."""
    number = things if isinstance(things, int) else len(things)
    return f"{number} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"


def percent(share: float, digits: int = 0) -> str:
    """What is more than nothing does not read as nothing: "12%", "less than 1%"."""
    least = 10.0 ** -(digits + 2)
    return f"{share:.{digits}%}" if share >= least / 2 else f"less than {least:.{digits}%}"


def four_figures(value: float) -> str:
    """At least, for there is no exponent where more stand before the point: "12.35", "29580"."""
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"
