"""Experiments and runs as tables: for a terminal, and aligned plain lines elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autokernel.common.table import plain
from autokernel.common.words import counted
from autokernel.history.experiments import Experiment, Status
from autokernel.history.progress import incumbent, loop_gain, rows_of, tried
from autokernel.history.status import Proof, known_rows, read_outline, read_proofs
from autokernel.integration.verification.record import Verification
from autokernel.run.workspace import PLAN, VERIFY, find_run

NONE = "–"


@dataclass(frozen=True)
class Comparable:
    """A run, as it is compared with another one."""

    tag: str
    model: str
    verdict: str
    experiments: int
    kept: int
    judging: str  # h:min:s
    cost_usd: float
    targets: Mapping[str, str]  # name -> its best kernel

    @staticmethod
    def of(root: Path, tag: str) -> "Comparable":
        """Raises NoRun, BadRecord."""
        run = find_run(root, tag)
        rows, outline, proofs = known_rows(root, tag).rows, read_outline(run / PLAN), read_proofs(run.folder)
        verdict = Verification.read(run / VERIFY).verdict if (run / VERIFY).exists() else "not verified yet"
        return Comparable(
            tag,
            outline.model,
            verdict.removeprefix(outline.model).strip(),
            len(tried(rows)),
            sum(row.status == Status.KEPT for row in tried(rows)),
            str(timedelta(seconds=round(sum(row.seconds for row in rows)))),
            sum(row.cost_usd for row in rows),
            {t.name: _best(t.share, rows_of(t, rows), proofs.get(t.name)) for t in outline.targets},
        )


def _best(share: float, rows: Sequence[Experiment], proof: Proof | None) -> str:
    best = incumbent(rows)
    if best is None:
        return f"{share:.1%} of the time; no kernel"
    gain = f"about {loop_gain(rows):.2f}x its starter"
    if proof and proof.commit == best.commit:
        gain = f"{proof.gain} its starter{'' if proof.confirmed else ' (not confirmed)'}" if proof.gain else "the starter"
    eager = f", {best.speedup_vs_pytorch:.2f}x eager" if best.speedup_vs_pytorch else ""
    return f"{share:.1%} of the time; #{best.experiment}: {gain}{eager}; {counted(tried(rows), 'experiment')}"


def compare(root: Path, tags: Sequence[str]) -> list[dict[str, object]]:
    """For programs: each run's figures."""
    return [asdict(Comparable.of(root, tag)) for tag in tags]


def compared(root: Path, tags: Sequence[str], console: Console | None = None) -> str:
    """For people: runs beside each other on a terminal; plain lines elsewhere."""
    runs = [Comparable.of(root, tag) for tag in tags]
    names = dict.fromkeys(name for run in runs for name in run.targets)
    rows = [
        ("model", *(run.model for run in runs)),
        ("verdict", *(run.verdict for run in runs)),
        ("experiments", *(f"{run.experiments}, {run.kept} kept" for run in runs)),
        ("judging, h:min:s", *(run.judging for run in runs)),
        ("cost", *(f"${run.cost_usd:.2f}" for run in runs)),
        *((name, *(run.targets.get(name, NONE) for run in runs)) for name in names),
    ]
    console = console or Console(highlight=False)
    if not console.is_terminal:
        return "\n".join(plain(("", *tags), rows, left=True))
    table = Table("", *tags, show_edge=False, pad_edge=False, show_lines=True)
    for row in rows:
        table.add_row(*map(Text, row))
    with console.capture() as drawn:
        console.print(table)
    return drawn.get().rstrip()
