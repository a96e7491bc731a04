"""What a Python program or a notebook calls: profile, optimize, bench, check and verify. `autokernel` exports them.

Whole models are measured by the commands, in processes of their own: the caller's threads, event loop and GPU memory take
no part in it. Such a process shows its progress on the terminal, as it does for the scripts, where stderr is one. Else, or
with progress=False, its lines go to the log "autokernel.api" (level INFO), or to `progress`, if that is a function.
Nothing is printed on stdout. What cannot be done raises Refused, in one sentence.
"""

import html
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from autokernel.common.preflight import HOME, Refused, program
from autokernel.common.verdict import Interval, Verdict
from autokernel.gate import Judge
from autokernel.gate.comparison import Comparison, compare
from autokernel.gate.kernel_files import source_of, usual_target
from autokernel.gate.source import checked_source, constants
from autokernel.integration.apply import apply_best
from autokernel.integration.verification.forms import EAGER
from autokernel.integration.verification.record import Verification
from autokernel.integration.verification.whole_job import whole_job
from autokernel.integration.verification.winners import open_run
from autokernel.model.handover import hand_over
from autokernel.model.hotspots import ModelProfile
from autokernel.model.user_code import shown
from autokernel.report.summary import HTML
from autokernel.run.command import CommandFailed, Progress, run_command, told, workload_options
from autokernel.run.workspace import VERIFY


@dataclass(frozen=True)
class Optimized:
    """What optimize() came to. `model` is the one that was given, with kernels in it where they pay."""

    model: nn.Module = field(repr=False)
    run: str  # its name, for apply(), verify() and the commands
    report: Path  # report.html
    verification: Verification | None = field(repr=False)  # None: no operation was found for which there are kernels

    @property
    def applied(self) -> bool:
        """Whether `model` has kernels in it now: they are part of the fastest that was measured."""
        return self.verification is not None and self.verification.best.kernels

    @property
    def speedups(self) -> Mapping[str, Interval]:
        """Of `model` as it is now over each way to run it without kernels, 95 % intervals; empty if it was left alone."""
        return self.verification.speedups[self.verification.best.fallback] if self.verification and self.applied else {}

    @property
    def baseline(self) -> str:
        """What `speedup` is over: the model as it was."""
        return EAGER

    @property
    def speedup(self) -> Interval | None:
        """Of `model` as it is now over `baseline`; None where it was left alone."""
        return self.speedups.get(self.baseline)

    @property
    def recommendation(self) -> str:
        """What to do, in one line; where the fastest is torch.compile without kernels, it says so."""
        if self.verification is None:
            return "leave it as it is: no operation was found for which there are kernels"
        return self.verification.verdict

    def __str__(self) -> str:
        return "\n".join([self.recommendation, f"report: {self.report}"])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{speedup}</td></tr>" for name, speedup in self.speedups.items()
        )
        table = f"<table><tr><th>against</th><th>speedup, 95 % interval</th></tr>{rows}</table>" if rows else ""
        verdict, report = html.escape(self.recommendation), html.escape(str(self.report))
        return f"<p><b>{verdict}</b></p>{table}<p>run {html.escape(self.run)}, report: <code>{report}</code></p>"


def profile(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    baseline: str = "best",
    progress: Progress | bool = True,
) -> ModelProfile:
    """Where the model's time goes on these inputs: `hotspots`, ranked, with the time that a perfect kernel would take.

    kwargs: keyword arguments of forward(). baseline: what kernels are held against, "eager", "compile" or "best" of both.
    """
    workload = hand_over(model, inputs, kwargs or {}, HOME)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "profile.json")
        words = [
            *program("profile", "profile"),
            *workload_options(workload),
            "--baseline",
            baseline,
            "--output",
            str(output),
        ]
        run_command(words, progress)
        return ModelProfile.read(output)


