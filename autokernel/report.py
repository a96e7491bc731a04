"""What a run came to: the closing summary, report.html, report.md and the plot, from plan, profile, rows, proof and git."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from textwrap import shorten

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autokernel.agents import Trial
from autokernel.agents.playbook import fitting_tier, tier_text
from autokernel.experiments import STARTER, Experiment, Status
from autokernel.profiler import ModelProfile
from autokernel.report_html import COLOURS, page
from autokernel.scheduler import expected_gain, incumbent, rows_of, tried
from autokernel.status import kernel_line, read_proofs
from autokernel.table import plain
from autokernel.target import Plan, Target
from autokernel.verification import Verification
from autokernel.verification.record import COLUMNS
from autokernel.workspace import PROFILE, REPORT, VERIFY, Workspace

HTML = "report.html"
IDEAS = 4  # of the playbook, named for each target
LABELS, LABEL = 12, 60  # of a target in the plot: kept experiments, the last of them; characters of one
SMALL = {"fontsize": 7, "ha": "center"}


def write_report(workspace: Workspace) -> str:
    """Write report.html, report.md and progress.png; returns the summary that they begin with."""
    rows = run_rows(workspace)
    closing = summary(workspace, rows)
    plot(workspace, rows)
    verification = Verification.read(workspace / VERIFY) if (workspace / VERIFY).exists() else None
    given = (closing, workspace.plan, rows, verification, diffs(workspace, rows), list(ideas(workspace.plan, rows)))
    (workspace / HTML).write_text(page(f"AutoKernel, run {workspace.tag}", *given))
    experiments = "\n".join(
        f"| {r.experiment} | {r.target} | {r.status} | {r.gain} | {r.description.replace('|', '/')} | {r.commit[:10]} |"
        for r in rows
    )
    (workspace / REPORT).write_text(
        f"# AutoKernel, run {workspace.tag}\n\n```\n{closing}\n```\n\n![progress](progress.png)\n\n"
        "## Experiments\n\n| # | target | status | vs incumbent | hypothesis | commit |\n|--:|---|---|---|---|---|\n"
        f"{experiments}\n\n`git show COMMIT` has the source, and the gate's words in full.\n"
    )
    return closing


def run_rows(workspace: Workspace) -> list[Experiment]:
    return [row for row in workspace.log.read() if row.tag == workspace.tag]


def summary(workspace: Workspace, rows: Sequence[Experiment]) -> str:
    """For someone who sees AutoKernel for the first time."""
    plan, proofs = workspace.plan, read_proofs(workspace)
    counts = {status: sum(row.status == status for row in tried(rows)) for status in Status}
    made = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "none"
    branch = f"autokernel/{workspace.tag}"
    sections = {
        f"{plan.model} on {plan.device}: {len(tried(rows))} experiments ({made})": [],
        "What got faster": [kernel_line(t, rows_of(t, rows), proofs.get(t.name)) for t in plan.targets],
        "The whole model": model_lines(workspace),
        "How it is known": [
            "every kernel passed five stages of correctness against a float64 oracle, in a process apart from its judge;",
            "a change was kept only if paired timing put its 99 % interval above the kernel it replaced;",
            "kept kernels were timed again against their starters, in fresh processes on fresh inputs (the loop's gain).",
        ],
        "What was in the way": obstacle_lines(workspace, plan),
        "Where it stands": [
            f"git log {branch}   (what was kept; your own branch and files are as they were)",
            f"python orchestrate.py log --all --tag {workspace.tag}   (everything that was tried)",
            f"{(workspace / HTML).relative_to(workspace.root)}   (all of this, with plots and every change)",
        ],
        "What to do next": [
            f"python orchestrate.py --tag {workspace.tag} --hours 8   (go on where this stopped)",
            "python orchestrate.py --model FILE --class-name NAME --input-shape 1,512   (your own model)",
            "read program.md: an agent with a key, a coding CLI or you can propose what the tuner cannot",
        ],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items() if lines or "experiments" in title)


def model_lines(workspace: Workspace) -> list[str]:
    path = workspace / VERIFY
    if not path.exists():
        return ["not verified yet"]
    verification = Verification.read(path)
    return [*verification.lines, *(plain(COLUMNS, verification.rows) if verification.figures else ())]


def obstacle_lines(workspace: Workspace, plan: Plan) -> list[str]:
    """Amdahl: what bounds the model however good its kernels get."""
    path = workspace / PROFILE
    if not path.exists():
        return []
    profile = ModelProfile.read(path)
    covered = sum(target.share for target in plan.targets)
    largest = sorted(profile.hotspots, key=lambda h: -h.share)[:3]
    saved = sum(max(h.time_us - h.limit_us, 0) for h in profile.sites if h.limit_us)
    ceiling = profile.device_time_us / (profile.device_time_us - saved)
    named = ", ".join(
        f"{h.kernel_type or h.name} {h.share:.0%}" + (f" (at {100 / h.headroom:.0f} % of its limit)" if h.headroom else "")
        for h in largest
    )
    return [
        f"the time is in: {named}",
        f"the targets are {covered:.0%} of it; the other {1 - covered:.0%} is not worked on here",
        f"the ceiling: with every such operation at this machine's limit the model would be {ceiling:.2f}x as fast",
    ]


def diffs(workspace: Workspace, rows: Sequence[Experiment]) -> dict[str, str]:
    """What each experiment changed in the kernel that it was an edit of, by commit."""
    with tempfile.TemporaryFile() as commits:
        commits.write("".join(f"{row.commit}\n" for row in rows if row.agent != STARTER).encode())
        commits.seek(0)
        text = workspace.ledger.repo.git.diff_tree("--stdin", "--patch", "--unified=2", istream=commits)
    _, *parts = re.split(r"(?m)^([0-9a-f]{40})$", text)
    return {commit: change.partition("\n@@")[2] and "@@" + change.partition("\n@@")[2] for commit, change in _pairs(parts)}


def _pairs(values: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(values[::2], values[1::2])


def ideas(plan: Plan, rows: Sequence[Experiment]) -> Iterator[str]:
    """What to try next: the targets in the order of what may be hoped for, and what the playbook has for each."""
    order = sorted(plan.targets, key=lambda t: -expected_gain(t, rows_of(t, rows)))
    for target in order:
        of_target = rows_of(target, rows)
        tier = fitting_tier([Trial(row, "", "") for row in of_target])
        titles = re.findall(r"(?m)^### (.+)$", tier_text(tier, target))
        at = f"at {best.pct_peak:.0f} % of its peak, " if (best := incumbent(of_target)) and best.pct_peak else ""
        hope = f"{expected_gain(target, of_target):.2%} of the model's time to be hoped for"
        yield f"{target.name}: {at}{hope}; tier {tier} of the playbook: {', '.join(titles[:IDEAS])}"


def plot(workspace: Workspace, rows: Sequence[Experiment]) -> None:
    """progress.png: for each target, every experiment and the best so far, relative to the starter, and what was kept."""
    targets = [t for t in workspace.plan.targets if rows_of(t, rows)]
    figure = Figure(figsize=(13, 2.4 * max(len(targets), 1)), layout="constrained")
    axes = figure.subplots(max(len(targets), 1), 1, squeeze=False)
    for axis, target in zip(axes[:, 0], targets):
        _plot_target(axis, target, rows_of(target, rows))
        axis.set_xlim(rows[0].experiment - 0.5, rows[-1].experiment + 0.5)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(workspace / "progress.png", dpi=120)


def _plot_target(axis: Axes, target: Target, rows: Sequence[Experiment]) -> None:
    steps = [(row.speedup_vs_incumbent or 1.0) if row.status == Status.KEPT else 1.0 for row in rows]
    best = list(accumulate(steps, lambda a, b: a * b))
    numbers = [row.experiment for row in rows]
    axis.step(numbers, best, where="post", color="tab:green", linewidth=1)
    kept = []
    for row, level, step in zip(rows, best, steps):
        height = level / step * (row.speedup_vs_incumbent or 1.0)
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
