"""The playbook, tier by tier: playbook/<tier>-*.md. An agent is given the tier that fits, not all of it.

A tier is a list of entries: `### Title`, then paragraphs that begin with **When**, **Gain**, **See** and **Example**.
Tier 5 groups them by machine and tier 6 by kernel type, under `## Name, name`; of those, only what fits the target.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autokernel.agents import Context, PastExperiment
from autokernel.history.experiments import STARTER, Status
from autokernel.history.progress import Rules
from autokernel.spec import ROOT, is_region
from autokernel.target import Target

FOLDER = ROOT / "playbook"
TIERS = range(1, 7)
FIELDS = ("When", "Gain", "See", "Example")
PATIENCE = Rules().reverts  # experiments in a row that were not kept: a target left for that is returned to a tier further
ARCHITECTURES = {8: "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}  # by major compute capability; 8.9 is Ada


@dataclass(frozen=True)
class PlaybookEntry:
    """One idea of the playbook."""

    tier: int
    group: str  # the heading that it stands under: a machine, kernel types, or ""
    title: str
    fields: dict[str, str]


def path_of(tier: int) -> Path:
    """Raises FileNotFoundError, in words, if there is no such tier."""
    found = next(iter(FOLDER.glob(f"{tier}-*.md")), None)
    if found is None:
        raise FileNotFoundError(f"no tier {tier}; there are {TIERS.start} to {TIERS.stop - 1}")
    return found


def entries(tier: int) -> list[PlaybookEntry]:
    found, group = [], ""
    for section in re.split(r"(?m)^(?=#{2,3} )", path_of(tier).read_text()):
        heading, _, body = section.partition("\n")
        if heading.startswith("## "):
            group = heading[3:]
        elif heading.startswith("### "):
            fields = dict(re.findall(r"(?ms)^\*\*(\w+)\*\*:? (.*?)(?=^\*\*\w+\*\*|\Z)", body))
            found.append(PlaybookEntry(tier, group, heading[4:], {k: " ".join(v.split()) for k, v in fields.items()}))
    return found


def tier_text(tier: int, target: Target | None = None) -> str:
    """A tier as it is written; with a target, without the groups that are for other machines or kernel types."""
    parts = re.split(r"(?m)^(?=## )", path_of(tier).read_text())
    return "".join(part for part in parts if target is None or not part.startswith("## ") or _fits(part, target))


def _fits(part: str, target: Target) -> bool:
    names = {name.strip() for name in part.partition("\n")[0][3:].split(",")}
    kind = "region" if is_region(target.kernel_type) else target.kernel_type
    return bool(names & {kind, machine(target.device), "every machine"})


def machine(device: str) -> str:
    """The heading of tier 5 that is for this device."""
    if not device.startswith("cuda"):
        return "x86"
    if torch.version.hip:
        return "CDNA"
    major, minor = torch.cuda.get_device_capability(device)
    return "Ada" if (major, minor) == (8, 9) else ARCHITECTURES.get(major, "")


def fitting_tier(trials: Sequence[PastExperiment]) -> int:
    """Where the next idea may be: one tier further after every PATIENCE experiments in a row that were not kept."""
    tier, misses = TIERS.start, 0
    for trial in trials:
        if trial.row.agent == STARTER or trial.row.status == "undecided":
            continue
        misses = 0 if trial.row.status == Status.KEPT else misses + 1
        if misses == PATIENCE:
            tier, misses = tier % len(TIERS) + 1, 0
    return tier


def tier_that_fits(context: Context) -> str:
    return tier_text(fitting_tier(context.trials), context.target)
