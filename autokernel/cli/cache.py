"""The kernels that paid in some model on this machine, which apply() puts into a model that has no run of its own.

Usage:
    python -m autokernel cache list     what is kept, and whether it counts under the installed PyTorch and Triton
    python -m autokernel cache prove    judge those of other versions anew; what is right and faster counts again
    python -m autokernel cache clear    forget all of it, and the patterns of operations, which are traced again

Reads and writes ~/.cache/autokernel/proven (or $AUTOKERNEL_PROVEN). verify.py adds the kernels that a model is faster with.
Traced patterns are in ~/.cache/autokernel/patterns (or below $AUTOKERNEL_CACHE).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from autokernel.cli.arguments import Parser
from autokernel.common import console
from autokernel.common.preflight import as_called
from autokernel.common.records import json_text
from autokernel.common.table import print_table
from autokernel.common.words import counted

if TYPE_CHECKING:
    from autokernel.common.verdict import Verdict
    from autokernel.integration.verification.proven import ProvenKernel

COLUMNS = ("kernel", "x PyTorch", "counts", "PyTorch", "Triton", "machine", "from", "sizes")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument(
        "action", nargs="?", choices=("list", "prove", "clear"), default="list", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="one JSON array on stdout; of clear, an object of two counts")
    console.add_sandbox_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    from autokernel.integration.verification.proven import clear, entries, folder  # with PyTorch
    from autokernel.model import pattern_graphs

    if options.action == "clear":
        kernels, files = clear(), pattern_graphs.clear()
        told = f"{counted(kernels, 'kernel')} forgotten, and {counted(files, 'file')} of traced patterns"
        print(json_text({"kernels": kernels, "files_of_patterns": files}) if options.json else told)
        return
    known = entries()
    if options.action == "prove":
        known = prove([entry for entry in known if not entry.counts], options.require_sandbox)
    if options.json:
        print(json_text([as_json(entry) for entry in known], indent=1))
    elif known:
        print_table(f"{counted(known, 'kernel')} in {folder()}", COLUMNS, [row(entry) for entry in known])
    else:
        done = "nothing to prove: all that is kept counts" if options.action == "prove" else "no kernel is kept"
        print(as_called(f"{done} in {folder()} (python verify.py adds those that a model is faster with)"))
    if options.action == "list" and not options.json and (traced := pattern_graphs.files()):
        size = sum(path.stat().st_size for path in traced)
        print(f"{len(traced)} files of traced patterns, {size / 1e6:.1f} MB, in {traced[0].parent}")


def prove(outdated: Sequence["ProvenKernel"], require_sandbox: bool) -> list["ProvenKernel"]:
    """Those that are right, and faster than PyTorch beyond doubt, under what is installed here; each is kept as such."""
    from autokernel.gate import Judge
    from autokernel.integration.verification.proven import machine, versions
    from autokernel.spec import is_kernel_type

    again: list[ProvenKernel] = []
    here = [entry for entry in outdated if entry.machine == machine(entry.winner.target.device)]
    for device in dict.fromkeys(entry.winner.target.device for entry in here):
        mine = [entry for entry in here if entry.winner.target.device == device]
        with Judge(device, require_sandbox=require_sandbox) as judge, console.progress("proving", total=len(mine)) as step:
            for entry in mine:
                name = entry.winner.target.name
                step(name)
                if not is_kernel_type(kind := entry.winner.target.kernel_type):
                    print(f"{name}: there is no kernel type {kind} any more by which to judge it", file=sys.stderr)
                    continue
                verdict = judge.examine(entry.winner.source, entry.winner.target)
                print(f"{name}: {verdict.why}", file=sys.stderr)
                if counts(verdict):
                    told = dict(zip(("torch", "triton"), versions()), date=str(date.today()))
                    again.append(replace(entry, **told, speedup=verdict.speedup_vs_pytorch.value))
                    again[-1].write()
    return again


def counts(verdict: "Verdict") -> bool:
    return verdict.correctness == "PASS" and bool(verdict.speedup_vs_pytorch) and verdict.speedup_vs_pytorch.low > 1


def as_json(entry: "ProvenKernel") -> dict[str, object]:
    told = {name: getattr(entry, name) for name in ("machine", "torch", "triton", "model", "speedup", "date", "counts")}
    return {"kernel": entry.winner.name, "sizes": entry.winner.target.cases[0].case.name} | told


def row(entry: "ProvenKernel") -> tuple[str, ...]:
    speedup = f"{entry.speedup:.2f}" if entry.speedup else ""
    where = (entry.torch, entry.triton, entry.machine, f"{entry.model}, {entry.date}")
    kind = entry.winner.target.kernel_type
    return kind, speedup, "yes" if entry.counts else "no", *where, entry.winner.target.cases[0].case.name
