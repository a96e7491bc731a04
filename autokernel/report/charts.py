"""The charts of a report: progress.png, and SVG for the page, whose marks say in words what they are.

The page's are drawn in its light colours by matplotlib; each then stands there as a variable, which a dark page sets anew.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from textwrap import shorten
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from autokernel.common.words import counted
from autokernel.history.experiments import STARTER, Experiment, Status
from autokernel.history.progress import incumbent, rows_of
from autokernel.spec import load_spec
from autokernel.target import Target

PALETTE = {  # name of a CSS variable -> its colour on a light and on a dark page
    "page": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "grid": ("#eaeef2", "#21262d"),
    "accent": ("#0969da", "#4493f8"),
    "kept": ("#1a7f37", "#3fb950"),
    "reset": ("#6e7781", "#848d97"),
    "undecided": ("#9a6700", "#d29922"),
    "failed": ("#cf222e", "#f85149"),
}
SHADE = {Status.TIMEOUT: "undecided", Status.CRASH: "failed"}  # of the others: their own name
COLOURS = {status: PALETTE[SHADE.get(status, str(status))][0] for status in Status}
MUTED, INK, POINTS, PAGE = (PALETTE[name][0] for name in ("muted", "ink", "accent", "page"))
WIDE, NARROW, HEIGHT = 860, 400, 230  # of charts in the page, px: across a desktop, and a phone or half of a desktop
ROOFLINE, TICKS_PX = 340, 240  # its height; what a decade with three ticks needs of its width, and half of it upwards
PX = 1 / 72  # inches: matplotlib's SVG has 72 units an inch, whatever the dpi
LABELS, LABEL = 12, 60  # of a target in progress.png: kept experiments, the last of them; characters of one
MANY = 40  # experiments in a chart, from which on their marks are smaller
LINE_PX = 15  # between the names in a roofline, at least
SMALL = {"fontsize": 7, "ha": "center"}
PLAIN = {"text.parse_math": False}  # a hypothesis may have a dollar sign
STYLE = PLAIN | {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "autokernel",  # equal charts have equal ids
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALETTE["grid"][0],
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
}
SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


# ---- progress ----


def levels(rows: Sequence[Experiment]) -> tuple[list[float], list[float]]:
    """Of a target's experiments, each one's speedup over the starter, and the best one's so far."""
    steps = [(row.speedup_vs_incumbent or 1.0) if row.status == Status.KEPT else 1.0 for row in rows]
    best = list(accumulate(steps, lambda a, b: a * b))
    return [level / step * (row.speedup_vs_incumbent or 1.0) for row, level, step in zip(rows, best, steps)], best


def progress(rows: Sequence[Experiment]) -> Markup:
    """Every experiment of a target against its starter, and the best so far as a line."""
    with matplotlib.rc_context(STYLE):
        figure, axis = _figure(NARROW, HEIGHT)
        heights, best = levels(rows)
        numbers = [row.experiment for row in rows]
        axis.step(numbers, best, where="post", color=COLOURS[Status.KEPT], linewidth=1.5)
        words, size = {}, 8 if len(rows) < MANY else 5
        for row, height in zip(rows, heights):
            gid = f"experiment-{row.experiment}"
            words[gid] = f"#{row.experiment} {row.status} {row.gain}: {row.description}"
            look = {"markersize": size, "zorder": 4 if row.status == Status.KEPT else 3}
            _mark(axis, row.experiment, height, COLOURS[row.status], gid, row.speedup_vs_incumbent is None, **look)
        last = max(numbers[-1], numbers[0] + 5)  # wide enough for ticks at whole numbers
        margin = max(0.5, (last - numbers[0]) / 100)
        axis.set_xlim(numbers[0] - margin, last + margin)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
        axis.set(xlabel="experiment (hollow: no speedup was measured)", ylabel="over the starter")
        return _svg(figure, words)


