"""Kept kernels as a small package that runs without this repository: it needs PyTorch, and Triton or a compiler.

What it takes along of this one is what backend.py imports, and of the kernel types what is needed to find them in a model.
Kernels travel as sources and are built where they run, for the very CPU or GPU, at their first call.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from autokernel.backend import Winner
from autokernel.build import INCLUDE, SANDBOX
from autokernel.spec import ROOT, load_spec
from autokernel.target import encode, write_json
from autokernel.verification import Verification

HERE = Path(__file__).resolve().parent
IMPORT = re.compile(r"^from autokernel\.([\w.]+) import", re.M)
INIT = '''"""Kernels for {model}, proven and kept by AutoKernel.

    import {name}
    model = {name}.apply(model)                         # in place; unapply(model) takes the kernels out again
    model = {name}.apply(model, fallback="inductor")    # and the rest of the model through Inductor
    model = {name}.apply(model, fallback="reduce-overhead")  # and all of it as CUDA graphs

A kernel runs where shapes, dtypes, strides, options and the kind of device are those that it was proven for; elsewhere,
the model's own code does. OPS has them by name, as operators of PyTorch, to be called on such inputs.
"""

import json
from importlib import import_module
from pathlib import Path

from {name}.autokernel import backend
from {name}.autokernel.backend import unapply as unapply
from {name}.autokernel.target import decode_target


class Saved(backend.Winner):
    """A winner whose `source` is the name of a module in winners/."""

    @property
    def name(self):
        return self.source

    def load(self):
        return import_module(f"{name}.winners.{{self.source}}").kernel_fn


RECORD = json.loads(Path(__file__).with_name("winners.json").read_text())
WINNERS = [Saved(decode_target(record["target"]), record["source"]) for record in RECORD["winners"]]
OPS = {{winner.target.name: backend.install(winner).ops for winner in WINNERS}}


def apply(model, fallback=None, gradients=True):
    """Put in what made the model faster beyond doubt, as it is or over Inductor: RECORD["pays"]."""
    pays = RECORD["pays"].get(fallback or "eager", RECORD["pays"]["inductor"])
    return backend.apply(model, [w for w in WINNERS if w.target.name in pays], fallback, gradients)
'''


def save(folder: Path, verification: Verification, winners: Sequence[Winner]) -> list[Winner]:
    """Write what pays as a package, imported by the folder's name; returns its kernels, and writes none without any.

    Raises FileExistsError where why_not() has a reason.
    """
    name = folder.name
    pays = {over: verification.staying(winners, over) for over in (None, "inductor", "reduce-overhead")}
    chosen = [winner for winner in winners if any(winner in staying for staying in pays.values())]
    if not chosen:
        return []
    if reason := why_not(folder):
        raise FileExistsError(reason)
    shutil.rmtree(folder, ignore_errors=True)
    modules = [*sorted(_imported("backend")), str(SANDBOX.relative_to(HERE).with_suffix(""))]
    files = {f"autokernel/{m.replace('.', '/')}.py": HERE / f"{m.replace('.', '/')}.py" for m in modules}
    files |= {f"autokernel/include/{path.name}": path for path in INCLUDE.iterdir()}
    files |= {"reference.py": ROOT / "reference.py", "LICENSE": ROOT / "LICENSE"}
    for kernel_type in {winner.target.kernel_type for winner in chosen}:
        sources = (load_spec(kernel_type).folder / part for part in ("spec.py", "patterns.py"))
        files |= {f"kernels/{kernel_type}/{path.name}": path for path in sources if path.exists()}
    texts = {place: path.read_text() for place, path in files.items()}
    texts |= {f"winners/{winner.name}.py": winner.source for winner in chosen}
    texts |= {"__init__.py": INIT.format(name=name, model=verification.model)}
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(_renamed(text, name) if place.endswith(".py") else text)
    record = {
        "winners": [{"target": encode(w.target), "source": w.name} for w in chosen],
        "pays": {over or "eager": [w.target.name for w in staying] for over, staying in pays.items()},
    }
    write_json(folder / "winners.json", record)
    return chosen


def why_not(folder: Path) -> str | None:
    """The reason for which no package can be written to `folder`."""
    if not folder.name.isidentifier():
        return f"a package is imported by its folder's name, and {folder.name!r} is no name in Python"
    if folder.exists() and not (folder / "winners.json").exists():
        return f"{folder} exists, and is not a package of kernels that could be written anew"
    return None


def _imported(module: str) -> set[str]:
    """The modules of this package that `module` cannot do without, itself included."""
    found: set[str] = set()
    pending = [module]
    while pending:
        found.add(module := pending.pop())
        needed = IMPORT.findall((HERE / f"{module.replace('.', '/')}.py").read_text())
        pending += [m for m in needed if m not in found]
    return found


def _renamed(source: str, name: str) -> str:
    """`source` with its imports from this repository taken from package `name`."""
    source = re.sub(r"^(\s*from) autokernel\b", rf"\1 {name}.autokernel", source, flags=re.M)
    return re.sub(r"^import reference$", f"from {name} import reference", source, flags=re.M)
