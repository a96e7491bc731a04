"""What an agent that reads text is told about its target: oracle, shapes, incumbent, and the history of what was tried."""

import inspect
import textwrap
from collections import Counter
from collections.abc import Sequence

from autokernel.agents import Context, PastExperiment
from autokernel.agents.playbook import tier_that_fits
from autokernel.common.words import four_figures
from autokernel.history.experiments import STARTER, Status
from autokernel.spec import PROBLEMS, ROOT, is_region

RECENT, STEPS = 15, 30  # experiments told in full: the last ones, and the last that were kept
OLDER = 60  # told in a few words; of those before them only how many there were
WORDS, FEW_WORDS = 300, 90  # characters of a hypothesis


def task_text(context: Context) -> str:
    """The task as Markdown, for an agent that is told everything at once."""
    playbook = tier_that_fits(context)
    return f"{rules_text()}\n{problem_text(context)}\n{playbook}\n{incumbent_text(context)}\n{history_text(context.trials)}"


def rules_text() -> str:
    """program.md without its list of the playbook, which is given a tier at a time."""
    return (ROOT / "program.md").read_text().partition("\n## The playbook")[0]


def problem_text(context: Context) -> str:
    """What does not change during a run."""
    target, spec = context.target, context.spec
    shapes = "\n".join(f"- {w.case.name}: {describe(w.case.args)}; {w.calls:g} calls per pass" for w in target.cases)
    library = f"A library may be called for {spec.library_calls}." if spec.library_calls else ""
    static = f"Static (weights, which may be prepared once): {', '.join(sorted(spec.static))}." if spec.static else ""
    backend = " or ".join((target.backend, *context.other_backends))
    return f"""# Target {target.name}
Make `kernel.py` faster: kernel type {target.kernel_type}, backend {backend}, device {target.device},
{target.share:.1%} of the model's time. What counts is the time over these shapes, weighted by calls:
{shapes}

{oracle_text(context)}
PyTorch programs write it as {spec.eager_form}. {library} {static}
It is also judged at these sizes, in fp16, bf16 and fp32: {", ".join(str(dict(d)) for d in (*spec.sweep, *spec.edges))}.
"""


def oracle_text(context: Context) -> str:
    if context.spec.folder.parent == PROBLEMS:
        problem = (context.spec.folder / "problem.py").read_text()
        guide = (ROOT / "kernelbench" / "program_kb.md").read_text()
        return f"The problem, whose Model your ModelNew must agree with:\n```python\n{problem}```\n\n{guide}"
    if is_region(context.spec.name):
        oracle = (context.spec.folder / "region.py").read_text()
    else:
        oracle = textwrap.dedent(inspect.getsource(context.spec.oracle))
    return f"The oracle, which `kernel_fn` must agree with (same parameters, in the same names):\n```python\n{oracle}```"


def incumbent_text(context: Context) -> str:
    best = next((t.row for t in reversed(context.trials) if t.row.status == Status.KEPT), None)
    measured = ""
    if best and best.latency_us:
        peak = f", {best.pct_peak:.0f} % of the limit that bounds it" if best.pct_peak else ""
        over = f", {best.speedup_vs_pytorch:.2f}x PyTorch eager" if best.speedup_vs_pytorch else ""
        measured = f"\n#{best.experiment}, as the gate measured it: {four_figures(best.latency_us)} us{over}{peak}."
    return f"# The kernel to beat{measured}\n```python\n{context.incumbent}```\n"


def history_text(trials: Sequence[PastExperiment]) -> str:
    """Everything tried, in bounded length: the last in full, what was kept always, the rest in a few words or counted."""
    steps = {t.row.experiment for t in [t for t in trials if t.row.status == Status.KEPT][-STEPS:]}
    lines, counted = [], Counter()
    for age, trial in enumerate(reversed(trials)):
        if age < RECENT or trial.row.experiment in steps:
            lines.append(trial_line(trial, WORDS))
        elif age < OLDER:
            lines.append(trial_line(trial, FEW_WORDS))
        else:
            counted[trial.row.status] += 1
    if counted:
        number = ", ".join(f"{count} {status}" for status, count in counted.items())
        lines.append(f"- and before them: {number}")
    refused = next((t for t in reversed(trials) if t.row.correctness != "PASS"), None)
    detail = f"\nThe last refusal at length (#{refused.row.experiment}):\n{clip(refused.notes, 3000)}\n" if refused else ""
    return f"# Tried on this target so far\n{chr(10).join(reversed(lines)) or '(nothing yet)'}\n{detail}"


def trial_line(trial: PastExperiment, words: int = WORDS) -> str:
    row = trial.row
    first = trial.notes.strip().split("\n")[0]
    said = f" | gate: {first[:200]}" if words == WORDS and row.agent != STARTER else ""
    return f"- #{row.experiment} {row.status} {row.gain}: {row.description[:words]}{said}"


def clip(text: str, length: int) -> str:
    """The beginning and the end of a text that is too long: a compiler's first error, a traceback's last line."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}\n… ({len(text) - length} characters left out) …\n{text[-length // 2 :]}"


def describe(args: dict) -> str:
    """Shapes and strides of a call's arguments: `x float32[512, 768] strides (768, 1), eps=1e-06`."""
    parts = []
    for name, value in args.items():
        if hasattr(value, "shape"):
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{name} {dtype}{list(value.shape)} strides {value.strides}")
        else:
            parts.append(f"{name}={value!r}")
    return ", ".join(parts)
