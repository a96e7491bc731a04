"""What Inductor writes for a region as a kernel file: on the CPU by Triton's interpreter, on a GPU as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys
import torch
from inductor_without_gpu import LIBDEVICE, h100
from test_regions import CHAINS, N, Of, drawn, found
from autokernel import spec as specs
from autokernel.agents.knobs import read_knobs, set_knob
from autokernel.gate.checks.correctness import expect, wrong
from autokernel.model.regions.spec import Region
from autokernel.spec import import_file, load_spec
from pathlib import Path

specs.REGIONS = Path(sys.argv[1])
torch.manual_seed(0)
for name in sys.argv[2].split(","):
    with h100():
        _, sites = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N), backend="triton")
    assert sites, name
    for site in sites:
        spec = load_spec(site.kernel_type)
        files, why = spec.starters("triton"), Region.read(spec.folder).without_inductor
        assert "triton_inductor" in files, f"{name}: {why}"
        path = files["triton_inductor"]
        text = path.read_text()
        assert "torch._inductor of PyTorch" in text and "BSD-3-Clause" in text and "import torch._" not in text
        knobs = read_knobs(text)
        sources = [text, *(set_knob(text, knob, values[-1]) for knob, values in list(knobs.choices.items())[:1])]
        for n, source in enumerate(sources):
            path.write_text(source)
            kernel = import_file(path, f"{site.kernel_type}_{n}")
            kernel.libdevice = LIBDEVICE
            inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
            result = kernel.kernel_fn(**inputs)
            assert result.is_contiguous()
            reason = wrong(result, expect(spec, inputs, "cpu"))
            assert reason is None, f"{name}, {n}: {reason}"
print("right")
"""


def run(folder: Path, names: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", PROGRAM, str(folder), names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_kernels_are_right(tmp_path: Path) -> None:
    """One kernel and several; by elements, by rows, by tiles."""
    run(tmp_path, "gelu,normed,scores,transposed,grouped")
