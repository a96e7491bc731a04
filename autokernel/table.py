"""Tables: Rich's on a terminal, aligned plain lines elsewhere (in which nothing is wrapped or cut, so that grep works)."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """To stdout. The first and the last column are words, aligned to the left; those between are numbers."""
    justify = ["left", *["right"] * (len(columns) - 2), "left"]
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left")
        for column, side in zip(columns, justify):
            table.add_column(column, justify=side)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    print(title)
    for row in (columns, *rows):
        cells = (c.ljust(w) if side == "left" else c.rjust(w) for c, w, side in zip(row, widths, justify))
        print("  ".join(cells).rstrip())
