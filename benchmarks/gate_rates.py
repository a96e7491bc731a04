"""How often one check by the gate is wrong by chance: cheats that it accepts, honest kernels that it refuses.

Usage:
    python3 benchmarks/gate_rates.py --cheats 5 --honest 20     so many checks of each (about 0.6 s and 2 s each, two cores)
    python3 benchmarks/gate_rates.py --cheats 30 --only of-one-kind

Each check draws its inputs anew. Cheats are those of tests/cheats that are refused for wrong numbers, of both tiers; honest
kernels are those of tests/honest and every C++ kernel of the library. Nothing is timed.
Writes:  benchmarks/gate_rates-cpu.json, after each kernel, if it asks about all; of each kernel that was decided otherwise
         once, how often.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/cheats"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/honest"))

from honest_kernels import HONEST
from test_cheats import CHEATS, target

from autokernel.common.console import progress
from autokernel.common.records import write_json
from autokernel.gate import Judge
from autokernel.hardware.threads import one_thread
from autokernel.spec import ROOT
from autokernel.target import Target
from tests.small_targets import small_target

RECORD = Path(__file__).with_name("gate_rates-cpu.json")
ELSEWHERE = ("WORKPLACE", "BYSTANDER", "PORT", "/proc")  # in the source of a cheat that is after something outside


@dataclass(frozen=True)
class Asked:
    """A kernel file and what the gate is to say of it."""

    name: str
    source: str
    target: Target
    is_right: bool
    libraries: bool = False  # which it may call
    has_threads: bool = False


def cheats() -> Iterator[Asked]:
    for cheat in CHEATS:
        if cheat.refused_by == "check" and not cheat.harmed and not any(word in cheat.source for word in ELSEWHERE):
            name = f"{cheat.kernel_type}: {cheat.id}"
            yield Asked(name, cheat.source, target(cheat), False, cheat.libraries, cheat.threads)


def honest() -> Iterator[Asked]:
    for kernel in HONEST:
        if not kernel.refused:
            where = small_target(kernel.kernel_type)
            yield Asked(f"{kernel.kernel_type}: {kernel.name}", kernel.source, where, True, has_threads=kernel.threads)
    for file in sorted((ROOT / "kernels").glob("*/cpp*.py")):
        yield Asked(f"{file.parent.name}/{file.stem}", file.read_text(), small_target(file.parent.name), True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cheats", type=int, default=0, metavar="N", help="checks of each cheat (default: %(default)s)")
    parser.add_argument(
        "--honest", type=int, default=0, metavar="N", help="checks of each honest kernel (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="kernels whose name has this in it; nothing is written")
    options = parser.parse_args()
    if not options.cheats and not options.honest:
        parser.error("nothing to do: give --cheats N, --honest N or both")
    asked = [(one, options.cheats) for one in cheats() if options.cheats]
    asked += [(one, options.honest) for one in honest() if options.honest]
    asked = [(one, count) for one, count in asked if options.only in one.name]
    if not asked:
        parser.error(f"no kernel has {options.only!r} in its name")
    made = {kind: {"kernels": 0, "checks": 0, "wrong": 0, "of": {}} for kind in ("cheats", "honest")}
    with ExitStack() as stack, progress("kernels", len(asked)) as step:
        judges: dict[tuple[bool, int], Judge] = {}
        for one, count in asked:
            key = one.libraries, one.has_threads
            if key not in judges:
                with nullcontext() if one.has_threads else one_thread():
                    judges[key] = stack.enter_context(Judge(allow_libraries=one.libraries))
            wrong = []
            for _ in range(count):
                failure = judges[key].check(one.source, one.target).failure
                if (failure is None) != one.is_right:
                    wrong.append("accepted" if failure is None else str(failure))
            step(one.name)
            entry = made["honest" if one.is_right else "cheats"]
            entry["kernels"] += 1
            entry["checks"] += count
            entry["wrong"] += len(wrong)
            if wrong:
                entry["of"][one.name] = {"checks": count, "wrong": len(wrong), "first": wrong[0]}
            if not options.only:
                write_json(RECORD, {"torch": torch.__version__, **made})
    for kind, entry in made.items():
        print(f"{kind}: {entry['wrong']} of {entry['checks']} checks of {entry['kernels']} kernels were wrong")
        for name, of in entry["of"].items():
            print(f"  {name}: {of['wrong']} of {of['checks']}; {of['first']}")


if __name__ == "__main__":
    main()
