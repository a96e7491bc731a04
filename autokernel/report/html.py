"""report.html: a run on one page that needs nothing else, from plan, rows, git, proofs, profile and verification."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from autokernel.common.preflight import as_called
from autokernel.common.verdict import Interval
from autokernel.gate.timing.statistics import CONFIDENCE
from autokernel.history.experiments import STARTER, Experiment, Status
from autokernel.history.progress import incumbent, loop_gain, rows_of, tried
from autokernel.history.status import Proof
from autokernel.integration.verification.forms import EAGER, Form, baseline, ours
from autokernel.integration.verification.record import COLUMNS, INTERVAL, KernelInModel, Verification
from autokernel.report import charts
from autokernel.report.live import estimated_speedup
from autokernel.target import Plan, Target

TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Command:
    """Lines to paste, and what they are for."""

    text: str
    what: str = ""

    @staticmethod
    def of(line: str) -> "Command":
        """Of a line of the terminal's summary, which has the purpose in brackets behind three spaces."""
        text, _, what = as_called(line).partition("   (")
        code = text.startswith("autokernel.")
        return Command(f"import autokernel\n{text}" if code else text, what.removesuffix(")"))


@dataclass(frozen=True)
class Story:
    """What a page is made from."""

    tag: str
    plan: Plan
    rows: Sequence[Experiment]
    advice: Sequence[str]  # the verdict, then lines to paste
    verification: Verification | None = None
    proofs: Mapping[str, Proof] = field(default_factory=dict)  # by target
    notes: Sequence[str] = ()  # where the records differ
    obstacles: Sequence[str] = ()  # where the time is, and how fast the model could be
    uncovered: Sequence[tuple[float, str]] = ()  # share of the pass, and why no kernel computes it
    known_by: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # machine, versions
    records: Sequence[str] = ()  # commands that show more
    following: Sequence[str] = ()  # commands to go on with
    ideas: Sequence[str] = ()  # what to try next
    diffs: Mapping[str, str] = field(default_factory=dict)  # by commit

    @property
    def badge(self) -> str:
        if not self.verification:
            return "not verified yet"
        if self.verification.best.kernels:
            return "use the kernels"
        if not self.verification.passed:
            return "outputs differ: use no kernel"
        return "leave it as it is" if self.verification.best == Form() else "use torch.compile"


def page(story: Story) -> str:
    targets = [_Row(story, target) for target in story.plan.targets]
    kernels = list(charts.points(story.plan.targets, story.rows))
    return _template().render(
        story=story,
        tiles=list(_tiles(story)),
        commands=[Command.of(line) for line in story.advice[1:]],
        bars=_bars(story.verification) if story.verification else (),
        figures=story.verification.rows if story.verification else (),
        columns=COLUMNS,
        gains=list(story.verification.gains()) if story.verification else (),
        doubts=list(story.verification.doubts()) if story.verification else (),
        targets=targets,
        moving=[row for row in targets if row.kept],
        rooflines=(("wide", charts.roofline(kernels, charts.WIDE)), ("narrow", charts.roofline(kernels, charts.NARROW))),
        kernels=kernels,
        records=[Command.of(line) for line in story.records],
        following=[Command.of(line) for line in story.following],
        statuses=[status for status in Status if any(row.status == status for row in story.rows)],
        shades=charts.SHADE,
        paid=any(row.cost_usd for row in story.rows),
        palette=charts.PALETTE,
        confidence=f"{100 * CONFIDENCE:g}",
        confidence_model=f"{100 * INTERVAL:g}",
    )


def _template() -> Template:
    """Undefined names are errors, and all text is escaped that is not Markup of our own."""
    loader = FileSystemLoader(Path(__file__).parent)
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return Environment(loader=loader, undefined=StrictUndefined, **options).get_template(TEMPLATE)


# ---- at a glance ----


def _tiles(story: Story) -> Iterator[tuple[str, str]]:
    """(figure, what it is)"""
    verification, made = story.verification, tried(story.rows)
    if verification is None:
        yield f"about {estimated_speedup(story.plan, story.rows):.2f}x", "the model, by Amdahl's law: not verified"
    elif gain := _gain(verification, verification.best):
        yield gain.estimate(2), f"the model over eager{gain.ends(2)}"
    elif verification.best == Form():
        yield "1.00x", "the model: nothing is faster beyond doubt"
    if verification and len(verification.figures) == 1:
        (sides,) = verification.figures.values()
        before, after = sides.get(EAGER), sides.get(verification.best.name)
        if before and after and after is not before:
            yield f"{before.milliseconds:.3g} → {after.milliseconds:.3g} ms", "a pass, before and after"
    counts = ((sum(row.status == status for row in made), status) for status in Status)
    by_status = ", ".join(f"{count} {status}" for count, status in counts if count)
    yield f"{len(made)}", f"experiment{'' if len(made) == 1 else 's'}" + (f": {by_status}" if by_status else "")
    seconds = sum(row.seconds for row in story.rows)
    dollars = sum(row.cost_usd for row in story.rows)
    yield str(timedelta(seconds=round(seconds))), "h:min:s of judging" + (f", ${dollars:.2f}" if dollars else "")


