"""The judge's folder of temporary files, locked while the judge lives: those of judges that were killed are removed."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SCRATCH_NAME = "autokernel-judge-"


def claim_scratch() -> tuple[Path, int]:
    """A new folder, and a lock on it for as long as this process lives. Folders of judges that were killed are removed."""
    places = Path(tempfile.gettempdir())
    for folder in places.glob(f"{SCRATCH_NAME}*"):
        with contextlib.suppress(OSError):  # another user's, or locked by a living judge, or gone by now
            os.close(_lock(folder))
            remove(folder)
    new = Path(tempfile.mkdtemp(prefix="autokernel-new-"))
    fd = _lock(new)
    return new.rename(places / f"{SCRATCH_NAME}{new.name.rpartition('-')[2]}"), fd  # named so only once it is locked


def _lock(folder: Path) -> int:
    """Raises OSError if the folder is not ours alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(folder)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # a kernel may nest folders as deep as it likes
        subprocess.run(["rm", "-rf", str(folder)], check=False)
