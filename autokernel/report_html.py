"""report.html: a run on one page that needs nothing else, drawn from plan, rows, git, proofs and verification."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate

from autokernel.experiments import STARTER, Experiment, Status
from autokernel.scheduler import incumbent, rows_of, tried
from autokernel.spec import load_spec
from autokernel.target import Plan, Target
from autokernel.verification import Verification

COLOURS = {
    Status.KEPT: "#1a7f37",
    Status.RESET: "#8c959f",
    Status.UNDECIDED: "#bf8700",
    Status.TIMEOUT: "#bf8700",
    Status.FAILED: "#cf222e",
    Status.CRASH: "#cf222e",
}
WIDTH, HEIGHT, LEFT, BOTTOM = 860, 240, 56, 36  # of a plot, and its margins, px
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1, h2, h3 { line-height: 1.25 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d1d9e0 }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.4 }
table { border-collapse: collapse; width: 100%; font-size: 13px } td, th { padding: .25rem .5rem; text-align: left;
border-bottom: 1px solid #d1d9e0; vertical-align: top } td.n { text-align: right; white-space: nowrap }
summary { cursor: pointer } td pre { white-space: pre-wrap }
svg { max-width: 100%; height: auto } svg text { font-size: 11px; fill: #59636e }
.add { color: #1a7f37 } .del { color: #cf222e } .chip { color: white; border-radius: 3px; padding: 0 .35rem }
input { font: inherit; padding: .25rem .5rem; width: 24rem; max-width: 100% }
"""
FILTER = """
document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelectorAll("#experiments tbody tr"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
});
"""


def page(
    title: str,
    closing: str,
    plan: Plan,
    rows: Sequence[Experiment],
    verification: Verification | None,
    diffs: Mapping[str, str],
    ideas: Sequence[str],
) -> str:
    """closing: the summary in words; diffs: by commit; ideas: what to try next, a line each."""
    targets = [t for t in plan.targets if rows_of(t, rows)]
    sections = {
        "": f"<pre>{escape(closing)}</pre>",
        "The whole model": before_and_after(verification) if verification else "",
        "Progress": "".join(progress(t, rows_of(t, rows)) for t in targets),
        "Roofline": roofline(targets, rows),
        "What to try next": _list(ideas) if ideas else "",
        "All experiments": table(rows, diffs),
    }
    body = "".join((f"<h2>{name}</h2>" if name else "") + html for name, html in sections.items() if html)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}<script>{FILTER}</script></html>\n"
    )


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


# ---- plots ----


