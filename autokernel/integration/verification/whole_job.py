"""A run on a live model: profile, experiments and verification, by the command for it in a process of its own."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autokernel.common.preflight import HOME, program
from autokernel.history.runs import checked_tag
from autokernel.integration.verification.forms import EAGER
from autokernel.integration.verification.record import Verification
from autokernel.model.handover import hand_over
from autokernel.run.command import Progress, run_command, workload_options
from autokernel.run.workspace import PLAN, VERIFY, Workspace, default_tag, runs


@dataclass(frozen=True)
class FinishedRun:
    workspace: Workspace
    verification: Verification | None  # None: no operation was found for which there are kernels

    @property
    def pays(self) -> bool:
        """Whether kernels are part of the fastest that was measured."""
        return self.verification is not None and self.verification.best.kernels

    @property
    def fallback(self) -> str | None:
        """What the fastest has beside the kernels, as apply() takes it."""
        fallback = self.verification.best.fallback
        return None if fallback == EAGER else fallback


def whole_job(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    agent: str,
    limits: Mapping[str, float | None],
    run: str | None = None,
    progress: Progress | bool = True,
) -> FinishedRun:
    """Runs to its end the run named `run`, by default a new one or that of this workload which is not verified yet.

    limits: options of the command and their values; None leaves an option to its default. Raises CommandFailed, Refused.
    """
    workload = hand_over(model, inputs, kwargs, HOME)
    workspace = Workspace(HOME, default_tag(HOME, workload) if run is None else checked_tag(str(run)))
    words = [*program("orchestrate", "optimize"), "run", *workload_options(workload)]
    words += ["--tag", workspace.tag, "--agent", agent]
    words += [f"{name}={value}" for name, value in limits.items() if value is not None]
    try:
        run_command(words, progress)
    finally:
        with suppress(OSError):  # something is in it, unless it was refused, or interrupted, at its start
            workspace.folder.rmdir()
    if (workspace / PLAN).exists() and not workspace.plan.targets:
        return FinishedRun(workspace, None)
    return FinishedRun(workspace, Verification.read(workspace / VERIFY))


def verified_run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Path | None:
    """The folder of the latest verified run of this very model on these very inputs, if there is one."""
    workload = hand_over(model, args, kwargs, HOME).to_json()
    verified = (run for run in runs(HOME) if (run / VERIFY).exists())
    return next((run.folder for run in verified if run.plan.workload == workload), None)
