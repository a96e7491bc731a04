"""The tables of kernels in docs/measurements.md and the full ones beside the records, written from these and nothing else.

Usage: python benchmarks/tables.py          (writes them)
       python benchmarks/tables.py --check  (exit status 1, and the files named, if they are not what the records say)
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.standings import LIMITS, ROWS, goals, standing

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "measurements.md"
BEGIN = "<!-- measured: written by benchmarks/tables.py from the records beside it -->\n"
END = "<!-- end -->\n"
WHO = ("eager", "torch", "compile", "liger", "cudnn", "flash", "triton", "cuda")
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
    cpu = FOLDER / "cpu.json"
    lines = [] if not cpu.exists() else list(_cpu_kernels(json.loads(cpu.read_text())))
    for path in gpu_records():
        lines += [*_gpu_summary(path), ""]
    return "\n".join(lines) + "\n" if lines else "No record yet: `python benchmarks/cpu.py` makes the first.\n"


def _cpu_kernels(record: Mapping[str, Any]) -> Iterator[str]:
    """One table for each machine and version that the records come from."""
    machines = sorted({(entry["device"], entry["torch"], entry["date"]) for entry in record.values()})
    for machine in machines:
        device, torch_version, day = machine
        yield f"C++ kernels, fp32, on {device} (PyTorch {torch_version}, {day}), `python benchmarks/cpu.py`:\n"
        yield from _table(COLUMNS, "llrrrl", [row(*x) for x in sorted(record.items()) if _machine(x[1]) == machine])
        yield ""


def _machine(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (entry["device"], entry["torch"], entry["date"])


def _table(columns: Sequence[str], sides: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """In Markdown; `sides` has an l or an r for each column."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "|".join({"l": "---", "r": "--:"}[side] for side in sides) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def gpu_records() -> list[Path]:
    return sorted(FOLDER.glob("kernels-*.json"))


def _gpu_summary(path: Path) -> Iterator[str]:
    """One line for each type, over all its cases and both dtypes."""
    record = json.loads(path.read_text())
    machines = [entry["machine"] for entry in record.values()]
    device, torch_version = machines[0]["device"], machines[0]["torch"]
    dtypes = sorted({entry["case"].split()[-1] for entry in record.values()}, reverse=True)
    days = sorted({machine["date"] for machine in machines})
    yield (
        f"GPU kernels, {' and '.join(dtypes)}, on one {device} (PyTorch {torch_version}, {' to '.join(days)}), "
        f"`python benchmarks/kernels.py`; every case and every peer is in `benchmarks/{path.stem}.md`. "
        "Here: the better of our two backends in each case, against the memory's limit (a copy, or for reductions a pass "
        "that reads) and the fastest of PyTorch eager, its best single call, torch.compile max-autotune, Liger, cuDNN:\n"
    )
    yield from _table(
        ("kernel", "cases", "time over the limit, worst case", "speed over the best peer, geometric mean", "worst case"),
        "lrrrr",
        [_summary_row(name, entries) for name, entries in _by_type(record).items()],
    )


