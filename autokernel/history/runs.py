"""The runs of a clone, from their folders and refs alone: their names, and where they are.

Without PyTorch. A run is workspace/<tag> with a plan, or the refs of its experiments; nothing else is ever removed as one.
"""

import os
import re
import subprocess
from pathlib import Path

from autokernel.common.preflight import IN_CLONE, Refused, why_no_repository
from autokernel.history.at_work import AtWork, at_work

PLAN, PROFILE, PROOF, VERIFY = "plan.json", "profile.json", "proof.json", "verify.json"
TAG = re.compile(r"\w[\w.+=-]*")  # stricter than git-check-ref-format(1), and without anything a shell or a path reads
LONGEST = 100
TAKEN = (
    "hub",
    "kernelbench",
    "regions",
    "models",
)  # folders of workspace/ that are no runs


class BadTag(Refused, ValueError):
    """No name for a run; the message says why."""


class NoRun(Refused, LookupError):
    """There is no run of this name, or none at all; the message says what to do."""


def checked_tag(tag: str) -> str:
    """`tag`, where it can be the name of a folder, a branch and refs. Raises BadTag: the one place that decides."""
    if not tag:
        raise BadTag("the name of a run is empty (a variable that is not set?)")
    if tag.casefold() in TAKEN:
        raise BadTag(f"{tag!r} is a folder of workspace/ that is no run")
    if not TAG.fullmatch(tag) or ".." in tag or tag.endswith((".", ".lock")) or len(tag) > LONGEST:
        raise BadTag(
            f"{tag!r} is no name of a run: letters, digits and inner . _ - + = only, at most {LONGEST}, not ending in .lock"
        )
    return tag


def run_folder(root: Path, tag: str) -> Path:
    """workspace/<tag>. Raises BadTag, also where a link leads out of workspace/."""
    folder = root / "workspace" / checked_tag(tag)
    if folder.is_symlink():
        raise BadTag(f"{folder} is a link to {os.readlink(folder)}: a run is a folder of its own (workspace may be a link)")
    return folder


def run_folders(root: Path) -> list[Path]:
    """The folders of this clone's runs, the latest first."""
    plans = [plan for plan in root.glob(f"workspace/*/{PLAN}") if plan.is_file() and _is_tag(plan.parent.name)]
    folders = [plan.parent for plan in sorted(plans, key=lambda path: path.stat().st_mtime, reverse=True)]
    return [folder for folder in folders if not folder.is_symlink()]


def run_refs(root: Path, tag: str | None = None) -> list[str]:
    """The branch and refs of the run named `tag`, or of all; none where there is no git or no repository.

    Raises NoRun where git refuses to read the one that is there, as a clone of another user's: that is not to have none.
    """
    named = [f"refs/heads/autokernel/{tag or ''}", f"refs/autokernel/{tag or ''}"]
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "for-each-ref", "--format=%(refname)", *named], capture_output=True, text=True
        )
    except FileNotFoundError:
        return []
    if not (root / ".git").exists():
        return []
    if asked.returncode and (reason := why_no_repository(root)):
        raise NoRun(reason)
    return asked.stdout.split()


def has_experiments(root: Path, tag: str) -> bool:
    return any(ref.startswith("refs/autokernel/") for ref in run_refs(root, tag))


def commit_times(root: Path, tag: str) -> dict[str, str]:
    """Commit of an experiment -> when it was made, "11-23 02:39" in this machine's time."""
    shown = "--format=%(objectname) %(creatordate:format-local:%m-%d %H:%M)"
    asked = ["git", "-C", str(root), "for-each-ref", shown, f"refs/autokernel/{tag}/"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return {}
    return {commit: time for commit, _, time in (line.partition(" ") for line in lines)}


def run_tags(root: Path) -> list[str]:
    """The names of all runs: those with a plan, the latest first, then those of which git alone knows."""
    planned = [folder.name for folder in run_folders(root)]
    refs = (ref.removeprefix("refs/heads/").removeprefix("refs/").split("/")[1] for ref in run_refs(root))
    return list(dict.fromkeys([*planned, *sorted(set(refs))]))


def find_folder(root: Path, tag: str | None) -> Path:
    """Of the run named `tag`, else of the latest that has a plan. Raises NoRun, BadTag."""
    if tag is not None and (run_folder(root, tag) / PLAN).is_file():
        return run_folder(root, tag)
    folders = run_folders(root)
    if tag is None and folders:
        return folders[0]
    raise no_run(root, tag)


def being_profiled(root: Path) -> list[AtWork]:
    """What works on runs that have no plan yet."""
    folders = (path for path in sorted(root.glob("workspace/*")) if _is_tag(path.name) and not (path / PLAN).exists())
    return [found for folder in folders if (found := at_work(folder))]


def no_run(root: Path, tag: str | None) -> NoRun:
    """That there is no such run with a plan, and which there are."""
    for found in being_profiled(root):
        if tag in (None, found.tag):
            return NoRun(f"run {found.tag!r} has no {PLAN} yet: {found}")
    if tag and (run_folder(root, tag) / PROFILE).is_file():
        return NoRun(f"run {tag!r} has a profile, and no {PLAN} yet: python extract.py --tag {tag} makes it")
    if tag and run_refs(root, tag):
        return NoRun(
            f"run {tag!r} has no workspace/{tag}/{PLAN}, only its commits (a folder that was renamed goes on under "
            f"its old name): git log autokernel/{tag} shows what was kept, python orchestrate.py clean {tag} removes it"
        )
    others = [folder.name for folder in run_folders(root)]
    if not tag or not others:
        where = "" if IN_CLONE else f" in {root}"
        left = [] if tag else run_tags(root)
        if left:
            listed = "python orchestrate.py runs lists them"
            return NoRun(f"there is no run with a {PLAN} here, only the commits of {', '.join(left[:5])}: {listed}")
        return NoRun(f"there is no run{f' named {tag!r}' if tag else ''}{where} yet: python orchestrate.py starts one")
    return NoRun(f"there is no run named {tag!r}; there are: {', '.join(others)}")


def _is_tag(name: str) -> bool:
    try:
        return bool(checked_tag(name))
    except BadTag:
        return False
