"""Problems of KernelBench in this project: where they are, and what the gate and the loop need of one."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autokernel.common import console
from autokernel.kernelbench.problems import Cost, Problem, examine, fitting, in_one_line, target_of
from autokernel.kernelbench.rewriting import NotRewritten, Rewriting, rewrite, unchanged, variants
from autokernel.spec import PROBLEMS, load_spec
from autokernel.target import Plan, Target

SOURCE = PROBLEMS / "source"  # what `fetch` has brought
LIMIT = Cost(flops=300_000_000, nbytes=24_000_000)  # of one pass on a CPU: about thirty of them, in float64, make a verdict


@dataclass(frozen=True)
class Setup:
    """A problem that is ready for the gate, and the ModelNew that our kernels make of it, if any does."""

    problem: Problem
    target: Target
    sources: Mapping[str, str]  # stem of a starter -> ModelNew
    rewriting: Rewriting | None
    why: str  # there is no rewriting

    @property
    def source(self) -> str:
        return self.sources[self.target.starter]


def repository(path: Path | None) -> Path:
    """The folder that has level1/, level2/, …; ends the program where there is none."""
    given = path or Path(os.environ.get("KERNELBENCH", SOURCE))
    folders = [folder for folder in (given, given / "KernelBench") if any(folder.glob("level*/*.py"))]
    if not folders:
        ways = "name a clone of it with --repo-path or $KERNELBENCH, or run python kernelbench/bridge.py fetch --level 1"
        console.fail(f"no KernelBench problems in {given}: {ways}")
    return folders[0]


def number_of(path: Path) -> int:
    """Of a problem, by its file's name: 23 for level1/23_Softmax.py."""
    found = re.match(r"\d+", path.stem)
    return int(found[0]) if found else 0


def level_files(folder: Path, level: int) -> list[Path]:
    return sorted((folder / f"level{level}").glob("*.py"), key=number_of)


def name_of(path: Path) -> str:
    """As a kernel type: level1_23, or the file's own name."""
    level = path.parent.name if re.fullmatch(r"level\d+", path.parent.name) and number_of(path) else ""
    return f"{level}_{number_of(path)}" if level else re.sub(r"\W", "_", path.stem).lower()


def set_up(path: Path, backend: str, device: str, limit: Cost | None) -> Setup:
    """Everything that the loop and the gate need, written to workspace/kernelbench/<name>/.

    limit: of one pass; None takes the problem as published. Raises NotJudged.
    """
    with in_one_line():
        problem = examine(name_of(path), path, fitting(path, limit) if limit else {}, device)
    folder, why, rewriting = problem.write(path.read_text()), "", None
    for old in folder.glob(f"{backend}_*.py"):
        old.unlink()
    try:
        rewriting = rewrite(problem, backend, device)
        sources = variants(rewriting, backend)
    except NotRewritten as reason:
        why, sources = str(reason), {f"{backend}_kernel": unchanged(problem, backend)}
    for stem, source in sources.items():
        (folder / f"{stem}.py").write_text(source)
    load_spec.cache_clear()  # the same name may have had other sizes before
    return Setup(problem, target_of(load_spec(problem.name), backend, device), sources, rewriting, why)


def plan_of(setup: Setup) -> Plan:
    """A plan whose only target is the problem."""
    return Plan(f"KernelBench {setup.problem.name}", {}, setup.target.device, 0.0, (setup.target,))
