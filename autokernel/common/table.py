"""Tables: Rich's on a terminal, aligned plain lines elsewhere (in which nothing is wrapped or cut, so that grep works)."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """To stdout. The first and the last column are words, aligned to the left; those between are numbers."""
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left")
        for column, side in zip(columns, _justify(columns)):
            table.add_column(column, justify=side)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
        return
    print(title, *plain(columns, rows), sep="\n")


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]], left: bool = False) -> list[str]:
    """The table as aligned lines, the first of them the columns' names; all of it words, with `left`."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    sides = ["left"] * len(columns) if left else _justify(columns)
    cells = ([c.ljust(w) if s == "left" else c.rjust(w) for c, w, s in zip(r, widths, sides)] for r in (columns, *rows))
    return ["  ".join(row).rstrip() for row in cells]


def _justify(columns: Sequence[str]) -> list[str]:
    return ["left", *["right"] * (len(columns) - 2), "left"]