class Axes:
    """Where values lie in an SVG; both scales are linear, or both logarithmic."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log: bool = False, height: int = HEIGHT) -> None:
        self.scale: Callable[[float], float] = math.log10 if log else float
        self.log, self.height = log, height
        self.x0, self.x1 = self._range(xs)
        self.y0, self.y1 = self._range(ys)

    def _range(self, values: Sequence[float]) -> tuple[float, float]:
        low, high = (self.scale(end(values)) for end in (min, max))
        margin = (high - low) * 0.06 or 0.5
        return low - margin, high + margin

    def x(self, value: float) -> float:
        return round(LEFT + (self.scale(value) - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - 10), 1)

    def y(self, value: float) -> float:
        return round(10 + (self.y1 - self.scale(value)) / (self.y1 - self.y0) * (self.height - BOTTOM - 10), 1)

    def frame(self, xlabel: str, ylabel: str, inside: str) -> str:
        ticks = "".join(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{self.y(v)}" y2="{self.y(v)}" stroke="#eaeef2"/>'
            f'<text x="{LEFT - 6}" y="{self.y(v) + 4}" text-anchor="end">{v:g}</text>'
            for v in self._ticks(self.y0, self.y1)
        ) + "".join(
            f'<text x="{self.x(v)}" y="{self.height - BOTTOM + 16}" text-anchor="middle">{v:g}</text>'
            for v in self._ticks(self.x0, self.x1)
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" role="img">{ticks}{inside}'
            f'<text x="{(LEFT + WIDTH) / 2}" y="{self.height - 4}" text-anchor="middle">{xlabel}</text>'
            f'<text transform="translate(12 {(self.height - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{ylabel}</text>'
            "</svg>"
        )

    def _ticks(self, low: float, high: float) -> list[float]:
        """Round values inside the range: powers of ten, with 2 and 5 where there are few; else steps of 1, 2 or 5."""
        if self.log:
            powers = range(math.floor(low), math.ceil(high) + 1)
            values = [m * 10.0**p for p in powers for m in ((1,) if high - low > 3 else (1, 2, 5))]
            return [v for v in values if low <= math.log10(v) <= high]
        rough = (high - low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def dot(x: float, y: float, colour: str, words: str, hollow: bool = False) -> str:
    paint = f'fill="white" stroke="{colour}" stroke-width="2"' if hollow else f'fill="{colour}"'
    return f'<circle cx="{x}" cy="{y}" r="4.5" {paint}><title>{escape(words)}</title></circle>'


def progress(target: Target, rows: Sequence[Experiment]) -> str:
    """Every experiment against the target's starter, the best so far as a line, and what was kept in words."""
    steps = [(row.speedup_vs_incumbent or 1.0) if row.status == Status.KEPT else 1.0 for row in rows]
    best = list(accumulate(steps, lambda a, b: a * b))
    levels = [level / step * (row.speedup_vs_incumbent or 1.0) for row, level, step in zip(rows, best, steps)]
    numbers = [row.experiment for row in rows]
    axes = Axes([*numbers, numbers[0] + 5], [*levels, *best, 1.0])  # wide enough for ticks at whole numbers
    path = f"M {axes.x(rows[0].experiment)} {axes.y(best[0])}"
    for row, level in zip(rows, best):
        path += f" H {axes.x(row.experiment)} V {axes.y(level)}"
    line = f'<path d="{path}" fill="none" stroke="{COLOURS[Status.KEPT]}" stroke-width="1.5"/>'
    dots = "".join(
        dot(axes.x(row.experiment), axes.y(level), COLOURS[row.status], _words(row), row.speedup_vs_incumbent is None)
        for row, level in zip(rows, levels)
    )
    kept = [row for row in tried(rows) if row.status == Status.KEPT]
    steps_made = "".join(f"<li>#{row.experiment} {escape(row.gain)}: {escape(row.description)}</li>" for row in kept)
    heading = f"{escape(target.name)}, {target.share:.1%} of the time: {best[-1]:.2f}x its starter"
    return (
        f"<h3>{heading}</h3>{axes.frame('experiment (hollow: no speedup was measured)', 'over the starter', line + dots)}"
        + (f"<ul>{steps_made}</ul>" if kept else "<p>No change was kept.</p>")
    )


def _words(row: Experiment) -> str:
    return f"#{row.experiment} {row.status} {row.gain}: {row.description}"