# ---- before and after ----


@dataclass(frozen=True)
class Bar:
    """A way of running the model, over the model as it is."""

    name: str
    gain: Interval
    milliseconds: str
    kind: str  # "untouched" | "compile" | "ours"
    best: bool
    scale: float  # what fills the chart's width

    @property
    def words(self) -> str:
        return "1x" if self.kind == "untouched" else f"{self.gain.estimate(2)}{self.gain.ends(2)}"

    def percent(self, value: float) -> str:
        return f"{100 * value / self.scale:.2f}%"

    @property
    def whisker(self) -> tuple[str, str] | None:
        """Where the interval begins, and how long it is."""
        if self.gain.wide or self.kind == "untouched":
            return None
        return self.percent(self.gain.low), self.percent(self.gain.high - self.gain.low)


def _gain(verification: Verification, form: Form) -> Interval | None:
    """Of the model so run over eager, untouched; None of that itself, and of what was not measured."""
    if form.kernels:
        return verification.speedups[form.fallback].get(EAGER)
    return verification.without.get(form.fallback)


def _bars(verification: Verification) -> list[Bar]:
    """The untouched model, each mode of torch.compile that was measured, and ours over each."""
    forms = [Form(), *map(Form, verification.without), *(Form(over, kernels=True) for over in verification.speedups)]
    gains = {form: Interval(1.0, 1.0, 1.0) if form == Form() else _gain(verification, form) for form in forms}
    gains = {form: gain for form, gain in gains.items() if gain}
    scale = 1.02 * max((gain.value if gain.wide else gain.high) for gain in gains.values())
    (sides,) = verification.figures.values() if len(verification.figures) == 1 else ({},)
    return [
        Bar(
            f"{EAGER}, untouched" if form == Form() else (ours if form.kernels else baseline)(form.fallback),
            gain,
            f"{sides[form.name].milliseconds:.3g} ms" if form.name in sides else "",
            "ours" if form.kernels else "untouched" if form == Form() else "compile",
            form == verification.best,
            scale,
        )
        for form, gain in gains.items()
    ]


# ---- targets ----


@dataclass(frozen=True)
class _Row:
    """A target in the table."""

    story: Story
    target: Target

    @cached_property
    def rows(self) -> list[Experiment]:
        return rows_of(self.target, self.story.rows)

    @property
    def sizes(self) -> str:
        return self.target.name.removeprefix(f"{self.target.kernel_type}_")

    @property
    def start(self) -> Experiment | None:
        return next((row for row in self.rows if row.agent == STARTER), None)

    @property
    def best(self) -> Experiment | None:
        return incumbent(self.rows)

    @property
    def made(self) -> int:
        return len(tried(self.rows))

    @cached_property
    def kept(self) -> list[Experiment]:
        return [row for row in tried(self.rows) if row.status == Status.KEPT]

    @property
    def proof(self) -> Proof | None:
        """Of the best kernel; None where it is another one that was proven."""
        proof = self.story.proofs.get(self.target.name)
        return proof if proof and self.best and proof.commit == self.best.commit else None

    @property
    def gain(self) -> str:
        """Of the best kernel over the starter."""
        if self.proof and self.proof.gain:
            return self.proof.gain.estimate()
        return f"about {loop_gain(self.rows):.2f}x" if self.kept else "–"

    @property
    def doubt(self) -> str:
        """The interval of that gain, or why there is none."""
        if self.proof and self.proof.gain:
            return self.proof.gain.ends() if self.proof.confirmed else f"{self.proof.gain.ends()} not confirmed"
        return "not proven again" if self.kept else ""

    @property
    def starts(self) -> bool:
        """Whether it is the starter that goes into the model: nothing better was found, or it was not confirmed."""
        return not self.kept or bool(self.proof) and not self.proof.confirmed

    @property
    def kernel(self) -> KernelInModel | None:
        kernels = self.story.verification.kernels if self.story.verification else ()
        return next((kernel for kernel in kernels if kernel.target == self.target.name), None)

    @property
    def verdict(self) -> tuple[str, str]:
        """(how it is coloured, what became of it)"""
        if not self.rows:
            return "reset", "not reached"
        if not self.best:
            return "failed", f"its starter did not pass ({self.rows[-1].status})"
        verification = self.story.verification
        if self.kernel and verification.best.kernels and self.kernel in verification.used(verification.best.fallback):
            return "kept", "starter in use" if self.starts else "in use"
        if self.kernel:
            return "reset", "left out"
        if self.proof and not self.proof.confirmed:
            return "undecided", "gain not confirmed: the starter stands"
        return "undecided", "not verified yet" if self.proof or not self.kept else "not proven again yet"

    @property
    def why(self) -> list[str]:
        return self.kernel.words.split("; ") if self.kernel else []

    @property
    def sparkline(self) -> Markup:
        return charts.sparkline(self.rows) if self.rows else Markup()

    @property
    def progress(self) -> Markup:
        return charts.progress(self.rows)
