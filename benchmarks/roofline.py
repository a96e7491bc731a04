"""The roofline of a record of kernels.py: what our best kernel and the best peer attain in each case."""

import json
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.standings import standing


def plot(record: Path) -> None:
    """Write the PNG beside the record."""
    entries = [entry for entry in json.loads(record.read_text()).values() if standing(entry)]
    if not entries:
        return
    figure = Figure(figsize=(9, 5.5))
    axis = figure.subplots()
    types = sorted({entry["kernel_type"] for entry in entries})
    for i, name in enumerate(types):
        of_type = [entry for entry in entries if entry["kernel_type"] == name]
        intensity = [entry["flops"] / entry["bytes_moved"] for entry in of_type]
        best = [standing(entry) for entry in of_type]
        axis.plot(intensity, [_tflops(e, b.ours) for e, b in zip(of_type, best)], "o", color=f"C{i}", label=name, zorder=3)
        peers = [_tflops(e, b.peer) if b.peer else float("nan") for e, b in zip(of_type, best)]
        axis.plot(intensity, peers, "o", mfc="none", color=f"C{i}", markersize=9)
    peak = max((entry["peak"] for entry in entries), key=lambda p: p["tflops"])
    ends = [
        min(e["flops"] / e["bytes_moved"] for e in entries) / 2,
        max(e["flops"] / e["bytes_moved"] for e in entries) * 2,
    ]
    ridge = peak["tflops"] / peak["gb_s"] * 1e3
    corners = sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]})
    axis.plot(corners, [min(x * peak["gb_s"] / 1e3, peak["tflops"]) for x in corners], color="black", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="TFLOP/s", title=_title(entries))
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(record.with_suffix(".png"), dpi=120)


def _tflops(entry: dict, name: str) -> float:
    return entry["flops"] / median(entry["us"][name]) / 1e6


def _title(entries: list[dict]) -> str:
    machine = entries[0]["machine"]
    return f"{machine['device']}, {machine['date']}: ours filled, the best peer hollow, the device's peaks as a line"
