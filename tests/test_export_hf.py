"""Exported kernels load through the package `kernels` in a process that does not know this repository, and are right."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from autokernel.agents.sizes import with_table
from autokernel.export.folders import NotOurs
from autokernel.export.hub import NotExported, Project, write
from autokernel.gate.checks.correctness import wrong
from autokernel.gate.checks.expectations import expect
from autokernel.gate.checks.inputs import fill_inputs
from autokernel.spec import KERNELS, load_spec

kernels = pytest.importorskip("kernels")
RUST = pytest.importorskip("kernels._rust")

RUN = """
import sys
from pathlib import Path

import kernels
import torch

module = kernels.get_local_kernel(Path(sys.argv[1]), backend=sys.argv[4])
calls = torch.load(sys.argv[2])
torch.save([getattr(module, sys.argv[5])(**inputs) for inputs in calls], sys.argv[3])
assert not any(name.partition(".")[0] == "autokernel" for name in sys.modules)
print(module.__all__, [name for name in dir(module.layers) if name[0].isupper() and name != "Tensor"])
"""


@dataclass(frozen=True)
class Export:
    kernel_type: str
    layer: str = ""
    file: str = "triton_kernel"
    table: Mapping = field(default_factory=dict)  # settings by sizes


TRITON = [Export("rmsnorm", "RMSNorm"), Export("layernorm", "LayerNorm"), Export("softmax"), Export("vectorsum")]
SMOKE = ((8, 256), (256,))
TRITON.append(Export("rmsnorm", "RMSNorm", table={SMOKE: {"PROGRAM_ELEMENTS": 1024}}))
CUDA = [
    Export("rmsnorm", "RMSNorm", "cuda_kernel"),
    Export("softmax", "", "cuda_kernel"),
    Export("layernorm", "LayerNorm", "cuda_kernel"),
]


def source(export: Export) -> str:
    return with_table((KERNELS / export.kernel_type / f"{export.file}.py").read_text(), export.table)


def round_trip(export: Export, folder: Path, backend: str) -> str:
    """Export, load and run elsewhere, and hold every output against the oracle; returns what the module offers."""
    project = Project(f"ak-{export.kernel_type}", source(export), backends=(backend,))
    write(project, folder / "project")
    spec = load_spec(export.kernel_type)
    small = (spec.smoke, *spec.edges[:3])
    calls = [fill_inputs(spec, spec.case(dims, dtype), 7) for dims in small for dtype in spec.dtypes]
    (folder / "run.py").write_text(RUN)
    device = "cpu" if backend == "cpu" else "cuda"
    moved = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()} for inputs in calls]
    torch.save(moved, folder / "inputs.pt")
    names = ["run.py", "project", "inputs.pt", "outputs.pt", backend, export.kernel_type]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if backend == "cpu" else {}
    if backend != "cpu":
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p.endswith(("site", "packages")))
    done = subprocess.run([sys.executable, *names], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for inputs, y in zip(calls, torch.load(folder / "outputs.pt"), strict=True):
        assert wrong(y.cpu(), expect(spec, inputs, "cpu")) is None
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("export", TRITON, ids=lambda e: e.kernel_type)
def test_triton_round_trip(export: Export, tmp_path):
    """On this CPU, by Triton's interpreter: a variant for backend cpu."""
    offered = round_trip(export, tmp_path, "cpu")
    assert export.kernel_type in offered and export.layer in offered


@pytest.mark.gpu
@pytest.mark.parametrize("export", [*TRITON, *CUDA], ids=lambda e: f"{e.kernel_type}-{e.file}")
def test_gpu_round_trip(export: Export, tmp_path):
    offered = round_trip(export, tmp_path, "cuda")
    assert export.kernel_type in offered and export.layer in offered


def test_a_wrong_kernel_is_seen(tmp_path):
    """The round trip can fail."""
    text = source(TRITON[0]).replace("values * scale[:, None]", "values * 1.01 * scale[:, None]")
    assert text != source(TRITON[0])
    project = Project("ak-wrong", text, backends=("cpu",))
    write(project, tmp_path / "project")
    spec = load_spec("rmsnorm")
    inputs = fill_inputs(spec, spec.case(spec.smoke, torch.float32), 7)
    (tmp_path / "run.py").write_text(RUN)
    torch.save([inputs], tmp_path / "inputs.pt")
    command = [sys.executable, "run.py", "project", "inputs.pt", "outputs.pt", "cpu", "rmsnorm"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, capture_output=True)
    assert wrong(torch.load(tmp_path / "outputs.pt")[0], expect(spec, inputs, "cpu"))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_build_toml_and_metadata_are_what_kernels_reads(backend, tmp_path):
    project = Project("ak-rmsnorm", source(TRITON[0]), "me/ak-rmsnorm", backends=(backend,))
    variant = write(project, tmp_path)
    (parsed,) = RUST.Build.open(tmp_path).general.backends
    assert str(parsed).lower() == backend
    metadata = RUST.Metadata.read_from_file(variant / "metadata.json")
    assert variant.name == f"torch-{backend}" and str(metadata.name) == "ak-rmsnorm"
    metadata.digest.validate(RUST.Digest.hash_variant(RUST.DigestAlgorithm.SHA256, variant))
    (variant / "kernel.py").write_text("another")
    with pytest.raises(RUST.DigestValidationError):
        metadata.digest.validate(RUST.Digest.hash_variant(RUST.DigestAlgorithm.SHA256, variant))


def test_a_cuda_project_has_a_binding_that_kernels_reads(tmp_path, monkeypatch):
    """All but what nvcc makes: build.toml, binding, sources and headers."""
    from autokernel.export import hub

    monkeypatch.setattr(hub, "compile_library", lambda library: Path(__file__))  # there is no device to compile it for
    write(Project("ak-softmax", source(CUDA[1])), tmp_path)
    (backend,) = RUST.Build.open(tmp_path).general.backends
    assert backend == RUST.Backend.CUDA
    binding = (tmp_path / "torch-ext" / "torch_binding.cpp").read_text()
    for name in ("run_rows", "run_strided"):
        assert f'ops.impl("{name}"' in binding
    for listed in ("kernel.cu", "rows.cuh", "autokernel.cuh"):
        assert (tmp_path / "ak_softmax_cuda" / listed).is_file()


@dataclass(frozen=True)
class Refused:
    name: str
    file: str
    why: str


REFUSED = [
    Refused("Ak_Softmax", "softmax/triton_kernel", "is no name for a kernel"),
    Refused("x", "softmax/triton_kernel", "two lower case letters or more"),
    Refused("ak-softmax", "softmax/cpp_kernel", "a C++ one cannot"),
    Refused("ak-matmul", "matmul/cuda_kernel", "chooses among libraries"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: r.why)
def test_refused(refused: Refused, tmp_path):
    with pytest.raises(NotExported, match=re.escape(refused.why)):
        write(Project(refused.name, (KERNELS / f"{refused.file}.py").read_text()), tmp_path / "project")


def test_a_compiled_kernel_with_settings_by_sizes_is_refused(tmp_path):
    """Its binding is one library, and would run the code of one setting with the launches of another."""
    sized = source(Export("rmsnorm", file="cuda_kernel", table={SMOKE: {"VECTORS": 2}}))
    with pytest.raises(NotExported, match="a library each"):
        write(Project("ak-rmsnorm", sized), tmp_path / "project")


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(NotOurs, match="did not write"):
        write(Project("ak-softmax", source(TRITON[2])), tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
