"""The picture in README.md: the lines of a recorded run that say most, drawn as a terminal shows them.

Usage:  python benchmarks/picture.py
Reads:  benchmarks/transcripts/cpu-first-line-short-2.15.txt
Writes: docs/images/first-run.svg; a line that is too wide ends in "…", lines left out between two are a line of "…"
"""

import re
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks/transcripts/cpu-first-line-short-2.15.txt"
PICTURE = ROOT / "docs/images/first-run.svg"
WIDTH = 118
SHOWN = (  # how the lines begin, behind the seconds, in their order
    *("$ python3", "profiling", "one pass takes", "   48.9%", "   35.0%", "   11.3%", "    2.3%", "    1.4%"),
    *("target matmul_768x32000", "#1 ", "#2 ", "#5 ", "target fused_mlp", "#6 ", "#7 ", "the loop ends", "confirmation"),
    *("verifying", "  matmul_768x768_float32 is left out", "  2 of 4 kernels stay over inductor"),
    *("models/llama.py:MiniLlama", "  autokernel.apply", "What got faster", "  matmul_768x32000", "  fused_mlp"),
    *("  a pass of the model", "  eager ", "  torch.compile ", "  torch.compile max-autotune", "  kernels over inductor "),
)
STYLES = {"$": "bold", "What got": "bold", "models/llama.py": "bold green", "  kernels over": "green"}
SECONDS = re.compile(r" *\d+\.\d ")  # since the start, before each line but the command


def picture() -> str:
    screen = Console(width=WIDTH, file=StringIO(), record=True, force_terminal=True, color_system="truecolor")
    for line in lines():
        screen.print(Text(line, style(line), no_wrap=True, overflow="ellipsis"))
    nothing_loaded = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return screen.export_svg(title="autokernel", unique_id="first-run", code_format=nothing_loaded)


def lines() -> list[str]:
    """Those of SHOWN, with a line of "…" wherever some of the record's are left out."""
    record = [line for line in RECORD.read_text().splitlines() if not line.startswith("# ")]
    chosen, last = [], -1
    for start in SHOWN:
        place = next(i for i in range(last + 1, len(record)) if SECONDS.sub("", record[i], 1).startswith(start))
        chosen += ["…"] * (last >= 0 and place > last + 1) + [record[place]]
        last = place
    return chosen


def style(line: str) -> str:
    line = SECONDS.sub("", line, 1)
    if line.startswith("#"):
        return "green" if " kept" in line else "dim"
    return next((style for start, style in STYLES.items() if line.startswith(start)), "")


if __name__ == "__main__":
    PICTURE.write_text(picture())
