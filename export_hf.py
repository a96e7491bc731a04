"""Write a kernel as a project of the Hugging Face Kernel Hub, with a card, a test, and a variant that loads at once.

Usage:
    python export_hf.py --name my-rmsnorm                                      the kept kernel of kernel.py
    python export_hf.py --name my-softmax --kernel kernels/softmax/triton_kernel.py --output DIR --repo-id me/my-softmax
    python bench.py kernel.py --json > verdict.json && python export_hf.py --name N --verdict verdict.json

Reads:  the kernel file; results.tsv and git (or --verdict) for the measured speed
Writes: DIR (default: workspace/hub/<name>): build.toml, flake.nix, CARD.md, torch-ext/, tests/, build/<variant>/

Triton kernels become a pure Python project, CUDA kernels one with a binding, whose variant for this machine is built here.
Load it:  kernels.get_local_kernel("DIR").  Publish it:  kernel-builder build-and-upload, in DIR (needs Nix and an account).
"""

import argparse
import json
from pathlib import Path

from autokernel import cli


def measured(source: str, verdict: Path | None) -> str:
    """What is known of the speed of this very source, in words; empty where nothing is."""
    import git

    from autokernel.experiments import ExperimentLog, Status
    from autokernel.spec import ROOT

    how = "8 to 32 pairs of fresh processes, interleaved, on fresh inputs that are in no cache; 95 % intervals."
    if verdict:
        data = json.loads(verdict.read_text())
        if not data.get("cases"):
            return ""
        lines = [f"On {data['device']}, against `{data['kernel_type']}` in PyTorch eager ({how}):", ""]
        for case in data["cases"]:
            s = case["speedup_vs_pytorch"]
            speed = f": {s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}] the speed of eager" if s else ""
            lines.append(f"- {case['case']}: {case['latency_us']:.4g} us{speed}")
        return "\n".join(lines)
    log = ExperimentLog(ROOT / "results.tsv")
    rows = [row for row in log.read() if row.status == Status.KEPT]
    repository = git.Repo(ROOT)
    for row in reversed(rows):
        if repository.git.show(f"{row.commit}:kernel.py", strip_newline_in_stdout=False) == source:
            speed = (
                f"{row.speedup_vs_pytorch:.2f}x PyTorch eager" if row.speedup_vs_pytorch else "not compared with PyTorch"
            )
            return f"On {row.device}, target {row.target}: {row.latency_us:.4g} us, {speed} ({how})"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the project: lower case letters, digits, dashes")
    parser.add_argument("--kernel", type=Path, default=Path("kernel.py"), help="the kernel file (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="default: workspace/hub/<name>")
    parser.add_argument("--repo-id", default="", help="on the Hub, such as me/my-rmsnorm")
    parser.add_argument("--verdict", type=Path, help="of `bench.py --json`, for the card")
    parser.add_argument("--backends", default="cuda", help="of a Triton kernel, such as cuda,rocm (default: %(default)s)")
    options = parser.parse_args()
    from autokernel.build import CompileError, MissingCompiler
    from autokernel.hub import NotExported, Project, write
    from autokernel.spec import ROOT

    if not options.kernel.is_file():
        cli.fail(f"there is no file {options.kernel}")
    source = options.kernel.read_text()
    backends = tuple(options.backends.split(","))
    project = Project(options.name, source, options.repo_id, measured(source, options.verdict), backends)
    output = options.output or ROOT / "workspace" / "hub" / options.name
    try:
        variant = write(project, output)
    except (NotExported, CompileError, MissingCompiler) as reason:
        cli.fail(reason)
    print(f"written: {output}\nvariant: {variant.name}\nspeed on the card: {'yes' if project.measured else 'not measured'}")
    print(f'load it: kernels.get_local_kernel(Path("{output}"))')
    print("not run here: the Nix build for other versions of PyTorch, and the upload (kernel-builder build-and-upload)")


if __name__ == "__main__":
    main()
