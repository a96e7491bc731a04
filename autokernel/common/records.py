"""Records on disk, without PyTorch: written whole or not at all, and read by the types that they were written from.

A file that is something else is a BadRecord, which names it and says what to do: one line, exit status 2.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, Any, TypeVar

from autokernel.common.preflight import Refused

PLAN_REMEDY = "move it away, or remove the run with python orchestrate.py clean TAG"
T = TypeVar("T")


class BadRecord(Refused, ValueError):
    """A file is not what was written there; the message says what to do about it."""


def reads(remedy: str) -> Callable[[Callable[[Path], T]], Callable[[Path], T]]:
    """Of a function that reads a file of ours: whatever else is in it, cut off or foreign, is a BadRecord that names it."""

    def decorate(read: Callable[[Path], T]) -> Callable[[Path], T]:
        @wraps(read)
        def guarded(path: Path) -> T:
            try:
                return read(path)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                if isinstance(error, Refused):
                    raise
                what = str(error).splitlines()[0] if str(error) else type(error).__name__
                what = f"no {what}" if isinstance(error, KeyError) else what
                raise BadRecord(f"{path} cannot be read ({what}): {remedy}") from None

        return guarded

    return decorate


@reads("delete it or move it away")
def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def record_from(data: Any, kind: type[T], named: Callable[[type, Any], Any] | None = None, text: bool = False) -> T:
    """What json.loads gave, as a dataclass `kind` with fields of the types that it says. Raises ValueError.

    `named(type, value)` makes what JSON has no type for, such as dtypes; with `text`, numbers are read from theirs. Fields
    that `kind` does not know are left out: a later version may have written them. Read by json before, and not by msgspec,
    which knows no infinity: a record may hold one.
    """
    import msgspec  # here, because a saved package takes this module along and is to need PyTorch alone

    return msgspec.convert(data, kind, dec_hook=named, strict=not text)


def json_text(data: Any, indent: int | None = None) -> str:
    """JSON for other programs, which know no NaN and no infinity: null."""
    return json.dumps(json.loads(json.dumps(data), parse_constant=lambda _: None), indent=indent)


def write_json(path: Path, data: Any) -> None:
    """Write a whole JSON file or nothing."""
    with replacing(path) as file:
        json.dump(data, file, indent=1)


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that takes the place of `path` once it is whole and synced; where it is not, what was there stays.

    A link at `path` is replaced, not followed. What is no file (a pipe, /dev/stdout) is written to as it is.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a file is to be written here, and it is a folder", str(path))
    errors = None if "b" in mode else "backslashreplace"  # a file's name may be no text in UTF-8
    if path.exists() and not path.is_file():
        with open(path, mode, errors=errors) as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, mode, errors=errors) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