def sparkline(rows: Sequence[Experiment]) -> Markup:
    """The best kernel so far over the starter, experiment by experiment, on a line of text."""
    _, best = levels(rows)
    top = max(best[-1], 1.05)  # a gain of a percent is no cliff
    xs = [100 * i / max(len(best) - 1, 1) for i in range(len(best))]
    ys = [26 - 22 * (level - 1) / (top - 1) for level in best]
    line = f"M{xs[0]:.1f},{ys[0]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in zip(xs[1:], ys[1:]))
    words = f"from 1.00x to {best[-1]:.2f}x its starter in {counted(len(best) - 1, 'experiment')}"
    return Markup(
        f'<svg class="spark" viewBox="0 0 100 28" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f'<title>{words}</title><path d="{line if len(best) > 1 else f"M0,{ys[0]:.1f}H100"}"/></svg>'
    )


def save_progress(path: object, targets: Sequence[Target], rows: Sequence[Experiment]) -> None:
    """progress.png: for each target, every experiment and the best so far, relative to the starter, and what was kept."""
    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(13, 2.4 * max(len(targets), 1)), layout="constrained")
        axes = figure.subplots(max(len(targets), 1), 1, squeeze=False)
        for axis, target in zip(axes[:, 0], targets):
            _plot_target(axis, target, rows_of(target, rows))
            axis.set_xlim(rows[0].experiment - 0.5, rows[-1].experiment + 0.5)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(path, dpi=120, format="png")


def _plot_target(axis: Axes, target: Target, rows: Sequence[Experiment]) -> None:
    heights, best = levels(rows)
    axis.step([row.experiment for row in rows], best, where="post", color="tab:green", linewidth=1)
    kept = []
    for row, height in zip(rows, heights):
        measured = row.speedup_vs_incumbent is not None
        axis.plot(row.experiment, height, "o" if measured else "x", color=COLOURS[row.status], markersize=5)
        if row.status == Status.KEPT:
            axis.annotate(str(row.experiment), (row.experiment, height), (0, 5), textcoords="offset points", **SMALL)
            kept.append(shorten(f"{row.experiment}  {height:.3f}x  {row.description}", LABEL, placeholder=" …"))
    hidden = [f"… {len(kept) - LABELS} more"] if len(kept) > LABELS else []
    axis.text(1.01, 1, "\n".join(hidden + kept[-LABELS:]), va="top", fontsize=7, transform=axis.transAxes)
    axis.margins(y=0.15)
    axis.set_title(target.name, fontsize=9)
    axis.set_ylabel("vs starter", fontsize=8)
    axis.set_xlabel("experiment", fontsize=8)


# ---- roofline ----


@dataclass(frozen=True)
class Point:
    """A kernel in the roofline."""

    name: str  # of its target, as short as it can be
    intensity: float  # FLOP per byte
    tflops: float
    peak: float  # percent of the limit that bounds it
    starter: bool
    words: str


def points(targets: Sequence[Target], rows: Sequence[Experiment]) -> Iterator[Point]:
    """Starter and best kernel of each target, as far as they were measured."""
    types = [target.kernel_type for target in targets]
    for target in targets:
        name = target.kernel_type if types.count(target.kernel_type) == 1 else _with_sizes(target)
        of_target = rows_of(target, rows)
        start, best = next((r for r in of_target if r.agent == STARTER), None), incumbent(of_target)
        for row in {r.experiment: r for r in (start, best) if r and r.throughput_tflops and r.pct_peak}.values():
            words = f"{target.name} #{row.experiment}: {row.throughput_tflops:.3g} TFLOP/s, {row.pct_peak:.0f} % of peak"
            starter = row is start and row is not best
            yield Point(name, intensity(target), row.throughput_tflops, row.pct_peak, starter, words)


def _with_sizes(target: Target) -> str:
    sizes = target.name.removeprefix(f"{target.kernel_type}_").removesuffix(f"_{str(target.dtype).removeprefix('torch.')}")
    return f"{target.kernel_type} {sizes}"