def roofline(targets: Sequence[Target], rows: Sequence[Experiment]) -> str:
    """Starter and best kernel of each target under the peaks that their percentages refer to."""
    points = []  # intensity, TFLOP/s, percent of peak, whether it is the starter, words
    for target in targets:
        of_target = rows_of(target, rows)
        start, best = next((r for r in of_target if r.agent == STARTER), None), incumbent(of_target)
        for row in {r.experiment: r for r in (start, best) if r and r.throughput_tflops and r.pct_peak}.values():
            rate, peak = row.throughput_tflops, row.pct_peak
            words = f"{target.name} #{row.experiment}: {rate:.3g} TFLOP/s, {peak:.0f} % of peak"
            points.append((intensity(target), rate, peak, row is start and row is not best, words))
    if not points:
        return ""
    roofs = [(x, rate * 100 / peak) for x, rate, peak, _, _ in points]
    slope, flat = max(y / x for x, y in roofs), max(y for _, y in roofs)
    low, high = min(x for x, _ in roofs) / 2, max(x for x, _ in roofs) * 2
    corners = [low, *([flat / slope] if low < flat / slope < high else []), high]
    axes = Axes(corners, [min(rate for _, rate, _, _, _ in points), flat, slope * low], log=True, height=340)
    path = "M " + " L ".join(f"{axes.x(x)} {axes.y(min(slope * x, flat))}" for x in corners)
    line = f'<path d="{path}" fill="none" stroke="#1f2328"/>'
    dots = "".join(dot(axes.x(x), axes.y(rate), "#0969da", words, start) for x, rate, _, start, words in points)
    words = _list([words for *_, words in points])
    return axes.frame("FLOP / byte (hollow: the starter)", "TFLOP/s", line + dots) + words


def intensity(target: Target) -> float:
    """FLOP per byte that must be moved, over the target's shapes as the model calls them."""
    spec = load_spec(target.kernel_type)
    flops = sum(c.calls * spec.flops(c.case.args) for c in target.cases)
    return flops / sum(c.calls * spec.bytes_moved(c.case.args) for c in target.cases)


# ---- the model ----


def before_and_after(verification: Verification) -> str:
    """A pass's time in each way of running the model as a bar, and what verify.py says."""
    drawn = "".join(
        f"<h3>{escape(workload)}</h3>{bars({name: figures.milliseconds for name, figures in sides.items()})}"
        for workload, sides in verification.figures.items()
    )
    return f"<p>{escape(verification.verdict)}</p>{drawn}{_list(verification.lines[1:])}"


def bars(milliseconds: Mapping[str, float]) -> str:
    """By name, the first to compare with; kernels of ours in another colour."""
    first, longest = next(iter(milliseconds.values())), max(milliseconds.values())
    drawn = "".join(
        f'<text x="200" y="{i * 26 + 20}" text-anchor="end">{escape(name)}</text>'
        f'<rect x="210" y="{i * 26 + 6}" width="{ms / longest * 440:.0f}" height="18" '
        f'fill="{COLOURS[Status.KEPT] if name.startswith("kernels") else COLOURS[Status.RESET]}"/>'
        f'<text x="{220 + ms / longest * 440:.0f}" y="{i * 26 + 20}">{ms:.2f} ms, {first / ms:.2f}x</text>'
        for i, (name, ms) in enumerate(milliseconds.items())
    )
    height = 26 * len(milliseconds) + 6
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{drawn}</svg>'


# ---- the experiments ----


def table(rows: Sequence[Experiment], diffs: Mapping[str, str]) -> str:
    head = "".join(
        f"<th>{name}" for name in ("#", "target", "status", "vs incumbent", "hypothesis and change", "who", "s", "$")
    )
    body = "".join(_table_row(row, diffs.get(row.commit, "")) for row in rows)
    return (
        '<p><input id="filter" placeholder="only rows with these words" aria-label="filter"></p>'
        f'<table id="experiments"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    )


def _table_row(row: Experiment, diff: str) -> str:
    change = f"<details><summary>{escape(row.description)}</summary><pre>{coloured(diff)}</pre></details>"
    cells = (
        f"<td class=n>{row.experiment}<td>{escape(row.target)}"
        f'<td><span class="chip" style="background:{COLOURS[row.status]}">{row.status}</span>'
        f"<td class=n>{row.gain}<td>{change if diff else escape(row.description)} <code>{row.commit[:10]}</code>"
        f"<td>{escape(row.agent)}<td class=n>{row.seconds:.0f}<td class=n>{row.cost_usd:.2f}"
    )
    return f"<tr>{cells}</tr>"


def coloured(diff: str) -> str:
    return "\n".join(_coloured_line(line) for line in diff.split("\n"))


def _coloured_line(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line)