def optimize(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    minutes: float | None = 30,
    experiments: int | None = None,
    agent: str = "tuner",
    top: int = 5,
    run: str | None = None,
    progress: Progress | bool = True,
) -> Optimized:
    """The whole job on a live model: profile it on these inputs, experiment for `minutes`, verify, and put in what pays.

    `model` is changed in place, as apply() does it; unapply() takes the kernels out again. An interrupted call goes on
    where it stopped when it is made again with the same model. kwargs: keyword arguments of forward(). run: a name of your
    choice.
    """
    limits = {"--minutes": minutes, "--experiments": experiments, "--top": top}
    finished = whole_job(model, inputs, kwargs or {}, agent, limits, run, progress)
    apply_best(model, finished)
    return Optimized(model, finished.workspace.tag, finished.workspace / HTML, finished.verification)


def verify(run: str | Path | None = None, *, progress: Progress | bool = True) -> Verification:
    """Measure a run's kernels in its model again (the latest run's by default): right, and how much faster?"""
    workspace = open_run(run)
    record = workspace / VERIFY
    before = record.stat().st_mtime_ns if record.exists() else None
    words = [*program("verify", "verify"), "--workspace", str(workspace.folder)]
    said = run_command(words, progress, right=(0, 1))  # 1: the outputs are not the original's, or an error of ours
    if not record.exists() or record.stat().st_mtime_ns == before:
        raise CommandFailed("\n".join(said))
    return Verification.read(record)


def bench(
    kernel: str | Path,
    type: str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    incumbent: str | Path | None = None,
    sizes: bool = False,
    quick: bool = False,
    allow_libraries: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """The gate on a kernel: five stages of correctness, then its speed against PyTorch.

    kernel: a file, file.py:function, or the text of a kernel file. type: what it computes, if the file does not say.
    device: "cpu", "cuda"; by default a GPU if there is one. incumbent: another kernel to be faster than. quick: no proof.
    """
    device, seed, say = _device(device), _seed(seed), told(progress)
    source = _source(kernel, type, device)
    target = usual_target(source, _called(kernel), type, device, dtype, sizes)
    old = None if incumbent is None else _source(incumbent, type, device)
    if old and constants(old).get("KERNEL_TYPE") != target.kernel_type:
        raise Refused(f"{_called(incumbent)} is of another kernel type than {_called(kernel)}: nothing to compare")
    with Judge(device, allow_libraries) as judge:
        return judge.examine(source, target, old, quick, seed, progress=say)


def check(
    old: str | Path,
    new: str | Path,
    type: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    sizes: bool = False,
    allow_libraries: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Is the new kernel right, and not slower than the old one beyond doubt? As `autokernel check` decides it."""
    device, seed, say = _device(device), _seed(seed), told(progress)
    before, after = (_source(kernel, type, device) for kernel in (old, new))
    target = usual_target(after, _called(new), type, device, dtype, sizes)
    with Judge(device, allow_libraries) as judge:
        return compare(judge, before, after, target, seed, say)


def _device(asked: str | None) -> str:
    from autokernel.common.console import device_here

    return device_here(asked)


def _seed(seed: Any) -> int | None:
    """Raises Refused."""
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise Refused(f"seed is a whole number from 0 to 2**63 - 1, not {shown(seed)}")
    return seed


def _source(kernel: Any, type: str | None, device: str) -> str:
    """Of a file, or the text itself: no file's name has lines. Raises Refused."""
    if not isinstance(kernel, (str, Path)) or not str(kernel):
        raise Refused(f"{shown(kernel)} is no kernel: give its file, file.py:function, or the text of a kernel file")
    if _is_text(kernel):
        return checked_source(kernel, _called(kernel))
    return source_of(Path(kernel), type, device)


def _called(kernel: str | Path) -> str:
    return "the kernel" if _is_text(kernel) else str(kernel)


def _is_text(kernel: str | Path) -> bool:
    return isinstance(kernel, str) and "\n" in kernel
