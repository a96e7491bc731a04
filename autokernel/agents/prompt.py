"""What an agent that reads text is told about its target: oracle, shapes, incumbent, and the history of what was tried."""

import inspect
import textwrap

from autokernel.agents import Context, Trial

HISTORY = 40  # trials told one line each; the last failure is told at length


def task_text(context: Context) -> str:
    """The task as Markdown: stable parts first, so that a cached prefix stays valid from one experiment to the next."""
    return f"{problem_text(context)}\n{state_text(context)}"


def problem_text(context: Context) -> str:
    target, spec = context.target, context.spec
    shapes = "\n".join(f"- {w.case.name}: {describe(w.case.args)}; {w.calls:g} calls per pass" for w in target.cases)
    library = f"A library may be called for {spec.library_calls}." if spec.library_calls else ""
    return f"""# Target {target.name}
Make `kernel.py` faster: kernel type {target.kernel_type}, backend {target.backend}, device {target.device},
{target.share:.1%} of the model's time. What counts is the time over these shapes, weighted by calls:
{shapes}

The oracle, which `kernel_fn` must agree with (same parameters, in the same names):
```python
{textwrap.dedent(inspect.getsource(spec.oracle))}```
PyTorch programs write it as {spec.eager_form}. {library}
It is also judged at these sizes, in fp16, bf16 and fp32: {", ".join(str(dict(d)) for d in (*spec.sweep, *spec.edges))}.
"""


def state_text(context: Context) -> str:
    lines = "\n".join(trial_line(t) for t in context.trials[-HISTORY:]) or "(nothing yet)"
    refused = next((t for t in reversed(context.trials) if t.row.correctness != "PASS"), None)
    detail = f"\nThe last refusal at length:\n{refused.notes}\n" if refused else ""
    return f"""# Tried on this target so far
{lines}
{detail}
# The kernel to beat
```python
{context.incumbent}```
"""


def trial_line(trial: Trial) -> str:
    row = trial.row
    first = trial.notes.strip().split("\n")[0]
    return f"- #{row.experiment} {row.status} {row.gain}: {row.description} | gate: {first}"


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
