"""A pass of the model as it is, and with the kernels that pay, as Chrome traces: for ui.perfetto.dev or chrome://tracing."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from autokernel.integration.verification.forms import EAGER
from autokernel.integration.verification.processes import in_fresh_process
from autokernel.integration.verification.record import Verification
from autokernel.integration.verification.sides import Sides, Variant, wait_for
from autokernel.integration.winner import Winner
from autokernel.model.workload import Workload
from autokernel.target import Plan

BEFORE, AFTER = "before.json.gz", "after.json.gz"


def write_traces(
    plan: Plan,
    verification: Verification,
    winners: Sequence[Winner],
    folder: Path,
    say: Callable[[str], None],
    log: Path | None = None,
) -> list[Path]:
    """Of the fastest form with kernels, and of the model without: for each workload one file of each. None of an earlier
    verification stays; where no kernel pays there are none. What goes wrong is said: it stands without them."""
    try:
        for path in folder.glob("*.json.gz"):
            path.unlink()
        if verification.fastest_with_kernels:
            _trace_each_workload(plan, verification, winners, folder, log)
    except Exception as error:  # the model's own among them
        say(f"no traces: {' '.join(str(error).split()) or type(error).__name__}")
    return sorted(folder.glob("*.json.gz"))


def _trace_each_workload(
    plan: Plan, verification: Verification, winners: Sequence[Winner], folder: Path, log: Path | None
) -> None:
    form = verification.fastest_with_kernels
    folder.mkdir(parents=True, exist_ok=True)
    kernels = verification.selected(winners, None if form.fallback == EAGER else form.fallback)
    sides = {BEFORE: Variant(), AFTER: Variant(tuple(kernels), form.fallback)}
    for workload, _ in Workload.from_json(plan.workload).parts:
        in_fresh_process(workload.device, trace, workload, sides, folder, log=log)


def trace(workload: Workload, sides: dict[str, Variant], folder: Path) -> None:
    """In a child process: one pass of each side, in which the kernels have the names of their targets."""
    model, args, kwargs = workload.load()
    built, device = Sides(workload, model), [ProfilerActivity.CUDA] if workload.device != "cpu" else []
    with torch.no_grad():
        built.build(sides, (args, kwargs))  # which runs each as often as it takes until CUDA graphs are replayed
        for name, candidate in built.models.items():
            with profile(activities=[ProfilerActivity.CPU, *device], record_shapes=True) as run:
                candidate(*args, **kwargs)
                wait_for(workload.device)
            run.export_chrome_trace(str(folder / "-".join(filter(None, (workload.name, name)))))