def roofline(drawn: Sequence[Point], width: int) -> Markup:
    """Each kernel under the limit that its percentage refers to; starters are hollow, and an arrow leads to the best."""
    if not drawn:
        return Markup()
    roofs = [(p.intensity, p.tflops * 100 / p.peak) for p in drawn]
    slope, flat = max(y / x for x, y in roofs), max(y for _, y in roofs)
    low, high = min(x for x, _ in roofs) / 2, max(x for x, _ in roofs) * 2
    corners = [low, *([flat / slope] if low < flat / slope < high else []), high]
    with matplotlib.rc_context(STYLE):
        figure, axis = _figure(width, ROOFLINE)
        axis.plot(corners, [min(slope * x, flat) for x in corners], color=INK)
        for i, p in enumerate(drawn):
            _mark(axis, p.intensity, p.tflops, POINTS, f"kernel-{i}", hollow=p.starter)
        for start, best in zip(drawn, drawn[1:]):
            if start.starter and start.name == best.name:
                ends = [start.tflops, best.tflops]
                axis.plot([start.intensity, best.intensity], ends, color=POINTS, linewidth=1, zorder=1)
        axis.set(xscale="log", yscale="log", xlabel="FLOP / byte (hollow: the starter)", ylabel="TFLOP/s")
        axis.margins(0.06)
        for scale, limits, room in ((axis.xaxis, axis.get_xlim(), width), (axis.yaxis, axis.get_ylim(), 2 * ROOFLINE)):
            crowded = math.log10(limits[1] / limits[0]) > room / TICKS_PX
            scale.set_major_locator(LogLocator(subs=(1,) if crowded else (1, 2, 5)))
            scale.set_major_formatter(StrMethodFormatter("{x:g}"))
            scale.set_minor_formatter(NullFormatter())
        _name(figure, axis, [p for p in drawn if not p.starter])
        return _svg(figure, {f"kernel-{i}": p.words for i, p in enumerate(drawn)})


def _name(figure: Figure, axis: Axes, named: Sequence[Point]) -> None:
    """A name beside each point, on the side with more room, and none over another."""
    figure.draw_without_rendering()  # the layout, which says where the points are
    places = sorted(zip(axis.transData.transform([(p.intensity, p.tflops) for p in named]).tolist(), named), key=_height)
    box, above = axis.get_window_extent(), -math.inf
    pixel = figure.dpi * PX
    for (x, y), point in places:
        above = max(y, above + LINE_PX * pixel)
        left = x > (box.x0 + box.x1) / 2
        axis.annotate(
            point.name,
            (point.intensity, point.tflops),
            ((-9 if left else 9), (above - y) / pixel),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=INK,
        )


def _height(place: tuple[Sequence[float], Point]) -> float:
    return place[0][1]


def intensity(target: Target) -> float:
    """FLOP per byte that must be moved, over the target's shapes as the model calls them."""
    spec = load_spec(target.kernel_type)
    flops = sum(c.calls * spec.flops(c.case.args) for c in target.cases)
    return flops / sum(c.calls * spec.bytes_moved(c.case.args) for c in target.cases)


# ---- SVG ----


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width * PX, height * PX), layout="constrained")
    axis = figure.subplots()
    axis.grid(axis="y")
    return figure, axis


def _mark(axis: Axes, x: float, y: float, colour: str, gid: str, hollow: bool, **look: float) -> None:
    axis.plot(x, y, "o", color=colour, markerfacecolor=PAGE if hollow else colour, gid=gid, **{"markersize": 8} | look)


def _svg(figure: Figure, words: Mapping[str, str]) -> Markup:
    """`words` become what a browser shows over the mark of that gid. Text is escaped by the writer of the XML."""
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=NO_METADATA)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    root = ElementTree.fromstring(text.getvalue())
    used = {value[1:] for node in root.iter() for name, value in node.items() if name == f"{{{LINK}}}href"}
    for node in root.iter():
        gid = node.get("id", "")
        if gid in words:
            title = ElementTree.Element(f"{{{SVG}}}title")
            title.text = words[gid]
            node.insert(0, title)
        if gid and gid not in used and not node.tag.endswith("clipPath"):
            del node.attrib["id"]  # several charts share a page
    root.set("width", root.get("viewBox").split()[2])
    root.attrib.pop("height", None)
    root.set("role", "img")
    for node in root.iter():
        if "style" in node.attrib:
            node.set("style", _COLOUR.sub(_variable, node.get("style")))
    return Markup(ElementTree.tostring(root, encoding="unicode"))


_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def _variable(colour: re.Match[str]) -> str:
    name = next((name for name, (light, _) in PALETTE.items() if light == colour[0]), None)
    return f"var(--{name})" if name else colour[0]
