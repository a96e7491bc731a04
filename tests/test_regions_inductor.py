"""What Inductor writes for a region as a kernel file: on the CPU by Triton's interpreter, on a GPU as it is."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autokernel.model.regions.spec import Region
from autokernel.spec import REGIONS, load_spec
from autokernel.target import Target, WeightedCase

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import ast
import sys
import torch
import inductor_without_gpu
from region_models import CHAINS, N, Of, drawn, found, why_wrong
from autokernel import spec as specs
from autokernel.agents.knobs import read_knobs, set_knob
from autokernel.model.regions.spec import Region
from autokernel.spec import import_file, load_spec
from pathlib import Path

specs.REGIONS = Path(sys.argv[1])
torch.manual_seed(0)
for name in sys.argv[2].split(","):
    with inductor_without_gpu.h100():
        _, sites = found(Of(CHAINS[name]).eval(), torch.randn(64, N), torch.randn(64, N), backend="triton")
    assert sites, name
    for site in sites:
        spec = load_spec(site.kernel_type)
        files, why = spec.starters("triton"), Region.read(spec.folder).without_inductor
        assert "triton_inductor" in files, f"{name}: {why}"
        path = files["triton_inductor"]
        text = path.read_text()
        assert "torch._inductor of PyTorch" in text and "BSD-3-Clause" in text and "import torch._" not in text
        imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        assert imported <= {"torch", "triton", "tl", "libdevice", "tl_math"}, imported  # as where Inductor launches them
        knobs = read_knobs(text)
        sources = [text, *(set_knob(text, knob, values[-1]) for knob, values in list(knobs.choices.items())[:1])]
        for n, source in enumerate(sources):
            path.write_text(source)
            kernel = import_file(path, f"{site.kernel_type}_{n}")
            kernel.libdevice = inductor_without_gpu
            inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
            reason = why_wrong(kernel.kernel_fn(**inputs), spec, inputs)
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
    run(tmp_path, "gelu,functions,normed,scores,transposed,grouped")


@pytest.mark.slow
def test_several_results(tmp_path: Path) -> None:
    run(tmp_path, "residual,gates,other_strides,mean_last")


CALL = """
def call(args):
    arg0_1, = args
    args.clear()
    assert_size_stride(arg0_1, (8, 8), (8, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        {line}
        del arg0_1
    return (buf0, )
"""
REFUSED = ["extern_kernels.mm(arg0_1, arg0_1, out=buf0)", "buf0 = torch.ops.aten.sort.default(arg0_1)", "buf0 = _constant0"]


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_no_launch_is_refused_by_its_text(line: str) -> None:
    from autokernel.model.regions.inductor import Body
    from autokernel.model.regions.lowering import Unsupported

    reason = re.escape(line.rpartition(" = ")[2])
    with pytest.raises(Unsupported, match=f"Inductor's program has {reason}"):
        Body(["input_0"], {}, {}).lines(ast.parse(CALL.format(line=line)))
    taken = Body(["input_0"], {}, {}).lines(
        ast.parse(CALL.format(line="buf1 = reinterpret_tensor(arg0_1, (64,), (1,), 0)"))
    )
    assert taken[1:] == ["buf1 = input_0.as_strided((64,), (1,))", "return buf0"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "normed", "transposed", "grouped"])
def test_the_gate_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, compiled and chosen by Inductor on this GPU; then without it, by all stages."""
    from region_models import CHAINS, N, Of, found

    from autokernel.gate import Judge

    monkeypatch.setattr("autokernel.model.regions.growing._KNOWN", {})
    model = Of(CHAINS[name]).half().cuda().eval()
    inputs = [torch.randn(64, N, dtype=torch.float16, device="cuda") for _ in range(2)]
    before = set(REGIONS.glob("*"))
    _, sites = found(model, *inputs, backend="triton")
    assert sites
    try:
        for site in sites:
            spec = load_spec(site.kernel_type)
            assert "triton_inductor" in spec.starters("triton"), Region.read(spec.folder).without_inductor
            target = Target(name, spec.name, "triton", "cuda", (WeightedCase(site.case, variants=site.variants),))
            with Judge("cuda") as judge:
                verdict = judge.check(spec.starters("triton")["triton_inductor"].read_text(), target)
            assert verdict.correctness.value == "PASS", verdict.why
    finally:
        for folder in set(REGIONS.glob("*")) - before:
            shutil.rmtree(folder)
