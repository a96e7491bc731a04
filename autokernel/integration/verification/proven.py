"""The kernels that paid in some model on this machine, for other models; kept in ~/.cache/autokernel/proven.

A file is one kernel for one set of shapes and dtypes, under one release of PyTorch and of Triton; with others it does not
count until it is proven again. A run's targets of like shapes are offered it as an experiment, whatever it was proven with.
What a region computes, whose type is made of some model's graph, is kept beside them.
"""

import hashlib
import json
import math
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from autokernel import spec
from autokernel.build import cpu_identity
from autokernel.common.preflight import proven_folder as folder
from autokernel.common.records import BadRecord, reads, replacing, write_json
from autokernel.integration.verification.record import Verification
from autokernel.integration.winner import Winner
from autokernel.spec import Case, TensorSpec, folder_of, is_kernel_type, is_region
from autokernel.target import Target, decode_target, encode, encoded

FALLBACKS = (None, "inductor", "reduce-overhead")
REGION = ("region.py", "region.json", "spec.py")  # of the folder of a region's type; with the last the type is there
ALIKE = 4.0  # times as many rows or columns: for shapes that are further apart a kernel is another one


@dataclass(frozen=True)
class ProvenKernel:
    """A kernel for one case, where it was proven, and what for."""

    winner: Winner
    machine: str
    torch: str
    triton: str
    model: str  # for people: in which it made the pass faster
    speedup: float | None  # over PyTorch by itself, as the gate measured it
    date: str

    @property
    def key(self) -> str:
        """Equal for kernels of which one can take the other's place."""
        (weighted,) = self.winner.target.cases
        what = (self.winner.target.kernel_type, self.winner.device_type, encoded(weighted.case))
        where = (self.machine, self.torch, self.triton)
        return hashlib.sha256(json.dumps([*what, *where]).encode()).hexdigest()[:16]

    @property
    def counts(self) -> bool:
        """Whether it was proven on this machine, under the versions that are installed, and its type is there."""
        target = self.winner.target
        here = self.machine == machine(target.device) and (self.torch, self.triton) == versions()
        return here and is_kernel_type(target.kernel_type)

    @property
    def path(self) -> Path:
        return folder() / f"{self.key}.json"

    def write(self) -> None:
        data = asdict(replace(self, winner=None)) | {"target": encode(self.winner.target), "source": self.winner.source}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, data)

    @staticmethod
    @reads("delete it, or all of them with autokernel cache clear")
    def read(path: Path) -> "ProvenKernel":
        data = json.loads(path.read_text())
        winner = Winner(decode_target(data.pop("target")), data.pop("source"))
        return ProvenKernel(**data | {"winner": winner})


def machine(device: str) -> str:
    """The GPU, or the CPU with its features and cores, on which `device` works; "none" where there is no such GPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "none"
    identity = hashlib.sha256(f"{cpu_identity()} {torch.get_num_threads()}".encode()).hexdigest()[:8]
    return f"{platform.machine()} CPU {identity}, {torch.get_num_threads()} threads"


def versions() -> tuple[str, str]:
    """Of PyTorch and Triton."""
    try:
        return torch.__version__, metadata.version("triton")
    except metadata.PackageNotFoundError:
        return torch.__version__, ""


def remember(
    verification: Verification, winners: Sequence[Winner], speedups: Mapping[str, float], model: str
) -> list[ProvenKernel]:
    """Keep the kernels that `model` is faster with, case by case, in place of what was known of these cases."""
    chosen = {w.target.name: w for fallback in FALLBACKS for w in verification.selected(winners, fallback)}
    kept = []
    for name, winner in chosen.items():
        keep_region(winner.target.kernel_type)
        where = (machine(winner.target.device), *versions())
        for target in by_case(winner.target):
            kernel = Winner(target, winner.source)
            kept.append(ProvenKernel(kernel, *where, model, speedups.get(name), str(date.today())))
            kept[-1].write()
    return kept


def keep_region(kernel_type: str) -> None:
    """What a region computes: a kernel of another clone's, or of one that is removed, is found and judged by it."""
    source, kept = folder_of(kernel_type), spec.KEPT_REGIONS / kernel_type
    if is_region(kernel_type) and source != kept:
        for name in REGION:
            with replacing(kept / name) as file:
                file.write((source / name).read_text())


def by_case(target: Target) -> Iterator[Target]:
    """A target of each of its cases, whose name is no other's."""
    for weighted in target.cases:
        digest = hashlib.sha256(encoded(weighted.case).encode()).hexdigest()[:8]
        yield replace(target, name=f"{target.kernel_type}_{digest}", cases=(weighted,))


def entries(pass_over: Callable[[BadRecord], None] | None = None) -> list[ProvenKernel]:
    """All that is kept, whatever it was proven with. Raises BadRecord, unless `pass_over` is told of it."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            found.append(ProvenKernel.read(path))
        except BadRecord as why:
            if not pass_over:
                raise
            pass_over(why)
    return found


def clear() -> int:
    """Forget all of it, readable or not; how many kernels there were."""
    files = list(folder().glob("*.json"))
    for path in files:
        path.unlink()
    shutil.rmtree(spec.KEPT_REGIONS, ignore_errors=True)
    return len(files)


def proven() -> list[Winner]:
    """The kernels that were proven on this machine under the installed PyTorch and Triton: apply(model, proven())."""
    return [entry.winner for entry in entries() if entry.counts]


def known_for(target: Target, known: Sequence[ProvenKernel] | None = None) -> list[ProvenKernel]:
    """What paid on this machine for shapes like the target's: each source once, those of the nearest shapes first.

    known: of these; by default of all that is kept.
    """
    here, near = machine(target.device), {}
    for entry in entries() if known is None else known:
        proven_on = entry.winner.target
        if (entry.machine, proven_on.kernel_type) == (here, target.kernel_type):
            apart = min(factor_between(proven_on.cases[0].case, weighted.case) for weighted in target.cases)
            if apart <= min(ALIKE, near.get(entry.winner.source, (math.inf,))[0]):
                near[entry.winner.source] = apart, entry
    return [entry for _, entry in sorted(near.values(), key=lambda found: found[0])]


def factor_between(one: Case, other: Case) -> float:
    """How many times as many rows or columns a tensor of one call has as that of the other; inf for other dtypes."""
    if {name: tensor.dtype for name, tensor in one.tensors.items()} != {n: t.dtype for n, t in other.tensors.items()}:
        return math.inf
    sizes = [(a, b) for name in one.tensors for a, b in zip(matrix(one.tensors[name]), matrix(other.tensors[name]))]
    return max(max(a, b) / max(min(a, b), 1) for a, b in sizes)


def matrix(tensor: TensorSpec) -> tuple[int, int]:
    """Rows and columns: all dimensions but the last are taken together, as most kernels do."""
    columns = tensor.shape[-1] if tensor.shape else 1
    return tensor.numel // max(columns, 1), columns
