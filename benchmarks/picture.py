"""The picture in README.md: the lines of a recorded run that say most, drawn as a terminal shows them.

Usage:  python benchmarks/picture.py
Reads:  benchmarks/transcripts/cpu-first-line.txt
Writes: docs/images/first-run.svg; a line that is too wide ends in "…", lines left out between two are a line of "…"
"""

import re
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks/transcripts/cpu-first-line.txt"
PICTURE = ROOT / "docs/images/first-run.svg"
WIDTH = 118
SHOWN = (  # how the lines begin, in their order
    *("$ python3", "profiling", "one pass takes", "   49.4%", "   22.2%", "   10.5%", "   15.9%", "    0.4%"),
    *(
        "target fused_mlp",
        "#1 ",
        "leaving fused_mlp",
        "#7 ",
        "#9 ",
        "#14 ",
        "#15 ",
        "the loop ends",
        "re-proof",
        "verifying",
    ),
    *("What got faster", "  fused_mlp", "  matmul_768x32000", "  flash_attention", "The whole model", "  over inductor"),
    *("  a pass of the model", "  eager ", "  torch.compile ", "  torch.compile max-autotune", "  kernels over inductor "),
)
STYLES = {"$": "bold", "What got": "bold", "The whole": "bold", "  over inductor": "bold green", "  kernels over": "green"}


def picture() -> str:
    screen = Console(width=WIDTH, file=StringIO(), record=True, force_terminal=True, color_system="truecolor")
    for line in lines():
        screen.print(Text(line, style(line), no_wrap=True, overflow="ellipsis"))
    nothing_loaded = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return screen.export_svg(title="autokernel", unique_id="first-run", code_format=nothing_loaded)


def lines() -> list[str]:
    """Those of SHOWN, with a line of "…" wherever some of the record's are left out."""
    record = [line for line in RECORD.read_text().splitlines() if line and not line.startswith("# ")]
    chosen, last = [], -1
    for start in SHOWN:
        place = next(i for i in range(last + 1, len(record)) if record[i].startswith(start))
        chosen += ["…"] * (last >= 0 and place > last + 1) + [record[place]]
        last = place
    return chosen


def style(line: str) -> str:
    if line.startswith("#"):
        return "green" if " kept" in line else "dim"
    return next((style for start, style in STYLES.items() if line.startswith(start)), "")


if __name__ == "__main__":
    PICTURE.write_text(picture())
