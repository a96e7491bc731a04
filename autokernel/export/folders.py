"""Folders that are written whole, a package or a project, and written anew: nothing in them that is not ours is lost.

A list of what was written, with digests, stays in the folder. Files that are not on it are left alone; where one that is
has been edited, or there is no list in a folder that has files, nothing is written.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from autokernel.common.preflight import Refused, why_not_writable
from autokernel.common.records import BadRecord, reads, record_from, write_json

LIST = ".autokernel.json"


class NotOurs(Refused, FileExistsError):
    """The folder has files that would be lost; the message names them."""


def write_anew(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write the files, by their places in the folder, in place of those that were written there before. Raises NotOurs."""
    if reason := why_not(folder) or _in_the_way(folder, files):
        raise NotOurs(reason)
    for name in _listed(folder):
        (folder / name).unlink(missing_ok=True)
    contents = {place: text.encode() if isinstance(text, str) else text for place, text in files.items()}
    for place, content in contents.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(content)
    write_json(folder / LIST, {place: hashlib.sha256(content).hexdigest() for place, content in contents.items()})


def _in_the_way(folder: Path, files: Iterable[str]) -> str | None:
    listed = _listed(folder)
    foreign = [place for place in files if place not in listed and (folder / place).exists()]
    return f"{folder} has {foreign[0]}, which AutoKernel did not write: name another folder" if foreign else None


def why_not(folder: Path) -> str | None:
    """The reason for which the folder cannot be written, or written anew."""
    if folder.is_symlink() or folder.exists() and not folder.is_dir():
        return f"{folder} exists and is no folder: name another"
    try:
        listed = _listed(folder)
    except BadRecord as error:
        return str(error)
    if reason := why_not_writable(folder):
        return reason
    if not listed and any(folder.glob("*")):
        return f"{folder} has files that AutoKernel did not write there: name another folder, or move them away"
    edited = [name for name, digest in listed.items() if (folder / name).is_file() and _digest(folder / name) != digest]
    if edited:
        return f"{folder} was edited since it was written ({', '.join(edited[:3])}): name another folder, or move it away"
    return None


def _listed(folder: Path) -> dict[str, str]:
    return _read(folder / LIST) if (folder / LIST).is_file() else {}


@reads("name another folder, or move this one away")
def _read(path: Path) -> dict[str, str]:
    digests = record_from(json.loads(path.read_text()), dict[str, str])
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in digests):
        raise ValueError("it names files outside of its folder")
    return digests


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
