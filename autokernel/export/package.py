"""Kept kernels as a small package that runs without this repository: it needs PyTorch, and Triton or a compiler.

What it takes along of this one is what integration/apply.py imports, and of the kernel types what finds them in a model.
Kernels travel as sources and are built where they run, for the very CPU or GPU, at their first call.
"""

import ast
import functools
import json
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from autokernel.build import INCLUDE, SANDBOX
from autokernel.export import folders
from autokernel.integration.verification.record import Verification
from autokernel.integration.winner import Winner
from autokernel.spec import ROOT, is_region, kernel_types, load_spec
from autokernel.target import encode

PACKAGE = Path(__file__).resolve().parents[1]
TAKEN = ("autokernel", "git", "kernels", "numpy", "reference", "torch", "triton")
PARTS = ("spec.py", "patterns.py", "region.py", "region.json")  # of a kernel type, beside its kernels
INIT = '''"""Kernels for {model}, proven and kept by AutoKernel.

    import {name}
    model = {name}.apply(model)                         # in place; unapply(model) takes the kernels out again
    model = {name}.apply(model, fallback="inductor")    # and the rest of the model through Inductor
    model = {name}.apply(model, fallback="reduce-overhead")  # and all of it as CUDA graphs

A kernel runs where shapes, dtypes, strides, options and the kind of device are those that it was proven for; elsewhere,
the model's own code does. OPS has them by name, as operators of PyTorch, to be called on such inputs.
"""

import json
import warnings
from importlib import import_module
from pathlib import Path

from {name}.autokernel.integration import apply as integration
from {name}.autokernel.integration.apply import unapply as unapply
from {name}.autokernel.integration.insertion import install
from {name}.autokernel.integration.winner import Winner
from {name}.autokernel.model.breaks import reason
from {name}.autokernel.target import decode_target


class Saved(Winner):
    """A winner whose `source` is the name of a module in winners/."""

    @property
    def name(self):
        return self.source

    def load(self):
        return import_module(f"{name}.winners.{{self.source}}").kernel_fn


RECORD = json.loads(Path(__file__).with_name("winners.json").read_text())
WINNERS = [Saved(decode_target(record["target"]), record["source"]) for record in RECORD["winners"]]
OPS, UNUSABLE = {{}}, {{}}  # by target: the operators, and why there is none
for winner in WINNERS:
    try:
        OPS[winner.target.name] = install(winner).ops
    except Exception as error:  # of any kind: no compiler, no Triton, no room for a cache
        UNUSABLE[winner.target.name] = reason(error)


def apply(model, fallback=None, gradients=True):
    """Put in what made the model faster beyond doubt, as it is or over Inductor: RECORD["pays"]; else leave it as it is."""
    pays = RECORD["pays"].get(fallback or "eager", RECORD["pays"]["inductor"])
    if not pays:
        said = f"no kernel pays over {{fallback or 'eager'}}, the model is left as it is: {{RECORD['verdict']}}"
        warnings.warn(said, stacklevel=2)
        return unapply(model)
    usable = [winner for winner in WINNERS if winner.target.name in pays and winner.target.name in OPS]
    if len(usable) < len(pays):
        left = f"{{len(usable)}} of {{len(pays)}} kernels are used" if usable else "the model is left as it is"
        whys = dict.fromkeys(UNUSABLE[name] for name in pays if name in UNUSABLE)
        warnings.warn(f"{{left}}: the kernels for others cannot be had here ({{'; '.join(whys)}})", stacklevel=2)
    return integration.apply(model, usable, fallback, gradients) if usable else unapply(model)
'''


def save(folder: Path, verification: Verification, winners: Sequence[Winner]) -> list[Winner]:
    """Write what pays as a package, imported by the folder's name; returns its kernels, and writes none without any.

    Raises NotOurs where the folder has files of others; see why_not().
    """
    name = folder.name
    pays = {fallback: verification.selected(winners, fallback) for fallback in (None, "inductor", "reduce-overhead")}
    chosen = [winner for winner in winners if any(winner in selected for selected in pays.values())]
    if not chosen:
        return []
    parts = {}
    types = {winner.target.kernel_type for winner in chosen}
    if any(map(is_region, types)):
        types |= {*kernel_types()}  # a region ends where an operation of another type begins, whose kernel may not pay
    for kernel_type in sorted(types):
        sources = (load_spec(kernel_type).folder / part for part in PARTS)
        parts |= {f"kernels/{kernel_type}/{path.name}": path for path in sources if path.exists()}
    needing = [_file("integration.apply"), *(path for path in parts.values() if path.suffix == ".py")]
    taken = [*sorted(_imported(needing) - {*parts.values()}), SANDBOX]
    files = parts | {f"autokernel/{path.relative_to(PACKAGE)}": path for path in taken}
    files |= {f"autokernel/include/{path.name}": path for path in INCLUDE.iterdir()}
    files |= {"reference.py": ROOT / "reference.py", "LICENSE": ROOT / "LICENSE"}
    texts = {place: path.read_text() for place, path in files.items()}
    texts |= {f"winners/{winner.name}.py": winner.source for winner in chosen}
    texts |= {"__init__.py": INIT.format(name=name, model=verification.model)}
    record = {
        "winners": [{"target": encode(w.target), "source": w.name} for w in chosen],
        "verdict": verification.verdict,
        "pays": {fallback or "eager": [w.target.name for w in selected] for fallback, selected in pays.items()},
    }
    texts = {place: _renamed(text, name) if place.endswith(".py") else text for place, text in texts.items()}
    folders.write_anew(folder, texts | {"winners.json": json.dumps(record, indent=1)})
    return chosen


def why_not(folder: Path) -> str | None:
    """The reason for which no package can be written to `folder`."""
    if not folder.name.isidentifier() or keyword.iskeyword(folder.name):
        return f"a package is imported by its folder's name, and {folder.name!r} is no name in Python"
    if folder.name in {*sys.stdlib_module_names, *TAKEN}:
        return f"a package named {folder.name!r} would hide another module of that name: choose another"
    return folders.why_not(folder)


def _imported(needing: Sequence[Path]) -> set[Path]:
    """These files, and the modules of this package that they cannot do without."""
    found: set[Path] = set()
    pending = list(needing)
    while pending:
        found.add(path := pending.pop())
        pending += [file for file in _imported_by(path.read_text()) if file not in found]
    return found


@functools.cache
def _imported_by(source: str) -> tuple[Path, ...]:
    files: list[Path] = []
    for line in ast.parse(source).body:
        if isinstance(line, ast.ImportFrom) and line.module.startswith("autokernel."):
            needed = line.module.removeprefix("autokernel.")
            names = [needed] if _file(needed).exists() else [f"{needed}.{name.name}" for name in line.names]
            files += map(_file, names)
    return tuple(files)


def _file(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.py"


def _renamed(source: str, name: str) -> str:
    """`source` with its imports from this repository taken from package `name`."""
    source = re.sub(r"^(\s*from) autokernel\b", rf"\1 {name}.autokernel", source, flags=re.M)
    return re.sub(r"^import reference$", f"from {name} import reference", source, flags=re.M)
