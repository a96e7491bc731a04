"""The README's section of measured results, written from the records in this folder and from nothing else.

Usage: python benchmarks/tables.py          (writes the section)
       python benchmarks/tables.py --check  (exit status 1 if it is not what the records say)
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent / "README.md"
BEGIN = "<!-- measured: written by benchmarks/tables.py from the records beside it -->\n"
END = "<!-- end -->\n"
COLUMNS = ("kernel", "case", "% of peak", "vs eager", "vs torch.compile", "eager form")


def row(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """A record of one kernel as cells; a kernel that the gate refused has its verdict instead of numbers."""
    verdict = entry["verdict"]
    if verdict["correctness"] != "PASS":
        return (name, entry["case"], verdict["correctness"], "", "", entry["eager_form"])
    compute = verdict["bottleneck"] == "compute"
    peak = verdict["pct_peak_compute" if compute else "pct_peak_bandwidth"]
    speedups = (_interval(verdict["speedup_vs_pytorch"]), _interval(verdict["speedup_vs_compile"]))
    return (name, entry["case"], f"{peak:.0f}", *speedups, entry["eager_form"])


def _interval(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""


def section() -> str:
    record = FOLDER / "cpu.json"
    if not record.exists():
        return "No record yet: `python benchmarks/cpu.py` makes the first.\n"
    return "\n".join(_kernels(json.loads(record.read_text()))) + "\n"


def _kernels(record: Mapping[str, Any]) -> Iterator[str]:
    """One table for each machine and version that the records come from."""
    machines = sorted({(entry["device"], entry["torch"], entry["date"]) for entry in record.values()})
    for machine in machines:
        device, torch_version, day = machine
        yield f"C++ kernels, fp32, on {device} (PyTorch {torch_version}, {day}), `python benchmarks/cpu.py`:\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "|---|---|--:|--:|--:|---|"
        for name, entry in sorted(record.items()):
            if (entry["device"], entry["torch"], entry["date"]) == machine:
                yield "| " + " | ".join(row(name, entry)) + " |"
        yield ""


def _written(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + section() + END + after


def write_section() -> None:
    README.write_text(_written(README.read_text()))


if __name__ == "__main__":
    if "--check" in sys.argv:
        raise SystemExit(_written(README.read_text()) != README.read_text())
    write_section()
