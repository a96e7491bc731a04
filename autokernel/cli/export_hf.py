"""Write a kernel as a project of the Hugging Face Kernel Hub, with a card, a test, and a variant that loads at once.

Usage:
    python export_hf.py --name my-rmsnorm                                      the kept kernel of kernel.py
    python export_hf.py --name my-softmax --kernel kernels/softmax/triton_kernel.py --output DIR --repo-id me/my-softmax
    python bench.py kernel.py --json > verdict.json && python export_hf.py --name N --verdict verdict.json

Reads:  the kernel file; results.tsv and git (or --verdict) for the measured speed
Writes: DIR (default: workspace/hub/<name>): build.toml, flake.nix, CARD.md, torch-ext/, tests/, build/<variant>/

Triton kernels become a pure Python project, CUDA kernels one with a binding, whose variant for this machine is built here.
Load it:     kernels.get_local_kernel(Path("DIR"))
Publish it:  kernel-builder build-and-upload, in DIR (needs Nix and an account)
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from autokernel.cli.arguments import Parser, named_path
from autokernel.common import console
from autokernel.common.preflight import Refused
from autokernel.common.records import BadRecord, reads, record_from
from autokernel.common.verdict import Verdict
from autokernel.common.words import four_figures

HOW = "8 to 32 pairs of fresh processes, interleaved, on fresh inputs that are in no cache; 95 % intervals."


def measured(source: str, verdict: Path | None) -> str:
    """What is known of the speed of this very source, in words; empty where nothing is."""
    from autokernel.common.preflight import HOME
    from autokernel.history import ledger
    from autokernel.history.experiments import ExperimentLog, Status

    if verdict:
        return of_verdict(verdict)
    try:
        rows = [row for row in ExperimentLog(HOME / "results.tsv").read() if row.status == Status.KEPT]
        repo = ledger.repository(HOME).git
    except (BadRecord, ledger.NoRepository) as reason:
        print(f"note: no speed on the card: {reason}", file=sys.stderr)
        return ""
    for row in reversed(rows):
        show = ["git", "show", f"{row.commit}:kernel.py"]
        if repo.execute(show, with_exceptions=False, strip_newline_in_stdout=False) == source:
            speed = (
                f"{row.speedup_vs_pytorch:.2f}x PyTorch eager" if row.speedup_vs_pytorch else "not compared with PyTorch"
            )
            return f"On {row.device}, target {row.target}: {four_figures(row.latency_us)} us, {speed} ({HOW})"
    return ""


@reads("give the output of python bench.py FILE --json")
def of_verdict(path: Path) -> str:
    if not path.is_file():
        raise Refused(f"there is no file {path}: python bench.py FILE --json > {shlex.quote(str(path))} writes one")
    verdict = record_from(json.loads(path.read_text()), Verdict)
    if not verdict.cases:
        return ""
    lines = [f"On {verdict.device}, against `{verdict.kernel_type}` in PyTorch eager ({HOW}):", ""]
    for case in verdict.cases:
        s = case.speedup_vs_pytorch
        speed = f": {s.estimate(2)}{s.ends(2)} the speed of eager" if s else ""
        lines.append(f"- {case.case}: {four_figures(case.latency_us)} us{speed}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("--name", required=True, help="of the project: lower case letters, digits, dashes")
    parser.add_argument(
        "--kernel", type=named_path, default=Path("kernel.py"), help="the kernel file (default: %(default)s)"
    )
    parser.add_argument("--output", type=named_path, help="default: workspace/hub/<name>")
    parser.add_argument("--repo-id", default="", help="on the Hub, such as me/my-rmsnorm")
    parser.add_argument("--verdict", type=named_path, help="of `bench.py --json`, for the card")
    parser.add_argument("--backends", default="cuda", help="of a Triton kernel, such as cuda,rocm (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    from autokernel.build import CompileError
    from autokernel.common.preflight import HOME
    from autokernel.export.hub import Project, write
    from autokernel.gate.source import read_source

    source = read_source(options.kernel)
    backends = tuple(dict.fromkeys(word.strip() for word in options.backends.split(",")))
    project = Project(options.name, source, options.repo_id, measured(source, options.verdict), backends)
    output = options.output or HOME / "workspace" / "hub" / options.name
    try:
        variant = write(project, output)
    except CompileError as reason:
        console.fail(reason)
    print(f"written: {output}\nvariant: {variant.name}\nspeed on the card: {'yes' if project.measured else 'not measured'}")
    print(f'load it: kernels.get_local_kernel(Path("{output}"))')
    print("not run here: the Nix build for other versions of PyTorch, and the upload (kernel-builder build-and-upload)")
