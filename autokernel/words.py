"""Words that scripts, reports and records share."""

from collections.abc import Sized


def counted(things: int | Sized, noun: str) -> str:
    """How many there are: "1 kernel", "2 kernels", "0 kernels"."""
    number = things if isinstance(things, int) else len(things)
    return f"{number} {noun}{'s' * (number != 1)}"
