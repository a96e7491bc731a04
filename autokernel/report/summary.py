"""What a run came to: the closing summary, report.html, report.md and the plot, from plan, profile, rows, proof and git."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from autokernel.agents import PastExperiment
from autokernel.agents.playbook import fitting_tier, tier_text
from autokernel.common.preflight import IN_CLONE, as_called, version
from autokernel.common.records import replacing
from autokernel.common.table import plain
from autokernel.common.words import counted, percent
from autokernel.gate.timing.statistics import CONFIDENCE
from autokernel.hardware.roofline import above_limit
from autokernel.history.experiments import STARTER, Experiment, Status
from autokernel.history.ledger import RESULT, GitFailed, NoRepository
from autokernel.history.progress import incumbent, rows_of, tried
from autokernel.history.status import Proof, kernel_line, known_rows, read_proofs
from autokernel.history.workers import read_workforce
from autokernel.integration.verification.record import COLUMNS, Verification
from autokernel.model import account
from autokernel.model.hotspots import ModelProfile
from autokernel.report.charts import save_progress
from autokernel.report.html import Story, page
from autokernel.run.scheduler import expected_gain
from autokernel.run.workspace import PROFILE, REPORT, TRACES, VERIFY, NoRun, Workspace
from autokernel.target import Plan

HTML = "report.html"
IDEAS = 4  # of the playbook, named for each target
KNOWN_BY = [
    "every kernel passed five stages of correctness against a float64 oracle, in a process apart from its judge;",
    f"a change was kept only if paired timing put its {100 * CONFIDENCE:g} % interval above the kernel it replaced;",
]
PROVEN_AGAIN = "kept kernels were timed again against their starters, in fresh processes on fresh inputs (the loop's gain)."
NONE_KEPT = "no change was kept in this run: its kernels are the starters."
NOT_PROVEN_AGAIN = "kept kernels have not been timed again against their starters yet: the loop's gain is not proven."
OTHER_AGENTS = "read program.md: an agent with a key, a coding CLI or you can propose what the tuner cannot"


def write_report(workspace: Workspace) -> str:
    """Write report.html, report.md and progress.png; returns the words that they begin with.

    Raises NoRun rather than write a report of nothing over one that had experiments.
    """
    known = known_rows(workspace.root, workspace.tag)
    rows, workforce = known.rows, read_workforce(workspace.folder)
    attained = above_limit(row.pct_peak for row in rows if row.pct_peak)
    notes = (*known.notes, *(workforce.quarantined() if workforce else ()), *filter(None, [attained]))
    if not rows and (workspace / HTML).exists():
        raise NoRun(f"neither git nor results.tsv has an experiment of run {workspace.tag!r}: {HTML} is left as it is")
    verification = Verification.read(workspace / VERIFY) if (workspace / VERIFY).exists() else None
    result = [as_called(line) for line in advice(workspace, verification)]
    words = as_called("\n\n".join([summary(workspace, rows, verification), *notes]))
    with replacing(workspace / "progress.png", "wb") as file:
        begun = [target for target in workspace.plan.targets if rows_of(target, rows)]
        save_progress(file, [t for t in begun if tried(rows_of(t, rows))] or begun[:1], rows)  # else one would see points
    with replacing(workspace / HTML) as file:
        file.write(page(story(workspace, rows, notes, verification)))
    closing = "\n  ".join(result) + "\n\n" + words
    experiments = "\n".join(
        f"| {r.experiment} | {r.target} | {r.status} | {r.gain} | {r.description.replace('|', '/')} | {r.commit[:10]} |"
        for r in rows
    )
    with replacing(workspace / REPORT) as file:
        file.write(
            f"# AutoKernel, run {workspace.tag}\n\n```\n{closing}\n```\n\n![progress](progress.png)\n\n"
            "## Experiments\n\n| # | target | status | vs incumbent | hypothesis | commit |\n|--:|---|---|---|---|---|\n"
            f"{experiments}\n\n`git show COMMIT` has the source, and the gate's words in full.\n"
        )
    return closing


def story(
    workspace: Workspace, rows: Sequence[Experiment], notes: Sequence[str], verification: Verification | None
) -> Story:
    """What report.html is made from."""
    plan = workspace.plan
    profile = _profile(workspace)
    return Story(
        tag=workspace.tag,
        plan=plan,
        rows=rows,
        advice=advice(workspace, verification),
        verification=verification,
        proofs=read_proofs(workspace),
        notes=notes,
        obstacles=list(obstacles(profile, plan)) if profile else (),
        uncovered=list(account.not_covered(profile.hotspots)) if profile else (),
        known_by=known_by(plan, rows, read_proofs(workspace)),
        facts=facts(plan, profile, rows),
        records=[line for line in records(workspace) if HTML not in line],
        following=following(workspace),
        ideas=[*ideas(plan, rows), OTHER_AGENTS],
        diffs=diffs(workspace, rows),
    )


def facts(plan: Plan, profile: ModelProfile | None, rows: Sequence[Experiment]) -> dict[str, str]:
    """What was measured on what, for whoever wants to repeat it."""
    machines = dict.fromkeys([*([profile.device_name] if profile else []), *(row.device for row in rows)])
    return {
        "model": plan.model,
        "machine": ", ".join(machines) or plan.device,
        "a pass, untouched": f"{plan.model_latency_us / 1e3:.3g} ms in eager mode",
        "this page was written by": version(),
    }


def advice(workspace: Workspace, verification: Verification | None) -> list[str]:
    """What the run came to in one line, and what to do with it: what every report begins with."""
    if verification:
        return verification.advice(workspace.tag)
    return [
        f"{workspace.plan.model} is not verified yet: no kernel is to be used in it",
        f"python orchestrate.py --tag {workspace.tag}   (goes on where this stopped, and verifies)",
        f"python verify.py --tag {workspace.tag}   (verifies what was kept so far)",
    ]


def summary(workspace: Workspace, rows: Sequence[Experiment], verification: Verification | None) -> str:
    """How the run came to it, for someone who sees AutoKernel for the first time."""
    plan, proofs = workspace.plan, read_proofs(workspace)
    counts = {status: sum(row.status == status for row in tried(rows)) for status in Status}
    by_status = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "none"
    made = f"{plan.model} on {plan.device}: {counted(tried(rows), 'experiment')} ({by_status})"
    sections = {
        made: [],
        "What got faster": [kernel_line(t, rows_of(t, rows), proofs.get(t.name)) for t in plan.targets],
        "The whole model": model_lines(verification) if verification else [],
        "How it is known": known_by(plan, rows, proofs),
        "What was in the way": obstacle_lines(workspace, plan),
        "Where it stands": records(workspace),
        "What to do next": [*following(workspace), OTHER_AGENTS],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items() if lines or title == made)


def known_by(plan: Plan, rows: Sequence[Experiment], proofs: dict[str, Proof]) -> list[str]:
    """Why the figures can be believed; a run that was stopped has not timed again all that it kept."""
    of_targets = [rows_of(target, rows) for target in plan.targets]
    kept = [of_it for of_it in of_targets if any(row.status == Status.KEPT for row in tried(of_it))]
    if not kept:
        return [*KNOWN_BY, NONE_KEPT]
    again = {proof.commit for proof in proofs.values()}
    return [*KNOWN_BY, PROVEN_AGAIN if all(incumbent(of_it).commit in again for of_it in kept) else NOT_PROVEN_AGAIN]


def records(workspace: Workspace) -> list[str]:
    """Where there is more, with what it is in brackets."""
    beside = IN_CLONE and workspace.root == Path.cwd()
    folder = workspace.folder.relative_to(workspace.root) if beside else workspace.folder
    git = "git" if beside or not IN_CLONE else f"git -C {shlex.quote(str(workspace.root))}"
    traces = [f"{folder / TRACES}/{path.name}" for path in sorted((workspace / TRACES).glob("*.json.gz"), reverse=True)]
    return [
        f"{git} log autokernel/{workspace.tag}   (what was kept; at its end {RESULT}/ has all of it; yours is as it was)",
        f"python orchestrate.py log --all --tag {workspace.tag}   (everything that was tried)",
        f"{folder / HTML}   (all of this, with plots and every change)",
        *(f"{path}   (a pass of the model as a trace, for ui.perfetto.dev)" for path in traces),
    ]


def following(workspace: Workspace) -> list[str]:
    return [
        f"python orchestrate.py --tag {workspace.tag} --hours 8   (go on where this stopped)",
        "python orchestrate.py --model FILE --class-name NAME --input-shape 1,512   (another model, such as your own)",
    ]


def model_lines(verification: Verification) -> list[str]:
    return [*verification.lines, *(plain(COLUMNS, verification.rows) if verification.figures else ())]


def _profile(workspace: Workspace) -> ModelProfile | None:
    path = workspace / PROFILE
    return ModelProfile.read(path) if path.exists() else None


def obstacle_lines(workspace: Workspace, plan: Plan) -> list[str]:
    """Amdahl: what bounds the model however good its kernels get; and an account of what is not worked on."""
    profile = _profile(workspace)
    if profile is None:
        return []
    largest, rest, ceiling = obstacles(profile, plan)
    return [largest, rest, *account.lines(profile.hotspots), *filter(None, [profile.without, profile.disturbed]), ceiling]


def obstacles(profile: ModelProfile, plan: Plan) -> tuple[str, str, str]:
    """Where the time is, what part of it the targets are, and how fast the model could be."""
    covered = sum(target.share for target in plan.targets)
    largest = sorted(profile.hotspots, key=lambda h: -h.share)[:3]
    saved = sum(max(h.time_us - h.limit_us, 0) for h in profile.sites if h.limit_us)
    ceiling = profile.device_time_us / (profile.device_time_us - saved)
    named = ", ".join(
        f"{h.kernel_type or h.name} {h.share:.0%}"
        + (f" (at {percent(h.limit_us / h.time_us)} of its limit)" if h.limit_us and h.time_us else "")
        for h in largest
    )
    left = f"; the other {1 - covered:.0%} is not worked on here" if round(1 - covered, 2) > 0 else ""
    return (
        f"PyTorch eager spends its time in: {named}",
        f"the targets are {covered:.0%} of it{left}",
        f"the ceiling: with every such operation at this machine's limit the model would be {ceiling:.2f}x as fast",
    )


def diffs(workspace: Workspace, rows: Sequence[Experiment]) -> dict[str, str]:
    """What each experiment changed in the kernel that it was an edit of, by commit."""
    try:
        text = workspace.ledger.changes([row.commit for row in rows if row.agent != STARTER])
    except (NoRepository, GitFailed):
        return {}
    _, *parts = re.split(r"(?m)^([0-9a-f]{40})$", text)
    return {commit: change.partition("\n@@")[2] and "@@" + change.partition("\n@@")[2] for commit, change in _pairs(parts)}


def _pairs(values: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(values[::2], values[1::2])


def ideas(plan: Plan, rows: Sequence[Experiment]) -> Iterator[str]:
    """What to try next: the targets in the order of their expected gain, and what the playbook has for each."""
    order = sorted(plan.targets, key=lambda t: -expected_gain(t, rows_of(t, rows)))
    for target in order:
        of_target = rows_of(target, rows)
        tier = fitting_tier([PastExperiment(row, "", "") for row in of_target])
        titles = re.findall(r"(?m)^### (.+)$", tier_text(tier, target))
        at = f"at {best.pct_peak:.0f} % of its peak, " if (best := incumbent(of_target)) and best.pct_peak else ""
        gain = f"expected gain {percent(expected_gain(target, of_target), 2)} of the model's time"
        yield f"{target.name}: {at}{gain}; tier {tier} of the playbook: {', '.join(titles[:IDEAS])}"
