"""A pass of the model as it is, and with the kernels that pay, as Chrome traces: for ui.perfetto.dev or chrome://tracing."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from autokernel.integration.verification.forms import EAGER, baseline
from autokernel.integration.verification.record import Verification
from autokernel.integration.verification.sides import built, wait_for

BEFORE, AFTER = "before", "after"


def trace_built(seed: int, names: Sequence[str], folder: str) -> str:
    """In a process that has built these sides: a file for a pass of each, in which kernels have the names of their targets.

    Returns what went wrong, or nothing: a verification stands without traces.
    """
    here, device = built[seed], [ProfilerActivity.CUDA] if built[seed].workload.device != "cpu" else []
    try:
        args, kwargs = here.workload.inputs(here.model, seed)
        Path(folder).mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            for name in names:
                with profile(activities=[ProfilerActivity.CPU, *device], record_shapes=True) as run:
                    here.models[name](*args, **kwargs)
                    wait_for(here.workload.device)
                run.export_chrome_trace(str(_file(Path(folder), here.workload.name, name)))
    except Exception as error:  # a full disk, or the profiler's own
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def keep_traces(verification: Verification, workloads: Sequence[str], folder: Path) -> list[Path]:
    """Of those of all forms, what stays: of the fastest with kernels and of the model as it is, a file for each workload.

    None of an earlier verification stays; where no kernel pays there are none.
    """
    fastest = verification.fastest_with_kernels
    for name in workloads if fastest else ():
        for form, kept in ((baseline(EAGER), BEFORE), (fastest.name, AFTER)):
            if (made := _file(folder, name, form)).exists():
                made.replace(_file(folder, name, kept))
            else:
                _file(folder, name, kept).unlink(missing_ok=True)
    kept = {_file(folder, name, kept) for name in workloads for kept in (BEFORE, AFTER) if fastest}
    for path in folder.glob("*.json.gz"):
        if path not in kept:
            path.unlink()
    return sorted(folder.glob("*.json.gz"))


def _file(folder: Path, workload: str, form: str) -> Path:
    return folder / ("-".join(filter(None, (workload, re.sub(r"\W", "-", form)))) + ".json.gz")
