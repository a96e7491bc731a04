"""The experiments of a run as a table for a terminal; without PyTorch, whose import takes long."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autokernel.history.experiments import Experiment, Status

STYLES = {Status.KEPT: "green", Status.RESET: "dim", Status.UNDECIDED: "yellow", Status.TIMEOUT: "yellow"}  # else red


def log_table(rows: Sequence[Experiment], times: Mapping[str, str], console: Console | None = None) -> str:
    """The experiments for eyes, as wide as the terminal; `times` by commit."""
    console = console or Console(highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("time", no_wrap=True)
    table.add_column("target", overflow="fold", max_width=26)
    table.add_column("outcome")
    table.add_column("speedup", no_wrap=True)
    table.add_column("description", ratio=1, overflow="fold")
    for row in rows:
        outcome = Text(row.status, style=STYLES.get(row.status, "red"))
        cells = (str(row.experiment), times.get(row.commit, ""), row.target)
        table.add_row(*map(Text, cells), outcome, Text(row.gain), Text(row.description))
    with console.capture() as drawn:
        console.print(table)
    return drawn.get().rstrip()
