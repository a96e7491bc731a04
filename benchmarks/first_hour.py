"""A new user's first hour in a clean clone without an environment: what is typed, what comes, how long each step takes.

Usage:   python benchmarks/first_hour.py              (some 25 minutes on two cores; do nothing else meanwhile)
         PIP_CONSTRAINT=FILE python benchmarks/first_hour.py   (torch held to the version that FILE names)
Reads:   this clone (committed files), the README, from which the first line is taken
Writes:  benchmarks/transcripts/first-hour.txt (--out FILE: elsewhere)
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks/transcripts/first-hour.txt"
PYTHON = ".venv/bin/python"
# Of a kind that is not in models/: patches by a convolution, PyTorch's own encoder layers, a mean, a head.
MODEL = """import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, width=256, tags=1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, tags)

    def forward(self, images):
        return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
"""
PROGRAM = """import time, torch, autokernel
from my_model import Tagger

model, images = Tagger().eval(), torch.randn(4, 3, 128, 128)
with torch.no_grad():
    before = model(images)
    autokernel.apply(model, fallback="inductor")
    after = model(images)
print("largest difference of an output:", (before - after).abs().max().item())
print(autokernel.explain(model))
"""
MINE = "--model my_model.py --class-name Tagger --input-shape 4,3,128,128"


def steps(first_line: str) -> list[tuple[str, str]]:
    """What a step is for, and its command."""
    install, job = re.split(r" && (?=\S+ orchestrate\.py)", first_line)
    return [
        ("the README's first line, its installation", install),
        ("the README's first line, its job", job),
        ("what was tried", f"{PYTHON} orchestrate.py log"),
        ("where the time of a model of one's own goes", f"{PYTHON} profile.py {MINE}"),
        ("that model for a minute", f"{PYTHON} orchestrate.py {MINE} --minutes 1"),
        ("in a program", f"{PYTHON} my_program.py"),
        ("one kernel by hand", f"{PYTHON} bench.py kernels/softmax/cpp_kernel.py"),
        ("what there is", f"{PYTHON} orchestrate.py runs"),
    ]


def take(command: str, folder: Path, longest: int) -> list[str]:
    """The command, the lines that it prints, each with the second at which it came, its exit status where it is not 0."""
    started, lines = time.monotonic(), []
    with subprocess.Popen(
        command, shell=True, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            lines.append(f"{time.monotonic() - started:6.1f}  {line.rstrip()}")
    left_out = [f"        … {len(lines) - longest} lines"] if len(lines) > longest else []
    status = f", exit status {process.returncode}" if process.returncode else ""
    return [f"$ {command}", *left_out, *lines[-longest:], f"({time.monotonic() - started:.0f} s{status})"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--most", type=int, default=200, metavar="N", help="last lines of a step that are shown (%(default)s)"
    )
    options = parser.parse_args(argv)
    first_line = re.search(r"^python3 .* orchestrate\.py$", (ROOT / "README.md").read_text(), re.M)[0]
    with tempfile.TemporaryDirectory() as home:
        clone = Path(home, "autokernel")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=clone, text=True).strip()
        (clone / "my_model.py").write_text(MODEL)
        (clone / "my_program.py").write_text(PROGRAM)
        empty = ("AUTOKERNEL_CACHE", "AUTOKERNEL_PROVEN", "TORCHINDUCTOR_CACHE_DIR")
        os.environ |= {name: f"{home}/{name.lower()}" for name in empty} | {"PIP_QUIET": "3"}
        lines = [f"# At {commit}, in a clean clone, with empty caches of kernels and of PyTorch's compiler."]
        started = time.monotonic()
        for purpose, command in steps(first_line):
            begun = (time.monotonic() - started) / 60
            lines += ["", f"# {begun:.1f} min: {purpose}", *take(command, clone, options.most)]
            print("\n".join(lines[-8:]), flush=True)
            options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