def _by_type(record: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    types = sorted({entry["kernel_type"] for entry in record.values()})
    return {name: [entry for entry in record.values() if entry["kernel_type"] == name] for name in types}


def _summary_row(name: str, entries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    standings = [s for s in map(standing, entries) if s]
    limits = [s.vs_limit for s in standings if s.vs_limit]
    peers = [s.vs_peer for s in standings if s.vs_peer]
    return (
        name,
        f"{len(standings)} of {len(entries)}" if len(standings) < len(entries) else f"{len(entries)}",
        f"{max(limits, key=lambda r: r.value)}" if limits else "",
        f"{geometric_mean(r.value for r in peers):.2f}x" if peers else "",
        f"{min(peers, key=lambda r: r.value)}" if peers else "",
    )


def gpu_tables(path: Path) -> str:
    """Everyone's median time in every case."""
    record = json.loads(path.read_text())
    lines = [
        f"# {path.stem}",
        "",
        f"Written by `benchmarks/tables.py` from [{path.name}]({path.name}), which has every round's times, and each row's "
        "device, driver, clocks, versions and command. Median microseconds a call; ratios within rounds, median and 95 % "
        "interval. `copy` is the driver's device-to-device copy of the largest input, `read` a pass that only reads it.",
        "",
    ]
    device = next(iter(record.values()))["machine"]["device"]
    lines += ["## Goals", "", *_table(("goal", "types", "met in", "worst case"), "llrl", _goal_rows(record, device)), ""]
    for name, entries in _by_type(record).items():
        present = [who for who in (*LIMITS, *WHO) if any(who in e["us"] or who in e["failed"] for e in entries)]
        more = sorted({who for e in entries for who in (*e["us"], *e["failed"])} - {*LIMITS, *WHO})
        columns = ("case", *present, *more, "ours / limit", "best peer / ours", "of peak")
        rows = [_gpu_row(entry, (*present, *more)) for entry in entries]
        lines += [f"## {name}", "", *_table(columns, "l" + "r" * (len(columns) - 1), rows), ""]
        notes = Counter(f"{who}: {why}" for e in entries for who, why in e["failed"].items())
        notes += Counter(f"{who}: not captured as a CUDA graph" for e in entries for who in e["not_captured"])
        lines += [*(f"- {note} ({cases} of {len(entries)} cases)" for note, cases in notes.items()), ""] if notes else []
    return "\n".join(lines).rstrip() + "\n"


def _goal_rows(record: Mapping[str, Any], device: str) -> Iterator[tuple[str, ...]]:
    found = [(s, entry) for entry in record.values() if (s := standing(entry))]
    for goal in goals("H100" in device):
        cases = [(goal.value(s, e), f"{s.kernel_type} {s.case}") for s, e in found if s.kernel_type in goal.types]
        counted = [(value, name) for value, name in cases if value is not None]
        if counted:
            value, name = goal.worst(counted)
            met = sum(goal.met(value) for value, _ in counted)
            yield (goal.words, ", ".join(goal.types), f"{met} of {len(counted)}", f"{value:.2f}, {name}")
    for types, least in ((ROWS, 1.05 if "H100" in device else 1.15), (("fused_mlp",), 1.03)):
        if gains := [s.vs_peer.value for s, _ in found if s.kernel_type in types and s.vs_peer]:
            words = f"geometric mean over the best peer, at least {least}"
            yield (
                words,
                ", ".join(types),
                "yes" if geometric_mean(gains) >= least else "no",
                f"{geometric_mean(gains):.2f}",
            )


def _gpu_row(entry: Mapping[str, Any], who: Sequence[str]) -> tuple[str, ...]:
    us, best = entry["us"], standing(entry)
    times = (f"{median(us[name]):.1f}" if name in us else "-" for name in who)
    if best is None:
        return (entry["case"], *times, "", "", "")
    ahead = f"{best.vs_peer} ({best.peer} / {best.ours})" if best.vs_peer else ""
    return (entry["case"], *times, f"{best.vs_limit or ''}", ahead, of_peak(entry, best.ours))


def of_peak(entry: Mapping[str, Any], name: str) -> str:
    """What a contestant attains of the rate that bounds this case: "78 % of 989 TFLOP/s"."""
    peak, seconds = entry["peak"], median(entry["us"][name]) / 1e6
    shares = {
        f"{peak['tflops']:.0f} TFLOP/s": entry["flops"] / seconds / 1e12 / peak["tflops"],
        f"{peak['gb_s']:.0f} GB/s": entry["bytes_moved"] / seconds / 1e9 / peak["gb_s"],
    }
    what, share = max(shares.items(), key=lambda x: x[1])
    return f"{share:.0%} of {what}"


def _written(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + section() + END + after


def outputs() -> dict[Path, str]:
    """Every file that is written here, and what it must say."""
    return {PAGE: _written(PAGE.read_text())} | {p.with_suffix(".md"): gpu_tables(p) for p in gpu_records()}


def write() -> None:
    for path, text in outputs().items():
        path.write_text(text)


def stale() -> list[Path]:
    return [path for path, text in outputs().items() if not path.exists() or path.read_text() != text]


if __name__ == "__main__":
    if "--check" in sys.argv:
        raise SystemExit(", ".join(path.name for path in stale()) or 0)
    write()
