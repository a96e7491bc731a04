"""Many experiments in one run, and what piles up meanwhile: memory, file handles, processes, refs, disk.

Usage:
    python benchmarks/soak.py --experiments 500 --out benchmarks/soak.json

The real gate judges wrong kernels for two targets, proposed by a scripted agent: a second each.

Reads:  this clone's files
Writes: the file named by --out; works in a temporary folder
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.agents.scripted import ScriptedAgent
from autokernel.cli.arguments import Parser, count, script
from autokernel.gate import Judge
from autokernel.gate.workers.scratch import SCRATCH_NAME
from autokernel.run.loop import Budget, Loop
from benchmarks.kills import NO_RULES, copy_of_this_clone, descendants, sh, started, users_state, wrong
from benchmarks.kills import check as check_records

PER_EXPERIMENT_KB = 40  # of disk: loose objects of git, a ref and a row, each at least a block, and for the log
SETTLED = 60  # experiments, after which the judge removes an old binary for each new one
SLACK_MB = 30  # of memory: allocators do not give everything back


def look(root: Path, loop: Loop, since: float) -> dict[str, float]:
    """What this process and its children hold now, and what is on the disk."""
    pids = [os.getpid(), *descendants(os.getpid())]
    resident = [int(line.split()[1]) for pid in pids for line in _status(pid) if line.startswith("VmRSS")]
    disk = sum(int(sh("du", "-sk", str(path), cwd=root).split()[0]) for path in (root, *_scratch()))
    return {
        "experiments": len(loop.rows),
        "seconds": round(time.monotonic() - since, 1),
        "memory_mb": round(sum(resident) / 1024, 1),
        "handles": len(os.listdir("/proc/self/fd")),
        "processes": len(pids),
        "refs": len(sh("git", "for-each-ref", cwd=root).splitlines()),
        "disk_kb": disk,
    }


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []


def _scratch() -> list[Path]:
    """The judges' folders that are ours: those of others grow and shrink meanwhile."""
    named = Path(tempfile.gettempdir()).glob(f"{SCRATCH_NAME}*")
    ours = {
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    }
    return [folder for folder in named if str(folder) in ours]


def soak(root: Path, experiments: int, every: int) -> list[dict[str, float]]:
    """Run so many experiments; returns what was seen after every `every` of them."""
    root.mkdir()
    workspace = started(copy_of_this_clone(root))
    before = users_state(root)
    seen, since = [], time.monotonic()
    with workspace.locked(), Judge("cpu") as judge:
        loop = Loop(workspace, workspace.plan, judge, lambda line: None)

        def edits() -> Iterator[tuple[object, str]]:
            for number in range(experiments):
                if number % every == 0:
                    seen.append(look(root, loop, since))
                yield lambda source, number=number: f"# {number}\n{wrong(source)}", f"edit {number}"
            seen.append(look(root, loop, since))

        loop.run(ScriptedAgent(edits()), NO_RULES, Budget(experiments=experiments + 1))
    check_records(workspace, before)
    assert not _scratch(), "the judge left its folder behind"
    return seen


def check(seen: list[dict[str, float]]) -> None:
    """Fails if anything grew that should not since the first look at a run that has settled."""
    first, last = next(look for look in seen if look["experiments"] >= SETTLED), seen[-1]
    made = last["experiments"] - first["experiments"]
    assert made > 0
    assert last["memory_mb"] <= first["memory_mb"] + SLACK_MB, seen
    assert last["handles"] <= first["handles"], seen
    assert last["processes"] <= first["processes"], seen
    assert last["refs"] - first["refs"] == made, seen
    assert last["disk_kb"] - first["disk_kb"] <= PER_EXPERIMENT_KB * made, seen


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--experiments", type=count, default=500)
    parser.add_argument("--every", type=count, default=50, help="look after so many (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # whose turns are not those of other runs here
        seen = soak(Path(folder, "clone"), arguments.experiments, arguments.every)
    for line in seen:
        print(json.dumps(line))
    if arguments.out:
        arguments.out.write_text(json.dumps(seen, indent=1) + "\n")
    check(seen)
    print("flat")


if __name__ == "__main__":
    raise SystemExit(script(main))
